"""Sampling while two collectors write at full speed, and what the shared cores explain of it.

The same sampler runs alone, beside two collectors, beside two processes that only burn CPU in Python,
and beside two that copy as many bytes privately as the collectors' rows cost.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import numpy as np

from . import peers
from .ingest import Crew
from .isolate import Emitter
from .plan import ALONE, BURNING, COPYING, WRITING
from .rows import ROWS
from .settings import Settings

COLLECTORS = 2
_LEAD = 0.1
"""Seconds the others are at work before and after the sampler is timed."""


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    row, name, batch = ROWS[spec["row"]], spec["contender"], spec["batch"]
    emit.at(name)
    host = peers.host(name)(row, settings.capacity(row), spec["scratch"])
    crew, burners = Crew(name, host, row, COLLECTORS), Burners(COLLECTORS, batch * row.nbytes)
    sample, seconds = host.sampler(settings.batch_size), settings.round_seconds
    rates: dict[str, list[float]] = {p: [] for p in (ALONE, WRITING, BURNING, COPYING)}
    costs: dict[str, list[float]] = {ALONE: [], WRITING: [], COPYING: []}
    written: list[float] = []

    def measure(phase: str) -> None:
        rate, cost = _sample_for(sample, seconds)
        rates[phase].append(rate)
        if phase in costs:
            costs[phase].append(cost)

    try:
        crew.round(COLLECTORS, batch, settings.warm_seconds)
        _sample_for(sample, settings.warm_seconds)
        for _ in range(settings.beside_rounds):
            measure(ALONE)

            chosen = crew.start(COLLECTORS, batch, seconds + 2 * _LEAD)
            time.sleep(_LEAD)
            measure(WRITING)
            rows, start, end = crew.finish(chosen)
            written.append(rows / (end - start))

            share = written[-1] * row.nbytes * host.copies / COLLECTORS
            for phase, bytes_per_second in ((BURNING, 0.0), (COPYING, share)):
                burners.start(seconds + 2 * _LEAD, bytes_per_second)
                time.sleep(_LEAD)
                measure(phase)
                burners.finish()
    finally:
        crew.close()
        burners.close()
        host.close()

    prefix = f"beside/{row.name}/{batch}"
    for phase, values in rates.items():
        emit.values(f"{prefix}/{phase}/{name}", values)
    for phase, values in costs.items():
        emit.values(f"{prefix}/cpu {phase}/{name}", values)
    emit.values(f"{prefix}/written/{name}", written)


def _sample_for(sample, seconds: float) -> tuple[float, float]:
    """Samples a second, and CPU seconds of this thread per sample."""
    clock, calls = time.perf_counter, 0
    start, cpu = clock(), time.thread_time()
    end = start + seconds
    while clock() < end:
        sample()
        calls += 1
    return calls / (clock() - start), (time.thread_time() - cpu) / calls


class Burners:
    """Processes that use their cores for nothing: in Python alone, or copying at a given rate."""

    def __init__(self, count: int, record: int):
        context = mp.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_burn, args=(theirs, record), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)
        self.finish()  # each says once that it is ready

    def start(self, seconds: float, bytes_per_second: float) -> None:
        for connection in self._connections:
            connection.send((seconds, bytes_per_second))

    def finish(self) -> None:
        for connection in self._connections:
            connection.recv()

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(5)


def _burn(connection: Connection, record: int) -> None:
    source = np.ones(record, np.uint8)
    target = np.ones((max(1, (128 << 20) // record), record), np.uint8)
    connection.send("ready")
    while (order := connection.recv()) is not None:
        seconds, bytes_per_second = order
        clock, at = time.perf_counter, 0
        due = clock()
        end = due + seconds
        period = record / bytes_per_second if bytes_per_second else seconds
        while clock() < end:
            if bytes_per_second:
                np.copyto(target[at], source)
                at = (at + 1) % len(target)
            due += period
            while clock() < min(due, end):
                pass
        connection.send("done")
