"""What a handle has of the device memory: made with the schema, or taken over from others, offered to others, let go."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from shmbuf.cuda import driver, memory, sharing
from shmbuf.cuda.memory import IPC, VMM, Memory
from shmbuf.errors import DeviceError

STEWARD_STARTS = 60.0  # seconds, at most: it starts an interpreter and the driver

# One mapping for all handles of this process on one buffer, by the segment's instance.
_known: dict[int, Memory] = {}
_lock = threading.Lock()
_stewards: list[subprocess.Popen] = []  # started here


class Hold:
    """One handle's share in a mapping. :meth:`close` when its native handle has been closed."""

    def __init__(self, mapped: Memory, instance: int, connection: socket.socket | None = None):
        self.memory, self._instance = mapped, instance
        self.connection = connection  # to the steward, if it has one
        self._listener: socket.socket | None = None
        self._keep: Any = None  # the steward's pipe, until it is told that the buffer is built
        self._pid, self._closed = os.getpid(), False
        self._poll = select.poll()
        if connection is not None:
            self._poll.register(connection, select.POLLIN | select.POLLHUP)

    def offer(self, member: int) -> None:
        """Hand it to whoever asks for it at this member's name. Nothing, if there is no entry for this handle, or a steward does it."""
        if member >= 0 and (self.memory.kind == VMM or self.memory.is_own):
            self._listener = sharing.server().offer(sharing.address_of(self._instance, member), self.memory)

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` when the steward is dead. Nothing, if there is none."""
        if self.connection is not None:
            sharing.watch(self.connection, gone)

    @property
    def lost(self) -> bool:
        """Whether the steward's end of the connection is closed; it says nothing else."""
        if self.connection is None or self._closed:
            return False
        return bool(self._poll.poll(0))

    def built(self) -> None:
        """The buffer has this memory: the steward may not leave with us."""
        if self._keep is not None:
            with contextlib.suppress(OSError):
                self._keep.write(b"keep\n")
                self._keep.flush()
            self._keep.close()
            self._keep = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._keep is not None:  # never built: its steward ends
            self._keep.close()
        if self._pid != os.getpid():
            return
        for s in (self._listener, self.connection):
            if s is not None:
                sharing.server().remove(s)
        with _lock:
            if self.memory.release():
                _known.pop(self._instance, None)


def make(name: str, handle: Any, uuid: bytes, size: int) -> Hold:
    """New memory on the device of this UUID, offered to others; for whoever is about to build the segment.

    Raises DeviceError, NotEnoughMemory.
    """
    instance, what = handle.header["instance_id"], f"the rows of buffer {name!r}"
    device = driver.by_uuid(uuid, what)
    reason = memory.why_not_vmm(device)
    if not reason:
        try:
            mapped = memory.create(device, size, what)
        except driver.Refused as e:
            reason = str(e)
        else:
            mapped.why = "ipc: not needed"
            with _lock:
                _known[instance] = mapped
            hold = Hold(mapped, instance)
            hold.offer(handle.member)
            return hold
    try:
        return _by_steward(name, handle, device, size, reason)
    except DeviceError as e:
        around = driver.surroundings()
        raise DeviceError(
            f"memory of {device} cannot be shared between processes here. As a descriptor: {reason}. By CUDA IPC: {e}. "
            + (f"Seen here: {around}. " if around else "")
            + 'Keep the rows in host memory: device="cpu"; samples can go to the device all the same'
        ) from None


def _by_steward(name: str, handle: Any, device: driver.Device, size: int, reason: str) -> Hold:
    """Memory that a process of its own holds."""
    instance = handle.header["instance_id"]
    command = [sys.executable, "-m", "shmbuf.cuda.steward", name, "--make", driver.uuid_text(device.uuid)]
    command += ["--bytes", str(size), "--instance", str(instance), "--why", reason]
    p = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    _stewards[:] = [s for s in _stewards if s.poll() is None] + [p]
    assert p.stdin is not None and p.stdout is not None
    try:
        line = _line_within(p, STEWARD_STARTS)
        if not line.startswith("member "):
            raise DeviceError(line or f"its steward, pid {p.pid}, ended with status {p.wait(10)} and without a word")
        offer = sharing._ask_one(sharing.address_of(instance, int(line.split()[1])), STEWARD_STARTS)
        if offer is None:
            raise DeviceError(f"its steward, pid {p.pid}, does not answer")
        hold = _opened(offer, instance, f"the rows of buffer {name!r}")
    except BaseException:
        p.stdin.close()
        raise
    finally:
        p.stdout.close()
    hold._keep = p.stdin
    return hold


def _line_within(p: subprocess.Popen, seconds: float) -> str:
    timer = threading.Timer(seconds, p.kill)
    timer.start()
    try:
        first = p.stdout.readline()  # type: ignore[union-attr]
        if not first.startswith(b"member "):
            first = (first + p.stdout.read()).strip().rpartition(b"\n")[2]  # type: ignore[union-attr]
        return first.decode(errors="replace").strip()
    finally:
        timer.cancel()


def take(name: str, handle: Any) -> Hold:
    """The memory of a built buffer, from who has it; and it is offered on.

    Raises StorageLost, DeviceError.
    """
    header = handle.header
    instance, what = header["instance_id"], f"buffer {name!r}"
    kind, uuid, size = (header[f"device_{k}"] for k in ("kind", "uuid", "bytes"))
    device = driver.by_uuid(uuid, what)
    with _lock:
        mapped = _known.get(instance) if kind == memory.KINDS[VMM] else None
        hold = Hold(mapped, instance) if mapped is not None and mapped.retain() else None
    if hold is None:
        offer = sharing.ask(handle, what)
        if (memory.KINDS.get(offer.kind), offer.uuid, offer.size) != (kind, uuid, size):
            offer.drop()
            raise DeviceError(
                f"pid {offer.pid} handed over other memory ({offer.kind}, {offer.size:,} bytes) than {what} has: is it attached to one "
                "of the same name that was replaced? Attach again"
            )
        hold = _opened(offer, instance, what, device)
    hold.offer(handle.member)
    return hold


def _opened(offer: sharing.Offer, instance: int, what: str, device: driver.Device | None = None) -> Hold:
    """Map what was handed over."""
    try:
        device = device or driver.by_uuid(offer.uuid, what)
        with _lock:
            mapped = _known.get(instance)
            if mapped is None or not mapped.retain():
                if offer.kind == VMM:
                    fd, offer.fd = offer.fd, -1
                    mapped = memory.imported(device, fd, offer.size)
                else:
                    mapped = memory.opened(device, offer.ipc_handle, offer.size)
                mapped.why = offer.why
                _known[instance] = mapped
    except driver.Refused as e:
        offer.drop()
        raise DeviceError(_not_opened(what, offer, e)) from None
    except BaseException:
        offer.drop()
        raise
    if offer.kind == VMM:
        offer.drop()  # the descriptor that a mapping already has
        return Hold(mapped, instance)
    return Hold(mapped, instance, offer.connection)


def _not_opened(what: str, offer: sharing.Offer, error: DeviceError) -> str:
    around = driver.surroundings()
    causes = {
        VMM: "its holder's driver and this one differ, or the device is another one here",
        IPC: "holder and asker live in different pid or ipc namespaces (docker: --pid host --ipc host, or container:…), or "
        "have different drivers",
    }
    return (
        f"the device memory of {what}, held by pid {offer.pid}, cannot be mapped here: {error}. Likely causes: {causes[offer.kind]}"
        + (f"; {around}" if around else "")
        + '. Buffers in host memory (device="cpu") work all the same'
    )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for mapped in _known.values():
        mapped.drop_in_child()
    _known.clear()


os.register_at_fork(after_in_child=_after_fork)
