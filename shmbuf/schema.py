"""What a row is made of: leaf names, dtypes and shapes, where each lies in the row, and the check of incoming rows.

No torch here: a dtype is its torch name as a string. numpy has no bfloat16, complex32 or float8; at the numpy level these
columns are their raw bits (uint16, uint32, uint8), and those of Python values, ``("msgpack", max_bytes)``, are their bytes:
`shmbuf.packed.encode` and `decode`.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgpack

from shmbuf._extension import native
from shmbuf.errors import BufferFormatError, SchemaError

Key = tuple[str, ...]

MAX_COLUMNS, MAX_DIMS, MAX_KEY_BYTES, MAX_DEPTH, MAX_ROW_BYTES = 4096, 32, 1024, 32, 1 << 30


class DType(NamedTuple):
    bytes: int
    numpy: str  # the numpy dtype that holds it
    formats: str  # buffer-protocol codes of that dtype


_RAW = {
    "bfloat16": "uint16",
    "complex32": "uint32",
    **{f"float8_{f}": "uint8" for f in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
}
_FORMATS = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "uint32": "I",
    "int32": "i",
    "uint64": "L|Q",
    "int64": "l|q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "Zf",
    "complex128": "Zd",
}
_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
DTYPES: dict[str, DType] = {name: DType(_BYTES[name], name, f"|{f}|") for name, f in _FORMATS.items()}
DTYPES.update({name: DTYPES[raw]._replace(numpy=raw) for name, raw in _RAW.items()})
PACKED = "msgpack"  # one Python value a row, in at most shape[0] bytes: see `shmbuf.packed`
_STORED = {**DTYPES, PACKED: DTYPES["uint8"]}


def dtype_name(dtype: Any) -> str:
    """``torch.float32``, ``np.float32``, ``np.dtype("<f4")``, ``"float32"``, ``bool`` … → ``"float32"``.

    Raises:
        SchemaError: no dtype of fixed size that torch has.
    """
    if dtype is None:
        raise SchemaError("no dtype is given")
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype.__name__
    name = {
        "float": "float32" if not isinstance(dtype, type) else "float64",
        "double": "float64",
        "half": "float16",
        "int": "int64",
        "long": "int64",
        "bool_": "bool",
        "cfloat": "complex64",
        "cdouble": "complex128",
        "chalf": "complex32",
    }.get(name, name)
    if name not in DTYPES:
        import numpy as np

        with contextlib.suppress(TypeError, SyntaxError, ValueError):  # numpy reads text as a list of fields
            name = np.dtype(dtype).newbyteorder("=").name
    if name not in DTYPES:
        raise SchemaError(f"dtype {dtype!r} cannot be stored; a column is one of {', '.join(DTYPES)}")
    return name


def show_key(key: Key) -> str:
    """A key as its owner would write it: ``'obs'`` or ``('next', 'obs')``."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def as_key(key: Any) -> Key:
    """A str or a tuple of str as a tuple; anything else is a SchemaError."""
    parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (tuple, list)) else None
    if not parts or not all(isinstance(p, str) for p in parts):
        raise SchemaError(f"key {key!r} is no str and no tuple of str")
    try:
        size = sum(len(p.encode()) for p in parts)
    except UnicodeEncodeError:
        raise SchemaError(f"key {key!r} is not valid text (lone surrogates cannot be encoded)") from None
    if size > MAX_KEY_BYTES or len(parts) > MAX_DEPTH:
        raise SchemaError(
            f"key {show_key(parts)[:80]}… has {size} bytes in {len(parts)} parts; "
            f"at most {MAX_KEY_BYTES} bytes in {MAX_DEPTH} parts"
        )
    return parts


def flatten(tree: Mapping, prefix: Key = (), is_node=lambda v: isinstance(v, Mapping)) -> dict[Key, Any]:
    """``{"a": x, "next": {"b": y}}`` or ``{"a": x, ("next", "b"): y}`` → ``{("a",): x, ("next", "b"): y}``."""
    out: dict[Key, Any] = {}
    for k, v in tree.items():
        key = as_key(prefix + as_key(k))  # also bounds the depth of what holds itself
        for full, leaf in (flatten(v, key, is_node) if is_node(v) else {key: v}).items():
            if full in out:
                raise SchemaError(f"key {show_key(full)} is given twice")
            out[full] = leaf
    return out


def nest(keys: Iterable[Key], leaves: Iterable[Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`, nested."""
    out: dict[str, Any] = {}
    for key, leaf in zip(keys, leaves, strict=True):
        node = out
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = leaf
    return out


@dataclass(frozen=True)
class Column:
    key: Key
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # in the row

    @cached_property
    def nbytes(self) -> int:
        return _STORED[self.dtype].bytes * math.prod(self.shape)

    @property
    def numpy(self) -> str:
        return _STORED[self.dtype].numpy

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def same_form(a: Any, b: Any) -> bool:
    """Of rows beside TensorDicts; the keys of dicts in any order."""
    if not (isinstance(a, list) and isinstance(b, list)) or a[:1] != b[:1] or len(a) != len(b):
        return bool(a == b)
    if a[:1] == ["dict"] and len(a) == 3:
        x, y = (dict(zip(map(_name, form[1]), form[2], strict=False)) for form in (a, b))
        return x.keys() == y.keys() and all(same_form(x[k], y[k]) for k in x)
    return all(same_form(x, y) for x, y in zip(a, b, strict=True))


def _name(key: Any) -> tuple[bool, Any]:
    return isinstance(key, str), key


def core_columns(columns: Iterable[Column], dtypes: Sequence[Any] | None = None) -> Any:
    """Some columns, where they lie in the row, for the core; see `Schema.native`."""
    out = native.Columns()
    for i, c in enumerate(columns):
        out.add(c.offset, c.nbytes, list(c.shape), _STORED[c.dtype].formats, dtypes[i] if dtypes else None)
    return out


class Schema:
    """Columns and their places in the row.

    Args:
        columns: in the order in which they come back.
        form: what rows are where they are no TensorDicts: see `shmbuf.forms`.
        inner: the shape of a time step, where rows are cells of [time, *inner]: see `shmbuf.lanes`.

    Raises:
        SchemaError: no column, one key twice or inside another, a shape or a row that is too large.
    """

    def __init__(self, columns: Sequence[Column], form: list | None = None, inner: tuple[int, ...] = ()):
        self.form, self.inner = form, inner
        if not columns:
            raise SchemaError("a schema needs at least one column")
        if len(columns) > MAX_COLUMNS:
            raise SchemaError(f"{len(columns)} columns; at most {MAX_COLUMNS}")
        seen: set[Key] = set()
        for c in columns:
            if c.dtype not in _STORED:
                raise SchemaError(f"key {show_key(c.key)}: dtype {c.dtype!r} is unknown")
            as_key(c.key)
            if c.dtype == PACKED and (len(c.shape) != 1 or not c.shape[0]):
                raise SchemaError(
                    f'key {show_key(c.key)}: a column of values is ("msgpack", max_bytes), not {list(c.shape)}'
                )
            if len(c.shape) > MAX_DIMS:
                raise SchemaError(f"key {show_key(c.key)}: {len(c.shape)} dimensions; at most {MAX_DIMS}")
            if any(not isinstance(d, int) or not 0 <= d <= MAX_ROW_BYTES for d in c.shape):
                raise SchemaError(f"key {show_key(c.key)}: shape {c.shape}: dimensions are 0 to {MAX_ROW_BYTES:,}")
            if c.key in seen:
                raise SchemaError(f"key {show_key(c.key)} is given twice")
            seen.add(c.key)
        for key in seen:
            for depth in range(1, len(key)):
                if key[:depth] in seen:
                    raise SchemaError(f"key {show_key(key[:depth])} is a column and also holds {show_key(key)}")
        # Widest alignment first: no padding between columns. Their order in self.columns stays the caller's.
        place, offsets = 0, {}
        for c in sorted(columns, key=lambda c: -min(8, _STORED[c.dtype].bytes)):
            offsets[c.key] = place
            place += c.nbytes
        if place > MAX_ROW_BYTES:
            raise SchemaError(f"a row has {place:,} bytes; at most {MAX_ROW_BYTES:,}")
        self.columns = tuple(Column(c.key, c.dtype, tuple(c.shape), offsets[c.key]) for c in columns)
        self.keys = tuple(c.key for c in self.columns)
        self.payload_bytes = place
        self.row_bytes = max(8, (place + 7) // 8 * 8)
        nodes: dict[Key, set[str]] = {(): set()}
        for key in self.keys:
            for depth in range(len(key)):
                nodes.setdefault(key[:depth], set()).add(key[depth])
        self.nodes = {path: len(names) for path, names in nodes.items()}  # how many entries each level of nesting has

    @classmethod
    def from_spec(cls, spec: Mapping) -> Schema:
        """From ``{key: (dtype, shape)}``, ``{key: dtype}`` for scalars, or nested mappings of these."""
        if not isinstance(spec, Mapping):
            raise SchemaError(f"a schema is a mapping of key to (dtype, shape), not {type(spec).__name__}")
        columns = []
        for key, value in flatten(spec).items():
            dtype, shape = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, ())
            try:
                if isinstance(shape, str):
                    raise TypeError("a shape is a tuple of int")
                shape = (shape,) if isinstance(shape, int) else tuple(operator.index(d) for d in shape)
                columns.append(Column(key, PACKED if dtype == PACKED else dtype_name(dtype), shape))
            except (TypeError, ValueError) as e:
                raise SchemaError(f"key {show_key(key)}: {value!r} is no (dtype, shape): {e}") from None
        return cls(columns)

    @classmethod
    def from_leaves(cls, leaves: Mapping[Key, Any], batch_dims: int) -> Schema:
        """From arrays or tensors by key, whose first ``batch_dims`` dimensions are not the row's."""
        columns = []
        for key, leaf in leaves.items():
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise SchemaError(
                    f"key {show_key(key)}: got {type(leaf).__name__}, expected an array or tensor; "
                    "non-tensor leaves cannot be stored"
                )
            try:
                columns.append(Column(key, dtype_name(leaf.dtype), tuple(int(d) for d in leaf.shape[batch_dims:])))
            except SchemaError as e:
                raise SchemaError(f"key {show_key(key)}: {e}") from None
        return cls(columns)

    def to_bytes(self) -> bytes:
        form: dict[str, Any] = {} if self.form is None else {"form": self.form}
        if self.inner:
            form["inner"] = list(self.inner)
        return msgpack.packb(
            {"columns": [[list(c.key), c.dtype, list(c.shape), c.offset] for c in self.columns], **form}
        )

    @classmethod
    def from_bytes(cls, blob: bytes) -> Schema:
        """Raises BufferFormatError if the bytes are no schema, or one laid out otherwise than this shmbuf would."""
        try:
            whole = msgpack.unpackb(blob)
            read, form = whole["columns"], whole.get("form")
            if not isinstance(form, (list, type(None))):
                raise ValueError(f"form {form!r}")
            inner = tuple(whole.get("inner", ()))
            if any(type(d) is not int or not 0 < d < 2**31 for d in inner):
                raise ValueError(f"inner {inner!r}")
            schema = cls([Column(as_key(k), d, tuple(s)) for k, d, s, _ in read], form, inner)
        except (SchemaError, ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as e:
            raise BufferFormatError(f"the segment's schema cannot be read: {e}") from None
        if [c.offset for c in schema.columns] != [o for *_, o in read]:
            raise BufferFormatError("the segment's columns are laid out as no version of shmbuf known here does")
        return schema

    def native(self, dtypes: Sequence[Any] | None = None) -> Any:
        """The columns for the core; ``dtypes`` are the torch dtypes by column, where tensors will come."""
        out = native.Columns()
        nodes = {path: i for i, path in enumerate(sorted(self.nodes, key=len))}  # parents first
        for path in nodes:
            out.add_node(nodes[path[:-1]] if path else 0, sys.intern(path[-1]) if path else "", self.nodes[path])
        for i, c in enumerate(self.columns):
            out.add(
                c.offset,
                c.nbytes,
                list(c.shape),
                _STORED[c.dtype].formats,
                dtypes[i] if dtypes else None,
                nodes[c.key[:-1]],
                sys.intern(c.key[-1]),
            )
        return out

    def differences(self, got: Mapping[Key, tuple[str, tuple[int, ...]]]) -> list[str]:
        """Every way in which leaves (dtype name, inner shape) differ from the schema, one line each."""
        out = []
        expected = {c.key: c for c in self.columns}
        missing = [k for k in self.keys if k not in got]
        extra = [k for k in got if k not in expected]
        for key in missing:
            near = [
                x for x in extra if x[-1].casefold().strip("_ ") == key[-1].casefold().strip("_ ") or x[-1] == key[-1]
            ]
            hint = f" (did you mean it by {show_key(near[0])}?)" if near else ""
            out.append(f"key {show_key(key)} is missing, expected {expected[key]}{hint}")
        out += [f"key {show_key(key)} is not in the schema, got {got[key][0]}{list(got[key][1])}" for key in extra]
        for key, c in expected.items():
            if key in got and got[key] != (c.dtype, c.shape):
                out.append(f"key {show_key(key)}: got {got[key][0]}{list(got[key][1])}, expected {c}")
        return out

    def require_same(self, other: Schema, whose: str) -> None:
        """Raises SchemaError listing the differences of ``other``."""
        lines = self.differences({c.key: (c.dtype, c.shape) for c in other.columns})
        if not same_form(self.form, other.form):
            lines.append(f"rows are of the form {other.form or 'TensorDict'}, expected {self.form or 'TensorDict'}")
        if self.inner != other.inner:
            lines.append(f"time steps are of shape {list(other.inner)}, expected {list(self.inner)}")
        if lines:
            raise SchemaError(f"{whose} does not fit the buffer's schema:\n  " + "\n  ".join(lines))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and (self.columns, self.form, self.inner) == (
            other.columns,
            other.form,
            other.inner,
        )

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{show_key(c.key)}: {c}' for c in self.columns)}; {self.row_bytes} B per row)"
