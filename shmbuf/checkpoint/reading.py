"""A checkpoint directory, checked whole before anybody uses it: TorchRL's files, and the sidecar if it has one. Runs no code from it."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from shmbuf.checkpoint import layout
from shmbuf.checkpoint.directories import place_of
from shmbuf.checkpoint.layout import Root, Stored, number
from shmbuf.errors import CheckpointError, SchemaError
from shmbuf.schema import Column, Schema, as_key, show_key

CHUNK = 1 << 30


class Checkpoint:
    """What a directory holds. Rows are numbered 0 to ``rows`` − 1, oldest first.

    Attributes:
        columns, capacity, rows, first_slot: where they lie in the files.
        state: the sidecar; None: TorchRL wrote it.
        first_id, write_count, streams, heads, priorities, formula (alpha, eps), new_row (what a new row gets).
        ignored: files that are there and are not read.
    """

    def __init__(self, path: str | os.PathLike):
        self.root = Root(place_of(path))
        self.path = self.root.path
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.root.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} is damaged: {text}")

    def _read(self) -> None:
        root = self.root
        storage = root.json("storage/storage_metadata.json")
        if storage.get("is_pytree"):
            raise CheckpointError(f"{self.path} holds a pytree of tensors; only TensorDicts can be loaded")
        self.columns, self.capacity = layout.stored_columns(root)
        layout.check_files(root, self.columns, self.capacity)
        self.rows = number("storage_metadata.json: len", storage.get("len"), 0, self.capacity)
        writer = root.json("writer/metadata.json")
        cursor = number("writer: cursor", writer.get("cursor", 0), 0, self.capacity)
        self.write_count = number("writer: write_count", writer.get("write_count", self.rows), 0, layout.MAX_ID)
        self.first_slot = cursor % self.capacity if self.rows == self.capacity else 0
        self.buffer = root.json("buffer_metadata.json") if root.has("buffer_metadata.json") else {}
        self.ignored = (
            ["prefetch.pkl (a pickle: batches that had been drawn ahead)"] if root.has("prefetch.pkl") else []
        )
        self.state = root.json("shmbuf/state.json") if root.has("shmbuf/state.json") else None
        self.form: list[Any] | None = None
        self.inner: tuple[int, ...] = ()
        self.first_id: int | None = None
        self.streams: np.ndarray | None = None
        self.heads: np.ndarray | None = None
        self.priorities: np.ndarray | None = None
        self.formula: tuple[float, float] | None = None
        self.new_row: float | None = None
        if self.state is not None:
            self._read_state(self.state)
        if root.has("sampler/sampler_metadata.json"):
            self._read_priorities(root.json("sampler/sampler_metadata.json"))

    def _read_state(self, state: dict[str, Any]) -> None:
        version = number("shmbuf/state.json: version", state.get("version"))
        if version != layout.VERSION:
            raise CheckpointError(
                f"{self.path}: its shmbuf/state.json is of version {version}, this shmbuf reads {layout.VERSION}"
            )
        if number("state.json: capacity", state.get("capacity"), 1) != self.capacity or state.get("rows") != self.rows:
            raise self._fault(
                f"state.json speaks of {state.get('rows')!r} of {state.get('capacity')!r} rows, storage/ of {self.rows:,} "
                f"of {self.capacity:,}"
            )
        self.first_id = number("state.json: first_id", state.get("first_id"), 0, layout.MAX_ID - self.rows)
        self.first_slot = number("state.json: first_slot", state.get("first_slot"), 0, self.capacity - 1)
        if self.first_slot and self.rows < self.capacity:
            raise self._fault(
                f"first_slot is {self.first_slot:,}, but only {self.rows:,} of {self.capacity:,} rows are there"
            )
        self.write_count = number("state.json: write_count", state.get("write_count"), 0, layout.MAX_ID)
        self._check_limiter(state.get("limiter"))
        self._check_epochs(state.get("epochs"))
        if not state.get("hooked"):
            self._own_columns(state.get("columns"))
        if state.get("has_streams"):
            self.streams = streams = self._array("streams", np.int64, self.rows)
            n = int(streams.max()) + 1 if self.rows else 0
            if self.rows and not 0 <= int(streams.min()) <= n <= self.rows:
                raise self._fault("shmbuf/streams.memmap numbers trajectories that cannot be")
            self.heads = heads = self._array(
                "heads", np.int64, number("state.json: heads", state.get("heads"), 0, self.rows)
            )
            if len(heads) and not 0 <= int(heads.min()) <= int(heads.max()) < n:
                raise self._fault("shmbuf/heads.memmap names trajectories that are not there")

    def _check_limiter(self, limiter: Any) -> None:
        if limiter is None:
            return
        if not isinstance(limiter, dict):
            raise self._fault(f"state.json: limiter = {str(limiter)[:80]}")
        for k in ("num", "den"):
            number(f"state.json: limiter: {k}", limiter.get(k), 1, 1 << 32)
        number("state.json: limiter: inserted", limiter.get("inserted"), 0, layout.MAX_ID)
        diff = limiter.get("diff")
        if isinstance(diff, bool) or not isinstance(diff, (int, float)) or not abs(diff) < 1 << 61:
            raise self._fault(f"state.json: limiter: diff = {str(diff)[:80]}: a number below 2^61")

    def _check_epochs(self, epochs: Any) -> None:
        if epochs is None:
            return
        own, shared = (epochs.get(k) or {} for k in ("own", "shared")) if isinstance(epochs, dict) else (None, None)
        if not isinstance(own, dict) or not isinstance(shared, dict):
            raise self._fault(f"state.json: epochs = {str(epochs)[:80]}")
        for word in (*shared.values(), *([own.get("word")] if own else [])):
            if (
                not isinstance(word, list)
                or len(word) != 2
                or not all(type(w) is int and 0 <= w < 1 << 64 for w in word)
            ):
                raise self._fault(f"state.json: epochs: {str(word)[:80]} is no pair of whole numbers below 2^64")
        if own and not (
            type(own.get("order")) is int and 0 <= own["order"] < 1 << 64 and type(own.get("fresh")) is bool
        ):
            raise self._fault(
                f"state.json: epochs: own: order {str(own.get('order'))[:80]}, fresh {own.get('fresh')!r}"
            )

    def _own_columns(self, described: Any) -> None:
        """The sidecar knows keys that cannot be names of files, and the order of columns."""
        try:
            mine = [
                Stored(
                    Column(
                        as_key(c["key"]), str(c["dtype"]), tuple(number("shape", d, 0, 1 << 30) for d in c["shape"])
                    ),
                    layout.column_path(as_key(c["file"])),
                )
                for c in described
            ]
            form, inner = (self.state or {}).get("form"), tuple((self.state or {}).get("inner") or ())
            if not isinstance(form, (list, type(None))) or any(type(d) is not int or not 0 < d < 2**31 for d in inner):
                raise ValueError(f"form {form!r}, inner {inner!r}")
            Schema([c.column for c in mine], form, inner)
        except (TypeError, KeyError, ValueError, OverflowError, AttributeError, SchemaError) as e:
            raise self._fault(f"the columns in shmbuf/state.json: {e!r}") from None
        files = {c.file: (c.column.dtype, c.column.shape) for c in self.columns}
        if {c.file: (layout.plain_dtype(c.column.dtype), c.column.shape) for c in mine} != files:
            raise self._fault("shmbuf/state.json and storage/meta.json describe different columns")
        self.columns, self.form, self.inner = mine, form, inner

    def _read_priorities(self, meta: dict[str, Any]) -> None:
        alpha, eps = (self._real(f"sampler: {k}", meta.get(k)) for k in ("_alpha", "_eps"))
        self.formula = (alpha, eps)
        top = meta.get("_max_priority")
        if isinstance(top, list) and top and isinstance(top[0], (int, float)) and 0 <= top[0] <= sys.float_info.max:
            self.new_row = float(top[0])
        if self.state is not None and self.state.get("priorities"):
            p = self._array("priorities", np.float64, self.rows)
        else:
            leaves = self._file("sampler/sumtree.memmap", np.float64, self.capacity)
            leaves = np.roll(leaves, -self.first_slot)[: self.rows]
            if not (np.isfinite(leaves) & (leaves >= 0)).all():
                raise self._fault("sampler/sumtree.memmap holds a NaN, an infinite or a negative priority")
            with np.errstate(all="ignore"):
                p = np.maximum(np.power(leaves, 1 / alpha) - eps, 0) if alpha else np.ones(self.rows)
        none = np.isnan(p)
        if not (none | ((p >= 0) & (p < np.inf))).all():
            raise self._fault("its priorities are not finite numbers ≥ 0")
        p[none] = 1.0
        self.priorities = p

    def _real(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise self._fault(f"{where} = {value!r}")
        return float(value)

    def _array(self, name: str, dtype: type, n: int) -> np.ndarray:
        return self._file(f"shmbuf/{name}.memmap", dtype, n)

    def _file(self, name: str, dtype: type, n: int) -> np.ndarray:
        nbytes = n * np.dtype(dtype).itemsize
        fd = self.root.sized(name, nbytes)
        try:
            out: np.ndarray = np.empty(n, dtype)
            self._fill(fd, out.view(np.uint8), 0, name)
            return out
        finally:
            os.close(fd)

    def _fill(self, fd: int, out: np.ndarray, at: int, name: str) -> None:
        view = memoryview(out.reshape(-1))  # type: ignore[arg-type]
        while view:
            n = os.preadv(fd, [view[:CHUNK]], at)
            if n <= 0:
                raise self._fault(f"{name} ends early")
            view, at = view[n:], at + n

    # ---- rows ---------------------------------------------------------------------------------------------------

    def schema(self) -> Schema:
        try:
            return Schema([c.column for c in self.columns], self.form, self.inner)
        except SchemaError as e:
            raise self._fault(str(e)) from None

    def opened(self, schema: Schema) -> Files:
        return Files(self, schema)

    def tensordict(self) -> Any:
        """All of it as a TensorDict of the whole capacity, mapped copy-on-write. For hooks."""
        import torch
        from tensordict import TensorDict

        leaves: dict[Any, Any] = {}
        for c in self.columns:
            fd = self.root.sized(f"storage/{c.file}", self.capacity * c.column.nbytes)
            shape = (self.capacity, *c.column.shape)
            with open(fd, "rb") as f:
                mapped = (
                    np.memmap(f, c.column.numpy, "c", shape=shape)
                    if c.column.nbytes
                    else np.empty(shape, c.column.numpy)
                )
            t = torch.from_numpy(np.asarray(mapped))
            leaves[c.column.key] = t.view(getattr(torch, c.column.dtype)) if c.column.dtype != c.column.numpy else t
        return TensorDict(leaves, batch_size=[self.capacity])


class Files:
    """The open files of a schema's columns."""

    def __init__(self, of: Checkpoint, schema: Schema):
        self._of, self._schema = of, schema
        where = {c.column.key: c.file for c in of.columns}
        self._names = [where[c.key] for c in schema.columns]
        self._fds: list[int] = []
        self._into: list[np.ndarray] = []
        try:
            for name, c in zip(self._names, schema.columns, strict=True):
                self._fds.append(of.root.sized(f"storage/{name}", of.capacity * c.nbytes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def rows(self, at: int, n: int) -> list[np.ndarray]:
        """Rows [at, at + n) as arrays [n, *shape], in the order of columns; the next call writes over them."""
        if not self._into or len(self._into[0]) < n:
            self._into = [np.empty((n, *c.shape), c.numpy) for c in self._schema.columns]
        out = [a[:n] for a in self._into]
        slot = (self._of.first_slot + at) % self._of.capacity
        first = min(n, self._of.capacity - slot)
        for a, name, fd, c in zip(out, self._names, self._fds, self._schema.columns, strict=True):
            if c.nbytes:
                flat = a.reshape(-1).view(np.uint8)
                self._of._fill(fd, flat[: first * c.nbytes], slot * c.nbytes, name)
                if first < n:
                    self._of._fill(fd, flat[first * c.nbytes :], 0, name)
        return out


class Made:
    """The same of a TensorDict that hooks made."""

    def __init__(self, of: Checkpoint, schema: Schema, leaves: dict[tuple[str, ...], Any]):
        import torch

        missing = [show_key(k) for k in schema.keys if k not in leaves]
        if missing:
            raise CheckpointError(f"load hooks gave no {', '.join(missing)}")
        self._of = of
        self._leaves = []
        for c in schema.columns:
            t = leaves[c.key].contiguous()
            raw = t.view(getattr(torch, c.numpy)) if c.dtype != c.numpy else t
            self._leaves.append(raw.numpy())

    def close(self) -> None:
        self._leaves = []

    def rows(self, at: int, n: int) -> list[np.ndarray]:
        slots = (self._of.first_slot + np.arange(at, at + n)) % self._of.capacity
        return [np.ascontiguousarray(a[slots]) for a in self._leaves]
