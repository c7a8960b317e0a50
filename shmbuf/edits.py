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
from shmbuf.schema import Column, flatten, show_key
from shmbuf.ticket import EditTicket, Nothing, left_of, same_ids, seconds_of

_STATUS = native.STATUSES


class Edits(Reading):
    """What `Buffer` does about edits."""

    def edit(self, ids: Any, rows: Mapping, *, timeout: float | None = None) -> np.ndarray:
        """New values for some keys of rows that are stored, for every process; returns when they are there.

        Each row changes at once; different rows may change one after another. Priorities, order and trajectories stay: of an end
        key or trajectory key only the value changes.

        Args:
            ids: int64[n] row ids. Of an id named twice the last values stay.
            rows: arrays [n, *shape] under any of the schema's keys, nested as they are; dtypes are never converted.
            timeout: seconds in all; None: the buffer's.

        Returns:
            bool[n]: where the row was still stored; others are left out, and counted (``stats()["stale_edits"]``).

        Raises:
            SchemaError: lists every difference. IndexError: an id never stored. RingFull: the time is over. Nothing was changed.
            CommitPending: edits that are in the ring will be made; ``.ticket`` waits for them.
        """
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        return self._edit(ids, rows, timeout, False).wait(left_of(timeout, since))

    def put_edit(self, ids: Any, rows: Mapping, *, timeout: float | None = None) -> EditTicket:
        """As `edit`, without waiting for it to be made; ``ticket.wait()`` gives what `edit` returns."""
        return self._edit(ids, rows, self._timeout if timeout is None else timeout, True)

    def _edit(self, ids: Any, rows: Mapping, timeout: float | None, wake: bool) -> EditTicket:
        ids = as_ids(ids)
        spans, arrays = self._spans(rows, len(ids))
        if not len(ids) or not spans:
            return EditTicket(Nothing, self, same_ids)  # type: ignore[arg-type]
        self._require_known(ids)
        return self.submit_edit(spans, [address_of(a) for a in arrays], ids, wake, timeout)

    def _require_known(self, ids: np.ndarray) -> None:
        end = self._get("window")[2]
        unknown = np.flatnonzero((ids < 0) | (ids >= end))
        if len(unknown):
            j = int(unknown[0])
            lo, hi = self.window
            stored = f"stored now: {lo} to {hi - 1}" if hi > lo else "the buffer is empty"
            raise IndexError(f"ids[{j}] = {ids[j]}: no such row has been stored; {stored}. Nothing was changed")

    def _spans(self, rows: Mapping, n: int) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
        if not isinstance(rows, Mapping):
            raise SchemaError(f"rows are a mapping of key to array, not {type(rows).__name__}")
        if self.schema is None:
            raise SchemaError(f"buffer {self.name!r} has no rows yet, so there is nothing to edit")
        columns = {c.key: c for c in self.schema.columns}
        lines, spans, arrays = [], [], []
        for key, leaf in flatten(rows).items():
            column, array = columns.get(key), as_array(key, leaf)
            if column is None:
                lines.append(f"{show_key(key)}: not in the schema")
            elif (line := _difference(column, array, n)) is not None:
                lines.append(line)
            else:
                spans.append((column.offset, column.nbytes))
                raw = array.view(column.numpy) if array.dtype.name == "bfloat16" else array
                arrays.append(np.require(raw, np.dtype(column.numpy), ["C", "A"]))
        if lines:
            raise SchemaError("an edit does not fit the buffer's schema; nothing was changed:\n  " + "\n  ".join(lines))
        return spans, arrays

    def submit_edit(
        self, spans: list[tuple[int, int]], addresses: list[int], ids: np.ndarray, wake: bool, timeout: float | None
    ) -> EditTicket:
        """For the floors above: an edit of (offset, bytes) of each row, checked; addresses: of the packed new values."""
        seconds = seconds_of(timeout)
        t = self._call("edit", spans, addresses, address_of(ids), len(ids), seconds, wake)
        ticket = EditTicket(t, self, same_ids)  # type: ignore[arg-type]
        why = _STATUS[t.status]
        if why == "never":
            raise SchemaError(
                f"one edited row has {sum(b for _, b in spans):,} bytes, the ring {self._header['ring_bytes']:,}: a record is at "
                "most half of it. Edit fewer keys at a time, or create the buffer with a larger ring_bytes"
            )
        if why == "full" and not ticket.rows:
            raise RingFull(
                f"the ring has no room for an edit after {seconds:g} s: {failures.held_up_text(self)} Nothing was changed."
            )
        if t.status:
            failures.put_failed(self, why, ticket, seconds)  # type: ignore[arg-type]
        return ticket


def _difference(column: Column, array: np.ndarray, n: int) -> str | None:
    name = array.dtype.newbyteorder("=").name
    if column.numpy == name:
        name = column.dtype  # also the raw bits of a dtype that numpy lacks
    if (name, array.shape) == (column.dtype, (n, *column.shape)):
        return None
    return f"{show_key(column.key)}: got {name}{list(array.shape)}, expected {column.dtype}{[n, *column.shape]}"
