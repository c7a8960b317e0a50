"""TorchRL's transforms and max-value writer as oracles of ours, and taken as they are."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import shmbuf.transforms as ours
from shmbuf.writers import TensorDictMaxValueWriter, plan

theirs = pytest.importorskip("torchrl.envs.transforms")
data = pytest.importorskip("torchrl.data")

CASES = [
    ("DTypeCastTransform", (torch.float64, torch.float32), {}),
    (
        "DTypeCastTransform",
        (torch.int64, torch.int32),
        {"in_keys": ["k"], "out_keys": ["j"], "in_keys_inv": ["i"], "out_keys_inv": ["k"]},
    ),
    ("DoubleToFloat", (), {}),
    ("DoubleToFloat", (), {"in_keys": [("n", "x")]}),
    ("ExcludeTransform", ("k", ("n", "x"), "missing"), {}),
    ("ExcludeTransform", ("k",), {"inverse": True}),
    ("SelectTransform", ("k", ("n", "x"), "missing"), {}),
    ("SelectTransform", ("k",), {"keep_rewards": False, "keep_dones": False}),
    ("DeviceCastTransform", ("cpu",), {}),
    ("DeviceCastTransform", ("cpu", "cpu"), {"in_keys": ["k"], "out_keys": [("n", "k")], "in_keys_inv": [("n", "x")]}),
    ("RenameTransform", (["k", ("n", "x")], [("n", "k"), "x"], ["i"], ["k"]), {}),
    ("RenameTransform", (["k", ("n", "x")], [("n", "k"), "x"], ["i"], ["k"]), {"create_copy": True}),
    ("ObservationNorm", (1.5, 0.0), {"in_keys": [("n", "x"), "k"], "in_keys_inv": ["f"]}),
    ("ObservationNorm", (2, 3), {"in_keys": ["k"], "out_keys": ["j"], "standard_normal": True, "in_keys_inv": ["f"]}),
    ("ObservationNorm", (torch.full((2,), 0.5), torch.zeros(2)), {"in_keys": [("n", "x")], "standard_normal": True}),
    ("RewardScaling", (1, 2), {}),
    ("RewardScaling", (0.5, 0.0), {"standard_normal": True}),
    ("RewardScaling", (1.0, torch.tensor([-1.0, 2.0])), {"in_keys": [("n", "x")], "out_keys": ["z"]}),
    ("ToTensorImage", (), {"in_keys": ["image", "drawn"]}),
    ("ToTensorImage", (True, True), {"in_keys": ["drawn"], "out_keys": ["d"], "dtype": torch.float64}),
    ("ToTensorImage", (False,), {"in_keys": ["image", "drawn"], "shape_tolerant": True}),
]


def rows() -> TensorDict:
    x = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    more = {"done": torch.zeros(3, 1, dtype=torch.bool), "reward": torch.rand(3, 1), "f": torch.rand(3)}
    more["image"] = torch.arange(3 * 4 * 5 * 3, dtype=torch.uint8).reshape(3, 4, 5, 3)
    more["drawn"] = torch.rand(3, 5, 4, 2)
    return TensorDict({"n": {"x": x, "y": x + 1}, "k": torch.arange(3), **more}, [3])


@pytest.mark.parametrize(("name", "args", "how"), CASES)
def test_as_theirs_both_ways(name, args, how):
    a, b, td = getattr(ours, name)(*args, **how), getattr(theirs, name)(*args, **how), rows()
    for way in ("forward", "inv"):
        x, y = (dict(getattr(t, way)(td.clone()).items(True, True)) for t in (a, b))
        assert x.keys() == y.keys()
        assert all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


def test_theirs_is_taken_in_eval_mode():
    t = ours.as_transform(theirs.DoubleToFloat(in_keys=[("n", "x")], in_keys_inv=[("n", "y")]))
    assert isinstance(t, ours.ForeignTransform) and not t.theirs.training and t.out_keys == [("n", "x")]
    assert ours.Compose(t).forward(rows())["n", "x"].dtype == torch.float32
    assert ours.as_transform(theirs.ExcludeTransform("k")).out_keys is None


@pytest.mark.parametrize("reduction", ["sum", "max", "min", "mean", "median"])
def test_ranks_and_places_as_their_writer(reduction):
    torch.manual_seed(0)
    rb = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(7), writer=data.TensorDictMaxValueWriter("r", reduction), batch_size=1
    )
    w, heap, size = TensorDictMaxValueWriter("r", reduction), [], 0
    for n in (3, 6, 20, 1, 9):
        td = TensorDict({"r": torch.randn(n, 4)}, [n])
        at = plan(heap, w.rank(td), torch.arange(n).numpy(), size, size, 7)
        size = min(7, size + n)
        mine = [-1] * n
        for slot, row in at.items():
            mine[row] = slot
        assert rb.extend(td).flatten().tolist() == mine


# ---- along time ------------------------------------------------------------------------------------------------------


def same(x, y, close=False) -> bool:
    a, b = dict(x.items(True, True)), dict(y.items(True, True))
    assert a.keys() == b.keys() and x.batch_size == y.batch_size
    assert all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a)
    return all(torch.allclose(a[k], b[k], rtol=1e-5) if close else torch.equal(a[k], b[k]) for k in a)


def played(*batch: int, seed: int = 0, p: float = 0.2) -> TensorDict:
    """Rows of trajectories, of which each "next" frame is the frame of the row after it; the last row of all ends one."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, 3, 2, generator=g)
    after, done = torch.rand(*batch, 3, 2, generator=g), torch.rand(*batch, 1, generator=g) < p
    done[..., -1, :] = True
    t = len(batch) - 1
    goes_on = ~done.narrow(t, 0, batch[-1] - 1)[..., None]
    after.narrow(t, 0, batch[-1] - 1).copy_(
        torch.where(goes_on, x.narrow(t, 1, batch[-1] - 1), after.narrow(t, 0, batch[-1] - 1))
    )
    more = {"done": done, "terminated": done, "reward": torch.rand(*batch, 1, generator=g), "x": after}
    return TensorDict({"x": x, "next": TensorDict(more, batch)}, batch)


@pytest.mark.parametrize("batch", [(17,), (3, 8)])
@pytest.mark.parametrize("gamma", [1.0, 0.9, torch.tensor(0.5)])
def test_rewards_to_go_as_theirs(batch, gamma):
    for how in ({}, {"out_keys": ["to_go"]}):
        a, b = ours.Reward2GoTransform(gamma, **how), theirs.Reward2GoTransform(gamma, **how)
        assert same(a.inv(played(*batch)), b.inv(played(*batch)), close=True)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_several_steps_as_theirs(batch, n):
    a, b, came = ours.MultiStepTransform(n, 0.9), theirs.MultiStepTransform(n, 0.9), 0
    for seed, rows_ in enumerate((2, 1, 9, 4, 6)):
        td = played(*batch, rows_, seed=seed)
        td["next", "done"][..., -1, :] = seed % 2 == 0
        x, y = a.inv(td.clone()), b.inv(td.clone())
        assert (x is None) == (y is None)
        if x is not None:
            came += x.shape[-1]
            assert same(x, y, close=True)
    assert came == 22 - n


@pytest.mark.parametrize("batch", [(13,), (3, 8)])
@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    ("keys", "n"),
    [
        *((k, n) for k in (["x"], [("next", "x")]) for n in (1, 2, 4)),
        (["x", ("next", "x")], 2),
        (["x", ("next", "x")], 4),
    ],
)
@pytest.mark.filterwarnings("ignore:The last dimension")
def test_frames_as_theirs(batch, padding, dim, keys, n):
    how = {"in_keys": keys, "padding": padding, "padding_value": -1.0, "mask_key": "pad"}
    for seed in range(4):
        td = played(*batch, seed=seed)
        x = ours.CatFrames(n, dim, **how).forward(td.clone())
        if (
            len(keys) == 2 and dim == -1
        ):  # theirs joins both only along a frame's first dimension: its frames lie turned
            y = theirs.CatFrames(n, -2, **how).forward(turned(td))
            assert same(x, turned(y))
        else:
            assert same(x, theirs.CatFrames(n, dim, **how).forward(td.clone()))


@pytest.mark.parametrize(("n", "dim"), [(1, -2), (2, -1)])
@pytest.mark.filterwarnings("ignore:The last dimension")
def test_frames_that_theirs_cannot_join(n, dim):
    both = {"in_keys": ["x", ("next", "x")]}
    with pytest.raises((IndexError, RuntimeError)):
        theirs.CatFrames(n, dim, **both).forward(played(13))
    out = ours.CatFrames(n, dim, **both).forward(played(13))
    assert torch.equal(out["next", "x"].unflatten(dim, (n, -1)).select(dim - 1, n - 1), played(13)["next", "x"])


def turned(td: TensorDict) -> TensorDict:
    out = td.clone()
    for key in ("x", ("next", "x")):
        out.set(key, td.get(key).transpose(-1, -2).contiguous())
    return out


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.filterwarnings("ignore:The last dimension")
def test_coming_frames_as_theirs(padding):
    for td in (played(13), played(3, 8), played(3, 8).exclude("next")):
        how = {"in_keys": ["x"], "padding": padding, "future": True, "mask_key": "pad"}
        x, y = (module.CatFrames(3, -1, **how).forward(td.clone()) for module in (ours, theirs))
        assert same(x, y)


def test_burn_in_as_theirs():
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    keys = {"in_keys": ["x", "h"], "out_keys": ["y", ("next", "h")]}
    gru = modules.GRUModule(input_size=4, hidden_size=5, default_recurrent_mode=True, **keys)
    td = TensorDict(
        {"x": torch.randn(2, 9, 4), "h": torch.zeros(2, 9, 1, 5), "is_init": torch.zeros(2, 9, 1, dtype=torch.bool)},
        [2, 9],
    )
    x, y = (module.BurnInTransform([gru], 5).forward(td.clone()) for module in (ours, theirs))
    assert same(x, y) and x["h"][:, 0].abs().sum() > 0
