"""What all rooms of a replay buffer share: its parts, and whose turn it is to put."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from shmbuf._extension import native
from shmbuf.buffer import Buffer
from shmbuf.errors import ConcurrentUse, RingFull
from shmbuf.limiter import Words
from shmbuf.samplers import Sampler
from shmbuf.samplers.sequences import SampleUnit
from shmbuf.schema import Key
from shmbuf.storage import ShmStorage
from shmbuf.ticket import seconds_of
from shmbuf.turns import alone
from shmbuf.writers import Writer

if TYPE_CHECKING:
    from shmbuf.face.prefetching import Prefetcher

_ALL: weakref.WeakSet[Face] = weakref.WeakSet()


def _inside() -> Exception:
    return ConcurrentUse("a signal handler or transform puts inside a put of its own thread. Nothing was put.")


def _new_locks() -> None:  # another thread of the parent may have held one at the fork
    for rb in _ALL:
        rb._new_turns()
        rb._editor, rb._pending = None, []  # its thread stayed in the parent
        if rb._ahead is not None:
            rb._ahead.forget()


os.register_at_fork(after_in_child=_new_locks)


class Face:
    """The parts of one handle, and what they are asked for."""

    _storage: ShmStorage
    _sampler: Sampler
    _unit: SampleUnit | None
    _batch_size: int | None
    _priority_key: Key | None
    _pin: bool
    _writer: Writer
    _decides: Writer | None = None  # the writer, if rows do not just go into the next slots
    _lock: Any  # puts in turn
    _rng: torch.Generator | None = None
    _ahead: Prefetcher | None = None
    _collate: Callable[[Any], Any] | None = None
    _shut = False

    _editor: ThreadPoolExecutor | None = None  # of edits in the background
    _pending: list[Future[Any]] = []  # noqa: RUF012 (never changed in place)
    _editing: Any  # who changes these two
    _putting: Any  # from the transforms to the put: what they hold back belongs to one put at a time

    def _register(self) -> None:
        self._new_turns()
        _ALL.add(self)

    def _new_turns(self) -> None:
        self._lock, self._editing, self._putting = threading.RLock(), threading.Lock(), native.Once(_inside)

    def _alone(self, timeout: float | None) -> AbstractContextManager[None]:
        """Threads put in turn. A signal handler inside a put of its own thread gets ConcurrentUse, no deadlock."""
        seconds = seconds_of(timeout)
        return alone(
            self._lock,
            seconds,
            lambda: RingFull(f"another thread of this process has been putting for {seconds:g} s. Nothing was put."),
        )

    def _timeout(self, timeout: float | None) -> float | None:
        """None: the buffer's."""
        return self.buffer.config["timeout"] if timeout is None else timeout

    def _drop_ahead(self) -> None:
        """Batches that were drawn ahead are not what would be drawn now."""
        if self._ahead is not None:
            self._ahead.clear()

    @property
    def buffer(self) -> Buffer:
        """The numpy-level handle under it."""
        return self._storage.buffer

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def storage(self) -> ShmStorage:
        """Where the rows are; ``rb.storage[index]`` reads them as they are stored. Another one by `set_storage`."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """How this handle draws. Another one by `set_sampler`."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """How rows are placed. Writing itself is done by whichever process drains the rings."""
        return self._writer

    @property
    def batch_size(self) -> int | None:
        """Of `sample` without a number, and of iterating."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """Rows stored since the buffer was made or emptied, by all processes, overwritten ones included."""
        return self.buffer.write_count

    @property
    def initialized(self) -> bool:
        """Whether the buffer has its schema."""
        return self.buffer.schema is not None

    @property
    def limiter(self) -> Words | None:
        """What limits sampling and inserting, for all processes; None: nothing. Another one by `set_limiter`."""
        return self.buffer.limiter

    def set_limiter(self, limiter: Words | None) -> None:
        """Let all processes sample and insert at this ratio from now on; None: at any. Who waits looks again at once.

        Raises ValueError where it would deadlock with this handle's batches. PermissionError: a read-only handle.
        """
        self.buffer.set_limiter(limiter, batch=self._batch_size or 1)

    def wait_rows(self, n: int, timeout: float | None = None) -> None:
        """Wait until at least n rows are stored. NotEnoughRows when ``timeout`` seconds are over; None: for ever."""
        self.buffer.wait_rows(n, timeout)

    def __len__(self) -> int:
        return len(self._storage)
