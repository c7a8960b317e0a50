"""A directory that is there whole or not at all: written beside its place, made durable, exchanged with what was there.

Killed at any step, a `replacing` leaves the old directory or the new one. What dead ones left is removed by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shmbuf.errors import CheckpointError

KNOWN = frozenset(
    {"buffer_metadata.json", "prefetch.pkl", "rng_state", "transform.t", "storage", "writer", "sampler", "shmbuf"}
)
MARK = "storage/storage_metadata.json"  # every checkpoint has it
PATIENCE = 1.0  # seconds for a reader to find one that nobody is just exchanging
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not become that large (RLIMIT_FSIZE, or the file system's limit)",
}


def step(name: str) -> None:
    """Called between any two steps that a kill may separate; tests put their own here."""


def _beside(target: Path, kind: str) -> str:
    """How names of what is made beside it begin: they are longer than its own, so of a long one only a part is in them."""
    name = os.fsencode(target.name)
    if len(name) > 200:
        name = name[:180] + hashlib.sha256(name).hexdigest()[:16].encode()
    return f".{os.fsdecode(name)}.shmbuf-{kind}."


def _temporary(target: Path, kind: str) -> Path:
    return target.parent / f"{_beside(target, kind)}{secrets.token_hex(6)}"


def _left(target: Path, kind: str) -> list[Path]:
    prefix = _beside(target, kind)
    with contextlib.suppress(FileNotFoundError):
        return sorted(p for p in target.parent.iterdir() if p.name.startswith(prefix))
    return []


def _alone(path: Path) -> int | None:
    """A descriptor that holds the directory's lock, which goes with its process; None: somebody is at work in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.lstat(path).st_ino:
            return fd
    except OSError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def place_of(path: str | os.PathLike) -> Path:
    """Where it leads. Raises CheckpointError: nowhere."""
    try:
        os.stat(path)
    except ValueError as e:
        raise CheckpointError(f"{os.fspath(path)!r:.300} is no path: {e}") from None
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise CheckpointError(f"{os.fspath(path)!r:.300} is no path: {e.strerror}") from None
    return Path(os.path.realpath(path))


def settle(target: Path) -> Path:
    """Where the checkpoint of this name is now: itself, or what a kill between two renames has left of it."""
    if not os.path.lexists(target):
        old = _left(target, "old")
        if old:
            return max(old, key=lambda p: p.stat().st_mtime_ns)
    return target


def hold(target: Path) -> tuple[Path, int]:
    """Where the checkpoint of this name is now, and a descriptor of it: while that is open, nobody who saves removes it.

    Raises FileNotFoundError, NotADirectoryError.
    """
    give_up = time.monotonic() + PATIENCE
    while True:
        path, fd = settle(target), -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held = _shared(fd)
            now, mine = os.stat(path), os.fstat(fd)
            late = time.monotonic() > give_up
            # Without the lock: whoever publishes it has not let go yet, and may be stopped. Another one now: this may be half removed.
            if ((held or late) and (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)) or (held and late):
                return path, fd
        except FileNotFoundError:
            if time.monotonic() > give_up or not (os.path.lexists(target) or _left(target, "old")):
                if fd >= 0:
                    os.close(fd)
                raise
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        if fd >= 0:
            os.close(fd)
        time.sleep(1e-3)


def _shared(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _discard(path: Path) -> None:
    """Remove a directory, unless somebody reads it or is at work in it: then a later sweep does."""
    fd = _alone(path)
    if fd is not None:
        try:
            shutil.rmtree(path, ignore_errors=True)
        finally:  # Ctrl-C: the next one removes the rest
            os.close(fd)


def _collect(target: Path) -> None:
    """Remove what dead ones left."""
    if not os.path.lexists(target) and (kept := settle(target)) != target:
        os.rename(kept, target)
    for path in (*_left(target, "tmp"), *_left(target, "old")):
        _discard(path)


def _check_target(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, and a checkpoint is a directory. Nothing was written")
    strange = sorted(e.name for e in target.iterdir() if e.name not in KNOWN)
    if strange:
        raise CheckpointError(
            f"{target} holds what is no part of a checkpoint ({', '.join(map(repr, strange[:4]))}"
            f"{' …' if len(strange) > 4 else ''}), so it is not replaced. Choose another path, or a directory below it"
        )
    if any(target.iterdir()) and not (target / MARK).is_file():
        raise CheckpointError(
            f"{target} is not empty, and no checkpoint: it has no {MARK}. It is not replaced. Choose another path, or remove it"
        )


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_tree(root: Path) -> None:
    for path, _, files in os.walk(root, topdown=False):
        for name in files:
            with open(os.path.join(path, name), "rb", buffering=0) as f:
                os.fsync(f.fileno())
        sync_directory(Path(path))
        step("synced")


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step. False: this kernel or file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _publish(made: Path, target: Path) -> Path:
    """Old or new, whole, at every instant; without RENAME_EXCHANGE between two renames under another name, where `settle` looks.
    Returns where an old one lies afterwards."""
    old = made
    if not os.path.lexists(target) or not any(target.iterdir()):
        os.rename(made, target)  # also onto an empty directory
    elif not exchange(made, target):
        old = _temporary(target, "old")
        os.rename(target, old)
        try:
            step("moved away")
            os.rename(made, target)
        except BaseException:
            with contextlib.suppress(OSError):  # another has put it back, or a new one there
                os.rename(old, target)
            raise
    step("published")
    sync_directory(target.parent)
    return old


def _make_parents(target: Path) -> None:
    """So that they, too, are there after a power failure."""
    new = [p for p in target.parents if not p.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for p in new:
        sync_directory(p.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """The block fills the directory it is given, which then takes the place of ``path``. If it raises, nothing has changed.

    Raises:
        CheckpointError: the place is taken by something that is no checkpoint. OSError: there is no room: says where.
    """
    target = place_of(path)
    _check_target(target)
    _make_parents(target)
    _collect(target)
    made = _temporary(target, "tmp")
    while True:
        made.mkdir(mode=0o777)
        lock = _alone(made)
        if lock is not None:
            break
    old = made
    try:
        step("begun")
        with _room(target):
            yield made
            step("filled")
            _sync_tree(made)
        _check_target(target)
        old = _publish(made, target)
    finally:
        try:
            if os.path.lexists(made) and os.path.samestat(os.lstat(made), os.fstat(lock)):
                shutil.rmtree(made, ignore_errors=True)
        finally:
            os.close(lock)  # what was published may be read from now on
        _discard(old)
    step("done")


@contextlib.contextmanager
def _room(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(target.parent).free
        raise OSError(
            e.errno,
            f"no checkpoint was written to {target}: {_NO_ROOM[e.errno]} ({free:,} bytes are free). What was there before is unchanged",
        ) from None


Tell = Callable[[int, int], None]  # rows done, of how many


@contextlib.contextmanager
def showing(progress: bool | Tell | None, what: str) -> Iterator[Tell]:
    """A callable to tell how far it is; True: a bar on stderr."""
    if callable(progress):
        yield progress
    elif progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield lambda done, total: None
