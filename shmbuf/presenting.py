"""The last step of a read: Python values out of their bytes, and rows in the form in which they were put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from shmbuf.forms import put_together
from shmbuf.packed import decode, pack
from shmbuf.schema import PACKED, Key, Schema, show_key


def pack_all(key: Key, values: Sequence[Any]) -> list[bytes]:
    return [pack(v, f"key {show_key(key)}, row {i}") for i, v in enumerate(values)]


def values_of(column: torch.Tensor) -> Any:
    """uint8[*batch, max_bytes] → a NonTensorStack of shape batch; of no batch dimension: NonTensorData."""
    batch = column.shape[:-1]
    values = decode(np.asarray(column.cpu().reshape(-1, column.shape[-1])))
    if not batch:
        return NonTensorData(values[0])
    each = [NonTensorData(v) for v in values]
    for size in reversed(batch[1:]):
        each = [NonTensorStack(*each[i : i + size]) for i in range(0, len(each), size)]
    return NonTensorStack(*each) if each else NonTensorData(None, batch_size=batch)


class Presenting:
    """What it does to a batch follows from the schema."""

    def __init__(self, form: list | None, packed: list[Key], keys: tuple[Key, ...]):
        self._form, self._packed, self._keys = form, packed, keys

    @classmethod
    def of(cls, schema: Schema) -> Presenting | None:
        """None: rows are tensors in TensorDicts, there is nothing to do."""
        packed = [c.key for c in schema.columns if c.dtype == PACKED]
        return cls(schema.form, packed, schema.keys) if packed or schema.form is not None else None

    def values(self, td: TensorDictBase) -> TensorDictBase:
        """Python values in place of their bytes, in ``td`` itself."""
        for key in self._packed:
            td.set(key, values_of(td.get(key)))
        return td

    def __call__(self, td: TensorDictBase) -> Any:
        td = self.values(td)
        if self._form is None:
            return td
        if self._form[0] == "tensorclass":  # which has no room for what the sampler says of its rows
            td = td.select(*self._keys)
        return put_together(self._form, td)
