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
