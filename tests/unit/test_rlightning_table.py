"""`EpisodeTable`: the assignments that rlightning makes, in every example that was worked out with it."""

import numpy as np
import pytest

from shmbuf.rlightning import EpisodeTable

TWO_NODES = {
    "nA": {"buffer": {"ids": [0]}, "train": {"ids": [0, 1]}, "env": {"ids": [0, 1]}},
    "nB": {"buffer": {"ids": [1]}, "train": {"ids": [2, 3]}, "env": {"ids": [2, 3]}},
}


def node(**ids):
    return {k: {"count": len(v), "ids": list(v)} for k, v in ids.items()}


class TestEnvironments:
    def test_a_table_needs_a_storage(self):
        with pytest.raises(ValueError, match="num_storages=0"):
            EpisodeTable(0)

    @pytest.mark.parametrize(
        "storages, env_ids, expected",
        [(2, "abc", [0, 1, 0]), (3, "abcdefg", [0, 1, 2, 0, 1, 2, 0])],
    )
    def test_they_go_to_storages_in_turn(self, storages, env_ids, expected):
        table = EpisodeTable(storages)
        table.register_envs(list(env_ids))
        assert [table.get_storage_idx_for_env(e) for e in env_ids] == expected
        assert table.get_env_to_storage() == dict(zip(env_ids, expected, strict=True))

    def test_one_str_is_no_list_of_ids(self):
        table = EpisodeTable(1)
        for how in (table.register_envs, lambda ids: EpisodeTable(1, ids)):
            with pytest.raises(TypeError, match=r"'e-0'.*\['e-0'\]"):
                how("e-0")
            with pytest.raises(TypeError, match="7 is no str"):
                how(["a", 7])
        assert table.get_env_to_storage() == {}

    def test_it_says_what_it_has(self):
        assert (
            repr(EpisodeTable(2, list("abc"), 4))
            == "EpisodeTable(storage 0: 2 envs, storage 1: 1 env; 4 train workers)"
        )
        assert repr(EpisodeTable(9)).endswith("storage 7: 0 envs, …)")

    def test_those_registered_at_birth_and_later_share_one_turn(self):
        table = EpisodeTable(3, list("abcd"))
        assert [table.get_storage_idx_for_env(e) for e in "efag"] == [1, 2, 0, 0]

    def test_one_that_is_known_keeps_its_storage_and_counts_once(self):
        table = EpisodeTable(2, ["a", "a", "b"])
        table.register_envs(["a", "b", "a"])
        assert table.get_env_to_storage() == {"a": 0, "b": 1}
        assert table.get_storage_idx_for_env("c") == 0

    def test_the_least_loaded_comes_first_and_the_turn_goes_on_past_others(self):
        # counts [2, 0, 1] come of affinity only
        table = EpisodeTable(
            3,
            ["x-0", "x-1", "x-2"],
            component_distribution={"n": node(buffer=[0], env=[0, 1]), "m": node(buffer=[2], env=[2, 3])},
            node_affinity_env=True,
        )
        assert [table.get_storage_idx_for_env(e) for e in "abcde"] == [1, 2, 1, 2, 0]

    def test_a_storages_environments_come_in_order(self):
        table = EpisodeTable(2, list("abcde"))
        assert table.get_envs_for_storage(0) == ["a", "c", "e"] and table.get_envs_for_storage(1) == ["b", "d"]
        for bad in (2, -1):
            for look in (table.get_envs_for_storage, table.get_train_workers):
                with pytest.raises(IndexError, match=str(bad)):
                    look(bad)


class TestTrainWorkers:
    @pytest.mark.parametrize(
        "storages, workers, expected",
        [(2, 8, {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}), (3, 6, {0: [0, 1], 1: [2, 3], 2: [4, 5]})],
    )
    def test_they_are_cut_into_even_blocks(self, storages, workers, expected):
        table = EpisodeTable(storages, num_train_workers=workers)
        assert table.get_storage_to_train_workers() == expected
        assert table.get_train_workers(1) == expected[1]

    def test_without_any_no_storage_has_some(self):
        table = EpisodeTable(2)
        assert table.get_storage_to_train_workers() == {} and table.get_train_workers(0) is None

    def test_numbers_that_do_not_divide_are_an_error(self):
        with pytest.raises(ValueError, match="num_train_workers=0"):
            EpisodeTable(2, num_train_workers=0)
        for workers in (1, 3):
            with pytest.raises(AssertionError, match=f"{workers} train workers"):
                EpisodeTable(2, num_train_workers=workers)


class TestAffinity:
    def test_both_stay_on_their_node(self):
        env_ids = ["u-3", "u-0", "u-2", "u-1"]
        table = EpisodeTable(2, env_ids, 4, TWO_NODES, node_affinity_env=True, node_affinity_train=True)
        assert table.get_env_to_storage() == {"u-3": 1, "u-0": 0, "u-2": 1, "u-1": 0}
        assert table.get_storage_to_train_workers() == {0: [0, 1], 1: [2, 3]}

    def test_an_id_without_a_number_is_as_good_as_its_place(self):
        table = EpisodeTable(2, list("abcd"), component_distribution=TWO_NODES, node_affinity_env=True)
        assert table.get_env_to_storage() == {"a": 0, "b": 0, "c": 1, "d": 1}

    @pytest.mark.parametrize("ids", [["0"], "0", [0.0], [True]])
    @pytest.mark.parametrize("component", ["buffer", "env", "train"])
    def test_ids_of_the_distribution_are_integers(self, component, ids):
        nodes = {"nA": {**node(buffer=[0], env=[0], train=[0]), component: {"ids": ids}}}
        with pytest.raises(TypeError, match=f"'nA' has {component} ids.*integers"):
            EpisodeTable(1, ["u-0"], 1, nodes, node_affinity_env=True, node_affinity_train=True)

    def test_ids_of_the_distribution_may_be_numpys(self):
        nodes = node(buffer=np.arange(1), env=np.arange(2), train=np.arange(2))
        table = EpisodeTable(1, ["u-1"], 2, {"nA": nodes}, node_affinity_env=True, node_affinity_train=True)
        assert table.get_train_workers(0) == [0, 1] and table.get_env_to_storage() == {"u-1": 0}

    def test_an_id_may_be_a_number(self):
        table = EpisodeTable(2, ["3", "0"], component_distribution=TWO_NODES, node_affinity_env=True)
        assert table.get_env_to_storage() == {"3": 1, "0": 0}

    def test_late_environments_stay_on_their_node_too(self):  # rlightning gives them to any storage
        table = EpisodeTable(2, ["u-0"], component_distribution=TWO_NODES, node_affinity_env=True)
        assert [table.get_storage_idx_for_env(f"late-{k}") for k in (1, 3, 2)] == [0, 1, 1]
        table.register_envs(["again-0"])
        assert table.get_envs_for_storage(0) == ["u-0", "late-1", "again-0"]
        assert table.get_storage_idx_for_env("nameless") == 1  # the least loaded

    def test_train_workers_alone_can_stay_where_environments_are_elsewhere(self):
        cluster = {"T": node(buffer=[0], train=[0, 1]), "R": node(env=[0, 1])}
        table = EpisodeTable(1, ["u-0", "u-1"], 2, cluster, node_affinity_train=True)
        assert table.get_train_workers(0) == [0, 1]
        with pytest.raises(RuntimeError, match=r"'T'.*no env"):
            EpisodeTable(1, ["u-0", "u-1"], 2, cluster, node_affinity_env=True)

    def test_the_number_of_workers_says_only_that_there_are_some(self):
        assert EpisodeTable(2, None, 7, TWO_NODES, node_affinity_train=True).get_train_workers(1) == [2, 3]
        assert EpisodeTable(2, None, None, TWO_NODES, node_affinity_train=True).get_storage_to_train_workers() == {}

    def test_a_storage_that_no_node_has_gets_no_workers(self):
        table = EpisodeTable(3, None, 4, TWO_NODES, node_affinity_train=True)
        assert table.get_storage_to_train_workers() == {0: [0, 1], 1: [2, 3], 2: []}

    @pytest.mark.parametrize("flag", ["node_affinity_env", "node_affinity_train"])
    def test_it_needs_a_distribution(self, flag):
        with pytest.raises(AssertionError, match="component_distribution"):
            EpisodeTable(1, **{flag: True})

    def test_two_storages_on_a_node_are_an_error_with_or_without_it(self):
        with pytest.raises(AssertionError, match="multiple buffer storages"):
            EpisodeTable(2, component_distribution={"n": node(buffer=[0, 1])})

    @pytest.mark.parametrize("flag, component", [("node_affinity_env", "env"), ("node_affinity_train", "train")])
    def test_nodes_with_storages_must_have_equally_many_workers(self, flag, component):
        uneven = {"n": node(buffer=[0], **{component: [0, 1]}), "m": node(buffer=[1], **{component: [2]})}
        EpisodeTable(2, None, None, uneven, **{flag: True})  # there is nobody to place
        with pytest.raises(RuntimeError, match="different numbers"):
            EpisodeTable(2, ["u-0"], 2, uneven, **{flag: True})
        none = {"n": node(buffer=[0], **{component: [0]}), "m": node(buffer=[1])}
        with pytest.raises(RuntimeError, match=f"'m'.*no {component}"):
            EpisodeTable(2, ["u-0"], 2, none, **{flag: True})

    def test_an_environment_on_a_node_without_a_storage_is_an_error(self):
        cluster = {"n": node(buffer=[0], env=[0]), "m": node(env=[1])}
        with pytest.raises(AssertionError, match="Missing storage for env worker 1"):
            EpisodeTable(1, ["u-1"], component_distribution=cluster, node_affinity_env=True)
        late = EpisodeTable(1, ["u-0"], component_distribution=cluster, node_affinity_env=True)
        assert late.get_storage_idx_for_env("u-1") == 0  # as in rlightning: there is nothing near it

    def test_a_storage_out_of_range_is_an_error(self):
        for flag in ("node_affinity_env", "node_affinity_train"):
            with pytest.raises(AssertionError, match="storage 5"):
                EpisodeTable(2, ["u-0"], 2, {"n": node(buffer=[5], env=[0], train=[0])}, **{flag: True})
