"""What a load does to others while it goes on, and where it stops: no row that nobody put, no limiter lifted, nothing lost for an error."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from shmbuf import Buffer, Lapped, RateLimiter, TooManyCollectors
from shmbuf._extension import native
from shmbuf.checkpoint import dump_buffer, load_buffer, loading
from tests.unit.helpers import SMALL, k, numbers, stuck_drainer
from tests.unit.test_checkpoint import STEPS, runs, steps

STREAMS = {"schema": STEPS, "trajectories": True, "end_keys": ("next", "done"), "ring_bytes": 1 << 14}


@pytest.fixture
def headless(make, tmp_path):
    """A checkpoint with two trajectories: of the first the beginning was overwritten, the second goes on."""
    buf = make(10, **STREAMS)
    buf.extend(steps(*range(7)), stream=1)
    buf.extend(steps(7, done=True), stream=1)
    buf.extend(steps(*range(20, 25)), stream=2)
    dump_buffer(buf, tmp_path / "c")
    assert runs(buf) == [([3, 4, 5, 6, 7], True, True), ([20, 21, 22, 23, 24], False, False)]
    return tmp_path / "c"


def test_a_load_stores_the_rows_of_the_checkpoint_and_no_others(make, headless):
    buf = make(10, **STREAMS)
    loaded = load_buffer(buf, headless)
    assert (loaded.rows, loaded.shift) == (10, 0) and buf.window == (3, 13)
    assert buf.stats()["write_count"] == 13 and buf._call("counters")["rows_total"] == 13
    assert runs(buf) == [([3, 4, 5, 6, 7], True, True), ([20, 21, 22, 23, 24], False, False)]
    assert not buf.check()["findings"]


def test_another_load_finds_other_ids_in_the_same_slots(make, headless):
    buf = make(10, **STREAMS)
    buf.extend(steps(*range(100, 117)), stream=9)
    loaded = load_buffer(buf, headless)
    assert (loaded.shift, buf.window) == (20, (23, 33)), (
        "id 3 lay in slot 3, and so does 23, the first that is free there"
    )
    assert runs(buf) == [([3, 4, 5, 6, 7], True, True), ([20, 21, 22, 23, 24], False, False)]


def test_a_load_needs_one_ring_and_says_so_before_anything_changes(make, tmp_path):
    buf = make(10, **{**SMALL, "max_collectors": 1})
    buf.extend(k(*range(7)))
    dump_buffer(buf, tmp_path / "c")
    with pytest.raises(TooManyCollectors):
        load_buffer(buf, tmp_path / "c")
    assert numbers(buf) == list(range(7)) and buf.write_count == 7
    other = make(10, **{**SMALL, "max_collectors": 1})
    assert load_buffer(other, tmp_path / "c").rows == 7


def test_rows_of_others_come_in_between_and_the_shift_is_not_made_up(make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 8 * 10)
    a, b = make(100, **SMALL), make(100, **SMALL)
    a.extend(k(*range(40)))
    dump_buffer(a, tmp_path / "c")
    with Buffer.attach(b.name) as other:
        loaded = load_buffer(b, tmp_path / "c", progress=lambda done, total: done == 20 and other.extend(k(-1, -2)))
    assert (loaded.rows, loaded.shift) == (40, None)
    assert numbers(b) == [*range(20), -1, -2, *range(20, 40)]
    assert load_buffer(b, tmp_path / "c").shift == 100


def test_the_limiter_is_in_force_during_a_load_and_does_not_hold_it_up(make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 8 * 10)
    a, b = make(100, **SMALL), make(100, **SMALL)
    a.extend(k(*range(80)))
    dump_buffer(a, tmp_path / "c")
    b.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-10, 10), max_batch=1))
    before, seen = b.limiter_state(), []
    load_buffer(b, tmp_path / "c", timeout=20, progress=lambda done, total: seen.append(b.limiter_state()))
    assert len(seen) == 8 and all(s["max_diff"] - s["diff"] == before["max_diff"] - before["diff"] for s in seen)
    assert len(b) == 80 and b.limiter_state()["max_diff"] - b.limiter_state()["diff"] == 10


def test_a_load_does_not_wait_for_samplers_where_collectors_did_when_it_was_saved(make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 8 * 10)
    a, b = make(100, **SMALL), make(100, **SMALL)
    limiter = RateLimiter(1.0, min_size=1, error_buffer=(-10, 10), max_batch=1)
    a.set_limiter(limiter)
    a.extend(k(*range(80)))
    state = a.limiter_state()
    assert state["diff"] > state["max_diff"], "one record may overshoot: now nobody may insert"
    dump_buffer(a, tmp_path / "c")
    b.set_limiter(limiter)
    load_buffer(b, tmp_path / "c", timeout=20)
    now = b.limiter_state()
    assert numbers(b) == list(range(80)) and now["max_diff"] - now["diff"] == state["max_diff"] - state["diff"] < 0


def test_what_somebody_else_sets_meanwhile_stays(make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 8 * 10)
    a, b = make(100, **SMALL), make(100, **SMALL)
    a.extend(k(*range(80)))
    dump_buffer(a, tmp_path / "c")
    b.set_limiter(RateLimiter(1.0, min_size=1))
    load_buffer(b, tmp_path / "c", progress=lambda done, total: done == 40 and b.set_limiter(None))
    assert b.limiter_state() is None


def test_a_killed_load_leaves_what_it_had_loaded_and_stops_nobody(make, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 8 * 10)
    a, b = make(100, **SMALL), make(100, **SMALL)
    a.extend(k(*range(80)))
    dump_buffer(a, tmp_path / "c")
    b.extend(k(500))
    b.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1000, 20), max_batch=1))
    pid = os.fork()
    if not pid:
        load_buffer(b, tmp_path / "c", progress=lambda done, total: done == 40 and os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    b._handle.sweep()
    assert numbers(b) == list(range(40)) and b.limiter_state() is not None
    for i in range(15):
        b.extend(k(1000 + i), timeout=20)
    assert not b.check()["findings"]


def test_the_largest_priority_touches_no_row(make, tmp_path, monkeypatch):
    a, b = make(10, **SMALL), make(10, **SMALL)
    for buf in (a, b):
        buf.keep_priorities(0.6)
    a.extend(k(0))
    a.set_priorities([0], 77.0)
    for _ in range(2):
        a.extend(k(*range(1, 11)), priorities=np.full(10, 2.0))
    dump_buffer(a, tmp_path / "c")
    monkeypatch.setattr(Buffer, "set_priorities", None)
    load_buffer(b, tmp_path / "c")
    assert np.allclose(b.priorities(range(*b.window)), 2.0) and b.stats()["priorities"]["new_row"] == pytest.approx(77)
    with Buffer.attach(b.name, readonly=True) as looks:
        assert native.STATUSES[looks._call("raise_new_row", 99.0)] == "readonly"
        with pytest.raises(TypeError):
            looks._call("epoch_word", 0, (1, 2))


def test_a_whole_checkpoint_is_whole_though_rows_are_edited_meanwhile(make, tmp_path, monkeypatch):
    buf = make(100, **SMALL)
    buf.extend(k(*range(100)))
    saved = dump_buffer(buf, tmp_path / "c", complete=True, progress=lambda done, total: buf.edit([3], k(-3)))
    assert saved.rows == 100
    with pytest.raises(Lapped, match="were edited meanwhile"), buf.pin() as pin:
        assert pin.keeps and pin.valid
        buf.edit([4], k(-4))
        assert pin.keeps and not pin.valid


@pytest.mark.parametrize("what", ["edit", "clear"])
def test_what_waits_behind_a_pin_is_nothing_to_do(make, what):
    """Else the drain thread would look for it without a pause."""
    buf = make(10, **SMALL)
    buf.extend(k(*range(10)))
    with Buffer.attach(buf.name) as other:
        assert not buf._handle.runnable
        pin = buf.pin()
        other.put(k(10))
        assert not buf._handle.runnable, "the pin holds it up"
        ticket = other.put_edit([5], k(-5)) if what == "edit" else None
        assert not buf._handle.runnable and not buf.drain(), "behind what the pin holds up"
        with Buffer.attach(buf.name) as third:
            third.put_edit([6], k(-6))
            assert buf._handle.runnable, "an edit needs no room"
            assert buf.drain() and not buf._handle.runnable
        pin.release()
        assert buf._handle.runnable
        if what == "edit":
            assert ticket.wait(20).all()
        else:
            other.empty(timeout=20)
    assert numbers(buf) == ([] if what == "clear" else [1, 2, 3, 4, -5, -6, 7, 8, 9, 10])


def test_a_limit_holds_up_rows_but_no_edit_and_no_load(make, tmp_path):
    buf = make(10, **SMALL)
    buf.extend(k(0, 1))
    dump_buffer(buf, tmp_path / "c")
    buf.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-10, 1)))
    with Buffer.attach(buf.name) as other, stuck_drainer(buf.name):
        other.put(k(2, 3))
        other.put(k(4))
        assert buf._handle.runnable
    buf.drain()
    assert not buf._handle.runnable and numbers(buf) == [0, 1, 2, 3]
    buf.edit([0], k(-1), timeout=20)
    load_buffer(buf, tmp_path / "c", timeout=20)
    assert numbers(buf) == [0, 1], "what had been put before is forgotten"


def test_trajectories_at_the_highest_ids(make):
    buf = make(100, **STREAMS)
    buf._restart(native.MAX_ID, write_count=0)
    put = [100 * who + i for i in range(40) for who in range(4)]
    for x in put:
        buf.extend(steps(x), stream=x // 100)
    stored = [[x for x in put[-100:] if x // 100 == who] for who in range(4)]
    assert runs(buf) == [(run, True, False) for run in stored]
    assert not buf.check()["findings"]
