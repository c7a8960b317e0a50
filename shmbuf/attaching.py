"""`attach`: a replay buffer out of a name; and what is asked of the arguments that it and the constructors take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuf.buffer import Buffer
from shmbuf.errors import BufferFormatError
from shmbuf.reading import checked_seed
from shmbuf.samplers import SAMPLERS, Sampler
from shmbuf.samplers.sequences import SampleUnit, checked_unit
from shmbuf.tensors import numbers_of, too_large

if TYPE_CHECKING:
    from shmbuf.replay_buffer import ReplayBuffer

# By name: attaching imports no class of the user's, so a subclass is attached as the one of these that it is made from.
FACES: dict[str, type[ReplayBuffer]] = {}


def positive(number: Any, name: str = "batch_size", what: str = "a number of rows") -> int | None:
    if number is None:
        return None
    if isinstance(number, bool) or not hasattr(number, "__index__") or int(number) < 0:
        raise ValueError(f"{name}={number!r}: {what} ≥ 0")
    return int(number)


INTEGERS, REALS = (torch.int64,), (torch.float32, torch.float64)


def is_plain(t: torch.Tensor, n: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    return (
        type(t) is torch.Tensor
        and t.dtype in dtypes
        and t.is_cpu
        and t.numel() == n
        and t.is_contiguous()
        and not t.is_neg()
    )


def checked_sampler(sampler: Any) -> Sampler:
    if not isinstance(sampler, Sampler) or not isinstance(sampler, tuple(SAMPLERS.values())):
        known = ", ".join(c.__name__ for c in SAMPLERS.values())
        raise TypeError(f"sampler is one of {known}, not {type(sampler).__name__}")
    return sampler


def numbers(values: Any, what: str) -> np.ndarray:
    """Row ids or indices as int64[n]."""
    array = numbers_of(values)
    if (number := too_large(array)) is not None:
        raise IndexError(f"{what}: {number} is out of range: no row has such a number. Nothing was changed")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} of dtype {array.dtype}: integers are needed")
    return array.reshape(-1).astype(np.int64)


def unpickle(cls: type[ReplayBuffer], buffer: Buffer, own: Mapping[str, Any]) -> ReplayBuffer:
    return cls._over(buffer, {**buffer.config.get("face", {}), **own})


def attach(
    name: str,
    *,
    owner: int | None = None,
    readonly: bool = False,
    batch_size: int | None = None,
    sampler: Sampler | None = None,
    sample_unit: SampleUnit | None = None,
    seed: int | None = None,
    prefetch: int | None = None,
    transform: Any = None,
    transform_factory: Callable[[], Any] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    timeout: float | None = 0.0,
) -> ReplayBuffer:
    """The replay buffer of that name, in any process, at any time: same class, same methods.

    Args:
        owner: uid of another user whose buffer it is, if its mode lets this one in.
        readonly: map it read-only: sampling and looking only.
        batch_size, sampler, sample_unit, seed, prefetch, transform, transform_factory, collate_fn: of this handle only. The sampler
            draws itself, no copy of it. Without one, and where a handle is unpickled, one is made of the arguments that the other
            was made with: what was set afterwards and has no such argument (``consumer_version``, a place in an epoch) stays behind, and functions do (``staleness_weight_fn``).
        timeout: seconds to wait until the name exists; 0: not at all; None: for ever.

    Raises:
        BufferNotFound, BufferFormatError, PermissionError. TypeError, ValueError: an argument that is none, or does not fit the buffer.
    """
    own: dict[str, Any] = {} if batch_size is None else {"batch_size": positive(batch_size)}
    if seed is not None:
        checked_seed(seed)
    sampler = None if sampler is None else checked_sampler(sampler)
    unit = None if sample_unit is None else checked_unit(sample_unit)
    own["prefetch"], own["collate_fn"] = positive(prefetch, "prefetch", "a number of batches"), collate_fn
    own["transform"], own["transform_factory"] = transform, transform_factory
    buffer = Buffer.attach(name, owner=owner, readonly=readonly, timeout=timeout)
    face = buffer.config.get("face") or {}
    cls = FACES.get(face.get("class", "ReplayBuffer"))
    if cls is None:
        buffer.close()
        raise BufferFormatError(
            f"buffer {name!r} was made by class {face['class']!r}, which this process does not know"
        )
    return cls._over(buffer, {**face, **own, "seed": seed}, sampler, unit)
