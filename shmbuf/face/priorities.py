"""Priorities of rows, by their ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.attaching import INTEGERS, REALS, is_plain, numbers
from shmbuf.face.base import Face
from shmbuf.samplers.sequences import anchor_priorities
from shmbuf.schema import show_key
from shmbuf.tensors import entry_of


class Priorities(Face):
    """`update_priority`, `update_tensordict_priority`, `mark_update`."""

    def update_priority(self, index: Any, priority: Any, *, row_id: Any = None) -> torch.Tensor:
        """Set priorities of rows by their ids, or by index, of whatever rows lie there now.

        Args:
            index: LongTensor[n] or one number, as in ``sample()["index"]``; None if row_id is given.
            priority: [n] or one number; finite, ≥ 0.
            row_id: LongTensor[n], as in ``sample()["row_id"]``: a row that has been overwritten meanwhile is left alone.

        Returns:
            bool[n]: whether it was applied.

        Raises:
            ValueError, IndexError: name position and value; nothing was changed. RuntimeError: the buffer keeps no priorities.
        """
        buffer = self.buffer
        if row_id is None:
            if self._storage.ndim > 1:
                index = self._storage.slots_of(index)
                if isinstance(priority, torch.Tensor) and priority.ndim > 1 and priority.numel() == index.numel():
                    swap = min(self._storage.time_dim, priority.ndim - 1)
                    priority = priority.transpose(swap, 0).flatten()  # as extend() was given it
            ids = buffer.ids_of(numbers(index, "index"))
        elif index is not None:
            raise TypeError("index or row_id, not both")
        else:
            ids = numbers(row_id, "row_id")
        if isinstance(priority, torch.Tensor):
            priority = self._reduced(priority, len(ids)).detach().cpu()
            priority = (priority.float() if priority.dtype is torch.bfloat16 else priority).numpy()
        return torch.from_numpy(buffer.set_priorities(ids, priority))

    def _set_priorities(self, ids: torch.Tensor, priority: torch.Tensor) -> bool:
        """The usual case of a learner's update: plain tensors as `sample` made them. False: look closer."""
        n = ids.numel()
        if not (is_plain(ids, n, INTEGERS) and is_plain(priority, n, REALS)):
            return False
        applied = torch.empty(n, dtype=torch.bool)
        status, _ = self.buffer._call(
            "set_priorities", ids.data_ptr(), priority.data_ptr(), n, priority.element_size(), applied.data_ptr()
        )
        return not status  # what is wrong is said by the long way, which finds it again

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows, found by its "row_id", to what it holds under the priority key.

        A row that has been overwritten since is left alone, and counted. Raises KeyError, and as `update_priority`.
        """
        key = self._priority_key or ("td_error",)
        if self._decides is None and len(key) == 1 and entry_of(data, "anchor_row_id") is None:
            given, rows = entry_of(data, key[0]), entry_of(data, "row_id")
            if type(given) is type(rows) is torch.Tensor and self._set_priorities(rows, given):
                return
        priority, ids = data.get(key, None), data.get("row_id", None)
        if priority is None or (ids is None and data.get("index", None) is None):
            missing = show_key(key) if priority is None else "'row_id'"
            raise KeyError(f"{missing} is not in the TensorDict, which has {sorted(map(str, data.keys(True, True)))}")
        if self._decides is not None and ids is not None and data.batch_dims == 1:
            kept = self._decides.still_stored(data, ids.cpu().numpy())
            if kept is not None:
                self._set_of_same(data, ids, priority, kept)
                return
        anchors = data.get("anchor_row_id", None)
        if anchors is not None:
            p = self._reduced(priority, anchors.numel(), anchors.shape)
            ids, p = anchor_priorities(anchors, data.get("validity_mask", None), p.detach().to(anchors.device))
            self.update_priority(None, p, row_id=ids)
        elif ids is not None and self._set_priorities(ids, priority):
            return
        elif ids is not None:
            self.update_priority(None, self._reduced(priority, ids.numel(), ids.shape), row_id=ids)
        else:
            index = data.get("index")
            if self._storage.ndim > 1:
                self.update_priority(index, self._reduced(priority, index[..., 0].numel(), index.shape[:-1]))
                return
            self.update_priority(index, self._reduced(priority, index.numel(), index.shape))

    def _set_of_same(self, data: TensorDictBase, ids: torch.Tensor, priority: torch.Tensor, kept: np.ndarray) -> None:
        """Of rows whose ids may come to mean others: a row that took the place of another gets no priority of that."""
        p, same = self._reduced(priority, ids.numel(), ids.shape), torch.from_numpy(kept)
        self.update_priority(None, p[same.to(p.device)], row_id=ids[same.to(ids.device)])
        assert self._decides is not None
        after = self._decides.still_stored(data, ids.cpu().numpy())
        gone = ids[torch.from_numpy(kept & ~after).to(ids.device)] if after is not None else ids[:0]
        if len(gone):  # replaced meanwhile
            state = self.buffer._get("priorities")
            self.update_priority(None, state["new_row"] if state else 1.0, row_id=gone)

    def mark_update(self, index: Any) -> None:
        """Give the rows at these indices the priority of new ones."""
        state = self.buffer._get("priorities")
        self.update_priority(index, state["new_row"] if state else 1.0)

    def _reduced(self, priority: torch.Tensor, n: int, shape: torch.Size | None = None) -> torch.Tensor:
        """One number a row (or for all: of no dimension), of a priority [n, …], or [*shape, …] where the n rows have that shape."""
        if priority.numel() == n or not priority.ndim:
            return priority.reshape(n) if priority.ndim else priority
        if shape is not None and priority.shape[: len(shape)] == shape:
            priority = priority.reshape(n, *priority.shape[len(shape) :])
        if priority.ndim < 2 or priority.shape[0] != n:
            also = "" if shape is None or len(shape) < 2 else f" or {[*shape]}"
            raise ValueError(
                f"a priority of shape {list(priority.shape)} for {n} rows: one for each is needed, shape [{n}]{also}, or several of each"
            )
        if not n:
            return priority.new_zeros(0)
        reduce = getattr(self._sampler, "reduce", None)  # what another sampler says is not known here: the largest
        return reduce(priority, n) if reduce is not None else priority.reshape(n, -1).amax(1)
