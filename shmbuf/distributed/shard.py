"""`Shard`: the actor of one shard of a `ShardedReplayBuffer`. Its segment outlives its process; so do all that work in it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmbuf.distributed.directory import actor, coordinator_name
from shmbuf.distributed.drawing import Drawers, Mass, Part, Spec
from shmbuf.distributed.keeper import Keeper
from shmbuf.distributed.limiting import Report
from shmbuf.distributed.packing import pack
from shmbuf.distributed.places import Recipe
from shmbuf.distributed.rays import need_ray

_UNLIMITED = 1 << 60
_NUM = 4096
"""Samples that weigh as much as a row: who samples the shard alone is counted by its segment, and moves the cap by next to nothing."""
_MOST_DRAWERS = 64
"""Of handles of other nodes: one for each way of drawing, and for each handle that has epochs or a seed of its own."""


@dataclass(frozen=True)
class _Cap:
    """A limiter that counts hardly any samples: rows are taken in until the difference is ``room``."""

    room: int
    strict = False

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]:
        return _NUM, 1, 0, float(-_UNLIMITED), float(self.room)


def set_cap(buffer: Any, cap: int | None) -> Report:
    """Let no more than ``cap`` rows in all be inserted; a record may overshoot it. None: any number."""
    state = buffer.limiter_state()
    if cap is None:
        if state is not None:
            buffer.set_limiter(None)
    else:
        if state is None:
            buffer.set_limiter(_Cap(0))
            state = buffer.limiter_state()
        buffer.set_limiter(_Cap(round(state["diff"]) + (cap - state["inserted"]) * _NUM))
    return report(buffer)


def report(buffer: Any) -> Report:
    state = buffer.limiter_state()
    cap = None if state is None else state["inserted"] + round(state["max_diff"] - state["diff"]) // _NUM
    if buffer.schema is None:
        return Report(0, False, cap)
    counters = buffer._call("counters")
    return Report(counters["rows_total"], counters["ring_used_bytes"] > 0, cap)


_LOOK = 5.0
"""Seconds between two looks whether the coordinator is there, of a buffer that ends with its maker."""


class Shard(Keeper):
    """A `Keeper` that also draws, for handles on other nodes. limited: nothing may be inserted before a cap is set. follows: the
    buffer whose coordinator it ends with; None: it stays."""

    def __init__(self, recipe: Recipe, limited: bool = False, follows: str | None = None):
        super().__init__(recipe)
        self._limited = limited
        self._drawers = Drawers(lambda: self._main().name, _MOST_DRAWERS)
        self._state: bytes | None = None
        self._books: bytes | None = None
        self._version = -1
        if follows is not None:
            threading.Thread(target=self._following, args=(follows,), daemon=True).start()

    def _following(self, name: str) -> None:
        """Whoever made the buffer may be killed: Ray ends his coordinator then, and nobody shuts the shards down."""
        ray, missed = need_ray(), 0
        while missed < 3:
            time.sleep(_LOOK)
            try:
                actor(coordinator_name(name))
                missed = 0
            except ValueError:
                missed += 1
            except Exception:  # Ray itself does not answer: that says nothing
                continue
        with contextlib.suppress(Exception):
            self.destroy()
        ray.kill(ray.get_runtime_context().current_actor)

    def _made(self) -> Any:
        rb = super()._made()
        if self._limited:
            set_cap(rb.buffer, 0)
        return rb

    def _found(self) -> Any:
        rb = super()._found()
        rb.buffer._become_reader()  # drains for those whose ring nobody else empties
        return rb

    def mass(self, spec: Spec) -> Mass:
        return self._drawers.mass(spec)

    def draw(self, spec: Spec, n: int) -> tuple[Part, Mass]:
        """A `Part`, packed, and the mass there is for the next one."""
        part, mass = self._drawers.draw(spec, n)
        return part._replace(td=pack(part.td)), mass

    def leave(self, client: Any) -> None:
        self._drawers.leave(client)
        super().leave(client)

    def prioritise(self, ids: np.ndarray, priorities: np.ndarray) -> tuple[int, int]:
        """Set them; how many reached their row, and how many came late."""
        done = self._main().buffer.set_priorities(ids, priorities)
        return int(done.sum()), int((~done).sum())

    def size(self) -> int:
        return len(self._main())

    def figures(self) -> dict[str, Any]:
        return self._main().stats()

    def cap(self, cap: int | None, numbers: bytes | None) -> Report:
        """Set the cap (negative: leave it; see `set_cap`), and keep what the coordinator would lose."""
        if numbers is not None:
            self._books = numbers
        buffer = self._main().buffer
        return report(buffer) if cap is not None and cap < 0 else set_cap(buffer, cap)

    def hold(self, version: int, state: bytes, numbers: bytes) -> None:
        """Of the coordinator: its directory and routes, its limiter's books."""
        with self._lock:  # what was sent later may come earlier
            if version >= self._version:
                self._version, self._state = version, state
            self._books = numbers

    def held(self) -> tuple[bytes | None, bytes | None]:
        """None: nothing since this process began."""
        return self._state, self._books

    def destroy(self) -> None:
        self._drawers.close()
        super().destroy()
