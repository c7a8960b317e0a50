"""One process's hold on a named buffer: made, found, let go, taken up again after a fork or a pickle, removed. No rows here."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack
import numpy as np

from shmbuf import devices, failures, memory, segment, streams
from shmbuf._extension import native
from shmbuf.errors import (
    BufferExists,
    BufferFormatError,
    BufferNotFound,
    DeviceError,
    NotEnoughMemory,
    ShmbufError,
    StorageLost,
)
from shmbuf.schema import Schema, flatten
from shmbuf.settings import DEFAULTS, FULL, check_settings
from shmbuf.ticket import left_of, seconds_of

Self = TypeVar("Self", bound="Attachment")


class Attachment:
    """What `Buffer` is without its rows: the handle, the settings, the schema, and how they begin and end."""

    def __init__(
        self, name: str, handle: Any, *, owner: int | None = None, readonly: bool = False, patience: float | None = 0.0
    ):
        self.name = name
        self._owner, self._readonly, self._pid = owner, readonly, os.getpid()
        self._schema: Schema | None = None
        self._columns: Any = None
        self.marks: Any = None  # streams.Marks, with the schema
        self._standby = False
        self.created = False  # by this handle, not found
        self._owns = self._removed = False
        self._drain_process: subprocess.Popen | None = None
        self._adopt(handle, patience)

    def _adopt(self, handle: Any, patience: float | None = 0.0) -> None:
        self._handle = self._bare = handle  # the first may be watched, see _have_rows
        self._header = handle.header
        try:
            self.config: dict[str, Any] = msgpack.unpackb(handle.config)
            self._full, self._timeout, self._drain = (self.config[k] for k in ("full", "timeout", "drain"))
            self._full_code = FULL.index(self._full)
            self._seconds = seconds_of(self._timeout)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as e:
            handle.close()
            raise segment.damaged(self.name, f"its configuration cannot be read: {e}", self._owner) from None
        handle.seed(secrets.randbits(64))
        failures.attached[id(handle)] = weakref.ref(self)
        self._pid = os.getpid()
        self._place = devices.Place(self.name, self.config.get("device"))
        self._finalizer = weakref.finalize(self, _finalize, handle, self._place, self.name, None, 0)
        try:
            self._have_rows(patience)
        except BaseException:  # the traceback would keep us attached
            self._finalizer()
            raise

    # ---- birth and end ------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls: type[Self],
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
        trajectories: bool | None = None,
        traj_key: Any = None,
        end_keys: Any = None,
        device: Any = None,
        device_rings: int = 1,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
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
            mode, group: permissions of the segment, whatever the umask; that everybody may write is refused. With 0o644 other
                users may look: ``attach(name, owner=uid, readonly=True)``.
            drain: who moves rows from the rings into the buffer: a ``"thread"`` of this process, a ``"process"`` of its own,
                or only the ``"caller"`` that needs it (deterministic).
            exists: if the name is taken: ``"error"``, ``"attach"`` or ``"replace"`` (only when nobody is attached).
            trajectories: whether rows remember their stream, for slices and trajectories (25 bytes a row). Default: if there
                is an end key or a trajectory key.
            traj_key: the column that names a row's trajectory. Default: ``("collector", "traj_ids")``, ``"episode"`` or
                ``"traj_ids"``, whichever the schema has; with none, a collector's rows (of one ``stream=``) follow each other.
            end_keys: columns of which a non-zero value ends a trajectory. Default: those of done, terminated, truncated under
                ``"next"``, or else at the top.
            device: where the rows live: None or ``"cpu"``: in the segment; ``"cuda"``, ``"cuda:1"`` or a GPU's UUID: in its memory, which
                lives as long as a process has it open.
            device_rings: how many handles can put rows from the device at the same time.
            config: extra msgpack values for :attr:`config`.

        Raises:
            BufferExists, BufferInUse, SchemaError, NotEnoughMemory, DeviceError, ValueError
        """
        check_settings(capacity, max_collectors, ring_bytes, full=full, drain=drain, exists=exists)
        seconds_of(timeout)
        given = schema if isinstance(schema, Schema) else Schema.from_spec(schema) if schema is not None else None
        if example is not None:
            shown = Schema.from_leaves({k: np.asarray(v) for k, v in flatten(example).items()}, 0)
            if given is not None:
                given.require_same(shown, "the example")
            given = given or shown
        marks = streams.settings(trajectories, traj_key, end_keys)
        if given is not None:
            streams.resolve(given, marks)
        settings = {**(config or {}), "full": full, "timeout": timeout, "drain": drain, "streams": marks}
        if (place := devices.wish(device, device_rings)) is not None:
            settings["device"] = place
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
                        **({} if place is None else {"device": place["uuid"]}),
                    }
                    return cls._attach_existing(name, asked, ring_bytes, given)  # type: ignore[arg-type]
                except BufferNotFound:
                    continue  # destroyed meanwhile
        self = cls(name, handle)
        self.created = True
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
    def _attach_existing(cls: type[Self], name: str, asked: dict, ring_bytes: int | None, given: Schema | None) -> Self:
        self = cls.attach(name)
        try:
            has = {"capacity": self.capacity, "max_collectors": self._header["max_collectors"], **self.config}
            has["device"] = (has.get("device") or {}).get("uuid", "cpu")
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
        cls: type[Self],
        name: str,
        *,
        owner: int | None = None,
        readonly: bool = False,
        timeout: float | None = 0.0,
    ) -> Self:
        """A handle on an existing buffer of this user, or of user ``owner`` if the mode lets us. Runs no code from it.

        Args:
            timeout: seconds to wait until the name exists; 0: not at all; None: for ever. With rows in device memory what is left is for
                those who have it and do not answer (None: 10 s). Without it the handle can put, and why is on the logger "shmbuf".

        Raises:
            BufferNotFound, BufferFormatError, PermissionError. StorageLost: its device memory is gone.
        """
        since = time.monotonic()
        handle = segment.attach_within(timeout, name, owner=owner, readonly=readonly)
        return cls(name, handle, owner=owner, readonly=readonly, patience=left_of(timeout, since))

    def _start_draining(self) -> None:
        if self._drain == "thread":
            self._handle.start_thread(False)
            if not self._handle.has_thread:
                failures.log.warning(
                    "buffer %r: no thread is to be had for the drain (ulimit -u, a pids cgroup or memory limit?): rows are stored "
                    "by whoever extends, waits or samples",
                    self.name,
                )
        elif self._drain == "process":
            command = [sys.executable, "-m", "shmbuf.drain", self.name, "--leave-when-alone"]
            with segment.enough_files():
                try:
                    self._drain_process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                except BlockingIOError as e:
                    raise BlockingIOError(
                        e.errno,
                        f'drain="process": {e.strerror}: no process is to be had (ulimit -u, a pids cgroup?). drain="thread" or '
                        '"caller" needs none',
                    ) from None

    def close(self) -> None:
        """Let go: what this handle put is drained if nobody else is at it, its ring is given back. An unnamed buffer goes
        when its creator closes. Closing twice is nothing."""
        ending = self._finalizer.peek()
        try:
            self._finalizer()
        except KeyboardInterrupt:  # it is called once only: what was cut short is done here
            if ending is not None:
                ending[1](*ending[2])
            raise
        if self._drain_process is not None and self._drain_process.poll() is None and self._owns:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself, the buffer is destroyed
                self._drain_process.wait(10)

    def destroy(self, *, force: bool = False) -> None:
        """Close this handle and remove the buffer, as `shmbuf.destroy` does. Nothing, if it is gone; never a successor of its name.

        Raises:
            BufferInUse: others are attached, and not ``force``: the buffer stays; this handle is closed all the same.
            PermissionError: the handle is read-only (and stays open).
        """
        if self._readonly:
            raise PermissionError(f"this handle on buffer {self.name!r} is read-only")
        self.close()
        with contextlib.suppress(BufferNotFound):
            segment.destroy(self.name, force=force, owner=self._owner, instance_id=self._header["instance_id"])
        self._removed = True

    @property
    def destroyed(self) -> bool:
        """Whether somebody destroyed the buffer. What is stored can still be read here; nothing more can be put."""
        return self._removed or self._get("destroyed")

    def _rearm_finalizer(self) -> None:
        self._finalizer.detach()
        instance = self._header["instance_id"] if self._owns else None
        self._finalizer = weakref.finalize(self, _finalize, self._bare, self._place, self.name, instance, os.getpid())
        util = sys.modules.get("multiprocessing.util")
        if self._owns and util is not None:  # a forked multiprocessing child ends without atexit
            util.Finalize(None, self._finalizer, exitpriority=0)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        return _unpickle, (type(self), self.name, self._owner, self._readonly, self._header["instance_id"])

    def _recover(self, error: Exception) -> None:
        """A native call met a dead handle: attach anew in a fork child, else say what happened."""
        why = native.STATUSES[error.args[0]]
        if why == "destroyed":
            raise self._lost(why) from None
        if why == "device":
            raise self._device_failed(error.args[1]) from None
        if why == "unmapped":
            with contextlib.suppress(native.Gone):  # another thread has closed it: the call that is made again says so
                self._place.require(self._bare)
                self._have_rows()
            return
        if why != "forked" or self.closed:
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                raise SystemExit  # the interpreter ends: quietly
            raise ValueError(f"this handle on buffer {self.name!r} is closed") from None
        instance = self._header["instance_id"]
        self._finalizer.detach()
        failures.attached.pop(id(self._bare), None)
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

    def _lost(self, what: str) -> StorageLost:
        """The error for a buffer that is no more."""
        if self._place.wish is not None and self._handle.linked:  # marked as destroyed by who saw the end of its memory
            return self._place.gone()
        return StorageLost(f"buffer {self.name!r} was {what}")

    def _device_failed(self, words: str) -> Exception:
        """The error of work on the device that went wrong."""
        if self._place.lost:
            return self._place.gone()
        return DeviceError(
            f"work on the rows of buffer {self.name!r}, in memory of {self.device}, went wrong in this process: {words}. Others go on; if "
            "the driver calls it an illegal address or a failed launch, this process's CUDA context is of no more use: begin it anew"
        )

    def _call(self, method: str, *args: Any) -> Any:
        try:
            while True:
                try:
                    return getattr(self._handle, method)(*args)
                except native.Gone as e:  # a fork child attaches anew, and then may have no rows
                    self._recover(e)
        except native.FormatError as e:
            raise segment.damaged(self.name, e, self._owner) from None
        except native.MapError as e:
            raise NotEnoughMemory(memory.unmappable(e)) from None

    def _get(self, attribute: str) -> Any:
        try:
            while True:
                try:
                    return getattr(self._handle, attribute)
                except native.Gone as e:
                    self._recover(e)
        except native.FormatError as e:
            raise segment.damaged(self.name, e, self._owner) from None
        except native.MapError as e:
            raise NotEnoughMemory(memory.unmappable(e)) from None

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._header["capacity"]

    @property
    def schema(self) -> Schema | None:
        """None until somebody put the first rows."""
        if self._schema is None and self._get("ready"):
            try:
                schema = Schema.from_bytes(self._handle.schema)
            except BufferFormatError as e:
                raise segment.damaged(self.name, e, self._owner) from None
            if schema.row_bytes != self._handle.header["row_bytes"]:
                raise segment.damaged(self.name, "its schema and its rows have different sizes", self._owner)
            self._use_schema(schema)
        return self._schema

    def _use_schema(self, schema: Schema) -> None:
        self._columns = schema.native()
        self.marks = streams.resolve(schema, self.config.get("streams") or {})
        self._header = self._handle.header
        if self._place.error is None:  # else it has just been waited for; who reads asks again
            self._have_rows()
        self._schema = schema

    def _have_rows(self, patience: float | None = 0.0) -> None:
        """Rows in device memory are kept as soon as there are any; and mapped, if this process has them mapped already, or this handle a
        thread that drains. patience: see `Place.have`."""
        place = self._place
        if place.wish is None or not self._handle.ready:
            return
        place.have(self._bare, patience)
        if place.hold is None:
            place.warn()
            return
        if place.hold.connection is not None and type(self._handle) is not devices.Watched:
            self._handle = devices.Watched(self._handle, place)
        if place.is_here or self._bare.has_thread:
            place.map(self._bare)
        elif not self._readonly:
            place.look_after(self._bare)

    def _help(self) -> bool:
        """Before a wait for what a drain brings: rows in device memory are mapped, so that this process does it, if nobody else will."""
        if self._place.wish is None or self._readonly:
            return False
        try:
            return self._place.help(self._bare)
        except native.Gone:  # closed, or a fork child's: the wait says so
            return False

    @property
    def device(self) -> str:
        """Where the rows live: ``"cpu"``, or the device as this process counts (``"cuda:0"``), or, if it does not see it, its UUID."""
        if self._place.wish is None:
            return "cpu"
        from shmbuf.cuda import driver

        try:
            return f"cuda:{driver.by_uuid(driver.uuid_of(self._place.wish['uuid'])).index}"
        except DeviceError:
            return self._place.wish["uuid"]

    def _build(self, schema: Schema, whose: str, timeout: float | None = None) -> None:
        if self._readonly and not self._get("ready"):
            raise PermissionError("a read-only handle cannot give the buffer its schema")
        self._get("ready")  # a fork child attaches anew here
        seconds = self._seconds if timeout is None else seconds_of(timeout)
        with self._place.within(None if seconds < 0 else seconds):
            self._use_schema(segment.build(self._handle, schema, whose, seconds, self._place))


def _unpickle(cls: type[Self], name: str, owner: int | None, readonly: bool, instance_id: int) -> Self:
    self = cls.attach(name, owner=owner, readonly=readonly)
    if self._header["instance_id"] != instance_id:
        self.close()
        raise StorageLost(
            f"the buffer that was named {name!r} when this handle was pickled is gone; the name means another one now"
        )
    return self


def _finalize(handle: Any, place: devices.Place, name: str, instance_id: int | None, owner_pid: int) -> None:
    """instance_id is given by the creator of an unnamed buffer, which ends with it (but not with its forked children)."""
    try:
        failures.attached.pop(id(handle), None)
        place.withdraw()
    finally:
        try:
            handle.close()
        finally:
            place.close()
    if instance_id is not None and os.getpid() == owner_pid:
        with contextlib.suppress(ShmbufError, OSError):  # gone already
            segment.destroy(name, force=True, instance_id=instance_id)
