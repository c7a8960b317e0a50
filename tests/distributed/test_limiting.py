"""The limiter over shards, as numbers: shards that insert what their caps allow, at any moment between two ticks. No Ray."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import RateLimiter, TensorDictReplayBuffer
from shmbuf.distributed.limiting import Allowance, Report
from shmbuf.distributed.shard import report, set_cap
from shmbuf.limiter import MinSize, Queue
from shmbuf.storage import ShmStorage


class Shards:
    """Segments, and a coordinator that has one message to each on its way. slow: ticks that the answer of a shard takes. down: those
    whose actor is dead, which answer nothing; what they were sent may have been done or not."""

    def __init__(self, limiter, n, batch=8, slow=None):
        self.allowance = Allowance.of(limiter, batch)
        self.rows, self.caps, self.rings, self.drawn = [0] * n, [0] * n, [0] * n, 0
        self.slow, self.down, self.pending, self.ticks = slow or [0] * n, set(), {}, 0
        self.pinned = set()  # nothing leaves their rings, whatever the cap
        for k in range(n):
            self.allowance.add(k, cap=0)

    def put(self, k, n, record=1):
        """Rows into a ring, and out of it as far as the cap lets them, in records that may overshoot."""
        self.rings[k] += n
        return self.drain(k, record)

    def drain(self, k, record=1):
        took = 0
        while self.rings[k] >= record and self.rows[k] < self.caps[k] and k not in self.pinned:
            self.rings[k] -= record
            self.rows[k] += record
            took += record
        return took

    def said(self, k):
        return Report(self.rows[k], self.rings[k] > 0, self.caps[k])

    def tick(self):
        self.ticks += 1
        for k, (due, cap) in list(self.pending.items()):
            if k in self.down:
                del self.pending[k]
                self.allowance.silent(k)
            elif due <= self.ticks:
                del self.pending[k]
                if cap is not None:
                    self.caps[k] = cap
                self.allowance.heard(k, self.said(k))  # at once: what the new cap lets in is still in the ring
        free = [k for k in range(len(self.rows)) if k not in self.pending and k in self.allowance.inserted]
        caps = self.allowance.messages(free)
        for k in free:
            self.pending[k] = self.ticks + 1 + self.slow[k], caps.get(k)

    def sample(self, n, most=None):
        got = self.allowance.grant(n, most or n)
        self.drawn += got
        return got

    def run(self, ticks, wants, batch=8, record=1):
        """Collectors that keep so many rows in their rings, and a learner that samples when it may."""
        for _ in range(ticks):
            for k, n in enumerate(wants):
                self.drain(k, record)
                self.put(k, max(0, n - self.rings[k]), record)
            self.sample(batch)
            self.tick()

    def difference(self):
        num, den, *_ = self.allowance.words
        return sum(self.rows) * num / den - self.drawn


def shares(rows, before=None):
    came = np.array(rows, float) - (0 if before is None else np.array(before))
    return came / came.sum()


def test_all_shards_together_keep_the_ratio():
    spi, low, high = 2.0, -16.0, 64.0
    shards = Shards(RateLimiter(spi, 4, (low, high)), 3)
    rng = np.random.default_rng(2)
    for _ in range(3000):
        what = rng.integers(0, 6)
        if what < 3:
            shards.put(what, int(rng.integers(1, 9)))
        elif what == 3:
            shards.sample(8, 32)
        else:
            shards.tick()
        assert low <= shards.difference() <= max(high, 4 * spi)
    assert sum(shards.rows) > 500 and shards.drawn > 1000, "and nobody stands still"


def test_it_keeps_the_ratio_though_actors_die_and_coordinators_go_back_to_older_books():
    """A message to a dead actor was carried out or not; a new coordinator has books of some ticks ago, but for what was sampled."""
    spi, low, high = 1.0, -16.0, 64.0
    shards, rng, old = Shards(RateLimiter(spi, 1, (low, high)), 3), np.random.default_rng(3), None
    for _ in range(6000):
        what = rng.integers(0, 40)
        k = int(rng.integers(0, 3))
        if what < 16:
            shards.put(k, int(rng.integers(1, 9)))
        elif what < 24:
            shards.sample(8)
        elif what == 24:
            if k in shards.pending and shards.pending[k][1] is not None and rng.random() < 0.5:
                shards.caps[k] = shards.pending[k][1]  # done, and nobody hears of it
            shards.down.add(k)
        elif what == 25:
            shards.down.clear()
        elif what == 26:
            old = pickle.dumps(shards.allowance)
        elif what == 27 and old is not None:
            sampled = shards.allowance.sampled
            shards.allowance, shards.pending, old = pickle.loads(old), {}, None
            shards.allowance.restarted()
            shards.allowance.sampled = sampled
        else:
            shards.tick()
        assert low <= shards.difference() <= high
    before = list(shards.rows)
    shards.down.clear()
    shards.run(50, [20, 20, 20])
    assert all(n > m for n, m in zip(shards.rows, before, strict=True)), "all go on"


def test_a_killed_shard_is_promised_nothing_and_gets_its_cap_when_it_is_back():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 64.0)), 2)
    shards.run(100, [50, 50])
    assert 1 in shards.pending
    shards.down.add(1)
    shards.run(5, [50, 50])
    held, before = shards.allowance._held(1), list(shards.rows)
    shards.run(500, [50, 50])
    assert shards.allowance._held(1) == held, "nothing was promised to it meanwhile"
    assert shards.rows[0] - before[0] > 500 * 8 - 100 and shards.difference() <= 64
    shards.down.clear()
    before = list(shards.rows)
    shards.run(500, [50, 50])
    assert shards.rows[1] - before[1] > 1500, "and it goes on"


@pytest.mark.parametrize("slow", [[0, 0], [0, 1], [3, 0], [1, 2]])
@pytest.mark.parametrize("record", [1, 4])
def test_two_shards_out_of_phase_get_the_same(slow, record):
    shards = Shards(RateLimiter(4.0, 200, max_batch=64), 2, batch=64, slow=slow)
    shards.run(20, [64, 0], 64, record)  # the first one is there first, and takes what there is
    assert shards.rows[0] > 150 > shards.rows[1]
    shards.run(3000, [64, 64], 64, record)
    assert abs(shares(shards.rows)[0] - 0.5) < 0.05, shards.rows
    assert shards.drawn > 0.2 * 3000 * 64, "whatever the answers take"


def test_of_many_shards_none_starves_when_a_batch_frees_one_row():
    shards = Shards(RateLimiter(8.0, 8, max_batch=64), 8, batch=8)
    shards.run(200, [20] * 8)
    before = list(shards.rows)
    shards.run(3000, [20] * 8)
    part = shares(shards.rows, before)
    assert sum(shards.rows) - sum(before) >= 2900 and np.abs(part - 1 / 8).max() < 0.0125, part


def test_who_wants_less_gets_what_it_wants_and_the_others_the_rest():
    shards = Shards(RateLimiter(1.0, 1, (-16.0, 128.0)), 3)
    for i in range(1500):
        if i % 4 == 0:
            shards.put(0, 1)
        for k in (1, 2):
            shards.put(k, max(0, 50 - shards.rings[k]))
        shards.drain(0)
        shards.sample(8)
        shards.tick()
    assert shards.rows[0] >= 370 and abs(shards.rows[1] - shards.rows[2]) < 50 and sum(shards.rows) > 8 * 1400


def test_who_wanted_nothing_for_long_is_not_owed_all_of_it():
    shards = Shards(RateLimiter(1.0, 1, (-16.0, 128.0)), 2)
    shards.run(20, [50, 50])
    shards.run(1000, [50, 0])
    before = list(shards.rows)
    shards.run(200, [50, 50])
    came = [n - m for n, m in zip(shards.rows, before, strict=True)]
    assert came[0] > 600 and came[1] <= came[0] + 2 * 144, "a window's worth, not a thousand ticks'"


def test_who_joins_begins_where_the_others_are():
    shards = Shards(RateLimiter(1.0, 1, (-16.0, 128.0)), 2)
    shards.run(1000, [50, 50])
    for known in (shards.rows, shards.caps, shards.rings, shards.slow):
        known.append(0)
    shards.allowance.add(2, cap=0)
    before = list(shards.rows)
    shards.run(300, [50, 50, 50])
    assert np.abs(shares(shards.rows, before) - 1 / 3).max() < 0.015


def test_a_shard_whose_rows_cannot_leave_its_ring_holds_up_nobody():
    shards = Shards(RateLimiter(1.0, 1, (-16.0, 128.0)), 2)
    shards.run(50, [50, 50])
    shards.pinned.add(1)
    before = list(shards.rows)
    shards.run(500, [50, 50])
    assert shards.rows[0] - before[0] > 8 * 400
    shards.pinned.clear()
    before = list(shards.rows)
    shards.run(500, [50, 50])
    assert shards.rows[1] - before[1] > 8 * 200


def test_what_idle_shards_may_insert_goes_to_those_that_want_to():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 90.0)), 3)
    for k in range(3):
        shards.put(k, 1)
    for _ in range(4):
        shards.tick()
    assert shards.caps == [30, 30, 30]
    for k in (0, 2):
        shards.drain(k)
    for _ in range(10):
        shards.put(1, 100)
        shards.tick()
    assert shards.rows == [1, 88, 1], "all of it, though two shards had a part of it"
    assert shards.sample(8) == 8
    for _ in range(4):
        shards.tick()
        shards.put(1, 100)
    assert shards.rows == [1, 96, 1]


def test_a_shard_that_is_lost_takes_no_allowance_with_it():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 60.0)), 2)
    for _ in range(4):
        shards.put(0, 10)
        shards.put(1, 1)
        shards.tick()
    taken = shards.rows[0]
    shards.tick()
    shards.allowance.lose(0)
    assert shards.allowance.rows - shards.rows[1] == taken > 0, "its rows were inserted"
    for _ in range(6):
        shards.put(1, 100)
        shards.tick()
    assert shards.rows[1] + taken == 60


def test_a_learner_that_dies_with_what_it_was_granted_stops_nobody():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 32.0)), 1)
    for _ in range(30):
        shards.put(0, 8)
        shards.tick()
        shards.allowance.grant(8, 8)  # and is killed
    assert shards.rows[0] > 100


def test_what_is_given_back_is_drawn_by_others_and_not_inserted_twice():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 32.0)), 1)
    shards.run(100, [50])
    shards.run(5, [50], batch=1 << 20)  # nobody samples
    full = shards.rows[0]
    got = shards.allowance.grant(8, 32)
    for _ in range(5):
        shards.tick()
        shards.put(0, 50)
    shards.allowance.refund(got)  # collectors were promised rows for them by now
    assert got == 32 and shards.rows[0] == full + 32
    figures = shards.allowance.figures()
    assert figures["sampled"] == shards.drawn and figures["diff"] == shards.difference() == 64
    for _ in range(5):
        shards.tick()
        shards.put(0, 50)
    assert shards.rows[0] == full + 32, "none more"
    assert shards.allowance.grant(8, 64) == 64 and shards.allowance.sampled == shards.drawn + 64


def test_another_ratio_counts_from_now_on():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 32.0)), 2)
    shards.run(200, [50, 50])
    rows = sum(shards.rows)
    a = shards.allowance
    with pytest.raises(ValueError, match="could never be sampled"):
        a.change(RateLimiter(2.0, 1, (0.0, 4.0)), 8)
    assert a.words[:2] == (1, 1) and a.figures()["max_diff"] == 32, "nothing changed"
    a.change(RateLimiter(4.0, 1, (-8.0, 64.0)), 8)
    assert a.figures()["diff"] == 0
    drawn = shards.drawn
    shards.run(300, [50, 50])
    came, drew = sum(shards.rows) - rows, shards.drawn - drawn
    assert -8 <= came * 4 - drew <= 64 + 4 * 32 and came > 500, "what was promised before came in, too"
    a.change(RateLimiter(4.0, 1, (-8.0, 640.0)), 8)  # the ratio stays, and so does the difference
    assert a.figures()["diff"] == pytest.approx(4 * came - drew, abs=4 * 32)
    a.change(MinSize(5), 8)
    assert not a.caps_inserts and a.messages([0, 1]) == {} and a.grant(8, 800) == 800


def test_a_limiter_for_shards_that_have_rows_already():
    """Until it is known what a shard holds nobody may insert; none of it counts."""
    a = Allowance.of(MinSize(1), 8)
    for k in range(2):
        a.add(k, seen=False)
    a.heard(0, Report(1000, True, None))
    a.change(Queue(50), 8, before=False)
    assert a.figures()["diff"] == 0 and a.messages([0]) == {0: 1000}
    a.heard(0, Report(1003, True, 1000))
    assert a.figures()["diff"] == 3 and a.messages([0]) == {}, "that of the other is not known"
    assert a.messages([0, 1]) == {1: 0}
    a.heard(1, Report(5000, False, 0))
    assert a.figures()["diff"] == 3 and a.messages([0, 1]) == {0: 1003 + 47}


def test_loaded_rows_are_none_that_samplers_have_to_keep_up_with():
    shards = Shards(RateLimiter(2.0, 1, (-16.0, 64.0)), 2)
    shards.run(100, [50, 50])
    saved = shards.allowance.state()
    shards.run(7, [50, 50])
    shards.rows[0] += 10_000
    shards.caps[0] += 10_000
    shards.tick()
    shards.tick()
    assert shards.sample(8) == 8
    shards.allowance.recount(saved)
    assert shards.allowance.figures()["diff"] == saved["diff"]
    before = list(shards.rows)
    shards.run(100, [50, 50])
    assert all(n > m + 100 for n, m in zip(shards.rows, before, strict=True))
    assert shards.allowance.figures()["diff"] <= 64
    shards.allowance.recount({**saved, "num": 5})
    assert shards.allowance.figures()["diff"] == 0, "of another ratio"
    shards.allowance.recount(None)
    assert shards.allowance.figures()["diff"] == 0


def test_limits_that_would_deadlock_are_refused_and_why_is_said():
    with pytest.raises(ValueError, match="could never be sampled"):
        Allowance.of(RateLimiter(1.0, 1, (0.0, 4.0)), 8)
    a = Allowance.of(RateLimiter(2.0, 10, (-4.0, 60.0)), 8)
    assert not a.could_ever(500) and a.could_ever(8)
    assert "sampling begins at 10" in a.why(8)
    a.add(0, cap=0)
    a.heard(0, Report(10, False, 10))
    assert a.grant(8, 32) == 24 and a.grant(8, 32) == 0 and "samplers wait for collectors" in a.why(8)
    a.refund(8)
    assert a.figures()["sampled"] == 16
    free = Allowance.of(MinSize(5), 8)
    free.add(0)
    assert not free.caps_inserts and not free.may_sample(8)
    free.heard(0, Report(5, False, None))
    assert free.grant(8, 64) == 64


def test_a_cap_holds_rows_in_the_rings():
    with TensorDictReplayBuffer(storage=ShmStorage(100, timeout=0.2), batch_size=4) as rb:
        assert set_cap(rb.buffer, 0) == (0, False, 0)
        ticket = rb.put(TensorDict({"k": torch.arange(5)}, [5]))
        assert not ticket.done() and len(rb) == 0 and report(rb.buffer) == (0, True, 0)
        assert set_cap(rb.buffer, 3).cap == 3
        assert ticket.wait(30).tolist() == [0, 1, 2, 3, 4], "a record may overshoot it"
        other = rb.put(TensorDict({"k": torch.arange(5)}, [5]))
        rb.storage.draw(4)
        for _ in range(100):  # is counted by the segment; the cap hardly moves
            rb.sample()
        assert not other.done() and report(rb.buffer) == (5, True, 3)
        assert set_cap(rb.buffer, 9).cap == 9
        other.wait(30)
        assert report(rb.buffer) == (10, False, 9)
        assert set_cap(rb.buffer, 10) == (10, False, 10)
        assert set_cap(rb.buffer, None).cap is None
        assert rb.extend(TensorDict({"k": torch.arange(50)}, [50]), timeout=30).numel() == 50
        assert set_cap(rb.buffer, 20) == (60, False, 20), "it may be below what there is"
