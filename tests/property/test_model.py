"""A buffer against a plain Python model: one dict from id to number, one list of waiting tickets per handle. drain="caller", so every
step is deterministic; a stuck drainer is a handle that holds the writer role."""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmbuf import Buffer, CommitPending, Lapped, NotEnoughRows, RingFull, destroy, segment
from tests.conftest import PREFIX

SPEC = {
    "k": "int64",
    "check": ("int64", (5,)),
}  # 48 bytes a row: 42 puts of one row, or one of 42 rows, fill half of the smallest ring
RING = 4096
FEW = st.integers(1, 5)
MANY = st.integers(40, 300)  # larger than half the ring, than the ring, than the capacity


def rows(first: int, n: int) -> dict:
    k = np.arange(first, first + n)
    return {"k": k, "check": k[:, None] * 31 + np.arange(5)}


class Model(RuleBasedStateMachine):
    handles: list[Buffer]

    @initialize(
        capacity=st.sampled_from([1, 2, 7, 30, 64, 400]),
        full=st.sampled_from(["block", "error", "drop_newest", "drop_oldest"]),
        late=st.booleans(),
    )
    def create(self, capacity: int, full: str, late: bool) -> None:
        self.name = f"{PREFIX}{secrets.token_hex(4)}"
        self.capacity, self.full = capacity, full
        self.handles = [
            Buffer.create(
                self.name,
                capacity,
                schema=None if late else SPEC,
                ring_bytes=RING,
                max_collectors=8,
                full=full,
                drain="caller",
            )
        ]
        self.waiting: dict[Buffer, deque] = {self.handles[0]: deque()}  # (ticket, numbers it carries)
        self.stored: dict[int, int] = {}  # id → number, everything ever committed
        self.given = 0  # rows handed in, refused ones too: the next number
        self.dropped: set[int] = set()
        self.refused = 0
        self.base, self.write_base = 0, 0  # first live id; rows stored before the last emptying that reset write_count
        self.clears = 0
        self.role = None
        self.marks: dict[int, int] = {}  # id → what the last edit of it left
        self.stale = 0

    # ---- helpers ----

    def buf(self, i: int) -> Buffer:
        return self.handles[i % len(self.handles)]

    @property
    def stuck(self) -> bool:
        return self.role is not None

    def collect(self) -> None:
        """Take over what tickets know by now."""
        for queue in self.waiting.values():
            for _ in range(len(queue)):
                ticket, numbers = queue.popleft()
                if ticket.done():
                    self.committed(ticket, numbers)
                else:
                    queue.append((ticket, numbers))

    def committed(self, ticket, numbers: list[int]) -> None:
        """What became of each record of a ticket: its rows' ids, or dropped."""
        ids, at = ticket.wait(0).tolist(), 0
        for n, first in ticket._native.pieces():
            if first is None:
                assert self.full == "drop_oldest"
                self.dropped.update(numbers[at : at + n])
            else:
                assert ids[:n] == list(range(first, first + n)) and not self.stored.keys() & set(ids[:n]), (
                    "an id never repeats"
                )
                self.stored.update(zip(ids[:n], numbers[at : at + n], strict=True))
                del ids[:n]
            at += n
        assert not ids and at == len(numbers)

    def accept(self, buf: Buffer, ticket, numbers: list[int]) -> None:
        """The first ticket.rows of the numbers went in; the others did not."""
        if ticket.rows:
            self.waiting[buf].append((ticket, numbers[: ticket.rows]))

    def take(self, n: int) -> tuple[int, list[int]]:
        first = self.given
        self.given += n
        return first, list(range(first, first + n))

    # ---- rules ----

    @rule(i=st.integers(0, 2), n=FEW | MANY)
    def put(self, i: int, n: int) -> None:
        buf, (first, numbers) = self.buf(i), self.take(n)
        try:
            ticket = buf.put(rows(first, n), timeout=0)
        except RingFull:
            assert self.stuck or self.full == "error"
            assert self.full in ("block", "error")
            self.refused += n
        except CommitPending as e:
            assert (self.stuck or self.full == "error") and 0 < e.rows < n
            self.accept(buf, e.ticket, numbers)
            self.refused += n - e.rows
        else:
            assert ticket.rows == n or self.full.startswith("drop")
            self.accept(buf, ticket, numbers)
            self.dropped.update(numbers[ticket.rows :])

    @rule(i=st.integers(0, 2), n=FEW | MANY)
    @precondition(lambda self: self.full == "block")
    def put_and_wait(self, i: int, n: int) -> None:
        buf, (first, numbers) = self.buf(i), self.take(n)
        try:
            ticket = buf.put(rows(first, n), timeout=0)
            ids = ticket.wait(0)
        except RingFull:
            assert self.stuck
            self.refused += n
        except CommitPending as e:
            assert self.stuck
            self.accept(buf, e.ticket, numbers)
            self.refused += n - e.rows
        else:
            assert not self.stuck and len(ids) == n
            self.committed(ticket, numbers)
            self.collect()
            assert not self.waiting[buf], "its earlier puts are before it"

    @rule(i=st.integers(0, 2))
    def drain(self, i: int) -> None:
        moved = self.buf(i).drain()
        assert not (moved and self.stuck)
        if not self.stuck:
            self.at_rest()

    @rule(i=st.integers(0, 2), n=st.integers(0, 50))
    def draw(self, i: int, n: int) -> None:
        buf = self.buf(i)
        try:
            got, ids = buf.draw(n)
        except NotEnoughRows:
            assert len(buf) == 0
            return
        self.collect()
        assert len(ids) == n
        if n:
            lo, hi = buf.window
            assert lo <= ids.min() and ids.max() < hi
            self.check(ids, got)

    @rule(i=st.integers(0, 2), offsets=st.lists(st.integers(-5, 80), max_size=20))
    def gather(self, i: int, offsets: list[int]) -> None:
        buf = self.buf(i)
        lo, hi = buf.window
        ids = np.array([hi - 1 - o for o in offsets], np.int64)
        got, valid = buf.try_gather(ids)
        assert valid.tolist() == [lo <= x < hi for x in ids.tolist()]
        if buf.schema is not None:
            self.collect()
            self.check(ids[valid], {k: v[valid] for k, v in got.items()})
        if not valid.all():
            with suppress(Lapped):
                buf.gather(ids)
                raise AssertionError("gather of ids that are not stored")

    @rule(i=st.integers(0, 2), keep=st.booleans())
    @precondition(lambda self: not self.stuck)
    def empty(self, i: int, keep: bool) -> None:
        buf = self.buf(i)
        buf.empty(empty_write_count=not keep)
        if buf.schema is None:
            return
        self.collect()
        assert not any(self.waiting.values()) and len(buf) == 0, "what was put before, by anybody, is gone"
        self.clears += 1
        end = max([*self.stored, self.base - 1]) + 1
        self.base = -(-end // self.capacity) * self.capacity
        if not keep:
            self.write_base = len(self.stored)
        self.at_rest()

    @rule(i=st.integers(0, 2), offsets=st.lists(st.integers(0, 500), max_size=70), both=st.booleans())
    @precondition(lambda self: not self.stuck and self.handles[0].schema is not None)
    def edit(self, i: int, offsets: list[int], both: bool) -> None:
        buf = self.buf(i)
        buf.drain()
        self.at_rest()
        lo, hi = buf.window
        ids = [hi - 1 - o for o in offsets if hi - 1 - o >= 0]
        mark, k = len(self.marks) + self.stale + 1, np.array([self.stored.get(x, 0) for x in ids], np.int64)
        new = {"check": k[:, None] * 31 + np.arange(5) + 1000 * mark, **({"k": k} if both else {})}
        live = [lo <= x < hi for x in ids]
        assert buf.edit(ids, new, timeout=0).tolist() == live
        self.marks.update((x, mark) for x, there in zip(ids, live, strict=True) if there)
        self.stale += len(ids) - sum(live)
        self.at_rest()

    @rule()
    @precondition(lambda self: len(self.handles) < 3)
    def attach(self) -> None:
        self.handles.append(Buffer.attach(self.name))
        self.waiting[self.handles[-1]] = deque()

    @rule(i=st.integers(0, 2))
    @precondition(lambda self: len(self.handles) > 1 and not self.stuck)
    def close(self, i: int) -> None:
        buf = self.buf(i)
        self.handles.remove(buf)
        queue = self.waiting.pop(buf)
        for ticket, _ in queue:
            ticket.done()  # looks, so that it is known after the handle's end
        buf.close()  # drains
        for ticket, numbers in queue:
            self.committed(ticket, numbers)

    @rule()
    @precondition(lambda self: not self.stuck)
    def stop_the_drainer(self) -> None:
        self.role = segment.attach(self.name, presence=False)
        if not self.role.try_take_role():  # there are no rings before the schema
            assert self.handles[0].schema is None
            self.resume()

    @rule()
    @precondition(lambda self: self.stuck)
    def resume(self) -> None:
        self.role.give_back_role()
        self.role.close()
        self.role = None

    # ---- what must hold ----

    def check(self, ids: np.ndarray, got: dict) -> None:
        """Whole rows; those whose ids are known are the right ones, the others were handed in and still wait for their ticket."""
        marks = np.array([self.marks.get(i, 0) for i in ids.tolist()], np.int64)
        assert (got["check"] == (got["k"] * 31 + 1000 * marks)[:, None] + np.arange(5)).all(), "torn, or another edit"
        pending = {n for queue in self.waiting.values() for _, numbers in queue for n in numbers}
        for i, k in zip(ids.tolist(), got["k"].tolist(), strict=True):
            assert self.stored.get(i, k) == k and (i in self.stored or k in pending)

    def at_rest(self) -> None:
        """Every ring is empty: the model knows everything."""
        self.collect()
        assert not any(self.waiting.values())
        buf = self.handles[0]
        s = buf.stats()
        live = {i: k for i, k in self.stored.items() if i >= self.base}
        end = max(live, default=self.base - 1) + 1
        assert sorted(live) == list(range(self.base, end)), "no gap in the ids"
        lo = max(self.base, end - self.capacity)
        assert buf.window == (lo, end) and len(buf) == end - lo == s["size"]
        assert buf.write_count == len(self.stored) - self.write_base and s["rows_total"] == len(self.stored)
        assert s["dropped_rows"] + s["skipped_rows"] == len(self.dropped) and s["refused_rows"] == self.refused
        assert (
            s["put_rows"] == len(self.stored) + s["skipped_rows"]
            and self.given == s["put_rows"] + s["dropped_rows"] + self.refused
        )
        assert s["malformed_records"] == 0 and s["clears"] == self.clears and s["stale_edits"] == self.stale
        if end > lo:
            got = buf.gather(np.arange(lo, end))
            self.check(np.arange(lo, end), got)
            assert got["k"].tolist() == [live[i] for i in range(lo, end)]

    @invariant()
    def window_is_sound(self) -> None:
        for buf in getattr(self, "handles", []):
            lo, hi = buf.window
            assert lo <= hi and hi - lo == len(buf) <= self.capacity

    def teardown(self) -> None:
        if not hasattr(self, "handles"):
            return
        if self.stuck:
            self.resume()
        try:
            self.handles[0].drain()
            self.at_rest()
        finally:
            for buf in self.handles:
                buf.close()
            destroy(self.name, force=True)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=40, report_multiple_bugs=False)
