"""Rewards to go, several steps at once, frames and burn-in, each against the sum or list written out in Python."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from shmbuf import BurnInTransform, CatFrames, MultiStepTransform, Reward2GoTransform
from shmbuf.transforms import Compose


def steps(first: int, n: int, ends=(), shape=(1,)) -> TensorDict:
    """Rows numbered from `first`; the row after number i has number i + 1; `ends` by number."""
    k = torch.arange(first, first + n)
    done = torch.tensor([i in ends for i in k.tolist()], dtype=torch.bool).reshape(n, *shape)
    after = {"k": k + 1, "reward": (k + 1.0).reshape(n, *shape), "done": done}
    return TensorDict({"k": k, "next": TensorDict(after, [n])}, [n])


def nexts(td) -> list:
    return td["next", "k"].tolist()


# ---- rewards to go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_rewards_are_summed_to_the_end_of_their_trajectory(n, shape):
    ends = {0, 4, 5}
    td = steps(0, n, ends, shape)
    before = td["next", "reward"].clone()
    out = Reward2GoTransform(0.5).inv(td.copy())["next", "reward"]
    want, later = [0.0] * n, 0.0
    for t in reversed(range(n)):
        later = want[t] = (t + 1.0) + (0.0 if t in ends else 0.5 * later)
    assert out.shape == before.shape and out.flatten().tolist() == want
    assert torch.equal(td["next", "reward"], before)


def test_rewards_go_each_along_its_own_row_and_to_another_key():
    td = TensorDict({"next": {"reward": torch.ones(2, 3, 1), "done": torch.zeros(2, 3, 1, dtype=torch.bool)}}, [2, 3])
    td["next", "done"][0, 1] = td["next", "done"][1, 2] = True
    t = Reward2GoTransform(1.0, out_keys=["to_go"])
    out = t.inv(td.copy())
    assert out["to_go"].flatten().tolist() == [2, 1, 1, 3, 2, 1] and (out["next", "reward"] == 1).all()
    assert t.forward(td) is td
    td["next", "done"][1, 2] = False
    with pytest.raises(RuntimeError, match=r"no end at \('next', 'done'\) .* \[2, 3\]"):
        t.inv(td)


def test_flags_for_each_reward_or_one_for_all():
    reward = torch.ones(3, 2)
    each = TensorDict({"next": {"reward": reward, "done": torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()}}, [3])
    assert Reward2GoTransform().inv(each)["next", "reward"].tolist() == [[1, 3], [2, 2], [1, 1]]
    one = TensorDict({"next": {"reward": reward, "done": torch.tensor([[1], [0], [1]]).bool()}}, [3])
    assert Reward2GoTransform().inv(one)["next", "reward"].tolist() == [[1, 1], [2, 2], [1, 1]]
    odd = TensorDict({"next": {"reward": reward, "done": torch.ones(3, 4).bool()}}, [3])
    with pytest.raises(ValueError, match=r"\(3, 4\) end flags for rewards"):
        Reward2GoTransform().inv(odd)


def test_rewards_to_go_of_whole_numbers_and_missing_keys():
    td = TensorDict({"next": {"reward": torch.tensor([1, 2]), "done": torch.tensor([False, True])}}, [2])
    assert Reward2GoTransform(torch.tensor(0.25)).inv(td)["next", "reward"].tolist() == [1.5, 2.0]
    with pytest.raises(KeyError, match=r"no key \('next', 'z'\)"):
        Reward2GoTransform(in_keys=[("next", "z")]).inv(td)


# ---- several steps ---------------------------------------------------------------------------------------------------


def emitted(t, chunks, ends) -> list:
    out, first = [], 0
    for n in chunks:
        td = t.inv(steps(first, n, ends))
        first += n
        out += [] if td is None else [td]
    return out


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [3, 3, 14], [2, 18], [10, 1, 9]])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_rows_lag_and_have_several_steps_however_they_come(chunks, n):
    ends, t = {0, 6, 7, 15}, MultiStepTransform(n, 0.5)
    out = torch.cat([*emitted(t, chunks, ends), t.flush()])
    assert out["k"].tolist() == list(range(20)) and t.flush() is None
    for i in range(20):
        end = min([e for e in ends if e >= i], default=99)
        last = min(i + n - 1, end, 19)
        assert nexts(out)[i] == last + 1
        assert out["next", "reward"][i].item() == sum(0.5 ** (j - i) * (j + 1) for j in range(i, last + 1))
        assert out["next", "original_reward"][i].item() == i + 1 and out["next", "done"][i].item() == (i in ends)
        assert out["steps_to_next_obs"][i] == last - i + 1 and out["gamma"][i] == 0.5 ** (last - i + 1)
        assert out["nonterminal"][i] == (last > i)


def test_nothing_comes_out_before_more_rows_than_steps():
    t = MultiStepTransform(3, 0.9)
    assert t.inv(steps(0, 0)) is None and t.flush() is None
    assert t.inv(steps(0, 2)) is None and t.inv(steps(2, 1)) is None
    assert t.inv(steps(3, 1))["k"].tolist() == [0]
    assert t.flush()["k"].tolist() == [1, 2, 3]


def test_a_row_without_a_batch_dimension():
    t = MultiStepTransform(1, 0.9)
    assert t.inv(steps(0, 1)[0]) is None
    out = t.inv(steps(1, 1)[0])
    assert out.batch_size == () and out["k"] == 0


def test_held_rows_are_copies_and_the_callers_dict_stays():
    t, td = MultiStepTransform(2, 1.0), steps(0, 3)
    out = t.inv(td)
    assert set(td.keys(True, True)) == {"k", ("next", "k"), ("next", "reward"), ("next", "done")}
    assert td["next", "reward"].flatten().tolist() == [1, 2, 3] and out["next", "reward"].item() == 3
    td.apply_(lambda v: v.zero_())
    assert t.flush()["k"].tolist() == [1, 2]


def test_rows_of_several_batches_go_each_their_own_way():
    a, b = steps(0, 9, {2}), steps(100, 9, {104})
    t = MultiStepTransform(3, 0.5)
    both = torch.stack([a, b])
    out = torch.cat([t.inv(both[:, :5]), t.inv(both[:, 5:]), t.flush()], -1)
    for row, alone in zip(out, (a, b), strict=True):
        u = MultiStepTransform(3, 0.5)
        want = torch.cat([u.inv(alone), u.flush()])
        assert (row == want).all()


def test_rows_that_do_not_fit_change_nothing():
    t = MultiStepTransform(2, 0.5)
    t.inv(steps(0, 2))
    with pytest.raises(ValueError, match=r"after rows held back of \[2\]"):
        t.inv(torch.stack([steps(0, 4), steps(0, 4)]))
    with pytest.raises(KeyError, match="MultiStepTransform: no key"):
        MultiStepTransform(2, 0.5, done_key="z").inv(steps(0, 4))
    with pytest.raises(ValueError, match="one flag for each row"):
        MultiStepTransform(2, 0.5).inv(steps(0, 4, (), (1, 1)).set(("next", "done"), torch.zeros(4, 2).bool()))
    assert t.flush()["k"].tolist() == [0, 1]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="at least 1"):
            t.n_steps = wrong


def test_the_number_of_steps_may_change():
    t = MultiStepTransform(4, 0.5)
    assert t.inv(steps(0, 6))["k"].tolist() == [0, 1]
    t.n_steps = 2
    out = t.inv(steps(6, 2))
    assert out["k"].tolist() == [2, 3, 4, 5] and nexts(out) == [4, 5, 6, 7]
    t.n_steps = 3
    assert t.inv(steps(8, 1)) is None
    assert t.inv(steps(9, 1))["k"].tolist() == [6]


def test_several_rewards_and_a_mask():
    td = steps(0, 4).set(("next", "b"), torch.full((4, 2), 10.0)).set("mask", torch.tensor([1, 0, 1, 1]).bool())
    out = MultiStepTransform(2, 1.0, reward_keys=["reward", "b"]).inv(td)
    assert out["next", "reward"].flatten().tolist() == [3, 5] and out["next", "b"].tolist() == [[20, 20], [20, 20]]
    assert out["next", "original_b"][0, 0] == 10 and out["next", "original_reward"].flatten().tolist() == [1, 2]
    assert out["nonterminal"].tolist() == [True, False]


def test_a_pickle_takes_no_rows_along_but_the_state_does():
    t = MultiStepTransform(2, 0.5)
    t.inv(steps(0, 2))
    copy = pickle.loads(pickle.dumps(Compose(t)))
    assert copy[0].flush() is None
    copy.load_state_dict(Compose(t).state_dict())
    assert copy[0].flush()["k"].tolist() == [0, 1] and t.flush()["k"].tolist() == [0, 1]


def test_a_fork_takes_no_rows_along():
    t = MultiStepTransform(2, 0.5)
    t.inv(steps(0, 2))
    pid = os.fork()
    if not pid:
        os._exit(0 if t.flush() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert t.flush()["k"].tolist() == [0, 1]


# ---- frames ----------------------------------------------------------------------------------------------------------


def windows(n: int, frames: int, ends, future: bool) -> list:
    """Of each row its window: (place, padding)."""
    out = []
    for i in range(n):
        first = max([e + 1 for e in ends if e < i], default=0)
        last = min([e for e in ends if e >= i], default=n - 1)
        places = range(i, i + frames) if future else range(i - frames + 1, i + 1)
        out.append([(min(max(p, first), last), not first <= p <= last) for p in places])
    return out


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("frames", [1, 3, 12])
def test_frames_lie_beside_one_another(frames, padding, future):
    td = steps(0, 9, {2, 3, 7}).set("x", torch.arange(9 * 2.0).reshape(9, 2, 1))
    how = {"padding": padding, "padding_value": -1, "future": future, "mask_key": "pad"}
    out = CatFrames(frames, -1, ["x"], ["y"], **how).forward(td)
    want = windows(9, frames, (2, 3, 7), future)
    assert out["y"].shape == (9, 2, frames) and out["pad"].tolist() == [[pad for _, pad in w] for w in want]
    for c in (0, 1):
        values = [[-1 if pad and padding == "constant" else 2 * at + c for at, pad in w] for w in want]
        assert out["y"][:, c].tolist() == values
    joined = CatFrames(frames, -2, ["x"], **how).forward(td)["x"]
    assert torch.equal(joined, out["y"].transpose(1, 2).reshape(9, 2 * frames, 1))


def test_each_row_of_a_batch_begins_anew_and_time_can_be_named():
    td = torch.stack([steps(0, 4), steps(10, 4, {11})])
    td.set("x", td["k"][..., None])
    t = CatFrames(2, -1, ["x"], mask_key="pad")
    pad = t.forward(td.copy())["pad"]
    out = t.forward(td.copy())["x"]
    assert out[0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert out[1].tolist() == [[10, 10], [10, 11], [12, 12], [12, 13]]
    turned = td.copy().transpose(0, 1).contiguous()
    turned.names = ["time", None]
    joined = t.forward(turned)
    assert torch.equal(joined["x"].transpose(0, 1), out) and torch.equal(joined["pad"].transpose(0, 1), pad)


@pytest.mark.parametrize(("padding", "first"), [("same", 5), ("constant", 0)])
def test_the_next_frames_go_on_from_these(padding, first):
    td = steps(5, 3, {7}).set("x", torch.tensor([[5], [6], [7]])).set(("next", "x"), torch.tensor([[6], [7], [8]]))
    out = CatFrames(3, -1, ["x", ("next", "x")], padding=padding).forward(td)
    assert out["x"].tolist() == [[first, first, 5], [first, 5, 6], [5, 6, 7]]
    assert out["next", "x"].tolist() == [[first, 5, 6], [5, 6, 7], [6, 7, 8]]


def test_frames_on_the_way_in_and_what_is_refused():
    td = steps(0, 2).set("x", torch.arange(2)[:, None])
    t = CatFrames(2, -1, ["x"], ["y"], as_inverse=True)
    assert t.forward(td) is td and "y" not in td
    assert t.inv(td)["y"].tolist() == [[0, 0], [0, 1]]
    assert CatFrames(2, -1, ["x"], ["z"]).inv(td) is td and "z" not in td
    for wrong, match in (((0, -1), "N=0"), ((2, 0), "dim=0"), ((2, -1, None, None, "zeros"), "padding='zeros'")):
        with pytest.raises(ValueError, match=match):
            CatFrames(*wrong)
    with pytest.raises(ValueError, match="is none of the frame's own"):
        CatFrames(2, -2, ["x"]).forward(td)
    with pytest.raises(ValueError, match="without a batch dimension"):
        CatFrames(2, -1, ["x"]).forward(td[0])
    bare = TensorDict({"x": torch.arange(3)[:, None]}, [3])
    with pytest.raises(KeyError, match=r"no key \('next', 'done'\)"):
        CatFrames(2, -1, ["x"]).forward(bare)
    assert CatFrames(2, -1, ["x"], future=True).forward(bare)["x"].tolist() == [[0, 1], [1, 2], [2, 2]]


# ---- burn-in ---------------------------------------------------------------------------------------------------------


class Running(torch.nn.Module):
    """A state that sums what came: the one of the first step goes in, the sum after each step comes out."""

    def forward(self, x, h):
        assert not torch.is_grad_enabled()
        return h[:, :1] + x.cumsum(1)


def running(**how) -> BurnInTransform:
    return BurnInTransform([TensorDictModule(Running(), ["x", "h"], [("next", "h")])], 3, **how)


def sequences() -> TensorDict:
    return TensorDict({"x": torch.arange(10.0).reshape(2, 5, 1), "h": torch.full((2, 5, 1), 100.0)}, [2, 5])


@pytest.mark.parametrize("how", [{}, {"out_keys": ["h"]}, {"out_keys": [("next", "h")]}])
def test_what_is_left_starts_in_the_state_that_was_burnt_in(how):
    t, td = running(**how), sequences()
    assert t.in_keys == ["x", "h"] and t.out_keys == ["h"]
    out = t.forward(td)
    assert out.batch_size == (2, 2) and out["x"].flatten().tolist() == [3, 4, 8, 9] and "next" not in out
    assert out["h"].flatten().tolist() == [103, 100, 118, 100]
    assert (td["h"] == 100).all() and "next" not in td


def test_a_state_that_was_not_stored_is_zero_after_the_first_step():
    module = TensorDictModule(lambda x: (x, x.cumsum(1)), ["x"], ["y", ("next", "n", "h")])
    t = BurnInTransform(module, 2)
    assert t.out_keys == [("n", "h")]
    out = t.forward(sequences().exclude("h"))
    assert out["n", "h"].flatten().tolist() == [1, 0, 0, 11, 0, 0] and "y" not in out


def test_modules_run_one_after_another():
    a = TensorDictModule(lambda x: x * 10, ["x"], ["y"])
    b = TensorDictModule(lambda y: y + 1, ["y"], [("next", "h")])
    assert BurnInTransform([a, b], 2).forward(sequences())["h"][:, 0].flatten().tolist() == [11, 61]


def test_burn_in_that_cannot_be():
    assert BurnInTransform([], 0).forward(sequences()).batch_size == (2, 5)
    with pytest.raises(ValueError, match=r"batch size \[2, 3\]: .* burn_in=3"):
        running().forward(sequences()[:, :3])
    with pytest.raises(ValueError, match=r"batch size \[5\]"):
        running().forward(sequences()[0])
    with pytest.raises(TypeError, match="not Running"):
        BurnInTransform([Running()], 1)
    with pytest.raises(ValueError, match="burn_in=-1"):
        BurnInTransform([], -1)
