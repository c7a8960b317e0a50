"""A replay buffer as a Ray service: on the actor's node in its memory, from other nodes through it."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ray
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    NotEnoughRows,
    PrioritizedSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    RingFull,
    SchemaError,
    ShmStorage,
    SliceSampler,
    StorageLost,
    TensorDictReplayBuffer,
    segment,
    traj,
)
from tests.distributed.helpers import kill_actor, restarted, rows, there, until, whole


def make(name, node=None, cls=RemoteTensorDictReplayBuffer, capacity=100, storage=None, **kw):
    config = {"num_cpus": 0}
    if node is not None:
        config.update(scheduling_strategy=there(node), max_restarts=-1)
    kw.setdefault("batch_size", 8)
    storage = ShmStorage(capacity, name=name) if storage is None else storage
    return cls(storage=storage, service_backend="ray", service_backend_options={"remote_config": config}, **kw)


@pytest.fixture
def far(cluster, buffer_name):
    """A service of the other node: everything goes through the actor."""
    rb = make(buffer_name, cluster.others[0], sampler=partial(PrioritizedSampler, 100, 0.7, 0.5))
    assert rb.local is None
    yield rb
    rb.shutdown()


def uses(client):
    """Each way of using it; returns what was seen, to be compared between the ways."""
    seen = {"local": client.local is not None}
    seen["extend"] = client.extend(rows(0, 10)).tolist()
    ticket = client.put(rows(10, 5))
    seen["put"] = (ticket.rows, ticket.wait(60).tolist(), ticket.done())
    seen["add"] = client.add(rows(15, 1)[0])
    batch = client.sample(16)
    seen["sample"] = (len(batch), whole(batch), sorted(map(str, batch.keys(True, True))), batch["obs"].is_contiguous())
    batch["obs"].add_(1)  # a copy, not Ray's memory
    batch, info = client.sample(return_info=True)
    seen["info"] = (len(batch), sorted(map(str, info)))
    seen["one"] = client[3]["k"].item()
    seen["slice"] = client[2:5]["k"].tolist()
    client[0:1] = rows(50, 1)
    seen["set"] = client[0]["k"].item()
    client.set_at_("k", torch.tensor([7]), torch.tensor([1]))
    seen["set_at_"] = client[1]["k"].item()
    seen["update"] = client.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0])).tolist()
    batch = client.sample(4)
    batch["td_error"] = torch.full((4,), 9.0)
    seen["td"] = client.update_tensordict_priority(batch)
    seen["properties"] = (client.batch_size, client.write_count, client.initialized, client.is_alive)
    seen["stats"] = {k: client.stats()[k] for k in ("size", "write_count", "capacity")}
    seen["next"] = len(client.next())
    it = iter(client)
    seen["iter"] = len(next(it))
    seen["backend"] = client.service_backend
    seen["itself"] = client.append_transform(lambda td: td.set("more", td["k"] + 1)) is client
    seen["transformed"] = bool(
        (client.sample()["more"] == client.sample()["k"].max() * 0 + client.sample()["more"]).all()
    )
    seen["len"] = len(client)
    client.empty()
    seen["empty"] = (len(client), client.write_count)
    return seen


def test_each_method_does_the_same_from_near_and_far(cluster, far):
    here = uses(far.client())
    far.empty()
    there_ = cluster.run(cluster.others[0], uses, far.client())
    assert here.pop("local") is False and there_.pop("local") is True
    assert here == there_
    assert here["extend"] == list(range(10)) and here["put"] == (5, [10, 11, 12, 13, 14], True) and here["add"] == 15
    assert here["sample"][:2] == (16, True) and here["set"] == 50 and here["len"] == 16 and here["empty"] == (0, 0)


def test_on_the_same_node_it_is_the_memory_itself(cluster, buffer_name):
    with make(buffer_name) as rb:
        assert rb.node_id == cluster.here and isinstance(rb.local, RemoteTensorDictReplayBuffer)
        rb.extend(rows(0, 6))
        with shmbuf.attach(rb.name) as other:  # any process of the node, by name
            assert len(other) == 6
        client = pickle.loads(pickle.dumps(rb.client()))
        assert client.local.buffer.name == rb.name == f"{buffer_name}.{cluster.here[:12]}" and whole(client.sample())
        assert cluster.run(cluster.others[0], lambda c: (c.local is None, len(c)), client) == (True, 6)
    assert not [n for n in segment.names() if n.startswith(buffer_name)]


def test_errors_of_the_actor_are_our_own(far):
    far.extend(rows(0, 4))
    with pytest.raises(SchemaError, match="key 'obs' is missing"):
        far.extend(TensorDict({"k": torch.arange(2)}, [2]))
    with pytest.raises(SchemaError):
        far.put(TensorDict({"k": torch.arange(2)}, [2]))
    with pytest.raises(IndexError, match="out of range"):
        far[1000]
    with pytest.raises(ValueError, match="nan"):
        far.update_priority(torch.tensor([0]), torch.tensor([float("nan")]))
    with pytest.raises(AttributeError, match="nonsense"):
        far.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="owner's"):
        far.client().shutdown  # noqa: B018
    with pytest.raises(AttributeError, match="cannot be set"):
        far.batch_size = 3
    assert len(far) == 4, "nothing was stored"
    far.empty()
    with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
        far.sample()
    with pytest.raises(NotEnoughRows):
        far.sample(timeout=1.2)


def test_a_client_of_another_node_asks_ahead(cluster, buffer_name):
    with make(buffer_name, cluster.others[0], prefetch=3) as rb:
        with pytest.raises(NotEnoughRows):
            rb.sample()
        rb.extend(rows(0, 20))
        for _ in range(15):
            batch = rb.sample()
            assert len(batch) == 8 and whole(batch)
        assert rb._coming and rb.local is None
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: whole(rb.sample()), range(40)))
        rb.empty()
        with pytest.raises(NotEnoughRows):
            until(lambda: rb.sample() is None)
        rb.extend(rows(100, 3))
        assert set(rb.sample()["k"].tolist()) <= {100, 101, 102}, "what was drawn before is forgotten"


def late(client):
    client.extend(rows(0, 3))


def test_who_waits_for_rows_gets_them_when_they_come(cluster, far):
    waiting = cluster.start(cluster.here, lambda c: len(c.sample(5, timeout=60)), far.client())
    until(lambda: not ray.wait([waiting], timeout=0)[0])
    cluster.run(cluster.others[0], late, far.client())
    assert ray.get(waiting, timeout=60) == 5


def test_a_ring_without_room_is_waited_for_and_said(cluster, buffer_name):
    """The limiter holds rows in the ring; a batch larger than it goes in in parts once rows are sampled."""
    row_bytes = rows(0, 1).bytes()
    storage = ShmStorage(4000, name=buffer_name, ring_bytes=4096, timeout=1.0)
    limiter = shmbuf.RateLimiter(1.0, 1, (-1e6, 100))
    with make(buffer_name, cluster.others[0], storage=storage, limiter=limiter) as rb:
        with pytest.raises((RingFull, shmbuf.CommitPending)):
            for i in range(50):
                rb.put(rows(i * 40, 40))
        stored = len(rb)
        assert 0 < stored <= 100 + 4096 // row_bytes + 1
        rb.sample(stored)  # makes room
        until(lambda: len(rb) > stored)
        rb.set_limiter(None)
        before = rb.write_count
        n = 3 * 4096 // row_bytes
        index = rb.extend(rows(5000, n), timeout=60)
        assert len(index) == n and rb.write_count >= before + n


def test_clients_of_other_nodes_have_streams_of_their_own(cluster, buffer_name):
    """Through one actor, but none takes the next step of another's trajectory."""
    sampler = partial(SliceSampler, slice_len=3)
    done = torch.zeros(6, 1, dtype=torch.bool)
    with make(buffer_name, cluster.others[0], sampler=sampler, batch_size=6) as rb:
        a, b = rb.client(), rb.client()
        for step in range(3):  # in turn
            for which, client in enumerate((a, b)):
                td = rows(100 * which + 2 * step, 2)
                td["next", "done"] = done[:2]
                client.extend(td)
        for _ in range(10):
            k = rb.sample()["k"].reshape(-1, 3)
            assert (k.diff(dim=1) == 1).all(), k
        assert sorted(t.length for t in rb.query(traj.length > 0)) == [6, 6]


def test_a_killed_actor_is_started_again_over_the_rows_that_are_there(cluster, far):
    far.extend(rows(0, 12))
    pid = kill_actor(far._keeper)
    near = cluster.start(cluster.others[0], lambda c: (whole(c.sample()), len(c.extend(rows(12, 3)))), far.client())
    assert ray.get(near, timeout=60) == (True, 3), "who is on its node does not notice"
    until(lambda: restarted(far._keeper, pid))

    def again():
        try:
            return len(far)
        except StorageLost as e:  # of a call that was on its way
            assert "did not answer" in str(e)
            return 0

    assert until(again) == 15 and whole(far.sample())
    assert far.extend(rows(15, 2)).tolist() == [15, 16]


def test_what_is_on_its_way_when_its_node_dies_is_a_lost_storage(cluster, buffer_name):
    node = cluster.add()
    rb = make(buffer_name, node)
    rb.extend(rows(0, 3))
    cluster.kill(node)

    def gone():
        try:
            return rb.sample() is None  # its process may outlive the node for a moment
        except StorageLost as e:  # and then it says nothing
            return f"on node {node[:12]} is gone" in str(e)

    until(gone)
    rb.shutdown()
    assert not rb.is_alive


def test_lifecycle_and_arguments(cluster, buffer_name):
    with pytest.warns(FutureWarning, match="deprecated"):
        rb = TensorDictReplayBuffer(storage=lambda: ShmStorage(10), use_ray_service=True)
    assert rb.service_backend == "ray" and rb.start() is rb and rb.is_alive and rb.name.startswith("ray-")
    assert len(rb.clients(2)) == 2 and rb.clients(1)[0].service_backend == "ray"
    rb.extend(rows(0, 2))
    name = rb.name
    rb.shutdown()
    rb.shutdown()
    assert not rb.is_alive and name not in segment.names()
    for use in (rb.start, rb.client):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    with pytest.raises(StorageLost, match="shut down"):
        rb.sample(2)
    for kw, error, text in (
        ({"service_backend_options": {"cpus": 3}}, TypeError, "cpus"),
        ({"transport": "distributed"}, ValueError, "transport='distributed'"),
        ({"storage": 5}, TypeError, "not int"),
        ({"prefetch": 2}, ValueError, "Dynamic batch-size"),
        ({"sampler": 5}, TypeError, "int"),
    ):
        with pytest.raises(error, match=text):
            ReplayBuffer(service_backend="ray", **kw)
    with pytest.raises(TypeError):
        ReplayBuffer(ShmStorage(3), service_backend="ray")
    with pytest.raises(ValueError, match="conflicts"):
        ReplayBuffer(service_backend="process", use_ray_service=True)


def test_as_remote_makes_an_actor_class(cluster, buffer_name):
    cls = RemoteTensorDictReplayBuffer.as_remote({"num_cpus": 0, "scheduling_strategy": there(cluster.others[0])})
    assert cls.is_remote
    handle = cls.remote(storage=ShmStorage(50, name=buffer_name), batch_size=3)
    try:
        assert ray.get(handle.extend.remote(rows(0, 4))).tolist() == [0, 1, 2, 3]
        batch = ray.get(handle.sample.remote())
        assert len(batch) == 3 and whole(batch)
        assert ray.get(handle.put.remote(rows(4, 2))) == 2
        assert ray.get(handle._getattr.remote("name")) == f"{buffer_name}.{cluster.others[0][:12]}"
        ray.get(handle.destroy.remote(force=True))
    finally:
        ray.kill(handle)
