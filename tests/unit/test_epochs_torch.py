"""Epochs, consuming and newest first through the replay buffer's face."""

from __future__ import annotations

import pickle

import msgpack
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    ConsumingSampler,
    NewestSampler,
    NotEnoughRows,
    SamplerWithoutReplacement,
    SchemaError,
)
from tests.unit.helpers_torch import rows as td_rows

# ---- TensorDicts ---------------------------------------------------------------------------------------------------


def test_the_sampler_as_torchrls(make_rb):
    rb = make_rb(10, batch_size=4)
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(td_rows(0, 10))
    batches = [*rb]
    assert [len(b) for b in batches] == [4, 4, 2] and rb.sampler.ran_out
    assert sorted(torch.cat([b["k"] for b in batches]).tolist()) == list(range(10))
    assert all((b["row_id"] == b["k"]).all() and (b["index"] == b["k"] % 10).all() for b in batches)
    assert all((b["obs"][:, 0] == 8 * b["k"]).all() for b in batches)
    assert [len(b) for b in rb] == [4, 4, 2], "and the next epoch"
    batch, info = rb.sample(return_info=True)
    assert info["index"].tolist() == batch["index"].tolist() and len(batch) == 4
    rb.set_sampler(SamplerWithoutReplacement(drop_last=True, shuffle=False))
    assert [b["k"].tolist() for b in rb] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match=r"batch size \(11\)"):
        rb.sample(11)


@pytest.mark.parametrize(("per_step", "shared"), [*((n, False) for n in (0, 1, 3, 9, 17, 60)), (0, True), (1, True)])
def test_iterating_ends_with_the_epoch_while_rows_come(make_rb, per_step, shared):
    rb = make_rb(100, batch_size=10)
    rb.set_sampler(SamplerWithoutReplacement(drop_last=True, shared=shared, seed=1))
    rb.extend(td_rows(0, 100))
    first = 100
    for again in range(20):
        seen, hi = [], first
        for batch in rb:
            assert len(batch) == 10
            seen += batch["row_id"].tolist()
            if per_step:
                rb.extend(td_rows(first, per_step))
                first += per_step
            assert len(seen) <= 100
        if not shared:
            assert len(set(seen)) == len(seen) and seen and max(seen) < hi, (again, "each once, none of the next epoch")
    # plain calls never end
    for _ in range(50):
        assert len(rb.sample()) == 10
        if per_step:
            rb.extend(td_rows(first, per_step))
            first += per_step


def test_iterating_begins_anew_if_the_epoch_has_no_batch_left(make_rb):
    rb = make_rb(10, batch_size=4)
    rb.set_sampler(SamplerWithoutReplacement(drop_last=True, shuffle=False))
    rb.extend(td_rows(0, 10))
    rb.sample()
    rb.extend(td_rows(10, 8))
    assert [b["row_id"].tolist() for b in rb] == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_iterating_over_what_can_be_consumed_ends(make_rb):
    rb = make_rb(10, batch_size=5)
    rb.set_sampler(ConsumingSampler())
    rb.extend(td_rows(0, 10))
    assert sorted(torch.cat([b["k"] for b in rb]).tolist()) == list(range(10))
    with pytest.raises(NotEnoughRows):
        next(iter(rb))
    rb.extend(td_rows(10, 7))
    assert [len(b) for b in rb] == [5, 2]


def test_out_is_filled_and_a_short_batch_fills_its_first_rows(make_rb):
    rb = make_rb(10)
    rb.extend(td_rows(0, 10))
    rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
    out = rb.sample(6)
    assert rb.sample(6, out=out)["k"].tolist() == [6, 7, 8, 9] and out["k"].tolist() == [6, 7, 8, 9, 4, 5]
    assert rb.sample(out=out) is out and out["k"].tolist() == [0, 1, 2, 3, 4, 5]
    rb.set_sampler(ConsumingSampler(shuffle=False))
    with pytest.raises(SchemaError):
        rb.sample(6, out=TensorDict({"k": torch.zeros(6, dtype=torch.int64)}, [6]))
    assert rb.sample(6)["k"].tolist() == [0, 1, 2, 3, 4, 5], "nothing was taken for an out that does not fit"
    rb.set_sampler(NewestSampler())
    assert rb.sample(out=out) is out and out["k"].tolist() == [9, 8, 7, 6, 5, 4]
    bare = out.exclude("index", "row_id")
    assert rb.sample(out=bare)["row_id"].tolist() == [9, 8, 7, 6, 5, 4]


@pytest.mark.parametrize(
    "sampler",
    [
        SamplerWithoutReplacement(True, False, shared=True, seed=3),
        SamplerWithoutReplacement(),
        ConsumingSampler(3, seed=1),
        ConsumingSampler(max_times_sampled=2, shuffle=False),
        NewestSampler(),
    ],
    ids=repr,
)
def test_who_attaches_draws_the_same_way(make_name, sampler):
    storage = shmbuf.ShmStorage(10, name=make_name(), drain="caller")
    with shmbuf.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=2) as rb:
        rb.extend(td_rows(0, 10))
        with shmbuf.attach(rb.name) as other:
            assert repr(other.sampler) == repr(sampler) and len(other.sample()) == 2
            assert repr(pickle.loads(pickle.dumps(sampler))) == repr(sampler)
            assert msgpack.unpackb(msgpack.packb(sampler.arguments())) == sampler.arguments()
        rb.destroy()


def test_attaching_read_only_to_a_shared_epoch_leaves_looking(make_name):
    storage = shmbuf.ShmStorage(10, name=make_name(), drain="caller")
    with shmbuf.ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(shared=True), batch_size=2) as rb:
        rb.extend(td_rows(0, 10))
        with shmbuf.attach(rb.name, readonly=True) as other:
            with pytest.raises(PermissionError, match=r"SamplerWithoutReplacement\(shared=False\)"):
                other.sample()
            assert other[3]["k"] == 3
            other.set_sampler(SamplerWithoutReplacement())
            assert len(other.sample()) == 2
        rb.destroy()
