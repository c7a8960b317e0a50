"""Drawing rows by the age of the policy that made them, with TorchRL's arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf._extension import native
from shmbuf.errors import NotEnoughRows, SchemaError
from shmbuf.samplers.base import Sampler, gather, pick, wait_for_rows
from shmbuf.samplers.epochs import check_out
from shmbuf.schema import Column, as_key, show_key
from shmbuf.ticket import left_of

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage

Weight = Callable[[torch.Tensor], torch.Tensor]
# Candidates looked at for a batch, at least, and as a share of the rows; if that does not do, the whole column is read.
LEAST, SHARE = 4096, 0.25
CUSTOM = "custom: "


def freshness(staleness: torch.Tensor) -> torch.Tensor:
    """1 / (staleness + 1), as in TorchRL; of a policy newer than the consumer's: 1."""
    return 1.0 / (staleness.clamp(min=0) + 1.0)


class StalenessAwareSampler(Sampler):
    """Rows of recent policies: ``staleness = consumer_version - version`` of a row is at most ``max_staleness``.

    Args:
        max_staleness: -1: any.
        staleness_weight_fn: float[k] staleness → weights ≥ 0 to draw by. Default: ``1 / (staleness + 1)``; ``"uniform"``: all the
            same. A function of one's own is known to this handle only, and costs a look at all versions for each batch.
        version_key: of the column that holds a row's policy version, one number a row.

    Attributes:
        consumer_version: of the policy now; set it after each update, or give it to one ``sample(consumer_version=)``.

    Rows are drawn with replacement. ``sample`` adds "staleness", float32[n].

    Raises (from ``sample``):
        NotEnoughRows: no row is fresh enough, nor becomes stored within ``timeout``. KeyError: no such column.
    """

    name = "staleness"
    info_keys: ClassVar[tuple[Any, ...]] = ("index", "row_id", "staleness")

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Weight | str | None = None,
        version_key: Any = "policy_version",
    ):
        known = staleness_weight_fn is None or callable(staleness_weight_fn) or staleness_weight_fn == "uniform"
        if not known and not str(staleness_weight_fn).startswith(CUSTOM):
            raise ValueError(f'staleness_weight_fn={staleness_weight_fn!r}: a function, "uniform" or None')
        self.staleness_weight_fn = staleness_weight_fn
        self.version_key = as_key(version_key)
        self.max_staleness = max_staleness
        self.consumer_version = 0

    def arguments(self) -> dict[str, Any]:
        fn = self.staleness_weight_fn
        return {
            "max_staleness": self._max_staleness,
            "staleness_weight_fn": f"{CUSTOM}{getattr(fn, '__qualname__', fn)}" if callable(fn) else fn,
            "version_key": list(self.version_key),
        }

    @property
    def max_staleness(self) -> int:
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        self._max_staleness = _number(value, "max_staleness")

    @property
    def consumer_version(self) -> int:
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        self._consumer_version = _number(value, "consumer_version")

    def increment_consumer_version(self) -> None:
        self._consumer_version += 1

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        consumer_version: int | None = None,
    ) -> TensorDictBase:
        fn = self.staleness_weight_fn
        if isinstance(fn, str) and fn.startswith(CUSTOM):
            raise RuntimeError(
                f"the weights come from a function ({fn.removeprefix(CUSTOM)}) of the process that made the buffer: give this "
                "handle one, set_sampler(StalenessAwareSampler(staleness_weight_fn=...))"
            )
        version = self._consumer_version if consumer_version is None else _number(consumer_version, "consumer_version")
        timeout = wait_for_rows(storage, timeout)
        check_out(storage, out, batch_size)
        draw = _Draw(storage, self, version, timeout)
        ids, staleness = draw.some(batch_size)

        def again(bad: np.ndarray) -> np.ndarray:
            ids, staleness[bad] = draw.some(len(bad))
            return ids[:, None]

        td = gather(storage, ids, again, pin=pin)
        storage.buffer._call("count_stale", int(np.maximum(staleness, 0).sum()), batch_size)
        td.set("staleness", torch.from_numpy(staleness))
        if out is None:
            return td
        if out.get("staleness", None) is None:
            out.set("staleness", torch.empty(batch_size, dtype=torch.float32))
        return out.update_(td)


class _Draw:
    """Ids of rows that are fresh enough, for one batch."""

    def __init__(self, storage: ShmStorage, sampler: StalenessAwareSampler, version: int, timeout: float | None):
        self.storage, self.version, self.timeout, self.since = storage, version, timeout, time.monotonic()
        self.most = float("inf") if sampler.max_staleness < 0 else sampler.max_staleness
        fn = sampler.staleness_weight_fn
        self.own: Weight | None = fn if callable(fn) else None  # no bound is known: no rejection
        self.uniform = fn == "uniform"
        self.column, self.columns = _version_column(storage, sampler.version_key)
        self.dtype = getattr(torch, self.column.dtype)
        self.random = storage.buffer.generator()
        self.scanned: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def some(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """int64[n] ids, float32[n] staleness; independent draws by weight among the rows that may be drawn."""
        if self.own is None and self.scanned is None:
            found = self._by_rejection(n)
            if found is not None:
                return found
        return self._by_scan(n)

    def _staleness(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64[m] of the rows of the ids, and which of them are (still) stored."""
        versions = torch.empty((len(ids), *self.column.shape), dtype=self.dtype)
        there = self.storage.buffer.fetch_into(self.columns, [versions.data_ptr()], ids)
        return self.version - versions.to(torch.float64).reshape(len(ids)).numpy(), there

    def _weights(self, staleness: np.ndarray) -> np.ndarray:
        if self.uniform:
            return np.ones(len(staleness))
        given = torch.from_numpy(staleness)
        weights = (self.own or freshness)(given.to(torch.float32) if self.own else given)
        out = torch.as_tensor(weights).detach().cpu().to(torch.float64).numpy()
        if out.shape != staleness.shape or not np.isfinite(out).all() or (out < 0).any():
            raise ValueError(
                f"staleness_weight_fn gave {'shape ' + str(list(out.shape)) if out.shape != staleness.shape else 'NaN, inf or < 0'} "
                f"for {len(staleness):,} rows: one finite number ≥ 0 for each is needed"
            )
        return out

    def _by_rejection(self, n: int) -> tuple[np.ndarray, np.ndarray] | None:
        ids, stale, have, tried = np.empty(n, np.int64), np.empty(n, np.float32), 0, 0
        left = max(LEAST, int(SHARE * len(self.storage.buffer)))
        more = 4 * n
        while have < n:
            if more > 2 * left:
                return None
            more = min(more, left)
            candidates = pick(self.storage, more, left_of(self.timeout, self.since))
            staleness, ok = self._staleness(candidates)
            ok = ok & (staleness <= self.most)
            if not self.uniform:  # the weights are at most 1
                ok[ok] = self.random.random(int(ok.sum())) < self._weights(staleness[ok])
            chosen = np.flatnonzero(ok)[: n - have]
            ids[have : have + len(chosen)], stale[have : have + len(chosen)] = candidates[chosen], staleness[chosen]
            have, tried, left = have + len(chosen), tried + more, left - more
            more = (n - have) * tried * 5 // (have * 4) + 64 if have else 8 * more
        return ids, stale

    def _by_scan(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        if self.scanned is None or self.scanned[0][-1] < self.storage.buffer.window[0] or not self._still(n):
            self.scanned = self._scan()
        ids, staleness, sums = self.scanned
        at = np.searchsorted(sums, self.random.random(n) * sums[-1], side="right")
        at = np.minimum(at, len(ids) - 1)
        return ids[at], staleness[at].astype(np.float32)

    def _still(self, n: int) -> bool:
        """Whether most of what was scanned has not been overwritten since."""
        assert self.scanned is not None
        ids, lo = self.scanned[0], self.storage.buffer.window[0]
        return 2 * int((ids >= lo).sum()) > len(ids)

    def _scan(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All rows that may be drawn: ids, staleness, sums of their weights. Waits for them."""
        buffer, nap = self.storage.buffer, 1e-3
        while True:
            count = buffer.write_count
            buffer.wait_readable(self._look, left_of(self.timeout, self.since))
            ids, staleness, there = self.seen
            ok = there & (staleness <= self.most)
            if ok.any():
                weights = self._weights(staleness[ok])
                if not weights.sum() > 0:
                    raise RuntimeError(
                        f"staleness_weight_fn gives each of the {int(ok.sum()):,} rows with a staleness up to {self.most:g} "
                        "the weight 0"
                    )
                return ids[ok], staleness[ok], np.cumsum(weights)
            left = left_of(self.timeout, self.since)
            if left == 0:
                raise NotEnoughRows(self._all_stale(staleness[there]))
            while buffer.write_count == count and (left is None or left > 0):
                if not buffer._readonly:
                    buffer._call("help")
                time.sleep(nap if left is None else min(nap, left))
                nap, left = min(2 * nap, 1e-2), left_of(self.timeout, self.since)

    def _look(self) -> bool:
        ids = np.arange(*self.storage.buffer.window, dtype=np.int64)
        self.seen = (ids, *self._staleness(ids))
        return bool(self.seen[2].any())

    def _all_stale(self, staleness: np.ndarray) -> str:
        newest = f"; the newest is of version {self.version - staleness.min():g}" if len(staleness) else ""
        after = f" after {self.timeout:.3g} s" if self.timeout else ""
        return (
            f"All {len(staleness):,} entries in the buffer exceed max_staleness={self.most:g} "
            f"(consumer_version={self.version}{newest}){after}. Increase max_staleness, or update the collectors' policies "
            "more often"
        )


def _version_column(storage: ShmStorage, key: tuple[str, ...]) -> tuple[Column, Any]:
    schema = storage.schema()
    column = next((c for c in schema.columns if c.key == key), None)
    if column is None:
        raise KeyError(
            f"no column {show_key(key)} with a policy version; there are {', '.join(map(show_key, schema.keys))}"
        )
    if int(np.prod(column.shape, dtype=np.int64)) != 1 or "complex" in column.dtype:
        raise SchemaError(f"key {show_key(key)}: {column} is no policy version, which is one real number a row")
    columns = native.Columns()
    columns.add(column.offset, column.nbytes, list(column.shape), "", None)
    return column, columns


def _number(value: Any, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}={value!r}: a whole number")
    return int(value)
