"""A whole run in small, to be put into any environment: a creator, two collectors, a learner with priorities, an inspector.

`python -m tests.process.workload ROLE NAME DIRECTORY [OWNER [UID]]`, without torch. Role "whole" starts all of them in
interpreters of their own, which inherit the environment; the others are its parts, for environments that differ. What goes
wrong is in DIRECTORY/ROLE.txt, as an environment may have no stderr.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shmbuf import Buffer, destroy
from tests import oracle

CAPACITY, ROWS, LARGEST = 3000, 4000, 24
CREATE = {
    "schema": oracle.ENDING,
    "ring_bytes": 1 << 15,
    "max_collectors": 8,
    "trajectories": True,
    "end_keys": "done",
}
DONE, STOP = "done", "stop"  # files in the directory: the collectors have ended; the learner may
WAIT = 90.0


def put_rows(buffer: Buffer, who: int, acks: np.ndarray, rows: int = ROWS) -> None:
    """Records of many sizes in several streams, until `rows` rows are in; counts those that were acknowledged."""
    rng = np.random.default_rng(who)
    k = int(acks[who])
    while k < rows:
        n = min(int(rng.integers(1, LARGEST + 1)), rows - k)
        record = oracle.make_rows(who, k, n, ends=True)
        ticket = buffer.put(record, stream=oracle.stream_of(who, record["k"]), timeout=WAIT)
        k += n
        acks[who] = k
        if rng.random() < 0.02:
            assert len(ticket.wait(WAIT)) == n


def learn(buffer: Buffer, stop: Path) -> int:
    """Batches by priority, priorities by row id, until `stop` exists; how many batches."""
    buffer.keep_priorities(timeout=WAIT)
    rng, batches = np.random.default_rng(1), 0
    while not stop.exists() or not batches:
        rows, ids, weights = buffer.draw_by_priority(64, timeout=WAIT)
        oracle.check_rows(rows)
        assert (weights > 0).all() and weights.max() <= 1
        buffer.set_priorities(ids, rng.random(64))
        batches += 1
    return batches


def look(buffer: Buffer, stop: Path) -> int:
    """Read-only: figures and rows, until `stop` exists."""
    looks = 0
    while not stop.exists() or not looks:
        s = buffer.stats()
        assert s["malformed_records"] == 0 and 0 <= s["size"] <= CAPACITY
        for c in buffer.collectors():
            assert c["state"] in ("alive", "closed", "dead") and 0 <= c["ring_used"] <= c["ring_bytes"]
        assert any(m["alive"] for m in buffer.members())
        if s["size"]:
            rows, _ = buffer.draw(16, timeout=WAIT)
            oracle.check_rows(rows)
        looks += 1
        time.sleep(0.002)
    return looks


def wait_for(there: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.002)


def start(
    role: str, name: str, directory: Path, *arguments: object, inside: Sequence[str] = (), **how
) -> subprocess.Popen:
    """inside: a command that runs the one behind it in its environment."""
    command = [*inside, sys.executable, "-m", "tests.process.workload", role, name, str(directory)]
    return subprocess.Popen([*command, *map(str, arguments)], **how)


def finish(processes: list[subprocess.Popen], directory: Path, seconds: float = WAIT) -> None:
    try:
        codes = [p.wait(seconds) for p in processes]
    finally:
        for p in processes:
            p.kill()
    said = "\n".join(f"{f.name}: {f.read_text()}" for f in directory.glob("*.txt"))
    assert codes == [0] * len(codes), f"{codes}\n{said}"


def create(name: str, directory: Path, **settings) -> None:
    """Until the collectors have ended, and everything they put is judged."""
    acks = oracle.Acks(directory / "acks", 8).counts
    with Buffer.create(name, CAPACITY, **{**CREATE, **settings}) as buffer:
        wait_for((directory / DONE).exists, "the collectors")
        oracle.settle(buffer)
        (directory / STOP).touch()
        buffer._handle.scrub()
        oracle.check(buffer, acks, 0, streams=True)
        assert buffer.write_count == acks.sum() == 2 * ROWS


def run(
    name: str, directory: Path, inside: Callable[[str], Sequence[str]] = lambda role: (), *arguments: object
) -> None:
    """All of them, each inside the environment of its role; arguments: of all but the creator."""

    def go(role: str) -> subprocess.Popen:
        return start(role, name, directory, *(arguments if role != "create" else ()), inside=inside(role))

    others = [go(role) for role in ("create", "learn", "look")]
    try:
        finish([go(f"collect{who}") for who in (0, 1)], directory)
        (directory / DONE).touch()
    finally:
        if not (directory / DONE).exists():
            for p in others:
                p.kill()
        finish(others, directory)
    destroy(name)


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def play(role: str, name: str, at: Path, owner: str, uid: str) -> None:
    if uid:
        become(int(uid))
    if role == "whole":
        return run(name, at)
    if role == "create":
        return create(name, at)
    acks = oracle.Acks(at / "acks", 8).counts if role.startswith("collect") else None
    of = int(owner) if owner else None
    with Buffer.attach(name, owner=of, readonly=role == "look", timeout=WAIT) as buffer:
        if acks is not None:
            put_rows(buffer, int(role.removeprefix("collect")), acks)
        elif role == "learn":
            learn(buffer, at / STOP)
        else:
            look(buffer, at / STOP)


def main(role: str, name: str, directory: str, owner: str = "", uid: str = "") -> int:
    try:
        play(role, name, Path(directory), owner, uid)
    except BaseException:
        (Path(directory) / f"{role}.txt").write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
