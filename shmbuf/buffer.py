"""`Buffer`: the numpy-level handle. Never imports torch.

>>> import numpy as np
>>> from shmbuf import Buffer
>>> buf = Buffer.create("pong", 1000, schema={"obs": ("float32", (4,)), "reward": "float32"})
>>> buf.extend({"obs": np.zeros((3, 4), "f4"), "reward": np.arange(3, dtype="f4")})
array([0, 1, 2])
>>> rows, ids = buf.draw(2)
"""

from __future__ import annotations

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

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.errors import (BufferExists, BufferFormatError, BufferNotFound, CommitInterrupted, CommitPending,
                           ConcurrentUse, Lapped, NotEnoughMemory, NotEnoughRows, RingFull, SchemaError, ShmbufError,
                           StorageLost, TooManyCollectors)
from shmbuf.schema import Key, Schema, as_key, dtype_name, flatten, nest, show_key

FULL = ("block", "error", "drop_newest", "drop_oldest")
DRAIN = ("thread", "process", "caller")
FOREVER = -1.0
_STATUS = native.STATUSES
_OK = 0


def _seconds(timeout: float | None) -> float:
    if timeout is None:
        return FOREVER
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds ≥ 0, or None to wait for ever")
    return float(timeout)


def _address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]  # a third of the time of a.ctypes.data


class Ticket:
    """Rows that are in the ring. They will be stored, whatever dies.

    Attributes:
        rows: how many went in (fewer than were given only with a drop policy).
    """

    __slots__ = ("_capacity", "_convert", "_native", "_size")

    def __init__(self, ticket: Any, size: int, capacity: int, convert: Callable[[np.ndarray, int], Any]):
        self._native, self._size, self._capacity, self._convert = ticket, size, capacity, convert

    @property
    def rows(self) -> int:
        return self._native.rows

    def done(self) -> bool:
        """Whether the rows can be drawn by now."""
        return self._native.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the rows can be drawn by every sampler.

        Returns:
            int64[rows]: their ids (from `Buffer`), or a LongTensor of their indices (from the replay buffers). Rows that a
            drop policy took are left out.

        Raises:
            CommitPending: not within ``timeout`` seconds; the rows will be stored.
            CommitInterrupted: Ctrl-C meanwhile; likewise.
            StorageLost: the buffer was destroyed.
        """
        try:
            status = self._native.wait(_seconds(timeout))
        except KeyboardInterrupt:
            raise CommitInterrupted("interrupted while waiting for the commit of rows that are in the ring: they will be "
                                    "stored; .ticket waits for them", self, self.rows) from None
        except native.Gone as e:
            if _STATUS[e.args[0]] == "forked":
                raise StorageLost("this ticket belongs to the process that put the rows; wait for it there") from None
            raise StorageLost("the handle was closed before these rows were committed; whoever is attached stores them, "
                              "their ids are not known here") from None
        if status != _OK:
            self._failed(_STATUS[status], timeout)
        return self._convert(self.ids(), self._capacity)

    def ids(self) -> np.ndarray:
        """int64 ids of the committed rows."""
        parts = [np.arange(first, first + n, dtype=np.int64) for n, first in self._native.pieces() if first is not None]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _failed(self, status: str, timeout: float | None) -> None:
        if status == "timeout":
            raise CommitPending(f"{self.rows:,} of {self._size:,} rows are in the ring but not committed after {timeout} s: "
                                "they will be stored; .ticket waits for them", self, self.rows)
        raise StorageLost(f"the buffer was {status} while {self.rows:,} rows waited for their commit")

    def __repr__(self) -> str:
        return f"Ticket({self.rows} rows, {'done' if self._native.done() else 'pending'})"


def _same_ids(ids: np.ndarray, capacity: int) -> np.ndarray:
    return ids


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
            self._seconds = _seconds(self._timeout)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as e:
            handle.close()
            raise BufferFormatError(f"buffer {self.name!r}: its configuration cannot be read: {e}") from None
        handle.seed(secrets.randbits(64))
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _finalize, handle, self.name, None, 0)

    # ---- birth and end ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, name: str | None, capacity: int, *, schema: Mapping | Schema | None = None, example: Mapping | None = None,
               max_collectors: int = 256, ring_bytes: int | None = None, full: str = "block", timeout: float | None = None,
               mode: int = 0o600, group: str | int | None = None, drain: str = "thread", exists: str = "error",
               config: Mapping[str, Any] | None = None) -> Buffer:
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
                ``"drop_newest"`` (what is being put), ``"drop_oldest"`` (what is in the ring). Drops are counted.
            timeout: seconds that ``"block"`` waits; None: for ever.
            mode, group: permissions of the segment; world access is refused.
            drain: who moves rows from the rings into the buffer: a ``"thread"`` of this process, a ``"process"`` of its own,
                or only the ``"caller"`` that needs it (deterministic).
            exists: if the name is taken: ``"error"``, ``"attach"`` or ``"replace"`` (only when nobody is attached).
            config: extra msgpack values for :attr:`config`.

        Raises:
            BufferExists, BufferInUse, SchemaError, NotEnoughMemory, ValueError
        """
        if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or not 0 < capacity < 1 << 48:
            raise ValueError(f"capacity={capacity!r}: a number of rows ≥ 1")
        if not 0 < max_collectors <= segment.MAX_COLLECTORS:
            raise ValueError(f"max_collectors={max_collectors!r}: 1 to {segment.MAX_COLLECTORS}")
        if ring_bytes is not None and not 0 < ring_bytes <= 1 << 34:
            raise ValueError(f"ring_bytes={ring_bytes!r}: 1 to {1 << 34}")
        for what, value, allowed in (("full", full, FULL), ("drain", drain, DRAIN), ("exists", exists, ("error", "attach", "replace"))):
            if value not in allowed:
                raise ValueError(f"{what}={value!r}: one of {', '.join(allowed)}")
        _seconds(timeout)
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
                name, handle = segment.create(name, capacity=int(capacity), max_collectors=max_collectors,
                                              ring_bytes=ring_bytes or 0, config=blob, mode=mode, group=group)
                break
            except BufferExists:
                if exists == "error":
                    raise
                if exists == "replace":
                    try:
                        segment.destroy(name)  # type: ignore[arg-type]
                    except BufferNotFound:
                        pass
                    continue
                try:
                    return cls._attach_existing(name, capacity, given)  # type: ignore[arg-type]
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
            self.close()
            segment.destroy(name, force=True)
            raise
        return self

    @classmethod
    def _attach_existing(cls, name: str, capacity: int, given: Schema | None) -> Buffer:
        self = cls.attach(name)
        try:
            if self.capacity != capacity:
                raise BufferExists(f"buffer {name!r} exists with capacity {self.capacity:,}, asked for {capacity:,}: attach "
                                   "without a capacity (shmbuf.attach), or exists=\"replace\"")
            if given is not None:
                self._build(given, "the schema")
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def attach(cls, name: str, *, owner: int | None = None, readonly: bool = False) -> Buffer:
        """A handle on an existing buffer of this user, or of user ``owner`` if the mode lets us. Runs no code from it.

        Raises:
            BufferNotFound, BufferFormatError, PermissionError
        """
        return cls(name, segment.attach(name, owner=owner, readonly=readonly), owner=owner, readonly=readonly)

    def _start_draining(self) -> None:
        if self._drain == "thread":
            self._handle.start_thread(False)
        elif self._drain == "process":
            self._drain_process = subprocess.Popen(
                [sys.executable, "-m", "shmbuf.drain", self.name, "--leave-when-alone"], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Let go: what this handle put is drained if nobody else is at it, its ring is given back. An unnamed buffer goes
        when its creator closes. Closing twice is nothing."""
        self._finalizer()
        if self._drain_process is not None and self._drain_process.poll() is None and self._owns:
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
            raise StorageLost(f"the buffer that was named {self.name!r} at the fork is gone; the name means another one now")
        self._standby = self._owns = False
        self._drain_process = None
        self._adopt(handle)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._handle, method)(*args)
        except native.Gone as e:
            self._recover(e)
            return getattr(self._handle, method)(*args)

    def _get(self, attribute: str) -> Any:
        try:
            return getattr(self._handle, attribute)
        except native.Gone as e:
            self._recover(e)
            return getattr(self._handle, attribute)

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._header["capacity"]

    @property
    def schema(self) -> Schema | None:
        """None until somebody put the first rows."""
        if self._schema is None and self._get("ready"):
            self._use_schema(Schema.from_bytes(self._handle.schema))
        return self._schema

    def _use_schema(self, schema: Schema) -> None:
        self._columns = schema.native()
        self._header = self._handle.header
        self._schema = schema

    def _build(self, schema: Schema, whose: str) -> None:
        if self._readonly and not self._get("ready"):
            raise PermissionError("a read-only handle cannot give the buffer its schema")
        self._get("ready")  # a fork child attaches anew here
        self._use_schema(segment.build(self._handle, schema, whose))

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
        return {**c, "capacity": self.capacity, "utilization": c["size"] / self.capacity, "initialized": self._handle.ready}

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
        return self._put(rows, False, timeout).wait(timeout)

    def _put(self, rows: Mapping, wake: bool, timeout: float | None) -> Ticket:
        if self.schema is None:
            leaves = {k: self._as_array(k, v) for k, v in flatten(rows).items()}
            if self._batch(leaves) == 0:
                return self._nothing()
            self._build(Schema.from_leaves(leaves, 1), "the first put")
        if type(rows) is dict:
            ticket = self.submit(self._columns, rows, -2, wake=wake, timeout=timeout, tensors=False)
            if ticket is not None:
                return ticket
        converted, n = self._convert(rows)
        if n == 0:
            return self._nothing()
        ticket = self.submit(self._columns, converted, n, wake=wake, timeout=timeout, tensors=False)
        assert ticket is not None, "converted rows fit"
        return ticket

    @staticmethod
    def _as_array(key: Key, leaf: Any) -> np.ndarray:
        if not (hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__") or isinstance(leaf, (list, int, float, bool, complex, memoryview))):
            raise SchemaError(f"key {show_key(key)}: got {type(leaf).__name__}, expected an array; "
                              "non-tensor leaves cannot be stored")
        try:
            array = np.asarray(leaf)
        except (ValueError, TypeError, RuntimeError) as e:
            raise SchemaError(f"key {show_key(key)}: {e}") from None
        if array.dtype.hasobject or array.dtype.names or array.dtype.kind in "SUVMm" and array.dtype.name != "bfloat16":
            raise SchemaError(f"key {show_key(key)}: dtype {array.dtype} cannot be stored")
        return array

    @staticmethod
    def _batch(leaves: Mapping[Key, np.ndarray]) -> int:
        sizes = {k: a.shape[0] if a.ndim else None for k, a in leaves.items()}
        if not sizes:
            raise SchemaError("no keys were given")
        if len(set(sizes.values())) > 1 or None in sizes.values():
            raise SchemaError("keys have different numbers of rows (first dimension): "
                              + ", ".join(f"{show_key(k)}: {'none' if n is None else n}" for k, n in sizes.items()))
        return next(iter(sizes.values()))  # type: ignore[return-value]

    def _convert(self, rows: Mapping) -> tuple[list[np.ndarray], int]:
        """Whatever can be taken, contiguous and native; else a SchemaError with every difference."""
        assert self._schema is not None
        if not isinstance(rows, Mapping):
            raise SchemaError(f"rows are a mapping of key to array, not {type(rows).__name__}")
        leaves = {k: self._as_array(k, v) for k, v in flatten(rows).items()}
        wanted = {c.key: c for c in self._schema.columns}
        got = {}
        for k, a in leaves.items():
            name = a.dtype.newbyteorder("=").name
            if k in wanted and wanted[k].numpy == name or name == "bfloat16":
                name = wanted[k].dtype if k in wanted else name  # raw bits of a dtype that numpy lacks
            got[k] = (name, a.shape[1:])
        lines = self._schema.differences(got)
        if lines:
            raise SchemaError("rows do not fit the buffer's schema; nothing was put:\n  " + "\n  ".join(lines))
        n = self._batch(leaves)
        out = []
        for c in self._schema.columns:
            a = leaves[c.key]
            a = a.view(np.uint16) if a.dtype.name == "bfloat16" else a
            out.append(np.ascontiguousarray(a, dtype=np.dtype(c.numpy)))
        return out, n

    def _nothing(self) -> Ticket:
        return Ticket(_Nothing, 0, self.capacity, _same_ids)

    def submit(self, columns: Any, rows: Any, n: int, *, wake: bool, timeout: float | None, tensors: bool,
               convert: Callable[[np.ndarray, int], Any] = _same_ids) -> Ticket | None:
        """For the floors above: put rows, as leaves in column order (a list), or nested as the schema.

        n: how many; −1: one, without a batch dimension; −2: as many as the first leaf has. None: they need conversion first.
        """
        seconds = self._seconds if timeout is None else _seconds(timeout)
        method = "put_leaves" if type(rows) is list else "put_tree"
        t = self._call(method, columns, rows, n, self._full_code, seconds, wake, tensors)
        if t is None:
            return None
        ticket = Ticket(t, n if n >= 0 else t.rows, self._header["capacity"], convert)
        if t.status != _OK:
            self._put_failed(_STATUS[t.status], ticket, seconds)
        return ticket

    def _put_failed(self, status: str, ticket: Ticket, seconds: float) -> None:
        n, rows = ticket._size, ticket.rows
        if status == "dropped":
            return  # asked for, and counted
        if status == "full":
            text = self._ring_full_text(n, seconds)
            if rows:
                raise CommitPending(f"{rows:,} of {n:,} rows are in the ring and will be stored; then {text}", ticket, rows)
            raise RingFull(f"{text} Nothing was put.")
        if status == "interrupted":
            raise CommitInterrupted(f"interrupted: {rows:,} of {n:,} rows are in the ring and will be stored", ticket, rows)
        if status == "concurrent":
            raise ConcurrentUse("another thread is putting through this handle; a Buffer handle puts from one thread: attach "
                                f"once per thread (Buffer.attach({self.name!r}))")
        if status == "none_free":
            raise TooManyCollectors(f"buffer {self.name!r}: all {self._header['max_collectors']} rings have living owners. Close "
                                    "some, or create the buffer with a larger max_collectors")
        if status == "no_memory":
            raise NotEnoughMemory(f"/dev/shm has no {self._header['ring_bytes']:,} bytes left for this collector's ring; enlarge "
                                  "it, or create the buffer with smaller ring_bytes. Nothing was put")
        if status == "readonly":
            raise PermissionError(f"this handle on buffer {self.name!r} is read-only")
        raise StorageLost(f"buffer {self.name!r} was {status} while rows were being put ({rows:,} of {n:,} are in its ring)")

    def _ring_full_text(self, n: int, seconds: float) -> str:
        me = next((c for c in self.collectors() if c["pid"] == os.getpid() and c["slot"] == self._handle.slot), None)
        used = f"{me['ring_used']:,} of {me['ring_bytes']:,} bytes used, " if me else ""
        waited = "" if self._full == "error" or seconds <= 0 else f" after {seconds:g} s"
        return (f"the ring of collector {self._handle.slot} has no room{waited} ({used}{n:,} rows of "
                f"{self._schema.row_bytes if self._schema else 0:,} bytes to put): {self._writer_text()}")

    def _writer_text(self) -> str:
        c = self._call("counters")
        pid = c["writer_pid"]
        if not c["writer_active"]:
            last = f"pid {pid} did last" if pid else "nobody did yet"
            return f"nobody drains at this moment ({last}). Enlarge ring_bytes, or give the drain more of a core."
        state = segment.process_state(pid)
        doing = {"T": "is stopped (SIGSTOP): continue it with SIGCONT or kill it", "Z": "is a zombie", None: "is gone"}.get(
            state, f"is in state {state}")
        age = f"the last transaction was {c['writer_age']:.1f} s ago" if c["writer_age"] >= 0 else "there was no transaction yet"
        return f"pid {pid} holds the writer role and {doing} ({age})."

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
        seconds = _seconds(timeout)
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        if self.schema is None:
            self.wait_rows(1, timeout)
        out, ids = self._outputs(n), np.empty(n, np.int64)
        self.draw_into(self._columns, [_address(a) for a in out], n, _address(ids), 0, seconds)
        return nest(self._schema.keys, out), ids  # type: ignore[union-attr]

    def draw_into(self, columns: Any, addresses: list[int], n: int, ids: int, slots: int, seconds: float) -> None:
        """For the floors above: draw into packed memory. ids and (unless 0) slots are addresses of int64[n]."""
        if not self._standby:
            self._become_reader()
        status = self._call("draw", columns, addresses, n, ids, slots, seconds)
        while status != _OK:
            why = _STATUS[status]
            if why == "lapped":
                raise Lapped(f"rows are overwritten faster than one of {self._schema.row_bytes:,} bytes is copied; "  # type: ignore[union-attr]
                             f"the capacity of {self.capacity:,} rows is too small for this write rate")
            if why != "empty":
                raise StorageLost(f"buffer {self.name!r}: drawing ended with {why}" if why != "timeout" else
                                  f"no row can be read: a transaction has been overwriting all {self.capacity:,} for "
                                  f"{seconds:g} s; {self._writer_text()}")
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
        seconds = _seconds(timeout)
        if n > self.capacity:
            raise ValueError(f"n={n:,}: more rows than the capacity of {self.capacity:,} are never stored")
        status = _STATUS[self._call("wait_rows", n, seconds)]
        if status == "timeout":
            have = len(self)
            if have >= n:  # they came between the last look and this one
                return
            raise NotEnoughRows(f"Cannot sample from an empty storage. Buffer {self.name!r} holds no rows"
                                + (f" after {seconds:g} s" if seconds else "; timeout= waits for them") if not have else
                                f"buffer {self.name!r} holds {have:,} rows, {n:,} are needed (after {seconds:g} s)")
        if status != "ok":
            raise StorageLost(f"buffer {self.name!r} was {status} while waiting for rows")

    def gather(self, ids: Any) -> dict[str, Any]:
        """The rows of these ids, in order: nested dict of arrays [n, *shape], copies.

        Raises:
            Lapped: some are not stored (any more): names how many and the window.
        """
        ids = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1)
        rows, valid = self.try_gather(ids)
        if not valid.all():
            bad = ids[~valid]
            lo, hi = self.window
            raise Lapped(f"{len(bad):,} of {len(ids):,} ids are not stored (first: {bad[0]}); stored now: {lo} to {hi - 1}"
                         if hi > lo else f"{len(bad):,} of {len(ids):,} ids are not stored; the buffer is empty")
        return rows

    def try_gather(self, ids: Any) -> tuple[dict[str, Any], np.ndarray]:
        """As :meth:`gather`, with bool[n] telling which rows are valid instead of the error."""
        ids = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1)
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

    def fetch_slots_into(self, columns: Any, addresses: list[int], slots: np.ndarray, seconds: float = 1.0) -> np.ndarray:
        """For the floors above: the rows that lie in these slots into packed memory; returns their ids, int64[n].

        A row that is overwritten meanwhile is read again as its successor. Raises IndexError for a slot beyond the stored
        rows, Lapped if some slot stays in transition for ``seconds``.
        """
        n, capacity, give_up = len(slots), self.capacity, time.monotonic() + seconds
        done = np.zeros(n, np.uint8)
        while True:
            lo, _, hi = self._get("window")
            if n and (int(slots.min()) < 0 or int(slots.max()) >= hi - lo):
                raise IndexError(f"index {int(slots.max() if slots.min() >= 0 else slots.min())} is out of range: "
                                 f"{hi - lo:,} rows are stored")
            fresh = hi - 1 - (hi - 1 - slots) % capacity  # the newest id of each slot
            ids = np.where(done, ids, fresh) if done.any() else fresh
            if self._call("fetch", columns, addresses, n, _address(ids), _address(done)) == n:
                return ids
            if time.monotonic() > give_up:
                raise Lapped(f"{int(n - done.sum()):,} of {n:,} rows are being overwritten for {seconds:g} s; {self._writer_text()}")
            if not self._readonly:
                self.drain()
            time.sleep(5e-5)

    # ---- the rest -----------------------------------------------------------------------------------------------

    def empty(self, *, empty_write_count: bool = True, timeout: float | None = None) -> None:
        """Forget all rows, everywhere, in the order of this handle's puts. Ids go on, slots start again at 0.

        Rows that other collectors' rings still hold are stored afterwards.
        """
        if self.schema is None:
            return
        t = self._call("clear", not empty_write_count, _seconds(timeout))
        ticket = Ticket(t, 0, self.capacity, _same_ids)
        if t.status != _OK:
            self._put_failed(_STATUS[t.status] if _STATUS[t.status] != "timeout" else "full", ticket, _seconds(timeout))
        ticket.wait(timeout)

    def drain(self) -> bool:
        """Move what the rings hold into the buffer now, unless somebody else is at it. True: at least one record moved."""
        return self._call("help") == 2

    def __repr__(self) -> str:
        if self.closed:
            return f"Buffer({self.name!r}, closed)"
        return f"Buffer({self.name!r}, {len(self):,} of {self.capacity:,} rows, {self.schema or 'no schema yet'})"


class _Nothing:
    """The native ticket of zero rows."""

    rows, status = 0, _OK

    @staticmethod
    def wait(timeout: float) -> int:
        return _OK

    @staticmethod
    def done() -> bool:
        return True

    @staticmethod
    def pieces() -> list:
        return []


def _unpickle(cls: type, name: str, owner: int | None, readonly: bool, instance_id: int) -> Buffer:
    self = cls.attach(name, owner=owner, readonly=readonly)
    if self._header["instance_id"] != instance_id:
        self.close()
        raise StorageLost(f"the buffer that was named {name!r} when this handle was pickled is gone; the name means another one now")
    return self


def _finalize(handle: Any, name: str, instance_id: int | None, owner_pid: int) -> None:
    """instance_id is given by the creator of an unnamed buffer, which ends with it (but not with its forked children)."""
    handle.close()
    if instance_id is not None and os.getpid() == owner_pid:
        try:
            segment.destroy(name, force=True, instance_id=instance_id)
        except (ShmbufError, OSError):
            pass  # gone already


__all__ = ["Buffer", "Schema", "Ticket", "as_key", "dtype_name"]
