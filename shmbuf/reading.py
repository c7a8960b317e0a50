"""Rows out of a buffer: how many there are, waiting for them, drawing them, fetching those of given ids or slots."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shmbuf import failures
from shmbuf._extension import native
from shmbuf.attachment import Attachment
from shmbuf.errors import Lapped, NotEnoughRows, StorageLost
from shmbuf.limiter import Scaled, Words, collectors_text, figures, from_now_on, limiter_of, scaled, waiting_text
from shmbuf.pins import Pin, pin
from shmbuf.rows import on_host
from shmbuf.schema import nest
from shmbuf.ticket import left_of, seconds_of

_STATUS = native.STATUSES
_OK = 0
PATIENCE = 1.0  # seconds, at least, for a transaction that overwrites all rows


def checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed={seed!r}: a whole number")
    return operator.index(seed)


def address_of(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]  # a third of the time of a.ctypes.data


def as_ids(ids: Any) -> np.ndarray:
    array = np.asarray(on_host(ids) if not isinstance(ids, range) else np.arange(ids.start, ids.stop, ids.step))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"row ids of dtype {array.dtype}: integers are needed")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(-1)


def _left(timeout: float | None, since: float) -> float | None:
    """`left_of`; all of it after a call that did not wait, so that error texts name the user's number."""
    return timeout if time.monotonic() - since < 1e-3 else left_of(timeout, since)


class Acquired:
    """Samples that count while this is entered, and are given back where that ends in an exception.

    No generator: one that Ctrl-C suspends before its body gives back when its traceback dies, to whatever limiter there is then.
    """

    __slots__ = ("_buffer", "_n", "_timeout", "_within")

    def __init__(self, buffer: Reading, n: int, timeout: float | None):
        self._buffer, self._n, self._timeout = buffer, n, timeout
        self._within: AbstractContextManager[None] | None = None

    def __enter__(self) -> float | None:
        left = self._buffer.acquire_samples(self._n, self._timeout)
        if self._buffer._place.wish is not None:
            self._within = self._buffer._place.within(left)
            self._within.__enter__()
        return left

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._within is not None:
            self._within.__exit__(None, None, None)
        if kind is not None:
            self._buffer.refund_samples(self._n)


class Reading(Attachment):
    """What any attachment can do with the rows, a read-only one too."""

    _numbers: tuple[Any, int | np.random.Generator | None] = (None, None)  # of which handle; a seed until it is needed

    # ---- how much there is --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._get("size")

    @property
    def window(self) -> tuple[int, int]:
        """Stored ids are ``range(*window)``."""
        lo, _, hi = self._get("window")
        return lo, hi

    @property
    def write_count(self) -> int:
        """Rows stored since the buffer was made or emptied, overwritten ones included."""
        return self._call("counters")["write_count"]

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; cheap, never blocks, from any process.

        ``size`` (rows), ``linked`` (its name still exists), ``write_count``, ``capacity``, ``utilization``, ``initialized``
        (has a schema); of rings: ``put_rows``,
        ``dropped_rows`` (drop_newest), ``skipped_rows`` (drop_oldest), ``refused_rows`` (RingFull), ``blocked_seconds``; of
        the writer: ``transactions``, ``takeovers`` (work finished for a dead one), ``writer_pid`` (the last to have signed
        for it), ``writer_active``, ``writer_age`` (seconds since its last transaction, −1: none yet); ``malformed_records``, ``clears``, ``rows_total``,
        ``first_id``, ``end_id``, ``reserve``; now: ``ring_used_bytes`` of all rings, ``ring_fill`` (0 to 1) of the fullest;
        who died: ``collectors_died``, ``writers_died``, ``processes_died`` (see :meth:`events`); by all processes:
        ``sampled_batches``, ``sampled_rows`` (see :meth:`ages`); ``replay_ratio`` (rows sampled per row stored);
        ``streams_cut`` (trajectories ended because a collector's table of streams was full); ``priorities_set``,
        ``priorities_stale`` (dropped, the row was overwritten); ``priorities``: None, or ``alpha``, ``eps``, ``sum`` and ``min``
        of the leaves, ``new_row`` (the priority it gets), ``scrubs`` (after an updater's death); ``limiter``: None, or its
        parameters, ``inserted``, ``sampled``, ``diff``, and who waits (``samplers_wait``: for a batch of 1;
        ``collectors_wait``; ``text``).
        """
        c, p = self._call("counters"), self._get("priorities")
        return {
            **c,
            "priorities_set": p["applied"] if p else 0,
            "priorities_stale": p["stale"] if p else 0,
            "capacity": self.capacity,
            "utilization": c["size"] / self.capacity,
            "initialized": self._handle.ready,
            "linked": self._handle.linked,
            "replay_ratio": c["sampled_rows"] / c["rows_total"] if c["rows_total"] else 0.0,
            "priorities": p,
            "limiter": figures(self._call("limiter", 1)),
        }

    def collectors(self) -> list[dict[str, Any]]:
        """One dict per ring in use: owner, state (alive, dead, closed), fill and counters."""
        return self._call("collectors")

    def members(self) -> list[dict[str, Any]]:
        """One dict per attached process: pid, command, roles, alive; ``waits_for`` (None, "rows", "schema", "room" in its ring,
        "commit", "limiter") and for how many ``waiting_seconds``; ``sampled_batches``, ``sampled_rows``."""
        return self._call("members")

    def events(self) -> list[dict[str, Any]]:
        """The last deaths (at most 32), oldest first: ``number``, ``kind`` ("collector_died", "writer_died", "process_died"), ``pid``,
        ``command``, ``at`` (unix time when it was noticed); ``rows`` that still lay in the collector's ring, or of the transaction
        that was finished for the writer; ``seconds`` from the writer's last sign of life to the take-over."""
        return self._call("events")

    def ages(self) -> dict[str, Any]:
        """How old the rows were that all processes have drawn, an age being the rows stored after one.

        ``sampled``: 64 counts, of ages of k bits (0; 1; 2–3; 4–7 …); ``sum`` of the ages; ``staleness_sum`` over
        ``staleness_rows`` rows, in policy versions, of `StalenessAwareSampler`; ``clock``: (row id, seconds ago), oldest first: when
        the buffer had got how far.
        """
        return self._call("ages")

    def check(self) -> dict[str, Any]:
        """Is the segment sound: header, cursors, rings, sums of priorities, links of trajectories? Reads only, from any process, at
        any time; looks at every row, and a second longer at a sum that is not what is below it.

        Returns:
            findings: what is wrong, one text each; quiet: nothing changed meanwhile, so that also what holds only at rest was
            checked; checked: how many of what.
        """
        return self._call("audit")

    def count_drawn(self, ids: np.ndarray) -> None:
        """For the floors above: these int64 ids were handed out, negative ones left out. For the statistics."""
        self._call("count_drawn", address_of(ids), len(ids))

    # ---- reading ------------------------------------------------------------------------------------------------

    def _outputs(self, n: int) -> list[np.ndarray]:
        assert self._schema is not None
        return [np.empty((n, *c.shape), c.numpy) for c in self._schema.columns]

    def draw(self, n: int, *, timeout: float | None = 0.0) -> tuple[dict[str, Any], np.ndarray]:
        """n rows drawn uniformly with replacement.

        Args:
            timeout: seconds to wait for the first row; 0 raises at once; None waits for ever.

        Returns:
            rows: nested dict of arrays [n, *shape], copies; ids: int64[n].

        Raises:
            NotEnoughRows: the buffer is empty. Lapped: rows are overwritten faster than one can be copied.
        """
        seconds_of(timeout)
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        timeout = self._wait_schema(timeout)
        out, ids = self._outputs(n), np.empty(n, np.int64)
        with self.sampling(n, timeout) as left:
            self.draw_into(self._columns, [address_of(a) for a in out], n, address_of(ids), 0, seconds_of(left))
        return nest(self._schema.keys, out), ids  # type: ignore[union-attr]

    def draw_into(self, columns: Any, addresses: list[int], n: int, ids: int, slots: int, seconds: float) -> None:
        """For the floors above: draw into packed memory. ids and (unless 0) slots are addresses of int64[n]."""
        self._drawn("draw", (columns, addresses, n, ids, slots), n, seconds)

    def ids_of(self, slots: np.ndarray) -> np.ndarray:
        """int64 ids of the rows that lie in these slots now. Raises IndexError for a slot that holds none."""
        lo, hi = self.window
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= hi - lo):
            j = int(np.flatnonzero((slots < 0) | (slots >= hi - lo))[0])
            raise IndexError(f"index[{j}] = {slots[j]} is out of range: {hi - lo:,} rows are stored")
        return hi - 1 - (hi - 1 - slots) % self.capacity

    def seed(self, value: int) -> None:
        """Make this handle's draws repeatable: the same seed draws the same of the same stored rows."""
        number = checked_seed(value) % 2**64
        self._get("ready")  # a fork child attaches anew here; the parent's handle takes a seed without a word
        self._call("seed", number)
        self._numbers = (self._handle, number)

    def generator(self) -> np.random.Generator:
        """For draws that Python makes: as repeatable as `seed` made this handle, and another one in a fork child."""
        self._get("ready")  # a fork child attaches anew here
        handle, numbers = self._numbers
        if not isinstance(numbers, np.random.Generator) or handle is not self._handle:
            numbers = np.random.default_rng(numbers if handle is self._handle else None)  # type: ignore[arg-type]
            self._numbers = (self._handle, numbers)
        return numbers

    def set_limiter(self, limiter: Words | None, *, batch: int = 1) -> None:
        """Let all processes sample and insert at this ratio from now on; None: at any.

        Raises ValueError where it would deadlock with batches of ``batch`` rows.
        """
        if self._readonly:
            raise PermissionError("a read-only handle cannot change the limiter")
        none: Scaled = (0, 0, 0, None, None)
        words, before, anew = none, self.limiter_state(), False
        if limiter is not None:
            inserted = self._call("counters")["rows_total"] if self._get("ready") else 0
            words, anew = from_now_on(limiter, scaled(limiter, batch), before, inserted)
        if not self._call("set_limiter", *words, anew):
            raise TimeoutError("the limiter is being changed by others all the time")

    @property
    def limiter(self) -> Words | None:
        """What limits sampling and inserting now, for all processes; None: nothing."""
        return limiter_of(self._call("limiter", 1))

    def limiter_state(self, n: int = 1) -> dict[str, Any] | None:
        """The limiter's numbers, and who waits for whom if a batch of n were asked for now. None: there is no limiter."""
        return self._call("limiter", n)

    def acquire_samples(self, n: int, timeout: float | None = 0.0) -> float | None:
        """Wait until n rows may be sampled, and count them. Without a limiter: nothing. Returns what is left of timeout.

        Raises:
            NotEnoughRows: not within ``timeout`` seconds (0: at once, None: for ever). ValueError: so many can never be.
        """
        since = time.monotonic() if timeout else 0.0
        status = self._call("acquire_samples", n, seconds_of(timeout))
        if status:
            why, state = _STATUS[status], self.limiter_state(n)
            if why == "limited" and state:
                raise NotEnoughRows(
                    f"the limiter of buffer {self.name!r} lets no batch of {n:,} be sampled"
                    f"{f' after {timeout:g} s' if timeout else '; timeout= waits'}: {waiting_text(state, n)}"
                )
            if why == "never" and state:
                raise ValueError(
                    f"a batch of {n:,} can never be sampled: the limiter of buffer {self.name!r} stops collectors at a "
                    f"difference of {state['max_diff']:g}, and a batch may not take it below {state['min_diff']:g}"
                )
            if why == "readonly":
                raise PermissionError(
                    "a read-only handle cannot sample from a buffer with a limiter, which counts samples"
                )
            raise self._lost(f"{why} while a sampler waited for its limiter" if timeout else why)
        return _left(timeout, since) if timeout else timeout

    def sampling(self, n: int, timeout: float | None) -> Acquired:
        """Acquire n rows, give them back if drawing them raises. What is left of timeout is for drawing them."""
        return Acquired(self, n, timeout)

    def refund_samples(self, n: int) -> None:
        """Give back n rows that were acquired and not drawn."""
        if n > 0 and not self._readonly:  # a read-only handle was given none, and cannot wake anybody
            with contextlib.suppress(ValueError, StorageLost):  # closed or destroyed meanwhile: nobody counts any more
                self._call("refund_samples", n)

    def _wait_schema(self, timeout: float | None) -> float | None:
        """Returns what is left of timeout."""
        if self.schema is None:
            since = time.monotonic()
            self.wait_rows(1, timeout)
            timeout = left_of(timeout, since)
            assert self.schema is not None, "rows are stored, so there is a schema"
        return timeout

    def _drawn(self, method: str, args: tuple[Any, ...], n: int, seconds: float, *more: Any) -> None:
        """Draw, waiting for rows if there are none; an error that says why nothing can be drawn."""
        if not self._standby:
            self._become_reader()
        since = time.monotonic() if seconds > 0 else 0.0
        try:  # as _call does, without its price
            status = getattr(self._handle, method)(*args, seconds, *more)
        except (native.Gone, native.FormatError):
            status = self._call(method, *args, seconds, *more)
        while status != _OK:
            why = _STATUS[status]
            if why == "lapped":
                raise Lapped(
                    f"rows are overwritten faster than one of {self._schema.row_bytes:,} bytes is copied; "  # type: ignore[union-attr]
                    f"the capacity of {self.capacity:,} rows is too small for this write rate"
                )
            if why == "timeout":
                raise self._unreadable(seconds)
            if why == "no_priority":
                raise RuntimeError(f"no row can be drawn: all {len(self):,} priorities are 0")
            if why == "not_ready":
                raise RuntimeError(f"buffer {self.name!r} keeps no priorities: keep_priorities(alpha, eps) first")
            if why != "empty":
                raise self._lost(why)
            if n == 0:
                return
            left = left_of(seconds if seconds >= 0 else None, since)
            self.wait_rows(1, left)
            status = self._call(method, *args, seconds_of(left), *more)

    def _unreadable(self, seconds: float) -> Lapped:
        return Lapped(
            f"no row can be read: one transaction has been overwriting all {self.capacity:,} for "
            f"{max(seconds, PATIENCE):.3g} s; {failures.writer_text(self)}"
        )

    def wait_readable(self, look: Callable[[], Any], timeout: float | None) -> None:
        """For the floors above: until ``look()``, which chooses or copies rows, says that it found some.

        Raises:
            NotEnoughRows: no row is stored within ``timeout`` seconds (None: waits for ever). StorageLost.
            Lapped: rows are stored, but for that time, and at least a second, none of them could be read: names the writer.
        """
        if look():
            return
        since, seconds, stuck = time.monotonic(), seconds_of(timeout), None
        while not look():
            if self._get("destroyed"):
                raise self._lost("destroyed")
            if not len(self):
                stuck = None
                self.wait_rows(1, left_of(timeout, since))
                continue
            stuck = time.monotonic() if stuck is None else stuck
            if time.monotonic() - stuck > max(seconds, PATIENCE):
                raise self._unreadable(seconds)
            if not self._readonly:
                self._call("help")
            time.sleep(1e-3)

    def _become_reader(self) -> None:
        """A handle that samples keeps a standby: a sleeping thread that drains when rings hold rows and nobody does."""
        self._standby = True
        if self._readonly:
            return
        self._call("add_role", native.READER)
        if self._drain != "caller":
            self._call("start_thread", True)

    def wait_rows(self, n: int, timeout: float | None = None) -> None:
        """Wait until at least n rows are stored.

        Raises NotEnoughRows when ``timeout`` seconds are over (None: waits for ever), StorageLost.
        """
        seconds = seconds_of(timeout)
        if n > self.capacity:
            raise ValueError(f"n={n:,}: more rows than the capacity of {self.capacity:,} are never stored")
        status, since, gone = "timeout", time.monotonic(), self._get("destroyed")
        while self._place.wish is not None and not self._get("ready") and status == "timeout":
            # Whoever waits helps, if nobody else does and he has the rows: in short turns until there are any.
            left = seconds_of(left_of(timeout, since))
            status = _STATUS[self._call("wait_rows", n, left if 0 <= left < 0.02 else 0.02)]
            if left == 0:
                break
        if self._place.wish is not None:
            with self._place.within(left_of(timeout, since)):
                self._have_rows(None)
                self._help()
        status = _STATUS[self._call("wait_rows", n, seconds_of(left_of(timeout, since)))]
        if status == "timeout":
            have = len(self)
            if have >= n:  # they came between the last look and this one
                return
            limited = collectors_text(self._call("limiter", 1))
            raise NotEnoughRows(
                f"Cannot sample from an empty storage. Buffer {self.name!r} holds no rows"
                + (f" after {seconds:.3g} s" if seconds else "; timeout= waits for them")
                if not have
                else f"buffer {self.name!r} holds {have:,} rows, {n:,} are needed (after {seconds:.3g} s)"
                + (f"; {limited}" if limited else "")
            )
        if status != "ok":
            raise self._lost(status if gone else f"{status} while waiting for rows")

    def gather(self, ids: Any) -> dict[str, Any]:
        """The rows of these ids, in order: nested dict of arrays [n, *shape], copies.

        Raises:
            Lapped: some are not stored (any more): names how many and the window.
        """
        ids = as_ids(ids)
        rows, valid = self.try_gather(ids)
        if not valid.all():
            bad = ids[~valid]
            lo, hi = self.window
            raise Lapped(
                f"{len(bad):,} of {len(ids):,} ids are not stored (first: {bad[0]}); stored now: {lo} to {hi - 1}"
                if hi > lo
                else f"{len(bad):,} of {len(ids):,} ids are not stored; the buffer is empty"
            )
        return rows

    def pin(self, first_id: int | None = None, *, seconds: float | None = 5.0) -> Pin:
        """Rows to be looked at in place, without a copy: none from ``first_id`` on (default: the oldest) is overwritten until the pin is
        released. ``with buf.pin() as p: for ids, rows in p.parts(): ...``. Meanwhile a full buffer takes no more rows than there are
        slots before the pinned ones: collectors wait.

        Args:
            seconds: after so long a writer that needs the room revokes it (`Pin.valid` is then False); None: never, but when this
                process dies.

        Raises:
            NotEnoughRows: there are no rows. Lapped: that row is not stored any more. IndexError: nor has it ever been.
            TooManyPins: 16 are in use. PermissionError: a read-only handle.
        """
        return pin(self, first_id, seconds)

    def try_gather(self, ids: Any) -> tuple[dict[str, Any], np.ndarray]:
        """As :meth:`gather`, with bool[n] telling which rows are valid instead of the error."""
        ids = as_ids(ids)
        if self.schema is None:
            return {}, np.zeros(len(ids), bool)
        out = self._outputs(len(ids))
        valid = self.fetch_into(self._columns, [address_of(a) for a in out], ids)
        return nest(self._schema.keys, out), valid  # type: ignore[union-attr]

    def fetch_into(self, columns: Any, addresses: list[int], ids: np.ndarray) -> np.ndarray:
        """For the floors above: the rows of int64 ids into packed memory; returns bool[n] valid."""
        done = np.zeros(len(ids), np.uint8)
        self.fetch_some(columns, addresses, ids, done)
        return done.view(bool)

    def fetch_some(self, columns: Any, addresses: list[int], ids: np.ndarray, done: np.ndarray) -> int:
        """For the floors above: those whose uint8[n] done is 0, which becomes 1 where the row was there; returns how many are."""
        return self._call("fetch", columns, addresses, len(ids), address_of(ids), address_of(done))

    def fetch_slots(
        self, fetch: Callable[[np.ndarray, np.ndarray], int], slots: np.ndarray, seconds: float = 1.0
    ) -> np.ndarray:
        """For the floors above: the rows that lie in these slots; returns their ids, int64[n].

        fetch(ids, done) copies the rows of int64[n] ids whose uint8[n] done is 0, sets it where the row was there, and returns how many are.
        A row that is overwritten meanwhile is read again as its successor. Raises IndexError for a slot beyond the stored
        rows, Lapped if some slot stays in transition for ``seconds``.
        """
        n, capacity, give_up = len(slots), self.capacity, time.monotonic() + seconds
        done, ids = np.zeros(n, np.uint8), np.zeros(n, np.int64)
        while True:
            lo, _, hi = self._get("window")
            if n and (int(slots.min()) < 0 or int(slots.max()) >= hi - lo):
                raise IndexError(
                    f"index {int(slots.max() if slots.min() >= 0 else slots.min())} is out of range: "
                    f"{hi - lo:,} rows are stored"
                )
            fresh = hi - 1 - (hi - 1 - slots) % capacity  # the newest id of each slot
            ids = np.where(done, ids, fresh)
            if fetch(ids, done) == n:
                return ids
            if time.monotonic() > give_up:
                raise Lapped(
                    f"{int(n - done.sum()):,} of {n:,} rows are being overwritten for {seconds:g} s; {failures.writer_text(self)}"
                )
            if not self._readonly:
                self._call("help")
            time.sleep(5e-5)
