"""Threads of one process, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shmbuf._extension import native


def alone(lock: Any, seconds: float, refused: Callable[[], Exception]) -> AbstractContextManager[None]:
    """lock: an RLock, not taken again inside of itself (a signal handler's call goes on). seconds: to wait for it, below 0: for ever; then
    refused() is raised. Wherever Ctrl-C comes, nobody is kept out afterwards."""
    return native.Alone(lock, min(seconds, threading.TIMEOUT_MAX) if seconds >= 0 else -1, refused)
