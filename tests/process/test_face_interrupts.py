"""Ctrl-C at every point of a put where the interpreter lets it in: other threads of the process still put through the handle."""

from __future__ import annotations

import concurrent.futures.thread
import threading

import pytest
import torch
from tensordict import TensorDict

from shmbuf import ShmStorage, TensorDictReplayBuffer
from tests.process import interrupts
from tests.process.interrupts import at_point


def rows(n: int) -> TensorDict:
    return TensorDict({"k": torch.arange(n)}, [n])


def tried(lock: threading.RLock, free: list[bool]) -> None:  # type: ignore[valid-type]
    free.append(lock.acquire(timeout=10))
    if free[0]:
        lock.release()


@pytest.mark.parametrize("through", [None, lambda td: td], ids=["plain", "through a transform"])
@pytest.mark.parametrize("what", ["extend", "set_at_"])
def test_no_thread_is_locked_out(through, what):
    with TensorDictReplayBuffer(storage=ShmStorage(1000, drain="caller"), transform=through) as rb:
        rb.extend(rows(2))
        call = {"extend": lambda: rb.extend(rows(2)), "set_at_": lambda: rb.set_at_("k", 5, 1)}[what]
        n, locked = 0, []
        while True:
            n += 1
            where, error = at_point(n, call, "")
            if not where:
                break
            error = None  # noqa: F841 (the frames of its traceback would keep what they hold)
            free: list[bool] = []
            other = threading.Thread(target=tried, args=(rb._lock, free))
            other.start()
            other.join()
            if free != [True]:
                locked.append(where)
                rb._lock.release()
            rb.extend(rows(1))
        assert n > 20 and not locked


def within(seconds: float, call) -> list:
    """What a call in another thread returned; [] if it does not end."""
    done: list = []
    other = threading.Thread(target=lambda: done.append(call()), daemon=True)
    other.start()
    other.join(seconds)
    return done


@pytest.mark.parametrize("what", ["sample", "iterate", "first sample"])
def test_who_draws_ahead_is_neither_stopped_nor_kept_from_ending(what, monkeypatch):
    waits = (threading.__file__, concurrent.futures.thread.__file__, concurrent.futures._base.__file__)
    monkeypatch.setattr(interrupts, "HOME", (*interrupts.HOME, *waits))  # what shmbuf waits by is Python, too

    def made() -> TensorDictReplayBuffer:
        rb = TensorDictReplayBuffer(storage=ShmStorage(100, drain="caller"), batch_size=4, prefetch=2)
        rb.extend(rows(50))
        return rb

    rb, n, hung = made(), 0, []
    while True:
        n += 1
        call = (lambda rb=rb: next(iter(rb))) if what == "iterate" else rb.sample
        where, error = at_point(n, call, "")
        if not where:
            break
        error = None  # noqa: F841
        if not within(20, rb.sample):
            hung.append(where)
        if what == "first sample" or hung:
            if not within(20, lambda rb=rb: rb.close() or True):
                hung.append(f"close() after {where}")
            rb = made()
        assert len(hung) < 3, hung
    assert within(20, lambda: rb.close() or True) and n > 20 and not hung
    assert not [t for t in threading.enumerate() if t.name.startswith("shmbuf-draw")]
