"""`Keeper`: the actor that keeps one segment on its node, and does for other nodes what they cannot do in its memory themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmbuf import segment
from shmbuf.attaching import attach
from shmbuf.distributed.packing import pack, unpack
from shmbuf.distributed.rays import here, need_ray, short
from shmbuf.errors import BufferNotFound, CommitPending, StorageLost
from shmbuf.storage import ShmStorage
from shmbuf.ticket import Ticket

GROUPS = {"writing": 4, "reading": 8, "looking": 4}
"""Threads of the actor: who waits for room in a ring holds up nobody who reads."""
_MOST_FACES = 100
"""Handles for clients of other nodes; above that the one that was idle longest is closed."""


class Recipe(NamedTuple):
    """How to make a replay buffer on some node: pickled, as Ray sends it."""

    cls: type
    keywords: dict[str, Any]
    name: str


class Place(NamedTuple):
    """Where a segment is. handle: a pickled handle, for processes of that node. config: the segment's."""

    node: str
    segment: str
    cls: type
    handle: bytes
    config: dict[str, Any]


class Pending(NamedTuple):
    """Rows that are in the ring: the number of their ticket, which the actor keeps, how many went in, and of how many."""

    number: int
    rows: int
    asked: int


def made_of(storage: Any) -> ShmStorage:
    """A storage that is not made yet, from itself or a function without arguments."""
    made = storage() if callable(storage) and not isinstance(storage, ShmStorage) else storage
    if not isinstance(made, ShmStorage):
        raise TypeError(f"storage is a ShmStorage, or a function that makes one, not {type(made).__name__}")
    if made._buffer is not None:
        raise ValueError(f"storage {made.name!r} is in use here already: give one that no replay buffer has taken yet")
    return made


def renamed(storage: ShmStorage, name: str) -> ShmStorage:
    storage._make["name"] = name
    return storage


def segment_name(name: str, node: str) -> str:
    """The node is in it: nodes that are one machine, in tests, are none to each other."""
    return segment.check_name(f"{name}.{short(node)}")


class Keeper:
    """Makes the segment on its node. One that Ray starts again, after its death, attaches to the segment that is still there."""

    def __init__(self, recipe: Recipe):
        ray = need_ray()
        self._recipe, self._node = recipe, here()
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._lock = threading.RLock()
        self._rb: Any = None
        self._faces: dict[Any, list[Any]] = {}  # by client: handle, when last used
        self._tickets: dict[tuple[Any, int], Ticket] = {}
        self._numbers = itertools.count()

    # ---- making ---------------------------------------------------------------------------------------------------

    def open(self) -> Place:
        """Make the segment, or find it after a restart. Raises what the constructor raises, and StorageLost."""
        rb = self._main()
        handle = pickle.dumps(rb)
        return Place(self._node, rb.name, type(rb), handle, rb.buffer.config)

    def _main(self) -> Any:
        with self._lock:
            if self._rb is None:
                self._rb = self._found() if self._again else self._made()
            return self._rb

    def _name(self) -> str:
        return segment_name(self._recipe.name, self._node)

    def _made(self) -> Any:
        keywords = dict(self._recipe.keywords)
        storage = renamed(made_of(keywords.pop("storage")), self._name())
        rb = self._recipe.cls(storage=storage, **keywords)
        self._again = True  # another call does not make it anew
        return rb

    def _found(self) -> Any:
        keywords = self._recipe.keywords
        ways = {k: keywords[k] for k in ("transform", "transform_factory", "collate_fn", "prefetch") if k in keywords}
        try:
            return attach(self._name(), **ways)
        except BufferNotFound as e:
            raise StorageLost(
                f"the actor of buffer {self._recipe.name!r} was started again on node {short(self._node)}, where its segment is not: "
                f"its rows are lost ({e})"
            ) from None

    def pid(self) -> int:
        return os.getpid()

    def destroy(self) -> None:
        """Remove the segment."""
        with self._lock:
            for face, _ in self._faces.values():
                with contextlib.suppress(Exception):
                    face.close()
            self._faces.clear()
            self._tickets.clear()
            rb, self._rb, self._again = self._rb, None, True
        if rb is not None:
            rb.destroy(force=True)
        else:
            with contextlib.suppress(BufferNotFound):
                segment.destroy(self._name(), force=True)

    # ---- for clients of other nodes -------------------------------------------------------------------------------

    def face(self, client: Any) -> Any:
        """The client's handle: its ring, streams, transforms and epochs are its own."""
        with self._lock:
            found = self._faces.get(client)
            if found is None:
                if len(self._faces) >= _MOST_FACES:
                    idle = min(self._faces, key=lambda c: self._faces[c][1])
                    self._close(idle)
                found = self._faces[client] = [self._another(client), 0.0]
            found[1] = time.monotonic()
            return found[0]

    def _another(self, client: Any) -> Any:
        return pickle.loads(pickle.dumps(self._main()))

    def _close(self, client: Any) -> None:
        face, _ = self._faces.pop(client)
        for key in [k for k in self._tickets if k[0] == client]:
            del self._tickets[key]
        face.close()

    def leave(self, client: Any) -> None:
        with self._lock:
            if client in self._faces:
                self._close(client)

    def call(self, client: Any, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """A method of the client's handle."""
        value = getattr(self.face(client), method)(*unpack(args, copy=False), **unpack(dict(keywords), copy=False))
        return None if value is self.face(client) else pack(value)

    def get(self, client: Any, attribute: str) -> Any:
        return getattr(self.face(client), attribute)

    def write(self, client: Any, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """As `call`, of a method that puts rows: `Pending` if they are not all stored within its ``timeout``."""
        face = self.face(client)
        try:
            value = getattr(face, method)(*unpack(args, copy=False), **unpack(dict(keywords), copy=False))
        except CommitPending as e:
            if e.ticket is None:
                raise
            return self._kept(client, e.ticket)
        return self._kept(client, value) if isinstance(value, Ticket) else pack(value)

    def _kept(self, client: Any, ticket: Ticket) -> Pending:
        number = next(self._numbers)
        self._tickets[client, number] = ticket
        return Pending(number, ticket.rows, ticket._native.asked)

    def ticket(self, client: Any, number: int, timeout: float) -> Any:
        """None: not yet. Raises StorageLost after a restart of this actor."""
        ticket = self._tickets.get((client, number))
        if ticket is None:
            raise StorageLost(
                "the actor that put these rows was started again: they are stored, their indices are not known any more"
            )
        try:
            indices = ticket.wait(timeout)
        except CommitPending:
            return None
        del self._tickets[client, number]
        return indices

    def forget(self, client: Any, number: int) -> None:
        """Nobody will wait for that ticket."""
        self._tickets.pop((client, number), None)


def unique(name: str | None) -> str:
    """A name for what has none: one that is collected when nobody is attached any more."""
    return segment.check_name(name) if name is not None else f"{segment.UNNAMED}ray-{os.urandom(6).hex()}"


__all__ = ["GROUPS", "Keeper", "Pending", "Place", "Recipe", "made_of", "segment_name", "unique"]
