"""What the processes of these tests do. Importable, so that spawn and forkserver find it; no torch."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shmbuf import Buffer, RateLimiter
from shmbuf._extension import native
from shmbuf.errors import Lapped, NotEnoughRows, StorageLost
from tests import oracle


def collect(name: str, who: int, acks_path: str, largest: int, stop, seed: int, rows: int | None = None) -> None:
    """Put records of random size until `stop` (an Event) is set, or `rows` rows are in."""
    rng = random.Random(seed)
    acks = oracle.Acks(acks_path).counts
    buffer = Buffer.attach(name)
    k, streams = 0, buffer.schema is not None and buffer.marks.keep
    while not stop.is_set() and (rows is None or k < rows):
        n = min(rng.randint(1, largest), rows - k if rows is not None else largest)
        record = oracle.make_rows(who, k, n)
        ticket = buffer.put(record, stream=oracle.stream_of(who, record["k"]) if streams else None)
        assert ticket.rows == n
        k += n
        acks[who] = k
        if rng.random() < 0.05:
            assert len(ticket.wait()) == n
    buffer.close()


def learn(name: str, stop, out) -> None:
    """Sample and judge every row until `stop`; puts how many rows were seen."""
    buffer = Buffer.attach(name)
    seen = 0
    while not stop.is_set() or not seen:
        rows, ids = buffer.draw(64, timeout=30)
        oracle.check_rows(rows)
        assert (ids >= 0).all()
        seen += len(ids)
    out.put(seen)
    buffer.close()


def drain(name: str) -> None:
    from shmbuf import drain as module

    module.run(name, quiet=True)


def run_all(method: str, tasks: list, seconds: float, stop, begun=lambda: True) -> list:
    """Start (target, args) in processes, let them work, stop and join; returns their exit codes.

    The seconds count from when ``begun()`` holds (a minute at most): on a busy machine spawning takes longer than they do.
    """
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=t, args=a) for t, a in tasks]
    for p in processes:
        p.start()
    give_up = time.monotonic() + 60
    while not begun() and time.monotonic() < give_up and not any(p.exitcode for p in processes):
        time.sleep(0.02)
    deadline = time.monotonic() + seconds
    while (
        time.monotonic() < deadline and any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes)
    ):
        time.sleep(0.02)
    stop.set()
    for p in processes:
        p.join(60)
    codes = [p.exitcode for p in processes]
    for p in processes:
        if p.is_alive():
            p.kill()
    return codes


def fork(target, *args) -> int:
    """A child that runs target and exits 0, or 1 with the traceback; the pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        target(*args)
        code = 0
    except StorageLost:
        code = 2
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill(pid: int) -> int:
    """SIGKILL and reap; the wait status."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def settle(buffer: Buffer, seconds: float = 30) -> None:
    """oracle.settle, with a deadline: until every ring is empty."""
    give_up = time.monotonic() + seconds
    while any(c["ring_used"] for c in buffer.collectors()):
        if not buffer.drain():
            assert time.monotonic() < give_up, f"rows stay in the rings: {buffer.stats()}\n{buffer.collectors()}"
            os.sched_yield()


class ForkedEvent:
    """An Event in a byte of shared memory: unlike multiprocessing's, no lock that a killed child could keep."""

    def __init__(self) -> None:
        self._word = np.frombuffer(mmap.mmap(-1, 8), np.uint64)

    def set(self) -> None:
        self._word[0] = 1

    def is_set(self) -> bool:
        return bool(self._word[0])


# ---- a crew that does everything, for random kills -----------------------------------------------------------------

ALPHA, EPS, MARK = 0.6, 1e-8, 64.0  # MARK: the largest priority of all, so what new rows get once it was given
LARGEST = 100  # rows of a put: more than fit into one record of a ring of 16 KiB
AHEAD = 2048  # rows that a collector makes at once
LIVES = 4  # numbers that one collector may put under, one after another
PATIENCE = 30.0  # seconds: who gets nothing for so long hangs
ROUND = 0.25  # seconds that one wait may take


@dataclass
class Job:
    """What the crew of one buffer shares: through fork, in memory that outlives each of them."""

    name: str
    acks: oracle.Acks
    ends: bool = False  # rows have a stream and an end
    limited: bool = False
    clears: bool = False
    pace: tuple[float, float] = (0, 0)  # seconds between puts, and between draws
    stop: ForkedEvent = field(default_factory=ForkedEvent)
    marked: ForkedEvent = field(default_factory=ForkedEvent)
    claimed: np.ndarray = field(default_factory=lambda: np.frombuffer(mmap.mmap(-1, 1 << 27), np.uint8))  # by id


def limiter() -> RateLimiter:
    return RateLimiter(2.0, min_size=64, error_buffer=4000)


def value_of(who: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The priority of this row, and of few others: one that reached another row would show."""
    return 0.1 + (who * 31 + k * 7) % 797 / 1000


def feed(job: Job, who: int, seed: int) -> None:
    """A collector: puts, waits, helps, comes back under another number, until `stop`."""
    rng = random.Random(seed)
    for me in range(who, who + LIVES):
        buffer, k, made, ahead = Buffer.attach(job.name), 0, 0, {}
        for _ in range(rng.randint(500, 10_000) if me < who + LIVES - 1 else 1 << 60):
            if job.stop.is_set():
                break
            n, p = LARGEST if rng.random() < 0.03 else rng.randint(1, 24), None
            if k + n > made:  # many at once: rows shall come faster than they are moved
                ahead = oracle.make_rows(me, k, AHEAD, ends=job.ends)
                made = k + AHEAD
            at = k - made + AHEAD
            rows = {key: v[at : at + n] for key, v in ahead.items()}
            if job.marked.is_set() and rng.random() < 0.5:
                p = value_of(rows["who"], rows["k"])
            stream = oracle.stream_of(me, rows["k"]) if job.ends else None
            ticket = buffer.put(rows, stream=stream, priorities=p, timeout=PATIENCE)
            assert ticket.rows == n
            k += n
            job.acks.counts[me] = k
            what = rng.random()
            if what < 0.05:
                ids = ticket.wait(PATIENCE)
                assert len(ids) == n and (np.diff(ids) >= 1).all()
            elif what < 0.15:
                buffer.drain()
            if job.pace[0]:
                time.sleep(job.pace[0])
        buffer.close()


def mark(job: Job) -> None:
    """Never killed: makes the buffer keep priorities, and new rows get MARK; then learns."""
    with Buffer.attach(job.name) as buffer:
        buffer.extend(
            oracle.make_rows(0, int(job.acks.counts[0]), 1, ends=job.ends), timeout=PATIENCE
        )  # it is the schema
        job.acks.counts[0] += 1
        buffer.keep_priorities(ALPHA, EPS, timeout=PATIENCE)
        rows = oracle.make_rows(0, int(job.acks.counts[0]), 1, ends=job.ends)
        buffer.extend(rows, priorities=MARK, timeout=PATIENCE)
        job.acks.counts[0] += 1
        job.marked.set()
        study(job, buffer, 0)


def create(job: Job, capacity: int, drain: str, late: bool, seed: int) -> None:
    """The creator (or who comes after him and finds the name there); then learns. drain="thread": has the drain thread."""
    with Buffer.create(
        job.name,
        capacity,
        schema=None if late else oracle.ENDING if job.ends else oracle.SCHEMA,
        ring_bytes=1 << 14,
        max_collectors=12,
        trajectories=job.ends,
        end_keys="done" if job.ends else None,
        drain=drain,
        exists="attach",
    ) as buffer:
        study(job, buffer, seed)


def attend(job: Job, seed: int) -> None:
    with Buffer.attach(job.name) as buffer:
        study(job, buffer, seed)


def study(job: Job, buffer: Buffer, seed: int) -> None:
    """A learner: draws in every way there is, judges every row, sets priorities, helps, until `stop`."""
    rng = random.Random(seed)
    while not (job.marked.is_set() or job.stop.is_set()):
        time.sleep(0.001)
    shared, once = buffer.epoch(shared=True, seed=7), buffer.consume(seed=7)

    def by_priority() -> None:
        rows, ids, weights = buffer.draw_by_priority(32, stratified=rng.random() < 0.5, timeout=ROUND)
        oracle.check_rows(rows)
        assert ((weights > 0) & (weights <= 1)).all()
        buffer.set_priorities(ids, value_of(rows["who"], rows["k"]))

    def slices() -> None:
        check_slices(*buffer.draw_slices(6, 5, strict=False, timeout=ROUND))

    def uniformly() -> None:
        oracle.check_rows(buffer.draw(32, timeout=ROUND)[0])

    def epoch() -> None:
        oracle.check_rows(shared.draw(16, timeout=ROUND)[0])

    def consume() -> None:
        rows, ids = once.draw(16, timeout=ROUND)
        oracle.check_rows(rows)
        ids = ids[ids < len(job.claimed)]
        assert not job.claimed[ids].any(), f"drawn twice: ids {ids[job.claimed[ids] > 0]}"
        job.claimed[ids] = 1

    def change() -> None:
        if job.limited and not job.stop.is_set():
            buffer.set_limiter(limiter(), batch=32)
        elif job.clears:
            buffer.empty(timeout=PATIENCE)

    deeds: list[Callable[[], object]] = [by_priority, uniformly, epoch, consume, buffer.drain]
    weights = [8, 3, 3, 3, 2]
    if job.ends:
        deeds, weights = [*deeds, slices], [*weights, 5]
    got = time.monotonic()
    while not job.stop.is_set():
        if rng.random() < 0.002:
            change()
        deed = rng.choices(deeds, weights)[0]
        try:
            deed()
            got = time.monotonic()
        except (NotEnoughRows, Lapped):
            if time.monotonic() - got > PATIENCE and not job.stop.is_set():
                raise
        if job.pace[1]:
            time.sleep(job.pace[1])


def armed(spec: str, target: Callable, *args) -> None:
    """With this failpoint, if any."""
    assert not spec or native.arm(spec)
    target(*args)


def check_slices(rows: dict, ids: np.ndarray, lens: np.ndarray) -> None:
    """Each is consecutive rows of one stream (oracle.stream_of) without an end before its last row."""
    oracle.check_rows(rows)
    k, who, at = rows["k"], rows["who"], 0
    for n in lens.tolist():
        part, at = slice(at, at + n), at + n
        assert (who[part] == who[part][0]).all() and (np.diff(ids[part]) > 0).all()
        following = np.where(k[part] % 2 == 0, k[part] + 1, k[part] + 5)[:-1]
        assert (k[part][1:] == following).all(), f"rows {k[part]} of writer {who[part][0]} do not follow each other"
        assert not rows["done"][part][:-1].any()
