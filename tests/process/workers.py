"""What the processes of these tests do. Importable, so that spawn and forkserver find it; no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time

import numpy as np

from shmbuf import Buffer
from shmbuf.errors import StorageLost
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
        os._exit(code)


def kill(pid: int) -> int:
    """SIGKILL and reap; the wait status."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


class ForkedEvent:
    """An Event in a byte of shared memory: unlike multiprocessing's, no lock that a killed child could keep."""

    def __init__(self) -> None:
        import mmap

        self._word = np.frombuffer(mmap.mmap(-1, 8), np.uint64)

    def set(self) -> None:
        self._word[0] = 1

    def is_set(self) -> bool:
        return bool(self._word[0])
