"""Several replay buffers sampled as one."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    NotEnoughRows,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
)


@pytest.fixture
def make(make_name):
    made = []

    def make(who: int, n: int = 10, sampler=None, **extra):
        storage = shmbuf.ShmStorage(100, name=make_name(), drain="caller")
        rb = shmbuf.TensorDictReplayBuffer(storage=storage, sampler=sampler)
        made.append(rb)
        if n:
            rb.extend(TensorDict({"k": torch.arange(n) + 1000 * who, **extra}, [n]))
        return rb

    yield make
    for rb in made:
        rb.close()


def test_shape_keys_and_info(make):
    e = ReplayBufferEnsemble(make(0), make(1), make(2), batch_size=12)
    batch, info = e.sample(return_info=True)
    assert batch.shape == (3, 4) and len(e) == 30
    assert (batch["k"] // 1000 == batch["buffer_ids"]).all() and (batch["k"] % 1000 == batch["index"]).all()
    assert info["index"].batch_size == (3,) and info["index"]["index"].shape == (3, 4)
    assert info["index"]["buffer_ids"].tolist() == batch["buffer_ids"][:, 0].tolist()
    assert (info["row_id"] == batch["row_id"]).all()
    assert e.sample(6).shape == (3, 2) and next(iter(e)).shape == (3, 4)


def test_from_all(make):
    e = ReplayBufferEnsemble(make(0), make(1), sample_from_all=True)
    for _ in range(5):
        assert e.sample(8)["buffer_ids"].tolist() == [[0] * 4, [1] * 4]


def test_by_weight_and_by_size(make):
    e = ReplayBufferEnsemble(make(0), make(1), p=[1.0, 3.0], num_buffer_sampled=4000)
    share = e.sample(4000)["buffer_ids"].double().mean()
    assert abs(share - 0.75) < 0.04
    e = ReplayBufferEnsemble(make(0, 5), make(1, 15), make(2, 0), p="sampleable", num_buffer_sampled=4000)
    ids = e.sample(4000)["buffer_ids"]
    assert abs(ids.double().mean() - 0.75) < 0.04 and (ids < 2).all()
    e = ReplayBufferEnsemble(make(0), make(1), p=torch.tensor([0.0, 2.0]), num_buffer_sampled=1)
    assert e.sample(5)["buffer_ids"].tolist() == [[1] * 5]


def test_a_set_rng_repeats_members_and_rows(make):
    e = ReplayBufferEnsemble(
        make(0, sampler=PrioritizedSampler()), make(1, sampler=SamplerWithoutReplacement()), make(2)
    )
    drawn = []
    for _ in range(2):
        g = torch.Generator().manual_seed(3)
        e[1].set_sampler(SamplerWithoutReplacement())  # an epoch begins
        e.set_rng(g)
        drawn.append(torch.stack([e.sample(6)["k"] for _ in range(8)]))
    assert (drawn[0] == drawn[1]).all() and len(drawn[0].unique()) > 10


def test_members_keep_their_samplers_and_priorities(make):
    e = ReplayBufferEnsemble(
        make(0, sampler=PrioritizedSampler(alpha=1.0)),
        make(1, sampler=PrioritizedSampler(alpha=1.0)),
        sample_from_all=True,
    )
    batch = e.sample(20)
    assert batch["priority_weight"].shape == (2, 10)
    batch["td_error"] = torch.where(batch["k"] == batch["k"][:, :1], 5.0, 0.0)
    e.update_tensordict_priority(batch)
    for i in range(2):
        first = batch["row_id"][i, :1].numpy()
        assert e[i].buffer.priorities(first) == pytest.approx([5.0])
    with pytest.raises(KeyError, match="buffer_ids"):
        e.update_tensordict_priority(batch.exclude("buffer_ids"))


def test_an_epochs_short_batch_is_filled_from_the_next(make):
    e = ReplayBufferEnsemble(make(0, 10, SamplerWithoutReplacement()), sample_from_all=True)
    got = torch.cat([e.sample(4)["k"][0] for _ in range(5)])
    assert torch.bincount(got).tolist() == [2] * 10


def test_members_of_different_keys_are_stacked_lazily(make):
    e = ReplayBufferEnsemble(make(0, a=torch.zeros(10, 3)), make(1, a=torch.ones(10, 5)), sample_from_all=True)
    batch = e.sample(4)
    assert batch[0]["a"].shape == (2, 3) and batch[1]["a"].shape == (2, 5) and batch["k"].shape == (2, 2)


def test_limiters_of_the_members_count(make):
    e = ReplayBufferEnsemble(make(0), make(1), sample_from_all=True)
    e[0].set_limiter(RateLimiter(2.0, error_buffer=300))
    e[0].extend(TensorDict({"k": torch.arange(5)}, [5]))
    e.sample(20)
    assert e[0].buffer.limiter_state()["sampled"] == 10 and e[1].buffer.limiter_state() is None


def test_it_pickles_as_its_names(make):
    e = ReplayBufferEnsemble(make(0), make(1), p=[1, 3], batch_size=4)
    with pickle.loads(pickle.dumps(e)) as other:
        assert other.sampler.p.tolist() == [0.25, 0.75] and other.sample().shape == (2, 2)


def test_bad_input(make):
    a, b = make(0), make(1)
    with pytest.raises(TypeError, match="not str"):
        ReplayBufferEnsemble(a, "b")
    with pytest.raises(ValueError, match="no storages"):
        ReplayBufferEnsemble()
    with pytest.raises(RuntimeError, match="Cannot pass both"):
        ReplayBufferEnsemble(a, b, p=[1, 1], sample_from_all=True)
    for p in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], "equal"):
        with pytest.raises(ValueError, match="p"):
            ReplayBufferEnsemble(a, b, p=p)
    with pytest.raises(ValueError, match="num_buffer_sampled=0"):
        ReplayBufferEnsemble(a, b, num_buffer_sampled=0)
    e = ReplayBufferEnsemble(a, b)
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        e.sample()
    with pytest.raises(ValueError, match="5 rows, 2 parts"):
        e.sample(5)
    with pytest.raises(TypeError, match="not ShmStorage"):
        SamplerEnsemble(RandomSampler()).sample(a.storage, 2)
    with pytest.raises(TypeError, match="samplers, not int"):
        SamplerEnsemble(3)
    with pytest.raises(TypeError, match="not SamplerEnsemble"):
        a.set_sampler(e.sampler)
    empty = ReplayBufferEnsemble(a, make(2, 0), sample_from_all=True)
    with pytest.raises(NotEnoughRows):
        empty.sample(4)
    with pytest.raises(RuntimeError, match="None of the replay-buffer ensemble members"):
        ReplayBufferEnsemble(make(3, 0), p="sampleable").sample(4)
