"""Replay buffers of many machines, through Ray. Needs ``pip install 'shmbuf[ray]'``; this package itself imports no Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbuf.distributed.client import RayClient
    from shmbuf.distributed.service import RayReplayBuffer, as_remote
    from shmbuf.distributed.sharded import ShardedReplayBuffer

_HOME = {
    "RayClient": "client",
    "RayReplayBuffer": "service",
    "ShardedReplayBuffer": "sharded",
    "as_remote": "service",
}
__all__ = ["RayClient", "RayReplayBuffer", "ShardedReplayBuffer", "as_remote"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shmbuf.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shmbuf.distributed.{home}"), name)
    globals()[name] = value
    return value
