"""Where segments are and how they are made, as values that travel. Imports no torch: the coordinator holds them, and is there at once."""

from __future__ import annotations

import os
import pickle
from typing import Any, NamedTuple

from shmbuf import segment
from shmbuf.distributed.rays import need_ray, short

GROUPS = {"writing": 4, "reading": 8, "looking": 4}
"""Threads of an actor that keeps a segment: who waits for room in a ring holds up nobody who reads."""


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
    """Where a segment is. kind: the pickled class; handle: a pickled handle, for processes of that node; config: the segment's."""

    node: str
    segment: str
    kind: bytes
    handle: bytes
    config: dict[str, Any]


class Pending(NamedTuple):
    """Rows that are in the ring: the number of their ticket, which the actor keeps, how many went in, and of how many."""

    number: int
    rows: int
    asked: int


def segment_name(name: str, node: str) -> str:
    """The node is in it: nodes that are one machine, in tests, are none to each other."""
    return segment.check_name(f"{name}.{short(node)}")


def unique(name: str | None) -> str:
    """A name for what has none: one that is collected when nobody is attached any more."""
    return segment.check_name(name) if name is not None else f"{segment.UNNAMED}ray-{os.urandom(6).hex()}"
