"""Where shared buffers have been known to fall off a cliff: many keys, many readers, millions of priority updates."""

from __future__ import annotations

import multiprocessing as mp
import time
from pathlib import Path

import numpy as np

from .isolate import Emitter
from .plan import READERS
from .settings import Settings

KEYS, ROW_BYTES, BATCH = 500, 4096, 256
UPDATES, PRIORITISED_ROWS = 10_000_000, 1_000_000


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    name = Path(spec["scratch"]).name
    {"keys": _many_keys, "readers": _many_readers, "pauses": _pauses}[spec["row"]](name, settings, emit)


def _timed(call, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _many_keys(name: str, settings: Settings, emit: Emitter) -> None:
    from shmbuf import Buffer

    for keys in (1, KEYS):
        schema = {f"k{i}": "float32" for i in range(keys)}
        row = {k: np.zeros(1, "f4") for k in schema}
        with Buffer.create(f"{name}-{keys}", 10_000, schema=schema) as buf:
            buf.extend({k: np.zeros(1000, "f4") for k in schema})

            def attach(name=f"{name}-{keys}") -> None:
                Buffer.attach(name).close()

            emit.values(f"cliffs/keys/{keys}/attach", _timed(attach, 20))
            emit.values(f"cliffs/keys/{keys}/put", _timed(lambda: buf.put(row), 500))  # noqa: B023
            emit.values(f"cliffs/keys/{keys}/sample", _timed(lambda: buf.draw(BATCH), 100))
            buf.destroy(force=True)


def _read(name: str, seconds: float, began, ready, out) -> None:
    from shmbuf import Buffer

    buf, n = Buffer.attach(name), 0
    buf.draw(BATCH)
    ready.release()
    began.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        buf.draw(BATCH)
        n += 1
    out.put(n / seconds)
    buf.close()


def _many_readers(name: str, settings: Settings, emit: Emitter) -> None:
    from shmbuf import Buffer

    context = mp.get_context("spawn")
    with Buffer.create(name, 50_000, schema={"x": ("uint8", (ROW_BYTES,))}) as buf:
        for _ in range(50):
            buf.extend({"x": np.ones((1000, ROW_BYTES), "u1")})
        for _ in range(settings.rounds):
            for n in READERS:
                began, ready, out = context.Event(), context.Semaphore(0), context.Queue()
                readers = [
                    context.Process(target=_read, args=(name, settings.round_seconds, began, ready, out))
                    for _ in range(n)
                ]
                for p in readers:
                    p.start()
                for _ in readers:
                    ready.acquire()
                began.set()
                emit.values(f"cliffs/readers/{n}", [sum(out.get(timeout=60) for _ in readers)])
                for p in readers:
                    p.join()
        buf.destroy(force=True)


def _pauses(name: str, settings: Settings, emit: Emitter) -> None:
    """The longest call among ten million updates of priorities from 1e-6 to 1e6, with a sample after each."""
    from shmbuf import Buffer

    rows, rng = int(PRIORITISED_ROWS * settings.fill), np.random.default_rng(1)
    batches = int(UPDATES * settings.fill) // BATCH
    with Buffer.create(name, rows, schema={"x": "float32"}) as buf:
        buf.keep_priorities(0.6, 1e-8)
        for first in range(0, rows, 100_000):
            buf.extend({"x": np.zeros(min(100_000, rows - first), "f4")})
        ids = rng.integers(0, rows, (64, BATCH))
        p = 10.0 ** rng.uniform(-6, 6, (64, BATCH))
        update, sample = np.empty(batches), np.empty(batches)
        for j in range(batches):
            start = time.perf_counter()
            buf.set_priorities(ids[j % 64], p[(j * 7) % 64])
            middle = time.perf_counter()
            buf.draw_by_priority(BATCH)
            update[j], sample[j] = middle - start, time.perf_counter() - middle
        for what, taken in (("update", update), ("sample", sample)):
            emit.values(f"cliffs/pauses/{what} longest", [float(taken.max())])
            tenth = max(1, batches // 10)
            emit.values(f"cliffs/pauses/{what} growth", [float(np.median(taken[-tenth:]) / np.median(taken[:tenth]))])
        buf.destroy(force=True)
