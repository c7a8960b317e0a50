"""Priorities at the numpy level: any process sets them in place, by row id; an update reaches its row or nobody."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.failures import writer_text
from shmbuf.reading import Reading, address_of, as_ids
from shmbuf.rows import on_host
from shmbuf.schema import nest
from shmbuf.ticket import seconds_of

_STATUS = native.STATUSES
NORMALIZE = ("buffer", "batch")


def check_formula(alpha: float, eps: float) -> None:
    for name, value in (("alpha", alpha), ("eps", eps)):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value!r}: a finite number ≥ 0")
    with np.errstate(over="ignore"):
        leaf = np.float32(np.power(1.0 + float(eps), float(alpha), dtype=np.float64))
    if not 0 < leaf < np.inf:
        raise ValueError(
            f"alpha={alpha!r} and eps={eps!r}: (1 + eps) ** alpha, of a new row, leaves the range of float32"
        )


def check_weighting(beta: float, normalize: str) -> None:
    if isinstance(beta, bool) or not isinstance(beta, (int, float, np.number)) or not 0 <= beta < float("inf"):
        raise ValueError(f"beta={beta!r}: a finite number ≥ 0 (0: all weights 1; 1: full correction)")
    if normalize not in NORMALIZE:
        raise ValueError(f"normalize={normalize!r}: one of {', '.join(NORMALIZE)}")


def as_priorities(priorities: Any, n: int) -> np.ndarray:
    """float32 or float64 [n], contiguous."""
    array = np.asarray(on_host(priorities))
    if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
        raise TypeError(f"priorities of dtype {array.dtype}: real numbers are needed")
    if array.shape not in ((n,), ()):
        raise ValueError(f"priorities of shape {list(array.shape)} for {n} rows: one for each is needed, shape [{n}]")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    return np.ascontiguousarray(array) if array.shape == (n,) else np.full(n, array)


def bad_priority(buffer: Reading, j: int, value: float) -> ValueError:
    if np.isfinite(value) and value >= 0:
        f = buffer._get("priorities")
        if not np.isfinite([f["alpha"], f["eps"]]).all():  # no such formula was ever set
            return segment.damaged(
                buffer.name, f"the formula of priorities has alpha {f['alpha']} and eps {f['eps']}", buffer._owner
            )
        with np.errstate(all="ignore"):
            leaf = float(np.float64(value + f["eps"]) ** f["alpha"])
        why = f"({value!r} + eps) ** alpha = {leaf:.3g} leaves the range of float32"
    else:
        why = "a priority is a finite number ≥ 0 (of a signed error give its absolute value)"
    return ValueError(f"priorities[{j}] = {value!r}: {why}. Nothing was changed")


class Priorities(Reading):
    """What `Buffer` does about priorities. Leaf of a row = ``(priority + eps) ** alpha``; it is drawn with probability leaf / sum."""

    def keep_priorities(
        self,
        alpha: float = 0.6,
        eps: float = 1e-8,
        *,
        max_priority_within_buffer: bool = False,
        timeout: float | None = None,
    ) -> None:
        """From now on rows have priorities; new ones get the largest priority set so far (1.0 before the first; with
        ``max_priority_within_buffer`` the largest of the stored rows). For all processes, once in a buffer's life.

        Args:
            alpha: 0: uniform, 1: in proportion. timeout: seconds until the rows that are there have theirs; None: the buffer's.

        Raises:
            ValueError: a parameter out of range, or the buffer keeps them by another formula. TimeoutError.
        """
        check_formula(alpha, eps)
        timeout = self._timeout if timeout is None else timeout
        status = _STATUS[self._call("keep_priorities", alpha, eps, max_priority_within_buffer, seconds_of(timeout))]
        if status == "other_formula":
            has = self._get("priorities")
            raise ValueError(
                f"buffer {self.name!r} keeps priorities with alpha={has['alpha']:g}, eps={has['eps']:g}, "
                f"max_priority_within_buffer={has['max_priority_within_buffer']}; asked for alpha={alpha:g}, eps={eps:g}, "
                f"max_priority_within_buffer={max_priority_within_buffer}: all processes use one formula"
            )
        if status == "readonly":
            raise PermissionError("a read-only handle cannot make the buffer keep priorities")
        if status == "timeout":
            raise TimeoutError(
                f"the rows of buffer {self.name!r} did not get priorities within {timeout:g} s: {writer_text(self)}"
            )
        if status != "ok":
            raise self._lost(f"{status} while it began to keep priorities")

    def set_priorities(self, ids: Any, priorities: Any) -> np.ndarray:
        """Set priorities of rows by id, in place, for every process at once.

        Args:
            ids: int64[n] row ids. Of an id named twice the last value stays.
            priorities: [n] or one number; finite, ≥ 0.

        Returns:
            bool[n]: where it was applied; not where the row has been overwritten meanwhile (counted in ``stats()``).

        Raises:
            ValueError: a NaN, ±inf or negative priority, or p^alpha outside float32. IndexError: an id never stored.
            Both name position and value; nothing was changed.
        """
        ids = as_ids(ids)
        p = as_priorities(priorities, len(ids))
        applied = np.empty(len(ids), bool)
        status, j = self._call(
            "set_priorities", address_of(ids), address_of(p), len(ids), p.itemsize, address_of(applied)
        )
        if status:
            self._not_set(_STATUS[status], j, ids, p)
        return applied

    def _not_set(self, why: str, j: int, ids: np.ndarray, p: np.ndarray) -> None:
        if why == "unknown_row":
            lo, hi = self.window
            raise IndexError(
                f"ids[{j}] = {ids[j]}: no such row has been stored; "
                + (f"stored now: {lo} to {hi - 1}" if hi > lo else "the buffer is empty")
                + ". Nothing was changed"
            )
        if why == "bad_priority":
            raise bad_priority(self, j, float(p[j]))
        if why == "readonly":
            raise PermissionError("a read-only handle cannot set priorities")
        if why == "destroyed":
            raise self._lost("destroyed: no priority was set")
        raise RuntimeError(f"buffer {self.name!r} keeps no priorities: keep_priorities(alpha, eps) first")

    def priorities(self, ids: Any) -> np.ndarray:
        """float64[n]: priorities as they were set; NaN for rows that are not stored (and with alpha=0, which forgets them)."""
        ids = as_ids(ids)
        out = np.empty(len(ids), np.float64)
        if not self._call("get_priorities", address_of(ids), len(ids), address_of(out)):
            raise RuntimeError(f"buffer {self.name!r} keeps no priorities: keep_priorities(alpha, eps) first")
        return out

    def draw_by_priority(
        self,
        n: int,
        *,
        beta: float = 0.4,
        normalize: str = "buffer",
        stratified: bool = False,
        timeout: float | None = 0.0,
    ) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
        """n rows, each drawn with probability leaf / sum, with replacement.

        Args:
            beta, normalize: weight = (P / P_min) ** -beta, P_min over the ``"buffer"`` or the ``"batch"``: the largest is 1
                (Schaul et al. 2016, eq. 3.4 divided by its maximum).
            stratified: one draw from each of n equal shares of the sum, not n independent draws.

        Returns:
            rows, ids (int64[n]), weights (float32[n]).

        Raises:
            NotEnoughRows, Lapped: see `draw`. RuntimeError: all priorities are 0, or the buffer keeps none.
        """
        check_weighting(beta, normalize)
        seconds_of(timeout)
        if n < 0:
            raise ValueError(f"n={n}: a number of rows ≥ 0")
        timeout = self._wait_schema(timeout)
        out, ids, weights = self._outputs(n), np.empty(n, np.int64), np.empty(n, np.float32)
        with self.sampling(n, timeout) as left:
            self.draw_by_priority_into(
                self._columns, [address_of(a) for a in out], n, address_of(ids), 0, address_of(weights),
                beta, stratified, normalize, seconds_of(left),
            )  # fmt: skip
        return nest(self._schema.keys, out), ids, weights  # type: ignore[union-attr]

    def draw_by_priority_into(
        self,
        columns: Any,
        addresses: list[int],
        n: int,
        ids: int,
        slots: int,
        weights: int,
        beta: float,
        stratified: bool,
        normalize: str,
        seconds: float,
    ) -> None:
        """For the floors above: as `draw_into`, by priority; weights: the address of float32[n]."""
        by_batch = normalize == "batch"
        args = (columns, addresses, n, ids, slots, weights, beta, stratified, by_batch)
        self._drawn("draw_by_priority", args, n, seconds)
