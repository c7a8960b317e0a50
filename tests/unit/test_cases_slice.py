"""Class SLICE of the real cases (shared/spec/cases.md): boundaries of slices, trajectories, successors. Each test is named after its
case; B030 (two processes) is in tests/process/test_slices_concurrent.py, B037 (n-step) in test_sequences.py, which needs torch.

Draws are seeded. Frequencies are within 5 σ of a binomial."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from shmbuf import NotEnoughRows
from shmbuf.trajectories import TrajectorySpan

SPEC = {"t": "int64", "x": "float32", "next": {"obs": "int64", "done": "bool"}}


def episode(first: int, n: int, ended: bool = True) -> dict:
    """n rows numbered from `first`, the last one done."""
    t = np.arange(first, first + n)
    done = np.zeros(n, bool)
    done[-1:] = ended
    return {"t": t, "x": t.astype(np.float32), "next": {"obs": t + 1, "done": done}}


@pytest.fixture
def buffer(make):
    def buffer(capacity: int = 100, *episodes: dict):
        buf = make(capacity, schema=SPEC)
        for rows in episodes:
            buf.extend(rows)
        buf.seed(1)
        return buf

    return buffer


def starts(buf, length: int, n: int, **how) -> Counter:
    """How often slices begin where; each is checked to be consecutive rows."""
    rows, _, lens = buf.draw_slices(n, length, **how)
    assert (lens == length).all()
    t = rows["t"].reshape(n, length)
    assert (np.diff(t, axis=1) == 1).all()
    return Counter(t[:, 0].tolist())


def even(counts: Counter, among: list[int], n: int) -> None:
    assert sorted(counts) == sorted(among)
    p = 1 / len(among)
    bound = 5 * math.sqrt(n * p * (1 - p))
    assert all(abs(c - n * p) <= bound for c in counts.values()), counts


@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_b023_the_last_step_can_be_reached(buffer, by):
    for steps, length, share in ((2, 1, 1 / 2), (5, 3, 1 / 9)):
        rows = episode(0, steps)
        rows["x"][-1] = np.nan
        buf = buffer(100, rows)
        got, _, _ = buf.draw_slices(10_000, length, by=by)
        assert abs(np.isnan(got["x"]).mean() - share) < 0.015
        even(starts(buf, length, 10_000, by=by), list(range(steps - length + 1)), 10_000)
    counts = starts(buffer(100, episode(0, 2)), 1, 10_000, by=by)
    assert set(counts) == {0, 1} and all(abs(c - 5000) <= 250 for c in counts.values())


def test_b025_the_exact_set_at_the_write_cursor(buffer):
    buf = buffer(10, episode(100, 4), episode(200, 5), episode(300, 4))  # A, B, C; A0 to A2 are gone
    expected = {
        1: [103, *range(200, 205), *range(300, 304)],
        2: [200, 201, 202, 203, 300, 301, 302],
        3: [200, 201, 202, 300, 301],
        4: [200, 201, 300],
        5: [200],
    }
    for length, among in expected.items():
        even(starts(buf, length, 50_000, by="start"), among, 50_000)
        counts = starts(buf, length, 50_000)
        assert sorted(counts) == among
        if length == 3:  # as TorchRL draws: B or C first
            assert all(abs(c / 50_000 - (1 / 6 if s < 300 else 1 / 4)) < 0.011 for s, c in counts.items())


@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize("strict", [True, False])
def test_b027_no_row_outside_the_live_range(buffer, strict, by):
    buf = buffer(100, episode(0, 1), episode(10, 2), episode(20, 3), episode(30, 50))
    live = {0, 10, 11, 20, 21, 22, *range(30, 80)}
    assert len(buf) == 56 == len(live)
    for length in (1, 2, 3, 50):
        for _ in range(10_000 // 40):
            rows, ids, lens = buf.draw_slices(40, length, strict=strict, by=by)
            t = rows["t"]
            assert len(ids) == len(t) == lens.sum() and (not strict or (lens == length).all())
            assert set(t.tolist()) <= live
            inside = np.ones(len(t), bool)
            inside[np.cumsum(lens)[:-1]] = False
            assert (np.diff(t)[inside[1:]] == 1).all() and (np.diff(ids)[inside[1:]] == 1).all()


def test_b028_mixed_lengths(buffer):
    buf = buffer(100, episode(0, 2), episode(10, 5))
    even(starts(buf, 4, 10_000), [10, 11], 10_000)
    rows, ids, lens = buf.draw_slices(10_000, 4, strict=False)
    assert set(lens.tolist()) == {2, 4} and len(ids) == lens.sum()
    begin = np.cumsum(lens) - lens
    for start, n in zip(begin.tolist(), lens.tolist(), strict=True):
        assert rows["t"][start : start + n].tolist() == (
            [0, 1] if n == 2 else list(range(rows["t"][start], rows["t"][start] + 4))
        )
    assert set(rows["t"][begin].tolist()) == {0, 10, 11}
    assert abs((lens == 2).mean() - 0.5) < 0.025
    with pytest.raises(NotEnoughRows, match=r"the longest has 2 rows, slices of 4 were asked for"):
        buffer(100, episode(0, 2)).draw_slices(5, 4)


def test_b031_row_by_row_equals_batch_by_batch(buffer):
    whole = {
        "t": np.arange(30),
        "x": np.zeros(30, "f4"),
        "next": {"obs": np.arange(30) + 1, "done": np.arange(30) % 10 == 9},
    }

    def part(lo: int, hi: int) -> dict:
        return {k: v[lo:hi] if k != "next" else {x: y[lo:hi] for x, y in v.items()} for k, v in whole.items()}

    seen = []
    for size in (1, 10, 30, 7):
        buf = buffer(100, *(part(i, min(i + size, 30)) for i in range(0, 30, size)))
        assert sorted(starts(buf, 5, 5000, by="start")) == [e * 10 + s for e in range(3) for s in range(6)]
        buf.seed(7)
        rows, ids, _ = buf.draw_slices(64, 5)
        seen.append((rows["t"].tolist(), ids.tolist(), [tuple(t) for t in buf.trajectories()]))
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_b032_the_successor_of_the_last_step(buffer):
    buf = buffer(100, episode(0, 5), episode(100, 3))
    ids = np.arange(5)
    assert buf.following(ids).tolist() == [1, 2, 3, 4, -1]  # never the first of the next episode
    assert buf.gather([4])["next"]["obs"].tolist() == [5]  # stored with its own row


def test_b033_the_successor_of_the_newest_row(buffer):
    buf = buffer(100, episode(1, 10, ended=False))
    for _ in range(100):
        rows, ids = buf.draw(100)
        after = buf.following(ids)
        assert ((after == -1) == (rows["t"] == 10)).all()  # the newest one is flagged
        stored = after >= 0
        assert (buf.gather(after[stored])["t"] == rows["t"][stored] + 1).all()


def test_b035_the_table_of_frame_stacks(buffer):
    buf = buffer(100, episode(0, 3), episode(3, 2), episode(5, 4), episode(9, 1, ended=False))
    table, lens = buf.walk_back(np.arange(10), 3)
    assert [tuple(line) for line in table[:, ::-1].tolist()] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 2), (3, 3, 3), (3, 3, 4), (5, 5, 5), (5, 5, 6), (5, 6, 7), (6, 7, 8), (9, 9, 9),
    ]  # fmt: skip
    assert lens.tolist() == [1, 2, 3, 1, 2, 1, 2, 3, 3, 1]


def test_b036_no_invented_rows(buffer):
    buf = buffer(100, episode(0, 8))
    rows = buf.gather(np.arange(*buf.window))
    assert (len(buf), buf.write_count, int(rows["next"]["done"].sum())) == (8, 8, 1)
    views = [buf.walk_forward(np.arange(8), 5)[0], buf.walk_back(np.arange(8), 5)[0]]
    got, ids, _ = buf.draw_slices(1000, 3)
    assert {i for v in views for i in v.reshape(-1).tolist()} == set(range(8)) == set(ids.tolist())
    assert set(got["t"][got["next"]["done"]].tolist()) == {7}


def test_b039_an_open_episode_longer_than_the_buffer(buffer):
    buf = buffer(100)
    for k in range(1, 251):
        buf.extend(episode(k - 1, 1, ended=False))
        if k < 10:
            with pytest.raises(NotEnoughRows, match=f"the longest has {k} row"):
                buf.draw_slices(2, 10)
            continue
        oldest = max(0, k - 100)
        assert buf.trajectories() == [TrajectorySpan(oldest, k - 1, k - oldest, k > 100, False)]
        counts = starts(buf, 10, 50)
        assert min(counts) >= oldest and max(counts) <= k - 10
    even(starts(buf, 10, 20_000), list(range(150, 241)), 20_000)


def test_b040_links_to_evicted_rows_are_cut(buffer):
    buf = buffer(6, episode(0, 4), episode(10, 4))
    assert buf.trajectories() == [TrajectorySpan(2, 3, 2, True, True), TrajectorySpan(4, 7, 4, False, True)]
    assert [(t.head_missing, rows["t"].tolist()) for t, rows in buf.export()] == [
        (True, [2, 3]),
        (False, [10, 11, 12, 13]),
    ]
    assert buf.preceding([2, 3, 4, 5]).tolist() == [-1, 2, -1, 4]
    assert buf.walk_back([2, 3], 4)[1].tolist() == [1, 2]
