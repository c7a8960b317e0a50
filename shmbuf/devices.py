"""Where a buffer's rows live: in host memory, or on a CUDA device. What a handle has of the second; CUDA itself is in `shmbuf.cuda`,
which is imported only when a buffer wants a device."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmbuf._extension import native
from shmbuf.errors import DeviceError, NotEnoughMemory, StorageLost, TooManyOpenFiles
from shmbuf.limiter import figures

if TYPE_CHECKING:
    from shmbuf.cuda.holding import Hold

STUCK = 5.0  # seconds that one waits before it drains by itself, though there is somebody who should
_HOST: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
log = logging.getLogger("shmbuf")
Wish = dict[str, Any]  # of a segment's configuration: {"uuid": as nvidia-smi writes it, "rings": int}


def is_uuid(text: str) -> bool:
    return text.startswith(("GPU-", "MIG-"))


def parsed(device: Any) -> tuple[str, str]:
    """("cpu" or "cuda" or "UUID", number or UUID or ""). Raises ValueError; asks no driver."""
    text = "cpu" if device is None else str(device)
    if text in ("cpu", "cpu:0"):
        return "cpu", ""
    if is_uuid(text):
        from shmbuf.cuda import driver

        driver.uuid_of(text)
        return "UUID", text
    kind, colon, index = text.partition(":")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ValueError(
            f'device={device!r}: "cpu", "cuda", "cuda:1" (as this process counts) or a UUID as nvidia-smi -L writes it'
        )
    return kind, index


def wish(device: Any, rings: int = 1) -> Wish | None:
    """What the configuration says of ``device``: None of host memory. Raises ValueError, DeviceError."""
    kind, index = parsed(device)
    if kind == "cpu":
        return None
    if isinstance(rings, bool) or not hasattr(rings, "__index__") or not 0 <= rings <= 64:
        raise ValueError(
            f"device_rings={rings!r}: 0 to 64, one for each process that puts rows from the device at the same time"
        )
    from shmbuf.cuda import driver

    if kind == "UUID":
        found = driver.by_uuid(driver.uuid_of(index), f"device={index!r}: ")
    else:
        found = driver.by_index(int(index) if index else driver.current_index())
    return {"uuid": found.uuid_text, "rings": int(rings)}


class Place:
    """Where the rows of one handle are, and whether this process has them. ``wish``: of the configuration; None: in the segment.

    Having them is holding what keeps them alive, which costs nothing on the device; they are mapped, in a context of the device, when this
    process first reads them, writes them from there, or has to drain.
    """

    def __init__(self, name: str, wish: Wish | None):
        self.name, self.wish = name, wish
        self.hold: Hold | None = None
        self._taking: Hold | None = None  # before it is `hold`, or was given up
        self.error: Exception | None = None  # why this process does not have them
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._watches = self._closed = False
        self._watched: Any = None  # by look_after
        self._calls, self._warned = threading.local(), False

    def make(self, handle: Any, size: int) -> tuple[int, bytes, int, int]:
        """The memory of a buffer that is being built: for `Handle.build`. Raises DeviceError, NotEnoughMemory."""
        from shmbuf.cuda import driver, holding, memory

        assert self.wish is not None
        self.hold = hold = holding.make(self.name, handle, driver.uuid_of(self.wish["uuid"]), size)
        m = hold.memory
        return memory.KINDS[m.kind], m.uuid, m.bytes, self.wish["rings"]

    def within(self, timeout: float | None) -> contextlib.AbstractContextManager[None]:
        """What this thread asks others for within the block is waited for no longer than ``timeout``, but for a look; None: as outside."""
        return _HOST if self.wish is None else self._within(timeout)

    @contextlib.contextmanager
    def _within(self, timeout: float | None) -> Iterator[None]:
        before = getattr(self._calls, "give_up", None)
        self._calls.give_up = None if timeout is None else time.monotonic() + timeout
        try:
            yield
        finally:
            self._calls.give_up = before

    def have(self, handle: Any, patience: float | None = 0.0) -> None:
        """Keep the memory of a built buffer, and offer it on. Where that cannot be, `error` says why; StorageLost is raised: the rows are
        gone, or TooManyOpenFiles. ``patience``: of `sharing.ask`, outside of :meth:`within`."""
        with self._lock:
            if self.wish is None or self._closed or self._watches:
                return
            from shmbuf.segment import enough_files

            try:
                with enough_files():
                    if self.hold is None:
                        from shmbuf.cuda import holding

                        if self._taking is not None:  # Ctrl-C came between
                            self._taking.close()
                        self._taking = holding.Hold()
                        if (give_up := getattr(self._calls, "give_up", None)) is not None:
                            patience = max(0.0, give_up - time.monotonic())
                        self.hold = holding.take(self.name, handle, self._taking, patience)
                    self.hold.built()
                    self.hold.watch(lambda: self._gone(handle))
                self._watches = True
                self.error = None
            except (DeviceError, NotEnoughMemory) as e:
                self.error = e

    def warn(self) -> None:
        """Once, where a handle goes on without them."""
        if self.error is not None and not self._warned:
            self._warned = True
            log.warning(
                "this process does not have the rows of buffer %r: it can put, not read. %s",
                self.name,
                self.error,
            )

    @property
    def is_here(self) -> bool:
        """Whether some handle of this process has it mapped, or made it."""
        return self.hold is not None and self.hold.memory.mapped is not None

    def map(self, handle: Any) -> None:
        """Have the rows of a built buffer in this process, mapped. As :meth:`have`, with all of `sharing.PATIENCE`."""
        with self._lock:
            if self.wish is None or self._closed or handle.device_rows is not None:
                return
            from shmbuf.segment import enough_files

            try:
                self.have(handle, None)
                if self.hold is None:
                    return
                with enough_files():
                    mapped = self.hold.memory.map(f"buffer {self.name!r}")
                handle.map_rows(mapped.address, mapped.bytes, mapped.context)
                self.error = None
            except (DeviceError, NotEnoughMemory, TooManyOpenFiles) as e:
                self.error = e
            except native.Gone as e:
                if len(e.args) < 2:  # closed, say
                    raise
                self.error = DeviceError(
                    f"the rows of buffer {self.name!r} cannot be used in this process: {e.args[1]}"
                )

    def help(self, handle: Any) -> bool:
        """Map the rows of a buffer that nobody drains, so that whoever waits here does. Whether it came to that."""
        if self.hold is None or handle.device_rows is not None or not handle.runnable or self._drains(handle.members()):
            return False
        self.map(handle)
        return handle.device_rows is not None

    @staticmethod
    def _drains(members: list[dict[str, Any]]) -> bool:
        """Whether one of them has the rows mapped and a thread, or itself, that drains."""
        from shmbuf import segment

        return any(
            m["alive"]
            and m["on_device"]
            and not m.get("device_error")
            and not {"drainer", "standby"}.isdisjoint(m["roles"])
            and segment.process_state(m["pid"]) not in ("T", "t")
            for m in members
        )

    def look_after(self, handle: Any) -> None:
        """While the rows are not mapped: :meth:`help` if this handle waits, also for one who drained when the wait began."""
        from shmbuf.cuda import sharing

        def look() -> bool:
            try:
                if self._closed or handle.device_rows is not None:
                    return True
                if not handle.runnable:
                    return False
                members = handle.members()
                mine = next((m for m in members if m["member"] == handle.member), None)
                if mine is None or mine["waits_for"] not in ("room", "commit", "rows"):
                    return False
                if mine["waiting_seconds"] > STUCK and not limits(handle):
                    self.map(handle)
                return self.help(handle)
            except native.Gone:  # closed
                return True

        def limits(handle: Any) -> bool:
            said = figures(handle.limiter(1))
            return bool(said and said["collectors_wait"])

        if self._watched is not handle:
            self._watched = handle
            sharing.server().repeat(look)

    def _gone(self, handle: Any) -> None:
        """The steward is dead: so everybody hears it, also those who do not have the memory."""
        with contextlib.suppress(Exception):  # closed meanwhile
            handle.mark_destroyed()

    @property
    def lost(self) -> bool:
        """Whether the process that held the memory for all is dead."""
        return self.hold is not None and self.hold.lost

    def require(self, handle: Any) -> None:
        """As :meth:`map`; raises why this process cannot have them."""
        self.map(handle)
        if self.error is not None:
            raise type(self.error)(*self.error.args) from None
        if self.wish is None:
            raise DeviceError(
                f"the rows of buffer {self.name!r} are said to lie in device memory, and its configuration knows of none: it is damaged"
            )

    def map_when_ready(self, handle: Any, leave_when_alone: bool) -> None:
        """For processes of their own: as :meth:`require`, waiting for the buffer to be built, or destroyed, or left. Nothing, of host rows."""
        while self.wish is not None:
            if handle.ready:
                return self.require(handle)
            if handle.destroyed or not handle.linked or (leave_when_alone and not handle.attached):
                return
            time.sleep(0.02)

    def gone(self, words: str = "") -> StorageLost:
        """The error of a buffer whose device memory is lost."""
        return StorageLost(
            f"the device memory of buffer {self.name!r} is gone: "
            + (words or "the steward, the process that held it for all, died")
            + f". Its rows are lost to everybody. shmbuf.destroy({self.name!r}) or `shminfo rm {self.name}` removes what is left; make it "
            "anew, from a checkpoint if there is one"
        )

    def withdraw(self) -> None:
        """Before the native handle is closed, whose entry others ask by."""
        if self._pid != os.getpid():  # of a lock that a thread of the parent may have held
            return
        with self._lock:
            self._closed = True
            if self.hold is not None:
                self.hold.withdraw()

    def close(self) -> None:
        """When the native handle has been closed, or it was not built. Again, if Ctrl-C cut it short."""
        for hold in (self.hold, self._taking):
            if hold is not None:
                hold.close()
        self.hold, self._taking, self._watches = None, None, False


class Watched:
    """A native handle of rows that a steward holds: no call begins, and no rows are handed out, after its end was to be seen."""

    def __init__(self, handle: Any, place: Place):
        self._handle, self._place = handle, place

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._handle, name)
        if name not in _OF_ROWS:
            return value

        def call(*args: Any, **more: Any) -> Any:
            if self._place.lost:
                raise self._place.gone()
            result = value(*args, **more)
            if self._place.lost:
                raise self._place.gone()
            return result

        return call


_OF_ROWS = frozenset(
    (
        "draw",
        "draw_by_priority",
        "fetch",
        "draw_device",
        "draw_by_priority_device",
        "gather_device",
        "put_device",
        "put_leaves",
        "put_tree",
        "edit",
        "clear",
        "wait_rows",
        "help",
    )
)
