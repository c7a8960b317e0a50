"""`Link`: one handle's way to one shard: into its memory on the same node, through its actor from others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from shmbuf.distributed.client import RayClient
from shmbuf.distributed.directory import Entry, actor, shard_name
from shmbuf.distributed.drawing import NOTHING, Drawers, Mass, Part, Spec
from shmbuf.distributed.packing import unpack
from shmbuf.distributed.rays import Gone, Silent, ask, check_alive, here, need_ray
from shmbuf.errors import BufferNotFound, Lapped, NotEnoughRows, StorageLost

MOST_UPDATES = 8
"""Priority updates on their way to one shard; one more waits for the oldest."""
_MOST_DRAWERS = 8
"""Of one handle, of its node's shard: with slices there is one for each size of batch."""
_KNOWN, _EMPTY = 1.0, 0.1
"""Seconds that a mass is good for, where the one of the last draw will do; and that of a shard without rows."""
_LOOK = 1.0
"""Seconds between two looks whether the node of a shard that says nothing is alive."""


@contextlib.contextmanager
def lost_is_gone() -> Iterator[None]:
    """A shard without its segment, though its actor lives: its rows are gone, as with its node."""
    try:
        yield
    except (StorageLost, BufferNotFound) as e:
        raise Gone(str(e)) from e


class Link:
    """Attributes: client: for puts and everything else that one shard does alone. last: the mass it last told.

    Methods that ask raise Gone (the shard is lost) and Silent (no answer in time: it is left out until `usable`).
    """

    def __init__(self, name: str, entry: Entry, timeout: float, owner: str):
        assert entry.place is not None
        self.number, self.entry, self.timeout = entry.number, entry, timeout
        self.actor = actor(shard_name(name, entry.number))
        self.client = RayClient(self.actor, entry.place)
        self.client._id = owner  # what `leave` is told
        self.is_local = entry.node == here()
        self._begin()

    def _begin(self) -> None:
        self._last: Mass | None = None
        self._told = 0.0
        self.applied = self.stale = self.dropped = 0
        self._drawers = Drawers(lambda: self.client.name, _MOST_DRAWERS)
        self._updates: deque[tuple[Any, int]] = deque()
        self._ping: Any = None
        self._looked = 0.0
        self._lock = threading.RLock()

    def _call(self, method: str, *args: Any, group: str = "looking") -> Any:
        return getattr(self.actor, method).options(concurrency_group=group).remote(*args)

    def answer(self, ref: Any, give_up: float) -> Any:
        """Of `_call`, until time.monotonic() is ``give_up``."""
        with lost_is_gone():
            return ask(ref, max(0.0, give_up - time.monotonic()))

    # ---- silence --------------------------------------------------------------------------------------------------

    def went_silent(self) -> None:
        """Ask for a sign of life; nothing else is asked before it comes."""
        with self._lock:
            if not self.is_local and self._ping is None:
                self._ping = self._call("pid")

    @property
    def silent(self) -> bool:
        """As far as is known: nothing is asked."""
        return self._ping is not None

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

    @property
    def last(self) -> Mass | None:
        """The mass as the shard last told it; None: not yet, or too long ago. One without rows is not drawn, so it tells nothing by itself."""
        known = self._last
        return (
            known if known is not None and time.monotonic() - self._told < (_KNOWN if known.sum else _EMPTY) else None
        )

    @last.setter
    def last(self, mass: Mass | None) -> None:
        self._last, self._told = mass, time.monotonic()

    def ask_mass(self, spec: Spec) -> Any:
        """A reference, or the mass itself."""
        if not self.is_local:
            self.client._known()
            return self._call("mass", spec.at(self.number))
        with lost_is_gone():
            return self._drawers.mass(spec.at(self.number))

    def mass(self, asked: Any, give_up: float) -> Mass:
        if not isinstance(asked, Mass):
            asked = self.answer(asked, give_up)
        self.last = asked
        return asked

    def ask_part(self, spec: Spec, n: int) -> Any:
        """A reference, or the part itself, or why there is none."""
        if not self.is_local:
            return self._call("draw", spec.at(self.number), n, group="reading")
        try:
            return self._drawers.draw(spec.at(self.number), n)
        except (NotEnoughRows, Lapped, StorageLost, BufferNotFound) as e:
            return e

    def part(self, asked: Any, give_up: float) -> Part:
        """Raises NotEnoughRows: it has none; Lapped."""
        try:
            with lost_is_gone():
                if isinstance(asked, Exception):
                    raise asked
                if not isinstance(asked, tuple):
                    asked = self.answer(asked, give_up)
                part, self.last = asked
        except NotEnoughRows:
            self.last = NOTHING
            raise
        return part._replace(td=unpack(part.td))

    # ---- priorities -----------------------------------------------------------------------------------------------

    def prioritise(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Here at once; to another node without waiting for it: if that says nothing they are dropped, and counted. Raises Gone."""
        if self.is_local:
            with lost_is_gone():
                done = self.client.local.buffer.set_priorities(ids, priorities)
            return self._count(int(done.sum()), int((~done).sum()))
        if not self.usable:
            return self._drop(len(ids))
        with self._lock:
            self._updates.append((self._call("prioritise", ids, priorities), len(ids)))
            oldest = self._updates.popleft() if len(self._updates) > MOST_UPDATES else None
        if oldest is not None:  # other threads sample meanwhile
            self._settle(oldest, time.monotonic() + self.timeout)

    def _settle(self, update: tuple[Any, int], give_up: float) -> None:
        ref, n = update
        try:
            applied, stale = self.answer(ref, give_up)
        except Gone:
            self._drop(n)
            raise
        except Silent:
            self._drop(n)
            self.went_silent()
        except (IndexError, RuntimeError, ValueError):  # rows it never had: it was emptied, or loaded
            self._count(0, n)
        except BaseException:  # Ctrl-C: it is still on its way
            with self._lock:
                self._updates.appendleft(update)
            raise
        else:
            self._count(applied, stale)

    def _count(self, applied: int, stale: int) -> None:
        with self._lock:
            self.applied += applied
            self.stale += stale

    def _drop(self, n: int) -> None:
        with self._lock:
            self.dropped += n

    def settle(self, give_up: float | None) -> bool:
        """Wait for the updates that are on their way, None: as long as the shard gives answers. Whether all are settled. Raises Gone."""
        while True:
            if not self.usable:
                self.drop_updates()
            with self._lock:
                if not self._updates:
                    return True
                ref, n = self._updates[0]
            patience = time.monotonic() + self.timeout
            if give_up is not None and give_up < patience:
                ready, _ = need_ray().wait([ref], timeout=max(0.0, give_up - time.monotonic()))
                if not ready:
                    return False
            with self._lock:
                if not self._updates or self._updates[0][0] is not ref:
                    continue  # another thread has it
                self._updates.popleft()
            self._settle((ref, n), patience)

    def drop_updates(self) -> None:
        """The shard is lost, or silent."""
        with self._lock:
            self.dropped += sum(n for _, n in self._updates)
            self._updates.clear()

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._drawers.close()
        handle = self.client._handle
        with contextlib.suppress(Exception):
            if handle is not None:
                handle.close()
            elif need_ray().is_initialized():
                self._call("leave", self.client._id)
