"""Rows that stay where they are while somebody looks at them in place: no copy, as long as it takes, but not for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuf import memory
from shmbuf._extension import native
from shmbuf.errors import DeviceError, Lapped, NotEnoughMemory, NotEnoughRows, StorageLost, TooManyPins
from shmbuf.schema import nest
from shmbuf.ticket import seconds_of

if TYPE_CHECKING:
    from shmbuf.reading import Reading

_STATUS = native.STATUSES
ALL = 2**64 - 1


class Pin:
    """The rows of ids [first_id, end_id): none of them is overwritten while this pin is valid. Made by :meth:`Buffer.pin`.

    Leaving it as a context manager releases it, and raises `Lapped` if it had been revoked: what was read may then be torn. Views
    stay readable after that, and after ``close()`` and ``destroy()``, but their rows may be overwritten.
    """

    def __init__(self, buffer: Reading, first_id: int, end_id: int, hold: Any, seconds: float | None):
        self.first_id, self.end_id = first_id, end_id
        self._buffer, self._seconds = buffer, seconds
        self._hold = hold  # lets go when the last reference to it does
        self._base: np.ndarray | None = None

    def __len__(self) -> int:
        return self.end_id - self.first_id

    @property
    def valid(self) -> bool:
        """Whether all its rows are still as they were: neither overwritten nor edited. Ask after reading."""
        return self._hold.valid

    @property
    def keeps(self) -> bool:
        """Whether all its rows are still stored, edited or not: enough for whoever copies them with `gather`."""
        return self._hold.keeps

    def parts(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """The rows in place, oldest first: one part, or two where the storage wraps. Keep the pin: when it is collected, it is released.

        Returns:
            of each part: ids, int64[n]; rows: nested dict of read-only arrays [n, *shape], views of shared memory.

        Raises:
            StorageLost: released, or its buffer closed. Lapped: revoked. DeviceError: the rows are in device memory. NotEnoughMemory: the rows, which are mapped once more
            for it, exceed this process's address space.
        """
        handle = self._buffer._handle
        if not self._hold.held or handle.closed or handle.forked:
            raise StorageLost(
                f"the pin on buffer {self._buffer.name!r} was released, or its handle closed: pin() again"
            )
        if not self._hold.valid:
            raise Lapped(self._lost())
        if self._buffer._place.wish is not None:
            raise DeviceError(
                f"the rows of buffer {self._buffer.name!r} are in device memory, of which numpy has no views: gather(range(pin.first_id, "
                "pin.end_id)) copies them, and none is overwritten while the pin is held"
            )
        if self._base is None:
            try:
                self._base = handle.view_rows()
            except native.MapError as e:
                raise NotEnoughMemory(memory.unmappable(e)) from None
        capacity, out = self._buffer.capacity, []
        wrap = min(self.end_id, (self.first_id // capacity + 1) * capacity)
        for lo, hi in ((self.first_id, wrap), (wrap, self.end_id)):
            if lo < hi:
                out.append((np.arange(lo, hi, dtype=np.int64), self._view(lo % capacity, hi - lo)))
        return out

    def _view(self, slot: int, n: int) -> dict[str, Any]:
        schema = self._buffer._schema
        assert schema is not None, "rows are stored, so there is a schema"
        columns = []
        for c in schema.columns:
            inner = np.empty((1, *c.shape), c.numpy).strides[1:]  # of none at all they would be 0
            columns.append(
                np.ndarray(
                    (n, *c.shape),
                    c.numpy,
                    buffer=self._base,
                    offset=slot * schema.row_bytes + c.offset,
                    strides=(schema.row_bytes, *inner),
                )
            )
        return nest(schema.keys, columns)

    def release(self) -> None:
        """Let the rows be overwritten. Twice is once."""
        self._hold.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        lost = self._lost() if kind is None and self._hold.held and not self.valid else None
        self.release()
        if lost:
            raise Lapped(lost)

    def _lost(self) -> str:
        if self._hold.keeps:
            return (
                f"rows of the pin on buffer {self._buffer.name!r} were edited meanwhile, so what was read of them may be "
                "half old and half new. Read them again, or copy them with gather()"
            )
        return (
            f"the pin on buffer {self._buffer.name!r} did not hold to the end: it was revoked after {self._seconds} s, or its "
            "handle was closed; what was read may be torn. pin(seconds=) takes longer"
        )

    def __repr__(self) -> str:
        return f"Pin({self.first_id:,} to {self.end_id - 1:,} of {self._buffer.name!r}, {'valid' if self.valid else 'not valid'})"


def pin(buffer: Reading, first_id: int | None, seconds: float | None) -> Pin:
    """See :meth:`Buffer.pin`."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds}: how long the rows may have to stay, > 0, or None")
    if first_id is not None and (isinstance(first_id, bool) or not hasattr(first_id, "__index__")):
        raise TypeError(f"first_id={first_id!r}: a row id is a whole number")
    if first_id is not None and not 0 <= first_id < 2**63:
        raise IndexError(f"first_id={first_id}: no such row id")
    limit = seconds_of(seconds)
    status, lo, hi, hold = buffer._call("pin", ALL if first_id is None else first_id, limit)
    why = _STATUS[status]
    if why == "ok":
        assert buffer.schema is not None
        return Pin(buffer, lo, hi, hold, seconds)
    if why == "empty":
        raise NotEnoughRows(f"buffer {buffer.name!r} holds no rows to pin")
    if why == "lapped":
        first, end = buffer.window
        raise Lapped(
            f"row {first_id} cannot be pinned: stored now are {first} to {end - 1}, and the oldest may be about to be overwritten"
            if first_id is not None
            else f"rows of buffer {buffer.name!r} are overwritten faster than they can be pinned"
        )
    if why == "none_free":
        held = buffer._call("pins")
        whose = ", ".join(f"pid {p['pid']} since {p['held_seconds']:.1f} s" for p in held)
        raise TooManyPins(f"all {len(held)} pins of buffer {buffer.name!r} are in use: {whose}. Release some")
    if why == "unknown_row":
        raise IndexError(f"first_id={first_id}: no such row has been stored; the newest is {buffer.window[1] - 1}")
    if why == "readonly":
        raise PermissionError("a read-only handle cannot pin: the writer has to see it")
    raise StorageLost(f"buffer {buffer.name!r} was {why}")
