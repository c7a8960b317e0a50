"""What stays of episodes in a storage of some capacity, how it is counted, read and forgotten."""

import logging
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import CommitPending, PrioritizedSampler, RingFull, SchemaError
from shmbuf.rlightning import EnvRet, PolicyResponse, Storage
from shmbuf.rlightning.index import EpisodeIndex
from tests.unit.helpers_rlightning import episode, make, metas, seen, step, vector

__all__ = ["make"]


def rows(*values, key="observation"):
    return {key: torch.tensor(values)}


class TestCircular:
    def test_rows_wrap_and_come_oldest_first(self, make):
        s = make(5)
        s.add_episode(rows(0, 1, 2))
        s.add_episode(rows(3, 4, 5, 6))
        assert seen(s) == [2, 3, 4, 5, 6] and len(s) == 5
        assert s.replay_buffer[:]["observation"].tolist() == [5, 6, 2, 3, 4]  # where they lie

    def test_the_size_after_a_wrap_is_exact(self, make):  # rlightning: 9
        s = make(10)
        s.add_episode(rows(*range(8)))
        s.add_episode(rows(*range(8, 11)))
        assert s.size == s.get_size() == len(s) == 10 and seen(s) == list(range(1, 11))

    @pytest.mark.parametrize("unit", ["transition", "episode"])
    def test_of_an_episode_longer_than_the_capacity_the_last_rows_stay(self, make, unit):
        s = make(4, unit=unit)
        s.add_episode(rows(90, 91))
        with pytest.warns(UserWarning, match="7 rows.*capacity of 4"):
            s.add_episode(rows(*range(7)))
        assert np.ravel(seen(s)).tolist() == [3, 4, 5, 6]
        assert len(s) == (4 if unit == "transition" else 1)

    def test_of_many_episodes_as_many_whole_ones_as_fit_stay(self, make):
        s = make(4, unit="episode")
        with pytest.warns(UserWarning, match="9 rows"):
            s.add_episode({"observation": torch.arange(9).reshape(3, 3).T}, num_envs=3)
        assert seen(s) == [[6, 7, 8]]

    @pytest.mark.parametrize(
        "capacity, lengths, left",
        [
            (6, [3, 2, 4], [2, 4]),  # rlightning: [4]
            (6, [3, 3, 1], [3, 1]),
            (10, [3, 2, 4, 2], [2, 4, 2]),
            (6, [3, 3], [3, 3]),
            (6, [2, 6], [6]),
        ],
    )
    def test_an_episode_that_loses_a_row_is_gone_whole_and_no_other(self, make, capacity, lengths, left):
        s, first = make(capacity, unit="episode"), 0
        for n in lengths:
            episode(s, first, n)
            first += n
        expected, at = [], first - sum(left)
        for n in left:
            expected.append([float(v) for v in range(at, at + n)])
            at += n
        assert len(s) == len(left) and seen(s) == expected

    def test_episodes_come_in_the_order_they_were_stored(self, make):  # rlightning: by the hash of their places
        s = make(100, unit="episode")
        for k in range(20):
            episode(s, 10 * k, 2)
            assert len(s) == k + 1
        assert seen(s) == [[10.0 * k, 10.0 * k + 1] for k in range(20)]

    def test_long_random_use_against_a_list(self, make):
        rng, s, stored = np.random.default_rng(3), make(40, unit="episode"), []
        for k in range(150):
            n = int(rng.integers(1, 12))
            stored.append([100 * k + i for i in range(n)])
            s.add_episode(rows(*stored[-1]))
            while sum(map(len, stored)) > 40:
                stored.pop(0)
            if rng.random() < 0.05:
                s.clear()
                stored = []
            if rng.random() < 0.3:
                assert len(s) == len(stored)
                assert [np.ravel(x).tolist() for x in seen(s)] == stored

    def test_an_episode_above_half_the_ring_is_found_whole(self, make):
        s = make(3000, unit="episode", ring_bytes=16384)
        s.add_episode(rows(*range(1000)))
        s.add_episode(rows(*range(5)))
        assert len(s) == 2 and seen(s) == [list(range(1000)), list(range(5))]

    def test_rows_of_an_episode_that_came_between_others_rows_are_found(self, make):
        """As two processes leave them whose episodes are longer than half the ring, and one that was killed half-way."""
        s = make(100, unit="episode")
        s.add_episode(rows(0))

        def put(episode, of, *values):
            n = len(values)
            own = {"id": np.full(n, episode), "rows": np.full(n, of, "i4")}
            s.buffer.extend({"observation": np.array(values), "episode": own})

        put(7, 3, 70, 71), put(8, 2, 80)
        assert len(s) == 1
        put(7, 3, 72), put(9, 4, 90, 91), put(8, 2, 81)
        assert seen(s) == [[0], [70, 71, 72], [80, 81]]
        assert s[1]["observation"].tolist() == [70, 71, 72]


class TestStandard:
    @pytest.mark.parametrize("mode", ["standard", "fixed"])
    @pytest.mark.parametrize("unit", ["transition", "episode"])
    def test_what_does_not_fit_is_refused_whole_also_when_full(
        self, make, mode, unit
    ):  # rlightning overwrites when full
        s = make(5, mode, unit)
        s.add_episode(rows(0, 1, 2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"Cannot push 3 items to storage of capacity 5. Current size is 3."):
                s.add_episode(rows(7, 8, 9))
        s.add_episode(rows(3, 4))
        with pytest.raises(RuntimeError, match=r"Cannot push 1 items to storage of capacity 5. Current size is 5."):
            s.add_episode(rows(9))
        assert [v for x in seen(s) for v in np.ravel(x)] == [0, 1, 2, 3, 4]

    def test_an_episode_that_does_not_fit_waits_for_room(self, make):
        s = make(3, "standard")
        episode(s, 0, 2)
        step(s, "e", 5.0), step(s, "e", 6.0), step(s, "e", 7.0)
        with pytest.raises(RuntimeError, match="Cannot push 2"):
            s.truncate_one_episode("e")
        s.clear()
        s.truncate_one_episode("e")
        assert seen(s) == [5, 6]

    def test_many_environments_fit_together_or_not_at_all(self, make):
        s = make(5, "standard", env_meta_list=metas(3))
        for t in range(3):
            s.add_transition(*vector(3, t))
        with pytest.raises(RuntimeError, match="Cannot push 6"):
            s.truncate_one_episode("v")
        assert len(s) == 0

    def test_other_words_are_an_error(self):
        with pytest.raises(ValueError, match=r"mode='ring'.*circular"):
            Storage(5, "ring")
        with pytest.raises(ValueError, match="Unknown unit type 'row'"):
            Storage(5, unit="row")
        with pytest.raises(ValueError, match="device='mps'"):
            Storage(5, device="mps")
        with pytest.raises(ValueError, match="capacity=0"):
            Storage(0)
        with pytest.raises(ValueError, match="num_envs=0"):
            Storage(5, env_meta_list=metas(0))


class TestNoRoom:
    """A pin lets a full buffer take nothing: pushes run into a full ring."""

    def held_up(self, make, monkeypatch, **kw):
        monkeypatch.setattr("shmbuf.rlightning.pushing._CHUNK_BYTES", 1024)
        s = make(1000, unit="episode", ring_bytes=16384, timeout=0.3, env_meta_list=metas(50), **kw)
        for t in range(21):
            s.add_transition(*vector(50, t))
        s.truncate_one_episode("v")
        assert len(s) == 50
        return s, s.buffer.pin(seconds=None)

    def test_what_found_none_goes_first_with_the_next_push(self, make, monkeypatch):
        s, pin = self.held_up(make, monkeypatch)
        for t in range(11):
            s.add_transition(*vector(50, 100 + t))
        with pytest.raises(CommitPending, match=r"the other [0-9]+ wait in this process"):
            s.truncate_one_episode("v")
        for t in range(3):
            s.add_transition(*vector(50, 200 + t))
        with pytest.raises(RingFull, match="rows of a push before this one still wait"):
            s.truncate_one_episode("v")
        pin.release()
        s.truncate_one_episode("v")
        expected = [[100.0 * i + 100 + t for t in range(10)] for i in range(50)]
        expected += [[100.0 * i + 200 + t for t in range(2)] for i in range(50)]
        assert seen(s)[-100:] == expected and len(s) == 120

    def test_an_episode_longer_than_the_ring_is_completed(self, make, monkeypatch):
        s, pin = self.held_up(make, monkeypatch)
        names = list(s.get_data()[0].keys())
        long = {k: torch.arange(700).to(s.get_data()[0][k].dtype) for k in names}
        with pytest.raises(CommitPending, match=r"the other [0-9]+ wait"):
            s.add_episode(long)
        pin.release()
        s.add_episode({k: v[:3] for k, v in long.items()})
        assert [len(e) for e in seen(s)][-2:] == [700, 3] and seen(s)[-2] == list(range(700))

    def test_what_waits_keeps_its_priorities(self, make, monkeypatch):
        monkeypatch.setattr("shmbuf.rlightning.pushing._CHUNK_BYTES", 1024)
        sampler = PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)
        s = make(1000, ring_bytes=16384, timeout=0.3, sampler=sampler, batch_size=50)
        s.add_episode({"a": torch.arange(1000), "td_error": torch.zeros(1000)})
        pin, p = s.buffer.pin(seconds=None), torch.zeros(700)
        p[690] = 1.0
        with pytest.raises(CommitPending, match=r"the other [0-9]+ wait"):
            s.add_episode({"a": torch.arange(700), "td_error": p})
        p[:] = 5.0  # the caller's again
        pin.release()
        s.add_episode({"a": torch.arange(1), "td_error": torch.zeros(1)})
        assert set(s.replay_buffer.sample()["a"].tolist()) == {690}

    def test_an_episode_that_ended_meanwhile_stays_one(self, make, monkeypatch):
        s = make(3, "standard", auto_truncate_episode=True)
        step(s, "e", 0.0), step(s, "e", 1.0), step(s, "e", 2.0, last_terminated=True)
        step(s, "e", 10.0), step(s, "e", 11.0)
        with pytest.raises(RuntimeError, match="Cannot push 2"):
            step(s, "e", 12.0, last_terminated=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Cannot push 2"):
                step(s, "e", 20.0)
        s.clear()
        step(s, "e", 20.0), step(s, "e", 21.0, last_terminated=True)
        assert seen(s) == [10, 11, 20] and seen(s, "next_observation") == [11, 12, 21]

    def test_of_many_that_end_one_by_one_too(self, make):
        s = make(2, "standard", auto_truncate_episode=True, env_meta_list=metas(2))
        s.add_transition(*vector(2, 0)), s.add_transition(*vector(2, 1))
        s.add_transition(*vector(2, 2, last_terminated=[0]))
        with pytest.raises(RuntimeError, match="Cannot push 3"):
            s.add_transition(*vector(2, 3, last_terminated=[1]))
        with pytest.raises(RuntimeError, match="Cannot push 3"):
            s.add_transition(*vector(2, 4))
        s.clear()
        with pytest.raises(RuntimeError, match="Cannot push 3"):
            s.truncate_one_episode("v/1")
        assert len(s) == 0 and s.counters["episodes_too_short"] == 0


class TestAddEpisode:
    @pytest.mark.parametrize("unit, size", [("transition", 6), ("episode", 3)])
    def test_of_n_environments_it_is_n_episodes(self, make, unit, size):
        s = make(unit=unit)
        data = torch.tensor([[0, 10, 20], [1, 11, 21]])
        s.add_episode(TensorDict({"observation": data, "x": {"y": data.float()[..., None]}}, [2]), num_envs=3)
        assert len(s) == size and np.ravel(seen(s)).tolist() == [0, 1, 10, 11, 20, 21]
        assert s.get_data()["x", "y"].dtype == torch.float32

    def test_arrays_and_lists_of_episodes_are_taken_too(self, make):
        s = make(unit="episode")
        s.add_episode({"observation": np.arange(3)})
        s.add_episode([rows(1, 2), rows(3)])
        assert seen(s) == [[0, 1, 2], [1, 2], [3]]

    def test_it_goes_past_the_chain(self, make):
        s = make(preprocess_fn=None.__class__, postprocess_fn=None.__class__)
        s.add_episode(rows(1, 2))
        assert seen(s) == [1, 2]

    @pytest.mark.parametrize(
        "bad, text",
        [
            ({"a": torch.zeros(3), "b": torch.zeros(2)}, "different numbers of rows.*'a': 3, 'b': 2"),
            ({"a": torch.tensor(1.0)}, "'a': none"),
            ({}, "without keys"),
            ({"a": ["x"]}, "'a'"),
            ({"episode": torch.zeros(3)}, "'episode'.*own numbers"),
        ],
    )
    def test_what_is_no_episode_is_an_error(self, make, bad, text):
        s = make()
        with pytest.raises(SchemaError, match=text):
            s.add_episode(bad)
        assert len(s) == 0 and s.buffer.schema is None

    def test_other_types_are_an_error(self, make):
        with pytest.raises(TypeError, match="not int"):
            make().add_episode(5)
        with pytest.raises(ValueError, match="num_envs=0"):
            make().add_episode(rows(1), num_envs=0)
        with pytest.raises(SchemaError, match=r"expected .rows, 3"):
            make().add_episode({"a": torch.zeros(2, 4)}, num_envs=3)


class TestReading:
    def test_unequal_episodes_are_a_list_equal_ones_a_tensordict(self, make):
        s = make(unit="episode")
        episode(s, 0, 2), episode(s, 10, 2)
        data = s.get_data()
        assert isinstance(data, TensorDict) and data.batch_size == (2, 2)
        episode(s, 20, 3)
        assert [d.batch_size[0] for d in s.get_data()] == [2, 2, 3]

    def test_an_empty_storage_gives_no_rows(self, make):  # rlightning: ValueError
        for unit, shape in (("transition", (0,)), ("episode", (0, 0))):
            s = make(unit=unit)
            assert s.get_data().batch_size[0] == 0 and len(s) == 0
            episode(s, 0, 2)
            s.clear()
            assert s.get_data().batch_size == shape and s.get_data()["observation"].shape == shape

    def test_it_is_a_copy(self, make):
        s = make()
        episode(s, 0, 2)
        s.get_data()["observation"][:] = 99
        s[0]["observation"][...] = 99
        assert seen(s) == [0, 1]

    def test_rows_by_index(self, make):
        s = make(3)
        s.add_episode(rows(*range(2))), s.add_episode(rows(*range(2, 5)))
        get = lambda i: s[i]["observation"].tolist()  # noqa: E731
        assert get(0) == 2 and get(-1) == 4 and get(np.int64(1)) == 3
        assert get(slice(None)) == [2, 3, 4] and get(slice(1, None)) == [3, 4] and get([2, -3]) == [4, 2]
        assert get(np.array([[0, 1], [1, 2]])) == [[2, 3], [3, 4]] and get(torch.tensor([0, 0])) == [2, 2]
        assert get(torch.tensor([True, False, True])) == [2, 4] and get([]) == []
        assert isinstance(s[0], dict)
        for bad in (3, -4, [0, 3], torch.tensor([5])):  # rlightning does not check lists
            with pytest.raises(IndexError, match="3 are stored"):
                s[bad]
        with pytest.raises(IndexError, match="'x'"):
            s["x"]

    def test_episodes_by_index(self, make):
        s = make(unit="episode")
        episode(s, 0, 2), episode(s, 10, 2), episode(s, 20, 3)
        assert s[-1]["observation"].tolist() == [20, 21, 22] and s[0]["observation"].tolist() == [0, 1]
        assert s[:2]["observation"].tolist() == [[0, 1], [10, 11]]
        assert [e["observation"].tolist() for e in s[[2, 0]]] == [[20, 21, 22], [0, 1]]
        with pytest.raises(IndexError):
            s[3]
        with pytest.raises(TypeError, match="'x'"):
            s["x"]

    def test_threads_that_look_at_the_same_time_take_turns(self, make, monkeypatch):
        s = make(unit="episode")
        episode(s, 0, 3), episode(s, 10, 3)
        look, others, waited = EpisodeIndex._look, [], []

        def in_the_middle(index, ids):
            if not others:
                others.append(threading.Thread(target=lambda: others.append(len(s))))
                others[0].start()
                others[0].join(1.0)  # it waits for us, and we do not wait for it
                waited.append(others[0].is_alive())
            return look(index, ids)

        monkeypatch.setattr(EpisodeIndex, "_look", in_the_middle)
        assert len(s) == 2
        others[0].join(60)
        assert others[1] == len(s) == 2 and waited == [True]

    def test_what_is_overwritten_meanwhile_is_left_out_whole(self, make, monkeypatch):
        s = make(6, unit="episode")
        episode(s, 0, 3), episode(s, 10, 3)
        found = s._reads._index.all

        def then_overwritten():
            out = found()
            s.add_episode({**s[1], "observation": torch.arange(20.0, 23.0)})
            return out

        s[1]
        with monkeypatch.context() as m:
            m.setattr(s._reads._index, "all", lambda: (m.undo(), then_overwritten())[1])
            assert seen(s) == [[10, 11, 12]]
        with monkeypatch.context() as m:
            m.setattr(s._reads._index, "all", lambda: (m.undo(), then_overwritten())[1])
            with pytest.raises(IndexError, match="overwritten while they were read"):
                s[0]
        assert seen(s) == [[20, 21, 22], [20, 21, 22]]

    def test_reads_are_counted_by_slot(self, make):
        s = make(4)
        assert s.data_use_counter.tolist() == [-1] * 4
        s.add_episode(rows(0, 1, 2))
        assert s.data_use_counter.tolist() == [0, 0, 0, -1]
        s[1], s.get_data()
        assert s.data_use_counter.tolist() == [1, 2, 1, -1]
        s.add_episode(rows(3, 4))
        assert s.data_use_counter.tolist() == [0, 2, 1, 0]
        s[-1]
        assert s.data_use_counter.tolist() == [1, 2, 1, 0]
        s.clear()
        assert s.data_use_counter.tolist() == [-1] * 4


class TestClear:
    @pytest.mark.parametrize("unit", ["transition", "episode"])
    def test_it_forgets_what_is_stored_and_no_running_steps(self, make, unit):
        s = make(unit=unit)
        episode(s, 0, 2)
        step(s, "e", 5.0)
        s.add_data_async(EnvRet("e", 6.0))
        s.clear()
        assert len(s) == s.size == s.get_size() == 0
        s.add_data_async(PolicyResponse("e", action=6))
        s.truncate_one_episode("e")
        assert np.ravel(seen(s)).tolist() == [5]

    def test_those_too_if_asked(self, make):
        s = make(env_meta_list=[*metas(2), *metas(1, "e")])
        step(s, "e", 5.0), s.add_transition(*vector(2, 0)), s.add_data_async(EnvRet("e", 6.0))
        s.clear(partial=True)
        with pytest.raises(ValueError, match="no EnvRet"):
            s.add_data_async(PolicyResponse("e", action=1))
        for env_id in "ev":
            with pytest.raises(KeyError):
                s.truncate_one_episode(env_id)
        episode(s, 0, 2)
        assert seen(s) == [0, 1]


class TestTiming:
    def test_truncations_are_timed_and_reset(self, make, caplog):
        s = make()
        assert s.timing_raw == {}
        episode(s, 0, 2), episode(s, 3, 2)
        t = s.timing_raw["truncate_one_episode"]
        assert t["count"] == 2 and t["total"] > 0 and t["avg"] == t["total"] / 2
        with caplog.at_level(logging.DEBUG, "shmbuf.rlightning"):
            assert s.print_timing_summary() is None
        assert caplog.messages == [
            "Buffer storage timing:",
            f"truncate_one_episode         count=2   total={t['total']:.6f}s avg={t['avg']:.6f}s",
        ]
        assert s.timing_raw
        s.print_timing_summary(reset=True)
        assert s.timing_raw == {}

    def test_the_way_of_data_is_timed_on_request(self, make, monkeypatch):
        monkeypatch.setenv("RLIGHTNING_DEBUG", "1")
        s = make()
        e, p = EnvRet("e", 1.0), PolicyResponse("e", action=1)
        e.ts_env_sent_ns -= 9_000_000_000
        p.ts_policy_sent_ns -= 5_000_000_000
        s.add_transition(e, p)
        assert 5 <= s.timing_raw["transition_pair_to_buffer"]["total"] < 9  # rlightning: 0, by the wrong attribute
        e.ts_env_sent_ns -= 9_000_000_000
        s.add_data_async(e), s.add_data_async(p)
        assert s.timing_raw["transition_env_to_buffer"]["total"] >= 9
        assert s.timing_raw["transition_policy_to_buffer"]["total"] >= 5
