"""Handles by key: made when first asked for, few at a time, and not closed while somebody works with them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from shmbuf.errors import TooManyCollectors

T = TypeVar("T")


class _Kept(Generic[T]):
    def __init__(self, thing: T):
        self.thing, self.users, self.used, self.dropped = thing, 0, time.monotonic(), False


class Pool(Generic[T]):
    """At most ``most``: one more takes the place of the one that has been idle longest, if that is ``idle`` seconds at least.

    Args:
        close: of one that is let go. full: (how many there are) → what an error is to say, where none may be let go.
    """

    def __init__(self, most: int, close: Callable[[T], Any], full: Callable[[int], str], idle: float = 0.0):
        self.most, self.idle = most, idle
        self._shut, self._full = close, full
        self._kept: dict[Hashable, _Kept[T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @contextlib.contextmanager
    def use(self, key: Hashable, make: Callable[[], T] | None) -> Iterator[T]:
        """It is not closed meanwhile. Raises TooManyCollectors, and what make() raises. make=None: KeyError if there is none."""
        idle: _Kept[T] | None = None
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                if make is None:
                    raise KeyError(key)
                longest = self._idle_longest() if len(self._kept) >= self.most else None
                kept = self._kept[key] = _Kept(make())
                idle = self._kept.pop(longest) if longest is not None else None
            kept.users += 1
        try:
            if idle is not None:
                self._end(idle)
            yield kept.thing
        finally:
            with self._lock:
                kept.users -= 1
                kept.used = time.monotonic()
                last = kept.dropped and not kept.users
            if last:
                self._end(kept)

    def _idle_longest(self) -> Hashable:
        """Whose place a new one may take."""
        before = time.monotonic() - self.idle
        idle = {key: k.used for key, k in self._kept.items() if not k.users and k.used <= before}
        if not idle:
            raise TooManyCollectors(self._full(len(self._kept)))
        return min(idle, key=lambda key: idle[key])

    def drop(self, which: Callable[[Any], bool]) -> None:
        """Those whose key is such a one; who is in use is closed when that is over."""
        with self._lock:
            gone = [self._kept.pop(key) for key in list(self._kept) if which(key)]
            for kept in gone:
                kept.dropped = True
            unused = [kept for kept in gone if not kept.users]
        for kept in unused:
            self._end(kept)

    def _end(self, kept: _Kept[T]) -> None:
        with contextlib.suppress(Exception):
            self._shut(kept.thing)
