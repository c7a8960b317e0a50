"""`Link`: one handle's way to one shard: into its memory on the same node, through its actor from others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from shmbuf.attaching import attach
from shmbuf.distributed.directory import Entry, actor, shard_name
from shmbuf.distributed.drawing import NOTHING, Drawer, Mass, Part
from shmbuf.distributed.packing import unpack
from shmbuf.distributed.rays import Gone, Silent, ask, check_alive, here, need_ray
from shmbuf.distributed.service import RayClient
from shmbuf.errors import NotEnoughRows
from shmbuf.samplers import SAMPLERS

MOST_UPDATES = 8
"""Priority updates on their way to one shard; one more waits for the oldest."""
_LOOK = 1.0
"""Seconds between two looks whether the node of a shard that says nothing is alive."""
Spec = tuple[str, dict[str, Any], "str | None"]


class Link:
    """Attributes: client: for puts and everything else that one shard does alone. last: the mass it last told.

    Methods that ask raise Gone (the shard is lost) and Silent (no answer in time: it is left out until `usable`).
    """

    def __init__(self, name: str, entry: Entry, timeout: float):
        assert entry.place is not None
        self.number, self.entry, self.timeout = entry.number, entry, timeout
        self.actor = actor(shard_name(name, entry.number))
        self.client = RayClient(self.actor, entry.place)
        self.is_local = entry.node == here()
        self.last: Mass | None = None
        self.applied = self.stale = self.dropped = 0
        self._drawers: dict[str, Drawer] = {}
        self._updates: deque[tuple[Any, int]] = deque()
        self._ping: Any = None
        self._looked = 0.0
        self._lock = threading.RLock()

    def _call(self, method: str, *args: Any, group: str = "looking") -> Any:
        return getattr(self.actor, method).options(concurrency_group=group).remote(*args)

    # ---- silence --------------------------------------------------------------------------------------------------

    def went_silent(self) -> None:
        """Ask for a sign of life; nothing else is asked before it comes."""
        with self._lock:
            if not self.is_local and self._ping is None:
                self._ping = self._call("pid")

    @property
    def usable(self) -> bool:
        """Whether it is to be asked. Raises Gone."""
        with self._lock:
            if self._ping is None:
                return True
            ready, _ = need_ray().wait([self._ping], timeout=0)
            if not ready:
                if time.monotonic() - self._looked > _LOOK:
                    self._looked = time.monotonic()
                    check_alive(self.entry.node)
                return False
            ping, self._ping = self._ping, None
            try:
                ask(ping, self.timeout)
            except Silent:
                check_alive(self.entry.node)
                self._ping = self._call("pid")
                return False
            return True

    # ---- drawing --------------------------------------------------------------------------------------------------

    def _drawer(self, spec: Spec, seed: int | None) -> Drawer:
        key = repr(spec)
        with self._lock:
            if key not in self._drawers:
                kind, arguments, _ = spec
                rb = attach(self.client.name, sampler=SAMPLERS[kind](**arguments), seed=seed)
                self._drawers[key] = Drawer(rb)
            return self._drawers[key]

    def ask_mass(self, spec: Spec, seed: int | None) -> Any:
        """A reference, or the mass itself."""
        return self._drawer(spec, seed).mass() if self.is_local else self._call("mass", spec)

    def mass(self, asked: Any, give_up: float) -> Mass:
        if not isinstance(asked, Mass):
            asked = ask(asked, max(0.0, give_up - time.monotonic()))
        self.last = asked
        return asked

    def ask_part(self, spec: Spec, n: int, seed: int | None) -> Any:
        """A reference, or the part itself, or why there is none."""
        if not self.is_local:
            return self._call("draw", spec, n, group="reading")
        try:
            return self._drawer(spec, seed).draw(n)
        except NotEnoughRows as e:
            return e

    def part(self, asked: Any, give_up: float) -> Part:
        """Raises NotEnoughRows: it has none; Lapped."""
        if isinstance(asked, NotEnoughRows):
            self.last = NOTHING
            raise asked
        if isinstance(asked, Part):
            return asked
        try:
            td, leaves, mass, self.last = ask(asked, max(0.0, give_up - time.monotonic()))
        except NotEnoughRows:
            self.last = NOTHING
            raise
        return Part(unpack(td), leaves, mass)

    # ---- priorities -----------------------------------------------------------------------------------------------

    def prioritise(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Here at once; to another node without waiting for it. Raises Gone."""
        if self.is_local:
            done = self.client.local.buffer.set_priorities(ids, priorities)
            self._count(int(done.sum()), int((~done).sum()))
            return
        with self._lock:
            while len(self._updates) >= MOST_UPDATES:
                self._settle(self.timeout)
            self._updates.append((self._call("prioritise", ids, priorities), len(ids)))

    def _settle(self, timeout: float | None) -> None:
        ref, n = self._updates.popleft()
        try:
            self._count(*ask(ref, timeout))
        except Gone:
            self.dropped += n
            raise
        except Silent:
            self.dropped += n
            self.went_silent()
        except (IndexError, RuntimeError, ValueError):  # rows it never had: it was emptied, or loaded
            self.stale += n

    def _count(self, applied: int, stale: int) -> None:
        self.applied += applied
        self.stale += stale

    def settle(self, timeout: float | None) -> None:
        """Wait for the updates that are on their way. Raises Gone."""
        with self._lock:
            while self._updates:
                self._settle(timeout)

    def drop_updates(self) -> None:
        """The shard is lost."""
        with self._lock:
            self.dropped += sum(n for _, n in self._updates)
            self._updates.clear()

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            drawers, self._drawers = list(self._drawers.values()), {}
        for drawer in drawers:
            with contextlib.suppress(Exception):
                drawer.rb.close()
        handle = self.client._handle
        with contextlib.suppress(Exception):
            if handle is not None:
                handle.close()
            elif need_ray().is_initialized():
                self._call("leave", self.client._id)
