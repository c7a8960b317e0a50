"""What all rooms of a sharded buffer's handle share: which shards there are, and what happens when one is lost."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from shmbuf.distributed.directory import Directory, Entry, Settings, lost_text
from shmbuf.distributed.joining import join, patiently
from shmbuf.distributed.links import Link
from shmbuf.distributed.rays import Gone, Silent, alive_nodes, ask, check_process, here, need_ray
from shmbuf.errors import StorageLost
from shmbuf.reading import checked_seed
from shmbuf.samplers import Sampler

T = TypeVar("T")
REFRESH = 1.0
"""Seconds between two questions whether shards have joined."""


class Sharing:
    """The parts of one handle."""

    _settings: Settings
    _closed = True
    _coordinator: Any
    _directory: Directory
    _sampler: Sampler
    _worker: int | None
    _only: list[int] | None
    _links: dict[int, Link]
    _lost: dict[int, str]
    _rng: np.random.Generator
    _seed: int | None
    _here: str
    _identity: str
    _ahead: Any = None
    _transform: Any = None

    def _join(
        self,
        settings: Settings,
        coordinator: Any,
        directory: Directory,
        *,
        sampler: Sampler,
        prefetch: int | None,
        seed: int | None,
        transform: Any,
        worker: int | None = None,
        only: list[int] | None = None,
    ) -> None:
        from shmbuf.face.transforming import _composed

        self._settings, self._coordinator, self._directory = settings, coordinator, directory
        self._version = directory.version
        self._worker, self._only = worker, only
        self._links: dict[int, Link] = {}
        self._lost = {s.number: s.lost for s in directory.shards if s.lost is not None}  # that is old news
        self._seed = None if seed is None else checked_seed(seed)
        self._rng = np.random.default_rng(None if self._seed is None else self._seed % 2**63)
        self._pid = os.getpid()
        self._here, self._identity = here(), os.urandom(8).hex()
        self._mutex = threading.RLock()
        self._refreshing: Any = None
        self._asked: list[tuple[Any, int]] = []  # questions for grants that are on their way, and of which limiter
        self._refreshed = time.monotonic()
        self._transform = _composed(transform)
        self._closed = False
        self._begin_writing()
        self._use_sampler(sampler)
        self._set_prefetch(prefetch)

    def _begin_writing(self) -> None:
        raise NotImplementedError

    def _use_sampler(self, sampler: Sampler) -> None:
        raise NotImplementedError

    def _set_prefetch(self, prefetch: int | None) -> None:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def batch_size(self) -> int | None:
        """Of `sample` without a number."""
        return self._settings.batch_size

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @property
    def initialized(self) -> bool:
        """Whether rows were stored anywhere."""
        return any(self._of_each(lambda link: link.client.initialized))

    # ---- shards -----------------------------------------------------------------------------------------------------

    def _link(self, number: int) -> Link:
        with self._mutex:
            link = self._links.get(number)
            if link is None:
                entry = self._directory.of(number)
                assert entry is not None
                try:
                    link = self._links[number] = Link(self.name, entry, self._settings.remote_timeout, self._identity)
                except ValueError as e:  # Ray forgot its actor already
                    raise Gone(str(e)) from e
            return link

    def _living(self) -> list[Link]:
        """Of all shards that are not lost, in the order of their numbers."""
        self._check_open()
        self._refresh()
        found = []
        for entry in self._directory.living():
            try:
                found.append(self._link(entry.number))
            except Gone as e:
                self._lose(entry.number, str(e))
        return found

    def _check_open(self) -> None:
        check_process(self._pid, f"buffer {self.name!r}")
        if self._closed:
            raise RuntimeError("A shut down replay buffer cannot be sampled.")

    def _refresh(self) -> None:
        """Ask the coordinator now and then, without waiting for it."""
        with self._mutex:
            if self._refreshing is not None:
                ready, _ = need_ray().wait([self._refreshing], timeout=0)
                if not ready:
                    return
                answer, self._refreshing = self._refreshing, None
                self._refreshed = time.monotonic()
                try:
                    found = ask(answer, 1.0)
                except (Gone, Silent):
                    return
                if found is not None:
                    self._take(found)
            elif time.monotonic() - self._refreshed > REFRESH:
                self._refreshing = self._asking("directory", self._version)

    def _asking(self, method: str, *args: Any) -> Any:
        return getattr(self._coordinator, method).options(concurrency_group="asking").remote(*args)

    def _take(self, directory: Directory) -> None:
        """A directory that may not know yet what was lost here."""
        self._version = (
            directory.version
        )  # not of what is made of it here, which others may have given to something else
        known = {s.number for s in directory.shards}
        for entry in self._directory.shards:
            if entry.number not in known:  # an older one, of a coordinator that was started again
                directory = replace(directory, shards=(*directory.shards, entry))
        news = [s for s in directory.shards if s.lost is not None and s.number not in self._lost]
        for number, why in self._lost.items():
            directory = directory.without(number, why)
        self._directory = directory
        for entry in news:
            self._mourn(entry)

    def _lose(self, number: int, why: str) -> None:
        """That shard is dead: tell the coordinator, warn once, go on with the others."""
        with self._mutex:
            if number in self._lost:
                return
            self._asking("lost", number, why)
            self._directory = self._directory.without(number, why)
            entry = self._directory.of(number)
            if entry is not None:
                self._mourn(entry)  # last: a warning may be an error

    def _of_each(self, work: Callable[[Link], T]) -> list[T]:
        """What is done with each shard, with all at the same time, in the order of their numbers; one that is lost meanwhile is left out.
        Raises what the first of the others raises, when all are done."""
        links = self._living()
        if not links:
            return []
        with ThreadPoolExecutor(len(links)) as threads:
            doing = [threads.submit(work, link) for link in links]
            wait(doing)
        out = []
        for link, done in zip(links, doing, strict=True):
            try:
                out.append(done.result())
            except StorageLost as e:
                if isinstance(e.__cause__, Silent):  # it may live
                    raise
                self._lose(link.number, str(e.__cause__ if isinstance(e.__cause__, Gone) else e))
        return out

    def _mourn(self, entry: Entry) -> None:
        self._lost[entry.number] = entry.lost or ""
        link = self._links.get(entry.number)
        if link is not None:
            link.drop_updates()
        warnings.warn(
            f"buffer {self.name!r}: {lost_text(entry)}. Its rows are gone; the other {len(self._directory.living())} shards are used",
            RuntimeWarning,
            stacklevel=4,
        )

    def shards(self) -> list[dict[str, Any]]:
        """One dict a shard, lost ones too: ``number``, ``node``, ``segment``, ``alive``, ``why`` it is lost, ``local`` (this process works in its
        memory), ``silent`` (left out for now, as it does not answer)."""
        self._living()
        out = []
        for entry in self._directory.shards:
            link = self._links.get(entry.number)
            alive = entry.lost is None
            out.append(
                {
                    "number": entry.number,
                    "node": entry.node,
                    "segment": None if entry.place is None else entry.place.segment,
                    "alive": alive,
                    "why": entry.lost,
                    "local": alive and entry.node == self._here,
                    "silent": alive and link is not None and link.silent,
                }
            )
        return out

    def shard(self, number: int) -> Any:
        """That shard alone: a `RayClient`, with all methods of its `TensorDictReplayBuffer`. KeyError: there is none, or it is lost."""
        self._check_open()
        self._refresh()
        entry = self._directory.of(number)
        if entry is None or entry.lost is not None:
            raise KeyError(f"no shard {number} of buffer {self.name!r}" if entry is None else lost_text(entry))
        return self._link(number).client

    def add_shard(self, node_id: str | None = None) -> int:
        """The number of that node's shard (default: this node's), which is made if it has none. ValueError: no living node has that id.
        Raises what making it raises."""
        self._check_open()
        if node_id is not None and node_id not in (alive := alive_nodes()):
            raise ValueError(f"node_id={node_id!r}: ids of living nodes are {alive}")
        number = join(self._settings, self._coordinator, node_id or self._here)
        self._update_directory()
        return number

    def _update_directory(self) -> None:
        found = patiently(self._coordinator, "directory", self._version)
        if found is not None:
            with self._mutex:
                self._take(found)
