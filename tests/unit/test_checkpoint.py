"""Checkpoints at the numpy level: what was stored comes back, for everybody; what is damaged is said and changes nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil

import numpy as np
import pytest

from shmbuf import Buffer, CheckpointError, SchemaError
from shmbuf.checkpoint import directories, dump_buffer, load_buffer, snapshot
from shmbuf.checkpoint.reading import Checkpoint
from tests.unit.helpers import SPEC, figures, numbers, rows, same, stored

STEPS = {"k": "int64", "next": {"done": "bool"}}


def steps(*k: int, done: bool = False) -> dict:
    return {"k": np.array(k, np.int64), "next": {"done": np.full(len(k), done)}}


def runs(buf: Buffer) -> list[tuple]:
    """Trajectories in terms of the rows' numbers, which survive renumbering."""
    out = []
    for t in buf.trajectories():
        out.append((buf.gather(buf.trajectory(t.end))["k"].tolist(), t.head_missing, t.ended))
    return sorted(out)


@pytest.mark.parametrize("n", [0, 1, 24, 100, 157, 1000])
def test_rows_and_priorities_come_back(make, tmp_path, n):
    a = make()
    a.keep_priorities(0.6)
    if n:
        for at in range(0, n, 50):
            a.extend(rows(at, min(50, n - at)))
        ids = np.arange(*a.window)
        a.set_priorities(ids[::3], np.linspace(0, 50, len(ids[::3])))
    saved = dump_buffer(a, tmp_path / "c")
    assert (saved.rows, saved.lost) == (len(a), 0)
    b = make(schema=None)
    b.keep_priorities(0.6)
    assert load_buffer(b, tmp_path / "c").rows == len(a) == len(b)
    assert b.schema == a.schema
    if n:
        assert same(stored(b), stored(a))
        assert b.priorities(np.arange(*b.window)).tolist() == a.priorities(ids).tolist()
        assert b.stats()["priorities"]["new_row"] == a.stats()["priorities"]["new_row"]
    assert b.check()["findings"] == []


def test_the_largest_priority_of_a_row_that_is_gone_is_kept(make, tmp_path):
    a, b = make(10), make(10)
    for buf in (a, b):
        buf.keep_priorities(0.6)
    a.extend(rows(0, 10))
    a.set_priorities([0], 77.0)
    for at in range(10, 20, 5):
        a.extend(rows(at, 5), priorities=1.0)
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert b.priorities(np.arange(*b.window)).max() == a.priorities(np.arange(*a.window)).max() < 77
    assert b.stats()["priorities"]["new_row"] == pytest.approx(77)


def test_every_attached_handle_sees_the_load_and_what_was_there_is_gone(make, tmp_path):
    a, b = make(), make()
    a.extend(rows(0, 30))
    b.extend(rows(500, 40))
    dump_buffer(a, tmp_path / "c")
    with Buffer.attach(b.name) as other:
        load_buffer(b, tmp_path / "c")
        assert numbers(other) == numbers(b) == list(range(30))
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(30))


@pytest.mark.parametrize("capacity, first", [(40, 60), (100, 0), (250, 0)])
def test_another_capacity_takes_the_newest_that_fit(make, tmp_path, capacity, first):
    a, b = make(100), make(capacity)
    for at in range(0, 100, 50):
        a.extend(rows(at, 50))
    dump_buffer(a, tmp_path / "c")
    done = load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(first, 100)) and bool(done.left_out) == (first > 0)


def test_exact_dtypes_and_keys_that_cannot_be_file_names(make, tmp_path):
    spec = {
        "bf": ("bfloat16", (3,)),
        "f8": "float8_e4m3fn",
        "c": "complex64",
        "u": "uint64",
        "a/b": "int16",
        "..": "int8",
        "x.memmap": {"y": "bool"},
        "x": "float64",
        "none": ("float32", (0,)),
        "t": {"device": "int32", "é ": "float16"},
    }
    a, b = make(schema=spec), make(schema=None)
    rng = np.random.default_rng(1)
    leaves = {c.key: rng.integers(0, 2, (7, *c.shape)).astype(c.numpy) for c in a.schema.columns}
    a.extend(leaves)
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert b.schema == a.schema and same(stored(b), stored(a))


# ---- trajectories -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [20, 100, 333])
def test_interleaved_streams_of_two_collectors_stay_apart(make, tmp_path, n):
    a, b = make(schema=STEPS), make(schema=STEPS)
    with Buffer.attach(a.name) as other:
        for i in range(n):
            (a, other)[i % 2].extend(steps(i, done=i % 11 == 10), stream=i % 3)
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert runs(b) == runs(a)
    assert (n <= 100) == (not any(head for _, head, _ in runs(a)))
    assert b.check()["findings"] == []


def test_equal_trajectory_ids_of_two_collectors_stay_apart(make, tmp_path):
    spec = {"k": "int64", "episode": "int64"}
    a, b = make(schema=spec, trajectories=True), make(schema=spec, trajectories=True)
    with Buffer.attach(a.name) as other:
        for i in range(150):
            (a, other)[i % 2].extend({"k": np.array([i]), "episode": np.array([i // 20])})
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert runs(b) == runs(a)


def test_a_smaller_buffer_cuts_heads_and_says_so(make, tmp_path):
    a, b = make(schema=STEPS), make(30, schema=STEPS)
    for i in range(60):
        a.extend(steps(i, done=i % 20 == 19), stream=0)
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert runs(b) == [(list(range(30, 40)), True, True), (list(range(40, 60)), False, True)]


def test_nobody_goes_on_with_a_loaded_trajectory(make, tmp_path):
    a, b = make(schema=STEPS), make(schema=STEPS)
    a.extend(steps(0, 1, 2), stream=5)
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    for stream in range(6):
        b.extend(steps(100 + stream), stream=stream)
    assert [0, 1, 2] in [r for r, *_ in runs(b)] and len(runs(b)) == 7


# ---- while others write -----------------------------------------------------------------------------------------------------


def during(monkeypatch, put) -> list[str]:
    """put() after each copied block."""
    names = []

    def step(name: str) -> None:
        names.append(name)
        if name == "copied":
            put()

    monkeypatch.setattr(directories, "step", step)
    return names


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_BLOCK_ROWS", 10)


@pytest.mark.parametrize("rate, least", [(0, 100), (5, 100), (10, 100), (13, 40), (25, 20), (60, 1)])
def test_what_a_writer_overwrites_is_left_out_oldest_first(make, tmp_path, monkeypatch, small_blocks, rate, least):
    a, b = make(100, schema=STEPS), make(100, schema=STEPS)
    at = 0

    def put(n: int) -> None:
        nonlocal at
        for _ in range(n):
            a.extend(steps(at, done=at % 7 == 6), stream=at % 2)
            at += 1

    put(130)
    before = runs(a)
    names = during(monkeypatch, lambda: put(rate))
    saved = dump_buffer(a, tmp_path / "c")
    monkeypatch.undo()
    assert (names.count("copied") >= 2 and at > 130) or not rate
    assert saved.end_id == 130 and saved.rows + saved.lost == 100
    assert saved.rows >= least
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(130 - saved.rows, 130))
    first = 130 - saved.rows
    expected = []
    for ks, head, ended in before:
        kept = [k for k in ks if k >= first]
        if kept:
            expected.append((kept, head or len(kept) < len(ks), ended))
    assert runs(b) == sorted(expected)
    with open(tmp_path / "c/writer/metadata.json") as f:
        assert json.load(f)["write_count"] == 130


def test_losses_are_reached_by_these_rates(make, tmp_path, monkeypatch, small_blocks):
    a = make(100, schema=STEPS)
    a.extend(steps(*range(60)))
    a.extend(steps(*range(60, 120)))
    during(monkeypatch, lambda: a.extend(steps(*range(25))))
    saved = dump_buffer(a, tmp_path / "c")
    assert 0 < saved.lost < 100
    meta = json.loads((tmp_path / "c/writer/metadata.json").read_text())
    assert meta["cursor"] == saved.rows  # not full any more: rows lie from slot 0 on, oldest first
    k = np.fromfile(tmp_path / "c/storage/k.memmap", np.int64)
    assert k[: saved.rows].tolist() == list(range(120 - saved.rows, 120))


def test_a_buffer_emptied_meanwhile_is_an_empty_checkpoint(make, tmp_path, monkeypatch, small_blocks):
    a = make(100)
    a.extend(rows(0, 50))
    during(monkeypatch, a.empty)
    saved = dump_buffer(a, tmp_path / "c")
    assert (saved.rows, saved.lost) == (0, 50)


def test_complete_makes_writers_wait(make, tmp_path, monkeypatch, small_blocks):
    a = make(100, full="error")
    for at in range(0, 100, 50):
        a.extend(rows(at, 50))
    put = []

    def more() -> None:
        put.append(a.put(rows(100 + len(put))))

    during(monkeypatch, more)
    saved = dump_buffer(a, tmp_path / "c", complete=True)
    assert saved.lost == 0 and saved.rows == 100 and len(put) >= 10
    for t in put:
        t.wait(30)
    assert numbers(a)[-1] == 99 + len(put)


# ---- the directory ----------------------------------------------------------------------------------------------------------


def test_paths(make, tmp_path, monkeypatch):
    a, b = make(), make()
    a.extend(rows(0, 9))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "link")
    for path in ("plain", "plain", "with space/deep/er", "empty", "link", str(tmp_path / "absolute") + "/"):
        dump_buffer(a, path)
        load_buffer(b, path)
        assert numbers(b) == list(range(9))
    assert (tmp_path / "link").is_symlink()
    assert not [p for p in tmp_path.rglob(".*shmbuf-*")]


def test_what_is_no_checkpoint_is_not_replaced(make, tmp_path):
    a = make()
    a.extend(rows(0, 9))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_text("meow")
    (tmp_path / "file").write_text("text")
    for place in ("photos", "file"):
        with pytest.raises(CheckpointError, match=f"{place}.*(cat.png|file)"):
            dump_buffer(a, tmp_path / place)
    assert (tmp_path / "photos/cat.png").read_text() == "meow" and (tmp_path / "file").read_text() == "text"


def test_a_directory_whose_names_look_right_is_not_replaced(make, tmp_path):
    a = make()
    a.extend(rows(0, 9))
    (tmp_path / "c/storage/photos").mkdir(parents=True)
    (tmp_path / "c/storage/photos/a").write_text("precious")
    with pytest.raises(CheckpointError, match=r"no checkpoint.*storage_metadata\.json"):
        dump_buffer(a, tmp_path / "c")
    assert (tmp_path / "c/storage/photos/a").read_text() == "precious" and os.listdir(tmp_path) == ["c"]


def test_made_parents_are_made_durable_in_their_own(make, tmp_path, monkeypatch):
    a, synced, fsync = make(), set(), os.fsync
    a.extend(rows(0, 9))
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    dump_buffer(a, tmp_path / "a/b/c")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= synced


@pytest.mark.parametrize("exchanges", [True, False])
def test_whoever_reads_keeps_what_he_opened_and_stops_nobody(make, tmp_path, monkeypatch, exchanges):
    a, b = make(), make()
    if not exchanges:
        monkeypatch.setattr(directories, "exchange", lambda *_: False)
    a.extend(rows(0, 9))
    dump_buffer(a, tmp_path / "c")
    with Checkpoint(tmp_path / "c") as held:
        a.extend(rows(9, 9))
        dump_buffer(a, tmp_path / "c")
        dump_buffer(a, tmp_path / "c")
        with contextlib.closing(held.opened(held.schema())) as files:
            k = files.rows(0, held.rows)[held.schema().keys.index(("k",))]
        assert k.tolist() == list(range(9)) and len(os.listdir(tmp_path)) == 2
        load_buffer(b, tmp_path / "c")
        assert numbers(b) == list(range(18))
    dump_buffer(a, tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_one_replaced_while_it_is_opened_is_opened_anew(make, tmp_path, monkeypatch, exchanges):
    """Between its path and its lock, the worst moment: the one that was opened is gone."""
    a, b = make(), make()
    if not exchanges:
        monkeypatch.setattr(directories, "exchange", lambda *_: False)
    a.extend(rows(0, 9))
    dump_buffer(a, tmp_path / "c")
    a.extend(rows(9, 9))
    shared, replaced = directories._shared, []

    def meanwhile(fd: int) -> bool:
        if not replaced:
            replaced.append(dump_buffer(a, tmp_path / "c"))
        return shared(fd)

    monkeypatch.setattr(directories, "_shared", meanwhile)
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(18)) and replaced and os.listdir(tmp_path) == ["c"]


def test_without_a_schema_there_is_nothing_to_save(make, tmp_path):
    with pytest.raises(RuntimeError, match="non-initialized"):
        dump_buffer(make(schema=None), tmp_path / "c")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
@pytest.mark.parametrize("at", ["begun", "copied", "filled", "synced"])
def test_no_room_leaves_the_old_one(make, tmp_path, monkeypatch, code, at):
    a, b = make(), make()
    a.extend(rows(0, 9))
    dump_buffer(a, tmp_path / "c")
    a.extend(rows(9, 9))

    def step(name: str) -> None:
        if name == at:
            raise OSError(code, "no")

    monkeypatch.setattr(directories, "step", step)
    with pytest.raises(OSError, match="no") as e:
        dump_buffer(a, tmp_path / "c")
    assert e.value.errno == code and (at == "begun" or "unchanged" in str(e.value))
    monkeypatch.undo()
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(9)) and os.listdir(tmp_path) == ["c"]


def test_without_exchange_the_old_one_is_found_between_the_renames(make, tmp_path, monkeypatch):
    a, b = make(), make()
    a.extend(rows(0, 9))
    dump_buffer(a, tmp_path / "c")
    a.extend(rows(9, 9))
    monkeypatch.setattr(directories, "exchange", lambda *_: False)

    class Killed(BaseException):
        pass

    def step(name: str) -> None:
        if name == "moved away":
            raise Killed

    monkeypatch.setattr(directories, "step", step)
    with pytest.raises(Killed):
        dump_buffer(a, tmp_path / "c")
    monkeypatch.setattr(directories, "step", lambda name: None)
    assert os.listdir(tmp_path) == ["c"]  # an error puts it back; a kill cannot
    os.rename(tmp_path / "c", tmp_path / ".c.shmbuf-old.0123456789ab")
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(9))
    dump_buffer(a, tmp_path / "c")
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(18)) and os.listdir(tmp_path) == ["c"]


# ---- damage -----------------------------------------------------------------------------------------------------------------


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

    def check(match: str = "", error=(CheckpointError, SchemaError)) -> None:
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
                refuses()
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
