"""Trajectories at the numpy level: slices of them, what follows a row and what came before it, all of them as they are now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shmbuf._extension import native
from shmbuf.errors import Lapped, NotEnoughRows
from shmbuf.reading import Reading, address_of, as_ids
from shmbuf.schema import nest
from shmbuf.ticket import left_of, seconds_of

_STATUS = native.STATUSES
BY = ("trajectory", "start")
MAX_TRIES = 1000
_MOVED = 2  # looks that find no slice in a window that moves meanwhile, until that is believed: each goes over all trajectories
_NAP = 1e-3


class TrajectorySpan(NamedTuple):
    """The stored part of a trajectory: the ids of its first and last row, and how many rows it has.

    head_missing: rows before ``first`` are overwritten, or were lost. ended: its last row says so.
    """

    first: int
    end: int
    rows: int
    head_missing: bool
    ended: bool


class Trajectories(Reading):
    """What `Buffer` does about trajectories: runs of rows of one stream, up to an end key's row or a change of trajectory id."""

    def require_trajectories(self) -> None:
        if self.schema is not None and not self.marks.keep:
            raise RuntimeError(
                f"buffer {self.name!r} keeps no trajectories: it has no end key and no trajectory key. Create it with "
                "trajectories=True, traj_key= or end_keys="
            )

    # ---- slices -------------------------------------------------------------------------------------------------

    def draw_slices(
        self,
        n: int,
        length: int,
        *,
        strict: bool = True,
        by: str = "trajectory",
        left: int = 0,
        right: int = 0,
        timeout: float | None = 0.0,
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """n slices of consecutive rows of one trajectory each.

        Args:
            strict: only of trajectories of at least ``length`` rows; False: shorter ones are taken whole.
            by: ``"trajectory"``: one uniformly, then the start; ``"start"``: uniformly of all starts there are.
            left, right: a slice may reach so many rows beyond its trajectory's first and last row; there it is cut.
            timeout: seconds to wait until there is a trajectory to draw from; 0: raise at once; None: for ever.

        Returns:
            rows: nested dict of arrays [Σ lens, *shape], slice after slice; ids: int64[Σ lens]; lens: int64[n].

        Raises:
            NotEnoughRows: no trajectory is that long: says how long the longest is. Lapped: rows are overwritten faster than
            slices can be copied. RuntimeError: the buffer keeps no trajectories.
        """
        how: dict[str, Any] = {"strict": strict, "by": by, "left": left, "right": right}
        _check_slices(n, length, **how)
        since = time.monotonic()
        self._wait_schema(timeout)
        how = {**how, "timeout": timeout, "since": since}
        with self.sampling(n * length, left_of(timeout, since)):
            ids, lens = self.choose_slices(n, length, **how)
            out = self._outputs(n * length)
            done = np.zeros((n, length), np.uint8)
            addresses = [address_of(a) for a in out]
            for _ in range(MAX_TRIES):
                if (
                    self._call("fetch", self._columns, addresses, n * length, address_of(ids), address_of(done))
                    == n * length
                ):
                    break
                bad = np.flatnonzero(~done.all(axis=1))
                done[bad] = 0
                ids[bad], lens[bad] = self.choose_slices(len(bad), length, **how)
            else:
                raise self._slices_lapped(length)
        ids = ids.reshape(-1)
        if not (lens == length).all():
            kept = (np.arange(length) < lens[:, None]).reshape(-1)
            ids, out = ids[kept], [a[kept] for a in out]
            self.refund_samples(n * length - len(ids))
        self.count_drawn(ids)
        return nest(self._schema.keys, out), ids, lens  # type: ignore[union-attr]

    def choose_slices(
        self,
        n: int,
        length: int,
        *,
        strict: bool = True,
        by: str = "trajectory",
        left: int = 0,
        right: int = 0,
        timeout: float | None = 0.0,
        since: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """For the floors above: ids int64[n, length] and lens int64[n]; after the end of a slice its last id is repeated.

        They were slices of the rows stored then: right if all are still there after they were copied. Errors: `draw_slices`.
        since: when the timeout began (``time.monotonic()``); default: now.
        """
        _check_slices(n, length, strict, by, left, right)
        since, seconds = time.monotonic() if since is None else since, seconds_of(timeout)
        self._wait_schema(left_of(timeout, since))
        self.require_trajectories()
        if not self._standby:
            self._become_reader()
        ids, lens = np.zeros((n, length), np.int64), np.zeros(n, np.int64)
        if n == 0:
            return ids, lens
        todo, tries = np.arange(n), 0
        while True:
            if self.destroyed:
                raise self._lost("destroyed while slices were being drawn")
            window, m = self._get("window"), len(todo)
            some, some_lens = np.zeros((m, length), np.int64), np.zeros(m, np.int64)
            status, longest = self._call(
                "choose_slices", m, length, strict, by == "start", left, right, address_of(some), address_of(some_lens)
            )
            ids[todo], lens[todo] = some, some_lens
            todo = todo[some_lens == 0]
            if not len(todo):
                break
            tries += 1
            live_lo, lo, _ = now = self._get("window")
            if _STATUS[status] == "lapped":
                if tries > MAX_TRIES:
                    raise self._slices_lapped(length)
            elif now != window and tries < _MOVED:  # it holds of no one moment
                pass
            elif (
                lo != live_lo and tries < MAX_TRIES
            ):  # rows are being overwritten just now: wait for what comes instead
                time.sleep(_NAP)
            elif not len(self):
                self.wait_rows(1, left_of(timeout, since))
            elif 0 <= seconds <= time.monotonic() - since:
                raise self._no_slice(length, longest, seconds)
            else:
                if not self._readonly:
                    self._call("help")
                time.sleep(_NAP)
        if not (lens == length).all():
            at = np.minimum(np.arange(length), lens[:, None] - 1)
            ids = np.ascontiguousarray(np.take_along_axis(ids, at, axis=1))
        return ids, lens

    def _no_slice(self, length: int, longest: int, seconds: float) -> NotEnoughRows:
        spans = list(self._found())  # as long as the search for one that is long enough
        n, going_on = len(spans), sum(not t.ended for t in spans)
        return NotEnoughRows(
            f"Did not find a single trajectory with sufficient length in buffer {self.name!r}: the longest has "
            f"{longest:,} row{'s' * (longest != 1)}, slices of {length:,} were asked for"
            + (f" (after {seconds:g} s)" if seconds else "")
            + f"; {n:,} trajector{'y is' if n == 1 else 'ies are'} stored, {going_on:,} of them open"
            + (
                ""
                if seconds
                else "; strict=False (of a sampler: strict_length=False) takes shorter ones whole, timeout= waits"
            )
        )

    def _slices_lapped(self, length: int) -> Lapped:
        return Lapped(
            f"rows are overwritten faster than slices of {length:,} can be found and copied; the capacity of "
            f"{self.capacity:,} rows is too small for this write rate"
        )

    # ---- what follows, what came before -------------------------------------------------------------------------

    def following(self, ids: Any) -> np.ndarray:
        """int64[n]: the next row of each row's trajectory; −1 if there is none: its last one, the newest one, one not stored."""
        ids = as_ids(ids)
        chain, lens = self.walk_forward(ids, 2)
        return np.where(lens == 2, chain[:, 1], -1)

    def preceding(self, ids: Any) -> np.ndarray:
        """int64[n]: the row before each in its trajectory; −1 if there is none, if it is overwritten, or if the row is."""
        chain, lens = self.walk_back(ids, 2)
        return np.where(lens == 2, chain[:, 1], -1)

    def walk_forward(self, ids: Any, steps: int, dilation: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """int64[n, steps]: each row itself and every dilation-th that follows in its trajectory; int64[n]: how many there are,
        0 for a row that is not stored. Beyond that the last id is repeated."""
        return self._walk(ids, steps, dilation, False)

    def walk_back(self, ids: Any, steps: int, dilation: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """As `walk_forward`, towards the trajectory's beginning."""
        return self._walk(ids, steps, dilation, True)

    def _walk(self, ids: Any, steps: int, dilation: int, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        ids = as_ids(ids)
        self._check_walk(steps, dilation)
        chain, lens = np.zeros((len(ids), steps), np.int64), np.zeros(len(ids), np.int64)
        self._call("walk", address_of(ids), len(ids), steps, dilation, backward, address_of(chain), address_of(lens))
        return _filled(chain, lens), lens

    def _check_walk(self, steps: int, dilation: int) -> None:
        if steps < 1 or dilation < 1:
            raise ValueError(f"steps={steps}, dilation={dilation}: both are ≥ 1")
        self.require_trajectories()

    # ---- all of them --------------------------------------------------------------------------------------------

    def trajectories(self) -> list[TrajectorySpan]:
        """All that are stored now, by their last row. A row may be overwritten or added while they are listed."""
        if self.schema is None:
            return []
        self.require_trajectories()
        return list(self._found())

    def _found(self) -> Iterator[TrajectorySpan]:
        for end, first, rows, flags in zip(*(a.tolist() for a in self.spans()), strict=True):
            yield TrajectorySpan(first, end, rows, bool(flags & 1), bool(flags & 2))

    def spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For the floors above: of each trajectory its last row, its first one, how many (int64), and flags (1: head_missing, 2: ended).

        What was read of rows that were overwritten meanwhile may be anything: these are looked up again."""
        end, first, rows, flags = (np.array(a, np.uint64).view(np.int64) for a in self._call("trajectories"))
        while len(gone := np.flatnonzero(first < self._get("window")[1])):
            for i in gone.tolist():
                ids = self.trajectory(int(end[i]))
                first[i], rows[i], flags[i] = (ids[0] if len(ids) else -1), len(ids), flags[i] | 1
            there = rows > 0
            end, first, rows, flags = end[there], first[there], rows[there], flags[there]
        return end, first, rows, flags

    def listing(self) -> tuple[np.ndarray, np.ndarray]:
        """All that are stored now, by their first rows: int64[m] the ids of their rows, one trajectory after another, oldest row first, and
        int64[k] how many rows each has. Where a row is overwritten meanwhile, what stands before it in its trajectory may be any
        row: whoever fetches them drops it."""
        self.require_trajectories()
        ids, offset, _ = self._call("list_trajectories")
        return ids, np.diff(offset)

    def trajectory(self, end: int) -> np.ndarray:
        """int64[k]: the stored rows of a trajectory up to row ``end``, oldest first; empty if that is not stored (any more)."""
        self.require_trajectories()
        return np.asarray(self._call("trajectory", int(end)) if end >= 0 else [], np.int64)

    def export(self) -> Iterator[tuple[TrajectorySpan, dict[str, Any]]]:
        """Each stored trajectory and its rows, nested dicts of arrays [k, *shape]. Rows that are overwritten on the way are left
        out and ``head_missing``; trajectories that are overwritten whole, too."""
        if self.schema is None:
            return
        self.require_trajectories()
        for t in self._found():
            ids = self.trajectory(t.end)
            if not len(ids):
                continue
            t = t._replace(first=int(ids[0]), rows=len(ids), head_missing=t.head_missing or int(ids[0]) != t.first)
            rows, valid = self.try_gather(ids)
            gone = len(ids) - int(valid.sum())  # the oldest ones
            if gone == len(ids):
                continue
            if gone:
                rows = _without(rows, gone)
                t = t._replace(first=int(ids[gone]), rows=t.rows - gone, head_missing=True)
            yield t, rows


def _check_slices(n: int, length: int, strict: bool, by: str, left: int, right: int) -> None:
    if n < 0:
        raise ValueError(f"n={n}: a number of slices ≥ 0")
    if length < 1:
        raise ValueError(f"length={length}: a slice has at least one row")
    if by not in BY:
        raise ValueError(f"by={by!r}: one of {', '.join(BY)}")
    for name, rows in (("left", left), ("right", right)):
        if not 0 <= rows < max(length, 1):
            raise ValueError(f"{name}={rows}: 0 ≤ rows beyond the trajectory < length={length}")


def _filled(chain: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """The last id repeated to the end of each line."""
    if (lens == chain.shape[1]).all():
        return chain
    at = np.minimum(np.arange(chain.shape[1]), np.maximum(lens[:, None] - 1, 0))
    return np.ascontiguousarray(np.take_along_axis(chain, at, axis=1))


def _without(rows: dict[str, Any], gone: int) -> dict[str, Any]:
    return {k: _without(v, gone) if isinstance(v, dict) else v[gone:] for k, v in rows.items()}
