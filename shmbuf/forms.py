"""The forms of rows beside TensorDicts: tensors, arrays, nested dicts, lists and tuples of them, tensorclasses, Python values.

A form is plain msgpack data, kept with the schema, so that every process gives rows back as they came:
``["tensor"]``, ``["array"]``, ``["value"]``, ``["dict", names, forms]``, ``["list", forms]``, ``["tuple", forms]``,
``["namedtuple", module, name, fields, forms]``, ``["tensorclass", module, name]``. Classes are looked up among the modules that are
imported already: attaching runs no code.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shmbuf.errors import BufferFormatError, SchemaError
from shmbuf.rows import as_array
from shmbuf.schema import Key, same_form, show_key

Form = list[Any]
ROOT: Key = ("data",)  # the column of rows that are one leaf
_VALUES = (type(None), bool, int, float, str, bytes)


class Rows(NamedTuple):
    """Rows taken apart: leaves by key, tensors or (of ``["value"]``) lists of one value a row."""

    form: Form
    leaves: dict[Key, Any]
    n: int  # −1: one row


def _is_namedtuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def _parts(data: Any) -> tuple[Form, list[tuple[str, Any]]] | None:
    """A node's form, without those below it, and what it holds by name; None: a leaf."""
    if isinstance(data, Mapping):
        for name in data:
            if type(name) is not int and not isinstance(name, str):
                raise SchemaError(f"key {name!r}: the keys of a dict to store are str or int")
            if type(name) is int and (str(name) in data or not -(2**63) <= name < 2**63):
                raise SchemaError(f"key {name!r}: also as a str, by which a column is named, or more than 64 bits")
        return ["dict", list(data)], [(str(name), x) for name, x in data.items()]
    if _is_namedtuple(data):
        kind = type(data)
        return ["namedtuple", kind.__module__, kind.__qualname__, list(data._fields)], list(
            zip(data._fields, data, strict=True)
        )
    if isinstance(data, (list, tuple)):
        return ["list" if isinstance(data, list) else "tuple"], [(str(i), x) for i, x in enumerate(data)]
    return None


def take_apart(data: Any, single: bool, ndim: int = 1) -> Rows:
    """A batch, whose leaves have the rows in their first dimension (or ``ndim``, see `shmbuf.lanes`); single: one row.

    Raises:
        SchemaError: names what cannot be stored, or leaves of different numbers of rows.
    """
    if is_tensor_collection(data):
        kind, td = type(data), data.to_tensordict()
        if len(td.batch_size) != (ndim - 1 if single else ndim):
            of = (
                ("add() takes one row, []" if single else "extend() takes [n]")
                if ndim == 1
                else f"with ndim={ndim} {'add' if single else 'extend'}() takes {ndim - 1 if single else ndim} dimensions"
            )
            raise SchemaError(f"got batch size {list(td.batch_size)}: {of}")
        return Rows(
            ["tensorclass", kind.__module__, kind.__qualname__], collected(td), -1 if single else td.batch_size[0]
        )
    leaves: dict[Key, Any] = {}
    form = _walk(data, (), single, leaves)
    if single:
        return Rows(form, leaves, -1)
    sizes = {k: v.shape[0] if v.ndim else None for k, v in leaves.items()}
    if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
        each = ", ".join(f"{show_key(k)}: {'none' if n is None else n}" for k, n in sizes.items())
        raise SchemaError(f"leaves have different numbers of rows (first dimension), or none: {each or 'no leaf'}")
    return Rows(form, leaves, len(next(iter(leaves.values()))))


def collected(td: TensorDictBase) -> dict[Key, Any]:
    """Its leaves, as `Rows` has them."""
    from shmbuf.tensors import tensor_leaves

    values: dict[Key, Any] = {}
    return {**tensor_leaves(td, others=values), **values}


def _walk(data: Any, key: Key, single: bool, leaves: dict[Key, Any]) -> Form:
    where = key or ROOT
    if len(key) > 32:
        raise SchemaError(f"key {show_key(key[:4])}…: nested deeper than 32")
    if (node := _parts(data)) is not None:
        form, inner = node
        if not inner:
            raise SchemaError(f"{show_key(where)}: an empty {type(data).__name__} cannot be stored")
        return [*form, [_walk(x, (*key, name), single, leaves) for name, x in inner]]
    if isinstance(data, torch.Tensor):
        leaves[where] = data
        return ["tensor"]
    if isinstance(data, _VALUES):
        if not single:
            raise SchemaError(
                f"key {show_key(where)}: {type(data).__name__} in a batch is no row; a list holds one a row"
            )
        leaves[where] = data
        return ["value"]
    if isinstance(data, (np.ndarray, np.generic)):
        array = as_array(where, data)
        array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        leaves[where] = torch.from_numpy(
            np.array(array) if not array.flags.writeable or min(array.strides, default=0) < 0 else array
        )
        return ["array"]
    raise SchemaError(f"key {show_key(where)}: {type(data).__name__} cannot be stored")


def take_items(items: list[Any]) -> Rows:
    """A list of rows. Raises SchemaError naming the first item that has another form, shape or dtype than item 0."""
    each = [take_apart(x, True) for x in items]
    first = each[0]
    for i, rows in enumerate(each):
        if not same_form(rows.form, first.form) or rows.leaves.keys() != first.leaves.keys():
            raise SchemaError(f"item {i} of the list is {show(rows.form)}, item 0 is {show(first.form)}")
    leaves: dict[Key, Any] = {}
    for key, leaf in first.leaves.items():
        column = [rows.leaves[key] for rows in each]
        if not isinstance(leaf, torch.Tensor):
            leaves[key] = column
            continue
        for i, t in enumerate(column):
            if not isinstance(t, torch.Tensor) or (t.dtype, t.shape) != (leaf.dtype, leaf.shape):
                got = f"{t.dtype}{list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
                raise SchemaError(f"key {show_key(key)}: {got} in item {i}, {leaf.dtype}{list(leaf.shape)} in item 0")
        leaves[key] = torch.stack(column)
    return Rows(first.form, leaves, len(items))


def as_batch(rows: Rows, items: list[Any]) -> Any:
    """What transforms are given of a list of rows: leaves with the rows in front, or, where some are Python values, the list."""
    if not all(isinstance(leaf, torch.Tensor) for leaf in rows.leaves.values()):
        return items
    return put_together(rows.form, TensorDict(dict(rows.leaves), [rows.n]))


def show(form: Form | None) -> str:
    """For error texts."""
    if form is None:
        return "a TensorDict"
    kind = form[0]
    if kind in ("tensorclass", "namedtuple"):
        return f"{kind} {form[1]}.{form[2]}"
    if kind == "dict":
        return "{" + ", ".join(f"{k!r}: {show(f)}" for k, f in zip(form[1], form[2], strict=True)) + "}"
    if kind in ("list", "tuple"):
        return ("[{}]" if kind == "list" else "({})").format(", ".join(map(show, form[1])))
    return f"a {kind}"


def _imported(module: str, name: str) -> Any:
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def put_together(form: Form, td: TensorDictBase) -> Any:
    """Rows of a TensorDict, whatever its batch size, as the form says. Python values come as a list, one a row."""
    try:
        if form[0] == "tensorclass":
            kind = _imported(form[1], form[2])
            if kind is not None and is_tensor_collection(kind):
                return kind.from_tensordict(td)
            warnings.warn(
                f"rows are of tensorclass {form[1]}.{form[2]}, which this process has not imported: they come as a TensorDict",
                stacklevel=3,
            )
            return td
        return _join(form, td, ())
    except (IndexError, TypeError, KeyError, AttributeError) as e:
        raise BufferFormatError(f"the form of the rows, {form!r}, cannot be used: {e!r}") from None


def _join(form: Form, td: TensorDictBase, key: Key) -> Any:
    kind = form[0]
    if kind in ("tensor", "array", "value"):
        leaf = td.get(key or ROOT, None)
        if leaf is None:
            raise KeyError(show_key(key or ROOT))
        if kind == "value":
            return leaf.tolist()
        return leaf.numpy() if kind == "array" else leaf
    if kind == "dict":
        return {name: _join(f, td, (*key, str(name))) for name, f in zip(form[1], form[2], strict=True)}
    if kind == "namedtuple":
        _, module, name, fields, forms = form
        parts = [_join(f, td, (*key, field)) for field, f in zip(fields, forms, strict=True)]
        made = _imported(module, name)
        if made is not None and issubclass(made, tuple) and list(getattr(made, "_fields", ())) == fields:
            return tuple.__new__(made, parts)
        warnings.warn(
            f"rows are of namedtuple {module}.{name}, which this process has not imported: they come as a dict",
            stacklevel=4,
        )
        return dict(zip(fields, parts, strict=True))
    if kind not in ("list", "tuple"):
        raise KeyError(kind)
    parts = [_join(f, td, (*key, str(i))) for i, f in enumerate(form[1])]
    return parts if kind == "list" else tuple(parts)
