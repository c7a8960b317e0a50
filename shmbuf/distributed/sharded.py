"""`ShardedReplayBuffer`: one replay buffer over the machines of a Ray cluster, with a segment on each."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shmbuf.attaching import positive
from shmbuf.distributed.coordinator import start
from shmbuf.distributed.directory import Routes, Settings, actor, coordinator_name
from shmbuf.distributed.drawing import check_sampler, spec_of
from shmbuf.distributed.ending import SWEEP, end_shards
from shmbuf.distributed.joining import join_all, patiently
from shmbuf.distributed.keeper import made_of
from shmbuf.distributed.limiting import Allowance
from shmbuf.distributed.links import Link
from shmbuf.distributed.places import Recipe, unique
from shmbuf.distributed.rays import Gone, Silent, alive_nodes, ask, need_ray, running
from shmbuf.distributed.reading import Reading
from shmbuf.distributed.writing import Writing
from shmbuf.errors import BufferExists, BufferNotFound, CheckpointError, ShmbufError
from shmbuf.face.making import made_sampler
from shmbuf.limiter import Words
from shmbuf.reading import checked_seed
from shmbuf.replay_buffer import TensorDictReplayBuffer
from shmbuf.rlightning.table import EpisodeTable
from shmbuf.samplers import SAMPLERS, Sampler
from shmbuf.schema import as_key

_WHOLE = "sharded.json"


class ShardedReplayBuffer(Reading, Writing):
    """A replay buffer whose rows lie on many nodes of a Ray cluster: one shard, with a segment, on each.

    Processes write to their own node's shard through shared memory, and sample from all shards: a batch has as many rows of each
    as fall to it by its rows (by its priorities, with a `PrioritizedSampler`), as if all lay in one buffer. A row is (shard, row_id).

    Args:
        storage: an unmade `ShmStorage` with a name, or a function that makes one: of every shard. Its size is one shard's. Without a
            name one is made up, and the buffer ends with the process that made it.
        sampler: `RandomSampler` (default), `PrioritizedSampler`, `SliceSampler`, `PrioritizedSliceSampler` (slices lie in one shard; shards are
            drawn by their rows, or priorities) or `SamplerWithoutReplacement` (each shard has its own epochs, per handle). Others are a TypeError.
        writer, priority_key, batch_size, transform: see `TensorDictReplayBuffer`. Rows are transformed where they are put, and batches
            where they are sampled.
        prefetch: so many batches ahead, which hides the transfer; how many rows come of which shard is then decided by what the shards
            last told.
        nodes: ids of those that get a shard now; default: all. auto_shards: a process that writes on a node without one has one made
            there; else it writes through an actor to another node's.
        limiter: over all shards: see `shmbuf.distributed.limiting` for how close it keeps to the ratio.
        env_ids, num_train_workers: for an `EpisodeTable` of as many storages as nodes (or give episode_table): environments are routed to
            shards (``extend(td, env_id=)``), and ``attach(name, train_worker=i)`` samples the shards of worker i alone.
        seed: of this handle's draws. shard_options: for ``ray.remote``, of the shards' actors. remote_timeout: seconds until a shard
            that does not answer is left out of a batch. ray_init_config: for ``ray.init``, if this process is not connected.

    Any process of the cluster: ``ShardedReplayBuffer.attach(name)``, or is sent the object. When a node dies its shard is lost: the
    others are sampled on, with a warning. When a shard's actor is killed nothing is lost: the segment is there, and the actor is started again.
    """

    def __init__(
        self,
        *,
        storage: Any,
        sampler: Any = None,
        writer: Any = None,
        batch_size: int | None = None,
        priority_key: str | tuple[str, ...] = "td_error",
        prefetch: int | None = None,
        transform: Any = None,
        nodes: Sequence[str] | None = None,
        auto_shards: bool = True,
        limiter: Words | None = None,
        env_ids: Sequence[str] | None = None,
        num_train_workers: int | None = None,
        episode_table: EpisodeTable | None = None,
        seed: int | None = None,
        shard_options: Mapping[str, Any] | None = None,
        remote_timeout: float = 5.0,
        ray_init_config: Mapping[str, Any] | None = None,
    ):
        size = positive(batch_size)
        of_all = check_sampler(made_sampler(sampler, None))
        spec = spec_of(of_all, size)
        made = made_of(storage)
        name = made._make["name"]
        unnamed = name is None
        name = unique(name)
        if positive(prefetch, "prefetch", "a number of batches") and size is None:
            raise ValueError("prefetch needs a batch_size: batches of it are drawn ahead")
        if seed is not None:
            checked_seed(seed)
        if limiter is not None:
            Allowance.of(limiter, size or 1)
        running(ray_init_config)
        chosen = self._nodes(nodes)
        routes = self._routed(chosen, env_ids, num_train_workers, episode_table)
        keywords: dict[str, Any] = {
            "storage": storage,
            "sampler": SAMPLERS[spec[0]](**spec[1]),
            "priority_key": as_key(priority_key),
        }
        more = {"writer": writer, "transform": transform, "batch_size": size}
        keywords.update({k: v for k, v in more.items() if v is not None})
        settings = Settings(
            name=name,
            recipe=Recipe.of(TensorDictReplayBuffer, keywords, name),
            sampler=(of_all.name, of_all.arguments()),
            batch_size=size,
            priority_key=as_key(priority_key),
            limiter=limiter,
            auto_shards=bool(auto_shards),
            shard_options=dict(shard_options or {}),
            remote_timeout=float(remote_timeout),
            ends=unnamed,
        )
        try:
            coordinator = start(settings, routes)
        except ValueError as e:
            raise BufferExists(
                f"a sharded buffer named {name!r} exists in this cluster: ShardedReplayBuffer.attach({name!r}), which can also shutdown() "
                f"what a killed process left ({e})"
            ) from None
        try:
            directory = join_all(settings, coordinator, chosen)
            ways = {"prefetch": prefetch, "seed": seed, "transform": transform}
            self._join(settings, coordinator, directory, sampler=of_all, **ways)
            if unnamed:
                self._until_exit()
        except BaseException as e:
            _end(coordinator, settings.name)
            if isinstance(e, (Gone, Silent)):
                raise ShmbufError(f"the shards of {name!r} could not be made: {e}") from e
            raise

    @staticmethod
    def _nodes(nodes: Sequence[str] | None) -> list[str]:
        alive = alive_nodes()
        if nodes is None:
            return alive
        chosen = list(nodes)
        unknown = [n for n in chosen if n not in alive]
        if unknown or not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"nodes={chosen}: different ids of living nodes are needed; those are {alive}")
        return chosen

    @staticmethod
    def _routed(
        nodes: list[str], env_ids: Sequence[str] | None, workers: int | None, table: EpisodeTable | None
    ) -> Routes | None:
        if table is None and env_ids is None and workers is None:
            return None
        if table is None:
            table = EpisodeTable(len(nodes), env_ids, workers)
        elif env_ids is not None or workers is not None:
            raise TypeError("episode_table, or env_ids and num_train_workers, not both")
        if table.num_storages != len(nodes):
            raise ValueError(f"episode_table has {table.num_storages} storages for {len(nodes)} nodes")
        return Routes(table, list(range(len(nodes))))

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        train_worker: int | None = None,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        prefetch: int | None = None,
        transform: Any = None,
        seed: int | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
    ) -> ShardedReplayBuffer:
        """The buffer of that name, in any process of the cluster.

        Args:
            train_worker: sample the shards of this one of the table's workers; all if these are lost.
            batch_size, sampler, prefetch, transform (of batches), seed: this handle's.

        Raises:
            BufferNotFound. ValueError, TypeError: an argument that is none.
        """
        running(ray_init_config or {"address": "auto"})
        try:
            coordinator = actor(coordinator_name(name))
        except ValueError as e:
            raise BufferNotFound(f"no sharded buffer named {name!r} in this Ray cluster") from e
        try:
            settings, directory = (patiently(coordinator, m) for m in ("settings", "directory"))
        except Gone as e:
            raise BufferNotFound(f"sharded buffer {name!r} was shut down: {e}") from e
        if batch_size is not None:
            settings = settings._replace(batch_size=positive(batch_size))
        self = cls.__new__(cls)
        only = None if train_worker is None else patiently(coordinator, "shards_of", train_worker)
        if train_worker is not None and only is None:
            raise ValueError(f"train_worker={train_worker}: buffer {name!r} was made without num_train_workers")
        if sampler is None:
            kind, arguments = settings.sampler
            sampler = SAMPLERS[kind](**arguments)
        ways = {"sampler": check_sampler(sampler), "prefetch": prefetch, "seed": seed, "transform": transform}
        self._join(settings, coordinator, directory, worker=train_worker, only=only, **ways)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        ways = {
            "train_worker": self._worker,
            "batch_size": self.batch_size,
            "sampler": (self._sampler.name, self._sampler.arguments()),
            "prefetch": None if self._ahead is None else self._ahead.depth,
            "transform": self._transform if len(self._transform) else None,
        }
        return _attached, (type(self), self.name, ways)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of it, here; what is on its way (priorities) is waited for."""
        if self._closed:
            return
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
        with contextlib.suppress(Exception):
            self.synchronize(self._settings.remote_timeout)
        with contextlib.suppress(Exception):
            self._refund()
        for link in self._links.values():
            link.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """End all shards, for everybody, and remove their segments. timeout: seconds (default: 60) until shards that do not answer are killed."""
        self.close()
        _end(self._coordinator, self.name, 60.0 if timeout is None else timeout)

    def _until_exit(self) -> None:
        """This process ends the buffer, also if it holds no handle any more."""
        coordinator, name, pid = self._coordinator, self.name, os.getpid()

        def end() -> None:
            if pid == os.getpid() and need_ray().is_initialized():
                _end(coordinator, name, 10.0)

        atexit.register(end)  # after Ray's own, so it is called before

    def __enter__(self) -> ShardedReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        living = self._directory.living()
        local = sum(s.node == self._here for s in living)
        return (
            f"ShardedReplayBuffer({self.name!r}, {len(living)} shards, {local} of this node, sampler={self._sampler!r})"
        )

    # ---- on disk ----------------------------------------------------------------------------------------------------

    def dumps(self, path: Any, **how: Any) -> None:
        """Each shard that ever had a row under ``path/shard-<number>``, written on its own node, all at the same time: a directory that all
        nodes share is needed for one checkpoint. Each of these is there whole or as it was; what belongs together is written down last.

        RuntimeError: no shard has ever had a row."""
        limiter, path = patiently(self._coordinator, "kept"), os.fspath(path)

        def dump(link: Link) -> str | None:
            if not link.client.initialized:
                return None
            link.client._call("dumps", os.path.join(path, name := f"shard-{link.number}"), **how)
            return name

        saved = [name for name in self._of_each(dump) if name is not None]
        if not saved:
            raise RuntimeError(f"Cannot save buffer {self.name!r}: none of its shards has ever had a row")
        os.makedirs(path, exist_ok=True)
        with open(fresh := os.path.join(path, f".{_WHOLE}"), "w") as file:
            json.dump({"shards": saved, "limiter": limiter}, file)
        os.replace(fresh, os.path.join(path, _WHOLE))

    def loads(self, path: Any, **how: Any) -> None:
        """What `dumps` saved, in the order of the shards' numbers; shards that nothing is left for are emptied. The limiter keeps its
        parameters, and goes on from the difference that was saved if the ratio is the same. ValueError: more were saved than there are
        shards; CheckpointError: that is no checkpoint of a sharded buffer. In both cases nothing was changed."""
        there, limiter = _saved(path)
        links = self._living()
        if len(there) > len(links):
            raise ValueError(
                f"{path} has {len(there)} shards, the buffer {len(links)}: {there}. Nothing was changed; add_shard(), or load them one by one: "
                f"shard(k).loads({os.path.join(os.fspath(path), there[-1])!r})"
            )
        places = {link.number: os.path.join(os.fspath(path), name) for link, name in zip(links, there, strict=False)}

        def load(link: Link) -> None:
            if link.number in places:
                link.client._call("loads", places[link.number], **how)
            elif link.client.initialized:
                link.client._call("empty")

        self._of_each(load)
        patiently(self._coordinator, "recount", limiter)
        self._forget_ahead()

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all rows of all shards."""
        try:
            self._of_each(lambda link: link.client._call("empty", empty_write_count))
        finally:
            self._forget_ahead()

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Draw another way from now on, through this handle. Returns the previous sampler. With priorities: those that the buffer keeps."""
        before, sampler = self._sampler, check_sampler(sampler)
        self._refund()
        self._use_sampler(sampler)
        self._forget_ahead()
        return before

    def _forget_ahead(self) -> None:
        """What was drawn ahead is not what would be drawn now."""
        if self._ahead is not None:
            self._ahead.clear()
        self._forget_masses()

    def set_limiter(self, limiter: Words | None) -> None:
        """Let everybody sample and insert at this ratio from now on, over all shards; None: at any, as at the end of a run, where collectors
        would wait for samplers for ever. Differences count from here unless the ratio stays. Other handles hear of it within some seconds.

        Raises ValueError, and changes nothing, where it would deadlock with this handle's batches.
        """
        self._check_open()
        batch = self.batch_size or 1
        if limiter is not None:
            Allowance.of(limiter, batch)
        patiently(self._coordinator, "limit", limiter, batch)
        self._update_directory()

    @property
    def service_backend(self) -> str:
        return "ray"

    @property
    def is_alive(self) -> bool:
        """Whether this handle samples."""
        return not self._closed


def _attached(cls: type[ShardedReplayBuffer], name: str, ways: dict[str, Any]) -> ShardedReplayBuffer:
    kind, arguments = ways.pop("sampler")
    return cls.attach(name, sampler=SAMPLERS[kind](**arguments), **ways)


def _saved(path: Any) -> tuple[list[str], dict[str, Any] | None]:
    """Directories of shards in their order, and the limiter's ratio and difference."""
    try:
        with open(os.path.join(path, _WHOLE)) as file:
            found = json.load(file)
        limiter = found["limiter"]
        return found["shards"], limiter if limiter is None else {k: limiter[k] for k in ("num", "den", "diff")}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{os.fspath(path)} is no checkpoint of a sharded buffer ({type(e).__name__}: {e}). Nothing was changed"
        ) from None


def _end(coordinator: Any, name: str, timeout: float = 60.0) -> None:
    """Also where the coordinator is dead, or does not answer."""
    ray = need_ray()
    try:
        ask(coordinator.shutdown.options(concurrency_group="ending").remote(timeout), timeout + 2 * SWEEP)
    except Exception:
        with contextlib.suppress(Exception):
            ray.kill(coordinator)
        with contextlib.suppress(Exception):
            end_shards(name, (), 10.0)
    with contextlib.suppress(Exception):
        ray.kill(coordinator)
