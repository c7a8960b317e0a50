"""Out to other formats and in again: rows and trajectories are the same."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from shmbuf import datasets

STEPS = {"k": "int64", "obs": ("float32", (3,)), "next": {"done": "bool"}}


def fill(buf) -> None:
    for i in range(30):
        rows = {"k": np.array([i]), "obs": np.full((1, 3), i, "f4"), "next": {"done": np.array([i % 10 == 9])}}
        buf.extend(rows, stream=i % 3)


def runs(buf) -> list:
    return sorted((buf.gather(buf.trajectory(t.end))["k"].tolist(), t.ended) for t in buf.trajectories())


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
def test_there_and_back(make, tmp_path, kind):
    if kind == "hdf5":
        pytest.importorskip("h5py")
    a, b = make(schema=STEPS), make(schema=STEPS)
    fill(a)
    assert getattr(datasets, f"to_{kind}")(a, tmp_path / f"x.{kind}") == 30
    assert getattr(datasets, f"from_{kind}")(b, tmp_path / f"x.{kind}") == 30
    assert runs(b) == runs(a)


def test_minari_episodes_become_trajectories(make, monkeypatch):
    monkeypatch.setattr(datasets, "_library", lambda *a: None)
    episodes = [
        types.SimpleNamespace(
            observations=np.arange(n + 1, dtype="f4")[:, None] + 100 * n,
            actions=np.arange(n),
            rewards=np.ones(n),
            terminations=np.arange(n) == n - 1,
            truncations=np.zeros(n, bool),
        )
        for n in (4, 6)
    ]
    buf = make(schema=None)
    assert datasets.from_minari(buf, types.SimpleNamespace(iterate_episodes=lambda: iter(episodes))) == 10
    assert sorted((t.rows, t.ended) for t in buf.trajectories()) == [(4, True), (6, True)]
    rows = buf.gather(np.arange(10))
    assert (rows["next"]["observation"] - rows["observation"] == 1).all()


def test_what_is_missing_is_said(make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    buf = make(schema=STEPS)
    fill(buf)
    with pytest.raises(ImportError, match="pip install h5py"):
        datasets.to_hdf5(buf, tmp_path / "x")
