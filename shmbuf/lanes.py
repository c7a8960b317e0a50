"""Storages of more than one dimension: a row is a cell of [time, *lanes]. Time steps lie one after another, so that with b lanes
``slot // b`` is the time and ``slot % b`` the lane: every record of every collector holds whole time steps, and so does the capacity."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from shmbuf.errors import BufferFormatError, CommitInterrupted, CommitPending, RingFull, SchemaError
from shmbuf.forms import Rows
from shmbuf.schema import Key, Schema, show_key
from shmbuf.streams import resolve
from shmbuf.ticket import Ticket, left_of

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
        raise BufferFormatError(
            f"the buffer has {ndim} dimensions, {capacity:,} cells, and steps of {list(schema.inner)}"
        )


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


def cells(data: Any, single: bool, ndim: int, time_dim: int) -> tuple[Any, tuple[int, ...]]:
    """A batch of ndim dimensions (that of time goes first, in exchange), or one time step, as flat rows; and the shape of a step."""
    dims = ndim - 1 if single else ndim

    def shape_of(shape: Sequence[int], what: str) -> tuple[int, ...]:
        if len(shape) < dims:
            raise SchemaError(
                f"got {what} {list(shape)}: with ndim={ndim}, "
                + (
                    f"add() takes a time step of {dims} dimensions"
                    if single
                    else f"extend() takes {dims} dimensions, that of time is number {time_dim}"
                )
                + ". Nothing was stored."
            )
        return tuple(shape[:dims])

    def flat(x: Any) -> Any:
        return (x if single else x.transpose(time_dim, 0)).flatten(0, dims - 1)

    if isinstance(data, Rows):
        shapes = {}
        for key, leaf in data.leaves.items():
            if not isinstance(leaf, torch.Tensor):
                raise SchemaError(f"key {show_key(key)}: Python values in rows of ndim={ndim} come in TensorDicts only")
            shapes[shape_of(leaf.shape, f"key {show_key(key)} of shape")] = key
        if len(shapes) > 1:
            raise SchemaError(
                f"leaves have different first {dims} dimensions: {', '.join(str(list(s)) for s in shapes)}"
            )
        shape = next(iter(shapes))
        leaves = {k: flat(v) for k, v in data.leaves.items()}
        out: Any = Rows(data.form, leaves, math.prod(shape))
    else:
        if not isinstance(data, TensorDictBase) and not is_tensor_collection(data):
            raise SchemaError(f"rows are a TensorDict, not {type(data).__name__}")
        shape = shape_of(data.batch_size, "batch size")
        if len(data.batch_size) > dims:
            raise SchemaError(
                f"got batch size {list(data.batch_size)}: with ndim={ndim} it has {dims} dimensions. Nothing was stored."
            )
        out = flat(data)
    if single:
        return out, shape
    stored = list(shape)
    stored[0], stored[time_dim] = stored[time_dim], stored[0]
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
    if slots.numel() and int(slots.min()) < 0:
        raise IndexError(f"index {int(slots.min())} of the time dimension: ≥ 0 is needed")
    for size, i in zip(inner, index[..., 1:].unbind(-1), strict=True):
        if i.numel() and (int(i.min()) < 0 or int(i.max()) >= size):
            raise IndexError(
                f"index {int(i.max() if i.min() >= 0 else i.min())} is out of range of a dimension of {size}"
            )
        slots = slots * size + i
    return slots


def _is_whole(x: Any) -> bool:
    """An array or a tensor of integers."""
    if isinstance(x, torch.Tensor):
        return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype is torch.bool)
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def _times(index: Any, dim: int, steps: int, ndim: int) -> tuple[torch.Tensor, Any]:
    """int64 steps among which an index of dimension ``dim`` chooses, and the index for a tensor that has only these: so that finding a few
    cells does not cost what all of them would. IndexError: there is no such step."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [p for p in parts if not isinstance(p, (torch.Tensor, np.ndarray))] and len(parts) <= ndim + 1:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (ndim + 1 - len(parts)), *parts[at + 1 :])
    whole = [(isinstance(p, int) and not isinstance(p, bool)) or _is_whole(p) for p in parts]
    simple = all(w or isinstance(p, slice) for w, p in zip(whole, parts, strict=True))
    if not simple or dim >= len(parts) or len(parts) > ndim:
        return torch.arange(steps), index  # masks, new dimensions; and what torch has an error for
    part = parts[dim]
    of: Any
    if isinstance(part, slice):
        begin, end, by = part.indices(steps)
        if by < 1:
            raise IndexError(f"{part}: a step ≥ 1 is needed")
        chosen, of = torch.arange(begin, max(begin, end), by), slice(None)
    else:
        given = torch.as_tensor(part).cpu().long()
        chosen = given.reshape(-1)
        if chosen.numel() and not (int(chosen.min()) >= -steps and int(chosen.max()) < steps):
            raise IndexError(f"index {part} is out of range: {steps:,} steps are stored")
        chosen = torch.where(chosen < 0, chosen + steps, chosen)
        of = 0 if isinstance(part, int) else torch.arange(len(chosen)).reshape(given.shape)
    return chosen, (*parts[:dim], of, *parts[dim + 1 :])


class Cells:
    """What a `ShmStorage` does where it has more dimensions than one."""

    ndim: int
    _time_dim: int | None = None
    _inner: tuple[int, ...] | None
    _buffer: Buffer | None
    _ready: Schema | None
    buffer: Any
    max_size: Any
    schema: Any
    _convert: Any
    _submit: Any
    _column: Any
    _rows: Any
    _is_key: Any
    __len__: Any

    def _put_cells(
        self,
        td: Any,
        inner: tuple[int, ...],
        wake: bool,
        timeout: float | None,
        priority_key: Key | None,
        stream: Any,
        priorities: Any,
    ) -> Ticket:
        """Flat rows, whole time steps of shape ``inner``, as records that are whole time steps."""
        buffer, each, since = self.buffer, math.prod(inner), time.monotonic()
        timeout = buffer.config["timeout"] if timeout is None else timeout
        require_inner(inner, self.inner, self.max_size)

        def streams(n: int, schema: Schema) -> np.ndarray | None:
            marks = resolve(schema, buffer.config.get("streams") or {})
            return (
                streams_of(n, each, stream) if stream is not None or (marks.keep and marks.trajectory is None) else None
            )

        leaves, n = self._convert(
            td, False, priority_key, timeout, lambda n, s: buffer.extras(n, streams(n, s), priorities, s), inner
        )
        if n == 0:
            ticket = buffer._nothing()
        else:
            assert buffer.schema is not None
            of, p = buffer.extras(n, streams(n, buffer.schema), priorities)
            most, parts = rows_at_once(buffer, each), list[Any]()
            for start in range(0, n, most):
                part = slice(start, min(start + most, n))
                extras = (None if of is None else of[part], None if p is None else p[part])
                try:
                    got = self._submit(
                        [t[part] for t in leaves],
                        part.stop - start,
                        wake,
                        left_of(timeout, since),
                        self._as_indices,
                        extras,
                    )
                except (RingFull, CommitInterrupted) as e:
                    if not parts:
                        raise
                    ticket = Ticket(Parts(parts, n), buffer, self._as_indices)
                    kind = CommitPending if isinstance(e, RingFull) else CommitInterrupted
                    raise kind(
                        f"{ticket.rows:,} of {n:,} rows are in the ring and will be stored; then {e}",
                        ticket,
                        ticket.rows,
                    ) from None
                parts.append(got._native)
            ticket = Ticket(Parts(parts, n), buffer, self._as_indices)
        ticket.convert = self._as_indices
        return ticket

    def _as_indices(self, ids: np.ndarray, capacity: int) -> torch.Tensor:
        return coordinates(torch.from_numpy(ids % capacity), self.inner or (1,) * (self.ndim - 1))

    @property
    def inner(self) -> tuple[int, ...] | None:
        """The shape of a time step; None: not known before the first rows."""
        schema = self._ready or (self._buffer.schema if self._buffer is not None else None)
        return schema.inner if schema is not None else self._inner

    @property
    def shape(self) -> torch.Size:
        """[time steps stored, *a step's shape]; of one dimension: [rows]."""
        inner = self.inner or ()
        return torch.Size((len(self) // math.prod(inner), *inner))

    @property
    def time_dim(self) -> int:
        """Of the dimensions of a batch that is put or read by index, through this handle, that of time: ``dim_extend``."""
        return self.ndim - 1 if self._time_dim is None else self._time_dim

    def lane_of(self, ids: np.ndarray) -> np.ndarray:
        """int64[n]: the lanes of rows, counted flat."""
        return ids % math.prod(self.inner or ())

    def located(self, td: TensorDictBase) -> TensorDictBase:
        """A sample whose "index" has ndim numbers a row."""
        return td.set("index", coordinates(td.get("index"), self.inner or ()))

    def slots_of(self, index: Any) -> torch.Tensor:
        """Of such indices, or tuples of ndim tensors."""
        return slots_of(index, self.schema().inner)

    def cells_at(self, index: Any) -> np.ndarray:
        """int64 slots of the cells that ``rb[index]`` means, in its shape."""
        return self._cells(index, self.schema().inner, self.time_dim).numpy()

    def _cells(self, index: Any, inner: tuple[int, ...], swap: int) -> torch.Tensor:
        """Of what samples give, (time, lane) as a tensor [*batch, ndim] or a tuple of ndim tensors, these cells; of anything else what a
        tensor means by it whose first dimension, time, and number ``swap`` are exchanged."""
        if self._are_coordinates(index):
            return slots_of(index, inner)
        index = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        steps, each = len(self) // math.prod(inner), math.prod(inner)
        lanes = torch.arange(each).reshape(1, *inner)
        try:
            times, index = _times(index, swap, steps, len(inner) + 1)
            time, lane = (
                t.expand(len(times), *inner).transpose(0, swap)[index]
                for t in (times.reshape(-1, *(1 for _ in inner)), lanes)
            )
        except (ValueError, OverflowError):  # torch, of what int64 does not hold
            raise IndexError(
                f"index {index} is out of range: {steps:,} steps of shape {list(inner)} are stored"
            ) from None
        return time * each + lane

    def _are_coordinates(self, index: Any) -> bool:
        if isinstance(index, tuple):
            return len(index) == self.ndim and all(_is_whole(i) and i.ndim for i in index)
        return _is_whole(index) and index.ndim > 1 and index.shape[-1] == self.ndim

    def _get_cells(self, index: Any, swap: int) -> Any:
        schema = self.schema()
        inner, each = schema.inner, math.prod(schema.inner)
        if self._is_key(index):
            column = self._column(schema, (index,) if isinstance(index, str) else index)
            return column.reshape(len(column) // each, *inner, *column.shape[1:]).transpose(0, swap)
        chosen = self._cells(index, inner, swap)
        return self._rows(schema, chosen.reshape(-1).numpy()).reshape(chosen.shape)
