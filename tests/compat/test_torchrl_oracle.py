"""TorchRL as an oracle, where it is right: same rows and priorities → same weights, same new priorities, same legal slices."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf

torchrl_data = pytest.importorskip("torchrl.data")

N = 500
FORMULAS = [
    (0.6, 0.4, 1e-8),
    (0.3, 1.0, 1e-8),
    (1.0, 0.5, 1e-8),
    (0.6, 0.7, 1e-3),
    (0.5, 1.0, 0.1),
    (1.0, 0.0, 1e-8),
    (0.0, 0.5, 1e-8),
]


@pytest.fixture
def both():
    """Two replay buffers, theirs and ours, of the same arguments."""
    made = []

    def make(capacity: int = N, theirs=None, ours=None, batch_size: int = 1000, **sampler):
        made.append(
            shmbuf.TensorDictReplayBuffer(
                storage=shmbuf.ShmStorage(capacity, name=f"compat.{secrets.token_hex(6)}", drain="caller"),
                sampler=ours or shmbuf.PrioritizedSampler(capacity, **sampler),
                batch_size=batch_size,
            )
        )
        return (
            torchrl_data.TensorDictReplayBuffer(
                storage=torchrl_data.LazyTensorStorage(capacity),
                sampler=theirs or torchrl_data.PrioritizedSampler(capacity, **sampler),
                batch_size=batch_size,
                priority_key="td_error",
            ),
            made[-1],
        )

    yield make
    for rb in made:
        rb.destroy(force=True)


def rows(first: int, n: int, **more) -> TensorDict:
    return TensorDict({"k": torch.arange(first, first + n), **more}, [n])


def weights(rb, turns: int = 40) -> dict[int, float]:
    out: dict[int, float] = {}
    for _ in range(turns):
        td = rb.sample()
        out.update(zip(td["index"].tolist(), td["priority_weight"].tolist(), strict=True))
    return out


def leaves(theirs, capacity: int) -> np.ndarray:
    return np.array([float(theirs.sampler._sum_tree[i]) for i in range(capacity)])


def ours_as_leaves(ours) -> np.ndarray:
    """By index, as TorchRL keeps them."""
    lo, hi = ours.buffer.window
    out = np.zeros(ours.buffer.capacity)
    f = ours.buffer._get("priorities")
    out[np.arange(lo, hi) % len(out)] = (ours.buffer.priorities(range(lo, hi)) + f["eps"]) ** f["alpha"]
    return out


def same_leaves(theirs, ours) -> None:
    np.testing.assert_allclose(ours_as_leaves(ours), leaves(theirs, ours.buffer.capacity), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha, beta, eps", FORMULAS)
def test_same_priorities_same_weights(both, alpha, beta, eps, dtype):
    theirs, ours = both(alpha=alpha, beta=beta, eps=eps, dtype=dtype)
    p = torch.from_numpy(np.random.default_rng(1).permutation(np.logspace(-2, 2, N))).to(dtype)
    for rb in (theirs, ours):
        rb.extend(rows(0, N))
        rb.update_priority(torch.arange(N), p)
    a, b = weights(theirs), weights(ours)
    seen = sorted(a.keys() & b.keys())
    assert len(seen) > N / 4
    np.testing.assert_allclose([b[i] for i in seen], [a[i] for i in seen], rtol=1e-6)
    if alpha:
        same_leaves(theirs, ours)


@pytest.mark.parametrize("within", [False, True], ids=["historic", "within"])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
def test_update_tensordict_priority(both, reduction, within):
    """What a sample's rows get, of one or [B, T] priorities, and what new rows get afterwards. (Not over a wrap: rows that were
    overwritten keep theirs with us, by intent.)"""
    theirs, ours = both(alpha=0.6, beta=0.4, reduction=reduction, max_priority_within_buffer=within)
    rng = torch.Generator().manual_seed(3)
    for rb in (theirs, ours):
        rb.extend(rows(0, 100))
    for turn in range(10):
        index = torch.randperm(100, generator=rng)[:32]
        error = torch.rand((32, 5) if turn % 2 else (32,), generator=rng) * 10 ** (turn / 3)
        td = TensorDict({"index": index, "row_id": index, "td_error": error}, [32])
        theirs.update_tensordict_priority(td.exclude("row_id"))
        ours.update_tensordict_priority(td)
        np.testing.assert_allclose(ours_as_leaves(ours)[:100], leaves(theirs, 100), rtol=1e-5)
    for rb in (theirs, ours):
        rb.extend(rows(100, 10))
    np.testing.assert_allclose(ours_as_leaves(ours)[:110], leaves(theirs, 110), rtol=1e-5)


def test_of_an_index_named_twice_the_last_value_stays(both):
    theirs, ours = both(alpha=1.0, beta=1.0)
    for rb in (theirs, ours):
        rb.extend(rows(0, 10))
        rb.update_priority(torch.tensor([3, 3, 5, 3]), torch.tensor([1.0, 9.0, 2.0, 4.0]))
    np.testing.assert_allclose(ours_as_leaves(ours)[:10], leaves(theirs, 10), rtol=1e-5)


def test_priorities_that_come_with_rows(both):
    theirs, ours = both(alpha=0.6, beta=0.4)
    for rb in (theirs, ours):
        rb.extend(rows(0, 10, td_error=torch.arange(10.0) + 0.5))
        rb.extend(rows(10, 5, td_error=torch.full((5,), 99.0)), update_priority=False)
    np.testing.assert_allclose(ours_as_leaves(ours)[:15], leaves(theirs, 15), rtol=1e-5)


def test_around_the_wrap(both):
    """Overwritten rows lose their priorities, new ones get the maximum."""
    theirs, ours = both(capacity=16, alpha=0.6, beta=0.4)
    for turn in range(6):
        for rb in (theirs, ours):
            rb.extend(rows(turn * 7, 7))
            n = len(rb)
            rb.update_priority(torch.arange(0, n, 3), torch.arange(0, n, 3) + 1.0)
        same_leaves(theirs, ours)
    assert sorted(ours[:]["k"].tolist()) == sorted(theirs[:]["k"].tolist())


# ---- slices -------------------------------------------------------------------------------------------------------

LENGTHS = (1, 4, 9, 2, 6, 13, 5)


def episodes(first: int) -> TensorDict:
    """One batch of whole episodes."""
    n = sum(LENGTHS)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    episode = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) + first
    k = torch.arange(n) + first * n
    return TensorDict({"k": k, "episode": episode, "next": {"done": done}}, [n])


def starts(rb, length: int, turns: int = 60) -> set[tuple[int, ...]]:
    """All slices that come, each as the numbers of its rows."""
    out: set[tuple[int, ...]] = set()
    for _ in range(turns):
        td = rb.sample()
        end = td["next", "truncated"].reshape(-1)
        slices = np.split(td["k"].numpy(), np.flatnonzero(end.numpy())[:-1] + 1)
        out |= {tuple(s.tolist()) for s in slices}
    return out


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("key", [{"traj_key": "episode"}, {"end_key": ("next", "done")}], ids=["traj_key", "end_key"])
@pytest.mark.parametrize("wraps", [False, True])
def test_same_legal_slices(both, strict, key, wraps):
    if not hasattr(shmbuf, "SliceSampler"):
        pytest.skip("no SliceSampler yet")
    length = 4
    arguments = {"slice_len": length, "strict_length": strict, **key}
    capacity = sum(LENGTHS) + 7 if wraps else 3 * sum(LENGTHS)
    theirs, ours = both(
        capacity,
        theirs=torchrl_data.SliceSampler(**arguments),
        ours=shmbuf.SliceSampler(**arguments),
        batch_size=length * 50,
    )
    for first in range(2):
        for rb in (theirs, ours):
            rb.extend(episodes(first * 100))
    a, b = starts(theirs, length), starts(ours, length)
    assert {len(s) for s in a} == ({4} if strict else {1, 2, 4})
    assert b == a
