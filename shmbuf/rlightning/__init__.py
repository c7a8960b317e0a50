"""rlightning's storage of a buffer over shared memory: `Storage`, `EpisodeTable`, `BufferView`, and what they take."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmbuf.rlightning.chain import (
        default_env_ret_preprocess_fn,
        default_policy_resp_preprocess_fn,
        default_postprocess_fn,
        default_preprocess_fn,
    )
    from shmbuf.rlightning.storage import Storage
    from shmbuf.rlightning.table import EpisodeTable
    from shmbuf.rlightning.types import EnvMeta, EnvRet, PolicyResponse
    from shmbuf.rlightning.view import BufferView

__all__ = [
    "BufferView",
    "EnvMeta",
    "EnvRet",
    "EpisodeTable",
    "PolicyResponse",
    "Storage",
    "default_env_ret_preprocess_fn",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
]
_HOME = {
    "BufferView": "view",
    "EpisodeTable": "table",
    "Storage": "storage",
    **dict.fromkeys(("EnvMeta", "EnvRet", "PolicyResponse"), "types"),
}


def __getattr__(name: str) -> Any:  # the table alone needs no torch
    if name not in __all__:
        raise AttributeError(f"module 'shmbuf.rlightning' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shmbuf.rlightning.{_HOME.get(name, 'chain')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
