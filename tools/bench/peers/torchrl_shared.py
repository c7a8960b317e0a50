"""TorchRL's replay buffer with `shared=True`, handed to spawned processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from ..rows import Row


class TensorHost:
    copies = 1

    def __init__(self, row: Row, capacity: int, scratch: str):
        torch.set_num_threads(1)
        self.handle = TensorDictReplayBuffer(storage=self._storage(capacity, scratch), batch_size=256, shared=True)
        for chunk in row.chunks(capacity):
            self.handle.extend(row.tensordict(chunk))

    def _storage(self, capacity: int, scratch: str):
        return LazyTensorStorage(capacity)

    def visible(self) -> int:
        return self.handle.write_count

    def sampler(self, batch_size: int) -> Callable[[], object]:
        return lambda: self.handle.sample(batch_size)

    def close(self) -> None:
        pass


class MemmapHost(TensorHost):
    def _storage(self, capacity: int, scratch: str):
        return LazyMemmapStorage(capacity, scratch_dir=f"{scratch}/memmap")


class Producer:
    def __init__(self, handle: TensorDictReplayBuffer, row: Row):
        torch.set_num_threads(1)
        self._row, self._buffer = row, handle

    def bind(self, batch: int) -> Callable[[], object]:
        data = self._row.tensordict(self._row.arrays(batch))
        return lambda: self._buffer.extend(data)

    def finish(self) -> None:
        pass  # extend returns when the rows are in
