"""A buffer's rows in memory, with what a checkpoint has beside them: taken as `shmbuf.checkpoint` takes it, and loaded by it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.checkpoint.loading import _Load
from shmbuf.checkpoint.snapshot import PATIENCE, _Copy, _streams
from shmbuf.errors import Lapped, SchemaError
from shmbuf.failures import writer_text
from shmbuf.forms import collected
from shmbuf.packed import bound_of, fill
from shmbuf.presenting import pack_all
from shmbuf.schema import PACKED, Column, Schema, as_key, show_key
from shmbuf.storage import ShmStorage
from shmbuf.tensors import as_numpy, make_tensordict, plain


def _silent(done: int, of: int) -> None:
    pass


def take(storage: ShmStorage) -> dict[str, Any]:
    """The rows of one instant, without those that are overwritten before they are copied: always the oldest. They do not count as drawn.

    Returns:
        rows: a TensorDict [n], oldest first, as stored. columns: [key, dtype, shape] of each. first: the slot of the oldest. priority:
        float64[n]; new_row: what a new one gets; formula. streams: int64[n], and heads, those whose beginning is not here.
        write_count, limiter. What the buffer does not keep is None.
    """
    buf, schema = storage.buffer, storage.schema()
    copy = _Copy(buf, schema, [], _silent)
    counters, limiter = copy._figures()
    end = counters["end_id"]
    lo = min(buf._get("window")[1], end)
    n = end - lo
    before = whole = priority = streams = heads = None
    if buf.marks.keep:
        before, whole = copy._predecessors(lo, end), copy._beginnings()
    ids, done = np.arange(lo, end, dtype=np.int64), np.zeros(n, np.uint8)
    leaves = storage._fresh(n, False)[:-2]
    since = time.monotonic()
    while storage.fetch(leaves, ids, done) < n:
        if done[max(0, buf._get("window")[1] - lo) :].all():
            break  # the others are gone
        if time.monotonic() - since > PATIENCE:
            raise Lapped(f"rows of buffer {buf.name!r} cannot be read; {writer_text(buf)}")
        time.sleep(1e-3)
    there, state = done.astype(bool), buf._get("priorities")
    if state:
        every = buf.priorities(ids)
        there &= ~np.isnan(every)  # nor those that are gone by now
        priority = every
    gone = np.flatnonzero(~there)
    first = int(gone[-1]) + 1 if len(gone) else 0
    if before is not None:
        assert whole is not None
        found, open_ = _streams(before[first:], lo + first, whole)
        streams, heads = torch.from_numpy(found), torch.from_numpy(open_)
    rows = make_tensordict(storage._tree, [t[first:] for t in leaves], torch.Size((n - first,)))
    rows = rows if not first else rows.clone()  # not those that are gone, beside the others
    return {
        "rows": rows if storage.presents is None else storage.presents.values(rows),
        "columns": [[list(c.key), c.dtype, list(c.shape)] for c in schema.columns],
        "form": schema.form,
        "inner": list(schema.inner),
        "first": (lo + first) % buf.capacity if first < n else 0,
        "priority": None if priority is None else torch.from_numpy(priority[first:].copy()),
        "new_row": state["new_row"] if state else None,
        "formula": [state["alpha"], state["eps"]] if state else None,
        "streams": streams,
        "heads": heads,
        "write_count": counters["write_count"],
        "limiter": limiter and {k: limiter[k] for k in ("num", "den", "inserted", "diff")},
    }


class Kept:
    """What `shmbuf.checkpoint.loading` asks a checkpoint for. Raises ValueError, KeyError, SchemaError: no such state."""

    path = "in memory"
    form: list | None = None

    def __init__(self, taken: Mapping[str, Any], known: Schema | None):
        rows: TensorDictBase = taken["rows"]
        self.rows, self.capacity = len(rows), len(rows)
        self.form, self.inner = taken.get("form"), tuple(taken.get("inner") or ())
        self.first_id: int | None = None
        self.write_count = max(int(taken.get("write_count") or 0), self.rows)
        self.new_row, self.formula = taken.get("new_row"), tuple(taken.get("formula") or ()) or None
        self.priorities = self._numbers(taken, "priority", np.float64, self.rows)
        streams, heads = (self._numbers(taken, k, np.int64, n) for k, n in (("streams", self.rows), ("heads", None)))
        self.streams = self.heads = None
        if streams is not None:  # counted from 0
            names, self.streams = np.unique(streams, return_inverse=True)
            self.heads = np.flatnonzero(np.isin(names, heads if heads is not None else []))
        limiter = taken.get("limiter")
        if limiter is not None:
            kinds = {"num": int, "den": int, "inserted": int, "diff": float}
            limiter = {k: kind(limiter[k]) for k, kind in kinds.items()}
        self.state = {"limiter": limiter}
        self.ignored: list[str] = []
        self._take(collected(rows), taken.get("columns"), known)

    def _numbers(self, taken: Mapping[str, Any], name: str, dtype: Any, n: int | None) -> np.ndarray | None:
        if (found := taken.get(name)) is None:
            return None
        array = np.asarray(found, dtype)
        if array.ndim != 1 or (n is not None and len(array) != n):
            raise ValueError(f"{name} of shape {list(array.shape)} for {self.rows:,} rows. Nothing was changed")
        if dtype is np.float64 and not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(f"{name}: finite numbers ≥ 0 are needed. Nothing was changed")
        return array

    def _take(self, leaves: dict[Any, Any], columns: Any, known: Schema | None) -> None:
        values = {k: pack_all(k, v) for k, v in leaves.items() if not isinstance(v, torch.Tensor)}
        tensors = {k: plain(k, t) for k, t in leaves.items() if k not in values}
        if columns is not None:
            made = [Column(as_key(tuple(k)), str(d), tuple(s)) for k, d, s in columns]
        else:
            bounds = {c.key: c.shape for c in known.columns} if known is not None else {}
            made = [*Schema.from_leaves(tensors, 1).columns] if tensors else []
            made += [Column(k, PACKED, bounds.get(k, (bound_of(v),))) for k, v in values.items()]
        self._schema = Schema(made, self.form, self.inner)
        got = {k: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for k, t in tensors.items()}
        got.update({c.key: (PACKED, c.shape) for c in made if c.key in values})
        if lines := self._schema.differences(got):
            raise SchemaError("rows of the state do not fit its columns:\n  " + "\n  ".join(lines))
        self._arrays = {k: as_numpy(t) for k, t in tensors.items()}
        for c in made:
            if c.key in values:
                self._arrays[c.key] = fill(values[c.key], c.shape[0], f"key {show_key(c.key)}")

    def schema(self) -> Schema:
        return self._schema

    def opened(self, schema: Schema) -> _Opened:
        return _Opened([self._arrays[k] for k in schema.keys])

    def loading(self, storage: ShmStorage, slot: int, timeout: float | None) -> _Load:
        """Ready to ``run(None)``; nothing is changed yet. slot: of the oldest row, if the rows fill the buffer."""
        buf = storage.buffer
        self.first_id = slot if self.rows == buf.capacity else None
        return _Load(buf, self, timeout, ())  # type: ignore[arg-type]


class _Opened:
    def __init__(self, arrays: list[np.ndarray]):
        self._arrays = arrays

    def rows(self, at: int, n: int) -> list[np.ndarray]:
        return [a[at : at + n].copy() for a in self._arrays]

    def close(self) -> None:
        pass
