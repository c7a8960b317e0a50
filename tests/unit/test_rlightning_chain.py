"""From an environment's return and a policy's response to rows: the data types, and the default functions."""

import copy
import pickle
import time

import numpy as np
import pytest
import torch

from shmbuf.rlightning import (
    EnvMeta,
    EnvRet,
    PolicyResponse,
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)
from shmbuf.rlightning.chain import identity
from shmbuf.rlightning.types import BFloat16

DEFAULTS = (identity, identity, default_env_ret_preprocess_fn, default_policy_resp_preprocess_fn)


class TestTypes:
    def test_env_meta_has_rlightnings_fields_all_none(self):
        assert EnvMeta._fields == ("env_id", "action_space", "observation_space", "num_envs")
        assert EnvMeta() == EnvMeta(None, None, None, None)

    def test_an_env_ret_has_rlightnings_defaults(self):
        e = EnvRet("a", 1.0)
        assert EnvRet.fields() == ("observation", "last_reward", "last_terminated", "last_truncated", "info")
        assert e.to_dict() == dict(
            observation=1.0, last_reward=0.0, last_terminated=False, last_truncated=False, info={}
        )
        assert hash(e) == hash("a")
        assert e.info is not EnvRet("a", 1.0).info

    def test_extra_keys_come_at_the_top_and_may_not_be_a_fields(self):
        assert EnvRet("a", 1.0, _extra={"depth": 2}).to_dict()["depth"] == 2
        with pytest.raises(KeyError, match="observation"):
            EnvRet("a", 1.0, _extra={"observation": 2}).to_dict()

    def test_an_env_ret_is_copied_and_a_policy_response_changed_in_place(self):
        e = EnvRet("a", {"rgb": torch.ones(2)}, _extra={"x": torch.ones(1)})
        n = e.numpy()
        assert n is not e and isinstance(n.observation["rgb"], np.ndarray) and isinstance(n._extra["x"], np.ndarray)
        assert isinstance(e.observation["rgb"], torch.Tensor)
        p = PolicyResponse("a", action=torch.ones(2))
        assert p.numpy() is p and isinstance(p.action, np.ndarray)
        assert p.cpu() is p and isinstance(p.action, torch.Tensor)

    def test_bfloat16_goes_through_numpy_and_true_uint16_stays_uint16(self):
        values = torch.tensor([1.5, -2.25]).bfloat16()
        n = EnvRet("a", values, last_reward=np.array([40000], np.uint16)).numpy()
        assert n.observation.dtype == np.uint16 and isinstance(n.observation, BFloat16)
        n = pickle.loads(pickle.dumps(n))
        back = n.cpu()
        assert back.observation.dtype == torch.bfloat16 and back.observation.tolist() == [1.5, -2.25]
        assert back.last_reward.dtype == torch.uint16 and back.last_reward.tolist() == [40000]

    def test_a_policy_response_is_what_it_was_given_in_that_order(self):
        p = PolicyResponse("a", value=1, action=2)
        assert list(p.to_dict().items()) == [("value", 1), ("action", 2)]
        for q in (pickle.loads(pickle.dumps(p)), copy.copy(p)):
            assert q.to_dict() == p.to_dict() and q.env_id == "a" and q.ts_policy_sent_ns == p.ts_policy_sent_ns

    def test_latencies_are_of_each_ones_own_stamp(self):  # rlightning reads the environment's for both, and gets 0
        e, p = EnvRet("a", 1.0), PolicyResponse("a")
        assert e.compute_sent_latency(e.ts_env_sent_ns + 2_000_000_000) == 2.0
        assert p.compute_sent_latency(p.ts_policy_sent_ns + 3_000_000_000) == 3.0
        assert e.compute_sent_latency(e.ts_env_sent_ns - 5) == 0.0
        e.ts_env_sent_ns = None
        assert e.compute_sent_latency() == 0.0
        before = time.time_ns()
        e.mark_env_sent(), p.mark_policy_sent()
        assert before <= e.ts_env_sent_ns <= p.ts_policy_sent_ns


class TestPreprocess:
    def test_observation_and_reward_go_through_their_preprocessors(self):
        out = default_env_ret_preprocess_fn({}, EnvRet("a", 2.0, last_reward=3.0), lambda o: o * 10, lambda r: -r)
        assert out["observation"] == 20.0 and out["last_reward"] == -3.0

    def test_the_policy_wins_over_keys_of_the_environment(self):
        out = default_preprocess_fn({}, EnvRet("a", 1.0, _extra={"x": 1}), PolicyResponse("a", x=2), *DEFAULTS)
        assert out["x"] == 2

    def test_each_alone_is_enough(self):
        assert default_preprocess_fn({}, EnvRet("a", 1.0), None, *DEFAULTS)["observation"] == 1.0
        assert default_preprocess_fn({}, EnvRet("a", 1.0)) == default_preprocess_fn(
            {}, EnvRet("a", 1.0), None, *DEFAULTS
        )
        assert default_preprocess_fn({"k": 0}, None, PolicyResponse("a", x=2), *DEFAULTS) == {"k": 0, "x": 2}

    def test_neither_or_of_different_environments_is_an_error(self):
        with pytest.raises(ValueError, match="At least one of"):
            default_preprocess_fn({}, None, None, *DEFAULTS)
        with pytest.raises(ValueError, match=r"Mismatched env_id.*'a'.*'b'"):
            default_preprocess_fn({}, EnvRet("a", 1.0), PolicyResponse("b"), *DEFAULTS)

    def test_other_types_are_an_error(self):
        with pytest.raises(TypeError, match="EnvRet, not dict"):
            default_env_ret_preprocess_fn({}, {}, identity, identity)
        with pytest.raises(TypeError, match="PolicyResponse, not dict"):
            default_policy_resp_preprocess_fn({}, {})


class TestPostprocess:
    def test_t_plus_1_steps_are_t_rows(self):
        out = default_postprocess_fn(
            {
                "observation": [0.0, 1.0, 2.0, 3.0],
                "last_reward": [0.0, 1.0, 2.0, 3.0],
                "last_terminated": [False] * 4,
                "last_truncated": [False] * 4,
                "info": [{}] * 4,
                "action": [0, 10, 20, 30],
            }
        )
        assert {k: v.tolist() for k, v in out.items()} == {
            "observation": [0, 1, 2],
            "next_observation": [1, 2, 3],
            "reward": [1, 2, 3],
            "terminated": [False] * 3,
            "truncated": [False] * 3,
            "action": [0, 10, 20],
        }
        assert [out[k].dtype for k in ("observation", "terminated", "action")] == [
            torch.float32,
            torch.bool,
            torch.int64,
        ]

    def test_an_extra_key_named_last_x_gives_both(self):
        out = default_postprocess_fn({"last_x": [0, 1, 2]})
        assert out["x"].tolist() == [1, 2] and out["last_x"].tolist() == [0, 1]

    def test_keys_with_info_in_their_name_are_dropped(self):
        assert list(default_postprocess_fn({"my_info_2": [1, 2], "a": [1, 2]})) == ["a"]

    def test_arrays_keep_their_dtypes_and_nesting_stays(self):  # rlightning fails on nested values
        values = [np.full(2, i, np.uint16) for i in range(3)]
        out = default_postprocess_fn({"observation": [{"d": v, "b": torch.ones(1).bfloat16()} for v in values]})
        assert out["next_observation"]["d"].dtype == torch.uint16 and out["next_observation"]["d"].tolist() == [
            [1, 1],
            [2, 2],
        ]
        assert out["observation"]["b"].dtype == torch.bfloat16
        assert default_postprocess_fn({"r": [np.float64(1), np.float64(2)]})["r"].dtype == torch.float64

    def test_what_a_reset_says_of_the_step_before_it_need_not_fit(self):
        out = default_postprocess_fn({"last_reward": [0.0, np.float32(1), np.float32(2)]})
        assert out["reward"].tolist() == [1, 2] and out["reward"].dtype == torch.float32

    def test_values_that_differ_are_an_error_that_names_the_key(self):
        with pytest.raises(ValueError, match=r"'a'.*float32.*step 1"):
            default_postprocess_fn({"a": [torch.ones(2), torch.ones(3), torch.ones(2)]})
        with pytest.raises(ValueError, match=r"'a'.*str"):
            default_postprocess_fn({"a": ["x", "y"]})
