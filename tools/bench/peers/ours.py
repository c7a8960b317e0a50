"""shmbuf itself, by TensorDict and by numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import shmbuf

from ..rows import Row


class TensorDictHost:
    copies = 2  # into the collector's ring, and from there into the storage

    def __init__(self, row: Row, capacity: int, scratch: str):
        from shmbuf import RandomSampler, ShmStorage, TensorDictReplayBuffer

        self.handle = Path(scratch).name
        example = row.tensordict(row.arrays(1))[0]
        self._buffer = TensorDictReplayBuffer(
            storage=ShmStorage(capacity, name=self.handle, example=example),
            sampler=RandomSampler(),
        )
        for chunk in row.chunks(capacity):
            self._buffer.extend(row.tensordict(chunk))

    def visible(self) -> int:
        return self._buffer.write_count

    def sampler(self, batch_size: int) -> Callable[[], object]:
        return lambda: self._buffer.sample(batch_size)

    def close(self) -> None:
        self._buffer.close()
        shmbuf.destroy(self.handle)


class TensorDictProducer:
    def __init__(self, handle: str, row: Row):
        import torch

        torch.set_num_threads(1)
        self._row, self._buffer, self._ticket = row, shmbuf.attach(handle), None

    def bind(self, batch: int) -> Callable[[], object]:
        return self._sending(self._row.tensordict(self._row.arrays(batch)))

    def _sending(self, data) -> Callable[[], object]:
        put = self._buffer.put

        def send() -> None:
            self._ticket = put(data)

        return send

    def finish(self) -> None:
        if self._ticket is not None:
            self._ticket.wait(60)


class NumpyProducer(TensorDictProducer):
    """A collector that never imports torch."""

    def __init__(self, handle: str, row: Row):
        self._row, self._buffer, self._ticket = row, shmbuf.Buffer.attach(handle), None

    def bind(self, batch: int) -> Callable[[], object]:
        return self._sending(self._row.nested(self._row.arrays(batch)))
