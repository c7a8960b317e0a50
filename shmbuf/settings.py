"""What a buffer can be told at its birth, and what it cannot."""

from __future__ import annotations

import numbers
from typing import Any

FULL = ("block", "error", "drop_newest", "drop_oldest")
DRAIN = ("thread", "process", "caller")
EXISTS = ("error", "attach", "replace")
MAX_COLLECTORS = 65_535
DEFAULTS: dict[str, Any] = {"max_collectors": 256, "full": "block", "timeout": None, "drain": "thread"}


def check_settings(
    capacity: Any, max_collectors: int, ring_bytes: int | None, *, full: str, drain: str, exists: str
) -> None:
    """Raises ValueError naming the setting, its value and what is allowed."""
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral) or not 0 < int(capacity) < 1 << 32:
        raise ValueError(f"capacity={capacity!r}: a number of rows ≥ 1 and < {1 << 32:,}")
    for number, count in (("max_collectors", max_collectors), ("ring_bytes", 1 if ring_bytes is None else ring_bytes)):
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise ValueError(f"{number}={count!r}: a whole number")
    if not 0 < max_collectors <= MAX_COLLECTORS:
        raise ValueError(f"max_collectors={max_collectors!r}: 1 to {MAX_COLLECTORS}")
    if ring_bytes is not None and not 0 < ring_bytes <= 1 << 34:
        raise ValueError(f"ring_bytes={ring_bytes!r}: 1 to {1 << 34}")
    if ring_bytes is not None and ring_bytes * max_collectors > 1 << 44:
        raise ValueError(
            f"{max_collectors:,} rings of {ring_bytes:,} bytes: more than {1 << 44:,} in all cannot be mapped"
        )
    choices = (("full", full, FULL), ("drain", drain, DRAIN), ("exists", exists, EXISTS))
    for what, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{what}={value!r}: one of {', '.join(allowed)}")
