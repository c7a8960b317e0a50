"""What a handle has of the device memory: made with the schema, or taken over from others, offered to others, let go."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from shmbuf import segment
from shmbuf.cuda import driver, memory, sharing
from shmbuf.cuda.memory import IPC, VMM, Memory
from shmbuf.errors import DeviceError

STEWARD_STARTS = 60.0  # seconds, at most: it starts an interpreter and the driver

# One for all handles of this process on one buffer, by the segment's instance.
_known: dict[int, Share] = {}
_lock = threading.Lock()
_stewards: list[subprocess.Popen] = []  # started here


class Share:
    """The memory of one buffer, as this process has it: what others can be handed (a descriptor, or a steward's handle), which keeps it
    alive and needs no context; and, from its first use here on, a mapping.

    It is had by its maker (None), or by ``who``, and by whoever calls :meth:`retain`, until they call :meth:`release`; the last of them lets go
    of it. What Ctrl-C has cut short is done by the same call again.
    """

    def __init__(
        self,
        instance: int,
        kind: str,
        size: int,
        uuid: bytes,
        *,
        why: str = "",
        pid: int = 0,
        fd: int = -1,
        ipc_handle: bytes = b"",
        mapped: Memory | None = None,
        who: object = None,
    ):
        self.instance, self.kind, self.bytes, self.uuid = instance, kind, size, uuid
        self.why, self.pid = why, pid  # why in this way; from whom it came
        self.fd, self.ipc_handle, self.mapped = fd, ipc_handle, mapped
        self._users, self._lock, self._mapping = {who}, threading.Lock(), threading.Lock()

    @classmethod
    def of(cls, mapped: Memory, instance: int, why: str) -> Share:
        """Of what this process made."""
        fd, mapped.fd = mapped.fd, -1
        of = instance, mapped.kind, mapped.bytes, mapped.device.uuid
        return cls(*of, why=why, pid=os.getpid(), fd=fd, ipc_handle=mapped.ipc_handle, mapped=mapped)

    @property
    def is_own(self) -> bool:
        return self.mapped is not None and self.mapped.is_own

    def map(self, what: str) -> Memory:
        """Mapped in this process: the first call opens the device's context. Raises DeviceError, NotEnoughMemory."""
        with self._mapping:
            if self.mapped is None:
                try:
                    device = driver.by_uuid(self.uuid)
                except DeviceError as e:
                    raise DeviceError(
                        f"the rows of {what} are on {driver.uuid_text(self.uuid)}, and this process can put but not read: {e}"
                    ) from None
                try:
                    if self.kind == VMM:
                        self.mapped = memory.imported(device, self.fd, self.bytes)
                    else:
                        self.mapped = memory.opened(device, self.ipc_handle, self.bytes)
                except driver.Refused as e:
                    raise DeviceError(_not_opened(what, self, e)) from None
            return self.mapped

    def retain(self, who: object) -> bool:
        """``who`` has it, too. False: there is nothing left of it."""
        with self._lock:
            if not self._users:
                return False
            self._users.add(who)
            return True

    def release(self, who: object = None) -> None:
        """``who`` has it no more. After the last nobody may be reading or writing through it."""
        with self._lock:
            self._users.discard(who)
            if self._users:
                return
        with _lock:
            if _known.get(self.instance) is self:
                del _known[self.instance]
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self.mapped is not None:
            self.mapped.release()

    def drop_in_child(self) -> None:
        """After a fork: the child keeps nothing alive."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Hold:
    """One handle's part in it. :meth:`withdraw` before its native handle is closed, :meth:`close` afterwards."""

    def __init__(self, made: Share | None = None):
        self.memory: Share = made  # type: ignore[assignment]  # None: until `take` has it
        self._who = None if made is not None else self
        self.connection: socket.socket | None = None  # to the steward, if it has one
        self._offered: sharing.Offered | None = None
        self._keep: Any = None  # the steward's pipe, until it is told that the buffer is built
        self._pid, self._closed = os.getpid(), False

    def offer(self, handle: Any) -> None:
        """Hand it to whoever asks for it at this member's name. Nothing, if there is no entry for this handle, or a steward does it."""
        if self.memory.kind == VMM or self.memory.is_own:
            entry = sharing.entry_of(handle)
            if entry is not None:
                name = sharing.address_of(self.memory.instance, entry)
                # Ours before it begins: Ctrl-C may come between.
                self._offered = sharing.Offered(sharing.server(), name, self.memory)
                self._offered.begin()

    def withdraw(self) -> None:
        """Offer it no more: the name is that of a member who is about to be none."""
        if self._offered is not None and self._pid == os.getpid():
            self._offered.withdraw()
        self._offered = None

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` when the steward is dead. Nothing, if there is none."""
        if self.connection is not None:
            sharing.watch(self.connection, gone)

    @property
    def lost(self) -> bool:
        """Whether the steward's end of the connection is closed; it says nothing else."""
        if self.connection is None or self._closed or self._pid != os.getpid():  # a fork child's handle says so itself
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return not self._closed  # by another thread, meanwhile

    def built(self) -> None:
        """The buffer has this memory: the steward may not leave with us."""
        if self._keep is not None:
            with contextlib.suppress(OSError):
                self._keep.write(b"keep\n")
                self._keep.flush()
            self._keep.close()
            self._keep = None

    def close(self) -> None:
        """Again, if Ctrl-C cut it short."""
        self.withdraw()
        self._closed = True
        if self._keep is not None:  # never built: its steward ends
            self._keep.close()
        if self._pid != os.getpid():
            return
        if self.connection is not None:
            sharing.server().remove(self.connection)
        if self.memory is not None:
            self.memory.release(self._who)


def make(name: str, handle: Any, uuid: bytes, size: int) -> Hold:
    """New memory on the device of this UUID, offered to others; for whoever is about to build the segment.

    Raises DeviceError, NotEnoughMemory.
    """
    instance, what = handle.header["instance_id"], f"the rows of buffer {name!r}"
    device = driver.by_uuid(uuid, f"{what} are to be on {driver.uuid_text(uuid)}: ")
    try:
        reason = memory.why_not_vmm(device)
    except driver.Refused as e:  # an older driver does not know what it is asked
        reason = str(e)
    if not reason:
        try:
            mapped = memory.create(device, size, what)
        except driver.Refused as e:
            reason = str(e)
        else:
            share = Share.of(mapped, instance, "ipc: not needed")
            with _lock:
                _known[instance] = share
            hold = Hold(share)
            try:
                hold.offer(handle)
            except BaseException:
                hold.close()
                raise
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
        try:
            offer = sharing.ask_member(handle, int(line.split()[1]), STEWARD_STARTS)
        except TimeoutError:
            offer = None
        if offer is None:
            raise DeviceError(
                f"its steward, pid {p.pid} ({_state(p.pid)}), does not answer within {STEWARD_STARTS:g} s"
            )
        hold = Hold()
        try:
            _held(hold, offer, instance)
            hold.memory.map(f"buffer {name!r}")
        except BaseException:
            hold.close()
            raise
    except BaseException:
        p.stdin.close()
        p.kill()  # it may be stopped
        raise
    finally:
        p.stdout.close()
    hold._keep = p.stdin
    return hold


def _state(pid: int) -> str:
    return {"T": "stopped", None: "gone"}.get(state := segment.process_state(pid), f"in state {state}")


def _line_within(p: subprocess.Popen, seconds: float) -> str:
    """What it says first. "": it ended. Raises DeviceError: it says nothing, and is killed."""
    late = ""

    def give_up() -> None:
        nonlocal late
        late = f"its steward, pid {p.pid} ({_state(p.pid)}), did not begin within {seconds:g} s"
        p.kill()

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        first = p.stdout.readline()  # type: ignore[union-attr]
        if not first.startswith(b"member "):
            first = (first + p.stdout.read()).strip().rpartition(b"\n")[2]  # type: ignore[union-attr]
            if late:
                raise DeviceError(late)
        return first.decode(errors="replace").strip()
    finally:
        timer.cancel()


def take(name: str, handle: Any, hold: Hold | None = None, patience: float | None = None) -> Hold:
    """The memory of a built buffer, from who has it: kept alive, and offered on; not mapped, so that no context is opened.

    Args:
        hold: a new one of the caller's, which it closes whatever happens here.
        patience: see `sharing.ask`.

    Raises:
        StorageLost, DeviceError
    """
    header = handle.header
    instance, what = header["instance_id"], f"buffer {name!r}"
    kind, uuid, size = (header[f"device_{k}"] for k in ("kind", "uuid", "bytes"))
    hold = Hold() if hold is None else hold
    try:
        with _lock:
            share = hold.memory = _known.get(instance) if kind == memory.KINDS[VMM] else None  # type: ignore[assignment]
            known = share is not None and share.retain(hold)
        if not known:
            offer = sharing.ask(handle, what, patience)
            if (memory.KINDS.get(offer.kind), offer.uuid, offer.size) != (kind, uuid, size):
                offer.drop()
                raise DeviceError(
                    f"pid {offer.pid} handed over other memory ({offer.kind}, {offer.size:,} bytes) than {what} has: is it attached to one "
                    "of the same name that was replaced? Attach again"
                )
            _held(hold, offer, instance)
        hold.offer(handle)
        return hold
    except BaseException:
        hold.close()
        raise


def _held(hold: Hold, offer: sharing.Offer, instance: int) -> None:
    """What was handed over is had by ``hold``."""
    with _lock:
        share = _known.get(instance)
        if share is not None:
            hold.memory = share
        if share is None or not share.retain(hold):
            fd, offer.fd = offer.fd, -1
            hold.memory = _known[instance] = Share(
                instance,
                offer.kind,
                offer.size,
                offer.uuid,
                why=offer.why,
                pid=offer.pid,
                fd=fd,
                ipc_handle=offer.ipc_handle,
                who=hold,
            )
    if offer.kind == VMM:
        offer.drop()  # the descriptor that is here already
    elif offer.connection is not None:
        offer.connection.setblocking(False)
        hold.connection = offer.connection


def _not_opened(what: str, share: Share, error: DeviceError) -> str:
    around = driver.surroundings()
    causes = {
        VMM: "its holder's driver and this one differ, or the device is another one here",
        IPC: "holder and asker live in different pid or ipc namespaces (docker: --pid host --ipc host, or container:…), or "
        "have different drivers",
    }
    return (
        f"the device memory of {what}, from pid {share.pid}, cannot be mapped here: {error}. Likely causes: {causes[share.kind]}"
        + (f"; {around}" if around else "")
        + '. Buffers in host memory (device="cpu") work all the same'
    )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for share in _known.values():
        share.drop_in_child()
    _known.clear()


os.register_at_fork(after_in_child=_after_fork)
