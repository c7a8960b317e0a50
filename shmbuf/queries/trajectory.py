"""`Trajectory`: the rows of one trajectory, oldest first."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase
from tensordict.utils import unravel_key

from shmbuf.tensors import make_tensordict, tree_of


class Trajectory(TensorClass["nocast"]):  # type: ignore[misc, type-arg, name-defined]
    """The rows of one trajectory, in order.

    ``data`` is a TensorDict of batch size [T]. Its entries are attributes, too: ``t.obs`` is ``data["obs"]`` or, if there is none,
    ``data["next", "obs"]``; so are ``t.reward`` and ``t.done``. ``t[key]`` is an entry of the data, ``t[2:5]`` or any other index another
    Trajectory. A position in it, 0 to T − 1, is no index into the buffer: those are its entries "index" and "row_id", where it has them.

    Raises ValueError for data of several batch dimensions.
    """

    data: TensorDictBase

    def __post_init__(self) -> None:
        data = self.data
        if self.batch_size or data is None or not data.batch_dims:
            return
        if data.batch_dims != 1:
            raise ValueError(
                f"a Trajectory has a single batch dimension, its steps; got data of batch_size={list(data.batch_size)}"
            )
        self.batch_size = data.batch_size

    @property
    def length(self) -> int:
        """T, the number of its rows."""
        return int(self.batch_size[0])

    @property
    def total_reward(self) -> torch.Tensor:
        """The sum of its rewards."""
        return self.reward.sum()  # type: ignore[attr-defined]

    def get(self, key: NestedKey, default: Any = None) -> Any:  # type: ignore[override]
        """The entry, at the root or, for a name, under "next"."""
        value = self.data.get(key, None)
        if value is None and isinstance(key, str):
            value = self.data.get(("next", key), None)
        return default if value is None else value

    def keys(self, *args: Any, **kwargs: Any) -> Any:
        """As of its data."""
        return self.data.keys(*args, **kwargs)


# The decorator behind TensorClass puts these in place after the class body was read: what follows wraps its own.
_class: Any = Trajectory
_getattr, _getitem = _class.__getattr__, _class.__getitem__


def _entry(self: Any, name: str) -> Any:
    try:
        return _getattr(self, name)
    except AttributeError:
        if name.startswith("_"):
            raise
    value = self.get(name)
    if value is None:
        have = ", ".join(sorted(map(str, self.data.keys(True, True))))
        raise AttributeError(f"Trajectory has no entry {name!r}, neither at the root nor under 'next'; it has {have}")
    return value


def _item(self: Any, index: Any) -> Any:
    if isinstance(index, str) or (isinstance(index, tuple) and unravel_key(index)):
        return self.data[index]
    return _getitem(self, index)


def _text(self: Any) -> str:
    batch = tuple(self.batch_size)
    shape = f"length={self.length}" if len(batch) == 1 else f"batch_size={list(batch)}"
    keys = None if self.data is None else sorted(map(str, self.data.keys()))
    return f"Trajectory({shape}, keys={keys})"


_class.__getattr__, _class.__getitem__, _class.__repr__ = _entry, _item, _text


def wrap_trajectory(data: TensorDict) -> Trajectory:
    """Of data known to be right, in less time than the constructor takes to look at it."""
    return Trajectory._from_tensordict(make_tensordict(_TREE, [data], data.batch_size), None, safe=False)  # type: ignore[list-item]


_TREE = tree_of((("data",),))
