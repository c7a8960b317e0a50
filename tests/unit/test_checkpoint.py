"""Checkpoints at the numpy level: what was stored comes back, for everybody; what is damaged is said and changes nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os

import numpy as np
import pytest

from shmbuf import Buffer, CheckpointError, RingFull
from shmbuf.checkpoint import directories, dump_buffer, load_buffer, snapshot
from shmbuf.checkpoint.reading import Checkpoint
from tests.unit.helpers import numbers, rows, same, stored

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
    assert (saved.rows, saved.lost) == (0, 0)


@pytest.mark.parametrize("capacity", [100, 70])  # an instant begins with slot 0, or does not
@pytest.mark.parametrize("times, end", [(1, 200), (2, 300), (100, 300)])
def test_who_overwrites_all_rows_of_an_instant_makes_no_empty_checkpoint(
    make, tmp_path, monkeypatch, small_blocks, times, end, capacity
):
    """A newer instant is saved; after two of them writers wait."""
    a = make(capacity, full="error")
    at = 0

    def put() -> None:
        nonlocal at
        for _ in range(2 if at < 100 * (times + 1) else 0):
            with contextlib.suppress(RingFull):  # behind a pin
                a.put(rows(at, 50), timeout=0)
                at += 50
                a.drain()

    put()

    during(monkeypatch, put)
    saved = dump_buffer(a, tmp_path / "c")
    monkeypatch.undo()
    assert saved == (capacity, 0, end - capacity, end)
    b = make(capacity)
    load_buffer(b, tmp_path / "c")
    assert numbers(b) == list(range(end - capacity, end)) and same(stored(b), stored(a))


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
    long = ["x" * 255, "x" * 254 + "y", "ü" * 127]  # as many bytes as a name may have
    for path in ("plain", "plain", "with space/deep/er", "empty", "link", str(tmp_path / "absolute") + "/", *long):
        dump_buffer(a, path)
        load_buffer(b, path)
        assert numbers(b) == list(range(9))
    assert (tmp_path / "link").is_symlink()
    assert not [p for p in tmp_path.rglob(".*shmbuf-*")]


def test_places_that_cannot_be(make, tmp_path):
    a = make()
    a.extend(rows(0, 9))
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    for bad, why in (("a", "symbolic link"), ("x" * 256, "too long"), ("x" * 5000, "too long"), ("nu\0l", "null")):
        for call in (dump_buffer, load_buffer):
            with pytest.raises(CheckpointError, match=why):
                call(a, tmp_path / bad)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


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
