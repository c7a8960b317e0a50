"""The predicate language over plain TensorDicts: every operation against the same written with torch, trajectory by trajectory."""

from __future__ import annotations

import operator
import pickle
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from shmbuf import Trajectory, TrajectoryPredicate, filter_trajectories, find_start_stop_traj, iter_trajectories, traj
from shmbuf.queries import segments

LENGTHS = (5, 1, 7, 3)


def data(lengths=LENGTHS, seed: int = 0) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    return TensorDict(
        {
            "obs": torch.randn(n, 2, 3, generator=rng),
            "t": torch.arange(n),
            "small": torch.arange(n).to(torch.uint8) + 240,
            "half": torch.full((n,), 60_000.0, dtype=torch.float16),
            "bf": torch.randn(n, generator=rng).bfloat16(),
            "flag": torch.randint(2, (n,), generator=rng).bool(),
            "wide": torch.tensor([2**53 + 1]).expand(n).clone(),
            "length": torch.full((n,), 99),
            "collector": {"traj_ids": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))},
            "next": {"reward": torch.randn(n, 1, generator=rng), "done": done, "obs": torch.randn(n, 6, generator=rng)},
        },
        [n],
    )


@pytest.fixture(scope="module")
def td() -> TensorDict:
    return data()


def parts(td: TensorDict) -> list[TensorDict]:
    return list(td.split(list(LENGTHS)))


def kept(td: TensorDict, predicate) -> list[int]:
    return [int(t["collector", "traj_ids"][0]) for t in filter_trajectories(td, predicate)]


REDUCTIONS = {
    "sum": torch.sum,
    "mean": lambda x: x.double().mean(),
    "std": lambda x: x.double().std(),
    "var": lambda x: x.double().var(),
    "prod": torch.prod,
    "max": torch.max,
    "min": torch.min,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("key", ["obs", "reward", "t", "flag", "bf", "small"])
def test_a_reduction_is_torchs_of_each_trajectory(td, name, key):
    whole = td.get(key, None) if td.get(key, None) is not None else td["next", key]
    got = segments.reduce(name, segments.tame(whole), np.array(LENGTHS))
    with warnings.catch_warnings():  # std of one element
        warnings.simplefilter("ignore")
        expected = [float(REDUCTIONS[name](p)) for p in whole.split(list(LENGTHS))]
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=2e-2 if key == "bf" else 1e-4, atol=1e-5)
    middle = float(np.nanmedian(expected)) + 1e-3
    again = [i for i, e in enumerate(expected) if e > middle]
    assert kept(td, getattr(traj[key], name)() > middle) == again


@pytest.mark.parametrize("op", [operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne])
def test_comparisons_with_constants_on_either_side(td, op):
    expected = [i for i, n in enumerate(LENGTHS) if op(n, 5)]
    swapped = [i for i, n in enumerate(LENGTHS) if op(5, n)]
    for five in (5, 5.0, torch.tensor(5), torch.tensor([5.0]), np.int64(5), np.float32(5), np.array(5)):
        assert kept(td, op(traj.length, five)) == expected
        assert kept(td, op(five, traj.length)) == swapped


def test_of_two_expressions(td):
    """TorchRL takes every one of these for true."""
    both = [(float(p["next", "reward"].max()), float(p["obs"].sum())) for p in parts(td)]
    assert kept(td, traj.reward.max() > traj.obs.sum()) == [i for i, (a, b) in enumerate(both) if a > b]
    assert 0 < len(kept(td, traj.reward.max() > traj.obs.sum())) < 4
    assert kept(td, traj.t.last() - traj.t.first() + 1 == traj.length) == [0, 1, 2, 3]
    assert kept(td, traj.t.last() - traj.t.first() == traj.length) == []


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_arithmetic(td, name, swap):
    op = getattr(operator, name)
    sides = (3, traj.t + 1) if swap else (traj.t + 1, 3)
    want = [float(op(*((3, p["t"] + 1) if swap else (p["t"] + 1, 3))).double().sum()) for p in parts(td)]
    for value in want:
        near = (op(*sides).sum() - value).abs() <= 1e-5 * abs(value)
        assert kept(td, near) == [i for i, w in enumerate(want) if abs(w - value) <= 1e-5 * abs(value)]


def test_unary(td):
    assert kept(td, (-traj.reward).max() > 1) == [
        i for i, p in enumerate(parts(td)) if float(p["next", "reward"].min()) < -1
    ]
    expected = [i for i, p in enumerate(parts(td)) if float(p["next", "reward"].abs().sum()) > 3]
    assert kept(td, traj.reward.abs().sum() > 3) == kept(td, abs(traj.reward).sum() > 3) == expected
    assert 0 < len(expected) < 4


def test_conditions_element_by_element(td):
    condition = (traj.reward > 0) & ~(traj.t > 9) | (traj.flag & traj.done)

    def torchs(p):
        return (p["next", "reward"] > 0) & ~(p["t"][:, None] > 9) | (p["flag"][:, None] & p["next", "done"])

    assert kept(td, condition.any()) == [i for i, p in enumerate(parts(td)) if torchs(p).any()]
    assert kept(td, ~condition.any()) == [i for i, p in enumerate(parts(td)) if not torchs(p).any()]
    assert kept(td, condition.all()) == [i for i, p in enumerate(parts(td)) if torchs(p).all()]
    assert kept(td, condition.count() == 2) == [i for i, p in enumerate(parts(td)) if int(torchs(p).sum()) == 2]
    assert kept(td, condition.mean() > 0.4) == [
        i for i, p in enumerate(parts(td)) if float(torchs(p).double().mean()) > 0.4
    ]
    assert kept(td, (condition ^ condition).any()) == []
    assert kept(td, (traj.reward > 0).last()) == [i for i, p in enumerate(parts(td)) if p["next", "reward"][-1] > 0]
    assert kept(td, (traj.reward > 0).first()) == [i for i, p in enumerate(parts(td)) if p["next", "reward"][0] > 0]


def test_each_step_beside_its_own_trajectorys_number(td):
    expected = [
        i for i, p in enumerate(parts(td)) if ((p["next", "reward"] - p["next", "reward"].mean()).abs() > 1.2).any()
    ]
    assert kept(td, ((traj.reward - traj.reward.mean()).abs() > 1.2).any()) == expected
    assert 0 < len(expected) < 4
    assert kept(td, ((traj.t > 4) & (traj.length > 5)).any()) == [2]  # a predicate, for each of its steps


def test_isin(td):
    assert kept(td, traj["collector", "traj_ids"].isin([1, 3]).all()) == [1, 3]
    assert kept(td, traj["collector", "traj_ids"].first().isin(torch.tensor([0, 3]))) == [0, 3]
    assert kept(td, traj.length.isin([7, 5])) == [0, 2]
    assert kept(td, traj.t.isin([0.5, 3.0]).any()) == [0]


def test_rows_of_several_elements(td):
    with pytest.raises(ValueError, match=r"compares rows of shape \[2, 3\].*ambiguous.*\.any\(\) or \.all\(\)"):
        filter_trajectories(td, traj.obs.first() > 0)
    assert kept(td, (traj.obs.first() > 0).any()) == [i for i, p in enumerate(parts(td)) if (p["obs"][0] > 0).any()]
    assert kept(td, (traj.obs.first() > -1).all()) == [i for i, p in enumerate(parts(td)) if (p["obs"][0] > -1).all()]
    assert kept(td, traj.obs.last().sum() > 0) == [i for i, p in enumerate(parts(td)) if p["obs"][-1].sum() > 0]
    threshold = torch.tensor([0.0, 9.0, 9.0])
    expected = [i for i, p in enumerate(parts(td)) if (p["obs"] > threshold).any(-1).any(-1).all()]
    assert kept(td, (traj.obs > threshold).count() >= traj.length) >= expected
    with pytest.raises(ValueError, match=r"a constant of shape \[3\] beside rows of shape \[\]"):
        filter_trajectories(td, (traj.t > torch.tensor([1, 2, 3])).any())
    with pytest.raises(ValueError, match=r"traj.obs"):
        filter_trajectories(td, (traj.obs > traj["next", "obs"]).any())


def test_numbers_do_not_wrap_nor_round(td):
    assert kept(td, (traj.small - 250 < 0).any()) == [0, 1, 2]  # uint8: 240 - 250 would be 246
    assert kept(td, (traj.small > 300).any()) == [] and kept(td, (traj.small > -1).all()) == [0, 1, 2, 3]
    assert kept(td, traj.half.sum() == 180_000) == [3]  # float16 ends at 65504
    assert kept(td, (traj.wide == 2**53 + 1).all()) == [0, 1, 2, 3]
    assert kept(td, (traj.wide + 0.0 == 2.0**53).all()) == [0, 1, 2, 3]  # a float64, not a float32
    assert kept(td, (traj.wide < 2**70).all()) == [0, 1, 2, 3]
    hard = TensorDict(
        {"x": torch.tensor([1e8, 1.0, -1e8]), "n": torch.full((3,), 2**24 + 1), "episode": torch.zeros(3)}, [3]
    )
    assert len(filter_trajectories(hard, traj.x.sum() == 1)) == 1  # 0 in float32
    assert (
        len(filter_trajectories(hard, (traj.n > 2**24 + 0.5).all()))
        == 1
        == len(filter_trajectories(hard, (traj.n > traj.x - 1e8 + 2**24).any()))
    )


NUMBERS = {
    "u8": torch.tensor([0, 44, 200, 255], dtype=torch.uint8),
    "i8": torch.tensor([-128, -56, 0, 127], dtype=torch.int8),
    "u32": torch.tensor([0, 44, 2**31, 2**32 - 1], dtype=torch.uint32),
    "u64": torch.tensor([0, 1, 2**53 + 1, 2**63 - 1], dtype=torch.uint64),
    "i64": torch.tensor([-(2**63), 0, 2**53 + 1, 2**63 - 1]),
    "flag": torch.tensor([False, True, False, True]),
    "f16": torch.tensor([-1.5, 2048.0, 65504.0, float("inf")], dtype=torch.float16),
    "f32": torch.tensor([-1.5, 2.0**24, 2.0**63, float("inf")]),
    "f64": torch.tensor([-1.5, 2.0**53, 2.0**63, float("nan")], dtype=torch.float64),
}
CONSTANTS = [
    0,
    1,
    -1,
    -56,
    44,
    200,
    300,
    2**24 + 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63) - 1,
    10**400,
]
CONSTANTS += [
    True,
    False,
    0.5,
    43.5,
    -1.5,
    300.0,
    2.0**53,
    2.0**63,
    -(2.0**63),
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def spelled(c) -> list:
    """The same number in every way to hand it over."""
    out = [c]
    if isinstance(c, int) and not isinstance(c, bool) and -(2**63) <= c < 2**64:
        kinds = [np.int64] * (c < 2**63) + [np.uint64] * (c >= 0)
    else:
        kinds = [np.float64] * isinstance(c, float) + [np.bool_] * isinstance(c, bool)
    for kind in kinds:
        out += [
            kind(c),
            np.array(c, kind),
            np.array([c], kind),
            torch.as_tensor(np.array(c, kind)),
            torch.as_tensor(np.array([[c]], kind)),
        ]
    return out  # fmt: skip


@pytest.mark.parametrize("c", CONSTANTS, ids=lambda c: str(c)[:24])
def test_a_constant_is_the_number_it_is_beside_every_dtype(c):
    """Python's own comparisons of exact numbers are the reference."""
    rows = TensorDict({**NUMBERS, "episode": torch.arange(4)}, [4])
    for key, column in NUMBERS.items():
        numbers = column.tolist()
        for constant in spelled(c):
            for op in (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne):
                got = [int(t["episode"][0]) for t in filter_trajectories(rows, op(traj[key], constant).any())]
                assert got == [i for i, x in enumerate(numbers) if op(x, c)], (key, op, constant)
            same = [i for i, x in enumerate(numbers) if x == c]
            for values in (constant, [constant], [constant, 10**30]):
                got = [int(t["episode"][0]) for t in filter_trajectories(rows, traj[key].isin(values).any())]
                assert got == same, (key, values)


@pytest.mark.parametrize("a", NUMBERS)
@pytest.mark.parametrize("b", NUMBERS)
def test_columns_and_long_constants_of_different_dtypes(a, b):
    rows = TensorDict(
        {
            "a": NUMBERS[a],
            "b": torch.stack(NUMBERS[b].unbind()[::-1]),
            "w": torch.stack([NUMBERS[a]] * 2, 1),
            "episode": torch.arange(4),
        },
        [4],
    )
    x, y = NUMBERS[a].tolist(), torch.stack(NUMBERS[b].unbind()[::-1]).tolist()
    for op in (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne):
        got = [int(t["episode"][0]) for t in filter_trajectories(rows, op(traj.a, traj.b).any())]
        assert got == [i for i in range(4) if op(x[i], y[i])], op
        for at in range(3):
            long = rows["b"][at : at + 2]
            got = [int(t["episode"][0]) for t in filter_trajectories(rows, op(traj.w, long).any())]
            assert got == [i for i in range(4) if op(x[i], y[at]) or op(x[i], y[at + 1])], (op, at)


def test_arithmetic_with_constants_of_any_spelling_does_not_wrap():
    rows = TensorDict({"x": NUMBERS["u8"], "f": torch.full((4,), 2.0**24), "episode": torch.arange(4)}, [4])

    def of(expression, value):
        return [int(t["episode"][0]) for t in filter_trajectories(rows, expression.first() == value)]

    for fifty in (50, np.uint8(50), np.array(50), torch.tensor(50), torch.tensor([50], dtype=torch.uint8)):
        assert (
            of(traj.x - fifty, -50) == [0] and of(traj.x + 5 + fifty, 255) == [2] and of(traj.x * fifty, 12750) == [3]
        )
        assert [int(t["episode"][0]) for t in filter_trajectories(rows, (traj.x - fifty > 0).any())] == [2, 3]
    assert of(traj.f + (2**24 + 1), 2**25 + 1) == [0, 1, 2, 3]


def test_length_and_total_reward(td):
    assert kept(td, traj.total_reward > 0) == [i for i, p in enumerate(parts(td)) if p["next", "reward"].sum() > 0]
    assert kept(td, traj.length > 50) == [] and kept(td, traj["length"].max() > 50) == [0, 1, 2, 3]


def test_callables(td):
    asked = []

    def long(t):
        asked.append(t.length)
        return t.length > 4

    assert kept(td, long) == [0, 2]
    asked.clear()
    assert kept(td, TrajectoryPredicate(long) & (traj.length < 6)) == [0] and asked == [5, 1, 3]  # the rest is settled
    asked.clear()
    assert kept(td, (traj.length < 2) | long) == [0, 1, 2] and asked == [5, 7, 3]
    assert kept(td, ~TrajectoryPredicate(long)) == [1, 3]
    assert kept(td, TrajectoryPredicate(long) ^ (traj.length < 6)) == [1, 2, 3]
    assert kept(td, long & (traj.length > 6)) == [2]
    assert kept(td, lambda t: float(t.reward[0]) == float(td["next", "reward"][5])) == [1]


def test_required_keys():
    assert (traj.a.sum() > traj["b", "c"].max()).required_keys() == {"a", ("b", "c")}
    assert ((traj.a > 1) & (traj.b > 1)).all().required_keys() == {"a", "b"}
    assert (traj.length > 1).required_keys() == frozenset() and (traj.total_reward > 1).required_keys() == {"reward"}
    assert (~(traj.a.isin([1]).any()) | (traj.b.first() + 1 > 1)).required_keys() == {"a", "b"}
    assert traj["a", ("b", "c")].sum().required_keys() == {("a", "b", "c")}
    opaque = TrajectoryPredicate(len)
    assert opaque.required_keys() is None and (opaque & (traj.a.sum() > 1)).required_keys() is None
    assert TrajectoryPredicate(len, keys=["a", ("b", "c")]).required_keys() == {"a", ("b", "c")}


def test_a_readable_formula():
    formula = ~((traj.reward.sum() > 100) & (abs(-(traj["next", "obs"] ** 2)) >= 0.5).any()) | (
        3 - traj.length == traj.x.last()
    )
    assert repr(formula) == (
        "(~((traj.reward.sum() > 100) & (-(traj[('next', 'obs')] ** 2).abs() >= 0.5).any()) | ((3 - traj.length) == traj.x.last()))"
    )
    assert repr(TrajectoryPredicate(len, "mine") & (traj.length > 1)) == "(mine & (traj.length > 1))"
    assert repr(traj) == "traj" and repr(traj.x.isin([1, 2]).all()) == "traj.x.isin([1, 2]).all()"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: (traj.length > 5) and (traj.length < 9),
        lambda: (traj.length > 5) or (traj.length < 9),
        lambda: not (traj.length > 5),
        lambda: 10 < traj.length < 8,
        lambda: bool(traj.x),
        lambda: bool(traj.x > 1),
        lambda: bool(TrajectoryPredicate(len)),
        lambda: traj.x in [traj.y],
    ],
)
def test_truth_is_refused(wrong):
    with pytest.raises(TypeError, match=r"& \| ~.*write a chained comparison as two"):
        wrong()


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda td: filter_trajectories(td, traj.t > 3), r"any\(\) or \.all\(\)"),
        (lambda td: filter_trajectories(td, traj.t), "reduce and compare it"),
        (lambda td: filter_trajectories(td, traj.t.sum()), r"is a number, no predicate: compare it, as in traj.t.sum\(\) > 0"),
        (lambda td: filter_trajectories(td, True), "got True"),
        (lambda td: (traj.t > 3) + 1, "unsupported operand"),
        (lambda td: (traj.t > (traj.t > 3)), "a condition is no number"),
        (lambda td: traj.t > "a", "str is neither a number"),
        (lambda td: traj.t == None, "NoneType is neither"),  # noqa: E711
        (lambda td: filter_trajectories(td, (traj.t & traj.flag).any()), "combine conditions, not values of torch.int64"),
        (lambda td: traj.t.sum().first(), r"has no \.first\(\)"),
        (lambda td: (traj.t > 1) & 1, "unsupported operand"),
        (lambda td: TrajectoryPredicate(3), "a predicate is a callable"),
        (lambda td: iter(traj), "not iterable"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(td, wrong, text):
    with pytest.raises(TypeError, match=text):
        wrong(td)


def test_missing_keys(td):
    for predicate in (traj.missing.sum() > 0, (traj.missing > 0).any(), traj["a", "b"].first() > 0):
        with pytest.raises(KeyError, match=r"not found in trajectory.*'t'"):
            filter_trajectories(td, predicate)
    with pytest.raises(KeyError, match="no tensor"):
        filter_trajectories(td, traj.collector.sum() > 0)
    with pytest.raises(AttributeError, match=r"traj\['a', 'b'\]"):
        _ = traj.collector.traj_ids
    with pytest.raises(AttributeError):
        _ = traj._x


def test_root_before_next(td):
    both = td.clone()
    both["reward"] = torch.full((16, 1), 5.0)
    assert kept(both, traj.reward.min() == 5) == [0, 1, 2, 3] and kept(both, traj.total_reward == 5) == [1]
    assert kept(both, (traj["next", "reward"] == 5).any()) == []


def test_predicates_are_called_and_travel(td):
    predicate = pickle.loads(pickle.dumps((traj.reward.sum() > 0) & (traj.length >= traj.t.isin([5]).count() + 1)))
    first = Trajectory(td[:5])
    assert predicate(first) is (float(td["next", "reward"][:5].sum()) > 0) is predicate(td[:5])
    assert pickle.loads(pickle.dumps(traj)) is traj
    with pytest.raises(TypeError):
        hash(traj.x)


# ---- Trajectory ---------------------------------------------------------------------------------------------------------


def test_trajectory(td):
    t = Trajectory(td[:5])
    assert (t.length, len(t)) == (5, 5) and isinstance(t.length, int)
    assert t.obs.shape == (5, 2, 3) and t.reward.shape == (5, 1) and torch.equal(t["next", "reward"], t.reward)
    assert float(t.total_reward) == pytest.approx(float(td["next", "reward"][:5].sum()))
    assert t.get("nothing", 7) == 7 and t.get(("next", "nothing")) is None and set(t.keys()) == set(td.keys())
    for part in (t[1:4], t[torch.tensor([0, 2])], t[0], t.clone(), t.to("cpu")):
        assert isinstance(part, Trajectory)
    assert t[1:4].length == 3 and torch.equal(t[1:4].t, td["t"][1:4])
    with pytest.raises(AttributeError, match=r"no entry 'pixels'.*obs"):
        _ = t.pixels
    with pytest.raises(ValueError, match="single batch dimension"):
        Trajectory(td[:4].reshape(2, 2))
    ragged = lazy_stack([t, Trajectory(td[5:6])])
    assert isinstance(ragged, Trajectory) and ragged.batch_size == torch.Size([2, -1])
    assert ragged[1].length == 1 and torch.equal(ragged[0].reward, t.reward)
    assert repr(t).startswith("Trajectory(length=5, keys=[")
    assert repr(ragged).startswith("Trajectory(batch_size=[2, -1]")


# ---- boundaries -----------------------------------------------------------------------------------------------------------


def test_views_of_the_data(td):
    for t, part in zip(iter_trajectories(td), parts(td), strict=True):
        assert torch.equal(t.t, part["t"])
    mine = td.clone()
    next(iter_trajectories(mine)).data["t"].fill_(-1)
    assert mine["t"][:5].tolist() == [-1] * 5
    assert list(iter_trajectories(td[:0])) == [] == filter_trajectories(td[:0], traj.length > 1)


def test_which_key_tells(td):
    lengths = lambda d, **kw: [t.length for t in iter_trajectories(d, **kw)]  # noqa: E731
    n = 16
    ids = {"traj_ids": torch.arange(n) // 8, "episode": torch.arange(n) // 4}
    d = td.exclude("collector")
    with pytest.warns(UserWarning, match="end-of-episode flags"):
        assert lengths(d) == list(LENGTHS)
    assert lengths(d.clone().update({"episode": ids["episode"]})) == [4] * 4
    assert lengths(d.clone().update(ids)) == [8, 8]
    assert lengths(td.clone().update(ids)) == list(LENGTHS)
    assert lengths(td.clone().update(ids), trajectory_key="episode") == [4] * 4
    with pytest.raises(KeyError, match=r"trajectory_key .*nothing.* not found in data: "):
        lengths(td, trajectory_key="nothing")
    with pytest.raises(KeyError, match=r"Cannot split data into trajectories.*truncated"):
        lengths(td.select("t"))
    with pytest.raises(RuntimeError, match=r"rows of shape \[2, 3\]"):
        lengths(td, trajectory_key="obs")
    with pytest.raises(TypeError, match="TensorDictBase"):
        lengths(torch.zeros(3))
    with pytest.raises(ValueError, match="single batch dimension"):
        lengths(td.reshape(4, 4))
    flags = TensorDict({"done": torch.zeros(5).bool(), "truncated": torch.tensor([0, 1, 0, 0, 0]).bool()}, [5])
    with pytest.warns(UserWarning, match="'done', 'truncated'"):
        assert lengths(flags) == [2, 3]


def test_find_start_stop():
    end = torch.zeros(10, dtype=torch.bool)
    end[[2, 7]] = True
    for cursor in (4, torch.tensor([2, 3, 4]), range(2, 5), np.array(4)):
        start, stop, lengths = find_start_stop_traj(end=end, at_capacity=True, cursor=cursor)
        assert start.tolist() == [[8], [3], [5]] and stop.tolist() == [[2], [4], [7]] and lengths.tolist() == [5, 2, 3]
    assert not end[4]
    ids = torch.tensor([[0, 3], [0, 3], [1, 3], [1, 4], [1, 4]])
    start, stop, lengths = find_start_stop_traj(trajectory=ids, at_capacity=False)
    assert start.tolist() == [[0, 0], [2, 0], [0, 1], [3, 1]] and stop.tolist() == [[1, 0], [4, 0], [2, 1], [4, 1]]
    assert lengths.tolist() == [2, 3, 3, 2]
    start, stop, lengths = find_start_stop_traj(end=torch.zeros(3, 2, 2, dtype=torch.bool), at_capacity=True)
    assert start.tolist() == [[0, i, j] for j in (0, 1) for i in (0, 1)] and lengths.tolist() == [3] * 4
    for wrong, text in (({}, "Exactly one"), ({"end": end, "trajectory": end}, "Exactly one")):
        with pytest.raises(TypeError, match=text):
            find_start_stop_traj(**wrong, at_capacity=True)
    for wrong in ({"end": end[:0]}, {"end": end[0]}, {"end": end, "cursor": range(0)}, {"end": end, "cursor": "x"}):
        with pytest.raises(RuntimeError):
            find_start_stop_traj(**wrong, at_capacity=True)
