"""Devices, names, scales and images: what each changes on the way out and on the way in, and what it refuses."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from shmbuf import DeviceCastTransform, ObservationNorm, RenameTransform, RewardScaling, ToTensorImage
from shmbuf.transforms import Compose


def two() -> TensorDict:
    return TensorDict({"a": torch.tensor([1.0, 2.0]), "n": {"b": torch.tensor([[3.0], [4.0]])}}, [2])


def names(td) -> set:
    return set(td.keys(True, True))


# "meta" is a device that every machine has: what lies there has a shape and no values.


def test_rows_go_whole_to_a_device_and_back_to_the_cpu():
    t = DeviceCastTransform("meta")
    out = t.forward(two())
    assert out.device.type == out["a"].device.type == out["n", "b"].device.type == "meta"
    assert t.inv(two()).device == torch.device("cpu")
    back = DeviceCastTransform("cpu", "meta")
    assert back.forward(two())["a"].tolist() == [1.0, 2.0] and back.inv(two())["n", "b"].device.type == "meta"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_only_the_keys_named_go_to_a_device(device):
    td = two().to(device) if device else two()
    t = DeviceCastTransform("meta", in_keys=[("n", "b")], out_keys=["c"])
    out = t.forward(td.copy())
    assert out["c"].device.type == "meta" and out["n", "b"].device.type == "cpu" and out.device is None
    assert t.inv(td) is td
    t = DeviceCastTransform("cpu", "meta", in_keys_inv=["a"])
    stored = t.inv(td)
    assert stored["a"].device.type == "meta" and stored["n", "b"].device.type == "cpu"
    assert td["a"].device.type == "cpu" and td.device == (torch.device(device) if device else None)
    assert t.forward(td.copy())["a"].tolist() == [1.0, 2.0]


def test_keys_get_other_names_and_the_callers_keep_theirs():
    t = RenameTransform(["a", ("n", "b")], [("n", "a"), "b"], ["x"], ["a"])
    out = t.forward(two())
    assert names(out) == {("n", "a"), "b"} and out["n", "a"].tolist() == [1.0, 2.0]
    td = two()
    stored = t.inv(td)
    assert names(stored) == {"x", ("n", "b")} and stored["x"] is td["a"] and names(td) == {"a", ("n", "b")}
    assert RenameTransform(["a"], ["c"]).inv(td) is td


def test_a_copy_keeps_the_old_name():
    out = RenameTransform(["a", "a", "n"], ["c", "d", "m"], create_copy=True).forward(two())
    assert names(out) == {"a", "c", "d", ("n", "b"), ("m", "b")} and out["c"] is out["a"]
    out.set(("m", "z"), torch.zeros(2))
    assert ("n", "z") not in names(out)


@pytest.mark.parametrize(
    "keys",
    [
        (["a", "b"], ["b", "c"]),
        (["a"], ["a"]),
        (["a", "b"], ["c", "c"]),
        (["a", "a"], ["b", "c"]),
        ([("n", "a")], [("n", ("a",))]),
        ([], [], ["a", "b"], ["b", "a"]),
    ],
)
def test_names_whose_order_would_matter_are_refused(keys):
    with pytest.raises(ValueError, match="order would matter"):
        RenameTransform(*keys)


def test_a_missing_name_changes_nothing():
    td = two()
    with pytest.raises(KeyError, match="RenameTransform: no key 'z' among 'a'"):
        RenameTransform(["a", "z"], ["c", "d"]).forward(td)
    assert names(td) == {"a", ("n", "b")}


@pytest.mark.parametrize("standard", [False, True])
def test_an_observation_is_scaled_and_back(standard):
    t = ObservationNorm(1.0, 4.0, ["a"], in_keys_inv=["a"], standard_normal=standard)
    scaled, back = [5.0, 9.0], [0.0, 0.25]
    assert t.forward(two())["a"].tolist() == (back if standard else scaled)
    assert t.inv(two())["a"].tolist() == (scaled if standard else back)
    assert ObservationNorm(1.0, 4.0, ["a"]).inv(two())["a"].tolist() == [1.0, 2.0]


def test_only_a_plain_scale_is_clamped():
    assert ObservationNorm(0, 0, ["a"]).scale.item() == pytest.approx(1e-6)
    assert ObservationNorm(0, 0, ["a"], eps=0.5).scale.item() == 0.5
    assert ObservationNorm(torch.zeros(2), torch.zeros(2), ["a"], eps=0.5).scale.tolist() == [0.0, 0.0]
    assert RewardScaling(0, torch.tensor([0.0, 2.0])).scale.tolist() == pytest.approx([1e-6, 2.0])
    assert RewardScaling(0, -3.0).scale.item() == pytest.approx(1e-6)


def test_what_an_observation_is_scaled_by_must_be_given():
    with pytest.raises(ValueError, match="needs loc, in_keys"):
        ObservationNorm(scale=1.0)


def test_a_reward_is_scaled_on_the_way_out_only():
    td = TensorDict({"reward": torch.tensor([1.0, 2.0])}, [2])
    assert RewardScaling(1.0, 4.0).forward(td.copy())["reward"].tolist() == [5.0, 9.0]
    assert RewardScaling(1.0, 4.0, standard_normal=True).forward(td.copy())["reward"].tolist() == [0.0, 0.25]
    assert RewardScaling(1.0, 4.0).inv(td)["reward"].tolist() == [1.0, 2.0]
    out = RewardScaling(1.0, 4.0, ["reward"], [("n", "r")]).forward(td.copy())
    assert out["n", "r"].tolist() == [5.0, 9.0] and out["reward"].tolist() == [1.0, 2.0]


def test_scales_are_state_and_pickle():
    a, b = Compose(RewardScaling(1.0, 2.0, ["a"])), Compose(RewardScaling(5.0, 6.0, ["a"]))
    b.load_state_dict(pickle.loads(pickle.dumps(a)).state_dict())
    assert b.forward(two())["a"].tolist() == [3.0, 5.0]
    with pytest.raises(KeyError, match="a state of 'loc' and 'scale'"):
        b[0].load_state_dict({"loc": 1})


def images(*shape, dtype=torch.uint8) -> TensorDict:
    n = torch.Size(shape).numel()
    return TensorDict({"pixels": (torch.arange(n) % 256).reshape(shape).to(dtype)}, [])


def test_an_image_is_turned_and_divided_unless_it_is_floating():
    td = images(2, 4, 5, 3)
    out = ToTensorImage().forward(td.copy())["pixels"]
    assert out.shape == (2, 3, 4, 5) and out.dtype == torch.float32
    assert torch.equal(out[1, 2, 3, 4], td["pixels"][1, 3, 4, 2] / 255)
    floating = images(2, 4, 5, 3, dtype=torch.float64)
    out = ToTensorImage(dtype=torch.float64).forward(floating.copy())["pixels"]
    assert out.dtype == torch.float64 and out[1, 2, 3, 4] == floating["pixels"][1, 3, 4, 2]
    assert ToTensorImage(True).forward(floating.copy())["pixels"].max() <= 1
    assert ToTensorImage(False).forward(td.copy())["pixels"].max() == 119
    assert ToTensorImage().inv(td) is td


def test_only_an_image_of_three_dimensions_gets_another():
    assert ToTensorImage(unsqueeze=True).forward(images(4, 5, 3))["pixels"].shape == (1, 3, 4, 5)
    assert ToTensorImage(unsqueeze=True).forward(images(2, 4, 5, 3))["pixels"].shape == (2, 3, 4, 5)
    assert ToTensorImage().forward(images(4, 5, 3))["pixels"].shape == (3, 4, 5)


def test_a_tolerant_one_turns_only_three_channels():
    assert ToTensorImage(shape_tolerant=True).forward(images(4, 5, 1))["pixels"].shape == (4, 5, 1)
    assert ToTensorImage(shape_tolerant=True).forward(images(4, 5, 3))["pixels"].shape == (3, 4, 5)
    with pytest.raises(ValueError, match=r"an image of shape \(5, 3\)"):
        ToTensorImage().forward(images(5, 3))
