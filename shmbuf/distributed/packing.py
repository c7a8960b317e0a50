"""TensorDicts as one run of bytes: Ray hands an array from node to node without pickling it, and out of its store without a copy."""

from __future__ import annotations

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


def layout(specs: list[tuple[Key, torch.dtype, tuple[int, ...]]]) -> tuple[tuple[Any, ...], int]:
    """Where leaves of these keys, dtypes and shapes lie, and how many bytes that takes."""
    at, leaves = 0, []
    for key, dtype, shape in specs:
        leaves.append((key, str(dtype).removeprefix("torch."), tuple(shape), at))
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        at += -(-nbytes // _ALIGNED) * _ALIGNED
    return tuple(leaves), at


def views(leaves: tuple[Any, ...], data: torch.Tensor) -> list[torch.Tensor]:
    """The leaves in these bytes."""
    out = []
    for _, name, shape, at in leaves:
        dtype = getattr(torch, name)
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        out.append(data[at : at + nbytes].view(dtype).view(shape))
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
    leaves, nbytes = layout([(k, t.dtype, tuple(t.shape)) for k, t in found.items()])
    data = torch.empty(nbytes, dtype=torch.uint8)
    for view, t in zip(views(leaves, data), found.values(), strict=True):
        view.copy_(t.detach())
    return Packed(leaves, tuple(value.batch_size), data.numpy())


class _Writable:
    """Ray's arrays are read-only; torch has no such thing. Nobody writes to it here."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def bytes_of(data: np.ndarray, copy: bool) -> torch.Tensor:
    """uint8[n]. Not copied: valid as long as it lives, and not to be written to."""
    if copy or not len(data):
        return torch.from_numpy(data.copy())
    return torch.from_numpy(np.asarray(_Writable(data)))


def unpack(value: Any, copy: bool = True) -> Any:
    """The inverse of `pack`. copy=False: tensors to look at, in memory that others share."""
    if isinstance(value, Packed):
        leaves = views(value.leaves, bytes_of(value.data, copy))
        tree = tree_of(tuple(k for k, *_ in value.leaves))
        return make_tensordict(tree, leaves, torch.Size(value.batch))
    if type(value) is tuple:
        return tuple(unpack(v, copy) for v in value)
    if type(value) is list:
        return [unpack(v, copy) for v in value]
    if type(value) is dict:
        return {k: unpack(v, copy) for k, v in value.items()}
    return value
