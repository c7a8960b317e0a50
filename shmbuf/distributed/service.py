"""A replay buffer as a Ray service: TorchRL's `RayReplayBuffer` and its clients, and `as_remote`.

One actor keeps the segment. A client that is on the actor's node works in its memory; any other asks the actor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shmbuf.distributed.client import GRACE, HOT, RayClient
from shmbuf.distributed.keeper import Keeper, made_of, renamed
from shmbuf.distributed.lives import PLACES, Life, end, opened
from shmbuf.distributed.places import GROUPS, Recipe, segment_name, unique
from shmbuf.distributed.rays import Gone, Silent, here, need_ray, on, running
from shmbuf.errors import StorageLost


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
        if not PLACES & {*(remote_config or {})}:
            config.update(scheduling_strategy=on(here()), max_restarts=-1)
        config.update(remote_config or {})
        keeper = ray.remote(**config)(Keeper).remote(Recipe.of(cls, keywords, name))
        self._shut = False
        try:
            place = opened(keeper, config)
        except BaseException as e:
            end(keeper, os.getpid(), GRACE)
            if isinstance(e, (Gone, Silent)):
                raise RuntimeError(f"the actor of the replay buffer could not be started: {e}") from e
            raise
        super().__init__(keeper, place)
        self._life = Life(keeper)

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
        client = RayClient(self._keeper, self._place)
        client._life = self._life
        return client

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
        for name in HOT:
            vars(self).pop(name, None)
        if handle is not None:
            handle._end_threads()
            handle.buffer.close()
        self._life.end(30.0 if timeout is None else timeout)

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
