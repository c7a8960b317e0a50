"""`sample(out=)`: into the caller's tensors, or an error that leaves them alone."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmbuf import SchemaError
from tests.unit.helpers_torch import rows, same

# ---- sample(out=) --------------------------------------------------------------------------------------------------


def out_of(n: int, **changes) -> TensorDict:
    td = TensorDict(
        {
            "obs": torch.empty(n, 4),
            "next": TensorDict({"obs": torch.empty(n, 4), "done": torch.empty(n, dtype=torch.bool)}, [n]),
            "k": torch.empty(n, dtype=torch.int64),
            "index": torch.empty(n, dtype=torch.int64),
            "row_id": torch.empty(n, dtype=torch.int64),
        },
        [n],
    )
    for key, value in changes.items():
        td = td.exclude(key) if value is None else td
        if value is not None:
            td[key] = value
    return td


def test_sample_into_the_callers_tensors(make_rb):
    rb = make_rb(50, batch_size=20)
    rb.extend(rows(0, 70))
    out = out_of(20)
    addresses = {k: v.data_ptr() for k, v in out.items(True, True)}
    for call in (lambda: rb.sample(out=out), lambda: rb.sample(20, out=out)):
        assert call() is out
        assert {k: v.data_ptr() for k, v in out.items(True, True)} == addresses
        assert (out["row_id"] == out["k"]).all() and (out["index"] == out["k"] % 50).all()
        assert same(out.exclude("index", "row_id"), rows(0, 70)[out["k"]])
    before = out["k"].clone()
    rb.sample(out=out)
    assert not torch.equal(before, out["k"]), "drawn anew"


def test_out_decides_the_batch_size_if_nobody_else_does(rb):
    rb.extend(rows(0, 5))
    assert rb.sample(out=out_of(6)).batch_size == torch.Size([6])


def test_out_may_be_a_sample_or_lack_the_indices(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 5))
    first = rb.sample()
    assert rb.sample(out=first) is first
    out = rb.sample(out=out_of(5, index=None, row_id=None))
    assert (out["row_id"] == out["k"]).all() and (out["index"] == out["k"]).all()


def test_out_may_hold_more(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 5))
    out = rb.sample(out=out_of(5, mine=torch.arange(5)))
    assert out["mine"].tolist() == [0, 1, 2, 3, 4] and (out["row_id"] == out["k"]).all()


@pytest.mark.parametrize(
    ("out", "texts"),
    [
        (lambda: out_of(4), ["batch size [4]", "[5]"]),
        (lambda: out_of(5, obs=None), ["key 'obs'", "expected float32[4]"]),
        (
            lambda: out_of(5, obs=torch.empty(5, 4, dtype=torch.float64)),
            ["key 'obs'", "float64", "expected float32[4]"],
        ),
        (lambda: out_of(5, obs=torch.empty(5, 3)), ["key 'obs'", "[3]", "expected float32[4]"]),
        (lambda: out_of(5, index=torch.empty(5, dtype=torch.int32)), ["key 'index'", "int32", "expected int64[]"]),
        (lambda: out_of(5, row_id=torch.empty(5, 1, dtype=torch.int64)), ["key 'row_id'", "expected int64[]"]),
        (lambda: out_of(5, obs=torch.empty(5, 8)[:, ::2]), ["key 'obs'", "contiguous"]),
        (lambda: out_of(5, obs=torch.empty(4).expand(5, 4)), ["key 'obs'", "contiguous"]),
        (lambda: out_of(5, obs=torch.empty(5, 4, device="meta")), ["key 'obs'"]),
        (lambda: out_of(5, obs=torch.zeros(5, 4).to_sparse()), ["key 'obs'"]),
    ],
    ids=["batch size", "missing", "dtype", "shape", "index", "row_id", "strided", "expanded", "meta", "sparse"],
)
def test_out_that_cannot_be_written_into(make_rb, out, texts):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 5))
    with pytest.raises(SchemaError) as e:
        rb.sample(5, out=out())
    assert all(t in str(e.value) for t in texts), str(e.value)


def test_out_without_a_batch_dimension(rb):
    rb.extend(rows(0, 5))
    with pytest.raises(SchemaError, match=r"batch size \[\]"):
        rb.sample(out=TensorDict({}, []))


@pytest.mark.parametrize(
    "lazy",
    [lambda n: torch.zeros(n, dtype=torch.complex64).conj(), lambda n: torch.zeros(n, 2, dtype=torch.float32)],
    ids=["conjugate view", "another dtype"],
)
def test_out_whose_bits_mean_something_else(make_rb, lazy):
    rb = make_rb(schema={"c": torch.complex64})
    rb.extend(TensorDict({"c": torch.full((3,), 1 + 2j)}, [3]))
    out = TensorDict({"c": lazy(4)}, [4])
    try:
        rb.sample(out=out)
    except SchemaError as e:
        assert "'c'" in str(e)
    else:
        assert out["c"].tolist() == [1 + 2j] * 4


def test_out_whose_tensors_share_memory(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 5))
    shared = torch.empty(5, 4)
    out = out_of(5, obs=shared)
    out["next", "obs"] = shared
    with pytest.raises(SchemaError, match="share memory"):
        rb.sample(out=out)
    both = torch.empty(6, 4)
    out["obs"], out["next", "obs"] = both[:5], both[1:]
    with pytest.raises(SchemaError, match="share memory"):
        rb.sample(out=out)


def test_a_refused_out_is_left_alone(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 5))
    out = out_of(5, index=None, row_id=None, obs=torch.full((5, 3), 7.0), k=torch.full((5,), 7))
    with pytest.raises(SchemaError):
        rb.sample(out=out)
    assert sorted(out.keys()) == ["k", "next", "obs"] and (out["k"] == 7).all() and (out["obs"] == 7).all()
