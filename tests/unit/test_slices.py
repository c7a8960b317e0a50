# ruff: noqa: F811
"""The slice samplers through the replay buffer's face: TorchRL's shapes, flags and errors. Draws are seeded."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    Buffer,
    Lapped,
    NotEnoughRows,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from shmbuf._extension import native
from shmbuf.storage import Gathering
from tests.unit.helpers_slices import episodes, make  # noqa: F401

# ---- SliceSampler -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["trajectory", "start"])
@pytest.mark.parametrize("arguments", [{"num_slices": 8}, {"slice_len": 5}])
def test_flat_batch_with_flags(make, arguments, by):
    rb = make(SliceSampler(**arguments, by=by), episodes(10, 7, 20), batch_size=40)
    td, info = rb.sample(return_info=True)
    assert td.batch_size == torch.Size([40])
    t = td["t"].reshape(8, 5)
    assert (t.diff(dim=1) == 1).all() and (td["episode"].reshape(8, 5).diff(dim=1) == 0).all()
    ends = torch.zeros(8, 5, dtype=torch.bool)
    ends[:, -1] = True
    ends = ends.reshape(40, 1)
    stored = rb[td["index"]]["next"]
    assert set(info) == {"index", "row_id", ("next", "truncated"), ("next", "done"), ("next", "terminated"), "is_init"}
    assert torch.equal(info["next", "truncated"], ends)
    assert torch.equal(td["next", "done"], stored["done"] | ends)
    assert torch.equal(td["next", "terminated"], stored["terminated"])
    assert torch.equal(td["is_init"], torch.roll(ends, 1, 0))
    assert torch.equal(td["index"], td["row_id"]) and td["index"].shape == (40,)


def test_flags_elsewhere_or_nowhere(make):
    rb = make(SliceSampler(slice_len=2, truncated_key="truncated", init_key=None), episodes(10), batch_size=4)
    td = rb.sample()
    assert td["truncated"].reshape(-1).tolist() == [False, True] * 2 == td["done"].reshape(-1).tolist()
    assert not td["terminated"].any() and not td["is_init"].any() and ("next", "truncated") not in td.keys(True)
    rb.set_sampler(SliceSampler(slice_len=2, truncated_key=None))
    td, info = rb.sample(return_info=True)
    assert set(info) == {"index", "row_id", "is_init"} and td["is_init"].reshape(-1).tolist() == [True, False] * 2


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_flags_that_are_stored_at_the_top_are_those_of_the_next_state(make, shape):
    ends = torch.tensor([False, False, True] * 5).reshape(15, *[1] * len(shape)).expand(15, *shape)
    real = ends & (torch.arange(15) < 8).reshape(15, *[1] * len(shape))
    data = TensorDict({"t": torch.arange(15), "terminated": real, "truncated": ends & ~real}, [15])
    td = make(SliceSampler(slice_len=2), data).sample(60)
    last = torch.tensor([False, True] * 30).reshape(60, *[1] * len(shape)).expand(60, *shape)
    assert td["terminated"].any() and torch.equal(td["next", "terminated"], td["terminated"])
    assert torch.equal(td["next", "truncated"], last) and torch.equal(td["next", "done"], last)
    assert torch.equal(td["truncated"], ends[td["t"]] & ~real[td["t"]])  # as stored
    both = (
        data.clone().set(("next", "t"), torch.arange(15)).set(("next", "done"), ends)
    )  # then those at the top are not
    td = make(SliceSampler(slice_len=2), both).sample(60)
    assert td["terminated"].any() and not td["next", "terminated"].any()


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_flags_have_the_shape_of_those_stored(make, shape):
    data = episodes(10)
    for key in ("done", "terminated"):
        data["next", key] = data["next", key].reshape(10, *[1] * len(shape)).expand(10, *shape).clone()
    td = make(SliceSampler(slice_len=2), data, batch_size=6).sample()
    assert all(td["next", k].shape == (6, *shape) for k in ("done", "terminated", "truncated"))
    assert td["next", "truncated"].reshape(6, -1).all(1).tolist() == [False, True] * 3


def test_short_ones_not_strict(make):
    rb = make(SliceSampler(slice_len=4, strict_length=False), episodes(2, 5), batch_size=40)
    td = rb.sample()
    lens = td["next", "truncated"].reshape(-1).nonzero().reshape(-1).diff(prepend=torch.tensor([-1]))
    assert set(lens.tolist()) == {2, 4} and len(td) == lens.sum() and len(lens) == 10
    first = lens.cumsum(0) - lens
    assert torch.equal(td["is_init"].reshape(-1).nonzero().reshape(-1), first)
    assert all(td["t"][i] == 0 for i, n in zip(first.tolist(), lens.tolist(), strict=True) if n == 2)
    assert rb.buffer.limiter_state() is None


def test_padding_repeats_the_own_last_row(make):
    rb = make(SliceSampler(slice_len=4, strict_length=False, pad_output=True), episodes(2, 5), batch_size=400)
    td, info = rb.sample(return_info=True)
    mask, t = info["collector", "mask"].reshape(100, 4), td["t"].reshape(100, 4)
    assert mask.dtype == torch.bool and set(mask.sum(1).tolist()) == {2, 4}
    short = mask.sum(1) == 2
    assert (
        (t[short] == torch.tensor([0, 1, 1, 1])).all() and (t[~short].diff(dim=1) == 1).all() and (t[~short] >= 2).all()
    )
    truncated = td["next", "truncated"].reshape(100, 4)
    assert (truncated[short] == torch.tensor([False, True, False, False])).all()
    assert (truncated[~short] == torch.tensor([False, False, False, True])).all()


@pytest.mark.parametrize(("span", "shortest"), [(True, 1), (1, 2), ((True, False), 1), ((False, 2), 1), ([0, 1], 2)])
def test_span(make, span, shortest):
    rb = make(SliceSampler(slice_len=3, span=span), episodes(6), batch_size=3000)
    td = rb.sample()
    ends = td["next", "truncated"].reshape(-1).nonzero().reshape(-1)
    lens = ends.diff(prepend=torch.tensor([-1]))
    assert set(lens.tolist()) == set(range(shortest, 4))
    short = lens < 3
    first, last = td["t"][ends - lens + 1][short], td["t"][ends][short]
    left, right = (span, span) if not isinstance(span, (tuple, list)) else span
    assert bool((first == 0).any()) == bool(left) and bool((last == 5).any()) == bool(right)
    assert ((first == 0) | (last == 5)).all()


def test_errors(make):
    for wrong in ({}, {"num_slices": 2, "slice_len": 2}):
        with pytest.raises(TypeError, match="Either num_slices or slice_len"):
            SliceSampler(**wrong)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="a number ≥ 1"):
            SliceSampler(slice_len=wrong)
    for wrong, text in (
        ({"by": "row"}, "one of trajectory, start"),
        ({"pad_output": True}, "strict_length=False"),
        ({"ends": torch.ones(3)}, "cannot be given"),
        ({"trajectories": torch.ones(3)}, "cannot be given"),
        ({"span": -1}, "span=-1"),
        ({"span": (1, 2, 3)}, "a pair"),
    ):
        with pytest.raises(ValueError, match=text):
            SliceSampler(slice_len=3, **wrong)
    with pytest.raises(RuntimeError, match="exclusive"):
        SliceSampler(slice_len=3, end_key="a", end_keys=["b"])
    rb = make(SliceSampler(num_slices=4))
    with pytest.raises(NotEnoughRows, match="empty storage"):
        rb.sample(8)
    rb.extend(episodes(5, 3))
    for n in (0, 6):
        with pytest.raises(
            RuntimeError, match=f"divisible by the number of slices, got batch_size={n} and num_slices=4"
        ):
            rb.sample(n)
    with pytest.raises(
        RuntimeError, match=r"single trajectory with sufficient length.*longest has 5 rows, slices of 6"
    ):
        rb.sample(24)
    rb.set_sampler(SliceSampler(slice_len=4))
    with pytest.raises(RuntimeError, match=r"slice length, got batch_size=6 and slice_len=4"):
        rb.sample(6)
    rb.set_sampler(SliceSampler(slice_len=4, span=4))
    with pytest.raises(ValueError, match="must be lower than the slice length, 4"):
        rb.sample(8)
    assert rb.stats()["size"] == 8


def test_accepted_without_effect(make):
    sampler = SliceSampler(slice_len=2, cache_values=True, compile=True, use_gpu=True, fragmented=True, step_key="t")
    assert len(make(sampler, episodes(5)).sample(10)) == 10


def test_waits_for_a_trajectory_that_is_long_enough(make):
    rb = make(SliceSampler(slice_len=4), episodes(3))
    threading.Timer(0.2, lambda: rb.extend(episodes(4, first=50))).start()
    assert rb.sample(4, timeout=20)["t"].tolist() == [50, 51, 52, 53]
    with pytest.raises(NotEnoughRows, match=r"longest has 4 rows, slices of 9 were asked for \(after 0\.0\S* s\)"):
        rb.set_sampler(SliceSampler(slice_len=9))
        rb.sample(9, timeout=0.01)


def test_same_seed_same_slices(make):
    rb = make(SliceSampler(slice_len=4), episodes(9, 9, 9), batch_size=32)
    other = shmbuf.attach(rb.name)
    assert isinstance(other.sampler, SliceSampler) and other.sampler.arguments() == rb.sampler.arguments()
    rb.set_rng(torch.Generator().manual_seed(1))
    other.set_rng(torch.Generator().manual_seed(1))
    for _ in range(5):
        assert torch.equal(rb.sample()["row_id"], other.sample()["row_id"])
    other.close()


def test_into_a_previous_sample(make):
    rb = make(SliceSampler(slice_len=4), episodes(9, 9, 9), batch_size=32)
    td = rb.sample()
    addresses = {k: v.data_ptr() for k, v in td.items(True, True)}
    assert rb.sample(out=td) is td and {k: v.data_ptr() for k, v in td.items(True, True)} == addresses
    assert (td["t"].reshape(8, 4).diff(dim=1) == 1).all()


def test_every_argument_travels(make):
    full = SliceSampler(
        slice_len=3, end_keys=[("next", "done")], traj_key="episode", strict_length=False, pad_output=True, span=(True, 1),
        truncated_key=None, init_key="first", by="start",
    )  # fmt: skip
    rb = make(full, episodes(5))
    other = shmbuf.attach(rb.name)
    assert other.sampler.arguments() == full.arguments() and other.sampler.info_keys == full.info_keys
    assert other.sample(9).batch_size == (9,)
    other.close()


# ---- whose keys -------------------------------------------------------------------------------------------------------------


def interleaved(n: int, key: str) -> TensorDict:
    """Two trajectories a row each in turn."""
    k = torch.arange(2 * n)
    return TensorDict({key: k % 2, "t": k // 2, "end": torch.zeros(2 * n, dtype=torch.bool)}, [2 * n])


def test_the_samplers_keys_become_the_buffers(make):
    rb = make(SliceSampler(slice_len=4, traj_key="who", end_key="end"), interleaved(20, "who"))
    assert (rb.buffer.marks.trajectory.key, [c.key for c in rb.buffer.marks.ends]) == (("who",), [("end",)])
    td = rb.sample(400)
    assert (td["who"].reshape(100, 4).diff(dim=1) == 0).all() and (td["t"].reshape(100, 4).diff(dim=1) == 1).all()


def test_without_any_key_a_collectors_rows_follow_each_other(make):
    rb = make(SliceSampler(slice_len=4), TensorDict({"t": torch.arange(9)}, [9]))
    assert (rb.sample(400)["t"].reshape(100, 4).diff(dim=1) == 1).all()


def test_other_keys_than_the_buffers_are_refused(make):
    rb = make(None, episodes(5))
    rb.set_sampler(SliceSampler(slice_len=2, end_key=("next", "done"), traj_key="episode"))
    rb.set_sampler(SliceSampler(slice_len=2, end_keys=[("next", k) for k in ("done", "truncated", "terminated")]))
    kept = rb.sampler
    for wrong in ({"traj_key": "t"}, {"end_key": "t"}):
        with pytest.raises(ValueError, match=r"fixed when a buffer is created.*ShmStorage or Buffer.create"):
            rb.set_sampler(SliceSampler(slice_len=2, **wrong))
    assert rb.sampler is kept
    rb = make(None, TensorDict({"t": torch.arange(9)}, [9]))
    with pytest.raises(RuntimeError, match="keeps no trajectories"):
        rb.set_sampler(SliceSampler(slice_len=2))
    rb = make(SliceSampler(slice_len=2, traj_key="t"), episodes(5), traj_key="episode")  # the storage's word counts
    with pytest.raises(ValueError, match="are linked by 'episode'"):
        rb.sample(4)


def test_keys_that_are_not_in_the_rows(make):
    with pytest.raises(shmbuf.SchemaError, match="traj_key='nobody' is not in the schema"):
        make(SliceSampler(slice_len=2, traj_key="nobody"), episodes(5))


# ---- without replacement ----------------------------------------------------------------------------------------------------


def trajectories_of(td: TensorDict) -> list[int]:
    return td["episode"][td["is_init"].reshape(-1)].tolist()


def test_each_trajectory_once_a_pass(make):
    rb = make(SliceSamplerWithoutReplacement(slice_len=3), episodes(*[3, 5, 9] * 4), batch_size=15)
    orders = []
    for _ in range(6):
        batches = [rb.sample() for _ in range(3)]
        assert [len(b) for b in batches] == [15, 15, 6]
        for b in batches:
            assert (b["t"].reshape(-1, 3).diff(dim=1) == 1).all() and (
                b["episode"].reshape(-1, 3).diff(dim=1) == 0
            ).all()
        seen = [e for b in batches for e in trajectories_of(b)]
        assert sorted(seen) == list(range(12))
        orders.append(tuple(seen))
    assert len(set(orders)) == 6
    assert sum(len(b) for b in rb) == 36  # iterating: one pass


def test_in_order_and_short_ones_left_out(make):
    rb = make(SliceSamplerWithoutReplacement(slice_len=4, shuffle=False), episodes(2, 4, 3, 9, 4, 1), batch_size=8)
    for _ in range(3):
        assert trajectories_of(rb.sample()) == [1, 3] and trajectories_of(rb.sample()) == [4]
    rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, strict_length=False))
    assert trajectories_of(rb.sample(80)) == list(range(6))
    with pytest.raises(NotEnoughRows, match="longest has 9 rows, slices of 10"):
        rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=10))
        rb.sample(10)


def test_drop_last(make):
    rb = make(SliceSamplerWithoutReplacement(slice_len=2, drop_last=True), episodes(4, 4, 4, 4, 4), batch_size=4)
    assert [len(rb.sample()) for _ in range(6)] == [4] * 6
    assert len(list(rb)) == 2
    with pytest.raises(RuntimeError, match="5 trajectories to draw slices of 2 rows from; batches of 6"):
        rb.sample(12)


@pytest.mark.parametrize("shuffle", [False, True])
def test_with_drop_last_short_trajectories_do_not_hide_the_end_of_a_pass(make, shuffle):
    sampler = SliceSamplerWithoutReplacement(num_slices=2, drop_last=True, shuffle=shuffle)
    rb = make(sampler, episodes(*[10, 2] * 5), batch_size=10)
    for _ in range(5):
        batches = list(rb)
        assert [len(b) for b in batches] == [10, 10]
        assert len({e for b in batches for e in trajectories_of(b)}) == 4, "each once"


def test_an_iteration_ends_where_no_batch_is_left_of_a_pass(make):
    sampler = SliceSamplerWithoutReplacement(slice_len=3, shuffle=False, drop_last=True)
    rb = make(sampler, episodes(4, 4, 4, 4), capacity=16, batch_size=6)
    batches = iter(rb)
    assert trajectories_of(next(batches)) == [0, 1]
    rb.extend(episodes(11, first=100))  # of trajectory 2 one row is left
    assert not list(batches) and rb.sampler.ran_out
    assert trajectories_of(rb.sample()) == [3, 100_000] and rb.sampler.ran_out
    rb = make(sampler, episodes(4, 4, 4, 4), capacity=16, batch_size=6)
    assert trajectories_of(rb.sample()) == [0, 1] and not rb.sampler.ran_out
    rb.extend(episodes(11, first=100))
    assert trajectories_of(rb.sample()) == [3, 100_000] and rb.sampler.ran_out, "a plain call goes on, and says so"


def test_with_drop_last_a_batch_that_loses_slices_on_the_way_is_none(make, monkeypatch):
    sampler = SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, drop_last=True)
    rb = make(sampler, episodes(4, 4, 4), capacity=12, batch_size=8)
    before_the_copy(monkeypatch, lambda: rb.extend(episodes(8, first=100)))
    assert trajectories_of(rb.sample()) == [2, 100_000]


def test_a_pass_takes_no_arguments_about_where_slices_lie():
    for other in ({"span": True}, {"by": "start"}, {"pad_output": True, "strict_length": False}):
        with pytest.raises(TypeError, match=next(iter(other))):
            SliceSamplerWithoutReplacement(slice_len=2, **other)


def test_what_comes_and_goes_during_a_pass(make):
    rb = make(SliceSamplerWithoutReplacement(slice_len=3, shuffle=False), episodes(4, 4, 4), capacity=12, batch_size=3)
    assert trajectories_of(rb.sample()) == [0]
    rb.extend(episodes(6, first=100))  # rows 0 to 5 go: of trajectory 1 two are left
    assert trajectories_of(rb.sample()) == [2] and trajectories_of(rb.sample()) == [2]  # a new pass: 2 is the oldest
    assert trajectories_of(rb.sample()) == [100_000]


def test_copies_have_passes_of_their_own(make):
    rb = make(
        SliceSamplerWithoutReplacement(slice_len=2, shuffle=False, drop_last=True), episodes(4, 4, 4), batch_size=2
    )
    assert trajectories_of(rb.sample()) == [0]
    clone = pickle.loads(pickle.dumps(rb.sampler))
    assert clone.arguments() == rb.sampler.arguments()
    assert trajectories_of(rb.sample()) == [1]
    rb.set_sampler(copy.deepcopy(clone))
    assert trajectories_of(rb.sample()) == [0]


def test_no_pass_is_shared():
    with pytest.raises(ValueError, match="each has passes of its own"):
        SliceSamplerWithoutReplacement(slice_len=2, shared=True)


# ---- while rows go ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        SliceSampler(slice_len=8),
        SliceSampler(slice_len=8, by="start", strict_length=False),
        SliceSamplerWithoutReplacement(slice_len=8),
        PrioritizedSliceSampler(slice_len=8),
    ],
    ids=lambda s: f"{s.name}{'' if s.strict_length else '-any'}",
)
def test_rows_overwritten_meanwhile_are_drawn_again(make, sampler):
    rb = make(sampler, episodes(20, 12), capacity=64, batch_size=64)
    stop, seen = threading.Event(), [0]

    def write() -> None:
        k = 1
        while not stop.is_set():
            rb.put(episodes(9 + k % 5, 10, first=k * 1000), timeout=30)
            rb.buffer.drain()
            k += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            try:
                td = rb.sample(timeout=5)
            except Lapped:
                continue
            inner = ~td["next", "truncated"].reshape(-1)[:-1]
            assert (td["t"].diff()[inner] == 1).all() and (td["episode"].diff()[inner] == 0).all()
            seen[0] += 1
    finally:
        stop.set()
        writer.join()
    assert seen[0] > 100, "hardly any batch could be drawn"


def before_the_copy(monkeypatch, act) -> None:
    """act() once, when the rows have been chosen and are about to be copied."""
    real, todo = Gathering.fetch, [act]

    def fetch(self, ids, done):
        while todo:
            todo.pop()()
        return real(self, ids, done)

    monkeypatch.setattr(Gathering, "fetch", fetch)


@pytest.mark.parametrize(
    "sampler",
    [
        SliceSampler(slice_len=4, strict_length=False),
        SliceSampler(slice_len=4, span=True),
        SliceSamplerWithoutReplacement(slice_len=4, strict_length=False),
        PrioritizedSliceSampler(slice_len=4, strict_length=False),
    ],
    ids=lambda s: s.name,
)
def test_slices_drawn_again_have_their_own_lengths(make, monkeypatch, sampler):
    rb = make(sampler, episodes(*[2, 4, 4, 2, 4, 4]), capacity=20, batch_size=400)
    before_the_copy(monkeypatch, lambda: rb.extend(episodes(1, 3, 5, first=100)))  # 9 of 20 rows go
    td = rb.sample()
    assert len(td) <= 400 and td["row_id"].min() >= 9
    truncated = td["next", "truncated"].reshape(-1)
    inner, t = ~truncated[:-1], td["t"]
    assert truncated[-1] and (t.diff()[inner] == 1).all() and (td["episode"].diff()[inner] == 0).all()
    assert torch.equal(td["is_init"].reshape(-1)[1:], truncated[:-1])
    assert len(set(td["episode"].tolist())) > 3


def test_a_pass_whose_trajectories_all_go_begins_anew(make, monkeypatch):
    rb = make(SliceSamplerWithoutReplacement(slice_len=4), episodes(5, 5), capacity=10, batch_size=8)
    before_the_copy(monkeypatch, lambda: rb.extend(episodes(5, 5, first=100)))
    assert sorted(trajectories_of(rb.sample())) == [100_000, 100_001]


def test_nothing_found_while_rows_moved_is_not_believed(make, monkeypatch):
    buf = make(None, episodes(6), face=ReplayBuffer).buffer
    real, todo = buf._call, [1]

    def call(method, *args):
        if method != "choose_slices" or not todo:
            return real(method, *args)
        todo.pop()
        buf.extend({k: v.numpy() for k, v in episodes(1).items(True, True)})
        return native.STATUSES.index("too_short"), 0

    monkeypatch.setattr(buf, "_call", call)
    assert buf.draw_slices(5, 6)[1].reshape(5, 6)[:, 0].tolist() == [0] * 5


def test_a_window_that_moves_all_the_time_is_not_looked_at_for_ever(make, monkeypatch):
    buf = make(None, episodes(*[1] * 150), face=ReplayBuffer).buffer
    real, looks = buf._call, []

    def call(method, *args):
        if method == "choose_slices":
            looks.append(1)
            buf.extend({k: v.numpy() for k, v in episodes(1).items(True, True)})
        return real(method, *args)

    monkeypatch.setattr(buf, "_call", call)
    with pytest.raises(NotEnoughRows, match="longest has 1 row"):
        buf.draw_slices(5, 2)
    assert len(looks) <= 2


def test_one_timeout_for_all_that_a_draw_of_slices_waits_for(make, monkeypatch):
    buf, given = make(None, episodes(3), face=ReplayBuffer).buffer, []
    schema, acquire = buf._wait_schema, buf.acquire_samples
    monkeypatch.setattr(buf, "_wait_schema", lambda t: (time.sleep(0.1), schema(t))[1])
    monkeypatch.setattr(buf, "acquire_samples", lambda n, t=0.0: (given.append(t), acquire(n, t))[1])
    since = time.monotonic()
    with pytest.raises(NotEnoughRows, match=r"after 0\.3 s"):
        buf.draw_slices(2, 5, timeout=0.3)
    assert time.monotonic() - since < 0.45 and given[0] < 0.25


@pytest.mark.parametrize(
    "sampler",
    [SliceSampler(slice_len=3), SliceSamplerWithoutReplacement(slice_len=3), PrioritizedSliceSampler(slice_len=3)],
    ids=lambda s: s.name,
)
def test_who_draws_slices_keeps_a_standby(make, sampler):
    rb = make(sampler, episodes(6))
    with shmbuf.attach(rb.name) as other:
        assert not other.buffer._standby
        other.sample(3)
        assert other.buffer._standby


def test_a_fork_child_draws_slices(make):
    rb = make(SliceSamplerWithoutReplacement(slice_len=3), episodes(6, 6), batch_size=6)
    rb.sample()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if len(rb.sample()) == 6 else 1
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_numpy_level_arguments(make):
    buf = make(None, episodes(6), face=ReplayBuffer).buffer
    for wrong in ({"n": -1}, {"length": 0}, {"by": "x"}, {"left": 3}, {"right": -1}):
        with pytest.raises(ValueError):
            buf.draw_slices(**{"n": 1, "length": 3, **wrong})
    rows, ids, lens = buf.draw_slices(0, 3)
    assert len(ids) == len(lens) == len(rows["t"]) == 0
    assert buf.walk_forward([0, 3, 7, -1], 4, 2)[1].tolist() == [3, 2, 0, 0]
    assert np.array_equal(buf.walk_forward([0], 4, 2)[0], [[0, 2, 4, 4]])
    assert buf.trajectory(-1).tolist() == buf.trajectory(99).tolist() == []


@pytest.mark.parametrize("seed", range(4))
def test_trajectories_are_listed_as_they_are_walked(make_name, seed):
    """Of streams that interleave row by row, by runs, and alone for long; round the end of the slots."""
    rng, capacity = np.random.default_rng(seed), 300
    buf = shmbuf.Buffer.create(
        make_name(), capacity, schema={"k": "int64", "done": "bool"}, trajectories=True, drain="caller"
    )
    stored = 0
    while stored < 4 * capacity:
        n = int(rng.choice([1, 2, 7, 40, 120]))
        streams = rng.integers(0, 3, n) if rng.random() < 0.5 else np.full(n, rng.integers(0, 3))
        buf.extend(
            {"k": np.arange(stored, stored + n), "done": rng.random(n) < rng.choice([0, 0.02, 0.3])}, stream=streams
        )
        stored += n
        ids, lengths = buf.listing()
        parts = np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
        assert [p.tolist() for p in parts] == sorted(buf.trajectory(t.end).tolist() for t in buf.trajectories())
        assert sorted(ids.tolist()) == list(range(*buf.window))
    buf.destroy(force=True)


@pytest.mark.parametrize("ring_bytes", [1 << 18, 1 << 22])
def test_as_many_streams_as_promised_stay_open(ring_bytes):
    """Half as many as the table has entries; also while trajectories end and others begin, many of them in one transaction."""
    n, rng = ring_bytes // 512, np.random.default_rng(0)
    buf = Buffer.create(None, 20 * n, schema={"k": "int64", "done": "bool"}, drain="caller", ring_bytes=ring_bytes)
    streams, begun = np.arange(n), n
    for _ in range(20):
        for at in np.array_split(np.arange(n), max(1, n // 1024)):
            done = rng.random(len(at)) < 0.02
            buf.put({"k": streams[at], "done": done}, stream=streams[at])
            streams[at[done]] = np.arange(begun, begun + done.sum())
            begun += done.sum()
    buf.drain()
    assert buf.stats()["streams_cut"] == 0
    assert len(buf.trajectories()) == len(np.unique(buf.gather(range(*buf.window))["k"]))
    buf.close()
