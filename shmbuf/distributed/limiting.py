"""The samples-per-insert limiter of all shards together: `shmbuf.limiter`'s inequality over sums, by leases.

The coordinator hands out what may be inserted: each shard's segment has a cap on its rows, and the caps never add up to more than
the inequality allows, whatever the shards do meanwhile. What may be sampled it grants by the rows that the shards last reported,
which are never more than there are. So neither side is ever ahead of the ratio, but for: a record, which may overshoot a shard's cap by
its length; rows granted to a learner and not drawn (up to `AHEAD` batches of each), which count as sampled.

Caps are absolute: one that a shard did not confirm is sent again, and counts meanwhile. Of shards that want more, the one that was
given least comes first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmbuf.limiter import Scaled, Words, figures, from_now_on, scaled, waiting_text

AHEAD = 4
"""Batches that a learner asks for at once, if so many are to be had."""
_MOST = 1 << 32
"""Rows promised ahead, at most: a segment's limiter counts in 64 bits."""
_STUCK = 10
"""Reports in a row of rows that wait though the cap would let them in (a pin, a stopped process): the lease is for others."""


class Report(NamedTuple):
    """rows: ever inserted into the shard; waiting: rows are in its rings, whatever the cap; cap: what its segment has; None: no cap."""

    rows: int
    waiting: bool
    cap: int | None


@dataclass
class Allowance:
    """words: num, den, min_size, min_diff, max_diff as in `shmbuf.limiter`. ``rows * num + offset - sampled * den`` is the difference.

    A shard's level is what it was given since it began, on the scale of the others: who begins late does so at the least of theirs.
    """

    words: Scaled
    offset: int = 0
    sampled: int = 0  # granted
    owed: int = 0  # of these, given back: granted again before others
    gone: int = 0  # rows inserted into shards that are lost
    inserted: dict[int, int] = field(default_factory=dict)  # by shard, as it last said
    caps: dict[int, int | None] = field(
        default_factory=dict
    )  # what it last said its segment has. Missing, None: may be anything
    told: dict[int, int] = field(default_factory=dict)  # caps that are sent until confirmed
    start: dict[int, int] = field(default_factory=dict)  # what its level counts from
    waiting: set[int] = field(default_factory=set)
    unseen: set[int] = field(default_factory=set)  # what they hold beyond ``inserted`` came in before counting began
    stuck: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, limiter: Words, batch: int) -> Allowance:
        """Raises ValueError where it would deadlock with batches of that size. TypeError: no limiter."""
        if not hasattr(limiter, "words"):
            raise TypeError(f"limiter={limiter!r}: a RateLimiter, a MinSize or a Queue, or None")
        return cls(scaled(limiter, batch))

    # ---- the parameters ---------------------------------------------------------------------------------------------

    def change(self, limiter: Words, batch: int, before: bool = True) -> None:
        """Another ratio, from now on; before: there was one, whose difference goes on if the ratio stays. Raises ValueError, and changes
        nothing, where it would deadlock."""
        state = self.state() if before else None
        self.words, anew = from_now_on(limiter, scaled(limiter, batch), state, self.rows)
        if anew:
            self.count_from(0.0)
        if not self.caps_inserts:
            self.told.clear()

    def count_from(self, diff: float) -> None:
        """That is the difference now."""
        num, den, *_ = self.words
        self.owed = 0
        self.offset = round(diff * den) - self.rows * num + self.sampled * den

    def recount(self, saved: dict[str, Any] | None) -> None:
        """After the rows of a checkpoint came in: its difference, where the ratio is the same; else none."""
        same = saved is not None and (saved["num"], saved["den"]) == self.words[:2]
        self.count_from(saved["diff"] if same and saved is not None else 0.0)
        self.told = {k: rows for k, rows in self.inserted.items() if self.caps_inserts}  # loading moved their caps

    @property
    def caps_inserts(self) -> bool:
        return self.words[4] is not None

    @property
    def rows(self) -> int:
        """Inserted, as far as shards said."""
        return self.gone + sum(self.inserted.values())

    @property
    def _difference(self) -> int:
        num, den, *_ = self.words
        return self.rows * num + self.offset - self.sampled * den

    def most(self) -> int:
        """How many rows may have been inserted in all, by now."""
        num, den, size, _, high = self.words
        assert high is not None
        return max(size, min((high - self.offset + self.sampled * den) // num, self.rows + _MOST))

    # ---- shards -----------------------------------------------------------------------------------------------------

    def add(self, shard: int, cap: int | None = None, seen: bool = True) -> None:
        """A shard, with what its segment is known to have. seen=False: it has rows that do not count."""
        if shard in self.inserted:
            return
        least = min((self._level(k) for k in self.inserted), default=0)
        self.inserted[shard] = 0
        self.caps[shard] = cap
        self.start[shard] = self._held(shard) - least
        if not seen:
            self.unseen.add(shard)

    def lose(self, shard: int) -> None:
        """Its rows were inserted; what it might have inserted others may."""
        self.gone += self.inserted.pop(shard, 0)
        for known in (self.caps, self.told, self.start, self.stuck):
            known.pop(shard, None)
        self.waiting.discard(shard)
        self.unseen.discard(shard)

    def restarted(self) -> None:
        """These books may be older than what was sent since: nobody is given anything before all have said what they have."""
        self.caps, self.waiting = dict.fromkeys(self.inserted), set()

    def silent(self, shard: int) -> None:
        """It does not answer: it is promised nothing more, and what it was told is told again."""
        self.waiting.discard(shard)

    def heard(self, shard: int, report: Report) -> None:
        if shard not in self.inserted:
            return
        rows = max(self.inserted[shard], report.rows)
        came = rows - self.inserted[shard]
        if shard in self.unseen:
            self.unseen.discard(shard)
            self.offset -= came * self.words[0]
            self.start[shard] += came
        self.inserted[shard], self.caps[shard] = rows, report.cap
        if report.cap is not None and report.cap == self.told.get(shard):
            del self.told[shard]
        (self.waiting.add if report.waiting else self.waiting.discard)(shard)
        still = report.waiting and came == 0 and report.cap is not None and rows < report.cap
        if came or not report.waiting:
            self.stuck.pop(shard, None)
        elif still:
            self.stuck[shard] = self.stuck.get(shard, 0) + 1

    def _held(self, shard: int) -> int:
        """Rows it has, or may have without asking."""
        return max(self.inserted[shard], self.caps[shard] or 0, self.told.get(shard, 0))

    def _level(self, shard: int) -> int:
        return self._held(shard) - self.start[shard]

    # ---- inserting --------------------------------------------------------------------------------------------------

    def messages(self, free: Collection[int]) -> dict[int, int]:
        """Caps to send now to shards that have no message on its way. What is promised here counts from now on."""
        if not self.caps_inserts:
            return {}
        unsettled = [k for k in self.inserted if self.caps[k] is None]
        for k in unsettled:  # whatever it has, not a row more; before this is known nobody is given anything
            self.told.setdefault(k, self.inserted[k])
        if not unsettled:
            self._plan(free)
        return {k: self.told[k] for k in sorted(free) if k in self.told}

    def _plan(self, free: Collection[int]) -> None:
        room = self.most() - self.gone - sum(map(self._held, self.inserted))
        hungry = [k for k in self.waiting if self.stuck.get(k, 0) < _STUCK] or list(self.waiting)
        if not hungry:
            return
        can = [k for k in free if k in self.inserted and k not in self.told]
        if room < len(hungry):
            for k in can:
                least = self.inserted[k] + (k in self.waiting)
                if k not in hungry and self._held(k) > least:
                    self.told[k] = least
        for k in can:
            if k in self.waiting and k not in hungry and self._held(k) == self.inserted[k] and room > 0:
                self.told[k], room = self._held(k) + 1, room - 1  # a row to show that it is stuck no more
        if room > 0:
            for k, more in self._shares(hungry, room).items():
                if more and k in can:  # the others' share waits for them
                    self.told[k] = self._held(k) + more

    def _shares(self, hungry: list[int], room: int) -> dict[int, int]:
        """Who was given least is raised to the next, until the room is used up."""
        num, _, size, low, high = self.words
        assert high is not None
        top, credit = max(map(self._level, self.inserted)), max(size, (high - (low or 0)) // num)
        for k in hungry:  # who wanted nothing for long is not owed all of it
            self.start[k] = min(self.start[k], self._held(k) - (top - credit))
        order = sorted(hungry, key=lambda k: (self._level(k), k))
        levels, n = [self._level(k) for k in order], 1
        while n < len(order) and sum(levels[n] - one for one in levels[:n]) <= room:
            n += 1
        each, more = divmod(room + sum(levels[:n]), n)
        return {k: each + (i < more) - levels[i] for i, k in enumerate(order[:n])}

    # ---- sampling ---------------------------------------------------------------------------------------------------

    def may_sample(self, n: int) -> bool:
        _, den, size, low, _ = self.words
        return self.rows >= size and (low is None or self._difference - n * den >= low)

    def grant(self, n: int, most: int) -> int:
        """A multiple of n that may be sampled, at most ``most``; 0: not now."""
        granted = 0
        while granted + n <= max(n, most):
            if self.owed >= n:
                self.owed -= n
            elif self.may_sample(n):
                self.sampled += n
            else:
                break
            granted += n
        return granted

    def refund(self, n: int) -> None:
        """Rows that were granted and not drawn; collectors have been promised rows for them, so others draw them first."""
        self.owed = min(self.sampled, self.owed + n)

    def could_ever(self, n: int) -> bool:
        num, den, _, low, high = self.words
        return low is None or high is None or high - num + 1 - n * den >= low

    # ---- figures ----------------------------------------------------------------------------------------------------

    def state(self, n: int = 1) -> dict[str, Any]:
        """As `Buffer.limiter_state`."""
        num, den, size, low, high = self.words
        held_up = any(self.inserted[k] >= (self.caps[k] or 0) for k in self.waiting) and self.caps_inserts
        return {
            "num": num,
            "den": den,
            "min_size": size,
            "min_diff": None if low is None else low / den,
            "max_diff": None if high is None else high / den,
            "inserted": self.rows,
            "sampled": self.sampled - self.owed,
            "diff": self._difference / den + self.owed,
            "allowance": 0 if held_up else 1,
            "sampler_waits_for_size": self.rows < size,
            "sampler_waits_for_inserts": self.rows >= size and not self.may_sample(n),
            "writer_waits_for_samples": held_up,
        }

    def why(self, n: int) -> str:
        """Why n rows cannot be sampled now."""
        return waiting_text(self.state(n), n)

    def figures(self) -> dict[str, Any]:
        found = figures(self.state())
        assert found is not None
        return found
