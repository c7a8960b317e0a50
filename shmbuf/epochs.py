"""Rows without replacement: epochs, which readers share or have each for themselves; rows drawn once and never again; the newest."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shmbuf._extension import native
from shmbuf.errors import Lapped, NotEnoughRows
from shmbuf.failures import Waiting, writer_text
from shmbuf.priorities import Priorities
from shmbuf.reading import Reading, address_of
from shmbuf.schema import nest
from shmbuf.ticket import left_of, seconds_of

EPOCH, CONSUMED = 0, 1  # words of the segment
LOW = 0xFFFFFFFF  # of an epoch's second word: the position; above it: the size
MAX_TIMES = 1 << 16
MAX_TRIES = 1000
PATIENCE = 1.0  # seconds for one transaction, as for draws
Fetch = Callable[
    [np.ndarray, np.ndarray], Any
]  # copies the rows of int64[n] ids where uint8[n] done is 0, and sets it where it could


def check_options(seed: int | None, times: int = 1) -> None:
    if isinstance(times, bool) or not isinstance(times, (int, np.integer)):
        raise TypeError(f"max_sample_count={times!r}: a whole number, 1 to {MAX_TIMES:,}")
    if not 1 <= times <= MAX_TIMES:
        raise ValueError(f"max_sample_count={times!r}: 1 to {MAX_TIMES:,}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
        raise TypeError(f"seed={seed!r}: a whole number, or None")


class Claimed(NamedTuple):
    n: int
    ended: bool  # nothing is left of the epoch
    epoch: int
    left: int | None  # rows of the epoch; None: not known


class EpochReader:
    """One reader's way through the rows of a buffer; see `Epochs.epoch` and `Epochs.consume`.

    Attributes:
        ran_out: the last call came to the end of an epoch (of a shared epoch one reader sees it), or took the last row there was.
        at_end: and its batch was the last one. Otherwise what was left of the epoch has gone, and the batch is of the next one.
    """

    def __init__(
        self, buffer: Reading, *, shared: bool, shuffle: bool, drop_last: bool, times: int | None, seed: int | None
    ):
        check_options(seed, 1 if times is None else times)
        self.buffer, self.shared, self.shuffle, self.drop_last = buffer, bool(shared), bool(shuffle), bool(drop_last)
        self.times, self.seed = None if times is None else int(times), None if seed is None else int(seed)
        self.ran_out = self.at_end = False
        self._which = EPOCH if times is None else CONSUMED
        self._own = None if shared else native.PrivateEpoch()
        self._order = 0  # the seed of the order now, or the next epoch's is to be chosen
        self._fresh = True  # one's own epoch has ended, and the next has not begun
        self._lock = (0, threading.RLock())
        self._claims: tuple[int, list[_Taken], threading.RLock] = (0, [], threading.RLock())  # type: ignore[valid-type]
        if self.shared and not buffer._readonly:
            self._join()

    # ---- drawing ------------------------------------------------------------------------------------------------

    def draw(self, n: int, *, timeout: float | None = 0.0, into_next: bool = True) -> tuple[dict[str, Any], np.ndarray]:
        """Up to n rows, as copies.

        Args:
            timeout: seconds for all that has to be waited for; 0: raise at once; None: for ever.
            into_next: if so much of the epoch has been overwritten that no batch is left of it: go on into the next one, which
                ``ran_out`` tells. False: raise NotEnoughRows, with ``ran_out`` set; the next call begins the next epoch.

        Returns:
            rows: nested dict of arrays [k, *shape]; ids: int64[k]. k < n: what was left of the epoch, or all that was new.

        Raises:
            NotEnoughRows: nothing is stored, or nothing new within ``timeout`` seconds; see into_next.
            ValueError: with drop_last, a batch larger than the buffer. Lapped, StorageLost.
            PermissionError: a read-only handle cannot take rows that others then do not get.
        """
        buffer, since = self.buffer, time.monotonic()
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        buffer._wait_schema(timeout)
        out = buffer._outputs(n)
        addresses = [address_of(a) for a in out]

        def fetch(ids: np.ndarray, done: np.ndarray) -> None:
            buffer._call("fetch", buffer._columns, addresses, n, address_of(ids), address_of(done))

        batch = self._batch(n)
        try:
            with buffer.sampling(n, left_of(timeout, since)):
                ids, order = self._fill(batch, fetch, timeout, since, into_next)
            if order is not None:
                out, ids = [a[order] for a in out], ids[order]
                buffer.refund_samples(n - len(ids))
            buffer.count_drawn(ids)
            rows = nest(buffer._schema.keys, out)  # type: ignore[union-attr]
            batch.given = True  # no call between here and the caller: Ctrl-C comes only after calls
            return rows, ids
        except BaseException:
            batch.release()
            raise

    def draw_into(
        self,
        n: int,
        fetch: Fetch,
        timeout: float | None = 0.0,
        *,
        since: float | None = None,
        into_next: bool = True,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """For the floors above: int64[n] ids and the order in which fetched rows make the batch: None: as they are.

        since: when the timeout began (``time.monotonic()``); default: now."""
        batch = self._batch(n)
        try:
            ids, order = self._fill(batch, fetch, timeout, time.monotonic() if since is None else since, into_next)
            batch.given = True
            return ids, order
        except BaseException:
            batch.release()
            raise

    def put_back(self, ids: np.ndarray) -> None:
        """For the floors above: rows int64[k] of a batch that could not be given to anybody; they are in the next batch."""
        self._batch(0).unfinished.append(_Taken(np.array(ids, np.int64)))

    def _fill(
        self, batch: _Batch, fetch: Fetch, timeout: float | None, since: float, into_next: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self.shared and self.buffer._readonly:
            raise PermissionError(
                "a read-only handle cannot take rows from what readers share: "
                + (
                    "SamplerWithoutReplacement(shared=False) has an epoch of its own"
                    if self.times is None
                    else "attach it writable"
                )
            )
        if not self.buffer._standby:
            self.buffer._become_reader()
        n = len(batch.ids)
        if n == 0:
            return batch.ids, None
        if batch.unfinished:
            batch.resume(self.buffer.window[0], fetch)
        if self.times is None:
            return self._of_epoch(n, batch, fetch, timeout, since, into_next)
        return self._of_new(n, batch, fetch, timeout, since)

    def _of_epoch(
        self, n: int, batch: _Batch, fetch: Fetch, timeout: float | None, since: float, into_next: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """All of one claim; what is overwritten meanwhile is replaced by more of the same epoch, as far as it goes."""
        passed = False
        for _ in range(MAX_TRIES):
            if batch.missing.size and not batch.over:
                first = batch.fresh
                got = batch.take(self._claim, fetch, self._tells)
                if first and not got.n and not got.ended:
                    self._wait_for_epoch(n, timeout, since)
                    continue
            if not batch.missing.size or (batch.over and not self.drop_last and batch.missing.size < n):
                self.at_end = self._close(n, batch.epoch) or batch.tell
                self.ran_out = self.at_end or passed
                return batch.ids, batch.order(sort=not self.shuffle)
            if batch.over:  # what was left of that epoch is no batch
                passed = passed or batch.tell
                self.ran_out, self.at_end = passed, False
                batch.restart()
                if passed and not into_next:
                    raise NotEnoughRows(
                        f"the epoch has ended without another batch of {n:,}: rows of buffer {self.buffer.name!r} were "
                        "overwritten before their turn; the next call begins another epoch"
                    )
        raise self._lapped()

    def _of_new(
        self, n: int, batch: _Batch, fetch: Fetch, timeout: float | None, since: float
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What nobody had yet (or not often enough), over as many windows as it takes; fewer if there is no more in time."""
        nap, helped, in_vain = 1e-4, False, 0
        self.ran_out = self.at_end = False
        with Waiting(self.buffer) as waiting:
            while batch.missing.size and in_vain < MAX_TRIES:
                had = batch.missing.size
                got = batch.take(self._claim, fetch, self._tells)
                if not batch.missing.size:
                    break
                if got.n:
                    nap, helped, in_vain = 1e-4, False, in_vain + 1 if batch.missing.size == had else 0
                    continue
                if self.buffer._get("destroyed"):
                    raise self.buffer._lost("destroyed while a reader waited for new rows")
                if not helped and self.buffer._get("ready"):
                    self.buffer._call("help")
                    helped = True
                    continue
                left = left_of(timeout, since)
                if left == 0:
                    self.ran_out = self.at_end = True
                    break
                # The core wakes nobody for rows that are new to an epoch.
                waiting.tick()
                time.sleep(nap if left is None else min(nap, left))
                nap, helped = min(2 * nap, 5e-3), False
        if batch.missing.size == n:
            raise self._lapped() if in_vain else NotEnoughRows(self._nothing_new(timeout))
        return batch.ids, batch.order(sort=not self.shuffle)

    # ---- claims -------------------------------------------------------------------------------------------------

    def _batch(self, n: int) -> _Batch:
        pid = os.getpid()
        if self._claims[0] != pid:  # a fork child leaves to its parent what that had claimed
            self._claims = (pid, [], threading.RLock())
        _, unfinished, lock = self._claims
        if unfinished:
            with lock:
                for taken in tuple(unfinished):
                    taken.tidy(unfinished)
        return _Batch(n, unfinished)

    def _claim(self, n: int, ids: np.ndarray, of: int | None) -> Claimed:
        """Up to n ids of one epoch into int64 ids, which belong to nobody else then; of: only of this epoch."""
        whole = self.drop_last and of is None
        options = (self.shuffle, whole, self.times is not None, self.times or 1, address_of(ids))
        if self.shared:
            seed = self.buffer._header["instance_id"] if self.seed is None else self.seed
            only = of if self.times is None else None  # what is consumed may come from several windows
            got, ended, left, name = self.buffer._call("claim", None, self._which, n, seed % 2**64, *options, only)
            return Claimed(got, ended or (only is not None and not got), name, left)
        with self._alone():
            own = self._own
            was, at = own.state  # type: ignore[union-attr]
            if of is not None and (self._fresh or was != of):
                return Claimed(0, True, of, 0)  # another thread has ended it
            running = not self._fresh
            if not running:
                at = 0
                if self.seed is None:
                    self._order = int(self.buffer.generator().integers(1 << 63))
                    own.state = (0, 0)  # type: ignore[union-attr]  # the order follows from the seed and the rows alone
            seed = (self._order if self.seed is None else self.seed) % 2**64
            got, _, _, _ = self.buffer._call("claim", own, self._which, n, seed, *options)
            now, word = own.state  # type: ignore[union-attr]
            if running and (
                not got or now != was
            ):  # too little was left of it, or nothing: it is over, and no other begun
                self._finish(was, at)
                return Claimed(0, True, was, 0)
            if got:
                # With drop_last the core puts the rest away at once; but it may replace rows of this batch.
                taken = (at & LOW) + got
                own.state = (now, word & ~LOW | taken)  # type: ignore[union-attr]
                self._fresh = taken == word >> 32
            return Claimed(got, self._fresh and got > 0, now, (word >> 32) - taken if got else 0)

    def _finish(self, low: int, high: int) -> None:
        self._own.state = (low, high & ~LOW | high >> 32)  # type: ignore[union-attr]
        self._fresh = True

    def _close(self, n: int, epoch: int | None) -> bool:
        """End one's own epoch if no batch of n is left of it."""
        if self.shared:
            return False
        with self._alone():
            low, high = self._own.state  # type: ignore[union-attr]
            if self._fresh or low != epoch or (high >> 32) - (high & LOW) >= (n if self.drop_last else 1):
                return False
            self._finish(low, high)
            return True

    def _tells(self, n: int, got: Claimed, whole: bool) -> bool:
        """Whether this claim ended the epoch: of all who share it exactly one."""
        if self.shared and not got.n:  # it was over before: whoever ended it tells
            return False
        if self.shared and self.drop_last and not whole and got.left is not None:
            return got.left < n <= got.left + got.n
        return got.ended

    def _alone(self) -> threading.RLock:  # type: ignore[valid-type]
        """Threads of this process in turn, a signal handler inside what it interrupts; in a fork child a lock of its own: the
        parent's may have been held. And an epoch of its own: children would all go on with the same rows."""
        pid = os.getpid()
        if self._lock[0] != pid:
            self._lock, self._fresh = (pid, threading.RLock()), True
        return self._lock[1]

    # ---- what others chose --------------------------------------------------------------------------------------

    def _word(self, shuffle: bool, drop_last: bool, times: int, seed: int | None) -> int:
        of_seed = 0 if seed is None else zlib.crc32(str(seed).encode()) | 1
        return 1 | shuffle << 1 | drop_last << 2 | (times - 1) << 8 | of_seed << 32

    def _join(self) -> None:
        mine = (self.shuffle, self.drop_last, self.times or 1, self.seed)
        if not self._agrees(mine):
            raise ValueError(
                f"buffer {self.buffer.name!r}: those who share {'an epoch' if self.times is None else 'rows that are consumed'} "
                f"all use the same options. {self._difference(mine)}"
            )

    def _agrees(self, options: tuple[bool, bool, int, int | None]) -> bool:
        return self.buffer._call("share_epoch", self._which, self._word(*options))

    def _difference(self, mine: tuple[bool, bool, int, int | None]) -> str:
        """The word is set by now: asking for other options than its own changes nothing, so they can be found by trial."""
        counts = [mine[2]] if self.times is None else [mine[2], *range(1, 257)]
        for seed in {mine[3], None}:
            for times in counts:
                for bits in range(4):
                    theirs = (bool(bits & 1), bool(bits & 2), times, seed)
                    if self._agrees(theirs):
                        names = ("shuffle", "drop_last", "max_sample_count", "seed")
                        pairs = [(k, a, b) for k, a, b in zip(names, theirs, mine, strict=True) if a != b]
                        return f"The first chose {_listed(pairs, 1)}, asked for {_listed(pairs, 2)}"
        return f"The first chose another seed than {mine[3]!r} (and maybe more)"

    # ---- waits and words ----------------------------------------------------------------------------------------

    def _wait_for_epoch(self, n: int, timeout: float | None, since: float) -> None:
        buffer, size = self.buffer, len(self.buffer)
        if buffer._get("destroyed"):
            raise buffer._lost("destroyed while rows were being drawn")
        if self.drop_last and size < n and (n > buffer.capacity or (size and timeout == 0)):
            raise ValueError(
                f"The batch size ({n:,}) is greater than the number of stored rows ({size:,}"
                f"{f', capacity {buffer.capacity:,}' if n > buffer.capacity else ''}): with drop_last there is no such batch"
            )
        if size < (n if self.drop_last else 1):
            buffer.wait_rows(n if self.drop_last and size else 1, left_of(timeout, since))
            return
        # One transaction overwrites all there is: it ends.
        if time.monotonic() - since > PATIENCE + (timeout or 0):
            raise Lapped(f"no {n:,} rows can be read: {writer_text(buffer)}")
        if not buffer._readonly:
            buffer._call("help")
        time.sleep(1e-3)

    def _nothing_new(self, timeout: float | None) -> str:
        size, times = len(self.buffer), self.times or 1
        if not size:
            how = f" after {timeout:g} s" if timeout else "; timeout= waits for rows"
            return f"Cannot sample from an empty storage. Buffer {self.buffer.name!r} holds no rows{how}"
        had = "" if times == 1 else f" {times} times"
        return (
            f"no new rows: all {size:,} of buffer {self.buffer.name!r} have been taken{had}"
            f"{f'; none came within {timeout:g} s' if timeout else '; timeout= waits for new ones'}"
        )

    def _lapped(self) -> Lapped:
        return Lapped(
            f"rows are overwritten faster than they are copied; the capacity of {self.buffer.capacity:,} rows is too small "
            "for this write rate"
        )


def _listed(pairs: list[tuple[str, Any, Any]], which: int) -> str:
    return ", ".join(f"{p[0]}={p[which]!r}" for p in pairs)


class _Taken:
    """Ids that one claim took from all readers: from before the claim (−1: not yet) until a batch of them has been given.

    Attributes:
        stop: how many of them the batch uses that holds it; None: all.
        epoch, over, tell: of the batch that it is for, see `_Batch`.
        takers: the batch that holds it is the first of them: an append decides between threads, and signal handlers.
    """

    __slots__ = ("epoch", "ids", "over", "stop", "takers", "tell")

    def __init__(self, ids: np.ndarray, *takers: _Batch):
        self.ids, self.takers = ids, [*takers]
        self.stop: int | None = None
        self.epoch: int | None = None
        self.over, self.tell = True, False

    def held_by(self, batch: _Batch) -> bool:
        return bool(self.takers) and self.takers[0] is batch

    def tidy(self, unfinished: list[_Taken]) -> None:
        """After the batch that held it was given."""
        if not self.takers or not self.takers[0].given:
            return
        self.ids = self.ids[len(self.ids) if self.stop is None else self.stop :]
        self.stop = None
        if self.ids.size:
            self.takers.clear()
        else:
            self.leave(unfinished)

    def leave(self, unfinished: list[_Taken]) -> None:
        with contextlib.suppress(ValueError):  # a signal handler did it in between
            unfinished.remove(self)


class _Batch:
    """A batch that fills up: claimed ids go to the places that are still missing.

    Whatever ends it early (Ctrl-C, a destroyed buffer, too few rows) leaves what it had claimed to the next batch of its reader, as
    nobody else will ever get those rows.

    Attributes:
        given: to the caller, so its rows are no more to be given.
    """

    def __init__(self, n: int, unfinished: list[_Taken]):
        self.unfinished, self.given = unfinished, False
        self.ids, self.done = np.empty(n, np.int64), np.zeros(n, np.uint8)
        self.missing = np.arange(n)
        self.epoch: int | None = None  # of the first claim
        self.over = False  # nothing more is to be had of that epoch
        self.tell = False  # and this reader is the one that tells it
        self._takes = 0

    def release(self) -> None:
        """It will not be given."""
        for taken in [t for t in self.unfinished if t.held_by(self)]:
            taken.ids, taken.stop = taken.ids[taken.ids >= 0], None
            if not taken.ids.size:
                taken.leave(self.unfinished)
                continue
            if self._takes:
                taken.epoch, taken.over, taken.tell = self.epoch, self.over, self.tell
            taken.takers.clear()

    @property
    def fresh(self) -> bool:
        return not self._takes

    def restart(self) -> None:
        """Its rows are nobody's, and another epoch's are to come."""
        self.given = True
        for taken in [t for t in self.unfinished if t.held_by(self)]:
            taken.tidy(self.unfinished)
        self.__init__(len(self.ids), self.unfinished)  # type: ignore[misc]

    def resume(self, first_id: int, fetch: Fetch) -> None:
        """Begin with what earlier batches had claimed and did not give; rows before first_id are gone."""
        for taken in tuple(self.unfinished):
            room = len(self.missing)
            if not room:
                return
            taken.takers.append(self)
            if not taken.held_by(self):
                continue
            taken.ids = taken.ids[taken.ids >= first_id]
            if not taken.ids.size:
                taken.leave(self.unfinished)
                continue
            whole = len(taken.ids) <= room
            taken.stop = None if whole else room
            self.epoch, self.over, self.tell = taken.epoch, taken.over or not whole, self.tell or (taken.tell and whole)
            self._takes += 2  # not one claim of this batch's own: it is to be put in order
            self._put(taken.ids[:room], fetch)

    def take(
        self,
        claim: Callable[[int, np.ndarray, int | None], Claimed],
        fetch: Fetch,
        tells: Callable[[int, Claimed, bool], bool],
    ) -> Claimed:
        """Claim as many as are missing, copy them."""
        first, taken = self.fresh, _Taken(np.full(len(self.missing), -1), self)
        self.unfinished.append(taken)
        self.over = True  # until it is known: a Ctrl-C may come before the claim has told
        got = claim(len(taken.ids), taken.ids, self.epoch)
        self.tell = self.tell or tells(len(self.ids), got, first)
        self.over = got.ended or not (got.n or first)  # emptied meanwhile
        if not got.n:
            taken.leave(self.unfinished)
            return got
        if first:
            self.epoch = got.epoch
        self._takes += 1
        self._put(taken.ids[: got.n], fetch)
        return got

    def _put(self, ids: np.ndarray, fetch: Fetch) -> None:
        if len(ids) == len(self.ids):  # the usual case: all at once
            self.ids = ids
            fetch(self.ids, self.done)
        else:
            places, rest = self.missing[: len(ids)], self.missing[len(ids) :]
            self.ids = self.ids.copy()  # what was claimed stays as it was
            self.ids[places] = ids
            self.done[rest] = 1  # not to be fetched
            fetch(self.ids, self.done)
            self.done[rest] = 0
        self.missing = (self.done == 0).nonzero()[0]

    def order(self, *, sort: bool) -> np.ndarray | None:
        """Places of the rows that are there; sort: by id, if they were not claimed in one go."""
        if not self.missing.size and not (sort and self._takes > 1):
            return None
        there = np.delete(np.arange(len(self.ids)), self.missing)
        return there[np.argsort(self.ids[there], kind="stable")] if sort and self._takes > 1 else there


class Epochs(Priorities):
    """What `Buffer` does about drawing without replacement."""

    def epoch(
        self, *, shared: bool = False, drop_last: bool = False, shuffle: bool = True, seed: int | None = None
    ) -> EpochReader:
        """A reader that gets every row once per epoch, in another order each time. A new row enters the next epoch; one that is
        overwritten before its turn is passed over.

        Args:
            shared: one epoch for all who say so, in all processes: each row goes to one of them. Else: this reader's own.
            drop_last: what is left at the end and less than a batch is not drawn. Else the last batch is shorter.
            shuffle: False: oldest first.
            seed: of the order; None: this handle's (shared: the buffer's).

        Raises:
            ValueError: who shares the epoch has other options.
        """
        return EpochReader(self, shared=shared, shuffle=shuffle, drop_last=drop_last, times=None, seed=seed)

    def consume(self, times: int = 1, *, shuffle: bool = True, seed: int | None = None) -> EpochReader:
        """A reader of rows that are drawn at most ``times``, by all such readers of all processes together, whoever dies: what a
        reader took when it was killed is lost. A batch has fewer rows than asked for if no more come within its timeout.

        Args:
            times: 1 to 65,536. shuffle: False: oldest first. seed: of the order.

        Raises:
            ValueError: others consume with other options.
        """
        return EpochReader(self, shared=True, shuffle=shuffle, drop_last=False, times=times, seed=seed)

    def newest(self, n: int, *, timeout: float | None = 0.0) -> tuple[dict[str, Any], np.ndarray]:
        """The n newest rows, newest first: nested dict of arrays [n, *shape], copies, and int64[n] ids.

        Raises:
            NotEnoughRows: not so many are stored within ``timeout`` seconds (None: for ever). ValueError: never are. Lapped.
        """
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        since = time.monotonic()
        self._wait_schema(timeout)
        out = self._outputs(n)
        addresses = [address_of(a) for a in out]

        def fetch(ids: np.ndarray, done: np.ndarray) -> None:
            self._call("fetch", self._columns, addresses, n, address_of(ids), address_of(done))

        with self.sampling(n, left_of(timeout, since)):
            ids = self.newest_into(n, fetch, timeout, since)
        self.count_drawn(ids)
        return nest(self._schema.keys, out), ids  # type: ignore[union-attr]

    def newest_into(self, n: int, fetch: Fetch, timeout: float | None, since: float | None = None) -> np.ndarray:
        """For the floors above: int64[n] ids, of which the rows have been fetched. since: when the timeout began; default: now."""
        if not self._standby:
            self._become_reader()
        seconds_of(timeout)
        since = time.monotonic() if since is None else since
        done = np.zeros(n, np.uint8)
        if n:
            self.wait_rows(n, left_of(timeout, since))
        while True:
            lo, hi = self.window
            ids = np.arange(hi - 1, hi - 1 - n, -1, dtype=np.int64)
            if hi - lo >= n:
                done[:] = 0
                fetch(ids, done)
                if done.all():
                    return ids
            if time.monotonic() - since > PATIENCE + (timeout or 0):
                raise Lapped(
                    f"the {n:,} newest of {self.capacity:,} rows are overwritten faster than they are copied; {writer_text(self)}"
                )
            if not self._readonly:
                self._call("help")
