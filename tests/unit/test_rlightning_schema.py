"""What rows of a rlightning storage are made of: steps that do not fit are refused whole, when they are added."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from shmbuf import SchemaError
from shmbuf.rlightning import EnvMeta, EnvRet, PolicyResponse
from tests.unit.helpers_rlightning import episode, make, metas, seen, step, vector

__all__ = ["make"]


@tensorclass
class Seen:
    a: TensorDict


BAD = [
    (EnvRet("e", np.zeros(2)), {"action": 1}, r"'observation': got float64\[2\], expected float32\[2\]"),
    (EnvRet("e", np.zeros(3, "f4")), {"action": 1}, r"'observation': got float32\[3\]"),
    (EnvRet("e", np.zeros(2, "f4")), {"action": 1.5}, r"'action': got the float 1.5, expected int64"),
    (EnvRet("e", np.zeros(2, "f4")), {"action": 1, "value": 2.0}, "'value' is not in the schema"),
    (EnvRet("e", np.zeros(2, "f4")), {}, "'action' is missing"),
    (EnvRet("e", np.zeros(2, "f4"), _extra={"last_x": 1}), {"action": 1}, "'x' is not in the schema"),
    (EnvRet("e", {"a": np.zeros(2, "f4")}), {"action": 1}, r"\('observation', 'a'\) is not in the schema"),
]


class TestSchema:
    @pytest.mark.parametrize(
        "other, text",
        [
            ({"a": torch.zeros(2)}, "'b' is missing"),  # rlightning: what was there stays there
            ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, "'c' is not in the schema"),
            ({"a": torch.zeros(2), "b": torch.zeros(2).double()}, "'b': got float64"),  # rlightning: converted
            ({"a": torch.zeros(2), "b": torch.zeros(2, 1)}, r"'b': got float32\[1\]"),
        ],
    )
    def test_rows_of_another_kind_are_refused_whole(self, make, other, text):
        s = make()
        s.add_episode({"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(SchemaError, match=text):
            s.add_episode(other)
        assert seen(s, "b") == [1, 1]

    def test_steps_that_drift_are_refused_when_they_are_added(self, make):
        s = make()
        step(s, "e", 0.0), step(s, "e", 1.0)
        for bad, text in [
            ((EnvRet("e", np.zeros(2)), PolicyResponse("e", action=1)), "'observation': got float64.*a number"),
            ((EnvRet("e", 2.0), PolicyResponse("e")), "'action'.*missing"),
            ((EnvRet("e", 2.0), PolicyResponse("e", action=1, value=2)), "'value'.*new"),
        ]:
            with pytest.raises(SchemaError, match=text):
                s.add_transition(*bad)
        s.truncate_one_episode("e")
        assert seen(s) == [0]

    def test_of_many_environments_too(self, make):
        s = make(env_meta_list=metas(2))
        s.add_transition(*vector(2, 0)), s.add_transition(*vector(2, 1))
        e, p = vector(2, 2)
        e.observation = e.observation.astype("f8")
        with pytest.raises(SchemaError, match=r"'observation'.*got float64.*float32"):
            s.add_transition(e, p)
        e, p = vector(2, 2)
        del p.action
        with pytest.raises(SchemaError, match=r"'action'.*missing"):
            s.add_transition(e, p)
        s.truncate_one_episode("v")
        assert seen(s) == [0, 100]

    @pytest.mark.parametrize("bad, answer, text", BAD)
    @pytest.mark.parametrize("running", [0, 1, 2])
    def test_a_step_that_does_not_fit_what_is_stored_is_refused_at_once(self, make, running, bad, answer, text):
        def good(k):
            s.add_transition(EnvRet("e", np.full(2, k, "f4"), last_reward=1.0), PolicyResponse("e", action=k))

        s = make()
        good(0), good(1)
        s.truncate_one_episode("e")
        for k in range(running):
            good(k)
        with pytest.raises(SchemaError, match=text if running == 0 else "nothing was taken|Nothing was stored"):
            s.add_transition(bad, PolicyResponse("e", **answer))
        s.add_data_async(EnvRet("e", np.full(2, 7, "f4"), last_reward=1.0))
        if "action" not in answer or answer != {"action": 1}:
            with pytest.raises(SchemaError):
                s.add_data_async(PolicyResponse("e", **answer))
        s.add_data_async(PolicyResponse("e", action=7))
        good(8)
        s.truncate_one_episode("e")
        assert seen(s, "action") == [0, *range(running), 7]

    @pytest.mark.parametrize("running", [0, 1])
    def test_of_many_environments_a_step_that_does_not_fit_is_refused_at_once(self, make, running):
        s = make(env_meta_list=metas(2))
        for _ in range(2):
            s.add_transition(*vector(2, 0)), s.add_transition(*vector(2, 1))
            s.truncate_one_episode("v")
        for t in range(running):
            s.add_transition(*vector(2, t))
        for change in ("observation", "last_reward", "action", "more"):
            e, p = vector(2, running)
            of = e if hasattr(e, change) else p
            setattr(of, change, np.zeros(2, "f8"))
            if change == "last_reward" and not running:
                continue  # what led to a reset says nothing
            with pytest.raises(SchemaError, match=change.removeprefix("last_")):
                s.add_transition(e, p)
        for t in range(running, 3):
            s.add_transition(*vector(2, t))
        s.truncate_one_episode("v")
        assert seen(s) == [0, 100, 0, 100, 0, 1, 100, 101]

    def test_numbers_become_what_is_stored_if_they_are_such_numbers(self, make):
        s = make()
        episode(s, 0, 2)  # rewards are float32, actions int64, flags bool
        for k, reward in enumerate([0, 1, np.float64(0.5), np.int32(2), True]):
            flag = [0, 1, np.True_, np.int64(0), 1.0][k]
            s.add_transition(EnvRet("e", k, last_reward=reward, last_terminated=flag), PolicyResponse("e", action=True))
        for bad in (1 << 63, 0.5, "x", np.longdouble(1), 1j):
            with pytest.raises(SchemaError, match="'action'"):
                s.add_transition(EnvRet("e", 5.0), PolicyResponse("e", action=bad))
        with pytest.raises(SchemaError, match="'last_terminated': got the int 2, expected bool"):
            s.add_transition(EnvRet("e", 5.0, last_terminated=2), PolicyResponse("e", action=1))
        s.truncate_one_episode("e")
        assert seen(s, "reward") == [1, 2, 1, 0.5, 2, 1] and seen(s, "action")[2:] == [1] * 4
        assert seen(s, "terminated")[2:] == [True, True, False, True]
        assert s.get_data()["reward"].dtype == torch.float32

    def test_the_first_episode_decides_what_numbers_are(self, make):
        s = make()
        for k in range(3):
            e = EnvRet("e", [float(k), 2.0], last_reward=np.float64(k / 2), last_terminated=k // 2, last_truncated=0)
            s.add_transition(e, PolicyResponse("e", action=np.uint8(k), value=[k, 0.5][k % 2]))
        with pytest.raises(SchemaError, match=r"'last_truncated': got the float 0\.5, expected bool"):
            s.add_transition(EnvRet("e", [0.0, 0.0], last_truncated=0.5), PolicyResponse("e", action=1, value=1))
        with pytest.raises(SchemaError, match="'action': got the int 9223372036854775808"):
            s.add_transition(EnvRet("e", [0.0, 0.0]), PolicyResponse("e", action=1 << 63, value=1))
        s.truncate_one_episode("e")
        types = {k: str(v.dtype).removeprefix("torch.") for k, v in s.get_data().items()}
        assert types == {
            "observation": "float32",
            "next_observation": "float32",
            "reward": "float64",
            "terminated": "bool",
            "truncated": "bool",
            "action": "uint8",
            "value": "float32",
        }
        assert seen(s, "reward") == [0.5, 1.0] and seen(s, "terminated") == [False, True]
        for k in range(2):  # no longer numpy's
            e = EnvRet("e", [float(k), 2.0], last_reward=0.1)
            s.add_transition(e, PolicyResponse("e", action=7, value=0))
        s.truncate_one_episode("e")
        assert seen(s, "reward")[2] == 0.1 and seen(s, "action") == [0, 1, 7]
        with pytest.raises(SchemaError, match="'action': got the int 256, expected uint8"):
            s.add_transition(EnvRet("e", [0.0, 0.0]), PolicyResponse("e", action=256, value=0))

    def test_flags_that_end_no_trajectory_are_warned_of(self, make):
        s = make(env_meta_list=metas(2))
        for t in range(2):
            e, p = vector(2, t)
            e.last_terminated = e.last_terminated.astype("i8")
            s.add_transition(e, p)
        with pytest.warns(RuntimeWarning, match="'terminated' is int64.*bool or uint8"):
            s.truncate_one_episode("v")

    def test_an_episode_that_others_rows_made_unfit_can_be_dropped(self, make):
        s = make()
        for k in range(2):
            s.add_transition(EnvRet("d", np.zeros(2)), PolicyResponse("d", action=k))
        s.add_episode({k: torch.zeros(1) for k in ("observation", "next_observation", "reward", "action")})
        for _ in range(2):
            with pytest.raises(SchemaError, match=r"drop_one_episode\('d'\)"):
                s.truncate_one_episode("d")
            with pytest.raises(SchemaError, match="nothing was taken"):
                s.add_transition(EnvRet("d", np.zeros(2)), PolicyResponse("d", action=2))
        s.drop_one_episode("d")
        s.truncate_one_episode("d")
        assert len(s) == 1

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_dropped_episode_decides_nothing(self, make, n):
        s = make(env_meta_list=metas(n))
        shape = (n, 3) if n > 1 else (3,)
        for dtype in ("f8", "f4"):
            s.drop_one_episode("v") if dtype == "f4" else None
            for k in range(2):
                flags = {f: np.zeros(shape[:-1], bool) for f in ("last_terminated", "last_truncated")}
                e = EnvRet("v", np.full(shape, k, dtype), last_reward=np.zeros(shape[:-1], dtype), **flags)
                s.add_transition(e, PolicyResponse("v", action=np.zeros(shape, dtype)))
        s.truncate_one_episode("v")
        assert {v.dtype for k, v in s.get_data().items() if k not in ("terminated", "truncated")} == {torch.float32}

    def test_the_name_of_the_storages_own_numbers_is_refused_at_once(self, make):
        s = make(env_meta_list=[*metas(2), EnvMeta("e")])
        with pytest.raises(SchemaError, match="'episode' is where the storage keeps its own"):
            s.add_transition(EnvRet("e", 0.0, _extra={"last_episode": 1}), PolicyResponse("e"))
        e, p = vector(2, 0)
        p.episode = np.zeros(2)
        with pytest.raises(SchemaError, match="'episode' is where the storage keeps its own"):
            s.add_transition(e, p)

    def test_an_observation_may_be_a_tensorclass(self, make):
        s = make()
        for k in range(3):
            o = Seen(a=TensorDict({"b": torch.full((2,), k)}, []), batch_size=[])
            s.add_transition(EnvRet("e", o), PolicyResponse("e", action=k))
        s.truncate_one_episode("e")
        assert s.get_data()["next_observation", "a", "b"].tolist() == [[1, 1], [2, 2]]

    def test_bfloat16_true_uint16_and_nested_keys_survive(self, make):
        s = make(env_meta_list=metas(2), auto_truncate_episode=True)
        deep = torch.tensor([[1.5, 2.5], [-3.0, 4.0]]).bfloat16()
        depth = np.array([40000, 65535], np.uint16)
        for t in range(2):
            e, p = vector(2, t, last_terminated=[0, 1] if t else [])
            e.observation = {"rgb": {"left": np.full((2, 4), 7, np.uint8)}, "depth": depth}
            p.forward_inputs = {"pixels": deep, "mask": torch.tensor([True, False])}
            (s.add_transition(e.numpy(), p.numpy()) if t else s.add_transition(e, p))
        data = s.get_data()
        assert data["forward_inputs", "pixels"].dtype == torch.bfloat16
        assert torch.equal(data["forward_inputs", "pixels"], deep)
        for key in ("observation", "next_observation"):
            assert data[key, "depth"].dtype == torch.uint16 and data[key, "depth"].tolist() == [40000, 65535]
            assert data[key, "rgb", "left"].shape == (2, 4)
        assert data["forward_inputs", "mask"].tolist() == [True, False]
