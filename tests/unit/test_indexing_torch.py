"""Indexing against a plain TensorDict; every dtype, shape and nesting bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import Schema, SchemaError, ShmStorage, TensorDictReplayBuffer
from shmbuf.schema import DTYPES
from tests.unit.helpers_torch import SPEC, bits, rows, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


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


# What int64 does not hold: as row −1 it would be the last one.
LARGE = (
    2**63,
    -(2**63) - 1,
    2**70,
    [2**63],
    [2**64 - 1],
    [0, 2**70],
    np.uint64(2**64 - 1),
    np.array([2**64 - 1], "u8"),
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
        *((i, IndexError, "out of range: 6 rows are stored") for i in LARGE),
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
def test_every_dtype_bit_for_bit(make_rb, dtype, by):
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
    rb = make_rb(**given)
    rb.extend(td)
    rb.add(td[0])
    rb.extend([td[1], td[2]])
    assert len(rb) == 12 and same(rb[:9], td) and same(rb[9], td[0]) and same(rb[10:], td[1:3])
    batch = rb.sample(30)
    assert same(batch.exclude("index", "row_id"), rb[batch["index"]])
    assert all(batch[k].dtype == torch_dtype for k in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex32, torch.float8_e5m2, torch.bool])
def test_example_as_a_mapping_of_tensors(make_rb, dtype):
    rb = make_rb(
        schema=None, example={"x": torch.zeros(3, dtype=dtype), "n": {"y": torch.zeros((), dtype=torch.int64)}}
    )
    assert rb.buffer.schema == Schema.from_spec({"x": (dtype, (3,)), "n": {"y": "int64"}})


def test_example_as_a_batch_of_which_one_row_counts(make_rb):
    assert (
        make_rb(schema=None, example=rows(0, 5)).buffer.schema
        == make_rb().buffer.schema
        == make_rb(schema=None, example=rows(0, None)).buffer.schema
    )


def test_schema_and_example_must_agree(make_rb):
    make_rb(example=rows(0, None))
    make_rb(schema=Schema.from_spec(SPEC))
    make_rb(schema=Schema.from_spec(SPEC), example=rows(0, None))
    for example in (rows(0, None).exclude("k"), rows(0, None).to(torch.float64)):
        with pytest.raises(SchemaError, match="the example does not fit"):
            make_rb(example=example)


def test_nested_keys_and_names_with_dots(make_rb):
    td = TensorDict(
        {
            "next.obs": torch.arange(3),
            "next": {"obs": torch.arange(3) + 10, "agents": {"a": {"obs": torch.arange(6).reshape(3, 2)}}},
        },
        [3],
    )
    rb = make_rb(schema=None)
    rb.extend(td)
    assert same(rb[:], td) and rb["next.obs"].tolist() == [0, 1, 2] and rb["next", "obs"].tolist() == [10, 11, 12]
    got = rb.sample(4)
    assert (
        got["next", "agents", "a"].batch_size == torch.Size([4])
        and (got["next", "agents", "a", "obs"][:, 0] == 2 * got["index"]).all()
    )
