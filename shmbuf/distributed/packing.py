"""TensorDicts as one run of bytes: Ray hands an array from node to node without pickling it, and out of its store without a copy."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from shmbuf.errors import SchemaError
from shmbuf.schema import Key
from shmbuf.tensors import make_tensordict, tensor_leaves, tree_of

_ALIGNED = 64


class Packed(NamedTuple):
    """leaves: key, dtype, shape, and where in data (uint8[n]) it begins; batch: the batch size."""

    leaves: tuple[tuple[Key, str, tuple[int, ...], int], ...]
    batch: tuple[int, ...]
    data: np.ndarray


@functools.lru_cache(256)
def layout(specs: tuple[tuple[Key, torch.dtype, torch.Size], ...]) -> tuple[tuple[Any, ...], int]:
    """Where leaves of these keys, dtypes and shapes lie, and how many bytes that takes."""
    at, leaves = 0, []
    for key, dtype, shape in specs:
        leaves.append((key, str(dtype).removeprefix("torch."), tuple(shape), at))
        at += -(-dtype.itemsize * math.prod(shape) // _ALIGNED) * _ALIGNED
    return tuple(leaves), at


def views(leaves: tuple[Any, ...], data: np.ndarray) -> list[torch.Tensor]:
    """The leaves in these bytes."""
    out = []
    for _, name, shape, at in leaves:
        dtype, n = getattr(torch, name), math.prod(shape)
        t = torch.frombuffer(data, dtype=dtype, count=n, offset=at) if n else torch.empty(0, dtype=dtype)
        out.append(t if len(shape) == 1 else t.view(shape))
    return out


def pack(value: Any) -> Any:
    """TensorDicts of tensors as `Packed`, also those inside tuples, lists and dicts; anything else as it is."""
    if type(value) is tuple:
        return tuple(pack(v) for v in value)
    if type(value) is list:
        return [pack(v) for v in value]
    if type(value) is dict:
        return {k: pack(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if not isinstance(value, TensorDictBase):
        return value.cpu() if is_tensor_collection(value) else value
    others: dict[Key, Any] = {}
    try:
        found = tensor_leaves(value, others=others)
    except SchemaError:
        return value.cpu()
    plain = not others and all(
        type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_nested
        for t in found.values()
    )
    if not plain or not found:
        return value.cpu()
    leaves, nbytes = layout(tuple([(k, t.dtype, t.shape) for k, t in found.items()]))
    data = np.empty(nbytes, np.uint8)
    for view, t in zip(views(leaves, data), found.values(), strict=True):
        view.copy_(t.detach())
    return Packed(leaves, tuple(value.batch_size), data)


class _Writable:
    """Ray's arrays are read-only; torch has no such thing. Nobody writes to it here."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def bytes_of(data: np.ndarray, copy: bool) -> np.ndarray:
    """Not copied: valid as long as it lives, and not to be written to."""
    return data.copy() if copy or not len(data) else np.asarray(_Writable(data))


@functools.lru_cache(256)
def _tree(leaves: tuple[Any, ...]) -> Any:
    return tree_of(tuple(k for k, *_ in leaves))


def unpack(value: Any, copy: bool = True) -> Any:
    """The inverse of `pack`. copy=False: tensors to look at, in memory that others share."""
    if isinstance(value, Packed):
        leaves = views(value.leaves, bytes_of(value.data, copy))
        return make_tensordict(_tree(value.leaves), leaves, torch.Size(value.batch))
    if type(value) is tuple:
        return tuple(unpack(v, copy) for v in value)
    if type(value) is list:
        return [unpack(v, copy) for v in value]
    if type(value) is dict:
        return {k: unpack(v, copy) for k, v in value.items()}
    return value
