"""The predicate language: expressions over the rows of a trajectory, built from `traj` and computed for many trajectories at once.

    expression per step         traj.name, traj[key]; op, abs, isin of them
    expression per trajectory   traj.length, traj.total_reward; sum … last of one per step; op, abs, isin of them
    condition per step          a comparison, or isin, in which some side is per step; & | ^ ~ of them; any, all, count reduce it
    predicate                   a comparison of two per trajectory; & | ^ ~ of them

`op` is + - * / // % ** and unary -, comparisons are > >= < <= == !=; the other side may be another expression or a constant.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import unravel_key

from shmbuf.queries import segments
from shmbuf.queries.comparing import compared, computable, is_one_of
from shmbuf.queries.trajectory import Trajectory
from shmbuf.schema import Key, as_key

__all__ = ["Condition", "Expression", "Frame", "TrajectoryPredicate", "traj"]


class Frame(Protocol):
    """What is computed on: the rows of k ≥ 0 trajectories, one after another; none is empty."""

    lengths: np.ndarray  # int64[k]

    def column(self, key: Key) -> torch.Tensor:
        """[Σ lengths, …]; a key of one name that is not there is looked for under "next". Raises KeyError."""

    def trajectory(self, i: int) -> Trajectory:
        """The i-th, for callables that are no expressions."""


class TrajectoryFrame:
    """One trajectory."""

    def __init__(self, trajectory: Any):
        self._trajectory = trajectory if not isinstance(trajectory, TensorDictBase) else Trajectory(trajectory)
        data = self._trajectory.data
        self._data, self.lengths = data, np.array([data.batch_size[0]], np.int64)

    def column(self, key: Key) -> torch.Tensor:
        return column_of(self._data, key)

    def trajectory(self, i: int) -> Trajectory:
        return self._trajectory


def column_of(td: TensorDictBase, key: Key, known: Any = None) -> torch.Tensor:
    """A leaf, at the root or, for a key of one name, under "next". KeyError, with the keys there are (``known``: instead)."""
    value = td.get(key, None)
    if value is None and len(key) == 1:
        value = td.get(("next", *key), None)
    if isinstance(value, torch.Tensor):
        return segments.tame(value)
    show = _shown(key)
    have = ", ".join(sorted(repr(k) for k in (known if known is not None else td.keys(True, True))))
    if value is None:
        raise KeyError(f"Key {show!r} not found in trajectory (looked up root and ('next', ...)); there are {have}")
    raise KeyError(f"Key {show!r} is no tensor but {type(value).__name__}; traj[...] takes one of {have}")


def _shown(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _union(*keys: frozenset | None) -> frozenset | None:
    return None if any(k is None for k in keys) else frozenset().union(*keys)  # type: ignore[arg-type]


# ---- computing: functions of a module, so that expressions can be pickled ------------------------------------------------

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}


def _constant(value: Any, what: str) -> Any:
    """A number, or a tensor. TypeError for anything else."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else segments.tame(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, list, tuple)):
        array = np.asarray(value)
        if array.size == 1:
            return _constant(array.item(), what)
        with contextlib.suppress(TypeError, ValueError):
            return _constant(torch.as_tensor(array), what)
    raise TypeError(f"{what}: {type(value).__name__} is neither a number, a tensor nor an expression of traj")


def _numbers(values: Any, what: str) -> list[Any]:
    if isinstance(values, (list, tuple)):  # one by one: NumPy makes floats of integers that int64 cannot hold
        return [n for v in values for n in _numbers(v, what)]
    if isinstance(values, torch.Tensor):
        return values.detach().reshape(-1).tolist()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return values.reshape(-1).tolist()
    return [_constant(values, what)]


def _aligned(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, …] and [n, …]: what follows the first dimension broadcasts."""
    while a.ndim < b.ndim:
        a = a.unsqueeze(1)
    while b.ndim < a.ndim:
        b = b.unsqueeze(1)
    return a, b


def _binary(op: Callable, symbol: str, formula: str, a: Any, b: Any, steps: bool, frame: Frame) -> torch.Tensor:
    x, y = (_side(s, steps, frame) if isinstance(s, _Computed) else s for s in (a, b))
    if isinstance(a, _Computed) and isinstance(b, _Computed):
        x, y = _aligned(x, y)
    else:
        value, constant = (x, y) if isinstance(a, _Computed) else (y, x)
        if isinstance(constant, torch.Tensor) and constant.ndim > value.ndim - 1:
            raise ValueError(
                f"{formula}: a constant of shape {list(constant.shape)} beside rows of shape {list(value.shape[1:])}"
            )
    try:
        if symbol not in ARITHMETIC.values():
            return compared(op, x, y)  # Python turns a comparison round, so the left side is always ours
        x, y = (segments.widened(s) if isinstance(s, torch.Tensor) else s for s in (x, y))
        if isinstance(x, torch.Tensor):
            x, y = computable(x, y)
        else:
            y, x = computable(y, x)
        return op(x, y)
    except RuntimeError as e:
        raise ValueError(f"{formula}: {str(e).splitlines()[0]}") from None


def _side(side: _Computed, steps: bool, frame: Frame) -> torch.Tensor:
    value = side._value(frame)
    return segments.spread(value, frame.lengths) if steps and not side._steps else value


def _logical(op: Callable, formula: str, a: _Computed, b: _Computed, steps: bool, frame: Frame) -> torch.Tensor:
    x, y = _aligned(_side(a, steps, frame), _side(b, steps, frame))
    return op(_truth(x, formula), _truth(y, formula))


def _truth(t: torch.Tensor, formula: str) -> torch.Tensor:
    if t.dtype != torch.bool:
        raise TypeError(
            f"{formula}: & | ^ ~ combine conditions, not values of {t.dtype}; compare them first, as in traj.x != 0"
        )
    return t


def _field(key: Key, frame: Frame) -> torch.Tensor:
    return frame.column(key)


def _length(frame: Frame) -> torch.Tensor:
    return torch.from_numpy(frame.lengths)


def _reduced(name: str, of: _Computed, frame: Frame) -> torch.Tensor:
    values = of._value(frame)
    return segments.reduce(name, values, frame.lengths if of._steps else np.ones(len(values), np.int64))


def _end(last: bool, of: _Computed, frame: Frame) -> torch.Tensor:
    return segments.ends(of._value(frame), frame.lengths, last)


def _unary(op: Callable, of: _Computed, frame: Frame) -> torch.Tensor:
    return op(segments.widened(of._value(frame)))


def _isin(numbers: list[Any], of: _Computed, frame: Frame) -> torch.Tensor:
    return is_one_of(of._value(frame), numbers)


def _inverted(of: _Computed, formula: str, frame: Frame) -> torch.Tensor:
    return ~_truth(of._value(frame), formula)


# ---- expressions ----------------------------------------------------------------------------------------------------------


class _Computed:
    """Something with a value for each step, or for each trajectory."""

    _steps: bool
    _formula: str
    _keys: frozenset | None
    _compute: Callable[[Frame], torch.Tensor] | None
    __array_ufunc__ = None  # NumPy leaves operators to us

    def _value(self, frame: Frame) -> torch.Tensor:
        assert self._compute is not None
        return self._compute(frame)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self._formula} has no truth value outside a query. Combine with & | ~, each side in parentheses, not with `and`, `or`, "
            "`not`; write a chained comparison as two: (10 < traj.length) & (traj.length < 20)"
        )

    def __repr__(self) -> str:
        return self._formula

    def required_keys(self) -> frozenset | None:
        """The keys it reads, names or tuples of them; None: not known."""
        return self._keys

    # ---- both for steps and trajectories

    def any(self) -> TrajectoryPredicate:
        """Whether some element of some step is true, or not 0."""
        return _predicate(partial(_reduced, "any", self), f"{self._formula}.any()", self._keys)

    def all(self) -> TrajectoryPredicate:
        """Whether every element of every step is true, or not 0."""
        return _predicate(partial(_reduced, "all", self), f"{self._formula}.all()", self._keys)

    def count(self) -> Expression:
        """How many elements, of all steps, are true, or not 0."""
        return self._reduce("count")

    def _reduce(self, name: str) -> Expression:
        return Expression(partial(_reduced, name, self), f"{self._formula}.{name}()", self._keys, False)

    # ---- conditions

    def _logic(self, op: Callable, symbol: str, other: Any, swap: bool = False) -> Any:
        if not isinstance(other, _Computed):
            return NotImplemented
        a, b = (other, self) if swap else (self, other)
        steps, formula = a._steps or b._steps, f"({a._formula} {symbol} {b._formula})"
        fn, keys = partial(_logical, op, formula, a, b, steps), _union(a._keys, b._keys)
        return Condition(fn, formula, keys, True) if steps else _predicate(fn, formula, keys)

    def __and__(self, other: Any) -> Any:
        return self._logic(operator.and_, "&", other)

    def __or__(self, other: Any) -> Any:
        return self._logic(operator.or_, "|", other)

    def __xor__(self, other: Any) -> Any:
        return self._logic(operator.xor, "^", other)

    def __invert__(self) -> Any:
        fn = partial(_inverted, self, f"~{self._formula}")
        return (
            Condition(fn, f"~{self._formula}", self._keys, True)
            if self._steps
            else _predicate(fn, f"~{self._formula}", self._keys)
        )


class Expression(_Computed):
    """Values for each step of a trajectory, or for a trajectory; see the module."""

    def __init__(self, fn: Callable[[Frame], torch.Tensor], formula: str, keys: frozenset | None, steps: bool):
        self._compute, self._formula, self._keys, self._steps = fn, formula, keys, steps

    def __call__(self, trajectory: Any = None) -> Any:
        raise TypeError(_no_filter(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._formula} has no {name!r}; a nested key is traj['a', 'b']")

    # ---- comparisons

    def _compare(self, op: Callable, symbol: str, other: Any) -> Any:
        formula, a, b, steps, keys = self._sides(symbol, other, False)
        fn = partial(_binary, op, symbol, formula, a, b, steps)
        return Condition(fn, formula, keys, True) if steps else _predicate(fn, formula, keys)

    def _sides(self, symbol: str, other: Any, swap: bool) -> tuple[str, Any, Any, bool, frozenset | None]:
        if isinstance(other, (Condition, TrajectoryPredicate)):
            raise TypeError(
                f"{self._formula} {symbol} {other._formula}: a condition is no number; .count() makes one of it"
            )
        if not isinstance(other, Expression):
            other = _constant(other, f"{self._formula} {symbol} …")
        a, b = (other, self) if swap else (self, other)
        steps, keys = self._steps, self._keys
        if isinstance(other, Expression):
            steps, keys = steps or other._steps, _union(keys, other._keys)
        return f"({_text(a)} {symbol} {_text(b)})", a, b, steps, keys

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, ">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, ">=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, "<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, "<=", other)

    def __eq__(self, other: Any) -> Any:
        return self._compare(operator.eq, "==", other)

    def __ne__(self, other: Any) -> Any:
        return self._compare(operator.ne, "!=", other)

    __hash__ = None  # type: ignore[assignment]

    def isin(self, values: Any) -> Any:
        """Whether it equals one of these numbers: a condition for each step, or a predicate."""
        fn = partial(_isin, _numbers(values, f"{self._formula}.isin(…)"), self)
        formula = f"{self._formula}.isin({_text(values)})"
        return Condition(fn, formula, self._keys, True) if self._steps else _predicate(fn, formula, self._keys)

    # ---- arithmetic

    def _arithmetic(self, op: Callable, symbol: str, other: Any, swap: bool = False) -> Expression:
        formula, a, b, steps, keys = self._sides(symbol, other, swap)
        return Expression(partial(_binary, op, symbol, formula, a, b, steps), formula, keys, steps)

    def __neg__(self) -> Expression:
        return Expression(partial(_unary, operator.neg, self), f"-{self._formula}", self._keys, self._steps)

    def __abs__(self) -> Expression:
        return self.abs()

    def abs(self) -> Expression:
        """Absolute values."""
        return Expression(partial(_unary, operator.abs, self), f"{self._formula}.abs()", self._keys, self._steps)

    # ---- reductions

    def sum(self) -> Expression:
        """Over all elements of all steps (of a trajectory's row: of the row), as are all of these; see `segments.reduce`."""
        return self._reduce("sum")

    def mean(self) -> Expression:
        return self._reduce("mean")

    def std(self) -> Expression:
        """Of a sample (n − 1), as torch's; NaN of one element."""
        return self._reduce("std")

    def var(self) -> Expression:
        return self._reduce("var")

    def prod(self) -> Expression:
        return self._reduce("prod")

    def max(self) -> Expression:
        return self._reduce("max")

    def min(self) -> Expression:
        return self._reduce("min")

    def first(self) -> Expression:
        """The first step's value. If that is a row of several elements, reduce it, or the comparison of it."""
        return self._step("first")

    def last(self) -> Expression:
        """The last step's value; see `first`."""
        return self._step("last")

    def _step(self, name: str) -> Expression:
        if not self._steps:
            raise TypeError(f"{self._formula} has one value a trajectory: it has no .{name}()")
        return Expression(partial(_end, name == "last", self), f"{self._formula}.{name}()", self._keys, False)


def _add_arithmetic() -> None:
    for name, symbol in ARITHMETIC.items():
        op = getattr(operator, name)

        def forward(self: Expression, other: Any, op: Any = op, symbol: str = symbol) -> Expression:
            return self._arithmetic(op, symbol, other)

        def backward(self: Expression, other: Any, op: Any = op, symbol: str = symbol) -> Expression:
            return self._arithmetic(op, symbol, other, True)

        setattr(Expression, f"__{name}__", forward)
        setattr(Expression, f"__r{name}__", backward)


_add_arithmetic()


class Condition(_Computed):
    """True or false for each element of each step. `any` and `all` make a predicate of it, `count` a number, & | ^ ~ another one."""

    def __init__(self, fn: Callable[[Frame], torch.Tensor], formula: str, keys: frozenset | None, steps: bool):
        self._compute, self._formula, self._keys, self._steps = fn, formula, keys, steps

    def __call__(self, trajectory: Any = None) -> Any:
        raise TypeError(_no_filter(self))

    def mean(self) -> Expression:
        """The share that is true."""
        return self._reduce("mean")

    def first(self) -> TrajectoryPredicate:
        """Whether it holds at the first step."""
        return _predicate(partial(_end, False, self), f"{self._formula}.first()", self._keys)

    def last(self) -> TrajectoryPredicate:
        """Whether it holds at the last step."""
        return _predicate(partial(_end, True, self), f"{self._formula}.last()", self._keys)


class TrajectoryPredicate(_Computed):
    """True or false for a trajectory. Made by comparing expressions of `traj`, or of any callable.

    Args:
        fn: takes a `Trajectory`.
        description: its text.
        keys: which keys it reads (names or tuples of names); None: not known, so whole rows are fetched.

    & | ^ ~ combine predicates, and any callables with them. `predicate(trajectory)` is a bool.
    """

    _steps = False

    def __init__(self, fn: Callable[[Trajectory], Any], description: str = "predicate", keys: Any = None):
        if not callable(fn):
            raise TypeError(f"a predicate is a callable, not {type(fn).__name__}")
        self._fn, self._formula = fn, description
        self._keys = None if keys is None else frozenset(_shown(as_key(k)) for k in keys)
        self._compute = None

    def __call__(self, trajectory: Any) -> bool:
        return bool(self.evaluate(TrajectoryFrame(trajectory))[0])

    def evaluate(self, frame: Frame, among: np.ndarray | None = None) -> np.ndarray:
        """bool[k]: whether it holds for each trajectory of the frame; callables are only asked about those ``among`` (bool[k]) them.

        Raises KeyError for a key that is not there, ValueError where rows of several elements were compared.
        """
        if self._compute is not None:
            return self._of_one(self._value(frame))
        asked = range(len(frame.lengths)) if among is None else np.flatnonzero(among)
        out = np.zeros(len(frame.lengths), bool)
        for i in asked:
            out[i] = bool(self._fn(frame.trajectory(int(i))))
        return out

    def _of_one(self, value: torch.Tensor) -> np.ndarray:
        if value[:1].numel() > 1 or (value.ndim > 1 and 0 in value.shape[1:]):
            raise ValueError(
                f"{self._formula} compares rows of shape {list(value.shape[1:])}, which is ambiguous for a trajectory: reduce the "
                f"comparison with .any() or .all(), or the row before it, as in traj.x.first().sum()"
            )
        return value.reshape(-1).numpy().astype(bool)

    def _value(self, frame: Frame) -> torch.Tensor:
        return super()._value(frame) if self._compute is not None else torch.from_numpy(self.evaluate(frame))

    def _logic(self, op: Callable, symbol: str, other: Any, swap: bool = False) -> Any:
        if not isinstance(other, _Computed) and callable(other):
            other = TrajectoryPredicate(other, getattr(other, "__name__", repr(other)))
        if isinstance(other, TrajectoryPredicate) and (self._compute is None or other._compute is None):
            a, b = (other, self) if swap else (self, other)
            return _Both(a, b, op, symbol)
        return super()._logic(op, symbol, other, swap)

    def __rand__(self, other: Any) -> Any:
        return self._logic(operator.and_, "&", other, True)

    def __ror__(self, other: Any) -> Any:
        return self._logic(operator.or_, "|", other, True)

    def __rxor__(self, other: Any) -> Any:
        return self._logic(operator.xor, "^", other, True)

    def __invert__(self) -> Any:
        return super().__invert__() if self._compute is not None else _Not(self)


class _Opaque(TrajectoryPredicate):
    """Of predicates of which some is a callable."""

    _compute = None

    def __init__(self, formula: str, keys: frozenset | None):
        self._formula, self._keys = formula, keys


class _Both(_Opaque):
    """The callable is asked last, and only where its answer counts."""

    def __init__(self, a: TrajectoryPredicate, b: TrajectoryPredicate, op: Callable, symbol: str):
        super().__init__(f"({a._formula} {symbol} {b._formula})", _union(a._keys, b._keys))
        self._sides, self._op, self._symbol = (
            (a, b) if a._compute is not None or b._compute is None else (b, a),
            op,
            symbol,
        )

    def evaluate(self, frame: Frame, among: np.ndarray | None = None) -> np.ndarray:
        a, b = self._sides
        x = a.evaluate(frame, among)
        open_ = np.ones(len(x), bool) if among is None else among
        if self._symbol in "&|":
            open_ = open_ & (x if self._symbol == "&" else ~x)
        return self._op(x, b.evaluate(frame, open_))


class _Not(_Opaque):
    def __init__(self, of: TrajectoryPredicate):
        super().__init__(f"~{of._formula}", of._keys)
        self._of = of

    def evaluate(self, frame: Frame, among: np.ndarray | None = None) -> np.ndarray:
        return ~self._of.evaluate(frame, among)


def _predicate(fn: Callable[[Frame], torch.Tensor], formula: str, keys: frozenset | None) -> TrajectoryPredicate:
    self = TrajectoryPredicate(bool, formula)
    self._compute, self._keys = fn, keys
    return self


def _text(value: Any) -> str:
    if isinstance(value, _Computed):
        return value._formula
    return repr(value.tolist()) if isinstance(value, (torch.Tensor, np.ndarray)) and value.size else repr(value)


def _no_filter(of: Expression | Condition) -> str:
    if not of._steps:
        return f"{of._formula} is a number, no predicate: compare it, as in {of._formula} > 0"
    return (
        f"{of._formula} compares per-transition values and is ambiguous as a trajectory filter. Call .any() or .all() to reduce it to a "
        "single boolean."
        if isinstance(of, Condition)
        else f"{of._formula} has a value for each step and is no predicate: reduce and compare it, as in {of._formula}.sum() > 0, or "
        "compare it and call .any() or .all()"
    )


class _Traj:
    """Where the language begins: `traj.length`, `traj.total_reward`, `traj.name` and `traj[key]`.

    A name is a key of the rows or, if it is not there, one under "next". Keys that are called length or total_reward, that begin with an
    underscore or that are nested are reached as `traj["length"]`, `traj["next", "obs"]`.
    """

    __iter__ = None
    __contains__ = None

    @property
    def length(self) -> Expression:
        """How many rows of it are stored."""
        return Expression(_length, "traj.length", frozenset(), False)

    @property
    def total_reward(self) -> Expression:
        """The sum of "reward", or of ("next", "reward")."""
        return Expression(partial(_reduced, "sum", self.reward), "traj.total_reward", frozenset({"reward"}), False)

    def __getattr__(self, name: str) -> Expression:
        if name.startswith("_"):
            raise AttributeError(name)
        return Expression(partial(_field, (name,)), f"traj.{name}", frozenset({name}), True)

    def __getitem__(self, key: Any) -> Expression:
        key = as_key(unravel_key(key))
        shown = _shown(key)
        return Expression(partial(_field, key), f"traj[{shown!r}]", frozenset({shown}), True)

    def __repr__(self) -> str:
        return "traj"

    def __reduce__(self) -> str:
        return "traj"


traj = _Traj()
