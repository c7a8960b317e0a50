"""Nodes, actors and collectors are killed: what is lost is a shard with its node, and nobody waits for the dead."""

from __future__ import annotations

import os
import pickle
import signal
import warnings

import pytest
import ray
import torch

from shmbuf import (
    BufferExists,
    PrioritizedSampler,
    RandomSampler,
    ShardedReplayBuffer,
    ShmStorage,
    StorageLost,
    segment,
)
from shmbuf.distributed import joining
from shmbuf.distributed.ending import named_shards
from shmbuf.distributed.joining import patiently
from tests.distributed.helpers import extend, kill_actor, restarted, rows, there, until, whole

FAR = 100_000  # more rows than a collector puts before it is killed


def make(name, **kw):
    kw.setdefault("sampler", PrioritizedSampler(alpha=1.0, beta=0.5))
    storage = ShmStorage(kw.pop("max_size", 1000), name=name)
    return ShardedReplayBuffer(storage=storage, batch_size=32, seed=5, remote_timeout=3.0, **kw)


def drawn_shards(rb, n=200):
    batch = rb.sample(n)
    assert len(batch) == n and whole(batch)
    return set(batch["shard"].tolist())


class Collector:
    """Puts rows until it is killed; each is its own number."""

    def __init__(self, rb, first):
        self.rb, self.k = rb, first

    def pid(self):
        return os.getpid()

    def go_on(self, n):
        for _ in range(n):
            self.rb.put(rows(self.k, 2)).wait(60)
            self.k += 2
        return self.k

    def for_ever(self):
        while True:
            self.go_on(1)


def collector(node, rb, first):
    return (
        ray.remote(num_cpus=0, max_concurrency=2)(Collector).options(scheduling_strategy=there(node)).remote(rb, first)
    )


def test_a_nodes_death_loses_its_shard_and_nothing_else(cluster, buffer_name):
    """With batches drawn ahead and priorities on their way; then a new node joins."""
    node = cluster.add()
    rb = make(buffer_name, nodes=[cluster.here, node], env_ids=["a", "b"], num_train_workers=2)
    ahead = ShardedReplayBuffer.attach(buffer_name, prefetch=2)
    worker = ShardedReplayBuffer.attach(buffer_name, train_worker=1)
    extend(rb, 0, 10, {})
    cluster.run(node, extend, rb, 1000, 10, {})
    assert drawn_shards(rb) == {0, 1} and drawn_shards(worker) == {1}
    old = rb.sample(200)
    ahead.sample()
    cluster.kill(node)
    with pytest.warns(RuntimeWarning, match=rf"shard 1 on node {node[:12]} is lost"):
        until(lambda: drawn_shards(rb) == {0} and rb.stats()["lost_shards"] == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # said once
        assert drawn_shards(rb) == {0}
        (dead,) = [s for s in rb.shards() if not s["alive"]]
        assert dead["number"] == 1 and dead["why"]
        with pytest.raises(KeyError, match="is lost"):
            rb.shard(1)
        rb.update_tensordict_priority(old.set("td_error", torch.ones(200)))
        rb.synchronize()
        stats, lost = rb.stats(), int((old["shard"] == 1).sum())
        assert (stats["priorities_dropped"], stats["priorities_set"]) == (lost, 200 - lost) and 0 < lost < 200
        assert len(rb) == 10 == stats["size"]
    with pytest.warns(RuntimeWarning, match="is lost"):
        until(lambda: set(ahead.sample()["shard"].tolist()) == {0} and ahead.stats()["lost_shards"])
    ahead.close()
    new = cluster.add()
    index, local = cluster.run(new, extend, rb, 2000, 10, {})
    assert local and index[0, 0] >= 2, "a number is never used again"
    number = int(index[0, 0])
    until(lambda: drawn_shards(rb) == {0, number})
    until(lambda: drawn_shards(worker) == {number})  # which took the lost one's place in the table
    until(lambda: rb.extend(rows(3000, 2), env_id="b")[:, 0].tolist() == [number] * 2)
    assert rb.extend(rows(3002, 2), env_id="a")[:, 0].tolist() == [0, 0]
    worker.close()
    rb.shutdown()


def test_who_wrote_to_a_node_that_died_writes_elsewhere(cluster, buffer_name):
    node = cluster.add()
    rb = make(
        buffer_name, nodes=[node, cluster.others[0]], auto_shards=False, env_ids=["a", "b"], sampler=RandomSampler()
    )
    assert rb.extend(rows(0, 3), env_id="a")[0, 0] == 0 and rb.extend(rows(3, 3), env_id="b")[0, 0] == 1
    rb.extend(rows(6, 4), env_id="a")
    cluster.kill(node)

    def stored():
        try:
            return rb.extend(rows(10, 3), env_id="a", timeout=30)[:, 0].tolist() == [1] * 3
        except StorageLost as e:  # of a call that was on its way
            assert "did not answer" in str(e)
            return False

    with pytest.warns(RuntimeWarning, match="is lost"):
        until(stored)
    assert rb.extend(rows(20, 2), env_id="c")[:, 0].tolist() == [1, 1] and drawn_shards(rb) == {1}
    rb.shutdown()


def test_a_shards_actor_is_killed_and_nothing_is_lost(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here, cluster.others[0]])
    extend(rb, 0, 10, {})
    there_ = collector(cluster.others[0], rb, 1000)
    ray.get(there_.go_on.remote(5))
    for k in (0, 1):
        shard = rb.shard(k)._keeper
        pid = kill_actor(shard)
        if k == 0:  # this node's: nobody here notices
            assert drawn_shards(rb) == {0, 1} and len(rb) == 20
        assert ray.get(there_.go_on.remote(5), timeout=60) == 1000 + 10 * (k + 2), "who writes into its memory goes on"
        assert 0 in drawn_shards(rb), "no batch waits for long"
        until(lambda shard=shard, pid=pid: restarted(shard, pid))
        until(lambda: drawn_shards(rb) == {0, 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rb) == 40 and rb.stats()["lost_shards"] == 0
    found = [*rb.shard(0)[:]["k"].tolist(), *rb.shard(1)[:]["k"].tolist()]
    assert sorted(found) == [*range(10), *range(1000, 1030)]
    rb.shutdown()


def test_a_stopped_shard_is_left_out_and_comes_back(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here, cluster.others[0]])
    extend(rb, 0, 10, {})
    cluster.run(cluster.others[0], extend, rb, 1000, 10, {})
    assert drawn_shards(rb) == {0, 1}
    pid = ray.get(rb.shard(1)._keeper.pid.remote(), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            assert drawn_shards(rb) == {0}
        assert [s["silent"] for s in rb.shards()] == [False, True]
        for _ in range(20):
            rb.update_priority(None, 2.0, shard=[0, 1], row_id=[0, 0])
        assert rb.synchronize(), "nobody waits for it"
        stats = rb.stats()
        assert (stats["priorities_set"], stats["priorities_dropped"], stats["lost_shards"]) == (20, 20, 0)
        assert not rb.shard(1).is_alive
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: drawn_shards(rb) == {0, 1})
    assert rb.shard(1).is_alive and len(rb) == 20 and not any(s["silent"] for s in rb.shards())
    rb.shutdown()


def test_a_collector_is_killed(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here, cluster.others[0]], max_size=FAR)  # none is overwritten
    working = [
        collector(node, rb, FAR * i) for i, node in enumerate([cluster.others[0], cluster.others[0], cluster.here])
    ]
    ray.get([w.go_on.remote(5) for w in working])
    for w in working[:2]:
        pid = ray.get(w.pid.remote())
        w.for_ever.remote()
        before = len(rb)
        until(lambda before=before: len(rb) > before)
        os.kill(pid, signal.SIGKILL)
        assert drawn_shards(rb) <= {0, 1}
        assert ray.get(working[2].go_on.remote(3), timeout=60)
    k = rb.shard(1)[:]["k"]
    for first in (0, FAR):
        mine = k[(k >= first) & (k < first + FAR)]
        assert torch.equal(mine.sort().values, torch.arange(first, first + len(mine))), "each row once, without a gap"
    rb.shutdown()


def test_the_coordinator_is_killed(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here, cluster.others[0]], env_ids=["a", "b"])
    extend(rb, 0, 5, {})
    cluster.run(cluster.others[0], extend, rb, 1000, 5, {})
    assert int(rb.extend(rows(20, 1), env_id="q")[0, 0]) == 0
    before = patiently(rb._coordinator, "directory")
    pid = kill_actor(rb._coordinator)
    assert drawn_shards(rb) == {0, 1}, "nobody waits for it"
    assert rb.extend(rows(5, 2))[:, 0].tolist() == [0, 0]
    until(lambda: restarted(rb._coordinator, pid))
    after = patiently(rb._coordinator, "directory")
    assert [(s.number, s.node, s.lost) for s in after.shards] == [(s.number, s.node, s.lost) for s in before.shards]
    assert (after.next, after.version > before.version) == (2, True)
    other = pickle.loads(pickle.dumps(rb))
    assert drawn_shards(other) == {0, 1}
    assert int(other.extend(rows(21, 1), env_id="q")[0, 0]) == 0, "and it knows which environment is where"
    assert patiently(rb._coordinator, "route", "q") == patiently(rb._coordinator, "route", "q")
    other.close()
    rb.shutdown()


def killed_before_it_says_so(name):
    """Makes a shard, of this process's node, and is killed when it is there."""

    def patiently(coordinator, method, *args, **how):
        if method == "joined":
            os.kill(os.getpid(), signal.SIGKILL)
        return patiently_(coordinator, method, *args, **how)

    patiently_, joining.patiently = joining.patiently, patiently
    make(name, nodes=[ray.get_runtime_context().get_node_id()])


def segments(name):
    return [n for n in segment.names() if n.startswith(f"{name}.")]


def test_what_a_killed_maker_left_can_be_used_and_removed(cluster, buffer_name):
    node = cluster.others[0]
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        cluster.run(node, killed_before_it_says_so, buffer_name)
    assert len(segments(buffer_name)) == 1
    with pytest.raises(BufferExists, match="shutdown"):
        make(buffer_name)
    rb = ShardedReplayBuffer.attach(buffer_name)
    assert not rb.shards(), "nobody said that it is there"
    index, local = cluster.run(node, extend, rb, 0, 5, {})
    assert local and index[0, 0] == 0, "who needs it finds it"
    assert rb.add_shard(cluster.here) == 1 and whole(rb.sample(10))
    # Actors that answer nothing, and of whom nothing is left, hold up nobody for long.
    os.kill(ray.get(rb.shard(1)._keeper.pid.remote()), signal.SIGSTOP)
    ray.kill(rb.shard(0)._keeper)
    rb.shutdown(10)
    assert not segments(buffer_name)


def test_a_buffer_whose_coordinator_was_killed_for_good_does_not_keep_its_name(cluster, buffer_name):
    rb = make(buffer_name, nodes=[cluster.here])
    rb.extend(rows(0, 3))
    ray.kill(rb._coordinator)
    rb = make(buffer_name, nodes=[cluster.here])
    assert len(rb) == 0 and rb.extend(rows(0, 3))[:, 0].tolist() == [0] * 3
    rb.shutdown()


class Maker:
    def pid(self):
        return os.getpid()

    def make(self):
        """The buffer, of which this process keeps no handle."""
        return ShardedReplayBuffer(storage=ShmStorage(10), nodes=[ray.get_runtime_context().get_node_id()])


def test_what_nobody_named_ends_with_a_killed_maker_and_not_before(cluster):
    maker = (
        ray.remote(num_cpus=0, max_concurrency=2)(Maker).options(scheduling_strategy=there(cluster.others[0])).remote()
    )
    pid, rb = ray.get([maker.pid.remote(), maker.make.remote()])
    index, _ = cluster.run(cluster.others[0], extend, rb, 0, 3, {})
    assert len(index) == 3 and len(segments(rb.name)) == 1, "others use it"
    os.kill(pid, signal.SIGKILL)
    until(lambda: not segments(rb.name))
    until(lambda: not named_shards(rb.name))
    rb.close()
