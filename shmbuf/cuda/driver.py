"""NVIDIA's driver, through its own Python bindings: devices by UUID, and errors in the driver's words with what to do.

The primary context of a device is retained at its first use, as torch does, and stays until the process ends; the caller's current
device and context are never changed (`current` pushes and pops).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shmbuf.errors import DeviceError, NotEnoughMemory

NOT_SUPPORTED = 801
_INSTALL = "pip install 'shmbuf[cuda]' (or cuda-bindings)"
_REMEDIES = {
    3: "the driver was started in a parent process before a fork: start such processes by spawn, not by fork",
    34: "a stub of libcuda.so.1 was loaded instead of the driver's own: look at LD_LIBRARY_PATH",
    35: "the display driver is older than cuda-bindings: update it, or install an older cuda-bindings",
    46: "the device is in exclusive compute mode, and another process has it: nvidia-smi -c DEFAULT",
    100: "no GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES, and whether the container was given one (--gpus)",
    101: "the device is in exclusive compute mode, or gone: look at nvidia-smi",
    700: "work on the device went wrong, and this process's context is of no more use: begin it anew",
    719: "work on the device went wrong, and this process's context is of no more use: begin it anew",
    801: "this device, or this way of sharing it (WSL 2, vGPU, MIG, Tegra), cannot do that",
    802: "the fabric manager of the machine is not ready: look at systemctl status nvidia-fabricmanager",
    803: "driver and libcuda.so.1 are of different versions: the machine has to be rebooted, or the container's driver mounted anew",
    999: "look at dmesg for Xid messages of the driver",
}


@dataclass(frozen=True)
class Device:
    """One that this process sees. ``index`` counts among the visible ones, and so only here."""

    index: int
    uuid: bytes
    name: str
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.uuid_text} (cuda:{self.index} here)"

    @property
    def uuid_text(self) -> str:
        """As nvidia-smi writes it: of a MIG instance, whose driver gives its own UUID and a name with MIG in it, ``MIG-…``."""
        return uuid_text(self.uuid, "MIG" if "MIG" in self.name.split() else "GPU")


def uuid_text(uuid: bytes, kind: str = "GPU") -> str:
    """As nvidia-smi writes it."""
    h = uuid.hex()
    return f"{kind}-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def uuid_of(text: str) -> bytes:
    """The other way round, also of a MIG instance. Raises ValueError; asks no driver."""
    if text.startswith("MIG-GPU-"):
        raise ValueError(
            f"{text!r} is the name of a MIG instance as older drivers gave it, which is not taken. Drivers from CUDA 11.4 on give the form "
            "MIG-<uuid>: update, and look at nvidia-smi -L"
        )
    try:
        uuid = bytes.fromhex(text.removeprefix("GPU-").removeprefix("MIG-").replace("-", ""))
    except ValueError:
        uuid = b""
    if len(uuid) != 16:
        raise ValueError(
            f"{text!r} is no UUID of a GPU, which is GPU- or MIG- and 32 hexadecimal digits ({uuid_text(bytes(range(16)))}, say); "
            "nvidia-smi -L lists them"
        )
    return uuid


_lock = threading.Lock()
_started: tuple[int, Any] | None = None  # in which process; the bindings
_contexts: dict[int, Any] = {}


def bindings() -> Any:
    """``cuda.bindings.driver``, the driver started. Raises DeviceError."""
    global _started
    if _started is not None:
        if _started[0] != os.getpid():
            raise DeviceError(_forked())
        return _started[1]
    with _lock:
        try:
            from cuda.bindings import driver as d
        except ImportError as e:
            raise DeviceError(
                f"rows in CUDA memory need NVIDIA's cuda-bindings, which cannot be imported here ({e}): {_INSTALL}"
            ) from None
        try:
            status = int(d.cuInit(0)[0])
        except Exception as e:  # the bindings look for libcuda.so.1 at their first call, and have errors of their own
            raise DeviceError(
                f"NVIDIA's driver is not to be had in this process: {' '.join(str(e).split())} It comes with the display driver; "
                "a container gets it with --gpus"
            ) from None
        if status:
            raise DeviceError(f"NVIDIA's driver does not start: {_words(d, status)}")
        _started = (os.getpid(), d)
        return d


def _forked() -> str:
    return (
        f"pid {os.getpid()} was forked from a process that had begun to use CUDA, which does not survive a fork: start processes that "
        "use rows in CUDA memory by spawn (multiprocessing.set_start_method('spawn')). Buffers in host memory work here"
    )


def _after_fork() -> None:
    """A thread of the parent may have been starting the driver: its lock is nobody's here, and its beginning of no use."""
    global _lock, _started
    if _started is None and _lock.locked():
        _started = (os.getppid(), None)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def forked() -> bool:
    """Whether this process comes from a fork of one that had begun to use CUDA here."""
    return _started is not None and _started[0] != os.getpid()


def _words(d: Any, status: int) -> str:
    texts = []
    for ask in (d.cuGetErrorName, d.cuGetErrorString):
        try:
            texts.append(ask(d.CUresult(status))[1].decode())
        except (ValueError, AttributeError):  # a number that these bindings do not know
            texts.append(str(status))
    remedy = _REMEDIES.get(status)
    return f"{texts[0]} ({texts[1]})" + (f": {remedy}" if remedy else "")


class Refused(DeviceError):
    """A driver call failed. ``status``: the driver's number."""

    def __init__(self, message: str, status: int = 0):  # a copy of it, and a pickle, is made of the message
        super().__init__(message)
        self.status = status


def call(name: str, *args: Any, doing: str = "") -> Any:
    """A call of the driver: its result, or tuple of results. ``doing``: for the error's text.

    Raises:
        NotEnoughMemory: the device has not enough left. Refused: anything else, in the driver's words; NOT_SUPPORTED, where this driver
        has no such call.
    """
    d = bindings()
    what = f"{doing}: " if doing else ""
    try:
        status, *results = getattr(d, name)(*args)
    except (RuntimeError, AttributeError) as e:  # the bindings are newer than the driver, or older than we think
        raise Refused(
            f"{what}{name} is not to be had here: {' '.join(str(e).split())}. The display driver, or cuda-bindings, is too old for it",
            NOT_SUPPORTED,
        ) from None
    if int(status):
        if int(status) == 2:
            raise NotEnoughMemory(
                f"{what}the device has not enough memory left ({name}: {_words(d, 2)}). nvidia-smi tells who has it; choose a "
                "smaller capacity"
            )
        raise Refused(f"{what}{name}: {_words(d, int(status))}", int(status))
    return results[0] if len(results) == 1 else tuple(results)


def devices() -> list[Device]:
    """Those that this process sees."""
    out = []
    for index in range(call("cuDeviceGetCount")):
        d = call("cuDeviceGet", index)
        name = call("cuDeviceGetName", 96, d).split(b"\0")[0].decode(errors="replace").strip()
        out.append(Device(index, _uuid(d), name, call("cuDeviceTotalMem", d)))
    return out


def _uuid(device: Any) -> bytes:
    """A MIG instance's own, where the driver is of CUDA 11.4 or newer."""
    try:
        return bytes(call("cuDeviceGetUuid_v2", device).bytes)
    except Refused as e:
        if e.status != NOT_SUPPORTED:
            raise
        return bytes(call("cuDeviceGetUuid", device).bytes)


def by_index(index: int) -> Device:
    """``cuda:index`` as this process counts. Raises DeviceError."""
    found = devices()
    if not 0 <= index < len(found):
        raise DeviceError(f"cuda:{index} is not visible here. {_visible(found)}")
    return found[index]


def by_uuid(uuid: bytes, what: str = "") -> Device:
    """The device of this UUID, whatever its number is here. Raises DeviceError; ``what``: the beginning of its text, with the UUID."""
    found = devices()
    for device in found:
        if device.uuid == uuid:
            return device
    raise DeviceError(
        f"{what}no device of this UUID is visible here. {_visible(found)} For another one, start the process with it "
        "among CUDA_VISIBLE_DEVICES (a container: among its --gpus)"
    )


def _visible(found: list[Device]) -> str:
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        f"Visible are: {', '.join(map(str, found)) or 'none'}"
        + (f" (CUDA_VISIBLE_DEVICES={masked})" if masked is not None else "")
        + "."
    )


def attribute(name: str, device: Device) -> int:
    """Of the device: the value of ``CU_DEVICE_ATTRIBUTE_<name>``."""
    which = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call("cuDeviceGetAttribute", which, call("cuDeviceGet", device.index))


def context(device: Device) -> Any:
    """The primary context, retained once."""
    bindings()
    with _lock:
        if device.index not in _contexts:
            _contexts[device.index] = call(
                "cuDevicePrimaryCtxRetain",
                call("cuDeviceGet", device.index),
                doing=f"opening {device}",
            )
        return _contexts[device.index]


@contextlib.contextmanager
def current(device: Device) -> Iterator[None]:
    """The device's context is this thread's within the block; afterwards, the one that was."""
    call("cuCtxPushCurrent", context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@functools.cache
def surroundings() -> str:
    """What of this machine is known to stand in the way of sharing device memory; "" if nothing is seen."""
    seen = []
    with contextlib.suppress(OSError), open("/proc/version") as f:
        if "microsoft" in f.read().lower():
            seen.append("this is WSL 2, where CUDA memory cannot be shared between processes")
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        seen.append("a MIG instance is in use, which has no CUDA IPC")
    with contextlib.suppress(DeviceError, NotEnoughMemory):
        for device in devices():
            if any(word in device.name for word in ("GRID", "vGPU", "MIG")):
                seen.append(f"{device.name} is a virtual or partitioned GPU, which may not be able to share memory")
            if attribute("INTEGRATED", device):
                seen.append(f"{device.name} is an integrated GPU (Tegra), which has no CUDA IPC")
    return "; ".join(seen)


def current_index() -> int:
    """The device that is this thread's current one, as torch has set it; 0 if there is none."""
    d = bindings()
    status, found = d.cuCtxGetCurrent()
    return int(call("cuCtxGetDevice")) if not int(status) and int(found) else 0
