"""Numbers of different dtypes side by side: compared as the numbers they are, computed with so that nothing wraps.

torch casts a number, and a tensor without dimensions, to the dtype of the tensor beside it: 300 is 44 there, if that is uint8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shmbuf.queries.segments import is_integer

_INT64 = torch.iinfo(torch.int64)


def _real(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def _as_float(c: int) -> float:
    try:
        return float(c)
    except OverflowError:
        return math.inf if c > 0 else -math.inf


def _holds(dtype: torch.dtype, c: float) -> bool:
    """Whether a float dtype has exactly this number."""
    return torch.tensor(c, dtype=torch.float64).to(dtype).double().item() == c


def compared(op: Callable, t: torch.Tensor, c: Any) -> torch.Tensor:
    """``op(t, c)``, one of > >= < <= == !=; ``c`` is a number, or a tensor that broadcasts. Integers are compared exactly with everything.
    A float number beside a float tensor is rounded to its dtype, as torch does: a float32 of 0.1 == 0.1."""
    if isinstance(c, torch.Tensor):
        if is_integer(t) and _real(c):
            return op(_difference(t, c), 0)
        return op(-_difference(c, t), 0) if _real(t) and is_integer(c) else op(t, c)
    if isinstance(c, float) and is_integer(t) and c.is_integer():
        c = int(c)
    if isinstance(c, int):
        if is_integer(t):
            return _with_integer(op, t, int(c))
        if _real(t):
            f = _as_float(c)
            if f == c and _holds(t.dtype, f):
                return op(t, f)
            # c lies between two floats, of which f is one.
            t, tie = t.double(), float((f > c) - (f < c))
            return op(torch.where(t == f, tie, _sign(t, torch.tensor(f, dtype=torch.float64))), 0)
    elif isinstance(c, float) and (is_integer(t) or (_real(t) and torch.finfo(t.dtype).max < abs(c) < math.inf)):
        t = t.double()  # an integer it rounds lies on the same side of c, which has a fraction
    return op(t, c)


def _with_integer(op: Callable, t: torch.Tensor, c: int) -> torch.Tensor:
    if not _INT64.min <= c <= _INT64.max:
        return op(torch.full(t.shape, -1 if c > 0 else 1, dtype=torch.int8), 0)
    if t.dtype == torch.bool or not torch.iinfo(t.dtype).min <= c <= torch.iinfo(t.dtype).max:
        t = t.to(torch.int64)
    return op(t, c)


def _difference(i: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Of integers and floats, a float of the sign of i − f; NaN where f is."""
    f = f.double()
    if i.dtype.itemsize < 8:
        return _sign(i.double(), f)
    whole = f.floor()
    inside = (whole >= -(2.0**63)) & (whole < 2.0**63)
    near = torch.where(inside, whole, 0.0).to(torch.int64)
    sign = (i > near).double() - ((i < near) | ((i == near) & (f > whole))).double()
    return torch.where(inside, sign, torch.where(f.isnan(), f, -torch.sign(f)))  # torch's sign of NaN is 0


def _sign(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of a − b, also of infinities."""
    return torch.where(a.isnan() | b.isnan(), math.nan, (a > b).double() - (a < b).double())


def is_one_of(t: torch.Tensor, numbers: list[Any]) -> torch.Tensor:
    """bool of t's shape: whether it equals one of them, as `compared` has it."""
    if t.dtype.is_complex or any(isinstance(c, complex) for c in numbers):
        return torch.isin(t.to(torch.complex128), torch.tensor(numbers, dtype=torch.complex128))
    if is_integer(t):
        whole = [int(c) for c in numbers if isinstance(c, int) or c.is_integer()]
        known = torch.tensor([c for c in whole if _INT64.min <= c <= _INT64.max], dtype=torch.int64)
        return torch.isin(t.to(torch.int64), known)
    kept = [c for c in numbers if not isinstance(c, int) or _as_float(c) == c]
    exact = torch.tensor([float(c) for c in kept], dtype=torch.float64)
    known = exact.to(t.dtype)
    rounded = torch.tensor([isinstance(c, float) for c in kept], dtype=torch.bool) & known.isfinite()
    return torch.isin(t, known[(known.double() == exact) | rounded])


def computable(t: torch.Tensor, c: Any) -> tuple[torch.Tensor, Any]:
    """The sides of an arithmetic operation, whose tensors `segments.widened` has made: an integer beside a float is a float64, and so is one
    that int64 cannot hold; a float32 becomes one beside an integer it would round."""
    if isinstance(c, torch.Tensor):
        if _real(t) and is_integer(c):
            return t.double(), c.double()
        return (t.double(), c.double()) if is_integer(t) and _real(c) else (t, c)
    if isinstance(c, float) and is_integer(t):
        return t.double(), c
    if isinstance(c, int) and is_integer(t) and not _INT64.min <= c <= _INT64.max:
        return t.double(), _as_float(c)
    if isinstance(c, int) and _real(t) and not _holds(t.dtype, _as_float(c)):
        return t.double(), _as_float(c)
    return t, c
