"""How fast rows may be sampled against how fast they come in, over all processes (Reverb's rate limiter, in integers).

With ``diff = inserted * samples_per_insert - sampled``, n rows may be sampled while ``diff - n >= min_diff`` and at least
``min_size`` rows were ever inserted; rows are taken out of the rings while ``diff <= max_diff`` or fewer than ``min_size`` were.
Collectors then feel it as a full ring: what happens is their buffer's ``full=``.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from shmbuf._extension import native

_FAULTS = ("none", "ratio", "order", "deadlock", "narrow", "min_size")
_MAX = (1 << 32) - 1
Scaled = tuple[int, int, int, "int | None", "int | None"]


def _rows(what: str, value: Any, least: int = 0) -> int:
    if not _finite(value) or int(value) != value or not least <= value <= _MAX:
        raise ValueError(f"{what}={value!r}: a number of rows, {least} to {_MAX:,}")
    return int(value)


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


class Words(Protocol):
    """What the segment keeps: samples per insert as a fraction, and differences in rows sampled."""

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]: ...

    strict: bool


@dataclass(frozen=True)
class RateLimiter:
    """samples_per_insert rows are sampled for each row inserted, give or take (Reverb's SampleToInsertRatio).

    Args:
        samples_per_insert: > 0; 4.0: each row is sampled four times on average.
        min_size: rows inserted before the first may be sampled.
        error_buffer: how far the ratio may be off, in rows sampled: one number around ``min_size * samples_per_insert``, or
            (min_diff, max_diff), counted from when it is set. Reverb has no default; here it is the least that works for batches of ``max_batch``.
        max_batch: the largest batch that will be sampled, for the default; the buffer's batch size counts if it is larger.
    """

    samples_per_insert: float
    min_size: int = 1
    error_buffer: float | tuple[float, float] | None = None
    max_batch: int = 256

    strict = True

    @property
    def centred(self) -> bool:
        """error_buffer is around the ratio, not at differences the user named."""
        return not isinstance(self.error_buffer, (tuple, list))

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]:
        spi, size = self.samples_per_insert, _rows("min_size", self.min_size)
        if isinstance(spi, bool) or not isinstance(spi, numbers.Real) or not 1 / 1000 <= float(spi) <= 1e6:
            raise ValueError(f"samples_per_insert={spi!r}: a number from 0.001 to 1,000,000")
        ratio = Fraction(spi).limit_denominator(4096)
        most = max(_rows("max_batch", self.max_batch), batch)
        if isinstance(self.error_buffer, (tuple, list)) and len(self.error_buffer) == 2:
            low, high = self.error_buffer
        else:
            error = self.error_buffer if self.error_buffer is not None else max(1.0, float(spi), most)
            low, high = (size * float(ratio) - error, size * float(ratio) + error) if _finite(error) else (error, error)
        if not (_finite(low) and _finite(high)):
            raise ValueError(f"error_buffer={self.error_buffer!r}: a finite number, or two: (min_diff, max_diff)")
        return ratio.numerator, ratio.denominator, size, float(low), float(high)


@dataclass(frozen=True)
class MinSize:
    """Sampling waits until ``min_size`` rows were inserted; then nothing is limited."""

    min_size: int

    strict = False

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]:
        return 1, 1, _rows("min_size", self.min_size), None, None


@dataclass(frozen=True)
class Queue:
    """Each row is sampled once on average, and at most ``size`` rows wait to be: a full queue stops collectors, an empty one samplers."""

    size: int

    strict = False

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]:
        return 1, 1, 1, 0.0, float(_rows("size", self.size, 1))


def scaled(limiter: Words, batch: int) -> Scaled:
    """For the core: differences times the denominator. Raises ValueError where it would deadlock, naming the numbers."""
    num, den, size, low, high = limiter.words(batch)
    if any(d is not None and abs(d * den) >= 1 << 62 for d in (low, high)):
        raise ValueError(f"{limiter}: a difference of {max(abs(low or 0), abs(high or 0)):g} is out of range")
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


def from_now_on(limiter: Words, words: Scaled, before: dict[str, Any] | None, inserted: int) -> tuple[Scaled, bool]:
    """What to set in a buffer that has been in use, and whether differences have to be counted anew.

    They count from here unless the ratio stays. Around `RateLimiter`'s error buffer the middle is what the difference will be
    when sampling begins, or the one that held so far.
    """
    num, den, size, low, high = words
    same = before is not None and (before["num"], before["den"]) == (num, den) and before["min_diff"] is not None
    if not getattr(limiter, "centred", False):
        return words, not same
    if inserted < size:
        middle = (round(before["diff"] * den) if same else 0) + (size - inserted) * num  # type: ignore[index]
    else:
        middle = round((before["min_diff"] + before["max_diff"]) / 2 * den) if same else 0  # type: ignore[index]
    shift = middle - size * num
    return (num, den, size, low + shift, high + shift), not same  # type: ignore[operator]


def limiter_of(state: dict[str, Any] | None) -> Words | None:
    """What was set, from what the segment keeps of it."""
    if state is None:
        return None
    spi, size, low, high = state["num"] / state["den"], state["min_size"], state["min_diff"], state["max_diff"]
    if low is None:
        return MinSize(size)
    if (spi, size, low) == (1, 1, 0):
        return Queue(int(high))
    return RateLimiter(spi, size, (low, high))


def figures(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """For ``stats()`` and `shminfo`."""
    if state is None:
        return None
    keys = ("min_size", "min_diff", "max_diff", "inserted", "sampled", "diff")
    return {
        "samples_per_insert": state["num"] / state["den"],
        **{k: state[k] for k in keys},
        "samplers_wait": state["sampler_waits_for_size"] or state["sampler_waits_for_inserts"],
        "collectors_wait": state["writer_waits_for_samples"],
        "text": waiting_text(state, 1),
    }


def _difference(state: dict[str, Any]) -> str:
    spi, inserted, sampled, diff = state["num"] / state["den"], state["inserted"], state["sampled"], state["diff"]
    if math.isclose(inserted * spi - sampled, diff, abs_tol=1e-6):
        return f"inserted {inserted:,} x {spi:g} - sampled {sampled:,} = {diff:,.10g}"
    return (
        f"inserted x {spi:g} - sampled, since the limiter was set, = {diff:,.10g} (in all {inserted:,} and {sampled:,})"
    )


def waiting_text(state: dict[str, Any], n: int) -> str:
    """Why n rows cannot be sampled, or rows not be inserted, now."""
    if state["sampler_waits_for_size"]:
        return f"inserted {state['inserted']:,} rows, sampling begins at {state['min_size']:,}: samplers wait for collectors"
    if state["sampler_waits_for_inserts"]:
        more = f"{n:,} rows" if n != 1 else "a row"
        return (
            f"{_difference(state)}; {more} more would go below {state['min_diff']:,.10g}: samplers wait for collectors"
        )
    return collectors_text(state) or _difference(state)


def collectors_text(state: dict[str, Any] | None) -> str | None:
    """Why rows stay in the rings; None: not because of the limiter."""
    if state is None or state["allowance"] != 0:
        return None
    most = f"{state['max_diff']:,.10g}"
    return f"collectors wait for samplers: {_difference(state)}, and a row more would go above {most}"
