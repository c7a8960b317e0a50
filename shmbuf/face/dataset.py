"""A replay buffer as a data set of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from shmbuf.face.reading import Reading


class ReplayDataset(IterableDataset):
    """Batches of a replay buffer. Made by ``rb.as_dataset()``.

    Args:
        num_batches: in all, over all workers; None: as many as iterating over the replay buffer gives each of them.

    ``DataLoader(data := rb.as_dataset(1000), collate_fn=data.collate, num_workers=2)``: a worker attaches to the buffer by its name
    and draws with the seed that the loader gives it, in all its epochs. A `SamplerWithoutReplacement` that is ``shared`` gives each row of an epoch
    to one worker.
    """

    def __init__(self, buffer: Reading, num_batches: int | None = None):
        if num_batches is not None and (isinstance(num_batches, bool) or num_batches < 0):
            raise ValueError(f"num_batches={num_batches!r}: a number ≥ 0, or None")
        if buffer.batch_size is None:
            raise RuntimeError("batch_size not specified: a data set of batches needs the replay buffer's batch_size")
        self._buffer, self.num_batches = buffer, num_batches
        self._seeded: int | None = None  # in a worker: with which seed

    @staticmethod
    def collate(batches: Any) -> Any:
        """The batches as they are: torch's own way takes a TensorDict for a dict. Of a loader's ``batch_size`` above 1: as one."""
        if not isinstance(batches, list):
            return batches
        return batches[0] if len(batches) == 1 else torch.cat(batches)

    def __iter__(self) -> Iterator[Any]:
        worker, n = get_worker_info(), self.num_batches
        if worker is not None:
            if self._seeded != worker.seed:  # a persistent worker begins every epoch with the same one
                self._buffer.buffer.seed(worker.seed)
                self._seeded = worker.seed
            if n is not None:
                n = n // worker.num_workers + (worker.id < n % worker.num_workers)
        if n is None:
            yield from self._buffer
            return
        for _ in range(n):
            yield self._buffer.sample()
