"""Rows of any form go in and come out as the same form, from any handle."""

from __future__ import annotations

import collections
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

import shmbuf
from shmbuf import ReplayBuffer, ShmStorage, SliceSampler, TensorDictReplayBuffer
from shmbuf.errors import SchemaError
from shmbuf.packed import bound_of, decode, encode
from tests.unit.helpers import unmoved

Pair = collections.namedtuple("Pair", "left right")


@tensorclass
class Point:
    x: torch.Tensor
    name: str


X, Y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
BATCHES = {
    "tensor": X,
    "array": np.arange(6.0).reshape(3, 2),
    "dict": {"b": X, "a": {"c": Y, "d": np.arange(3)}},
    "tuple": (X, [Y, {"z": Y}]),
    "namedtuple": Pair(X, (Y,)),
}


@pytest.fixture
def rb(name):
    with ReplayBuffer(storage=ShmStorage(50, name=name, drain="caller"), batch_size=4) as rb:
        yield rb


def item(data, i):
    """Row i, or with a slice or tensor several, of a batch."""
    if isinstance(data, dict):
        return {k: item(v, i) for k, v in data.items()}
    if isinstance(data, Pair):
        return Pair(*(item(v, i) for v in data))
    if isinstance(data, (list, tuple)):
        return type(data)(item(v, i) for v in data)
    return data[i]


def equal(a, b) -> bool:
    if type(a) is not type(b):
        return isinstance(a, (np.generic, np.ndarray)) and isinstance(b, (np.generic, np.ndarray)) and bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b if isinstance(a, str) else bool(a.dtype == b.dtype and (a == b).all())


@pytest.mark.parametrize("form", BATCHES)
def test_a_batch_comes_back_as_it_was(rb, form, name):
    data = BATCHES[form]
    assert rb.extend(data).tolist() == [0, 1, 2]
    assert equal(rb[:], data)
    assert rb.add(item(data, 1)) == 3 and equal(rb[3], item(data, 1))
    with shmbuf.attach(name) as other:
        got, info = other.sample(5, return_info=True)
        assert equal(got, item(rb[:], info["index"])) and info["row_id"].dtype == torch.int64
        other.extend(data)
    assert len(rb) == 7


def test_items_of_a_list_are_rows(rb):
    rb.extend([{"x": X[i], "text": "abc" * i, "n": [b"z", None, 2.5][i]} for i in range(3)])
    got = rb[:]
    assert torch.equal(got["x"], X) and got["text"] == ["", "abc", "abcabc"]
    assert got["n"] == [b"z", None, 2.5] and rb[1]["text"] == "abc"
    assert set(rb.sample(20)["text"]) <= {"", "abc", "abcabc"}
    with unmoved(rb.buffer):
        assert rb.extend([]).tolist() == []
        with pytest.raises(SchemaError, match="item 1 of the list"):
            rb.extend([{"x": X[0], "text": "", "n": None}, {"x": X[0], "text": ""}])
        with pytest.raises(SchemaError, match=r"key 'x'.*item 1"):
            rb.extend([{"x": X[0], "text": "", "n": None}, {"x": X[0].double(), "text": "", "n": None}])


@pytest.mark.parametrize("other", BATCHES)
def test_another_form_than_the_first_is_refused(rb, other):
    first = "dict" if other != "dict" else "tuple"
    rb.extend(BATCHES[first])
    with unmoved(rb.buffer):
        with pytest.raises(SchemaError, match="the buffer's are"):
            rb.extend(BATCHES[other])
        with pytest.raises(SchemaError, match="a TensorDict, the buffer's are"):
            rb.extend(TensorDict({"data": X}, [3]))
        with pytest.raises(SchemaError, match="the buffer's are"):
            rb.add(item(BATCHES[other], 0))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"a": X, "b": Y[:2]}, "different numbers of rows"),
        (torch.tensor(1.0), "different numbers of rows"),
        ({}, "empty dict"),
        ({1.5: X}, "keys of a dict"),
        ({"a": X, "b": "text"}, "str in a batch"),
        ({"index": X}, "what samples call"),
        ([object()], "object cannot be stored"),
        ([(1 << 64,)], "cannot be stored"),
        (7, "int in a batch"),
    ],
)
def test_wrong_first_rows_fix_nothing(rb, bad, text):
    with pytest.raises(SchemaError, match=text):
        rb.extend(bad)
    assert not rb.initialized and rb.extend(X).tolist() == [0, 1, 2]


def test_tensorclass(rb):
    rb.extend(torch.stack([Point(x=X[i], name=f"p{i}", batch_size=[]) for i in range(3)]))
    got, info = rb.sample(5, return_info=True)
    assert type(got) is Point and got.batch_size == (5,) and torch.equal(got.x, X[info["index"]])
    assert type(rb[1]) is Point and rb[1].name == "p1"


def test_a_process_without_the_class_gets_tensordicts_and_is_told(rb, name):
    rb.extend(torch.stack([Point(x=X[i], name=f"p{i}", batch_size=[]) for i in range(3)]))
    script = (
        "import warnings, shmbuf\nfrom tensordict import TensorDict\n"
        f"rb = shmbuf.attach({name!r})\n"
        "with warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    td = rb[:]\n"
        "assert type(td) is TensorDict and td.get('name').tolist() == ['p0', 'p1', 'p2'], td\n"
        "assert any('has not imported' in str(x.message) for x in w), w\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_values_in_tensordicts(name):
    with TensorDictReplayBuffer(storage=ShmStorage(50, name=name, drain="caller"), batch_size=8) as rb:
        rb.extend(
            TensorDict({"x": Y, "s": NonTensorStack("a", "bb", "ccc"), "next": TensorDict({"m": "same"}, [3])}, [3])
        )
        rb.add(TensorDict({"x": Y[0], "s": "add", "next": {"m": "one"}}, []))
        with shmbuf.attach(name) as other:
            td = other.sample(20)
            assert td.get("s").tolist() == [["a", "bb", "ccc", "add"][i] for i in td["index"].tolist()]
        assert rb[:].get("s").tolist() == ["a", "bb", "ccc", "add"] and rb[3]["s"] == "add"
        assert rb["s"].tolist() == ["a", "bb", "ccc", "add"] and rb[0]["next", "m"] == "same"
        assert next(c for c in rb.buffer.schema.columns if c.key == ("s",)).shape == (64,)
        rb.extend(rb.sample(5))  # a sample can be stored again
        assert len(rb) == 9
        with unmoved(rb.buffer):
            with pytest.raises(
                SchemaError, match=r"key 's', row 1: the value has 102 bytes as msgpack, the column holds 64"
            ):
                rb.extend(
                    TensorDict(
                        {
                            "x": Y,
                            "s": NonTensorStack("a", "b" * 100, "c"),
                            "next": {"m": NonTensorStack("a", "b", "c")},
                        },
                        [3],
                    )
                )
            with pytest.raises(SchemaError, match="key 's', row 0: tuple cannot be stored"):
                rb.add(TensorDict({"x": Y[0], "s": NonTensorData((1, 2)), "next": {"m": "one"}}, []))
            raw = TensorDict(
                {"x": Y, "s": torch.zeros(3, 64, dtype=torch.uint8), "next": {"m": NonTensorStack("a", "b", "c")}}, [3]
            )
            with pytest.raises(SchemaError, match="key 's': got uint8"):
                rb.extend(raw)
        with pytest.raises(SchemaError, match="out= takes tensors only"):
            rb.sample(out=rb.sample())


def test_values_at_the_numpy_level():
    values = [None, True, -1, 2.5, "ä", b"\0", [1, {"k": [2]}], {1: 2}]
    with shmbuf.Buffer.create(None, 20, schema={"v": ("msgpack", 32)}, drain="caller") as buf:
        ids = buf.extend({"v": encode(values, 32)})
        assert decode(buf.gather(ids)["v"]) == values
    assert [bound_of([b"x" * n]) for n in (1, 16, 17, 64, 65)] == [64, 64, 128, 256, 512]
    with pytest.raises(SchemaError, match="row 1"):
        encode(["a", "b" * 40], 32)
    for bad in ((), (2, 3), (0,)):
        with pytest.raises(SchemaError, match="msgpack"):
            shmbuf.Buffer.create(None, 20, schema={"v": ("msgpack", bad)}, drain="caller")


def test_tensordict_buffers_take_no_dicts():
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        for bad in ({"x": X}, X, (X,), [X]):
            with pytest.raises(SchemaError):
                rb.extend(bad)
        assert not rb.initialized


def test_a_forged_form_is_an_error_and_runs_nothing():
    from shmbuf.errors import BufferFormatError
    from shmbuf.forms import put_together

    td = TensorDict({"data": X}, [3])
    for form in (
        [],
        ["dict"],
        ["dict", ["a"], [["tensor"]]],
        ["other", []],
        ["namedtuple", "os", "system", ["a"], 3],
        [7],
    ):
        with pytest.raises(BufferFormatError, match="cannot be used"):
            put_together(form, td)
    with pytest.warns(UserWarning, match="has not imported"):
        assert put_together(["namedtuple", "os", "system", ["data"], [["tensor"]]], td).keys() == {"data"}


def test_keys_of_a_dict_come_in_any_order(rb, name, tmp_path):
    rb.extend({"a": torch.zeros(2), "b": {1: torch.ones(2), "c": torch.zeros(2)}})
    rb.extend({"b": {"c": torch.full((2,), 4.0), 1: torch.full((2,), 3.0)}, "a": torch.full((2,), 2.0)})
    rb.extend(
        [
            {"a": torch.tensor(5.0), "b": {"c": torch.tensor(7.0), 1: torch.tensor(6.0)}},
            {"b": {1: torch.tensor(6.0), "c": torch.tensor(7.0)}, "a": torch.tensor(5.0)},
        ]
    )
    rb[0] = {"b": {"c": torch.tensor(7.0), 1: torch.tensor(6.0)}, "a": torch.tensor(5.0)}
    assert rb["a"].tolist() == [5, 0, 2, 2, 5, 5]
    assert list(rb[2]) == ["a", "b"] and rb[2]["b"] == {1: torch.tensor(3.0), "c": torch.tensor(4.0)}
    with pytest.raises(SchemaError, match="the buffer's are"), unmoved(rb.buffer):
        rb.extend({"a": torch.zeros(2), "b": {"1": torch.ones(2), "c": torch.zeros(2)}})
    with ReplayBuffer(storage=ShmStorage(50, name=f"{name}.b", drain="caller"), batch_size=4) as other:
        other.extend({"b": {"c": torch.ones(2), 1: torch.ones(2)}, "a": torch.zeros(2)})
        rb.dumps(tmp_path / "a")
        other.loads(tmp_path / "a")
        assert other["a"].tolist() == [5, 0, 2, 2, 5, 5]
        other.extend({"b": {"c": torch.ones(1), 1: torch.ones(1)}, "a": torch.zeros(1)})
        other.load_state_dict(rb.state_dict())
        assert other["a"].tolist() == [5, 0, 2, 2, 5, 5] and other[2]["b"][1] == 3
    shmbuf.destroy(f"{name}.b", force=True)


@tensorclass
class Next:
    done: torch.Tensor


@tensorclass
class Step:
    x: torch.Tensor
    next: Next


@tensorclass
class Flat:
    x: torch.Tensor
    done: torch.Tensor


@pytest.mark.parametrize("prefetch", [None, 2])
def test_what_a_sampler_says_of_tensorclass_rows_is_in_info(name, prefetch):
    done = (torch.arange(8) % 4 == 3)[:, None]
    for made in (
        Step(x=torch.arange(8), next=Next(done=done, batch_size=[8]), batch_size=[8]),
        Flat(x=torch.arange(8), done=done, batch_size=[8]),
    ):
        with ReplayBuffer(
            storage=ShmStorage(50, name=name), sampler=SliceSampler(slice_len=2), batch_size=4, prefetch=prefetch
        ) as rb:
            rb.extend(made)
            batch, info = rb.sample(return_info=True)
            assert type(batch) is type(made) and batch.x.equal(info["index"]) and batch[0].x == batch.x[0]
            assert ("next", "truncated") in info and type(rb[0]) is type(made)
        shmbuf.destroy(name, force=True)


def test_a_writer_that_ranks_rows_says_what_rows_it_takes(name):
    with ReplayBuffer(storage=ShmStorage(4, name=name), writer=shmbuf.TensorDictMaxValueWriter("r")) as rb:
        for call in (
            lambda: rb.add({"r": torch.tensor(1.0)}),
            lambda: rb.extend({"r": torch.ones(2)}),
            lambda: rb.add(Flat(x=torch.tensor(1), done=torch.tensor([True]), batch_size=[])),
        ):
            with pytest.raises(TypeError, match="rows to be ranked are a TensorDict"):
                call()
        assert len(rb) == 0
    shmbuf.destroy(name, force=True)


@pytest.mark.parametrize(
    ("example", "longer"),
    [
        (["x" * 300], "y" * 1000),
        ([{"text": "x" * 300, "n": torch.zeros(2)}], {"text": "y" * 1000, "n": torch.ones(2)}),
        ([("x" * 300, np.zeros(2))], ("y" * 1000, np.ones(2))),
    ],
)
def test_an_example_says_the_form_of_rows_and_how_long_values_may_be(name, example, longer):
    with ReplayBuffer(storage=ShmStorage(50, name=name, example=example), batch_size=2) as rb:
        rb.extend([longer])
        other = shmbuf.attach(name)
        other.extend([longer] * 2)
        assert len(rb) == 3 and equal(rb[2], longer)
        with pytest.raises(SchemaError, match="rows are a tensor"):
            rb.extend(torch.zeros(3))


@pytest.mark.parametrize("example", [[], [1, torch.zeros(2)], "text", 3])
def test_an_example_that_is_no_rows_is_refused(name, example):
    with pytest.raises(SchemaError, match=r"example=|item 1"):
        ReplayBuffer(storage=ShmStorage(50, name=name, example=example), batch_size=2)
    with pytest.raises(shmbuf.BufferNotFound):
        shmbuf.attach(name)


class Doubled(torch.nn.Module):
    """Stored as twice what was given."""

    def forward(self, x):
        return x

    def inv(self, x):
        self.seen = x
        return double(x)


def double(x):
    if isinstance(x, dict):
        return {k: double(v) for k, v in x.items()}
    if isinstance(x, Pair):
        return Pair(*map(double, x))
    return type(x)(map(double, x)) if isinstance(x, (list, tuple)) else x * 2


@pytest.mark.parametrize("form", BATCHES)
def test_transforms_change_a_list_of_rows_as_they_do_a_batch(rb, name, form):
    batch = BATCHES[form]
    rb.append_transform(Doubled())
    rb.extend([item(batch, i) for i in range(3)])
    rb.extend(batch)
    first, second = (shmbuf.attach(name)[part] for part in (slice(0, 3), slice(3, 6)))
    assert equal_all(first, double(batch)) and equal_all(second, double(batch))


def test_transforms_are_given_a_list_of_python_values_as_it_is(rb):
    rb.append_transform(twice := Doubled())
    rb.extend(["a", "b"])
    assert twice.seen == ["a", "b"] and rb[:] == ["aa", "bb"]


def equal_all(a, b) -> bool:
    return all(equal(item(a, i), item(b, i)) for i in range(3))
