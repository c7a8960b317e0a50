"""Save and load hooks, as TorchRL applies them: to the stored data as one TensorDict of the whole capacity."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from shmbuf.errors import CheckpointError

Hook = Callable[..., Any]


def _apply(hook: Hook, data: Any, **extra: Any) -> Any:
    """TorchRL passes path= or out= as well; a hook that takes only the data is given only that."""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):
        return hook(data)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return hook(data, **{k: v for k, v in extra.items() if anything or k in parameters})


def save_through(hooks: Sequence[Hook], storage: Path) -> None:
    """Replace the saved rows by what the hooks make of them."""
    data: Any = TensorDict.load_memmap(storage)
    for hook in hooks:
        data = _apply(hook, data, path=storage)
    new = storage.with_name("storage.hooked")
    _require(data, "save").memmap(new, copy_existing=True)
    shutil.copy(storage / "storage_metadata.json", new)
    shutil.rmtree(storage)
    new.rename(storage)


def load_through(hooks: Sequence[Hook], data: TensorDictBase) -> TensorDictBase:
    """What the hooks make of the saved rows."""
    made: Any = data
    for hook in hooks:
        made = _apply(hook, made, out=None)
    return _require(made, "load")


def _require(data: Any, what: str) -> TensorDictBase:
    if not isinstance(data, TensorDictBase):
        raise CheckpointError(f"a {what} hook returned {type(data).__name__}, a TensorDict is needed")
    return data
