"""Slices while others write: every one is consecutive rows of one stream that were stored during the call. numpy level, no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from shmbuf import Buffer, Lapped, NotEnoughRows
from tests.process import workers

SPEC = {"who": "int64", "lane": "int64", "run": "int64", "t": "int64", "done": "bool"}


def part(who: int, lane, run, t, done) -> dict:
    lane, run, t, done = np.broadcast_arrays(np.atleast_1d(lane), run, t, done)
    return {
        "who": np.full(lane.shape, who, np.int64),
        "lane": lane.astype(np.int64),
        "run": run.astype(np.int64),
        "t": t.astype(np.int64),
        "done": done.astype(bool),
    }


def collect(name: str, who: int, stop, lanes: int = 3) -> None:
    """Several environments in turn, a step of all at a time; each lane's episodes have lengths of their own."""
    buffer = Buffer.attach(name)
    lane, run, t = np.arange(lanes), np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    length = 12 + 5 * lane + who % 4
    while not stop.is_set():
        done = t + 1 == length
        buffer.put(part(who, lane, run, t, done), stream=lane, timeout=30)
        t, run = np.where(done, 0, t + 1), run + done
    buffer.close()


def check(rows: dict, lens: np.ndarray) -> None:
    inner = np.ones(len(rows["t"]), bool)
    inner[np.cumsum(lens) - lens] = False
    for key in ("who", "lane", "run"):
        assert (np.diff(rows[key], prepend=0)[inner] == 0).all(), key
    assert (np.diff(rows["t"], prepend=0)[inner] == 1).all()


def sample(name: str, stop, out, strict: bool, by: str) -> None:
    buffer = Buffer.attach(name)
    seen = lapped = 0
    while not stop.is_set() or not seen:
        try:
            rows, _, lens = buffer.draw_slices(16, 8, strict=strict, by=by, timeout=30)
        except Lapped:
            lapped += 1
            continue
        check(rows, lens)
        assert not strict or (lens == 8).all()
        seen += 1
    out.put((seen, lapped))
    buffer.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_interleaved_collectors_and_readers(unique_name, method):
    context = multiprocessing.get_context(method)
    stop, out = context.Event(), context.Queue()
    with Buffer.create(unique_name, 2000, schema=SPEC, trajectories=True) as buffer:
        tasks = [(collect, (unique_name, w, stop)) for w in range(2)]
        tasks += [(sample, (unique_name, stop, out, s, by)) for s, by in ((True, "trajectory"), (False, "start"))]
        assert workers.run_all(method, tasks, 4, stop, begun=lambda: buffer.write_count > 4000) == [0] * 4
        got = [out.get(timeout=5) for _ in range(2)]
        assert all(seen > lapped for seen, lapped in got), got


def test_a_hundred_collectors_in_turn(unique_name):
    """Handles of one process: what matters is how their rows lie in the buffer."""
    with Buffer.create(unique_name, 3000, schema=SPEC, trajectories=True, drain="caller", ring_bytes=4096) as buffer:
        handles = [Buffer.attach(unique_name) for _ in range(100)]
        for t in range(45):
            for who, h in enumerate(handles):
                h.put(part(who, 0, t // 15, t % 15, t % 15 == 14))
            buffer.drain()
        buffer.seed(2)
        rows, ids, lens = buffer.draw_slices(4000, 15)
        check(rows, lens)
        assert set(rows["who"].tolist()) == set(range(100)) and (rows["t"].reshape(-1, 15) == np.arange(15)).all()
        found = buffer.trajectories()
        assert len(found) == 200 and all(t.rows == 15 and not t.head_missing and t.ended for t in found)
        assert (np.diff(ids.reshape(-1, 15), axis=1) > 0).all()
        chain, n = buffer.walk_back(ids.reshape(-1, 15)[:50, -1], 15)
        assert (n == 15).all() and (chain[:, ::-1] == ids.reshape(-1, 15)[:50]).all()
        for h in handles:
            h.close()


def evict(name: str, begun, stop, capacity: int) -> None:
    buffer = Buffer.attach(name)
    k = 1
    while not stop.is_set():
        buffer.put(part(1, 0, k, np.arange(50), np.arange(50) == 49), timeout=30)
        k += 1
        if k * 50 > 2 * capacity:
            begun.set()
    buffer.close()


def test_b030_what_was_seen_is_evicted(unique_name):
    """Whatever this process may keep of the trajectories it saw is worthless after the other one's first writes."""
    context, capacity = multiprocessing.get_context("spawn"), 1000
    begun, stop = context.Event(), context.Event()
    with Buffer.create(unique_name, capacity, schema=SPEC, trajectories=True) as buffer:
        buffer.extend(part(0, 0, 0, np.arange(200), np.arange(200) == 199))
        rows, _, _ = buffer.draw_slices(100, 10)
        assert (rows["who"] == 0).all()
        writer = context.Process(target=evict, args=(unique_name, begun, stop, capacity))
        writer.start()
        assert begun.wait(60)
        while buffer.window[0] < 200:
            time.sleep(0.001)
        newest, drawn = 0, 0
        for _ in range(1000):
            lo, _ = buffer.window
            try:
                rows, ids, lens = buffer.draw_slices(8, 10, timeout=5)
            except Lapped:
                continue
            drawn += 1
            assert (rows["who"] == 1).all() and ids.min() >= lo
            check(rows, lens)
            newest = max(newest, int(rows["run"].max()))
        stop.set()
        writer.join(60)
        assert writer.exitcode == 0 and drawn > 900
        buffer.drain()
        last = buffer.extend(part(2, 0, 0, np.arange(500), np.arange(500) == 499))[-1]
        buffer.seed(1)
        rows, ids, _ = buffer.draw_slices(200, 10, by="start")  # new ones appear in the next call
        assert 2 in rows["who"] and ids.max() <= last


def die(name: str, ready) -> None:
    buffer = Buffer.attach(name)
    buffer.put(part(7, 0, 0, np.arange(20), False)).wait(30)
    ready.set()
    time.sleep(60)


def test_a_collector_that_dies_mid_episode(unique_name):
    """Its rows stay a trajectory of 20, which those of whoever gets its ring do not continue."""
    with Buffer.create(unique_name, 1000, schema=SPEC, trajectories=True, max_collectors=2) as buffer:
        for _ in range(3):
            ready = workers.ForkedEvent()
            pid = workers.fork(die, unique_name, ready)
            while not ready.is_set():
                time.sleep(0.001)
            assert os.WTERMSIG(workers.kill(pid)) == signal.SIGKILL
        with Buffer.attach(unique_name) as other:
            other.extend(part(8, 0, 0, np.arange(30), False))
        found = buffer.trajectories()
        assert [(t.rows, t.head_missing, t.ended) for t in found] == [(20, False, False)] * 3 + [(30, False, False)]
        rows, _, lens = buffer.draw_slices(300, 20)
        check(rows, lens)
        assert (rows["who"].reshape(-1, 20) == rows["who"].reshape(-1, 20)[:, :1]).all()
        with pytest.raises(NotEnoughRows, match="longest has 30 rows, slices of 31"):
            buffer.draw_slices(1, 31)
