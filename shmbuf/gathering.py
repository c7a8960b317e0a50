"""A batch of rows that a sampler chose by id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict

from shmbuf.tensors import make_tensordict

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage


class Gathering:
    """A batch that is filled by id, in as many goes as it takes."""

    def __init__(self, storage: ShmStorage, n: int, pin: bool):
        storage.schema()
        self._storage, self.n = storage, n
        self._leaves = storage._fresh(n, pin)

    def fetch(self, ids: np.ndarray, done: np.ndarray) -> int:
        """Copy the rows of int64[n] ids whose uint8[n] done is 0, and set it where the row was there; returns how many are."""
        return self._storage.fetch(self._leaves[:-2], ids, done)

    def tensordict(self, ids: np.ndarray) -> TensorDict:
        self._storage.buffer.count_drawn(ids)
        row_id, index = self._leaves[-2:]
        row_id.copy_(torch.from_numpy(ids))
        torch.remainder(row_id, self._storage.buffer.capacity, out=index)
        return make_tensordict(self._storage._sample_tree, self._leaves, torch.Size((self.n,)))
