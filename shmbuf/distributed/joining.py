"""Making shards: by the process that needs them, under numbers that the coordinator gives out."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from shmbuf.distributed.directory import Directory, Entry, Settings, shard_name
from shmbuf.distributed.places import GROUPS
from shmbuf.distributed.rays import NAMESPACE, Gone, Silent, ask, need_ray, on, short
from shmbuf.distributed.shard import Shard
from shmbuf.errors import ShmbufError

_MAKING = 120.0


def make_shard(settings: Settings, number: int, node: str) -> Entry:
    """Raises what the shard's constructor raises; then nothing is left of it."""
    ray = need_ray()
    limited = settings.limiter is not None and settings.limiter.words(1)[4] is not None
    recipe = settings.recipe._replace(name=f"{settings.name}.{number}")
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, **settings.shard_options}
    actor = ray.remote(concurrency_groups=GROUPS, **options)(Shard)
    shard = actor.options(
        name=shard_name(settings.name, number), namespace=NAMESPACE, lifetime="detached", scheduling_strategy=on(node)
    ).remote(recipe, limited)
    try:
        place = ask(shard.open.options(concurrency_group="looking").remote(), _MAKING)
    except BaseException as e:
        with contextlib.suppress(Exception):
            ask(shard.destroy.options(concurrency_group="looking").remote(), 10.0)
        with contextlib.suppress(Exception):
            ray.kill(shard)
        if isinstance(e, (Gone, Silent)):
            raise ShmbufError(f"no shard could be made on node {short(node)}: {e}") from e
        raise
    return Entry(number, node, place)


def join(settings: Settings, coordinator: Any, node: str) -> int:
    """The number of that node's shard, which is made if it has none. Raises what making it raises."""
    give_up = time.monotonic() + _MAKING
    while True:
        what, number = patiently(coordinator, "reserve", node)
        if what == "there":
            return number
        if what == "make":
            break
        if time.monotonic() > give_up:
            raise ShmbufError(f"somebody has been making the shard of node {short(node)} for {_MAKING:g} s")
        time.sleep(0.05)
    try:
        entry = make_shard(settings, number, node)
    except BaseException:
        coordinator.failed.options(concurrency_group="asking").remote(node)
        raise
    patiently(coordinator, "joined", entry)
    return number


def join_all(settings: Settings, coordinator: Any, nodes: list[str]) -> Directory:
    """A shard on each, at the same time; numbered in this order."""
    failures: list[BaseException] = []
    numbers = [patiently(coordinator, "reserve", node)[1] for node in nodes]

    def made(number: int, node: str) -> None:
        try:
            patiently(coordinator, "joined", make_shard(settings, number, node))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=made, args=pair) for pair in zip(numbers, nodes, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]
    return patiently(coordinator, "directory")


def patiently(coordinator: Any, method: str, *args: Any, timeout: float = 60.0) -> Any:
    """What a coordinator answers that may be starting again. Raises ShmbufError: not within ``timeout`` seconds; Gone."""
    give_up = time.monotonic() + timeout
    while True:
        try:
            return ask(getattr(coordinator, method).options(concurrency_group="asking").remote(*args), 10.0)
        except Silent:
            if time.monotonic() > give_up:
                raise ShmbufError(f"the buffer's coordinator does not answer within {timeout:g} s") from None
            time.sleep(0.2)
