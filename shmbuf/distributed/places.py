"""Where segments are and how they are made, as values that travel. Imports no torch: the coordinator holds them, and is there at once."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import threading
from typing import Any, NamedTuple

from shmbuf import segment
from shmbuf.distributed.rays import need_ray, short
from shmbuf.errors import ShmbufError

_MADE_UP = re.compile(r"ray-[0-9a-f]{12}(\.\d+)?\.[0-9a-f]{12}")

_RESTARTS = 60.0
"""Seconds in which Ray starts a killed keeper again."""

GROUPS = {"writing": 4, "reading": 8, "looking": 4, "ending": 1}
"""Threads of an actor that keeps a segment: who waits for room in a ring holds up nobody who reads, and nobody the end."""


class Recipe(NamedTuple):
    """How to make a replay buffer on some node. made: its class and its constructor's keywords, pickled as Ray does."""

    made: bytes
    name: str

    @classmethod
    def of(cls, kind: type, keywords: dict[str, Any], name: str) -> Recipe:
        need_ray()
        from ray import cloudpickle

        return cls(cloudpickle.dumps((kind, keywords)), name)

    def ingredients(self) -> tuple[type, dict[str, Any]]:
        return pickle.loads(self.made)


class Place(NamedTuple):
    """Where a segment is. kind: the pickled class; handle: a pickled handle, for processes of that node; config: the segment's;
    prefetch: so many batches are asked for ahead by clients of other nodes."""

    node: str
    segment: str
    kind: bytes
    handle: bytes
    config: dict[str, Any]
    prefetch: int = 0


class Itself(NamedTuple):
    """A method returned its own buffer."""


class Pending(NamedTuple):
    """Rows that are in the ring: the number of their ticket, which the actor keeps, how many went in, and of how many."""

    number: int
    rows: int
    asked: int


def segment_name(name: str, node: str) -> str:
    """The node is in it: nodes that are one machine, in tests, are none to each other."""
    return segment.check_name(f"{name}.{short(node)}")


def unique(name: str | None) -> str:
    """The name, or one for what has none: see `collect`."""
    return segment.check_name(name) if name is not None else f"ray-{os.urandom(6).hex()}"


def collect(before: str, seconds: float = _RESTARTS) -> None:
    """Before a segment that nobody named is made: remove those of its kind that nobody is attached to, now and some time from now. Their
    owners were killed; but a keeper that was killed is started again, and its rows are there."""
    if _MADE_UP.fullmatch(before) and (left := set(segment.stale(_MADE_UP.fullmatch))):
        later = threading.Timer(seconds, _remove, [left])
        later.daemon = True
        later.start()


def _remove(left: set[str]) -> None:
    for name in left & set(segment.stale(_MADE_UP.fullmatch)):
        with contextlib.suppress(ShmbufError, OSError):
            segment.destroy(name)
