"""`Buffer`: the numpy-level handle. Never imports torch.

>>> import numpy as np
>>> from shmbuf import Buffer
>>> buf = Buffer.create("pong", 1000, schema={"obs": ("float32", (4,)), "reward": "float32"})
>>> buf.extend({"obs": np.zeros((3, 4), "f4"), "reward": np.arange(3, dtype="f4")})
array([0, 1, 2])
>>> rows, ids = buf.draw(2)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shmbuf import failures, streams
from shmbuf._extension import native
from shmbuf.edits import Edits
from shmbuf.epochs import Epochs
from shmbuf.errors import RingFull, SchemaError
from shmbuf.priorities import as_priorities, bad_priority
from shmbuf.reading import address_of
from shmbuf.rows import as_arrays, conform, count, on_host
from shmbuf.schema import Schema, show_key
from shmbuf.ticket import Nothing, Ticket, left_of, same_ids, seconds_of
from shmbuf.trajectories import Trajectories

_STATUS = native.STATUSES
_OK = 0


class Buffer(Trajectories, Epochs, Edits):
    """One attachment of this process to one named buffer. Made by :meth:`create` and :meth:`attach`.

    Rows are mappings of key to array, nested like the schema: ``{"obs": a, "next": {"obs": b}}``; ``("next", "obs")`` as a
    key means the same. A row id is a 64-bit number that never repeats; ``slot = id % capacity``.

    A handle puts from one thread at a time (ConcurrentUse otherwise); reading is free. It pickles as its name and attaches
    where it is unpickled; after a fork the child's first use attaches anew.
    """

    # ---- putting ------------------------------------------------------------------------------------------------

    def put(self, rows: Mapping, *, stream: Any = None, priorities: Any = None, timeout: float | None = None) -> Ticket:
        """Hand rows to the ring and return at once; blocks only while the ring is full (see ``full=``).

        Args:
            rows: arrays [n, *shape] of the schema's dtypes. Any strides and byte order; dtypes are never converted.
            stream: whose next steps these rows are: one number, or one a row (a step of many environments). Default 0.
            priorities: one number a row, or one for all, instead of the maximum; ignored unless the buffer keeps priorities.
            timeout: seconds; None: the buffer's.

        Raises:
            SchemaError: lists every difference; nothing was put. ValueError: a stream or priority that cannot be taken.
            RingFull: nothing was put.
            CommitPending: a put larger than the ring ran out of time: ``.rows`` of them are in.
            TooManyCollectors, ConcurrentUse, StorageLost, NotEnoughMemory
        """
        return self._put(rows, True, timeout, stream, priorities)

    def extend(
        self, rows: Mapping, *, stream: Any = None, priorities: Any = None, timeout: float | None = None
    ) -> np.ndarray:
        """Put, wait for the commit, and return int64[n], the rows' ids. timeout: seconds in all; None: the buffer's."""
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        return self._put(rows, False, timeout, stream, priorities).wait(left_of(timeout, since))

    def _put(
        self, rows: Mapping, wake: bool, timeout: float | None, stream: Any = None, priorities: Any = None
    ) -> Ticket:
        if self.schema is None:
            since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
            leaves = as_arrays(rows)
            if count(leaves) == 0:
                return self._nothing()
            found = Schema.from_leaves(leaves, 1)
            self.extras(count(leaves), stream, priorities, found)  # what is refused must not fix the schema
            self._build(found, "the first put", timeout)
            timeout = left_of(timeout, since)
        if self._whole_steps and self._schema.inner:  # type: ignore[union-attr]
            self._require_steps(count(as_arrays(rows)))
        if type(rows) is dict and stream is None and priorities is None:
            ticket = self.submit(self._columns, rows, -2, wake, timeout, False)
            if ticket is not None:
                return ticket
        converted, n = conform(rows, self._schema)  # type: ignore[arg-type]
        if n == 0:
            return self._nothing()
        ticket = self.submit(
            self._columns, converted, n, wake, timeout, False, extras=self.extras(n, stream, priorities)
        )
        assert ticket is not None, "converted rows fit"
        return ticket

    _whole_steps = True

    def _require_steps(self, n: int) -> None:
        each = math.prod(self._schema.inner)  # type: ignore[union-attr]
        if n % each:
            raise SchemaError(
                f"{n:,} rows are no whole time steps: buffer {self.name!r} has {each:,} cells a step, of shape {list(self._schema.inner)}. "  # type: ignore[union-attr]
                "Nothing was put"
            )

    def extras(
        self, n: int, stream: Any, priorities: Any, schema: Schema | None = None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """For the floors above: what comes with n rows, checked; schema: that the buffer would get."""
        of = p = None
        if stream is not None:
            self._require_streams(schema)
            of = np.asarray(on_host(stream))
            if of.dtype.kind not in "iu" or of.shape not in ((n,), ()):
                raise ValueError(
                    f"stream of dtype {of.dtype} and shape {list(of.shape)} for {n} rows: one integer, or one for each"
                )
            of = np.ascontiguousarray(np.broadcast_to(of.astype(np.int64), (n,)))
        if priorities is not None:
            p = as_priorities(priorities, n).astype(np.float64, copy=False)
            bad = np.flatnonzero(~(np.isfinite(p) & (p >= 0)))
            if len(bad) and self._get("wants_priorities"):
                raise bad_priority(self, int(bad[0]), float(p[bad[0]]))
        return of, p

    def _require_streams(self, schema: Schema | None) -> None:
        marks = self.marks if schema is None else streams.resolve(schema, self.config.get("streams") or {})
        if not marks.keep:
            raise ValueError(
                f"buffer {self.name!r} keeps no trajectories, so rows have no stream: create it with trajectories=True"
            )
        if marks.trajectory is not None:
            raise ValueError(f"stream= is not needed: rows carry their trajectory in {show_key(marks.trajectory.key)}")

    def _nothing(self) -> Ticket:
        return Ticket(Nothing, self, same_ids)

    def submit(
        self,
        columns: Any,
        rows: Any,
        n: int,
        wake: bool,
        timeout: float | None,
        tensors: bool,
        convert: Callable[[np.ndarray, int], Any] = same_ids,
        extras: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
        loaded: bool = False,
    ) -> Ticket | None:
        """For the floors above: put rows, as leaves in column order (a list), or nested as the schema.

        n: how many; −1: one, without a batch dimension; −2: as many as the first leaf has. timeout: None: the buffer's. extras: of
        leaves, uint64[n] streams and float64[n] priorities. loaded: rows of a checkpoint, which the limiter does not hold up, and
        whose streams may have `native.HEADLESS` set: their beginnings are missing.
        Returns None if they need conversion first.
        """
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        if type(rows) is list:
            of, p = extras
            with_them = (0 if of is None else address_of(of), 0 if p is None else address_of(p))
            try:
                t = self._call(
                    "put_leaves", columns, rows, n, self._full_code, seconds, wake, tensors, *with_them, loaded
                )
            except native.BadPriority as e:
                raise bad_priority(self, e.args[0], float(p[e.args[0]])) from None  # type: ignore[index]
        else:
            try:  # as _call does, without its price: 1-row puts are frequent
                t = self._handle.put_tree(columns, rows, n, self._full_code, seconds, wake, tensors)
            except (native.Gone, native.FormatError):
                t = self._call("put_tree", columns, rows, n, self._full_code, seconds, wake, tensors)
        if t is None:
            return None
        if (
            t.status and self._help() and _STATUS[t.status] == "none_free"
        ):  # the rings of those who left wait to be drained
            return self.submit(columns, rows, n, wake, timeout, tensors, convert, extras, loaded)
        ticket = Ticket(t, self, convert)
        if t.status:
            failures.put_failed(self, _STATUS[t.status], ticket, seconds)
        return ticket

    def submit_device(
        self,
        columns: list[tuple[int, int, int]],
        n: int,
        wake: bool,
        timeout: float | None,
        convert: Callable[[np.ndarray, int], Any],
        extras: tuple[np.ndarray | None, np.ndarray | None],
        stream: int,
    ) -> Ticket | None:
        """For the floors above: as `submit`, of n rows in device memory: (offset in the row, bytes, address) of each column.

        stream: the CUstream whose work makes them. Returns None if every device ring has a living owner.
        """
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        of, p = extras
        with_them = (0 if of is None else address_of(of), 0 if p is None else address_of(p))
        try:
            with self._place.within(None if seconds < 0 else seconds):
                t = self._call("put_device", columns, n, self._full_code, seconds, wake, *with_them, False, stream)
        except native.BadPriority as e:
            raise bad_priority(self, e.args[0], float(p[e.args[0]])) from None  # type: ignore[index]
        if _STATUS[t.status] == "no_device_ring":
            return None
        ticket = Ticket(t, self, convert)
        if t.status:
            failures.put_failed(self, _STATUS[t.status], ticket, seconds)
        return ticket

    # ---- emptying, draining ------------------------------------------------------------------------------------

    def empty(self, *, empty_write_count: bool = True, timeout: float | None = None) -> None:
        """Forget, for everybody, every row whose put returned before this call. Ids go on, slots start again at 0.

        Rows that others put meanwhile may come before (and are forgotten) or after. timeout: seconds; None: the buffer's.
        """
        if self.schema is None:
            return
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        self._clear(not empty_write_count, timeout).wait(left_of(timeout, since))

    def _restart(self, first_id: int, *, write_count: int, timeout: float | None = None) -> int:
        """`empty`, and the next row gets this id; for a checkpoint that is about to be loaded.

        Args:
            first_id: 0 to native.MAX_ID. If it is below the next id, as ids never repeat, the row gets the lowest id that is not
                and belongs to the same slot.
            write_count: what is counted on from.

        Returns:
            The id of the next row.
        """
        if not 0 <= first_id <= native.MAX_ID or not 0 <= write_count <= native.MAX_ID:
            raise ValueError(f"first_id={first_id}, write_count={write_count}: numbers up to {native.MAX_ID}")
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        ticket = self._clear(False, timeout, (first_id, write_count))
        ticket.wait(left_of(timeout, since))
        ((_, began),) = ticket._native.pieces()
        return int(began)

    def _clear(self, keep_write_count: bool, timeout: float | None, restart: tuple[int, int] | None = None) -> Ticket:
        self._help()
        t = self._call("clear", keep_write_count, seconds_of(timeout), restart)
        ticket = Ticket(t, self, same_ids)
        if t.status != _OK:
            if _STATUS[t.status] in ("full", "timeout"):
                raise RingFull(
                    f"rows that were put before could not be stored within {timeout:g} s, so nothing was emptied: "
                    f"{failures.held_up_text(self)}"
                )
            failures.put_failed(self, _STATUS[t.status], ticket, seconds_of(timeout))
        return ticket

    def drain(self) -> bool:
        """Move what the rings hold into the buffer now, unless somebody else is at it. True: at least one record moved."""
        if self._place.wish is not None:
            self._get("ready")  # a fork child attaches anew here
            self._place.map(self._bare)
        return self._call("help") == 2

    def __repr__(self) -> str:
        if self.closed:
            return f"Buffer({self.name!r}, closed)"
        return f"Buffer({self.name!r}, {len(self):,} of {self.capacity:,} rows, {self.schema or 'no schema yet'})"
