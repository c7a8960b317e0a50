"""Class CKPT of the real cases at the TensorDict level. Kills (B125), restoring beside collectors (B132) and memory (B136) are in
tests/process/test_checkpoint_kills.py; paths and places (B129, B134) also in test_checkpoint.py."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    MinSize,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    SamplerWithoutReplacement,
    ShmStorage,
    SliceSampler,
    TensorDictReplayBuffer,
)
from shmbuf.checkpoint import dumps, loads, register_load_hook, register_save_hook
from shmbuf.transforms import Transform


@pytest.fixture
def make_rb(make_name):
    made = []

    def make(capacity: int = 100, sampler=None, batch_size: int = 12, limiter=None, **kw) -> TensorDictReplayBuffer:
        storage = ShmStorage(capacity, name=make_name(), drain="caller", **kw)
        made.append(TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size, limiter=limiter))
        return made[-1]

    yield make
    for rb in made:
        rb.close()


def rows(first: int, n: int, length: int | None = None) -> TensorDict:
    k = torch.arange(first, first + n)
    td = TensorDict({"k": k}, [n])
    if length is not None:
        td["next", "done"] = k % length == length - 1
    return td


def numbers(rb) -> list[int]:
    return rb.buffer.gather(range(*rb.buffer.window))["k"].tolist()


@pytest.mark.parametrize("how", ["before any sample", "after priorities", "at capacity"])
def test_b127_priorities_before_and_after(make_rb, tmp_path, how):
    """24 rows of 100, before and after priorities are set, and 100 of 100: P of every row to 1e-12, and the same draws."""
    a, b = (make_rb(sampler=PrioritizedSampler(100, 0.6, 0.4)) for _ in range(2))
    a.extend(rows(0, 24))
    if how != "before any sample":
        batch = a.sample(12)
        a.update_priority(None, torch.full((12,), 3.0), row_id=batch["row_id"])
    if how == "at capacity":
        a.extend(rows(24, 76))
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    ids = range(*a.buffer.window)
    assert b.buffer.priorities(ids) == pytest.approx(a.buffer.priorities(ids), rel=1e-12)
    draws = []
    for rb in (a, b):
        rb.buffer.seed(7)
        draws.append([rb.sample() for _ in range(5)])
    for x, y in zip(*draws, strict=True):
        assert torch.equal(x["k"], y["k"]) and torch.equal(x["priority_weight"], y["priority_weight"])


FRESH = """
import sys
from shmbuf import Buffer
from shmbuf.checkpoint import load_buffer
with Buffer.create(None, 100, drain="caller") as buf:
    buf.keep_priorities(0.6)
    load_buffer(buf, sys.argv[1])
    print(len(buf), *(p.hex() for p in map(float, buf.priorities(range(*buf.window)))))
"""


def test_b127_restored_in_a_new_process(make_rb, tmp_path, python):
    """24 rows of which 12, drawn, have priority 1.0: every P to the bit, in a process that has no torch."""
    rb = make_rb(sampler=PrioritizedSampler(100, 0.6, 0.4))
    rb.extend(rows(0, 24))
    rb.update_priority(None, 3.0, row_id=torch.arange(24))
    rb.update_priority(None, torch.ones(12), row_id=rb.sample(12)["row_id"])
    rb.dumps(tmp_path / "c")
    n, *priorities = python(FRESH, tmp_path / "c").split()
    assert n == "24" and len(set(priorities)) == 2
    assert [float.fromhex(p) for p in priorities] == rb.buffer.priorities(range(24)).tolist()


def test_b129_of_a_buffer_and_a_path_that_nobody_named(tmp_path, monkeypatch):
    """The default storage, an unnamed one, saves to a relative path with a space in it; the second save replaces the first."""
    monkeypatch.chdir(tmp_path)
    with TensorDictReplayBuffer() as rb, TensorDictReplayBuffer() as other:
        rb.extend(rows(0, 10))
        rb.dumps("a place")
        rb.extend(rows(10, 3))
        rb.dumps("a place")
        other.loads("a place")
        assert numbers(other) == list(range(13))
        (tmp_path / "full").mkdir()
        (tmp_path / "full/diary").write_text("mine")
        with pytest.raises(shmbuf.CheckpointError, match="diary"):
            rb.dumps("full")
        assert (tmp_path / "full/diary").read_text() == "mine"


def test_b129_save_load_save_again_elsewhere(make_rb, tmp_path):
    """B is whole without A. Also A twice; other kinds of path are in `test_paths`."""
    rb, other = make_rb(), make_rb()
    rb.extend(rows(0, 30))
    dumps(rb, tmp_path / "A")
    dumps(rb, tmp_path / "A")
    loads(rb, tmp_path / "A")
    rb.extend(rows(30, 1))
    dumps(rb, tmp_path / "B")
    shutil.rmtree(tmp_path / "A")
    loads(other, tmp_path / "B")
    assert numbers(other) == numbers(rb) == list(range(31))


@pytest.mark.parametrize("length", [4, 5])
def test_b131_episode_bookkeeping_after_a_load(make_rb, tmp_path, length):
    """Episodes of 7, cut at 4: none is longer than 7, the cut one has 4 rows and no end, no slice joins old and new."""
    sampler = SliceSampler(slice_len=length, strict_length=True)
    a, b = (make_rb(sampler=sampler) for _ in range(2))
    a.extend(rows(0, 7 * 3 + 4, 7))
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    for turn in range(3):  # collectors start anew
        b.extend(rows(700 + 7 * turn, 7, 7))
    lengths = sorted(t.rows for t in b.buffer.trajectories())
    assert lengths == [4] + [7] * 6
    cut = next(t for t in b.buffer.trajectories() if t.rows == 4)
    assert not cut.ended and not cut.head_missing
    seen = set()
    for _ in range(50):
        k = b.sample(4 * length)["k"].reshape(-1, length)
        assert (k.diff(dim=1) == 1).all()
        seen |= set(k.flatten().tolist())
    assert (24 in seen) == (length == 4), "the cut one is long enough for slices of 4 only"


def test_b132_restored_once_not_twice(make_rb, tmp_path):
    """Replaces what is stored: into a buffer that has the same rows, and twice. While collectors put: test_checkpoint_kills.py."""
    rb = make_rb()
    rb.extend(rows(0, 40))
    dumps(rb, tmp_path / "c")
    for _ in range(2):
        loads(rb, tmp_path / "c")
        assert numbers(rb) == list(range(40))


def test_b134_restore_puts_the_data_where_it_is_asked_to(make_rb, tmp_path):
    """Into the handle it is called on, in every attached process; a missing or empty place is an error, never an empty buffer."""
    a, b = make_rb(), make_rb()
    a.extend(rows(0, 33))
    dumps(a, tmp_path / "c")
    other = shmbuf.attach(b.name)
    loads(b, tmp_path / "c")
    assert len(b) == len(other) == 33 and sorted(set(other.sample(500)["k"].tolist())) == list(range(33))
    other.close()
    (tmp_path / "empty").mkdir()
    for place in ("missing", "empty"):
        with pytest.raises(shmbuf.CheckpointError, match=place):
            loads(b, tmp_path / place)
    assert len(b) == 33


WRITTEN = 100_073


@pytest.mark.parametrize("limiter", [MinSize(50_000), RateLimiter(2.0, min_size=1000, error_buffer=3000.0)])
def test_b137_loaded_and_sampling_starts(make_rb, tmp_path, limiter):
    """100,073 rows written, 2,000 stored, under a minimum size or a ratio: sampling goes on at once, as far from its bounds as before."""
    a, b = (make_rb(2000, limiter=limiter, batch_size=10) for _ in range(2))
    for at in range(0, WRITTEN, 1000):
        a.extend(rows(at, min(1000, WRITTEN - at)), timeout=30)
        while isinstance(limiter, RateLimiter) and at >= 1000 and a.buffer.limiter_state()["diff"] > 2000:
            a.sample(1000)
    a.sample(timeout=0)
    before = a.buffer.limiter_state()
    dumps(a, tmp_path / "c")
    done = loads(b, tmp_path / "c")
    assert done.rows == 2000 and a.write_count == WRITTEN
    b.sample(timeout=0)
    after = b.buffer.limiter_state()
    assert not after["sampler_waits_for_size"] and after["allowance"] != 0
    if isinstance(limiter, RateLimiter):  # as far from where samplers stop as before, but for the batch just drawn
        assert after["diff"] - after["min_diff"] == before["diff"] - before["min_diff"] - 10
        assert after["max_diff"] - after["diff"] == before["max_diff"] - before["diff"] + 10
    assert b.write_count == WRITTEN
    assert b.extend(rows(WRITTEN, 1), timeout=30).tolist() == [WRITTEN % 2000]
    assert numbers(b)[-1] == WRITTEN and b.write_count == WRITTEN + 1 and b.buffer.window[1] == WRITTEN + 1


def test_samples_go_on_as_they_would_have(make_rb, tmp_path):
    a, b = (make_rb(sampler=RandomSampler()) for _ in range(2))
    a.set_rng(torch.Generator().manual_seed(3))
    a.extend(rows(0, 80))
    a.sample()
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    for _ in range(4):
        assert torch.equal(a.sample()["k"], b.sample()["k"])


@pytest.mark.parametrize("seed", [None, 11])
def test_an_epoch_goes_on_where_it_was(make_rb, tmp_path, seed):
    a, b = (make_rb(sampler=SamplerWithoutReplacement(seed=seed)) for _ in range(2))
    a.extend(rows(0, 90))
    first = a.sample()["k"].tolist()
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    rest = [b.sample()["k"] for _ in range(7)]
    assert [x.tolist() for x in rest] == [a.sample()["k"].tolist() for _ in range(7)]
    assert sorted(first + torch.cat(rest).tolist()) == list(range(90))


def test_a_shared_epoch_goes_on_if_its_order_has_a_seed(make_rb, tmp_path):
    a, b = (make_rb(sampler=SamplerWithoutReplacement(shared=True, seed=4)) for _ in range(2))
    a.extend(rows(0, 90))
    first = a.sample()["k"].tolist()
    dumps(a, tmp_path / "c")
    assert loads(b, tmp_path / "c").left_out == ()
    assert sorted(first + torch.cat([b.sample()["k"] for _ in range(7)]).tolist()) == list(range(90))


def test_hooks_see_all_the_data_and_undo_each_other(make_rb, tmp_path):
    a, b, plain = make_rb(), make_rb(), make_rb()
    seen = []

    def save(data):
        seen.append(tuple(data.batch_size))
        return data.apply(lambda t: t + 1000)

    def load(data, out=None):
        return data.apply(lambda t: t - 1000)

    register_save_hook(a, save)
    register_load_hook(b, load)
    a.extend(rows(0, 30))
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    loads(plain, tmp_path / "c")
    assert seen == [(100,)] and numbers(b) == list(range(30)) and numbers(plain) == list(range(1000, 1030))


class Learned(Transform):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(2)

    def state_dict(self):
        return {"mean": self.mean.clone()}

    def load_state_dict(self, state):
        self.mean = state["mean"].clone()


class Nasty:
    def __reduce__(self):
        return print, ("this must not run",)


def test_the_transform_comes_back_and_runs_no_code(make_rb, tmp_path, capsys):
    a, b = make_rb(), make_rb()
    mine, others = Learned(), Learned()
    a.append_transform(mine), b.append_transform(others)
    mine.mean += 5
    a.extend(rows(0, 3))
    dumps(a, tmp_path / "c")
    loads(b, tmp_path / "c")
    assert others.mean.tolist() == [5, 5]
    b.extend(rows(3, 1))
    (tmp_path / "c/transform.t").write_bytes(pickle.dumps(Nasty()))
    with pytest.raises(shmbuf.CheckpointError, match=r"transform\.t"):
        loads(b, tmp_path / "c")
    assert numbers(b) == [0, 1, 2, 3] and "must not run" not in capsys.readouterr().out
