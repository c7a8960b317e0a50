"""Whether a step will fit the rows that are stored: said when it is added, by what the default functions will make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shmbuf.errors import SchemaError
from shmbuf.rlightning.chain import FLOATS, fits, places
from shmbuf.rlightning.leaves import OWN
from shmbuf.schema import Key, Schema, show_key

Kind = tuple[str, tuple[int, ...]]  # dtype and shape
_FLAGS: dict[Key, str] = {(k,): "bool" for k in ("terminated", "truncated")}
_PLAIN = {bool: "bool", int: "int64", float: "float32"}  # as torch has them


class Stored:
    """What rows are made of, as far as it is decided."""

    def __init__(self, schema: Callable[[], Schema | None] = lambda: None):
        self._schema = schema
        self._of: Schema | None = None
        self._scalars: dict[Key, str] = _FLAGS
        self._fitted: tuple[Any, ...] = ()  # what was found to fit
        self._ask: list[tuple[Key, str]] = []  # of its numbers those whose value matters

    def now(self) -> Schema | None:
        if self._of is None and (found := self._schema()) is not None:
            self._of = found
            self._scalars = {c.key: c.dtype for c in found.columns if not c.shape}
        return self._of

    def scalars(self) -> Mapping[Key, str]:
        """Of which dtype numbers become under each key, where that is decided: flags are bool."""
        self.now()
        return self._scalars

    def require(self, kinds: Mapping[Key, Kind], numbers: Mapping[Key, Any], silent: tuple[str, ...] = ()) -> None:
        """SchemaError: what a step has, by its own keys, is not what rows have. silent: keys that the first step leaves open."""
        schema, scalars, lines = self.now(), self.scalars(), []
        looked = (schema, kinds, silent, {key: type(value) for key, value in numbers.items()})
        if looked == self._fitted and all(fits(numbers[key], dtype) for key, dtype in self._ask):
            return
        places_of = {key: [(name, *key[1:]) for name, _ in places(key[0])] for key in (*kinds, *numbers)}
        dtypes: dict[Key, str] = {}
        for key, value in numbers.items():
            usual = (
                value.dtype.name
                if isinstance(value, np.generic)
                else next(d for t, d in _PLAIN.items() if isinstance(value, t))
            )
            for place in places_of[key]:
                dtypes[place] = dtype = scalars.get(place, usual)
                if not fits(value, dtype):
                    lines.append(f"key {show_key(key)}: got the {type(value).__name__} {value!r}, expected {dtype}")
        got = {place: kind for key, kind in kinds.items() for place in places_of[key]}
        got.update((place, (dtype, ())) for place, dtype in dtypes.items())
        names = {name for key in silent for name, _ in places(key)}
        if any(key[0] == OWN for key in got) or OWN in names:
            lines.append(f"key {OWN!r} is where the storage keeps its own numbers; name it otherwise")
        if schema is not None:
            lines += [f"key {name!r} is not in the schema" for name in sorted(names - {key[0] for key in schema.keys})]
            got = {k: v for k, v in got.items() if k[0] not in names and k[0] != OWN}
            got.update((c.key, (c.dtype, c.shape)) for c in schema.columns if c.key[0] in names or c.key[0] == OWN)
            lines += schema.differences(got)
        if lines:
            what = "rows" if schema is None else "the rows that are stored"
            raise SchemaError(f"a step does not fit {what}; nothing was taken:\n  " + "\n  ".join(dict.fromkeys(lines)))
        self._fitted = looked
        self._ask = [
            (key, dtypes[place])
            for key, value in numbers.items()
            for place in places_of[key]
            if not isinstance(value, bool) and not (isinstance(value, float) and dtypes[place] in FLOATS)
        ]
