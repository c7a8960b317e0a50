"""`Buffer`: the numpy-level handle. Never imports torch.

>>> import numpy as np
>>> from shmbuf import Buffer
>>> buf = Buffer.create("pong", 1000, schema={"obs": ("float32", (4,)), "reward": "float32"})
>>> buf.extend({"obs": np.zeros((3, 4), "f4"), "reward": np.arange(3, dtype="f4")})
array([0, 1, 2])
>>> rows, ids = buf.draw(2)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from shmbuf import failures, segment
from shmbuf._extension import native
from shmbuf.errors import (
    BufferExists,
    BufferFormatError,
    BufferNotFound,
    Lapped,
    NotEnoughRows,
    RingFull,
    ShmbufError,
    StorageLost,
)
from shmbuf.rows import as_arrays, conform, count
from shmbuf.schema import Schema, flatten, nest
from shmbuf.settings import DEFAULTS, FULL, check_settings
from shmbuf.ticket import Nothing, Ticket, left_of, same_ids, seconds_of

_STATUS = native.STATUSES
_OK = 0


def _address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]  # a third of the time of a.ctypes.data


def _as_ids(ids: Any) -> np.ndarray:
    array = np.asarray(ids if not isinstance(ids, range) else np.arange(ids.start, ids.stop, ids.step))
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"row ids of dtype {array.dtype}: integers are needed")
    return np.ascontiguousarray(array, dtype=np.int64).reshape(-1)


class Buffer:
    """One attachment of this process to one named buffer. Made by :meth:`create` and :meth:`attach`.

    Rows are mappings of key to array, nested like the schema: ``{"obs": a, "next": {"obs": b}}``; ``("next", "obs")`` as a
    key means the same. A row id is a 64-bit number that never repeats; ``slot = id % capacity``.

    A handle puts from one thread at a time (ConcurrentUse otherwise); reading is free. It pickles as its name and attaches
    where it is unpickled; after a fork the child's first use attaches anew.
    """

    def __init__(self, name: str, handle: Any, *, owner: int | None = None, readonly: bool = False):
        self.name = name
        self._owner, self._readonly, self._pid = owner, readonly, os.getpid()
        self._schema: Schema | None = None
        self._columns: Any = None
        self._standby = False
        self._owns = False
        self._drain_process: subprocess.Popen | None = None
        self._adopt(handle)

    def _adopt(self, handle: Any) -> None:
        self._handle = handle
        self._header = handle.header
        try:
            self.config: dict[str, Any] = msgpack.unpackb(handle.config)
            self._full, self._timeout, self._drain = (self.config[k] for k in ("full", "timeout", "drain"))
            self._full_code = FULL.index(self._full)
            self._seconds = seconds_of(self._timeout)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as e:
            handle.close()
            raise BufferFormatError(f"buffer {self.name!r}: its configuration cannot be read: {e}") from None
        handle.seed(secrets.randbits(64))
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _finalize, handle, self.name, None, 0)

    # ---- birth and end ------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str | None,
        capacity: int,
        *,
        schema: Mapping | Schema | None = None,
        example: Mapping | None = None,
        max_collectors: int = 256,
        ring_bytes: int | None = None,
        full: str = "block",
        timeout: float | None = None,
        mode: int = 0o600,
        group: str | int | None = None,
        drain: str = "thread",
        exists: str = "error",
        config: Mapping[str, Any] | None = None,
    ) -> Buffer:
        """A new buffer, and a handle on it.

        Args:
            name: 1 to 100 characters of ``A-Za-z0-9._-``. None: unnamed; it dies with this handle.
            capacity: rows; then the oldest is overwritten.
            schema: ``{key: (dtype, shape)}`` (``{key: dtype}`` for scalars; nested mappings allowed). dtype: a torch, numpy
                or string name of any torch dtype of fixed size.
            example: one row, from which to take the schema. With neither, the first put of any process decides.
            max_collectors: how many handles can put at the same time.
            ring_bytes: of each collector's ring; rounded up to a power of two. Default: 4 MiB, more for large rows.
            full: what a put does when its ring is full: ``"block"`` (up to ``timeout``), ``"error"`` (RingFull at once),
                ``"drop_newest"`` (what is being put), ``"drop_oldest"`` (what is in the ring;
                while whoever drains is stuck nobody can, and the new rows go instead). Drops are counted.
            timeout: seconds that ``"block"`` waits; None: for ever.
            mode, group: permissions of the segment; world access is refused.
            drain: who moves rows from the rings into the buffer: a ``"thread"`` of this process, a ``"process"`` of its own,
                or only the ``"caller"`` that needs it (deterministic).
            exists: if the name is taken: ``"error"``, ``"attach"`` or ``"replace"`` (only when nobody is attached).
            config: extra msgpack values for :attr:`config`.

        Raises:
            BufferExists, BufferInUse, SchemaError, NotEnoughMemory, ValueError
        """
        check_settings(capacity, max_collectors, ring_bytes, full=full, drain=drain, exists=exists)
        seconds_of(timeout)
        given = schema if isinstance(schema, Schema) else Schema.from_spec(schema) if schema is not None else None
        if example is not None:
            shown = Schema.from_leaves({k: np.asarray(v) for k, v in flatten(example).items()}, 0)
            if given is not None:
                given.require_same(shown, "the example")
            given = given or shown
        settings = {**(config or {}), "full": full, "timeout": timeout, "drain": drain}
        try:
            blob = msgpack.packb(settings)
        except (TypeError, ValueError, OverflowError) as e:
            raise ValueError(f"config cannot be packed: {e}") from None
        segment.collect_unnamed()
        while True:
            try:
                name, handle = segment.create(
                    name,
                    capacity=int(capacity),
                    max_collectors=max_collectors,
                    ring_bytes=ring_bytes or 0,
                    config=blob,
                    mode=mode,
                    group=group,
                )
                break
            except BufferExists:
                if exists == "error":
                    raise
                if exists == "replace":
                    with contextlib.suppress(BufferNotFound):
                        segment.destroy(name)  # type: ignore[arg-type]
                    continue
                try:
                    asked = {
                        "capacity": capacity,
                        "max_collectors": max_collectors,
                        "full": full,
                        "timeout": timeout,
                        "drain": drain,
                    }
                    return cls._attach_existing(name, asked, ring_bytes, given)  # type: ignore[arg-type]
                except BufferNotFound:
                    continue  # destroyed meanwhile
        self = cls(name, handle)
        try:
            if given is not None:
                self._build(given, "the schema")
            self._owns = self._header["unnamed"]
            self._rearm_finalizer()
            self._start_draining()
        except BaseException:
            instance = self._header["instance_id"]
            self.close()
            with contextlib.suppress(BufferNotFound):  # an unnamed one is gone with close()
                segment.destroy(name, force=True, instance_id=instance)
            raise
        return self

    @classmethod
    def _attach_existing(cls, name: str, asked: dict, ring_bytes: int | None, given: Schema | None) -> Buffer:
        self = cls.attach(name)
        try:
            has = {"capacity": self.capacity, "max_collectors": self._header["max_collectors"], **self.config}
            other = [
                f"{k}: has {has.get(k)!r}, asked for {v!r}"
                for k, v in asked.items()
                if v not in (has.get(k), DEFAULTS.get(k, ...))  # what was not asked for is taken as it is
            ]
            if (
                ring_bytes
                and self._header["ready"]
                and native.ring_bytes(ring_bytes, self._header["row_bytes"]) != self._header["ring_bytes"]
            ):
                other.append(f"ring_bytes: has {self._header['ring_bytes']}, asked for {ring_bytes}")
            if other:
                raise BufferExists(
                    f"buffer {name!r} exists with other settings ({'; '.join(other)}): take it as it is with "
                    f'shmbuf.attach({name!r}), or exists="replace"'
                )
            if given is not None:
                self._build(given, "the schema")
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def attach(
        cls, name: str, *, owner: int | None = None, readonly: bool = False, timeout: float | None = 0.0
    ) -> Buffer:
        """A handle on an existing buffer of this user, or of user ``owner`` if the mode lets us. Runs no code from it.

        Args:
            timeout: seconds to wait until the name exists; 0: not at all; None: for ever.

        Raises:
            BufferNotFound, BufferFormatError, PermissionError
        """
        handle = segment.attach_within(timeout, name, owner=owner, readonly=readonly)
        return cls(name, handle, owner=owner, readonly=readonly)

    def _start_draining(self) -> None:
        if self._drain == "thread":
            self._handle.start_thread(False)
        elif self._drain == "process":
            self._drain_process = subprocess.Popen(
                [sys.executable, "-m", "shmbuf.drain", self.name, "--leave-when-alone"], stdin=subprocess.DEVNULL
            )

    def close(self) -> None:
        """Let go: what this handle put is drained if nobody else is at it, its ring is given back. An unnamed buffer goes
        when its creator closes. Closing twice is nothing."""
        self._finalizer()
        if self._drain_process is not None and self._drain_process.poll() is None and self._owns:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself, the buffer is destroyed
                self._drain_process.wait(10)

    def _rearm_finalizer(self) -> None:
        self._finalizer.detach()
        instance = self._header["instance_id"] if self._owns else None
        self._finalizer = weakref.finalize(self, _finalize, self._handle, self.name, instance, os.getpid())

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        return _unpickle, (type(self), self.name, self._owner, self._readonly, self._header["instance_id"])

    def _recover(self, error: Exception) -> None:
        """A native call met a dead handle: attach anew in a fork child, else say what happened."""
        why = _STATUS[error.args[0]]
        if why != "forked" or self.closed:
            raise ValueError(f"this handle on buffer {self.name!r} is closed") from None
        instance = self._header["instance_id"]
        self._finalizer.detach()
        try:
            handle = segment.attach(self.name, owner=self._owner, readonly=self._readonly)
        except BufferNotFound as e:
            raise StorageLost(f"this forked process cannot attach: {e}") from None
        if handle.header["instance_id"] != instance:
            handle.close()
            raise StorageLost(
                f"the buffer that was named {self.name!r} at the fork is gone; the name means another one now"
            )
        self._standby = self._owns = False
        self._drain_process = None
        self._adopt(handle)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._handle, method)(*args)
        except native.Gone as e:
            self._recover(e)
            return getattr(self._handle, method)(*args)
        except native.FormatError as e:
            raise BufferFormatError(f"buffer {self.name!r}: {e}") from None

    def _get(self, attribute: str) -> Any:
        try:
            return getattr(self._handle, attribute)
        except native.Gone as e:
            self._recover(e)
            return getattr(self._handle, attribute)
        except native.FormatError as e:
            raise BufferFormatError(f"buffer {self.name!r}: {e}") from None

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._header["capacity"]

    @property
    def schema(self) -> Schema | None:
        """None until somebody put the first rows."""
        if self._schema is None and self._get("ready"):
            schema = Schema.from_bytes(self._handle.schema)
            if schema.row_bytes != self._handle.header["row_bytes"]:
                raise BufferFormatError(f"buffer {self.name!r}: its schema and its rows have different sizes")
            self._use_schema(schema)
        return self._schema

    def _use_schema(self, schema: Schema) -> None:
        self._columns = schema.native()
        self._header = self._handle.header
        self._schema = schema

    def _build(self, schema: Schema, whose: str, timeout: float | None = None) -> None:
        if self._readonly and not self._get("ready"):
            raise PermissionError("a read-only handle cannot give the buffer its schema")
        self._get("ready")  # a fork child attaches anew here
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        self._use_schema(segment.build(self._handle, schema, whose, seconds))

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

        ``size`` (rows), ``write_count``, ``capacity``, ``utilization``, ``initialized`` (has a schema); of rings: ``put_rows``,
        ``dropped_rows`` (drop_newest), ``skipped_rows`` (drop_oldest), ``refused_rows`` (RingFull), ``blocked_seconds``; of
        the writer: ``transactions``, ``takeovers`` (work finished for a dead one), ``writer_pid``, ``writer_active``,
        ``writer_age`` (seconds since its last transaction, −1: none yet); ``malformed_records``, ``clears``, ``rows_total``,
        ``first_id``, ``end_id``, ``reserve``.
        """
        c = self._call("counters")
        return {
            **c,
            "capacity": self.capacity,
            "utilization": c["size"] / self.capacity,
            "initialized": self._handle.ready,
        }

    def collectors(self) -> list[dict[str, Any]]:
        """One dict per ring in use: owner, state (alive, dead, closed), fill and counters."""
        return self._call("collectors")

    def members(self) -> list[dict[str, Any]]:
        """One dict per attached process: pid, command, roles, alive."""
        return self._call("members")

    # ---- putting ------------------------------------------------------------------------------------------------

    def put(self, rows: Mapping, *, timeout: float | None = None) -> Ticket:
        """Hand rows to the ring and return at once; blocks only while the ring is full (see ``full=``).

        Args:
            rows: arrays [n, *shape] of the schema's dtypes. Any strides and byte order; dtypes are never converted.
            timeout: seconds, instead of the buffer's.

        Raises:
            SchemaError: lists every difference; nothing was put.
            RingFull: nothing was put.
            CommitPending: a put larger than the ring ran out of time: ``.rows`` of them are in.
            TooManyCollectors, ConcurrentUse, StorageLost, NotEnoughMemory
        """
        return self._put(rows, True, timeout)

    def extend(self, rows: Mapping, *, timeout: float | None = None) -> np.ndarray:
        """Put, wait for the commit, and return int64[n], the rows' ids."""
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        return self._put(rows, False, timeout).wait(left_of(timeout, since))

    def _put(self, rows: Mapping, wake: bool, timeout: float | None) -> Ticket:
        if self.schema is None:
            leaves = as_arrays(rows)
            if count(leaves) == 0:
                return self._nothing()
            self._build(Schema.from_leaves(leaves, 1), "the first put", timeout)
        if type(rows) is dict:
            ticket = self.submit(self._columns, rows, -2, wake, timeout, False)
            if ticket is not None:
                return ticket
        converted, n = conform(rows, self._schema)  # type: ignore[arg-type]
        if n == 0:
            return self._nothing()
        ticket = self.submit(self._columns, converted, n, wake, timeout, False)
        assert ticket is not None, "converted rows fit"
        return ticket

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
    ) -> Ticket | None:
        """For the floors above: put rows, as leaves in column order (a list), or nested as the schema.

        n: how many; −1: one, without a batch dimension; −2: as many as the first leaf has. None: they need conversion first.
        """
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        if type(rows) is list:
            t = self._call("put_leaves", columns, rows, n, self._full_code, seconds, wake, tensors)
        else:
            try:  # as _call does, without its price: 1-row puts are frequent
                t = self._handle.put_tree(columns, rows, n, self._full_code, seconds, wake, tensors)
            except (native.Gone, native.FormatError):
                t = self._call("put_tree", columns, rows, n, self._full_code, seconds, wake, tensors)
        if t is None:
            return None
        ticket = Ticket(t, self, convert)
        if t.status:
            failures.put_failed(self, _STATUS[t.status], ticket, seconds)
        return ticket

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
        seconds = seconds_of(timeout)
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        if self.schema is None:
            self.wait_rows(1, timeout)
            assert self.schema is not None, "rows are stored, so there is a schema"
        out, ids = self._outputs(n), np.empty(n, np.int64)
        self.draw_into(self._columns, [_address(a) for a in out], n, _address(ids), 0, seconds)
        return nest(self._schema.keys, out), ids  # type: ignore[union-attr]

    def draw_into(self, columns: Any, addresses: list[int], n: int, ids: int, slots: int, seconds: float) -> None:
        """For the floors above: draw into packed memory. ids and (unless 0) slots are addresses of int64[n]."""
        if not self._standby:
            self._become_reader()
        try:  # as _call does, without its price
            status = self._handle.draw(columns, addresses, n, ids, slots, seconds)
        except (native.Gone, native.FormatError):
            status = self._call("draw", columns, addresses, n, ids, slots, seconds)
        while status != _OK:
            why = _STATUS[status]
            if why == "lapped":
                raise Lapped(
                    f"rows are overwritten faster than one of {self._schema.row_bytes:,} bytes is copied; "  # type: ignore[union-attr]
                    f"the capacity of {self.capacity:,} rows is too small for this write rate"
                )
            if why == "timeout":
                raise Lapped(
                    f"no row can be read: one transaction has been overwriting all {self.capacity:,} for "
                    f"{max(seconds, 1.0):g} s; {failures.writer_text(self)}"
                )
            if why != "empty":
                raise StorageLost(f"buffer {self.name!r} was {why} while rows were being drawn")
            if n == 0:
                return
            self.wait_rows(1, seconds if seconds >= 0 else None)
            status = self._call("draw", columns, addresses, n, ids, slots, seconds)

    def _become_reader(self) -> None:
        """A handle that samples keeps a standby: a sleeping thread that drains when rings hold rows and nobody does."""
        self._standby = True
        if self._readonly:
            return
        self._call("add_role", native.READER)
        if self._drain != "caller":
            self._call("start_thread", True)

    def wait_rows(self, n: int, timeout: float | None = None) -> None:
        """Wait until at least n rows are stored. Raises NotEnoughRows when ``timeout`` seconds are over, StorageLost."""
        seconds = seconds_of(timeout)
        if n > self.capacity:
            raise ValueError(f"n={n:,}: more rows than the capacity of {self.capacity:,} are never stored")
        status = _STATUS[self._call("wait_rows", n, seconds)]
        if status == "timeout":
            have = len(self)
            if have >= n:  # they came between the last look and this one
                return
            raise NotEnoughRows(
                f"Cannot sample from an empty storage. Buffer {self.name!r} holds no rows"
                + (f" after {seconds:g} s" if seconds else "; timeout= waits for them")
                if not have
                else f"buffer {self.name!r} holds {have:,} rows, {n:,} are needed (after {seconds:g} s)"
            )
        if status != "ok":
            raise StorageLost(f"buffer {self.name!r} was {status} while waiting for rows")

    def gather(self, ids: Any) -> dict[str, Any]:
        """The rows of these ids, in order: nested dict of arrays [n, *shape], copies.

        Raises:
            Lapped: some are not stored (any more): names how many and the window.
        """
        ids = _as_ids(ids)
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

    def try_gather(self, ids: Any) -> tuple[dict[str, Any], np.ndarray]:
        """As :meth:`gather`, with bool[n] telling which rows are valid instead of the error."""
        ids = _as_ids(ids)
        if self.schema is None:
            return {}, np.zeros(len(ids), bool)
        out = self._outputs(len(ids))
        valid = self.fetch_into(self._columns, [_address(a) for a in out], ids)
        return nest(self._schema.keys, out), valid  # type: ignore[union-attr]

    def fetch_into(self, columns: Any, addresses: list[int], ids: np.ndarray) -> np.ndarray:
        """For the floors above: the rows of int64 ids into packed memory; returns bool[n] valid."""
        done = np.zeros(len(ids), np.uint8)
        self._call("fetch", columns, addresses, len(ids), _address(ids), _address(done))
        return done.view(bool)

    def fetch_slots_into(
        self, columns: Any, addresses: list[int], slots: np.ndarray, seconds: float = 1.0
    ) -> np.ndarray:
        """For the floors above: the rows that lie in these slots into packed memory; returns their ids, int64[n].

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
            if self._call("fetch", columns, addresses, n, _address(ids), _address(done)) == n:
                return ids
            if time.monotonic() > give_up:
                raise Lapped(
                    f"{int(n - done.sum()):,} of {n:,} rows are being overwritten for {seconds:g} s; {failures.writer_text(self)}"
                )
            if not self._readonly:
                self.drain()
            time.sleep(5e-5)

    # ---- the rest -----------------------------------------------------------------------------------------------

    def empty(self, *, empty_write_count: bool = True, timeout: float | None = None) -> None:
        """Forget, for everybody, every row whose put returned before this call. Ids go on, slots start again at 0.

        Rows that others put meanwhile may come before (and are forgotten) or after.
        """
        if self.schema is None:
            return
        since, timeout = time.monotonic(), self._timeout if timeout is None else timeout
        t = self._call("clear", not empty_write_count, seconds_of(timeout))
        ticket = Ticket(t, self, same_ids)
        if t.status != _OK:
            if _STATUS[t.status] in ("full", "timeout"):
                raise RingFull(
                    f"rows that were put before could not be stored within {timeout:g} s, so nothing was emptied: "
                    f"{failures.writer_text(self)}"
                )
            failures.put_failed(self, _STATUS[t.status], ticket, seconds_of(timeout))
        ticket.wait(left_of(timeout, since))

    def drain(self) -> bool:
        """Move what the rings hold into the buffer now, unless somebody else is at it. True: at least one record moved."""
        return self._call("help") == 2

    def __repr__(self) -> str:
        if self.closed:
            return f"Buffer({self.name!r}, closed)"
        return f"Buffer({self.name!r}, {len(self):,} of {self.capacity:,} rows, {self.schema or 'no schema yet'})"


def _unpickle(cls: type[Buffer], name: str, owner: int | None, readonly: bool, instance_id: int) -> Buffer:
    self = cls.attach(name, owner=owner, readonly=readonly)
    if self._header["instance_id"] != instance_id:
        self.close()
        raise StorageLost(
            f"the buffer that was named {name!r} when this handle was pickled is gone; the name means another one now"
        )
    return self


def _finalize(handle: Any, name: str, instance_id: int | None, owner_pid: int) -> None:
    """instance_id is given by the creator of an unnamed buffer, which ends with it (but not with its forked children)."""
    handle.close()
    if instance_id is not None and os.getpid() == owner_pid:
        with contextlib.suppress(ShmbufError, OSError):  # gone already
            segment.destroy(name, force=True, instance_id=instance_id)
