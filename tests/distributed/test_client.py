"""Clients of an actor on another node, without Ray: the actor is threads of this process."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shmbuf import Buffer, NotEnoughRows, RandomSampler, RemoteTensorDictReplayBuffer, ShmStorage, StorageLost, segment
from shmbuf.distributed import client as module
from shmbuf.distributed import keeper as keepers
from shmbuf.distributed import lives, places, service
from shmbuf.distributed.client import RayClient
from shmbuf.distributed.packing import unpack
from shmbuf.errors import BufferNotFound, CommitInterrupted, CommitPending, TooManyCollectors
from tests.distributed.helpers import rows, until, whole
from tests.distributed.offline import FAR, HERE, forked


@pytest.fixture
def far(offline, name):
    """(client, actor) of a buffer on the other node."""
    actor, place = offline.keeper(name, FAR, sampler=RandomSampler(), batch_size=8)
    return RayClient(actor, place), actor


def held(it, method):
    """Calls of that method of the actor wait; returns what lets them go, and what tells that one is there."""
    gate, entered, call = threading.Event(), threading.Event(), getattr(it, method)

    def wait(*args, **keywords):
        entered.set()
        assert gate.wait(60)
        return call(*args, **keywords)

    setattr(it, method, wait)
    return gate, entered


def test_a_call_may_take_long_as_long_as_the_actor_lives(far, monkeypatch):
    """What takes minutes (`loads`) is waited for, and not done twice."""
    client, actor = far
    monkeypatch.setattr(module, "_ANSWER", 0.3)
    monkeypatch.setattr(module, "LOOK", 0.05)
    client.extend(rows(0, 5))
    gate, _ = held(actor._it, "call")
    with ThreadPoolExecutor(1) as threads:
        emptied = threads.submit(client.empty)
        until(lambda: actor.calls.count("pid") >= 20 or emptied.done())  # many times the patience
        assert not emptied.done()
        gate.set()
        emptied.result(60)
    assert actor.calls.count("call") == 1 and len(client) == 0


def test_a_stopped_actor_is_given_up_when_the_time_is_over(far, offline, monkeypatch):
    client, actor = far
    monkeypatch.setattr(module, "GRACE", 0.3)
    monkeypatch.setattr(module, "LOOK", 0.05)
    client.extend(rows(0, 5))
    assert client.is_alive
    actor.stop()
    monkeypatch.setattr(module, "_ANSWER", 3600.0)  # of calls without a timeout
    for _ in range(2):
        for use in (lambda: client.sample(4, timeout=0.1), lambda: client.extend(rows(5, 2), timeout=0.1)):
            with pytest.raises(StorageLost, match=r"did not answer: it has given no sign of life for 0\.\d+ s"):
                use()
        assert not client.is_alive
    actor.go_on()
    assert client.is_alive and whole(client.sample(4)) and client.extend(rows(9, 1)).numel() == 1
    actor.stop()
    offline.nodes.remove(FAR)  # which Ray knows: nobody waits for that hour
    with pytest.raises(StorageLost, match="on node bbbbbbbbbbbb is gone: its node died"):
        client.sample(4)
    offline.nodes.append(FAR)
    actor.die()
    with pytest.raises(StorageLost, match="on node bbbbbbbbbbbb is gone: killed"):
        client.sample(4)


def test_threads_share_a_client_that_asks_ahead(offline, name):
    actor, place = offline.keeper(name, FAR, sampler=RandomSampler(), batch_size=8, prefetch=3)
    client = RayClient(actor, place)
    client.extend(rows(0, 50))

    def use(k):
        for i in range(60):
            batch = client.sample()
            assert len(batch) == 8 and whole(batch)
            if k == 0 and i % 7 == 0:
                client.set_sampler(RandomSampler())  # forgets what was drawn ahead
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(8)))
    client.empty()
    with pytest.raises(NotEnoughRows):
        client.sample()


def interrupt(entered, gate):
    """Ctrl-C once it is there; and then let it go."""

    def work():
        assert entered.wait(60)
        _thread.interrupt_main()
        gate.set()

    threading.Thread(target=work).start()


@pytest.mark.parametrize("method", ["extend", "put"])
def test_ctrl_c_while_rows_are_on_their_way_gives_their_ticket(far, method):
    client, actor = far
    client.extend(rows(0, 3))
    gate, entered = held(actor._it, "write")
    interrupt(entered, gate)
    with pytest.raises(CommitInterrupted, match="2 rows are in the ring") as e:
        getattr(client, method)(rows(3, 2))
    assert e.value.rows == 2 and e.value.ticket.wait(60).tolist() == [3, 4] and len(client) == 5


def test_ctrl_c_while_rows_wait_for_their_commit_leaves_the_ticket_as_it_was(far):
    client, actor = far
    client.extend(rows(0, 1))
    put = client.put(rows(1, 2))
    gate, entered = held(actor._it, "ticket")
    interrupt(entered, gate)
    with pytest.raises(CommitInterrupted) as e:
        put.wait(60)
    assert e.value.ticket is put and put.wait(60).tolist() == [1, 2] and put.done()


def test_ctrl_c_between_parts_of_a_large_batch_gives_the_ticket_of_all(far):
    client, actor = far
    client.extend(rows(0, 1))
    it, calls, gate, entered = actor._it, [], threading.Event(), threading.Event()

    def partly(of, method, args, keywords):
        """As where the ring has room for 40 rows at a time; the second call takes long."""
        td = unpack(args)[0]
        calls.append(len(td))
        with it._use(of) as face:
            got = face.keep(face.rb.put(td[:40]), len(td))
        if len(calls) == 2:
            entered.set()
            assert gate.wait(60)
        return got

    it.write = partly
    interrupt(entered, gate)
    with pytest.raises(CommitInterrupted, match="80 rows are in the ring") as e:
        client.extend(rows(1, 200))
    assert calls == [200, 160] and e.value.rows == 80
    assert e.value.ticket.wait(60).tolist() == list(range(1, 81)) and len(client) == 81
    assert client.extend(rows(81, 100)).tolist() == list(range(81, 181))


def test_parts_of_a_put_are_one_ticket(far):
    client, actor = far
    tickets = [client.put(rows(3 * k, 3)) for k in range(2)]
    both = module._together(tickets)
    gate, _ = held(actor._it, "ticket")
    gate.set()
    it = actor._it
    ticket, it.ticket = it.ticket, lambda *args: None  # not yet
    with pytest.raises(CommitPending, match="3 rows") as e:
        both.wait(0.0)
    assert e.value.ticket is both and e.value.rows == 6
    it.ticket = ticket
    assert both.wait(60).tolist() == list(range(6)) and both.done()


def test_a_clients_handle_is_not_closed_while_it_is_used_or_was_a_moment_ago(offline, name):
    actor, place = offline.keeper(name, FAR, sampler=RandomSampler())
    it = actor._it
    it._faces.most = 3
    clients = [RayClient(actor, place) for _ in range(3)]
    tickets = [c.put(rows(10 * k, 2)) for k, c in enumerate(clients)]
    for _ in range(2):
        with pytest.raises(TooManyCollectors, match=f"3 clients of other nodes use the actor of buffer '{name}'"):
            RayClient(actor, place).put(rows(50, 1))
    assert [t.wait(60).tolist() for t in tickets] == [[0, 1], [2, 3], [4, 5]], "nobody's ticket is lost"
    gate, entered = held(it._faces._kept[clients[0]._id].thing.rb, "extend")
    it._faces.idle = 0.0  # five minutes later, but for the first, who is in a long call
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(clients[0].extend, rows(60, 1))
        assert entered.wait(60)
        more = [RayClient(actor, place) for _ in range(5)]
        assert [len(c) for c in more] == [6] * 5 and len(it._faces) == 3
        gate.set()
        assert long.result(60).tolist() == [6]
    assert clients[0]._id in it._faces._kept


def test_a_client_that_is_collected_leaves(offline, name):
    actor, place = offline.keeper(name, FAR, sampler=RandomSampler())
    it = actor._it
    it._faces.most = 3
    RayClient(actor, place).extend(rows(0, 4))
    for _ in range(12):  # as short tasks do
        client = RayClient(actor, place)
        assert until(lambda client=client: len(it._faces) < 3 and len(client)) == 4
        del client
        gc.collect()
    until(lambda: len(it._faces) == 0)


def test_the_child_of_a_fork_is_told_so(far, offline, name):
    client, _ = far
    client.extend(rows(0, 3))
    with client._lock:
        for use in (client.sample, lambda: len(client), lambda: client.batch_size, lambda: client.put(rows(0, 1))):
            said = forked(use)
            assert said.startswith("RuntimeError") and f"forked from process {os.getpid()}" in said
    near_actor, place = offline.keeper(f"{name}.near", HERE, sampler=RandomSampler(), batch_size=8)
    near = RayClient(near_actor, place)
    near.extend(rows(0, 3))
    assert forked(lambda: near.sample()) == "nothing", "in its memory no Ray is needed"
    near.local.close()


# ---- the owner -------------------------------------------------------------------------------------------------------


def serve(name, **config):
    storage = ShmStorage(10, name=name)
    options = {"remote_config": config} if config else None
    return RemoteTensorDictReplayBuffer(
        storage=storage, batch_size=2, service_backend="ray", service_backend_options=options
    )


def there(name):
    return [n for n in segment.names() if n.startswith(name)]


def test_the_service_ends_with_the_last_of_its_owner_and_its_clients(offline, name, monkeypatch):
    monkeypatch.setattr(lives, "apart", lambda work, *args: work(*args))  # at once
    rb = serve(name)
    assert there(name) == [f"{name}.{HERE[:12]}"]
    client = rb.client()
    del rb
    gc.collect()
    client.extend(rows(0, 3))
    assert len(client) == 3 and there(name), "who was given a client goes on"
    del client
    gc.collect()
    assert not there(name)


def test_the_owner_ends_it_whoever_has_clients(offline, name):
    with serve(name) as rb:
        client = rb.client()
        client.extend(rows(0, 3))
    assert not there(name)
    with pytest.raises(StorageLost):
        client.extend(rows(3, 1))
    client.local.close()


def test_an_actor_that_finds_no_place_is_said_and_given_up(offline, name, monkeypatch):
    monkeypatch.setattr(lives, "_LOOK", 0.02)
    monkeypatch.setattr(lives, "_SAY", 0.05)
    monkeypatch.setattr(lives, "_OPENING", 0.3)
    monkeypatch.setattr(service, "GRACE", 0.05)
    offline.full = True
    with (
        pytest.raises(RuntimeError, match=r"could not be started: Ray has not begun the actor.*'num_gpus': 3.*1 of 2"),
        pytest.warns(RuntimeWarning, match=r"asks for .*'num_gpus': 3.*'CPU': '1 of 2'"),
    ):
        serve(name, num_gpus=3)
    offline.full = False
    monkeypatch.setattr(lives, "_OPENING", 0.0)  # one that makes its segment is waited for
    gate, made = threading.Event(), keepers.Keeper.open

    def slow(self):
        assert gate.wait(60)
        return made(self)

    monkeypatch.setattr(keepers.Keeper, "open", slow)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(serve, name)
        until(lambda: any(a.calls.count("pid") for a in offline.named.values()))
        gate.set()
        making.result(60).shutdown()


def test_a_name_that_is_taken_is_not_removed(offline, name):
    with serve(name) as rb:
        rb.extend(rows(0, 3))
        with pytest.raises(Exception, match="exists"):
            serve(name)
        assert there(name) and len(rb) == 3 and torch.equal(rb[:]["k"], torch.arange(3))


def test_segments_of_dead_keepers_go_and_of_restarted_ones_stay():
    """Between a keeper's death and its new beginning nobody is attached."""
    dead, restarted, named = (f"ray-{os.urandom(6).hex()}.{k}.{'ab' * 6}" for k in range(3))
    named = named.replace("ray-", "mine-")
    try:
        for name in (dead, restarted, named):
            Buffer.create(name, 10, schema={"k": "int64"}, drain="caller").close()
        places.collect("mine.cdcdcdcdcdcd", 0.1)  # it is named: nothing of others is looked at
        places.collect(f"ray-{os.urandom(6).hex()}.{'ab' * 6}", 0.3)
        assert {dead, restarted} <= set(segment.names())
        with Buffer.attach(restarted):
            until(lambda: dead not in segment.names())
            assert {restarted, named} <= set(segment.names())
    finally:
        for name in (dead, restarted, named):
            with contextlib.suppress(BufferNotFound):
                segment.destroy(name, force=True)
