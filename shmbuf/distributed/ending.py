"""The end of a sharded buffer's shards: also of those that no directory knows, as who made them was killed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from shmbuf import segment
from shmbuf.distributed.directory import Entry, shard_name
from shmbuf.distributed.places import segment_name
from shmbuf.distributed.rays import NAMESPACE, alive_nodes, need_ray, on
from shmbuf.errors import BufferNotFound

SWEEP = 30.0


def named_shards(name: str) -> dict[int, Any]:
    """The actors of all shards of that buffer, by number."""
    ray = need_ray()
    prefix, found = shard_name(name, 0)[:-1], {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        number = named["name"].removeprefix(prefix)
        if named["namespace"] == NAMESPACE and named["name"].startswith(prefix) and number.isdecimal():
            with contextlib.suppress(ValueError):  # it has just died
                found[int(number)] = ray.get_actor(named["name"], namespace=NAMESPACE)
    return found


def end_shards(name: str, entries: Sequence[Entry], timeout: float) -> None:
    """Remove the segments and end the actors: those that exist, and what is left of others. Waits ``timeout`` seconds for all
    together; who does not answer by then is killed, and his segment removed by another process of his node, within `SWEEP` seconds."""
    ray = need_ray()
    actors = named_shards(name)
    asked = {}
    for number, shard in actors.items():
        with contextlib.suppress(Exception):
            asked[shard.destroy.options(concurrency_group="ending").remote()] = number
    done: set[int] = set()
    if asked:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=max(0.0, timeout))
        for ref in ready:
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=1.0)
                done.add(asked[ref])
    for shard in actors.values():
        with contextlib.suppress(Exception):
            ray.kill(shard)
    _sweep(name, {e.number: e.node for e in entries}, {*actors, *(e.number for e in entries)} - done)


def _sweep(name: str, known: dict[int, str], numbers: set[int]) -> None:
    ray = need_ray()
    alive = alive_nodes() if numbers else []
    names: dict[str, list[str]] = {}
    for number in numbers:
        for node in [known[number]] if number in known else alive:
            names.setdefault(node, []).append(segment_name(f"{name}.{number}", node))
    task = ray.remote(num_cpus=0, max_retries=0)(remove_segments)
    refs = [task.options(scheduling_strategy=on(node)).remote(found) for node, found in names.items() if node in alive]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=SWEEP)


def remove_segments(names: list[str]) -> None:
    """Of this node, whoever is attached to them."""
    for name in names:
        with contextlib.suppress(BufferNotFound):
            segment.destroy(name, force=True)
