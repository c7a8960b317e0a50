"""Where shared buffers have been known to fall off a cliff: many keys (B164 of the real cases), many readers (B162), millions of priority
updates (B165), updates (B166) and slices (B160) of many rows."""

from __future__ import annotations

import multiprocessing as mp
import time
from pathlib import Path

import numpy as np

from .isolate import Emitter
from .plan import FILLS, READERS, UPDATED
from .sampling import check_memory
from .settings import Settings

KEYS, ROW_BYTES, BATCH = 500, 4096, 256
UPDATES, PRIORITISED_ROWS = 10_000_000, 1_000_000


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    name = Path(spec["scratch"]).name
    rows = {
        "keys": _many_keys,
        "readers": _many_readers,
        "pauses": _pauses,
        "updates": _updates,
        "slices": _slices,
    }
    rows[spec["row"]](name, settings, emit)


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


def _updates(name: str, settings: Settings, emit: Emitter) -> None:
    """256 priorities at a time, of rows drawn at random: should follow the depth of the tree."""
    from shmbuf import Buffer

    rng = np.random.default_rng(1)
    for rows in UPDATED:
        with Buffer.create(f"{name}-{rows}", rows, schema={"x": "float32"}) as buf:
            buf.keep_priorities(0.6, 1e-8)
            for first in range(0, rows, 10_000):
                buf.extend({"x": np.zeros(min(10_000, rows - first), "f4")})
            ids, p = rng.integers(0, rows, (64, BATCH)), rng.uniform(0.1, 2, (64, BATCH))
            turns = iter(range(10**9))
            emit.values(
                f"cliffs/updates/{rows}",
                _timed(lambda: buf.set_priorities(ids[(j := next(turns)) % 64], p[(j * 7) % 64]), 2000),  # noqa: B023
            )
            buf.destroy(force=True)


def _slices(name: str, settings: Settings, emit: Emitter) -> None:
    """256 slices of 4 out of tiny rows: should follow neither how many are stored nor how much room is free."""
    from shmbuf import Buffer

    schema, chunk = {"x": "float32", "next": {"done": "bool"}}, 100_000
    done = np.arange(chunk) % 200 == 199
    for rows, capacity in FILLS:
        place = f"cliffs/slices/{rows}/{capacity}"
        try:
            check_memory(capacity * 64)
            with Buffer.create(f"{name}-{rows}-{capacity}", capacity, schema=schema, trajectories=True) as buf:
                for _ in range(0, rows, chunk):
                    buf.extend({"x": np.zeros(chunk, "f4"), "next": {"done": done}}, timeout=60)
                emit.values(place, _timed(lambda: buf.draw_slices(BATCH, 4), 500))
                buf.destroy(force=True)
        except Exception as error:
            emit.error(place, f"{type(error).__name__}: {error}")
