"""A caller's tensors that a sample is written into."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuf._extension import native
from shmbuf.errors import SchemaError
from shmbuf.on_device import OnDevice
from shmbuf.schema import Key, Schema, show_key
from shmbuf.tensors import tensor_leaves

NUMBERS: tuple[Key, Key] = (("row_id",), ("index",))


class Outs:
    """What a `ShmStorage` does with ``out=``."""

    schema: Any
    _on: OnDevice | None
    _later: bool
    _look_again: Callable[..., None]
    _out_schema: Schema
    _out_columns: Any

    @staticmethod
    def _copy_into(out: TensorDictBase, td: TensorDictBase) -> TensorDictBase:
        """Into the first rows of out, if they are fewer."""
        try:
            shorter = out.batch_dims == 1 and len(td) < len(out)
            return (out[: len(td)] if shorter else out).update_(td)
        except (KeyError, RuntimeError) as e:
            raise SchemaError(f"out does not fit a sample: {e}") from None

    def require_out(self, out: TensorDictBase, n: int, more: Mapping[Key, tuple[int, ...]]) -> None:
        """Before rows are claimed for it, which would be lost: whether out has room for n rows and further entries of these
        shapes. Raises SchemaError."""
        if tuple(out.batch_size) != (n,):
            raise SchemaError(f"out has batch size {list(out.batch_size)}, the sample has [{n}]")
        leaves = tensor_leaves(out)
        for key, shape in {
            **{c.key: c.shape for c in self.schema().columns},
            **dict.fromkeys(NUMBERS, ()),
            **more,
        }.items():
            t = leaves.get(key)
            if t is None or tuple(t.shape[1:]) != shape:
                got = "nothing" if t is None else f"shape {list(t.shape)}"
                raise SchemaError(f"out, key {show_key(key)}: got {got}, expected shape {[n, *shape]}")

    def _into(self, out: TensorDictBase, n: int) -> list[int]:
        """The addresses of a caller's tensors, checked; index and row_id are added to out if they are missing."""
        if tuple(out.batch_size) != (n,):
            raise SchemaError(f"out has batch size {list(out.batch_size)}, the sample has [{n}]")
        if self._later:
            self._look_again()
        host = self._on is None
        where = torch.device("cpu") if self._on is None else self._on.device
        addresses = native.addresses_in(self._out_columns, out, n) if host and type(out) is TensorDict else None
        if addresses is not None:
            return addresses
        leaves = tensor_leaves(out)
        added: dict[Key, torch.Tensor] = {
            k: torch.empty(n, dtype=torch.int64, device=where) for k in NUMBERS if k not in leaves
        }
        leaves.update(added)
        for c in self._out_schema.columns:
            t, key = leaves.get(c.key), show_key(c.key)
            if t is None or (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) != (c.dtype, c.shape):
                got = "nothing" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}"
                raise SchemaError(f"out, key {key}: got {got}, expected {c}")
            there = t.device == where or (t.device.type == "cpu" and c.key in NUMBERS)  # which the host knows
            plain = t.layout == torch.strided and there and t.is_contiguous()
            if not plain or t.is_neg() or t.is_conj() or (t.numel() and not t.data_ptr()):
                raise SchemaError(
                    f"out, key {key}: has to be a plain contiguous {'CPU' if where.type == 'cpu' else where} tensor to be written into"
                )
        spans = sorted((leaves[c.key].data_ptr(), n * c.nbytes, show_key(c.key)) for c in self._out_schema.columns)
        for (start, nbytes, key), (following, _, other) in itertools.pairwise(spans):
            if nbytes and start + nbytes > following:
                raise SchemaError(f"out, keys {key} and {other}: their tensors share memory")
        for k, t in added.items():
            out.set(k[0], t)
        return [leaves[c.key].data_ptr() for c in self._out_schema.columns]
