"""Contenders of uniform sampling: each full, each giving fresh outputs unless it says `out=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from .peers import OURS
from .rows import Row

BARE = "index_select"
BARE_OUT = "index_select out="
OURS_OUT = "shmbuf out="

Sample = Callable[[], object]


class Contender:
    """`prepare` runs before each call and is not timed."""

    def __init__(self, sample: Sample, prepare: Callable[[], None] = lambda: None):
        self.sample, self.prepare = sample, prepare


def bare(row: Row, capacity: int, batch: int) -> dict[str, Contender]:
    """The limit: `torch.index_select` over private columns, its indices drawn beforehand."""
    columns = [torch.from_numpy(array) for array in filled(row, capacity).values()]
    outs = [torch.empty((batch, *c.shape[1:]), dtype=c.dtype) for c in columns]
    index = torch.zeros(batch, dtype=torch.int64)

    def fresh() -> list[torch.Tensor]:
        return [torch.index_select(column, 0, index) for column in columns]

    def in_place() -> None:
        for column, out in zip(columns, outs, strict=True):
            torch.index_select(column, 0, index, out=out)

    def prepare() -> None:
        torch.randint(capacity, (batch,), out=index)

    return {BARE: Contender(fresh, prepare), BARE_OUT: Contender(in_place, prepare)}


def torchrl_tensor(row: Row, capacity: int, batch: int, scratch: str) -> Contender:
    from torchrl.data import LazyTensorStorage

    return _torchrl(LazyTensorStorage(capacity), row, capacity, batch)


def torchrl_memmap(row: Row, capacity: int, batch: int, scratch: str) -> Contender:
    from torchrl.data import LazyMemmapStorage

    storage = LazyMemmapStorage(capacity, scratch_dir=f"{scratch}/memmap")
    return _torchrl(storage, row, capacity, batch)


def _torchrl(storage, row: Row, capacity: int, batch: int) -> Contender:
    from torchrl.data import TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch)
    for chunk in row.chunks(capacity):
        buffer.extend(row.tensordict(chunk))
    return Contender(buffer.sample)


def cpprb(row: Row, capacity: int, batch: int, scratch: str) -> Contender:
    from cpprb import ReplayBuffer

    from .peers.cpprb_mp import env_dict

    buffer = ReplayBuffer(capacity, env_dict(row))
    for chunk in row.chunks(capacity):
        buffer.add(**chunk)
    return Contender(lambda: buffer.sample(batch))


def tianshou(row: Row, capacity: int, batch: int, scratch: str) -> Contender:
    from tianshou.data import ReplayBuffer

    full = filled(row, capacity)
    terminated = full["next_terminated"][:, 0]
    buffer = ReplayBuffer.from_data(
        obs=full["obs"],
        act=full["action"],
        rew=full["next_reward"][:, 0],
        terminated=terminated,
        truncated=np.zeros_like(terminated),
        done=full["next_done"][:, 0],
        obs_next=full["next_obs"],
    )
    return Contender(lambda: buffer.sample(batch))


def stable_baselines3(row: Row, capacity: int, batch: int, scratch: str) -> Contender:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    def space(name: str) -> spaces.Space:
        column = next(c for c in row.columns if c.flat == name)
        if column.dtype == "int64":
            return spaces.Discrete(6)
        low, high = (0, 255) if column.dtype == "uint8" else (-np.inf, np.inf)
        return spaces.Box(low, high, column.shape, np.dtype(column.dtype))

    buffer = ReplayBuffer(capacity, space("obs"), space("action"), device="cpu")
    at = 0
    # Straight into its arrays: a million calls of `add` would take minutes.
    for chunk in row.chunks(capacity):
        rows = slice(at, at + len(chunk["obs"]))
        buffer.observations[rows, 0] = chunk["obs"]
        buffer.next_observations[rows, 0] = chunk["next_obs"]
        buffer.actions[rows, 0] = chunk["action"].reshape(len(chunk["obs"]), -1)
        buffer.rewards[rows] = chunk["next_reward"]
        buffer.dones[rows] = chunk["next_done"]
        at = rows.stop
    buffer.full = True
    return Contender(lambda: buffer.sample(batch))


PEERS = {
    "torchrl": torchrl_tensor,
    "torchrl memmap": torchrl_memmap,
    "cpprb": cpprb,
    "tianshou": tianshou,
    "sb3": stable_baselines3,
}
NAMES = (OURS, BARE, *PEERS)


@contextmanager
def ours(row: Row, capacity: int, batch: int, scratch: str) -> Iterator[dict[str, Contender]]:
    import shmbuf
    from shmbuf import RandomSampler, ShmStorage, TensorDictReplayBuffer

    name = Path(scratch).name
    example = row.tensordict(row.arrays(1))[0]
    storage = ShmStorage(capacity, name=name, example=example)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=batch)
    try:
        for chunk in row.chunks(capacity):
            buffer.extend(row.tensordict(chunk))
        out = buffer.sample()
        yield {
            OURS: Contender(buffer.sample),
            OURS_OUT: Contender(lambda: buffer.sample(out=out)),
        }
    finally:
        buffer.close()
        shmbuf.destroy(name)


@contextmanager
def build(name: str, row: Row, capacity: int, batch: int, scratch: str) -> Iterator[dict[str, Contender]]:
    """A contender, or two of them over the same rows, until the end of the case."""
    if name == OURS:
        with ours(row, capacity, batch, scratch) as contenders:
            yield contenders
    elif name == BARE:
        yield bare(row, capacity, batch)
    else:
        yield {name: PEERS[name](row, capacity, batch, scratch)}


def filled(row: Row, capacity: int) -> dict[str, np.ndarray]:
    full = {c.flat: np.empty((capacity, *c.shape), c.dtype) for c in row.columns}
    at = 0
    for chunk in row.chunks(capacity):
        n = len(chunk["obs"])
        for name, array in chunk.items():
            full[name][at : at + n] = array
        at += n
    return full
