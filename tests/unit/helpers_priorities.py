"""What the tests of priorities share. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from shmbuf import Buffer
from tests.unit.helpers import figures, k


def prioritised(make, p, *, capacity: int | None = None, alpha: float = 1.0, eps: float = 0.0, **kw) -> Buffer:
    """A full buffer (unless capacity says more) of rows k = 0 … with these priorities."""
    own = {c: kw.pop(c) for c in list(kw) if c == "max_priority_within_buffer"}
    buf = make(capacity or len(p), **{"schema": {"k": "int64"}, **kw})
    buf.keep_priorities(alpha, eps, **own)
    if len(p):
        buf.extend(k(*range(len(p))), priorities=np.asarray(p, np.float64))
    buf.seed(1)
    return buf


def state(buf: Buffer) -> dict:
    return buf._get("priorities")


def total(buf: Buffer) -> float:
    return state(buf)["sum"]


def all_priorities(buf: Buffer) -> np.ndarray:
    return buf.priorities(range(*buf.window))


def at_rest(buf: Buffer) -> None:
    """No node of the tree differs from what its children say; the root is the sum of the leaves."""
    assert buf._handle.check_tree() == 0
    has = state(buf)
    if has["alpha"]:
        leaves = (np.maximum(all_priorities(buf), 0) + has["eps"]) ** has["alpha"]
        np.testing.assert_allclose(has["sum"], leaves.sum(), rtol=1e-5)


def drawn(buf: Buffer, n: int, batch: int | None = None, *, stratified: bool = False) -> np.ndarray:
    """ids of n draws."""
    batch = batch or n
    return np.concatenate([buf.draw_by_priority(batch, stratified=stratified)[1] for _ in range(n // batch)])


def chi2_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """P(χ² as large or larger), after Wilson and Hilferty (1931)."""
    df = len(observed) - 1
    x = float((((observed - expected) ** 2) / expected).sum())
    z = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return math.erfc(z / math.sqrt(2)) / 2


def counters(buf: Buffer) -> dict:
    """All that a refused call may not move."""
    return {**figures(buf), "priorities": state(buf), "each": all_priorities(buf).tobytes() if state(buf) else b""}


@contextmanager
def no_change(*handles: Buffer) -> Iterator[None]:
    """Priorities, counters and rows are the same afterwards, through every one of these handles."""
    before = [counters(b) for b in handles]
    try:
        yield
    finally:
        assert [counters(b) for b in handles] == before
