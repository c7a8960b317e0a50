"""Rows on their way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from shmbuf.attaching import checked_sampler, positive
from shmbuf.errors import DeviceError, NotEnoughRows, SchemaError
from shmbuf.face.dataset import ReplayDataset
from shmbuf.face.prefetching import Prefetcher
from shmbuf.face.sending import Sender, target
from shmbuf.face.transforming import Transforming
from shmbuf.limiter import figures
from shmbuf.on_device import Sent
from shmbuf.samplers import ConsumingSampler, Sampler


class Reading(Transforming):
    """`sample`, iterating, indexing, `query`."""

    _iterator: Iterator[Any] | None = None
    _sender: Sender | None = None  # where batches are wanted elsewhere than where the rows live

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        device: Any = None,
        **how: Any,
    ) -> Any:
        """A batch, as copies, with "index" (int64[n], the slot; with ndim > 1 [n, ndim]: time, then the lane) and "row_id" (int64[n],
        never repeats). Rows that are no TensorDicts come as they were put; of these ``return_info`` gives the numbers.

        Args:
            batch_size: instead of the constructor's.
            return_info: True: returns (batch, {"index" (with ndim > 1 a tuple of ndim tensors), "row_id", and what the sampler adds}).
                include_info: TorchRL's deprecated alias.
            out: a TensorDict of batch size [n] whose tensors are written; returned. A previous sample will do.
            timeout: seconds to wait while the buffer is empty, or its limiter says so; 0: raise at once; None: for ever.
            device: where the batch is wanted; None: where the rows live. From host memory to ``"cuda"`` rows are drawn into page-locked memory
                and copied on a stream of its own; with ``prefetch`` that is ahead, too, from the second call for that device on.
            how: what the sampler takes for one call, like ``beta=`` of a `PrioritizedSampler`.

        With ``prefetch``, a batch of the constructor's size is one that was drawn up to that many calls ago: its rows, weights and
        beta are of then. A batch that is asked for with ``out``, ``how`` or another size is drawn now.

        Raises:
            NotEnoughRows: "Cannot sample from an empty storage.", or what the limiter waits for. Lapped: see `Buffer.draw`.
            RuntimeError: after `shutdown`, or no batch size. ValueError: a device that is none. DeviceError: it is not here.
        """
        if self._shut:
            raise RuntimeError("A shut down replay buffer cannot be sampled.")
        if device is not None or self._sender is not None:
            self._send_to(device)
        n = positive(batch_size) if batch_size is not None else self._batch_size
        if n is None:
            if out is None:
                raise RuntimeError(
                    "batch_size not specified. You can specify the batch_size when constructing the replay buffer, "
                    "or pass it to the sample method."
                )
            n = out.batch_size[0] if out.batch_dims else 0
        if self._ahead is not None and n == self._batch_size and out is None and not how:
            try:
                td, info = map(self._received, self._ahead.take())
                return (td, info) if return_info or include_info else td
            except (NotEnoughRows, DeviceError):
                # They do not wait, this call may; and what was so then may have passed.
                self._ahead.clear()
        if out is not None and self._storage.presents is not None:
            raise SchemaError("out= takes tensors only: these rows have Python values, or are no TensorDicts")
        if out is not None and self._storage.ndim > 1:
            raise SchemaError(f"out= is for storages of one dimension; this one has ndim={self._storage.ndim}")
        if out is not None and self._sender is not None:
            raise SchemaError("out= says where the batch goes: device= is not for it")
        if out is not None:
            td = self._draw(n, out, timeout, how)
        else:
            with self._storage.aside():
                td = self._draw(n, None, timeout, how)
                (td,) = self._storage.sent(td)
            td = self._received(td)
        if self._touched or self._storage.presents is not None or self._sender is not None:
            td, info = self._finished_here(td)
            td = self._received(td)
            return (td, info) if return_info or include_info else td
        return (td, self._info(td)) if return_info or include_info else td

    def _send_to(self, device: Any) -> None:
        """From now on batches are wanted there; those that were drawn ahead for elsewhere are dropped."""
        to = None if device is None else target(device)
        if to == self._storage.device:
            to = None
        if to != (None if self._sender is None else self._sender.device):
            self._sender = None if to is None else Sender(to)
            self._drop_ahead()

    def _finished_here(self, td: TensorDictBase) -> tuple[Any, dict[Any, Any]]:
        """Transformed, and on its way to where it is wanted."""
        batch, info = self._with_info(td)
        return (batch if self._sender is None else self._sender.send(batch)), info

    def _finished_ahead(self, td: TensorDictBase) -> tuple[Any, Any]:
        """The same, of what was drawn aside: both parts have to be received."""
        with self._storage.aside():
            batch, info = self._finished_here(td)
            if isinstance(batch, Sent):
                return batch, *self._storage.sent(info)  # type: ignore[return-value]
            return self._storage.sent(batch, info)  # type: ignore[return-value]

    @staticmethod
    def _received(batch: Any) -> Any:
        return batch.received() if isinstance(batch, Sent) else batch

    def _draw(self, n: int, out: TensorDictBase | None, timeout: float | None, how: dict[str, Any]) -> TensorDictBase:
        sampler, buffer = self._sampler, self.buffer
        pin = (self._pin or (self._sender is not None and self._sender.pins)) and self._storage._on is None
        if self._decides is not None and any(p is not None and p.trajectory_settings() for p in (sampler, self._unit)):
            self._decides.check_trajectories()
        if self._rng is not None:
            self._reseed(self._rng)
        left = buffer.acquire_samples(n, timeout)
        try:
            with buffer._place.within(left):
                if self._unit is None:
                    td = sampler.sample(self._storage, n, out=out, timeout=left, pin=pin, **how)
                else:
                    td = self._unit.sample(sampler, self._storage, n, out=out, timeout=left, pin=pin, **how)
        except BaseException:
            buffer.refund_samples(n)
            raise
        got = self._counted(td, n)
        if got < n:  # what was left of an epoch
            buffer.refund_samples(n - got)
        if self._writer.tracks_generations:
            td.set("index_generation", td.get("row_id") // self.buffer.capacity)
        td = self._storage.delivered(td) if out is None else td
        return td if self._storage.ndim == 1 else self._storage.located(td)

    def _counted(self, td: TensorDictBase, n: int) -> int:
        """How many of n rows asked for a batch is, to the limiter."""
        if self._unit is None:
            return td.batch_size.numel()
        each = self._unit.rows_per_anchor
        return td.batch_size.numel() // each if each else n

    def _reseed(self, generator: torch.Generator) -> None:
        self.buffer.seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))

    def _info(self, td: TensorDictBase) -> dict[Any, Any]:
        info = {k: td[k] for k in self._info_keys() if k in td.keys(True)}
        if self._storage.ndim > 1:
            info["index"] = info["index"].unbind(-1)
        return info

    def _with_info(self, td: TensorDictBase) -> tuple[Any, dict[Any, Any]]:
        info = self._info(td)
        return self._finished(td), info

    def _set_prefetch(self, prefetch: int | None) -> None:
        depth = positive(prefetch, "prefetch", "a number of batches")
        if not depth:
            return
        if self._batch_size is None:
            raise ValueError(
                "Dynamic batch-size specification is incompatible with multithreaded sampling. "
                "When using prefetch, the batch-size must be specified in advance."
            )
        self._check_ahead(self._sampler)

        def draw() -> TensorDictBase:
            assert self._batch_size is not None
            with self._storage.aside():
                return self._draw(self._batch_size, None, 0.0, {})

        def refund(td: TensorDictBase) -> None:
            assert self._batch_size is not None
            self.buffer.refund_samples(self._counted(td, self._batch_size))

        self._ahead = Prefetcher(depth, draw, self._finished_ahead, lambda: self._sampler, refund, self._received)

    @staticmethod
    def _check_ahead(sampler: Sampler) -> None:
        if isinstance(sampler, ConsumingSampler):
            raise ValueError(
                "Prefetching is not supported with ConsumingSampler: rows that were drawn ahead and not used would be lost"
            )

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Draw by another sampler from now on, through this handle. Returns the previous one."""
        sampler = checked_sampler(sampler)
        if self._ahead is not None:
            self._check_ahead(sampler)
        sampler.check_capacity(self._storage.max_size)
        sampler.prepare(self._storage)
        before, self._sampler = self._sampler, sampler
        self._drop_ahead()
        return before

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample(batch_size)`` would find rows now, and its limiter's leave. Draws nothing.

        Of a sampler that looks for more than rows (slices of a length, what is new), only a draw tells all.
        """
        n = positive(batch_size) if batch_size is not None else self._batch_size
        if n is None:
            raise RuntimeError(
                "batch_size not specified. Configure it on the replay buffer or pass it to can_sample()."
            )
        if self._shut or not self.initialized or not len(self):
            return False
        asked = getattr(self._sampler, "can_sample", None)
        if asked is not None and not asked(self._storage, n):
            return False
        limits = figures(self.buffer.limiter_state(n))
        return limits is None or not limits["samplers_wait"]

    def __iter__(self) -> Iterator[Any]:
        """Batches for ever, or to the end of the epoch where the sampler knows one (``ran_out``)."""
        if self._batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of the replay buffer."
            )
        return self._pass() if self._ahead is None else self._ahead.iterate()

    def _pass(self) -> Iterator[Any]:
        sampler, first = self._sampler, True
        sampler.ran_out = False
        try:
            while not sampler.ran_out:
                try:
                    batch = self.sample()
                except NotEnoughRows:
                    if first or not sampler.ran_out:
                        raise
                    return
                first = False
                yield batch
        finally:
            sampler.ran_out = True  # also where the loop was left: the next sample() is nobody's iteration

    def next(self) -> Any:
        """The next batch of an iteration that begins with the first call, or after its end: there it returns None."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            batch = next(self._iterator, None)
        except BaseException:  # which ended it
            self._iterator = None
            raise
        if batch is None:
            self._iterator = None
        return batch

    def as_dataset(self, num_batches: int | None = None) -> ReplayDataset:
        """An iterable of batches for a `torch.utils.data.DataLoader`: see `ReplayDataset`."""
        return ReplayDataset(self, num_batches)

    def __getitem__(self, index: Any) -> Any:
        """Physical indexing, copies: int, slice, list, tensor, mask, or a key (its whole column). Through the transforms."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if not self._touched:
            return self._storage.get(index, self._storage.time_dim)
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return self[:][index]
        rows = self._storage.get(index, self._storage.time_dim)
        if self._collate is not None and not isinstance(index, int):
            rows = self._collate(rows)
        return self._forward(rows)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """``rb[:end]``: the rows in the order of their slots, through the transforms; copies. RuntimeError before the first rows."""
        return self[:end]

    def query(self, predicate: Any = None, *, trajectory_key: Any = None) -> list[Any]:
        """The stored trajectories that a predicate holds for, through the transforms: see `shmbuf.query.query_buffer`."""
        from shmbuf.query import query_buffer

        if self._decides is not None:
            self._decides.check_trajectories()
        return query_buffer(
            self._storage,
            predicate,
            trajectory_key=trajectory_key,
            transforms=self._parts(),
        )
