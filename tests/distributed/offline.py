"""Actors that are threads of this process, in place of Ray's: everything above `shmbuf.distributed.rays` is the real thing.

What goes to an actor and comes back is pickled. An actor can be stopped, killed for good, or lose its segment.
"""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import SimpleNamespace
from typing import Any

from ray import cloudpickle

from shmbuf import ShardedReplayBuffer, TensorDictReplayBuffer
from shmbuf.distributed import (
    client,
    coordinator,
    directory,
    joining,
    keeper,
    links,
    lives,
    places,
    reading,
    service,
    sharing,
    writing,
)
from shmbuf.distributed.directory import Directory, Entry, Settings, shard_name
from shmbuf.distributed.places import Recipe
from shmbuf.distributed.rays import Gone, Late, Silent
from shmbuf.distributed.shard import Shard
from shmbuf.storage import ShmStorage

HERE, FAR = "a" * 56, "b" * 56
_PATCHED = (client, lives, coordinator, directory, joining, keeper, links, places, reading, service, sharing, writing)


class Actor:
    """Its methods are called as Ray's: ``actor.method.options(...).remote(*args)``."""

    def __init__(self, it: Any):
        self._it, self._threads, self._going = it, ThreadPoolExecutor(16), threading.Event()
        self._going.set()
        self._dead: str | None = None
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        call = SimpleNamespace(remote=lambda *args: self._remote(method, args))
        return SimpleNamespace(options=lambda **_: call, remote=call.remote)

    def __reduce__(self) -> Any:
        return _same, (id(self),)

    def _remote(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        sent = cloudpickle.dumps(args)
        self.calls.append(method)

        def work() -> bytes:
            self._going.wait()
            if self._dead is not None:
                raise Gone(self._dead)
            return cloudpickle.dumps(getattr(self._it, method)(*pickle.loads(sent)))

        return self._threads.submit(work)

    def stop(self) -> None:
        """As SIGSTOP."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def die(self, why: str = "killed") -> None:
        self._dead = why
        self._going.set()


_ACTORS: dict[int, Actor] = {}


def _same(number: int) -> Actor:
    return _ACTORS[number]


def ask(ref: Future[Any], timeout: float | None = None) -> Any:
    try:
        return pickle.loads(ref.result(timeout))
    except TimeoutError as e:
        if ref.done():  # the actor's own
            raise
        raise Late("not in time") from e


def wait(refs: list[Future[Any]], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    done, others = wait_for(refs, timeout)
    return list(done), list(others)


class Offline:
    """A cluster of two nodes, of which this process is on the first."""

    def __init__(self, monkeypatch: Any):
        self.nodes, self.here, self.named = [HERE, FAR], HERE, {}
        context = SimpleNamespace(was_current_actor_reconstructed=False, get_node_id=lambda: self.here)
        ray = SimpleNamespace(
            wait=wait,
            is_initialized=lambda: True,
            get_runtime_context=lambda: context,
            kill=lambda actor: actor.die(),
            remote=self._remote,
            cluster_resources=lambda: {"CPU": 2.0, "node:here": 1.0},
            available_resources=lambda: {"CPU": 1.0},
        )
        self.full = False

        def check_alive(node: str) -> None:
            if node not in self.nodes:
                raise Gone("its node died")

        new = {
            "need_ray": lambda: ray,
            "running": lambda init=None: ray,
            "here": lambda: self.here,
            "ask": ask,
            "alive_nodes": lambda: list(self.nodes),
            "check_alive": check_alive,
            "actor": self._actor,
        }
        for module in _PATCHED:
            for name, value in new.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        self._closing: list[Any] = []

    def _actor(self, name: str) -> Actor:
        if name not in self.named:
            raise ValueError(f"no actor {name}")
        return self.named[name]

    def _remote(self, **config: Any) -> Any:
        """As ray.remote, of a class. Where the cluster is full an actor never begins."""
        strategy = config.get("scheduling_strategy")
        node = HERE if strategy is None else strategy.node_id

        def made(cls: type, *args: Any) -> Actor:
            it = self.on(node, lambda: cls(*args))
            self._closing.append(it)
            actor = self.start(f"unnamed.{len(self.named)}", it)
            if self.full:
                actor.stop()
            return actor

        return lambda cls: SimpleNamespace(remote=lambda *args: made(cls, *args))

    def start(self, name: str, it: Any) -> Actor:
        actor = self.named[name] = Actor(it)
        _ACTORS[id(actor)] = actor
        return actor

    def on(self, node: str, make: Any) -> Any:
        """What make() returns while this process is on that node."""
        before, self.here = self.here, node
        try:
            return make()
        finally:
            self.here = before

    def keeper(self, name: str, node: str, cls: type = keeper.Keeper, **keywords: Any) -> tuple[Actor, Any]:
        """The actor of one segment, and its place."""
        storage = keywords.pop("storage", None) or ShmStorage(keywords.pop("capacity", 1000), name=name)
        recipe = Recipe.of(TensorDictReplayBuffer, {"storage": storage, **keywords}, name)
        it = self.on(node, lambda: cls(recipe))
        place = self.on(node, it.open)
        self._closing.append(it)
        return self.start(name, it), place

    def sharded(self, name: str, nodes: list[str], sampler: Any, **how: Any) -> Cluster:
        return Cluster(self, name, nodes, sampler, **how)

    def end(self) -> None:
        for actor in self.named.values():
            actor.go_on()
            actor._threads.shutdown(wait=True)
            _ACTORS.pop(id(actor), None)
        for it in self._closing:
            it.destroy()


class _Coordinator:
    def __init__(self, directory: Directory):
        self._directory, self.workers = directory, {}

    def directory(self, known: int = -1) -> Directory | None:
        return None if self._directory.version == known else self._directory

    def lost(self, number: int, why: str) -> None:
        self._directory = self._directory.without(number, why)

    def shards_of(self, worker: int) -> list[int]:
        return self.workers[worker]

    granted = 0

    def grant(self, n: int, most: int) -> tuple[int, str]:
        self.granted += most
        return most, ""

    def kept(self) -> None:
        """There is no limiter."""

    def recount(self, saved: None) -> None:
        pass


class Cluster:
    """A sharded buffer: ``shards`` are the actors, ``rows`` their replay buffers, by number."""

    def __init__(
        self,
        offline: Offline,
        name: str,
        nodes: list[str],
        sampler: Any,
        remote_timeout: float = 2.0,
        capacity: int = 1000,
    ):
        self.offline, self.shards, self.it = offline, [], []
        entries = []
        offline.nodes = [*dict.fromkeys([*offline.nodes, *nodes])]
        for number, node in enumerate(nodes):
            keywords = {"sampler": sampler, "capacity": capacity}
            actor, place = offline.keeper(f"{name}.{number}", node, Shard, **keywords)
            offline.named[shard_name(name, number)] = actor
            self.shards.append(actor)
            self.it.append(actor._it)
            entries.append(Entry(number, node, place))
        recipe = Recipe.of(TensorDictReplayBuffer, {}, name)
        self.settings = Settings(
            name, recipe, (sampler.name, sampler.arguments()), None, ("td_error",), None, False, {}, remote_timeout
        )
        self.coordinator = offline.start(name, _Coordinator(Directory(1, len(nodes), tuple(entries))))

    @property
    def rows(self) -> list[Any]:
        return [it._main() for it in self.it]

    def handle(self, sampler: Any, batch_size: int = 32, **how: Any) -> ShardedReplayBuffer:
        rb = ShardedReplayBuffer.__new__(ShardedReplayBuffer)
        ways = {"prefetch": None, "seed": None, "transform": None, **how}
        settings = self.settings._replace(batch_size=batch_size)
        rb._join(settings, self.coordinator, self.coordinator._it._directory, sampler=sampler, **ways)
        return rb


def forked(work: Any) -> str:
    """What work() says in a child of a fork."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                work()
                said = "nothing"
            except BaseException as e:
                said = f"{type(e).__name__}: {e}"
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        said = f.read()
    os.waitpid(pid, 0)
    return said


__all__ = ["FAR", "HERE", "Actor", "Cluster", "Offline", "Silent", "forked"]
