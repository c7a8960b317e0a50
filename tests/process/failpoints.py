"""Walks the failpoints: a child is killed (or stopped) at a named step, a successor takes over, the oracle judges.

Run with SHMBUF_NATIVE=failpoints in an interpreter without threads: `python -m tests.process.failpoints NAME …`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time

import numpy as np

from shmbuf import Buffer, RateLimiter, destroy, segment
from shmbuf._extension import native
from shmbuf.errors import Lapped
from tests import oracle
from tests.process import workers

LARGEST = 9
HITS = (1, 2, 3)
EXTRA = ("skip_", "clear_", "sweep_", "link_cleared")  # what only `extras` passes
RECYCLES = ("link_recycling", "link_recycled", "link_claimed")
FILLER = 700  # streams of one row each: many more than a collector's table has entries


def rows(who: int, first: int, n: int) -> dict:
    return oracle.make_rows(who, first, n, ends=True)


def put(buffer: Buffer, who: int, first: int, n: int, **with_them) -> None:
    record = rows(who, first, n)
    buffer.put(record, stream=oracle.stream_of(who, record["k"]), **with_them)


def actor(name: str, acks_path: str, spec: str, first: int, late: bool = False) -> None:
    """Passes every labelled step that a collector which helps itself can pass: claims a ring, builds the schema, puts rows of
    several streams, drains, begins to keep priorities, updates some, changes the limiter, samples, claims from an epoch, has
    rows skipped, sweeps, empties, closes. Dies at the armed one. late: arm when all is stored, before the first update."""
    acks = oracle.Acks(acks_path).counts
    buffer, other = Buffer.attach(name), Buffer.attach(name)
    if spec.startswith(RECYCLES):  # the table of streams is full when the failpoint is armed
        for _ in range(0, FILLER, LARGEST):
            put(buffer, oracle.APART, int(acks[oracle.APART]), LARGEST)
            acks[oracle.APART] += LARGEST
            buffer.drain()
    assert late or native.arm(spec)
    k = first
    for n in (1, LARGEST, 4, 7, 2):
        if buffer.schema is None:  # the first put builds it, and cannot name a stream: it is 0
            buffer.put(rows(1, k, n))
        else:
            put(buffer, 1, k, n, priorities=1.0 + np.arange(n) if n % 2 else None)
        k += n
        acks[1] = k
        buffer.drain()
        buffer.keep_priorities(ALPHA, EPS)
    assert not late or native.arm(spec)
    prioritise(buffer)
    if spec.startswith(EXTRA):
        extras(name, buffer, other, k)
    buffer.close()
    other.close()


ALPHA, EPS = 0.6, 1e-8


def prioritise(buffer: Buffer) -> None:
    """Updates, samples by priority under a limiter that never waits, and claims from the epoch that all share."""
    lo, hi = buffer.window
    ids = np.arange(lo, hi)
    for turn in range(3):
        buffer.set_priorities(ids[turn::2], np.arange(len(ids[turn::2])) % 10 + 1.0)
    assert buffer._handle.share_epoch(0, 1)
    for turn in range(3):
        buffer.set_limiter(RateLimiter(1.0, min_size=turn, error_buffer=(-1e9, 1e9)))
        oracle.check_rows(buffer.draw_by_priority(16)[0])
        claim(buffer, 3)


def claim(buffer: Buffer, n: int) -> list[int]:
    """Consume-once: ids that nobody else gets."""
    ids = np.empty(n, np.int64)
    got, _, _ = buffer._handle.claim(None, 0, n, 7, True, False, True, 1, ids.ctypes.data)
    return ids[:got].tolist()


def extras(name: str, buffer: Buffer, other: Buffer, k: int) -> None:
    third = segment.attach(name)
    for _ in range(50):  # until a drainer that was stuck goes on just while drop_oldest waits for it
        assert third.try_take_role()
        release = threading.Timer(0.004, third.give_back_role)
        release.start()
        for _ in range(4):
            put(buffer, 1, k, LARGEST)
            k += LARGEST
        release.join()
        buffer.drain()
        if buffer.stats()["skipped_rows"]:
            break
    third.close()
    put(other, 2, 0, 3)
    other.drain()
    other.close()  # its slot is now to be swept
    buffer._handle.sweep()
    for _ in HITS:
        buffer.empty()
        put(buffer, 1, k, LARGEST)
        k += LARGEST
        buffer.drain()
    Buffer.attach(name).extend(rows(3, 0, 1))


def successor(name: str, acks_path: str) -> None:
    """Another process goes on: reads, puts, drains, updates, samples, claims; nothing may hang or be wrong."""
    acks = oracle.Acks(acks_path).counts
    buffer = Buffer.attach(name)
    five = rows(100, 0, 5)
    assert len(buffer.extend(five, stream=oracle.stream_of(100, five["k"]), timeout=20)) == 5
    acks[100] = 5
    oracle.check_rows(buffer.draw(50)[0])
    buffer.keep_priorities(ALPHA, EPS)
    buffer.set_limiter(RateLimiter(1.0, min_size=0, error_buffer=(-1e9, 1e9)))
    lo, hi = buffer.window
    assert buffer.set_priorities(range(lo, hi), 2.0).all()
    claimed = [i for _ in range(hi - lo) for i in claim(buffer, 7)]
    assert len(set(claimed)) == len(claimed) and set(claimed) <= set(range(lo, hi))
    assert hi - 1 in claimed or not claimed, "the newest row was in no window"
    oracle.check_rows(buffer.draw_by_priority(50)[0])
    buffer._handle.sweep()
    buffer.close()


def run(name: str, how: str, hit: int, directory: str, *, kill_successor: bool = False, late: bool = False) -> bool:
    """True if the step fired. Raises AssertionError if anything is wrong afterwards."""
    where = f"{name}={how}@{hit}"
    special = name.startswith(EXTRA)
    path = tempfile.mktemp(dir=directory)
    acks = oracle.Acks(path)
    shm = f"fp.{os.getpid()}.{name}.{how}.{hit}.{late}"
    built = None if name.startswith("build_") else oracle.ENDING
    full = "drop_oldest" if special else "block"
    creator = Buffer.create(
        shm,
        64 if special else 10_000,
        schema=built,
        ring_bytes=4096,
        drain="caller",
        full=full,
        max_collectors=8,
        trajectories=True,
        end_keys="done",
    )
    try:
        if name != "tree_kept":
            creator.keep_priorities(ALPHA, EPS)
        pid = workers.fork(actor, shm, path, where, 0, late)
        status = wait(pid, stopped=how == "stop")
        if status == 0:
            return False
        if how == "kill":
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{where}: wait status {status}"
        else:
            assert os.WIFSTOPPED(status), f"{where}: wait status {status}"
            reads_go_on(creator, late)
            os.kill(pid, signal.SIGCONT)
            assert os.waitpid(pid, 0)[1] == 0, where
        if kill_successor:  # and the one that comes to finish its work, at the same step and at the commit
            for again in (name, "txn_committed"):
                again_at = int(acks.counts[1]) if special else recover_k(creator, acks)
                workers_status = wait(workers.fork(actor, shm, path, f"{again}=kill@1", again_at, late))
                assert workers_status in (0, signal.SIGKILL), f"{where}: {workers_status}"
        if late and how == "kill":
            heal(creator, hit, where)
        assert wait(workers.fork(successor, shm, path)) == 0, where
        oracle.settle(creator)
        creator._handle.scrub()
        if special:
            lo, hi = creator.window
            oracle.check_rows(creator.gather(range(lo, hi)))
            assert creator.stats()["malformed_records"] == 0
            assert creator._handle.check_tree() == 0, where
            oracle.check_links(creator, True, None)
        else:
            cuts = None if name.startswith(RECYCLES) or kill_successor else 0
            oracle.check(creator, acks.counts, LARGEST, whole=True, streams=True, cuts=cuts)
        for c in creator.collectors():
            assert c["state"] != "dead" or c["ring_used"] == 0, (where, c)
        return True
    finally:
        creator.close()
        destroy(shm, force=True)
        os.unlink(path)


def heal(creator: Buffer, hit: int, where: str) -> None:
    """An updater died between leaf and root: a standby of somebody who lives mends it by himself; or scrub() does at once."""
    if hit > 1:
        creator._handle.scrub()
    else:
        creator._handle.start_thread(True)
        deadline = time.monotonic() + 30
        while not creator._get("priorities")["scrubs"]:
            assert time.monotonic() < deadline, f"{where}: nobody mended the tree"
            time.sleep(0.005)
    assert creator._handle.check_tree() == 0, where


def recover_k(creator: Buffer, acks: oracle.Acks) -> int:
    """Where writer 1 has to go on: a record that was published but not acknowledged counts."""
    oracle.settle(creator)
    lo, hi = creator.window
    if hi == lo:
        return 0
    rows = creator.gather(range(lo, hi))
    mine = rows["k"][rows["who"] == 1]
    acks.counts[1] = int(mine[-1]) + 1 if len(mine) else 0
    return int(acks.counts[1])


def reads_go_on(creator: Buffer, update: bool) -> None:
    """Somebody is stopped at this step: what is stored can still be read, by one who never waits for him."""
    lo, hi = creator.window
    if hi > lo:
        rows, valid = creator.try_gather(range(lo, hi))
        oracle.check_rows({k: v[valid] for k, v in rows.items()})
        creator.draw(8)
        if update:  # of others' rows, and of the very ones
            assert creator.set_priorities(range(lo, hi), 3.0).all()
            oracle.check_rows(creator.draw_by_priority(8)[0])
    creator.stats(), creator.collectors(), creator.members()


def stopped_while_rows_are_overwritten(overwritten: int, stored: int = 4) -> None:
    """By priority the rows that stay are drawn meanwhile; if none do the reader says so when its time is over. Then all go on."""
    name = f"fp.{os.getpid()}.overwritten"
    creator = Buffer.create(name, stored, schema=oracle.SCHEMA, drain="caller")
    creator.keep_priorities(ALPHA, EPS)
    creator.extend(oracle.make_rows(0, 0, stored))

    def write() -> None:
        assert native.arm("txn_evicted=stop@1")
        Buffer.attach(name).extend(oracle.make_rows(0, stored, overwritten))

    def read() -> None:
        buffer = Buffer.attach(name)
        for stratified in (False, True):
            try:
                _, ids, _ = buffer.draw_by_priority(2000, stratified=stratified, timeout=0.1)
            except Lapped:
                assert overwritten == stored
                continue
            assert set(ids.tolist()) == set(range(overwritten, stored)), "not the rows that stay"

    writer = workers.fork(write)
    try:
        assert os.WIFSTOPPED(wait(writer, stopped=True))
        assert wait(workers.fork(read), seconds=20) == 0
        os.kill(writer, signal.SIGCONT)
        assert wait(writer) == 0
        ids = creator.draw_by_priority(64 * stored)[1]
        assert set(ids.tolist()) <= set(range(overwritten, overwritten + stored)) and ids.max() >= stored
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)
        creator.close()
        destroy(name, force=True)


def wait(pid: int, stopped: bool = False, seconds: float = 30) -> int:
    """The wait status; a child that hangs is an assertion."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
        if done:
            return status
        time.sleep(0.001)
    workers.kill(pid)
    raise AssertionError(f"child {pid} hangs")


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            # Steps of the tree: of the writer, and of whoever updates.
            for late in (False, True) if name.startswith("tree_") and name != "tree_kept" else (False,):
                if name == "tree_leaf_read" and not late:
                    continue
                fired = {hit: run(name, "kill", hit, directory, late=late) for hit in HITS}
                assert fired[1], f"{name} never fired"
                run(name, "kill", 1, directory, late=late, kill_successor=not name.startswith(EXTRA))
                assert run(name, "stop", 1, directory, late=late), f"{name} never fired"
            print(name, fired, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(native.FAILPOINTS))
