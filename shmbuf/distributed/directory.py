"""Which shards there are, and who works on which: plain values that coordinator, shards and handles hold copies of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shmbuf.distributed.places import Place, Recipe
from shmbuf.distributed.rays import NAMESPACE, need_ray, short
from shmbuf.limiter import Words

if TYPE_CHECKING:
    from shmbuf.rlightning.table import EpisodeTable


_FIRST_STREAM = 1 << 32
"""Environments are numbered from here, so that they are no streams that somebody else numbered: 0 is of rows without one."""


@dataclass(frozen=True)
class Entry:
    """A shard. lost: why it is; None: it is not."""

    number: int
    node: str
    place: Place | None
    lost: str | None = None


@dataclass(frozen=True)
class Directory:
    """version grows with every change; next: the number of the next shard, as numbers are never used again. limited: whether sampling
    needs the coordinator's leave; regime: how often a limiter was set or taken away."""

    version: int = 0
    next: int = 0
    shards: tuple[Entry, ...] = ()
    limited: bool = False
    regime: int = 0

    def living(self) -> list[Entry]:
        return [s for s in self.shards if s.lost is None and s.place is not None]

    def of(self, number: int) -> Entry | None:
        return next((s for s in self.shards if s.number == number), None)

    def on(self, node: str) -> Entry | None:
        """The living shard of that node."""
        return next((s for s in self.living() if s.node == node), None)

    def with_(self, entry: Entry) -> Directory:
        others = [s for s in self.shards if s.number != entry.number]
        shards = tuple(sorted([*others, entry], key=lambda s: s.number))
        return replace(self, version=self.version + 1, next=max(self.next, entry.number + 1), shards=shards)

    def without(self, number: int, why: str) -> Directory:
        entry = self.of(number)
        if entry is None or entry.lost is not None:
            return self
        return self.with_(replace(entry, lost=why))


class Settings(NamedTuple):
    """Of a sharded buffer, as its constructor was told: what every process needs, and a coordinator that is started again. ends: with the
    process that made it."""

    name: str
    recipe: Recipe
    sampler: tuple[str, dict[str, Any]]
    batch_size: int | None
    priority_key: tuple[str, ...]
    limiter: Words | None
    auto_shards: bool
    shard_options: dict[str, Any]
    remote_timeout: float
    ends: bool = False


class Reserved(NamedTuple):
    """Of a node's shard. what: "there": it has that number; "make": the asker is to make it; "wait": somebody else makes it. limited:
    nothing may be inserted into it before a cap is set. before: the number with which somebody was to make it who is dead; −1: nobody."""

    what: str
    number: int
    limited: bool = False
    before: int = -1


@dataclass
class Routes:
    """Environments to shards and shards to train workers, by an `EpisodeTable` whose storages are ``places``: numbers of shards.

    A shard that is lost leaves its place to the next one that joins; meanwhile its environments go to the other places in turn.
    """

    table: EpisodeTable
    places: list[int]
    streams: dict[str, int] = field(default_factory=dict)

    def route(self, env_id: str, living: set[int]) -> tuple[int, int] | None:
        """The number of its shard, and that of its stream. None: no shard is there."""
        stream = self.streams.setdefault(env_id, _FIRST_STREAM + len(self.streams))
        first = self.table.get_storage_idx_for_env(env_id)
        n = len(self.places)
        for step in range(n):
            number = self.places[(first + step) % n]
            if number in living:
                return number, stream
        return (min(living), stream) if living else None

    def joined(self, number: int, living: set[int]) -> None:
        if number in self.places:
            return
        for i, held in enumerate(self.places):
            if held not in living:
                self.places[i] = number
                return

    def shards_of(self, worker: int) -> list[int] | None:
        """Numbers of the shards that a train worker samples; None: the table has no workers. ValueError: it has no such worker."""
        workers = self.table.get_storage_to_train_workers()
        if not workers:
            return None
        if not any(worker in ids for ids in workers.values()):
            known = sorted(i for ids in workers.values() for i in ids)
            raise ValueError(f"train_worker={worker!r}: workers are {known}")
        return [self.places[s] for s, ids in workers.items() if worker in ids]


def coordinator_name(name: str) -> str:
    return f"shmbuf.{name}"


def shard_name(name: str, number: int) -> str:
    return f"{coordinator_name(name)}/{number}"  # no buffer's name has a slash


def actor(name: str) -> Any:
    """A named actor. Raises ValueError: there is none."""
    return need_ray().get_actor(name, namespace=NAMESPACE)


def lost_text(entry: Entry) -> str:
    return f"shard {entry.number} on node {short(entry.node)} is lost: {entry.lost}"
