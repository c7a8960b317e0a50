"""The one conservation check. Every row names its writer and number and carries a payload computed from them, so that a row
can be judged alone (not torn, not mixed) and all rows together (none lost, doubled or out of order)."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from shmbuf import Buffer

WORDS = 13  # payload of 104 bytes: rows straddle cache lines and ring ends
SCHEMA = {"who": "int64", "k": "int64", "payload": ("uint64", (WORDS,))}
ENDING = {**SCHEMA, "done": "bool"}  # rows with ends, for buffers that keep trajectories
APART = 99  # this writer puts every row into a stream of its own


def payload(who: np.ndarray, k: np.ndarray, words: int = WORDS) -> np.ndarray:
    """uint64[n, words], another one for every (who, k, word): splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        x = (who.astype(np.uint64) << np.uint64(40)) ^ k.astype(np.uint64)
        x = x[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.arange(1, words + 1, dtype=np.uint64) * np.uint64(
            0xD1342543DE82EF95
        )
        for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(by)
        return x ^ (x >> np.uint64(31))


def make_rows(who: int, first: int, n: int, *, ends: bool = False) -> dict:
    k = np.arange(first, first + n, dtype=np.int64)
    w = np.full(n, who, np.int64)
    rows = {"who": w, "k": k, "payload": payload(w, k)}
    return {**rows, "done": is_end(k)} if ends else rows


def edited(rows: dict) -> dict:
    """What an edit of these rows sets: all bits of their payload turned."""
    return {"payload": ~rows["payload"]}


def stream_of(who: int, k: np.ndarray) -> np.ndarray:
    """Which of its streams a writer that has several puts its k-th row into."""
    return k if who == APART else k // 2 % 3


def is_end(k: np.ndarray) -> np.ndarray:
    return k % 17 >= 15


def check_rows(rows: dict) -> None:
    """Each row is byte for byte one that was handed in, or what `edited` made of it."""
    right = payload(rows["who"], rows["k"])
    bad = (rows["payload"] != right).any(axis=1) & (rows["payload"] != ~right).any(axis=1)
    assert not bad.any(), f"{bad.sum()} torn rows of {len(bad)}, first: who={rows['who'][bad][0]} k={rows['k'][bad][0]}"


class Acks:
    """How many rows each writer was told are in the ring; survives its death. who = index into the file."""

    def __init__(self, path: str | Path, writers: int = 4096):
        self.path = str(path)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        size = max(os.fstat(fd).st_size, writers * 8)
        os.ftruncate(fd, size)
        self.counts = np.frombuffer(mmap.mmap(fd, size), np.int64)
        os.close(fd)


def settle(buffer: Buffer) -> None:
    """Until every ring is empty; whoever holds the role is waited for by the test's own timeout."""
    while any(c["ring_used"] for c in buffer.collectors()):
        if not buffer.drain():
            os.sched_yield()


def check_links(buffer: Buffer, streams: bool, cuts: int | None = 0) -> None:
    """At rest, if trajectories are kept: every live row lies in exactly one, and is followed by the next row of its stream.

    Args:
        streams: rows were put with ``stream_of``, else all of a writer into one.
        cuts: how many trajectories may have been cut, as a collector that came back does; None: any number.
    """
    lo, hi = buffer.window
    if buffer.schema is None or not buffer.marks.keep or lo == hi:
        return
    rows = buffer.gather(np.arange(lo, hi))
    who, k, done = rows["who"], rows["k"], rows.get("done", np.zeros(hi - lo, bool))
    stream = np.array([stream_of(w, n) if streams else 0 for w, n in zip(who, k, strict=True)])
    following: dict[int, int] = {}  # the next row of the same stream
    last: dict[tuple[int, int], int] = {}
    for i, key in enumerate(zip(who.tolist(), stream.tolist(), strict=True)):
        if key in last:
            following[last[key]] = i
        last[key] = i
    ends, firsts, _, _ = buffer._handle.trajectories()
    seen, cut = np.zeros(hi - lo, int), 0
    for end, first in zip(ends, firsts, strict=True):
        t = np.array(buffer._handle.trajectory(end)) - lo
        assert t[0] == first - lo and t[-1] == end - lo, (end, first, t)
        seen[t] += 1
        for a, b in zip(t[:-1].tolist(), t[1:].tolist(), strict=True):
            assert following.get(a) == b, (
                f"row {a} of stream {who[a], stream[a]} is followed by {b}, not {following.get(a)}"
            )
        assert not done[t[:-1]].any(), f"trajectory {first} to {end} goes on after an end"
        cut += not done[t[-1]] and int(t[-1]) in following
    assert (seen == 1).all(), f"rows {np.flatnonzero(seen != 1)[:9] + lo} lie in {seen[seen != 1][:9]} trajectories"
    assert cuts is None or cut <= cuts, f"{cut} trajectories were cut"


def check(
    buffer: Buffer,
    acks: np.ndarray,
    largest_put: int,
    *,
    whole: bool = False,
    streams: bool = False,
    cuts: int | None = 0,
) -> dict:
    """At rest, after `settle`: the invariants and the accounts.

    Args:
        acks: rows acknowledged per writer.
        largest_put: a writer killed inside a put may have put that many more.
        whole: the buffer never wrapped nor was emptied, so all rows are there.
        streams, cuts: see `check_links`.
    """
    s = buffer.stats()
    assert s["first_id"] <= s["end_id"] and s["size"] <= buffer.capacity
    assert s["clears"] or s["reserve"] >= s["end_id"], s
    for c in buffer.collectors():
        assert 0 <= c["ring_used"] <= c["ring_bytes"], c
    assert s["malformed_records"] == 0, s
    assert buffer._handle.check_tree() == 0, "stale sums of priorities"
    check_links(buffer, streams, cuts)
    lo, hi = buffer.window
    rows = buffer.gather(np.arange(lo, hi))
    if hi > lo:
        check_rows(rows)
        for who in np.unique(rows["who"]):
            k = rows["k"][rows["who"] == who]
            assert (np.diff(k) == 1).all(), f"writer {who}: not consecutive: {k[:20]} … (lost, doubled or out of order)"
            stored = int(k[-1]) + 1
            assert acks[who] <= stored <= acks[who] + largest_put, (
                f"writer {who}: {acks[who]} acknowledged, {stored} stored"
            )
            if whole:
                assert k[0] == 0, f"writer {who}: rows before {k[0]} are gone"
    if whole:
        seen = set(np.unique(rows["who"]).tolist()) if hi > lo else set()
        missing = [w for w in np.flatnonzero(acks) if w not in seen]
        assert not missing, f"writers {missing}: acknowledged rows, none stored"
    if not s["clears"]:
        assert (
            int(acks.sum())
            <= s["rows_total"] + s["skipped_rows"]
            <= int(acks.sum()) + largest_put * int((acks > 0).sum() + 1)
        )
        assert s["rows_total"] + s["skipped_rows"] <= s["put_rows"]
    return s
