"""Walks the failpoints: a child is killed (or stopped) at a named step, a successor takes over, the oracle judges.

Run with SHMBUF_NATIVE=failpoints in an interpreter without threads: `python -m tests.process.failpoints NAME …`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time

from shmbuf import Buffer, destroy, segment
from shmbuf._extension import native
from tests import oracle
from tests.process import workers

LARGEST = 9
HITS = (1, 2, 3)


def actor(name: str, acks_path: str, spec: str, first: int) -> None:
    """Passes every labelled step that a collector which helps itself can pass: claims a ring, builds the schema, puts,
    drains, has rows skipped, sweeps, empties, closes. Dies at the armed one."""
    acks = oracle.Acks(acks_path).counts
    buffer, other = Buffer.attach(name), Buffer.attach(name)
    assert native.arm(spec)
    k = first
    for n in (1, LARGEST, 4, 7, 2):
        buffer.put(oracle.make_rows(1, k, n))
        k += n
        acks[1] = k
        buffer.drain()
    if spec.startswith(("skip_", "clear_", "sweep_")):
        extras(name, buffer, other, k)
    buffer.close()
    other.close()


def extras(name: str, buffer: Buffer, other: Buffer, k: int) -> None:
    third = segment.attach(name)
    for _ in range(50):  # until a drainer that was stuck goes on just while drop_oldest waits for it
        assert third.try_take_role()
        release = threading.Timer(0.004, third.give_back_role)
        release.start()
        for _ in range(4):
            buffer.put(oracle.make_rows(1, k, LARGEST))
            k += LARGEST
        release.join()
        buffer.drain()
        if buffer.stats()["skipped_rows"]:
            break
    third.close()
    other.put(oracle.make_rows(2, 0, 3))
    other.drain()
    other.close()  # its slot is now to be swept
    buffer._handle.sweep()
    buffer.empty()
    Buffer.attach(name).extend(oracle.make_rows(3, 0, 1))


def successor(name: str, acks_path: str) -> None:
    """Another process goes on: reads, puts, drains; nothing may hang or be wrong."""
    acks = oracle.Acks(acks_path).counts
    buffer = Buffer.attach(name)
    assert len(buffer.extend(oracle.make_rows(100, 0, 5), timeout=20)) == 5
    acks[100] = 5
    oracle.check_rows(buffer.draw(50)[0])
    buffer._handle.sweep()
    buffer.close()


def run(name: str, how: str, hit: int, directory: str, *, kill_successor: bool = False) -> bool:
    """True if the step fired. Raises AssertionError if anything is wrong afterwards."""
    where = f"{name}={how}@{hit}"
    special = name.startswith(("skip_", "clear_", "sweep_"))
    path = tempfile.mktemp(dir=directory)
    acks = oracle.Acks(path)
    shm = f"fp.{os.getpid()}.{name}.{how}.{hit}"
    built = None if name.startswith("build_") else oracle.SCHEMA
    full = "drop_oldest" if special else "block"
    creator = Buffer.create(
        shm, 64 if special else 10_000, schema=built, ring_bytes=4096, drain="caller", full=full, max_collectors=8
    )
    try:
        pid = workers.fork(actor, shm, path, where, 0)
        status = wait(pid, stopped=how == "stop")
        if status == 0:
            return False
        if how == "kill":
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{where}: wait status {status}"
        else:
            reads_go_on(creator, where)
            os.kill(pid, signal.SIGCONT)
            assert os.waitpid(pid, 0)[1] == 0, where
        if kill_successor:  # and the one that comes to finish its work, at the same step and at the commit
            for again in (name, "txn_committed"):
                workers_status = wait(
                    workers.fork(
                        actor,
                        shm,
                        path,
                        f"{again}=kill@1",
                        int(acks.counts[1]) if special else recover_k(creator, acks),
                    )
                )
                assert workers_status in (0, signal.SIGKILL), f"{where}: {workers_status}"
        assert wait(workers.fork(successor, shm, path)) == 0, where
        oracle.settle(creator)
        if special:
            lo, hi = creator.window
            oracle.check_rows(creator.gather(range(lo, hi)))
            assert creator.stats()["malformed_records"] == 0
        else:
            oracle.check(creator, acks.counts, LARGEST, whole=True)
        for c in creator.collectors():
            assert c["state"] != "dead" or c["ring_used"] == 0, (where, c)
        return True
    finally:
        creator.close()
        destroy(shm, force=True)
        os.unlink(path)


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


def reads_go_on(creator: Buffer, where: str) -> None:
    """Somebody is stopped at this step: what is stored can still be read, by one who never waits for him."""
    lo, hi = creator.window
    if hi > lo:
        rows, valid = creator.try_gather(range(lo, hi))
        oracle.check_rows({k: v[valid] for k, v in rows.items()})
        creator.draw(8)
    creator.stats(), creator.collectors(), creator.members()


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
            fired = {hit: run(name, "kill", hit, directory) for hit in HITS}
            assert fired[1], f"{name} never fired"
            run(name, "kill", 1, directory, kill_successor=not name.startswith(("skip_", "clear_", "sweep_")))
            assert run(name, "stop", 1, directory), f"{name} never fired"
            print(name, fired, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(native.FAILPOINTS))
