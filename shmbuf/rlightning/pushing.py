"""Ended episodes into the shared buffer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

from shmbuf import segment
from shmbuf.buffer import Buffer
from shmbuf.errors import CommitPending, RingFull, SchemaError, StorageLost
from shmbuf.rlightning.leaves import OWN, as_tensors
from shmbuf.rlightning.steps import Episodes
from shmbuf.schema import Column, Key, Schema, nest, show_key
from shmbuf.ticket import Ticket, left_of, seconds_of

EPISODE_ID, EPISODE_ROWS = (OWN, "id"), (OWN, "rows")
_OWN_COLUMNS = [Column(EPISODE_ID, "int64", ()), Column(EPISODE_ROWS, "int32", ())]
_CHUNK_BYTES = 1 << 20  # of rows that are gathered and put at once: they stay in the cache, and fit the ring

_ENDS = [("done",), ("terminated",), ("truncated",)]
Part = tuple[list[Key], list[np.ndarray], np.ndarray | None]  # rows by column, and their priorities, if these were sent


Reduced = Callable[[torch.Tensor, int], torch.Tensor]


class Pusher:
    """Puts episodes, whole: rows of one lie next to each other, if it is not longer than half the ring."""

    def __init__(self, buffer: Buffer, fixed: bool, keep_cut: bool, priority_key: Key | None, reduced: Reduced):
        """fixed: nothing is overwritten. keep_cut: an episode longer than the capacity is stored as its last rows. priority_key: the
        column that has priorities, if any; reduced: several of a row to one.
        """
        self._buffer, self._fixed, self._keep_cut = buffer, fixed, keep_cut
        self._priority_key, self._reduced = priority_key, reduced
        self._numbers = (0, 0)  # (pid, the next episode's id)
        self._columns: list[Column] | None = None  # that were found to fit
        self._pending: Ticket | None = None  # of what was pushed last
        self._rest: list[Part] = []  # of a push that found no more room
        self.took = False

    def push(self, episodes: list[Episodes], timeout: float | None = None, *, wait: bool = True) -> None:
        """Put them all, one after another. timeout: seconds; None: the buffer's. wait: until every process sees them; otherwise
        they are in the ring when it returns, and `settle` waits. Afterwards `took` says whether they are its own affair now.

        Raises:
            RuntimeError: they do not fit, and nothing may be overwritten. SchemaError, RingFull, StorageLost … ValueError: a priority
            that cannot be. In these cases nothing was stored. CommitPending: they will be; what found no room in the ring is kept here and goes first with the next push.
        """
        episodes = [e for e in episodes if int(e.lengths.sum())]
        self.took = not episodes
        if not episodes:
            return
        since, timeout = time.monotonic(), self._buffer.config["timeout"] if timeout is None else timeout
        for e in episodes:
            self._fit(e.columns, left_of(timeout, since))
        sent = [self._sent(e) for e in episodes]
        with _alone(self._buffer, left_of(timeout, since)) if self._fixed else contextlib.nullcontext():
            if self._fixed:
                self._require_room(episodes)
            rest, self._rest = self._rest, []
            self._put_all(iter(rest), since, timeout, rest=True)
            both = zip(episodes, sent, strict=True)
            self._put_all((part for e, p in both for part in self._parts(e, p)), since, timeout)
            if wait or self._fixed:
                self.settle(left_of(timeout, since))

    def _require_room(self, episodes: list[Episodes]) -> None:
        rows = sum(int(e.lengths.sum()) for e in episodes) + sum(len(arrays[0]) for _, arrays, _ in self._rest)
        size, capacity = len(self._buffer), self._buffer.capacity
        if size + rows > capacity:
            raise RuntimeError(
                f"Cannot push {rows} items to storage of capacity {capacity}. Current size is {size}. clear() makes room; "
                'mode="circular" overwrites the oldest'
            )

    def settle(self, timeout: float | None = None) -> None:
        """Until what this process pushed is stored. timeout: seconds; None: the buffer's."""
        ticket = self._pending
        if ticket is not None:
            if self._numbers[0] == os.getpid():  # not what the parent of a fork pushed
                ticket.wait(self._buffer.config["timeout"] if timeout is None else timeout)
            if self._pending is ticket:  # another thread may push meanwhile
                self._pending = None

    def _fit(self, columns: list[Column], timeout: float | None) -> None:
        if columns == self._columns:
            return
        own = next((c for c in columns if c.key[0] == OWN), None)
        if own is not None:
            raise SchemaError(
                f"key {show_key(own.key)}: {OWN!r} is where the storage keeps its own numbers; name it otherwise. Nothing was stored"
            )
        schema = self._buffer.schema
        if schema is None:
            self._buffer._build(Schema([*columns, *_OWN_COLUMNS]), "the first episode", timeout)
            for c in columns:
                if c.key in _ENDS and c.dtype not in ("bool", "uint8"):
                    warnings.warn(
                        f"key {show_key(c.key)} is {c.dtype}: only flags of bool or uint8 end a trajectory, so slices and n-step sums go "
                        "on past these, to the end of the episode",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        else:
            got = {c.key: (c.dtype, c.shape) for c in (*columns, *_OWN_COLUMNS)}
            if lines := schema.differences(got):
                raise SchemaError("rows do not fit the storage's schema; nothing was stored:\n  " + "\n  ".join(lines))
        self._columns = columns

    def _sent(self, e: Episodes) -> np.ndarray | None:
        """float64[rows]: what they carry under the priority key, if anybody draws by priority. ValueError: it cannot be one."""
        j = next((j for j, c in enumerate(e.columns) if c.key == self._priority_key), None)
        if j is None or not self._buffer._get("wants_priorities"):
            return None
        dtype, out = e.columns[j].dtype, []
        for first, last, _ in self._chunks(e, 0):
            n = int(e.lengths[first:last].sum())
            p = self._reduced(as_tensors(np.ascontiguousarray(e.take(first, last)[j]), dtype), n)
            out.append(p.to(torch.float64).numpy().copy())
        return self._buffer.extras(sum(map(len, out)), None, np.concatenate(out))[1]

    def _put_all(self, parts: Iterator[Part], since: float, timeout: float | None, *, rest: bool = False) -> None:
        """All of them, or none, or some and the rest is kept; of what is itself such a rest, at least that."""
        begun = rest
        for keys, arrays, p in parts:
            try:
                self._pending = self._buffer.put(nest(keys, arrays), priorities=p, timeout=left_of(timeout, since))
            except BaseException as e:
                rows = e.rows if isinstance(e, CommitPending) else 0
                begun = begun or rows > 0
                if begun:  # arrays may be memory that is used again
                    kept = [(keys, [a[rows:].copy() for a in arrays], None if p is None else p[rows:])]
                    kept += [(k, [a.copy() for a in more], p) for k, more, p in parts]
                    self._rest = [part for part in kept if len(part[1][0])]
                    self.took = not rest
                if isinstance(e, CommitPending):
                    self._pending = e.ticket
                if not begun or not isinstance(e, (RingFull, CommitPending)) or isinstance(e, KeyboardInterrupt):
                    raise
                left = sum(len(a[0]) for _, a, _ in self._rest)
                if rest:
                    raise RingFull(
                        f"{left:,} rows of a push before this one still wait for room. Nothing was stored: {e}"
                    ) from None
                raise CommitPending(
                    f"rows are in the ring and will be stored; the other {left:,} wait in this process and go first with the next "
                    f"push: {e}",
                    self._pending,
                    rows,
                ) from None
            begun = True
        if not rest:
            self.took = True

    def _chunks(self, e: Episodes, first: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """[from, to) of some episodes at a time, from the first one on, and their lengths."""
        ends = np.cumsum(e.lengths)
        most = max(1, _CHUNK_BYTES // self._buffer.schema.row_bytes)  # type: ignore[union-attr]
        while first < len(ends):
            start = int(ends[first] - e.lengths[first])
            last = max(first + 1, int(np.searchsorted(ends, start + most, side="right")))
            yield first, last, e.lengths[first:last]
            first = last

    def _parts(self, e: Episodes, priorities: np.ndarray | None) -> Iterator[Part]:
        """Some episodes at a time, with the storage's own numbers; none that would be overwritten by the others."""
        capacity, ends = self._buffer.capacity, np.cumsum(e.lengths)
        surplus = int(ends[-1]) - capacity
        begin, cut = 0, 0
        if surplus > 0:
            warnings.warn(
                f"{int(ends[-1]):,} rows at once are more than the storage's capacity of {capacity:,}: the last ones are kept",
                stacklevel=2,
            )
            begin = int(np.searchsorted(ends, surplus, side="right"))
            cut = surplus - int(ends[begin] - e.lengths[begin])
            # An episode is stored whole, unless it is longer than all there is.
            if cut and self._keep_cut and begin < len(ends) - 1:
                begin, cut = begin + 1, 0
        ids, keys = self._take_ids(len(ends)), [*(c.key for c in e.columns), EPISODE_ID, EPISODE_ROWS]
        for first, last, n in self._chunks(e, begin):
            leaves, end = e.take(first, last), int(ends[last - 1])
            if cut:
                leaves, n = [a[cut:] for a in leaves], np.concatenate([n[:1] - cut, n[1:]])
                cut = 0
            p = None if priorities is None else priorities[end - int(n.sum()) : end]
            yield keys, [*leaves, np.repeat(ids[first:last], n), np.repeat(n, n).astype(np.int32)], p

    def _take_ids(self, n: int) -> np.ndarray:
        """Numbers that no other process gives, nor this one again."""
        pid, following = self._numbers
        if pid != os.getpid():  # also a fork's child
            following = secrets.randbits(31) << 32
        self._numbers = (os.getpid(), following + n)
        return np.arange(following, following + n)


@contextlib.contextmanager
def _alone(buffer: Buffer, timeout: float | None) -> Iterator[None]:
    """Nobody else pushes to a storage in which nothing is overwritten: what fits is looked up and put in one go.

    The kernel drops the lock with its holder.
    """
    since, seconds = time.monotonic(), seconds_of(timeout)
    try:
        fd = os.open(segment.path_of(buffer.name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StorageLost(f"buffer {buffer.name!r} was destroyed. Nothing was stored") from None
    try:
        while not _locked(fd):
            if seconds >= 0 and time.monotonic() - since >= seconds:
                raise RingFull(
                    f"another process has been pushing to storage {buffer.name!r} for {round(seconds, 1):g} s. Nothing was stored"
                )
            time.sleep(1e-3)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has it, too
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
