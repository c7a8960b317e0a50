"""`RayClient`: a replay buffer that an actor keeps: in its memory on the actor's node, through it from others."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shmbuf.distributed.lives import apart
from shmbuf.distributed.packing import Packed, pack, unpack
from shmbuf.distributed.places import Itself, Pending, Place
from shmbuf.distributed.rays import Gone, Late, Silent, ask, check_alive, check_process, here, lost, need_ray, short
from shmbuf.errors import CommitInterrupted, CommitPending, NotEnoughRows, RingFull, StorageLost
from shmbuf.ticket import left_of, seconds_of

_SLICE = 0.5
"""Seconds that one call waits in the actor: whoever is killed while he waits leaves nobody waiting there for long."""
_ANSWER = 60.0
"""Seconds until an actor that gives no sign of life is given up; one that works on a call (`loads` may take hours) gives them."""
GRACE = 5.0
"""The same, beyond its timeout, for a call that was given one."""
LOOK = 1.0
"""Seconds between two signs of life that are asked for."""
_AGAIN = 0.2
"""Seconds between two questions to an actor that Ray starts again."""
_WAITS = frozenset({"sample", "next", "wait_rows"})
_WRITES = frozenset({"extend", "put", "add"})
HOT = ("sample", "extend", "put", "update_priority", "update_tensordict_priority")
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
_LIFE = frozenset({"client", "clients", "close", "destroy", "shutdown", "start"})


class RemoteTicket:
    """As a `Ticket`, of rows that are in the ring of another node."""

    def __init__(self, client: RayClient, pending: Pending, indices: torch.Tensor | None = None):
        self._client, self._pending, self._indices = client, pending, indices

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
        try:
            while self._indices is None:
                left = left_of(timeout, since)
                once = _SLICE if left is None else min(left, _SLICE)
                patience = _ANSWER if left is None else left + GRACE
                found = self._client._ask("ticket", "writing", self._pending.number, once, patience=patience)
                if found is not None:
                    self._indices = found
                elif left is not None and left <= once:
                    raise CommitPending(
                        f"{self.rows:,} rows are in the ring of buffer {self._client.name!r} but not committed after {seconds:.3g} s: it will "
                        "happen; .ticket waits for it",
                        self,
                        self.rows,
                    )
        except KeyboardInterrupt:
            raise _interrupted(self) from None
        return self._indices

    def __repr__(self) -> str:
        return f"RemoteTicket({self.rows} rows, {'done' if self._indices is not None else 'pending'})"


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
        try:
            return torch.cat([t.wait(left_of(timeout, since)) for t in self._parts])
        except CommitInterrupted:
            raise _interrupted(self) from None
        except CommitPending as e:
            raise CommitPending(str(e), self, self.rows) from None


def _together(parts: list[RemoteTicket]) -> RemoteTicket | _Tickets:
    return parts[0] if len(parts) == 1 else _Tickets(parts)


def _interrupted(ticket: RemoteTicket | _Tickets) -> CommitInterrupted:
    return CommitInterrupted(
        f"interrupted; {ticket.rows:,} rows are in the ring of another node and will be stored; .ticket waits for them",
        ticket,
        ticket.rows,
    )


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
        self._lock = threading.RLock()
        self._life: Any = None  # of what the owner in this process ends
        self._leaving: Any = None
        self._turn = 0  # of what was asked for ahead
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
            check_process(self._pid, f"buffer {self.name!r}")
            with self._lock:
                if self._handle is None:
                    self._near = self._place.node == here()
                    if self._near:
                        handle = pickle.loads(self._place.handle)
                        vars(self).update({name: getattr(handle, name) for name in HOT})  # found without __getattr__
                        self._handle = handle
        return self._handle

    @property
    def is_alive(self) -> bool:
        """Whether the actor answers, within 5 s."""
        try:
            self._ask("pid", "looking", of_client=False, patience=GRACE)
        except StorageLost:
            return False
        return True

    # ---- asking -----------------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        group: str,
        *args: Any,
        of_client: bool = True,
        patience: float | None = None,
        sent: list[Any] | None = None,
    ) -> Any:
        """What the actor answers, however long it works on it. patience: seconds without a sign of life until it is given up;
        None: a minute. sent: is given
        the reference while nothing is known of it."""
        check_process(self._pid, f"buffer {self.name!r}")
        patience = _ANSWER if patience is None else patience
        try:
            if self._shaky:  # so that what changes something is sent to an actor that is there
                began = time.monotonic()
                self._wait_for_actor(patience)
                patience = max(patience - (time.monotonic() - began), LOOK)
            ref = self._send(method, group, *((self._id, *args) if of_client else args))
            if sent is not None:
                sent.append(ref)
            answer = self._answer(ref, patience)
            if sent is not None:
                sent.clear()
            return answer
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
        if method != "pid":
            self._known()
        call = self._methods.get((method, group))
        if call is None:
            call = self._methods[method, group] = getattr(self._keeper, method).options(concurrency_group=group)
        return call.remote(*args)

    def _known(self) -> None:
        """The actor keeps something for this client: it is told when nobody has the client any more."""
        if self._leaving is None:
            self._leaving = weakref.finalize(self, _say_goodbye, self._keeper, self._id, self._pid)
            self._leaving.atexit = False

    def _answer(self, ref: Any, patience: float) -> Any:
        heard, ping = time.monotonic(), None
        while True:
            left = heard + patience - time.monotonic()
            try:
                answer = ask(ref, max(0.0, min(LOOK, left)))
                self._shaky = False
                return answer
            except Late:
                if left <= 0:
                    raise Silent(f"it has given no sign of life for {patience:.3g} s") from None
            if ping is None:
                ping = self._send("pid", "looking")
                continue
            try:
                ask(ping, 0.0)
                heard, ping = time.monotonic(), None
            except Silent as e:
                check_alive(self._place.node)
                ping = ping if isinstance(e, Late) else None

    def _wait_for_actor(self, patience: float) -> None:
        give_up = time.monotonic() + patience
        while True:
            try:
                self._answer(self._send("pid", "looking"), max(0.0, give_up - time.monotonic()))
                return
            except Silent:
                if time.monotonic() + _AGAIN > give_up:
                    raise
                time.sleep(_AGAIN)

    def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        local = self.local
        if local is not None:
            return getattr(local, method)(*args, **keywords)
        check_process(self._pid, f"buffer {self.name!r}")
        if method == "sample" and self._place.prefetch and not args and not keywords:
            batch = self._taken()
            if batch is not None:
                return batch
        elif method not in _LOOKS:
            self._forget()  # what was asked for before is not what would be drawn now
        if method in _WAITS:
            return self._waiting(method, args, keywords)
        if method in _WRITES:
            return self._write(method, args, keywords)
        return self._once("call", "reading", method, args, keywords)

    def _once(self, how: str, group: str, method: str, args: Any, keywords: Mapping[str, Any], **asking: Any) -> Any:
        answer = self._ask(how, group, method, pack(tuple(args)), pack(dict(keywords)), **asking)
        if isinstance(answer, Itself):
            return self
        return answer if isinstance(answer, Pending) else unpack(answer)

    def _taken(self) -> Any:
        """The next of the batches that were asked for ahead. None: there is none; the long way says why."""
        together = max(1, min(self._place.prefetch, _INLINE // max(1, self._batch_bytes)))
        while True:
            with self._lock:
                while len(self._coming) * together <= self._place.prefetch:
                    self._coming.append(self._send("samples", "reading", self._id, together))
                if self._here:
                    packed = self._here.popleft()
                    break
                coming, turn = self._coming.popleft(), self._turn
            try:  # other threads take others
                found = self._answer(coming, _ANSWER)
            except (NotEnoughRows, Gone, Silent):
                self._forget()
                return None
            with self._lock:
                if turn == self._turn:
                    self._here.extend(found)
        self._batch_bytes = len(packed.data) if isinstance(packed, Packed) else _INLINE
        return unpack(packed)

    def _forget(self) -> None:
        with self._lock:
            self._here.clear()
            self._coming.clear()
            self._turn += 1

    def _waiting(self, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """In slices, for rows that are not there yet."""
        timeout = keywords.get("timeout", None if method == "wait_rows" else 0.0)
        if method == "next":
            return self._once("call", "reading", method, args, keywords)
        given = "timeout" in keywords
        if method == "wait_rows" and len(args) > 1:
            args, timeout, given = args[:1], args[1], True
        since, _ = time.monotonic(), seconds_of(timeout)
        out = keywords.pop("out", None)
        while True:
            left = left_of(timeout, since)
            once = _SLICE if left is None else min(left, _SLICE)
            patience = left + GRACE if given and left is not None else _ANSWER
            try:
                got = self._once("call", "reading", method, args, {**keywords, "timeout": once}, patience=patience)
                return got if out is None else out.update_(got)
            except NotEnoughRows:
                if left is not None and left <= once:
                    raise

    def _write(self, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """In slices, for room in the ring; rows that are in are waited for by their ticket."""
        done: list[RemoteTicket] = []
        sent: list[Any] = []
        try:
            return self._written(method, args, keywords, done, sent)
        except CommitInterrupted:
            raise
        except KeyboardInterrupt:
            if sent:  # it waits for half a second at most
                with contextlib.suppress(Exception):
                    got = unpack(ask(sent.pop(), _SLICE + GRACE))
                    if isinstance(got, Pending):
                        done.append(RemoteTicket(self, got))
                    elif got is not None:
                        index = torch.as_tensor(got).reshape(-1)
                        done.append(RemoteTicket(self, Pending(-1, len(index), len(index)), index))
            if not done:
                raise
            raise _interrupted(_together(done)) from None

    def _written(
        self, method: str, args: tuple[Any, ...], keywords: dict[str, Any], done: list[RemoteTicket], sent: list[Any]
    ) -> Any:
        given = keywords.get("timeout") is not None
        timeout = keywords["timeout"] if given else self._place.config["timeout"]
        since = time.monotonic()
        seconds_of(timeout)
        while True:
            left = left_of(timeout, since)
            once = _SLICE if left is None else min(left, _SLICE)
            asking = {"patience": left + GRACE if given and left is not None else _ANSWER, "sent": sent}
            try:
                got = self._once("write", "writing", method, args, {**keywords, "timeout": once}, **asking)
            except RingFull:
                sent.clear()
                if left is not None and left <= once:
                    raise
                continue
            if not isinstance(got, Pending):
                return got if not done else torch.cat([_together(done).wait(left_of(timeout, since)), got])
            done.append(RemoteTicket(self, got))
            if method == "put" and got.rows >= got.asked:
                return _together(done)
            if got.rows < got.asked:  # a batch larger than the ring
                args, keywords = _rest(args, keywords, got)
                continue
            index = _together(done).wait(left_of(timeout, since))
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


def _say_goodbye(keeper: Any, client: str, pid: int) -> None:
    """The actor may close what it keeps for that client."""

    def leave() -> None:
        with contextlib.suppress(Exception):
            if need_ray().is_initialized():
                keeper.leave.options(concurrency_group="looking").remote(client)

    if pid == os.getpid():
        apart(leave)
