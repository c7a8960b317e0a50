"""`ReplayBufferEnsemble`: a batch out of several replay buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuf.attaching import positive
from shmbuf.replay_buffer import ReplayBuffer
from shmbuf.samplers.ensemble import SamplerEnsemble, StorageEnsemble

__all__ = ["ReplayBufferEnsemble", "SamplerEnsemble", "StorageEnsemble"]


class ReplayBufferEnsemble:
    """Replay buffers, in this process's handles, that are sampled together. Rows are stored through the members: ``ensemble[i]``.

    Args:
        buffers: the members. Each draws by its own sampler, into its own sample unit, under its own limiter; its batch size does
            not count here.
        p, sample_from_all, num_buffer_sampled: which members a batch comes from; see `SamplerEnsemble`.
        batch_size: of `sample`, over all parts; a multiple of num_buffer_sampled.
        generator: see `set_rng`.
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        p: Sequence[float] | torch.Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ):
        for rb in buffers:
            if not isinstance(rb, ReplayBuffer):
                raise TypeError(f"an ensemble is made of replay buffers, not {type(rb).__name__}")
        self._rbs, self._rng, self._batch_size = buffers, generator, positive(batch_size)
        self._storage = StorageEnsemble(*(rb.storage for rb in buffers))
        self._options: dict[str, Any] = {
            "p": p,
            "sample_from_all": sample_from_all,
            "num_buffer_sampled": num_buffer_sampled,
        }
        self._sampler = SamplerEnsemble(*(rb.sampler for rb in buffers), **self._options)
        lengths = {1 if rb._unit is None else rb._unit.rows_per_anchor for rb in buffers}
        if len(lengths) > 1:
            raise ValueError(
                f"the sample units of the members make different numbers of rows for each they draw: "
                f"{', '.join(map(str, sorted(lengths)))}"
            )

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, timeout: float | None = 0.0, **how: Any
    ) -> Any:
        """A batch [num_buffer_sampled, batch_size / num_buffer_sampled] (times the rows of a sample unit), with "index", "row_id" and "buffer_ids", the member.

        Parts of different keys or shapes are stacked lazily. timeout: seconds the members may make it wait, together.

        Args:
            return_info: True: returns (batch, info): "index" is a TensorDict [num_buffer_sampled] of "index" and "buffer_ids".

        Raises:
            ValueError: not divisible. NotEnoughRows: a member that was chosen is empty. RuntimeError: no batch size.
        """
        n = self._batch_size if batch_size is None else positive(batch_size)
        if n is None:
            raise RuntimeError("batch_size not specified. Give it to the constructor or to sample")
        self._sampler._use(tuple(rb.sampler for rb in self._rbs), tuple(rb._unit for rb in self._rbs))
        parts, ids = self._sampler.sample(self._storage, n, generator=self._rng, timeout=timeout, **how)
        td = LazyStackedTensorDict.maybe_dense_stack(parts)
        td.set("buffer_ids", ids[:, None].expand(td.batch_size).clone())
        if not return_info:
            return td
        index = TensorDict({"index": td.get("index"), "buffer_ids": ids}, [len(ids)])
        parts_of = [part for rb in self._rbs for part in (rb.sampler, rb._unit) if part is not None]
        keys = {k for part in parts_of for k in part.info_keys} - {"index"}
        have = td.keys(True)
        return td, {"index": index, "buffer_ids": ids, **{k: td.get(k) for k in keys if k in have}}

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Each row's priority to the member it came from, by "buffer_ids". Raises KeyError, and as the members do."""
        ids = data.get("buffer_ids", None)
        if ids is None:
            raise KeyError(
                f"'buffer_ids' is not in the TensorDict, which has {sorted(map(str, data.keys(True, True)))}"
            )
        for part, member in zip(data.unbind(0), ids[:, 0].tolist(), strict=True):
            self._rbs[member].update_tensordict_priority(part)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Let the generator's numbers decide which members a batch comes from, and what they draw for it."""
        self._rng = generator

    def __iter__(self) -> Iterator[TensorDictBase]:
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs the constructor's batch_size")
        while True:
            yield self.sample()

    def __getitem__(self, i: int) -> ReplayBuffer:
        """The i-th member."""
        return self._rbs[i]

    def __len__(self) -> int:
        """Rows of all members."""
        return len(self._storage)

    @property
    def storage(self) -> StorageEnsemble:
        return self._storage

    @property
    def sampler(self) -> SamplerEnsemble:
        return self._sampler

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def close(self) -> None:
        """Close the members."""
        for rb in self._rbs:
            rb.close()

    def __enter__(self) -> ReplayBufferEnsemble:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        return _unpickle, (self._rbs, {**self._options, "batch_size": self._batch_size})

    def __repr__(self) -> str:
        return f"ReplayBufferEnsemble({', '.join(map(repr, self._rbs))}, batch_size={self._batch_size})"


def _unpickle(buffers: tuple[ReplayBuffer, ...], options: dict[str, Any]) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*buffers, **options)
