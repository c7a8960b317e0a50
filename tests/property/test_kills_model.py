"""A buffer and its processes against a plain Python model, while processes are killed and stopped: between calls, and inside them
at a labelled step. Workers do one command at a time, each acknowledged; nobody else drains; so all but the call in flight is known:
how many rows of each handle are stored, in which order, under which ids, with which priorities."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmbuf import Buffer, destroy, segment
from shmbuf._extension import native
from shmbuf.errors import BufferNotFound
from tests import oracle
from tests.conftest import PREFIX
from tests.process import workers
from tests.property.model_common import ALPHA, EPS, KILLED, RING, STOPPED, Worker

SOAK = bool(os.environ.get("SHMBUF_SOAK"))
ROW = 128  # bytes: 3 numbers, the payload, a flag, rounded up

WRITING = ("role_", "plan_", "txn_", "post_", "link_", "tree_leaves", "tree_children", "tree_level")
LABELS = {  # which steps a call may pass
    "create": ("build_",),
    "put": ("ring_", "ring_", "claim_", "build_", *WRITING),
    "drain": WRITING,
    "set": ("tree_leaf_", "tree_leaves", "tree_children", "tree_level"),
    "keep": ("tree_", "role_"),
    "draw": ("limiter_taken", "epoch_", *WRITING),
    "limiter": ("limiter_",),
    "empty": ("clear_", "link_cleared", "ring_published", *WRITING),
    "close": ("close_", "slot_", *WRITING),
}


def fates(call: str) -> st.SearchStrategy[str]:
    """A failpoint's spec, most often none."""
    known = getattr(native, "FAILPOINTS", ())
    labels = [n for prefix in LABELS[call] for n in known if n.startswith(prefix)] or ["none"]
    armed = st.builds(
        "{}={}@{}".format, st.sampled_from(labels), st.sampled_from(["kill", "kill", "stop"]), st.integers(1, 4)
    )
    return st.just("") | armed


# ---- the model ------------------------------------------------------------------------------------------------------


class Model(RuleBasedStateMachine):
    FEW = st.integers(1, 9)
    N = FEW | st.sampled_from([15, 30, 60])  # up to what fills half a ring, a ring, more
    I = st.integers(0, 2)  # noqa: E741

    watch: Buffer

    @initialize(
        capacity=st.sampled_from([1, 5, 30, 64, 300]),
        full=st.sampled_from(["block", "error"]),
        late=st.booleans(),
        first=st.integers(0, 30),
        keep=st.booleans(),
        fate=fates("create"),
    )
    def create(self, capacity: int, full: str, late: bool, first: int, keep: bool, fate: str) -> None:
        self.name, self.capacity = f"{PREFIX}{secrets.token_hex(4)}", capacity
        self.workers = [Worker()]
        self.acks = np.zeros(512, np.int64)  # rows of each handle that are in its ring or stored
        self.next_who = 100
        self.given: dict[tuple[int, int], set[float]] = {}  # priorities that a row may have
        self.values = {1.0}  # all priorities ever given: a new row has one of them
        self.known: dict[int, tuple[int, int]] = {}  # id → row
        self.taken: set[int] = set()  # ids consumed
        self.clears = self.forks = 0
        self.kept = False
        self.flight: tuple[int, list[int]] | None = None  # who; how many of its rows may be stored
        self.emptying = False  # by a call in flight
        self.stale_tree = False
        self.stopped: tuple[Worker, Callable, Callable] | None = None
        arguments = (self.name, capacity, full, late)
        while (reply := self.workers[0].call("create", arguments, fate)) in (KILLED, STOPPED):
            if reply == STOPPED:
                workers.kill(self.workers[0].pid)
            self.workers[0] = Worker()
            with contextlib.suppress(
                BufferNotFound
            ):  # it was killed while it made the rows of what has its name by now
                reply = self.workers[0].call("attach", (self.name,), "")
                break
            fate = ""
        assert reply == (None, None), reply
        self.workers[0].who = self.number()
        self.watch = Buffer.attach(self.name)
        self.put(0, first, None, True, "")
        if keep and self.watch.schema is not None:
            self.keep(0, "")

    # ---- calls ----

    def number(self) -> int:
        self.next_who += 1
        return self.next_who

    def of(self, i: int) -> Worker:
        """The i-th worker that is not stopped; a new one, if there is none."""
        free = [w for w in self.workers if self.stopped is None or w is not self.stopped[0]]
        return free[i % len(free)] if free else self.come()

    def come(self) -> Worker:
        worker = Worker()
        self.workers.append(worker)
        assert worker.call("attach", (self.name,), "") == (None, None)
        worker.who = self.number()
        return worker

    @property
    def held_up(self) -> bool:
        """Whoever is stopped holds the writer role."""
        return self.stopped is not None and self.watch._handle.counters()["writer_active"]

    def issue(
        self,
        worker: Worker,
        command: str,
        arguments: tuple,
        fate: str,
        after: Callable[[str | None, Any], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """after(error, result): the call has come back. lost(): it may have happened, or part of it."""
        if self.stopped is not None:  # one call in flight at a time
            fate = ""
        reply = worker.call(command, arguments, fate)
        if reply == STOPPED:
            self.stopped = (worker, after, lost)
            lost()
        elif reply == KILLED:
            lost()
            self.workers.remove(worker)
            self.at_rest()
        else:
            after(*reply)

    def calm(self, error: str | None, *allowed: str) -> bool:
        assert error is None or error in allowed, error
        return error is None

    # ---- rules: writing ----

    @rule(i=I, n=N, fate=fates("put"))
    def put_(self, i: int, n: int, fate: str) -> None:
        self.put(i, n, None, False, fate)

    @rule(i=I, n=FEW, fate=fates("put"))
    def extend(self, i: int, n: int, fate: str) -> None:
        self.put(i, n, None, True, fate)

    @rule(i=I, n=N, p=st.integers(0, 9), wait=st.booleans(), fate=fates("put"))
    def put_with_priorities(self, i: int, n: int, p: int, wait: bool, fate: str) -> None:
        self.put(i, n, p, wait, fate)

    def put(self, i: int, n: int, p: int | None, wait: bool, fate: str) -> None:
        worker = self.of(i)
        who = worker.who
        k = int(self.acks[who])
        priorities = None if p is None else [float((p + j) % 10) for j in range(n)]
        streams_and_leaves = 8 + (0 if p is None else 4)
        most = (RING // 2 - 32) // (self.row_bytes() + streams_and_leaves)

        def note(rows: int) -> None:
            self.values |= set(priorities or ())
            for j in range(rows):
                self.given[who, k + j] = {priorities[j]} if priorities and self.kept else set()

        def after(error: str | None, result: Any) -> None:
            if self.flight is not None and self.flight[0] == who:
                self.flight = None
            rows = 0
            # Rings of the closed are emptied for whoever comes, unless the one who could is stopped.
            if self.calm(error, "RingFull", *(("TooManyCollectors",) if self.held_up else ())):
                rows, ids = result
                if ids is not None:
                    assert len(ids) == rows
                    self.learn(ids, who, k)
            assert rows == n or self.held_or_error(error, n, most)
            note(rows)
            self.acks[who] += rows

        def lost() -> None:
            self.flight = (who, [k + r for r in (*range(0, n, most), n)])
            note(n)

        self.issue(worker, "put", (who, k, n, priorities, wait), fate, after, lost)

    def row_bytes(self) -> int:
        return self.watch.schema.row_bytes if self.watch.schema is not None else ROW

    def held_or_error(self, error: str | None, n: int, most: int) -> bool:
        """May a put go in in part, or not at all? With full="error" it may, if the ring holds too much."""
        return self.held_up or self.watch.config["full"] == "error"

    @rule(i=I, n=FEW, fate=fates("put"))
    def fork_with_a_live_handle(self, i: int, n: int, fate: str) -> None:
        worker, who = self.of(i), self.number()
        if "stop" in fate or self.stopped is not None:
            fate = ""
        for k in range(n):
            self.given[who, k] = set()

        def after(error: str | None, status: Any) -> None:
            assert error is None and status in (0, signal.SIGKILL), (error, status)
            if status == signal.SIGKILL:
                self.flight = (who, [0, n])
                self.at_rest()
            else:
                self.acks[who] = n

        if not self.held_up and self.forks < 3:  # it takes its time
            self.forks += 1
            self.issue(worker, "forked", (who, n, fate), "", after)

    @rule(i=I, fate=fates("drain"))
    def drain(self, i: int, fate: str) -> None:
        self.issue(self.of(i), "drain", (), fate, lambda error, moved: self.calm(error) and None)

    @rule(i=I)
    def tickets(self, i: int) -> None:
        worker = self.of(i)

        def after(error: str | None, result: Any) -> None:
            assert error is None
            for k, ids in result:
                self.learn(ids, worker.who, k)

        self.issue(worker, "done", (), "", after)

    @rule(i=I, fate=fates("empty"))
    @precondition(lambda self: not self.stopped and self.watch.schema is not None)
    def empty(self, i: int, fate: str) -> None:
        def after(error: str | None, _: Any) -> None:
            self.calm(error)
            self.emptying = False
            self.clears += 1
            self.values.add(1.0)

        def lost() -> None:
            self.emptying = True

        self.issue(self.of(i), "empty", (), fate, after, lost)

    # ---- rules: reading ----

    def check_drawn(self, rows: list) -> None:
        """Each was handed in; no id ever means another row."""
        for i, who, k in rows:
            in_flight = self.flight[1][-1] if self.flight and self.flight[0] == who else 0
            assert k < max(self.acks[who], in_flight), f"row {k} of {who} was never put"
            assert self.known.setdefault(i, (who, k)) == (who, k), f"id {i} has been another row"

    @rule(i=I, n=st.integers(1, 20), fate=fates("draw"))
    def draw(self, i: int, n: int, fate: str) -> None:
        def after(error: str | None, rows: Any) -> None:
            if self.calm(error, "NotEnoughRows", *self.if_stopped("Lapped")):
                self.check_drawn(rows)

        self.issue(self.of(i), "draw", (n,), fate, after)

    @rule(i=I, n=st.integers(1, 20), stratified=st.booleans(), fate=fates("draw"))
    @precondition(lambda self: self.kept)
    def draw_by_priority(self, i: int, n: int, stratified: bool, fate: str) -> None:
        def after(error: str | None, rows: Any) -> None:
            if error == "RuntimeError":  # all are 0: it says so
                assert "priorities are 0" in rows, rows
                lo, hi = self.watch.window
                assert not np.nansum(self.watch.priorities(range(lo, hi)))
            elif self.calm(error, "NotEnoughRows", *self.if_stopped("Lapped")):
                self.check_drawn(rows)
                for _, who, k in rows:
                    assert self.given[who, k] != {0.0}, f"row {k} of {who} was drawn, with priority 0"

        self.issue(self.of(i), "draw_by_priority", (n, stratified), fate, after)

    @rule(i=I, n=st.integers(1, 5), length=st.integers(1, 5), fate=fates("draw"))
    def slices(self, i: int, n: int, length: int, fate: str) -> None:
        def after(error: str | None, rows: Any) -> None:
            if self.calm(error, "NotEnoughRows", *self.if_stopped("Lapped")):
                self.check_drawn(rows)

        self.issue(self.of(i), "slices", (n, length), fate, after)

    @rule(i=I, n=st.integers(1, 20), fate=fates("draw"))
    def consume(self, i: int, n: int, fate: str) -> None:
        def after(error: str | None, rows: Any) -> None:
            if self.calm(error, "NotEnoughRows", *self.if_stopped("Lapped")):
                self.check_drawn(rows)
                ids = [i for i, _, _ in rows]
                assert len(set(ids)) == len(ids) and not self.taken & set(ids), "consumed twice"
                self.taken |= set(ids)

        self.issue(self.of(i), "consume", (n,), fate, after)

    def if_stopped(self, error: str) -> tuple[str, ...]:
        return (error,) if self.stopped is not None else ()

    # ---- rules: priorities, limiter ----

    @rule(i=I, fate=fates("keep"))
    @precondition(lambda self: self.watch.schema is not None and not self.stopped)
    def keep(self, i: int, fate: str) -> None:
        def after(error: str | None, _: Any) -> None:
            self.calm(error)
            self.begin_priorities()

        self.issue(self.of(i), "keep", (), fate, after)

    def begin_priorities(self) -> None:
        if not self.kept:
            self.kept = True
            self.given = {row: set() for row in self.given}

    @rule(
        i=I,
        offsets=st.lists(st.integers(0, 70), min_size=1, max_size=20, unique=True),
        p=st.integers(0, 9),
        fate=fates("set"),
    )
    @precondition(lambda self: self.kept)
    def set_priorities(self, i: int, offsets: list[int], p: int, fate: str) -> None:
        _, hi = self.watch.window
        ids = [hi - 1 - o for o in offsets if hi - 1 - o >= 0]
        if not ids:
            return
        rows, valid = self.watch.try_gather(ids)
        keys = list(zip(rows["who"].tolist(), rows["k"].tolist(), strict=True))
        values = [float((p + j) % 10) for j in range(len(ids))]
        resumed = self.held_up

        def after(error: str | None, applied: Any) -> None:
            self.calm(error)
            stopped = self.stopped is not None or resumed
            for j, key in enumerate(keys):
                if valid[j] and not stopped:
                    assert applied[j], f"the priority of id {ids[j]}, which is stored, was dropped"
                assert valid[j] or not applied[j] or stopped, f"id {ids[j]} is not stored"
                if valid[j]:
                    others = self.given[key] & self.flying
                    if applied[j]:
                        self.given[key] = {values[j]} | others
            self.values |= set(values)

        def lost() -> None:
            self.stale_tree = True
            self.values |= set(values)
            for j, key in enumerate(keys):
                if valid[j] and self.given[key]:
                    self.given[key] = self.given[key] | {values[j]}

        self.issue(self.of(i), "set", (ids, values), fate, after, lost)

    @property
    def flying(self) -> set[float]:
        """Values that a stopped updater may still set."""
        return self.values if self.stopped is not None else set()

    @rule(i=I, size=st.none() | st.integers(0, 40), fate=fates("limiter"))
    def change_limiter(self, i: int, size: int | None, fate: str) -> None:
        self.issue(self.of(i), "limiter", (size,), fate, lambda error, _: self.calm(error) and None)

    # ---- rules: coming and going ----

    @rule()
    @precondition(lambda self: len(self.workers) < 3)
    def attach(self) -> None:
        self.come()

    @rule(i=I, fate=fates("close"))
    def close_and_come_back(self, i: int, fate: str) -> None:
        worker = self.of(i)

        def after(error: str | None, _: Any) -> None:
            self.calm(error)
            assert worker.call("attach", (self.name,), "") == (None, None)
            worker.who = self.number()

        self.issue(worker, "close", (), fate, after)

    @rule(i=I)
    def kill(self, i: int) -> None:
        worker = self.of(i)
        self.workers.remove(worker)
        assert workers.kill(worker.pid) == signal.SIGKILL

    @rule(i=I)
    def pause_between_calls(self, i: int) -> None:
        """Stopped while it does nothing: all others go on."""
        worker = self.of(i)
        if self.stopped is None:
            os.kill(worker.pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])
            self.at_rest()
            os.kill(worker.pid, signal.SIGCONT)

    @rule()
    @precondition(lambda self: self.stopped is not None)
    def go_on(self) -> None:
        worker, after, _ = self.stopped
        os.kill(worker.pid, signal.SIGCONT)
        reply = worker.answer()
        assert reply not in (KILLED, STOPPED), reply
        after(*reply)
        self.stopped = None

    @rule()
    @precondition(lambda self: self.stopped is not None)
    def kill_the_stopped(self) -> None:
        worker, _, _ = self.stopped
        self.workers.remove(worker)
        assert workers.kill(worker.pid) == signal.SIGKILL
        self.stopped = None
        self.at_rest()

    # ---- what must hold ----

    def learn(self, ids: list[int], who: int, k: int) -> None:
        for j, i in enumerate(ids):
            assert self.known.setdefault(i, (who, k + j)) == (who, k + j), f"id {i} has been another row"

    @rule()
    @precondition(lambda self: self.stopped is None)
    def at_rest(self) -> None:
        """Nobody is in a call: the model knows everything, once it has seen what became of the call of who was killed."""
        if self.stopped is not None:
            return
        watch = self.watch
        workers.settle(watch)
        if not self.kept and watch._get("wants_priorities"):  # somebody was killed after he had asked for them
            watch.keep_priorities(ALPHA, EPS)
            self.begin_priorities()
        s = watch.stats()
        assert s["clears"] in (self.clears, self.clears + self.emptying), (s["clears"], self.clears)
        self.clears, self.emptying = s["clears"], False
        if self.flight is not None:  # all its records up to one, none of those after it
            who, may = self.flight
            stored = s["rows_total"] - int(self.acks.sum()) + int(self.acks[who])
            assert stored in may, f"{stored} rows of {who} are stored; it may be {may}"
            self.acks[who], self.flight = stored, None
        if self.stale_tree:
            watch._handle.scrub()
            self.stale_tree = False
        assert s["rows_total"] == self.acks.sum(), "rows were lost, or doubled"
        if watch.schema is None:
            return
        whole = not self.clears and s["rows_total"] <= self.capacity
        oracle.check(watch, self.acks, 0, whole=whole, streams=True)
        assert not watch._handle.audit()["findings"], watch._handle.audit()
        lo, hi = watch.window
        if hi == lo:
            return
        assert hi - lo == min(self.capacity, hi - lo)
        ids = np.arange(lo, hi)
        rows = watch.gather(ids)
        keys = list(zip(rows["who"].tolist(), rows["k"].tolist(), strict=True))
        for i, key in zip(ids.tolist(), keys, strict=True):
            assert self.known.setdefault(i, key) == key, f"id {i} has been another row"
        if self.kept:
            for key, p in zip(keys, watch.priorities(ids).tolist(), strict=True):
                assert p in (self.given[key] or self.values), f"row {key} has priority {p}, not {self.given[key]}"
                self.given[key] = {p}  # from now on it is known

    @invariant()
    def the_window_is_sound(self) -> None:
        if hasattr(self, "watch"):
            lo, hi = self.watch.window
            assert 0 <= hi - lo == len(self.watch) <= self.capacity

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        for worker in self.workers:
            workers.kill(worker.pid)
        if not hasattr(self, "watch"):
            return
        try:
            self.stopped = None
            self.at_rest()
            self.watch._handle.sweep()
            assert self.watch.collectors() == []
            assert [m for m in self.watch.members() if m["alive"] and m["pid"] != os.getpid()] == []
        finally:
            self.watch.close()
            destroy(self.name, force=True)


def test_a_model_with_kills():
    """In an interpreter of its own, without threads: it forks, with the build whose steps can be killed by name."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        capture_output=True,
        text=True,
        timeout=600 if SOAK else 110,
        env={**os.environ, "SHMBUF_NATIVE": "failpoints"},
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-20_000:]}"


if __name__ == "__main__":
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if SOAK else [])]  # which may take minutes
    examples, steps = (1500, 60) if SOAK else (120, 40)
    run_state_machine_as_test(
        Model,
        settings=settings(max_examples=examples, stateful_step_count=steps, phases=phases, report_multiple_bugs=False),
    )
    assert not [name for name in segment.names() if name.startswith(PREFIX)]
