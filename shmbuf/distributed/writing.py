"""Rows into shards: each process into its own node's, environments into those that the table says; a stream stays where it began."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from shmbuf import streams
from shmbuf.distributed.joining import join
from shmbuf.distributed.links import Link
from shmbuf.distributed.rays import Gone, Silent, ask
from shmbuf.distributed.sharing import Sharing
from shmbuf.errors import SchemaError, ShmbufError, StorageLost
from shmbuf.schema import Schema
from shmbuf.tensors import tensor_leaves
from shmbuf.ticket import left_of, seconds_of
from shmbuf.turns import alone

_HOME = 60.0
_TRIES = 4


class _Makeshift(NamedTuple):
    """A shard to write to while the coordinator, which knows the right one, does not answer."""

    number: int


class ShardTicket:
    """As a `Ticket`: ``wait`` gives int64[n, 2], shard and row index there of each row."""

    def __init__(self, ticket: Any, shard: int):
        self._ticket, self.shard = ticket, shard

    @property
    def rows(self) -> int:
        return self._ticket.rows

    def done(self) -> bool:
        """Whether the rows can be drawn by now."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        return _numbered(self.shard, self._ticket.wait(timeout))


def _numbered(shard: int, index: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.full_like(index, shard), index], -1)


class Writing(Sharing):
    """`extend`, `put`, `add`."""

    def _begin_writing(self) -> None:
        self._home: int | None = None
        self._routes: dict[str, tuple[int, int]] = {}
        self._streams_named: bool | None = None
        self._settling: Any = threading.RLock()

    def extend(
        self,
        tensordicts: TensorDictBase,
        *,
        env_id: str | None = None,
        update_priority: bool | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows in one shard; returns when everybody can draw them.

        Args:
            tensordicts, update_priority, stream, timeout: see `TensorDictReplayBuffer.extend`.
            env_id: the environment whose next steps these are: the table says its shard, and they are one stream. Default: this
                process's shard, which is its node's.

        Returns:
            LongTensor[n, 2]: the shard, and the index there, of each row.

        Raises:
            As `TensorDictReplayBuffer.extend`. StorageLost: an actor of another node was killed meanwhile, and it is not known whether
            the rows were stored. If its node died they are stored in another shard.
        """
        ways = {} if update_priority is None else {"update_priority": update_priority}
        number, index = self._write("extend", tensordicts, env_id, stream, timeout, ways)
        return _numbered(number, index)

    def put(
        self, data: TensorDictBase, *, env_id: str | None = None, stream: Any = None, timeout: float | None = None
    ) -> ShardTicket:
        """Hand rows to the ring and return at once: what collectors call. On a node without a shard: through an actor, which is waited for."""
        number, ticket = self._write("put", data, env_id, stream, timeout, {})
        return ShardTicket(ticket, number)

    def add(
        self, data: TensorDictBase, *, env_id: str | None = None, stream: Any = None, timeout: float | None = None
    ) -> torch.Tensor:
        """Store one row, of batch size []; returns LongTensor[2]: shard and index."""
        number, index = self._write("add", data, env_id, stream, timeout, {})
        return torch.tensor([number, index])

    def _write(
        self, method: str, rows: Any, env_id: str | None, stream: Any, timeout: float | None, ways: dict[str, Any]
    ) -> tuple[int, Any]:
        self._check_open()
        self._refresh()
        if env_id is not None and stream is not None:
            raise TypeError("env_id or stream, not both: an environment is a stream")
        since = time.monotonic()
        for tries in range(_TRIES):
            number, of = self._target(env_id, timeout, since)
            how = dict(ways, timeout=left_of(timeout, since))
            try:
                link = self._link(number)
                if stream is not None:
                    how["stream"] = stream
                elif of is not None and not self._named(link, rows, method == "add"):
                    how["stream"] = of
                return number, link.client._call(method, rows, **how)
            except Gone as e:
                self._moved(number, e)
            except StorageLost as e:
                if not isinstance(e.__cause__, Gone) or tries == _TRIES - 1:
                    raise
                self._moved(number, e.__cause__)
        raise StorageLost(
            f"{_TRIES} shards of buffer {self.name!r} were lost while rows were being put. Nothing was stored"
        )

    def _moved(self, number: int, why: Exception) -> None:
        """That shard is lost: whoever wrote there writes elsewhere from now on."""
        self._lose(number, str(why))
        with self._settling:
            if self._home == number:
                self._home = None
            self._routes = {k: v for k, v in self._routes.items() if v[0] != number}

    def _target(self, env_id: str | None, timeout: float | None, since: float) -> tuple[int, int | None]:
        """The shard, and the stream if it is an environment's. Raises ShmbufError: not within ``timeout`` seconds."""
        with alone(
            self._settling,
            seconds_of(left_of(timeout, since)),
            lambda: ShmbufError(
                f"another thread of this process has been finding its shard of buffer {self.name!r} for {timeout} s. Nothing was stored"
            ),
        ):
            if env_id is not None:
                return self._of_environment(env_id, timeout, since)
            if self._home is None or self._home in self._lost:
                mine = self._directory.on(self._here)
                home = mine.number if mine is not None else self._from_coordinator("home", timeout, since, self._here)
                if home is None and not self._settings.auto_shards:
                    raise StorageLost(
                        f"all shards of buffer {self.name!r} are lost, and auto_shards is off: add_shard()"
                    )
                if isinstance(home, _Makeshift):
                    return home.number, None
                self._home = self._joined(timeout, since) if home is None else home
                self._know(self._home)
            return self._home, None

    def _of_environment(self, env_id: str, timeout: float | None, since: float) -> tuple[int, int]:
        known = self._routes.get(env_id)
        if known is None or known[0] in self._lost:
            try:
                found = self._from_coordinator("route", timeout, since, env_id)
                if found is None and self._settings.auto_shards:
                    self._joined(timeout, since)
                    found = self._from_coordinator("route", timeout, since, env_id)
            except LookupError:
                raise ValueError(
                    f"env_id={env_id!r}: buffer {self.name!r} routes no environments: give its constructor env_ids= or episode_table="
                ) from None
            if found is None:
                raise StorageLost(f"all shards of buffer {self.name!r} are lost: add_shard()")
            known = self._routes[env_id] = found
        self._know(known[0])
        return known

    def _joined(self, timeout: float | None, since: float) -> int:
        try:
            return join(self._settings, self._coordinator, self._here, left_of(timeout, since))
        except Gone as e:
            raise StorageLost(f"buffer {self.name!r} was shut down: {e}") from e

    def _from_coordinator(self, method: str, timeout: float | None, since: float, *args: Any) -> Any:
        """It may be starting again. Without it: any shard that is known, for now."""
        give_up = time.monotonic() + _HOME
        while True:
            left = left_of(timeout, since)
            try:
                return ask(self._asking(method, *args), 10.0 if left is None else max(0.1, min(left, 10.0)))
            except Silent:
                living = self._directory.living()
                if method == "home" and living:
                    return _Makeshift(living[0].number)
                if time.monotonic() > give_up or (left is not None and left <= 0):
                    raise ShmbufError(
                        f"the coordinator of buffer {self.name!r} does not answer within {_HOME if timeout is None else timeout:g} s. "
                        "Nothing was stored"
                    ) from None
                time.sleep(0.2)
            except Gone as e:
                raise StorageLost(f"buffer {self.name!r} was shut down: {e}") from e

    def _know(self, number: int) -> None:
        if self._directory.of(number) is None:
            self._update_directory()

    def _named(self, link: Link, rows: Any, single: bool) -> bool:
        """Whether rows need no stream: they name their trajectory themselves, or the buffer keeps none."""
        if self._streams_named is None:
            marks = None
            with contextlib.suppress(SchemaError):  # the put will say what is wrong
                leaves = tensor_leaves(rows, others={})
                schema = Schema.from_leaves(leaves, 0 if single else 1)
                marks = streams.resolve(schema, link.entry.place.config.get("streams") or {})  # type: ignore[union-attr]
            if marks is None:
                return True
            self._streams_named = not marks.keep or marks.trajectory is not None
        return self._streams_named
