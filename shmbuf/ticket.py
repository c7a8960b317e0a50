"""What a put gives back: rows that are in the ring, and how to wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.errors import CommitInterrupted, CommitPending, StorageLost
from shmbuf.failures import held_up_text

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer

FOREVER = -1.0


def seconds_of(timeout: float | None) -> float:
    if timeout is None:
        return FOREVER
    if isinstance(timeout, str) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds ≥ 0, or None to wait for ever")
    return float(timeout)


def left_of(timeout: float | None, since: float) -> float | None:
    """What remains of a timeout that began at ``time.monotonic() == since``: one call's waits share it."""
    return None if timeout is None else max(0.0, timeout - (time.monotonic() - since))


def same_ids(ids: np.ndarray, capacity: int) -> np.ndarray:
    return ids


class Ticket:
    """Rows that are in the ring. They will be stored, whatever dies.

    Attributes:
        rows: how many went in (fewer than were given only with a drop policy).
    """

    __slots__ = ("_buffer", "_native", "convert")

    def __init__(self, ticket: Any, buffer: Buffer, convert: Callable[[np.ndarray, int], Any]):
        self._native, self._buffer, self.convert = (
            ticket,
            buffer,
            convert,
        )  # the buffer: not closed by GC while one waits

    @property
    def rows(self) -> int:
        return self._native.rows

    def done(self) -> bool:
        """Whether the rows can be drawn by now."""
        return self._native.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the rows can be drawn by every sampler.

        Args:
            timeout: seconds; None: for ever, whatever the buffer's is.

        Returns:
            int64[rows]: their ids (from `Buffer`), or a LongTensor of their indices (from the replay buffers). Rows that a
            drop policy took are left out.

        Raises:
            CommitPending: not within ``timeout`` seconds; the rows will be stored.
            CommitInterrupted: Ctrl-C meanwhile; likewise.
            StorageLost: the buffer was destroyed.
        """
        self.finish(timeout)
        return self.convert(self.ids(), self._buffer.capacity)

    def finish(self, timeout: float | None = None) -> None:
        """`wait`, for whoever does not ask what became of the rows."""
        buffer = self._buffer
        if buffer._place.wish is not None and not self._native.done():
            buffer._help()
        try:
            status = self._native.wait(seconds_of(timeout))
        except KeyboardInterrupt:
            raise CommitInterrupted(
                "interrupted while waiting for the commit of rows that are in the ring: they will be "
                "stored; .ticket waits for them",
                self,
                self.rows,
            ) from None
        except native.Gone as e:
            if native.STATUSES[e.args[0]] == "forked":
                raise StorageLost("this ticket belongs to the process that put the rows; wait for it there") from None
            if native.STATUSES[e.args[0]] == "device":
                raise self._buffer._device_failed(e.args[1]) from None
            raise StorageLost(
                "the handle was closed before these rows were committed; whoever is attached stores them, "
                "their ids are not known here"
            ) from None
        if status:
            self._failed(native.STATUSES[status], timeout)

    def ids(self) -> np.ndarray:
        """int64 ids of the committed rows."""
        try:
            pieces = self._native.pieces()
        except native.FormatError as e:
            raise segment.damaged(self._buffer.name, e) from None
        parts = [np.arange(first, first + n, dtype=np.int64) for n, first in pieces if first is not None]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _failed(self, status: str, timeout: float | None) -> None:
        if status == "timeout":
            what = f"{self.rows:,} of {self._native.asked:,} rows are" if self._native.asked else "the emptying is"
            raise CommitPending(
                f"{what} in the ring but not committed after {timeout:.3g} s: it will happen; .ticket waits for it. "
                f"{held_up_text(self._buffer)}",
                self,
                self.rows,
            )
        raise self._buffer._lost(f"{status} while {self.rows:,} rows waited for their commit")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows} rows, {'done' if self._native.done() else 'pending'})"


class EditTicket(Ticket):
    """An edit that is in the ring. It will be made, whatever dies. ``wait`` gives bool[n]: where the row was changed."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> np.ndarray:
        self.finish(timeout)
        return np.frombuffer(self._native.applied(), np.uint8) == 1

    def not_newer(self) -> np.ndarray:
        """bool[n], once it is made: where the row is left as it was because of its version (``edit(version=)``)."""
        return np.frombuffer(self._native.applied(), np.uint8) == 2

    def ids(self) -> np.ndarray:
        """int64[0]: it stores no rows."""
        return np.empty(0, np.int64)


class Nothing:
    """The native ticket of zero rows."""

    rows, asked, status = 0, 0, 0

    @staticmethod
    def wait(timeout: float) -> int:
        return 0

    @staticmethod
    def done() -> bool:
        return True

    @staticmethod
    def pieces() -> list:
        return []

    @staticmethod
    def applied() -> bytes:
        return b""
