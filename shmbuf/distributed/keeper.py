"""`Keeper`: the actor that keeps one segment on its node, and does for other nodes what they cannot do in its memory themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from shmbuf import segment
from shmbuf.attaching import attach
from shmbuf.distributed.packing import pack, unpack
from shmbuf.distributed.places import Itself, Pending, Place, Recipe, collect, segment_name
from shmbuf.distributed.pool import Pool
from shmbuf.distributed.rays import here, need_ray, short
from shmbuf.errors import BufferNotFound, CommitPending, NotEnoughRows, StorageLost
from shmbuf.storage import ShmStorage
from shmbuf.ticket import Ticket

_MOST_TICKETS = 10_000  # of one client
_MOST_FACES = 100
"""Handles for clients of other nodes, each with a ring of its own."""
_IDLE = 300.0
"""Seconds after which a handle that was not used is closed for another client, if there is no room: its client was killed, or waits long.
Its episode is cut, and its tickets are forgotten; a client that ends, or is collected, says so before."""


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


class _Face:
    """One client's handle: its ring, streams, transforms and epochs are its own; and the tickets that it was not given."""

    def __init__(self, rb: Any):
        self.rb = rb
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count()

    def keep(self, ticket: Ticket, asked: int) -> Pending:
        number = next(self._numbers)
        self._tickets[number] = ticket
        if len(self._tickets) > _MOST_TICKETS:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):
                del self._tickets[next(iter(self._tickets))]
        return Pending(number, ticket.rows, asked)

    def ticket(self, number: int, timeout: float) -> Any:
        """KeyError: not known; None: not yet. It can be asked for again: the answer may not have reached who was interrupted."""
        with contextlib.suppress(CommitPending):
            return self._tickets[number].wait(timeout)
        return None

    def close(self) -> None:
        self._tickets.clear()
        self.rb.close()


class Keeper:
    """Makes the segment on its node. One that Ray starts again, after its death, attaches to the segment that is still there."""

    def __init__(self, recipe: Recipe):
        ray = need_ray()
        self._recipe, self._node = recipe, here()
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._lock = threading.RLock()
        self._rb: Any = None
        self._faces: Pool[_Face] = Pool(_MOST_FACES, _Face.close, self._full, _IDLE)

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
        self._faces.drop(lambda client: True)
        with self._lock:
            rb, self._rb, mine, self._again = self._rb, None, self._again, True
        if rb is not None:
            rb.destroy(force=True)
        elif mine:  # else one of that name is somebody else's, and that is why there is none here
            with contextlib.suppress(BufferNotFound):
                segment.destroy(self._name(), force=True)

    # ---- for clients of other nodes -------------------------------------------------------------------------------

    def _full(self, n: int) -> str:
        return (
            f"{n} clients of other nodes use the actor of buffer {self._recipe.name!r} on node {short(self._node)}, which keeps no more handles, and "
            f"none of them has been idle for {_IDLE:g} s. Nothing was done. Let clients go that are not used any more (`del`, or end their "
            "processes), let the workers of a process share one client, or use a ShardedReplayBuffer, whose workers use their own node's memory"
        )

    def _use(self, client: Any) -> AbstractContextManager[_Face]:
        """The client's handle. Raises TooManyCollectors."""
        return self._faces.use(client, self._another)

    def _another(self) -> _Face:
        from ray import cloudpickle

        face = pickle.loads(cloudpickle.dumps(self._main()))
        if face._ahead is not None:  # the client asks ahead
            face._ahead.close()
            face._ahead = None
        return _Face(face)

    def leave(self, client: Any) -> None:
        """That client is no more."""
        self._faces.drop(lambda key: key == client)

    def call(self, client: Any, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """A method of the client's handle."""
        with self._use(client) as face:
            try:
                value = getattr(face.rb, method)(*unpack(args, copy=False), **unpack(dict(keywords), copy=False))
            except CommitPending as e:  # its ticket stays here
                raise CommitPending(str(e), None, e.rows) from None
            return Itself() if value is face.rb else pack(value)

    def samples(self, client: Any, n: int) -> list[Any]:
        """n batches; fewer if there are no more. Raises what the first one raises."""
        out: list[Any] = []
        with self._use(client) as face:
            for _ in range(n):
                try:
                    out.append(pack(face.rb.sample()))
                except NotEnoughRows:
                    if not out:
                        raise
                    break
        return out

    def get(self, client: Any, attribute: str) -> Any:
        with self._use(client) as face:
            return getattr(face.rb, attribute)

    def write(self, client: Any, method: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """As `call`, of a method that puts rows: `Pending` if they are not all stored within its ``timeout``."""
        with self._use(client) as face:
            try:
                value = getattr(face.rb, method)(*unpack(args, copy=False), **unpack(dict(keywords), copy=False))
            except CommitPending as e:
                if e.ticket is None:
                    raise
                return face.keep(e.ticket, e.ticket._native.asked)
            return face.keep(value, value.rows) if isinstance(value, Ticket) else pack(value)

    def ticket(self, client: Any, number: int, timeout: float) -> Any:
        """None: not yet. Raises StorageLost if it is not known here."""
        try:
            with self._faces.use(client, None) as face:
                return face.ticket(number, timeout)
        except KeyError:
            raise StorageLost(
                "the actor that put these rows was started again, or was given too many others since, or closed this client's handle, which was "
                "not used for long: the rows are stored, their indices are not known any more"
            ) from None
