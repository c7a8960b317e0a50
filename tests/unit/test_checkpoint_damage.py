"""Damaged checkpoints, and what is none: said in words, and nothing has changed."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest

from shmbuf import CheckpointError, SchemaError
from shmbuf.checkpoint import dump_buffer, load_buffer
from tests.unit.helpers import SPEC, figures, numbers, rows


@pytest.fixture
def saved(make, tmp_path):
    a = make(20)
    a.keep_priorities(0.6)
    a.extend(rows(0, 15))
    a.extend(rows(15, 12))
    dump_buffer(a, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def refuses(make, saved):
    """A load that raises changes nothing, not even of a buffer without a schema."""
    full, empty = make(20), make(20, schema=None)
    full.keep_priorities(0.6)
    full.extend(rows(100, 7))

    def check(match: str | None = None, error=(CheckpointError, SchemaError)) -> None:
        for buf in (full, empty):
            before = figures(buf)
            with pytest.raises(error, match=match):
                load_buffer(buf, saved)
            assert figures(buf) == before

    return check


def test_every_file_cut_or_missing_is_said(saved, refuses, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    files = sorted(p.relative_to(saved) for p in saved.rglob("*") if p.is_file())
    assert len(files) >= 14
    for f in files:
        for how in ("cut", "grown", "gone", "link", "directory"):
            size = (saved / f).stat().st_size
            optional = f.name in ("buffer_metadata.json", "state.json", "sampler_metadata.json")
            tree = f.name in ("mintree.memmap", "sumtree.memmap")  # the sidecar has them exactly
            if how == "cut" and size:
                os.truncate(saved / f, size // 2)
            elif how == "grown":
                with open(saved / f, "ab") as file:
                    file.write(b"x")
            else:
                (saved / f).unlink()
                if how == "link":
                    os.symlink(whole / f, saved / f)
                elif how == "directory":
                    (saved / f).mkdir()
            if not tree and not (how == "gone" and optional) and (size or how != "cut"):
                refuses(re.escape(f.name))
            shutil.rmtree(saved)
            shutil.copytree(whole, saved)


HOSTILE = [
    ("storage/storage_metadata.json", "len", 10**30),
    ("storage/storage_metadata.json", "len", -1),
    ("storage/storage_metadata.json", "len", 21),
    ("storage/storage_metadata.json", "is_pytree", True),
    ("storage/meta.json", "shape", [10**18]),
    ("storage/meta.json", "shape", [5, 4]),
    ("storage/meta.json", "shape", "x"),
    ("storage/meta.json", "../../etc", {"device": "cpu", "shape": [20], "dtype": "torch.int64"}),
    ("storage/meta.json", "..", {"type": "TensorDict"}),
    ("storage/meta.json", "k", {"device": "cpu", "shape": [20, 2], "dtype": "torch.int64"}),
    ("storage/meta.json", "k", {"device": "cpu", "shape": [20], "dtype": "torch.float128"}),
    ("storage/meta.json", "k", {"device": "cpu", "shape": [20, -1], "dtype": "torch.int64"}),
    ("storage/meta.json", "k", 7),
    ("writer/metadata.json", "cursor", 10**12),
    ("writer/metadata.json", "write_count", "many"),
    ("shmbuf/state.json", "version", 99),
    ("shmbuf/state.json", "first_id", -3),
    ("shmbuf/state.json", "first_id", 2**63),
    ("shmbuf/state.json", "first_id", 2**61 - 2**40),
    ("shmbuf/state.json", "write_count", 2**61),
    ("shmbuf/state.json", "epochs", {"own": {"word": [0, 2**64], "order": 0, "fresh": True}}),
    ("shmbuf/state.json", "epochs", {"own": {"word": [0, 0], "order": "0", "fresh": 1}}),
    ("shmbuf/state.json", "epochs", {"shared": {"0": [0]}}),
    ("shmbuf/state.json", "first_slot", 20),
    ("shmbuf/state.json", "capacity", 19),
    ("shmbuf/state.json", "rows", 3),
    ("shmbuf/state.json", "heads", 10**9),
    ("shmbuf/state.json", "columns", [{"key": ["k"], "dtype": "int64", "shape": [], "file": ["..", "k"]}]),
    ("shmbuf/state.json", "columns", None),
    ("sampler/sampler_metadata.json", "_alpha", float("nan")),
    ("sampler/sampler_metadata.json", "_eps", -1),
]


@pytest.mark.parametrize("file, key, value", HOSTILE, ids=[f"{f}:{k}={str(v)[:20]}" for f, k, v in HOSTILE])
def test_numbers_and_names_that_cannot_be(saved, refuses, file, key, value):
    data = json.loads((saved / file).read_text())
    (saved / file).write_text(json.dumps({**data, key: value}))
    refuses()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"len": NaN}', "\x00"])
def test_json_that_is_none(saved, refuses, text):
    (saved / "storage/storage_metadata.json").write_text(text)
    refuses()


VALUES = [
    None,
    True,
    -1,
    0,
    2**61,
    10**400,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    0.5,
    "",
    "zz",
    "\ud800",
    "x" * 70_000,
]
VALUES += [
    [],
    {},
    [None],
    [float("inf")],
    [-1],
    [[]],
    ["\ud800"],
    [{}],
    {"": 1},
    {"\ud800": {}},
    ",orch.float32",
    "(2,)f4",
    "O",
]


def mutants(value):
    """A JSON value with one value in it, at any depth, or one key replaced."""
    yield from VALUES
    if isinstance(value, dict):
        for k, v in value.items():
            yield {n: w for n, w in value.items() if n != k}
            for key in ("\ud800", "", "..", "x" * 70_000):
                yield {key if n == k else n: w for n, w in value.items()}
            yield from ({**value, k: m} for m in mutants(v))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from ([*value[:i], m, *value[i + 1 :]] for m in mutants(v))


def test_every_json_value_may_be_anything(saved, make):
    """A load is refused in words and changes nothing, or it stores the rows."""
    state = json.loads((saved / "shmbuf/state.json").read_text())
    state["limiter"] = {
        "num": 1,
        "den": 1,
        "min_size": 1,
        "min_diff": 0.0,
        "max_diff": 9e9,
        "inserted": 27,
        "sampled": 0,
        "diff": 27.0,
    }
    state["epochs"]["own"] = {"word": [0, 0], "order": 0, "fresh": True}
    (saved / "shmbuf/state.json").write_text(json.dumps(state))
    refused, rng = 0, np.random.default_rng(11)
    buf = make(20)
    buf.extend(rows(100, 7))
    before = figures(buf)
    for path in sorted(saved.rglob("*.json")):
        text = path.read_text()
        every = list(mutants(json.loads(text)))
        for at in rng.permutation(len(every))[:400]:
            path.write_text(json.dumps(every[at]))
            try:
                load_buffer(buf, saved)
            except (CheckpointError, SchemaError):
                refused += 1
                assert figures(buf) == before, (path, str(every[at])[:300])
            except Exception as e:
                raise AssertionError(f"{path}: {str(every[at])[:600]}") from e
            else:
                before = figures(buf)
        path.write_text(text)
    assert refused > 500


@pytest.mark.parametrize("bad", [float("nan"), 1e300, float("inf"), "zz", 10**400, None])
def test_a_limiter_that_cannot_be(saved, refuses, bad):
    path = saved / "shmbuf/state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "limiter": {"num": 1, "den": 1, "inserted": 27, "diff": bad}}))
    refuses("diff")


def test_arrays_that_cannot_be(saved, refuses):
    for name, value in (("streams", 10**6), ("streams", -1), ("priorities", -1.0), ("priorities", float("inf"))):
        path = saved / f"shmbuf/{name}.memmap"
        was = path.read_bytes()
        array = np.fromfile(path, np.int64 if name == "streams" else np.float64)
        array[3] = value
        array.tofile(path)
        refuses()
        path.write_bytes(was)


def test_random_damage_is_an_error_or_rows(saved, make, tmp_path):
    rng = np.random.default_rng(7)
    whole = tmp_path / "whole"
    shutil.copytree(saved, whole)
    texts = sorted(p.relative_to(saved) for p in saved.rglob("*.json"))
    buf, loads, errors = make(20, schema=SPEC), 0, 0
    for _ in range(300):
        f = saved / texts[rng.integers(len(texts))]
        data = bytearray(f.read_bytes())
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            data[at] = rng.integers(256)
        f.write_bytes(data)
        try:
            load_buffer(buf, saved)
            loads += 1
        except (CheckpointError, SchemaError):
            errors += 1
        f.write_bytes((whole / f.relative_to(saved)).read_bytes())
    assert errors > 50 and loads + errors == 300


@pytest.mark.parametrize("what", ["missing", "empty", "temporary only", "file"])
def test_what_is_no_checkpoint_is_an_error(make, tmp_path, what):
    buf, place = make(), tmp_path / "c"
    buf.extend(rows(0, 3))
    if what == "file":
        place.write_text("x")
    elif what != "missing":
        place.mkdir()
    if what == "temporary only":
        (place / ".c.shmbuf-tmp.123").mkdir()
    with pytest.raises(CheckpointError, match=str(place)):
        load_buffer(buf, place)
    assert numbers(buf) == [0, 1, 2]


def test_another_schema_is_said_with_every_difference(saved, make):
    buf = make(schema={"obs": ("float32", (5,)), "k": "int64"})
    with pytest.raises(SchemaError, match=r"(?s)checkpoint.*obs.*next"):
        load_buffer(buf, saved)
    assert len(buf) == 0


def test_progress(make, tmp_path, saved, capsys):
    told = []
    buf = make(20)
    load_buffer(buf, saved, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (20, 20)
    dump_buffer(buf, tmp_path / "d", progress=True)
    assert "20/20" in capsys.readouterr().err
