"""Windows about sampled rows and n-step transitions, over any sampler. Expected numbers of windows are TorchRL 0.14's own."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    ConsumingSampler,
    NotEnoughRows,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    SamplerWithoutReplacement,
    SchemaError,
    Sequence,
    ShmStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    Transition,
)
from tests.unit.test_slices import before_the_copy


def rows(n: int, done_at: tuple[int, ...] = (), first: int = 0, reward: float = 1.0, **flags: bool) -> TensorDict:
    """n rows; those of done_at are done, and have the flags given (terminated, truncated)."""
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[list(done_at)] = True
    t = torch.arange(first, first + n)
    following = {"obs": t + 1, "reward": torch.full((n, 1), reward), "done": done}
    for name, value in flags.items():
        following[name] = done.clone() if value else torch.zeros_like(done)
    return TensorDict({"t": t, "obs": t, "next": following}, [n])


@pytest.fixture
def make(make_name):
    made = []

    def make(unit=None, *data: TensorDict, sampler=None, capacity=100, **kw):
        storage = ShmStorage(capacity, name=make_name(), drain="caller", ring_bytes=1 << 14, **kw)
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, sample_unit=unit, seed=5)
        made.append(rb)
        for td in data:
            rb.extend(td)
        return rb

    yield make
    for rb in made:
        rb.close()


# ---- windows ----------------------------------------------------------------------------------------------------------------

TEN = rows(10, (4, 9))  # two episodes of 5


@pytest.mark.parametrize(
    ("arguments", "anchor", "index", "valid"),
    [
        ({"length": 3}, 0, [0, 1, 2], [1, 1, 1]),
        ({"length": 3}, 3, [3, 4, 4], [1, 1, 0]),
        ({"length": 3, "dilation": 2}, 0, [0, 2, 4], [1, 1, 1]),
        ({"length": 4, "dilation": 2}, 1, [1, 3, 4, 4], [1, 1, 0, 0]),  # clamped to the last row, on the grid or not
        ({"length": 2, "burn_in": 1, "bootstrap": 1}, 5, [5, 5, 6, 7], [0, 1, 1, 1]),
        ({"length": 1, "burn_in": 3}, 7, [5, 5, 6, 7], [0, 1, 1, 1]),
        ({"length": 2, "bootstrap": 2}, 8, [8, 9, 9, 9], [1, 1, 0, 0]),
        ({"length": 3, "episode_boundary": "stop"}, 3, [2, 3, 4], [1, 1, 1]),
        ({"length": 3, "episode_boundary": "stop", "burn_in": 1}, 4, [1, 2, 3, 4], [1, 1, 1, 1]),
        ({"length": 7, "episode_boundary": "stop"}, 6, [5, 6, 7, 8, 9, 9, 9], [1, 1, 1, 1, 1, 0, 0]),
        ({"length": 2, "episode_boundary": "stop", "dilation": 2}, 4, [2, 4], [1, 1]),
        ({"length": 4, "episode_boundary": "include_reset"}, 3, [3, 4, 5, 6], [1, 1, 1, 1]),
        ({"length": 4, "episode_boundary": "include_reset", "burn_in": 1}, 0, [0, 0, 1, 2, 3], [0, 1, 1, 1, 1]),
        ({"length": 4, "episode_boundary": "include_reset"}, 8, [8, 9, 9, 9], [1, 1, 0, 0]),
        ({"length": 4, "done_key": None}, 3, [3, 4, 5, 6], [1, 1, 1, 1]),
        ({"length": 4, "done_key": None, "episode_boundary": "stop"}, 8, [6, 7, 8, 9], [1, 1, 1, 1]),
    ],
)
def test_windows(make, arguments, anchor, index, valid):
    rb = make(None, TEN)
    unit = Sequence(**arguments)
    got, info = unit.expand(torch.tensor([anchor]), {"w": torch.tensor([7.0]), "scalar": 3}, rb.storage)
    assert (got.tolist(), info["validity_mask"].int().tolist()) == (index, valid)
    assert info["w"].tolist() == [7.0] * len(index) and info["scalar"] == 3
    assert info["step_in_sequence"].tolist() == list(range(len(index))) and not info["sequence_id"].any()
    assert info["anchor_index"].tolist() == [anchor] * len(index)
    burn_in = arguments.get("burn_in", 0)
    assert info["learning_mask"].nonzero().reshape(-1).tolist() == list(range(burn_in, burn_in + arguments["length"]))


def test_windows_never_cross_the_write_seam(make):
    rb = make(None, rows(14), capacity=10)  # rows 4 to 13; slots 4 … 9, 0 … 3
    for boundary in ("pad", "include_reset"):
        got, info = Sequence(3, boundary, burn_in=2).expand(torch.tensor([3, 4, 9]), {}, rb.storage)
        assert got.tolist() == [1, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8, 9, 0, 1]
        assert info["validity_mask"].int().tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("sampler", [RandomSampler(), PrioritizedSampler(alpha=1.0, beta=1.0)], ids=lambda s: s.name)
def test_batches_of_windows(make, sampler):
    rb = make(Sequence(3, burn_in=1, bootstrap=1), TEN, sampler=sampler)
    td, info = rb.sample(64, return_info=True)
    assert td.batch_size == (320,)
    assert set(info) == {"index", "row_id", *Sequence.info_keys, *({"priority_weight"} & set(td.keys()))}
    assert torch.equal(td["t"], td["index"]) and torch.equal(td["sequence_id"], torch.arange(64).repeat_interleave(5))
    t, valid, anchor = (td[k].reshape(64, 5) for k in ("t", "validity_mask", "anchor_index"))
    assert torch.equal(t[:, 1], anchor[:, 1]) and valid[:, 1].all()
    assert (t // 5 == anchor // 5).all() and ((t.diff(dim=1) == 1) | ~valid[:, 1:] | ~valid[:, :-1]).all()
    if "priority_weight" in td.keys():  # noqa: SIM118
        assert td["priority_weight"].tolist() == [1.0] * 320
    again = rb.sample(64, out=td)
    assert again is td and len(set(anchor[:, 0].tolist())) > 5


def test_priorities_go_back_to_the_anchors(make):
    rb = make(Sequence(3), TEN, sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    td = rb.sample(20)
    td["td_error"] = torch.where(td["validity_mask"], td["t"] + 10.0, 1e6)  # padded rows must not count
    before = rb.buffer.priorities(range(10))
    rb.update_tensordict_priority(td)
    after = rb.buffer.priorities(range(10))
    anchors = set(td["anchor_index"].tolist())
    for i in range(10):
        last = min(i + 2, 4 if i < 5 else 9)
        assert after[i] == pytest.approx(last + 10 if i in anchors else before[i], rel=1e-5)
    rb.extend(rows(100))  # all overwritten: dropped, not given to whoever lies there now
    rb.update_tensordict_priority(td)
    assert rb.buffer._get("priorities")["stale"] == len(anchors)


def test_units_travel(make):
    unit = Sequence(2, "stop", burn_in=1, dilation=2)
    rb = make(unit, TEN)
    other = shmbuf.attach(rb.name, seed=5)
    assert repr(other._unit) == repr(unit)
    assert torch.equal(other.sample(7)["row_id"], rb.sample(7)["row_id"])
    other.close()
    other = shmbuf.attach(rb.name, sample_unit=NStep(2, 0.5))  # of this handle only
    assert other.sample(4)["steps_to_next_obs"].shape == (4, 1) and rb.sample(4).batch_size == (12,)
    other.close()
    with pytest.raises(TypeError, match="sample_unit is one of"):
        shmbuf.attach(rb.name, sample_unit="pad")
    clone = pickle.loads(pickle.dumps(rb))
    assert repr(clone._unit) == repr(unit)
    clone.close()
    assert make(Transition(), TEN).sample(3).batch_size == (3,)


def test_bad_units(make):
    for wrong in (
        {"length": 0}, {"length": True}, {"length": 2, "burn_in": -1}, {"length": 2, "bootstrap": -1},
        {"length": 2, "dilation": 0}, {"length": 2, "episode_boundary": "wrap"},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Sequence(**wrong)
    for wrong in (
        {"n": 0},
        {"n": 1.5},
        {"n": 2, "gamma": 1.1},
        {"n": 2, "gamma": float("nan")},
        {"n": 2, "gamma": True},
    ):
        with pytest.raises(ValueError):
            NStep(**wrong)
    with pytest.raises(TypeError, match=r"one of Transition, Sequence, NStep, or a SampleUnit.* not int"):
        make(3)
    with pytest.raises(ValueError, match=r"done_key='t', but trajectories of buffer .* end by"):
        Sequence(2, done_key="t").expand(torch.tensor([0]), {}, make(None, TEN).storage)
    with pytest.raises(RuntimeError, match="keeps no trajectories"):
        Sequence(2).expand(torch.tensor([0]), {}, make(None, TensorDict({"t": torch.arange(5)}, [5])).storage)
    with pytest.raises(KeyError, match="no reward is stored"):
        make(NStep(2), TensorDict({"t": torch.arange(5)}, [5])).sample(2)
    assert (
        make(Sequence(2, done_key="end"), TensorDict({"end": torch.ones(5, dtype=torch.uint8)}, [5]))
        .sample(4)["validity_mask"]
        .tolist()
        == [True, False] * 4
    )


def test_windows_drawn_again_have_their_own_masks(make, monkeypatch):
    rb = make(Sequence(3, burn_in=1), TEN, sampler=PrioritizedSampler(alpha=1.0, beta=1.0), capacity=10)
    before_the_copy(monkeypatch, lambda: rb.extend(rows(8, (7,), first=10)))
    td = rb.sample(200)
    anchor = td["anchor_row_id"].reshape(200, 4)
    t, valid = td["t"].reshape(200, 4), td["validity_mask"].reshape(200, 4)
    want = anchor + torch.arange(-1, 3)
    first, last = torch.where(anchor < 10, 8, 10), torch.where(anchor < 10, 9, 17)
    assert anchor.min() >= 8 and torch.equal(td["anchor_index"], td["anchor_row_id"] % 10)
    assert torch.equal(t, want.clamp(first, last)) and torch.equal(valid, (want >= first) & (want <= last))


def test_n_steps_drawn_again_have_their_own_sums(make, monkeypatch):
    rb = make(NStep(4, 1.0), TEN, capacity=10)
    before_the_copy(monkeypatch, lambda: rb.extend(rows(8, (7,), first=10)))
    td = rb.sample(300)
    assert by_row(td, ("next", "reward")) == {8: 2, 9: 1, **{t: min(4, 18 - t) for t in range(10, 18)}}
    assert by_row(td, "steps_to_next_obs") == by_row(td, ("next", "reward"))


# ---- n steps ----------------------------------------------------------------------------------------------------------------


def by_row(td: TensorDict, key) -> dict[int, float]:
    return {int(t): round(float(v), 6) for t, v in zip(td["t"], td[key].reshape(-1), strict=True)}


@pytest.mark.parametrize("ended_by", ["terminated", "truncated"])
def test_b037_n_step_views(make, ended_by):
    flags = {k: k == ended_by for k in ("terminated", "truncated")}
    td = make(NStep(3, 0.9), rows(5, (4,), **flags)).sample(300)
    assert by_row(td, ("next", "reward")) == {0: 2.71, 1: 2.71, 2: 2.71, 3: 1.9, 4: 1.0}
    assert by_row(td, "steps_to_next_obs") == {0: 3, 1: 3, 2: 3, 3: 2, 4: 1}
    last = (
        {0: 0.729, 1: 0.729, 2: 0.0, 3: 0.0, 4: 0.0}
        if ended_by == "terminated"
        else {0: 0.729, 1: 0.729, 2: 0.729, 3: 0.81, 4: 0.9}
    )
    assert by_row(td, "bootstrap_discount") == last
    assert by_row(td, ("next", "obs")) == {
        0: 3,
        1: 4,
        2: 5,
        3: 5,
        4: 5,
    }  # B032: the final observation, no next episode's
    assert by_row(td, ("next", "done")) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize("put", [5, 7, 8])  # full; wrapped, the cursor in the middle
def test_b037_no_sum_crosses_the_cursor(make, put):
    rb = make(NStep(3, 0.9), capacity=5)
    for i in range(put):
        rb.extend(rows(1, first=i, reward=2.0**i))
    td = rb.sample(300)
    oldest = put - 5
    assert by_row(td, "steps_to_next_obs") == {oldest + i: k for i, k in enumerate([3, 3, 3, 2, 1])}
    for t, total in by_row(td, ("next", "reward")).items():
        assert total == pytest.approx(sum(0.9**i * 2.0 ** (t + i) for i in range(min(3, put - t))), rel=1e-6)
    assert by_row(td, ("next", "obs")) == {t: min(t + 3, put) for t in range(oldest, put)}


def test_n_steps_over_priorities_and_other_shapes(make):
    data = rows(6, (5,))
    data["next", "reward"] = torch.arange(6)  # int64[]
    rb = make(NStep(2, 0.5), data, sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0, 1, 0, 0, 3]))
    td, info = rb.sample(500, return_info=True)
    assert set(info) == {"index", "row_id", "priority_weight", "steps_to_next_obs", "bootstrap_discount"}
    assert td["next", "reward"].dtype == torch.float32 and td["bootstrap_discount"].shape == (500,)
    assert by_row(td, ("next", "reward")) == {2: 3.5, 5: 5.0}
    assert by_row(td, "bootstrap_discount") == {2: 0.25, 5: 0.0}  # done without a word of truncation: terminal
    td["td_error"] = torch.ones(500)
    rb.update_tensordict_priority(td)
    top = TensorDict(
        {"t": torch.arange(4), "reward": torch.ones(4), "terminated": torch.tensor([False] * 3 + [True])}, [4]
    )
    td = make(NStep(3, 0.5), top).sample(100)
    assert by_row(td, "reward") == {0: 1.75, 1: 1.75, 2: 1.5, 3: 1.0}
    assert by_row(td, "bootstrap_discount") == {0: 0.125, 1: 0.0, 2: 0.0, 3: 0.0}
    assert by_row(td, "terminated") == {0: 0, 1: 1, 2: 1, 3: 1}


def test_n_steps_over_slices_keep_the_flags_of_the_last_row(make):
    td = make(NStep(3), rows(6, (5,), terminated=True), sampler=SliceSampler(slice_len=2)).sample(100)
    for flag in ("done", "terminated"):
        assert by_row(td, ("next", flag)) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}


def test_interleaved_streams_are_followed(make):
    data = TensorDict(
        {
            "env": torch.arange(40) % 4,
            "t": torch.arange(40),
            "next": {"reward": torch.ones(40), "done": torch.zeros(40, dtype=torch.bool)},
        },
        [40],
    )
    rb = make(Sequence(3, burn_in=2), data, traj_key="env")
    td = rb.sample(50)
    t = td["t"].reshape(50, 5)
    assert (t % 4 == t[:, :1] % 4).all()
    assert (
        (t.diff(dim=1) == 4) | ~td["validity_mask"].reshape(50, 5)[:, 1:] | ~td["validity_mask"].reshape(50, 5)[:, :-1]
    ).all()


def test_far_predecessors_are_found(make):
    """Beyond the look at the near rows: two streams, 600 rows of each in turn."""
    data = TensorDict({"env": torch.arange(3600) // 600 % 2, "t": torch.arange(3600)}, [3600])
    chain, lens = make(None, data, traj_key="env", capacity=3600).buffer.walk_back([1201, 3000, 600, 3599], 3)
    assert chain.tolist() == [[1201, 1200, 599], [3000, 2399, 2398], [600] * 3, [3599, 3598, 3597]]
    assert lens.tolist() == [3, 3, 1, 3]


@pytest.mark.parametrize("shape", [(60, 2), (60, 1, 2), (20, 3, 2)])
def test_priorities_of_windows_with_more_dimensions_go_to_the_anchors(make, shape):
    rb = make(Sequence(3), TEN, sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
    td = rb.sample(20)
    if shape[1] == 3:
        td = td.reshape(20, 3)
    p = torch.where(td["validity_mask"], td["t"] + 10.0, 1e6)
    td["td_error"] = torch.stack([p, p - 5], -1).reshape(shape)
    before = rb.buffer.priorities(range(10))
    rb.update_tensordict_priority(td)
    after, anchors = rb.buffer.priorities(range(10)), set(td["anchor_index"].flatten().tolist())
    for i in range(10):
        last = min(i + 2, 4 if i < 5 else 9)
        assert after[i] == pytest.approx(last + 10 if i in anchors else before[i], rel=1e-5)


def test_priorities_that_fit_no_window_are_refused(make):
    rb = make(Sequence(3), TEN, sampler=PrioritizedSampler())
    td = rb.sample(4)
    before = rb.buffer.priorities(range(10)).tolist()
    with pytest.raises(ValueError, match=r"priority of shape \[4\] .* 12 rows"):
        rb.update_tensordict_priority(dict_like(td, torch.ones(4)))
    assert rb.buffer.priorities(range(10)).tolist() == before


def dict_like(td: TensorDict, p: torch.Tensor) -> TensorDict:
    return TensorDict({**{k: td[k] for k in ("row_id", "anchor_row_id", "validity_mask")}, "td_error": p}, [])


def test_what_an_epochs_end_left_out_is_given_back_in_anchors(make):
    rb = make(Sequence(3), TEN, sampler=SamplerWithoutReplacement())
    rb.set_limiter(RateLimiter(100.0, error_buffer=1000))
    assert [rb.sample(4).batch_size[0] for _ in range(3)] == [12, 12, 6]
    assert rb.buffer.limiter_state()["sampled"] == 10


@pytest.mark.parametrize("unit", [Sequence(3), NStep(3)], ids=lambda u: u.name)
def test_claimed_anchors_stay_when_others_cannot_be_replaced(make, monkeypatch, unit):
    rb = make(unit, TEN, sampler=ConsumingSampler(shuffle=False), capacity=10)
    rb.set_limiter(RateLimiter(100.0, error_buffer=1000))
    real, redrawn = ConsumingSampler.sample, []

    def sample(self, *args, **how):
        if redrawn:
            raise NotEnoughRows("no new rows")
        redrawn.append(1)
        td = real(self, *args, **how)
        rb.extend(rows(4, (3,), first=10))  # rows 0 to 3 go
        return td

    monkeypatch.setattr(ConsumingSampler, "sample", sample)
    td = rb.sample(8)
    per = unit.rows_per_anchor
    assert td.batch_size == (4 * per,) and td["t"][::per].tolist() == [4, 5, 6, 7]
    if per > 1:
        assert td["anchor_row_id"][::per].tolist() == [4, 5, 6, 7]
        assert td["sequence_id"].tolist() == [i for i in range(4) for _ in range(3)]
        assert td["validity_mask"].tolist() == [True, False, False] + [True] * 9
    else:
        assert td["steps_to_next_obs"].flatten().tolist() == [1, 3, 3, 3]
    assert rb.buffer.limiter_state()["sampled"] == 4


def test_no_anchor_left_says_so(make, monkeypatch):
    rb = make(Sequence(2), TEN, capacity=10)
    monkeypatch.setattr(
        "shmbuf.samplers.sequences._Anchors._more", lambda self, n: (_ for _ in ()).throw(NotEnoughRows("none"))
    )
    before_the_copy(monkeypatch, lambda: rb.extend(rows(10, (9,), first=10)))
    with pytest.raises(NotEnoughRows, match="none"):
        rb.sample(4)


@pytest.mark.parametrize("unit", [Sequence(3), NStep(3)], ids=lambda u: u.name)
def test_an_out_that_does_not_fit_claims_nothing(make, unit):
    rb = make(unit, TEN, sampler=ConsumingSampler())
    good = make(unit, TEN).sample(4)
    mark = "anchor_index" if unit.name == "sequence" else "steps_to_next_obs"
    for bad in (
        good[:-1].clone(),
        good.exclude(mark),
        good.exclude("t"),
        good.clone().set("t", torch.zeros(len(good), 2)),
    ):
        with pytest.raises(SchemaError, match="out"):
            rb.sample(4, out=bad)
    with pytest.raises((ValueError, KeyError)):  # nor does a unit that cannot be
        TensorDictReplayBuffer.sample(shmbuf.attach(rb.name, sample_unit=Sequence(2, done_key="t")), 4)
    with (
        shmbuf.attach(rb.name, sample_unit=NStep(2, reward_key="r")) as other,
        pytest.raises(KeyError, match="no reward"),
    ):
        other.sample(4)
    with (
        shmbuf.attach(rb.name, sample_unit=Sequence(2, done_key="t")) as other,
        pytest.raises(ValueError, match="done_key"),
    ):
        other.sample(4)
    assert rb.sample(4, out=good) is good
    assert len(rb.sample(6)) == 6 * unit.rows_per_anchor, "none was lost"


def test_a_shorter_last_batch_goes_into_the_first_rows_of_out(make):
    rb = make(Sequence(3), TEN, sampler=SamplerWithoutReplacement(shuffle=False))
    out = rb.sample(8)
    got = rb.sample(8, out=out)
    assert (
        got.batch_size == (6,)
        and got["t"].tolist() == [8, 9, 9, 9, 9, 9]
        and out["t"][:6].tolist() == got["t"].tolist()
    )
