"""Processes beside each other on one buffer in device memory: `python -m tests.cuda.actors WHAT NAME ACKS WHO`. Each goes on until it is killed."""

from __future__ import annotations

import random
import sys

import numpy as np

from shmbuf import Buffer
from shmbuf.errors import Lapped, NotEnoughRows
from tests import oracle

LARGEST = 12


def collect(buffer: Buffer, acks: np.ndarray, who: int, from_device: bool) -> None:
    rng, k = random.Random(who), 0
    while True:
        n = rng.randint(1, LARGEST)
        rows = oracle.make_rows(who, k, n)
        if from_device:
            columns = [(c.offset, c.nbytes, rows[c.key[-1]].ctypes.data) for c in buffer.schema.columns]  # type: ignore[union-attr]
            ticket = buffer.submit_device(columns, n, True, 60.0, lambda ids, n: ids, (None, None), 0)
            assert ticket is not None, "no device ring is free"
        else:
            ticket = buffer.put(rows, timeout=60)
        k += n
        acks[who] = k
        if rng.random() < 0.1:
            assert len(ticket.wait(60)) == n


def read(buffer: Buffer) -> None:
    n, rng = 200, np.random.default_rng()
    schema = buffer.schema
    assert schema is not None
    out = [np.empty((n, *c.shape), c.numpy) for c in schema.columns]
    columns = [(c.offset, c.nbytes, o.ctypes.data) for c, o in zip(schema.columns, out, strict=True)]
    seen = 0
    while True:
        try:
            oracle.check_rows(buffer.draw(n, timeout=60)[0])
            lo, hi = buffer.window
            if hi <= lo:
                continue
            ids, done = rng.integers(lo, hi, n), np.zeros(n, np.uint8)
            buffer._handle.gather_device(columns, n, ids.ctypes.data, done.ctypes.data)
            good = done.astype(bool)
            oracle.check_rows({c.key[-1]: o[good] for c, o in zip(schema.columns, out, strict=True)})
            seen += 1
            if seen == 20:
                print("read", flush=True)
        except (Lapped, NotEnoughRows):
            pass


def edit(buffer: Buffer) -> None:
    """Of rows that are read: their payload, turned."""
    rng = np.random.default_rng()
    while True:
        lo, hi = buffer.window
        if hi - lo < 8:
            continue
        ids = np.unique(rng.integers((lo + hi) // 2, hi, 6))
        rows, valid = buffer.try_gather(ids)
        oracle.check_rows({k: v[valid] for k, v in rows.items()})
        turned = oracle.edited({k: v[valid] for k, v in rows.items()})
        if valid.any():
            buffer.edit(ids[valid], turned, timeout=60)


def main(what: str, name: str, acks_path: str, who: str) -> None:
    buffer = Buffer.attach(name)
    if what == "drain":
        while True:
            buffer.drain()
    elif what == "read":
        read(buffer)
    elif what == "edit":
        edit(buffer)
    else:
        collect(buffer, oracle.Acks(acks_path).counts, int(who), what == "device")


if __name__ == "__main__":
    main(*sys.argv[1:])
