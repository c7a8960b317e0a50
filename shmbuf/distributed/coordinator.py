"""`Coordinator`: the small actor that knows the shards of one buffer, and leases what its limiter allows. It loads no torch.

Nothing that is sampled or stored goes through it. Started again after its death, it takes up the copy of its state that the
shards hold; handles go on meanwhile with the directory they have.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

from shmbuf.distributed.directory import Directory, Entry, Routes, Settings, actor, coordinator_name, shard_name
from shmbuf.distributed.limiting import Allowance
from shmbuf.distributed.rays import NAMESPACE, Gone, Silent, alive_nodes, ask, need_ray

COORDINATOR_GROUPS = {"asking": 8, "ending": 1}
_TICK = 0.02
"""Seconds between two looks at what the shards have inserted, with a limiter."""
_LOOK = 1.0
"""Seconds between two looks at which nodes are alive."""
_PUBLISH = 5.0
"""Seconds after which the shards are given the state again."""
_RECOVERY = 5.0
"""Seconds for the shards to hand over the state they hold."""
_MAKING = 150.0
"""Seconds after which somebody who was to make a shard is taken for dead."""


class Coordinator:
    def __init__(self, settings: Settings, routes: Routes | None):
        ray = need_ray()
        self._settings, self._routes = settings, routes
        self._directory = Directory()
        self._lock, self._tables = threading.RLock(), threading.Lock()
        self._making: dict[str, tuple[int, float]] = {}
        self._looked = self._published = 0.0
        self._stopping = threading.Event()
        batch = settings.batch_size or 1
        self._allowance = None if settings.limiter is None else Allowance.of(settings.limiter, batch)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._recover()
        if self._allowance is not None:
            threading.Thread(target=self._ticking, daemon=True).start()

    # ---- what handles ask -----------------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def settings(self) -> Settings:
        return self._settings

    def directory(self, known: int = -1) -> Directory | None:
        """The directory; None: it is still the one of version ``known``."""
        self._look_at_nodes()
        if time.monotonic() - self._published > _PUBLISH:  # shards that were started again hold nothing
            self._publish()
        return None if self._directory.version == known else self._directory

    def home(self, node: str) -> int | None:
        """The shard that processes of that node write to: its own; another one where it has none and auto_shards is off. None: make one."""
        self._look_at_nodes()
        mine = self._directory.on(node)
        if mine is not None:
            return mine.number
        living = self._directory.living()
        if self._settings.auto_shards or not living:
            return None
        return living[int(node[-8:], 16) % len(living)].number  # the same for all of a node

    def route(self, env_id: str) -> tuple[int, int] | None:
        """Shard and stream of an environment; None: nobody routes environments here, or there is no shard."""
        self._look_at_nodes()
        if self._routes is None:
            return None
        with self._tables:
            before = len(self._routes.streams)
            found = self._routes.route(env_id, {s.number for s in self._directory.living()})
            known = len(self._routes.streams) == before
        if not known:
            self._publish()
        return found

    def shards_of(self, worker: int) -> list[int] | None:
        if self._routes is None:
            return None
        with self._tables:
            return self._routes.shards_of(worker)

    def lost(self, number: int, why: str) -> Directory:
        """A handle found that shard dead for good."""
        self._lose(number, why)
        return self._directory

    def reserve(self, node: str) -> tuple[str, int]:
        """Of the node's shard: ("there", its number); ("make", the number that the asker is to make it with, and then to say `joined` or
        `failed`); ("wait", the number with which somebody else makes it)."""
        self._look_at_nodes()
        with self._lock:
            found = self._directory.on(node)
            if found is not None:
                return "there", found.number
            now = time.monotonic()
            number, since = self._making.get(node, (-1, -_MAKING))
            if now - since < _MAKING:
                return "wait", number
            number = self._directory.next
            self._directory = Directory(self._directory.version, number + 1, self._directory.shards)
            self._making[node] = number, now
            return "make", number

    def joined(self, entry: Entry) -> Directory:
        """That shard is there."""
        with self._lock:
            self._making.pop(entry.node, None)
            self._directory = self._directory.with_(entry)
            if self._allowance is not None:
                self._allowance.add(entry.number)
        if self._allowance is None and self._settings.limiter is not None:
            self._uncap(entry.number)
        if self._routes is not None:
            with self._tables:
                self._routes.joined(entry.number, {s.number for s in self._directory.living()} - {entry.number})
        self._publish()
        return self._directory

    def failed(self, node: str) -> None:
        """It could not be made."""
        with self._lock:
            self._making.pop(node, None)

    def grant(self, n: int, most: int) -> tuple[int, str]:
        """How many rows may be sampled now, a multiple of n; or 0 and why not. Raises ValueError: so many can never be."""
        with self._lock:
            if self._allowance is None:
                return most, ""
            if not self._allowance.could_ever(n):
                raise ValueError(
                    f"a batch of {n:,} can never be sampled: {self._settings.limiter} stops collectors before"
                )
            granted = self._allowance.grant(n, most)
            return granted, "" if granted else self._allowance.why(n)

    def refund(self, n: int) -> None:
        if self._allowance is not None:
            with self._lock:
                self._allowance.refund(n)

    def unlimit(self) -> None:
        """Nothing is limited any more."""
        with self._lock:
            self._allowance = None
            shards = [s.number for s in self._directory.living()]
        for k in shards:
            self._uncap(k)
        self._publish()

    def _uncap(self, number: int) -> None:
        with contextlib.suppress(Exception):
            shard = actor(shard_name(self._settings.name, number))
            ask(shard.cap.options(concurrency_group="looking").remote(None), 10.0)

    def limits(self) -> dict[str, Any] | None:
        with self._lock:
            return None if self._allowance is None else self._allowance.figures()

    def shutdown(self) -> None:
        """End all shards and remove their segments."""
        self._stopping.set()
        ray = need_ray()
        entries = [s for s in self._directory.shards if s.lost is None]
        pending = []
        for entry in entries:
            with contextlib.suppress(Exception):
                shard = actor(shard_name(self._settings.name, entry.number))
                pending.append((shard, shard.destroy.options(concurrency_group="looking").remote()))
        for shard, ref in pending:
            with contextlib.suppress(Exception):
                ask(ref, 30.0)
            with contextlib.suppress(Exception):
                ray.kill(shard)

    # ---- shards ---------------------------------------------------------------------------------------------------

    def _lose(self, number: int, why: str) -> None:
        with self._lock:
            before = self._directory
            self._directory = before.without(number, why)
            if self._directory is before:
                return
            if self._allowance is not None:
                self._allowance.lose(number)
        self._publish()

    def _look_at_nodes(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        alive = set(alive_nodes())
        for entry in self._directory.living():
            if entry.node not in alive:
                self._lose(entry.number, "its node died")

    # ---- what outlives this process -------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        with self._lock, self._tables:
            return {"directory": self._directory, "routes": self._routes, "allowance": self._allowance}

    def _publish(self) -> None:
        state, self._published = self._state(), time.monotonic()
        for entry in self._directory.living():
            with contextlib.suppress(Exception):
                shard = actor(shard_name(self._settings.name, entry.number))
                shard.hold.options(concurrency_group="looking").remote(state)

    def _recover(self) -> None:
        ray = need_ray()
        prefix, found = shard_name(self._settings.name, 0)[:-1], []
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == NAMESPACE and named["name"].startswith(prefix):
                with contextlib.suppress(Exception):
                    shard = ray.get_actor(named["name"], namespace=NAMESPACE)
                    found.append(
                        (
                            int(named["name"][len(prefix) :]),
                            shard,
                            shard.held.options(concurrency_group="looking").remote(),
                        )
                    )
        best, give_up = None, time.monotonic() + _RECOVERY
        for number, _, ref in found:
            self._directory = Directory(0, max(self._directory.next, number + 1))
            with contextlib.suppress(Exception):  # one that is being started again knows nothing
                held: dict[str, Any] | None = ask(ref, max(0.0, give_up - time.monotonic()))
                if held is not None and (best is None or _newer(held, best)):
                    best = held
        if best is not None:
            kept = best["directory"]
            self._directory = Directory(kept.version + 1, max(kept.next, self._directory.next), kept.shards)
            self._routes, self._allowance = best["routes"], best["allowance"]
        for number, shard, _ in found:  # one that was being added
            if self._directory.of(number) is None:
                with contextlib.suppress(Exception):
                    place = ask(shard.open.options(concurrency_group="looking").remote(), 30.0)
                    self.joined(Entry(number, place.node, place))

    # ---- the limiter ----------------------------------------------------------------------------------------------

    def _ticking(self) -> None:
        while not self._stopping.wait(_TICK) and self._allowance is not None:
            with contextlib.suppress(Exception):
                self._tick()

    def _tick(self) -> None:
        """Hear what was inserted, and move the caps."""
        allowance, settings = self._allowance, self._settings
        if allowance is None:
            return
        state = self._state()
        with self._lock:
            plan = allowance.plan() if allowance.caps_inserts else {}
            for k, cap in plan.items():
                if cap > allowance.caps[k]:  # promised from now on, whether the shard hears of it or not
                    allowance.caps[k] = cap
            shards = [s.number for s in self._directory.living()]
        pending = []
        for k in shards:
            with contextlib.suppress(ValueError):
                shard = actor(shard_name(settings.name, k))
                pending.append((k, shard.cap.options(concurrency_group="looking").remote(plan.get(k, -1), state)))
        for k, ref in pending:
            try:
                rows, waiting = ask(ref, 5.0)
            except Gone as e:
                self._lose(k, str(e))
                continue
            except Silent:
                continue
            with self._lock:
                if k in plan and k in allowance.caps:
                    allowance.caps[k] = plan[k]
                allowance.report(k, rows, waiting)
        if self._allowance is None:  # meanwhile
            for k in plan:
                self._uncap(k)


def _newer(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def key(state: dict[str, Any]) -> tuple[int, int]:
        return state["directory"].version, state["allowance"].sampled if state["allowance"] is not None else 0

    return key(a) > key(b)


def start(settings: Settings, routes: Routes | None) -> Any:
    """The coordinator of a new buffer. Raises ValueError if there is one of that name."""
    ray = need_ray()
    return (
        ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=COORDINATOR_GROUPS)(Coordinator)
        .options(name=coordinator_name(settings.name), namespace=NAMESPACE, lifetime="detached")
        .remote(settings, routes)
    )
