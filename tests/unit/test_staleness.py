"""Rows of recent policies: which may be drawn, how often each is, and what is said when there is none."""

from __future__ import annotations

import threading
import time

import msgpack
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import Lapped, NotEnoughRows, SchemaError, StalenessAwareSampler
from shmbuf.samplers import staleness as module


def versions(*v: int, dtype=torch.int64, shape=()) -> TensorDict:
    t = torch.tensor(v).to(dtype).reshape(len(v), *shape)
    return TensorDict({"policy_version": t, "x": torch.arange(len(v))}, [len(v)])


@pytest.fixture
def make(make_name):
    made = []

    def make(sampler: StalenessAwareSampler, rows: TensorDict | None = None, capacity: int = 1000, **kw):
        storage = shmbuf.ShmStorage(capacity, name=make_name(), drain="caller")
        made.append(shmbuf.TensorDictReplayBuffer(storage=storage, sampler=sampler, **kw))
        if rows is not None:
            made[-1].extend(rows)
        return made[-1]

    yield make
    for rb in made:
        rb.close()


def chi(counts, expected) -> float:
    return float((((torch.as_tensor(counts) - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_only_fresh_rows_are_drawn(make, dtype, shape):
    sampler = StalenessAwareSampler(max_staleness=2)
    rb = make(sampler, versions(*range(10), dtype=dtype, shape=shape))
    sampler.consumer_version = 9
    batch, info = rb.sample(300, return_info=True)
    assert set(batch["policy_version"].flatten().tolist()) == {7, 8, 9}
    assert batch["staleness"].dtype == torch.float32 and batch["staleness"].shape == (300,)
    assert (batch["staleness"] == 9 - batch["policy_version"].flatten()).all()
    assert info["staleness"] is batch["staleness"] or (info["staleness"] == batch["staleness"]).all()
    assert set(rb.sample(300, consumer_version=11)["policy_version"].flatten().tolist()) == {9}, "of one call alone"
    assert sampler.consumer_version == 9
    sampler.increment_consumer_version()
    assert set(rb.sample(300)["policy_version"].flatten().tolist()) == {8, 9}


@pytest.mark.parametrize("how", ["rejection", "scan"])
@pytest.mark.parametrize(
    "weights", [None, "uniform", lambda s: (s + 1) ** -2, "cut"], ids=["default", "uniform", "own", "cut"]
)
def test_how_often(make, how, weights, monkeypatch):
    monkeypatch.setattr(module, "LEAST", 0 if how == "scan" else 10**7)
    if how == "scan":
        monkeypatch.setattr(module, "SHARE", 0.0)
    elif not callable(weights):
        monkeypatch.setattr(module._Draw, "_scan", None)
    cut = 4 if weights == "cut" else -1
    sampler = StalenessAwareSampler(cut, "uniform" if weights == "cut" else weights)
    rb = make(sampler, versions(*range(8)))
    sampler.consumer_version = 7
    n = 40_000
    counts = torch.bincount(rb.sample(n)["x"], minlength=8).double()
    stale = torch.arange(7, -1, -1).double()
    p = torch.ones(8) if isinstance(weights, str) else weights(stale) if weights else 1 / (stale + 1)
    p = torch.where(stale > 4, 0.0, p.double()) if weights == "cut" else p.double()
    assert (counts[p == 0] == 0).all()
    expected = n * p / p.sum()
    assert chi(counts[p > 0], expected[p > 0]) < 7 + 6 * 14**0.5


def test_when_few_are_fresh_one_column_is_read_whole(make):
    sampler = StalenessAwareSampler(0, "uniform")
    rb = make(sampler, versions(*([0] * 990), 5, *([0] * 9)))
    sampler.consumer_version = 5
    assert rb.sample(64)["x"].tolist() == [990] * 64


def test_a_policy_newer_than_the_consumers_counts_as_fresh(make):
    rb = make(StalenessAwareSampler(max_staleness=0), versions(0, 1, 2))
    batch = rb.sample(300)
    assert set(batch["staleness"].tolist()) == {0.0, -1.0, -2.0}
    counts = torch.bincount(batch["x"], minlength=3).double()
    assert chi(counts, torch.full((3,), 100.0)) < 30


def test_none_fresh_says_the_numbers_and_changes_nothing(make):
    sampler = StalenessAwareSampler(max_staleness=3)
    rb = make(sampler, versions(1, 2, 4))
    with pytest.raises(
        NotEnoughRows,
        match=r"All 3 entries .* max_staleness=3 \(consumer_version=9; the newest is of version 4\)\. Increase",
    ):
        rb.sample(4, consumer_version=9)
    with pytest.raises(NotEnoughRows, match=r"after 0\.05 s"):
        rb.sample(4, consumer_version=9, timeout=0.05)
    t = threading.Timer(0.1, lambda: rb.extend(versions(9)))
    t.start()
    assert rb.sample(4, consumer_version=9, timeout=30)["policy_version"].tolist() == [9] * 4
    t.join()


def test_empty_and_wrong_columns(make):
    sampler = StalenessAwareSampler()
    rb = make(sampler)
    with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
        rb.sample(3)
    rb.extend(TensorDict({"x": torch.zeros(3), "v": {"of": torch.zeros(3, 2)}}, [3]))
    with pytest.raises(KeyError, match="no column 'policy_version'"):
        rb.sample(3)
    rb.set_sampler(StalenessAwareSampler(version_key=("v", "of")))
    with pytest.raises(SchemaError, match="is no policy version"):
        rb.sample(3)


def test_weights_that_are_none(make):
    rb = make(StalenessAwareSampler(staleness_weight_fn=lambda s: s * 0), versions(1, 2))
    with pytest.raises(RuntimeError, match="the weight 0"):
        rb.sample(3)
    for bad in (lambda s: s * float("nan"), lambda s: s - 100, lambda s: s[:1], lambda s: 1.0):
        rb.set_sampler(StalenessAwareSampler(staleness_weight_fn=bad))
        with pytest.raises(ValueError, match="staleness_weight_fn gave"):
            rb.sample(3)
    with pytest.raises(ValueError, match="'linear'"):
        StalenessAwareSampler(staleness_weight_fn="linear")
    for wrong in ({"max_staleness": 1.5}, {"max_staleness": True}):
        with pytest.raises(TypeError, match="max_staleness="):
            StalenessAwareSampler(**wrong)
    with pytest.raises(TypeError, match="consumer_version='a'"):
        StalenessAwareSampler().consumer_version = "a"


def test_who_attaches_gets_the_arguments_but_no_function(make):
    sampler = StalenessAwareSampler(4, "uniform", ("a", "version"))
    rb = make(sampler)
    rb.extend(TensorDict({"a": {"version": torch.arange(5)}}, [5]))
    with shmbuf.attach(rb.name) as other:
        assert other.sampler.arguments() == sampler.arguments() == msgpack.unpackb(msgpack.packb(sampler.arguments()))
        assert len(other.sample(3)) == 3

    def mine(s):
        return s * s

    rb = make(StalenessAwareSampler(staleness_weight_fn=mine), versions(1, 2))
    with shmbuf.attach(rb.name) as other:
        with pytest.raises(RuntimeError, match=r"function \(.*mine\) of the process that made the buffer"):
            other.sample(3)
        other.set_sampler(StalenessAwareSampler(staleness_weight_fn=mine))
        assert len(other.sample(3)) == 3


def test_out_gets_the_staleness_too(make):
    rb = make(StalenessAwareSampler(), versions(*range(10)))
    out = rb.sample(5)
    before = out["staleness"].data_ptr()
    assert rb.sample(out=out, consumer_version=20) is out and out["staleness"].data_ptr() == before
    assert (out["staleness"] == 20 - out["policy_version"]).all()
    bare = out.exclude("staleness", "index", "row_id")
    assert (rb.sample(out=bare, consumer_version=3)["staleness"] == 3 - bare["policy_version"]).all()


def test_rows_that_are_overwritten_meanwhile_are_drawn_anew(make):
    sampler = StalenessAwareSampler(max_staleness=5)
    rb = make(sampler, versions(*range(20)), capacity=20)
    stop, failed = threading.Event(), []

    def churn():
        v = 20
        while not stop.is_set():
            sampler.consumer_version = v
            rb.extend(versions(v, v + 1, v + 2))
            v += 3

    t = threading.Thread(target=churn)
    t.start()
    try:
        for _ in range(300):
            batch = rb.sample(16, timeout=10)
            if not (np.diff(batch["staleness"] + batch["policy_version"]) == 0).all() or (batch["staleness"] > 5).any():
                failed.append(batch)
    finally:
        stop.set()
        t.join(30)
    assert not failed


def test_rows_that_are_all_being_overwritten_are_not_waited_for_for_ever(make, monkeypatch):
    rb = make(StalenessAwareSampler(), versions(*range(10)))
    real = rb.buffer._call
    monkeypatch.setattr(rb.buffer, "_call", lambda method, *a: 0 if method in ("choose", "fetch") else real(method, *a))
    for sampler in (StalenessAwareSampler(), StalenessAwareSampler(staleness_weight_fn=lambda s: s + 1)):
        rb.set_sampler(sampler)
        since = time.monotonic()
        with pytest.raises(Lapped, match=r"no row can be read: .* all 1,000 for 1 s; .*drain"):
            rb.sample(3, timeout=0.1)
        assert time.monotonic() - since < 20
    rb.buffer.empty()
    with pytest.raises(NotEnoughRows, match="empty storage"):
        rb.sample(3, timeout=0.1)
