"""What the numpy-level tests share. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest

from shmbuf import Buffer, RingFull, Schema, devices, segment
from shmbuf.schema import flatten

SPEC = {"obs": ("float32", (4,)), "next": {"obs": ("float32", (4,)), "done": "bool"}, "k": "int64"}  # 48 bytes a row
ROW = Schema.from_spec(SPEC).row_bytes
RING = 4096
RECORD = -(-(32 + ROW) // 32) * 32  # bytes in the ring of a put of one row
FITS = RING // RECORD  # such puts fill the ring
WHOLE = (RING // 2 - 32) // ROW  # rows of the largest record
SMALL = {"schema": {"k": "int64"}, "drain": "caller", "ring_bytes": 4096, "max_collectors": 4}


def rows(first: int, n: int = 1) -> dict:
    """n rows of SPEC, numbered from `first`; every value follows from the number."""
    k = np.arange(first, first + n, dtype=np.int64)
    obs = (k[:, None] * 8 + np.arange(4)).astype(np.float32)
    return {"obs": obs, "next": {"obs": obs + 4, "done": k % 3 == 0}, "k": k}


def k(*numbers: int) -> dict:
    """Rows of SMALL's schema."""
    return {"k": np.array(numbers, np.int64)}


def same(got: Mapping, expected: Mapping) -> bool:
    """Same keys, dtypes, shapes and bytes."""
    a, b = flatten(got), flatten(expected)
    return a.keys() == b.keys() and all(
        raw(a[k]) == raw(b[k]) and a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a
    )


def raw(a: Any) -> bytes:
    return np.ascontiguousarray(a).tobytes()


def stored(buf: Buffer) -> dict:
    """All rows, oldest first."""
    return buf.gather(np.arange(*buf.window))


def numbers(buf: Buffer) -> list[int]:
    """Column k of all rows, oldest first."""
    return stored(buf)["k"].tolist() if len(buf) else []


def figures(buf: Buffer) -> dict:
    """All that a call which raises must not move (who looked last whether there is anything to write may change)."""
    s = {k: v for k, v in buf.stats().items() if k not in ("writer_age", "writer_pid", "writer_pid_namespace")}
    return {
        **s,
        "len": len(buf),
        "window": buf.window,
        "write_count": buf.write_count,
        "schema": buf.schema,
        "rings": [(c["slot"], c["ring_used"], c["put_rows"], c["stored_rows"]) for c in buf.collectors()],
    }


@contextmanager
def unmoved(buf: Buffer) -> Iterator[None]:
    """Length, counters, rows and rings are the same afterwards, also when the block raises."""
    before, content = figures(buf), stored(buf) if len(buf) else {}
    try:
        yield
    finally:
        assert figures(buf) == before
        assert not content or same(stored(buf), content)


@contextmanager
def stuck_drainer(name: str) -> Iterator[None]:
    """Somebody else holds the writer role and does nothing, as a process does that was stopped there."""
    handle = segment.attach(name, presence=False)
    place = devices.Place(name, msgpack.unpackb(handle.config).get("device"))
    place.map(handle)  # only who has the rows takes the role
    assert handle.try_take_role()
    try:
        yield
    finally:
        handle.give_back_role()
        handle.close()
        place.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def fill(buf: Buffer, first: int) -> int:
    """Puts of one row until the ring has no room; how many went in. Only with full="error" or timeout=0, and a stuck drainer."""
    n = 0
    with pytest.raises(RingFull):
        while True:
            buf.put(rows(first + n), timeout=0)
            n += 1
    return n
