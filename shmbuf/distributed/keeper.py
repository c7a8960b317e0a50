"""`Keeper`: the actor that keeps one segment on its node, and does for other nodes what they cannot do in its memory themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from shmbuf import segment
from shmbuf.attaching import attach
from shmbuf.distributed.packing import pack, unpack
from shmbuf.distributed.places import Itself, Pending, Place, Recipe, collect, segment_name
from shmbuf.distributed.rays import here, need_ray, short
from shmbuf.errors import BufferNotFound, CommitPending, NotEnoughRows, StorageLost
from shmbuf.storage import ShmStorage
from shmbuf.ticket import Ticket

_MOST_TICKETS = 10_000
_MOST_FACES = 100
"""Handles for clients of other nodes; above that the one that was idle longest is closed."""


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
        from ray import cloudpickle

        depth = 0 if rb._ahead is None else rb._ahead.depth
        return Place(self._node, rb.name, cloudpickle.dumps(type(rb)), cloudpickle.dumps(rb), rb.buffer.config, depth)

    def _main(self) -> Any:
        with self._lock:
            if self._rb is None:
                self._rb = self._found() if self._again else self._made()
            return self._rb

    def _name(self) -> str:
        return segment_name(self._recipe.name, self._node)

    def _made(self) -> Any:
        cls, keywords = self._recipe.ingredients()
        storage = renamed(made_of(keywords.pop("storage")), self._name())
        collect(self._name())
        rb = cls(storage=storage, **keywords)
        self._again = True  # another call does not make it anew
        return rb

    def _found(self) -> Any:
        _, keywords = self._recipe.ingredients()
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
        from ray import cloudpickle

        face = pickle.loads(cloudpickle.dumps(self._main()))
        if face._ahead is not None:  # the client asks ahead
            face._ahead.close()
            face._ahead = None
        return face

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
        try:
            value = getattr(self.face(client), method)(*unpack(args, copy=False), **unpack(dict(keywords), copy=False))
        except CommitPending as e:  # its ticket stays here
            raise CommitPending(str(e), None, e.rows) from None
        return Itself() if value is self.face(client) else pack(value)

    def samples(self, client: Any, n: int) -> list[Any]:
        """n batches; fewer if there are no more. Raises what the first one raises."""
        face, out = self.face(client), []
        for _ in range(n):
            try:
                out.append(pack(face.sample()))
            except NotEnoughRows:
                if not out:
                    raise
                break
        return out

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
            return self._kept(client, e.ticket, e.ticket._native.asked)
        return self._kept(client, value, value.rows) if isinstance(value, Ticket) else pack(value)

    def _kept(self, client: Any, ticket: Ticket, asked: int) -> Pending:
        number = next(self._numbers)
        with self._lock:
            self._tickets[client, number] = ticket
            if len(self._tickets) > _MOST_TICKETS:
                del self._tickets[next(iter(self._tickets))]
        return Pending(number, ticket.rows, asked)

    def ticket(self, client: Any, number: int, timeout: float) -> Any:
        """None: not yet. Raises StorageLost if it is not known here."""
        ticket = self._tickets.get((client, number))
        if ticket is None:
            raise StorageLost(
                "the actor that put these rows was started again, or was given too many others since: the rows are stored, their indices "
                "are not known any more"
            )
        try:
            indices = ticket.wait(timeout)
        except CommitPending:
            return None
        self._tickets.pop((client, number), None)
        return indices
