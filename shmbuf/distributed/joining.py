"""Making shards: by the process that needs them, under numbers that the coordinator gives out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from shmbuf.distributed.directory import Directory, Entry, Settings, actor, shard_name
from shmbuf.distributed.places import GROUPS
from shmbuf.distributed.rays import NAMESPACE, Gone, Silent, ask, need_ray, on, short
from shmbuf.distributed.shard import Shard
from shmbuf.errors import ShmbufError
from shmbuf.ticket import left_of

_MAKING = 120.0
_WORD = 2.0
"""Seconds between two words to the coordinator that a shard is being made."""
_LOOK = 1.0
"""Seconds between two looks whether a shard is there that somebody else was to make."""


def make_shard(
    settings: Settings, number: int, node: str, limited: bool, still: Callable[[], Any], joined: Callable[[Entry], Any]
) -> None:
    """Make it and tell so. Raises what the shard's constructor raises, and ``joined``; then nothing is left of it. still: is called every
    two seconds."""
    ray = need_ray()
    recipe = settings.recipe._replace(name=f"{settings.name}.{number}")
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, **settings.shard_options}
    kind = ray.remote(concurrency_groups=GROUPS, **options)(Shard)
    shard = kind.options(
        name=shard_name(settings.name, number), namespace=NAMESPACE, lifetime="detached", scheduling_strategy=on(node)
    ).remote(recipe, limited, settings.name if settings.ends else None)
    try:
        opened, give_up = shard.open.options(concurrency_group="looking").remote(), time.monotonic() + _MAKING
        while not ray.wait([opened], timeout=_WORD)[0] and time.monotonic() < give_up:
            still()
        joined(Entry(number, node, ask(opened, 0.1)))
    except BaseException as e:
        with contextlib.suppress(Exception):
            ask(shard.destroy.options(concurrency_group="ending").remote(), 10.0)
        with contextlib.suppress(Exception):
            ray.kill(shard)
        if isinstance(e, (Gone, Silent)):
            raise ShmbufError(f"no shard could be made on node {short(node)}: {e}") from e
        raise


class _Making(threading.Thread):
    """Makes one shard, whoever waits for it and for how long."""

    def __init__(self, settings: Settings, coordinator: Any, node: str, number: int, limited: bool):
        super().__init__(daemon=True, name="shmbuf-shard")
        self.settings, self.coordinator, self.node, self.number = settings, coordinator, node, number
        self.limited = limited
        self.failure: BaseException | None = None

    def run(self) -> None:
        def tell(method: str) -> Any:
            return getattr(self.coordinator, method).options(concurrency_group="asking")

        try:
            make_shard(
                self.settings,
                self.number,
                self.node,
                self.limited,
                lambda: tell("making").remote(self.node, self.number),
                lambda entry: patiently(self.coordinator, "joined", entry),
            )
        except BaseException as e:
            self.failure = e
            with contextlib.suppress(Exception):
                tell("failed").remote(self.node, self.number)


def join(settings: Settings, coordinator: Any, node: str, timeout: float | None = None) -> int:
    """The number of that node's shard, which is made if it has none. Raises what making it raises; ShmbufError: not within ``timeout``
    seconds (None: 120). It is made nevertheless."""
    most = _MAKING if timeout is None else timeout
    since, looked = time.monotonic(), 0.0
    while True:
        reserved = patiently(coordinator, "reserve", node, timeout=left_of(most, since))
        if reserved.what == "there":
            return reserved.number
        if reserved.before >= 0 and _tell_of(settings, coordinator, node, reserved.before, 10.0):
            return reserved.before
        if reserved.what == "make":
            making = _Making(settings, coordinator, node, reserved.number, reserved.limited)
            making.start()
            making.join(max(0.0, left_of(most, since) or 0.0))
            if making.failure is not None:
                raise making.failure
            if not making.is_alive():
                return reserved.number
        elif time.monotonic() - looked > _LOOK:  # who was to make it may have been killed when it was there
            looked = time.monotonic()
            _tell_of(settings, coordinator, node, reserved.number, _LOOK)
        if time.monotonic() - since > most:
            raise ShmbufError(
                f"the shard of node {short(node)} of buffer {settings.name!r} is still being made after {most:.3g} s. Nothing was stored"
            )
        time.sleep(0.05)


def _tell_of(settings: Settings, coordinator: Any, node: str, number: int, timeout: float) -> bool:
    """Tell the coordinator of a shard that is there though nobody says so."""
    try:
        shard = actor(shard_name(settings.name, number))
        place = ask(shard.open.options(concurrency_group="looking").remote(), timeout)
    except Exception:  # not there yet, or it cannot be made: whoever makes it hears why
        return False
    patiently(coordinator, "joined", Entry(number, node, place))
    return True


def join_all(settings: Settings, coordinator: Any, nodes: list[str]) -> Directory:
    """A shard on each, at the same time; numbered in this order."""
    makings = []
    for node in nodes:
        reserved = patiently(coordinator, "reserve", node)
        makings.append(_Making(settings, coordinator, node, reserved.number, reserved.limited))
    for making in makings:
        making.start()
    for making in makings:
        while making.is_alive():
            making.join(0.2)
    for making in makings:
        if making.failure is not None:
            raise making.failure
    return patiently(coordinator, "directory")


def patiently(coordinator: Any, method: str, *args: Any, timeout: float | None = 60.0) -> Any:
    """What a coordinator answers that may be starting again. Raises ShmbufError: not within ``timeout`` seconds; Gone."""
    since = time.monotonic()
    while True:
        left = left_of(timeout, since)
        try:
            ref = getattr(coordinator, method).options(concurrency_group="asking").remote(*args)
            return ask(ref, 10.0 if left is None else max(0.1, min(10.0, left)))
        except Silent:
            if left is not None and left <= 0:
                raise ShmbufError(f"the buffer's coordinator does not answer within {timeout:g} s") from None
            time.sleep(0.2)
