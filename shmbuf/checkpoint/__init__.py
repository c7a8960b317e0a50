"""Snapshots on disk: of one instant, whole or not at all, in TorchRL's layout and with what that forgets.

>>> from shmbuf.checkpoint import dumps, loads
>>> dumps(rb, "run/checkpoint")
>>> loads(rb, "run/checkpoint")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmbuf.checkpoint.loading import Loaded, load_buffer, loads
from shmbuf.checkpoint.saving import Saved, dump_buffer, dumps

__all__ = [
    "Loaded",
    "Saved",
    "dump_buffer",
    "dumps",
    "load_buffer",
    "loads",
    "register_load_hook",
    "register_save_hook",
]


def _checked(hook: Any) -> Callable[..., Any]:
    if not callable(hook):
        raise TypeError(f"a hook is a function of a TensorDict, not {type(hook).__name__}")
    return hook


def register_save_hook(rb: Any, hook: Callable[..., Any]) -> None:
    """``hook(data) -> data``, applied by `dumps` to the rows as one TensorDict [capacity]; one that takes ``path`` gets it."""
    rb._save_hooks = [*getattr(rb, "_save_hooks", ()), _checked(hook)]


def register_load_hook(rb: Any, hook: Callable[..., Any]) -> None:
    """``hook(data) -> data``, applied by `loads` to what was saved before it is stored; one that takes ``out`` gets None."""
    rb._load_hooks = [*getattr(rb, "_load_hooks", ()), _checked(hook)]
