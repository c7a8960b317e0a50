"""Where a buffer's rows live: in host memory, or on a CUDA device. What a handle has of the second; CUDA itself is in `shmbuf.cuda`,
which is imported only when a buffer wants a device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shmbuf.errors import DeviceError, NotEnoughMemory, StorageLost

if TYPE_CHECKING:
    from shmbuf.cuda.holding import Hold

Wish = dict[str, Any]  # of a segment's configuration: {"uuid": bytes, "rings": int}


def wish(device: Any, rings: int = 1) -> Wish | None:
    """What the configuration says of ``device``: None of host memory. Raises ValueError, DeviceError."""
    text = "cpu" if device is None else str(device)
    if text == "cpu":
        return None
    kind, _, index = text.partition(":")
    if not text.startswith("GPU-") and (kind != "cuda" or (index and not index.isdecimal()) or text.endswith(":")):
        raise ValueError(f'device={device!r}: "cpu", "cuda", "cuda:1" (as this process counts) or a UUID as nvidia-smi -L writes it')
    if isinstance(rings, bool) or not hasattr(rings, "__index__") or not 0 <= rings <= 64:
        raise ValueError(f"device_rings={rings!r}: 0 to 64, one for each process that puts rows from the device at the same time")
    from shmbuf.cuda import driver

    if text.startswith("GPU-"):
        try:
            uuid = bytes.fromhex(text[4:].replace("-", ""))
        except ValueError:
            uuid = b""
        if len(uuid) != 16:
            raise ValueError(f"device={device!r}: no UUID of a GPU; nvidia-smi -L lists them")
        found = driver.by_uuid(uuid, "the buffer")
    else:
        found = driver.by_index(int(index) if index else driver.current_index())
    return {"uuid": found.uuid, "rings": int(rings)}


class Place:
    """Where the rows of one handle are, and whether this process has them. ``wish``: of the configuration; None: in the segment."""

    def __init__(self, name: str, wish: Wish | None):
        self.name, self.wish = name, wish
        self.hold: Hold | None = None
        self.error: Exception | None = None  # why this process does not have them
        self.lost: str | None = None

    def make(self, handle: Any, size: int) -> tuple[bytes, int, int, int]:
        """The memory of a buffer that is being built: for `Handle.build`. Raises DeviceError, NotEnoughMemory."""
        from shmbuf.cuda import holding, memory

        assert self.wish is not None
        self.hold = hold = holding.make(self.name, handle, self.wish["uuid"], size)
        return hold.memory.device.uuid, hold.memory.bytes, memory.KINDS[hold.memory.kind], self.wish["rings"]

    def unmake(self) -> None:
        """It was not built."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.close()

    def map(self, handle: Any) -> None:
        """Have the rows of a built buffer in this process. Where that cannot be, `error` says why; StorageLost is raised: they are gone."""
        if self.wish is None or handle.device_mapped:
            return
        try:
            if self.hold is None:
                from shmbuf.cuda import holding

                self.hold = holding.take(self.name, handle)
            hold = self.hold
            handle.map_device(hold.memory.address, hold.memory.bytes, hold.memory.context)
            if hold.connection is not None:
                handle.watch_device(hold.connection.fileno())
                hold.watch(lambda: self._gone(handle))
            hold.built()
            self.error = None
        except (DeviceError, NotEnoughMemory) as e:
            self.error = e

    def _gone(self, handle: Any) -> None:
        """The steward is dead: so everybody hears it, also those who do not have the memory."""
        with contextlib.suppress(Exception):  # closed meanwhile
            handle.mark_destroyed()

    def require(self, handle: Any) -> None:
        """As :meth:`map`; raises why this process cannot have them."""
        self.map(handle)
        if self.error is not None:
            raise type(self.error)(*self.error.args) from None

    def gone(self, handle: Any) -> StorageLost:
        """The error of a buffer whose device memory is lost."""
        words = handle.device_error
        return StorageLost(
            f"the device memory of buffer {self.name!r} is gone: "
            + (words or "its steward, the process that held it, died")
            + ". Its rows are lost to everybody; make the buffer anew, from a checkpoint if there is one"
        )

    def close(self) -> None:
        """When the native handle has been closed."""
        self.unmake()
