"""The replay buffers TorchRL users know, over `ShmStorage`: composition, nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shmbuf.attaching import FACES, INTEGERS, REALS, attach, checked_sampler, is_plain, numbers, positive, unpickle
from shmbuf.buffer import Buffer
from shmbuf.errors import BufferFormatError, NotEnoughRows, RingFull, SchemaError
from shmbuf.forms import take_apart, take_items
from shmbuf.lanes import cells
from shmbuf.limiter import Words, scaled
from shmbuf.reading import checked_seed
from shmbuf.samplers import SAMPLERS, RandomSampler, Sampler
from shmbuf.samplers.sequences import UNITS, SampleUnit, anchor_priorities, checked_unit
from shmbuf.schema import Key, as_key, show_key
from shmbuf.storage import ShmStorage, stack
from shmbuf.ticket import Ticket, left_of, seconds_of

__all__ = ["RemoteTensorDictReplayBuffer", "ReplayBuffer", "TensorDictReplayBuffer", "attach"]

_unpickle = unpickle  # where pickles of 0.1.0 look for it
Self = TypeVar("Self", bound="ReplayBuffer")
_ALL: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _new_locks() -> None:  # another thread of the parent may have held one at the fork
    for rb in _ALL:
        rb._lock = threading.RLock()


os.register_at_fork(after_in_child=_new_locks)


class ReplayBuffer:
    """A replay buffer that many processes share.

    Args:
        storage: a `ShmStorage`; default: an unnamed one of 1000 rows.
        sampler: default `RandomSampler()`.
        batch_size: of `sample()`.
        pin_memory: samples in page-locked memory, where CUDA is present.
        limiter: how many rows may be sampled for each one inserted, over all processes; see `RateLimiter`.
        sample_unit: what each sampled row becomes: a `Sequence`, an `NStep` transition; default: itself.
        seed: of this handle's draws; the same seed draws the same of the same stored rows.

    One process constructs it; others attach by name (`shmbuf.attach`), or get the object itself: it pickles as its name and
    the arguments of its sampler and unit (what is set later, or is a function, stays behind: see `attach`), under spawn, fork or
    forkserver. Any of them may extend first. Methods may be called from several threads.

    Rows are TensorDicts, tensors, numpy arrays, tensorclasses, or dicts, lists and tuples of tensors, arrays and (of `add` and lists)
    small Python values; they come back as they went in. The first write decides which. A list given to `extend` is one row an item.
    Samples of other forms than TensorDict have no "index" and "row_id" in them: ``return_info=True`` gives these.
    """

    _takes_forms = True

    def __init__(
        self,
        *,
        storage: ShmStorage | None = None,
        sampler: Sampler | None = None,
        batch_size: int | None = None,
        pin_memory: bool = False,
        limiter: Words | None = None,
        sample_unit: SampleUnit | None = None,
        seed: int | None = None,
    ):
        storage = storage() if callable(storage) and not isinstance(storage, ShmStorage) else storage
        sampler = sampler() if callable(sampler) else sampler
        if storage is not None and not isinstance(storage, ShmStorage):
            raise TypeError(f"storage is a ShmStorage, not {type(storage).__name__}")
        if seed is not None:
            checked_seed(seed)
        self._storage = storage if storage is not None else ShmStorage(1000)
        self._sampler = checked_sampler(sampler) if sampler is not None else RandomSampler()
        self._sampler.check_capacity(self._storage.max_size)
        self._unit = None if sample_unit is None else checked_unit(sample_unit)
        for part in (self._sampler, self._unit):
            if part is not None:
                self._storage.suggest(part.trajectory_settings())
        self._batch_size = positive(batch_size)
        self._priority_key: Key | None = getattr(self, "_priority_key", None)
        self._pin = pin_memory and torch.cuda.is_available()
        self._lock = threading.RLock()
        _ALL.add(self)
        if limiter is not None:
            scaled(limiter, self._batch_size or 1)
        face = {
            "class": next(c.__name__ for c in type(self).__mro__ if c in FACES.values()),
            "batch_size": self._batch_size,
            "priority_key": list(self._priority_key or ()),
            "pin_memory": pin_memory,
            "sampler": [self._sampler.name, self._sampler.arguments()],
            "sample_unit": None if self._unit is None else [self._unit.name, self._unit.arguments()],
        }
        with self._storage.opened(face):
            if limiter is not None:
                self.buffer.set_limiter(limiter, batch=self._batch_size or 1)
            self._settle(seed)

    def _settle(self, seed: int | None) -> None:
        self._rng: torch.Generator | None = None
        if seed is not None:
            self.buffer.seed(seed)
        self._sampler.check_capacity(self._storage.max_size)
        self._sampler.prepare(self._storage)

    @classmethod
    def _over(
        cls: type[Self],
        buffer: Buffer,
        face: Mapping[str, Any],
        sampler: Sampler | None = None,
        unit: SampleUnit | None = None,
    ) -> Self:
        """Sampler and unit: themselves, or out of the face. Closes the buffer if it raises."""
        self = cls.__new__(cls)
        self._storage = ShmStorage.over(buffer)
        try:
            kind, arguments = face.get("sampler", ["random", {}])
            self._sampler = sampler if sampler is not None else SAMPLERS[kind](**arguments)
            named = face.get("sample_unit")
            self._unit = unit if unit is not None or named is None else UNITS[named[0]](**named[1])
            self._batch_size = positive(face.get("batch_size"))
            self._priority_key = tuple(face.get("priority_key") or ()) or None
            self._pin = bool(face.get("pin_memory")) and torch.cuda.is_available()
        except (KeyError, TypeError, ValueError) as e:
            buffer.close()
            raise BufferFormatError(f"buffer {buffer.name!r}: its configuration cannot be used: {e!r}") from None
        self._lock = threading.RLock()
        _ALL.add(self)
        try:
            self._settle(face.get("seed"))
        except BaseException:
            buffer.close()
            raise
        return self

    # ---- writing ------------------------------------------------------------------------------------------------

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows; returns when every sampler of every process can draw them.

        Args:
            data: a TensorDict of batch size [n] (any strides, any device; dtypes are never converted), or a list of
                TensorDicts to stack. ``index``, ``row_id`` and ``priority_weight`` are dropped unless the schema has them.
            update_priority: False: ignore the priorities that the rows carry under the priority key.
            stream: whose next steps these rows are: one number, or one a row; see `Buffer.put`.
            timeout: seconds; None: the buffer's.

        Returns:
            LongTensor[n]: the rows' indices.

        Raises:
            SchemaError: lists every difference. RingFull: the time is over. In both cases nothing was stored.
            CommitPending: the rows are in the ring and will be stored; ``.ticket`` waits for them.
        """
        return self._store(self._batch(data), timeout, False, True, stream=stream, prioritise=update_priority)

    def put(self, data: Any, *, stream: Any = None, timeout: float | None = None) -> Ticket:
        """Hand rows to this process's ring and return at once; ``ticket.wait()`` gives their indices. What collectors call.

        timeout: seconds to wait for room in the ring; None: the buffer's.
        """
        return self._store(self._batch(data), timeout, True, False, stream=stream)

    def add(self, data: TensorDictBase, *, stream: Any = None, timeout: float | None = None) -> Any:
        """Store one row, a TensorDict of batch size []; returns its index, or None if a drop policy took it.

        timeout: seconds; None: the buffer's.
        """
        td = data if isinstance(data, TensorDictBase) else self._one(data)
        index = self._store(td, timeout, False, True, single=True, stream=stream)
        if self._storage.ndim > 1:
            return index
        return int(index) if len(index) else None

    def _store(
        self,
        td: Any,
        timeout: float | None,
        wake: bool,
        wait: bool,
        single: bool = False,
        stream: Any = None,
        prioritise: bool | None = None,
    ) -> Any:
        """Lock, first build, room and commit share one timeout."""
        ticket, since, storage, key = None, time.monotonic(), self._storage, self._priority_key
        inner = None
        if storage.ndim > 1:
            (td, inner), single = cells(td, single, storage.ndim), False
        priorities = None if key is None or prioritise is False else self._sent_priorities(td, key, single)
        if self._lock.acquire(False):  # the usual case, without the cost of a context manager
            try:
                ticket = storage.put(td, wake, timeout, single, key, stream, priorities, inner)
            finally:
                self._lock.release()
            if not wait:
                return ticket
        timeout = self.buffer.config["timeout"] if timeout is None else timeout
        if ticket is None:
            with self._alone(timeout):
                ticket = storage.put(td, wake, left_of(timeout, since), single, key, stream, priorities, inner)
        return ticket.wait(left_of(timeout, since)) if wait else ticket

    def _sent_priorities(self, td: Any, key: Key, single: bool) -> np.ndarray | None:
        """What rows carry under the priority key, if anybody draws by priority."""
        name = key[0] if len(key) == 1 else key
        held = td._tensordict if type(td) is TensorDict else None
        if held is not None and key[0] not in held:  # the usual case
            return None
        if len(getattr(td, "batch_size", ())) != (0 if single else 1):  # the storage says so
            return None
        p = td.get(name, None) if is_tensor_collection(td) else None
        if not isinstance(p, torch.Tensor) or not self.buffer._get("wants_priorities"):
            return None
        n = 1 if single else td.batch_size[0]
        p = self._reduced(p.reshape(1, *p.shape) if single else p, n).expand(n)
        return p.detach().cpu().to(torch.float64).numpy().reshape(n)

    @contextlib.contextmanager
    def _alone(self, timeout: float | None) -> Iterator[None]:
        """Threads put in turn. A signal handler inside a put of its own thread gets ConcurrentUse, no deadlock."""
        seconds = seconds_of(timeout)
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX) if seconds >= 0 else -1):
            raise RingFull(f"another thread of this process has been putting for {seconds:g} s. Nothing was put.")
        try:
            yield
        finally:
            self._lock.release()

    def _batch(self, data: Any) -> Any:
        if type(data) is TensorDict or isinstance(data, TensorDictBase):
            return data
        if isinstance(data, list) and not data:
            return TensorDict({}, batch_size=[0])
        if self._takes_forms:
            if not isinstance(data, list):
                return take_apart(data, False)
            if not all(isinstance(d, TensorDictBase) for d in data):
                return take_items(data)
        if isinstance(data, (list, tuple)):
            if not data:
                return TensorDict({}, batch_size=[0])
            if not all(is_tensor_collection(d) for d in data):
                raise SchemaError(
                    f"a list to store holds TensorDicts, not {', '.join(sorted({type(d).__name__ for d in data}))}"
                )
            return stack(list(data))
        if is_tensor_collection(data):
            return data
        return self._collect(data, None)

    def _one(self, data: Any) -> Any:
        if self._takes_forms:
            return take_apart(data, True)
        return data if is_tensor_collection(data) else self._collect(data, [])

    @staticmethod
    def _collect(data: Any, batch_size: list | None) -> TensorDictBase:
        size = "[n]" if batch_size is None else batch_size
        hint = f": TensorDict(d, batch_size={size}) makes one of it, a Buffer takes dicts of arrays"
        raise SchemaError(
            f"rows are a TensorDict{'' if batch_size is not None else ' or a list of them'}, not {type(data).__name__}"
            + (hint if isinstance(data, Mapping) else "")
        )

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        **how: Any,
    ) -> Any:
        """A batch, as copies, with "index" (the slot) and "row_id" (64-bit, never repeats).

        Args:
            batch_size: instead of the constructor's.
            return_info: True: returns (batch, {"index", "row_id", and what the sampler adds}). include_info: TorchRL's deprecated alias.
            out: a TensorDict of batch size [n] whose tensors are written; returned. A previous sample will do.
            timeout: seconds to wait while the buffer is empty, or its limiter says so; 0: raise at once; None: for ever.
            how: what the sampler takes for one call, like ``beta=`` of a `PrioritizedSampler`.

        Raises:
            NotEnoughRows: "Cannot sample from an empty storage.", or what the limiter waits for. Lapped: see `Buffer.draw`.
        """
        n = positive(batch_size) if batch_size is not None else self._batch_size
        if n is None:
            if out is None:
                raise RuntimeError(
                    "batch_size not specified. You can specify the batch_size when constructing the replay buffer, "
                    "or pass it to the sample method."
                )
            n = out.batch_size[0] if out.batch_dims else 0
        sampler, buffer = self._sampler, self.buffer
        if (
            out is not None
            and buffer.schema is not None
            and self._storage.schema()
            and self._storage.presents is not None
        ):
            raise SchemaError("out= takes tensors only: these rows have Python values, or are no TensorDicts")
        if out is not None and self._storage.ndim > 1:
            raise SchemaError(f"out= is for storages of one dimension; this one has ndim={self._storage.ndim}")
        if self._rng is not None:
            self._reseed(self._rng)
        left = buffer.acquire_samples(n, timeout)
        try:
            if self._unit is None:
                td = sampler.sample(self._storage, n, out=out, timeout=left, pin=self._pin, **how)
                got = td.batch_size.numel()
            else:
                td = self._unit.sample(sampler, self._storage, n, out=out, timeout=left, pin=self._pin, **how)
                got = td.batch_size.numel() // self._unit.rows_per_anchor
        except BaseException:
            buffer.refund_samples(n)
            raise
        if got < n:  # what was left of an epoch
            buffer.refund_samples(n - got)
        if self._storage.ndim > 1:
            td = self._storage.located(td)
        if return_info or include_info:
            keys = (*sampler.info_keys, *(self._unit.info_keys if self._unit is not None else ()))
            info = {k: td[k] for k in keys if k in td.keys(True)}
            if self._storage.ndim > 1:
                info["index"] = info["index"].unbind(-1)
            return self._presented(td), info
        return td if self._storage.presents is None else self._storage.presents(td)

    def _presented(self, td: TensorDictBase) -> Any:
        return td if self._storage.presents is None else self._storage.presents(td.copy())

    def set_sampler(self, sampler: Sampler) -> None:
        """Draw by another sampler from now on, through this handle."""
        sampler = checked_sampler(sampler)
        sampler.check_capacity(self._storage.max_size)
        sampler.prepare(self._storage)
        self._sampler = sampler

    @property
    def limiter(self) -> Words | None:
        """What limits sampling and inserting, for all processes; None: nothing. Another one by `set_limiter`."""
        return self.buffer.limiter

    def set_limiter(self, limiter: Words | None) -> None:
        """Let all processes sample and insert at this ratio from now on; None: at any. Who waits looks again at once.

        Raises ValueError where it would deadlock with this handle's batches. PermissionError: a read-only handle.
        """
        self.buffer.set_limiter(limiter, batch=self._batch_size or 1)

    def set_rng(self, generator: torch.Generator) -> None:
        """Let the generator's numbers decide what this handle draws: the same state draws the same of the same stored rows."""
        self._rng = generator

    def _reseed(self, generator: torch.Generator) -> None:
        self.buffer.seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))

    # ---- priorities ---------------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any, *, row_id: Any = None) -> torch.Tensor:
        """Set priorities of rows by their ids, or by index, of whatever rows lie there now.

        Args:
            index: LongTensor[n] or one number, as in ``sample()["index"]``; None if row_id is given.
            priority: [n] or one number; finite, ≥ 0.
            row_id: LongTensor[n], as in ``sample()["row_id"]``: a row that has been overwritten meanwhile is left alone.

        Returns:
            bool[n]: whether it was applied.

        Raises:
            ValueError, IndexError: name position and value; nothing was changed. RuntimeError: the buffer keeps no priorities.
        """
        buffer = self.buffer
        if row_id is None:
            if self._storage.ndim > 1:
                index = self._storage.slots_of(index)
                if isinstance(priority, torch.Tensor) and priority.ndim > 1 and priority.numel() == index.numel():
                    swap = min(self._storage.ndim, priority.ndim) - 1
                    priority = priority.transpose(swap, 0).flatten()  # as extend() was given it
            ids = buffer.ids_of(numbers(index, "index"))
        elif index is not None:
            raise TypeError("index or row_id, not both")
        else:
            ids = numbers(row_id, "row_id")
        if isinstance(priority, torch.Tensor):
            priority = self._reduced(priority, len(ids)).detach().cpu()
            priority = (priority.float() if priority.dtype is torch.bfloat16 else priority).numpy()
        return torch.from_numpy(buffer.set_priorities(ids, priority))

    def _set_priorities(self, ids: torch.Tensor, priority: torch.Tensor) -> bool:
        """The usual case of a learner's update: plain tensors as `sample` made them. False: look closer."""
        n = ids.numel()
        if not (is_plain(ids, n, INTEGERS) and is_plain(priority, n, REALS)):
            return False
        applied = torch.empty(n, dtype=torch.bool)
        status, _ = self.buffer._call(
            "set_priorities", ids.data_ptr(), priority.data_ptr(), n, priority.element_size(), applied.data_ptr()
        )
        return not status  # what is wrong is said by the long way, which finds it again

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows, found by its "row_id", to what it holds under the priority key.

        A row that has been overwritten since is left alone, and counted. Raises KeyError, and as `update_priority`.
        """
        key = self._priority_key or ("td_error",)
        priority, ids = data.get(key, None), data.get("row_id", None)
        if priority is None or (ids is None and data.get("index", None) is None):
            missing = show_key(key) if priority is None else "'row_id'"
            raise KeyError(f"{missing} is not in the TensorDict, which has {sorted(map(str, data.keys(True, True)))}")
        anchors = data.get("anchor_row_id", None)
        if anchors is not None:
            p = self._reduced(priority, anchors.numel(), anchors.shape)
            ids, p = anchor_priorities(anchors, data.get("validity_mask", None), p.detach().to(anchors.device))
            self.update_priority(None, p, row_id=ids)
        elif ids is not None and self._set_priorities(ids, priority):
            return
        elif ids is not None:
            self.update_priority(None, self._reduced(priority, ids.numel(), ids.shape), row_id=ids)
        else:
            index = data.get("index")
            if self._storage.ndim > 1:
                n = index[..., 0].numel()
                self.update_priority(index, self._reduced(priority, n, index.shape[:-1]))
                return
            self.update_priority(index, self._reduced(priority, index.numel(), index.shape))

    def mark_update(self, index: Any) -> None:
        """Give the rows at these indices the priority of new ones."""
        state = self.buffer._get("priorities")
        self.update_priority(index, state["new_row"] if state else 1.0)

    def _reduced(self, priority: torch.Tensor, n: int, shape: torch.Size | None = None) -> torch.Tensor:
        """One number a row (or for all: of no dimension), of a priority [n, …], or [*shape, …] where the n rows have that shape."""
        if priority.numel() == n or not priority.ndim:
            return priority.reshape(n) if priority.ndim else priority
        if shape is not None and priority.shape[: len(shape)] == shape:
            priority = priority.reshape(n, *priority.shape[len(shape) :])
        if priority.ndim < 2 or priority.shape[0] != n:
            also = "" if shape is None or len(shape) < 2 else f" or {[*shape]}"
            raise ValueError(
                f"a priority of shape {list(priority.shape)} for {n} rows: one for each is needed, shape [{n}]{also}, or several of each"
            )
        if not n:
            return priority.new_zeros(0)
        reduce = getattr(self._sampler, "reduce", None)  # what another sampler says is not known here: the largest
        return reduce(priority, n) if reduce is not None else priority.reshape(n, -1).amax(1)

    def wait_rows(self, n: int, timeout: float | None = None) -> None:
        """Wait until at least n rows are stored. NotEnoughRows when ``timeout`` seconds are over; None: for ever."""
        self.buffer.wait_rows(n, timeout)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches for ever, or to the end of the epoch where the sampler knows one (``ran_out``)."""
        if self._batch_size is None:
            raise RuntimeError("batch_size not specified: iterating needs the constructor's batch_size")
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

    def __getitem__(self, index: Any) -> Any:
        """Physical indexing, copies: int, slice, list, tensor, mask, or a key (its whole column)."""
        return self._storage.get(index, self._storage.ndim - 1)

    def __len__(self) -> int:
        return len(self._storage)

    def empty(self, empty_write_count: bool = True, *, timeout: float | None = None) -> None:
        """Forget all rows, for every process; indices start again at 0. timeout: seconds; None: the buffer's."""
        timeout = self.buffer.config["timeout"] if timeout is None else timeout
        since = time.monotonic()
        with self._alone(timeout):
            self.buffer.empty(empty_write_count=empty_write_count, timeout=left_of(timeout, since))

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Buffer:
        """The numpy-level handle under it."""
        return self._storage.buffer

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def storage(self) -> ShmStorage:
        return self._storage

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @property
    def write_count(self) -> int:
        """Rows stored since the buffer was made or emptied, by all processes, overwritten ones included."""
        return self.buffer.write_count

    @property
    def initialized(self) -> bool:
        """Whether the buffer has its schema."""
        return self.buffer.schema is not None

    def stats(self) -> dict[str, Any]:
        """TorchRL's keys (size, write_count, capacity, utilization, prefetch_queue_size, initialized) and `Buffer.stats`'s."""
        return {**self.buffer.stats(), "prefetch_queue_size": 0}

    def close(self) -> None:
        """Let go of the buffer. An unnamed one ends with the handle that made it; a named one stays until `shmbuf.destroy`."""
        self.buffer.close()

    def destroy(self, *, force: bool = False) -> None:
        """Close this handle and remove the buffer: see `Buffer.destroy`."""
        self.buffer.destroy(force=force)

    @property
    def destroyed(self) -> bool:
        """Whether somebody destroyed the buffer."""
        return self.buffer.destroyed

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        own: dict[str, Any] = {
            "batch_size": self._batch_size,
            "sampler": [self._sampler.name, self._sampler.arguments()],
        }
        if self._unit is not None:
            own["sample_unit"] = [self._unit.name, self._unit.arguments()]
        return unpickle, (type(self), self.buffer, own)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buffer!r}, sampler={self._sampler!r}, batch_size={self._batch_size})"


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of TensorDicts.

    Args:
        priority_key: rows may carry their priority under this key. It is stored only if the schema has it.
    """

    _takes_forms = False

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kw: Any):
        self._priority_key = as_key(priority_key)
        super().__init__(**kw)


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` whose `sample` takes TorchRL's other order of arguments."""

    def sample(  # type: ignore[override]
        self,
        batch_size: int | None = None,
        include_info: bool | None = None,
        return_info: bool = False,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        **how: Any,
    ) -> Any:
        return super().sample(batch_size, return_info, include_info, out=out, timeout=timeout, **how)


FACES.update({c.__name__: c for c in (ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer)})
