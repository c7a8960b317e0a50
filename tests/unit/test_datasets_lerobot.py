"""LeRobot data sets: by the library itself where it is installed (it brings a torch of its own, so not with our extras)."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest

from shmbuf import datasets
from shmbuf.errors import SchemaError
from tests.unit.helpers_datasets import contents, play

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


@pytest.fixture
def lerobot(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("lerobot.datasets.lerobot_dataset")


class Table:
    """What `from_lerobot` asks of a `datasets.Dataset`, over arrays. Images are decoded, dimensions of one are dropped, and floats are float32
    unless a dtype is given, as numpy's formatter has it."""

    def __init__(self, columns, dtype=None):
        self.columns, self.dtype = columns, dtype

    def select_columns(self, names):
        return Table({k: self.columns[k] for k in names}, self.dtype)

    def with_format(self, _, dtype=None):
        return Table(self.columns, dtype)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, at):
        if isinstance(at, str):
            return self.columns[at]
        return {k: a[at].astype(self.dtype or ("f4" if a.dtype == "f8" else a.dtype)) for k, a in self.columns.items()}


def standing_in(features, **columns):
    n = len(columns["episode_index"])
    features = {
        k: {"dtype": d, "shape": s, "names": None}
        for k, (d, s) in {**features, "episode_index": ("int64", (1,))}.items()
    }
    return types.SimpleNamespace(repo_id="me/it", features=features, hf_dataset=Table(columns), num_frames=n)


def test_frames_become_rows(make):
    features = {
        "observation.state": ("float64", (2,)),
        "action": ("int64", (1,)),
        "cam": ("image", (3, 4, 5)),
        "film": ("video", (3, 4, 5)),
    }
    state, cam = np.arange(14.0).reshape(7, 2), np.arange(7 * 60, dtype="u1").reshape(7, 4, 5, 3)
    columns = {"observation.state": state, "action": np.arange(7), "cam": cam, "film": cam}
    data = standing_in(features, **columns, episode_index=np.array([0, 0, 0, 2, 2, 5, 5]))
    a, b = make(schema=None), make(schema={"action": "int64", "episode_index": "int64"}, trajectories=True)
    with pytest.raises(ValueError, match=r"'film' is video.*keys="):
        datasets.from_lerobot(a, data)
    assert a.schema is None
    assert datasets.from_lerobot(a, data, keys=["observation.state", "action", "cam"]) == 7
    rows = a.gather(np.arange(7))
    assert (rows["observation"]["state"] == state).all() and rows["observation"]["state"].dtype == "f8"
    assert (rows["cam"] == np.moveaxis(cam, -1, 1)).all()
    assert rows["action"].shape == (7, 1)
    assert rows["next"]["done"][:, 0].tolist() == [False, False, True, False, True, False, True]
    assert [t.rows for t in a.trajectories()] == [3, 2, 2]
    assert datasets.from_lerobot(b, data, keys=["action", "episode_index"]) == 7
    assert b.gather(np.arange(7))["episode_index"].tolist() == [0, 0, 0, 2, 2, 5, 5]
    assert [t.rows for t in b.trajectories()] == [3, 2, 2]
    with pytest.raises(SchemaError, match=f"'me/it' does not fit buffer '{b.name}'"):
        datasets.from_lerobot(b, data, keys=["cam"])
    assert b.window == (0, 7)


class Recorder:
    """Of a LeRobotDataset, what `to_lerobot` calls; it fails at the frame it is told to fail at."""

    image_writer = None

    def __init__(self, fail_at=None):
        self.fail_at, self.frames, self.episodes, self.final = fail_at, [], [], False

    def create(self, *, root, **about):
        self.root, self.about = root, about
        root.mkdir()
        return self

    def add_frame(self, frame):
        if sum(self.episodes) + len(self.frames) == self.fail_at:
            raise ValueError("it will not")
        self.frames.append(frame)

    def save_episode(self):
        self.episodes.append(len(self.frames))
        self.frames.clear()

    def finalize(self):
        self.final = True


def test_rows_become_frames(make, monkeypatch, tmp_path):
    buf, to = make(schema=ROBOT), Recorder()
    play(buf, ROBOT)
    monkeypatch.setattr(datasets, "_lerobot", lambda: to)
    assert datasets.to_lerobot(buf, "me/it", root=tmp_path / "x", fps=10, task="play", robot_type="arm") == 15
    assert (to.episodes, to.final) == ([4, 5, 6], True)
    features = to.about.pop("features")
    assert to.about == {"repo_id": "me/it", "fps": 10, "use_videos": False, "robot_type": "arm"}
    assert features["observation.images.top"]["names"] == ["channels", "height", "width"]
    assert features["observation.images.side"]["names"] == ["height", "width", "channels"]
    assert features["observation.depth"] == {"dtype": "uint8", "shape": (1, 4, 4), "names": None}
    assert features["next.terminated"] == {"dtype": "bool", "shape": (1,), "names": None}

    to = Recorder(fail_at=7)
    with pytest.raises(RuntimeError, match=r"ends with row 7 of .*: it will not.*is removed"):
        datasets.to_lerobot(buf, "me/it", root=tmp_path / "y", fps=10, task="play")
    assert not (tmp_path / "y").exists()
    for key, spec in (("timestamp", "float32"), ("a.b", "bool"), ("z", "complex64")):
        with pytest.raises(SchemaError, match=f"'{key}'"):
            datasets.to_lerobot(make(schema={key: spec}), "me/it", root=tmp_path / "y", fps=10, task="play")
    assert not (tmp_path / "y").exists()


def test_features_that_lerobot_counts_itself_come_if_there_is_room_for_them(make):
    data = standing_in(
        {"action": ("int64", (1,)), "index": ("int64", (1,))},
        action=np.arange(4),
        index=np.arange(4),
        episode_index=np.zeros(4),
    )
    a, b = make(schema=None), make(schema={"action": "int64", "index": "int64"}, trajectories=True)
    assert datasets.from_lerobot(a, data) == datasets.from_lerobot(b, data) == 4
    assert set(a.schema.keys) == {("action",), ("next", "done")}
    assert b.gather(np.arange(4))["index"].tolist() == [0, 1, 2, 3]
    data.num_frames = 5
    with pytest.raises(ValueError, match="has 5 frames, of which 4 can be read"):
        datasets.from_lerobot(a, data)


def test_flags_of_the_data_set_are_kept(make):
    data = standing_in(
        {"action": ("int64", (1,)), "next.terminated": ("bool", (1,))},
        **{"action": np.arange(4), "next.terminated": np.array([False, True, False, False])},
        episode_index=np.array([0, 0, 1, 1]),
    )
    buf = make(schema=None)
    assert datasets.from_lerobot(buf, data) == 4
    assert set(buf.schema.keys) == {("action",), ("next", "terminated")}
    assert [(t.rows, t.ended) for t in buf.trajectories()] == [(2, True), (2, False)]


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
