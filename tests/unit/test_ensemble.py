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
    PrioritizedSliceSampler,
    RandomSampler,
    RateLimiter,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)


@pytest.fixture
def make(make_name):
    made = []

    def make(who: int, n: int = 10, sampler=None, unit=None, **extra):
        storage = shmbuf.ShmStorage(100, name=make_name(), drain="caller")
        rb = shmbuf.TensorDictReplayBuffer(storage=storage, sampler=sampler, sample_unit=unit)
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


def test_members_sample_units_are_drawn(make):
    e = ReplayBufferEnsemble(
        make(0, 20, unit=Sequence(3, done_key=None), sampler=PrioritizedSampler(alpha=1.0)),
        make(1, 20, unit=Sequence(2, burn_in=1, done_key=None), sampler=PrioritizedSampler(alpha=1.0)),
        p=[1, 3],
        num_buffer_sampled=4,
    )
    batch, info = e.sample(20, return_info=True)
    assert batch.shape == (4, 15) and info["anchor_row_id"].shape == (4, 15)
    assert (batch["sequence_id"] == torch.arange(5).repeat_interleave(3)).all()
    start = batch["k"].reshape(4, 5, 3)
    assert (start // 1000 == batch["buffer_ids"].reshape(4, 5, 3)).all()
    batch["td_error"] = torch.full((4, 15), 7.0)
    e.update_tensordict_priority(batch)
    anchors = batch["anchor_row_id"][0].unique()
    assert e[int(batch["buffer_ids"][0, 0])].buffer.priorities(anchors.numpy()) == pytest.approx(7)


def test_an_epoch_is_filled_up_in_anchors(make):
    e = ReplayBufferEnsemble(
        make(0, 10, SamplerWithoutReplacement(), unit=Sequence(2, done_key=None)), sample_from_all=True
    )
    e[0].set_limiter(RateLimiter(100.0, error_buffer=1000))
    got = [e.sample(4) for _ in range(5)]
    anchors = torch.cat([b["anchor_index"][0, ::2] for b in got])
    assert torch.bincount(anchors).tolist() == [2] * 10
    assert all(b["sequence_id"].tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] for b in got)
    assert e[0].buffer.limiter_state()["sampled"] == 20


def test_members_whose_units_have_different_lengths_are_refused(make):
    with pytest.raises(ValueError, match="rows for each they draw: 1, 3"):
        ReplayBufferEnsemble(make(0), make(1, unit=Sequence(3, done_key=None)))


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_members_that_draw_slices_of_any_length_are_refused(make, kind):
    sampler = kind(slice_len=4, strict_length=False)
    with pytest.raises(ValueError, match=r"member 1 .*strict_length=False.*pad_output=True"):
        SamplerEnsemble(RandomSampler(), sampler)
    e = ReplayBufferEnsemble(make(0, 10, sampler=SliceSampler(slice_len=4)), sample_from_all=True)
    e[0].set_sampler(sampler)
    with pytest.raises(ValueError, match="strict_length=False"):
        e.sample(8)
    SamplerEnsemble(SliceSampler(slice_len=4, strict_length=False, pad_output=True))
    SamplerEnsemble(SliceSamplerWithoutReplacement(num_slices=4, drop_last=True))
    with pytest.raises(ValueError, match="num_slices"):
        SamplerEnsemble(SliceSamplerWithoutReplacement(num_slices=4))


def test_num_slices_are_those_of_each_part(make):
    e = ReplayBufferEnsemble(
        make(0, 40, sampler=SliceSampler(num_slices=2)), make(1, 40), p=[1, 0], num_buffer_sampled=4
    )
    k = e.sample(40)["k"].reshape(4, 2, 5)
    assert (k.diff(dim=2) == 1).all()
