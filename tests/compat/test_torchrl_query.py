"""TorchRL as an oracle of queries, where it is right: same rows, same predicates → same trajectories. And where it is wrong."""

from __future__ import annotations

import secrets
import warnings

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import traj

torchrl_data = pytest.importorskip("torchrl.data")
theirs = torchrl_data.traj if hasattr(torchrl_data, "traj") else pytest.skip("no queries", allow_module_level=True)

LENGTHS = (5, 1, 9, 3, 12, 4)


def rows(first: int = 0, ids: bool = True) -> TensorDict:
    rng = torch.Generator().manual_seed(first)
    n = sum(LENGTHS)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    td = TensorDict(
        {
            "k": torch.arange(first, first + n),
            "obs": torch.randn(n, 3, generator=rng),
            "next": {"reward": torch.randn(n, 1, generator=rng), "done": done},
        },
        [n],
    )
    if ids:
        td["collector", "traj_ids"] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) + first
    return td


PREDICATES = [
    lambda t: t.length >= 5,
    lambda t: t.length != 9,
    lambda t: t.reward.sum() > 0.5,
    lambda t: t.reward.mean() <= 0.1,
    lambda t: t.obs.max() > 2,
    lambda t: t.obs.min() < -1.5,
    lambda t: t.total_reward < 1,
    lambda t: t.reward.first() > 0,
    lambda t: t.reward.last() < 0,
    lambda t: (t.reward > 1).any(),
    lambda t: (t.reward > -1).all(),
    lambda t: (t["next", "reward"] >= 1.5).any() & ~(t.length < 5),
    lambda t: (t.obs.sum() > 0) | (t.reward.sum() > 1) & (t.length < 10),
    lambda t: (t["collector", "traj_ids"] == 3).all(),
    lambda t: t.k.first() == 6,
    lambda t: t.reward.sum() > torch.tensor(0.5),
]


@pytest.fixture
def both():
    made = []

    def make(capacity: int):
        name = f"compat.{secrets.token_hex(6)}"
        made.append(
            shmbuf.TensorDictReplayBuffer(
                storage=shmbuf.ShmStorage(capacity, name=name, drain="caller", trajectories=True)
            )
        )
        return torchrl_data.TensorDictReplayBuffer(
            storage=torchrl_data.LazyTensorStorage(capacity), batch_size=4
        ), made[-1]

    yield make
    for rb in made:
        rb.destroy(force=True)


def ours(rb, predicate=None, **kw):
    from shmbuf.query import query_buffer

    return query_buffer(rb.storage, predicate, **kw)


def shown(found) -> list[list[int]]:
    return [t.k.tolist() for t in found]


@pytest.mark.parametrize("n", range(len(PREDICATES)))
def test_same_trajectories_of_a_tensordict(n):
    td, p = rows(), PREDICATES[n]
    assert shown(shmbuf.filter_trajectories(td, p(traj))) == shown(torchrl_data.filter_trajectories(td, p(theirs)))
    assert p(traj).required_keys() == p(theirs).required_keys()


@pytest.mark.parametrize("capacity, ids", [(100, True), (50, True), (47, True), (50, False), (34, True)])
def test_same_trajectories_of_a_buffer(both, capacity, ids):
    their, our = both(capacity)
    for first in (0, 100):
        for rb in (their, our):
            rb.extend(rows(first, ids))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert shown(ours(our)) == shown(their.query())
        matched = 0
        for p in PREDICATES:
            if ids or "collector" not in str(p(traj)):
                found = shown(ours(our, p(traj)))
                assert found == shown(their.query(p(theirs))), p(traj)
                matched += len(found)
        assert matched > 20
        a, b = ours(our, traj.length >= 5), their.query(theirs.length >= 5)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.obs, y.obs) and torch.equal(x.reward, y.reward) and x.batch_size == y.batch_size


@pytest.mark.parametrize("at_capacity", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (40,), (13, 3), (6, 2, 3)])
def test_same_boundaries(shape, at_capacity):
    rng = torch.Generator().manual_seed(len(shape))
    for turn in range(40):
        end = torch.rand(shape, generator=rng) < (0.0, 0.2, 0.6, 1.0)[turn % 4]
        ids = torch.randint(3, shape, generator=rng)
        for signal in ({"end": end}, {"trajectory": ids}):
            for cursor in (None, int(torch.randint(shape[0], (), generator=rng))):
                a = shmbuf.find_start_stop_traj(**signal, at_capacity=at_capacity, cursor=cursor)
                b = torchrl_data.find_start_stop_traj(**signal, at_capacity=at_capacity, cursor=cursor)
                for x, y in zip(a, b, strict=True):
                    assert torch.equal(x, y), (signal, cursor, a, b)


def test_where_torchrl_is_wrong():
    """These give an answer there, and not the right one; the right one here, or an error."""
    td = rows()
    two = [(float(t.reward.max()), float(t.obs.sum())) for t in shmbuf.iter_trajectories(td)]
    right = [i for i, (a, b) in enumerate(two) if a > b]
    assert [
        int(t["collector", "traj_ids"][0]) for t in shmbuf.filter_trajectories(td, traj.reward.max() > traj.obs.sum())
    ] == right
    wrong = torchrl_data.filter_trajectories(td, theirs.reward.max() > theirs.obs.sum())
    assert len(wrong) == len(LENGTHS) != len(right)
    for p in (lambda t: 10 < t.length < 8, lambda t: (t.length > 99) and (t.length < 8)):
        assert len(torchrl_data.filter_trajectories(td, p(theirs))) == 4  # the second half of it alone
        with pytest.raises(TypeError):
            p(traj)


def test_interleaved_actors():
    """Every row is a trajectory there."""
    td = TensorDict({"episode": torch.arange(10) % 2, "k": torch.arange(10)}, [10])
    name = f"compat.{secrets.token_hex(6)}"
    with shmbuf.TensorDictReplayBuffer(storage=shmbuf.ShmStorage(10, name=name, drain="caller")) as our:
        their = torchrl_data.TensorDictReplayBuffer(storage=torchrl_data.LazyTensorStorage(10), batch_size=4)
        for rb in (their, our):
            rb.extend(td)
        assert [t.length for t in their.query()] == [1] * 10
        assert shown(ours(our)) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    shmbuf.destroy(name)
