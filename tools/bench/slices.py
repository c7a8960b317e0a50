"""Slices of 64 × 32 steps out of buffers of three sizes: ours against TorchRL's, by trajectory and by priority."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from . import samplers
from .isolate import Emitter
from .peers import OURS
from .plan import SLICED
from .sampling import check_memory, take_turns, time_calls
from .settings import Settings

SLICES, LENGTH, EPISODE = 64, 32, 200
ROW = 17 * 4 + 8 + 3  # a small row: what is measured is finding slices, more than copying them


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    size = int(spec["row"])
    rows = max(4 * EPISODE, int(size * settings.fill)) if size > 10_000 else size
    prefix = f"slices/{size}"
    with ExitStack() as stack:
        entrants: dict[str, samplers.Contender] = {}
        for name in spec["contenders"]:
            emit.at(name)
            try:
                check_memory(2 * rows * ROW)
                contender = samplers.Contender(stack.enter_context(_build(name, rows, spec["scratch"])))
                time_calls(contender, 2)
                entrants[name] = contender
            except Exception as error:
                emit.error(f"{prefix}/{name}", f"{type(error).__name__}: {error}")
        for name, seconds in take_turns(entrants, settings, emit).items():
            emit.values(f"{prefix}/{name}", seconds)


def _episodes(rows: int) -> Iterator[TensorDict]:
    """Whole episodes of 200 steps, many in a batch."""
    chunk = 100_000 // EPISODE * EPISODE
    for first in range(0, rows, chunk):
        n = min(chunk, rows - first)
        t = torch.arange(first, first + n)
        done = (t % EPISODE == EPISODE - 1).unsqueeze(-1)
        yield TensorDict({"obs": torch.rand(n, 17), "episode": t // EPISODE, "next": {"done": done}}, [n])


@contextmanager
def _build(name: str, rows: int, scratch: str) -> Iterator:
    prioritised, cached = "prioritised" in name, "cached" in name
    arguments = {"slice_len": LENGTH, "traj_key": "episode"}
    batch = SLICES * LENGTH
    if name.startswith(OURS):
        import shmbuf

        kind = shmbuf.PrioritizedSliceSampler if prioritised else shmbuf.SliceSampler
        first = (rows, 0.6, 0.4) if prioritised else ()
        shm = Path(scratch).name + ("p" if prioritised else "")
        buffer = shmbuf.TensorDictReplayBuffer(
            storage=shmbuf.ShmStorage(rows, name=shm), sampler=kind(*first, **arguments), batch_size=batch
        )
        try:
            for td in _episodes(rows):
                buffer.extend(td)
            yield buffer.sample
        finally:
            buffer.close()
            shmbuf.destroy(shm)
    else:
        from torchrl.data import LazyTensorStorage, PrioritizedSliceSampler, SliceSampler, TensorDictReplayBuffer

        if prioritised:
            sampler = PrioritizedSliceSampler(rows, 0.6, 0.4, **arguments)
        else:
            sampler = SliceSampler(**arguments, cache_values=cached)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=batch)
        for td in _episodes(rows):
            buffer.extend(td)
        if prioritised:
            buffer.update_priority(torch.arange(rows), torch.from_numpy(np.random.default_rng(1).random(rows)).float())
        yield buffer.sample


assert all(n.startswith((OURS, "torchrl")) for n in SLICED)
