"""`Coordinator`: the small actor that knows the shards of one buffer, and leases what its limiter allows. It loads no torch.

Nothing that is sampled or stored goes through it. Started again after its death, it takes up the copy of its state that the
shards hold; handles go on meanwhile with the directory they have.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from dataclasses import replace
from typing import Any

from shmbuf.distributed.directory import (
    Directory,
    Entry,
    Reserved,
    Routes,
    Settings,
    actor,
    coordinator_name,
    shard_name,
)
from shmbuf.distributed.ending import end_shards, named_shards
from shmbuf.distributed.limiting import Allowance, Report
from shmbuf.distributed.rays import NAMESPACE, Gone, alive_nodes, ask, need_ray
from shmbuf.errors import ShmbufError
from shmbuf.limiter import Words

COORDINATOR_GROUPS = {"asking": 8, "ending": 1}
_TICK = 0.02
"""Seconds between two looks at what a shard has inserted, with a limiter."""
_SILENT = 0.1
"""Seconds without an answer after which a shard is given nothing more."""
_REPORTS = 5.0
"""Seconds for all shards to say what they hold, where counting begins."""
_LOOK = 1.0
"""Seconds between two looks at which nodes are alive."""
_PUBLISH = 5.0
"""Seconds after which the shards are given the state again."""
_RECOVERY = 5.0
"""Seconds for the shards to hand over the state they hold."""
_MAKING = 20.0
"""Seconds without a word after which somebody who was to make a shard is taken for dead."""
_LOST_VERSIONS = 1000
"""More than there were since the shards were told; so that no two directories have the same version."""
_LEFT_OVER = 20.0
"""Seconds to remove shards of an earlier buffer of that name, whose coordinator is gone."""


class Coordinator:
    def __init__(self, settings: Settings, routes: Routes | None):
        ray = need_ray()
        self._settings, self._routes = settings, routes
        self._directory = Directory()
        self._lock, self._tables = threading.RLock(), threading.Lock()
        self._making: dict[str, tuple[Reserved, float]] = {}
        self._looked = self._published = 0.0
        self._stopping, self._awake = threading.Event(), threading.Event()
        self._actors: dict[int, Any] = {}
        self._pending: dict[
            int, tuple[Any, int | None, float]
        ] = {}  # of the ticking thread: what was asked, the cap sent, when
        self._capless: set[int] = set()  # shards that have not said yet that their cap is gone
        self._clock = 0
        self._allowance: Allowance | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._recover()
        else:
            if settings.limiter is not None:
                self._allowance = Allowance.of(settings.limiter, settings.batch_size or 1)
                self._directory = replace(self._directory, limited=True, regime=1)
            if named_shards(settings.name):
                end_shards(settings.name, (), _LEFT_OVER)
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
        """Shard and stream of an environment; None: there is no shard. Raises LookupError: nobody routes environments here."""
        self._look_at_nodes()
        if self._routes is None:
            raise LookupError(env_id)
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

    def reserve(self, node: str) -> Reserved:
        """The number of that node's shard. Who is to make it says `making` meanwhile, and then `joined` or `failed`. Raises ShmbufError:
        the buffer is being shut down."""
        self._look_at_nodes()
        with self._lock:
            self._refuse_the_late()
            found = self._directory.on(node)
            if found is not None:
                return Reserved("there", found.number)
            reserved, since = self._making.get(node, (None, 0.0))
            if reserved is not None and time.monotonic() - since < _MAKING:
                return reserved._replace(what="wait")
            number = self._directory.next
            self._directory = replace(self._directory, next=number + 1)
            limited = self._allowance is not None and self._allowance.caps_inserts
            before = -1 if reserved is None else reserved.number
            self._making[node] = Reserved("make", number, limited, before), time.monotonic()
            return self._making[node][0]

    def making(self, node: str, number: int) -> None:
        """It is being made."""
        with self._lock:
            reserved, _ = self._making.get(node, (None, 0.0))
            if reserved is not None and reserved.number == number:
                self._making[node] = reserved, time.monotonic()

    def joined(self, entry: Entry) -> Directory:
        """That shard is there. Raises ShmbufError: the buffer is being shut down."""
        with self._lock:
            self._refuse_the_late()
            reserved, _ = self._making.pop(entry.node, (None, 0.0))
            if self._directory.of(entry.number) is not None:
                return self._directory  # somebody who waited for it was first to say so
            self._directory = self._directory.with_(entry)
            self._capless.add(entry.number)
            if self._allowance is not None:
                held = reserved is not None and reserved.number == entry.number and reserved.limited
                self._allowance.add(entry.number, cap=0 if held else None)
        if self._routes is not None:
            with self._tables:
                self._routes.joined(entry.number, {s.number for s in self._directory.living()} - {entry.number})
        self._publish()
        self._awake.set()
        return self._directory

    def _refuse_the_late(self) -> None:
        if self._stopping.is_set():
            raise ShmbufError(f"buffer {self._settings.name!r} is being shut down")

    def failed(self, node: str, number: int) -> None:
        """It could not be made."""
        with self._lock:
            if node in self._making and self._making[node][0].number == number:
                del self._making[node]

    # ---- the limiter, for handles ---------------------------------------------------------------------------------

    def grant(self, n: int, most: int) -> tuple[int, str]:
        """How many rows may be sampled now, a multiple of n; or 0 and why not. Raises ValueError: so many can never be."""
        with self._lock:
            if self._allowance is None:
                return most, ""
            if not self._allowance.could_ever(n):
                raise ValueError(
                    f"a batch of {n:,} can never be sampled: the limiter of buffer {self._settings.name!r} stops collectors before"
                )
            granted = self._allowance.grant(n, most)
            return granted, "" if granted else self._allowance.why(n)

    def refund(self, n: int, regime: int) -> None:
        """Rows that were granted under that limiter and not drawn."""
        with self._lock:
            if self._allowance is not None and self._directory.regime == regime:
                self._allowance.refund(n)

    def limit(self, limiter: Words | None, batch: int) -> None:
        """Another one, or none, from now on. Raises ValueError, and changes nothing, where it would deadlock with batches of that size."""
        fresh = None if limiter is None else Allowance.of(limiter, batch)
        reports = self._reports() if fresh is not None and self._allowance is None else {}
        with self._lock:
            before = self._allowance
            if limiter is None or fresh is None:
                self._allowance = None
            elif before is not None:
                before.change(limiter, batch)
            else:
                for entry in self._directory.living():
                    fresh.add(entry.number, seen=False)
                for k, report in reports.items():
                    fresh.heard(k, report)
                fresh.change(limiter, batch, before=False)
                self._allowance = fresh
            self._capless = {s.number for s in self._directory.living()}
            old = self._directory
            self._directory = replace(old, version=old.version + 1, regime=old.regime + 1, limited=limiter is not None)
        self._publish()
        self._awake.set()

    def recount(self, saved: dict[str, Any] | None) -> None:
        """The rows of a checkpoint came in, of which the limiter stood so. They count for nothing."""
        reports = self._reports() if self._allowance is not None else {}
        with self._lock:
            if self._allowance is not None:
                self._allowance.unseen |= set(self._allowance.inserted) - set(reports)
                for k, report in reports.items():
                    self._allowance.heard(k, report)
                self._allowance.recount(saved)

    def kept(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        with self._lock:
            return None if self._allowance is None else self._allowance.state()

    def _reports(self) -> dict[int, Report]:
        ray = need_ray()
        asked = {self._ask_cap(s.number, -1, None): s.number for s in self._directory.living()}
        asked.pop(None, None)
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=_REPORTS)[0] if asked else []
        found = {}
        for ref in ready:
            with contextlib.suppress(Exception):
                found[asked[ref]] = ask(ref, 1.0)
        return found

    def limits(self) -> dict[str, Any] | None:
        with self._lock:
            return None if self._allowance is None else self._allowance.figures()

    def shutdown(self, timeout: float) -> None:
        """End all shards and remove their segments; no more are made."""
        with self._lock:
            self._stopping.set()
        self._awake.set()
        end_shards(self._settings.name, self._directory.shards, timeout)

    # ---- shards ---------------------------------------------------------------------------------------------------

    def _lose(self, number: int, why: str) -> None:
        with self._lock:
            before = self._directory
            self._directory = before.without(number, why)
            if self._directory is before:
                return
            self._capless.discard(number)
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

    def _numbers(self) -> bytes:
        with self._lock:
            self._clock += 1
            return pickle.dumps((self._clock, self._allowance))

    def _publish(self) -> None:
        with self._lock, self._tables:  # pickled here: others change it
            state, version = pickle.dumps((self._directory, self._routes)), self._directory.version
        numbers, self._published = self._numbers(), time.monotonic()
        for entry in self._directory.living():
            with contextlib.suppress(Exception):
                self._actor(entry.number).hold.options(concurrency_group="looking").remote(version, state, numbers)

    def _recover(self) -> None:
        """The newest directory and the newest numbers that any shard holds; then shards that none of it knows."""
        ray = need_ray()
        found = named_shards(self._settings.name)
        asked = {}
        for number, shard in found.items():
            self._directory = Directory(0, max(self._directory.next, number + 1))
            with contextlib.suppress(Exception):
                asked[shard.held.options(concurrency_group="looking").remote()] = number
        states, numbers = [], []
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=_RECOVERY)[0] if asked else []:
            with contextlib.suppress(Exception):  # one that is being started again knows nothing
                state, held = ask(ref, 1.0)
                states += [] if state is None else [pickle.loads(state)]
                numbers += [] if held is None else [pickle.loads(held)]
        if states:
            kept, self._routes = max(states, key=lambda s: s[0].version)
            self._directory = replace(
                kept, version=kept.version + _LOST_VERSIONS, next=max(kept.next, self._directory.next)
            )
        if numbers:
            self._clock, self._allowance = max(numbers, key=lambda n: n[0])
        elif not states and self._settings.limiter is not None:  # nobody holds anything: as in the beginning
            self._allowance = Allowance.of(self._settings.limiter, self._settings.batch_size or 1)
        limited = self._allowance is not None
        if limited != self._directory.limited:
            self._directory = replace(self._directory, limited=limited, regime=self._directory.regime + 1)
        living = {s.number for s in self._directory.living()}
        self._capless = set(living)
        if self._allowance is not None:
            for k in set(self._allowance.inserted) - living:
                self._allowance.lose(k)
            for k in living:
                self._allowance.add(k)
            self._allowance.restarted()
        for number, shard in found.items():  # one that was being added
            if self._directory.of(number) is None:
                with contextlib.suppress(Exception):
                    place = ask(shard.open.options(concurrency_group="looking").remote(), _RECOVERY)
                    self.joined(Entry(number, place.node, place))

    # ---- the limiter ----------------------------------------------------------------------------------------------

    def _actor(self, number: int) -> Any:
        """Raises ValueError: Ray knows none."""
        if number not in self._actors:
            self._actors[number] = actor(shard_name(self._settings.name, number))
        return self._actors[number]

    def _ask_cap(self, number: int, cap: int | None, numbers: bytes | None) -> Any:
        """A reference; None: there is no such actor."""
        try:
            return self._actor(number).cap.options(concurrency_group="looking").remote(cap, numbers)
        except ValueError as e:
            self._lose(number, str(e))
            return None

    def _ticking(self) -> None:
        while not self._stopping.is_set():
            if self._allowance is None and not self._capless and not self._pending:
                self._awake.wait()
                self._awake.clear()
                continue
            since = time.monotonic()
            with contextlib.suppress(Exception):
                self._tick()
            self._stopping.wait(max(0.0, since + _TICK - time.monotonic()))

    def _tick(self) -> None:
        """Send caps to shards that have answered, and hear what was inserted from those that answer now."""
        numbers = self._numbers()
        with self._lock:
            free = {s.number for s in self._directory.living()} - set(self._pending)
            caps: dict[int, int | None] = dict.fromkeys(free, -1)  # as it is
            if self._allowance is None:
                caps = dict.fromkeys(free & self._capless)
            elif not self._allowance.caps_inserts:
                caps.update(dict.fromkeys(free & self._capless))
            else:
                caps.update(self._allowance.messages(free))
                self._capless.clear()
        for k, cap in caps.items():
            ref = self._ask_cap(k, cap, numbers)
            if ref is not None:
                self._pending[k] = ref, cap, time.monotonic()
        waited = [ref for ref, _, _ in self._pending.values()]
        if not waited:
            return
        ready = set(need_ray().wait(waited, num_returns=len(waited), timeout=_TICK)[0])
        for k, (ref, cap, since) in list(self._pending.items()):
            if ref in ready:
                del self._pending[k]
                self._answered(k, ref, cap)
            elif time.monotonic() - since > _SILENT and self._allowance is not None:
                with self._lock:
                    self._allowance.silent(k)

    def _answered(self, number: int, ref: Any, cap: int | None) -> None:
        try:
            report = ask(ref, 1.0)
        except Gone as e:
            self._lose(number, str(e))
            return
        except Exception:  # it is being started again
            with self._lock:
                if self._allowance is not None:
                    self._allowance.silent(number)
            return
        with self._lock:
            if cap is None and report.cap is None:
                self._capless.discard(number)
            if self._allowance is not None:
                self._allowance.heard(number, report)


def start(settings: Settings, routes: Routes | None) -> Any:
    """The coordinator of a new buffer, which outlives this process if the buffer does. Raises ValueError if there is one of that name."""
    ray = need_ray()
    return (
        ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups=COORDINATOR_GROUPS)(Coordinator)
        .options(
            name=coordinator_name(settings.name),
            namespace=NAMESPACE,
            lifetime="non_detached" if settings.ends else "detached",
        )
        .remote(settings, routes)
    )
