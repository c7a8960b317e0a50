"""Changing rows that are stored. By their ids: a row that is overwritten meanwhile is left alone, and counted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.utils import is_non_tensor

from shmbuf.attaching import numbers
from shmbuf.edits import ROW
from shmbuf.errors import SchemaError
from shmbuf.face.transforming import Transforming
from shmbuf.face.values import leaves_of, of_rows
from shmbuf.forms import take_apart, take_items
from shmbuf.schema import PACKED, Column, Key, Schema, as_key, core_columns, show_key
from shmbuf.storage import of_tensors, torch_dtype
from shmbuf.tensors import as_numpy, slots_at, stack
from shmbuf.ticket import left_of

Self = TypeVar("Self", bound="Editing")


class ConditionalUpdateResult(NamedTuple):
    """What became of each row of `update_if_present`.

    Attributes:
        updated: bool[n]: changed.
        version_rejected: bool[n]: still there, and of a version that is not to be replaced; None: not asked for.
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    @property
    def updated_count(self) -> int:
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Overwritten before."""
        return len(self.updated) - self.updated_count - self.version_rejected_count


class Editing(Transforming):
    """`set_`, `set_at_`, `update_`, `rb[index] = rows`, `write_all`, `update_if_present`."""

    def set_at_(self: Self, key: Any, value: Any, index: Any, *, row_id: Any = None) -> Self:
        """Give the rows at ``index`` (int, slice, list, tensor, mask) another value under ``key``, as it is stored: no transform.

        Args:
            value: [n, *shape] of the column's dtype, or what expands to it; Python numbers that it holds exactly (fractions: to its
                precision). Of a column of Python values: a list of one a row, or one for all.
            index: slots, whatever rows lie there now; with ndim > 1 also ``batch["index"]``. None if row_id is given.
            row_id: LongTensor[n], as ``batch["row_id"]``: a row that has been overwritten meanwhile is left alone, and
                counted.

        Raises:
            KeyError, IndexError, RuntimeError (shape), SchemaError (dtype). In all cases nothing was changed.
        """
        if row_id is not None and index is not None:
            raise TypeError("index or row_id, not both")
        if self._set_plain(key, value, index, row_id):
            return self
        columns, at = self._columns_of(as_key(key)), as_key(key)
        if row_id is None:
            slots, shape = self._slots(index)
        else:
            ids, shape = numbers(row_id, "row_id"), tuple(np.shape(row_id))
        if is_tensor_collection(value) and not is_non_tensor(value):
            leaves = {(*at, *k): v for k, v in leaves_of(value).items()}
        else:
            leaves = {c.key: value for c in columns}
        values = self._checked(leaves, columns, shape)
        if row_id is None:
            self._edit(slots, values)
        elif len(ids) and values:
            with self._alone(self._timeout(None)):
                self._apply(ids, values)
        return self

    def _set_plain(self, key: Any, value: Any, index: Any, row_id: Any) -> bool:
        """The usual case: of one column, a tensor as it is stored, and a tensor of slots or ids. False: look closer."""
        storage, rows = self._storage, index if row_id is None else row_id
        if (
            type(rows) is not torch.Tensor
            or type(value) is not torch.Tensor
            or storage.ndim > 1
            or not self.initialized
        ):
            return False
        columns = self._one_column(key)
        if columns is None:
            return False
        buffer = storage.buffer
        with self._alone(buffer._timeout):
            since = time.monotonic()
            ticket = buffer.edit_leaves(
                columns, [value, rows], rows.numel(), True, row_id is None, False, buffer._timeout
            )
            if ticket is None:
                return False
            ticket.finish(left_of(buffer._timeout, since))
        return True

    def _one_column(self, key: Any) -> Any:
        """For the core, with a row's number behind it. None: look closer."""
        schema, known = self._storage.schema(), self._storage.one
        try:
            columns = known.get(key)
        except TypeError:  # a list
            return None
        if columns is None:
            at = as_key(key)
            column = next((c for c in schema.columns if c.key == at and c.dtype != PACKED), None)
            if column is not None:
                dtypes = [torch_dtype(column), torch.int64]
                columns = known[key] = of_tensors(core_columns([column, ROW], dtypes), dtypes)
        return columns

    def set_(self: Self, key: Any, value: Any) -> Self:
        """Give all rows another value [len, *shape] under ``key``, as it is stored. Errors: see `set_at_`."""
        return self.update_({key: value})

    def update_(
        self: Self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Iterable[Any] | None = None
    ) -> Self:
        """Give all rows other values, [len, *shape] under each key, as they are stored.

        Args:
            clone: nothing here: what is written is a copy in any case.
            keys_to_update: only these.

        Raises:
            KeyError: a key that is not stored. RuntimeError: a shape. SchemaError: a dtype. In all cases nothing was changed.
        """
        leaves = _leaves(input_dict_or_td)
        if keys_to_update is not None:
            chosen = [as_key(k) for k in keys_to_update]
            missing = [k for k in chosen if not any(at[: len(k)] == k for at in leaves)]
            if missing:
                raise KeyError(f"key {show_key(missing[0])} is in keys_to_update, but not in what to update with")
            leaves = {k: v for k, v in leaves.items() if any(k[: len(c)] == c for c in chosen)}
        slots, shape = self._slots(slice(None))
        columns = [self._columns_of(k)[0] for k in leaves]
        self._edit(slots, self._checked(leaves, columns, shape, exact=True))
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace the rows at ``index`` (int, slice, list, tensor, mask) by ``value``, of its shape, with all their keys, through the
        inverse transforms. ``rb[key] = value``: `set_`.

        Raises:
            IndexError, RuntimeError (shape), SchemaError. In all cases nothing was changed.
        """
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            self.set_(index, value)
            return
        if (form := self._schema().form) is not None and not is_tensor_collection(value):
            self._set_in_form(index, value, form)
            return
        rows = stack(list(value)) if isinstance(value, (list, tuple)) and value else value
        if not is_tensor_collection(rows):
            raise SchemaError(f"rows are a TensorDict, not {type(value).__name__}. Nothing was changed.")
        slots, shape = self._slots(index)
        if self._touched and (rows := self._inverted(rows)) is None:
            return
        if not is_tensor_collection(rows):
            raise SchemaError(
                f"the transforms made {type(rows).__name__} of the rows, a TensorDict is needed. Nothing was changed."
            )
        if tuple(rows.batch_size) not in (shape, ()):
            raise RuntimeError(
                f"rows of batch size {list(rows.batch_size)} for an index of shape {list(shape)}. Nothing was changed."
            )
        single = not rows.batch_dims
        leaves, _ = self._storage._convert(
            rows if rows.batch_dims < 2 else rows.reshape(-1), single, None, None, lambda *_: None
        )
        keys, n = self._storage.schema().keys, len(slots)
        self._edit(slots, {k: t.expand(n, *t.shape) if single else t for k, t in zip(keys, leaves, strict=True)})

    def _set_in_form(self, index: Any, value: Any, form: list[Any]) -> None:
        """Rows that are no TensorDicts: one where the index is one row's, else leaves with the rows in front, or a list of rows."""
        slots, shape = self._slots(index)
        if self._touched and (value := self._inverted(value)) is None:
            return
        listed = shape and isinstance(value, list) and form[0] != "list"
        rows = take_items(value) if listed else take_apart(value, not shape)
        leaves, n = self._storage._convert(rows, not shape, None, None, lambda *_: None)
        if shape and shape != (n,):
            raise RuntimeError(f"{n:,} rows for an index of shape {list(shape)}. Nothing was changed.")
        keys = self._storage.schema().keys
        self._edit(slots, {k: t if shape else t[None] for k, t in zip(keys, leaves, strict=True)})

    def write_all(self, data: Any, end: int | None = None) -> None:
        """``rb[:end] = data``: replace rows in the order of their slots, through the inverse transforms.

        end: None: as many as data has; of a full buffer, all. Errors: see ``rb[index] = rows``.
        """
        if end is None and len(self) < self._storage.max_size:
            if is_tensor_collection(data) and not data.batch_dims:
                raise SchemaError(
                    "write_all() takes a batch of rows, batch size [n]; got one row. Nothing was changed."
                )
            end = data.batch_size[0] if is_tensor_collection(data) else len(data)
        self[:end] = data

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change rows that are still the ones that were sampled.

        Args:
            index, generation: LongTensor[n] (or of more dimensions, as ``extend`` returned the index): ``batch["index"]`` and
                ``batch["row_id"] // capacity``. With ndim > 1 the index has ndim numbers for each row, in its last dimension.
            patch: the keys to change, [n, *shape] each (or in the generation's shape, or that of the batch that was put).
            version_key: a column of one number a row, which is set to ``version`` ([n] or one number) where that is larger (or equal,
                unless ``require_newer``); other rows are left alone. Of several for one row the largest, of equal ones the last, counts.
                The writer compares, so that the updates of all processes come one after another: see `Buffer.edit`.

        Raises:
            KeyError, IndexError, ValueError, SchemaError: in all cases nothing was changed.
        """
        index = self._storage.slots_of(index) if self._storage.ndim > 1 else index
        shape = torch.Size(np.shape(generation))
        slots, generations = numbers(index, "index"), numbers(generation, "generation")
        if len(slots) != len(generations):
            raise ValueError(
                f"index and generation must address the same number of records, "
                f"got {len(slots)} indices and {len(generations)} generations."
            )
        if (version_key is None) != (version is None):
            raise ValueError("version_key and version must be provided together.")
        n, capacity = len(slots), self.buffer.capacity
        if n and not (slots.min() >= 0 and slots.max() < capacity):
            raise IndexError(f"an index is out of range: the capacity is {capacity:,} rows. Nothing was changed.")
        if n and generations.max() > 2**62 // capacity:
            raise IndexError(f"generation {generations.max()}: no row has such a number. Nothing was changed.")
        leaves = _leaves(patch)
        columns = [self._columns_of(k)[0] for k in leaves]
        values = {
            c.key: of_rows(self._flat(leaves[c.key], shape, c), c, (n,), exact=True, refused=SchemaError)
            for c in columns
        }
        ids, chosen, key = generations * capacity + slots, generations >= 0, None  # -1: of a slot that never had a row
        if version_key is not None:
            key, values_of = self._version(version_key, version, values, n)
            values[key], new = values_of, values_of.reshape(-1)
            best: dict[int, int] = {}  # of several for one row
            for i, row in enumerate(ids.tolist()):
                if row not in best or new[i] >= new[best[row]]:
                    best[row] = i
            chosen[np.setdiff1d(np.arange(n), list(best.values()))] = False
        updated, rejected = np.zeros(n, bool), np.zeros(n, bool)
        if values and chosen.any():
            arrays = {k: as_numpy(t[torch.from_numpy(chosen)]) for k, t in values.items()}
            with self._alone(self._timeout(None)):
                ticket = self.buffer.put_edit(ids[chosen], arrays, version=key, require_newer=require_newer)
                updated[chosen] = ticket.wait(self._timeout(None))
            rejected[chosen] = ticket.not_newer()
        if key is None:
            return ConditionalUpdateResult(torch.from_numpy(updated))
        there = set(ids[updated | rejected].tolist())
        for i in np.flatnonzero(
            ~chosen & (generations >= 0)
        ).tolist():  # those that another one of this call came before
            rejected[i] = int(ids[i]) in there
        return ConditionalUpdateResult(torch.from_numpy(updated), torch.from_numpy(rejected))

    def _flat(self, value: Any, shape: torch.Size, c: Column) -> Any:
        """A value for rows of this shape, or of a batch as it was put, as one for rows in a line."""
        if not isinstance(value, torch.Tensor) or value.numel() != shape.numel() * int(
            np.prod(c.shape, dtype=np.int64)
        ):
            return value
        ndim, lead = self._storage.ndim, value.shape[: value.ndim - len(c.shape)]
        if value.shape[len(lead) :] == c.shape and lead == shape:
            return value.reshape(-1, *c.shape)
        if value.shape[len(lead) :] == c.shape and len(lead) == ndim > 1:
            return value.transpose(self._storage.time_dim, 0).reshape(-1, *c.shape)
        return value

    def _version(self, version_key: Any, version: Any, patched: Mapping[Key, Any], n: int) -> tuple[Key, torch.Tensor]:
        """Its column's key, and [n, *shape] of its dtype."""
        if isinstance(version_key, str) and "." in version_key:
            raise ValueError(
                f"Dotted-string version keys are not supported: got {version_key!r}. Pass the nested key in tuple form, "
                f"e.g. {tuple(version_key.split('.'))!r}."
            )
        key = as_key(version_key)
        if key in patched:
            raise ValueError(f"version_key {version_key!r} may not appear in patch.")
        column = self._columns_of(key)[0]
        if int(np.prod(column.shape, dtype=np.int64)) != 1:
            raise ValueError(
                f"version_key {version_key!r} must reference a per-record scalar field; the storage holds feature shape "
                f"{column.shape}."
            )
        if isinstance(version, (np.ndarray, np.generic)):
            version = torch.as_tensor(version)
        if isinstance(version, torch.Tensor) and version.dtype != (dtype := torch_dtype(column)):
            whole = version.to(dtype)
            if not (whole.to(version.dtype) == version).all() or dtype is torch.bool:
                raise SchemaError(f"version {version.tolist()} is no {column.dtype}. Nothing was changed.")
            version = whole
        size = int(np.size(version)) if not isinstance(version, torch.Tensor) else version.numel()
        if size not in (1, n):
            raise ValueError(f"version of shape {list(np.shape(version))} for {n} records: one, or one for each")
        flat = Column(key, column.dtype, ())
        one = version.reshape(-1) if isinstance(version, torch.Tensor) else version
        return key, of_rows(one, flat, (n,), refused=ValueError).reshape(n, *column.shape)

    def submit_update_if_present(self, **how: Any) -> Future[ConditionalUpdateResult]:
        """`update_if_present` by a thread, one after the other. `synchronize` and `shutdown` wait for it."""
        if self._shut:
            raise RuntimeError("A shut down replay buffer cannot accept updates.")
        with self._editing:
            if self._editor is None:
                self._editor = ThreadPoolExecutor(1, thread_name_prefix="shmbuf-edit")
            future = self._editor.submit(self.update_if_present, **how)
            ended = [f for f in self._pending if f.done() and not f.cancelled() and f.exception() is not None]
            self._pending = [*ended[:1], *(f for f in self._pending if not f.done()), future]
        return future

    # ---- how ----------------------------------------------------------------------------------------------------

    def _slots(self, index: Any) -> tuple[np.ndarray, tuple[int, ...]]:
        """int64[n] slots that an index means now, and its shape."""
        self._schema()
        if self._storage.ndim > 1:
            chosen = self._storage.cells_at(index)
            return np.ascontiguousarray(chosen).reshape(-1), chosen.shape
        if index is None or (isinstance(index, tuple) and not index):
            raise IndexError(f"{index!r} is no index: an int, slice, list, tensor, mask or key is")
        size = len(self)
        if isinstance(index, slice) or index is Ellipsis:
            slots = np.arange(*(slice(None) if index is Ellipsis else index).indices(size), dtype=np.int64)
        else:
            slots = self._storage._counted(slots_at(index, size), size)
        return np.ascontiguousarray(slots).reshape(-1), np.shape(slots)

    def _schema(self) -> Schema:
        if not self.initialized:
            raise RuntimeError(
                f"buffer {self.name!r} has no rows yet, so there is nothing to change: extend() stores the first"
            )
        return self._storage.schema()

    def _columns_of(self, key: Key) -> list[Column]:
        schema = self._schema()
        columns = [c for c in schema.columns if c.key[: len(key)] == key]
        if not columns:
            raise KeyError(f"key {show_key(key)} is not stored: {', '.join(map(show_key, schema.keys))}")
        return columns

    @staticmethod
    def _checked(
        leaves: Mapping[Key, Any], columns: list[Column], shape: tuple[int, ...], exact: bool = False
    ) -> dict[Key, torch.Tensor]:
        known = {c.key: c for c in columns}
        for key in leaves:
            if key not in known:
                raise KeyError(f"key {show_key(key)} is not stored: {', '.join(map(show_key, known))}")
        return {key: of_rows(value, known[key], shape, exact=exact) for key, value in leaves.items()}

    def _edit(self, slots: np.ndarray, values: dict[Key, torch.Tensor]) -> None:
        if len(slots) and values:
            with self._alone(self._timeout(None)):
                self._apply(self.buffer.ids_of(slots), values)

    def _apply(self, ids: np.ndarray, values: dict[Key, torch.Tensor]) -> np.ndarray:
        """bool[n]: changed."""
        return self.buffer.edit(ids, {k: as_numpy(t) for k, t in values.items()})


def _leaves(given: TensorDictBase | Mapping[Any, Any]) -> dict[Key, Any]:
    if not isinstance(given, Mapping) and not is_tensor_collection(given):
        raise TypeError(f"a dict or a TensorDict is needed, not {type(given).__name__}")
    return leaves_of(given)
