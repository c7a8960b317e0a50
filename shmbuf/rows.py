"""Incoming rows at the numpy level: what can be taken as it is given, and an error that lists every difference otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shmbuf.errors import SchemaError
from shmbuf.schema import Key, Schema, flatten, show_key


def on_host(values: Any) -> Any:
    """What numpy can look at: of a tensor of any device, with autograd or without, its values on the host. Never imports torch."""
    return values.detach().cpu() if hasattr(values, "detach") and hasattr(values, "cpu") else values


def as_array(key: Key, leaf: Any) -> np.ndarray:
    """One leaf as an array; SchemaError names the key of what cannot be one."""
    arraylike = hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")
    if not arraylike and not isinstance(leaf, (list, int, float, bool, complex, memoryview)):
        raise SchemaError(
            f"key {show_key(key)}: got {type(leaf).__name__}, expected an array; non-tensor leaves cannot be stored"
        )
    try:
        array = np.asarray(leaf)
    except (ValueError, TypeError, RuntimeError) as e:
        raise SchemaError(f"key {show_key(key)}: {e}") from None
    if isinstance(array, np.ma.MaskedArray) or isinstance(leaf, np.ma.MaskedArray):
        raise SchemaError(f"key {show_key(key)}: a masked array would lose its mask; give .filled(…)")
    textual = array.dtype.kind in "SUVMm" and array.dtype.name != "bfloat16"
    if array.dtype.hasobject or array.dtype.names or textual:
        raise SchemaError(f"key {show_key(key)}: dtype {array.dtype} cannot be stored")
    return array


def as_arrays(rows: Any) -> dict[Key, np.ndarray]:
    """The leaves of a mapping, by key."""
    if not isinstance(rows, Mapping):
        raise SchemaError(f"rows are a mapping of key to array, not {type(rows).__name__}")
    return {k: as_array(k, v) for k, v in flatten(rows).items()}


def count(leaves: Mapping[Key, np.ndarray]) -> int:
    """The number of rows, which all leaves must agree on."""
    sizes = {k: a.shape[0] if a.ndim else None for k, a in leaves.items()}
    if not sizes:
        raise SchemaError("no keys were given")
    n = next(iter(sizes.values()))
    if n is None or len(set(sizes.values())) > 1:
        raise SchemaError(_sizes(leaves))
    return n


def _sizes(leaves: Mapping[Key, np.ndarray]) -> str:
    each = ", ".join(f"{show_key(k)}: {a.shape[0] if a.ndim else 'none'}" for k, a in leaves.items())
    return f"keys have different numbers of rows (first dimension): {each}"


def conform(rows: Any, schema: Schema) -> tuple[list[np.ndarray], int]:
    """Arrays in column order, contiguous and in native byte order, and how many rows they hold. Dtypes are never converted.

    Raises:
        SchemaError: with every difference between rows and schema.
    """
    leaves = as_arrays(rows)
    columns = {c.key: c for c in schema.columns}
    got = {}
    for key, array in leaves.items():
        name, column = array.dtype.newbyteorder("=").name, columns.get(key)
        if column is not None and column.numpy == name:
            name = column.dtype  # also the raw bits of a dtype that numpy lacks
        got[key] = (name, array.shape[1:])
    lines = schema.differences(got)
    if lines:
        if len({a.shape[:1] for a in leaves.values()}) > 1:
            lines.append(_sizes(leaves))
        raise SchemaError("rows do not fit the buffer's schema; nothing was put:\n  " + "\n  ".join(lines))
    n = count(leaves)
    out = []
    for c in schema.columns:
        array = leaves[c.key]
        raw = array.view(c.numpy) if array.dtype.name == "bfloat16" else array  # ml_dtypes' own
        out.append(np.require(raw, np.dtype(c.numpy), ["C", "A"]))
    return out, n
