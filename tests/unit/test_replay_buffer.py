"""The faces TorchRL users know, in one process: `ReplayBuffer`, `TensorDictReplayBuffer`, `RemoteTensorDictReplayBuffer`, `ShmStorage`."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    BufferExists,
    BufferFormatError,
    BufferNotFound,
    CommitPending,
    NotEnoughRows,
    RandomSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    RingFull,
    Schema,
    SchemaError,
    ShmStorage,
    StorageLost,
    TensorDictReplayBuffer,
    segment,
)
from shmbuf.schema import DTYPES
from tests.unit.helpers import open_files, stuck_drainer, unmoved
from tests.unit.helpers_torch import SPEC, bits, rows, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
FACES = [ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer]


@pytest.fixture
def make(make_name):
    made = []

    def make(capacity: int = 100, face=TensorDictReplayBuffer, batch_size=None, **kw):
        storage = ShmStorage(
            capacity, **{"name": make_name(), "schema": SPEC, "drain": "caller", "ring_bytes": 1 << 14, **kw}
        )
        made.append(face(storage=storage, batch_size=batch_size))
        return made[-1]

    yield make
    for rb in made:
        rb.close()


@pytest.fixture
def rb(make):
    return make()


# ---- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("schema", [SPEC, None])
def test_extend_put_add_return_the_rows_indices(make, face, schema):
    rb = make(10, face, schema=schema)
    indices = rb.extend(rows(0, 4))
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2, 3]
    ticket = rb.put(rows(4, 3))
    assert ticket.rows == 3 and len(rb) == 4
    indices = ticket.wait()
    assert indices.dtype == torch.int64 and indices.tolist() == [4, 5, 6]
    index = rb.add(rows(7, None))
    assert type(index) is int and index == 7
    assert rb.extend(rows(8, 4)).tolist() == [8, 9, 0, 1], "slots, as in TorchRL"
    assert (len(rb), rb.write_count) == (10, 12)
    assert rb["k"].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("capacity", "n"), [(4, 10), (7, 8), (7, 14), (10, 1000)])
def test_extend_larger_than_the_capacity(make, capacity, n):
    rb = make(capacity)
    assert rb.extend(rows(0, n)).tolist() == [i % capacity for i in range(n)], "every index is returned"
    assert (len(rb), rb.write_count) == (capacity, n)
    reference = torch.zeros(capacity, dtype=torch.int64)
    for i in range(n):
        reference[i % capacity] = i
    assert rb["k"].tolist() == reference.tolist(), "the last rows win"


def test_a_list_of_rows_is_stacked(rb):
    assert rb.extend([rows(k, None) for k in range(5)]).tolist() == [0, 1, 2, 3, 4]
    assert rb.put((rows(5, None), rows(6, None))).wait().tolist() == [5, 6]
    assert same(rb[:], rows(0, 7))
    with unmoved(rb.buffer):
        assert rb.extend([]).tolist() == [] and rb.put([]).rows == 0


def test_a_sample_can_be_stored_again(rb):
    rb.extend(rows(0, 5))
    batch = rb.sample(20)
    batch["priority_weight"] = torch.ones(20)
    assert rb.extend(batch).tolist() == list(range(5, 25))
    assert rb["k"][5:].tolist() == batch["k"].tolist() and sorted(rb[0].keys()) == ["k", "next", "obs"]


def test_a_sample_as_the_first_rows_does_not_make_its_index_a_column(rb, make):
    rb.extend(rows(0, 5))
    other = make(schema=None)
    other.extend(rb.sample(6))
    assert sorted(other[0].keys()) == ["k", "next", "obs"]


def test_index_is_stored_if_the_schema_has_it(make):
    rb = make(schema={"index": torch.int64, "x": torch.float32})
    rb.extend(TensorDict({"index": torch.tensor([7, 8]), "x": torch.zeros(2)}, [2]))
    assert rb["index"].tolist() == [7, 8]
    with pytest.raises(SchemaError, match="key 'index' is missing"):
        rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))


def test_the_priority_key_is_exempt_from_the_key_check(make_name):
    for key, given in (("td_error", "td_error"), ("prio", "prio"), (("agent", "prio"), ("agent", "prio"))):
        with TensorDictReplayBuffer(
            storage=ShmStorage(100, name=make_name(), schema=SPEC, drain="caller"), priority_key=key
        ) as rb:
            td = rows(0, 3)
            td[given] = torch.ones(3)
            rb.extend(td)
            assert sorted(rb[0].keys()) == ["k", "next", "obs"], "stored if and only if the schema has it"
            td["other"] = torch.ones(3)
            with pytest.raises(SchemaError, match="key 'other' is not in the schema, got float32"), unmoved(rb.buffer):
                rb.extend(td)


def test_rows_are_copied_in_and_out(rb):
    td = rows(0, 3)
    ticket = rb.put(td)
    td["obs"].fill_(-1)
    ticket.wait()
    for got in (rb.sample(5), rb[0], rb[:], rb[[0, 1]], rb["obs"]):
        (got if isinstance(got, torch.Tensor) else got["obs"]).fill_(9)
    assert same(rb[:], rows(0, 3))


def test_empty(rb):
    rb.extend(rows(0, 30))
    rb.empty()
    assert (len(rb), rb.write_count, rb.initialized) == (0, 0, True)
    assert rb.extend(rows(50, 3)).tolist() == [0, 1, 2], "indices start again at 0"
    assert rb.sample(10)["row_id"].min() >= 100, "ids never repeat"
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 3)


# ---- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_sample(make, face):
    rb = make(10, face, batch_size=7)
    rb.extend(rows(0, 14))
    td = rb.sample()
    assert td.batch_size == torch.Size([7]) and td["next"].batch_size == torch.Size([7])
    assert (
        sorted(td.keys()) == ["index", "k", "next", "obs", "row_id"]
        and td["index"].dtype == td["row_id"].dtype == torch.int64
    )
    td = rb.sample(3000)
    assert (
        (td["row_id"] == td["k"]).all()
        and (td["index"] == td["k"] % 10).all()
        and set(td["k"].tolist()) == set(range(4, 14))
    )
    reference = rows(0, 14)[td["k"]]
    assert same(td.exclude("index", "row_id"), reference)
    assert rb.sample(0).batch_size == torch.Size([0]) and rb.batch_size == 7


def test_samples_are_uniform(make):
    rb = make(50)
    rb.extend(rows(0, 70))
    counts = torch.bincount(rb.sample(50_000)["index"], minlength=50)
    assert (abs(counts - 1000) < 8 * 1000**0.5).all(), "eight standard deviations"


@pytest.mark.parametrize("n", [-1, 1.5, "4", True, [4]])
def test_a_batch_size_that_is_none(rb, n):
    rb.extend(rows(0, 3))
    with pytest.raises(ValueError, match="batch_size="):
        rb.sample(n)
    with pytest.raises(ValueError, match="batch_size="):
        TensorDictReplayBuffer(storage=ShmStorage(10), batch_size=n)


def test_no_batch_size_anywhere(rb):
    rb.extend(rows(0, 3))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        rb.sample()
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        next(iter(rb))


def test_iterating_samples_for_ever(make):
    rb = make(batch_size=4)
    rb.extend(rows(0, 3))
    for _, td in zip(range(5), rb, strict=False):
        assert td.batch_size == torch.Size([4])


def test_return_info_and_include_info_in_torchrls_orders(make):
    """(batch_size, return_info, include_info); of Remote…: (batch_size, include_info, return_info)."""
    for face in (ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer):
        rb = make(face=face)
        rb.extend(rows(0, 5))
        with_info = [
            ((True,), {}),
            ((), {"return_info": True}),
            ((), {"include_info": True}),
            ((False, True), {}),
            ((None, True), {}),
            ((), {"return_info": True, "include_info": False}),
        ]
        for args, kw in with_info:
            td, info = rb.sample(3, *args, **kw)
            assert (info["index"] == td["index"]).all() and (info["row_id"] == td["row_id"]).all()
        for args, kw in [
            ((), {}),
            ((False,), {}),
            ((False, False), {}),
            ((None, False), {}),
            ((), {"include_info": None}),
        ]:
            assert isinstance(rb.sample(3, *args, **kw), TensorDict)
    assert list(inspect.signature(RemoteTensorDictReplayBuffer.sample).parameters)[1:4] == [
        "batch_size",
        "include_info",
        "return_info",
    ]
    assert list(inspect.signature(TensorDictReplayBuffer.sample).parameters)[1:4] == [
        "batch_size",
        "return_info",
        "include_info",
    ]


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


def test_sample_into_the_callers_tensors(make):
    rb = make(50, batch_size=20)
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


def test_out_may_be_a_sample_or_lack_the_indices(make):
    rb = make(batch_size=5)
    rb.extend(rows(0, 5))
    first = rb.sample()
    assert rb.sample(out=first) is first
    out = rb.sample(out=out_of(5, index=None, row_id=None))
    assert (out["row_id"] == out["k"]).all() and (out["index"] == out["k"]).all()


def test_out_may_hold_more(make):
    rb = make(batch_size=5)
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
def test_out_that_cannot_be_written_into(make, out, texts):
    rb = make(batch_size=5)
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
def test_out_whose_bits_mean_something_else(make, lazy):
    rb = make(schema={"c": torch.complex64})
    rb.extend(TensorDict({"c": torch.full((3,), 1 + 2j)}, [3]))
    out = TensorDict({"c": lazy(4)}, [4])
    try:
        rb.sample(out=out)
    except SchemaError as e:
        assert "'c'" in str(e)
    else:
        assert out["c"].tolist() == [1 + 2j] * 4


def test_out_whose_tensors_share_memory(make):
    rb = make(batch_size=5)
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


def test_a_refused_out_is_left_alone(make):
    rb = make(batch_size=5)
    rb.extend(rows(0, 5))
    out = out_of(5, index=None, row_id=None, obs=torch.full((5, 3), 7.0), k=torch.full((5,), 7))
    with pytest.raises(SchemaError):
        rb.sample(out=out)
    assert sorted(out.keys()) == ["k", "next", "obs"] and (out["k"] == 7).all() and (out["obs"] == 7).all()


# ---- an empty buffer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SPEC, None])
def test_sample_on_empty_raises_at_once_or_waits_as_told(make, schema):
    rb = make(schema=schema, batch_size=4)
    for timeout in (0, 0.02):
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"), unmoved(rb.buffer):
            rb.sample(timeout=timeout)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    with pytest.raises(ValueError, match="timeout"):
        rb.sample(timeout=-1)


@pytest.mark.parametrize("schema", [SPEC, None])
@pytest.mark.parametrize("same_handle", [True, False])
def test_a_waiting_sample_is_woken_by_another_threads_put(make, schema, same_handle):
    rb = make(schema=schema, batch_size=4)
    got: list = []
    thread = threading.Thread(target=lambda: got.append(rb.sample(timeout=None)))
    thread.start()
    other = rb if same_handle else shmbuf.attach(rb.name)
    other.put(rows(7, 1))
    thread.join(60)
    assert not thread.is_alive() and got and got[0]["k"].tolist() == [7] * 4
    other.close()


def test_before_the_first_rows(make):
    rb = make(schema=None)
    assert (len(rb), rb.write_count, rb.initialized, rb.stats()["initialized"]) == (0, 0, False, False)
    for index in (0, slice(None), "k"):
        with pytest.raises(RuntimeError, match="non-initialized storage"):
            rb[index]
    rb.empty()
    rb.extend(rows(0, 2))
    assert rb.initialized and rb.buffer.schema.keys == (("obs",), ("next", "obs"), ("next", "done"), ("k",))


# ---- indexing, against a plain TensorDict --------------------------------------------------------------------------

INDICES = [
    0,
    5,
    -1,
    -6,
    np.int64(3),
    torch.tensor(2),
    torch.tensor(-2),
    np.array(4),
    slice(None),
    slice(1, 4),
    slice(-3, None),
    slice(None, -2),
    slice(0, 6, 2),
    slice(4, 1),
    slice(50),
    slice(3, 100),
    ...,
    [0, 3],
    [5, 0, 5],
    [-1, -6],
    [],
    range(2, 5),
    torch.tensor([1, 0]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([-1, 2], dtype=torch.int32),
    np.array([4, 4]),
    np.array([1, -1], np.int16),
    torch.tensor([[0, 1], [2, 5]]),
    np.zeros((2, 1, 3), int),
    [[0, 1], [1, 2]],
    torch.tensor([True, False, True, False, False, True]),
    [True, False, False, False, False, True],
    np.arange(6) > 3,
    torch.zeros(6, dtype=torch.bool),
    torch.ones(6, dtype=torch.bool),
]


@pytest.fixture(scope="module")
def wrapped():
    """Capacity 6, 10 rows: slots hold 6 7 8 9 4 5."""
    rb = TensorDictReplayBuffer(storage=ShmStorage(6, schema=SPEC, drain="caller"))
    rb.extend(rows(0, 10))
    yield rb, rows(0, 10)[torch.tensor([6, 7, 8, 9, 4, 5])]
    rb.close()


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_getitem_is_physical_indexing(wrapped, index):
    rb, reference = wrapped
    given = index
    if isinstance(index, (list, range, np.ndarray)):
        array = np.asarray(index)
        index = torch.as_tensor(array if array.dtype == bool else array.astype(np.int64))
    expected = reference[index]
    assert same(rb[given], expected)
    assert same(rb.storage[given], expected)


def test_getitem_with_a_negative_step(wrapped):
    rb, reference = wrapped
    assert same(rb[::-1], reference.flip(0)) and same(rb[4:0:-2], reference[torch.tensor([4, 2])])


@pytest.mark.parametrize("key", ["k", "obs", ("next", "obs"), ("next", "done"), ("k",), "next"])
def test_getitem_with_a_key_is_its_column(wrapped, key):
    rb, reference = wrapped
    got, expected = rb[key], reference[key]
    assert (
        same(got, expected)
        if isinstance(expected, TensorDict)
        else got.dtype == expected.dtype and bits(got) == bits(expected)
    )


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (6, IndexError, "index 6 is out of range: 6 rows are stored"),
        ([0, 6], IndexError, "index 6 is out of range"),
        (torch.tensor([1, 99]), IndexError, "index 99 is out of range"),
        (-7, IndexError, "index -7 is out of range"),
        ([0, -9], IndexError, "index -9 is out of range"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), IndexError, "out of range"),
        (1.5, IndexError, "float"),
        ([0.0], IndexError, "float"),
        (True, IndexError, "bool"),
        (False, IndexError, "bool"),
        (np.True_, IndexError, "bool"),
        (torch.ones(5, dtype=torch.bool), IndexError, "mask"),
        ([True], IndexError, "mask"),
        (torch.ones(6, 2, dtype=torch.bool), IndexError, "mask"),
        ("nothing", KeyError, "nothing"),
        (("next", "nothing"), KeyError, "nothing"),
        (("k", "deeper"), KeyError, "deeper"),
        ("", KeyError, ""),
    ],
    ids=repr,
)
def test_getitem_of_what_is_not_there(wrapped, index, error, text):
    with pytest.raises(error) as e:
        wrapped[0][index]
    assert text in str(e.value)


def test_getitem_of_a_part_filled_buffer(rb):
    rb.extend(rows(0, 3))
    assert same(rb[:], rows(0, 3)) and same(rb[-1], rows(2, None)) and rb["k"].tolist() == [0, 1, 2]
    with pytest.raises(IndexError):
        rb[3]
    rb.empty()
    assert rb[:].batch_size == torch.Size([0]) and rb["k"].shape == (0,)
    with pytest.raises(IndexError, match="0 rows are stored"):
        rb[0]


# ---- dtypes, shapes, nesting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["schema", "example", "first rows"])
def test_every_dtype_bit_for_bit(make, dtype, by):
    torch_dtype, g = getattr(torch, dtype), torch.Generator().manual_seed(5)
    leaves = {}
    for i, shape in enumerate([(), (3,), (2, 0), (2, 3)]):
        raw = torch.randint(0, 256, (9, *shape, torch_dtype.itemsize), dtype=torch.uint8, generator=g)
        leaves[f"x{i}"] = (raw & 1 if dtype == "bool" else raw).view(torch_dtype).reshape(9, *shape)
    td = TensorDict({"pad": torch.arange(27, dtype=torch.uint8).reshape(9, 3), **leaves}, [9])
    given = {
        "schema": dict(schema={k: (v.dtype, v.shape[1:]) for k, v in td.items()}),
        "example": dict(schema=None, example=td[0]),
        "first rows": dict(schema=None),
    }[by]
    rb = make(**given)
    rb.extend(td)
    rb.add(td[0])
    rb.extend([td[1], td[2]])
    assert len(rb) == 12 and same(rb[:9], td) and same(rb[9], td[0]) and same(rb[10:], td[1:3])
    batch = rb.sample(30)
    assert same(batch.exclude("index", "row_id"), rb[batch["index"]])
    assert all(batch[k].dtype == torch_dtype for k in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex32, torch.float8_e5m2, torch.bool])
def test_example_as_a_mapping_of_tensors(make, dtype):
    rb = make(schema=None, example={"x": torch.zeros(3, dtype=dtype), "n": {"y": torch.zeros((), dtype=torch.int64)}})
    assert rb.buffer.schema == Schema.from_spec({"x": (dtype, (3,)), "n": {"y": "int64"}})


def test_example_as_a_batch_of_which_one_row_counts(make):
    assert (
        make(schema=None, example=rows(0, 5)).buffer.schema
        == make().buffer.schema
        == make(schema=None, example=rows(0, None)).buffer.schema
    )


def test_schema_and_example_must_agree(make):
    make(example=rows(0, None))
    make(schema=Schema.from_spec(SPEC))
    make(schema=Schema.from_spec(SPEC), example=rows(0, None))
    for example in (rows(0, None).exclude("k"), rows(0, None).to(torch.float64)):
        with pytest.raises(SchemaError, match="the example does not fit"):
            make(example=example)


def test_nested_keys_and_names_with_dots(make):
    td = TensorDict(
        {
            "next.obs": torch.arange(3),
            "next": {"obs": torch.arange(3) + 10, "agents": {"a": {"obs": torch.arange(6).reshape(3, 2)}}},
        },
        [3],
    )
    rb = make(schema=None)
    rb.extend(td)
    assert same(rb[:], td) and rb["next.obs"].tolist() == [0, 1, 2] and rb["next", "obs"].tolist() == [10, 11, 12]
    got = rb.sample(4)
    assert (
        got["next", "agents", "a"].batch_size == torch.Size([4])
        and (got["next", "agents", "a", "obs"][:, 0] == 2 * got["index"]).all()
    )


# ---- full rings ----------------------------------------------------------------------------------------------------


def test_a_timeout_says_how_many_rows_went_in_and_gives_a_ticket(rb):
    with stuck_drainer(rb.name):
        with pytest.raises(CommitPending, match="3 of 3 rows") as e:
            rb.extend(rows(0, 3), timeout=0)
        with pytest.raises(CommitPending) as large:
            rb.extend(rows(3, 5000), timeout=0.01)
        assert f"{large.value.rows:,} of 5,000 rows are in the ring" in str(large.value)
        with pytest.raises(RingFull) as full:
            rb.put(rows(0, 300), timeout=0)
        assert "300 rows of 48 bytes to put" in str(full.value)
    indices = e.value.ticket.wait()
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2]
    assert large.value.ticket.wait().tolist() == [i % 100 for i in range(3, 3 + large.value.rows)]


def test_add_when_the_ring_is_full(make):
    rb = make(ring_bytes=4096)
    with stuck_drainer(rb.name):
        tickets = []
        with pytest.raises(RingFull):
            while True:
                tickets.append(rb.put(rows(len(tickets), 1), timeout=0))
        with pytest.raises(RingFull) as e:
            rb.add(rows(0, None), timeout=0)
        assert "Nothing was put" in str(e.value)
        assert re.search("1 rows? of 48 bytes to put", str(e.value)), str(e.value)
    assert rb.add(rows(len(tickets), None)) == len(tickets)


def test_add_of_a_row_that_the_drop_policy_takes(make):
    rb = make(ring_bytes=4096, full="drop_newest")
    with stuck_drainer(rb.name):
        while rb.put(rows(0, 1)).rows:
            pass
        assert rb.extend(rows(0, 3)).tolist() == []
        assert rb.add(rows(0, None)) is None
    assert rb.stats()["dropped_rows"] == 5


# ---- several threads ------------------------------------------------------------------------------------------------


def test_threads_share_one_face(make):
    rb = make(10_000)
    seen: list = []

    def write(who: int):
        for i in range(100):
            rb.extend(rows(1000 * who + i, 1))

    def read():
        for _ in range(100):
            td = rb.sample(20, timeout=None)
            seen.append(bool((td["next", "obs"] == td["obs"] + 4).all() and (td["obs"][:, 0] == 8 * td["k"]).all()))

    threads = [threading.Thread(target=write, args=(w,)) for w in range(3)] + [
        threading.Thread(target=read) for _ in range(2)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    k = rb["k"]
    for w in range(3):
        assert k[k // 1000 == w].tolist() == list(range(1000 * w, 1000 * w + 100)), (
            "each thread's rows, once and in order"
        )
    assert len(seen) == 200 and all(seen)


# ---- names, pickles, ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_attach_gives_the_same_class_and_settings(make, face):
    kw = {} if face is ReplayBuffer else {"priority_key": ("agent", "prio")}
    made = make(face=lambda **k: face(**k, **kw), batch_size=5)
    made.extend(rows(0, 3))
    with shmbuf.attach(made.name) as rb:
        assert (
            type(rb) is face and rb.batch_size == 5 and isinstance(rb.sampler, RandomSampler) and rb.name == made.name
        )
        assert rb._priority_key == made._priority_key
        assert rb.sample().batch_size == torch.Size([5]) and rb.extend(rows(3, 2)).tolist() == [3, 4]
        assert same(made[:], rows(0, 5))
    with shmbuf.attach(made.name, batch_size=2) as rb:
        assert rb.batch_size == 2 and made.batch_size == 5, "of this handle only"
    with shmbuf.attach(made.name, readonly=True) as rb:
        assert rb.sample().batch_size == torch.Size([5])
        with pytest.raises(PermissionError):
            rb.extend(rows(0, 1))


def test_attach_to_a_numpy_level_buffer(name):
    with shmbuf.Buffer.create(name, 10, schema={"k": "int64"}, drain="caller") as buf:
        buf.extend({"k": np.arange(3)})
        with shmbuf.attach(name) as rb:
            assert type(rb) is ReplayBuffer and rb["k"].tolist() == [0, 1, 2] and rb.batch_size is None


def test_attach_to_nothing(name):
    with pytest.raises(BufferNotFound):
        shmbuf.attach(name)
    with pytest.raises(ValueError):
        shmbuf.attach("not/allowed")


@pytest.mark.parametrize(
    "face",
    [{"class": "Unknown"}, {"class": "ReplayBuffer", "sampler": ["nonsense", {}]}, {"sampler": 5}, {"batch_size": "x"}],
)
def test_attach_to_a_face_this_process_cannot_make(name, face):
    with shmbuf.Buffer.create(name, 10, drain="caller", config={"face": face}):
        before = open_files()
        with pytest.raises(BufferFormatError):
            shmbuf.attach(name)
        gc.collect()
        assert open_files() == before


def test_a_name_that_is_taken(make, rb):
    with pytest.raises(BufferExists):
        TensorDictReplayBuffer(storage=ShmStorage(100, name=rb.name, drain="caller"))
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=rb.name, exists="attach"), batch_size=3) as other:
        other.extend(rows(0, 2))
        assert len(rb) == 2 and other.sample().batch_size == torch.Size([3])


@pytest.mark.parametrize("face", FACES)
def test_a_pickle_attaches_with_this_handles_settings(make, face):
    rb = make(face=face, batch_size=5)
    rb.extend(rows(0, 3))
    blob = pickle.dumps(rb)
    assert len(blob) < 1000
    with pickle.loads(blob) as other:
        assert type(other) is face and other.batch_size == 5
        other.extend(rows(3, 2))
    assert same(rb[:], rows(0, 5))
    with shmbuf.attach(rb.name, batch_size=2) as here, pickle.loads(pickle.dumps(here)) as other:
        assert other.batch_size == 2


def test_the_context_manager_closes(make, rb):
    with rb as same_one:
        assert same_one is rb
        rb.extend(rows(0, 3))
    for call in (
        lambda: rb.extend(rows(0, 1)),
        lambda: rb.sample(1),
        lambda: len(rb),
        lambda: rb[0],
        lambda: rb.stats(),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    rb.close()
    with shmbuf.attach(rb.name) as again:
        assert len(again) == 3, "a named buffer stays"


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_an_unnamed_buffer_dies_with_its_owner(end):
    rb = TensorDictReplayBuffer(storage=ShmStorage(10, drain="caller"))
    rb.extend(rows(0, 3))
    path, other = segment.path_of(rb.name), pickle.loads(pickle.dumps(rb))
    assert os.path.exists(path) and len(other) == 3
    if end == "close":
        rb.close()
    elif end == "with":
        with rb:
            pass
    else:
        del rb
        gc.collect()
    assert not os.path.exists(path)
    with pytest.raises(StorageLost):
        other.extend(rows(0, 1))
    other.close()


def test_the_default_storage_is_unnamed():
    with ReplayBuffer() as rb:
        rb.extend(rows(0, 3))
        assert rb.buffer.capacity == 1000 and rb.name.startswith("unnamed.") and len(rb.storage) == 3


@pytest.mark.parametrize("kw", [{"storage": 5}, {"storage": torch.zeros(3)}, {"sampler": 5}, {"sampler": "random"}])
def test_parts_that_are_none(kw):
    with pytest.raises(TypeError):
        TensorDictReplayBuffer(**kw)


def test_parts_may_be_made_by_a_callable():
    with TensorDictReplayBuffer(
        storage=lambda: ShmStorage(20, drain="caller"), sampler=RandomSampler, batch_size=2
    ) as rb:
        rb.extend(rows(0, 3))
        assert rb.buffer.capacity == 20 and rb.sample().batch_size == torch.Size([2])


@pytest.mark.parametrize("kw", [{"device": "cuda"}, {"device": "meta"}, {"ndim": 2}])
def test_storage_arguments_that_are_not_there_yet(kw):
    with pytest.raises(ValueError):
        ShmStorage(10, **kw)


def test_stats_have_torchrls_keys_too(rb):
    rb.extend(rows(0, 30))
    s = rb.stats()
    assert {
        k: s[k] for k in ("size", "write_count", "capacity", "utilization", "prefetch_queue_size", "initialized")
    } == {
        "size": 30,
        "write_count": 30,
        "capacity": 100,
        "utilization": 0.3,
        "prefetch_queue_size": 0,
        "initialized": True,
    }


def test_repr_says_what_it_is(rb, make):
    rb.extend(rows(0, 3))
    assert "3 of 100 rows" in repr(rb) and "RandomSampler" in repr(rb) and "float32[4]" in repr(rb)
    assert "no schema yet" in repr(make(schema=None)) and "not made yet" in repr(ShmStorage(5))
    rb.close()
    assert "closed" in repr(rb)
