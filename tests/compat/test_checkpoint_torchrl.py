"""Checkpoints of TorchRL's load here, and ours load there: same rows, priorities, cursor."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf.checkpoint import dumps, loads

torchrl_data = pytest.importorskip("torchrl.data")

N = 50


def rows(first: int, n: int) -> TensorDict:
    k = torch.arange(first, first + n)
    return TensorDict(
        {
            "obs": k[:, None] * 2.0 + torch.arange(3),
            "half": k.to(torch.bfloat16),
            "next": TensorDict({"reward": k[:, None].float(), "done": (k % 7 == 6)[:, None]}, [n]),
            "k": k,
        },
        [n],
    )


@pytest.fixture
def ours():
    made = []

    def make(capacity: int = N, sampler=None, **kw) -> shmbuf.TensorDictReplayBuffer:
        storage = shmbuf.ShmStorage(capacity, name=f"compat.{secrets.token_hex(6)}", drain="caller")
        made.append(shmbuf.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8, **kw))
        return made[-1]

    yield make
    for rb in made:
        rb.destroy(force=True)


def theirs(storage, sampler=None):
    return torchrl_data.TensorDictReplayBuffer(
        storage=storage(N), sampler=sampler, batch_size=8, priority_key="td_error"
    )


STORAGES = [torchrl_data.LazyTensorStorage, torchrl_data.LazyMemmapStorage]
SAMPLERS = {
    "random": (lambda: torchrl_data.RandomSampler(), lambda: shmbuf.RandomSampler()),
    "prioritized": (
        lambda: torchrl_data.PrioritizedSampler(N, 0.6, 0.4),
        lambda: shmbuf.PrioritizedSampler(N, 0.6, 0.4),
    ),
    "without": (lambda: torchrl_data.SamplerWithoutReplacement(), lambda: shmbuf.SamplerWithoutReplacement()),
}


def equal(a, b) -> bool:
    keys = ["obs", "half", ("next", "reward"), ("next", "done"), "k"]
    return all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in keys)


@pytest.mark.parametrize("storage", STORAGES, ids=["tensor", "memmap"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("n", [20, N, 77])
def test_theirs_loads_here(ours, tmp_path, storage, sampler, n):
    a = theirs(storage, SAMPLERS[sampler][0]())
    a.set_rng(torch.Generator().manual_seed(5))
    for first in range(0, n, 7):
        a.extend(rows(first, min(7, n - first)))
    if sampler == "prioritized":
        a.update_priority(torch.arange(min(n, N)), torch.linspace(0.1, 9, min(n, N)))
    a.dumps(tmp_path / "c")
    b = ours(sampler=SAMPLERS[sampler][1]())
    with pytest.warns(UserWarning, match=r"prefetch\.pkl"):
        done = loads(b, tmp_path / "c")
    assert len(b) == len(a) == done.rows
    in_order = b.buffer.gather(np.arange(*b.buffer.window))
    assert in_order["k"].tolist() == list(range(max(0, n - N), n))
    assert equal(b[:], a[:]), "every row in its slot"
    if sampler == "prioritized":
        state = b.buffer.stats()["priorities"]
        leaves = (b.buffer.priorities(np.arange(*b.buffer.window)) + state["eps"]) ** state["alpha"]
        slots = (np.arange(max(0, n - N), n)) % N
        assert leaves == pytest.approx(np.asarray(a.sampler._sum_tree._values)[slots], rel=1e-6)
        assert state["new_row"] == pytest.approx(9)
    assert torch.equal(b._rng.get_state(), a._rng.get_state())
    assert b.extend(rows(n, 1)).tolist() == a.extend(rows(n, 1)).tolist() == [n % N]


@pytest.mark.parametrize("storage", STORAGES, ids=["tensor", "memmap"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("n", [20, N, 77])
def test_ours_loads_there(ours, tmp_path, storage, sampler, n):
    a = ours(sampler=SAMPLERS[sampler][1]())
    a.set_rng(torch.Generator().manual_seed(5))
    for first in range(0, n, 7):
        a.extend(rows(first, min(7, n - first)))
    if sampler == "prioritized":
        a.update_priority(torch.arange(min(n, N)), torch.linspace(0.1, 9, min(n, N)))
    dumps(a, tmp_path / "c")
    b = theirs(storage, SAMPLERS[sampler][0]())
    b.set_rng(torch.Generator())
    if sampler == "without":
        with pytest.raises(FileNotFoundError):  # its place in the epoch: TorchRL wants one to load
            b.sampler.loads(tmp_path / "c/sampler")
        (tmp_path / "c/sampler").mkdir(exist_ok=True)
        b._sampler = torchrl_data.RandomSampler()
    b.loads(tmp_path / "c")
    assert len(b) == len(a) and equal(b[:], a[:])
    assert b.writer._cursor == n % N and b.write_count == n
    assert torch.equal(b._rng.get_state(), a._rng.get_state())
    if sampler == "prioritized":
        state = a.buffer.stats()["priorities"]
        ids = np.arange(*a.buffer.window)
        leaves = (a.buffer.priorities(ids) + state["eps"]) ** state["alpha"]
        assert np.asarray(b.sampler._sum_tree._values)[ids % N] == pytest.approx(leaves, rel=1e-6)
        assert b.sampler.default_priority == pytest.approx(state["new_row"])
        b.sample()
    b.extend(rows(1000, 3))
    assert b[:]["k"][n % N].item() == 1000
