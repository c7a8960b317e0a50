"""`ShmStorage`: TorchRL's place for a storage, in tensordict terms over a `Buffer`. torch first appears on this floor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shmbuf import devices
from shmbuf._extension import native
from shmbuf.buffer import Buffer
from shmbuf.errors import Lapped, SchemaError
from shmbuf.forms import Rows, show, take_items
from shmbuf.gathering import Gathering
from shmbuf.lanes import Cells, cells, check_inner, checked_lanes
from shmbuf.on_device import OnDevice, Placed
from shmbuf.outs import NUMBERS, Outs
from shmbuf.packed import bound_of, fill
from shmbuf.presenting import Presenting, pack_all, values_of
from shmbuf.reading import address_of
from shmbuf.schema import PACKED, Column, Key, Schema, flatten, same_form, show_key
from shmbuf.tensors import make_tensordict, plain, slots_at, stack, tensor_leaves, tree_of
from shmbuf.ticket import Ticket, left_of, seconds_of

__all__ = ["Gathering", "ShmStorage", "stack"]

_ADDED = frozenset(
    {("index",), ("row_id",), ("priority_weight",)}
)  # what sample() adds, so that a sample can be stored again
# How the core asks tensors where torch has it: four times as fast.
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_ADDRESS = torch.Tensor.data_ptr


def _check_names(schema: Schema) -> None:
    for key in schema.keys:
        if len(key) > 1 and key[:1] in NUMBERS:
            raise SchemaError(
                f"key {show_key(key)}: {key[0]!r} is what samples call their own numbers; name it otherwise"
            )


def _schema_of(example: TensorDictBase | Mapping | list) -> Schema:
    form, lead, values = None, 0, {}
    if isinstance(example, list) and example:
        form, leaves, _ = take_items(example)
        lead, values = 1, {k: v for k, v in leaves.items() if not isinstance(v, torch.Tensor)}
    elif isinstance(example, TensorDictBase):
        lead = int(example.batch_dims > 0)
        leaves = tensor_leaves(example, others=values)
    elif isinstance(example, Mapping):
        leaves = flatten(example)
    else:
        raise SchemaError(
            f"example={example!r:.80}: a TensorDict, a mapping of arrays, or a list of rows that is not empty"
        )
    arrays = {k: v if isinstance(v, torch.Tensor) else np.asarray(v) for k, v in leaves.items() if k not in values}
    columns = [*Schema.from_leaves(arrays, lead).columns] if arrays else []
    columns += [Column(k, PACKED, (bound_of(pack_all(k, v if lead else [v])),)) for k, v in values.items()]
    return Schema(columns, form)


def _as_indices(ids: np.ndarray, capacity: int) -> torch.Tensor:
    return torch.from_numpy(ids % capacity)


def torch_dtype(c: Column) -> torch.dtype:
    dtype = torch.uint8 if c.dtype == PACKED else getattr(torch, c.dtype, None)
    if dtype is None:
        raise SchemaError(f"key {show_key(c.key)}: torch {torch.__version__} has no {c.dtype}")
    return dtype


def of_tensors(columns: Any, dtypes: list[torch.dtype]) -> Any:
    """Columns for the core, which then takes tensors of these dtypes."""
    columns.set_tensor_type(torch.Tensor)
    if _EXCHANGE is not None:
        columns.set_exchange(_EXCHANGE, [torch.empty(1, dtype=d) for d in dtypes])
    return columns


class ShmStorage(Outs, Cells, Placed):
    """Rows in shared memory, under a name.

    Args:
        max_size: capacity in rows.
        name: 1 to 100 characters of ``A-Za-z0-9._-``; None: unnamed, ends with the process that made it.
        schema: ``{key: (dtype, shape)}``; example: a TensorDict (one row, or a batch) or, for a `ReplayBuffer`, a list of rows as
            `extend` takes it (``["x" * 300]``: strings up to four times that long). With neither, the first `extend` or `put` of any process decides. A key of small Python values (None, bool, int, float, str, bytes, lists
            and dicts of them) is ``("msgpack", max_bytes)``; of first rows: the next power of two of 4 times the longest, at least 64.
        device: where the rows live: ``"cpu"``: in the segment; ``"cuda"``, ``"cuda:1"``, a torch.device or a GPU's UUID: in its memory, from which
            samples come without a copy on the host. Everything else stays in the segment.
        device_rings: how many processes put tensors of that device without a copy on the host at the same time; the others' go through
            the host.
        ndim: of the storage; with 2, rows are the cells of [time, lane], and `extend` takes [B, T]. ``len`` and ``write_count`` count cells
            (TorchRL's ``write_count`` counts time steps).
        batch_shape: the shape of a time step; max_size is rounded up to whole ones. Default: that of the first rows.
        trajectories, traj_key, end_keys (default: what the sampler says), and the others: see `Buffer.create`.

    The segment is made when a replay buffer takes the storage, or at the first use of :attr:`buffer`.
    """

    def __init__(
        self,
        max_size: int,
        *,
        name: str | None = None,
        schema: Mapping | Schema | None = None,
        example: TensorDictBase | Mapping | list | None = None,
        device: Any = "cpu",
        device_rings: int = 1,
        ndim: int = 1,
        batch_shape: int | tuple[int, ...] | None = None,
        max_collectors: int = 256,
        ring_bytes: int | None = None,
        full: str = "block",
        timeout: float | None = None,
        mode: int = 0o600,
        group: str | int | None = None,
        drain: str = "thread",
        exists: str = "error",
        trajectories: bool | None = None,
        traj_key: Any = None,
        end_keys: Any = None,
    ):
        self.ndim, self._inner, max_size = checked_lanes(ndim, batch_shape, max_size)
        if ndim > 1 and batch_shape is None and not (schema is None and example is None):
            raise ValueError(f"ndim={ndim} with a schema or an example: batch_shape= is needed, too")
        devices.parsed(device)
        self._make: dict[str, Any] = dict(
            name=name,
            capacity=max_size,
            schema=schema,
            example=example,
            max_collectors=max_collectors,
            mode=mode,
            ring_bytes=ring_bytes,
            full=full,
            timeout=timeout,
            group=group,
            drain=drain,
            exists=exists,
            device=device,
            device_rings=device_rings,
            **{"trajectories": trajectories, "traj_key": traj_key, "end_keys": end_keys},
        )
        self._buffer: Buffer | None = None
        self._ready: Schema | None = None
        self._direct = False  # rows may be what the core takes as it is
        self.presents: Presenting | None = None  # the last step of a sample, where rows are more than tensors
        self._templates: tuple[int, list[torch.Tensor]] = (-1, [])

    @classmethod
    def over(cls, buffer: Buffer) -> ShmStorage:
        """The storage of an attached buffer."""
        self = cls(buffer.capacity, name=buffer.name)
        self._buffer, said = buffer, buffer.config.get("dims") or {}
        self.ndim, self._inner = said.get("ndim", 1), tuple(said["inner"]) if said.get("inner") else None
        return self

    def suggest(self, settings: Mapping[str, Any]) -> None:
        """What the segment is made with where the constructor was not told."""
        if self._make["trajectories"] is not False:
            self._make.update({k: v for k, v in settings.items() if self._make[k] is None})

    def open(self, face: Mapping[str, Any]) -> Buffer:
        """Make the segment, if it is not made yet; ``face`` tells other processes how to rebuild the replay buffer."""
        if self._buffer is None:
            make = dict(self._make)
            example = make.pop("example")
            if example is not None:
                shown = _schema_of(example)
                if make["schema"] is not None:
                    given = make["schema"]
                    make["schema"] = given if isinstance(given, Schema) else Schema.from_spec(given)
                    make["schema"].require_same(shown, "the example")
                make["schema"] = make["schema"] or shown
            if make["schema"] is not None:
                given = make["schema"]
                make["schema"] = given if isinstance(given, Schema) else Schema.from_spec(given)
                _check_names(make["schema"])
                make["schema"] = Schema(make["schema"].columns, make["schema"].form, self._inner or ())
            dims = {"dims": {"ndim": self.ndim, "inner": self._inner}} if self.ndim > 1 else {}
            self._buffer = Buffer.create(**make, config={"face": dict(face), **dims})
            if (self._buffer.config.get("dims") or {}).get("ndim", 1) != self.ndim:
                self._buffer.close()
                raise SchemaError(f"buffer {self.name!r} exists with other dimensions than ndim={self.ndim}")
        return self._buffer

    @contextlib.contextmanager
    def opened(self, face: Mapping[str, Any]) -> Iterator[None]:
        """`open`, undone if the block raises: what was made by it is destroyed, what it found is left."""
        mine = self._buffer is None
        buffer = self.open(face)
        try:
            yield
        except BaseException:
            if mine:
                self._buffer = self._ready = self.presents = None
                self._direct = False
                if buffer.created:
                    buffer.destroy(force=True)
                else:
                    buffer.close()
            raise

    @property
    def buffer(self) -> Buffer:
        """The numpy-level handle under it."""
        return self._buffer if self._buffer is not None else self.open({})

    @property
    def name(self) -> str | None:
        return self._buffer.name if self._buffer is not None else self._make["name"]

    @property
    def max_size(self) -> int:
        return self._buffer.capacity if self._buffer is not None else self._make["capacity"]

    def __len__(self) -> int:
        return len(self.buffer)

    def _prepare(self, schema: Schema) -> None:
        check_inner(schema, self.ndim, self.max_size)
        place = self.buffer._place
        self._on = None if place.wish is None else OnDevice.of(self.buffer)
        self._later = place.wish is not None and self._on is None and self.buffer._handle.device_rows is None
        self._dtypes = [torch_dtype(c) for c in schema.columns]
        self._columns = of_tensors(schema.native(self._dtypes), self._dtypes)
        self._specs = [(c.shape, d) for c, d in zip(schema.columns, self._dtypes, strict=True)]
        self._tree, self._sample_tree = tree_of(schema.keys), tree_of((*schema.keys, *NUMBERS))
        self._weighted_tree = tree_of((*schema.keys, *NUMBERS, ("priority_weight",)))
        # A sample's "index" and "row_id" are always the slot and the id; stored columns of these names are not shown in it.
        self._shadowed = any(k in NUMBERS for k in schema.keys)
        if not self._shadowed:
            self._out_schema = Schema([*schema.columns, *(Column(k, "int64", ()) for k in NUMBERS)])
            dtypes = [*self._dtypes, torch.int64, torch.int64]
            self._out_columns = of_tensors(self._out_schema.native(dtypes), dtypes)
        self.presents = Presenting.of(schema)
        self._direct = self.presents is None and self.ndim == 1 and self._on is None
        self.one: dict[Any, Any] = {}  # by key, for edits
        self._ready = schema

    # ---- writing ------------------------------------------------------------------------------------------------

    def put(
        self,
        td: TensorDictBase,
        wake: bool = True,
        timeout: float | None = None,
        single: bool = False,
        priority_key: Key | None = None,
        stream: Any = None,
        priorities: Any = None,
        inner: tuple[int, ...] | None = None,
    ) -> Ticket:
        """Hand a batch of rows (single: one row without batch dimension) to this process's ring.

        The ticket's ``wait`` gives a LongTensor of indices. inner: the shape of a time step, of rows that are `cells`. timeout: None:
        the buffer's. Errors: see `Buffer.put`.
        """
        if self._direct and type(td) is TensorDict and stream is None and priorities is None:
            batch = td.batch_size
            if len(batch) == (0 if single else 1):
                ticket = self._buffer.submit(  # type: ignore[union-attr]
                    self._columns, td, -1 if single else batch[0], wake, timeout, True, _as_indices
                )
                if ticket is not None:
                    return ticket
        if self.ndim > 1:
            if inner is None:
                td, inner = cells(td, single, self.ndim, self.time_dim)
            return self._put_cells(td, inner, wake, timeout, priority_key, stream, priorities)
        if self._ready is None and timeout is None:
            timeout = self.buffer.config["timeout"]
        since = time.monotonic()
        first = self.buffer.schema is None  # then building it takes of the time
        leaves, n = self._convert(
            td, single, priority_key, timeout, lambda n, schema: self.buffer.extras(n, stream, priorities, schema)
        )
        timeout = left_of(timeout, since) if first else timeout
        if n == 0:
            ticket = self.buffer._nothing()
            ticket.convert = _as_indices
            return ticket
        extras = self.buffer.extras(1 if single else n, stream, priorities)
        return self._submit(leaves, n, wake, timeout, _as_indices, extras)

    def _submit(
        self, leaves: list[torch.Tensor], n: int, wake: bool, timeout: float | None, convert: Any, extras: Any
    ) -> Ticket:
        """Plain leaves in column order, of the host or all of the device. n: −1: one row, without a batch dimension."""
        if self._on is not None and leaves and self._on.holds(leaves[0]):
            ticket = self._on.put(self.buffer, self.schema(), leaves, abs(n), wake, timeout, convert, extras)
            if ticket is not None:
                return ticket
            leaves = [t.cpu() for t in leaves]
        ticket = self.buffer.submit(self._columns, leaves, n, wake, timeout, True, convert, extras)
        assert ticket is not None, "converted rows fit"
        return ticket

    def _convert(
        self,
        td: Any,
        single: bool,
        priority_key: Key | None,
        timeout: float | None,
        check: Callable[[int, Schema], object],
        inner: tuple[int, ...] = (),
    ) -> tuple[list[torch.Tensor], int]:
        """Whatever can be taken, plain; else a SchemaError with every difference."""
        if isinstance(td, Rows):
            return self._accept(dict(td.leaves), {}, td.form, td.n, priority_key, timeout, check, inner)
        if not isinstance(td, TensorDictBase) and not is_tensor_collection(td):
            raise SchemaError(f"rows are a TensorDict, not {type(td).__name__}")
        batch = tuple(td.batch_size)
        if len(batch) != (0 if single else 1):
            what = (
                "add() takes one row, batch size []"
                if single
                else "extend() and put() take a batch of rows, batch size [n]"
            )
            hint = (
                ("" if single or batch else " add() stores one row.")
                if len(batch) < 2
                else (
                    " To store every step as a row: td.reshape(-1); to store each of the "
                    f"{batch[0]} sequences as one row: td.batch_size = [{batch[0]}]; "
                    "to keep both dimensions: ShmStorage(ndim=2)."
                )
            )
            raise SchemaError(f"got batch size {list(batch)}: {what}.{hint} Nothing was stored.")
        values: dict[Key, Any] = {}
        leaves = tensor_leaves(td, others=values)
        return self._accept(leaves, values, None, -1 if single else batch[0], priority_key, timeout, check, inner)

    def _accept(
        self,
        leaves: dict[Key, Any],
        values: dict[Key, Any],
        form: list | None,
        n: int,
        priority_key: Key | None,
        timeout: float | None,
        check: Callable[[int, Schema], object],
        inner: tuple[int, ...] = (),
    ) -> tuple[list[torch.Tensor], int]:
        """Leaves (those that are Python values: one, or one a row) in column order, or a SchemaError with every difference."""
        single, schema = n < 0, self.buffer.schema
        if not leaves and not values and n == 0:
            return [], 0
        if form is not None:
            if own := [k for k in leaves if k[:1] in _ADDED]:
                raise SchemaError(
                    f"key {show_key(own[0])}: {own[0][0]!r} is what samples call their own numbers; name it otherwise"
                )
            values = {k: v for k, v in leaves.items() if not isinstance(v, torch.Tensor)}
            leaves = {k: v for k, v in leaves.items() if k not in values}
        if schema is not None and not same_form(form, schema.form):
            raise SchemaError(f"rows are {show(form)}, the buffer's are {show(schema.form)}. Nothing was stored.")
        known = set(schema.keys) if schema is not None else set()
        for key in [
            k for k in leaves if (k in _ADDED or (schema is not None and k == priority_key)) and k not in known
        ]:
            del leaves[key]
        on = self._on
        to = on.device if on is not None and any(map(on.holds, leaves.values())) else "cpu"
        leaves = {k: plain(k, t, to) for k, t in leaves.items()}
        columns = {c.key: c for c in schema.columns} if schema is not None else {}
        for key, value in values.items():
            if schema is not None and (key not in columns or columns[key].dtype != PACKED):
                one = value if single else next(iter(value), None)
                raise SchemaError(
                    f"key {show_key(key)}: non-tensor data ({type(one).__name__}) cannot be stored; the schema has "
                    f"{columns.get(key, 'no such key')}"
                )
        packed = {k: pack_all(k, [v] if single else v) for k, v in values.items()}
        lead = 0 if single else 1
        if schema is None:
            if n == 0:
                return [], 0
            made = [*Schema.from_leaves(leaves, lead).columns] if leaves else []
            made += [Column(k, PACKED, (bound_of(v),)) for k, v in packed.items()]
            _check_names(found := Schema(made, form, inner))
            check(1 if single else n, found)  # what is refused must not fix the schema
            self.buffer._build(found, "the first rows", timeout)
            schema = self.buffer.schema
            assert schema is not None
        got = {k: (str(t.dtype).removeprefix("torch."), tuple(t.shape[lead:])) for k, t in leaves.items()}
        columns = {c.key: c for c in schema.columns}
        got.update({k: (PACKED, columns[k].shape if k in columns else ()) for k in packed})
        lines = schema.differences(got)
        if lines:
            raise SchemaError("rows do not fit the buffer's schema; nothing was stored:\n  " + "\n  ".join(lines))
        if self._ready is not schema:
            self._prepare(schema)
        for k, each in packed.items():
            filled = torch.from_numpy(fill(each, columns[k].shape[0], f"key {show_key(k)}")).to(to)
            leaves[k] = filled[0] if single else filled
        return [leaves[k] for k in schema.keys], n

    # ---- reading ------------------------------------------------------------------------------------------------

    def schema(self) -> Schema:
        """The buffer's schema. Raises RuntimeError before the first rows."""
        schema = self._ready or self.buffer.schema
        if schema is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        if self._ready is not schema:
            self._prepare(schema)
        return schema

    def _fresh(self, n: int, pin: bool, weighted: bool = False) -> list[torch.Tensor]:
        """Uninitialised [n, *shape] tensors: the columns, then int64 row_id and index, which are the host's; weighted: and a float32."""
        numbers = [((), torch.int64), ((), torch.int64), ((), torch.float32)]
        if self._later:
            self._look_again()
        if self._on is not None:
            of_host = [torch.empty(n, dtype=d) for _, d in (numbers if weighted else numbers[:2])]
            return [torch.empty((n, *s), dtype=d, device=self._on.device) for s, d in self._specs] + of_host
        if pin:
            specs = [*self._specs, *(numbers if weighted else numbers[:2])]
            return [torch.empty((n, *s), dtype=d, pin_memory=True) for s, d in specs]
        kept = self._templates  # threads may sample different sizes at once
        if kept[0] != n:  # empty_like of a kept tensor is the fastest way to a fresh one
            self._templates = kept = (n, [torch.empty((n, *s), dtype=d) for s, d in [*self._specs, *numbers]])
        fresh = kept[1] if weighted else kept[1][:-1]
        return [torch.empty_like(t) for t in fresh]

    def draw(
        self, n: int, *, out: TensorDictBase | None = None, timeout: float | None = 0.0, pin: bool = False
    ) -> TensorDictBase:
        """n rows drawn uniformly with replacement, with "index" (slot) and "row_id"; into ``out``'s tensors if given.
        timeout: seconds to wait for the first row; None: for ever.

        Raises NotEnoughRows, Lapped, SchemaError (of out).
        """
        if n < 0:
            raise ValueError(f"batch_size={n}: a number of rows ≥ 0")
        buffer = self.buffer
        if self._ready is None:
            timeout = buffer._wait_schema(timeout)
            self.schema()
        schema = self._ready
        assert schema is not None
        if out is not None and self._shadowed:
            return self._copy_into(out, self.draw(n, timeout=timeout))
        if out is None:
            leaves = self._fresh(n, pin)
            *columns, ids, slots = map(_ADDRESS, leaves)
        else:
            *columns, ids, slots = self._into(out, n)
        if self._on is None:
            buffer.draw_into(self._columns, columns, n, ids, slots, seconds_of(timeout))
        else:
            of = [(c.offset, c.nbytes, at) for c, at in zip(schema.columns, columns, strict=True)]
            numbers = np.empty((2, n), np.int64)  # the host's, wherever out has them
            where = [address_of(a) for a in numbers] if out is not None else [ids, slots]
            buffer._drawn("draw_device", (of, n, *where), n, seconds_of(timeout), self._on.stream())
            if out is not None:
                for key, a in zip(NUMBERS, numbers, strict=True):
                    out.get(key).copy_(torch.from_numpy(a))
        if out is not None:
            return out
        return make_tensordict(self._sample_tree, leaves, torch.Size((n,)))

    def draw_by_priority(
        self,
        n: int,
        *,
        beta: float,
        normalize: str = "buffer",
        stratified: bool = False,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        """As `draw`, by priority, with "priority_weight", float32[n]; see `Buffer.draw_by_priority`."""
        if n < 0:
            raise ValueError(f"batch_size={n}: a number of rows ≥ 0")
        buffer = self.buffer
        timeout = buffer._wait_schema(timeout)
        self.schema()
        leaves = self._fresh(n, pin, True)
        *columns, ids, slots, weights = map(_ADDRESS, leaves)
        seconds = seconds_of(timeout)
        if self._on is None:
            buffer.draw_by_priority_into(
                self._columns, columns, n, ids, slots, weights, beta, stratified, normalize, seconds
            )
        else:
            of = self._on.columns(self.schema(), leaves[:-3])
            args = (of, n, ids, slots, weights, beta, stratified, normalize == "batch")
            buffer._drawn("draw_by_priority_device", args, n, seconds, self._on.stream())
        td = make_tensordict(self._weighted_tree, leaves, torch.Size((n,)))
        return td if out is None else self._copy_into(out, td)

    def fetch(self, leaves: list[torch.Tensor], ids: np.ndarray, done: np.ndarray) -> int:
        """Copy the rows of int64[n] ids whose uint8[n] done is 0 into leaves that `_fresh` made, and set it where the row was there; returns
        how many are."""
        where = len(ids), address_of(ids), address_of(done)
        if self._on is None:
            return self.buffer._call("fetch", self._columns, [t.data_ptr() for t in leaves], *where)
        return self.buffer._call("gather_device", self._on.columns(self.schema(), leaves), *where, self._on.stream())

    def gathering(self, n: int, *, pin: bool = False) -> Gathering:
        """Room for n rows, to be filled by id. For samplers."""
        return Gathering(self, n, pin)

    def get(self, index: Any, swap: int = 0) -> Any:
        """``storage[index]``: physical indexing, copies. int → one row, slice, list, tensor, mask → rows, key → its column.

        Of more than one dimension: as a tensor of :attr:`shape` is indexed (swap: with its first dimension and this one exchanged).
        """
        got = self._get(index) if self.ndim == 1 else self._get_cells(index, swap)
        return got if self.presents is None or self._is_key(index) else self.presents(got)

    @staticmethod
    def _is_key(index: Any) -> bool:
        return isinstance(index, str) or (
            isinstance(index, tuple) and bool(index) and all(isinstance(p, str) for p in index)
        )

    def _get(self, index: Any) -> Any:
        schema = self.schema()
        if self._is_key(index):
            return self._column(schema, (index,) if isinstance(index, str) else index)
        if isinstance(index, slice) or index is Ellipsis:
            return self._clipped(slice(None) if index is Ellipsis else index, lambda slots: self._rows(schema, slots))
        size = len(self)
        slots = slots_at(index, size)
        rows = self._rows(schema, self._counted(slots.reshape(-1), size))
        return rows if slots.ndim == 1 else rows.reshape(slots.shape) if slots.ndim else rows[0]

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def _clipped(self, index: slice, read: Callable[[np.ndarray], Any]) -> Any:
        """read(slots) of a slice, which clips: also when the buffer is emptied between the look at its length and the copy."""
        for _ in range(100):
            try:
                return read(np.arange(*index.indices(len(self)), dtype=np.int64))
            except IndexError:
                continue
        raise Lapped("the buffer is being emptied faster than a slice of it can be read")

    @staticmethod
    def _counted(slots: np.ndarray, size: int) -> np.ndarray:
        """Negative ones from the end."""
        if slots.size and int(slots.min()) < -size:
            raise IndexError(f"index {int(slots.min())} is out of range: {size:,} rows are stored")
        return np.where(slots < 0, slots + size, slots)

    def _rows(self, schema: Schema, slots: np.ndarray) -> TensorDictBase:
        leaves = self._fresh(len(slots), False)[:-2]
        slots = np.ascontiguousarray(slots)
        self.buffer.fetch_slots(lambda ids, done: self.fetch(leaves, ids, done), slots)
        return make_tensordict(self._tree, leaves, torch.Size((len(slots),)))

    def _column(self, schema: Schema, key: Key) -> Any:
        chosen = [c for c in schema.columns if c.key[: len(key)] == key]
        if not chosen:
            raise KeyError(f"key {show_key(key)} is not in the schema: {', '.join(map(show_key, schema.keys))}")
        columns = native.Columns()
        for c in chosen:
            columns.add(c.offset, c.nbytes, list(c.shape), "", None)

        def read(slots: np.ndarray) -> tuple[int, list[torch.Tensor]]:
            leaves = [torch.empty((len(slots), *c.shape), dtype=torch_dtype(c)) for c in chosen]
            into = [t.data_ptr() for t in leaves]
            self.buffer.fetch_slots(lambda ids, done: self.buffer.fetch_some(columns, into, ids, done), slots)
            return len(slots), leaves if self._on is None else [t.to(self._on.device) for t in leaves]

        n, leaves = self._clipped(slice(None), read)
        leaves = [values_of(t) if c.dtype == PACKED else t for c, t in zip(chosen, leaves, strict=True)]
        if chosen[0].key == key:
            return leaves[0]
        return make_tensordict(tree_of(tuple(c.key[len(key) :] for c in chosen)), leaves, torch.Size((n,)))

    def __repr__(self) -> str:
        return (
            f"ShmStorage({self._buffer!r})"
            if self._buffer is not None
            else f"ShmStorage({self._make['name']!r}, {self.max_size:,} rows, not made yet)"
        )
