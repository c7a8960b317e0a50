"""Storages of more than one dimension: a row is a cell of [time, *lanes]. Time steps lie one after another, so that with b lanes
``slot // b`` is the time and ``slot % b`` the lane: every record of every collector holds whole time steps, and so does the capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from shmbuf.errors import BufferFormatError, SchemaError
from shmbuf.forms import Rows
from shmbuf.schema import Schema, show_key

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer

_RECORD, _STREAM, _LEAF = 32, 8, 4  # bytes in a ring: of a record's header, and beside each row


def checked_lanes(ndim: Any, batch_shape: Any, max_size: int) -> tuple[int, tuple[int, ...] | None, int]:
    """ndim, batch_shape, and the capacity: whole time steps. Raises ValueError."""
    if isinstance(ndim, bool) or not isinstance(ndim, int) or ndim < 1:
        raise ValueError(f"ndim={ndim!r}: a number of dimensions ≥ 1")
    if batch_shape is None:
        return ndim, None, max_size
    shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
    if len(shape) != ndim - 1 or any(isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in shape):
        raise ValueError(f"batch_shape={batch_shape!r} with ndim={ndim}: {ndim - 1} sizes ≥ 1 are needed")
    each = math.prod(shape)
    return ndim, shape, -(-max_size // each) * each


def check_inner(schema: Schema, ndim: int, capacity: int) -> None:
    """What a segment says. Raises BufferFormatError."""
    if len(schema.inner) != ndim - 1 or capacity % math.prod(schema.inner):
        raise BufferFormatError(f"the buffer has {ndim} dimensions, {capacity:,} cells, and steps of {list(schema.inner)}")


def require_inner(inner: Sequence[int], has: Sequence[int] | None, capacity: int) -> None:
    """Before anything is stored. Raises SchemaError."""
    if has is not None and tuple(has) != tuple(inner):
        raise SchemaError(f"time steps of shape {list(inner)}, the buffer's are {list(has)}. Nothing was stored.")
    each = math.prod(inner)
    if not each or capacity % each:
        raise SchemaError(
            f"max_size={capacity:,} is no multiple of {each:,}, the cells of a time step of shape {list(inner)}: make the storage with "
            f"batch_shape={tuple(inner)}, which rounds it up, or max_size={-(-capacity // each) * each if each else 0:,}. Nothing was stored."
        )


def cells(data: Any, single: bool, ndim: int) -> tuple[Any, tuple[int, ...]]:
    """A batch […, T] (its last of ndim dimensions goes first), or one time step, as flat rows; and the shape of a step."""
    dims = ndim - 1 if single else ndim

    def shape_of(shape: Sequence[int], what: str) -> tuple[int, ...]:
        if len(shape) < dims:
            raise SchemaError(
                f"got {what} {list(shape)}: with ndim={ndim}, "
                + (f"add() takes a time step of {dims} dimensions" if single else f"extend() takes {dims} dimensions, time last")
                + ". Nothing was stored."
            )
        return tuple(shape[:dims])

    def flat(x: Any) -> Any:
        return (x if single else x.transpose(ndim - 1, 0)).flatten(0, dims - 1)

    if isinstance(data, Rows):
        shapes = {}
        for key, leaf in data.leaves.items():
            if not isinstance(leaf, torch.Tensor):
                raise SchemaError(f"key {show_key(key)}: Python values in rows of ndim={ndim} come in TensorDicts only")
            shapes[shape_of(leaf.shape, f"key {show_key(key)} of shape")] = key
        if len(shapes) > 1:
            raise SchemaError(f"leaves have different first {dims} dimensions: {', '.join(str(list(s)) for s in shapes)}")
        shape = next(iter(shapes))
        leaves = {k: flat(v) for k, v in data.leaves.items()}
        out: Any = Rows(data.form, leaves, math.prod(shape))
    else:
        if not isinstance(data, TensorDictBase) and not is_tensor_collection(data):
            raise SchemaError(f"rows are a TensorDict, not {type(data).__name__}")
        shape = shape_of(data.batch_size, "batch size")
        if len(data.batch_size) > dims:
            raise SchemaError(f"got batch size {list(data.batch_size)}: with ndim={ndim} it has {dims} dimensions. Nothing was stored.")
        out = flat(data)
    if single:
        return out, shape
    stored = list(shape)
    stored[0], stored[-1] = stored[-1], stored[0]
    return out, tuple(stored[1:])


def streams_of(n: int, each: int, stream: Any) -> np.ndarray:
    """int64[n]: a lane is a stream; of collectors with streams of their own, ``each`` lanes for each of these."""
    if stream is not None and (isinstance(stream, bool) or np.ndim(stream) or not hasattr(stream, "__index__")):
        raise ValueError(f"stream={stream!r}: one integer; lanes are told apart by themselves")
    return np.arange(n, dtype=np.int64) % each + (int(stream) if stream is not None else 0) * each


def rows_at_once(buffer: Buffer, each: int) -> int:
    """How many rows one record of this buffer's rings holds, in whole time steps. Raises SchemaError where it is none."""
    assert buffer.schema is not None
    room = buffer._header["ring_bytes"] // 2 - _RECORD
    most = room // (buffer.schema.row_bytes + _STREAM + _LEAF) // each * each
    if not most:
        raise SchemaError(
            f"a time step of {each:,} rows of {buffer.schema.row_bytes:,} bytes does not fit half a ring of "
            f"{buffer._header['ring_bytes']:,} bytes: make the storage with a larger ring_bytes. Nothing was stored."
        )
    return most


class Parts:
    """The native ticket of rows that were put in several records of whole time steps."""

    status = 0

    def __init__(self, parts: list[Any], asked: int):
        self._parts, self.asked = parts, asked

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self._parts)

    def done(self) -> bool:
        return all(p.done() for p in self._parts)

    def wait(self, seconds: float) -> int:
        return self._parts[-1].wait(seconds)  # a ring is drained in order

    def pieces(self) -> list:
        return [piece for p in self._parts for piece in p.pieces()]


def coordinates(slots: torch.Tensor, inner: Sequence[int]) -> torch.Tensor:
    """int64[*batch] slots → [*batch, ndim]: time, then the lane."""
    each, out = math.prod(inner), []
    lane = slots % each
    for size in reversed(inner):
        out.append(lane % size)
        lane = lane // size
    return torch.stack([slots // each, *reversed(out)], -1)


def slots_of(index: Any, inner: Sequence[int]) -> torch.Tensor:
    """The inverse, of a tensor [*batch, ndim] or a tuple of ndim tensors. Raises IndexError, TypeError."""
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(i) for i in index], -1)
    index, ndim = torch.as_tensor(index).cpu(), len(inner) + 1
    if index.dtype.is_floating_point or index.dtype is torch.bool:
        raise TypeError(f"index of dtype {index.dtype}: integers are needed")
    if not index.ndim or index.shape[-1] != ndim:
        raise IndexError(f"index of shape {list(index.shape)}: [n, {ndim}] is needed, or a tuple of {ndim} tensors")
    slots = index[..., 0].long()
    for size, i in zip(inner, index[..., 1:].unbind(-1), strict=True):
        if i.numel() and (int(i.min()) < 0 or int(i.max()) >= size):
            raise IndexError(f"index {int(i.max() if i.min() >= 0 else i.min())} is out of range of a dimension of {size}")
        slots = slots * size + i
    return slots
