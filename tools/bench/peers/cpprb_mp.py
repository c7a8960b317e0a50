"""cpprb's MPReplayBuffer: shared memory, one lock, one learner."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable

import numpy as np
from cpprb import MPReplayBuffer

from ..rows import Row


def env_dict(row: Row) -> dict:
    return {c.flat: {"shape": c.shape or 1, "dtype": np.dtype(c.dtype)} for c in row.columns}


class Host:
    copies = 1

    def __init__(self, row: Row, capacity: int, scratch: str):
        self.handle = MPReplayBuffer(capacity, env_dict(row), ctx=mp.get_context("spawn"))
        self._capacity = capacity
        for chunk in row.chunks(capacity):
            self.handle.add(**chunk)

    def visible(self) -> None:
        return None  # add returns when the rows are in; there is no counter that never wraps

    def sampler(self, batch_size: int) -> Callable[[], object]:
        return lambda: self.handle.sample(batch_size)

    def close(self) -> None:
        pass


class Producer:
    def __init__(self, handle: MPReplayBuffer, row: Row):
        self._row, self._buffer = row, handle

    def bind(self, batch: int) -> Callable[[], object]:
        data = self._row.arrays(batch)
        return lambda: self._buffer.add(**data)

    def finish(self) -> None:
        pass
