"""Drawing by priority (Schaul et al. 2016), with TorchRL's arguments and formulas."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf._extension import native
from shmbuf.errors import Lapped
from shmbuf.failures import writer_text
from shmbuf.priorities import check_formula, check_weighting
from shmbuf.reading import address_of
from shmbuf.samplers.base import MAX_TRIES, Sampler, gather, wait_for_rows
from shmbuf.ticket import left_of, seconds_of

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer
    from shmbuf.storage import ShmStorage

_NO_COLUMNS = native.Columns()
REDUCTIONS = ("max", "min", "mean", "median", "sum")


def number_of(value: Any) -> Any:
    """What a tensor of one number holds; anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


class PrioritizedSampler(Sampler):
    """Each row is drawn with probability ``(p + eps) ** alpha / Σ``, independently and with replacement.

    Args:
        max_capacity: TorchRL's; the buffer's capacity counts, so it may be left out, but not be another number.
        alpha: 0: uniform … 1: in proportion. Fixed for the life of the buffer.
        beta: ``priority_weight = (P / P_min) ** -beta``; may be changed at any time, or given to one ``sample(beta=)``.
        eps: added to every priority.
        dtype: of TorchRL's tree; float32 weights are returned in any case, sums are float64.
        reduction: of a priority with more dimensions than one a row: "max", "min", "mean", "median" or "sum".
        max_priority_within_buffer: a new row gets the largest priority of the stored rows, not the largest set so far. Both are
            1.0 as long as there is none.
        normalize: P_min of the whole "buffer" (as TorchRL) or of the "batch".
        stratified: one draw from each of batch_size equal shares of the sum.
        replacement: True, as `RandomSampler` may be told otherwise.

    alpha, beta and eps may be tensors of one number.

    ``sample`` adds "priority_weight", float32[n]; its largest possible value is 1.
    """

    name = "prioritized"
    info_keys: ClassVar[tuple[Any, ...]] = ("index", "row_id", "priority_weight")

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        normalize: str = "buffer",
        stratified: bool = False,
        replacement: bool = True,
    ):
        if not replacement:
            raise TypeError("replacement=False: drawing by priority has no without-replacement variant")
        alpha, beta, eps = number_of(alpha), number_of(beta), number_of(eps)
        check_formula(alpha, eps)
        check_weighting(beta, normalize)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: one of {', '.join(REDUCTIONS)}")
        if dtype not in (torch.float32, torch.float64, "float32", "float64"):
            raise ValueError(f"dtype={dtype}: torch.float32 or torch.float64")
        self.max_capacity, self._alpha, self._beta, self._eps = max_capacity, float(alpha), float(beta), float(eps)
        self.dtype, self.reduction = dtype, reduction
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self.normalize, self.stratified = normalize, bool(stratified)

    def arguments(self) -> dict[str, Any]:
        return {
            "max_capacity": self.max_capacity,
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "dtype": str(self.dtype).removeprefix("torch."),
            "reduction": self.reduction,
            "max_priority_within_buffer": self.max_priority_within_buffer,
            "normalize": self.normalize,
            "stratified": self.stratified,
        }

    @property
    def alpha(self) -> float:
        """Fixed: the leaves of all processes hold (p + eps) ** alpha."""
        return self._alpha

    @property
    def eps(self) -> float:
        return self._eps

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        value = number_of(value)
        check_weighting(value, self.normalize)
        self._beta = float(value)

    def check_capacity(self, max_size: int) -> None:
        if self.max_capacity is not None and self.max_capacity != max_size:
            raise ValueError(
                f"max_capacity={self.max_capacity:,} of the sampler, but the storage holds {max_size:,} rows"
            )

    def prepare(self, storage: ShmStorage) -> None:
        storage.buffer.keep_priorities(
            self._alpha, self._eps, max_priority_within_buffer=self.max_priority_within_buffer
        )

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
        return storage.draw_by_priority(
            batch_size,
            beta=beta,
            normalize=self.normalize,
            stratified=self.stratified,
            out=out,
            timeout=timeout,
            pin=pin,
        )

    def with_leaves(
        self, storage: ShmStorage, batch_size: int, *, timeout: float | None = 0.0
    ) -> tuple[TensorDictBase, np.ndarray]:
        """For who weighs rows of several buffers against each other: a batch as of `sample`, without weights, and what its rows were drawn
        by, ``(p + eps) ** alpha`` at that moment, float32[n]. The limiter is not asked. Errors as `sample`."""
        since, buffer = time.monotonic(), storage.buffer
        wait_for_rows(storage, timeout)
        ids, leaves = self._starts(buffer, batch_size, left_of(timeout, since), self.stratified)

        def again(bad: np.ndarray) -> np.ndarray:
            new, leaves[bad] = self._starts(buffer, len(bad), left_of(timeout, since))
            return new

        return gather(storage, ids, again), leaves

    def _starts(
        self, buffer: Buffer, n: int, timeout: float | None, stratified: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """n rows by priority and their leaves."""
        ids, leaves = np.zeros(n, np.int64), np.zeros(n, np.float32)
        to = (address_of(ids), 0, address_of(leaves))
        for _ in range(MAX_TRIES):
            if buffer._call("choose_by_priority", n, stratified, to[0], to[2]) == n:
                return ids, leaves
            # Draw one row, of no column: that waits, or says why there is none.
            buffer.draw_by_priority_into(_NO_COLUMNS, [], 1, *to, 0.0, False, "buffer", seconds_of(timeout))
        raise Lapped(f"no {n:,} rows can be drawn by priority: {writer_text(buffer)}")

    def reduce(self, priority: torch.Tensor, n: int) -> torch.Tensor:
        """One number a row, of a priority [n, …]."""
        if priority.ndim <= 1 or priority.shape[0] != n:
            return priority
        flat = priority.reshape(n, -1)
        if flat.shape[1] == 1:
            return flat[:, 0]
        if self.reduction in ("max", "min"):
            return getattr(flat, "a" + self.reduction)(dim=1)
        return flat.median(dim=1).values if self.reduction == "median" else getattr(flat, self.reduction)(dim=1)
