"""Reductions of many trajectories at once: rows that lie one trajectory after another, so a segment each. No loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_WIDE_INTEGERS = {torch.uint16, torch.uint32}  # torch compares and adds few of them


def is_integer(t: torch.Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex)


def tame(t: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch and NumPy can both compute with."""
    t = t.detach().cpu().resolve_conj().resolve_neg()
    if t.dtype in _WIDE_INTEGERS:
        return t.to(torch.int64)
    if t.dtype == torch.uint64:
        as_signed = t.view(torch.int64)
        if t.numel() and bool((as_signed < 0).any()):
            raise OverflowError(
                "a uint64 column holds numbers above 2^63 - 1, which a predicate cannot compare exactly"
            )
        return as_signed
    if t.dtype.is_floating_point and t.dtype.itemsize == 1:
        return t.float()
    return t


def widened(t: torch.Tensor) -> torch.Tensor:
    """For arithmetic: small integers and bools as int64, half precision as float32, so that nothing wraps."""
    if is_integer(t):
        return t.to(torch.int64)
    return t.float() if t.dtype.is_floating_point and t.dtype.itemsize < 4 else t


def _array(t: torch.Tensor) -> np.ndarray:
    return (t.float() if t.dtype == torch.bfloat16 else t).contiguous().numpy()


def _starts(lengths: np.ndarray, width: int) -> np.ndarray:
    return (np.cumsum(lengths) - lengths) * width


def reduce(name: str, values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """[k] out of [m, …]: over all elements of the lengths[i] ≥ 1 rows of each segment, Σ lengths = m.

    sum, mean, std, var and prod are accumulated in float64 (int64 for integers). Results: sum and prod in the values' dtype, integers
    in int64, half precision in float32; mean, std and var in float32, of float64 in float64. std and var are of a sample, with
    n − 1, as torch's: NaN for one element. max and min propagate NaN, as torch's.
    """
    k, width = len(lengths), int(values[:1].numel()) if len(values) else 1
    if width == 0 and name in ("max", "min"):
        raise ValueError(f".{name}() of rows of shape {list(values.shape[1:])}, which have no elements")
    if k == 0 or width == 0:
        return _of_nothing(name, values, k)
    at, n = _starts(lengths, width), lengths * width
    if name in ("any", "all", "count"):
        true = _array(values != 0).reshape(-1)
        if name == "count":
            return torch.from_numpy(np.add.reduceat(true, at, dtype=np.int64))
        return torch.from_numpy((np.logical_or if name == "any" else np.logical_and).reduceat(true, at))
    x = _array(values).reshape(-1)
    if name in ("max", "min"):
        out = torch.from_numpy((np.maximum if name == "max" else np.minimum).reduceat(x, at))
        return out.to(values.dtype)
    exact: Any = np.complex128 if values.dtype.is_complex else np.int64 if is_integer(values) else np.float64
    if name in ("sum", "prod"):
        out = torch.from_numpy((np.add if name == "sum" else np.multiply).reduceat(x, at, dtype=exact))
        return out if is_integer(values) else out.to(widened(values[:0]).dtype)
    x = x.astype(np.complex128 if values.dtype.is_complex else np.float64, copy=False)
    mean = np.add.reduceat(x, at) / n
    if name == "mean":
        return torch.from_numpy(mean).to(_mean_dtype(values))
    off = x - np.repeat(mean, n)
    with np.errstate(invalid="ignore", divide="ignore"):
        var = np.add.reduceat((off * off.conj()).real, at) / (n - 1)
    return torch.from_numpy(np.sqrt(var) if name == "std" else var).to(_mean_dtype(values))


def _mean_dtype(values: torch.Tensor) -> torch.dtype:
    if values.dtype.is_complex:
        return values.dtype
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _of_nothing(name: str, values: torch.Tensor, k: int) -> torch.Tensor:
    if name in ("any", "all"):
        return torch.full((k,), name == "all")
    if name in ("sum", "count"):
        return torch.zeros(k, dtype=torch.int64 if is_integer(values) or name == "count" else values.dtype)
    if name == "prod":
        return torch.ones(k, dtype=torch.int64 if is_integer(values) else values.dtype)
    if name in ("max", "min"):
        return values.new_empty(k)
    return torch.full((k,), float("nan"), dtype=_mean_dtype(values))


def ends(values: torch.Tensor, lengths: np.ndarray, last: bool) -> torch.Tensor:
    """[k, …] out of [m, …]: the first, or the last, row of each segment."""
    upto = np.cumsum(lengths)
    return values[torch.from_numpy(upto - 1 if last else upto - lengths)]


def spread(values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """[m, …] out of [k, …]: each segment's value for all its rows."""
    return values.repeat_interleave(torch.from_numpy(lengths), dim=0)
