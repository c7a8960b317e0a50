"""Where a buffer's rows live: in host memory, or on a CUDA device. What a handle has of the second; CUDA itself is in `shmbuf.cuda`,
which is imported only when a buffer wants a device."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from shmbuf._extension import native
from shmbuf.errors import DeviceError, NotEnoughMemory, StorageLost

if TYPE_CHECKING:
    from shmbuf.cuda.holding import Hold

Wish = dict[str, Any]  # of a segment's configuration: {"uuid": as nvidia-smi writes it, "rings": int}


def parsed(device: Any) -> tuple[str, str]:
    """("cpu" or "cuda" or "GPU", number or UUID or ""). Raises ValueError; asks no driver."""
    text = "cpu" if device is None else str(device)
    if text in ("cpu", "cpu:0"):
        return "cpu", ""
    if text.startswith("GPU-"):
        return "GPU", text[4:]
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

    if kind == "GPU":
        found = driver.by_uuid(driver.uuid_of(f"GPU-{index}"), "the buffer")
    else:
        found = driver.by_index(int(index) if index else driver.current_index())
    return {"uuid": driver.uuid_text(found.uuid), "rings": int(rings)}


class Place:
    """Where the rows of one handle are, and whether this process has them. ``wish``: of the configuration; None: in the segment."""

    def __init__(self, name: str, wish: Wish | None):
        self.name, self.wish = name, wish
        self.hold: Hold | None = None
        self.error: Exception | None = None  # why this process does not have them
        self._lock = threading.Lock()

    def make(self, handle: Any, size: int) -> tuple[int, bytes, int, int]:
        """The memory of a buffer that is being built: for `Handle.build`. Raises DeviceError, NotEnoughMemory."""
        from shmbuf.cuda import driver, holding, memory

        assert self.wish is not None
        self.hold = hold = holding.make(self.name, handle, driver.uuid_of(self.wish["uuid"]), size)
        m = hold.memory
        return memory.KINDS[m.kind], m.device.uuid, m.bytes, self.wish["rings"]

    def map(self, handle: Any) -> None:
        """Have the rows of a built buffer in this process. Where that cannot be, `error` says why; StorageLost is raised: they are gone."""
        if self.wish is None:
            return
        with self._lock:
            if handle.device_rows is not None:
                return
            try:
                if self.hold is None:
                    from shmbuf.cuda import holding

                    self.hold = holding.take(self.name, handle)
                hold = self.hold
                handle.map_rows(hold.memory.address, hold.memory.bytes, hold.memory.context)
                hold.built()
                hold.watch(lambda: self._gone(handle))
                self.error = None
            except (DeviceError, NotEnoughMemory) as e:
                self.error = e
            except native.Gone as e:
                if len(e.args) < 2:  # closed, say
                    raise
                self.error = DeviceError(
                    f"the rows of buffer {self.name!r} cannot be used in this process: {e.args[1]}"
                )

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

    def close(self) -> None:
        """When the native handle has been closed, or it was not built."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.close()


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
