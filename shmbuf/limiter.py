"""How fast rows may be sampled against how fast they come in, over all processes (Reverb's rate limiter, in integers).

With ``diff = inserted * samples_per_insert - sampled``, n rows may be sampled while ``diff - n >= min_diff`` and at least
``min_size`` rows were ever inserted; rows are taken out of the rings while ``diff <= max_diff`` or fewer than ``min_size`` were.
Collectors then feel it as a full ring: what happens is their buffer's ``full=``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from shmbuf._extension import native

_FAULTS = ("none", "ratio", "order", "deadlock", "narrow", "min_size")
_MAX = (1 << 32) - 1


class Words(Protocol):
    """What the segment keeps: samples per insert as a fraction, and differences in rows sampled."""

    def words(self) -> tuple[int, int, int, float | None, float | None]: ...

    strict: bool


@dataclass(frozen=True)
class RateLimiter:
    """samples_per_insert rows are sampled for each row inserted, give or take.

    Args:
        samples_per_insert: > 0; 4.0: each row is sampled four times on average.
        min_size: rows inserted before the first may be sampled.
        error_buffer: how far the ratio may be off, in rows sampled: one number around ``min_size * samples_per_insert``, or
            (min_diff, max_diff). Default: as little as works for ``max_batch``.
        max_batch: the largest batch that will be sampled, for the default and the check of error_buffer.
    """

    samples_per_insert: float
    min_size: int = 1
    error_buffer: float | tuple[float, float] | None = None
    max_batch: int = 256

    strict = True

    def words(self) -> tuple[int, int, int, float | None, float | None]:
        spi, size = self.samples_per_insert, self.min_size
        if isinstance(spi, bool) or not 1 / 1000 <= float(spi) <= 1e6:
            raise ValueError(f"samples_per_insert={spi!r}: a number from 0.001 to 1,000,000")
        if isinstance(size, bool) or int(size) != size or size < 0:
            raise ValueError(f"min_size={size!r}: a number of rows ≥ 0")
        ratio = Fraction(spi).limit_denominator(4096)
        if isinstance(self.error_buffer, (tuple, list)):
            low, high = self.error_buffer
        else:
            error = self.error_buffer if self.error_buffer is not None else max(1.0, float(spi), self.max_batch)
            low, high = size * float(spi) - error, size * float(spi) + error
        return ratio.numerator, ratio.denominator, int(size), float(low), float(high)


@dataclass(frozen=True)
class MinSize:
    """Sampling waits until ``min_size`` rows were inserted; then nothing is limited."""

    min_size: int

    strict = False

    def words(self) -> tuple[int, int, int, float | None, float | None]:
        if isinstance(self.min_size, bool) or int(self.min_size) != self.min_size or self.min_size < 0:
            raise ValueError(f"min_size={self.min_size!r}: a number of rows ≥ 0")
        return 1, 1, int(self.min_size), None, None


@dataclass(frozen=True)
class Queue:
    """Each row is sampled once on average, and at most ``size`` rows wait to be: a full queue stops collectors, an empty one samplers."""

    size: int

    strict = False

    def words(self) -> tuple[int, int, int, float | None, float | None]:
        if isinstance(self.size, bool) or int(self.size) != self.size or not 1 <= self.size <= _MAX:
            raise ValueError(f"size={self.size!r}: a number of rows, 1 to {_MAX:,}")
        return 1, 1, 1, 0.0, float(self.size)


def scaled(limiter: Words, batch: int) -> tuple[int, int, int, int | None, int | None]:
    """For the core: differences times the denominator. Raises ValueError where it would deadlock, naming the numbers."""
    num, den, size, low, high = limiter.words()
    low_by_den, high_by_den = (None if d is None else round(d * den) for d in (low, high))
    fault = _FAULTS[native.check_limiter(num, den, size, low_by_den, high_by_den, 1, batch, limiter.strict)]
    if fault == "none":
        return num, den, size, low_by_den, high_by_den
    said = {
        "ratio": "samples per insert have to be > 0",
        "order": f"min_diff={low:g} is above max_diff={high:g}",
        "deadlock": f"a batch of {batch:,} could never be sampled: writers stop at a difference of {high:g}, and sampling "
        f"needs {batch:,} more than {low:g}",
        "narrow": f"the error buffer from {low:g} to {high:g} is narrower than twice the largest step "
        f"(max(1, {num / den:g} a row inserted, a batch of {batch:,})): both sides could wait for each other",
        "min_size": f"max_diff={high:g} is less than min_size * samples_per_insert = {size * num / den:g}: writers would stop "
        "before sampling may begin",
    }[fault]
    raise ValueError(f"{limiter}: {said}")


def waiting_text(state: dict[str, Any], n: int) -> str:
    """Why n rows cannot be sampled, or rows not be inserted, now."""
    spi = state["num"] / state["den"]
    if state["sampler_waits_for_size"]:
        return f"{state['inserted']:,} rows were inserted, sampling begins at {state['min_size']:,}: samplers wait for collectors"
    about = f"inserted {state['inserted']:,} x {spi:g} - sampled {state['sampled']:,} = {state['diff']:g}"
    if state["sampler_waits_for_inserts"]:
        return f"{about}; {n:,} rows more would go below {state['min_diff']:g}: samplers wait for collectors"
    if state["allowance"] == 0:
        return f"{about}, above {state['max_diff']:g}: collectors wait for samplers"
    return about
