"""Threads of one process, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def alone(lock: Any, seconds: float, refused: Callable[[], Exception]) -> Iterator[None]:
    """lock: an RLock, not taken again inside of itself (a signal handler's call goes on). seconds: to wait for it, below 0: for ever; then
    refused() is raised. Wherever Ctrl-C comes, nobody is kept out afterwards."""
    mine = lock._is_owned()  # by what this is inside of
    try:
        if not mine and not lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX) if seconds >= 0 else -1):
            raise refused()
        yield
    finally:
        if not mine:
            try:  # noqa: SIM105 (no other call comes first: Ctrl-C would be let in behind it)
                lock.release()
            except RuntimeError:
                pass  # it was not taken
