"""Queries while others write: every result is consecutive rows of one stream, untorn, that matches, was stored during the call and is
whole behind its first row. torch in this process alone: writers are numpy-level."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from shmbuf import Buffer, Lapped, ShmStorage, traj
from shmbuf.query import query_buffer
from tests import oracle
from tests.process import workers

CAPACITY = 3000


def numpy_of(found) -> dict:
    return {k: found[k].numpy() for k in ("who", "k", "payload", "done", "row_id")}


def judge(found, lo: int, hi_after: int) -> None:
    rows = numpy_of(found)
    oracle.check_rows(rows)
    who, k, ids = rows["who"], rows["k"], rows["row_id"]
    assert (who == who[0]).all() and (np.diff(ids) > 0).all()
    following = np.where(k % 2 == 0, k + 1, k + 5)[:-1]
    assert (k[1:] == following).all(), f"rows {k} of writer {who[0]} do not follow each other"
    assert not rows["done"][:-1].any()
    assert lo <= ids[0] and ids[-1] < hi_after


def none_was_cut(found) -> None:
    """Of all trajectories: where one of a stream ends and another goes on, there was an end."""
    last: dict[tuple[int, int], tuple[int, bool]] = {}
    for f in found:
        rows = numpy_of(f)
        who, k = int(rows["who"][0]), rows["k"]
        key = (who, int(oracle.stream_of(who, k[:1])[0]))
        if key in last:
            before, ended = last[key]
            assert ended, f"stream {key} was cut between {before} and {k[0]}"
        last[key] = int(k[-1]), bool(rows["done"][-1])


def collect(name: str, who: int, acks: str, stop) -> None:
    rng = np.random.default_rng(who)
    buffer, k = Buffer.attach(name), 0
    counts = oracle.Acks(acks).counts
    while not stop.is_set():
        n = int(rng.integers(1, 60))
        rows = oracle.make_rows(who, k, n, ends=True)
        buffer.put(rows, stream=oracle.stream_of(who, rows["k"]), timeout=30)
        k += n
        counts[who] = k
        time.sleep(float(rng.random()) * 2e-3)
    buffer.close()


@pytest.mark.parametrize("capacity", [CAPACITY, 300])
def test_while_collectors_write(unique_name, tmp_path, capacity):
    context, acks = multiprocessing.get_context("spawn"), str(tmp_path / "acks")
    oracle.Acks(acks)
    stop = context.Event()
    with Buffer.create(
        unique_name, capacity, schema=oracle.ENDING, trajectories=True, end_keys="done", ring_bytes=1 << 14
    ) as buffer:
        storage = ShmStorage.over(buffer)
        writers = [context.Process(target=collect, args=(unique_name, w, acks, stop)) for w in range(3)]
        for p in writers:
            p.start()
        give_up = time.monotonic() + 90
        while buffer.write_count < 2 * capacity:
            assert time.monotonic() < give_up and all(p.is_alive() for p in writers)
            time.sleep(0.01)
        predicates = [
            None,
            traj.length >= 3,
            (traj.k.max() - traj.k.min() >= 4) & (traj.who >= 0).all(),
            lambda t: t.length > 2,
            traj.done.any(),
        ]
        seen, moved = [0] * len(predicates), 0
        for turn in range(60):
            which = turn % len(predicates)
            (lo, hi) = buffer.window
            found = query_buffer(storage, predicates[which])
            (lo_after, hi_after) = buffer.window
            moved += hi_after > hi
            for f in found:
                judge(f, lo, hi_after)
                p = predicates[which]
                assert p is None or p(f)
            seen[which] += len(found)
            ids = np.concatenate([f.row_id.numpy() for f in found]) if found else np.zeros(0)
            assert len(np.unique(ids)) == len(ids)
            if which == 0:
                none_was_cut(found)
            if which == 0:  # all of the window as it was, less what was overwritten meanwhile: nothing is missing
                assert not len(np.setdiff1d(np.arange(max(lo, lo_after), hi), ids))
        stop.set()
        for p in writers:
            p.join(60)
        assert [p.exitcode for p in writers] == [0] * 3
        assert moved > 10 and all(seen), (moved, seen)
        workers.settle(buffer)
        oracle.check(buffer, oracle.Acks(acks).counts, 60, streams=True)
        rows = sum(f.length for f in query_buffer(storage))
        assert rows == len(buffer) == capacity


def die(name: str, ready) -> None:
    buffer = Buffer.attach(name)
    buffer.put(oracle.make_rows(7, 0, 12, ends=True), stream=0).wait(30)
    ready.set()
    time.sleep(60)


def test_a_collector_that_dies_mid_episode(unique_name):
    """Its rows stay a trajectory of their own, unfinished, which whoever gets its ring does not continue."""
    with Buffer.create(
        unique_name, 1000, schema=oracle.ENDING, trajectories=True, end_keys="done", max_collectors=2
    ) as buffer:
        storage = ShmStorage.over(buffer)
        for _ in range(2):
            ready = workers.ForkedEvent()
            pid = workers.fork(die, unique_name, ready)
            give_up = time.monotonic() + 60
            while not ready.is_set():
                assert time.monotonic() < give_up
                time.sleep(0.001)
            assert os.WTERMSIG(workers.kill(pid)) == signal.SIGKILL
        with Buffer.attach(unique_name) as other:
            other.extend(oracle.make_rows(8, 0, 16, ends=True), stream=0)
        assert [f.length for f in query_buffer(storage)] == [12, 12, 16]
        assert [int(f.who[0]) for f in query_buffer(storage, ~traj.done.any())] == [7, 7]
        assert [int(f.who[0]) for f in query_buffer(storage, traj.done.last().sum() == 1)] == [8]


def test_one_that_is_emptied_and_refilled_meanwhile(unique_name):
    """In a thread of this process: neither rows of before nor half a trajectory of the other filling."""
    import threading

    with Buffer.create(
        unique_name, 400, schema=oracle.ENDING, trajectories=True, end_keys="done", drain="caller"
    ) as buffer:
        storage, stop = ShmStorage.over(buffer), threading.Event()

        def churn() -> None:
            with Buffer.attach(unique_name) as other:
                k = 0
                while not stop.is_set():
                    other.extend(oracle.make_rows(oracle.APART, k, 50, ends=True), stream=np.arange(k, k + 50) // 10)
                    k += 50
                    if k % 500 == 0:
                        other.empty()

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            seen, turn, give_up = 0, 0, time.monotonic() + 60
            while seen < 1000 or turn < 300:
                assert time.monotonic() < give_up and thread.is_alive()
                turn += 1
                lo, _ = buffer.window
                try:
                    found = query_buffer(storage, (traj.k >= 0).all() if turn % 2 else None)
                except Lapped:
                    continue
                for f in found:
                    rows = numpy_of(f)
                    oracle.check_rows(rows)
                    assert (np.diff(rows["k"]) == 1).all() and (rows["k"] // 10 == rows["k"][0] // 10).all()
                    assert not rows["done"][:-1].any() and rows["row_id"][0] >= lo
                seen += len(found)
        finally:
            stop.set()
            thread.join(30)
