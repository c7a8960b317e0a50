"""The samples-per-insert limiter of all shards together: `shmbuf.limiter`'s inequality over sums, by leases.

The coordinator hands out what may be inserted: each shard's segment has a cap on its rows, and the caps never add up to more than
the inequality allows, whatever the shards do meanwhile. What may be sampled it grants by the rows that the shards last reported,
which are never more than there are. So neither side is ever ahead of the ratio, but for: a record, which may overshoot a shard's cap by
its length; rows granted to a learner and not drawn (up to `AHEAD` batches of each), which count as sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmbuf.limiter import Scaled, Words, scaled

AHEAD = 4
"""Batches that a learner asks for at once, if so many are to be had."""


@dataclass
class Allowance:
    """num, den, min_size, min_diff, max_diff as in `shmbuf.limiter`: differences times den; inserted, caps: rows by shard."""

    words: Scaled
    sampled: int = 0
    inserted: dict[int, int] = field(default_factory=dict)
    caps: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    gone: int = 0  # rows inserted into shards that are lost

    @classmethod
    def of(cls, limiter: Words, batch: int) -> Allowance:
        """Raises ValueError where it would deadlock with batches of that size."""
        return cls(scaled(limiter, batch))

    @property
    def caps_inserts(self) -> bool:
        return self.words[4] is not None

    @property
    def rows(self) -> int:
        """Inserted, as far as shards said."""
        return self.gone + sum(self.inserted.values())

    @property
    def diff(self) -> float:
        num, den, *_ = self.words
        return self.rows * num / den - self.sampled

    def most(self) -> int:
        """How many rows may have been inserted in all, by now."""
        num, den, size, _, high = self.words
        assert high is not None
        return max(size, (high + self.sampled * den) // num)

    def add(self, shard: int) -> None:
        self.inserted.setdefault(shard, 0)
        self.caps.setdefault(shard, 0)
        self.waiting.add(shard)  # it has nothing yet

    def lose(self, shard: int) -> None:
        """Its rows were inserted; what it might have inserted others may."""
        self.gone += self.inserted.pop(shard, 0)
        self.caps.pop(shard, None)
        self.waiting.discard(shard)

    def report(self, shard: int, rows: int, waiting: bool) -> None:
        if shard in self.inserted:
            self.inserted[shard] = max(self.inserted[shard], rows)
            (self.waiting.add if waiting else self.waiting.discard)(shard)

    def plan(self) -> dict[int, int]:
        """New caps. First those that are lowered have to be set and their reports come in; what they freed is in the next plan."""
        held = {k: max(self.caps[k], self.inserted[k]) for k in self.caps}
        free = self.most() - self.gone - sum(held.values())
        needy = sorted(k for k in self.waiting if k in self.caps)
        if not needy:
            return {}
        if free >= len(needy):
            each, more = divmod(free, len(needy))
            return {k: held[k] + each + (i < more) for i, k in enumerate(needy)}
        if free > 0:
            return {k: held[k] + 1 for k in needy[:free]}
        idle = {k: self.inserted[k] for k in self.caps if k not in self.waiting and self.caps[k] > self.inserted[k]}
        return idle

    def may_sample(self, n: int) -> bool:
        num, den, size, low, _ = self.words
        rows = self.rows
        return rows >= size and (low is None or rows * num - (self.sampled + n) * den >= low)

    def grant(self, n: int, most: int) -> int:
        """A multiple of n that may be sampled, at most ``most``; 0: not now."""
        granted = 0
        while granted + n <= max(n, most) and self.may_sample(n):
            self.sampled += n
            granted += n
        return granted

    def refund(self, n: int) -> None:
        self.sampled = max(0, self.sampled - n)

    def could_ever(self, n: int) -> bool:
        num, den, _, low, high = self.words
        return low is None or high is None or high - num + 1 - n * den >= low

    def why(self, n: int) -> str:
        """Why n rows cannot be sampled now."""
        num, den, size, low, _ = self.words
        if self.rows < size:
            return f"{self.rows:,} rows were inserted into all shards, sampling begins at {size:,}: samplers wait for collectors"
        least = "" if low is None else f"; {n:,} more would go below {low / den:g}"
        return f"inserted {self.rows:,} x {num / den:g} - sampled {self.sampled:,} = {self.diff:g}{least}: samplers wait for collectors"

    def figures(self) -> dict[str, Any]:
        num, den, size, low, high = self.words
        return {
            "samples_per_insert": num / den,
            "min_size": size,
            "min_diff": None if low is None else low / den,
            "max_diff": None if high is None else high / den,
            "inserted": self.rows,
            "sampled": self.sampled,
            "diff": self.diff,
            "collectors_wait": bool(self.waiting),
        }
