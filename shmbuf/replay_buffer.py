"""The replay buffers TorchRL users know, over `ShmStorage`: composition, nothing else. The rooms are in `shmbuf.face`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from shmbuf.attaching import FACES, attach, positive, unpickle
from shmbuf.buffer import Buffer
from shmbuf.errors import BufferFormatError
from shmbuf.face.making import (
    check_drop_last,
    check_service,
    checked_generator,
    made_sampler,
    made_storage,
    set_time_dim,
    wants_ray,
)
from shmbuf.face.remote import TakesRRefs
from shmbuf.face.state import State
from shmbuf.limiter import Words, scaled
from shmbuf.reading import checked_seed
from shmbuf.samplers import SAMPLERS, PrioritizedSampler, Sampler
from shmbuf.samplers.sequences import SampleUnit, checked_unit, named, unit_of
from shmbuf.schema import as_key
from shmbuf.storage import ShmStorage
from shmbuf.writers import WRITERS, Writer

__all__ = [
    "PrioritizedReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "attach",
]

_unpickle = unpickle  # where pickles of 0.1.0 look for it
Self = TypeVar("Self", bound="ReplayBuffer")


class ReplayBuffer(State):
    """A replay buffer that many processes share.

    Args:
        storage: a `ShmStorage`; default: an unnamed one of 1000 rows. sampler: default `RandomSampler()`. Both: or a function without
            arguments that makes one.
        sample_unit: what each sampled row becomes: a `Sequence`, an `NStep` transition; default: itself.
        writer: how rows are placed; default: in turn. checkpointer: None: saved in TorchRL's layout.
        collate_fn: what is made of a batch before the transforms see it.
        pin_memory: samples in page-locked memory, where CUDA is present.
        prefetch: so many batches of ``batch_size`` are drawn ahead, by threads: see `sample`.
        transform: of rows on their way in and out: see `append_transform`. transform_factory: makes it, at its first use in each
            process (``delayed_init=False``: now), where it cannot be pickled.
        batch_size: of `sample()`.
        dim_extend: with a storage of ndim > 1, the dimension of a batch along which rows follow each other, as it is put and read
            by index through this handle: ndim - 1 (the default: [lanes, T]) or 0 ([T, lanes]).
        generator: see `set_rng`. seed: of this handle's draws; the same seed draws the same of the same stored rows.
        consume_after_n_samples: each row is drawn at most so many times, over all processes: a `ConsumingSampler`.
        limiter: how many rows may be sampled for each one inserted, over all processes; see `RateLimiter`.
        shared, compilable: nothing to be told here: it is shared in any case, and nothing in it needs compiling. ``shared=True`` with
            ``prefetch``, which TorchRL refuses, is allowed: each handle draws its own batches ahead.
        service_backend: "direct" or None: any process of the machine attaches to the memory. "ray" (``use_ray_service=True`` is its
            deprecated name): a `shmbuf.distributed.RayReplayBuffer` is made instead, for processes of other machines, too;
            service_backend_options: {"remote_config": of its actor, "ray_init_config": …}. transport: "auto".

    One process constructs it; others attach by name (`shmbuf.attach`), or get the object itself: it pickles as its name, its
    transforms and the arguments of its sampler and unit (what is set later, or is a sampler's function, stays behind: see `attach`),
    under spawn, fork or forkserver. Any of them may extend first. Methods may be called from several threads.

    Rows are TensorDicts, tensors, numpy arrays, tensorclasses, or dicts, lists and tuples of tensors, arrays and (of `add` and lists)
    small Python values; they come back as they went in. The first write decides which. A list given to `extend` is one row an item.
    Samples of other forms than TensorDict have no "index" and "row_id" in them: ``return_info=True`` gives these.
    """

    def __new__(
        cls, *args: Any, service_backend: str | None = None, use_ray_service: bool = False, **keywords: Any
    ) -> Any:
        if not wants_ray(service_backend, use_ray_service):
            return super().__new__(cls)
        if args:
            raise TypeError(f"{cls.__name__} takes keywords only")
        from shmbuf.distributed.service import serve

        return serve(cls, keywords, keywords.pop("service_backend_options", None))

    def __init__(
        self,
        *,
        storage: ShmStorage | Callable[[], ShmStorage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        sample_unit: SampleUnit | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: None = None,
        generator: torch.Generator | None = None,
        consume_after_n_samples: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        service_backend: str | None = "direct",
        service_backend_options: Mapping[str, Any] | None = None,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        use_ray_service: bool = False,
        limiter: Words | None = None,
        seed: int | None = None,
    ):
        check_service(service_backend, service_backend_options, transport, transport_options)
        made = self._made_writer(writer)
        if checkpointer is not None:
            raise TypeError(
                f"checkpointer: dumps() writes TorchRL's own layout and loads() reads it; {type(checkpointer).__name__} is not taken"
            )
        if seed is not None:
            checked_seed(seed)
        self._rng = checked_generator(generator)
        self._storage = made_storage(storage)
        if consume_after_n_samples is not None and prefetch:
            raise ValueError("Prefetching is not supported when consume_after_n_samples is set.")
        set_time_dim(self._storage, dim_extend)
        self._sampler = made_sampler(sampler, consume_after_n_samples)
        self._sampler.check_capacity(self._storage.max_size)
        self._unit = None if sample_unit is None else checked_unit(sample_unit)
        for part in (self._sampler, self._unit):
            if part is not None:
                self._storage.suggest(part.trajectory_settings())
        self._batch_size = positive(batch_size)
        check_drop_last(self._sampler, self._batch_size)
        self._priority_key = getattr(self, "_priority_key", None)
        self._pin = pin_memory and torch.cuda.is_available()
        self._set_ways(prefetch, transform, transform_factory, collate_fn, delayed_init)
        self._register()
        if limiter is not None:
            scaled(limiter, self._batch_size or 1)
        self._writer = made
        with self._storage.opened(self._described(pin_memory)):
            self._use_writer(made)
            if limiter is not None:
                self.buffer.set_limiter(limiter, batch=self._batch_size or 1)
            self._settle(seed)

    def _described(self, pin_memory: bool) -> dict[str, Any]:
        """What the segment keeps of it, for those who attach by name."""
        return {
            "class": next(c.__name__ for c in type(self).__mro__ if c in FACES.values()),
            "batch_size": self._batch_size,
            "priority_key": list(self._priority_key or ()),
            "pin_memory": pin_memory,
            "sampler": [self._sampler.name, self._sampler.arguments()],
            "writer": [self._writer.name, self._writer.arguments()],
            "dim_extend": self._storage._time_dim,
            "sample_unit": None if self._unit is None else named(self._unit) or [type(self._unit).__qualname__, {}],
        }

    def _set_ways(
        self, prefetch: Any, transform: Any, factory: Any, collate_fn: Any, delayed_init: bool | None = None
    ) -> None:
        """What is this handle's only."""
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn is a function of a batch, not {type(collate_fn).__name__}")
        self._collate = collate_fn
        self._set_transforms(transform, factory, delayed_init)
        self._set_prefetch(prefetch)

    def _settle(self, seed: int | None) -> None:
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
            set_time_dim(self._storage, face.get("dim_extend"))
            kind, arguments = face.get("sampler", ["random", {}])
            self._sampler = sampler if sampler is not None else SAMPLERS[kind](**arguments)
            self._unit = unit if unit is not None else unit_of(face.get("sample_unit"))
            kept = face.get("writer")
            self._writer = cls._made_writer(None) if kept is None else WRITERS[kept[0]](**kept[1])
            self._batch_size = positive(face.get("batch_size"))
            self._priority_key = tuple(face.get("priority_key") or ()) or None
            self._pin = bool(face.get("pin_memory")) and torch.cuda.is_available()
        except (KeyError, TypeError, ValueError) as e:
            buffer.close()
            raise BufferFormatError(f"buffer {buffer.name!r}: its configuration cannot be used: {e!r}") from None
        self._register()
        try:
            ways = (face.get(k) for k in ("prefetch", "transform", "transform_factory", "collate_fn"))
            self._set_ways(*ways)
            self._use_writer(self._writer)
            self._settle(face.get("seed"))
        except BaseException:
            buffer.close()
            raise
        return self

    def set_storage(self, storage: ShmStorage, collate_fn: Callable[[Any], Any] | None = None) -> ShmStorage:
        """Work on another storage from now on, through this handle; its rows are its own. Returns the previous one, still open.

        collate_fn: of batches from now on; None: none.
        """
        storage = made_storage(storage)
        if storage.ndim == self._storage.ndim:
            set_time_dim(storage, self._storage._time_dim)
        self._sampler.check_capacity(storage.max_size)
        before = self._storage
        for part in (self._sampler, self._unit):
            if part is not None:
                storage.suggest(part.trajectory_settings())
        with storage.opened(self._described(self._pin)):
            self._sampler.prepare(storage)
            self._writer.register_storage(storage)
        self._drop_ahead()
        self._storage, self._collate = storage, collate_fn
        return before


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of TensorDicts.

    Args:
        priority_key: rows may carry their priority under this key. It is stored only if the schema has it.
    """

    _takes_forms = False

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kw: Any):
        self._priority_key = as_key(priority_key)
        super().__init__(**kw)


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer, metaclass=TakesRRefs):
    """A `TensorDictReplayBuffer` whose `sample` takes TorchRL's other order of arguments, and whose methods, called on the class,
    take a `torch.distributed.rpc` RRef of such a buffer in place of ``self``. On the same machine, send the buffer: it attaches."""

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
        """See `ReplayBuffer.sample`; ``include_info`` comes second here."""
        return super().sample(batch_size, return_info, include_info, out=out, timeout=timeout, **how)


class _Prioritized(ReplayBuffer):
    """What both classes do with alpha and beta."""

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        storage: ShmStorage | Callable[[], ShmStorage] | None = None,
        sampler: PrioritizedSampler | Callable[[], PrioritizedSampler] | None = None,
        sampler_device: Any = None,
        sync: bool = True,
        **kw: Any,
    ):
        if sampler_device is not None and torch.device(sampler_device).type != "cpu":
            raise ValueError(f"sampler_device={sampler_device!r}: priorities are in host memory, for all processes")
        made = made_storage(storage)
        if sampler is None:
            sampler = PrioritizedSampler(made.max_size, alpha, beta, eps, dtype, reduction)
        super().__init__(storage=made, sampler=sampler, **kw)

    @property
    def prioritized_sampler(self) -> Sampler:
        return self._sampler


class PrioritizedReplayBuffer(_Prioritized):
    """A `ReplayBuffer` with a `PrioritizedSampler`.

    Args:
        alpha, beta, eps, dtype: see `PrioritizedSampler`. sampler: another one; alpha and beta are then its own.
        sync: nothing to be told here: all processes have the same priorities at any time.
        sampler_device: "cpu".
    """


class TensorDictPrioritizedReplayBuffer(_Prioritized, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`.

    Args:
        alpha, beta, eps, reduction, sync, sampler_device: see `PrioritizedReplayBuffer` and `PrioritizedSampler`.
    """


FACES.update(
    {
        c.__name__: c
        for c in (
            ReplayBuffer,
            TensorDictReplayBuffer,
            RemoteTensorDictReplayBuffer,
            PrioritizedReplayBuffer,
            TensorDictPrioritizedReplayBuffer,
        )
    }
)
