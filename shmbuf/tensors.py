"""TensorDicts as leaves by key, and leaves as TensorDicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import is_non_tensor

from shmbuf.errors import SchemaError
from shmbuf.schema import Key, show_key


def tensor_leaves(td: Any, prefix: Key = (), others: dict[Key, Any] | None = None) -> dict[Key, torch.Tensor]:
    """Leaves by key, nested ones too. Non-tensor ones go to ``others``, as a value or (batched) a list of them; without it they are a
    SchemaError, which names the key."""
    out: dict[Key, torch.Tensor] = {}
    for name in list(td.keys()):  # a TensorDict iterates over its rows
        key = (*prefix, name)
        try:
            value = td.get(name)
        except RuntimeError as e:  # a lazy stack of different shapes
            raise SchemaError(f"key {show_key(key)}: its rows have no common shape: {str(e).splitlines()[0]}") from None
        if is_non_tensor(value) and others is not None:
            others[key] = value.tolist() if td.batch_dims else value.data
        elif is_non_tensor(value):
            raise SchemaError(
                f"key {show_key(key)}: non-tensor data ({type(getattr(value, 'data', value)).__name__}) cannot be "
                "stored; encode it as a tensor of fixed shape"
            )
        elif is_tensor_collection(value):
            out.update(tensor_leaves(value, key, others))
        elif isinstance(value, torch.Tensor):
            out[key] = value
        else:
            raise SchemaError(f"key {show_key(key)}: got {type(value).__name__}, expected a tensor")
    return out


def entry_of(td: TensorDictBase, name: str) -> Any:
    """What lies under a name, None if nothing does: `get` without its price. Of values that are no tensors it may be their wrapper."""
    entries = td.__dict__.get("_tensordict") if type(td) is TensorDict else None
    return entries.get(name) if type(entries) is dict else td.get(name, None)


def plain(key: Key, t: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """The same values as a contiguous tensor of this device without autograd, conjugation or subclass."""
    if t.is_nested or t.layout != torch.strided:
        raise SchemaError(
            f"key {show_key(key)}: got a {'nested' if t.is_nested else str(t.layout).removeprefix('torch.')} tensor, "
            "expected a dense one (.to_dense())"
        )
    if t.device.type == "meta":
        raise SchemaError(f"key {show_key(key)}: got a meta tensor, which has no values")
    if t._is_zerotensor():  # has no memory until it is written out
        return torch.zeros(t.shape, dtype=t.dtype, device=device)
    try:
        out = t.detach().as_subclass(torch.Tensor).to(device).resolve_conj().resolve_neg().contiguous()
        held = out.untyped_storage().nbytes() - out.storage_offset() * out.element_size()
        if type(out) is torch.Tensor and (not out.nbytes or (held >= out.nbytes and out.data_ptr())):
            return out
    except RuntimeError:  # fake, functional, wrapped …
        pass
    raise SchemaError(f"key {show_key(key)}: got a {type(t).__name__} without memory of its own")


def as_numpy(t: torch.Tensor) -> np.ndarray:
    """A plain CPU tensor's memory; of dtypes that numpy lacks the raw bits, as the numpy level has them."""
    raw = {"bfloat16": torch.uint16, "complex32": torch.uint32}.get(str(t.dtype).removeprefix("torch."))
    if raw is None and str(t.dtype).startswith("torch.float8"):
        raw = torch.uint8
    return (t if raw is None else t.view(raw)).numpy()


def numbers_of(values: Any) -> np.ndarray:
    """Indices or ids as an array, of Python numbers where numpy would make floats of large ones."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind == "f" and isinstance(values, (list, tuple)):
        exact = np.asarray(values, object)
        return exact if array.size and all(isinstance(i, int) for i in exact.flat) else array
    return array


def too_large(array: np.ndarray) -> int | None:
    """The first of an array's whole numbers that int64 does not hold: cast, it would be the number of another row."""
    if array.dtype.kind == "u":
        over = array > np.iinfo(np.int64).max
    elif array.dtype == object and all(isinstance(i, int) for i in array.flat):
        over = np.array([not -(2**63) <= i < 2**63 for i in array.flat], bool)
    else:
        return None
    return int(array[over.reshape(array.shape)].flat[0]) if over.any() else None


def slots_at(index: Any, size: int) -> np.ndarray:
    """int64 slots that an int, list, tensor, array or mask means among ``size`` stored rows, in its shape; negative ones as they are.
    IndexError: it is none."""
    if isinstance(index, (bool, np.bool_)):
        raise IndexError("a bool is no index; masks have one entry per stored row")
    array = numbers_of(index)
    if array.dtype == bool:
        if array.shape != (size,):
            raise IndexError(f"mask of shape {list(array.shape)}: {size:,} rows are stored")
        return np.flatnonzero(array)
    if (number := too_large(array)) is not None:
        raise IndexError(f"index {number} is out of range: {size:,} rows are stored")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise IndexError(f"index of dtype {array.dtype}: integers or bool")
    return array.astype(np.int64)


def stack(rows: list[Any]) -> TensorDictBase:
    """A list of TensorDicts as a batch. Dtypes are not promoted, as torch.stack would: SchemaError names the key."""
    if other := sorted({type(r).__name__ for r in rows if not is_tensor_collection(r)}):
        raise SchemaError(f"a list to store holds TensorDicts, not {', '.join(other)}")
    first = {k: t.dtype for k, t in tensor_leaves(rows[0], others={}).items()}
    for i, td in enumerate(rows[1:], 1):
        for key, t in tensor_leaves(td, others={}).items():
            if first.get(key, t.dtype) != t.dtype:
                raise SchemaError(
                    f"key {show_key(key)}: {first[key]} in the first TensorDict of the list, {t.dtype} in number {i}"
                )
    try:
        return torch.stack(rows)  # type: ignore[return-value]
    except (RuntimeError, KeyError) as e:
        raise SchemaError(f"the {len(rows)} TensorDicts of the list cannot be stacked: {e}") from None


# The nodes of a nesting, inner ones first, each as (name, number) pairs: a leaf's number, or that of a node, counted on.
Tree = tuple[tuple[tuple[str, int], ...], ...]


def tree_of(keys: tuple[Key, ...]) -> Tree:
    nodes: list[tuple[tuple[str, int], ...]] = []

    def add(depth: int, leaves: list[int]) -> int:
        below: dict[str, list[int]] = {}
        for i in leaves:
            below.setdefault(keys[i][depth], []).append(i)
        # Of two leaves of one name the later one is shown: a sample's own numbers.
        entries = [(k, v[-1] if len(keys[v[-1]]) == depth + 1 else add(depth + 1, v)) for k, v in below.items()]
        nodes.append(tuple(entries))
        return len(keys) + len(nodes) - 1

    add(0, list(range(len(keys))))
    return tuple(nodes)


def make_tensordict(tree: Tree, leaves: list[torch.Tensor], batch: torch.Size) -> TensorDict:
    """Nested, without the checks of the public constructor: shapes and devices are right by construction."""
    parts: list[Any] = [*leaves]
    for node in tree:
        parts.append(_wrap({name: parts[i] for name, i in node}, batch))
    return parts[-1]


def _blank() -> dict[str, Any] | None:
    """The attributes of an empty TensorDict, if they are what they are known to be."""
    try:
        attributes = dict(vars(TensorDict._new_unsafe({}, batch_size=torch.Size((0,)), nested=False)))
    except (AttributeError, TypeError):
        return None
    known = type(attributes.pop("_tensordict", None)) is dict and attributes.pop("_batch_size", None) == torch.Size(
        (0,)
    )
    return attributes if known and not any(v is not None for v in attributes.values()) else None


_BLANK = _blank()


def _from_blank(source: dict[str, Any], batch: torch.Size) -> TensorDict:
    td = TensorDict.__new__(TensorDict)  # as its _new_unsafe, in a fifth of the time
    td.__dict__.update(_BLANK or {}, _tensordict=source, _batch_size=batch)
    return td


def _constructed(source: dict[str, Any], batch: torch.Size) -> TensorDict:
    return TensorDict(source, batch_size=batch)


_wrap = _from_blank if _BLANK is not None else _constructed
