"""Who has the memory hands it to who attaches: over an abstract unix socket named by the segment's instance and the member's entry,
which says since when whose it is: nobody answers under the name of who had the entry before.

    asker  connect \\0shmbuf.<instance>.<member>.<pid>.<since> → the listener's uid is this one? → receive, one packet: msgpack {kind, size, uuid,
           why, pid, ipc_handle} and, of kind vmm, the descriptor
    holder accept → the peer's uid is this one? → send, close. A steward keeps the connection: its end is how its death is seen

The socket is there only while its process lives, so nobody is asked who is dead. Whoever is stopped does not answer: the next one is
asked. One sleeping thread a process serves all of its buffers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from shmbuf import segment
from shmbuf.cuda import driver
from shmbuf.cuda.memory import IPC, VMM
from shmbuf.errors import DeviceError, StorageLost

if TYPE_CHECKING:
    from shmbuf.cuda.holding import Share

ANSWER = 1.0  # seconds that one of several is waited for, and at least all of them, whatever the caller's patience
PATIENCE = 10.0  # in all, for those who have it and do not answer, if the caller knows no other
STOPPED = 0.5  # in all, for processes that are stopped: a debugger's look at them is over by then
AGAIN = 0.1  # between attempts at what does not work at once
SETTLE = 1.0  # for one that has just been handed it to offer it in turn
log = logging.getLogger("shmbuf")


@dataclass
class Offer:
    """What a holder answered. ``connection``: to a steward; else closed."""

    kind: str
    size: int
    uuid: bytes
    why: str
    pid: int
    ipc_handle: bytes = b""
    fd: int = -1
    connection: socket.socket | None = None

    def drop(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        if self.connection is not None:
            self.connection.close()


def address_of(instance: int, entry: dict[str, Any]) -> str:
    """Of an entry of `Handle.members`."""
    return f"\0shmbuf.{instance:016x}.{entry['member']}.{entry['pid']}.{round(entry['since'] * 1e6)}"


def entry_of(handle: Any, member: int | None = None) -> dict[str, Any] | None:
    """This handle's own entry, or that of ``member``; None if there is none."""
    wanted = handle.member if member is None else member
    return next((m for m in handle.members() if m["member"] == wanted), None)


def _peer(s: socket.socket) -> tuple[int, int]:
    """pid (0: of another pid namespace) and uid of the other end, from the kernel."""
    pid, uid, _ = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


# ---- holding -------------------------------------------------------------------------------------------------------


class Offered:
    """That memory is offered under a name, from :meth:`begin` on. As long as somebody else has the name it is tried again."""

    def __init__(self, on: _Server, name: str, share: Share):
        self._on, self._name, self._share = on, name, share
        self._lock, self._withdrawn, self._told = threading.Lock(), False, False
        self._listener: socket.socket | None = None

    def begin(self) -> None:
        if not self._listen():
            self._on.repeat(self._listen)

    def _listen(self) -> bool:
        """Whether no more is to be done."""
        with self._lock:
            if self._withdrawn:
                return True
            try:
                listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listener.bind(self._name)
                listener.listen(64)
            except OSError as e:
                if self._listener is not None:
                    self._listener.close()
                    self._listener = None
                if not self._told:
                    self._told = True
                    log.warning("device memory cannot be offered to other processes as %r yet: %s", self._name[1:], e)
                return False
            self._on.add(listener, lambda: self._on.answer(listener, self._share))
            return True

    def withdraw(self) -> None:
        with self._lock:
            self._withdrawn = True
            if self._listener is not None:
                self._on.remove(self._listener)


class _Server:
    """The thread of this process. It sleeps in one epoll, and ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.EpollSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._drain_wake())
        self._sockets: set[socket.socket] = set()
        self._tasks: list[Callable[[], bool]] = []
        self._spare = -1  # a descriptor, to answer with when the process has none left
        self._keep_spare()
        try:
            threading.Thread(target=self._run, name="shmbuf-device", daemon=True).start()
        except RuntimeError:
            self.close_in_child()
            raise DeviceError(
                "rows in device memory need a thread that hands the memory to other processes, and none is to be had (ulimit -u, a pids "
                "cgroup or memory limit?)"
            ) from None

    def _run(self) -> None:
        due = 0.0
        while True:
            for key, _ in self._selector.select(max(0.0, due - time.monotonic()) if self._tasks else None):
                try:
                    key.data()
                except Exception:  # of one connection
                    log.debug("serving device memory", exc_info=True)
            if self._tasks and time.monotonic() >= due:
                self._do_tasks()
                due = time.monotonic() + AGAIN

    def _do_tasks(self) -> None:
        for task in list(self._tasks):
            try:
                done = task()
            except Exception:
                log.debug("looking after device memory", exc_info=True)
                done = True
            if done:
                self._tasks.remove(task)

    def repeat(self, task: Callable[[], bool]) -> None:
        """Call it now and then, from the thread, until it returns True."""
        self._tasks.append(task)
        self._wake.send(b"1")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(64)

    def add(self, s: socket.socket, ready: Callable[[], None]) -> None:
        s.setblocking(False)
        with self._lock:
            self._sockets.add(s)
            self._selector.register(s, selectors.EVENT_READ, ready)
        self._wake.send(b"1")

    def forget(self, s: socket.socket) -> None:
        with self._lock:
            if s in self._sockets:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(s)
                self._sockets.discard(s)

    def remove(self, s: socket.socket) -> None:
        self.forget(s)
        s.close()

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        for _ in range(2):
            try:
                return listener.accept()[0]
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE):  # gone, or withdrawn
                    return None
            if self._spare < 0:
                break
            os.close(self._spare)
            self._spare = -1
        time.sleep(AGAIN)  # he still waits at the door, and epoll says so at once
        return None

    def answer(self, listener: socket.socket, share: Share) -> None:
        peer = self._accept(listener)
        if peer is None:
            return self._keep_spare()
        keep = False
        retained = share.retain(peer)  # or its descriptor could be another file by the time it is sent
        try:
            peer.setblocking(False)
            if _peer(peer)[1] != os.getuid():
                return
            if not retained:
                return
            packet = msgpack.packb(
                {
                    "kind": share.kind,
                    "size": share.bytes,
                    "uuid": share.uuid,
                    "why": share.why,
                    "pid": os.getpid(),
                    "ipc_handle": share.ipc_handle,
                }
            )
            if share.kind == VMM:
                socket.send_fds(peer, [packet], [share.fd])
            else:
                peer.send(packet)
                keep = share.is_own
        except OSError:  # it did not wait
            pass
        finally:
            if retained:
                share.release(peer)
            if keep:
                self.add(peer, lambda: self.remove(peer))  # it says nothing more: readable is its end
            else:
                peer.close()
            self._keep_spare()

    def close_in_child(self) -> None:
        for s in [*self._sockets, self._wake, self._woken]:
            s.close()
        if self._spare >= 0:
            os.close(self._spare)
        self._selector.close()


_server: _Server | None = None
_server_lock = threading.Lock()


def server() -> _Server:
    global _server
    with _server_lock:
        if _server is None:
            _server = _Server()
        return _server


def _after_fork() -> None:
    """The child holds none of its parent's sockets: a name that nobody answers would hold up who asks."""
    global _server, _server_lock
    before, _server, _server_lock = _server, None, threading.Lock()
    if before is not None:
        before.close_in_child()


os.register_at_fork(after_in_child=_after_fork)


def watch(connection: socket.socket, gone: Callable[[], None]) -> None:
    """Call ``gone`` once, from the thread, when the other end of a steward's connection is closed."""
    s = server()

    def look() -> None:
        try:
            ended = not connection.recv(64)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            # Not closed: its number would soon be another file's, and `Hold.lost` would look there.
            s.forget(connection)
            gone()

    s.add(connection, look)


# ---- asking --------------------------------------------------------------------------------------------------------


def _ask_one(name: str, seconds: float) -> Offer | None:
    """None: nobody holds it there. Raises TimeoutError: somebody does, and does not answer. PermissionError: he is another user."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    keep = False
    try:
        s.settimeout(seconds)
        try:
            s.connect(name)
        except BlockingIOError:  # its queue is full
            raise TimeoutError from None
        except OSError:
            return None
        if _peer(s)[1] != os.getuid():
            raise PermissionError(f"uid {_peer(s)[1]}")
        packet, fds, flags, _ = socket.recv_fds(s, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return None
        if flags & socket.MSG_CTRUNC:  # it handed over a descriptor, and none is left here
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        offer = Offer(**msgpack.unpackb(packet), fd=fds[0] if fds else -1)
        if offer.kind == VMM and not fds:
            return None
        fds = []
        if offer.kind == IPC:
            offer.connection, keep = s, True
        return offer
    except (ValueError, TypeError, msgpack.UnpackException, ConnectionError):
        return None
    finally:
        for fd in fds:
            os.close(fd)
        if not keep:
            s.close()


def ask_member(handle: Any, member: int, seconds: float) -> Offer | None:
    """As `_ask_one`, of one member of this segment."""
    entry = entry_of(handle, member)
    return None if entry is None else _ask_one(address_of(handle.header["instance_id"], entry), seconds)


def ask(handle: Any, what: str, patience: float | None = None) -> Offer:
    """The memory of a built segment, from one of those attached who have it.

    Args:
        patience: seconds that those who have it and do not answer are waited for, and at least `ANSWER`; None: `PATIENCE`. If all of them
            are stopped, `STOPPED`.

    Raises:
        StorageLost: nobody has it any more. DeviceError: somebody may, and cannot be asked: names who and why.
    """
    instance, own = handle.header["instance_id"], handle.member
    began = time.monotonic()
    patience = max(PATIENCE if patience is None else patience, ANSWER)
    while True:
        members = [m for m in handle.members() if m["alive"] and m["member"] != own]
        stopped = {m["member"] for m in members if _is_stopped(m)}
        members.sort(key=lambda m: m["member"] in stopped)  # they answer last, if at all
        silent: list[dict[str, Any]] = []
        refused: list[dict[str, Any]] = []
        for i, m in enumerate(members):
            left = patience - (time.monotonic() - began)
            if silent and left <= 0:
                break
            if m["member"] in stopped:
                seconds = STOPPED / len(stopped)
            else:  # its part of what is left for those who are not
                each = (left - STOPPED * bool(stopped)) / (len(members) - len(stopped) - i)
                seconds = min(ANSWER, max(each, 0.1))
            try:
                offer = _ask_one(address_of(instance, m), seconds)
            except TimeoutError:
                silent.append(m)
                continue
            except PermissionError:
                refused.append(m)
                continue
            if offer is not None:
                return offer
        waited = time.monotonic() - began
        if silent:
            if waited + AGAIN > (STOPPED if all(map(_is_stopped, silent)) else patience):  # too little for another turn
                raise DeviceError(_silent_text(what, silent, waited))
        elif refused:
            raise DeviceError(
                f"the device memory of {what} is handed to processes of its own user only: {_people(refused)} of uid {refused[0]['uid']} "
                f"{'has' if len(refused) == 1 else 'have'} it, and this is uid {os.getuid()}. Its rows cannot be read from here, whatever "
                'the mode of the segment; rows in host memory (device="cpu") can'
            )
        elif waited > SETTLE or not members:
            break
        time.sleep(0.02)
    apart = [m for m in members if not reachable(m)]
    if apart:
        raise DeviceError(
            f"the device memory of {what} cannot be asked for: {_people(apart)} may have it, but lives in another network or pid namespace "
            "(another container), and abstract sockets do not lead there. Share the namespaces (docker: --network and --pid host, or "
            "container:…; Kubernetes: one pod), or keep the rows in host memory"
        )
    raise StorageLost(
        f"the device memory of {what} is gone: it lives as long as somebody has it open, and "
        + (f"of those attached ({_people(members)}) nobody has" if members else "nobody is attached")
        + ". Its rows are lost; shmbuf.destroy(name) or `shminfo rm` removes what is left. `python -m shmbuf.cuda.steward NAME` keeps "
        "such memory while nobody else does"
    )


def _people(members: Iterable[dict[str, Any]]) -> str:
    names = [f"pid {m['pid']} ({m['command']})" for m in members]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _is_stopped(m: dict[str, Any]) -> bool:
    return segment.process_state(m["pid"]) in ("T", "t")


def _silent_text(what: str, silent: list[dict[str, Any]], waited: float) -> str:
    stopped = [m for m in silent if _is_stopped(m)]
    who = stopped or silent
    return (
        f"the device memory of {what} is held by {_people(who)}, which did not answer for {waited:.1f} s: "
        + (
            f"stopped (kill -CONT {who[0]['pid']} lets it go on)."
            if stopped
            else "busy without giving up the interpreter lock, or without a descriptor left (ulimit -n)?"
        )
        + " Each call that needs it asks again"
    )


def reachable(m: dict[str, Any]) -> bool:
    """Whether a member's abstract sockets are among those seen here; also if nothing tells."""
    if m["pid_namespace"] not in (0, segment.pid_namespace()):
        return False
    try:
        return os.stat(f"/proc/{m['pid']}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return True


def holders(handle: Any) -> list[dict[str, Any]]:
    """For people: of each member that has the memory {pid, command, member, answers, kind, bytes, uuid, why}."""
    instance, out = handle.header["instance_id"], []
    for m in handle.members():
        if not m["alive"]:
            continue
        entry = {"pid": m["pid"], "command": m["command"], "member": m["member"]}
        try:
            offer = _ask_one(address_of(instance, m), 0.3)
        except (TimeoutError, PermissionError):
            out.append({**entry, "answers": False})
            continue
        if offer is not None:
            offer.drop()
            told = {"kind": offer.kind, "bytes": offer.size, "uuid": driver.uuid_text(offer.uuid), "why": offer.why}
            out.append({**entry, "answers": True, **told})
    return out
