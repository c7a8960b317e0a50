"""Steps become episodes: when they are visible, pairing, truncation, environments that step together."""

import numpy as np
import pytest
import torch

from shmbuf import SchemaError
from shmbuf.rlightning import EnvMeta, EnvRet, PolicyResponse, Storage, default_postprocess_fn
from shmbuf.rlightning.steps import VectorSteps
from tests.unit.helpers_rlightning import episode, make, metas, seen, step, vector

__all__ = ["make"]


class TestVisibility:
    def test_only_truncated_episodes_are_stored(self, make):
        s = make()
        for k in range(4):
            step(s, "e", float(k))
            assert len(s) == 0
        s.truncate_one_episode("e")
        assert len(s) == 3
        assert seen(s) == [0, 1, 2] and seen(s, "next_observation") == [1, 2, 3]
        assert seen(s, "reward") == [1, 2, 3] and seen(s, "action") == [0, 10, 20]
        assert set(s.get_data().keys()) == {
            "observation",
            "next_observation",
            "reward",
            "terminated",
            "truncated",
            "action",
        }

    def test_episodes_of_several_environments_do_not_mix(self, make):
        s = make()
        for k in range(3):
            step(s, "a", float(k))
            step(s, "b", float(10 + k))
        s.truncate_episodes(["b", "a"])
        assert seen(s) == [10, 11, 0, 1]

    def test_a_pair_of_different_environments_is_an_error(self, make):
        s = make()
        with pytest.raises(ValueError, match=r"Mismatched env_id.*'a'.*'b'"):
            s.add_transition(EnvRet("a", 1.0), PolicyResponse("b", action=1))
        with pytest.raises(KeyError):
            s.truncate_one_episode("a")

    def test_also_where_a_custom_function_does_not_look(self, make):
        s = make(preprocess_fn=lambda d, e, p, *rest: {"observation": 1.0})
        with pytest.raises(ValueError, match="Mismatched"):
            s.add_transition(EnvRet("a", 1.0), PolicyResponse("b"))

    def test_what_was_handed_over_may_be_written_again(self, make):
        s, obs = make(), np.zeros(2, "f4")
        for k in range(3):
            obs[:] = k
            s.add_transition(EnvRet("e", obs), PolicyResponse("e", action=1))
        s.truncate_one_episode("e")
        assert seen(s) == [[0, 0], [1, 1]]

    def test_a_step_of_one_row_short_makes_no_rows_and_is_counted(self, make):  # rlightning: lost, or "Null Interval"
        for unit in ("transition", "episode"):
            s = make(unit=unit)
            step(s, "e", 0.0)
            s.truncate_one_episode("e")
            assert len(s) == 0 and s.counters["episodes_too_short"] == 1

    def test_adding_restamps_the_env_ret(self, make):
        s, e = make(), EnvRet("e", 1.0, ts_env_sent_ns=5)
        s.add_transition(e, PolicyResponse("e", action=1))
        assert e.ts_env_sent_ns > 5


class TestPairing:
    def test_an_env_ret_and_then_its_response_are_one_step(self, make):
        s = make()
        for k in range(3):
            s.add_data_async(EnvRet("e", float(k), last_reward=float(k)))
            s.add_data_async(PolicyResponse("e", action=k))
        s.truncate_one_episode("e")
        assert seen(s) == [0, 1] and seen(s, "action") == [0, 1] and seen(s, "reward") == [1, 2]
        assert not any(s.counters.values())

    def test_an_env_ret_alone_stores_nothing(self, make):
        s = make(auto_truncate_episode=True)
        for k in range(2):
            s.add_data_async(EnvRet("e", float(k), last_terminated=k == 1))
            assert len(s) == 0
            s.add_data_async(PolicyResponse("e", action=k))
        assert len(s) == 1  # the end is judged when the last step is complete

    def test_other_items_are_an_error(self, make):
        with pytest.raises(TypeError, match=r"EnvRet or a PolicyResponse.*dict"):
            make().add_data_async({})

    def test_a_second_env_ret_replaces_the_first_counted_and_warned(
        self, make
    ):  # rlightning loses the first in silence
        s = make()
        s.add_data_async(EnvRet("e", 0.0))
        with pytest.warns(RuntimeWarning, match="'e'.*replaces"):
            s.add_data_async(EnvRet("e", 7.0))
        s.add_data_async(PolicyResponse("e", action=1))
        s.add_data_async(EnvRet("e", 8.0))
        s.add_data_async(PolicyResponse("e", action=2))
        s.truncate_one_episode("e")
        assert seen(s) == [7.0] and s.counters["env_ret_replaced"] == 1

    def test_a_response_to_nothing_is_refused_and_counted(
        self, make
    ):  # rlightning then drops all other keys of the episode
        s = make()
        with pytest.raises(ValueError, match="no EnvRet came before it"):
            s.add_data_async(PolicyResponse("e", action=1))
        for k in range(2):
            s.add_data_async(EnvRet("e", float(k)))
            s.add_data_async(PolicyResponse("e", action=k))
        s.truncate_one_episode("e")
        assert seen(s) == [0] and s.counters["policy_resp_without_env_ret"] == 1

    def test_a_second_response_is_refused_and_counted(self, make):  # rlightning stores the second one twice
        s = make()
        for k in range(2):
            s.add_data_async(EnvRet("e", float(k)))
            s.add_data_async(PolicyResponse("e", action=k))
            with pytest.raises(ValueError, match="has one already"):
                s.add_data_async(PolicyResponse("e", action=99))
        s.truncate_one_episode("e")
        assert seen(s, "action") == [0] and s.counters["policy_resp_duplicate"] == 2

    def test_an_env_ret_older_than_the_last_is_taken_counted_and_warned(self, make):
        s = make()
        s.add_data_async(EnvRet("e", 0.0, ts_env_sent_ns=100))
        s.add_data_async(PolicyResponse("e", action=0))
        with pytest.warns(RuntimeWarning, match="'e'.*older"):
            s.add_data_async(EnvRet("e", 1.0, ts_env_sent_ns=50))
        s.add_data_async(PolicyResponse("e", action=1))
        s.truncate_one_episode("e")
        assert seen(s) == [0] and s.counters["env_ret_out_of_order"] == 1

    def test_a_whole_step_replaces_one_that_waits_counted_and_warned(self, make):
        s = make()
        s.add_data_async(EnvRet("e", 5.0))
        with pytest.warns(RuntimeWarning, match="'e'.*whole step replaces"):
            step(s, "e", 0.0)
        step(s, "e", 1.0)
        with pytest.raises(ValueError, match="has one already"):
            s.add_data_async(PolicyResponse("e", action=1))
        s.truncate_one_episode("e")
        assert seen(s) == [0] and s.counters["env_ret_replaced"] == 1

    def test_after_a_response_that_was_refused_the_right_one_may_come(self, make):
        s = make()
        for k in range(2):
            s.add_data_async(EnvRet("e", float(k)))
            with pytest.raises(SchemaError, match="'x'"):
                s.add_data_async(PolicyResponse("e", action=k, x="text"))
            s.add_data_async(PolicyResponse("e", action=k))
        s.truncate_one_episode("e")
        assert seen(s) == [0] and "x" not in set(s.get_data().keys())

    def test_environments_do_not_take_each_others_responses(self, make):
        s = make()
        s.add_data_async(EnvRet("a", 1.0))
        with pytest.raises(ValueError, match="'b'"):
            s.add_data_async(PolicyResponse("b", action=1))
        s.add_data_async(PolicyResponse("a", action=1))

    def test_an_env_ret_that_waits_at_the_end_begins_the_next_episode(self, make):
        s = make()
        for k in range(3):
            s.add_data_async(EnvRet("e", float(k)))
            if k < 2:
                s.add_data_async(PolicyResponse("e", action=k))
        with pytest.warns(RuntimeWarning, match="'e' was truncated while an EnvRet waits.*begins the next"):
            s.truncate_one_episode("e")
        s.truncate_one_episode("e")  # nothing was running
        assert s.counters["env_ret_left_at_end"] == 1
        s.add_data_async(PolicyResponse("e", action=2))
        s.add_data_async(EnvRet("e", 3.0))
        s.add_data_async(PolicyResponse("e", action=3))
        s.truncate_one_episode("e")
        assert seen(s) == [0, 2] and s.counters["env_ret_left_at_end"] == 1

    def test_one_that_waits_at_the_end_can_be_dropped(self, make):
        s = make()
        step(s, "e", 0.0), s.add_data_async(EnvRet("e", 1.0))
        with pytest.warns(RuntimeWarning, match="drop_one_episode"):
            s.truncate_one_episode("e")
        assert s.counters["episodes_too_short"] == 1
        s.drop_one_episode("e")
        with pytest.raises(ValueError, match="PolicyResponse, but"):
            s.add_data_async(PolicyResponse("e", action=1))
        s.add_data_async(EnvRet("f", 1.0))
        s.drop_one_episode("f")
        with pytest.raises(ValueError, match="no EnvRet came before it"):
            s.add_data_async(PolicyResponse("f", action=1))

    def test_what_waits_for_its_response_may_be_written_again(self, make):
        s, obs = make(), np.zeros(2, "f4")
        for k in range(2):
            obs[:] = k
            s.add_data_async(EnvRet("e", obs))
            obs[:] = 99
            s.add_data_async(PolicyResponse("e", action=k))
        s.truncate_one_episode("e")
        assert seen(s, "observation") == [[0, 0]] and seen(s, "next_observation") == [[1, 1]]


class TestTruncation:
    def test_by_id_by_object_and_by_list(self, make):
        s = make()
        for env_id in "abcd":
            step(s, env_id, 0.0), step(s, env_id, 1.0)
        s.truncate_one_episode("a")
        s.truncate_one_episode(EnvRet("b", 0.0))
        s.truncate_episodes([PolicyResponse("c"), "d"])
        assert len(s) == 4

    def test_one_running_episode_can_be_dropped(self, make):
        s = make()
        episode(s, 0, 2)
        for env_id in "ef":
            step(s, env_id, 7.0), step(s, env_id, 8.0)
        s.drop_one_episode(EnvRet("e", 0.0))
        s.truncate_episodes(["e", "f"])
        step(s, "e", 3.0), step(s, "e", 4.0)
        s.truncate_one_episode("e")
        assert seen(s) == [0, 1, 7, 3] and not any(s.counters.values())
        with pytest.raises(KeyError, match="no step of this environment"):
            s.drop_one_episode("x")
        with pytest.raises(TypeError):
            s.drop_one_episode(5)

    def test_of_many_environments_one_or_all_can_be_dropped(self, make):
        s = make(3, "standard", env_meta_list=metas(3), auto_truncate_episode=True)
        for t in range(2):
            s.add_transition(*vector(3, t, last_terminated=[0] if t else []))
        s.add_transition(*vector(3, 2))
        with pytest.raises(RuntimeError, match="Current size is 1"):
            s.add_transition(*vector(3, 3, last_terminated=[0, 1, 2]))  # 1 + 3 + 3 rows
        s.drop_one_episode("v/1")
        with pytest.raises(RuntimeError, match="Cannot push 4 items"):
            s.add_transition(*vector(3, 0))
        s.drop_one_episode("v/2")
        s.add_transition(*vector(3, 0)), s.add_transition(*vector(3, 1))
        assert seen(s) == [0, 2]
        s.drop_one_episode("v")
        s.truncate_one_episode("v")
        s.add_transition(*vector(3, 0))
        assert seen(s) == [0, 2]

    def test_a_storage_that_is_closed_takes_nothing(self, make):
        s = make(env_meta_list=[*metas(2), EnvMeta("e")])
        step(s, "e", 0.0), s.add_data_async(EnvRet("e", 1.0)), s.add_transition(*vector(2, 0))
        s.close()
        for how in (
            lambda: step(s, "e", 1.0),
            lambda: s.add_transition(*vector(2, 1)),
            lambda: s.add_data_async(EnvRet("e", 2.0)),
            lambda: s.add_data_async(PolicyResponse("e", action=1)),
            lambda: s.truncate_one_episode("e"),
            lambda: s.truncate_episodes(["v"]),
            lambda: s.drop_one_episode("e"),
            lambda: s.add_episode({"a": torch.zeros(2)}),
            lambda: len(s),
        ):
            with pytest.raises(ValueError, match="closed"):
                how()

    def test_what_is_no_id_is_an_error(self, make):
        with pytest.raises(TypeError, match="int"):
            make().truncate_one_episode(5)

    def test_an_id_never_seen_is_a_key_error_and_one_that_was_flushed_is_not(self, make):
        s = make(auto_truncate_episode=True)
        step(s, "e", 0.0), step(s, "e", 1.0, last_truncated=True)
        s.truncate_one_episode("e")  # rlightning: KeyError
        assert len(s) == 1
        with pytest.raises(KeyError, match="nobody"):
            s.truncate_one_episode("nobody")

    def test_of_a_list_with_a_stranger_none_is_truncated(self, make):  # rlightning truncates those before it
        s = make()
        step(s, "a", 0.0), step(s, "a", 1.0)
        with pytest.raises(KeyError, match="nobody"):
            s.truncate_episodes(["a", "nobody"])
        assert len(s) == 0
        s.truncate_episodes(["a"])
        assert len(s) == 1

    def test_flags_end_nothing_unless_asked(self, make):
        s = make()
        for k in range(3):
            step(s, "e", float(k), last_terminated=k == 1)
        assert len(s) == 0
        s.truncate_one_episode("e")
        assert seen(s, "terminated") == [True, False]

    @pytest.mark.parametrize("flag", ["last_terminated", "last_truncated"])
    def test_either_flag_ends_an_episode_if_asked(self, make, flag):
        s = make(auto_truncate_episode=True)
        for k in range(5):
            step(s, "a", float(k), **{flag: k == 2})
            step(s, "b", float(10 + k))
        assert seen(s) == [0, 1]
        s.truncate_episodes(["a", "b"])
        assert seen(s) == [0, 1, 3, 10, 11, 12, 13]

    def test_a_chain_that_drops_the_flags_never_ends_an_episode(self, make):
        s = make(auto_truncate_episode=True, env_ret_preprocess_fn=lambda d, e, o, r: {"observation": e.observation})
        for k in range(3):
            step(s, "e", float(k), last_terminated=True)
        assert len(s) == 0


class TestTogether:
    def test_each_ones_episode_ends_by_itself(self, make):
        s, sizes = make(env_meta_list=metas(3), auto_truncate_episode=True), []
        for t in range(4):
            s.add_transition(*vector(3, t, last_terminated=[0] if t == 2 else [], last_truncated=[2] if t == 3 else []))
            sizes.append(len(s))
        assert sizes == [0, 0, 2, 5]
        assert seen(s) == [0, 1, 200, 201, 202] and seen(s, "next_observation") == [1, 2, 201, 202, 203]
        assert seen(s, "action") == [0, 1, 2000, 2001, 2002] and seen(s, "reward") == [1, 2, 1, 2, 3]
        s.truncate_one_episode("v/1")
        assert seen(s)[5:] == [100, 101, 102]
        s.truncate_one_episode("v")  # what is left of them: rlightning loses some and raises
        assert len(s) == 8 and s.counters["episodes_too_short"] == 1

    def test_otherwise_they_end_at_once_one_after_another(self, make):
        s = make(env_meta_list={"v": EnvMeta("v", num_envs=3)}, unit="episode")
        for t in range(3):
            s.add_transition(*vector(3, t, last_terminated=[1] if t == 1 else []))
        assert len(s) == 0
        with pytest.raises(KeyError, match="v/1"):
            s.truncate_one_episode("v/1")
        s.truncate_one_episode("v")
        assert len(s) == 3 and seen(s) == [[0, 1], [100, 101], [200, 201]]
        assert seen(s, "terminated") == [[False, False], [True, False], [False, False]]

    def test_they_may_come_in_halves(self, make):
        s = make(env_meta_list=metas(2), auto_truncate_episode=True)
        for t in range(3):
            for half in vector(2, t, last_truncated=[1] if t == 2 else []):
                s.add_data_async(half)
        assert seen(s) == [100, 101] and seen(s, "action") == [1000, 1001]

    @pytest.mark.parametrize("bad", [np.zeros(4, "f4"), np.float32(0), np.zeros((1, 3), "f4")])
    def test_a_leaf_of_another_number_is_an_error_that_changes_nothing(self, make, bad):
        s = make(env_meta_list=metas(3))
        s.add_transition(*vector(3, 0))
        with pytest.raises(SchemaError, match=r"'observation'.*expected .3"):
            e, p = vector(3, 1)
            e.observation = bad
            s.add_transition(e, p)
        s.add_transition(*vector(3, 1))
        s.truncate_one_episode("v")
        assert seen(s) == [0, 100, 200]

    def test_after_a_reset_defaults_stand_for_all(self, make):
        s = make(env_meta_list=metas(2), auto_truncate_episode=True)
        for start in (0, 10):
            s.add_transition(EnvRet("v", np.array([start, 100 + start], "f4")), vector(2, start)[1])
            s.add_transition(*vector(2, start + 1, last_truncated=[0, 1]))
        assert seen(s) == [0, 100, 10, 110] and seen(s, "reward") == [1, 1, 11, 11]

    def test_a_sub_environments_id_is_one_environment_of_its_own(self, make):
        s = make(env_meta_list=metas(3))
        step(s, "v/client", 0.0), step(s, "v/client", 1.0)
        s.truncate_one_episode("v/client")
        assert len(s) == 1

    def test_an_id_that_no_meta_has_is_a_key_error_with_the_whole_id(self, make):
        with pytest.raises(KeyError, match="'w/1' not found"):
            step(make(env_meta_list=metas(3)), "w/1", 0.0)

    def test_flags_of_a_chunk_of_actions_end_an_episode_if_any_does(self, make):
        s = make(env_meta_list=metas(2), auto_truncate_episode=True)
        for t in range(2):
            flags = np.zeros((2, 4), bool)
            flags[1, 2] = t == 1
            zeros = np.zeros((2, 4), bool)
            s.add_transition(
                EnvRet("v", np.arange(2) + 10.0 * t, np.zeros((2, 4), "f4"), flags, zeros),
                PolicyResponse("v", action=torch.zeros(2)),
            )
        assert seen(s) == [1.0]


class TestVectorSteps:
    @pytest.mark.parametrize("separate, often", [(True, 0.02), (True, 0.3), (False, 0.02)])
    def test_their_rows_are_what_the_default_function_makes_of_each(self, separate, often):
        """Random ends over many more steps than the memory has room for, against lists of steps."""
        n, rng = 5, np.random.default_rng(7)
        fast, lists, made, expected = VectorSteps(n, default_postprocess_fn, separate), [[] for _ in range(n)], [], []

        def finish(envs):
            for e in fast.episodes(fast.segments(envs)):
                leaves, at = e.take(0, len(e.lengths)), 0
                for k in e.lengths:
                    made.append({c.key: a[at : at + k].tolist() for c, a in zip(e.columns, leaves, strict=True)})
                    at += k
            fast.forget(envs)
            for i in envs:
                steps, lists[i] = lists[i], []
                if len(steps) > 1:
                    rows = default_postprocess_fn({k: [x[k] for x in steps] for k in steps[0]})
                    flat = {
                        ("observation", "o"): rows["observation"].pop("o"),
                        ("next_observation", "o"): rows["next_observation"].pop("o"),
                    }
                    flat |= {(k,): v for k, v in rows.items() if not isinstance(v, dict)}
                    expected.append({k: v.tolist() for k, v in flat.items()})

        for t in range(400):
            o, r = rng.integers(0, 1000, (n, 2)), rng.random(n).astype("f4")
            flags = rng.random(n) < often
            whole = {
                "observation": {"o": o},
                "last_reward": r,
                "last_terminated": flags,
                "last_truncated": np.zeros(n, bool),
                "info": {"text": "x"},
                "last_extra": o[:, 0],
                "action": torch.from_numpy(o * 2),
            }
            done = np.flatnonzero(fast.append(whole))
            for i in range(n):
                lists[i].append(
                    {
                        "observation": {"o": o[i]},
                        "last_reward": r[i],
                        "last_terminated": flags[i],
                        "last_truncated": np.False_,
                        "info": {},
                        "last_extra": o[i, 0],
                        "action": o[i] * 2,
                    }
                )
            if len(done):
                finish(done)
            if (often < 0.1 and t == 250) or (not separate and t % 70 == 69):
                finish(np.arange(n))
        finish(np.arange(n))
        assert len(made) > 15 and made == expected
        assert fast._room < 100 or often < 0.1  # so the memory was gone around

    @pytest.mark.parametrize("running", [1, 2, 3])
    def test_a_step_that_looks_otherwise_is_refused_at_any_time(self, running):
        def made(**other):
            o = {"a": np.zeros((3, 2), "f4"), "b": {"c": torch.zeros(3)}}
            return {
                "observation": o,
                "last_reward": np.zeros(3, "f4"),
                "action": torch.zeros(3, dtype=torch.int64),
                **other,
            }

        steps, o = VectorSteps(3, default_postprocess_fn, False), made()["observation"]
        for _ in range(running):
            steps.append(made())
        for bad, text in [
            (made(more=torch.zeros(3)), "'more'.*new"),
            (made(observation={**o, "d": torch.zeros(3)}), "'d'.*new"),
            (made(observation={"a": o["a"], "b": {"c": torch.zeros(3), "d": torch.zeros(3)}}), "'d'.*new"),
            (made(observation={"a": o["a"], "b": torch.zeros(3)}), "missing"),
            (made(action=torch.zeros(3)), "'action'.*float32"),
            (made(action=np.zeros(3, "u8")), "'action'.*uint64"),
            (made(action=torch.zeros(3, 1, dtype=torch.int64)), r"'action'.*int64\[1\]"),
            (made(action=torch.zeros(4, dtype=torch.int64)), "'action'.*dimension mismatch"),
        ]:
            with pytest.raises(SchemaError, match=text):
                steps.append(bad)
        steps.append(made(action=torch.ones(3, dtype=torch.int64), info={"x": 1}))
        steps.append({k: made()[k] for k in ("action", "observation", "last_reward")})  # in another order
        steps.append(made(last_reward=torch.zeros(3, requires_grad=True)))
        steps.append(made(last_reward=np.zeros(3, ">f4")))
        assert steps.lengths().tolist() == [running + 4] * 3
        (e,) = steps.episodes(steps.segments(np.arange(3)))
        rows = dict(zip([c.key for c in e.columns], e.take(0, 3), strict=True))
        assert rows[("action",)].tolist() == ([0] * running + [1, 0, 0]) * 3


class TestCustomFunctions:
    def test_they_are_called_in_rlightnings_order(self, make):
        calls = []

        def noted(name, f):
            return lambda *a: (calls.append(name), f(*a))[1]

        s = make(
            obs_preprocessor=noted("obs", lambda o: o + 0.5),
            reward_preprocessor=noted("rew", lambda r: r * 2),
            postprocess_fn=noted("post", default_postprocess_fn),
        )
        episode(s, 0, 1)
        assert calls == ["obs", "rew", "obs", "rew", "post"]
        assert seen(s) == [0.5] and seen(s, "reward") == [2.0]

    def test_preprocess_returns_the_step(self, make):
        s = make(preprocess_fn=lambda d, e, p, *rest: {"observation": e.observation, "mine": p.action + 1})
        episode(s, 0, 2)
        assert set(s.get_data().keys()) == {"observation", "next_observation", "mine"} and seen(s, "mine") == [1, 11]

    def test_postprocess_gets_lists_of_all_steps_with_what_is_no_tensor(self, make):
        got = {}

        def post(lists):
            got.update(lists)
            return {"k": torch.arange(3), "nested": {"x": np.zeros((3, 2), "f4")}}

        s = make(postprocess_fn=post)
        for k in range(3):
            step(s, "e", float(k), info={"text": f"t{k}"})
        s.truncate_one_episode("e")
        assert [len(v) for v in got.values()] == [3] * len(got) and got["info"][2] == {"text": "t2"}
        assert seen(s, "k") == [0, 1, 2] and s.get_data()["nested", "x"].shape == (3, 2)

    def test_of_many_at_once_it_gets_steps_of_all(self, make):
        def post(lists):
            assert [tuple(o.shape) for o in lists["observation"]] == [(3,)] * 3
            return {
                "o": torch.stack(lists["observation"])[:-1],
                "text": torch.tensor([[i["n"]] * 3 for i in lists["info"]])[1:],
            }

        s = make(env_meta_list=metas(3), postprocess_fn=post, unit="episode")
        for t in range(3):
            e, p = vector(3, t)
            e.info = {"n": t, "text": "x"}
            s.add_transition(e, p)
        s.truncate_one_episode("v")
        assert seen(s, "o") == [[0, 1], [100, 101], [200, 201]] and seen(s, "text") == [[1, 2]] * 3

    def test_of_many_that_end_one_by_one_it_gets_each_ones(self, make):
        def post(lists):
            return {"o": torch.stack(lists["observation"])[1:]}

        s = make(env_meta_list=metas(3), postprocess_fn=post, auto_truncate_episode=True)
        for t in range(3):
            s.add_transition(*vector(3, t, last_terminated=[0, 2] if t == 2 else []))
        assert seen(s, "o") == [1, 2, 201, 202]

    def test_what_is_no_function_is_an_error(self):
        with pytest.raises(TypeError, match="postprocess_fn is a function, not int"):
            Storage(10, postprocess_fn=5)
