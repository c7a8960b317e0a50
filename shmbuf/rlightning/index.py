"""Which episodes are stored whole: looked up in the rows' own numbers, of new rows only."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shmbuf._extension import native
from shmbuf.buffer import Buffer
from shmbuf.errors import Lapped
from shmbuf.reading import address_of
from shmbuf.rlightning.pushing import EPISODE_ID, EPISODE_ROWS


def fetched(buffer: Buffer, columns: Any, addresses: list[int], ids: np.ndarray) -> np.ndarray:
    """bool[n]: which rows were copied; all others are overwritten. Lapped: some stay in transition for a second."""
    give_up = time.monotonic() + 1.0
    while True:
        valid = buffer.fetch_into(columns, addresses, ids)
        if valid.all() or int(ids[~valid].max()) < buffer.window[0]:
            return valid
        if time.monotonic() > give_up:
            raise Lapped(f"{int((~valid).sum()):,} of {len(ids):,} rows are being overwritten for a second")
        buffer.drain()
        time.sleep(1e-4)


_MANY = 1 << 16  # rows looked up at once


class EpisodeIndex:
    """The stored episodes, in the order in which they were completed. One that has lost a row is none any more."""

    def __init__(self, buffer: Buffer):
        self._buffer = buffer
        self._columns: Any = None
        self._seen = 0  # rows below this id were looked at
        self._first = np.zeros(0, np.int64)  # of each episode: its first row
        self._rows = np.zeros(0, np.int64)  # and how many it has
        self._parts: dict[int, list[np.ndarray]] = {}  # by first row: the ids of those that do not lie together
        self._open: dict[int, list[np.ndarray]] = {}  # by episode: ids of one of which rows are missing yet

    def __len__(self) -> int:
        self._refresh()
        return len(self._first)

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """int64[k]: the rows of each, oldest episode first; and int64[sum]: their ids."""
        self._refresh()
        if not len(self._first):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if not self._parts:
            within = np.arange(int(self._rows.sum())) - np.repeat(np.cumsum(self._rows) - self._rows, self._rows)
            return self._rows, np.repeat(self._first, self._rows) + within
        pieces = [p for f, n in zip(self._first, self._rows, strict=True) for p in self._ids(int(f), int(n))]
        return self._rows, np.concatenate(pieces)

    def _ids(self, first: int, rows: int) -> list[np.ndarray]:
        return self._parts.get(first) or [np.arange(first, first + rows)]

    def _refresh(self) -> None:
        schema = self._buffer.schema
        if schema is None:
            return
        if self._columns is None:
            self._columns = native.Columns()
            for key in (EPISODE_ID, EPISODE_ROWS):
                c = schema.columns[schema.keys.index(key)]
                self._columns.add(c.offset, c.nbytes, list(c.shape), "", None)
        lo, hi = self._buffer.window
        at, found = max(lo, self._seen), [(self._first, self._rows)]
        while at < hi:
            end = min(hi, at + _MANY)
            found += self._look(np.arange(at, end))
            at = end
        self._seen = hi
        lo = self._buffer.window[0]  # it moved meanwhile: what was being overwritten was not found
        first, rows = (np.concatenate(x) for x in zip(*found, strict=True))
        if len(first) and first.min() < lo:
            rows, first = rows[first >= lo], first[first >= lo]
            self._parts = {f: p for f, p in self._parts.items() if f >= lo}
        self._first, self._rows = first, rows
        self._open = {e: p for e, p in self._open.items() if p[0][0] >= lo}

    def _look(self, ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        episode, rows = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int32)
        valid = fetched(self._buffer, self._columns, [address_of(episode), address_of(rows)], ids)
        ids, episode, rows = ids[valid], episode[valid], rows[valid]
        if not len(ids):
            return []
        begins = np.flatnonzero(np.concatenate([[True], (np.diff(episode) != 0) | (np.diff(ids) != 1)]))
        counts = np.diff(np.append(begins, len(ids)))
        whole = counts == rows[begins]
        out = [(ids[begins[whole]], counts[whole].astype(np.int64))]
        for b, n in zip(begins[~whole], counts[~whole], strict=True):
            parts = self._open.setdefault(int(episode[b]), [])
            parts.append(ids[b : b + n])
            if sum(map(len, parts)) == rows[b]:
                del self._open[int(episode[b])]
                self._parts[int(parts[0][0])] = parts
                out.append((parts[0][:1], np.array([rows[b]], np.int64)))
        return out
