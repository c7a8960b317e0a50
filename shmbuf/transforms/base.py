"""What a transform is: rows in a TensorDict, on their way into the buffer (`inv`) and out of it (`forward`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection, unravel_key

from shmbuf.schema import as_key, show_key

Keys = NestedKey | Sequence[NestedKey] | None


def as_keys(keys: Keys) -> list[NestedKey] | None:
    """A list of keys; one key alone (a string or a tuple of strings) is a list of one. None stays None."""
    if keys is None:
        return None
    return [unravel_key(k) for k in ([keys] if isinstance(keys, str | tuple) and not _several(keys) else list(keys))]


def _several(keys: Any) -> bool:
    """A tuple that holds a tuple holds several keys: a key of nested tuples is written flat."""
    return isinstance(keys, tuple) and any(not isinstance(k, str) for k in keys)


def _nothing() -> None:
    """Nothing was held back."""


class Prepared(NamedTuple):
    """Rows as they are to be stored (None: none), whose next steps they are, and what is to be called once they are in the buffer."""

    rows: Any
    stream: Any = None
    commit: Callable[[], object] = _nothing


class Transform:
    """Changes rows on their way out of the buffer (`forward`: sample, indexing, query) and into it (`inv`: add, extend).

    A subclass gives `_apply` (and `_inv_apply`) for one tensor, or `forward` and `inv` for whole TensorDicts. It needs no TorchRL,
    and pickles if its attributes do. `forward` may run in several threads at once: what it changes in ``self`` it must guard.

    Args:
        in_keys: keys that `forward` reads. None: not known, any of them.
        out_keys: keys that it writes, one for each of ``in_keys``. Default: ``in_keys``.
        in_keys_inv, out_keys_inv: `inv` reads ``out_keys_inv`` and writes ``in_keys_inv``, as in TorchRL. Default: none.

    Raises:
        ValueError: not as many out-keys as in-keys.
    """

    in_keys: list[NestedKey] | None
    out_keys: list[NestedKey] | None
    in_keys_inv: list[NestedKey] | None
    out_keys_inv: list[NestedKey] | None

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        self.in_keys, self.out_keys = _pair("", in_keys, out_keys)
        self.in_keys_inv, self.out_keys_inv = _pair("_inv", in_keys_inv, out_keys_inv)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Rows as they are read. ``td`` belongs to the call and may be changed. Raises KeyError: one of ``in_keys`` is missing."""
        for source, target in zip(self.in_keys or (), self.out_keys or (), strict=True):
            td.set(target, self._apply(found_in(self, td, source)))
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        """Rows as they are stored; None: none of them. Keys may be set in ``td``, its tensors are the caller's."""
        for target, source in zip(self.in_keys_inv or (), self.out_keys_inv or (), strict=True):
            td.set(target, self._inv_apply(found_in(self, td, source)))
        return td

    def prepared(self, td: TensorDictBase, stream: Any = None, trajectory_keys: Sequence[NestedKey] = ()) -> Prepared:
        """`inv`, for a buffer: what a transform holds back from one call to the next moves on with ``commit``, so that rows that could
        not be stored can be given again.

        stream: one number, or int[n]. trajectory_keys: else the first of these that rows have says which rows follow each other.
        """
        return Prepared(self.inv(td), stream)

    def pending(self) -> list[tuple[TensorDictBase, Any, Callable[[], object]]]:
        """Rows that are held back, by stream, and what is to be called once they are stored."""
        return []

    def _apply(self, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has neither _apply nor a forward of its own")

    def _inv_apply(self, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has neither _inv_apply nor an inv of its own")

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return self.forward(td)

    def state_dict(self) -> dict[str, Any]:
        """What it has learned or holds back, to be given to `load_state_dict`; ``{}`` if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises KeyError for a state of other keys."""
        if state:
            raise KeyError(f"{type(self).__name__} has no state; got {sorted(state)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(in_keys={self.in_keys}, out_keys={self.out_keys})"


def _pair(of: str, sources: Keys, targets: Keys) -> tuple[list[NestedKey] | None, list[NestedKey] | None]:
    a, b = as_keys(sources), as_keys(targets)
    if b is None:
        b = None if a is None else list(a)
    elif a is not None and len(a) != len(b):
        raise ValueError(f"{len(a)} in_keys{of} {a}, but {len(b)} out_keys{of} {b}: each in-key needs one out-key")
    return a, b


def found_in(transform: Transform, td: TensorDictBase, key: NestedKey) -> torch.Tensor:
    value = td.get(key, None)
    if value is None:
        there = ", ".join(sorted(show_key(as_key(k)) for k in td.keys(True, True)))
        raise KeyError(f"{type(transform).__name__}: no key {show_key(as_key(key))} among {there}")
    return value


class CallableTransform(Transform):
    """A function of a TensorDict, called on what is read. What is stored stays as it is."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, td: Any) -> Any:
        return self.fn(td)

    def state_dict(self) -> dict[str, Any]:
        return self.fn.state_dict() if isinstance(self.fn, torch.nn.Module) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.fn, torch.nn.Module):
            self.fn.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def __repr__(self) -> str:
        return f"CallableTransform({self.fn!r})"


class ForeignTransform(CallableTransform):
    """Another library's transform, by its methods ``forward`` and ``inv`` (TorchRL's ``Transform``)."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.theirs = transform
        # Many of theirs keep an empty list though they touch every key: only a list of names says something.
        for name in ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"):
            keys = getattr(transform, name, None)
            setattr(self, name, as_keys(keys) or None)

    def forward(self, td: Any) -> Any:
        return self.theirs.forward(td)

    def inv(self, td: Any) -> Any:
        return self.theirs.inv(td)

    def __repr__(self) -> str:
        return repr(self.fn)


class InvertTransform(Transform):
    """The other way round: `forward` of the other on what is stored, its `inv` on what is read.

    A function that changes tensors in place changes the caller's then: what is stored is no copy before it is in the ring.
    """

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.in_keys, self.out_keys = transform.out_keys_inv, transform.in_keys_inv
        self.in_keys_inv, self.out_keys_inv = transform.out_keys, transform.in_keys

    def forward(self, td: Any) -> Any:
        return self.transform.inv(td)

    def inv(self, td: Any) -> Any:
        return self.transform.forward(td)

    def state_dict(self) -> dict[str, Any]:
        return self.transform.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.transform.load_state_dict(state)

    def __repr__(self) -> str:
        return f"InvertTransform({self.transform!r})"


class Compose(Transform):
    """Several in a row: `forward` from first to last, `inv` from last to first, on a shallow copy of what is handed in.

    Args:
        *transforms: as `as_transform` takes them.
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self._transforms = [as_transform(t) for t in transforms]

    def append(self, transform: Any) -> None:
        """Last on what is read, first on what is stored."""
        self._transforms.append(as_transform(transform))

    def insert(self, index: int, transform: Any) -> None:
        """As number ``index``, as `list.insert`."""
        self._transforms.insert(index, as_transform(transform))

    def __len__(self) -> int:
        return len(self._transforms)

    def __bool__(self) -> bool:
        return True  # an empty chain is one still, and can be appended to

    def __getitem__(self, index: Any) -> Any:
        found = self._transforms[index]
        return Compose(*found) if isinstance(found, list) else found

    def __iter__(self) -> Iterator[Transform]:
        return iter(list(self._transforms))

    def forward(self, td: Any) -> Any:
        for t in list(self._transforms):
            td = t.forward(td)
        return td

    def inv(self, td: Any) -> Any:
        """None as soon as one of them gives None: those that come after it see nothing."""
        made = self.prepared(td)
        made.commit()
        return made.rows

    def prepared(self, td: Any, stream: Any = None, trajectory_keys: Sequence[NestedKey] = ()) -> Prepared:
        commits: list[Callable[[], object]] = []
        if is_tensor_collection(td):
            td = td.copy()
        for t in reversed(list(self._transforms)):
            td, stream, commit = t.prepared(td, stream, trajectory_keys)
            commits.append(commit)
            if td is None:
                break
        return Prepared(td, stream, lambda: [commit() for commit in commits])

    def state_dict(self) -> dict[str, Any]:
        return {str(i): t.state_dict() for i, t in enumerate(self._transforms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises KeyError for a state of another number of transforms; nothing is loaded then."""
        names = [str(i) for i in range(len(self._transforms))]
        if sorted(state) != sorted(names):
            raise KeyError(f"a state of {len(state)} transforms {sorted(state)} for {len(names)}; nothing was loaded")
        for name, t in zip(names, self._transforms, strict=True):
            t.load_state_dict(state[name])

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._transforms))})"


def parts_of(transform: Transform) -> list[Transform]:
    """The transforms of a chain, of chains within it too."""
    return [p for t in transform for p in parts_of(t)] if isinstance(transform, Compose) else [transform]


CALLED = (CallableTransform, InvertTransform)  # do what another's function does


def as_transform(obj: Any, invert: bool = False) -> Transform:
    """Whatever can be a transform, as one.

    Args:
        obj: a `Transform`, another library's object with ``forward`` and ``inv`` (TorchRL's, called ``.eval()`` on), or a function or
            module of a TensorDict.
        invert: its two directions are swapped.

    Raises:
        TypeError: none of these.
    """
    if isinstance(obj, Transform):
        made = obj
    elif not isinstance(obj, type) and callable(getattr(obj, "forward", None)) and callable(getattr(obj, "inv", None)):
        made = ForeignTransform(_evaluating(obj))
    elif callable(obj) and not isinstance(obj, type):
        made = CallableTransform(_evaluating(obj))
    else:
        what = f"the class {obj.__name__}, not an object of it" if isinstance(obj, type) else type(obj).__name__
        raise TypeError(f"a transform is a Transform, TorchRL's, a module or a function of a TensorDict, not {what}")
    return InvertTransform(made) if invert else made


def _evaluating(obj: Any) -> Any:
    return obj.eval() if isinstance(obj, torch.nn.Module) else obj
