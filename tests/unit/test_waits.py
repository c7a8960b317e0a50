"""A wait that lasts says so: what it waits for, and why that does not come."""

import logging
import os
import sys
import threading

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughRows, RateLimiter, RingFull, failures
from shmbuf._extension import native

SPEC = {"k": "int64", "v": ("float32", (14,))}


def rows(n: int) -> dict:
    return {"k": np.arange(n), "v": np.zeros((n, 14), np.float32)}


@pytest.fixture
def said(caplog):
    """Waits of a fiftieth of a second are long; what they said."""
    caplog.set_level(logging.WARNING, "shmbuf")
    native.set_long_wait(failures._long_wait, 0.02)
    yield lambda: [r.getMessage() for r in caplog.records]
    native.set_long_wait(failures._long_wait)


@pytest.fixture
def buffer(name):
    with Buffer.create(name, 100, schema=SPEC, ring_bytes=4096, drain="caller", max_collectors=4) as b:
        yield b


def test_for_room_while_somebody_holds_the_role(buffer, said):
    other = Buffer.attach(buffer.name)
    assert other._handle.try_take_role()
    with pytest.raises(RingFull):
        for _ in range(1000):
            buffer.put(rows(10), timeout=0.3)
    other._handle.give_back_role()
    other.close()
    first = said()[0]
    assert f"buffer {buffer.name!r}: waiting for 0 s for room in the ring of collector 0 (" in first
    assert f"pid {os.getpid()} holds the writer role and is in state" in first and "larger" not in first
    assert 2 <= len(said()) <= 5, "each after twice the time of the one before"


def test_for_the_commit(buffer, said):
    with Buffer.attach(buffer.name) as other:
        assert other._handle.try_take_role()
        ticket = buffer.put(rows(1))
        with pytest.raises(TimeoutError):
            ticket.wait(0.2)
        other._handle.give_back_role()
    assert "for what lies in the ring of collector 0" in said()[0]


def test_for_rows(buffer, said):
    with pytest.raises(NotEnoughRows):
        buffer.draw(1, timeout=0.2)
    assert "for rows: 0 are stored, 0 collectors are attached; the rings are empty" in said()[0]


def test_for_the_limiter(buffer, said):
    buffer.extend(rows(20))
    buffer.set_limiter(RateLimiter(samples_per_insert=1.0, min_size=50))
    with pytest.raises(NotEnoughRows):
        buffer.draw(1, timeout=0.2)
    assert "to sample: " in said()[0] and "50" in said()[0]


def test_a_short_wait_says_nothing_and_none_can_be_asked_for(buffer, said):
    buffer.extend(rows(10))
    buffer.draw(5, timeout=1)
    assert said() == []
    native.set_long_wait(None)
    with pytest.raises(NotEnoughRows):
        buffer.wait_rows(50, 0.2)
    assert said() == []


def test_an_error_in_saying_it_does_not_end_the_wait(buffer, said, monkeypatch):
    monkeypatch.setattr(failures, "long_wait_text", lambda *_: 1 / 0)
    errors: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda e: errors.append(e.exc_type))
    done = threading.Timer(0.2, lambda: buffer.extend(rows(50)))
    done.start()
    buffer.wait_rows(50, 60)
    done.join()
    assert len(buffer) == 50 and errors and set(errors) == {ZeroDivisionError}


def test_others_see_what_a_process_waits_for(buffer):
    buffer.extend(rows(1))
    stop = threading.Event()

    def wait() -> None:
        with pytest.raises(NotEnoughRows):
            buffer.wait_rows(100, 0.5)
        stop.set()

    thread = threading.Thread(target=wait)
    thread.start()
    seen = set()
    with Buffer.attach(buffer.name, readonly=True) as watcher:
        while not stop.is_set():
            seen |= {(m["waits_for"], m["waiting_seconds"] >= 0) for m in watcher.members()}
        assert ("rows", True) in seen
        assert all(m["waits_for"] is None for m in watcher.members())
    thread.join()
