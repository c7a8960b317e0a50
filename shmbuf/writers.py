"""Which slot a row goes to. A writer is a light description: rows are moved by the buffer's rings, from any process."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection

from shmbuf.schema import Key, as_key, show_key
from shmbuf.tensors import as_numpy

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage


class Writer:
    """A way of placing rows. Its arguments travel with the buffer's name, so that others who attach write the same way.

    Attributes:
        name: of the kind, in the segment.
        in_turn: rows go one after another into the next slots, so that `put` needs no answer from the writer.
    """

    name: ClassVar[str]
    in_turn: ClassVar[bool] = True
    _storage: ShmStorage | None = None

    def arguments(self) -> dict[str, Any]:
        """What another process needs to rebuild it: numbers, strings, lists."""
        return {}

    def register_storage(self, storage: ShmStorage) -> None:
        """Called once by every handle, before its first row. Raises ValueError for a storage that it cannot write to."""
        self._storage = storage

    def check_write(self) -> None:
        """Called before anything is written or emptied. Raises RuntimeError where that is not allowed."""

    def _registered(self) -> ShmStorage:
        if self._storage is None:
            raise RuntimeError(
                f"{type(self).__name__} has no storage yet: give it to a replay buffer, or register_storage"
            )
        return self._storage

    @property
    def _cursor(self) -> int:
        """The slot of the next row."""
        buffer = self._registered().buffer
        return buffer.window[1] % buffer.capacity

    @property
    def write_count(self) -> int:
        """Rows stored since the buffer was made or emptied, by every process."""
        return self._registered().buffer.write_count

    @property
    def tracks_generations(self) -> bool:
        """Whether samples carry "index_generation"."""
        return False

    def generations_of(self, index: Any) -> torch.Tensor:
        """int64, shaped like index: which of its rows lies in each slot now, ``row_id // capacity``; −1 where none does.

        With ndim > 1 an index has ndim numbers a row: a tensor [*shape, ndim], or a tuple of ndim tensors."""
        storage = self._registered()
        slots = storage.slots_of(index) if storage.ndim > 1 else torch.as_tensor(index, dtype=torch.int64)
        buffer = storage.buffer
        lo, hi = buffer.window
        ids = hi - 1 - (hi - 1 - slots) % buffer.capacity
        stored = (slots >= 0) & (slots < buffer.capacity) & (ids >= lo)
        return torch.where(stored, ids // buffer.capacity, -1)

    @property
    def _write_count(self) -> int:
        return self.write_count

    def extend(
        self,
        td: TensorDictBase,
        *,
        timeout: float | None = None,
        priority_key: Key | None = None,
        priorities: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Rows [n] → LongTensor[n] of their slots, once committed. Errors: see `Buffer.put`.

        priority_key: of rows, need not be in the schema. priorities: float64[n], of the rows; None: those of new ones.
        """
        self.check_write()
        return self._registered().put(td, False, timeout, False, priority_key, None, priorities).wait(timeout)

    def still_stored(self, td: TensorDictBase, ids: np.ndarray) -> np.ndarray | None:
        """bool[n]: rows of these ids are still the ones in td, as a batch has them; None: as ids never mean other rows, the ids tell."""
        return None

    def check_trajectories(self) -> None:
        """Raises RuntimeError where rows do not follow each other in the order of their ids."""

    def state_dict(self) -> dict[str, Any]:
        return {"_cursor": self._cursor, "_write_count": self.write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: where the next row goes is the buffer's, and comes back with its rows."""

    def __getstate__(self) -> dict[str, Any]:
        """Its arguments: the handle that holds it registers its storage again."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_storage", "_lock", "_known")}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.arguments().items())})"


class RoundRobinWriter(Writer):
    """Row after row into the next slot, the oldest overwritten.

    Args:
        compilable: TorchRL's, without effect: counters are shared without a lock.
        track_generations: samples carry "index_generation", int64: ``row_id // capacity``. They count for all processes.
    """

    name = "RoundRobinWriter"

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        self.compilable, self.track_generations = compilable, bool(track_generations)

    def arguments(self) -> dict[str, Any]:
        return {"track_generations": True} if self.track_generations else {}

    @property
    def tracks_generations(self) -> bool:
        return self.track_generations


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same, under the name it has for TensorDicts. Samples carry "index" and "row_id" with either."""

    name = "TensorDictRoundRobinWriter"


class ImmutableDatasetWriter(Writer):
    """Adds no row: adding, extending and emptying raise RuntimeError, and nothing changes.

    As with TorchRL's, rows that are stored may still be changed in place (``rb[index] = rows``, `set_`), and priorities set. Where that
    must not be, attach with ``readonly=True``.
    """

    name = "ImmutableDatasetWriter"
    in_turn = False
    WRITING_ERR = "This dataset doesn't allow writing."

    def __init__(self, compilable: bool = False) -> None:
        self.compilable = compilable

    def check_write(self) -> None:
        raise RuntimeError(self.WRITING_ERR)

    def state_dict(self) -> dict[str, Any]:
        return {}


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda v: v.amax(1),
    "min": lambda v: v.amin(1),
    "mean": lambda v: v.mean(1),
    "median": lambda v: v.median(1).values,
    "sum": lambda v: v.sum(1),
}


class _Offered(NamedTuple):
    """Rows, as they were given and in column order, with their ranks; priorities: theirs, or None."""

    td: TensorDictBase
    leaves: list[torch.Tensor]
    ranks: np.ndarray
    priority_key: Key | None
    priorities: np.ndarray | None


class TensorDictMaxValueWriter(Writer):
    """Keeps the rows of the highest rank. While the buffer is not full, rows are appended; then a row of a higher rank than the least
    stored one takes its place, and others are not stored.

    Several processes may write. Each plans from the ranks that are stored when it begins. What holds then: no row is torn; a row whose
    index was returned was stored, and left only by being replaced or overwritten; with one process writing at a time, the stored
    ones are the top ones of all that were offered. Writing at once, two processes may choose the same row to replace: the later
    one stays, also if it ranks lower; and while the buffer fills, they may append more rows than there is room for, which overwrite
    the oldest whatever their rank.

    A row that replaces another has its row id, slot and place in the order, and the priority it carries, or that of new rows. So an id
    means another row afterwards, of a higher rank: `update_tensordict_priority` compares the ranks of the batch with those stored, before
    and after, and leaves other rows alone (in between, for a moment, one may have the late priority; if the updating process dies right
    there, it keeps it). `update_priority` by ``row_id`` or index, `set_at_`, and batches without the rank key, with changed ranks or of two
    processes that write at once cannot tell: they reach whatever row is there. Trajectories are refused once rows were changed.

    Args:
        rank_key: the key whose values rank a row. Default: ``("next", "reward")``. It must be stored.
        reduction: ``"sum"``, ``"max"``, ``"min"``, ``"mean"`` or ``"median"`` (of an even number the lower one) over the values of a row, in their
            own dtype, as TorchRL. A NaN ranks below everything.

    Raises:
        ValueError: an unknown reduction.
    """

    name = "TensorDictMaxValueWriter"
    in_turn = False

    def __init__(
        self, rank_key: NestedKey | list[str] | None = None, reduction: str = "sum", compilable: bool = False
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: one of {', '.join(_REDUCTIONS)}")
        self.rank_key = as_key(("next", "reward") if rank_key is None else rank_key)
        self.reduction, self.compilable = reduction, compilable
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[Any, list[tuple[float, int]]] | None = None  # state of the buffer, heap of (rank, slot) then

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def arguments(self) -> dict[str, Any]:
        return {"rank_key": list(self.rank_key), "reduction": self.reduction}

    def register_storage(self, storage: ShmStorage) -> None:
        if getattr(storage, "ndim", 1) > 1:
            raise ValueError(
                f"TensorDictMaxValueWriter is not compatible with storages with more than one dimension; this one has {storage.ndim}. "
                "To rank whole trajectories, store each as one row"
            )
        super().register_storage(storage)
        self._known = None

    def still_stored(self, td: TensorDictBase, ids: np.ndarray) -> np.ndarray | None:
        if td.get(self.rank_key, None) is None:
            return None
        storage = self._registered()
        lo, hi = storage.buffer.window
        there = (ids >= lo) & (ids < hi)
        slots = torch.from_numpy(ids[there] % storage.buffer.capacity)
        there[there] = self._reduced(storage.get(slots).get(self.rank_key)) == self.rank(td)[there]
        return there

    def check_trajectories(self) -> None:
        buffer = self._registered().buffer
        if edited := buffer._call("counters")["edited_rows"]:
            raise RuntimeError(
                f"rows of buffer {buffer.name!r} were replaced by better ones, or changed ({edited:,} so far): they do not follow each "
                "other any more, so there are no trajectories. Store each trajectory as one row, or use another writer"
            )

    def rank(self, td: TensorDictBase) -> np.ndarray:
        """Rows [n] → float64[n]. Raises KeyError: no such key; ValueError: a row without a value; TypeError: no rows."""
        if not is_tensor_collection(td) or not td.batch_dims:
            raise TypeError("rows to be ranked are a TensorDict of batch size [n]")
        value = td.get(self.rank_key, None)
        if not isinstance(value, torch.Tensor):
            what = "there is no such key" if value is None else "it holds more than one tensor"
            raise KeyError(f"rank key {show_key(self.rank_key)}: {what}")
        return self._reduced(value)

    def _reduced(self, value: torch.Tensor) -> np.ndarray:
        n = value.shape[0]
        if not n:
            return np.zeros(0)
        flat = value.detach().reshape(n, -1)
        if not flat.shape[1]:
            raise ValueError(
                f"rank key {show_key(self.rank_key)}: its values have shape {list(value.shape[1:])}, so no number"
            )
        one = flat[:, 0] if flat.shape[1] == 1 else _REDUCTIONS[self.reduction](flat)
        ranks = one.to("cpu", torch.float64).numpy()
        return np.where(np.isnan(ranks), -np.inf, ranks)

    def extend(
        self,
        td: TensorDictBase,
        *,
        timeout: float | None = None,
        priority_key: Key | None = None,
        priorities: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Rows [n] → LongTensor[n]: the slots of those that are stored afterwards, −1 for the others.

        The rows that are appended are stored first, together; then the others, one by one. Errors: see `Buffer.put` and `rank`.
        """
        self.check_write()
        storage, ranks = self._registered(), self.rank(td)
        leaves, n = storage._convert(td, False, priority_key, timeout, lambda n, schema: None)
        slots = np.full(len(ranks), -1, np.int64)
        with self._lock:
            todo = np.arange(len(ranks)) if n else np.zeros(0, np.int64)
            while len(todo):
                todo = self._place(storage, _Offered(td, leaves, ranks, priority_key, priorities), todo, slots, timeout)
        return torch.from_numpy(slots)

    def _place(
        self, storage: ShmStorage, offered: _Offered, todo: np.ndarray, slots: np.ndarray, timeout: float | None
    ) -> np.ndarray:
        """The rows that are left because the ones they should have replaced were gone."""
        buffer, (td, leaves, ranks, key, p) = storage.buffer, offered
        state, heap = self._current(storage)
        self._known = None  # until all is done
        lo, hi, written, edited = state
        capacity = buffer.capacity
        at = plan(heap, ranks, todo, hi, hi - lo, capacity)
        room = min(capacity - (hi - lo), len(todo))
        new = [s for s in ((hi + j) % capacity for j in range(room)) if s in at]
        appended = set(new)
        old = [s for s in at if s not in appended]
        as_planned = True
        if new:
            rows = np.array([at[s] for s in new])
            given = None if p is None else p[rows]
            ticket = storage.put(td[torch.from_numpy(rows)], False, timeout, False, key, None, given)
            slots[rows] = ticket.wait(timeout).numpy()
            as_planned = slots[rows].tolist() == new
        left = np.zeros(0, np.int64)
        if old:
            rows = np.array([at[s] for s in old])
            # ids lo … hi − 1 hold each slot once
            ids = lo + (np.array(old) - lo) % capacity
            values = {k: as_numpy(t[rows]) for k, t in zip(storage.schema().keys, leaves, strict=True)}
            done = buffer.edit(ids, values, timeout=timeout)
            slots[rows[done]] = np.array(old)[done]
            if done.any() and buffer._get("wants_priorities"):
                new_row = (buffer._get("priorities") or {}).get("new_row", 1.0)
                buffer.set_priorities(ids[done], np.full(int(done.sum()), new_row) if p is None else p[rows[done]])
            left = rows[~done]
        after = (max(lo, hi + len(new) - capacity), hi + len(new), written + len(new), edited + len(old))
        if as_planned and not len(left) and _state(buffer) == after:
            self._known = after, heap
        return left

    def _current(self, storage: ShmStorage) -> tuple[Any, list[tuple[float, int]]]:
        buffer = storage.buffer
        for _ in range(100):
            state = _state(buffer)
            if self._known is not None and self._known[0] == state:
                return self._known
            ranks = self._reduced(storage.get(self.rank_key))
            heap = [(float(r), slot) for slot, r in enumerate(ranks)]
            if len(heap) == state[1] - state[0] and _state(buffer) == state:
                break
        else:  # others write all the time: what was read last; an edit of a row that is gone is told
            heap = heap[: state[1] - state[0]]
        heapq.heapify(heap)
        return state, heap


def plan(
    heap: list[tuple[float, int]], ranks: np.ndarray, todo: np.ndarray, cursor: int, size: int, capacity: int
) -> dict[int, int]:
    """Which row ends up in which slot, as if they came one by one. ``heap`` (rank, slot) is brought up to date."""
    at: dict[int, int] = {}
    for i in todo.tolist():
        rank = float(ranks[i])
        if size < capacity:
            slot = cursor % capacity
            cursor, size = cursor + 1, size + 1
            heapq.heappush(heap, (rank, slot))
        elif rank > (heap[0][0] if heap else math.inf):
            slot = heap[0][1]
            heapq.heapreplace(heap, (rank, slot))
        else:
            continue
        at[slot] = i
    return at


def _state(buffer: Any) -> tuple[int, int, int, int]:
    counters, (lo, hi) = buffer._call("counters"), buffer.window
    return lo, hi, counters["write_count"], counters["edited_rows"]


WRITERS: dict[str, type[Writer]] = {
    w.name: w for w in (RoundRobinWriter, TensorDictRoundRobinWriter, TensorDictMaxValueWriter, ImmutableDatasetWriter)
}
