"""A buffer over two nodes: a shard on each, batches out of both."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from shmbuf import (
    BufferExists,
    BufferNotFound,
    NotEnoughRows,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SchemaError,
    ShardedReplayBuffer,
    ShmStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    segment,
    traj,
)
from shmbuf.samplers import ConsumingSampler
from tests.conftest import PREFIX
from tests.distributed.helpers import extend, rows, until, whole
from tests.unit.helpers_priorities import chi2_p


def make(name, capacity=1000, **kw):
    kw.setdefault("sampler", PrioritizedSampler(alpha=1.0, beta=0.5))
    kw.setdefault("batch_size", 32)
    kw.setdefault("seed", 3)
    return ShardedReplayBuffer(storage=ShmStorage(capacity, name=name), **kw)


@pytest.fixture(scope="module")
def made(cluster):
    """Made once; each test gets a handle of its own on it, while it is empty."""
    rb = make(f"{PREFIX}shared")
    yield rb
    rb.shutdown()


@pytest.fixture
def rb(made):
    rb = ShardedReplayBuffer.attach(made.name, seed=3)
    yield rb
    rb.empty()
    rb.close()


def fill(cluster, rb, here, there_):
    """Rows 0… on this node, 1000… on the other, with priorities 1, 2, 3 …"""
    extend(rb, 0, here, {"td_error": torch.arange(1.0, here + 1)})
    index, local = cluster.run(
        cluster.others[0], extend, rb, 1000, there_, {"td_error": torch.arange(1.0, there_ + 1) * 3}
    )
    assert local and index[:, 0].unique().tolist() == [1]


def test_each_process_writes_to_its_own_nodes_shard(cluster, rb):
    index, local = extend(rb, 0, 5, {})
    assert local and index.tolist() == [[0, i] for i in range(5)]
    index, local = cluster.run(cluster.others[0], extend, rb, 1000, 3, {})
    assert local and index.tolist() == [[1, i] for i in range(3)]
    ticket = rb.put(rows(5, 2))
    assert ticket.rows == 2 and ticket.wait(60).tolist() == [[0, 5], [0, 6]] and ticket.done()
    assert rb.add(rows(7, 1)[0]).tolist() == [0, 7]
    assert len(rb) == 11 and rb.write_count == 11 and rb.initialized and rb
    shards = rb.shards()
    assert [(s["number"], s["node"], s["local"], s["alive"]) for s in shards] == [
        (0, cluster.here, True, True),
        (1, cluster.others[0], False, True),
    ]
    assert [s["segment"] for s in shards] == [f"{rb.name}.{k}.{node[:12]}" for k, node in enumerate(cluster.all)]
    far = rb.shard(1)
    assert far.local is None and whole(far[:]) and far[:]["k"].tolist() == [1000, 1001, 1002]
    assert rb.shard(0).local is not None
    with pytest.raises(KeyError, match="no shard 7"):
        rb.shard(7)
    stats = rb.stats()
    assert (stats["size"], stats["capacity"], stats["lost_shards"]) == (11, 2000, 0) and set(stats["shards"]) == {0, 1}
    rb.empty()
    assert len(rb) == 0


def test_rows_come_by_the_priorities_of_all_shards(cluster, rb):
    """χ² of 20,000 draws over 30 rows of unequal shards, after some priorities were set from afar."""
    fill(cluster, rb, 6, 24)
    seen = {}
    while len(seen) < 30:
        batch = rb.sample()
        assert whole(batch)
        seen.update(
            {(int(s), int(i)): int(k) for s, i, k in zip(batch["shard"], batch["row_id"], batch["k"], strict=True)}
        )
    assert all((k >= 1000) == (s == 1) for (s, _), k in seen.items())
    new = {key: 1.0 + 7.0 * (k % 5) for key, k in seen.items()}
    td = TensorDict(
        {
            "shard": torch.tensor([s for s, _ in new]),
            "row_id": torch.tensor([i for _, i in new]),
            "td_error": torch.tensor([*new.values()]),
        },
        [len(new)],
    )
    rb.update_tensordict_priority(td)
    rb.synchronize()
    assert rb.stats()["priorities_set"] == 30
    drawn: Counter = Counter()
    for _ in range(20):
        batch = rb.sample(1000)
        drawn.update(zip(batch["shard"].tolist(), batch["row_id"].tolist(), strict=True))
    keys = sorted(new)
    p = np.array([new[k] for k in keys])
    assert chi2_p(np.array([drawn[k] for k in keys]), p / p.sum() * 20_000) > 1e-6


def test_weights_are_those_of_one_buffer(cluster, rb):
    fill(cluster, rb, 6, 24)
    one = TensorDictReplayBuffer(storage=ShmStorage(30), sampler=PrioritizedSampler(alpha=1.0, beta=0.5))
    one.extend(rows(0, 6, td_error=torch.arange(1.0, 7.0)))
    one.extend(rows(1000, 24, td_error=torch.arange(1.0, 25.0) * 3))
    expected = one.sample(3000)
    expected = dict(zip(expected["k"].tolist(), expected["priority_weight"].tolist(), strict=True))
    for batch, info in (rb.sample(400, return_info=True) for _ in range(3)):
        assert set(batch["shard"].tolist()) == {0, 1} and torch.equal(info["shard"], batch["shard"])
        for k, weight in zip(batch["k"].tolist(), batch["priority_weight"].tolist(), strict=True):
            assert weight == pytest.approx(expected[k], rel=1e-6)
    assert rb.sample(50, beta=0.0)["priority_weight"].tolist() == [1.0] * 50
    one.close()


def test_a_batch_drawn_ahead_is_as_any_other(cluster, rb):
    fill(cluster, rb, 10, 10)
    ahead = ShardedReplayBuffer.attach(rb.name, prefetch=3)
    drawn: Counter = Counter()
    for i, batch in enumerate(ahead):
        assert (
            len(batch) == 32 and whole(batch) and {"shard", "row_id", "index", "priority_weight"} <= set(batch.keys())
        )
        drawn.update(batch["shard"].tolist())
        k = batch["k"].float()
        as_they_are = torch.where(k < 1000, k + 1, 3 * (k - 999))
        ahead.update_tensordict_priority(batch.set("td_error", as_they_are))
        if i == 60:
            break
    assert ahead.stats()["prefetch_queue_size"] == 3
    assert chi2_p(np.array([drawn[0], drawn[1]]), np.array([0.25, 0.75]) * sum(drawn.values())) > 1e-6
    before = ahead.set_sampler(RandomSampler())
    assert ahead.sample().get("priority_weight", None) is None, "no batch of before"
    ahead.set_sampler(before)
    assert ahead.sample().get("priority_weight", None) is not None
    ahead.empty()
    with pytest.raises(NotEnoughRows, match="empty"):
        ahead.sample()
    ahead.close()
    with pytest.raises(RuntimeError, match="shut down"):
        ahead.sample()


def attached(name):
    rb = ShardedReplayBuffer.attach(name, batch_size=4)
    batch = rb.sample()
    locals_ = [s["local"] for s in rb.shards()]
    rb.close()
    return whole(batch), len(batch), locals_


def test_any_process_attaches_by_name_or_is_sent_the_buffer(cluster, rb):
    fill(cluster, rb, 5, 5)
    assert cluster.run(cluster.others[0], attached, rb.name) == (True, 4, [False, True])
    again = pickle.loads(pickle.dumps(rb))
    assert again.batch_size == 32 and whole(again.sample()) and [s["local"] for s in again.shards()] == [True, False]
    again.close()
    with pytest.raises(BufferNotFound, match="no sharded buffer"):
        ShardedReplayBuffer.attach(rb.name + "x")
    with pytest.raises(BufferExists, match="attach"):
        make(rb.name)


def test_errors_change_nothing(cluster, rb):
    with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
        rb.sample()
    fill(cluster, rb, 4, 4)
    with pytest.raises(SchemaError):
        rb.extend(TensorDict({"k": torch.arange(2)}, [2]))
    batch = rb.sample(8)
    ids = dict(shard=batch["shard"], row_id=batch["row_id"])
    for error, text, call in (
        (ValueError, "nan", lambda: rb.update_priority(None, torch.full((8,), float("nan")), **ids)),
        (ValueError, "float32", lambda: rb.update_priority(None, 1e300, **ids)),
        (ValueError, "-1", lambda: rb.update_priority(None, -1.0, **ids)),
        (ValueError, "2 shards for 1 row ids", lambda: rb.update_priority(None, 1.0, shard=[0, 1], row_id=[0])),
        (IndexError, "shard 9", lambda: rb.update_priority(None, 1.0, shard=[9], row_id=[0])),
        (TypeError, "index", lambda: rb.update_priority([0], 1.0)),
        (KeyError, "td_error", lambda: rb.update_tensordict_priority(batch.exclude("td_error"))),
        (KeyError, "shard", lambda: rb.update_tensordict_priority(rows(0, 1, td_error=torch.ones(1)))),
        (ValueError, "timeout=-1", lambda: rb.sample(2, timeout=-1)),
        (ValueError, "ids of living nodes are", lambda: rb.add_shard("nonode")),
        (TypeError, "env_id or stream", lambda: rb.extend(rows(0, 1), env_id="a", stream=1)),
        (ValueError, "routes no environments", lambda: rb.extend(rows(0, 1), env_id="a")),
        (TypeError, "ConsumingSampler: shards draw", lambda: rb.set_sampler(ConsumingSampler())),
    ):
        with pytest.raises(error, match=text):
            call()
    assert rb.stats()["priorities_set"] == 0 and len(rb) == 8
    assert isinstance(rb.set_sampler(RandomSampler()), PrioritizedSampler)
    assert rb.sample().get("priority_weight", None) is None


def test_arguments_that_cannot_be_leave_nothing(cluster, buffer_name):
    for kw, error, text in (
        ({"sampler": ConsumingSampler()}, TypeError, "shards draw"),
        ({"nodes": ["0" * 56]}, ValueError, "living nodes"),
        ({"nodes": []}, ValueError, "nodes="),
        ({"prefetch": 2, "batch_size": None}, ValueError, "batch_size"),
        ({"num_train_workers": 3}, AssertionError, "divided evenly"),
        ({"writer": 5}, TypeError, "not int"),
        (
            {"storage": ShmStorage(1 << 31, name=buffer_name, schema={"k": ("int64", (9999,))})},
            MemoryError,
            "2,147,483,648 rows",
        ),
        ({"storage": 5}, TypeError, "not int"),
    ):
        with pytest.raises(error, match=text):
            ShardedReplayBuffer(**{"storage": ShmStorage(10, name=buffer_name), "batch_size": 4, **kw})
    assert not [n for n in segment.names() if n.startswith(buffer_name)]
    rb = make(buffer_name)  # the name is free
    rb.shutdown()


def episodes(rb, worker, n, interleaved):
    """Each environment's numbers go up by one a step; several of them in turn, through one handle."""
    for step in range(n):
        for env in interleaved:
            first = 10_000 * worker + 1000 * env + 2 * step
            td = rows(first, 2)
            td["next", "done"] = torch.tensor([[False], [step == n - 1]])
            rb.extend(td, stream=env)


def test_slices_lie_in_one_shard_and_trajectories_never_straddle(cluster, buffer_name):
    rb = make(buffer_name, sampler=SliceSampler(slice_len=4), batch_size=32)
    far = cluster.start(cluster.others[0], episodes, rb, 1, 4, [1, 2])
    episodes(rb, 0, 4, [1, 2])  # at the same time
    ray.get(far)
    for _ in range(5):
        batch = rb.sample()
        k, shard = batch["k"].reshape(-1, 4), batch["shard"].reshape(-1, 4)
        assert (k.diff(dim=1) == 1).all() and (shard == shard[:, :1]).all() and len(batch) == 32
        assert batch["next", "truncated"].reshape(-1, 4)[:, -1].all()
    found = rb.query(traj.length >= 1)
    assert sorted(t.length for t in found) == [8] * 4
    with pytest.raises(RuntimeError, match="divisible"):
        rb.sample(30)
    rb.shutdown()


def test_without_replacement_each_shard_has_its_epochs(cluster, buffer_name):
    rb = make(buffer_name, sampler=SamplerWithoutReplacement(), batch_size=10)
    fill(cluster, rb, 20, 40)
    drawn = Counter(k for _ in range(60) for k in rb.sample()["k"].tolist())
    for first, n in ((0, 20), (1000, 40)):
        times = [drawn[first + i] for i in range(n)]
        assert max(times) - min(times) <= 1, "no row comes again before all of its shard came"
    assert sum(drawn.values()) == 600
    rb.shutdown()


def doubled(td):
    return td.set("twice", 2 * td["k"])


def test_transforms_of_batches(cluster, buffer_name):
    rb = make(buffer_name, transform=doubled)
    fill(cluster, rb, 5, 5)
    batch = rb.sample(16)
    assert torch.equal(batch["twice"], 2 * batch["k"]) and {"shard", "row_id"} <= set(batch.keys())
    rb.shutdown()


def routed(rb, first, env_ids):
    return {e: int(rb.extend(rows(first + 10 * i, 3), env_id=e)[0, 0]) for i, e in enumerate(env_ids)}


def sampled_by(name, worker):
    rb = ShardedReplayBuffer.attach(name, train_worker=worker, sampler=RandomSampler())
    shards = set(rb.sample(40)["shard"].tolist())
    rb.close()
    return shards


def test_environments_go_to_their_shard_and_shards_to_their_workers(cluster, buffer_name):
    rb = make(buffer_name, env_ids=["a", "b", "c"], num_train_workers=2)
    here = routed(rb, 0, ["a", "b", "c", "d"])
    assert here == {"a": 0, "b": 1, "c": 0, "d": 1}, "as EpisodeTable says"
    assert cluster.run(cluster.others[0], routed, rb, 500, ["b", "a", "d"]) == {"b": 1, "a": 0, "d": 1}
    assert [sampled_by(rb.name, w) for w in (0, 1)] == [{0}, {1}]
    assert set(rb.sample(100)["shard"].tolist()) == {0, 1}
    with pytest.raises(ValueError, match="workers are"):
        ShardedReplayBuffer.attach(rb.name, train_worker=5)
    rb.shutdown()


def test_environments_of_one_collector_are_streams_of_their_own(cluster, buffer_name):
    rb = make(buffer_name, sampler=SliceSampler(slice_len=4), batch_size=8, env_ids=["x", "y"])
    for step in range(4):
        for first, env in ((0, "x"), (100, "y"), (200, "z")):  # y's shard is on the other node
            td = rows(first + 2 * step, 2)
            td["next", "done"] = torch.zeros(2, 1, dtype=torch.bool)
            rb.extend(td, env_id=env)
    assert sorted(t.length for t in rb.query(traj.length >= 1)) == [8, 8, 8]
    for _ in range(5):
        assert (rb.sample()["k"].reshape(-1, 4).diff(dim=1) == 1).all()
    rb.shutdown()


def test_a_process_of_a_node_without_a_shard_writes_through_an_actor(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here], auto_shards=False)
    index, local = cluster.run(cluster.others[0], extend, rb, 0, 5, {})
    assert not local and index[:, 0].tolist() == [0] * 5 and len(rb.shards()) == 1
    rb.shutdown()


def test_a_process_of_a_node_without_a_shard_gets_one(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here], sampler=RandomSampler())
    extend(rb, 0, 5, {})
    index, local = cluster.run(cluster.others[0], extend, rb, 1000, 5, {})
    assert local and index[:, 0].tolist() == [1] * 5
    until(lambda: len(rb.shards()) == 2)
    until(lambda: set(rb.sample(50)["shard"].tolist()) == {0, 1})
    assert rb.add_shard(cluster.others[0]) == 1, "it is there"
    rb.shutdown()


def test_saved_and_loaded_shard_by_shard(cluster, rb, buffer_name, tmp_path):
    fill(cluster, rb, 6, 9)
    rb.dumps(tmp_path)
    ahead = ShardedReplayBuffer.attach(rb.name, prefetch=2)
    ahead.sample()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-0", "shard-1", "sharded.json"]
    rb.empty()
    extend(rb, 500, 5, {})
    ahead.sample()
    ahead.loads(tmp_path)
    assert 500 not in ahead.sample(32)["k"].tolist() + ahead.sample()["k"].tolist(), "nor is what was drawn ahead left"
    ahead.close()
    assert len(rb) == 15 and sorted(rb.shard(1)[:]["k"].tolist()) == list(range(1000, 1009))
    (tmp_path / "shard-2").mkdir()  # an older one's, which had more
    rb.loads(tmp_path)
    assert len(rb) == 15


def test_what_nobody_named_ends_with_its_maker(cluster):
    before = set(segment.names())
    rb = ShardedReplayBuffer(storage=ShmStorage(10), batch_size=2)
    made = set(segment.names()) - before
    assert len([n for n in made if n.startswith(rb.name)]) == 2
    rb.shutdown()
    assert not [n for n in segment.names() if n.startswith(rb.name)]
    rb.shutdown()
