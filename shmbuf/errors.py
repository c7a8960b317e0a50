"""Every error shmbuf raises. Each text says what was wrong, the numbers, and what to do; each class is also the builtin a
caller would expect to catch."""

from __future__ import annotations

__all__ = [
    "BufferExists",
    "BufferFormatError",
    "BufferInUse",
    "BufferNotFound",
    "CheckpointError",
    "CommitInterrupted",
    "CommitPending",
    "ConcurrentUse",
    "DeviceError",
    "Lapped",
    "NotEnoughMemory",
    "NotEnoughRows",
    "RingFull",
    "SchemaError",
    "ShmbufError",
    "StorageLost",
    "TooManyCollectors",
    "TooManyOpenFiles",
]


class ShmbufError(Exception):
    """Base of all of them."""


class BufferExists(ShmbufError, FileExistsError):
    """The name is taken."""


class BufferInUse(ShmbufError, RuntimeError):
    """Somebody is attached."""


class BufferNotFound(ShmbufError, FileNotFoundError):
    """No buffer of that name."""


class BufferFormatError(ShmbufError, ValueError):
    """A file of that name that is not a segment this shmbuf can read, or a damaged one."""


class SchemaError(ShmbufError, ValueError):
    """Rows that do not fit the schema, or a schema that cannot be. Nothing was stored."""


class RingFull(ShmbufError, TimeoutError):
    """The collector's ring has no room (``full="error"``, or ``full="block"`` and the time is over). Nothing was put."""


class NotEnoughRows(ShmbufError, RuntimeError):
    """Fewer rows are stored than the call needs."""


class Lapped(ShmbufError, RuntimeError):
    """Rows that were asked for are overwritten, or are overwritten faster than they can be copied."""


class TooManyCollectors(ShmbufError, RuntimeError):
    """All of the buffer's rings have living owners."""


class TooManyOpenFiles(ShmbufError, OSError):
    """No file descriptor is left for a handle. Nothing was made or attached."""


class CommitPending(ShmbufError, TimeoutError):
    """The rows are in the ring and will be stored, but were not yet when the time was over.

    ``ticket`` waits for them; ``rows`` says how many of the call's rows went in.
    """

    def __init__(self, message: str, ticket=None, rows: int = 0):
        super().__init__(message)
        self.ticket, self.rows = ticket, rows


class CommitInterrupted(CommitPending, KeyboardInterrupt):
    """Ctrl-C while waiting for rows that are already in the ring: a KeyboardInterrupt that carries their ticket."""


class ConcurrentUse(ShmbufError, RuntimeError):
    """Two threads used one collector handle at the same time."""


class StorageLost(ShmbufError, RuntimeError):
    """The buffer was destroyed, or what its name means now is another one."""


class TooManyPins(ShmbufError, RuntimeError):
    """All 16 pins of the buffer are held by living processes."""


class NotEnoughMemory(ShmbufError, MemoryError):
    """/dev/shm, the machine or the cgroup has less memory left than the buffer needs. Nothing is left behind."""


class DeviceError(ShmbufError, RuntimeError):
    """A CUDA device, its driver or its memory is not to be had in this process. Buffers in host memory work all the same."""


class CheckpointError(ShmbufError, ValueError):
    """A directory is no checkpoint, or a damaged one, or one that does not fit."""
