"""Input that is odd or wrong, at the numpy level: taken byte for byte, or refused with a SchemaError that names the key, what was
got and what was expected; then nothing has moved and the producer can go on."""

from __future__ import annotations

import array
import types

import numpy as np
import pytest

from shmbuf import Buffer, Schema, SchemaError
from tests.unit.helpers import SPEC, numbers, raw, rows, same, stored, unmoved


@pytest.fixture(params=["schema", "first put"])
def buf(request, name):
    """With rows in it; its schema was given, or came from the first put."""
    with Buffer.create(
        name, 50, schema=SPEC if request.param == "schema" else None, drain="caller", ring_bytes=1 << 14
    ) as buf:
        buf.extend(rows(0, 3))
        yield buf


def changed(key: tuple[str, ...], value, n: int = 2) -> dict:
    """Rows of SPEC with one leaf replaced (None: removed)."""
    out = rows(10, n)
    node = out
    for part in key[:-1]:
        node = node.setdefault(part, {})
    if value is None:
        del node[key[-1]]
    else:
        node[key[-1]] = value
    return out


def refused(buf: Buffer, given, *texts: str) -> None:
    for call in (buf.put, buf.extend):
        with unmoved(buf), pytest.raises(SchemaError) as e:
            call(given)
        for text in texts:
            assert text in str(e.value), str(e.value)
    n = len(buf)
    assert buf.extend(rows(n, 2)).tolist() == [n, n + 1], "the producer can go on"
    assert numbers(buf) == list(range(n + 2))


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "texts"),
    [
        # missing, extra, misspelt
        (("obs",), None, ["key 'obs' is missing, expected float32[4]"]),
        (("next", "obs"), None, ["key ('next', 'obs') is missing, expected float32[4]"]),
        (("next",), None, ["key ('next', 'obs') is missing", "key ('next', 'done') is missing, expected bool[]"]),
        (("extra",), np.zeros((2, 7), np.int16), ["key 'extra' is not in the schema, got int16[7]"]),
        (("next", "extra"), np.zeros(2), ["key ('next', 'extra') is not in the schema, got float64[]"]),
        (("next", "agent", "obs"), np.zeros(2), ["key ('next', 'agent', 'obs') is not in the schema, got float64[]"]),
        # dtype: never converted, not even where nothing would be lost
        (("obs",), np.zeros((2, 4), "f8"), ["key 'obs': got float64[4], expected float32[4]"]),
        (("obs",), np.zeros((2, 4), "f2"), ["key 'obs': got float16[4], expected float32[4]"]),
        (("obs",), np.zeros((2, 4), "c8"), ["key 'obs': got complex64[4], expected float32[4]"]),
        (("k",), np.zeros(2, "i4"), ["key 'k': got int32[], expected int64[]"]),
        (("k",), np.zeros(2, "u8"), ["key 'k': got uint64[], expected int64[]"]),
        (("k",), np.zeros(2, bool), ["key 'k': got bool[], expected int64[]"]),
        (("next", "done"), np.zeros(2, "u1"), ["key ('next', 'done'): got uint8[], expected bool[]"]),
        (("next", "done"), np.zeros(2, "i1"), ["key ('next', 'done'): got int8[], expected bool[]"]),
        (("obs",), np.zeros((2, 4), np.longdouble), ["key 'obs'", "expected float32[4]"]),
        (("obs",), [[0.0] * 4] * 2, ["key 'obs': got float64[4], expected float32[4]"]),
        # inner shape
        (("obs",), np.zeros((2, 5), "f4"), ["key 'obs': got float32[5], expected float32[4]"]),
        (("obs",), np.zeros((2, 3), "f4"), ["key 'obs': got float32[3], expected float32[4]"]),
        (("obs",), np.zeros((2, 0), "f4"), ["key 'obs': got float32[0], expected float32[4]"]),
        (("obs",), np.zeros(2, "f4"), ["key 'obs': got float32[], expected float32[4]"]),
        (("obs",), np.zeros((2, 2, 2), "f4"), ["key 'obs': got float32[2, 2], expected float32[4]"]),
        (("obs",), np.zeros((2, 4, 1), "f4"), ["key 'obs': got float32[4, 1], expected float32[4]"]),
        (("k",), np.zeros((2, 1), "i8"), ["key 'k': got int64[1], expected int64[]"]),
        # numbers of rows
        (("obs",), np.zeros((3, 4), "f4"), ["'obs': 3", "'k': 2", "('next', 'obs'): 2"]),
        (("k",), np.zeros(1, "i8"), ["'k': 1", "'obs': 2"]),
        (("k",), np.zeros(0, "i8"), ["'k': 0", "'obs': 2"]),
        (("obs",), np.zeros((0, 4), "f4"), ["'obs': 0", "'k': 2"]),
        (("k",), np.int64(5), ["'k': none", "'obs': 2"]),
        (("k",), 5, ["'k'"]),
        # no arrays
        (("k",), "text", ["key 'k': got str, expected an array"]),
        (("k",), b"bytes", ["key 'k': got bytes, expected an array"]),
        (("k",), object(), ["key 'k': got object, expected an array"]),
        (("next", "done"), {1, 2}, ["key ('next', 'done'): got set, expected an array"]),
        (("k",), np.array(["a", "b"]), ["key 'k'", "<U1"]),
        (("k",), np.array([b"a", b"b"]), ["key 'k'", "S1"]),
        (("k",), np.array([1, None]), ["key 'k'", "object"]),
        (("k",), np.zeros(2, "M8[s]"), ["key 'k'", "datetime64[s]"]),
        (("k",), np.zeros(2, "m8[ns]"), ["key 'k'", "timedelta64[ns]"]),
        (("k",), np.zeros(2, [("a", "i4"), ("b", "i4")]), ["key 'k'"]),
        (("k",), np.zeros(2, "V8"), ["key 'k'"]),
        (("k",), [[1], [2, 3]], ["key 'k'"]),
        (("extra",), "text", ["key 'extra': got str"]),
        # nested where flat is expected, flat where nested is
        (
            ("obs",),
            {"x": np.zeros((2, 4), "f4")},
            ["key 'obs' is missing", "key ('obs', 'x') is not in the schema, got float32[4]"],
        ),
        (("next",), np.zeros((2, 4), "f4"), ["key 'next' is not in the schema", "key ('next', 'obs') is missing"]),
        # keys that are none
        ((("next", "obs"),), np.zeros((2, 4), "f4"), ["key ('next', 'obs') is given twice"]),
        ((5,), np.zeros(2), ["key 5 is no str"]),
        ((("a", 5),), np.zeros(2), ["key ('a', 5) is no str"]),
        (((),), np.zeros(2), ["key () is no str"]),
        (("",), np.zeros(2), ["key '' is not in the schema"]),
    ],
)
def test_refused(buf, key, value, texts):
    refused(buf, changed(key, value), *texts)


def test_a_misspelt_key_is_recognised(buf):
    given = rows(10, 2)
    given["Obs"] = given.pop("obs")
    given["next"]["don"] = given["next"].pop("done")
    given["done"] = given["next"].pop("don")
    refused(
        buf,
        given,
        "key 'obs' is missing, expected float32[4] (did you mean it by 'Obs'?)",
        "key 'Obs' is not in the schema, got float32[4]",
        "key ('next', 'done') is missing, expected bool[] (did you mean it by 'done'?)",
    )


def test_every_difference_is_listed_in_one_error(buf):
    given = {"k": np.zeros(2, "i4"), "next": {"obs": np.zeros((2, 5), "f4"), "other": np.zeros(2)}, "z": np.zeros(2)}
    refused(
        buf,
        given,
        "key 'obs' is missing, expected float32[4]",
        "key ('next', 'done') is missing, expected bool[]",
        "key ('next', 'other') is not in the schema, got float64[]",
        "key 'z' is not in the schema, got float64[]",
        "key 'k': got int32[], expected int64[]",
        "key ('next', 'obs'): got float32[5], expected float32[4]",
    )


@pytest.mark.parametrize("given", [None, [], [1, 2], "text", b"bytes", 5, np.zeros(3), [rows(0)], (), {1}, object()])
def test_rows_that_are_no_mapping(buf, given):
    refused(buf, given, "rows are a mapping of key to array, not")


@pytest.mark.parametrize("given", [{}, {"next": {}}, {"obs": {}, "next": {}, "k": {}}])
def test_no_keys_at_all(buf, given):
    refused(buf, given, "key 'obs' is missing, expected float32[4]")


# ---- refused as the first put of a buffer without a schema -----------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"next": {}},
        {"k": "text"},
        {"k": np.array(["a"])},
        {"k": np.array([None])},
        {"k": np.int64(5)},
        {5: np.zeros(2)},
        {"a": np.zeros(2), "b": np.zeros(3)},
        {"a": np.zeros(2, "M8[s]")},
        {"a": np.zeros(2, "f4,i4")},
        {"a": np.zeros((2, 3), np.longdouble)},
        {"a": np.zeros(2), ("a", "b"): np.zeros(2)},
        {"a": {"b": np.zeros(2)}, ("a", "b"): np.zeros(2)},
        {"a\ud800": np.zeros(2)},
        {"k" * 1025: np.zeros(2)},
        {"a": np.zeros((2, *(1,) * 33))},
        [1, 2],
        None,
        np.zeros(3),
        "text",
    ],
)
def test_refused_as_the_first_put(name, given):
    with Buffer.create(name, 50, drain="caller") as buf:
        for call in (buf.put, buf.extend):
            with pytest.raises(SchemaError):
                call(given)
            assert buf.schema is None and len(buf) == 0 and buf.stats()["put_rows"] == 0 and buf.collectors() == []
        assert buf.extend(rows(0, 2)).tolist() == [0, 1] and buf.schema == Schema.from_spec(SPEC)


def test_the_loser_of_the_first_put_is_checked_against_the_winner(name):
    with Buffer.create(name, 50, drain="caller") as buf, Buffer.attach(name) as other:
        buf.extend(rows(0, 2))
        refused(other, {"k": np.zeros(2, np.int64)}, "key 'obs' is missing")


# ---- taken, byte for byte -------------------------------------------------------------------------------------------


def strided(a: np.ndarray) -> np.ndarray:
    wide = np.zeros((a.shape[0] * 3, *(2 * d for d in a.shape[1:])), a.dtype)
    view = wide[tuple(slice(None, None, s) for s in (3, *(2,) * (a.ndim - 1)))]
    view[:] = a
    return view


def strided_rows(a: np.ndarray) -> np.ndarray:
    """Only from row to row; each row's values lie side by side."""
    wide = np.zeros((a.shape[0] * 3, *a.shape[1:]), a.dtype)
    wide[::3] = a
    return wide[::3]


def reversed_rows(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a[::-1])[::-1]


def reversed_(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a[tuple(slice(None, None, -1) for _ in a.shape)])[
        tuple(slice(None, None, -1) for _ in a.shape)
    ]


def read_only(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


def unaligned(a: np.ndarray) -> np.ndarray:
    """As np.frombuffer gives it for the payload of a message with a header of odd size."""
    return np.frombuffer(b"\1" + raw(a), np.uint8)[1:].view(a.dtype).reshape(a.shape)


def packed(a: np.ndarray) -> np.ndarray:
    """A field of a packed record."""
    records = np.zeros(a.shape, [("pad", "u1"), ("x", a.dtype)])
    records["x"] = a
    return records["x"]


class Subclass(np.ndarray):
    pass


class HasArray:
    def __init__(self, a):
        self._a = a

    def __array__(self, dtype=None, copy=None):
        return self._a


class HasInterface:
    def __init__(self, a):
        self._a, self.__array_interface__ = a, a.__array_interface__


FORMS = {
    "as it is": lambda a: a,
    "strided": strided,
    "strided rows": strided_rows,
    "reversed rows": reversed_rows,
    "fortran order": np.asfortranarray,
    "negative strides": reversed_,
    "read-only": read_only,
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "big-endian, strided": lambda a: strided(a.astype(a.dtype.newbyteorder(">"))),
    "big-endian, reversed": lambda a: reversed_(a.astype(a.dtype.newbyteorder(">"))),
    # numpy gives both the format code "=f", and np.ascontiguousarray does not align
    "unaligned": unaligned,
    "packed record field": packed,
    "subclass": lambda a: a.view(Subclass),
    "subclass, reversed": lambda a: reversed_(a).view(Subclass),
    "__array__": HasArray,
    "__array_interface__": HasInterface,
    "memoryview": lambda a: memoryview(np.ascontiguousarray(a)),
    "memoryview, read-only": lambda a: memoryview(read_only(a)),
    "moved axes": lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 0, -1)), -1, 0),
    "memory map": lambda a: np.array(a).view(np.memmap),
}
COLUMNS = {
    "f": ("float32", (2, 3)),
    "b": "bool",
    "i": ("int64", ()),
    "h": ("uint16", (3,)),
    "c": ("complex64", (2,)),
    "e": ("float16", (1,)),
    "d": "float64",
    "nest": {"u": ("uint8", (5,)), "zero": ("float32", (0, 2)), "z": ("complex128", ()), "j": ("int32", (1, 1))},
}


def samples(n: int) -> dict:
    rng = np.random.default_rng(3)
    out = {}
    for c in Schema.from_spec(COLUMNS).columns:
        a = np.frombuffer(rng.bytes(n * c.nbytes), c.numpy) if c.nbytes else np.zeros(0, c.numpy)
        out[c.key] = (
            (a.view(np.uint8) & 1).view(bool).reshape(n, *c.shape)
            if c.dtype == "bool"
            else a.reshape(n, *c.shape).copy()
        )
    return out


@pytest.mark.parametrize("given_schema", [True, False])
@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("form", FORMS)
def test_taken(name, form, n, given_schema):
    given = samples(n)
    with Buffer.create(name, 1000, schema=COLUMNS if given_schema else None, drain="caller", ring_bytes=1 << 14) as buf:
        odd = {key: FORMS[form](a) for key, a in given.items()}
        assert buf.extend(odd).tolist() == list(range(n))
        assert buf.schema == Schema.from_spec(COLUMNS)
        assert same(stored(buf), given)


@pytest.mark.parametrize(
    "form", ["strided", "strided rows", "reversed rows", "negative strides", "big-endian", "read-only"]
)
def test_one_odd_leaf_among_plain_ones(buf, form):
    given = rows(3, 5)
    given["next"]["obs"] = FORMS[form](given["next"]["obs"])
    buf.extend(given)
    assert same(stored(buf), rows(0, 8))


def test_zero_strides_are_read_as_what_they_show(buf):
    given = rows(3, 4)
    given["obs"] = np.broadcast_to(given["obs"][:1], (4, 4))
    given["next"]["obs"] = np.broadcast_to(given["obs"][0, :1], (4, 4))
    given["k"] = np.broadcast_to(np.int64(3), (4,))
    buf.extend(given)
    assert same(buf.gather(np.arange(3, 7)), {**given, "next": dict(given["next"])})


def test_one_array_under_two_keys(buf):
    given = rows(3, 4)
    given["next"]["obs"] = given["obs"]
    buf.extend(given)
    assert raw(buf.gather(np.arange(3, 7))["next"]["obs"]) == raw(given["obs"])


@pytest.mark.parametrize(
    "tree",
    [
        lambda r: types.MappingProxyType(r),
        lambda r: {
            "obs": r["obs"],
            "k": r["k"],
            ("next", "obs"): r["next"]["obs"],
            ("next", "done"): r["next"]["done"],
        },
        lambda r: {"k": r["k"], "next": types.MappingProxyType(r["next"]), "obs": r["obs"]},
        lambda r: {**r, "next": {("obs",): r["next"]["obs"], "done": r["next"]["done"]}},
        lambda r: dict(reversed(r.items())),
        lambda r: {("obs",): r["obs"], **{k: v for k, v in r.items() if k != "obs"}},
    ],
)
def test_any_way_to_write_the_keys(buf, tree):
    buf.extend(tree(rows(3, 4)))
    assert same(stored(buf), rows(0, 7))


def test_lists_and_arrays_of_other_modules_where_the_dtype_fits(buf):
    given = rows(3, 4)
    given["k"] = [3, 4, 5, 6]
    given["next"]["done"] = [True, False, False, True]
    buf.extend(given)
    given["k"] = array.array("q", [7, 8, 9, 10])
    given["obs"], given["next"] = rows(7, 4)["obs"], rows(7, 4)["next"]
    buf.extend(given)
    assert same(stored(buf), rows(0, 11))


@pytest.mark.parametrize("n", [0])
def test_zero_rows_are_checked_and_are_nothing(buf, n):
    with unmoved(buf):
        ticket = buf.put(rows(0, n))
        assert (
            (ticket.rows, ticket.done()) == (0, True)
            and ticket.wait(0).tolist() == []
            and ticket.ids().dtype == np.int64
        )
        assert buf.extend(rows(0, n)).tolist() == []
    refused(buf, {**rows(0, 0), "obs": np.zeros((0, 5), "f4")}, "key 'obs': got float32[5], expected float32[4]")
    refused(buf, {**rows(0, 0), "k": np.zeros(0, "i4")}, "key 'k': got int32[], expected int64[]")
    refused(buf, {"k": np.zeros(0, "i8")}, "key 'obs' is missing")


def test_zero_rows_as_the_first_put_decide_nothing(name):
    with Buffer.create(name, 50, drain="caller") as buf:
        assert buf.extend({"k": np.zeros(0)}).tolist() == [] and buf.schema is None
        buf.extend(rows(0, 2))
        assert buf.schema == Schema.from_spec(SPEC)


# ---- columns that numpy has no dtype for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bfloat16", "uint16"), ("complex32", "uint32"), ("float8_e4m3fn", "uint8"), ("float8_e8m0fnu", "uint8")],
)
def test_a_dtype_that_numpy_lacks_is_its_bits(name, dtype, bits):
    with Buffer.create(name, 50, schema={"x": (dtype, (3,))}, drain="caller") as buf:
        given = np.frombuffer(np.random.default_rng(1).bytes(6 * np.dtype(bits).itemsize), bits).reshape(2, 3)
        buf.extend({"x": given})
        buf.extend({"x": strided(given)})
        buf.extend({"x": given.astype(given.dtype.newbyteorder(">"))})
        assert same(stored(buf), {"x": np.concatenate([given] * 3)})
        for wrong in ("float32", "int8", "float16"):
            with pytest.raises(SchemaError, match=rf"key 'x': got {wrong}\[3\], expected {dtype}\[3\]"), unmoved(buf):
                buf.put({"x": np.zeros((2, 3), wrong)})


# ---- ids that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0.7], [1.0], np.array([2.5]), [True, False, True], np.zeros(3, bool), ["1"]])
def test_ids_that_are_no_integers_are_refused(buf, ids):
    with pytest.raises((TypeError, ValueError, IndexError)):
        buf.gather(ids)
