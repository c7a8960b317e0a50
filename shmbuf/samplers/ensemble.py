"""Several buffers as one: which of them each part of a batch comes from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from shmbuf.samplers.base import Sampler
from shmbuf.samplers.epochs import _EpochSampler
from shmbuf.samplers.sequences import SampleUnit
from shmbuf.ticket import left_of

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage


class StorageEnsemble:
    """Storages side by side, in the order of their samplers. ``len``: rows of all of them; ``[i]``: the i-th."""

    def __init__(self, *storages: ShmStorage):
        if not storages:
            raise ValueError("an ensemble of no storages")
        self._storages = storages

    def __len__(self) -> int:
        return sum(map(len, self._storages))

    def __getitem__(self, i: int) -> ShmStorage:
        return self._storages[i]

    def __repr__(self) -> str:
        return f"StorageEnsemble({', '.join(map(repr, self._storages))})"


def _check_lengths(member: int, sampler: Sampler) -> None:
    """Parts are stacked, so each has to be as long as asked for. Raises ValueError."""
    if not getattr(sampler, "strict_length", True) and not getattr(sampler, "pad_output", False):
        raise ValueError(
            f"member {member} draws by {type(sampler).__name__}(strict_length=False), whose batches are shorter than asked for: "
            "SliceSampler(strict_length=False, pad_output=True) fills them up, strict_length=True draws whole slices only"
        )
    if getattr(sampler, "num_slices", None) is not None and not getattr(sampler, "drop_last", True):
        raise ValueError(
            f"member {member} draws by {type(sampler).__name__}(num_slices={sampler.num_slices}), whose last batch of a pass has "  # type: ignore[attr-defined]
            "fewer and cannot be filled up: give it slice_len= instead, or drop_last=True"
        )


def _put_back(sampler: Sampler, storage: ShmStorage, td: TensorDictBase) -> None:
    """Rows, or windows about them, that were drawn and cannot be given: where nobody else will ever get them, to the next batch."""
    reader = sampler._readers.get(storage.buffer) if isinstance(sampler, _EpochSampler) else None
    if reader is not None:
        ids = td.get("anchor_row_id", None)
        reader.put_back((td.get("row_id") if ids is None else ids[td.get("step_in_sequence") == 0]).numpy())


class SamplerEnsemble:
    """Draws each of ``num_buffer_sampled`` equal parts of a batch from one member, by that member's own sampler.

    Args:
        samplers: of the members, in order.
        p: weights of the members, ≥ 0, for drawing them independently with replacement; ``"sampleable"``: by how many rows each
            stores now; None: all the same.
        sample_from_all: one part of each member instead.
        num_buffer_sampled: how many parts; default: as many as there are members.

    Raises:
        ValueError, RuntimeError: weights that are none; both ways asked for; a sampler whose batches cannot be filled up.
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | torch.Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ):
        if not samplers:
            raise ValueError("an ensemble of no samplers")
        for sampler in samplers:
            if not isinstance(sampler, Sampler):
                raise TypeError(f"an ensemble is made of samplers, not {type(sampler).__name__}")
        for i, sampler in enumerate(samplers):
            _check_lengths(i, sampler)
        if sample_from_all and p is not None:
            raise RuntimeError("Cannot pass both `p` argument and `sample_from_all=True`.")
        self._samplers, self.sample_from_all = samplers, bool(sample_from_all)
        self._units: tuple[SampleUnit | None, ...] = (None,) * len(samplers)
        self.p = p
        self.num_buffer_sampled = num_buffer_sampled

    def _use(self, samplers: tuple[Sampler, ...], units: tuple[SampleUnit | None, ...]) -> None:
        """What the members have now, if that is something else."""
        if any(a is not b for a, b in zip(samplers, self._samplers, strict=True)):
            for i, sampler in enumerate(samplers):
                _check_lengths(i, sampler)
            self._samplers = samplers
        self._units = units

    @property
    def p(self) -> torch.Tensor | str | None:
        return self._p

    @p.setter
    def p(self, value: Sequence[float] | torch.Tensor | str | None) -> None:
        if value is None or isinstance(value, str):
            if value not in (None, "sampleable"):
                raise ValueError(f'p={value!r}: one weight for each member, "sampleable" or None')
            self._p: torch.Tensor | str | None = value
            return
        p = torch.as_tensor(value, dtype=torch.float64)
        if p.shape != (len(self._samplers),):
            raise ValueError(
                f"p of shape {list(p.shape)}: one weight for each of {len(self._samplers)} members is needed"
            )
        if not (p.isfinite().all() and (p >= 0).all() and p.sum() > 0):
            raise ValueError(f"p={p.tolist()}: finite weights ≥ 0, not all 0")
        self._p = p / p.sum()

    @property
    def num_buffer_sampled(self) -> int:
        return self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        parts = len(self._samplers) if value is None or self.sample_from_all else value
        if isinstance(parts, bool) or not hasattr(parts, "__index__") or int(parts) < 1:
            raise ValueError(f"num_buffer_sampled={value!r}: a whole number ≥ 1")
        self._parts = int(parts)

    def choose(self, storage: StorageEnsemble, generator: torch.Generator | None = None) -> torch.Tensor:
        """LongTensor[num_buffer_sampled]: the member of each part."""
        members = len(self._samplers)
        if self.sample_from_all:
            return torch.arange(members)
        if self._p is None:
            return torch.randint(members, (self._parts,), generator=generator)
        p = self._p
        if isinstance(p, str):
            p = torch.tensor([float(len(s)) for s in storage._storages])
            if not p.any():
                raise RuntimeError("None of the replay-buffer ensemble members can be sampled.")
        return torch.multinomial(p, self._parts, True, generator=generator)

    def sample(
        self,
        storage: StorageEnsemble,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        **how: Any,
    ) -> tuple[list[TensorDictBase], torch.Tensor]:
        """Parts, each [batch_size / num_buffer_sampled], and the member of each, LongTensor[num_buffer_sampled].

        What was drawn before a member raises is in the next batch of its reader, if it may be drawn but once.

        Raises:
            ValueError: batch_size is not divisible. NotEnoughRows, Lapped: of a member.
        """
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"SamplerEnsemble draws from a StorageEnsemble, not {type(storage).__name__}")
        if batch_size % self._parts:
            raise ValueError(
                f"The batch size must be divisible by num_buffer_sampled: {batch_size:,} rows, {self._parts} parts"
            )
        if len(storage._storages) != len(self._samplers):
            raise ValueError(f"{len(self._samplers)} samplers for {len(storage._storages)} storages")
        each, ids, since = batch_size // self._parts, self.choose(storage, generator), time.monotonic()
        parts: list[Any] = [None] * self._parts
        with ExitStack() as undo:
            for member in ids.unique(sorted=True).tolist():
                places = (ids == member).nonzero().flatten().tolist()
                left = left_of(timeout, since) if member else timeout
                rows = self._of(member, storage[member], each, len(places), generator, left, pin, how, undo)
                for place, part in zip(places, rows, strict=True):
                    parts[place] = part
            undo.pop_all()
        return parts, ids

    def _of(
        self,
        member: int,
        storage: ShmStorage,
        each: int,
        parts: int,
        generator: torch.Generator | None,
        timeout: float | None,
        pin: bool,
        how: dict[str, Any],
        undo: ExitStack,
    ) -> list[TensorDictBase]:
        """That many parts of one member."""
        buffer, since = storage.buffer, time.monotonic()
        if generator is not None:
            seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            buffer.seed(int(seed))
        sampler, unit = self._samplers[member], self._units[member]
        if getattr(sampler, "num_slices", None) is not None and parts > 1:  # the batch says how long a slice is
            first = self._filled(sampler, unit, storage, each, timeout, pin, how, undo)
            more = [
                self._filled(sampler, unit, storage, each, left_of(timeout, since), pin, how, undo)
                for _ in range(parts - 1)
            ]
            return [first, *more]
        td = self._filled(sampler, unit, storage, each * parts, timeout, pin, how, undo)
        if not each:
            return [td] * parts
        rows = each * (1 if unit is None else unit.rows_per_anchor)
        split: list[Any] = list(td.split(rows))
        return split if unit is None or parts == 1 else [unit.numbered(part) for part in split]

    @staticmethod
    def _filled(
        sampler: Sampler,
        unit: SampleUnit | None,
        storage: ShmStorage,
        n: int,
        timeout: float | None,
        pin: bool,
        how: dict[str, Any],
        undo: ExitStack,
    ) -> TensorDictBase:
        """n rows, or anchors; a sampler that gives less at the end of its epoch is asked again."""
        drawn: list[Any] = []
        missing, per = n, 1 if unit is None else unit.rows_per_anchor
        with storage.buffer.sampling(n, timeout) as left:
            since = time.monotonic()
            while missing or not drawn:
                time_left = left_of(left, since) if drawn else left
                if unit is None:
                    drawn.append(sampler.sample(storage, missing, timeout=time_left, pin=pin, **how))
                else:
                    drawn.append(unit.sample(sampler, storage, missing, timeout=time_left, pin=pin, **how))
                undo.callback(_put_back, sampler, storage, drawn[-1])
                got = drawn[-1].batch_size.numel() // per
                if not (got == missing or 0 < got < missing):
                    raise ValueError(f"{sampler} gave {got:,} for a batch of {missing:,}")
                missing -= got
        undo.callback(storage.buffer.refund_samples, n)
        if len(drawn) == 1:
            return drawn[0]
        td: Any = torch.cat(drawn)
        return td if unit is None else unit.numbered(td)

    def __len__(self) -> int:
        return len(self._samplers)

    def __getitem__(self, i: int) -> Sampler:
        return self._samplers[i]

    def __repr__(self) -> str:
        return f"SamplerEnsemble({', '.join(map(repr, self._samplers))})"
