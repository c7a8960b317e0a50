"""Several buffers as one: which of them each part of a batch comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from shmbuf.samplers.base import Sampler

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


class SamplerEnsemble:
    """Draws each of ``num_buffer_sampled`` equal parts of a batch from one member, by that member's own sampler.

    Args:
        samplers: of the members, in order.
        p: weights of the members, ≥ 0, for drawing them independently with replacement; ``"sampleable"``: by how many rows each
            stores now; None: all the same.
        sample_from_all: one part of each member instead.
        num_buffer_sampled: how many parts; default: as many as there are members.

    Raises:
        ValueError, RuntimeError: weights that are none; both ways asked for.
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
        if sample_from_all and p is not None:
            raise RuntimeError("Cannot pass both `p` argument and `sample_from_all=True`.")
        self._samplers, self.sample_from_all = samplers, bool(sample_from_all)
        self.p = p
        self.num_buffer_sampled = num_buffer_sampled

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
        each, ids = batch_size // self._parts, self.choose(storage, generator)
        parts: list[Any] = [None] * self._parts
        for member in ids.unique(sorted=True).tolist():
            places = (ids == member).nonzero().flatten().tolist()
            rows = self._of(member, storage[member], each, len(places), generator, timeout, pin, how)
            for place, part in zip(places, rows, strict=True):
                parts[place] = part
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
    ) -> list[TensorDictBase]:
        """That many parts of one member; a sampler that gives less at the end of its epoch is asked again."""
        buffer, n = storage.buffer, each * parts
        if generator is not None:
            seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            buffer.seed(int(seed))
        drawn: list[TensorDictBase] = []
        missing = n
        with buffer.sampling(n, timeout):
            while missing or not drawn:
                drawn.append(self._samplers[member].sample(storage, missing, timeout=timeout, pin=pin, **how))
                got = drawn[-1].batch_size.numel()
                if not (got == missing or 0 < got < missing):
                    raise ValueError(f"member {member} gave {got:,} rows for a batch of {missing:,}")
                missing -= got
        td = drawn[0] if len(drawn) == 1 else torch.cat(drawn)  # type: ignore[arg-type]
        return list(td.split(each)) if each else [td] * parts  # type: ignore[arg-type,list-item]

    def __len__(self) -> int:
        return len(self._samplers)

    def __getitem__(self, i: int) -> Sampler:
        return self._samplers[i]

    def __repr__(self) -> str:
        return f"SamplerEnsemble({', '.join(map(repr, self._samplers))})"
