"""Adapters for other libraries. Each needs the library it is for, and says so where that is missing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = dict.fromkeys(("TorchRLSampler", "TorchRLStorage", "TorchRLWriter"), "torchrl")
__all__ = ["TorchRLSampler", "TorchRLStorage", "TorchRLWriter"]

if TYPE_CHECKING:
    from shmbuf.integrations.torchrl import TorchRLSampler, TorchRLStorage, TorchRLWriter


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shmbuf.integrations' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shmbuf.integrations.{_HOME[name]}"), name)
    globals()[name] = value
    return value
