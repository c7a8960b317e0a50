"""What is stored, oldest first, as copies."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuf.reading import address_of
from shmbuf.rlightning.index import EpisodeIndex, fetched
from shmbuf.rlightning.leaves import OWN, as_tensors
from shmbuf.schema import Column, Schema, nest
from shmbuf.storage import ShmStorage


class Reader:
    """Rows (unit "transition") or whole episodes of one handle."""

    def __init__(self, storage: ShmStorage, episodes: bool):
        self._storage, self._buffer, self._episodes = storage, storage.buffer, episodes
        self._index = EpisodeIndex(self._buffer)
        self._owner = self._reads = np.zeros(0, np.int64)  # by slot: whose reads were counted, and how many
        self._columns: Any = None
        self._lock, self._pid = threading.RLock(), os.getpid()

    def alone(self) -> threading.RLock:
        """To be held while it reads: threads take turns. One that another thread of a fork's parent may have held is left to it."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock

    def __len__(self) -> int:
        return len(self._index) if self._episodes else len(self._buffer)

    def all(self) -> TensorDict | list[TensorDict]:
        """A TensorDict [rows]; of episodes [episodes, rows], or a list where they are of different lengths."""
        if self._episodes:
            return self._read_episodes(*self._index.all())
        lo, hi = self._buffer.window
        return self._read(np.arange(lo, hi))[0]

    def get(self, index: Any) -> Any:
        """By age: 0 is the oldest. As nested dicts of tensors; see `Storage.__getitem__`."""
        if not self._episodes:
            lo, hi = self._buffer.window
            chosen = _chosen(index, hi - lo, IndexError)
            rows, valid = self._read(lo + chosen.reshape(-1))
            if not valid.all():
                raise IndexError(f"{int((~valid).sum()):,} rows were overwritten while they were read")
            return rows.reshape(chosen.shape).to_dict()
        lengths, ids = self._index.all()
        chosen = _chosen(index, len(lengths), TypeError)
        ends = np.cumsum(lengths)
        pieces = [ids[ends[i] - lengths[i] : ends[i]] for i in chosen.reshape(-1)]
        which = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        found = self._read_episodes(lengths[chosen.reshape(-1)], which, every=True)
        if chosen.ndim == 0:
            return found[0].to_dict()
        return found.to_dict() if isinstance(found, TensorDict) else found

    def _read_episodes(self, lengths: np.ndarray, ids: np.ndarray, every: bool = False) -> Any:
        rows, valid = self._read(ids)
        if not valid.all():  # overwritten meanwhile: whole episodes go
            if every:
                raise IndexError("episodes were overwritten while they were read")
            starts = np.cumsum(lengths) - lengths
            stays = np.logical_and.reduceat(valid, starts)
            rows, lengths = rows[torch.from_numpy(np.repeat(stays, lengths)[valid])], lengths[stays]
        if not len(lengths):
            return TensorDict(
                {k: v.reshape(0, 0, *v.shape[1:]) for k, v in rows.items(True, True)},
                batch_size=[0, 0],
                device=self._storage.device,
            )
        if (lengths == lengths[0]).all():
            return rows.reshape(len(lengths), int(lengths[0]))
        return [rows[e - n : e] for e, n in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True)]

    def _shown(self) -> list[Column]:
        schema = self._buffer.schema
        return [] if schema is None else [c for c in schema.columns if c.key[0] != OWN]

    def _read(self, ids: np.ndarray) -> tuple[TensorDict, np.ndarray]:
        """Those that are still stored, and bool[n] which they are."""
        shown = self._shown()
        if not shown:
            return TensorDict({}, batch_size=[len(ids)], device=self._storage.device), np.ones(len(ids), bool)
        if self._columns is None:
            self._columns = _native(self._buffer.schema, shown)  # type: ignore[arg-type]
        arrays = [np.zeros((len(ids), *c.shape), c.numpy) for c in shown]
        valid = fetched(self._buffer, self._columns, [address_of(a) for a in arrays], ids)
        if not valid.all():
            arrays, ids = [a[valid] for a in arrays], ids[valid]
        self._count(ids)
        tensors = (as_tensors(a, c.dtype) for a, c in zip(arrays, shown, strict=True))
        return TensorDict(
            nest([c.key for c in shown], tensors), batch_size=[len(ids)], device=self._storage.device
        ), valid

    # ---- how often rows were read -----------------------------------------------------------------------------------

    def _count(self, ids: np.ndarray) -> None:
        if not len(self._owner):
            self._owner, self._reads = (
                np.full(self._buffer.capacity, -1, np.int64),
                np.zeros(self._buffer.capacity, np.int64),
            )
        slots = ids % self._buffer.capacity
        self._reads[slots[self._owner[slots] != ids]] = 0
        self._owner[slots] = ids
        self._reads[slots] += 1

    def reads(self) -> np.ndarray:
        """int32[capacity], by slot: −1: no row; else how often this handle read the row there."""
        lo, hi = self._buffer.window
        out = np.full(self._buffer.capacity, -1, np.int32)
        ids = np.arange(lo, hi)
        slots = ids % self._buffer.capacity
        out[slots] = np.where(self._owner[slots] == ids, self._reads[slots], 0) if len(self._owner) else 0
        return out


def _native(schema: Schema, columns: list[Column]) -> Any:
    from shmbuf._extension import native

    out = native.Columns()
    for c in columns:
        out.add(c.offset, c.nbytes, list(c.shape), "", None)
    return out


def _chosen(index: Any, n: int, no_number: type[Exception]) -> np.ndarray:
    """The places that an index means among n; negative ones count from the end."""
    if isinstance(index, slice):
        return np.arange(n)[index]
    array = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.dtype.kind == "b" and array.shape == (n,):
        return np.flatnonzero(array)
    if array.size == 0 and array.ndim:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise no_number(f"index {index!r}: an integer, a slice, or integers (list, array or tensor)")
    array = array.astype(np.int64)
    bad = array[(array < -n) | (array >= n)]
    if bad.size:
        raise IndexError(f"index {int(bad.flat[0])} is out of range: {n:,} are stored")
    return np.where(array < 0, array + n, array)
