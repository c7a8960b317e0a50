"""Schema: what a row is made of, where each column lies, and that nothing else passes."""

from __future__ import annotations

import math
import random

import msgpack
import numpy as np
import pytest

from shmbuf import BufferFormatError, Schema, SchemaError
from shmbuf.schema import DTYPES, MAX_DEPTH, MAX_DIMS, Column, as_key, dtype_name, flatten, nest

BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


def again(schema: Schema) -> Schema:
    return Schema.from_bytes(schema.to_bytes())


# ---- round trip ----------------------------------------------------------------------------------------------------


def test_every_fixed_size_dtype_is_there():
    assert {d: t.bytes for d, t in DTYPES.items()} == BYTES
    assert all(np.dtype(t.numpy).itemsize == t.bytes for t in DTYPES.values())


@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 3), (1,) * MAX_DIMS])
@pytest.mark.parametrize("dtype", BYTES)
def test_round_trip_of_every_dtype_and_shape(dtype, shape):
    schema = Schema.from_spec({"x": (dtype, shape)})
    assert again(schema) == schema
    (column,) = again(schema).columns
    assert (column.key, column.dtype, column.shape, column.nbytes) == (
        ("x",),
        dtype,
        shape,
        BYTES[dtype] * math.prod(shape),
    )


@pytest.mark.parametrize("depth", [1, 2, 5, MAX_DEPTH])
def test_round_trip_of_any_nesting(depth):
    spec: dict = {"leaf": ("float32", (2,)), "other": "bool"}
    for level in range(depth - 1):
        spec = {f"level{level}": spec, "beside": ("int16", (level,))}
    schema = Schema.from_spec(spec)
    assert again(schema) == schema and again(schema).keys == schema.keys
    assert max(len(k) for k in schema.keys) == depth


def test_nested_mappings_and_tuple_keys_mean_the_same():
    a = Schema.from_spec({"x": "int8", "next": {"obs": ("float32", (4,)), "agent": {"a": "bool"}}})
    b = Schema.from_spec({"x": "int8", ("next", "obs"): ("float32", (4,)), "next": {("agent", "a"): "bool"}})
    assert a == b and hash(a) == hash(b) and a.keys == (("x",), ("next", "obs"), ("next", "agent", "a"))


def test_the_order_of_the_columns_is_the_callers():
    keys = ["z", "a", "m", "b"]
    schema = again(Schema.from_spec({k: d for k, d in zip(keys, ["int8", "float64", "int16", "float32"], strict=True)}))
    assert [k for (k,) in schema.keys] == keys


def test_a_dot_in_a_name_is_no_nesting():
    schema = again(Schema.from_spec({"next.obs": "int8", "next": {"obs": "int16"}}))
    assert [(c.key, c.dtype) for c in schema.columns] == [(("next.obs",), "int8"), (("next", "obs"), "int16")]


@pytest.mark.parametrize("key", ["", "\0", "a\0", "\0a", " ", "0\U00010000", "é" * 510, "\n", "'", "\x7f", "日本"])
def test_any_text_is_a_key_and_comes_back_exactly(key):
    schema = Schema.from_spec({key: "int8", "beside": "int16", "nest": {key: "int32"}})
    assert again(schema).keys == ((key,), ("beside",), ("nest", key))


@pytest.mark.parametrize("tree", [{"a": 1}, {"a": {"b": 1, "c": {"d": 2}}, "e": 3}, {"": {"": 1}}])
def test_nest_is_the_inverse_of_flatten(tree):
    flat = flatten(tree)
    assert nest(flat.keys(), flat.values()) == tree


def test_from_leaves_takes_dtype_and_inner_shape():
    leaves = {("a",): np.zeros((5, 2, 3), ">i2"), ("b", "c"): np.zeros(5, bool)}
    assert Schema.from_leaves(leaves, 1) == Schema.from_spec({"a": ("int16", (2, 3)), "b": {"c": "bool"}})
    assert Schema.from_leaves(leaves, 0) == Schema.from_spec({"a": ("int16", (5, 2, 3)), "b": {"c": ("bool", (5,))}})


# ---- dtypes by their many names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "is_called"),
    [
        ("float32", "float32"),
        ("torch.float32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.half", "float16"),
        ("torch.long", "int64"),
        ("torch.double", "float64"),
        ("torch.cfloat", "complex64"),
        ("torch.chalf", "complex32"),
        ("<f4", "float32"),
        (">f4", "float32"),
        ("f8", "float64"),
        ("?", "bool"),
        ("u1", "uint8"),
        (np.float32, "float32"),
        (np.bool_, "bool"),
        (np.uint16, "uint16"),
        (np.dtype(">i8"), "int64"),
        (np.dtype("c8"), "complex64"),
        (float, "float64"),
        (int, "int64"),
        (bool, "bool"),
        (complex, "complex128"),
    ],
)
def test_names_of_dtypes(given, is_called):
    assert dtype_name(given) == is_called
    assert Schema.from_spec({"x": given}).columns[0].dtype == is_called


@pytest.mark.parametrize(
    "dtype",
    [
        object,
        str,
        bytes,
        "S5",
        "U3",
        "V4",
        "M8[ns]",
        "m8[s]",
        np.longdouble,
        np.clongdouble,
        "quint8",
        "torch.quint8",
        "",
        "nonsense",
        5,
        [("x", "f4")],
        np.dtype("f4,i4"),
        np.void,
        "f4,f4",
        None,
    ],
)  # np.dtype(None) is float64
def test_a_dtype_without_a_fixed_size_is_refused_and_the_key_named(dtype):
    with pytest.raises(SchemaError, match=r"key \('next', 'obs'\)"):
        Schema.from_spec({"next": {"obs": (dtype, (3,))}})
    with pytest.raises(SchemaError, match=r"key \('next', 'obs'\)"):
        Schema.from_spec({"next": {"obs": dtype}})


@pytest.mark.parametrize(
    "shape", [None, -1, (-1,), (3, -2), (None,), ("x",), ((1, 2),), 1.5, {"a": 1}, (2.7,), (2.0,), "34"]
)
def test_what_is_no_shape_is_refused_and_the_key_named(shape):
    with pytest.raises(SchemaError, match="key 'obs'"):
        Schema.from_spec({"obs": ("float32", shape)})


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        "float32",
        [("obs", "float32")],
        {},
        {"a": {}},
        {1: "int8"},
        {(): "int8"},
        {("a", 1): "int8"},
        {b"a": "int8"},
        {"a": {None: "int8"}},
        {"a\ud800": "int8"},
    ],
)
def test_what_is_no_schema_is_refused(spec):
    with pytest.raises(SchemaError):
        Schema.from_spec(spec)


def test_a_leaf_that_is_no_array_is_refused_and_the_key_named():
    with pytest.raises(SchemaError, match=r"key \('info', 'text'\): got str, expected an array"):
        Schema.from_leaves({("info", "text"): "hello"}, 0)
    with pytest.raises(SchemaError, match=r"key 'x': .*<U5"):
        Schema.from_leaves({("x",): np.array(["hello"])}, 1)


# ---- conflicts and limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"a": "int8", ("a", "b"): "int8"}, "key 'a' is a column and also holds ('a', 'b')"),
        ({("a", "b", "c"): "int8", ("a", "b"): "int8"}, "key ('a', 'b') is a column and also holds ('a', 'b', 'c')"),
        ({"a": {"b": "int8"}, ("a", "b"): "int8"}, "key ('a', 'b') is given twice"),
        ({("a",): "int8", "a": "int16"}, "key 'a' is given twice"),
    ],
)
def test_a_key_twice_or_inside_another_is_refused(spec, text):
    with pytest.raises(SchemaError) as e:
        Schema.from_spec(spec)
    assert text in str(e.value)


def test_columns_given_directly_are_checked_too():
    for columns in (
        [Column(("a",), "int8", ()), Column(("a",), "int8", ())],
        [Column(("a",), "int8", ()), Column(("a", "b"), "int8", ())],
        [Column(("a",), "float", ())],
        [Column(("a",), "int8", (-1,))],
        [],
    ):
        with pytest.raises(SchemaError):
            Schema(columns)


def key_of(total: int, parts: int) -> tuple[str, ...]:
    return ("k" * (total - parts + 1),) + ("k",) * (parts - 1)


@pytest.mark.parametrize(
    ("limit", "make", "text"),
    [
        (4096, lambda n: {f"c{i}": "int8" for i in range(n)}, "4097 columns; at most 4096"),
        (32, lambda n: {"a": ("int8", (1,) * n)}, "key 'a': 33 dimensions; at most 32"),
        (1024, lambda n: {"k" * n: "int8"}, "has 1025 bytes in 1 parts; at most 1024 bytes in 32 parts"),
        (1024, lambda n: {key_of(n, 3): "int8"}, "has 1025 bytes in 3 parts; at most 1024 bytes in 32 parts"),
        (
            256,
            lambda n: {"\U00010000" * n: "int8"},
            "has 1028 bytes in 1 parts; at most 1024 bytes in 32 parts",
        ),  # bytes, not characters
        (32, lambda n: {key_of(n, n): "int8"}, "has 33 bytes in 33 parts; at most 1024 bytes in 32 parts"),
        (1 << 30, lambda n: {"a": ("uint8", (n,))}, "key 'a': shape (1073741825,): dimensions are 0 to 1,073,741,824"),
        (1 << 29, lambda n: {"a": ("uint8", (2, n))}, "a row has 1,073,741,826 bytes; at most 1,073,741,824"),
        (1 << 27, lambda n: {"a": ("float64", (n,))}, "a row has 1,073,741,832 bytes; at most 1,073,741,824"),
    ],
)
def test_limits_hold_exactly_and_the_error_says_them(limit, make, text):
    assert again(Schema.from_spec(make(limit)))
    with pytest.raises(SchemaError) as e:
        Schema.from_spec(make(limit + 1))
    assert text in str(e.value)


def test_dimensions_whose_product_overflows_64_bits_are_refused():
    with pytest.raises(SchemaError, match=r"a row has .* bytes; at most"):
        Schema.from_spec({"a": ("float64", (1 << 30, 1 << 30, 1 << 30))})


# ---- layout --------------------------------------------------------------------------------------------------------


def random_schema(rng: random.Random) -> Schema:
    return Schema(
        [
            Column(
                (f"k{i}",),
                rng.choice(list(BYTES)),
                tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randint(0, 3))),
            )
            for i in range(rng.randint(1, 12))
        ]
    )


@pytest.mark.parametrize("seed", range(200))
def test_columns_are_aligned_do_not_overlap_and_fill_the_row(seed):
    schema = random_schema(random.Random(seed))
    used = sorted((c.offset, c.nbytes) for c in schema.columns if c.nbytes)
    for c in schema.columns:
        assert c.offset % min(8, BYTES[c.dtype]) == 0, c
        assert c.nbytes == BYTES[c.dtype] * math.prod(c.shape)
    at = 0
    for offset, nbytes in used:
        assert offset == at, "neither a gap nor an overlap"
        at += nbytes
    assert at == schema.payload_bytes == sum(c.nbytes for c in schema.columns)
    assert schema.row_bytes % 8 == 0 and schema.row_bytes == max(8, schema.payload_bytes + -schema.payload_bytes % 8)
    assert again(schema) == schema and again(schema).row_bytes == schema.row_bytes


@pytest.mark.parametrize(
    ("spec", "payload", "row"),
    [
        ({"a": "bool"}, 1, 8),
        ({"a": ("uint8", (0,))}, 0, 8),
        ({"a": ("uint8", (8,))}, 8, 8),
        ({"a": ("uint8", (9,))}, 9, 16),
        ({"a": ("uint8", (3,)), "b": "float64"}, 11, 16),
        ({"a": "complex128", "b": "bool"}, 17, 24),
    ],
)
def test_bytes_per_row(spec, payload, row):
    schema = Schema.from_spec(spec)
    assert (schema.payload_bytes, schema.row_bytes) == (payload, row)


# ---- differences ---------------------------------------------------------------------------------------------------


def test_differences_name_key_got_and_expected_one_line_each():
    schema = Schema.from_spec({"obs": ("float32", (4,)), "act": "int64", "next": {"done": "bool"}})
    lines = schema.differences({("Obs",): ("float32", (4,)), ("act",): ("int32", (2,)), ("next", "done"): ("bool", ())})
    assert lines == [
        "key 'obs' is missing, expected float32[4] (did you mean it by 'Obs'?)",
        "key 'Obs' is not in the schema, got float32[4]",
        "key 'act': got int32[2], expected int64[]",
    ]
    assert schema.differences({c.key: (c.dtype, c.shape) for c in reversed(schema.columns)}) == []


def test_require_same_compares_keys_not_their_order():
    a, b = Schema.from_spec({"x": "int8", "y": "int16"}), Schema.from_spec({"y": "int16", "x": "int8"})
    assert a != b
    a.require_same(b, "the other one")
    with pytest.raises(
        SchemaError, match=r"(?s)the other one does not fit.*key 'y': got int32\[\], expected int16\[\]"
    ):
        a.require_same(Schema.from_spec({"x": "int8", "y": "int32"}), "the other one")


# ---- bytes of a stranger -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb({}),
        msgpack.packb({"columns": None}),
        msgpack.packb({"columns": []}),
        msgpack.packb({"columns": [["a"]]}),
        msgpack.packb({"columns": [[["a"], "int8", []]]}),
        msgpack.packb({"columns": [[["a"], "int8", [], 0, 0]]}),
        msgpack.packb({"columns": [[["a"], "int8", [-1], 0]]}),
        msgpack.packb({"columns": [[["a"], ["int8"], [], 0]]}),
        msgpack.packb({"columns": [[["a"], "int9", [], 0]]}),
        msgpack.packb({"columns": [[["a"], "int8", [1.5], 0]]}),
        msgpack.packb({"columns": [[["a"], "int8", "3", 0]]}),
        msgpack.packb({"columns": [[[b"a"], "int8", [], 0]]}),
        msgpack.packb({"columns": [[[], "int8", [], 0]]}),
        msgpack.packb({"columns": [[["a"], "int8", [], 8]]}),
        msgpack.packb({"columns": [[["a"], "int8", [], 0], [["b"], "int8", [], 0]]}),
        msgpack.packb({"columns": [[["a"], "int8", [], 0]]})[:-1],
        msgpack.packb({"columns": [[["a"], "int8", [], 0]]}) + b"\0",
    ],
)
def test_bytes_that_are_no_schema_are_a_format_error(blob):
    with pytest.raises(BufferFormatError):
        Schema.from_bytes(blob)


def test_damaged_bytes_raise_nothing_but_a_format_error():
    rng = random.Random(7)
    good = Schema.from_spec({"obs": ("float32", (4, 2)), "next": {"obs": ("float16", (4,)), "é": "bool"}}).to_bytes()
    refused = 0
    for _ in range(3000):
        blob = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            blob[rng.randrange(len(blob))] = rng.randrange(256)
        try:
            read = Schema.from_bytes(bytes(blob[: rng.randint(0, len(blob))] if rng.random() < 0.2 else blob))
        except BufferFormatError:
            refused += 1
        else:
            assert again(read) == read and [c.offset for c in again(read).columns] == [c.offset for c in read.columns]
    assert refused > 1000


def test_as_key():
    assert as_key("a") == ("a",) and as_key(("a", "b")) == ("a", "b") and as_key(["a"]) == ("a",)


@pytest.mark.parametrize("text", [",orch.float32", "f4,(", "", "3,", "torch.", "no such"])
def test_text_that_is_no_dtype_is_a_schema_error(text):
    with pytest.raises(SchemaError, match="cannot be stored"):
        Schema.from_spec({"a": text})
