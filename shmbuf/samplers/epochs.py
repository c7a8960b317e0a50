"""Drawing without replacement: in epochs, once for all, and the newest first. Thin over `shmbuf.epochs`."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.buffer import Buffer
from shmbuf.epochs import EpochReader, check_options
from shmbuf.errors import NotEnoughRows
from shmbuf.samplers.base import Sampler, wait_for_rows
from shmbuf.samplers.passes import PassSampler

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage


def rows_into(td: TensorDictBase, order: np.ndarray | None, out: TensorDictBase | None) -> TensorDictBase:
    """A batch that may have become shorter than asked for, or that is to be put in order; into the first rows of ``out``."""
    if order is not None:
        td = td[torch.from_numpy(order)]
    if out is None:
        return td
    return (out if td.batch_size == out.batch_size else out[: td.batch_size[0]]).update_(td)


def check_out(storage: ShmStorage, out: TensorDictBase | None, n: int) -> None:
    """Before rows are claimed, which would be lost. Raises SchemaError."""
    if out is not None and not storage._shadowed:
        storage._into(out, n)


class _EpochSampler(PassSampler):
    """A sampler whose place in the rows is an `EpochReader` for each handle."""

    def __init__(self, seed: int | None):
        check_options(seed)
        self.seed = None if seed is None else int(seed)
        self._readers: weakref.WeakKeyDictionary[Buffer, EpochReader] = weakref.WeakKeyDictionary()

    def _new_reader(self, buffer: Buffer) -> EpochReader:
        raise NotImplementedError

    def __reduce__(self) -> tuple:
        return _made, (type(self), self.arguments())

    def prepare(self, storage: ShmStorage) -> None:
        self._readers[storage.buffer] = self._new_reader(storage.buffer)

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        reader = self._readers.get(storage.buffer)
        if reader is None:
            self.prepare(storage)
            reader = self._readers[storage.buffer]
        since = time.monotonic()
        if self._into_next:  # else an emptied buffer ends the iteration, too
            wait_for_rows(storage, timeout)
        check_out(storage, out, batch_size)
        rows = storage.gathering(batch_size, pin=pin)
        try:
            how: dict[str, Any] = {"since": since, "into_next": self._into_next}
            ids, order = reader.draw_into(batch_size, rows.fetch, timeout, **how)
        except NotEnoughRows:
            if reader.ran_out:
                self._came_to_nothing()
            raise
        self._came(reader.ran_out, reader.at_end)
        return rows_into(rows.tensordict(ids), order, out)


def _made(cls: type[Sampler], arguments: dict[str, Any]) -> Sampler:
    return cls(**arguments)


class SamplerWithoutReplacement(_EpochSampler):
    """Every row once per epoch. A row that is stored meanwhile enters the next epoch; one that is overwritten is passed over.

    Args:
        drop_last: an incomplete last batch of an epoch is not drawn. False: it is drawn, and is shorter.
        shuffle: False: oldest first.
        shared: one epoch for all readers of the buffer that say so, whatever process they are in: each row goes to one of them,
            and what a killed reader had taken counts as seen. Their options have to be the same. False: an epoch of one's own.
        seed: of the order, the same for all who share. None: this handle's (``seed=``, ``set_rng``), or the buffer's if shared.
        replacement: False, as `RandomSampler` is told.

    A plain ``sample`` goes on into the next epoch if so much of this one has been overwritten that no batch is left of it;
    iterating over the replay buffer ends there.

    Raises (from ``sample``):
        ValueError: with drop_last, a batch larger than the buffer.
    """

    name = "without_replacement"

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        shared: bool = False,
        seed: int | None = None,
        replacement: bool = False,
    ):
        super().__init__(seed)
        if replacement:
            raise ValueError("replacement=True: this sampler draws without; RandomSampler draws with")
        self.drop_last, self.shuffle, self.shared = bool(drop_last), bool(shuffle), bool(shared)

    def arguments(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "shuffle": self.shuffle, "shared": self.shared, "seed": self.seed}

    def _new_reader(self, buffer: Buffer) -> EpochReader:
        return buffer.epoch(shared=self.shared, drop_last=self.drop_last, shuffle=self.shuffle, seed=self.seed)


class ConsumingSampler(_EpochSampler):
    """Every row at most ``max_sample_count`` times, over all readers of the buffer in all processes, whoever dies.

    Args:
        max_sample_count: 1 to 65,536; ``max_times_sampled``: another word for it (Reverb's).
        shuffle: False: oldest first. seed: of the order; all readers use the same. None: the buffer's.

    A batch takes what is new, and is shorter if there is less and no more comes within ``timeout``. With a count above 1 a row may
    be in a batch twice. What a killed reader had taken counts as sampled. Rows stay stored until they are overwritten.

    Raises (from ``sample``):
        NotEnoughRows: nothing new came within ``timeout``.
    """

    name = "consuming"

    def __init__(
        self,
        max_sample_count: int = 1,
        *,
        max_times_sampled: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ):
        super().__init__(seed)
        if max_times_sampled is not None and max_sample_count not in (1, max_times_sampled):
            raise TypeError("max_sample_count or max_times_sampled, not both")
        times = max_sample_count if max_times_sampled is None else max_times_sampled
        check_options(seed, times)
        self.max_sample_count, self.shuffle = int(times), bool(shuffle)

    @property
    def max_times_sampled(self) -> int:
        return self.max_sample_count

    def arguments(self) -> dict[str, Any]:
        return {"max_sample_count": self.max_sample_count, "shuffle": self.shuffle, "seed": self.seed}

    def _new_reader(self, buffer: Buffer) -> EpochReader:
        return buffer.consume(self.max_sample_count, shuffle=self.shuffle, seed=self.seed)


class NewestSampler(Sampler):
    """The newest rows, newest first.

    Raises (from ``sample``):
        NotEnoughRows: fewer than a batch are stored within ``timeout``. ValueError: a batch larger than the capacity.
    """

    name = "newest"

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        since = time.monotonic()
        wait_for_rows(storage, timeout)
        check_out(storage, out, batch_size)
        rows = storage.gathering(batch_size, pin=pin)
        ids = storage.buffer.newest_into(batch_size, rows.fetch, timeout, since)
        return rows_into(rows.tensordict(ids), None, out)
