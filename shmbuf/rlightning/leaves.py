"""A step's values as leaves: arrays by key, with the torch dtype that they are stored as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from shmbuf.errors import SchemaError
from shmbuf.rlightning.types import BFloat16
from shmbuf.rows import as_array
from shmbuf.schema import Column, Key, as_key, dtype_name, show_key
from shmbuf.tensors import as_numpy, plain

OWN = "episode"  # the storage's own numbers of each row


class Leaf(NamedTuple):
    """Of dtypes that numpy lacks the array has the raw bits."""

    array: np.ndarray
    dtype: str


def as_leaf(key: Key, value: Any) -> Leaf:
    """An array, tensor, number or list of numbers; no copy where there is memory to look at. SchemaError names the key.

    Python floats are float32, as torch has them; dtypes are never converted.
    """
    if isinstance(value, torch.Tensor):
        t = plain(key, value)
        return Leaf(as_numpy(t), str(t.dtype).removeprefix("torch."))
    if isinstance(value, np.ndarray):
        if isinstance(value, BFloat16) or value.dtype.name == "bfloat16":  # the latter: ml_dtypes' own
            return Leaf(value.view(np.ndarray).view(np.uint16), "bfloat16")
    elif isinstance(value, (bool, int, float, list, tuple)) and not isinstance(value, np.generic):
        try:
            return as_leaf(key, torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as e:
            raise SchemaError(f"key {show_key(key)}: got {type(value).__name__}: {e}") from None
    array = as_array(key, value)
    try:
        return Leaf(array, dtype_name(array.dtype))
    except SchemaError as e:
        raise SchemaError(f"key {show_key(key)}: {e}") from None


def leaves_of(data: Any, prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Nested mappings and TensorDicts, flat."""
    for name in list(data.keys()):
        value, key = data[name] if isinstance(data, Mapping) else data.get(name), (*prefix, *as_key(name))
        if isinstance(value, Mapping) or (is_tensor_collection(value) and not isinstance(value, torch.Tensor)):
            yield from leaves_of(value, key)
        else:
            yield key, value


def column(key: Key, leaf: Leaf, lead: int) -> Column:
    """What the leaf is in the schema, without its first ``lead`` dimensions."""
    return Column(key, leaf.dtype, tuple(leaf.array.shape[lead:]))


def as_tensors(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Of what as_leaf gave, or a buffer gives: the tensor that has this memory."""
    t = torch.from_numpy(array)
    wanted = getattr(torch, dtype)
    return t if t.dtype == wanted else t.view(wanted)
