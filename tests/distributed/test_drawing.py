"""Shares and weights of many shards, as numbers: no Ray."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import NotEnoughRows, TensorDictReplayBuffer
from shmbuf.distributed.drawing import Drawer, Mass, check_sampler, counts_of, weights_of
from shmbuf.distributed.packing import Packed, pack, unpack
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
