"""Name → segment: created, attached, built, destroyed. A segment is an ordinary POSIX shared-memory object
``/shmbuf.<uid>.<name>``: made nameless, filled, then linked, so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import re
import resource
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import posix_ipc

from shmbuf import memory
from shmbuf._extension import native
from shmbuf.devices import Place
from shmbuf.errors import (
    BufferExists,
    BufferFormatError,
    BufferInUse,
    BufferNotFound,
    NotEnoughMemory,
    RingFull,
    StorageLost,
    TooManyOpenFiles,
)
from shmbuf.schema import Schema
from shmbuf.streams import resolve

SHM_DIR = memory.SHM_DIR
UNNAMED = "unnamed."
WAIT = "attach(name, timeout=…)"  # how a name is waited for
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"buffer name {name!r}: 1 to 100 characters out of A-Z a-z 0-9 . _ - are allowed")
    return name


def file_name(name: str, owner: int | None = None) -> str:
    return f"shmbuf.{os.getuid() if owner is None else owner}.{name}"


def path_of(name: str, owner: int | None = None) -> str:
    return f"{SHM_DIR}/{file_name(name, owner)}"


def names(owner: int | None = None) -> list[str]:
    """Buffers of one user (default: this one), by name."""
    prefix = file_name("", owner)
    return sorted(
        f[len(prefix) :] for f in os.listdir(SHM_DIR) if f.startswith(prefix) and NAME.fullmatch(f[len(prefix) :])
    )


def pid_namespace() -> int:
    """In which this process's pids count; 0 without /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_state(pid: int) -> str | None:
    """One letter from /proc (R, S, D, T, Z …), None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None


def lock_holder(inode: int, at: int, members: list[dict[str, Any]]) -> int | None:
    """The pid of whoever holds this lock byte, as the kernel tells it; None: nobody, or nobody that can be seen from here.

    What a holder writes into the segment comes a moment after its lock, and that is when it may have been stopped.
    """
    here = pid_namespace()
    for pid in {m["pid"]: 0 for m in members if m["alive"] and m["pid_namespace"] == here}:
        with contextlib.suppress(OSError):
            for number in os.listdir(folder := f"/proc/{pid}/fdinfo"):
                with contextlib.suppress(OSError), open(f"{folder}/{number}") as f:
                    # lock: 1: OFDLCK ADVISORY WRITE -1 MAJOR:MINOR:INODE FIRST LAST
                    locks = (line.split() for line in f if line.startswith("lock:") and "OFDLCK" in line)
                    if any(w[6].endswith(f":{inode}") and w[7] == str(at) for w in locks):
                        return pid
    return None


def name_writer(counters: dict[str, Any], inode: int, members: list[dict[str, Any]]) -> None:
    """Let ``counters`` name who holds the writer role now."""
    if counters["writer_active"] and (pid := lock_holder(inode, native.LOCK_WRITER, members)):
        counters["writer_pid"], counters["writer_pid_namespace"] = pid, pid_namespace()


def damaged(name: str, why: object, owner: int | None = None) -> BufferFormatError:
    """The error for a buffer that cannot be read, with the remedy."""
    whose = "" if owner in (None, os.getuid()) else f"--owner {owner} "
    return BufferFormatError(f"{path_of(name, owner)}: {why}. `shminfo rm --force {whose}{name}` removes it")


@contextlib.contextmanager
def enough_files() -> Iterator[None]:
    """An OSError that means "no descriptor left" becomes one that says the limit."""
    try:
        yield
    except OSError as e:
        if isinstance(e, TooManyOpenFiles) or e.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = (
            f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files open (RLIMIT_NOFILE); close "
            "some, or raise the limit (`ulimit -n`)"
            if e.errno == errno.EMFILE
            else "the machine has as many files open as it may (/proc/sys/fs/file-max)"
        )
        text = f"no descriptor is left for a handle on a buffer, which takes two while it opens, and one afterwards: {limit}"
        raise TooManyOpenFiles(e.errno, text) from None


# ---- create, attach, build, destroy ----------------------------------------------------------------------------


@enough_files()
def create(
    name: str | None,
    *,
    capacity: int,
    max_collectors: int,
    ring_bytes: int,
    config: bytes,
    mode: int,
    group: str | int | None,
) -> tuple[str, Any]:
    """A configuration segment under ``name`` (None: a random one that dies with its owner) and a handle on it."""
    if not hasattr(os, "O_TMPFILE"):
        raise OSError("shmbuf needs O_TMPFILE (Linux 3.11)")
    unnamed = name is None
    if name is not None and check_name(name).startswith(UNNAMED):
        raise ValueError(
            f"buffer name {name!r}: names that begin with {UNNAMED!r} are for buffers without a name, which are cleaned up"
        )
    name = f"{UNNAMED}{secrets.token_hex(8)}" if name is None else name
    if mode & 0o003:
        raise ValueError(f"mode {mode:#o} lets everybody write; share with a group instead: mode=0o660, group=…")
    need = native.config_bytes(max_collectors, memory.MAX_MEMBERS, len(config))
    memory.require(need, "the buffer's configuration")
    fd = _not_std(os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    handle = None
    try:
        if group is not None:
            import grp

            try:
                os.fchown(fd, -1, grp.getgrnam(group).gr_gid if isinstance(group, str) else group)
            except KeyError:
                raise ValueError(f"group={group!r}: no such group") from None
        os.fchmod(fd, mode)  # not through the umask
        os.posix_fallocate(fd, 0, need)
        native.format(
            fd, capacity, max_collectors, memory.MAX_MEMBERS, ring_bytes, config, secrets.randbits(64), unnamed
        )
        if not os.path.exists(f"/proc/self/fd/{fd}"):
            raise OSError(
                errno.ENOTSUP, "/proc is not mounted here: a buffer gets its name through it. mount -t proc proc /proc"
            )
        lock_fd = _not_std(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        keep, fd = fd, -1
        handle = native.Handle(keep, lock_fd)  # takes both, also when it raises
        # src_dir_fd makes CPython call linkat(AT_SYMLINK_FOLLOW), without which /proc/self/fd cannot be linked
        os.link(f"/proc/self/fd/{keep}", path_of(name), src_dir_fd=keep, follow_symlinks=True)
        handle.named()
        handle.add_role(native.CREATOR)
        return name, handle
    except OSError as e:
        if handle is not None:
            handle.close()
        if e.errno == errno.EEXIST:
            raise BufferExists(_exists_text(name)) from None
        if e.errno == errno.ENOSPC:
            raise NotEnoughMemory(
                memory.too_little(need, "the buffer's configuration", "/dev/shm", memory.shm_free())
            ) from None
        if e.errno == errno.EFBIG:
            raise NotEnoughMemory(memory.too_large(need, "the buffer's configuration")) from None
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _exists_text(name: str) -> str:
    what = ""
    try:
        handle = attach(name, watch=True)
        h, live = handle.header, dict.fromkeys(str(m["pid"]) for m in handle.members() if m["alive"])
        age = time.time() - h["created"]
        what = (
            f" ({handle.size:,} of {h['capacity']:,} rows, created {age:,.0f} s ago, "
            f"{'attached: pid ' + ', '.join(list(live)[:8]) if live else 'nobody attached'})"
        )
        handle.close()
    except (OSError, ValueError, RuntimeError):
        pass
    return (
        f'a buffer named {name!r} exists{what}. Attach to it: shmbuf.attach({name!r}) or exists="attach"; '
        f'replace it when nobody is attached: exists="replace"; remove it: shmbuf.destroy({name!r}) or `shminfo rm {name}`.'
    )


def _check_file(name: str, owner: int | None, readonly: bool) -> None:
    path = path_of(name, owner)
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        raise BufferNotFound(_not_found_text(name, owner)) from None
    _check_stat(st, path, owner, readonly)


def _check_stat(st: os.stat_result, path: str, owner: int | None, readonly: bool) -> None:
    if not stat.S_ISREG(st.st_mode):
        raise BufferFormatError(f"{path} is no regular file (mode {stat.filemode(st.st_mode)}); it is not opened")
    if st.st_mode & 0o002:
        raise BufferFormatError(
            f"{path} is writable by everybody (mode {stat.filemode(st.st_mode)}); it is not trusted"
        )
    wanted = os.getuid() if owner is None else owner
    if st.st_uid != wanted and not readonly:
        raise BufferFormatError(
            f"{path} belongs to uid {st.st_uid}, not {wanted}; it is not trusted. Look with readonly=True"
        )


def _some(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 8, 0.4) or known[:8]
    more = len(known) - len(near)
    return (", ".join(near) if near else "none") + (f" and {more} more" if more else "")


def _not_found_text(name: str, owner: int | None) -> str:
    known = names(owner)
    others = sorted(
        f.split(".")[1]
        for f in os.listdir(SHM_DIR)
        if re.fullmatch(rf"shmbuf\.\d+\.{re.escape(name)}", f) and f != file_name(name, owner)
    )
    text = f"no buffer named {name!r}"
    if others:
        text += f"; uid {', '.join(others)} has one: attach(name, owner=…)"
    return text + f". Known: {_some(name, known)}. To wait until somebody makes it: {WAIT}."


@enough_files()
def attach(
    name: str, *, owner: int | None = None, readonly: bool = False, watch: bool = False, presence: bool = True
) -> Any:
    """A handle on an existing segment. ``watch``: read-only and invisible (no presence, no member entry).

    Raises:
        BufferNotFound, BufferFormatError, PermissionError
    """
    check_name(name)
    readonly = readonly or watch
    flags = (native.READONLY if readonly else 0) | (0 if presence and not watch else native.NO_PRESENCE)
    for _ in range(200):
        _check_file(name, owner, readonly)
        try:
            fds = _open_twice("/" + file_name(name, owner), readonly)
        except FileNotFoundError:
            continue
        except PermissionError:
            mode = stat.S_IMODE(os.lstat(path_of(name, owner)).st_mode)
            raise PermissionError(
                f"{path_of(name, owner)}: uid {os.getuid()} may not open it (mode {mode:#o})"
                + ("" if readonly else " for writing; look with readonly=True")
            ) from None
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):  # exchanged since we looked: look again
                continue
            raise
        inodes = [os.fstat(fd) for fd in fds]
        try:  # what was opened, not what lay there before
            for st in inodes:
                _check_stat(st, path_of(name, owner), owner, readonly)
        except BufferFormatError:
            for fd in fds:
                os.close(fd)
            raise
        if inodes[0].st_ino != inodes[1].st_ino or not inodes[0].st_nlink:  # replaced between the two
            for fd in fds:
                os.close(fd)
            continue
        try:
            handle = native.Handle(*fds, flags)
        except native.FormatError as e:
            raise damaged(name, e, owner) from None
        except native.MapError as e:
            raise NotEnoughMemory(memory.unmappable(e)) from None
        if flags & native.NO_PRESENCE:
            return handle
        if handle.present:
            try:
                if os.stat(path_of(name, owner)).st_ino == inodes[0].st_ino:
                    return handle
            except FileNotFoundError:
                pass
        handle.close()  # somebody is destroying it
        time.sleep(0.01)
    raise BufferInUse(f"buffer {name!r} is being destroyed by another process; try again")


def _not_std(fd: int) -> int:
    """The same file under a number that nobody prints to: with stderr closed, the next file opened gets its number."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _open_twice(shm_name: str, readonly: bool) -> list[int]:
    first = _open(shm_name, readonly)
    try:
        return [first, _open(shm_name, readonly)]
    except BaseException:
        os.close(first)
        raise


def _open(shm_name: str, readonly: bool) -> int:
    """As shm_open does, but also without waiting for the other end of a FIFO, which posix_ipc cannot be told."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _not_std(os.open(f"{SHM_DIR}{shm_name}", flags | (os.O_RDONLY if readonly else os.O_RDWR)))


def attach_within(timeout: float | None, name: str, **how: Any) -> Any:
    """`attach`, waiting up to ``timeout`` seconds (None: for ever) for the name to exist."""
    give_up = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return attach(name, **how)
        except BufferNotFound as e:
            if give_up is not None and time.monotonic() >= give_up:
                if not timeout:
                    raise
                raise BufferNotFound(f"within {timeout:g} s nobody made it: {e}") from None
            time.sleep(0.02)


def build(handle: Any, schema: Schema, whose: str, seconds: float, place: Place) -> Schema:
    """Give the segment its rows. Of several processes at once one builds, the others' schemas are checked against it.

    Returns the buffer's schema. Raises SchemaError, NotEnoughMemory, DeviceError, StorageLost, RingFull (not within ``seconds``).
    """
    give_up = time.monotonic() + seconds if seconds >= 0 else None
    marks = resolve(schema, msgpack.unpackb(handle.config).get("streams") or {})
    while not handle.ready:
        if handle.destroyed:
            raise StorageLost("the buffer was destroyed before it got its schema")
        try:  # around the lock, too: Ctrl-C may come between it and us
            if not handle.try_lock_build():
                if give_up is not None and time.monotonic() >= give_up:
                    pid = lock_holder(handle.inode, native.LOCK_BUILD, handle.members()) or handle.builder_pid
                    raise RingFull(
                        f"pid {pid} (state {process_state(pid) or 'gone, or of another pid namespace'}) has been reserving the "
                        f"buffer's memory for its first rows for {seconds:g} s. Nothing was put."
                    )
                time.sleep(0.001)  # the lock goes with its holder
                continue
            if handle.ready:
                break
            h = handle.header
            rings = place.wish["rings"] if place.wish is not None else None
            need = memory.of(
                schema, h["capacity"], h["max_collectors"], h["ring_bytes"], marks.keep, h["config_bytes"], rings
            )
            what = f"a buffer of {h['capacity']:,} rows × {schema.row_bytes:,} bytes, with one ring of {need.ring:,},"
            rows = need.total - need.configuration
            memory.require(rows + need.ring, what, need)
            device = place.make(handle, need.device) if rings is not None else None
            shape = schema.to_bytes(), schema.row_bytes, len(schema.columns), *marks.native()
            if error := handle.build(*shape, device):
                if error == errno.EFBIG:
                    raise NotEnoughMemory(memory.too_large(rows, what))
                if error == errno.ENOMEM:
                    raise NotEnoughMemory(
                        f"{what} cannot be mapped: {h['max_collectors']:,} rings of {need.ring:,} bytes and the rows exceed this process's "
                        "address space (RLIMIT_AS, `ulimit -v`). Choose a smaller max_collectors or ring_bytes. Nothing was built."
                    )
                if error == errno.ENOSPC:
                    raise NotEnoughMemory(memory.too_little(rows, what, "/dev/shm", memory.shm_free(), need))
                raise OSError(error, f"growing the segment: {os.strerror(error)}")
        finally:
            handle.unlock_build()
            if not handle.ready:
                place.close()
    try:
        mine = Schema.from_bytes(handle.schema)
    except native.FormatError as e:
        raise BufferFormatError(str(e)) from None
    if schema != mine:
        mine.require_same(schema, whose)
    return mine


@enough_files()
def destroy(name: str, *, force: bool = False, owner: int | None = None, instance_id: int | None = None) -> None:
    """Remove a buffer. Without ``force`` only if nobody is attached; with it, those attached get StorageLost from their next
    put or wait, and their memory goes when they do.

    Raises:
        BufferNotFound, BufferInUse, BufferFormatError (of a damaged one, unless forced)
    """
    check_name(name)
    path = path_of(name, owner)
    try:
        handle = attach(name, owner=owner, presence=False)
    except (BufferFormatError, NotEnoughMemory):  # damaged, or more than this process can map
        if not force or not stat.S_ISREG(os.lstat(path).st_mode):
            raise
        os.unlink(path)
        return
    lock_fd = -1
    try:
        if instance_id is not None and handle.header["instance_id"] != instance_id:
            raise BufferNotFound(f"the buffer that was named {name!r} is gone; the name means another one now")
        lock_fd = _open("/" + file_name(name, owner), False)
        if os.fstat(lock_fd).st_ino != handle.inode:  # replaced between the two openings
            raise BufferNotFound(f"the buffer that was named {name!r} is gone; the name means another one now")
        # Only who holds this byte of an inode removes that inode's name: two at once never remove a successor's.
        if not native.lock_byte(lock_fd, native.LOCK_DESTROY, True):
            raise BufferInUse(f"buffer {name!r} is being destroyed by another process")
        if not native.lock_byte(lock_fd, native.LOCK_PRESENCE, True) and not force:
            live, me = [m for m in handle.members() if m["alive"]], (os.getpid(), pid_namespace())
            mine = [(m["pid"], m["pid_namespace"]) == me for m in live]
            who = list(
                dict.fromkeys(f"pid {m['pid']} ({m['command']})" for m, own in zip(live, mine, strict=True) if not own)
            )[:8]
            if sum(mine) > 1:  # one is the handle of this call
                who.append("this process (.close() its handles first)")
            if not who:
                who.append("a read-only handle, of this process or another")
            raise BufferInUse(
                f"buffer {name!r} is attached: {', '.join(who)}. Close those handles, or destroy({name!r}, force=True) / "
                f"`shminfo rm --force {name}` to take it from under them."
            )
        if os.stat(path).st_ino != handle.inode:
            raise BufferNotFound(f"the buffer that was named {name!r} is gone; the name means another one now")
        handle.mark_destroying()  # so that the drain thread (handle.h, sweep) ends what we are killed in the middle of
        try:
            posix_ipc.unlink_shared_memory("/" + file_name(name, owner))
        except BaseException as e:
            if handle.linked:
                handle.unmark_destroying()
            if isinstance(e, posix_ipc.PermissionsError):
                raise PermissionError(
                    f"{path} belongs to uid {os.stat(path).st_uid}; only he may remove it (/dev/shm is sticky)"
                ) from None
            raise
        handle.mark_destroyed()
    except (posix_ipc.ExistentialError, FileNotFoundError) as e:
        raise e if isinstance(e, BufferNotFound) else BufferNotFound(_not_found_text(name, owner)) from None
    finally:
        if lock_fd >= 0:
            os.close(lock_fd)
        handle.close()


def stale_unnamed() -> Iterator[str]:
    """This user's unnamed buffers that nobody is attached to: their owners were killed."""
    return stale(lambda name: name.startswith(UNNAMED))


def stale(which: Callable[[str], Any]) -> Iterator[str]:
    """Buffers of such names that nobody is attached to."""
    for name in names():
        if which(name):
            try:
                if not stat.S_ISREG(os.lstat(path_of(name)).st_mode):
                    continue
                fd = _open("/" + file_name(name), False)
            except (posix_ipc.Error, OSError, ValueError):  # gone, or no segment of ours
                continue
            try:
                if native.lock_byte(fd, native.LOCK_PRESENCE, True):
                    yield name
            finally:
                os.close(fd)


@enough_files()
def collect_unnamed() -> None:
    for name in list(stale_unnamed()):  # a list: the generator holds a lock while it yields
        with contextlib.suppress(
            BufferNotFound, BufferInUse, BufferFormatError
        ):  # somebody was faster, or it is not ours
            destroy(name)
