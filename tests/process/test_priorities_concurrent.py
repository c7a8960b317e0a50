"""Priorities set by many processes at once while rows come and go, judged by an oracle that knows the last value of each row:
every row has one owner, who logs what it sets. Then the same with owners killed at random."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, destroy
from tests import oracle
from tests.process import workers
from tests.process.test_kills import run_supervisor
from tests.unit.helpers_priorities import chi2_p

OWNERS = 4
CAPACITY = 1021  # no multiple of 4: the rows that share a slot have different owners
BATCH = 64
MOST = 1 << 20  # the largest priority, set by the first row: what new rows get
SENT = 500_000  # + k % 1000: what a row brings
IDS = 1 << 22  # how many ids the log has room for
KILLS = 3000 if os.environ.get("SHMBUF_SOAK") else 300


class Log:
    """In a file that all map: the last value that its owner set for each id, and what each owner is about to set."""

    def __init__(self, path: str | Path):
        self.path = str(path)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        size = IDS * 4 + OWNERS * (BATCH + 1) * 16 + 4096
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        os.close(fd)
        self.value = np.frombuffer(memory, np.float32, IDS)
        rest = np.frombuffer(memory, np.float64, OWNERS * (BATCH + 1) * 2 + 16, IDS * 4)
        self.counts = rest[: OWNERS * 2].reshape(OWNERS, 2)  # applied, stale, as each owner was told
        self.pending = rest[16 : 16 + OWNERS * BATCH * 2].reshape(OWNERS, 2, BATCH)  # ids + 1, values


def collect(name: str, acks_path: str, stop) -> None:
    """Rows of writer 0: most bring SENT + k % 1000, every fourth record takes what new rows get."""
    rng, acks = random.Random(0), oracle.Acks(acks_path).counts
    buffer = Buffer.attach(name)
    k = 1  # the first is there
    while not stop.is_set():
        n = rng.randint(1, 12)
        numbers = np.arange(k, k + n)
        buffer.put(oracle.make_rows(0, k, n), priorities=SENT + numbers % 1000 if k % 4 else None)
        k += n
        acks[0] = k
        if rng.random() < 0.3:
            buffer.drain()
        time.sleep(0.0005)  # updaters shall meet the same rows more than once
    buffer.close()


def own(name: str, log_path: str, me: int, seed: int, stop) -> None:
    """Set priorities of rows with id ≡ me (mod 4), some of them overwritten meanwhile. Values ≡ me, so that a mixture shows."""
    log, rng = Log(log_path), np.random.default_rng(seed)
    buffer = Buffer.attach(name)
    pending = log.pending[me]
    again = pending[0] > 0  # what a killed predecessor may have set or not
    if again.any():
        settle(buffer, log, me, pending[0, again].astype(np.int64) - 1, pending[1, again])
    while not stop.is_set():
        lo, hi = buffer.window
        ids = np.unique(rng.integers(max(0, lo - 20), hi, rng.integers(1, BATCH + 1)))
        ids = ids[ids % OWNERS == me]
        p = 4 * rng.integers(0, 1000, len(ids)) + me
        pending[1, : len(ids)] = p
        pending[0, : len(ids)] = ids + 1
        settle(buffer, log, me, ids, p)
    buffer.close()


def settle(buffer: Buffer, log: Log, me: int, ids: np.ndarray, p: np.ndarray) -> None:
    applied = buffer.set_priorities(ids, p)
    log.value[ids[applied]] = p[applied] + 1  # 0: never set
    log.counts[me] += applied.sum(), (~applied).sum()
    log.pending[me, 0] = 0


def learn(name: str, stop) -> None:
    buffer = Buffer.attach(name)
    seen = 0
    while not stop.is_set() or not seen:
        rows, ids, w = buffer.draw_by_priority(64, timeout=30, stratified=seen % 2 == 0)
        oracle.check_rows(rows)
        assert (w >= 0).all() and (w <= 1).all() and np.isfinite(w).all()
        assert (rows["k"] == ids).all()  # one writer: its k-th row has id k
        seen += 1
    buffer.close()


def judge(buffer: Buffer, log: Log) -> None:
    """At rest: each live row's priority is the last that its owner set, or what it came with; no sum is stale."""
    assert buffer._handle.check_tree() == 0
    lo, hi = buffer.window
    ids = np.arange(lo, hi)
    p, k = buffer.priorities(ids), buffer.gather(ids)["k"]
    assert (k == ids).all()
    came_with = np.where(p == MOST, MOST, SENT + k % 1000)  # every fourth record takes the maximum
    expected = np.where(log.value[ids] > 0, log.value[ids] - 1.0, came_with)
    for me in range(OWNERS):  # killed between leaf and log: either
        begun = log.pending[me, 0] > 0
        for i, x in zip(log.pending[me, 0, begun].astype(int) - 1, log.pending[me, 1, begun], strict=True):
            if lo <= i < hi and p[i - lo] == x:
                expected[i - lo] = x
    bad = p != expected
    assert not bad.any(), f"{bad.sum()} of {len(ids)}: ids {ids[bad][:5]} have {p[bad][:5]}, not {expected[bad][:5]}"
    assert buffer._get("priorities")["sum"] == p.sum()  # whole numbers: exact


def begin(name: str, live_maximum: bool) -> Buffer:
    buffer = Buffer.create(name, CAPACITY, schema=oracle.SCHEMA, ring_bytes=1 << 14, drain="caller", max_collectors=16)
    buffer.keep_priorities(1.0, 0.0, max_priority_within_buffer=live_maximum)
    buffer.extend(oracle.make_rows(0, 0, 1), priorities=float(MOST))
    return buffer


def supervise(name: str, directory: str, kills: int) -> None:
    """In a fresh interpreter, without threads of its own: it forks."""
    rng, stop, log = random.Random(4), workers.ForkedEvent(), Log(f"{directory}/log")
    acks = oracle.Acks(f"{directory}/acks")
    acks.counts[0] = 1
    buffer = begin(name, False)
    collector = workers.fork(collect, name, acks.path, stop)
    reader = workers.fork(learn, name, stop)
    owners = [workers.fork(own, name, log.path, me, me, stop) for me in range(OWNERS)]
    drainer = workers.fork(workers.drain, name)
    done = 0
    while done < kills if kills else buffer.window[0] < 8 * CAPACITY or log.counts.min() < 100:
        time.sleep(rng.random() * 0.02)
        if kills:
            me = rng.randrange(OWNERS)
            assert workers.kill(owners[me]) == signal.SIGKILL, "an owner ended by itself"
            done += 1
            owners[me] = workers.fork(own, name, log.path, me, 100 + done, stop)
    stop.set()
    for pid in (collector, reader, *owners):
        assert os.waitpid(pid, 0)[1] == 0
    workers.kill(drainer)
    oracle.settle(buffer)
    has = buffer._get("priorities")
    if kills:
        buffer._handle.scrub()
    else:  # what they were told adds up
        assert (has["applied"], has["stale"]) == tuple(log.counts.sum(axis=0))
    judge(buffer, log)
    oracle.check(buffer, acks.counts, 12)
    print(f"kills={done} end={buffer.window[1]} applied={has['applied']} stale={has['stale']} scrubs={has['scrubs']}")
    buffer.close()
    destroy(name, force=True)


@pytest.mark.parametrize("kills", [0, KILLS], ids=["all live", "killed"])
def test_each_leaf_is_the_last_that_its_owner_set(unique_name, tmp_path, kills):
    out = run_supervisor(
        "from tests.process.test_priorities_concurrent import supervise; "
        f"supervise({unique_name!r}, {str(tmp_path)!r}, {kills})"
    )
    assert f"kills={kills} " in out


# ---- B022 ---------------------------------------------------------------------------------------------------------


def update_64(name: str, values: tuple, seed: int, told) -> None:
    rng, buffer = np.random.default_rng(seed), Buffer.attach(name)
    applied = 0
    ids = np.arange(0, 128, 2)  # even ones: the capacity is odd, so whoever follows in their slots is odd
    for i, v in zip(rng.choice(ids, 100_000), rng.choice(values, 100_000), strict=True):
        applied += int(buffer.set_priorities([i], v)[0])
    told[seed] = applied
    buffer.close()


def insert(name: str, stop) -> None:
    buffer = Buffer.attach(name)
    k = 128
    while not stop.is_set():
        buffer.put(oracle.make_rows(0, k, 1))
        buffer.drain()
        k += 1
    buffer.close()


@pytest.mark.parametrize("capacity", [1_000_001, 129], ids=["rows stay", "rows are overwritten"])
def test_b022_two_learners_update_the_same_live_rows(unique_name, capacity):
    """100,000 updates each, of values {1, 2} and {10, 20}, of 64 live rows, while a collector keeps inserting."""
    run_supervisor(f"from tests.process.test_priorities_concurrent import b022; b022({unique_name!r}, {capacity})")


def b022(name: str, capacity: int) -> None:
    stop = workers.ForkedEvent()
    told = np.frombuffer(mmap.mmap(-1, 16), np.int64)
    buffer = Buffer.create(name, capacity, schema=oracle.SCHEMA, drain="caller")
    buffer.keep_priorities(1.0, 0.0, max_priority_within_buffer=False)
    buffer.extend(oracle.make_rows(0, 0, 128), priorities=np.where(np.arange(128) == 1, 100.0, 5.0))
    updaters = [workers.fork(update_64, name, v, s, told) for s, v in enumerate([(1.0, 2.0), (10.0, 20.0)])]
    collector = workers.fork(insert, name, stop)
    for pid in updaters:
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    assert os.waitpid(collector, 0)[1] == 0
    oracle.settle(buffer)
    has, (lo, hi) = buffer._get("priorities"), buffer.window
    p = buffer.priorities(range(lo, hi))
    if lo == 0:
        assert set(p[0:128:2]) <= {1.0, 2.0, 10.0, 20.0} and has["stale"] == 0
        assert (p[1:128:2] == np.where(np.arange(1, 128, 2) == 1, 100.0, 5.0)).all()
    else:
        assert has["stale"] > 0
    assert (p[128 - lo if lo < 128 else 0 :] == 100.0).all()  # an update of a dead row would show
    assert has["applied"] == told.sum() and has["applied"] + has["stale"] == 200_000
    assert abs(has["sum"] - p.sum()) <= 1e-9 * p.sum() and buffer._handle.check_tree() == 0
    buffer.close()
    destroy(name, force=True)


# ---- shares while others update -------------------------------------------------------------------------------------


def shuffle_half(name: str, half: int, seed: int, n: int, stop) -> None:
    """Give the rows of one half of [n, 2n) other priorities all the time: of pairs, in one update, so that two always add up
    to 10; but the two change one after another, so draws by others may find any sum in between."""
    rng, buffer = np.random.default_rng(seed), Buffer.attach(name)
    mine = np.arange(n, 2 * n)[half::2]
    while not stop.is_set():
        buffer.set_priorities(mine, rng.integers(0, 10, len(mine)) + 0.0)
    buffer.close()


@pytest.mark.parametrize("stratified", [False, True], ids=["proportional", "stratified"])
def test_shares_while_two_others_update_the_other_half(unique_name, stratified):
    """Of draws that fall into the rows that nobody updates each row has its share, whatever the rest does meanwhile."""
    run_supervisor(
        f"from tests.process.test_priorities_concurrent import shares; shares({unique_name!r}, {stratified})"
    )


def shares(name: str, stratified: bool) -> None:
    n, stop = 256, workers.ForkedEvent()
    buffer = Buffer.create(name, 2 * n, schema=oracle.SCHEMA, drain="caller")
    buffer.keep_priorities(1.0, 0.0)
    p = np.random.default_rng(0).integers(1, 20, 2 * n) + 0.0
    buffer.extend(oracle.make_rows(0, 0, 2 * n), priorities=p)
    others = [workers.fork(shuffle_half, name, half, half, n, stop) for half in (0, 1)]
    buffer.seed(1)
    count, before = np.zeros(2 * n), -1
    applied = lambda: buffer._get("priorities")["applied"]  # noqa: E731
    for _ in range(400):
        while applied() == before:
            os.sched_yield()
        before = applied()
        for _ in range(4):
            count += np.bincount(buffer.draw_by_priority(250, stratified=stratified)[1], minlength=2 * n)
    stop.set()
    for pid in others:
        assert os.waitpid(pid, 0)[1] == 0
    still = count[:n]
    assert still.sum() > 100_000
    if stratified:  # less spread than independent draws, never more
        assert ((still - still.sum() * p[:n] / p[:n].sum()) ** 2 / (still.sum() * p[:n] / p[:n].sum())).sum() < 1.4 * n
    else:
        assert chi2_p(still, still.sum() * p[:n] / p[:n].sum()) > 1e-4
    assert count[n:].min() > 0 and buffer._handle.check_tree() == 0
    buffer.close()
    destroy(name, force=True)
