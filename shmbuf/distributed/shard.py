"""`Shard`: the actor of one shard of a `ShardedReplayBuffer`. Its segment outlives its process; so do all that work in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmbuf.distributed.drawing import Drawers, Mass, Part, Spec
from shmbuf.distributed.keeper import Keeper
from shmbuf.distributed.packing import pack
from shmbuf.distributed.places import Recipe

_UNLIMITED = 1 << 60
_MOST_DRAWERS = 64
"""Of handles of other nodes: one for each way of drawing, and for each handle that has epochs or a seed of its own."""


@dataclass(frozen=True)
class _Cap:
    """A limiter that counts no samples: rows are taken in until the difference is ``room``."""

    room: int
    strict = False

    def words(self, batch: int = 1) -> tuple[int, int, int, float | None, float | None]:
        return 1, 1, 0, float(-_UNLIMITED), float(self.room)


class Report(NamedTuple):
    """rows: ever inserted into the shard; waiting: collectors wait to insert more."""

    rows: int
    waiting: bool


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
        buffer.set_limiter(_Cap(round(state["diff"]) + cap - state["inserted"]))
    return report(buffer)


def report(buffer: Any) -> Report:
    if buffer.schema is None:
        return Report(0, False)
    counters, state = buffer._call("counters"), buffer.limiter_state()
    held = state is not None and state["allowance"] == 0
    return Report(counters["rows_total"], bool(held and counters["ring_used_bytes"]))


class Shard(Keeper):
    """A `Keeper` that also draws, for handles on other nodes. limited: nothing may be inserted before a cap is set."""

    def __init__(self, recipe: Recipe, limited: bool = False):
        super().__init__(recipe)
        self._limited = limited
        self._drawers = Drawers(lambda: self._main().name, _MOST_DRAWERS)
        self._held: Any = None

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

    def cap(self, cap: int | None, held: Any = None) -> Report:
        """Set the cap (negative: leave it), keep what the coordinator would lose; see `set_cap`."""
        if held is not None:
            self._held = held
        buffer = self._main().buffer
        return report(buffer) if cap is not None and cap < 0 else set_cap(buffer, cap)

    def hold(self, held: Any) -> None:
        self._held = held

    def held(self) -> Any:
        """What `hold` was given last; None: nothing since this process began."""
        return self._held

    def destroy(self) -> None:
        self._drawers.close()
        super().destroy()
