"""`EpisodeTable`: which storage takes which environment's episodes, and which train workers read it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Distribution = Mapping[str, Mapping[str, Mapping[str, Any]]]


class EpisodeTable:
    """Environments to storages, storages to train workers.

    Without affinity an environment goes to the storage with the fewest of them, equal ones in turn; workers are cut into even
    blocks. With it both go to the storage of their own node.

    Args:
        num_storages: how many there are.
        env_ids: registered at once.
        num_train_workers: how many there are; None: no storage has any.
        component_distribution: of each node, which workers run there: ``{node: {"env" | "buffer" | "train": {"ids": [...]}}}``.
        node_affinity_env, node_affinity_train: whether environments and train workers stay on their node.

    An environment is number k if what stands after the last ``-`` of its id is a number, else its place in ``env_ids``. One that is
    registered later also goes to its node's storage (rlightning gives it to any); to the least loaded one if its id has no number, or
    its node no storage.

    Raises:
        TypeError: env_ids is a str, or holds what is none; ids in component_distribution that are no integers.
        ValueError: num_storages or num_train_workers below 1. AssertionError: workers do not divide evenly; affinity without a
        distribution; a node with two storages; an environment on a node without one; a storage's number out of range.
        RuntimeError: with env_ids (or num_train_workers) and their affinity a storage's node has none of them, or nodes have different
        numbers.
    """

    def __init__(
        self,
        num_storages: int,
        env_ids: Sequence[str] | None = None,
        num_train_workers: int | None = None,
        component_distribution: Distribution | None = None,
        node_affinity_env: bool = False,
        node_affinity_train: bool = False,
    ):
        if num_storages < 1:
            raise ValueError(f"num_storages={num_storages}: at least 1")
        self.num_storages, self.num_train_workers = num_storages, num_train_workers
        self._counts, self._cursor = [0] * num_storages, 0
        self._storage_of: dict[str, int] = {}
        self._workers_of: dict[int, list[int]] = {}
        self._nodes = dict(component_distribution or {})
        if (node_affinity_env or node_affinity_train) and not self._nodes:
            raise AssertionError("node affinity needs component_distribution, which is empty")
        self._home: dict[str, int] = {}  # the storage of a node
        for node in self._nodes:
            storages = self._ids(node, "buffer")
            if len(storages) > 1:
                raise AssertionError(f"node {node!r} has multiple buffer storages {storages}: one at most")
            if storages:
                self._home[node] = storages[0]
        self._near: dict[int | None, str] = {}  # the node of an environment's number
        if node_affinity_env:
            self._near = {k: node for node in self._nodes for k in self._ids(node, "env")}
            if env_ids:
                self._require_even("env")
        for place, env_id in enumerate(_checked(env_ids or ())):
            if env_id not in self._storage_of:
                number = self._number(env_id)
                number = place if number is None else number
                self._assign(env_id, self._near_storage(number, env_id) if node_affinity_env else None)
        if num_train_workers is not None:
            self._workers_of = self._near_workers() if node_affinity_train else self._blocks(num_train_workers)

    # ---- environments ---------------------------------------------------------------------------------------------

    def register_envs(self, env_ids: Iterable[str]) -> None:
        """Give each a storage; those that have one keep it. TypeError: a str, or one of them is none; none was registered."""
        for env_id in _checked(env_ids):
            self.get_storage_idx_for_env(env_id)

    def get_storage_idx_for_env(self, env_id: str) -> int:
        """Its storage; it is given one if it has none."""
        if env_id not in self._storage_of:
            storage = self._home.get(self._near.get(self._number(env_id), ""))
            self._assign(env_id, None if storage is None else self._in_range(storage))
        return self._storage_of[env_id]

    def get_env_to_storage(self) -> dict[str, int]:
        return self._storage_of

    def get_envs_for_storage(self, storage_idx: int) -> list[str]:
        """Its environments in the order of their registration. IndexError: no such storage."""
        self._check(storage_idx)
        return [env_id for env_id, i in self._storage_of.items() if i == storage_idx]

    def _assign(self, env_id: str, storage: int | None) -> None:
        index = self._least_loaded() if storage is None else storage
        self._storage_of[env_id] = index
        self._counts[index] += 1

    def _least_loaded(self) -> int:
        least = min(self._counts)
        while True:
            index, self._cursor = self._cursor, (self._cursor + 1) % self.num_storages
            if self._counts[index] == least:
                return index

    @staticmethod
    def _number(env_id: str) -> int | None:
        try:
            return int(env_id.rsplit("-", 1)[-1])
        except ValueError:
            return None

    # ---- train workers --------------------------------------------------------------------------------------------

    def get_storage_to_train_workers(self) -> dict[int, list[int]]:
        return self._workers_of

    def get_train_workers(self, storage_idx: int) -> list[int] | None:
        """Its workers; None: there are no workers at all. IndexError: no such storage."""
        self._check(storage_idx)
        return self._workers_of.get(storage_idx)

    def _blocks(self, workers: int) -> dict[int, list[int]]:
        if workers < 1:
            raise ValueError(f"num_train_workers={workers}: at least 1, or None")
        if workers % self.num_storages:
            raise AssertionError(f"{workers} train workers cannot be divided evenly among {self.num_storages} storages")
        each = workers // self.num_storages
        return {s: list(range(s * each, (s + 1) * each)) for s in range(self.num_storages)}

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _ids(self, node: str, component: str) -> list[int]:
        ids = self._nodes[node].get(component, {}).get("ids", ())
        if isinstance(ids, str) or any(isinstance(k, bool) or not hasattr(k, "__index__") for k in ids):
            raise TypeError(f"component_distribution: node {node!r} has {component} ids {ids!r}: a list of integers")
        return [operator.index(k) for k in ids]

    def _require_even(self, component: str) -> None:
        counts = {node: len(self._ids(node, component)) for node in self._home}
        for node, count in counts.items():
            if not count:
                raise RuntimeError(f"node {node!r} has storage {self._home[node]}, but no {component} workers")
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"nodes with a storage have different numbers of {component} workers: {counts}")

    def _near_storage(self, number: int, env_id: str) -> int:
        storage = self._home.get(self._near.get(number, ""))
        if storage is None:
            raise AssertionError(f"Missing storage for env worker {number} ({env_id!r}): its node has none")
        return self._in_range(storage)

    def _near_workers(self) -> dict[int, list[int]]:
        self._require_even("train")
        out: dict[int, list[int]] = {s: [] for s in range(self.num_storages)}
        for node, storage in self._home.items():
            out[self._in_range(storage)] = self._ids(node, "train")
        return out

    def _in_range(self, storage: int) -> int:
        if not 0 <= storage < self.num_storages:
            raise AssertionError(
                f"storage {storage} of the distribution is none of 0 to {self.num_storages - 1} (num_storages={self.num_storages})"
            )
        return storage

    def __repr__(self) -> str:
        each = ", ".join(f"storage {i}: {n} env{'s' * (n != 1)}" for i, n in enumerate(self._counts[:8]))
        workers = "" if self.num_train_workers is None else f"; {self.num_train_workers} train workers"
        return f"EpisodeTable({each}{', …' * (self.num_storages > 8)}{workers})"

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_storages:
            raise IndexError(f"storage {index} is out of range: there are {self.num_storages}, counted from 0")


def _checked(env_ids: Iterable[str]) -> list[str]:
    if isinstance(env_ids, (str, bytes)):
        raise TypeError(f"env_ids={env_ids!r}: a list of ids; of one [{env_ids!r}]")
    ids = list(env_ids)
    for env_id in ids:
        if not isinstance(env_id, str):
            raise TypeError(f"env_ids: {env_id!r} is no str")
    return ids
