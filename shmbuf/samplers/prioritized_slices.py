"""Slices that begin at rows drawn by priority."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.priorities import check_weighting
from shmbuf.reading import address_of
from shmbuf.samplers.base import gather
from shmbuf.samplers.prioritized import PrioritizedSampler, number_of
from shmbuf.samplers.slices import SliceSampler
from shmbuf.ticket import left_of
from shmbuf.trajectories import MAX_TRIES

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer
    from shmbuf.storage import ShmStorage

# Rows drawn by priority for a batch: so many, or this part of the capacity; then all are looked at.
_LEAST, _SHARE = 4096, 64
_AT_ONCE, _WALKED = 1 << 18, 1 << 21  # ids of one walk; of all walks of a batch


class PrioritizedSliceSampler(PrioritizedSampler, SliceSampler):
    """Slices that begin at rows drawn by priority, among those where a slice may begin: with slice_len - 1 rows behind it in its
    trajectory (span right: fewer), or, not strict, the first row of a shorter trajectory. `PrioritizedSampler`'s and
    `SliceSampler`'s arguments; there is no left span.

    ``sample`` adds "priority_weight": that of the row where the slice begins, for each of its rows.
    """

    name: ClassVar[str] = "prioritized_slice"

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        normalize: str = "buffer",
        **slices: Any,
    ):
        if "by" in slices:
            raise TypeError("by: starts are drawn by priority")
        SliceSampler.__init__(self, **slices)
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, normalize=normalize
        )
        if self.span[0]:
            warnings.warn("Left spanning is disabled for PrioritizedSliceSampler", stacklevel=2)
            self.span = (False, self.span[1])

    def arguments(self) -> dict[str, Any]:
        mine = {**SliceSampler.arguments(self), **PrioritizedSampler.arguments(self)}
        return {k: v for k, v in mine.items() if k not in ("by", "stratified")}

    @property
    def info_keys(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (*SliceSampler.info_keys.fget(self), "priority_weight")  # type: ignore[attr-defined]

    def prepare(self, storage: ShmStorage) -> None:
        SliceSampler.prepare(self, storage)
        PrioritizedSampler.prepare(self, storage)

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        beta: float | None = None,
    ) -> TensorDictBase:
        if beta is None:
            beta = self._beta
        else:
            beta = number_of(beta)
            check_weighting(beta, self.normalize)
        td, lens, leaves, length = self._drawn(storage, batch_size, timeout, pin)
        storage.buffer._call("weigh", address_of(leaves), len(leaves), beta, self.normalize == "batch")
        return self._finish(storage, td, lens, length, out, weights=leaves)

    def with_leaves(
        self, storage: ShmStorage, batch_size: int, *, timeout: float | None = 0.0
    ) -> tuple[TensorDictBase, np.ndarray]:
        td, lens, leaves, length = self._drawn(storage, batch_size, timeout, False)
        td = self._finish(storage, td, lens, length, None, weights=leaves)
        of_rows: Any = td.pop("priority_weight")
        return td, np.asarray(of_rows)

    def _drawn(
        self, storage: ShmStorage, batch_size: int, timeout: float | None, pin: bool
    ) -> tuple[TensorDictBase, np.ndarray, np.ndarray, int]:
        """Rows of whole slices, how long these are, the leaves of their first rows, and the length asked for."""
        n, length = self._shape(batch_size)
        right = self._beyond(length)[1]
        since = time.monotonic()
        buffer = self._ready(storage, timeout)
        ids, lens, leaves = self._choose(buffer, n, length, right, timeout, since)

        def again(bad: np.ndarray) -> np.ndarray:
            new, lens[bad], leaves[bad] = self._choose(buffer, len(bad), length, right, timeout, since)
            return new

        return gather(storage, ids.reshape(-1), again, unit=length, pin=pin), lens, leaves, length

    def _legal(self, buffer: Buffer, starts: np.ndarray, lens: np.ndarray, length: int, right: int) -> np.ndarray:
        legal = lens >= length - right
        if not self.strict_length:
            short = np.flatnonzero((lens > 0) & ~legal)
            if len(short):
                legal[short] = buffer.preceding(starts[short]) < 0
        elif right:  # but no trajectory that is too short
            cut = np.flatnonzero(legal & (lens < length))
            if len(cut):
                before = buffer.walk_back(starts[cut], length)[1] - 1
                legal[cut] = before + lens[cut] >= length
        return legal

    def _choose(
        self, buffer: Buffer, n: int, length: int, right: int, timeout: float | None, since: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """n slices, how long they are, and the leaves of their first rows.

        Rows are drawn by priority and those kept where a slice may begin; as many at a time as will do by what was kept so far.
        Where such rows are rare the rest is drawn from a list of all of them.
        """
        ids, lens, leaves = np.zeros((n, length), np.int64), np.zeros(n, np.int64), np.zeros(n, np.float32)
        budget = max(2 * n, min(max(_LEAST, buffer.capacity // _SHARE), _WALKED // length))
        have = drawn = 0
        while have < n and drawn < budget:
            need = n - have
            wanted = need if not drawn else int(1.2 * need * drawn / max(have, 1)) + 8
            m = max(1, min(wanted, budget - drawn, _AT_ONCE // length))
            starts, leaf = self._starts(buffer, m, left_of(timeout, since))
            chain, found = buffer.walk_forward(starts, length)
            kept = np.flatnonzero(self._legal(buffer, starts, found, length, right))[:need]
            to = slice(have, have + len(kept))
            ids[to], lens[to], leaves[to] = chain[kept], found[kept], leaf[kept]
            have, drawn = have + len(kept), drawn + m
        if have == n:
            return ids, lens, leaves
        for _ in range(MAX_TRIES):
            strict = self.strict_length
            buffer.choose_slices(1, length, strict=strict, timeout=timeout, since=since)  # says so if there is none
            starts, leaf = self._all_starts(buffer, length, right)
            if not len(starts):
                continue
            upto = np.cumsum(leaf)
            if not upto[-1]:
                raise RuntimeError(
                    f"no slice can be drawn: the priorities of all {len(starts):,} rows where one may begin are 0"
                )
            at = np.searchsorted(upto, buffer.generator().random(n - have) * upto[-1], side="right")
            ids[have:], lens[have:] = buffer.walk_forward(starts[at], length)
            leaves[have:] = leaf[at]
            if self._legal(buffer, starts[at], lens[have:], length, right).all():  # else they have gone meanwhile
                return ids, lens, leaves
        raise buffer._slices_lapped(length)

    def _all_starts(self, buffer: Buffer, length: int, right: int) -> tuple[np.ndarray, np.ndarray]:
        """All rows where a slice may begin now, and their leaves, float64: of each trajectory all but its last ones."""
        end, first, rows, _ = buffer.spans()
        behind = length - right - 1  # rows that have to follow
        n = rows - behind
        n = np.where(rows >= length, n, 0) if self.strict_length else np.maximum(n, 1)
        end, first, rows, n = (a[n > 0] for a in (end, first, rows, n))
        together = end - first + 1 == rows  # no rows of others between: ids follow each other
        many, start = n[together], first[together]
        starts = [np.arange(many.sum()) + np.repeat(start - (many.cumsum() - many), many)]
        for e, r, k in zip(*(a[~together].tolist() for a in (end, rows, n)), strict=True):
            ids = np.empty(k, np.int64)
            while k > 0 and not buffer._call("stretch", e, r - k, k, ids.ctypes.data):
                r = min(r - 1, buffer._call("trajectory_rows", e))  # its first rows have gone
                k = min(k, r, max(r - behind, 0 if self.strict_length else 1))
            starts.append(ids[: max(k, 0)])
        ids = np.concatenate(starts)
        p = buffer.priorities(ids)
        if not self._alpha:  # which forgets priorities, but all rows that have any are as likely
            return ids, np.ones(len(ids))
        return ids, np.where(np.isnan(p), 0.0, (np.nan_to_num(p) + self._eps) ** self._alpha)
