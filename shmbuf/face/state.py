"""All of a replay buffer as a value, on disk or in memory; its figures; its generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shmbuf.attaching import positive
from shmbuf.errors import SchemaError
from shmbuf.face.kept import Kept, take
from shmbuf.face.lifetime import Lifetime
from shmbuf.face.making import checked_generator
from shmbuf.face.writing import Writing
from shmbuf.forms import show
from shmbuf.lanes import require_inner
from shmbuf.samplers import SAMPLERS, ConsumingSampler, Sampler
from shmbuf.schema import same_form


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
        """A copy of rows, priorities and settings, under TorchRL's keys. Taking it counts as no draw.

        ``_storage``: ``rows``, oldest first, as stored (None before the first), ``columns``, ``first``, the slot of the oldest,
        ``form`` of rows that are no TensorDicts, ``inner``, of more dimensions the shape of a time step, ``streams`` and ``heads``:
        which trajectory each row is of, and those whose beginning is not here; ``limiter``. Batches that were drawn ahead are not
        in it, nor is the place in an epoch.
        """
        taken: dict[str, Any] = {"rows": None, "first": 0, "form": None, "inner": []}
        if self.initialized:
            taken = take(self._storage)
        sampler = self._sampler
        priorities = {k: taken.pop(k, None) for k in ("priority", "new_row", "formula")}
        write_count = taken.pop("write_count", self.write_count)
        return {
            "_storage": taken,
            "_sampler": {"name": sampler.name, "arguments": sampler.arguments(), **priorities},
            "_writer": {"_cursor": self.buffer.window[1] % self.buffer.capacity, "_write_count": write_count},
            "_transforms": self.transform.state_dict() if self._transforms() else {},
            "_batch_size": self._batch_size,
            "_consume_after_n_samples": sampler.max_sample_count if isinstance(sampler, ConsumingSampler) else None,
            "_rng": None if self._rng is None else (self._rng.get_state().clone(), str(self._rng.device)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace rows, trajectories, priorities and ``write_count``, for every process, and this handle's batch size, sampler's
        arguments, transforms' state and generator, by those of `state_dict`.

        Rows come to their old slots, under new ids; rows that others put meanwhile may come among them. Where some were overwritten while
        the state of a full buffer was taken, the oldest of the rest comes to slot 0. A limiter keeps its parameters, and goes on from
        the difference of the state if their ratio is the same.

        Raises:
            ValueError, KeyError: not a state of such a buffer, or priorities of another formula (alpha, eps). SchemaError: of another
            schema. Nothing was changed.
        """
        kept, sampler = state_dict["_storage"], state_dict["_sampler"]
        rows, first, capacity = kept["rows"], int(kept["first"]), self.buffer.capacity
        batch_size, written = positive(state_dict["_batch_size"]), state_dict["_writer"]["_write_count"]
        if sampler["name"] != self._sampler.name:
            raise ValueError(f"the state is of a buffer with sampler {sampler['name']!r}, not {self._sampler.name!r}")
        n, inner = 0 if rows is None else len(rows), tuple(kept.get("inner") or ())
        if n > capacity or not 0 <= first < capacity:
            raise ValueError(f"{n:,} rows from slot {first:,} on do not fit the capacity of {capacity:,} rows")
        if n and len(inner) != self._storage.ndim - 1:
            raise ValueError(
                f"the state is of time steps of shape {list(inner)}, the buffer has ndim={self._storage.ndim}"
            )
        if n and inner:
            require_inner(inner, self._storage.inner, capacity)
        if n and self.initialized and not same_form(kept.get("form"), form := self._storage.schema().form):
            raise SchemaError(f"rows are {show(kept.get('form'))}, the buffer's are {show(form)}. Nothing was changed.")
        made = self._sampler_of(sampler["arguments"])
        load = None
        if n:
            values = {**kept, **{k: sampler.get(k) for k in ("priority", "new_row", "formula")}, "write_count": written}
            saved = Kept(values, self._storage.schema() if self.initialized else None)
            load = saved.loading(self._storage, first, self._timeout(None))
        generator = None
        if state_dict["_rng"] is not None:
            numbers, device = state_dict["_rng"]
            generator = torch.Generator(device=device)
            generator.set_state(numbers)
        if len(state_dict["_transforms"]):
            before = self.transform.state_dict()
            try:
                self.transform.load_state_dict(state_dict["_transforms"])
            except BaseException:
                self.transform.load_state_dict(before)
                raise
        if load is not None:
            load.run(None)
        else:
            self.empty()
        self._batch_size = batch_size
        if made is not None:
            self.set_sampler(made)
        elif "beta" in sampler["arguments"]:
            self._sampler.beta = sampler["arguments"]["beta"]  # type: ignore[attr-defined]
        if generator is not None:
            self.set_rng(generator)
        self._drop_ahead()

    def _sampler_of(self, arguments: dict[str, Any]) -> Sampler | None:
        """One with these arguments, ready to draw from this buffer; None: this handle's has them, but perhaps for beta."""
        free = ("beta", "max_capacity")
        own = self._sampler.arguments()
        differ = {k: v for k, v in arguments.items() if k not in free and own.get(k, v) != v}
        if not differ:
            return None
        made = SAMPLERS[self._sampler.name](**{**own, **arguments, **{k: own[k] for k in free[1:] if k in own}})
        made.prepare(self._storage)
        return made
