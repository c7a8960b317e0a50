"""One allocation in CUDA memory, mapped in this process: made here, or taken over from another process.

    kind  made by                              handed over as          lives as long as
    vmm   cuMemCreate, by whoever builds       a file descriptor       anybody has it mapped or holds its descriptor
    ipc   cuMemAlloc, by a steward process     64 bytes (cuIpc…)       the steward

Outside torch's allocator, so that nothing but the rows is shared. The first kind is taken where the driver has it and a round trip
of a descriptor works; the reason why not is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any

from shmbuf.cuda import driver
from shmbuf.cuda.driver import Device, call
from shmbuf.errors import DeviceError, NotEnoughMemory

VMM, IPC = "vmm", "ipc"
KINDS = {VMM: 1, IPC: 2}
ASKED = "SHMBUF_CUDA_SHARING=ipc"  # why not as a descriptor, by the user's own wish
_PATTERN = bytes(range(64))
_BLOCK = 2 << 20  # bytes


class Memory:
    """A mapped allocation. ``address`` and ``bytes`` as the driver has them; ``fd`` (vmm) or ``ipc_handle`` (ipc) are what others map it by."""

    def __init__(
        self,
        device: Device,
        kind: str,
        address: int,
        size: int,
        *,
        fd: int = -1,
        ipc_handle: bytes = b"",
        own: bool = False,
        why: str = "",
    ):
        self.device, self.kind, self.address, self.bytes = device, kind, address, size
        self.fd, self.ipc_handle, self.why = fd, ipc_handle, why
        self.is_own = own  # made by this process
        self._mapped, self._lock, self._pid = True, threading.Lock(), os.getpid()

    @property
    def context(self) -> int:
        """The CUcontext, as a number."""
        return int(driver.context(self.device))

    def release(self) -> None:
        """Unmap it, once. Nobody may be reading or writing through it any more."""
        with self._lock:
            mapped, self._mapped = self._mapped, False
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if not mapped or self._pid != os.getpid():  # the driver's state is the parent's
            return
        with contextlib.suppress(DeviceError, NotEnoughMemory), driver.current(self.device):
            if self.kind == VMM:
                _unmap(self.address, self.bytes)
            else:
                call("cuMemFree" if self.is_own else "cuIpcCloseMemHandle", self.address)

    def drop_in_child(self) -> None:
        """After a fork: the child keeps nothing alive."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# ---- vmm -----------------------------------------------------------------------------------------------------------


def _properties(device: Device) -> Any:
    d = driver.bindings()
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type, p.location.id = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.index
    p.requestedHandleTypes = _descriptor()
    return p


def _descriptor() -> Any:
    return driver.bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity(device: Device) -> int:
    """Allocations are a multiple of so many bytes."""
    d = driver.bindings()
    which = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return call("cuMemGetAllocationGranularity", _properties(device), which)


def _map(device: Device, handle: Any, size: int) -> int:
    """Takes the handle, which the mapping keeps alive."""
    d = driver.bindings()
    address = 0
    try:
        address = int(call("cuMemAddressReserve", size, 0, 0, 0))
        call("cuMemMap", address, size, 0, handle, 0)
        access = d.CUmemAccessDesc()
        access.location = _properties(device).location
        access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size, [access], 1)
    except BaseException:  # Ctrl-C may come when any of them was done
        if address:
            with contextlib.suppress(DeviceError):  # not mapped
                call("cuMemUnmap", address, size)
            with contextlib.suppress(DeviceError):
                call("cuMemAddressFree", address, size)
        raise
    finally:
        call("cuMemRelease", handle)
    return address


def _unmap(address: int, size: int) -> None:
    call("cuMemUnmap", address, size)
    call("cuMemAddressFree", address, size)


def _import(fd: int) -> Any:
    return call("cuMemImportFromShareableHandle", fd, _descriptor())


def why_not_vmm(device: Device) -> str:
    """Why memory of this device cannot be handed over as a descriptor; "" if the driver says that it can, and the user not otherwise."""
    if os.environ.get("SHMBUF_CUDA_SHARING") == IPC:
        return ASKED
    if not driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device):
        return "the device has no virtual memory management (cuMemCreate)"
    if not driver.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", device):
        return "the device's memory cannot be exported as a file descriptor"
    return ""


def create(device: Device, size: int, what: str = "the rows") -> Memory:
    """New memory of at least ``size`` bytes, that lives as long as somebody has it. What a handed-over descriptor leads to is tried.

    Raises:
        NotEnoughMemory. Refused: the driver cannot do it this way.
    """
    doing = f"{size:,} bytes for {what} on {device}"
    with driver.current(device):
        unit = granularity(device)
        size = -(-size // unit) * unit
        handle = call("cuMemCreate", size, _properties(device), 0, doing=doing)
        fd = -1
        try:
            fd = int(call("cuMemExportToShareableHandle", handle, _descriptor(), 0, doing=doing))
            os.set_inheritable(fd, False)
        except BaseException:
            call("cuMemRelease", handle)
            raise
        try:
            address = _map(device, handle, size)
        except BaseException:
            os.close(fd)
            raise
        memory = Memory(device, VMM, address, size, fd=fd, own=True)
        try:
            _try_round_trip(memory)
        except BaseException:
            memory.release()
            raise
    return memory


def _try_round_trip(memory: Memory) -> None:
    """What its descriptor leads to, mapped once more, has the bytes that were written here. Its first bytes are written."""
    again = _map(memory.device, _import(memory.fd), memory.bytes)
    try:
        got = ctypes.create_string_buffer(len(_PATTERN))
        call("cuMemcpyHtoD", memory.address, _PATTERN, len(_PATTERN))
        call("cuMemcpyDtoH", got, again, len(_PATTERN))
    finally:
        _unmap(again, memory.bytes)
    if got.raw != _PATTERN:
        raise driver.Refused(
            "memory that was handed over as a descriptor has other bytes than its own", driver.NOT_SUPPORTED
        )


def imported(device: Device, fd: int, size: int) -> Memory:
    """Map what another process handed over. The descriptor stays the caller's."""
    with driver.current(device):
        return Memory(device, VMM, _map(device, _import(fd), size), size)


# ---- ipc -----------------------------------------------------------------------------------------------------------


def allocate(device: Device, size: int, what: str = "the rows") -> Memory:
    """For the steward: memory that dies with this process, in whole blocks of 2 MiB: the driver cuts smaller allocations out of one,
    and an IPC handle opens all of it to others.

    Raises:
        NotEnoughMemory, Refused.
    """
    size = -(-size // _BLOCK) * _BLOCK
    with driver.current(device):
        address = int(call("cuMemAlloc", size, doing=f"{size:,} bytes for {what} on {device}"))
        try:
            handle = call("cuIpcGetMemHandle", address, doing=f"a handle of memory on {device}")
        except BaseException:
            call("cuMemFree", address)
            raise
        return Memory(device, IPC, address, size, ipc_handle=ctypes.string_at(handle.getPtr(), 64), own=True)


def opened(device: Device, ipc_handle: bytes, size: int) -> Memory:
    """Map a steward's memory. Raises Refused."""
    d = driver.bindings()
    handle = d.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), ipc_handle, 64)
    with driver.current(device):
        flags = d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return Memory(device, IPC, int(call("cuIpcOpenMemHandle", handle, int(flags))), size, ipc_handle=ipc_handle)


def is_host(address: int) -> bool:
    """Whether the driver says that this address is host memory. Of rows that is so only with a driver that has no GPU behind it."""
    d = driver.bindings()
    kind = call("cuPointerGetAttribute", d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    return int(kind) == int(d.CUmemorytype.CU_MEMORYTYPE_HOST)
