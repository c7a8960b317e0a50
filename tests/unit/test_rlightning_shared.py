"""A storage is a buffer as any other: found by name, sampled, with priorities and slices; and `BufferView`."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import shmbuf
from shmbuf import (
    Buffer,
    BufferExists,
    BufferNotFound,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ShmStorage,
    SliceSampler,
    StorageLost,
)
from shmbuf.rlightning import BufferView, EnvRet, EpisodeTable, PolicyResponse, Storage, default_postprocess_fn
from tests.unit.helpers_rlightning import episode, make, metas, seen, step, vector

__all__ = ["make"]


def doubled(reward):
    return reward * 2


class TestLearner:
    def test_it_attaches_by_name_and_samples_rows_with_their_numbers(self, make, name):
        s = make(name=name, batch_size=32)
        episode(s, 0, 3), episode(s, 10, 2)
        with shmbuf.attach(name) as rb:
            assert type(rb) is shmbuf.TensorDictReplayBuffer and len(rb) == 5
            batch = rb.sample()
            assert batch.batch_size == (32,) and set(batch["observation"].tolist()) <= {0.0, 1.0, 2.0, 10.0, 11.0}
            assert torch.equal(batch["next_observation"], batch["observation"] + 1)
            first, rows = batch["observation"] < 10, batch["episode", "rows"]
            assert (rows[first] == 3).all() and (rows[~first] == 2).all()
            ids = batch["episode", "id"]
            assert len(set(ids[first].tolist())) == len(set(ids[~first].tolist())) == 1 and len(set(ids.tolist())) == 2

    def test_by_priority(self, make, name):
        s = make(name=name)
        episode(s, 0, 3)
        with shmbuf.attach(name, sampler=PrioritizedSampler(100, alpha=1.0, beta=1.0), batch_size=50) as rb:
            batch = rb.sample()
            batch["td_error"] = (batch["observation"] == 2).float() + 1e-6
            while len(set(batch["observation"].tolist())) < 3:
                batch = rb.sample()
                batch["td_error"] = (batch["observation"] == 2).float() + 1e-6
            rb.update_tensordict_priority(batch)
            assert (rb.sample()["observation"] == 2).all()
            episode(s, 10, 1)  # as important as the most important so far
            assert set(rb.sample()["observation"].tolist()) == {2.0, 10.0}

    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("key", ["td_error", "importance"])
    def test_priorities_may_come_with_the_steps(self, make, name, n, key):
        kw = {} if key == "td_error" else {"priority_key": key}
        how = {"sampler": PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), "batch_size": 200}
        first = make(name=name, env_meta_list=metas(n), **how, **kw)
        for s in (first, Storage.attach(name, env_meta_list=metas(n))):
            for t in range(4):
                e, p = vector(n, t)
                if n == 1:
                    e, p = EnvRet("v", float(t)), PolicyResponse("v", action=t)
                setattr(p, key, torch.full((n, 2) if n > 1 else (2,), 0.0 if t == 1 else 2.0 * (t == 2)))
                s.add_transition(e, p)
            s.truncate_one_episode("v")
        with shmbuf.attach(name) as rb:
            batch = rb.sample()
            assert (batch["observation"] % 100 == 2).all() and len(set(batch["episode", "id"].tolist())) == 2 * n
        first.add_transition(EnvRet("v", e.observation, last_reward=e.last_reward), p)
        setattr(p, key, torch.full_like(getattr(p, key), float("nan")))
        first.add_transition(e, p), first.add_transition(e, p)
        with pytest.raises(ValueError, match=r"(?s)nan.*drop_one_episode\('v'\)"):
            first.truncate_one_episode("v")
        first.drop_one_episode("v")
        assert len(first) == 6 * n
        s.close()

    def test_a_storage_may_be_born_with_a_sampler(self, make):
        s = make(sampler=PrioritizedSampler(100, alpha=0.5, beta=0.5), batch_size=4)
        episode(s, 0, 3)
        assert s.replay_buffer.sample()["priority_weight"].shape == (4,)

    def test_slices_keep_to_an_episode_also_where_no_flag_ended_it(self, make, name):
        s = make(name=name, env_meta_list=metas(8))
        for _ in range(3):
            for t in range(6):
                s.add_transition(*vector(8, t))
            s.truncate_one_episode("v")
        with shmbuf.attach(name, sampler=SliceSampler(slice_len=5), batch_size=50) as rb:
            batch = rb.sample().reshape(-1, 5)
            assert torch.equal(batch["observation"] % 100, torch.arange(5.0).expand(10, 5))
            assert (batch["episode", "id"] == batch["episode", "id"][:, :1]).all()
        with (
            shmbuf.attach(name, sampler=SliceSampler(slice_len=6), batch_size=6) as rb,
            pytest.raises(shmbuf.NotEnoughRows),
        ):
            rb.sample()

    def test_slices_do_not_cross_a_terminal_inside_of_an_episode(self, make, name):
        s = make(name=name)
        for k in range(7):
            step(s, "e", float(k), last_terminated=k == 3)
        s.truncate_one_episode("e")
        with shmbuf.attach(name, sampler=SliceSampler(slice_len=3), batch_size=60) as rb:
            assert {tuple(r) for r in rb.sample()["observation"].reshape(-1, 3).tolist()} == {(0, 1, 2), (3, 4, 5)}

    def test_slices_say_which_ends_are_real(self, make, name):
        s = make(name=name)
        for terminal in (True, False):
            for k in range(5):
                step(s, "e", float(k), last_terminated=terminal and k == 4, last_truncated=not terminal and k == 4)
            s.truncate_one_episode("e")
        for sampler in (SliceSampler(slice_len=2), PrioritizedSliceSampler(slice_len=2, max_capacity=100)):
            with shmbuf.attach(name, sampler=sampler, batch_size=80) as rb:
                batch, end = rb.sample(), torch.tensor([False, True] * 40)
                assert batch["terminated"].any() and batch["truncated"].any()
                assert torch.equal(batch["next", "terminated"], batch["terminated"])
                assert torch.equal(batch["next", "truncated"], end)
                assert torch.equal(batch["next", "done"], end)

    @pytest.mark.parametrize("nested", [False, True])
    def test_n_steps_lead_to_the_last_ones_next_observation(self, make, name, nested):
        s = make(name=name)
        for k in range(6):
            observed = {"a": {"b": float(k)}} if nested else float(k)
            e = EnvRet("e", observed, last_reward=1.0, last_terminated=k == 5, last_truncated=False)
            s.add_transition(e, PolicyResponse("e", action=k, hint={"next": k}))
        s.truncate_one_episode("e")
        with shmbuf.attach(name, sample_unit=NStep(3, 0.5), batch_size=100) as rb:
            batch = rb.sample()
            batch = batch.flatten_keys(".")
            deep = ".a.b" if nested else ""
            t = batch["observation" + deep]
            assert set(t.tolist()) == {0, 1, 2, 3, 4} and torch.equal(batch["action"], t.long())
            assert torch.equal(batch["hint.next"], t.long())
            steps = (5 - t).clamp(max=3)
            assert torch.equal(batch["steps_to_next_obs"], steps.long())
            assert torch.equal(batch["next_observation" + deep], t + steps)
            assert torch.equal(batch["terminated"], t >= 2) and not batch["truncated"].any()
            assert torch.equal(batch["bootstrap_discount"], torch.where(t >= 2, 0.0, 0.5**3))
            assert torch.equal(batch["reward"], torch.tensor([1.0, 1.5, 1.75])[steps.long() - 1])

    def test_n_steps_from_the_rows_of_slices_have_the_flags_of_the_last_step(self, make, name):
        s = make(name=name)
        for k in range(6):
            step(s, "e", float(k), last_terminated=k == 5)
        s.truncate_one_episode("e")
        with shmbuf.attach(name, sampler=SliceSampler(slice_len=2), sample_unit=NStep(3), batch_size=100) as rb:
            batch = rb.sample()
            assert torch.equal(batch["terminated"], batch["observation"] >= 2) and batch["terminated"].any()
            assert batch.get("next", None) is None

    def test_rows_of_an_evicted_episode_are_sampled_until_they_are_overwritten(self, make):
        s = make(4, unit="episode", batch_size=200)
        episode(s, 0, 3), episode(s, 10, 2)
        assert len(s) == 1 and set(s.replay_buffer.sample()["observation"].tolist()) == {1.0, 2.0, 10.0, 11.0}

    def test_at_the_numpy_level(self, make, name):
        s = make(name=name)
        episode(s, 0, 3)
        with Buffer.attach(name) as b:
            rows, _ = b.draw(10)
            assert set(rows) == {
                "observation",
                "next_observation",
                "reward",
                "terminated",
                "truncated",
                "action",
                "episode",
            }
            assert len(b.trajectories()) == 1 and b.trajectories()[0].rows == 3
        assert s.buffer.name == s.name == name


class TestOtherHandles:
    def test_another_process_adds_to_the_same_storage(self, make, name):
        s = make(6, "standard", "episode", name=name, env_meta_list=metas(2), auto_truncate_episode=True)
        t = Storage.attach(name, env_meta_list=metas(2, "w"), reward_preprocessor=doubled)
        assert (t.capacity, t.mode, t.unit, t.auto_truncate_episode) == (6, "standard", "episode", True)
        for k in range(3):
            s.add_transition(*vector(2, k, last_terminated=[0, 1] if k == 2 else []))
            t.add_transition(*vector(2, k, "w", last_terminated=[1] if k == 2 else []))
        assert len(t) == 3 == len(s) and seen(s, "reward") == [[1, 2], [1, 2], [2, 4]] == seen(t, "reward")
        with pytest.raises(RuntimeError, match="Current size is 6"):
            t.truncate_one_episode("w")
        t.clear()
        assert len(s) == 0
        t.truncate_one_episode("w")
        assert seen(s) == [[0, 1]]
        t.close()

    @pytest.mark.parametrize("mode", ["circular", "standard"])
    def test_a_storage_that_was_destroyed_takes_nothing(self, make, name, mode):
        s = make(10, mode, name=name)
        episode(s, 0, 2)
        step(s, "e", 0.0), step(s, "e", 1.0)
        shmbuf.destroy(name, force=True)
        make(10, mode, name=name)  # another one of that name
        with pytest.raises(StorageLost):
            s.truncate_one_episode("e")

    def test_it_can_be_told_that_the_name_may_exist(self, make, name):
        s = make(10, name=name)
        with pytest.raises(BufferExists):
            make(10, name=name)
        t = make(10, name=name, exists="attach")
        episode(t, 0, 2)
        assert seen(s) == [0, 1]
        for other in ({"mode": "standard"}, {"unit": "episode"}):
            with pytest.raises(BufferExists, match="asked for"):
                make(10, name=name, exists="attach", **other)
        with pytest.raises(BufferExists, match="capacity"):
            make(11, name=name, exists="attach")

    def test_other_buffers_are_no_storages(self, make, name):
        with pytest.raises(BufferNotFound):
            Storage.attach(name)
        rb = shmbuf.TensorDictReplayBuffer(storage=ShmStorage(10, name=name, drain="caller"))
        for how in (lambda: Storage.attach(name), lambda: make(10, name=name, exists="attach")):
            with pytest.raises(BufferExists, match="no storage of this kind"):
                how()
        with pytest.raises(TypeError, match=r"postprocess.*functions are"):
            Storage.attach(name, postprocess=doubled)
        rb.close()

    def test_it_travels_as_its_name_and_functions(self, make):
        s = make(10, unit="episode", reward_preprocessor=doubled, env_meta_list=metas(1, "e"))
        step(s, "e", 7.0)
        t = pickle.loads(pickle.dumps(s))
        step(t, "e", 0.0), step(t, "e", 1.0)
        t.truncate_one_episode("e")
        assert seen(s) == [[0]] and seen(s, "reward") == [[2]]  # not the step that had been waiting in s
        with pytest.raises(KeyError):
            step(t, "x", 0.0)
        rb = pickle.loads(pickle.dumps(s.replay_buffer))
        assert len(rb) == 1
        rb.close(), t.close()

    def test_ids_of_episodes_never_repeat(self, make, name):
        s = make(name=name)
        t = Storage.attach(name)
        for k in range(3):
            episode(s, k, 1), episode(t, k, 1)
        with Buffer.attach(name) as b:
            assert len(set(b.gather(np.arange(6))["episode"]["id"].tolist())) == 6
        t.close()

    def test_it_closes_as_a_context(self, name):
        with Storage(10, name=name) as s:
            episode(s, 0, 2)
        assert s.buffer.closed
        with Storage.attach(name) as t:
            assert seen(t) == [0, 1] and "circular" in repr(t)
        shmbuf.destroy(name)

    def test_a_table_says_which_storage(self, make):
        stores, table = [make(), make()], EpisodeTable(2, ["a", "b", "c"])
        for env_id in "abc":
            for k in range(2):
                stores[table.get_storage_idx_for_env(env_id)].add_transition(
                    EnvRet(env_id, float(k + ord(env_id))), PolicyResponse(env_id, action=k)
                )
        for i, s in enumerate(stores):
            s.truncate_episodes(table.get_envs_for_storage(i))
        assert [seen(s) for s in stores] == [[97, 99], [98]]


class TestView:
    def test_it_has_a_length_and_items(self, make):
        s = make()
        episode(s, 0, 4)
        v = BufferView(s.get_data())
        assert len(v) == v.capacity == 4 and v[1]["observation"] == 1 and v[-1]["observation"] == 3
        assert v[1:3]["observation"].tolist() == [1, 2] and v["action"].tolist() == [0, 10, 20, 30]
        assert [float(r["observation"]) for r in v] == [0, 1, 2, 3]
        with pytest.raises(IndexError):
            v[4]
        with pytest.raises(TypeError):
            v[0] = 1

    def test_of_nothing_of_all_and_of_episodes(self):
        assert len(BufferView(TensorDict({"a": torch.zeros(0)}, [0]))) == 0
        v = BufferView(TensorDict({"a": torch.zeros(3, 2)}, [3, 2]))
        assert len(v) == 3 and v[0].batch_size == (2,) and v[:].batch_size == (3, 2)

    def test_a_data_loader_takes_it(self, make):
        s = make()
        episode(s, 0, 4)
        batches = list(DataLoader(BufferView(s.get_data()), batch_size=2, collate_fn=torch.stack))
        assert [b["observation"].tolist() for b in batches] == [[0, 1], [2, 3]]


def test_importing_shmbuf_imports_none_of_it():
    code = "import sys, shmbuf; print([m for m in ('torch', 'shmbuf.rlightning') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_default_functions_are_a_storages_defaults():
    import inspect

    import shmbuf.rlightning as r

    parameters = inspect.signature(Storage).parameters
    for name in ("env_ret_preprocess_fn", "policy_resp_preprocess_fn", "preprocess_fn", "postprocess_fn"):
        assert parameters[name].default is getattr(r, f"default_{name}")
    for name in ("obs_preprocessor", "reward_preprocessor"):
        assert parameters[name].default(5) == 5
    assert parameters["postprocess_fn"].default is default_postprocess_fn
    assert list(parameters)[:12] == [
        "capacity",
        "mode",
        "unit",
        "env_meta_list",
        "device",
        "obs_preprocessor",
        "reward_preprocessor",
        "env_ret_preprocess_fn",
        "policy_resp_preprocess_fn",
        "preprocess_fn",
        "postprocess_fn",
        "auto_truncate_episode",
    ]
