# ruff: noqa: F811
"""Slices whose starts are drawn by priority. Draws are seeded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    NotEnoughRows,
    PrioritizedSliceSampler,
)
from tests.unit.helpers_slices import episodes, make  # noqa: F401

# ---- by priority ------------------------------------------------------------------------------------------------------------


def test_starts_by_priority_among_the_legal_ones(make):
    rb = make(PrioritizedSliceSampler(alpha=1.0, beta=1.0, slice_len=3), episodes(5, 2, 4))
    p = torch.tensor([1.0, 2, 3, 50, 50, 50, 50, 4, 5, 50, 50])
    rb.update_priority(torch.arange(11), p)
    td, info = rb.sample(60_000, return_info=True)
    assert set(info) >= {"priority_weight", ("next", "truncated"), "row_id"}
    t = td["t"].reshape(20_000, 3)
    assert (t.diff(dim=1) == 1).all()
    counts = Counter(t[:, 0].tolist())
    assert sorted(counts) == [0, 1, 2, 7, 8]
    for start, c in counts.items():  # 5 σ
        share = float(p[start]) / 15
        assert abs(c - 20_000 * share) < 5 * (20_000 * share * (1 - share)) ** 0.5
    w = td["priority_weight"].reshape(20_000, 3)
    assert torch.allclose(w, (1 / p[t[:, 0]])[:, None].expand(-1, 3), rtol=1e-5)  # P_min is 1
    assert rb.sample(30, beta=0.0)["priority_weight"].tolist() == [1.0] * 30
    rb.sampler.beta = 0.5
    td = rb.sample(30)
    assert torch.allclose(td["priority_weight"][::3], p[td["t"][::3]] ** -0.5, rtol=1e-5)


def test_rare_starts_are_found_exactly(make):
    rb = make(PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3), episodes(3, 3, *[1] * 100))
    p = torch.full((106,), 1e9)
    p[0], p[3] = 1e-3, 3e-3
    rb.update_priority(torch.arange(106), p)
    td = rb.sample(3 * 4000)
    counts = Counter(td["t"].reshape(-1, 3)[:, 0].tolist())
    assert sorted(counts) == [0, 3] and abs(counts[3] - 3000) < 140
    p[0] = p[3] = 0
    rb.update_priority(torch.arange(106), p)
    with pytest.raises(RuntimeError, match="priorities of all 2 rows where one may begin are 0"):
        rb.sample(3)
    with pytest.raises(NotEnoughRows, match="longest has 3 rows, slices of 4"):
        rb.set_sampler(PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=4))
        rb.sample(4)


def calls(monkeypatch, buffer) -> Counter:
    """How often which native method was called."""
    real, counted = buffer._call, Counter()
    monkeypatch.setattr(buffer, "_call", lambda method, *args: (counted.update([method]), real(method, *args))[1])
    return counted


def test_where_few_rows_may_begin_a_slice_they_are_found_without_looking_at_all(make, monkeypatch):
    rb = make(PrioritizedSliceSampler(slice_len=50), *[episodes(*[60] * 10)] * 10, capacity=6000)
    rb.update_priority(torch.arange(6000), torch.rand(6000))
    counted = calls(monkeypatch, rb.buffer)
    for _ in range(20):
        t = rb.sample(64 * 50)["t"].reshape(64, 50)
        assert (t.diff(dim=1) == 1).all()
    assert not counted["trajectories"] and counted["choose_by_priority"] <= 20 * 5


@pytest.mark.parametrize(
    "how", [{}, {"strict_length": False}, {"span": (0, 1)}, {"strict_length": False, "span": (0, 2)}]
)
@pytest.mark.parametrize("together", [True, False])
def test_the_list_of_all_starts_is_what_looking_at_each_row_says(make, how, together):
    lengths = [7, 2, 3, 9, 1, 4, 5] * 3
    rb = make(PrioritizedSliceSampler(alpha=1.0, slice_len=4, **how), capacity=75)
    if together:
        rb.extend(episodes(*lengths))
    else:  # streams in turn, a row each
        longest = max(lengths)
        for t in range(longest):
            at = torch.tensor([i for i, n in enumerate(lengths) if t < n])
            done = (t + 1 == torch.tensor(lengths)[at]).reshape(-1, 1)
            data = TensorDict({"t": at * 0 + t, "next": {"done": done, "terminated": done}}, [len(at)])
            rb.extend(data, stream=at.numpy())
    lo, hi = rb.buffer.window
    assert lo > 0, "some have lost their heads"
    ids, right = np.arange(lo, hi), rb.sampler._beyond(4)[1]
    found = rb.buffer.walk_forward(ids, 4)[1]
    legal = rb.sampler._legal(rb.buffer, ids, found, 4, right)
    p = np.random.default_rng(1).random(hi - lo)
    rb.buffer.set_priorities(ids, p)
    starts, leaves = rb.sampler._all_starts(rb.buffer, 4, right)
    order = np.argsort(starts)
    assert starts[order].tolist() == ids[legal].tolist() and np.allclose(leaves[order], p[legal], atol=1e-6)


def test_by_priority_not_strict_and_spanning(make):
    def starts(**how) -> set[tuple[int, int]]:
        rb = make(PrioritizedSliceSampler(slice_len=3, **how), episodes(5, 2))
        td = rb.sample(3000)
        ends = td["next", "truncated"].reshape(-1).nonzero().reshape(-1)
        lens = ends.diff(prepend=torch.tensor([-1]))
        assert td["priority_weight"].shape == td["t"].shape
        return set(zip(td["t"][ends - lens + 1].tolist(), lens.tolist(), strict=True))

    assert starts() == {(0, 3), (1, 3), (2, 3)}
    assert starts(strict_length=False) == {(0, 3), (1, 3), (2, 3), (5, 2)}
    assert starts(span=(0, 1)) == {(0, 3), (1, 3), (2, 3), (3, 2)}
    assert starts(span=(False, True)) == {(0, 3), (1, 3), (2, 3), (3, 2), (4, 1)}
    with pytest.warns(UserWarning, match="Left spanning is disabled"):
        PrioritizedSliceSampler(slice_len=3, span=True)
    with pytest.raises(TypeError, match="starts are drawn by priority"):
        PrioritizedSliceSampler(slice_len=3, by="start")


def test_prioritized_slices_travel(make):
    rb = make(PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=3, normalize="batch"), episodes(5, 2))
    other = shmbuf.attach(rb.name)
    assert other.sampler.arguments() == rb.sampler.arguments()
    td = other.sample(30)
    assert td["priority_weight"].max() == 1
    td["td_error"] = torch.rand(30)
    other.update_tensordict_priority(td)
    other.close()
    with pytest.raises(ValueError, match="max_capacity=100"):
        make(PrioritizedSliceSampler(100, slice_len=3))


def test_where_all_priorities_are_0_it_is_said_at_once(make, monkeypatch):
    rb = make(PrioritizedSliceSampler(alpha=1.0, eps=0.0, slice_len=2), episodes(4, 4), batch_size=4)
    rb.buffer.set_priorities(range(8), 0.0)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits"))
    with pytest.raises(RuntimeError, match="all 8 priorities are 0"):
        rb.sample(timeout=None)
    rb.empty()
    with pytest.raises(NotEnoughRows):
        rb.sample()
