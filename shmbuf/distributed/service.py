"""A replay buffer as a Ray service: TorchRL's `RayReplayBuffer` and its clients, and `as_remote`.

One actor keeps the segment. A client that is on the actor's node works in its memory; any other asks the actor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shmbuf.distributed.keeper import Keeper, made_of, renamed
from shmbuf.distributed.packing import Packed, pack, unpack
from shmbuf.distributed.places import GROUPS, Itself, Pending, Place, Recipe, segment_name, unique
from shmbuf.distributed.rays import Gone, Silent, ask, check_alive, here, lost, need_ray, on, running, short
from shmbuf.errors import CommitPending, NotEnoughRows, RingFull, StorageLost
from shmbuf.ticket import left_of, seconds_of

_SLICE = 0.5
"""Seconds that one call waits in the actor: whoever is killed while he waits leaves nobody waiting there for long."""
_ANSWER = 60.0
"""Seconds, beyond what the call itself may wait, until an actor that says nothing is given up."""
_WAITS = frozenset({"sample", "next", "wait_rows"})
_WRITES = frozenset({"extend", "put", "add"})
_HOT = ("sample", "extend", "put", "update_priority", "update_tensordict_priority")
_INLINE = 96 << 10
"""Bytes of an answer that Ray sends along with it; a larger one takes a way several times as long."""
_LOOKS = frozenset(
    {
        "__len__",
        "__getitem__",
        "sample",
        "stats",
        "extend",
        "put",
        "add",
        "update_priority",
        "update_tensordict_priority",
    }
)
"""Calls after which batches that were drawn ahead are still given out."""
_PLACES = frozenset({"scheduling_strategy", "resources", "num_gpus", "label_selector", "accelerator_type"})
"""Options with one of these say where the actor is to be."""
_LIFE = frozenset({"client", "clients", "close", "destroy", "shutdown", "start"})


class RemoteTicket:
    """As a `Ticket`, of rows that are in the ring of another node."""

    def __init__(self, client: RayClient, pending: Pending):
        self._client, self._pending = client, pending
        self._indices: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self._pending.rows

    def done(self) -> bool:
        with contextlib.suppress(CommitPending):
            self.wait(0.0)
        return self._indices is not None

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """LongTensor of the rows' indices, once they can be drawn. Errors as `Ticket.wait`."""
        since, seconds = time.monotonic(), seconds_of(timeout)
        while self._indices is None:
            left = left_of(timeout, since)
            once = _SLICE if left is None else min(left, _SLICE)
            found = self._client._ask("ticket", "writing", self._pending.number, once)
            if found is not None:
                self._indices = found
            elif left is not None and left <= once:
                raise CommitPending(
                    f"{self.rows:,} rows are in the ring of buffer {self._client.name!r} but not committed after {seconds:.3g} s: it will "
                    "happen; .ticket waits for it",
                    self,
                    self.rows,
                )
        assert self._indices is not None
        return self._indices

    def __repr__(self) -> str:
        return f"RemoteTicket({self.rows} rows, {'done' if self._indices is not None else 'pending'})"


class RayClient:
    """A replay buffer that an actor keeps; small, and pickled into any process of the cluster. Its methods and properties are those of
    the buffer's class, without the end of its life, which is the owner's.

    On the actor's node it is attached to the segment (`local` is the handle). On another node each call asks the actor; rows come
    and go as one array.

    Raises StorageLost once the actor's node, or the actor for good, is gone.
    """

    def __init__(self, keeper: Any, place: Place):
        self._keeper, self._place = keeper, place
        self._cls: type = pickle.loads(place.kind)
        self._id = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._pid = os.getpid()
        self._handle: Any = None
        self._near: bool | None = None
        self._shaky = False
        self._methods: dict[tuple[str, str], Any] = {}
        self._coming: deque[Any] = deque()  # answers on their way, of some batches each
        self._here: deque[Any] = deque()
        self._batch_bytes = _INLINE

    def __reduce__(self) -> tuple[Any, ...]:
        return RayClient, (self._keeper, self._place)

    # ---- where ------------------------------------------------------------------------------------------------------

    @property
    def service_backend(self) -> str:
        """ "ray"."""
        return "ray"

    @property
    def node_id(self) -> str:
        """Of the node that has the segment."""
        return self._place.node

    @property
    def name(self) -> str:
        """Of the segment: on its node, `shmbuf.attach` takes it."""
        return self._place.segment

    @property
    def local(self) -> Any:
        """This process's own handle, if it is on the segment's node; else None."""
        if self._handle is None and self._near is not False:
            self._near = self._place.node == here()
            if self._near:
                self._handle = pickle.loads(self._place.handle)
                vars(self).update({name: getattr(self._handle, name) for name in _HOT})  # found without __getattr__
        return self._handle

    @property
    def is_alive(self) -> bool:
        """Whether the actor answers."""
        try:
            self._ask("pid", "looking", of_client=False)
        except StorageLost:
            return False
        return True

    # ---- asking -----------------------------------------------------------------------------------------------------

    def _ask(self, method: str, group: str, *args: Any, of_client: bool = True) -> Any:
        if self._shaky and method != "pid":  # so that what changes something is sent to an actor that is there
            self._wait_for_actor()
        try:
            return self._answer(self._send(method, group, *((self._id, *args) if of_client else args)))
        except Gone as e:
            raise lost(f"the actor of buffer {self.name!r}", self._place.node, e) from e
        except Silent as e:
            self._shaky = True
            try:
                check_alive(self._place.node)
            except Gone as gone:
                raise lost(f"the actor of buffer {self.name!r}", self._place.node, gone) from gone
            raise StorageLost(
                f"the actor of buffer {self.name!r} on node {short(self._place.node)} did not answer: {e}. If it was killed it is started "
                "again, and rows that were stored are there; whether this call was carried out is not known"
            ) from e

    def _send(self, method: str, group: str, *args: Any) -> Any:
        call = self._methods.get((method, group))
        if call is None:
            call = self._methods[method, group] = getattr(self._keeper, method).options(concurrency_group=group)
        return call.remote(*args)

    def _answer(self, ref: Any) -> Any:
        answer = ask(ref, _ANSWER)
        self._shaky = False
        return answer

    def _wait_for_actor(self) -> None:
        give_up = time.monotonic() + _ANSWER
        while True:
            try:
                self._ask("pid", "looking", of_client=False)
                return
            except StorageLost as e:
                if isinstance(e.__cause__, Gone) or time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        local = self.local
        if local is not None:
            return getattr(local, method)(*args, **keywords)
        if method == "sample" and self._place.prefetch and not args and not keywords:
            batch = self._taken()
            if batch is not None:
                return batch
        elif method not in _LOOKS:
            self._here.clear()
            self._coming.clear()  # what was asked for before is not what would be drawn now
        if method in _WAITS:
            return self._waiting(method, args, keywords)
        if method in _WRITES:
            return self._write(method, args, keywords)
        return self._once("call", "reading", method, args, keywords)

    def _once(self, how: str, group: str, method: str, args: Any, keywords: Mapping[str, Any]) -> Any:
        answer = self._ask(how, group, method, pack(tuple(args)), pack(dict(keywords)))
        if isinstance(answer, Itself):
            return self
        return answer if isinstance(answer, Pending) else unpack(answer)

    def _taken(self) -> Any:
        """The next of the batches that were asked for ahead. None: there is none; the long way says why."""
        together = max(1, min(self._place.prefetch, _INLINE // max(1, self._batch_bytes)))
        while len(self._coming) * together <= self._place.prefetch:
            self._coming.append(self._send("samples", "reading", self._id, together))
        if not self._here:
            try:
                self._here.extend(self._answer(self._coming.popleft()))
            except (NotEnoughRows, Gone, Silent):
                self._coming.clear()
                return None
        packed = self._here.popleft()
        self._batch_bytes = len(packed.data) if isinstance(packed, Packed) else _INLINE
        return unpack(packed)

    def _waiting(self, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """In slices, for rows that are not there yet."""
        timeout = keywords.get("timeout", None if method == "wait_rows" else 0.0)
        if method == "next":
            return self._once("call", "reading", method, args, keywords)
        if method == "wait_rows" and len(args) > 1:
            args, timeout = args[:1], args[1]
        since, _ = time.monotonic(), seconds_of(timeout)
        out = keywords.pop("out", None)
        while True:
            left = left_of(timeout, since)
            once = _SLICE if left is None else min(left, _SLICE)
            try:
                got = self._once("call", "reading", method, args, {**keywords, "timeout": once})
                return got if out is None else out.update_(got)
            except NotEnoughRows:
                if left is not None and left <= once:
                    raise

    def _write(self, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """In slices, for room in the ring; rows that are in are waited for by their ticket."""
        timeout = self._place.config["timeout"] if keywords.get("timeout") is None else keywords["timeout"]
        since = time.monotonic()
        done: list[RemoteTicket] = []
        seconds_of(timeout)
        while True:
            left = left_of(timeout, since)
            once = _SLICE if left is None else min(left, _SLICE)
            try:
                got = self._once("write", "writing", method, args, {**keywords, "timeout": once})
            except RingFull:
                if left is not None and left <= once:
                    raise
                continue
            if not isinstance(got, Pending):
                return got if not done else torch.cat([t.wait(left_of(timeout, since)) for t in done] + [got])
            done.append(RemoteTicket(self, got))
            if method == "put" and got.rows >= got.asked:
                return done[0] if len(done) == 1 else _Tickets(done)
            if got.rows < got.asked:  # a batch larger than the ring
                args, keywords = _rest(args, keywords, got)
                continue
            index = torch.cat([t.wait(left_of(timeout, since)) for t in done])
            return int(index) if method == "add" and len(index) == 1 else index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _LIFE:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: the buffer's life is its owner's")
        found = getattr(self._cls, name)  # AttributeError: no such name
        if not callable(found):
            local = self.local
            return getattr(local, name) if local is not None else self._ask("get", "looking", name)

        def call(*args: Any, **keywords: Any) -> Any:
            value = self._call(name, *args, **keywords)
            return self if value is self._handle and value is not None else value

        call.__name__, call.__doc__ = name, found.__doc__
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{name!r} of a {type(self).__name__} cannot be set; its methods change the buffer")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return self._call("__len__")

    def __getitem__(self, index: Any) -> Any:
        return self._call("__getitem__", index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call("__setitem__", index, value)

    def __iter__(self) -> Iterator[Any]:
        if self.local is not None:
            yield from self.local
            return
        while (batch := self._call("next")) is not None:
            yield batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, a {self._cls.__name__} on node {short(self._place.node)})"


class _Tickets:
    """Of a put that went in in parts."""

    def __init__(self, parts: list[RemoteTicket]):
        self._parts = parts

    @property
    def rows(self) -> int:
        return sum(t.rows for t in self._parts)

    def done(self) -> bool:
        return all(t.done() for t in self._parts)

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        since = time.monotonic()
        return torch.cat([t.wait(left_of(timeout, since)) for t in self._parts])


def _rest(args: tuple[Any, ...], keywords: dict[str, Any], got: Pending) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What of a call's rows did not go in."""
    name = next((k for k in ("tensordicts", "data") if k in keywords), None)
    rows = args[0] if name is None else keywords[name]
    if len(rows) != got.asked:  # a transform made others of them
        raise CommitPending(
            f"{got.rows:,} of {got.asked:,} rows are in the ring and will be stored; the others found no room",
            None,
            got.rows,
        )
    stream = keywords.get("stream")
    if stream is not None and np.ndim(stream):
        keywords = {**keywords, "stream": stream[got.rows :]}
    rows = rows[got.rows :]
    return ((rows, *args[1:]), keywords) if name is None else (args, {**keywords, name: rows})


class RayReplayBuffer(RayClient):
    """The owner of a replay buffer that an actor keeps: a `RayClient` that begins and ends it. Made by
    ``ReplayBuffer(service_backend="ray")`` and its subclasses; pickled, it is a client.

    Args:
        cls: of the buffer. keywords: its constructor's; they travel by pickle, as Ray sends things, so that a storage is one that is not
            made yet, or a function that makes one.
        ray_init_config: for ``ray.init``, if this process is not connected.
        remote_config: for ``ray.remote``; default: on this node, without a CPU of its own, started again when it is killed.

    The segment is named ``<name>.<node>``; unnamed storages get a name. `shutdown` ends the actor and removes the segment.
    """

    def __init__(
        self,
        cls: type,
        keywords: Mapping[str, Any],
        *,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
    ):
        ray = running(ray_init_config)
        keywords = dict(keywords)
        storage = keywords.get("storage")
        if storage is None:
            from shmbuf.storage import ShmStorage

            storage = keywords["storage"] = ShmStorage(1000)
        name = unique(made_of(storage)._make["name"])
        config: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": GROUPS}
        if not _PLACES & {*(remote_config or {})}:
            config.update(scheduling_strategy=on(here()), max_restarts=-1)
        config.update(remote_config or {})
        keeper = ray.remote(**config)(Keeper).remote(Recipe.of(cls, keywords, name))
        self._shut = False
        try:
            place = ask(keeper.open.options(concurrency_group="looking").remote())
        except BaseException as e:
            with contextlib.suppress(Exception):
                ray.kill(keeper)
            if isinstance(e, (Gone, Silent)):
                raise RuntimeError(f"the actor of the replay buffer could not be started: {e}") from e
            raise
        super().__init__(keeper, place)
        self._end = _AtExit(keeper)

    @property
    def is_alive(self) -> bool:
        """Before `shutdown`."""
        return not self._shut

    def start(self) -> RayReplayBuffer:
        """Itself, which is started. RuntimeError after `shutdown`."""
        if self._shut:
            raise RuntimeError("A closed RayReplayBuffer cannot be restarted.")
        return self

    def client(self) -> RayClient:
        """For another process, or this one. RuntimeError after `shutdown`."""
        if self._shut:
            raise RuntimeError("RayReplayBuffer is closed.")
        return RayClient(self._keeper, self._place)

    def clients(self, num_clients: int) -> list[RayClient]:
        """So many clients."""
        if isinstance(num_clients, bool) or not isinstance(num_clients, int):
            raise TypeError("num_clients must be an integer.")
        if num_clients < 1:
            raise ValueError("num_clients must be at least 1.")
        return [self.client() for _ in range(num_clients)]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the actor and remove the segment; whoever is attached gets StorageLost from the next put or wait. timeout: seconds for
        the actor to answer; it is killed in any case."""
        if self._shut:
            return
        self._shut = True
        handle, self._handle = self._handle, None
        for name in _HOT:
            vars(self).pop(name, None)
        if handle is not None:
            handle._end_threads()
            handle.buffer.close()
        self._end(30.0 if timeout is None else timeout)

    def close(self) -> None:
        """`shutdown`."""
        self.shutdown()

    def _ask(self, *args: Any, **keywords: Any) -> Any:
        if self._shut:
            raise StorageLost("this replay buffer was shut down")
        return super()._ask(*args, **keywords)

    @property
    def local(self) -> Any:
        if self._shut:
            raise StorageLost("this replay buffer was shut down")
        return super().local

    def __enter__(self) -> RayReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


class _AtExit:
    """Ends a keeper once: at `shutdown`, or when the owner goes, or the interpreter."""

    def __init__(self, keeper: Any):
        self._keeper, self._pid = keeper, os.getpid()
        atexit.register(self)  # after Ray's own, so it is called before

    def __call__(self, timeout: float = 10.0) -> None:
        atexit.unregister(self)
        keeper, self._keeper = self._keeper, None
        ray = need_ray()
        if keeper is None or self._pid != os.getpid() or not ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            ask(keeper.destroy.options(concurrency_group="looking").remote(), timeout)
        with contextlib.suppress(Exception):
            ray.kill(keeper)


# ---- TorchRL's other way -----------------------------------------------------------------------------------------------


def _served(cls: type) -> type:
    """cls as the class of an actor: its segment carries the node's id, and what it returns can be sent."""

    class Served(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *, storage: Any = None, **keywords: Any):
            if storage is not None:
                made = made_of(storage)
                name = made._make["name"]
                storage = made if name is None else renamed(made, segment_name(name, here()))
            super().__init__(storage=storage, **keywords)

        def put(self, data: Any, **how: Any) -> int:
            """Returns how many rows are in the ring."""
            return super().put(data, **how).rows

        def start(self) -> None:
            super().start()

        def client(self) -> None:
            raise RuntimeError("the handle of the actor is the client")

        def share(self, shared: bool = True) -> None:
            """It is shared in any case."""

        def _getattr(self, attribute: str) -> Any:
            return getattr(self, attribute)

        def _setattr(self, attribute: str, value: Any) -> None:
            setattr(self, attribute, value)

    Served.__name__, Served.__qualname__ = cls.__name__, cls.__qualname__
    return Served


def as_remote(cls: type, remote_config: Mapping[str, Any] | None = None) -> Any:
    """A Ray actor class of a replay-buffer class: ``as_remote(…).remote(…)`` constructs one, ``handle.extend.remote(td)`` calls it.

    remote_config: for ``ray.remote``. Raises ImportError, which says what to install.
    """
    ray = need_ray()
    config = dict(remote_config or {})
    made = ray.remote(**config)(_served(cls)) if config else ray.remote(_served(cls))
    made.is_remote = True
    return made


def serve(cls: type, keywords: dict[str, Any], options: Mapping[str, Any] | None) -> RayReplayBuffer:
    """What ``cls(service_backend="ray", service_backend_options=options, **keywords)`` is."""
    options = dict(options or {})
    found = {k: options.pop(k, None) for k in ("ray_init_config", "remote_config")}
    if options:
        raise TypeError(f"Unexpected Ray replay-buffer service options: {sorted(options)}")
    transport = keywords.pop("transport", "auto")
    if transport not in ("auto", "ray"):
        raise ValueError(
            f"transport={transport!r}: 'auto' or 'ray'. On the actor's node clients use its memory in any case"
        )
    if keywords.pop("transport_options", None):
        raise ValueError("transport_options are not used by the Ray replay transport.")
    return RayReplayBuffer(cls, keywords, **found)
