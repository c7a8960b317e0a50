"""TorchRL's own replay buffers over shared memory: a `torchrl.data.Storage`, and the writer and samplers that go with it.

>>> from torchrl.data import TensorDictReplayBuffer
>>> from shmbuf import PrioritizedSampler
>>> from shmbuf.integrations import TorchRLSampler, TorchRLStorage
>>> storage = TorchRLStorage(1_000_000, name="pong")
>>> sampler = TorchRLSampler(PrioritizedSampler(1_000_000, alpha=0.6, beta=0.4))
>>> rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=256)

Another process: ``TorchRLStorage.open("pong")`` in a replay buffer of its own, or ``shmbuf.attach("pong")``.
"""

from __future__ import annotations

import functools
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shmbuf.buffer import Buffer
from shmbuf.checkpoint import layout
from shmbuf.checkpoint.snapshot import copy_rows
from shmbuf.errors import SchemaError
from shmbuf.samplers import Sampler
from shmbuf.schema import Schema
from shmbuf.storage import ShmStorage
from shmbuf.tensors import as_numpy, plain, tensor_leaves

try:
    from torchrl.data import RoundRobinWriter, Storage, TensorDictRoundRobinWriter
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler as _Prioritized
    from torchrl.data.replay_buffers.samplers import Sampler as _Sampler
except ImportError as e:
    raise ImportError(f"shmbuf.integrations needs TorchRL: pip install 'shmbuf[torchrl]' ({e})") from e

__all__ = ["TorchRLSampler", "TorchRLStorage", "TorchRLWriter"]


def _as_it_is(batch: Any) -> Any:
    """Collates what is a batch already."""
    return batch


def _is_plain_writer(writer: Any) -> bool:
    """Whether a replay buffer would write by TorchRL's own round robin: nobody chose, its default, or one of the user's."""
    if isinstance(writer, functools.partial):
        writer = writer.func
    plain = (RoundRobinWriter, TensorDictRoundRobinWriter)
    return writer is None or writer in plain or (type(writer) in plain and not writer.tracks_generations)


class TorchRLStorage(Storage):
    """Rows of a TorchRL replay buffer in shared memory, under a name.

    A replay buffer made over it gets a `TorchRLWriter` in place of TorchRL's round-robin writers, which count slots in one process.
    What is read is a copy; a row read is whole, whoever writes.

    Args:
        max_size: rows, or a `ShmStorage`.
        options: of `ShmStorage`.
    """

    def __init__(self, max_size: int | ShmStorage, **options: Any):
        if isinstance(max_size, ShmStorage):
            if options:
                raise TypeError(f"{', '.join(options)}: give them to the ShmStorage")
            self.shm = max_size
        else:
            self.shm = ShmStorage(max_size, **options)
        super().__init__(self.shm.max_size)
        self.ndim, self.device = self.shm.ndim, self.shm.device
        self.shm._time_dim = 0  # TorchRL's buffers hand rows of several dimensions over with time first

    @classmethod
    def open(cls, name: str, **how: Any) -> TorchRLStorage:
        """The storage of a buffer that is there, by its name, in any process; keywords: see `Buffer.attach`."""
        return cls(ShmStorage.over(Buffer.attach(name, **how)))

    @property
    def buffer(self) -> Buffer:
        """The numpy-level handle under it."""
        return self.shm.buffer

    @property
    def name(self) -> str | None:
        return self.shm.name

    # ---- what TorchRL asks a storage ------------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Called by the replay buffer that is being made over it."""
        super().attach(buffer)
        if hasattr(buffer, "_init_writer") and _is_plain_writer(buffer._init_writer):
            buffer._init_writer = TorchRLWriter()
        if getattr(buffer, "_init_collate_fn", _as_it_is) is None:
            buffer._init_collate_fn = _as_it_is

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """New rows at the write head, or (set_cursor=False) new values for the rows at these slots.

        Raises:
            RuntimeError: another process has written since the writer chose its slots: use `TorchRLWriter`.
        """
        if not set_cursor:
            self._edit(cursor, data)
            return
        went = self._append(data, single=isinstance(cursor, int)).tolist()
        chosen = [cursor] if isinstance(cursor, int) else torch.as_tensor(cursor).tolist()
        if went != chosen:
            raise RuntimeError(
                f"rows were stored from index {went[0]} on, the writer had chosen {chosen[0]}: buffer {self.name!r} has other "
                "writers too. Give the replay buffer writer=TorchRLWriter()"
            )

    def _edit(self, index: Any, data: Any) -> None:
        slots = np.arange(len(self), dtype=np.int64)[
            index.cpu().numpy() if isinstance(index, torch.Tensor) else index
        ].reshape(-1)
        rows = data if data.batch_dims else data.unsqueeze(0)
        known = {*self.shm.schema().keys}
        leaves = {k: as_numpy(plain(k, t)) for k, t in tensor_leaves(rows).items() if k in known or k != ("index",)}
        self.buffer.edit(self.buffer.ids_of(slots), leaves)

    def _append(self, data: Any, single: bool, timeout: float | None = None) -> torch.Tensor:
        """The rows' indices, with their ids, so that a priority for them by this very tensor is theirs."""
        if not is_tensor_collection(data):
            raise SchemaError(
                f"rows are a TensorDict, not {type(data).__name__}; shmbuf.ReplayBuffer takes tensors and pytrees"
            )
        ticket = self.shm.put(data, False, timeout, single)
        index = ticket.wait(timeout)
        index._shmbuf_ids = ticket.ids()
        return index

    def get(self, index: Any) -> Any:
        """The rows at these slots, as copies; those that a `TorchRLSampler` has just drawn, as it drew them."""
        drawn = getattr(index, "_shmbuf_rows", None)
        if drawn is not None:
            return drawn
        return self.shm.get(index[0] if isinstance(index, tuple) and len(index) == 1 else index)

    def __len__(self) -> int:
        return len(self.shm)

    def __contains__(self, item: Any) -> bool:
        return bool(((torch.as_tensor(item) >= 0) & (torch.as_tensor(item) < len(self))).all())

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.max_size]) if self.ndim == 1 else self.shm.shape

    _total_shape = shape

    @property
    def _len_along_dim0(self) -> int:
        return len(self) // (self.shape[1:].numel() or 1)

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        return self.shape[0]

    @property
    def initialized(self) -> bool:
        """Whether the buffer has its schema."""
        return self.shm.buffer.schema is not None

    def _empty(self) -> None:
        self.buffer.empty()

    # Who wrote last may be another process: both are asked of the segment. Assigned to by TorchRL's base class.
    @property
    def _last_cursor_index(self) -> int | None:
        cursor = self._cursor()
        return (cursor - 1) % self.max_size if cursor else None

    @property
    def _last_cursor(self) -> int | None:
        return self._last_cursor_index

    @_last_cursor.setter
    def _last_cursor(self, value: Any) -> None:
        pass

    @property
    def _mutation_revision(self) -> int:
        """Moves with every write and edit, so that what TorchRL's samplers keep of the content is looked up anew."""
        return self._cursor() + self.buffer._call("counters")["edited_rows"]

    def _bump_mutation_revision(self) -> None:
        """TorchRL's buffer calls it after its `set_`, `set_at_` and `update_`, which have changed the copy that ``storage[:]`` gave."""
        raise NotImplementedError(
            f"what a TorchRLStorage gives are copies, so set_, set_at_ and update_ cannot change its rows; nothing was changed. Use "
            f"rb[index] = rows, or shmbuf.attach({self.name!r}).set_at_(key, value, index)"
        )

    def _cursor(self) -> int:
        return self.buffer._get("window")[2]

    def state_dict(self) -> dict[str, Any]:
        """The rows, oldest first, and the slot of the oldest. Taken while nobody else writes."""
        if not self.initialized:
            return {"_storage": None, "_len": 0, "_first": 0}
        rows, n, first = self.shm.get(slice(None)), len(self), 0
        if n == self.buffer.capacity:
            first = self.buffer.window[0] % n
            step = first // (self.shape[1:].numel() or 1)
            rows = torch.cat([rows[step:], rows[:step]])
        return {"_storage": rows.state_dict(), "_len": n, "_first": first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Rows of `state_dict`, in place of all that are stored: at their old slots, and as old among each other as they were."""
        kept = state_dict["_storage"]
        if kept is None or not state_dict["_len"]:
            self.buffer.empty()
            return
        rows: Any = TensorDict({}, []).load_state_dict(kept, strict=False)
        self._replace(rows, int(state_dict["_len"]), int(state_dict.get("_first", 0)))

    def _replace(self, rows: Any, n: int, first: int) -> None:
        """By n rows, the oldest first, which comes to slot ``first`` if they fill the buffer."""
        if n > self.buffer.capacity:
            raise ValueError(f"{n:,} rows do not fit the capacity of {self.buffer.capacity:,}. Nothing was changed")
        first = first if n == self.buffer.capacity else 0
        if self.buffer.schema is None and self.ndim == 1:
            leaves = {k: plain(k, t) for k, t in tensor_leaves(rows).items() if k != ("index",)}
            self.buffer._build(Schema.from_leaves(leaves, 1), "the rows", None)
        if self.buffer.schema is not None:
            self.buffer._restart(first, write_count=0)
        elif first:  # what lies in front is overwritten by the newest
            self._append(rows[: first // self.shape[1:].numel()], single=False)
        self._append(rows, single=False)

    def dumps(self, path: Any) -> None:
        """The rows into the directory ``path``, as TorchRL's storages lay them out; others may write meanwhile."""
        if not self.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if self.ndim > 1:
            raise NotImplementedError("a TorchRLStorage of several dimensions is saved by state_dict()")
        where, schema = Path(path), self.buffer.schema
        assert schema is not None
        if where.exists():
            shutil.rmtree(where)
        where.mkdir(parents=True)
        files = layout.file_keys(schema)
        layout.write_tensordict_meta(where, files, schema.columns, [self.buffer.capacity])
        copied = copy_rows(self.buffer, where, files, complete=False, timeout=60.0, tell=lambda *_: None)
        about = {"len": copied.end - copied.first, "first_slot": copied.first_slot}
        layout.write_json(where / "storage_metadata.json", {"metadata": {}, "is_pytree": False, **about})

    def loads(self, path: Any) -> None:
        """Rows of such a directory, of ours or of TorchRL's, in place of all that are stored: at their old slots, where they fill it."""
        where = Path(path)
        about = json.loads((where / "storage_metadata.json").read_text())
        n, first = int(about["len"]), about.get("first_slot")
        rows: Any = TensorDict.load_memmap(where)
        if first is None:  # TorchRL's writer says beside it
            writer = where.parent / "writer/metadata.json"
            full = n == len(rows) and writer.exists()
            first = int(json.loads(writer.read_text()).get("cursor", 0)) % n if full and n else 0
        rows = rows[:n] if n < len(rows) else torch.cat([rows[first:], rows[:first]])
        if n:
            self._replace(rows, n, first)
        else:
            self.buffer.empty()

    def __getstate__(self) -> dict[str, Any]:
        return {"shm": self.shm.buffer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(ShmStorage.over(state["shm"]))  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"TorchRLStorage({self.shm!r})"


class _Added(threading.local):
    """Of a thread: (index, id) of the row that it added last; None: it did something else with priorities since."""

    row: tuple[int, int] | None = None


_added = _Added()


class TorchRLWriter(RoundRobinWriter):
    """Appends rows to a `TorchRLStorage`, whoever else does; the indices it returns are those the rows were given."""

    def add(self, data: Any) -> int:
        stored = self._rows(data, single=True)
        index = int(stored[0])
        _added.row = index, stored._shmbuf_ids[0]  # type: ignore[attr-defined]
        self._mark_update_entities(index)
        return index

    def extend(self, data: Any) -> torch.Tensor:
        index = self._rows(data, single=False)
        self._mark_update_entities(index)
        return index

    def _rows(self, data: Any, single: bool) -> torch.Tensor:
        if not isinstance(self._storage, TorchRLStorage):
            raise TypeError(f"TorchRLWriter writes to a TorchRLStorage, not to a {type(self._storage).__name__}")
        return self._storage._append(data, single)

    def write_at(self, index: Any, data: Any) -> Any:
        self._storage.set(index, data, set_cursor=False)
        return index

    # Counted in the segment, for all processes.
    @property
    def _cursor(self) -> int:
        return self._storage._cursor() % self._storage.max_size if self._storage is not None else 0

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        pass

    @property
    def _write_count(self) -> int:
        return self._storage.buffer.write_count if self._storage is not None else 0

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        pass

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.buffer.empty(empty_write_count=empty_write_count)


class TorchRLSampler(_Sampler):
    """One of shmbuf's samplers for a TorchRL replay buffer over a `TorchRLStorage`.

    A batch is what the sampler copied when it drew it. The priorities that new rows carry are given to these rows, a moment after they can
    be drawn. Any other priority is given to the row that was drawn last at that index, if it is still there: of two batches under way, an index in both whose row was overwritten in between is that of the later one.
    """

    def __new__(cls, sampler: Sampler, **kw: Any) -> TorchRLSampler:
        keeps = hasattr(
            sampler, "reduction"
        )  # what TensorDictReplayBuffer.update_tensordict_priority asks for by isinstance
        return object.__new__(_PrioritizedTorchRLSampler if keeps else TorchRLSampler)

    def __init__(self, sampler: Sampler):
        if not isinstance(sampler, Sampler):
            raise TypeError(f"TorchRLSampler takes one of shmbuf's samplers, not {type(sampler).__name__}")
        self.sampler = sampler
        self._storage: TorchRLStorage | None = None
        self._ids = np.zeros(0, np.int64)  # row id + 1 of what was drawn last at each index

    def _prepared(self, storage: Any) -> TorchRLStorage:
        if not isinstance(storage, TorchRLStorage):
            raise TypeError(f"TorchRLSampler draws from a TorchRLStorage, not from a {type(storage).__name__}")
        if storage is not self._storage:
            self.sampler.check_capacity(storage.max_size)
            self.sampler.prepare(storage.shm)
            self._storage, self._ids = storage, np.zeros(storage.max_size, np.int64)
        return storage

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict]:
        buffer, shm = self._prepared(storage).buffer, storage.shm
        _added.row = None
        if self._rng is not None:
            buffer.seed(int(torch.randint(2**62, (1,), generator=self._rng, device=self._rng.device)))
        left = buffer.acquire_samples(batch_size, 0.0)
        try:
            rows: TensorDictBase = self.sampler.sample(shm, batch_size, timeout=left)
        except BaseException:
            buffer.refund_samples(batch_size)
            raise
        index, ids = rows.get("index"), rows.get("row_id").numpy().reshape(-1)
        self._ids[index.numpy().reshape(-1)] = ids + 1
        index._shmbuf_rows = rows  # for TorchRLStorage.get
        info = {k: rows.get(k) for k in self.sampler.info_keys if k != "index" and rows.get(k, None) is not None}
        return index, info

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        if self._storage is None and storage is not None:
            self._prepared(storage)
        if self._storage is None or not hasattr(self.sampler, "reduction"):
            return super().update_priority(index, priority)
        slots = torch.as_tensor(index).reshape(-1).cpu().numpy()
        own, (added, _added.row) = getattr(index, "_shmbuf_ids", None), (_added.row, None)
        if own is not None and len(own) == len(slots):  # as the writer has just returned it: rows that were not drawn
            ids = own
        elif added is not None and not torch.as_tensor(index).ndim and added[0] == slots[0]:
            ids = np.array([added[1]])
        else:
            ids = self._ids[slots] - 1
        if (ids < 0).any():
            ids = np.where(ids < 0, self._storage.buffer.ids_of(slots), ids)
        p = torch.as_tensor(priority).detach().cpu().to(torch.float64)
        self._storage.buffer.set_priorities(ids, p.reshape(-1).numpy() if p.ndim else float(p))
        return None

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Nothing: a new row has the priority of new ones from the moment it can be drawn."""

    @property
    def ran_out(self) -> bool:
        return self.sampler.ran_out

    def _empty(self) -> None:
        self._ids[:] = 0

    # Priorities and epochs lie in the segment.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"TorchRLSampler({self.sampler!r})"


class _PrioritizedTorchRLSampler(TorchRLSampler, _Prioritized):
    """One that TorchRL's buffers take for prioritised; TorchRL's own trees, which may not load, are not made."""

    _max_priority_within_buffer = False

    def __init__(self, sampler: Sampler):
        TorchRLSampler.__init__(self, sampler)

    @property
    def reduction(self) -> str:  # type: ignore[override]
        return self.sampler.reduction  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return TorchRLSampler.__repr__(self)
