"""Out to other formats and in again: rows and trajectories are the same. The real libraries where they are installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from shmbuf import datasets
from shmbuf.errors import SchemaError
from shmbuf.schema import flatten, nest

# Minari recommends an author, a description, …
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore::UserWarning:lerobot")

STEPS = {"k": "int64", "obs": ("float32", (3,)), "next": {"done": "bool"}}
ENDS = {"reward": ("float32", (1,)), "terminated": ("bool", (1,)), "truncated": ("bool", (1,)), "done": ("bool", (1,))}
TED = {"observation": ("float32", (3,)), "action": "int64", "next": {"observation": ("float32", (3,)), **ENDS}}
TREE = {"position": ("float64", (2,)), "hand": {"open": "bool", "image": ("uint8", (32, 32, 3))}}
NESTED = {"observation": TREE, "action": {"arm": ("float32", (2,))}, "next": {"observation": TREE, **ENDS}}


def fill(buf) -> None:
    for i in range(30):
        rows = {"k": np.array([i]), "obs": np.full((1, 3), i, "f4"), "next": {"done": np.array([i % 10 == 9])}}
        buf.extend(rows, stream=i % 3)


def runs(buf, key="k") -> list:
    return sorted((buf.gather(buf.trajectory(t.end))[key].tolist(), t.ended) for t in buf.trajectories())


def some(rng, dtype, shape):
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, shape).astype(dtype) if "int" in dtype else rng.normal(size=shape).astype(dtype)


def episode(schema, n, how, rng) -> dict:
    """n steps whose next observations are the following ones; how: the end key that the last one has, or None."""
    leaves = {}
    for key, spec in flatten(schema, is_node=lambda v: isinstance(v, dict)).items():
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        leaves[key] = some(rng, dtype, (n + 1, *shape))
    for key in list(leaves):
        if key[:2] == ("next", "observation"):
            leaves[key] = leaves[key[1:]][1:]
    for key in leaves:
        if key[-1] in ("terminated", "truncated", "done"):
            leaves[key][:] = False
            if how and key[-1] in (how, "done"):
                leaves[key][n - 1] = True
        leaves[key] = leaves[key][:n]
    return nest(leaves.keys(), leaves.values())


def play(buf, schema=TED, ends=("terminated", "truncated", "terminated")) -> None:
    """Episodes of 4, 5, … rows, each step by step in a stream of its own, so that their rows lie between one another."""
    rng = np.random.default_rng(1)
    games = [episode(schema, 4 + i, how, rng) for i, how in enumerate(ends)]
    for t in range(4 + len(ends)):
        for i, game in enumerate(games):
            if t < 4 + i:
                leaves = {k: a[t : t + 1] for k, a in flatten(game).items()}
                buf.extend(nest(leaves.keys(), leaves.values()), stream=i)


def contents(buf) -> list:
    """Every trajectory with all of its rows, comparable, in one order."""
    out = []
    for t in buf.trajectories():
        leaves = flatten(buf.gather(buf.trajectory(t.end)))
        out.append((t.ended, {k: (a.dtype.name, a.shape, a.tobytes()) for k, a in leaves.items()}))
    return sorted(out, key=lambda x: sorted(x[1].items()))


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    pytest.importorskip("minari.dataset._storages.hdf5_storage")
    return pytest.importorskip("minari")


@pytest.fixture
def lerobot(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("lerobot.datasets.lerobot_dataset")


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


# ---- LeRobot -----------------------------------------------------------------------------------------------------------

ROBOT = {
    "observation": {
        "state": ("float64", (3,)),
        "images": {"top": ("uint8", (3, 6, 8)), "side": ("uint8", (6, 8, 3)), "square": ("uint8", (3, 3, 3))},
        "grid": ("int16", (2, 3)),
        "depth": ("uint8", (1, 4, 4)),
        "mass": "float64",
    },
    "action": ("float32", (2,)),
    "next": {"reward": ("float32", (1,)), "done": ("bool", (1,)), "terminated": "bool"},
}


def test_lerobot_there_and_back(make, lerobot, tmp_path):
    a, b = make(schema=ROBOT), make(schema=ROBOT)
    play(a, ROBOT, ends=("terminated", None, "terminated"))
    about = {"robot_type": "arm", "image_writer_threads": 2}
    assert datasets.to_lerobot(a, "me/game", root=tmp_path / "x", fps=10, task="play", **about) == 15
    data = lerobot.LeRobotDataset("me/game", root=tmp_path / "x")
    assert (data.num_episodes, data.num_frames, data.fps, data.meta.robot_type) == (3, 15, 10, "arm")
    assert data[0]["task"] == "play"
    assert data[0]["observation.images.top"].shape == data[0]["observation.images.side"].shape == (3, 6, 8)
    assert datasets.from_lerobot(b, data) == 15
    assert contents(b) == contents(a)
    assert sorted((t.rows, t.ended) for t in b.trajectories()) == [(4, True), (5, False), (6, True)]


def test_lerobot_some_features_and_episodes(make, lerobot, tmp_path):
    a = make(schema=ROBOT)
    play(a, ROBOT)
    keys = [("observation", "state"), "action"]
    assert datasets.to_lerobot(a, "me/game", root=tmp_path / "x", fps=10, task="play", keys=keys) == 15
    b = make(schema=None)
    assert datasets.from_lerobot(b, "me/game", root=tmp_path / "x") == 15
    assert set(b.schema.keys) == {
        ("observation", "state"),
        ("action",),
        ("next", "done"),
    }  # which the file does not have
    assert sorted((t.rows, t.ended) for t in b.trajectories()) == [(4, True), (5, True), (6, True)]
    c = make(schema={"action": ("float32", (2,)), "frame_index": "int64"}, trajectories=True)
    data = lerobot.LeRobotDataset("me/game", root=tmp_path / "x", episodes=[1])
    assert datasets.from_lerobot(c, data, keys=["action", "frame_index"]) == 5
    assert c.gather(np.arange(5))["frame_index"].tolist() == [0, 1, 2, 3, 4]
    d = make(
        schema={"action": ("float32", (2,)), "observation": {"state": ("float64", (3,))}, "frame_index": "int64"},
        trajectories=True,
    )
    assert datasets.from_lerobot(d, data) == 5
    with pytest.raises(SchemaError, match="no feature 'nothing'"):
        datasets.from_lerobot(d, data, keys=["nothing"])
    with pytest.raises(SchemaError) as e:
        datasets.from_lerobot(c, data, keys=["observation.state"])
    assert "me/game" in str(e.value) and c.name in str(e.value)
    assert (c.window, d.window) == ((0, 5), (0, 5))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # LeRobot's own, of what it could not write
def test_lerobot_leaves_nothing_behind(make, lerobot, tmp_path):
    a, root = make(schema=ROBOT), tmp_path / "x"
    with pytest.raises(RuntimeError, match="no trajectory to write"):
        datasets.to_lerobot(a, "me/game", root=root, fps=10, task="play")
    play(a, ROBOT)
    with pytest.raises(ValueError, match="fps=0"):
        datasets.to_lerobot(a, "me/game", root=root, fps=0, task="play")
    with pytest.raises(ValueError, match="task=None"):
        datasets.to_lerobot(a, "me/game", root=root, fps=10, task=None)
    flat = {"x": ("float64", (2, 2)), "next": {"done": "bool"}}
    c = make(schema=flat)
    for i, n in enumerate((1, 4)):  # more than LeRobot's statistics can take
        c.extend({"x": np.ones((n, 2, 2)), "next": {"done": np.arange(n) == n - 1}}, stream=i)
    with pytest.raises(RuntimeError, match="LeRobot could not write the episode that ends with row 5"):
        datasets.to_lerobot(c, "me/game", root=root, fps=10, task="play")
    for key, spec in (
        ("a.b", "bool"),
        ("timestamp", "float32"),
        ("task", "bool"),
        ("z", "complex64"),
        ("w", ("int8", (1,) * 6)),
    ):
        b = make(schema={key: spec, "next": {"done": "bool"}})
        with pytest.raises(SchemaError, match=f"'{key}'"):
            datasets.to_lerobot(b, "me/game", root=root, fps=10, task="play")
    assert not root.exists()
    Path(root).mkdir()
    with pytest.raises(FileExistsError):
        datasets.to_lerobot(a, "me/game", root=root, fps=10, task="play")
    assert root.exists()


def test_lerobot_images_of_others(make, lerobot, tmp_path):
    """Whose feature does not say which dimension is the channels."""
    features = {"cam": {"dtype": "image", "shape": (3, 6, 8), "names": None}}
    frames = np.random.default_rng(0).integers(0, 256, (4, 3, 6, 8), np.uint8)
    data = lerobot.LeRobotDataset.create("me/x", fps=5, features=features, root=tmp_path / "x", use_videos=False)
    for frame in frames:
        data.add_frame({"cam": frame, "task": "t"})
    data.save_episode()
    data.finalize()
    buf = make(schema=None)
    assert datasets.from_lerobot(buf, "me/x", root=tmp_path / "x") == 4
    rows = buf.gather(np.arange(4))
    assert rows["cam"].dtype == np.uint8 and (rows["cam"] == frames).all()
    assert rows["next"]["done"].tolist() == [[False], [False], [False], [True]]


def test_lerobot_text_video_and_unfinished_are_refused(make, lerobot, tmp_path):
    features = {
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "words": {"dtype": "string", "shape": (1,), "names": None},
    }
    data = lerobot.LeRobotDataset.create("me/x", fps=5, features=features, root=tmp_path / "x")
    for _ in range(3):
        data.add_frame({"action": np.zeros(2, "f4"), "words": "hello", "task": "t"})
    data.save_episode()
    buf = make(schema=None)
    with pytest.raises(ValueError, match="has 3 frames, of which 0 can be read: finalize"):
        datasets.from_lerobot(buf, data, keys=["action"])
    data.finalize()
    data = lerobot.LeRobotDataset("me/x", root=tmp_path / "x")
    with pytest.raises(ValueError, match="'words' is string"):
        datasets.from_lerobot(buf, data)
    assert buf.schema is None
    assert datasets.from_lerobot(buf, data, keys=["action"]) == 3
    film = {
        "action": features["action"],
        "cam": {"dtype": "video", "shape": (8, 8, 3), "names": ["height", "width", "channels"]},
    }
    data = lerobot.LeRobotDataset.create("me/y", fps=5, features=film, root=tmp_path / "y")
    with pytest.raises(ValueError, match=r"'cam' is video.*keys="):
        datasets.from_lerobot(buf, data)
