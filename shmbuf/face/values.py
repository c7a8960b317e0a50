"""What an edit gives rows, as the tensor that their column needs. Tensors and arrays are of its dtype or refused; Python numbers become
what equals them; Python values are packed as a put packs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, is_tensor_collection
from tensordict.utils import is_non_tensor

from shmbuf.errors import SchemaError
from shmbuf.packed import fill
from shmbuf.presenting import pack_all
from shmbuf.rows import as_array
from shmbuf.schema import PACKED, Column, Key, as_key, show_key
from shmbuf.storage import torch_dtype
from shmbuf.tensors import plain, tensor_leaves


def leaves_of(given: Any) -> dict[Key, Any]:
    """Of a TensorDict or nested mapping, by key: tensors, arrays, and Python values, those of a batch as a list."""
    out: dict[Key, Any] = {}
    if is_tensor_collection(given):
        values: dict[Key, Any] = {}
        out.update(tensor_leaves(given, others=values))
        out.update({k: v if given.batch_dims else NonTensorData(v) for k, v in values.items()})
        return out
    for key, value in given.items():
        if isinstance(value, Mapping) or (is_tensor_collection(value) and not is_non_tensor(value)):
            out.update({(*as_key(key), *k): v for k, v in leaves_of(value).items()})
        else:
            out[as_key(key)] = value
    return out


def of_rows(
    value: Any,
    c: Column,
    shape: Sequence[int],
    *,
    exact: bool = False,
    refused: type[Exception] = RuntimeError,
) -> torch.Tensor:
    """value for rows of this shape as [n, *c.shape] of the column's dtype.

    Args:
        exact: one for each row, nothing is repeated. refused: what another shape raises.
    """
    n = math.prod(shape)
    if c.dtype == PACKED:
        values = _one_each(value, c, shape, exact, refused)
        return torch.from_numpy(fill(pack_all(c.key, values), c.shape[0], f"key {show_key(c.key)}"))
    value, dtype, full = _tensor(value, c), torch_dtype(c), (n, *c.shape)
    if value.dtype != dtype:
        raise SchemaError(_expected(c, str(value.dtype).removeprefix("torch.")))
    if len(shape) != 1 and tuple(value.shape) == (*shape, *c.shape):
        value = value.reshape(full)
    if tuple(value.shape) != (*full, 1) and (not exact or tuple(value.shape) == full):
        try:
            return plain(c.key, value.expand(full))
        except RuntimeError:
            pass
    raise refused(
        f"key {show_key(c.key)}: shape {list(value.shape)} for {n:,} rows: {list(full)} is needed. Nothing was changed."
    )


def _expected(c: Column, got: str) -> str:
    return f"key {show_key(c.key)}: expected {c.dtype}, got {got}. Nothing was changed."


def _one_each(value: Any, c: Column, shape: Sequence[int], exact: bool, refused: type[Exception]) -> list[Any]:
    """Of more than one row: a list of one a row, or a value for all."""
    if isinstance(value, (torch.Tensor, np.ndarray)) or (is_tensor_collection(value) and not is_non_tensor(value)):
        raise SchemaError(
            f"key {show_key(c.key)}: expected Python values, got {type(value).__name__}. Nothing was changed."
        )
    single = is_non_tensor(value) and not value.batch_dims
    if is_non_tensor(value):
        value = value.data if single else value.tolist()
    if not shape:
        return [value]
    if single or not isinstance(value, list):
        if exact and shape != (1,):
            raise refused(
                f"key {show_key(c.key)}: one value for {math.prod(shape):,} rows: a list of one for each is needed. Nothing was changed."
            )
        return [value] * math.prod(shape)
    each = [value]
    for size in shape:
        if any(not isinstance(part, list) or len(part) != size for part in each):
            raise refused(f"key {show_key(c.key)}: lists of {list(shape)} values are needed. Nothing was changed.")
        each = [x for part in each for x in part]
    return each


def _tensor(value: Any, c: Column) -> torch.Tensor:
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(v, torch.Tensor) for v in value):
            try:
                return torch.stack(list(value))
            except RuntimeError as e:
                raise SchemaError(f"key {show_key(c.key)}: {e}. Nothing was changed.") from None
        if all(isinstance(v, (np.ndarray, np.generic)) for v in value):
            if len({v.dtype for v in value}) > 1:
                raise SchemaError(_expected(c, "arrays of different dtypes"))
            value = np.stack(value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        array = as_array(c.key, value)
        array = np.array(array, array.dtype.newbyteorder("="))
        if array.dtype.name not in (c.dtype, c.numpy):
            raise SchemaError(_expected(c, array.dtype.name))
        return torch.from_numpy(array.view(c.numpy)).view(torch_dtype(c))
    return _of_python(value, c)


def _of_python(value: Any, c: Column) -> torch.Tensor:
    """Numbers, if they are what the column then holds: whole ones exactly, fractions to its precision."""
    dtype = torch_dtype(c)
    try:
        given = np.array(value, object)
    except ValueError as e:
        raise SchemaError(f"key {show_key(c.key)}: {e}. Nothing was changed.") from None
    numbers = given.reshape(-1).tolist()
    for x in numbers:
        if not isinstance(x, (bool, int, float, complex)):
            raise SchemaError(_expected(c, type(x).__name__))
        fraction = isinstance(x, (float, complex))
        if (fraction and not (dtype.is_floating_point or dtype.is_complex)) or (
            isinstance(x, complex) and not dtype.is_complex
        ):
            raise SchemaError(_expected(c, type(x).__name__))
    try:
        made = torch.tensor(numbers, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError, TypeError):
        made = None
    if made is None or not _equal(numbers, made, dtype):
        raise SchemaError(
            f"key {show_key(c.key)}: {_shown(numbers)} is no {c.dtype}: it would be changed. Nothing was changed."
        )
    return made.reshape(given.shape)


def _equal(numbers: list[Any], made: torch.Tensor, dtype: torch.dtype) -> bool:
    most = torch.finfo(dtype).max if dtype.is_floating_point or dtype.is_complex else None
    for x, y in zip(numbers, made.tolist(), strict=True):
        if isinstance(x, (float, complex)):
            parts = (
                ((x, y),)
                if isinstance(x, float) and not isinstance(y, complex)
                else ((complex(x).real, y.real), (complex(x).imag, y.imag))
            )
            if any(math.isfinite(a) and (abs(a) > most or not math.isfinite(b)) for a, b in parts):  # type: ignore[operator]
                return False
        elif x != y:
            return False
    return True


def _shown(numbers: list[Any]) -> str:
    return (
        str(numbers[0])
        if len(numbers) == 1
        else f"[{', '.join(map(str, numbers[:4]))}{', …' if len(numbers) > 4 else ''}]"
    )
