"""Shares, weights and allowances of many shards, as numbers: no Ray."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import NotEnoughRows, RateLimiter, TensorDictReplayBuffer
from shmbuf.distributed.drawing import Drawer, Mass, check_sampler, counts_of, weights_of
from shmbuf.distributed.limiting import Allowance
from shmbuf.distributed.packing import Packed, pack, unpack
from shmbuf.distributed.shard import report, set_cap
from shmbuf.limiter import MinSize
from shmbuf.samplers import ConsumingSampler, NewestSampler, PrioritizedSampler, RandomSampler, SliceSampler
from shmbuf.storage import ShmStorage
from tests.unit.helpers_priorities import chi2_p


def prioritized(n, priorities, alpha=0.7):
    rb = TensorDictReplayBuffer(storage=ShmStorage(n), sampler=PrioritizedSampler(n, alpha, 0.5))
    rb.extend(TensorDict({"k": torch.arange(n), "td_error": torch.as_tensor(priorities)}, [n]))
    return rb


def test_weights_are_those_of_one_buffer_that_holds_all_rows():
    rng = np.random.default_rng(0)
    values = [10 ** rng.uniform(-4, 3, n) for n in (5, 40, 300)]
    whole = prioritized(345, np.concatenate(values))
    shards = [prioritized(len(v), v) for v in values]
    first = np.cumsum([0, 5, 40])
    for beta in (0.4, 1.0):
        batch = whole.sample(4000, beta=beta)
        expected = dict(zip(batch["k"].tolist(), batch["priority_weight"].tolist(), strict=True))
        parts = [(k, Drawer(rb).draw(500)) for k, rb in enumerate(shards)]
        masses = {k: p.mass for k, p in parts}
        compared = 0
        for (k, part), weights in zip(parts, weights_of(parts, masses, beta, False), strict=True):
            for row, weight in zip(part.td["k"].tolist(), weights.tolist(), strict=True):
                if row + first[k] in expected:
                    compared += 1
                    assert weight == pytest.approx(expected[row + first[k]], rel=1e-6)
        assert compared > 500
    for rb in (whole, *shards):
        rb.close()


def test_the_least_likely_row_of_all_shards_has_weight_one_though_its_shard_drew_nothing():
    parts = [(0, Drawer(prioritized(2, [4.0, 4.0], 1.0)).draw(3))]
    masses = {0: parts[0][1].mass, 1: Mass(1, 1.0, 1.0)}
    (weights,) = weights_of(parts, masses, 1.0, False)
    assert weights.tolist() == pytest.approx([0.25] * 3)
    (weights,) = weights_of(parts, masses, 1.0, True)
    assert weights.tolist() == pytest.approx([1.0] * 3), "of the batch"


def test_a_shard_that_changed_meanwhile_is_corrected_for():
    """Its share was taken for 8, it drew when its sum was 4."""
    drawer = Drawer(prioritized(4, [1.0] * 4, 1.0))
    part = drawer.draw(2)
    masses = {0: Mass(4, 8.0, 1.0), 1: Mass(4, 8.0, 2.0)}
    (weights,) = weights_of([(0, part)], masses, 1.0, False)
    # q of its rows: 8/16 / 4 = 1/8; of the other shard's: 8/16 * 2/8 = 1/8
    assert weights.tolist() == pytest.approx([1.0, 1.0])


def test_counts_go_by_mass():
    rng = np.random.default_rng(1)
    masses = np.array([1.0, 0.0, 3.0, 6.0])
    total = sum(counts_of(10, masses, rng) for _ in range(2000))
    assert total[1] == 0 and total.sum() == 20_000
    assert chi2_p(total[[0, 2, 3]], np.array([0.1, 0.3, 0.6]) * 20_000) > 1e-6
    exact = counts_of(10, masses, rng, stratified=True)
    assert exact.tolist() == [1, 0, 3, 6]
    with pytest.raises(NotEnoughRows):
        counts_of(3, np.zeros(2), rng)
    with pytest.raises(NotEnoughRows):
        counts_of(3, np.zeros(0), rng)


def test_samplers_that_shards_cannot_draw_by_are_refused():
    for sampler in (RandomSampler(), PrioritizedSampler(), SliceSampler(slice_len=2)):
        assert check_sampler(sampler) is sampler
    for sampler in (ConsumingSampler(), NewestSampler()):
        with pytest.raises(TypeError, match=f"{type(sampler).__name__}: shards draw"):
            check_sampler(sampler)


def test_what_is_packed_comes_back():
    td = TensorDict(
        {
            "u": torch.arange(6, dtype=torch.uint8).reshape(3, 2),
            "b": torch.tensor([True, False, True]),
            "nested": {"h": torch.rand(3, 4).bfloat16(), "d": torch.rand(3, dtype=torch.float64)},
            "none": torch.zeros(3, 0),
            "strided": torch.rand(5, 3).T,
        },
        [3],
    )
    packed = pack(td)
    assert isinstance(packed, Packed) and packed.data.dtype == np.uint8
    packed.data.flags.writeable = False  # as Ray gives it
    for copy in (True, False):
        back = unpack(packed, copy)
        assert back.batch_size == td.batch_size and sorted(map(str, back.keys(True, True))) == sorted(
            map(str, td.keys(True, True))
        )
        for key in td.keys(True, True):
            assert back[key].dtype == td[key].dtype and torch.equal(back[key], td[key]), key
    inside = unpack(pack((1, [td], {"x": td, "y": "z"})))
    assert inside[0] == 1 and torch.equal(inside[1][0]["u"], td["u"]) and inside[2]["y"] == "z"
    words = TensorDict({"text": ["a", "b"]}, [2])
    assert pack(words)["text"] == words["text"], "what is no tensor travels as it is"


# ---- the limiter -----------------------------------------------------------------------------------------------------


class Shards:
    """Shards that insert what their caps allow, at any moment between two ticks."""

    def __init__(self, limiter, n, batch=8):
        self.allowance = Allowance.of(limiter, batch)
        self.rows, self.caps, self.wants, self.drawn = [0] * n, [0] * n, [0] * n, 0
        for k in range(n):
            self.allowance.add(k)

    def insert(self, k, n):
        took = max(0, min(n, self.caps[k] - self.rows[k]))
        self.rows[k] += took
        self.wants[k] = n - took
        return took

    def tick(self):
        a = self.allowance
        plan = a.plan()
        for k, cap in plan.items():
            a.caps[k] = max(a.caps[k], cap)
        for k in list(a.caps):
            if k in plan:
                self.caps[k] = plan[k]
                a.caps[k] = plan[k]
            a.report(k, self.rows[k], self.wants[k] > 0 and self.rows[k] >= self.caps[k])

    def sample(self, n, most=None):
        got = self.allowance.grant(n, most or n)
        self.drawn += got
        return got


def test_all_shards_together_keep_the_ratio():
    spi, low, high = 2.0, -16.0, 64.0
    shards = Shards(RateLimiter(spi, 4, (low, high)), 3)
    rng = np.random.default_rng(2)
    for _ in range(3000):
        what = rng.integers(0, 6)
        if what < 3:
            shards.insert(what, int(rng.integers(1, 9)))
        elif what == 3:
            shards.sample(8, 32)
        else:
            shards.tick()
        diff = sum(shards.rows) * spi - shards.drawn
        assert low <= diff <= max(high, 4 * spi)
    assert sum(shards.rows) > 500 and shards.drawn > 1000, "and nobody stands still"


def test_what_idle_shards_may_insert_goes_to_those_that_want_to():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 90.0)), 3)
    shards.tick()
    assert shards.caps == [30, 30, 30]
    inserted = 0
    for _ in range(10):
        inserted += shards.insert(1, 100)
        shards.tick()
    assert inserted == shards.rows[1] == 90, "all of it, though two shards had a part of it"
    assert shards.insert(0, 1) == 0
    shards.wants[0] = 0
    assert shards.sample(8) == 8
    for _ in range(4):
        shards.tick()
        inserted += shards.insert(1, 100)
    assert inserted == 98


def test_a_shard_that_is_lost_takes_no_allowance_with_it():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 60.0)), 2)
    shards.tick()
    shards.insert(0, 20)
    shards.tick()
    shards.allowance.lose(0)
    assert shards.allowance.rows == 20, "its rows were inserted"
    for _ in range(4):
        shards.insert(1, 100)
        shards.tick()
    assert shards.rows[1] == 40


def test_a_learner_that_dies_with_what_it_was_granted_stops_nobody():
    shards = Shards(RateLimiter(1.0, 1, (-8.0, 32.0)), 1)
    for _ in range(20):
        shards.insert(0, 8)
        shards.tick()
        shards.allowance.grant(8, 8)  # and is killed
    assert shards.rows[0] > 100


def test_limits_that_would_deadlock_are_refused_and_why_is_said():
    with pytest.raises(ValueError, match="could never be sampled"):
        Allowance.of(RateLimiter(1.0, 1, (0.0, 4.0)), 8)
    a = Allowance.of(RateLimiter(2.0, 10, (-4.0, 60.0)), 8)
    assert not a.could_ever(500) and a.could_ever(8)
    assert "sampling begins at 10" in a.why(8)
    a.add(0)
    a.report(0, 10, False)
    assert a.grant(8, 32) == 24 and a.grant(8, 32) == 0 and "samplers wait for collectors" in a.why(8)
    a.refund(8)
    assert a.figures()["sampled"] == 16
    free = Allowance.of(MinSize(5), 8)
    free.add(0)
    assert not free.caps_inserts and not free.may_sample(8)
    free.report(0, 5, False)
    assert free.grant(8, 64) == 64


def test_a_cap_holds_rows_in_the_rings():
    with TensorDictReplayBuffer(storage=ShmStorage(100, timeout=0.2), batch_size=4) as rb:
        set_cap(rb.buffer, 0)
        ticket = rb.put(TensorDict({"k": torch.arange(5)}, [5]))
        assert not ticket.done() and len(rb) == 0
        assert set_cap(rb.buffer, 3).rows in (0, 5)
        assert ticket.wait(30).tolist() == [0, 1, 2, 3, 4], "a record may overshoot it"
        other = rb.put(TensorDict({"k": torch.arange(5)}, [5]))
        rb.storage.draw(4)  # not counted
        assert not other.done() and report(rb.buffer) == (5, True)
        set_cap(rb.buffer, 9)
        other.wait(30)
        assert report(rb.buffer) == (10, False)
        set_cap(rb.buffer, None)
        assert rb.extend(TensorDict({"k": torch.arange(50)}, [50]), timeout=30).numel() == 50
