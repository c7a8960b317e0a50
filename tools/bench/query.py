"""Trajectories by predicate, out of a buffer of trajectories of 1,000 rows: ours against TorchRL's.

Of `length` nothing has to be read but where trajectories lie; of `none` one key of all rows; of `half` that, and whole rows of every
second trajectory, which are copies with us and views of the storage with TorchRL; of `all` every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from . import samplers
from .isolate import Emitter
from .peers import OURS
from .sampling import check_memory, take_turns, time_calls
from .settings import Settings

EPISODE = 1000
ROW = 17 * 4 + 8 + 4 + 1
QUERIES: dict[str, Callable[[Any], Any]] = {
    "length": lambda traj: traj.length > EPISODE,
    "none": lambda traj: traj.reward.sum() > EPISODE,
    "half": lambda traj: traj.reward.sum() > EPISODE / 2,
    "all": lambda traj: None,
}


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    """Emits `query/<rows>/<query>/<contender>`, in seconds."""
    torch.set_num_threads(1)
    size = int(spec["row"])
    rows = max(4 * EPISODE, int(size * settings.fill) // EPISODE * EPISODE)
    with ExitStack() as stack:
        entrants: dict[str, samplers.Contender] = {}
        for name in spec["contenders"]:
            emit.at(name)
            try:
                check_memory(3 * rows * ROW)
                for query, call in stack.enter_context(_build(name, rows, spec["scratch"])).items():
                    contender = samplers.Contender(call)
                    time_calls(contender, 2)
                    entrants[f"{query}/{name}"] = contender
            except Exception as error:
                emit.error(f"query/{size}/{name}", f"{type(error).__name__}: {error}")
        for name, seconds in take_turns(entrants, settings, emit).items():
            emit.values(f"query/{size}/{name}", seconds)


def _episodes(rows: int) -> Iterator[TensorDict]:
    chunk = 100 * EPISODE
    rng = torch.Generator().manual_seed(1)
    for first in range(0, rows, chunk):
        t = torch.arange(first, min(rows, first + chunk))
        reward = torch.rand(len(t), 1, generator=rng)
        done = (t % EPISODE == EPISODE - 1).unsqueeze(-1)
        obs = torch.rand(len(t), 17, generator=rng)
        yield TensorDict({"obs": obs, "episode": t // EPISODE, "next": {"reward": reward, "done": done}}, [len(t)])


@contextmanager
def _build(name: str, rows: int, scratch: str) -> Iterator[dict[str, Callable[[], object]]]:
    """Each query as a call without arguments."""
    if name == OURS:
        import shmbuf
        from shmbuf.query import query_buffer

        shm = Path(scratch).name + "q"
        buffer = shmbuf.TensorDictReplayBuffer(
            storage=shmbuf.ShmStorage(rows, name=shm, traj_key="episode"), batch_size=1
        )
        try:
            for td in _episodes(rows):
                buffer.extend(td)
            yield {q: partial(query_buffer, buffer.storage, make(shmbuf.traj)) for q, make in QUERIES.items()}
        finally:
            buffer.close()
            shmbuf.destroy(shm)
    else:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, traj

        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=1)
        for td in _episodes(rows):
            buffer.extend(td)
        yield {q: partial(buffer.query, make(traj)) for q, make in QUERIES.items()}
