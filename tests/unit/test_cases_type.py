"""Class TYPE of the real cases (shared/spec/cases.md) at the numpy level: dtype, shape, schema, error messages, aliasing. Each test
is named after its case. What they say of snapshots, queries, slices and priorities comes with those. TensorDict cases:
test_cases_type_torch.py."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughRows, Schema, SchemaError
from tests.unit.helpers import numbers, raw, stored, unmoved


def test_b100_dtypes_are_kept(name):
    spec = {"obs": ("uint8", (84, 84, 4)), "done": "bool", "k": "int32", "h": ("float16", (3,))}
    schema = Schema.from_spec(spec)
    assert schema.payload_bytes == 28_224 + 1 + 4 + 6 == 28_235 and schema.row_bytes == 28_240, "aligned to 8"
    rng = np.random.default_rng(0)
    given = {
        "obs": rng.integers(0, 256, (20, 84, 84, 4), np.uint8),
        "done": rng.integers(0, 2, 20).astype(bool),
        "k": rng.integers(-(1 << 31), 1 << 31, 20, np.int32),
        "h": np.frombuffer(rng.bytes(120), np.float16).reshape(20, 3),
    }
    with Buffer.create(name, 100, schema=spec, drain="caller") as buf:
        ids = buf.extend(given)
        got, drawn = buf.draw(50)
        for key, a in given.items():
            assert (
                got[key].dtype == a.dtype
                and got[key].shape == (50, *a.shape[1:])
                and raw(got[key]) == raw(a[drawn - ids[0]])
            )


def extremes(dtype: str) -> np.ndarray:
    """min, max, −0.0, the smallest subnormal, NaNs with a payload (quiet and signalling), ±inf, as raw bits."""
    if dtype == "bool":
        return np.array([False, True])
    if np.dtype(dtype).kind in "iu":
        i = np.iinfo(dtype)
        return np.array([i.min, i.max, 0, 1, i.max - 1], dtype)
    if np.dtype(dtype).kind == "c":
        part = extremes({"complex64": "float32", "complex128": "float64"}[dtype])
        return np.stack([np.repeat(part, len(part)), np.tile(part, len(part))], -1).view(dtype)[..., 0]
    bits, mantissa = {"float16": (16, 10), "float32": (32, 23), "float64": (64, 52)}[dtype]
    exponent = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    sign, quiet = 1 << (bits - 1), 1 << (mantissa - 1)
    words = [
        0,
        sign,
        1,
        sign | 1,
        exponent - 1,
        sign | (exponent - 1),
        exponent,
        sign | exponent,
        exponent | quiet,
        exponent | quiet | 5,
        exponent | 5,
        sign | exponent | quiet | 77,
        1 << mantissa,
    ]
    return np.array(words, f"u{bits // 8}").view(dtype)


BFLOAT16 = [
    0,
    0x8000,
    1,
    0x8001,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0x7FC5,
    0x7F85,
    0xFFCD,
    0x0080,
]  # the same list, as bits
KINDS = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "bfloat16",
]
SHAPES = {"s": (), "one": (1,), "two": (2, 3)}


def every_dtype() -> tuple[dict, dict]:
    """Schema and rows: each dtype in each shape, after a uint8 (3) that leaves the alignment odd."""
    spec: dict = {"odd": ("uint8", (3,))}
    rows = {"odd": np.arange(200 * 3, dtype=np.uint64).astype(np.uint8).reshape(200, 3)}
    for dtype in KINDS:
        values = np.array(BFLOAT16, np.uint16) if dtype == "bfloat16" else extremes(dtype)
        for tag, shape in SHAPES.items():
            spec[f"{dtype}.{tag}"] = (dtype, shape)
            rows[f"{dtype}.{tag}"] = np.resize(values, (200, *shape))
    return spec, rows


ELSEWHERE = """
import sys
import numpy as np
from shmbuf import Buffer
with Buffer.attach(sys.argv[1]) as buf:
    rows = buf.gather(np.arange(*buf.window))
    for key in sorted(rows):
        print(key, rows[key].dtype, rows[key].shape, np.ascontiguousarray(rows[key]).tobytes().hex())
    buf.extend(rows)
"""


def test_b102_every_supported_dtype_with_extreme_values(name, python):
    spec, rows = every_dtype()
    with Buffer.create(name, 1000, schema=spec, drain="caller") as buf:
        buf.extend(rows)
        for key, a in rows.items():
            got = stored(buf)[key]
            assert got.dtype == a.dtype and got.shape == a.shape and raw(got) == raw(a), key
        printed = python(ELSEWHERE, name).splitlines()
        assert printed == [
            f"{key} {rows[key].dtype} {rows[key].shape} {raw(rows[key]).hex()}" for key in sorted(rows)
        ], "in another process too"
        again = buf.gather(np.arange(200, 400))
        assert all(raw(again[key]) == raw(rows[key]) for key in rows), "and back"


def test_b102_alignment_that_is_odd(name):
    with Buffer.create(
        name, 100, schema={"a": ("uint8", (3,)), "b": "float64", "c": "bool", "d": ("float16", (1,))}, drain="caller"
    ) as buf:
        a = np.arange(150, dtype=np.uint8).reshape(50, 3)
        b = np.array([struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0000 + i))[0] for i in range(50)])
        buf.extend({"a": a, "b": b, "c": a[:, 0] > 70, "d": b.astype(np.float16)[:, None]})
        got = stored(buf)
        assert raw(got["a"]) == raw(a) and raw(got["b"]) == raw(b) and raw(got["c"]) == raw(a[:, 0] > 70)


@pytest.mark.parametrize(
    "dtype",
    [object, "S5", "U5", str, bytes, "M8[ns]", "m8[us]", "V3", np.longdouble, np.clongdouble, "quint8", "f4,i4"],
)
def test_b102_unsupported_dtypes_are_refused_at_create(name, dtype):
    with pytest.raises(SchemaError, match=r"key 'x': .* a column is one of bool, uint8"):
        Buffer.create(name, 10, schema={"x": dtype}, drain="caller")
    with Buffer.create(name, 10, schema={"x": "int8"}, drain="caller"):
        pass


OBS, ACT = np.zeros((3, 4), np.float32), np.zeros(3, np.int64)


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({"obs": OBS, "act": ACT, "rew": np.zeros((3, 2))}, ["key 'rew' is not in the schema, got float64[2]"]),
        ({"obs": OBS}, ["key 'act' is missing, expected int64[]"]),
        ({"obs": np.zeros((3, 5), "f4"), "act": ACT}, ["key 'obs': got float32[5], expected float32[4]"]),
        ({"obs": OBS, "act": ACT[:2]}, ["'obs': 3", "'act': 2"]),
        (
            {"obs": {"x": OBS}, "act": ACT},
            ["key 'obs' is missing, expected float32[4]", "key ('obs', 'x') is not in the schema, got float32[4]"],
        ),
        (
            {"observation": OBS, "act": ACT},
            ["key 'obs' is missing, expected float32[4]", "key 'observation' is not in the schema, got float32[4]"],
        ),
        (
            {"Obs": np.zeros((3, 5)), "act": ACT.astype("i4"), "z": ACT},
            [
                "key 'obs' is missing, expected float32[4]",
                "key 'Obs' is not in the schema, got float64[5]",
                "key 'z' is not in the schema, got int64[]",
                "key 'act': got int32[], expected int64[]",
            ],
        ),
        # everything at once
        (
            {"obs": np.zeros((3, 5), "f4"), "act": ACT[:2], "z": ACT},
            [
                "key 'z' is not in the schema, got int64[]",
                "key 'obs': got float32[5], expected float32[4]",
                "'obs': 3",
                "'act': 2",
            ],
        ),
    ],
)
def test_b103_one_error_lists_every_difference(name, given, lines):
    with Buffer.create(name, 100, schema={"obs": ("float32", (4,)), "act": "int64"}, drain="caller") as buf:
        buf.extend({"obs": OBS, "act": ACT})
        for call in (buf.put, buf.extend):
            with unmoved(buf), pytest.raises(SchemaError) as e:
                call(given)
            assert all(line in str(e.value) for line in lines), str(e.value)
        assert buf.extend({"obs": OBS, "act": ACT}).tolist() == [3, 4, 5], "the producer can go on"


def test_b105_nested_keys(name):
    spec = {"next": {"obs": "float32", "agents": {"a": {"obs": ("int16", (2,))}}}, "next.obs": "int8"}
    with Buffer.create(name, 100, schema=spec, drain="caller") as buf:
        given = {
            "next": {
                "obs": np.arange(5, dtype="f4"),
                "agents": {"a": {"obs": np.arange(10, dtype="i2").reshape(5, 2)}},
            },
            "next.obs": -np.arange(5, dtype="i1"),
        }
        buf.extend(given)
        got, ids = buf.draw(20)
        assert (
            list(got) == ["next", "next.obs"]
            and list(got["next"]) == ["obs", "agents"]
            and list(got["next"]["agents"]) == ["a"]
        )
        assert got["next"]["obs"].tolist() == ids.tolist() == (-got["next.obs"]).tolist(), (
            "the name with a dot and the nested key are two"
        )
        assert (got["next"]["agents"]["a"]["obs"][:, 1] == 2 * ids + 1).all()
        with pytest.raises(SchemaError, match=r"key \('next', 'obs'\) is missing"):
            buf.extend(
                {k: v for k, v in given.items() if k != "next"}
                | {"next.agents.a.obs": given["next"]["agents"]["a"]["obs"]}
            )


TEXTS = ["", "a\0", "\0", "\0a\0", "0\U00010000" * 2, "é" * 150, "x" * 300, " ", "日本語"]


def test_b107_key_names_come_back_exactly(name, python):
    spec = {t: "int32" for t in TEXTS} | {"nest": {t: "int64" for t in TEXTS}}
    with Buffer.create(name, 10, schema=spec, drain="caller") as buf:
        given = {t: np.full(1, i, "i4") for i, t in enumerate(TEXTS)} | {
            "nest": {t: np.full(1, -i) for i, t in enumerate(TEXTS)}
        }
        buf.extend(given)
        got = stored(buf)
        assert list(got) == [*TEXTS, "nest"] and list(got["nest"]) == TEXTS
        assert all(got[t][0] == i and got["nest"][t][0] == -i for i, t in enumerate(TEXTS)), "neighbours unchanged"
        printed = python(
            "import sys; from shmbuf import Buffer; print([list(k) for k in Buffer.attach(sys.argv[1]).schema.keys] == eval(sys.argv[2]))",
            name,
            ascii([[t] for t in TEXTS] + [["nest", t] for t in TEXTS]),
        )
        assert printed == "True"


def test_b107_a_key_over_the_limit_is_refused_with_the_limit_in_bytes(name):
    with pytest.raises(SchemaError, match="has 1028 bytes in 1 parts; at most 1024 bytes"):
        Buffer.create(name, 10, schema={"\U00010000" * 257: "int8"}, drain="caller")


def test_b107_metadata_comes_back_exactly(name):
    config = {"bytes": b"\x00\x01\x00", "none": b"", "texts": TEXTS, "long": b"\xff" * 300, "text": "a\0", "": "\0"}
    with (
        Buffer.create(name, 10, schema={"x": "int8"}, drain="caller", config=config) as buf,
        Buffer.attach(name) as other,
    ):
        for b in (buf, other):
            assert {k: b.config[k] for k in config} == config and b.capacity == 10


@pytest.mark.parametrize("text", ["a\0", "", "0\U00010000" * 2, "x" * 300, b"\x00\x01\x00"])
def test_b107_buffer_names_that_are_not_kept_exactly_are_refused_with_the_limit(text):
    with pytest.raises(ValueError, match="1 to 100 characters"):
        Buffer.create(text, 10, schema={"x": "int8"}, drain="caller")


def test_b107_text_as_data_is_refused(name):
    with Buffer.create(name, 10, schema={"x": "int8"}, drain="caller") as buf:
        for leaf in (
            "a\0",
            b"\x00\x01\x00",
            np.array(["a\0"]),
            np.array([b"\0\1\0"]),
            np.array(["0\U00010000"], object),
        ):
            with pytest.raises(SchemaError, match="key 'x'"), unmoved(buf):
                buf.extend({"x": leaf})


@pytest.mark.parametrize(
    ("comm", "shown"),
    [
        ("plain", "plain"),
        ("(x) y", "(x) y"),
        ("a\tb", "a\tb"),
        ("é" * 20, "é" * 7 + "\ufffd"),
        ("\U00010000" * 4, "\U00010000" * 3 + "\ufffd"),
    ],
)
def test_b107_process_names(name, comm, shown):
    """The kernel keeps 15 bytes of them and cuts in the middle of a character."""
    with Buffer.create(name, 10, schema={"x": "int8"}, drain="caller") as buf, open("/proc/self/comm", "rb") as f:
        before = f.read().rstrip(b"\n")
        try:
            with open("/proc/self/comm", "wb") as f:
                f.write(comm.encode())
            with Buffer.attach(name) as other:
                other.extend({"x": np.zeros(1, np.int8)})
                assert [c["command"] for c in buf.collectors()] == [shown] and buf.members()[1]["command"] == shown
                assert (buf.members()[1]["pid"], buf.collectors()[0]["slot"]) == (buf.members()[0]["pid"], 0), (
                    "neighbours unchanged"
                )
        finally:
            with open("/proc/self/comm", "wb") as f:
                f.write(before)


def test_b110_zero_rows_change_nothing_and_wake_nobody(name):
    with Buffer.create(name, 10, schema={"k": "int64"}, drain="caller") as buf:
        buf.extend({"k": np.arange(3)})
        with unmoved(buf):  # transactions too
            for _ in range(1000):
                assert buf.put({"k": np.zeros(0, np.int64)}).rows == 0
                assert buf.extend({"k": np.zeros(0, np.int64)}).tolist() == []
        for lists in ([], [{"k": np.arange(1)}] * 3, ()):
            with pytest.raises(SchemaError, match="rows are a mapping"), unmoved(buf):
                buf.put(lists)
        assert buf.gather([])["k"].shape == (0,) and buf.draw(0)[1].shape == (0,)


@pytest.mark.parametrize("schema", [{"k": "int64"}, None])
def test_b111_sampling_what_was_never_written(name, schema):
    with Buffer.create(name, 10, schema=schema, drain="caller") as buf, Buffer.attach(name) as other:
        for b in (buf, other):
            with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"), unmoved(b):
                b.draw(4)
        buf.empty()
        with pytest.raises(NotEnoughRows):
            other.draw(1)
        assert buf.extend({"k": np.arange(2)}).tolist() == [0, 1]
        buf.empty()
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
            other.draw(4)


def test_b112_a_sample_is_private_and_writable(name):
    with (
        Buffer.create(name, 10, schema={"obs": ("float32", (3,)), "k": "int64"}, drain="caller") as buf,
        Buffer.attach(name) as other,
    ):
        buf.extend({"obs": np.ones((10, 3), "f4"), "k": np.arange(10)})
        held = other.gather(np.arange(10))
        x, ids = buf.draw(10)
        assert all(a.flags.writeable and a.flags.owndata for a in x.values()) and ids.flags.writeable
        x["obs"] += 1
        x["k"][:] = -1
        assert (other.gather(np.arange(10))["obs"] == 1).all() and numbers(other) == list(range(10))
        buf.extend({"obs": np.full((10, 3), 5, "f4"), "k": np.arange(10, 20)})
        assert (x["obs"] == 2).all() and (held["obs"] == 1).all(), "overwriting the rows changes no copy"


def test_b112_while_another_thread_reads(name):
    with (
        Buffer.create(name, 10, schema={"obs": ("float32", (64,))}, drain="caller") as buf,
        Buffer.attach(name) as other,
    ):
        buf.extend({"obs": np.ones((10, 64), "f4")})
        seen: list = []
        thread = threading.Thread(target=lambda: seen.extend((other.draw(50)[0]["obs"] == 1).all() for _ in range(300)))
        thread.start()
        for _ in range(300):
            buf.draw(50)[0]["obs"] += 1
        thread.join()
        assert len(seen) == 300 and all(seen)
