"""Uniform sampling in one process: all contenders take turns, so that noise hits all alike."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from . import samplers
from .isolate import Emitter
from .rows import ROWS
from .settings import Settings


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    row = ROWS[spec["row"]]
    capacity, batch = settings.capacity(row), settings.batch_size
    prefix = f"sample/{row.name}"
    with ExitStack() as stack:
        entrants: dict[str, samplers.Contender] = {}
        for name in spec["contenders"]:
            emit.at(name)
            try:
                check_memory(capacity * row.nbytes)
                built = stack.enter_context(samplers.build(name, row, capacity, batch, spec["scratch"]))
                for contender in built.values():
                    time_calls(contender, 3)
                entrants |= built
            except Exception as error:
                emit.error(f"{prefix}/{name}", f"{type(error).__name__}: {error}")
        for name, seconds in take_turns(entrants, settings, emit).items():
            emit.values(f"{prefix}/{name}", seconds)


def take_turns(entrants: dict, settings: Settings, emit: Emitter) -> dict[str, list[float]]:
    """Seconds per call of each turn, per contender."""
    calls = {}
    for name, contender in entrants.items():
        calls[name] = max(1, min(100, int(settings.turn_seconds / time_calls(contender, 5))))
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    order = list(entrants)
    for _ in range(settings.turns):
        random.shuffle(order)
        for name in order:
            emit.at(name)
            # The ones before it took the caches: the first calls of a turn do not count.
            time_calls(entrants[name], max(1, calls[name] // 10))
            seconds[name].append(time_calls(entrants[name], calls[name]))
    return seconds


def time_calls(contender: samplers.Contender, calls: int) -> float:
    total, clock = 0.0, time.perf_counter
    for _ in range(calls):
        contender.prepare()
        start = clock()
        contender.sample()
        total += clock() - start
    return total / calls


def check_memory(needed: int) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    if free < needed + (1 << 30):
        raise MemoryError(f"{free >> 20} MiB available, {needed >> 20} MiB and 1 GiB more needed")
