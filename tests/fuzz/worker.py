"""A process that attaches to damaged segments, one after another, and uses each in every way there is. One line of JSON in
(name, readonly), one line out: how each call ended. What kills it, or keeps it, is a finding."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuf import Buffer, RateLimiter, ShmbufError, reading
from shmbuf.cli import checking
from shmbuf.cli import main as shminfo
from shmbuf.cli.looking import look

checking.PATIENCE, checking.STALE = 0.0, 0.01
reading.PATIENCE = 0.05  # seconds that readers wait for a writer that is stopped
SOON = 0.02
# What the documentation of a call names besides ShmbufError; (class, a part of the text).
DOCUMENTED: tuple[tuple[type[Exception], str], ...] = (
    (PermissionError, "read-only"),
    (RuntimeError, "no row can be drawn: all"),
    (RuntimeError, "keeps no priorities: keep_priorities"),
    (RuntimeError, "keeps no trajectories"),
    (ValueError, "can never be sampled"),
    (ValueError, "all processes use one formula"),
    (ValueError, "keeps priorities with alpha="),
    (ValueError, "priority "),  # one that the formula that is there takes out of range
    (ValueError, "all use the same options"),
    (TimeoutError, "did not get priorities within"),
    (TimeoutError, "limiter is being changed"),
    (IndexError, "no such row has been stored"),
)


def ids_of(buf: Buffer) -> range:
    lo, hi = buf.window
    assert 0 <= lo <= hi and hi - lo <= buf.capacity, f"window {lo}, {hi} of capacity {buf.capacity}"
    return range(max(lo, hi - 8), hi)


def any_ids(buf: Buffer) -> np.ndarray:
    some = [*ids_of(buf), 0, 3, buf.capacity, 1 << 40, -1, (1 << 63) - 1]
    return np.array([i for i in some if i < 1 << 63], np.int64)


def some_rows(buf: Buffer, n: int) -> dict:
    if buf.schema is None:
        return {"k": np.arange(n)}
    return {c.key: np.zeros((n, *c.shape), c.numpy) for c in buf.schema.columns}


def size(buf: Buffer) -> None:
    assert len(buf) <= buf.capacity


LOOK: dict[str, Callable[[Buffer], Any]] = {
    "len": size,
    "schema": lambda b: b.schema,
    "window": ids_of,
    "stats": lambda b: b.stats(),
    "members": lambda b: b.members(),
    "collectors": lambda b: b.collectors(),
    "repr": repr,
    "events": lambda b: b.events(),
    "ages": lambda b: b.ages(),
    "check": lambda b: b.check(),
    "draw": lambda b: b.draw(8, timeout=SOON),
    "gather": lambda b: b.gather(ids_of(b)),
    "try_gather": lambda b: b.try_gather(any_ids(b)),
    "draw_by_priority": lambda b: b.draw_by_priority(8, timeout=SOON),
    "stratified": lambda b: b.draw_by_priority(8, stratified=True, normalize="batch", timeout=SOON),
    "priorities": lambda b: b.priorities(any_ids(b)),
    "draw_slices": lambda b: b.draw_slices(4, 3, timeout=SOON),
    "draw_slices by start": lambda b: b.draw_slices(4, 5, strict=False, by="start", left=2, right=1, timeout=SOON),
    "trajectories": lambda b: [b.trajectory(t.end) for t in b.trajectories()],
    "walk_back": lambda b: b.walk_back(ids_of(b), 4),
    "following": lambda b: b.following(any_ids(b)),
    "newest": lambda b: b.newest(4, timeout=SOON),
    "epoch": lambda b: b.epoch(seed=1).draw(9, timeout=SOON),
    "limiter": lambda b: (b.limiter, b.limiter_state(8)),
}
CHANGE: dict[str, Callable[[Buffer], Any]] = {
    "drain": lambda b: b.drain(),
    "put": lambda b: b.put(some_rows(b, 3), timeout=SOON),
    "extend": lambda b: b.extend(some_rows(b, 9), priorities=1.5, timeout=SOON),
    "shared epoch": lambda b: b.epoch(shared=True).draw(9, timeout=SOON),
    "consume": lambda b: b.consume().draw(9, timeout=SOON),
    "set_priorities": lambda b: b.set_priorities(ids_of(b), 2.0),
    "keep_priorities": lambda b: b.keep_priorities(0.6, 1e-6, timeout=SOON),
    "empty": lambda b: b.empty(timeout=SOON),
    "extend again": lambda b: b.extend(some_rows(b, 70), timeout=SOON),
    "set_limiter": lambda b: b.set_limiter(RateLimiter(1.0, 1, error_buffer=100)),
    "sweep": lambda b: b._handle.sweep(),
    "scrub": lambda b: b._handle.scrub(),
    "draw again": lambda b: b.draw(8, timeout=SOON),
}


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
        return "ok"
    except ShmbufError as e:
        return type(e).__name__
    except Exception as e:
        if any(type(e) is c and text in str(e) for c, text in DOCUMENTED):
            return type(e).__name__
        import traceback

        return f"UNEXPECTED {traceback.format_exc()}"


def use(name: str, readonly: bool) -> dict[str, str]:
    out = {}

    def attach() -> None:
        nonlocal buf
        buf = Buffer.attach(name, readonly=readonly)

    def show(*arguments: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert shminfo(list(arguments)) in (0, 1)

    def doing(what: str, call: Callable[[], Any]) -> None:
        print(what, file=sys.stderr)  # the last line, of who does not come back
        out[what] = outcome(call)

    buf: Buffer | None = None
    doing("look", lambda: look(name, os.getuid(), whole=True))
    doing("shminfo show", lambda: show("show", name))
    doing("shminfo show --json", lambda: show("show", name, "--json"))
    doing("shminfo check", lambda: show("check", name))
    doing("attach", attach)
    if buf is None:
        assert out["attach"].startswith("UNEXPECTED") or out["attach"] == "BufferFormatError", out["attach"]
        return out
    for what, call in {**LOOK, **({} if readonly else CHANGE)}.items():
        doing(what, lambda call=call: call(buf))  # type: ignore[misc]
    if not readonly:
        for what in ("stats", "collectors", "draw_slices", "draw_by_priority", "trajectories"):
            doing(f"{what}, changed", lambda what=what: LOOK[what](buf))  # type: ignore[misc]
        doing("look, changed", lambda: look(name, os.getuid(), whole=True))
    doing("close", buf.close)
    return out


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(use(*json.loads(line))), flush=True)
