"""Rows that are changed where they lie, by row id, through the ring like new ones: whoever dies, an edit is whole or was never begun."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmbuf import failures
from shmbuf._extension import native
from shmbuf.errors import RingFull, SchemaError
from shmbuf.reading import Reading, address_of, as_ids
from shmbuf.rows import as_array
from shmbuf.schema import Column, Schema, as_key, core_columns, flatten, show_key
from shmbuf.ticket import EditTicket, Nothing, left_of, same_ids, seconds_of

_STATUS = native.STATUSES
MAX_KNOWN = 64  # sets of keys
ROW = Column(("row_id",), "int64", ())


class Edits(Reading):
    """What `Buffer` does about edits."""

    def edit(
        self, ids: Any, rows: Mapping, *, version: Any = None, require_newer: bool = False, timeout: float | None = None
    ) -> np.ndarray:
        """New values for some keys of rows that are stored, for every process; returns when they are there.

        Each row changes at once; different rows may change one after another. Priorities, order and trajectories stay: of an end
        key or trajectory key only the value changes (a checkpoint that is loaded later goes by the value).

        Args:
            ids: int64[n] row ids. Of an id named twice the last values stay.
            rows: arrays [n, *shape] under any of the schema's keys, nested as they are; dtypes are never converted.
            version: a key of ``rows``, of one integer or float32/64 a row: a row is changed only if its stored number is not larger
                (require_newer: if it is smaller) than the new one. The writer compares, so that edits of all processes come one
                after another. Of an id named twice each is compared with what was stored before.
            timeout: seconds in all; None: the buffer's.

        Returns:
            bool[n]: where the row was changed. Those not stored any more are counted (``stats()["stale_edits"]``).

        Raises:
            SchemaError: lists every difference. IndexError: an id never stored. RingFull: the time is over. Nothing was changed.
            CommitPending: edits that are in the ring will be made; ``.ticket`` waits for them.
        """
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        return self._edit(ids, rows, timeout, False, version, require_newer).wait(left_of(timeout, since))

    def put_edit(
        self, ids: Any, rows: Mapping, *, version: Any = None, require_newer: bool = False, timeout: float | None = None
    ) -> EditTicket:
        """As `edit`, without waiting for it to be made; ``ticket.wait()`` gives what `edit` returns."""
        return self._edit(ids, rows, self._timeout if timeout is None else timeout, True, version, require_newer)

    def _edit(
        self, ids: Any, rows: Mapping, timeout: float | None, wake: bool, version: Any, require_newer: bool
    ) -> EditTicket:
        if version is None and type(rows) is dict and type(ids) is np.ndarray:
            known = self._known_columns((*rows,))
            leaves = [*rows.values(), ids]
            if known is not None and all(type(a) is np.ndarray for a in leaves):
                ticket = self.edit_leaves(known, leaves, len(ids) if ids.ndim else 0, False, False, wake, timeout)
                if ticket is not None:
                    return ticket
        ids = as_ids(ids)
        columns, arrays = self._spans(rows, len(ids))
        kind = 0
        if version is not None:
            at = next((i for i, c in enumerate(columns) if c.key == as_key(version)), None)
            if at is None:
                raise KeyError(f"version={show_key(as_key(version))} is none of the keys to edit. Nothing was changed")
            kind = _kind_of_version(columns[at], require_newer)
            columns.insert(0, columns.pop(at))
            arrays.insert(0, arrays.pop(at))
        if not len(ids) or not columns:
            return EditTicket(Nothing, self, same_ids)  # type: ignore[arg-type]
        spans = [(c.offset, c.nbytes) for c in columns]
        return self.submit_edit(spans, [address_of(a) for a in arrays], ids, wake, timeout, kind)

    def _use_schema(self, schema: Schema) -> None:
        super()._use_schema(schema)
        self._known: dict[tuple, Any] = {}  # columns for the core, by the keys of a mapping

    def _known_columns(self, keys: tuple) -> Any:
        """Of these keys of a mapping and, last, of row ids; None: look closer."""
        if self._schema is None:
            return None
        if keys not in self._known:
            places = {k: c for c in self._schema.columns for k in (c.key, *(c.key if len(c.key) == 1 else ()))}
            columns = [places[k] for k in keys if k in places]
            if not keys or len(set(columns)) < len(keys):  # unknown, nested, or named twice
                return None
            if len(self._known) >= MAX_KNOWN:
                self._known = {}
            self._known[keys] = core_columns([*columns, ROW])
        return self._known[keys]

    def edit_leaves(
        self, columns: Any, leaves: list, n: int, tensors: bool, by_slot: bool, wake: bool, timeout: float | None
    ) -> EditTicket | None:
        """For the floors above: an edit of n rows by what they have in each of ``columns`` and, last, by their ids or (by_slot) by
        their slots, negative ones from the end. None: it is not what the core takes as it is, and nothing is changed."""
        t = self._call("edit_leaves", columns, leaves, n, tensors, by_slot, seconds_of(timeout), wake)
        return None if t is None else self._submitted(t, timeout)

    def _require_known(self, ids: np.ndarray) -> None:
        end = self._get("window")[2]
        unknown = np.flatnonzero((ids < 0) | (ids >= end))
        if len(unknown):
            j = int(unknown[0])
            lo, hi = self.window
            stored = f"stored now: {lo} to {hi - 1}" if hi > lo else "the buffer is empty"
            raise IndexError(f"ids[{j}] = {ids[j]}: no such row has been stored; {stored}. Nothing was changed")

    def _spans(self, rows: Mapping, n: int) -> tuple[list[Column], list[np.ndarray]]:
        if not isinstance(rows, Mapping):
            raise SchemaError(f"rows are a mapping of key to array, not {type(rows).__name__}")
        if self.schema is None:
            raise SchemaError(f"buffer {self.name!r} has no rows yet, so there is nothing to edit")
        columns = {c.key: c for c in self.schema.columns}
        lines, found, arrays = [], [], []
        for key, leaf in flatten(rows).items():
            column, array = columns.get(key), as_array(key, leaf)
            if column is None:
                lines.append(f"{show_key(key)}: not in the schema")
            elif (line := _difference(column, array, n)) is not None:
                lines.append(line)
            else:
                found.append(column)
                raw = array.view(column.numpy) if array.dtype.name == "bfloat16" else array
                arrays.append(np.require(raw, np.dtype(column.numpy), ["C", "A"]))
        if lines:
            raise SchemaError("an edit does not fit the buffer's schema; nothing was changed:\n  " + "\n  ".join(lines))
        return found, arrays

    def submit_edit(
        self,
        spans: list[tuple[int, int]],
        addresses: list[int],
        ids: np.ndarray,
        wake: bool,
        timeout: float | None,
        version: int = 0,
    ) -> EditTicket:
        """For the floors above: an edit of (offset, bytes) of each row, checked; addresses: of the packed new values; version: what
        the first span is, where it is compared."""
        seconds = seconds_of(timeout)
        while True:
            t = self._call("edit", spans, addresses, address_of(ids), len(ids), seconds, wake, version)
            if _STATUS[t.status] != "unknown_row":
                break
            self._require_known(ids)
        if _STATUS[t.status] == "never":
            raise SchemaError(
                f"one edited row has {sum(b for _, b in spans):,} bytes, the ring {self._header['ring_bytes']:,}: a record is at "
                "most half of it. Edit fewer keys at a time, or create the buffer with a larger ring_bytes"
            )
        return self._submitted(t, timeout)

    def _submitted(self, t: Any, timeout: float | None) -> EditTicket:
        ticket = EditTicket(t, self, same_ids)  # type: ignore[arg-type]
        if t.status:
            why, seconds = _STATUS[t.status], seconds_of(timeout)
            if why == "full" and not ticket.rows:
                raise RingFull(
                    f"the ring has no room for an edit after {seconds:g} s: {failures.held_up_text(self)} Nothing was changed."
                )
            failures.put_failed(self, why, ticket, seconds)  # type: ignore[arg-type]
        return ticket


# layout.h: Versions
_VERSIONS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
_STRICTLY = 16


def _kind_of_version(column: Column, require_newer: bool) -> int:
    if int(np.prod(column.shape, dtype=np.int64)) != 1 or column.dtype not in _VERSIONS:
        raise ValueError(
            f"version={show_key(column.key)} is {column}: one number a row is needed, {', '.join(_VERSIONS)}. Nothing was changed"
        )
    return _VERSIONS.index(column.dtype) + 1 + (_STRICTLY if require_newer else 0)


def _difference(column: Column, array: np.ndarray, n: int) -> str | None:
    name = array.dtype.newbyteorder("=").name
    if column.numpy == name:
        name = column.dtype  # also the raw bits of a dtype that numpy lacks
    if (name, array.shape) == (column.dtype, (n, *column.shape)):
        return None
    return f"{show_key(column.key)}: got {name}{list(array.shape)}, expected {column.dtype}{[n, *column.shape]}"
