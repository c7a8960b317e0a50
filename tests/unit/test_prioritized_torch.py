"""`PrioritizedSampler` and the faces of the replay buffers that use it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import PrioritizedSampler, RandomSampler, ReplayBuffer, SchemaError, ShmStorage, TensorDictReplayBuffer
from tests.unit.helpers_priorities import all_priorities, at_rest, no_change, state, total

EXACT = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}


@pytest.fixture
def make_rb(make_name):
    made = []

    def make(capacity: int = 8, face=TensorDictReplayBuffer, batch_size: int | None = 16, sampler=None, **kw):
        keys = {n: kw.pop(n) for n in ("priority_key", "seed") if n in kw}
        settings = {**EXACT, **{n: kw.pop(n) for n in list(kw) if n in SAMPLER}}
        storage = ShmStorage(
            capacity,
            **{"schema": {"k": torch.int64}, "name": make_name(), "drain": "caller", "ring_bytes": 1 << 14, **kw},
        )
        made.append(
            face(
                storage=storage,
                sampler=sampler or PrioritizedSampler(capacity, **settings),
                batch_size=batch_size,
                **keys,
            )
        )
        return made[-1]

    yield make
    for rb in made:
        rb.close()


SAMPLER = ("alpha", "beta", "eps", "reduction", "max_priority_within_buffer", "normalize", "stratified")


def rows(*numbers: int, **more: torch.Tensor) -> TensorDict:
    n = len(numbers)
    return TensorDict({"k": torch.tensor(numbers), **more}, [n])


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- drawing ----------------------------------------------------------------------------------------------------


def test_a_sample_has_index_row_id_and_weight(make_rb):
    rb = make_rb(capacity=4)
    rb.extend(rows(0, 1, 2, 3, 4, 5))
    rb.update_priority(torch.arange(4), f64(1, 2, 3, 4))  # of rows 4, 5, 2, 3
    td, info = rb.sample(64, return_info=True)
    assert info.keys() == {"index", "row_id", "priority_weight"}
    assert td["priority_weight"].dtype == torch.float32 and td["index"].dtype == torch.int64
    assert (td["row_id"] == td["k"]).all() and (td["index"] == td["k"] % 4).all()
    torch.testing.assert_close(td["priority_weight"], 1 / (td["index"] + 1.0), rtol=1e-6, atol=0)
    assert rb.extend(td[:2]).shape == (2,)  # a sample can be stored again


def test_beta_of_one_call_and_of_the_sampler(make_rb):
    rb = make_rb(beta=0.5)
    rb.extend(rows(0, 1))
    rb.update_priority([0, 1], f64(1, 16))

    def weight(**how):
        td = rb.sample(64, **how)
        return td["priority_weight"][td["k"] == 1][0].item()

    assert weight() == 0.25 and weight(beta=1.0) == 0.0625 and weight(beta=0.0) == 1.0 and weight() == 0.25
    rb.sampler.beta = 1.0
    assert weight() == 0.0625
    for call in (lambda: rb.sample(beta=-1.0), lambda: setattr(rb.sampler, "beta", float("nan"))):
        with pytest.raises(ValueError, match="beta="):
            call()
    assert rb.sampler.beta == 1.0
    with pytest.raises(TypeError):
        rb.sample(alpha=1.0)
    with pytest.raises(AttributeError):
        rb.sampler.alpha = 0.5  # the leaves of all processes hold it


def test_normalize_by_batch_and_stratified(make_rb):
    rb = make_rb(capacity=4, normalize="batch", stratified=True)
    rb.extend(rows(0, 1, 2, 3))
    assert sorted(rb.sample(4)["k"].tolist()) == [0, 1, 2, 3]
    rb.update_priority(torch.arange(4), f64(1, 1, 1, 997))
    for _ in range(50):
        td = rb.sample(4)
        assert (td["k"] == 3).sum() >= 3
        assert td["priority_weight"].max() == 1


def test_out_is_written(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1))
    out = rb.sample(8)
    rb.update_priority([0, 1], f64(0, 3))
    again = rb.sample(8, out=out)
    assert again is out and (out["k"] == 1).all() and (out["priority_weight"] == 1).all()


def test_seeds_repeat_draws(make_rb):
    rb = make_rb(seed=3)
    rb.extend(rows(*range(8)))
    rb.update_priority(torch.arange(8), torch.arange(8.0))

    def draws():
        return rb.sample(64)["k"].tolist()

    rb.set_rng(torch.Generator().manual_seed(1))
    first, second = draws(), draws()
    rb.set_rng(torch.Generator().manual_seed(1))
    assert [draws(), draws()] == [first, second] and first != second


# ---- updating ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["as it is", "reordered", "part", "no row_id"])
def test_update_tensordict_priority(make_rb, where):
    rb = make_rb(batch_size=None)
    rb.extend(rows(*range(8)))
    td = rb.sample(4)
    td["td_error"] = td["k"] + 10.0
    td = {"as it is": td, "reordered": td[[2, 0, 1, 3]], "part": td[1:3], "no row_id": td.exclude("row_id")}[where]
    rb.update_tensordict_priority(td)
    touched = set(td["k"].tolist())
    assert all_priorities(rb.buffer).tolist() == [k + 10.0 if k in touched else 1.0 for k in range(8)]
    at_rest(rb.buffer)


def test_update_tensordict_priority_without_what_it_needs(make_rb):
    rb = make_rb(priority_key=("next", "td"))
    rb.extend(rows(0, 1))
    td = rb.sample(2)
    with no_change(rb.buffer):
        with pytest.raises(KeyError, match=r"\('next', 'td'\) is not in the TensorDict"):
            rb.update_tensordict_priority(td)
        td["next", "td"] = torch.ones(2)
        with pytest.raises(KeyError, match=r"row_id.* is not in the TensorDict"):
            rb.update_tensordict_priority(td.exclude("row_id", "index"))
    rb.update_tensordict_priority(td)


@pytest.mark.parametrize(
    "index, priority, error, text",
    [
        ([0, 1], [1.0, float("nan")], ValueError, r"priorities\[1\] = nan"),
        ([0, 1], [-1.0, 1.0], ValueError, r"priorities\[0\] = -1\.0"),
        ([0, 1], [1.0, float("inf")], ValueError, r"priorities\[1\] = inf"),
        ([0, 1], [1.0], ValueError, r"shape \[1\] for 2 rows"),
        ([0, 1], [1.0, 2.0, 3.0], ValueError, r"shape \[3\] for 2 rows"),
        ([0, 1], [[1.0], [2.0], [3.0]], ValueError, "for 2 rows"),
        ([0, 3], [1.0, 1.0], IndexError, r"index\[1\] = 3 is out of range: 3 rows are stored"),
        ([0, -1], [1.0, 1.0], IndexError, r"index\[1\] = -1 is out of range"),
        ([0.0, 1.0], [1.0, 1.0], TypeError, "index of dtype float.*integers are needed"),
        ([0, 1], [1.0, 1e60], ValueError, r"priorities\[1\] = 1e\+60: .*float32"),
    ],
)
def test_bad_input_by_index_changes_nothing(make_rb, index, priority, error, text):
    rb = make_rb()
    rb.extend(rows(0, 1, 2))
    other = shmbuf.attach(rb.name)
    for p in (torch.tensor(priority, dtype=torch.float64), priority):
        with no_change(rb.buffer, other.buffer), pytest.raises(error, match=text):
            rb.update_priority(torch.tensor(index), p)
    other.close()


def test_bad_input_by_row_id_changes_nothing(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1, 2))
    td = rb.sample(4)
    with no_change(rb.buffer):
        with pytest.raises(IndexError, match=r"ids\[1\] = 3: no such row"):
            rb.update_priority(None, f64(1, 1), row_id=torch.tensor([0, 3]))
        with pytest.raises(TypeError, match="index or row_id, not both"):
            rb.update_priority([0], 1.0, row_id=[0])
        td["td_error"] = torch.full((4,), float("nan"))
        with pytest.raises(ValueError, match=r"priorities\[0\] = nan"):
            rb.update_tensordict_priority(td)
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            rb.update_priority([0], torch.tensor([1j]))
        with pytest.raises(TypeError, match="bool: real numbers"):
            rb.update_priority([0], torch.tensor([True]))


def test_what_update_priority_takes_and_returns(make_rb):
    rb = make_rb(capacity=4)
    rb.extend(rows(0, 1, 2, 3, 4))
    assert rb.update_priority(2, 5.0).tolist() == [True]
    assert rb.update_priority([0, 1], 3).tolist() == [True, True]
    assert rb.update_priority(torch.tensor([[3]]), torch.tensor([[7.0]])).tolist() == [True]
    assert all_priorities(rb.buffer).tolist() == [3, 5, 7, 3]  # rows 1, 2, 3, 4
    assert rb.update_priority(None, f64(9, 9), row_id=torch.tensor([0, 4])).tolist() == [False, True]
    assert all_priorities(rb.buffer).tolist() == [3, 5, 7, 9]
    rb.update_priority([1], torch.ones(1, dtype=torch.bfloat16, requires_grad=True))
    rb.mark_update([0])
    assert all_priorities(rb.buffer).tolist() == [1, 5, 7, 9]  # index 0: row 4, at the highest there was
    at_rest(rb.buffer)


def test_a_buffer_without_priorities_says_so(make_rb):
    rb = make_rb(sampler=RandomSampler())
    rb.extend(rows(0, 1))
    td = rb.sample(2)
    td["td_error"] = torch.ones(2)
    with pytest.raises(RuntimeError, match="keeps no priorities"):
        rb.update_tensordict_priority(td)


@pytest.mark.parametrize("reduction, expected", [("max", 4), ("min", -2), ("mean", 1), ("median", 1), ("sum", 3)])
def test_priorities_with_time_are_reduced(make_rb, reduction, expected):
    rb = make_rb(reduction=reduction)
    rb.extend(rows(0, 1))
    p = torch.tensor([[1.0, -2.0, 4.0], [5.0, 5.0, 5.0]])
    td = TensorDict({"row_id": torch.arange(2), "td_error": p}, [2])
    if expected < 0:
        with no_change(rb.buffer), pytest.raises(ValueError, match=r"priorities\[0\] = -2\.0"):
            rb.update_tensordict_priority(td)
        return
    rb.update_tensordict_priority(td)
    assert all_priorities(rb.buffer).tolist() == [expected, 15 if reduction == "sum" else 5]
    rb.update_priority([0, 1], p.reshape(2, 3, 1).abs())
    assert rb.buffer.priorities([1])[0] == (15 if reduction == "sum" else 5)
    rb.extend(rows(2, 3, td_error=p) if reduction != "min" else rows(2, 3, td_error=p.abs()))
    assert all_priorities(rb.buffer)[2:].tolist() == (
        [1, 5] if reduction == "min" else [expected, 15 if reduction == "sum" else 5]
    )


# ---- priorities that come with rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_schema", [False, True])
@pytest.mark.parametrize("key", ["td_error", ("next", "td_error")])
def test_rows_bring_their_priorities(make_rb, in_schema, key):
    schema = {"k": torch.int64, **({key: (torch.float32, (1,))} if in_schema else {})}
    rb = make_rb(schema=schema, priority_key=key)

    def with_p(*numbers: int):
        td = rows(*numbers)
        td.set(key, torch.tensor(numbers, dtype=torch.float32).unsqueeze(-1) + 1)
        return td

    rb.extend(with_p(0, 1))
    rb.put(with_p(2, 3)).wait()
    rb.add(with_p(4)[0])
    assert all_priorities(rb.buffer).tolist() == [1, 2, 3, 4, 5]
    rb.extend(with_p(5), update_priority=False)  # the highest so far
    assert rb.buffer.priorities([5])[0] == 5.0
    if not in_schema:
        rb.extend(rows(6))
        assert rb.buffer.priorities([6])[0] == 5.0
    sample = rb.sample()
    assert (key in sample.keys(True)) is in_schema
    if in_schema:
        assert (sample[key][:, 0] == sample["k"] + 1).all()
    at_rest(rb.buffer)


def test_a_bad_priority_that_comes_with_rows_stores_nothing(make_rb):
    rb = make_rb()
    rb.extend(rows(0))
    for bad in (float("nan"), -1.0, float("inf")):
        for call in (rb.extend, rb.put):
            with no_change(rb.buffer), pytest.raises(ValueError, match=r"priorities\[1\] = "):
                call(rows(1, 2, td_error=f64(1.0, bad)))
    rb.extend(rows(1, 2, td_error=f64(1.0, float("nan"))), update_priority=False)
    assert all_priorities(rb.buffer).tolist() == [1, 1, 1]


def test_a_collector_that_attached_before_anybody_prioritised(make_rb):
    """Rows may carry the key from the beginning; it means something once a buffer keeps priorities."""
    rb = make_rb(sampler=RandomSampler())
    collector = shmbuf.attach(rb.name)
    collector.extend(rows(0, 1, td_error=f64(5, 6)))
    learner = shmbuf.attach(rb.name, sampler=PrioritizedSampler(**EXACT))
    assert all_priorities(rb.buffer).tolist() == [1, 1]
    collector.extend(rows(2, td_error=f64(7)))
    assert all_priorities(rb.buffer).tolist() == [1, 1, 7]
    assert "priority_weight" in learner.sample(4) and "priority_weight" not in rb.sample(4)
    rb.set_sampler(PrioritizedSampler(**EXACT))
    assert "priority_weight" in rb.sample(4)
    for handle in (collector, learner):
        handle.close()


@pytest.mark.parametrize("within", [False, True])
def test_what_new_rows_get(make_rb, within):
    rb = make_rb(max_priority_within_buffer=within)
    rb.extend(rows(0, 1))
    rb.update_priority([0, 1], f64(9, 2))
    rb.update_priority([0], f64(1))
    rb.extend(rows(2))
    assert all_priorities(rb.buffer).tolist() == [1, 2, 2 if within else 9]


# ---- the sampler itself, other handles ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"alpha": -0.5}, "alpha=-0.5: a finite number ≥ 0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"beta": -1}, "beta=-1: a finite number ≥ 0"),
        ({"beta": float("inf")}, "beta=inf"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"reduction": "first"}, "reduction='first': one of max, min, mean, median, sum"),
        ({"normalize": "all"}, "normalize='all': one of buffer, batch"),
        ({"dtype": torch.int64}, "dtype=torch.int64: torch.float32 or torch.float64"),
    ],
)
def test_arguments_out_of_range(arguments, text):
    with pytest.raises(ValueError, match=text):
        PrioritizedSampler(10, **arguments)


def test_a_max_capacity_that_is_not_the_storage_s(make_name):
    name = make_name()
    with pytest.raises(ValueError, match="max_capacity=10 of the sampler, but the storage holds 20 rows"):
        ReplayBuffer(storage=ShmStorage(20, name=name), sampler=PrioritizedSampler(10))
    assert name not in shmbuf.segment.names()


def test_torchrl_s_order_of_arguments():
    s = PrioritizedSampler(10, 0.7, 0.5, 1e-6, torch.float64, "mean", True)
    assert (s.max_capacity, s.alpha, s.beta, s.eps) == (10, 0.7, 0.5, 1e-6)
    assert (s.dtype, s.reduction, s.max_priority_within_buffer) == (torch.float64, "mean", True)


def test_attach_and_pickle_draw_the_same_way(make_rb, python):
    rb = make_rb(beta=0.5, reduction="sum", normalize="batch", stratified=True, priority_key="err")
    rb.extend(rows(0, 1, err=f64(4, 16)))
    for other in (shmbuf.attach(rb.name), pickle.loads(pickle.dumps(rb))):
        s = other.sampler
        assert (s.alpha, s.beta, s.reduction, s.normalize, s.stratified) == (1.0, 0.5, "sum", "batch", True)
        assert other.sample(4)["k"].tolist().count(1) >= 3
        other.close()
    code = (
        "import sys, torch, shmbuf; rb = shmbuf.attach(sys.argv[1]); td = rb.sample(4)\n"
        "td['err'] = torch.full((4, 2), 1.0); rb.update_tensordict_priority(td); print(rb.sampler)"
    )
    assert "beta=0.5" in python(code, rb.name)
    assert 2.0 in all_priorities(rb.buffer)  # its sum over time


def test_another_formula_is_refused_and_leaves_nothing_attached(make_rb, nothing_moves):
    rb = make_rb()
    rb.extend(rows(0))
    members = len(rb.buffer.members())
    with pytest.raises(ValueError, match="all processes use one formula"):
        shmbuf.attach(rb.name, sampler=PrioritizedSampler(alpha=0.3))
    before = rb.sampler
    with pytest.raises(ValueError, match="all processes use one formula"):
        rb.set_sampler(PrioritizedSampler(alpha=0.3))
    assert len(rb.buffer.members()) == members
    assert rb.sampler is before and rb.sample(4)["k"].tolist() == [0] * 4
    rb.destroy()


def test_a_read_only_handle_samples_but_sets_nothing(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1))
    look = shmbuf.attach(rb.name, readonly=True)
    td = look.sample(8)
    td["td_error"] = torch.ones(8)
    with no_change(rb.buffer), pytest.raises(PermissionError, match="read-only"):
        look.update_tensordict_priority(td)
    look.close()


def test_empty_resets(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1, td_error=f64(5, 6)))
    rb.empty()
    assert total(rb.buffer) == 0 and len(rb) == 0
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    rb.extend(rows(2))
    assert state(rb.buffer)["new_row"] == 1.0 and rb.sample(4)["priority_weight"].tolist() == [1] * 4


def test_all_priorities_zero(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1, td_error=f64(0, 0)))
    with pytest.raises(RuntimeError, match="no row can be drawn: all 2 priorities are 0"):
        rb.sample()
    assert np.array_equal(all_priorities(rb.buffer), [0, 0])


@pytest.mark.parametrize("batch", [[], [2, 2]])
def test_rows_of_another_batch_size_that_carry_priorities(make_rb, batch):
    rb = make_rb()
    n = torch.Size(batch).numel()
    td = TensorDict({"k": torch.arange(n), "td_error": torch.ones(n)}, [n]).reshape(*batch) if batch else None
    td = td if td is not None else TensorDict({"k": torch.tensor(3), "td_error": torch.tensor(2.0)}, [])
    for call in (rb.extend, rb.put):
        with no_change(rb.buffer), pytest.raises(SchemaError, match=r"extend\(\) and put\(\) take a batch"):
            call(td)
    with pytest.raises(SchemaError, match=r"add\(\) takes one row"):
        rb.add(TensorDict({"k": torch.arange(2), "td_error": torch.ones(2)}, [2]))


def test_a_handle_that_draws_otherwise_reduces_by_the_largest(make_rb):
    rb = make_rb()
    rb.extend(rows(0, 1))
    p = torch.tensor([[1.0, 4.0], [6.0, 5.0]])
    with shmbuf.attach(rb.name, sampler=RandomSampler()) as other:
        other.extend(rows(2, 3, td_error=p))
        assert all_priorities(rb.buffer)[2:].tolist() == [4, 6]
        other.update_priority([0, 1], p + 1)
        assert all_priorities(rb.buffer).tolist() == [5, 7, 4, 6]
        other.update_tensordict_priority(TensorDict({"row_id": torch.arange(2), "td_error": p}, [2]))
        assert all_priorities(rb.buffer).tolist() == [4, 6, 4, 6]
    for handle in (rb, other := shmbuf.attach(rb.name, sampler=RandomSampler())):
        with no_change(rb.buffer), pytest.raises(ValueError, match=r"priority of shape \[3, 2\] .* 2 rows"):
            handle.update_priority([0, 1], torch.ones(3, 2))
        handle.update_priority([], torch.ones(0, 2))
    other.close()
