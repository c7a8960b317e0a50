"""The rows of one instant, copied into files while others write. No torch here.

The instant is the moment when the end of the window is read. Its rows can only fall off, the oldest first, and only before they were
copied: those are left out, and whoever asks is told how many. So what is saved is a whole suffix of what was stored then. If none is
left, a newer instant is saved, at last one whose rows writers have to leave. A row that is edited meanwhile is saved as it was or as it
became, whole.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmbuf.buffer import Buffer
from shmbuf.checkpoint import directories
from shmbuf.checkpoint.directories import Tell
from shmbuf.checkpoint.layout import column_path
from shmbuf.errors import Lapped, NotEnoughRows
from shmbuf.failures import writer_text
from shmbuf.reading import address_of
from shmbuf.schema import Key, Schema

BLOCK_BYTES = 8 << 20
MAX_BLOCK_ROWS = 1 << 18
PATIENCE = 10.0
INSTANTS = 3  # the last one behind a pin


class Copied(NamedTuple):
    first: int  # id of the oldest row saved; the others follow without a gap
    end: int
    lost: int  # rows of the instant that were overwritten before they were copied
    first_slot: int  # in the files; slots go on from there, modulo the capacity
    counters: dict[str, Any]
    limiter: dict[str, Any] | None
    priorities: np.ndarray | None  # float64[n]
    streams: np.ndarray | None  # int64[n]
    heads: np.ndarray | None  # int64: streams without their beginning


def copy_rows(
    buf: Buffer, storage: Path, files: Sequence[Key], *, complete: bool, timeout: float, tell: Tell
) -> Copied:
    """Every column into its file of capacity × its size. Raises Lapped (complete: not all could be kept within timeout), OSError."""
    schema = buf.schema
    assert schema is not None
    paths = [storage / column_path(f) for f in files]
    for p in paths:
        p.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # File objects: wherever Ctrl-C comes, they close themselves.
        fds = [stack.enter_context(open(p, "xb+", buffering=0)).fileno() for p in paths]
        for fd, c in zip(fds, schema.columns, strict=True):
            os.ftruncate(fd, buf.capacity * c.nbytes)
        return _Copy(buf, schema, fds, tell).run(complete, timeout, paths)


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Write, and let the disk begin: the fsync at the end has little left to wait for."""
    begin, nbytes = at, len(data)
    while data:
        n = os.pwrite(fd, data[: 1 << 30], at)
        data, at = data[n:], at + n
    os.posix_fadvise(
        fd, begin, nbytes, os.POSIX_FADV_DONTNEED
    )  # Linux starts to write such pages, and drops clean ones only


def write_array(path: Path, array: np.ndarray) -> None:
    with open(path, "xb") as f:
        write_all(f.fileno(), memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), 0)  # type: ignore[arg-type]


class _Copy:
    def __init__(self, buf: Buffer, schema: Schema, fds: list[int], tell: Tell):
        self.buf, self.schema, self.fds, self.tell = buf, schema, fds, tell
        self.block = int(min(max(1, BLOCK_BYTES // schema.row_bytes), buf.capacity, MAX_BLOCK_ROWS))
        self.out = [np.empty((self.block, max(c.nbytes, 1)), np.uint8) for c in schema.columns]

    def run(self, complete: bool, timeout: float, paths: list[Path]) -> Copied:
        for left in reversed(range(INSTANTS)):
            copied = self._instant(complete or not left, timeout)
            if not copied.lost or copied.end > copied.first:
                break
        n, slot = copied.end - copied.first, copied.first_slot
        if n == self.buf.capacity or not slot:
            return copied
        # TorchRL's files begin with slot 0 unless they are full. From here on they are other files than `fds`.
        for p, c in zip(paths, self.schema.columns, strict=True):
            _straighten(p, slot * c.nbytes, n * c.nbytes, self.buf.capacity * c.nbytes)
        return copied._replace(first_slot=0)

    def _instant(self, complete: bool, timeout: float) -> Copied:
        buf, capacity = self.buf, self.buf.capacity
        with self._pinned(complete, timeout):
            counters, limiter = self._figures()
            asked, end = buf._get("window")[1], counters["end_id"]
            first = asked = min(asked, end)
            kept = np.empty(end - first) if buf._get("priorities") else None
            before = whole = None
            if buf.marks.keep:
                before, whole = self._predecessors(first, end), self._beginnings()
            at = first
            copied = 0  # blocks' rows, also of those that were lost afterwards
            while at < end:
                n = min(self.block, end - at, capacity - at % capacity)
                ids = np.arange(at, at + n, dtype=np.int64)
                lost = self._fetch(ids, complete, timeout)
                if lost:
                    at = first = self._ahead(lost, end, copied)
                    continue
                where = slice(at - asked, at - asked + n)
                if kept is not None:
                    kept[where] = buf.priorities(ids)
                # What was read beside the rows is right if they were still there afterwards.
                copied += n
                if (gone := buf._get("window")[1]) > at:
                    at = first = self._ahead(gone, end, copied)
                    continue
                for fd, c, rows in zip(self.fds, self.schema.columns, self.out, strict=True):
                    if c.nbytes:
                        write_all(fd, memoryview(rows.reshape(-1))[: n * c.nbytes], at % capacity * c.nbytes)  # type: ignore[arg-type]
                at += n
                self.tell(at - asked, end - asked)
                directories.step("copied")
        streams = heads = None
        if before is not None:
            assert whole is not None
            streams, heads = _streams(before[first - asked :], first, whole)
        kept = None if kept is None else kept[first - asked :]
        return Copied(first, end, first - asked, first % capacity, counters, limiter, kept, streams, heads)

    @contextlib.contextmanager
    def _pinned(self, complete: bool, timeout: float) -> Iterator[None]:
        if not complete:
            yield
            return
        try:
            pin = self.buf.pin(seconds=timeout)
        except NotEnoughRows:
            yield
            return
        try:
            yield
            if not pin.keeps:  # edits do no harm: rows are copied whole
                raise Lapped(
                    f"writers had to wait for this checkpoint of buffer {self.buf.name!r} for {timeout:g} s, and went on: rows were "
                    "lost. No checkpoint was written. timeout= allows more"
                )
        finally:
            pin.release()

    def _figures(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Counters and limiter of one instant, if writers leave one within a few looks."""
        for _ in range(100):
            limiter, counters = self.buf.limiter_state(), self.buf._call("counters")
            if limiter is None or limiter["inserted"] == counters["rows_total"]:
                break
        return counters, limiter

    def _fetch(self, ids: np.ndarray, complete: bool, timeout: float) -> int:
        """Copies rows; 0: all of them; else the oldest id that may still be there."""
        buf, n, done = self.buf, len(ids), np.zeros(len(ids), np.uint8)
        addresses = [address_of(a) for a in self.out]
        give_up = time.monotonic() + max(PATIENCE, timeout)
        while True:
            if buf._call("fetch", buf._columns, addresses, n, address_of(ids), address_of(done)) == n:
                return 0
            lo = buf._get("window")[1]
            if lo > ids[0]:
                return int(lo)
            if time.monotonic() > give_up:
                raise Lapped(
                    f"{n - int(done.sum()):,} rows of buffer {buf.name!r} cannot be read; {writer_text(buf)}. No checkpoint was written"
                )
            time.sleep(1e-3)

    def _ahead(self, oldest: int, end: int, copied: int) -> int:
        """Where to go on after rows were lost: far enough before a writer who is faster that it does not get here again."""
        written = self.buf._get("window")[2] - end
        if oldest >= end or written <= copied:
            return min(oldest, end)
        ahead = math.ceil((end - oldest) * (1 - copied / written)) + self.block
        return oldest + min(ahead, max(0, end - oldest - self.block))

    def _predecessors(self, first: int, end: int) -> np.ndarray:
        """int64: of each row the one before it in its trajectory, −1: none. Looked up before any row is copied: those of the rows that
        will be saved were all there then."""
        out = np.empty(end - first, np.int64)
        for at in range(first, end, MAX_BLOCK_ROWS):
            ids = np.arange(at, min(end, at + MAX_BLOCK_ROWS), dtype=np.int64)
            chain, lens = self.buf.walk_back(ids, 2)
            out[at - first : at - first + len(ids)] = np.where(lens == 2, chain[:, 1], -1)
        return out

    def _beginnings(self) -> np.ndarray:
        """int64: the first stored rows of trajectories that have nothing missing before them, sorted."""
        _, first, _, flags = self.buf.spans()
        return np.sort(first[flags & 1 == 0])


def _streams(before: np.ndarray, first: int, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From each row's predecessor: which trajectory it is of, and the trajectories whose beginning is not here."""
    n = len(before)
    root = np.arange(n, dtype=np.int64)
    linked = before >= first
    root[linked] = before[linked] - first
    while True:  # to the first row of each: every round doubles how far
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    starts = np.flatnonzero(root == np.arange(n))
    number = np.empty(n, np.int64)
    number[starts] = np.arange(len(starts))
    # A first row that was not the first one when they were listed has lost rows since.
    return number[root], np.flatnonzero(~np.isin(starts + first, whole)).astype(np.int64)


def _straighten(path: Path, begin: int, nbytes: int, whole: int) -> None:
    """Rewrite a column so that what begins there, and goes on at the file's start, begins with it."""
    new = path.with_name(path.name + ".straight")
    with open(path, "rb") as old, open(new, "xb") as f:
        os.ftruncate(f.fileno(), whole)
        for start, size, to in (
            (begin, min(nbytes, whole - begin), 0),
            (0, max(0, nbytes - (whole - begin)), whole - begin),
        ):
            while size > 0:
                data = os.pread(old.fileno(), min(size, BLOCK_BYTES), start)
                write_all(f.fileno(), memoryview(data), to)
                start, size, to = start + len(data), size - len(data), to + len(data)
    os.replace(new, path)


def state_of(buf: Buffer, copied: Copied, files: Sequence[Key]) -> dict[str, Any]:
    """What the sidecar says beside its arrays."""
    counters, limiter, priorities = copied.counters, copied.limiter, buf._get("priorities")
    schema = buf.schema
    assert schema is not None
    return {
        "capacity": buf.capacity,
        "first_id": copied.first,
        "end_id": copied.end,
        "lost": copied.lost,
        "first_slot": copied.first_slot,
        "write_count": counters["write_count"],
        "rows_total": counters["rows_total"],
        "columns": [
            {"key": list(c.key), "dtype": c.dtype, "shape": list(c.shape), "file": list(f)}
            for c, f in zip(schema.columns, files, strict=True)
        ],
        "form": schema.form,
        "inner": list(schema.inner),
        "streams": buf.config.get("streams") or {},
        "has_streams": copied.streams is not None,
        "priorities": None
        if priorities is None
        else {k: priorities[k] for k in ("alpha", "eps", "max_priority_within_buffer", "new_row")},
        "limiter": None
        if limiter is None
        else {k: limiter[k] for k in ("num", "den", "min_size", "min_diff", "max_diff", "inserted", "sampled", "diff")},
    }
