"""All of a replay buffer as a value, on disk or in memory; its figures; its generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.attaching import positive
from shmbuf.face.lifetime import Lifetime
from shmbuf.face.making import checked_generator
from shmbuf.face.writing import Writing
from shmbuf.forms import Rows, collected
from shmbuf.lanes import require_inner
from shmbuf.samplers import ConsumingSampler


class State(Writing, Lifetime):
    """`stats`, `dumps` and `loads`, `state_dict`, `set_rng`."""

    _save_hooks: list[Callable[[Any], Any]]
    _load_hooks: list[Callable[[Any], Any]]

    def stats(self) -> dict[str, Any]:
        """TorchRL's keys (size, write_count, capacity, utilization, prefetch_queue_size, initialized) and `Buffer.stats`'s."""
        return {**self.buffer.stats(), "prefetch_queue_size": 0 if self._ahead is None else len(self._ahead)}

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Let the generator's numbers decide what this handle draws: the same state draws the same of the same stored rows."""
        self._rng = checked_generator(generator)
        self._drop_ahead()

    # ---- on disk ------------------------------------------------------------------------------------------------

    def dumps(self, path: Any, **how: Any) -> None:
        """Save it under a directory, while others write and sample on: see `shmbuf.checkpoint.dumps`, also for ``how``."""
        from shmbuf.checkpoint import dumps

        self._transforms()  # made by now
        dumps(self, path, **how)

    def loads(self, path: Any, **how: Any) -> None:
        """Fill it with what `dumps`, or TorchRL's, saved: see `shmbuf.checkpoint.loads`, also for ``how`` (``timeout=``)."""
        from shmbuf.checkpoint import loads

        self._transforms()
        loads(self, path, **how)
        self._drop_ahead()

    def dump(self, *args: Any, **kw: Any) -> None:
        """`dumps`."""
        self.dumps(*args, **kw)

    def save(self, *args: Any, **kw: Any) -> None:
        """`dumps`."""
        self.dumps(*args, **kw)

    def load(self, *args: Any, **kw: Any) -> None:
        """`loads`."""
        self.loads(*args, **kw)

    def register_save_hook(self, hook: Callable[[Any], Any]) -> None:
        """Have what is saved through this handle changed by it: TensorDict → TensorDict. Hooks are not saved and do not travel."""
        from shmbuf.checkpoint import register_save_hook

        register_save_hook(self, hook)

    def register_load_hook(self, hook: Callable[[Any], Any]) -> None:
        """Have what is loaded through this handle changed by it. Otherwise as `register_save_hook`."""
        from shmbuf.checkpoint import register_load_hook

        register_load_hook(self, hook)

    # ---- in memory ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of rows, priorities and settings, under TorchRL's keys.

        ``_storage``: ``rows``, oldest first, as stored (None before the first), ``first``, the slot of the oldest, and of rows that
        are no TensorDicts their ``form``; of more dimensions ``inner``, the shape of a time step. Batches that were drawn ahead are
        not in it.
        """
        rows = priority = form = None
        first, inner = 0, tuple[int, ...]()
        if self.initialized:
            schema = self._storage.schema()
            form, inner = schema.form, schema.inner
            lo, hi = self.buffer.window
            ids = np.arange(lo, hi, dtype=np.int64)
            gathering, done = self._storage.gathering(len(ids)), np.zeros(len(ids), np.uint8)
            gathering.fetch(ids, done)
            there = done.astype(bool)  # not those that are overwritten meanwhile
            if self.buffer._get("priorities"):
                every = self.buffer.priorities(ids)
                there &= ~np.isnan(every)  # nor those that are by now
                priority = torch.from_numpy(every[there])
            ids = ids[there]
            first = int(ids[0]) % self.buffer.capacity if len(ids) else 0
            rows = gathering.tensordict(np.arange(lo, hi))[torch.from_numpy(there)].exclude("index", "row_id")
            rows = rows if self._storage.presents is None else self._storage.presents.values(rows)
        rng = None if self._rng is None else (self._rng.get_state().clone(), str(self._rng.device))
        sampler = self._sampler
        return {
            "_storage": {"rows": rows, "first": first, "form": form, "inner": list(inner)},
            "_sampler": {"name": sampler.name, "arguments": sampler.arguments(), "priority": priority},
            "_writer": {"_cursor": self.buffer.window[1] % self.buffer.capacity, "_write_count": self.write_count},
            "_transforms": self.transform.state_dict() if self._transforms() else {},
            "_batch_size": self._batch_size,
            "_consume_after_n_samples": sampler.max_sample_count if isinstance(sampler, ConsumingSampler) else None,
            "_rng": rng,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the rows, for every process, and this handle's batch size, transforms' state and generator by those of `state_dict`.

        Rows come to their old slots, under new ids; rows that others put meanwhile may come among them. Where some were overwritten while
        the state of a full buffer was taken, the oldest of the rest comes to slot 0.

        Raises:
            ValueError, KeyError: not a state of such a buffer. SchemaError: of another schema. Nothing was changed.
        """
        kept, sampler = state_dict["_storage"], state_dict["_sampler"]
        rows, first, capacity = kept["rows"], int(kept["first"]), self.buffer.capacity
        batch_size = positive(state_dict["_batch_size"])
        if sampler["name"] != self._sampler.name:
            raise ValueError(f"the state is of a buffer with sampler {sampler['name']!r}, not {self._sampler.name!r}")
        n, inner = 0 if rows is None else len(rows), tuple(kept.get("inner", ()))
        if n > capacity or not 0 <= first < capacity:
            raise ValueError(f"{n:,} rows from slot {first:,} on do not fit the capacity of {capacity:,} rows")
        if n and len(inner) != self._storage.ndim - 1:
            raise ValueError(
                f"the state is of time steps of shape {list(inner)}, the buffer has ndim={self._storage.ndim}"
            )
        if n and inner:
            require_inner(inner, self._storage.inner, capacity)
        if n and self.initialized:  # raises what does not fit
            self._storage._convert(_formed(rows, kept.get("form")), False, None, None, lambda *_: None, inner)
        self.empty()
        if n:
            priority = sampler["priority"] if self.buffer._get("priorities") else None
            self._fill(rows, first, priority, kept.get("form"), inner)
        self._batch_size = batch_size
        if len(state_dict["_transforms"]):
            self.transform.load_state_dict(state_dict["_transforms"])
        if state_dict["_rng"] is not None:
            numbers, device = state_dict["_rng"]
            generator = torch.Generator(device=device)
            generator.set_state(numbers)
            self.set_rng(generator)
        self._drop_ahead()

    def _fill(
        self, rows: TensorDictBase, first: int, priority: torch.Tensor | None, form: list | None, inner: tuple[int, ...]
    ) -> None:
        """An empty buffer with rows; as many as it holds: the oldest in slot ``first``, what lies in front is overwritten by the newest."""
        if first and len(rows) == self.buffer.capacity:
            self._store(_formed(rows[torch.zeros(first, dtype=torch.int64)], form), None, False, True, inner=inner)
        self._store(_formed(rows, form), None, False, True, inner=inner)
        if priority is not None:
            hi = self.buffer.window[1]
            self.buffer.set_priorities(np.arange(hi - len(rows), hi, dtype=np.int64), priority.numpy())


def _formed(rows: TensorDictBase, form: list | None) -> TensorDictBase | Rows:
    return rows if form is None else Rows(form, collected(rows), len(rows))
