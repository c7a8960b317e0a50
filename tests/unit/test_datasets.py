"""Out to other formats and in again: rows and trajectories are the same. The real libraries where they are installed."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from shmbuf import datasets
from shmbuf.errors import SchemaError
from tests.unit.helpers import numbers
from tests.unit.helpers_datasets import NESTED, TED, contents, episode, play

# Minari recommends an author, a description, …
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")

STEPS = {"k": "int64", "obs": ("float32", (3,)), "next": {"done": "bool"}}


def fill(buf) -> None:
    for i in range(30):
        rows = {"k": np.array([i]), "obs": np.full((1, 3), i, "f4"), "next": {"done": np.array([i % 10 == 9])}}
        buf.extend(rows, stream=i % 3)


def runs(buf, key="k") -> list:
    return sorted((buf.gather(buf.trajectory(t.end))[key].tolist(), t.ended) for t in buf.trajectories())


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    pytest.importorskip("minari.dataset._storages.hdf5_storage")
    return pytest.importorskip("minari")


# ---- npz, HDF5 -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["npz", "hdf5"])
def ways(request, tmp_path):
    """How to write, how to read, and the name of a file."""
    if request.param == "hdf5":
        pytest.importorskip("h5py")
    of = (getattr(datasets, f"{way}_{request.param}") for way in ("to", "from"))
    return *of, tmp_path / "a file"


def write(path, to, arrays) -> None:
    """A file that others made."""
    if to is datasets.to_npz:
        with open(path, "wb") as f:
            np.savez(f, **arrays)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as f:
            for k, a in arrays.items():
                f[k] = a


def test_there_and_back(make, ways):
    to, back, path = ways
    a, b, c = make(schema=STEPS), make(schema=STEPS), make(schema=None)
    fill(a)
    assert to(a, path) == 30
    assert back(b, path) == back(c, path) == 30
    assert runs(b) == runs(c) == runs(a)
    assert contents(b) == contents(c) == contents(a)


def test_any_column_name_and_dtype(make, ways):
    to, back, path = ways
    schema = {"file": "bfloat16", "allow_pickle": ("float16", (2, 1)), "x": "complex64", "empty": ("float32", (0,))}
    a, b = make(schema=schema, trajectories=False), make(schema=schema, trajectories=False)
    rng = np.random.default_rng(0)
    rows = {
        "file": rng.integers(0, 9, 7).astype("u2"),
        "allow_pickle": rng.normal(size=(7, 2, 1)).astype("f2"),
        "x": rng.normal(size=7).astype("c8"),
        "empty": np.zeros((7, 0), "f4"),
    }
    a.extend(rows)
    assert to(a, path) == back(b, path) == 7
    got = b.gather(np.arange(7))
    assert all((got[k] == rows[k]).all() for k in rows)


def test_an_empty_buffer_there_and_back(make, ways):
    to, back, path = ways
    a, b = make(schema=STEPS), make(schema=STEPS)
    assert to(a, path) == back(b, path) == 0
    with pytest.raises(RuntimeError, match="no schema"):
        to(make(schema=None), path)


def test_what_does_not_fit_names_both_and_changes_nothing(make, ways):
    to, back, path = ways
    a, b = make(schema=STEPS), make(schema={"k": "int32", "obs": ("float32", (3,)), "more": "bool"}, trajectories=True)
    fill(a)
    to(a, path)
    with pytest.raises(SchemaError) as e:
        back(b, path)
    for part in (str(path), b.name, "'k': got int64[], expected int32[]", "'more' is missing", "('next', 'done')"):
        assert part in str(e.value)
    assert b.window == (0, 0)


def test_a_bad_file(make, ways, tmp_path):
    to, back, path = ways
    buf = make(schema=None)
    with pytest.raises(FileNotFoundError):
        back(buf, tmp_path / "missing")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises((ValueError, OSError)):
        back(buf, path)
    for arrays, said in (
        ({"a": np.zeros(3), "b": np.zeros(4)}, "a: 3, b: 4"),
        ({"a": np.zeros(3), "b": np.float32(1)}, "b: None"),
        ({}, "no arrays"),
        ({"a": np.zeros(3, "S4")}, "'a'"),
    ):
        write(path, to, arrays)
        with pytest.raises(SchemaError, match=said):
            back(buf, path)
    assert buf.schema is None


def test_pickles_are_not_loaded(make, tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([{}, {}], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        datasets.from_npz(make(schema=None), tmp_path / "x.npz")


def test_a_key_that_would_come_back_as_another(make, tmp_path):
    buf = make(schema={"a/b": "bool"}, trajectories=False)
    buf.extend({"a/b": np.zeros(1, bool)})
    with pytest.raises(SchemaError, match="'a/b'"):
        datasets.to_npz(buf, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_more_rows_than_fit(make, ways):
    to, back, path = ways
    a, b = make(schema=STEPS), make(12, schema=STEPS)
    fill(a)
    to(a, path)
    with pytest.warns(UserWarning, match="has 30 rows, .* room for 12"):
        assert back(b, path) == 30
    assert len(b) == 12
    whole = {tuple(k) for k, _ in runs(a)}
    for kept, _ in runs(b):  # each the end of one
        assert any(tuple(kept) == w[len(w) - len(kept) :] for w in whole)


def test_what_is_missing_is_said(make, tmp_path, monkeypatch):
    for name in ("h5py", "minari", "lerobot", "lerobot.datasets.lerobot_dataset"):
        monkeypatch.setitem(sys.modules, name, None)
    buf = make(schema=STEPS)
    fill(buf)
    for call, said in (
        (lambda: datasets.to_hdf5(buf, tmp_path / "x"), "pip install h5py"),
        (lambda: datasets.from_hdf5(buf, tmp_path / "x"), "pip install h5py"),
        (lambda: datasets.to_minari(buf, "x-v0"), r"pip install shmbuf\[datasets\]"),
        (lambda: datasets.from_minari(buf, "x-v0"), r"pip install shmbuf\[datasets\]"),
        (lambda: datasets.to_lerobot(buf, "a/b", fps=10, task="t"), "pip install lerobot"),
        (lambda: datasets.from_lerobot(buf, "a/b"), "pip install lerobot"),
    ):
        with pytest.raises(ImportError, match=said):
            call()


# ---- Minari ------------------------------------------------------------------------------------------------------------


def standing_in(*lengths, dtype="f4"):
    """What `from_minari` reads of a data set, for spaces that rows cannot be written from."""
    episodes = [
        types.SimpleNamespace(
            observations=(np.arange(n + 1, dtype="f4")[:, None] + 100 * n, np.arange(n + 1)),
            actions=np.arange(n),
            rewards=np.ones(n, "f4" if n == lengths[0] else dtype),
            terminations=np.arange(n) == n - 1,
            truncations=np.zeros(n, bool),
        )
        for n in lengths
    ]
    return types.SimpleNamespace(iterate_episodes=lambda: iter(episodes))


def test_minari_episodes_become_trajectories(make):
    buf = make(schema=None)
    assert datasets.from_minari(buf, standing_in(4, 6)) == 10
    assert sorted((t.rows, t.ended) for t in buf.trajectories()) == [(4, True), (6, True)]
    rows = buf.gather(np.arange(10))
    for item in ("0", "1"):  # of a tuple
        assert (rows["next"]["observation"][item] - rows["observation"][item] == 1).all()


def test_a_later_episode_that_does_not_fit(make):
    buf = make(schema=None)
    with pytest.raises(
        SchemaError, match=r"(?s)episode 1 of .* \(the 4 rows of those before it are in\).*float64\[\]"
    ) as e:
        datasets.from_minari(buf, standing_in(4, 6, dtype="f8"))
    assert buf.name in str(e.value)
    assert [t.rows for t in buf.trajectories()] == [4]


def test_rows_that_carry_their_trajectory(make, ways):
    to, back, path = ways
    schema = {"episode": "int64", "k": "int64"}
    a, b = make(schema=schema), make(schema=schema)
    a.extend({"episode": np.array([0, 0, 1, 1, 1, 2]), "k": np.arange(6)})
    assert to(a, path) == back(b, path) == 6
    assert [k for k, _ in runs(b)] == [k for k, _ in runs(a)] == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("schema", [TED, NESTED], ids=["flat", "nested"])
def test_minari_there_and_back(make, minari, schema):
    a, b = make(schema=schema), make(schema=schema)
    play(a, schema)
    assert datasets.to_minari(a, "test/game-v0", author="me") == 15
    data = minari.load_dataset("test/game-v0")
    assert (data.total_episodes, data.total_steps) == (3, 15)
    assert sorted((len(e), bool(e.terminations[-1]), bool(e.truncations[-1])) for e in data.iterate_episodes()) == [
        (4, True, False),
        (5, False, True),
        (6, True, False),
    ]
    assert datasets.from_minari(b, "test/game-v0") == 15
    assert contents(b) == contents(a)
    assert sorted(t.rows for t in b.trajectories()) == [4, 5, 6]
    _, _, lens = b.draw_slices(20, 4)
    assert (lens == 4).all()


def test_minari_gives_a_buffer_its_schema(make, minari):
    a, b = make(schema=TED), make(schema=None)
    play(a)
    datasets.to_minari(a, "game-v0")
    assert datasets.from_minari(b, minari.load_dataset("game-v0")) == 15
    assert {c.key: c.shape for c in b.schema.columns}["next", "reward"] == ()
    assert sorted((t.rows, t.ended) for t in b.trajectories()) == [(4, True), (5, True), (6, True)]


def test_minari_marks_what_is_not_over(make, minari):
    a, b = make(schema=TED), make(schema=TED)
    play(a, ends=("terminated", None))
    assert datasets.to_minari(a, "all-v0") == 9
    assert datasets.to_minari(a, "over-v0", incomplete=False) == 4
    assert datasets.from_minari(b, "all-v0") == 9
    assert sorted((t.rows, t.ended) for t in a.trajectories()) == [(4, True), (5, False)]
    last = b.gather(np.array([t.end for t in b.trajectories() if t.rows == 5]))["next"]
    assert last["truncated"].all() and last["done"].all() and not last["terminated"].any()
    datasets.from_minari(b, "over-v0")
    assert sorted((t.rows, t.ended) for t in b.trajectories()) == [(4, True), (4, True), (5, True)]


@pytest.mark.parametrize(
    ("has", "ends_with", "told"),
    [
        (["done"], "done", "terminations"),
        (["terminated"], "terminated", "terminations"),
        (["truncated"], "truncated", "truncations"),
        (["terminated", "done"], "done", "truncations"),
        (["truncated", "done"], "done", "terminations"),
    ],
)
def test_minari_takes_some_end_keys(make, minari, has, ends_with, told):
    next_ = {"observation": "float32", "reward": "float32", **dict.fromkeys(has, "bool")}
    schema = {"observation": "float32", "action": "int64", "next": next_}
    a, b = make(schema=schema), make(schema=schema)
    play(a, schema, ends=(ends_with,))
    datasets.to_minari(a, "x-v0")
    (e,) = minari.load_dataset("x-v0").iterate_episodes()
    assert getattr(e, told).tolist() == [False] * 3 + [True]
    assert (e.terminations | e.truncations).sum() == 1 == e.terminations.sum() + e.truncations.sum()
    assert datasets.from_minari(b, "x-v0") == 4
    assert contents(b) == contents(a)


def test_what_is_no_minari_episode(make, minari, tmp_path):
    bad = make(schema={"observation": "float32", "extra": "bool", "next": {"observation": "float64", "done": "bool"}})
    bad.extend(
        {
            "observation": np.zeros(1, "f4"),
            "extra": np.zeros(1, bool),
            "next": {"observation": np.zeros(1), "done": np.ones(1, bool)},
        }
    )
    with pytest.raises(SchemaError) as e:
        datasets.to_minari(bad, "x-v0")
    for part in (
        "'extra' has no place",
        "'action' is missing",
        "('next', 'reward') is missing",
        "is float64[], 'observation' float32[]",
    ):
        assert part in str(e.value)
    with pytest.raises(SchemaError, match="'nowhere', which is not in the schema"):
        datasets.to_minari(bad, "x-v0", keys=["nowhere"])

    torn = make(schema=TED)
    play(torn)
    torn.edit(np.array([torn.trajectories()[0].end]), {"observation": np.full((1, 3), 7, "f4")})
    with pytest.raises(
        ValueError, match=r"row 2 of 4: \('next', 'observation'\) is not the following row's 'observation'"
    ):
        datasets.to_minari(torn, "x-v0")
    odd = make(schema=TED)
    play(odd)
    odd.edit(np.array([0]), {"next": {"truncated": np.ones((1, 1), bool)}})
    with pytest.raises(ValueError, match=r"row 0 of 4: done=False where terminated=False and truncated=True"):
        datasets.to_minari(odd, "x-v0")
    for name in ("bad id!", "", "x", "x-v", "../x-v0", "/x-v0", "a/x-v0", "x.y-v0"):
        with pytest.raises(ValueError, match="an id is"):
            datasets.to_minari(odd, name)
    with pytest.raises(RuntimeError, match="keeps no trajectories"):
        datasets.to_minari(make(schema=TED, trajectories=False), "x-v0")
    with pytest.raises(RuntimeError, match="no trajectory to write"):
        datasets.to_minari(make(schema=TED), "x-v0")
    with pytest.raises(RuntimeError, match="no schema"):
        datasets.to_minari(make(schema=None), "x-v0")
    assert not (tmp_path / "minari").exists()


def test_minari_leaves_out_a_lost_beginning_if_told(make, minari):
    a = make(7, schema=TED)
    rng = np.random.default_rng(0)
    for n in (5, 4):  # two rows of the first are overwritten
        a.extend(episode(TED, n, "terminated", rng))
    assert [(t.rows, t.head_missing) for t in a.trajectories()] == [(3, True), (4, False)]
    assert datasets.to_minari(a, "all-v0") == 7
    assert datasets.to_minari(a, "whole-v0", incomplete=False) == 4


def test_minari_columns_by_name_and_a_taken_id(make, minari):
    a, b = make(schema={**TED, "extra": "bool"}), make(schema=TED)
    play(a, {**TED, "extra": "bool"})
    keys = ["observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated"), "next"]
    assert datasets.to_minari(a, "x-v0", keys=keys) == datasets.from_minari(b, "x-v0") == 15
    with pytest.raises(ValueError, match="already exists"):
        datasets.to_minari(a, "x-v0", keys=keys)
    with pytest.raises(FileNotFoundError):
        datasets.from_minari(b, "nothing-v0")
    with pytest.raises(SchemaError) as e:
        datasets.from_minari(a, "x-v0")
    assert "x-v0" in str(e.value) and a.name in str(e.value) and "'extra' is missing" in str(e.value)
    assert a.window == (0, 15)


def test_a_replay_buffer_will_do_and_nothing_else(make, tmp_path):
    pytest.importorskip("torch")
    from shmbuf import ReplayBuffer, ShmStorage

    buf = make(10, schema={"k": "int64"})
    buf.extend({"k": np.arange(5)})
    rb = ReplayBuffer(storage=ShmStorage.over(buf))
    assert datasets.to_npz(rb, tmp_path / "x") == 5 and datasets.from_npz(rb, tmp_path / "x") == 5
    assert numbers(buf) == [*range(5)] * 2
    with pytest.raises(TypeError, match="to_npz takes a Buffer or a replay buffer, not dict"):
        datasets.to_npz({}, tmp_path / "x")
