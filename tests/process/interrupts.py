"""Ctrl-C into every kind of call: at random moments of real waits (`hammer`), and at every point of our Python where the interpreter
lets a signal in (`every_point`). After each, the same handle and others go on, and nothing is locked, lost or doubled.

Run in an interpreter of its own, in whose main thread signals arrive: `python -m tests.process.interrupts hammer|every_point KIND …`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import shmbuf
from shmbuf import Buffer, NotEnoughRows, RateLimiter, RingFull, destroy, segment
from shmbuf.errors import BufferNotFound, CommitInterrupted, CommitPending
from tests import oracle

RING = 4096  # 25 rows, one record each
LARGE = 60  # rows, that do not fit into it
SHORT = 0.02
HOME = (os.path.dirname(shmbuf.__file__), contextlib.__file__)  # str.startswith takes both


class Scene:
    """One handle that is interrupted, another that goes on, a third that can hold the writer role; an account of every row."""

    def __init__(self, kind: str, rng: random.Random):
        self.kind, self.rng = kind, rng
        self.name = f"interrupts.{os.getpid()}.{secrets.token_hex(4)}"
        built = None if kind == "build" else oracle.SCHEMA
        self.mine = Buffer.create(self.name, 100_000, schema=built, drain="caller", ring_bytes=RING, timeout=3)
        self.empty = Buffer.create(None, 10, schema=oracle.SCHEMA, drain="caller", ring_bytes=RING)
        self.holder: Any = None
        self.k, self.others, self.stored = 0, 0, {0: 0, 1: 0}
        self.seen: list[int] = []
        self.given: Any = None
        self.sampled = 0
        if kind != "build":
            self.other = Buffer.attach(self.name)
            self.third = segment.attach(self.name)
        if kind in ("epoch", "shared epoch", "consume", "consume of two", "priorities", "newest", "draw"):
            self.fill(40)
        if kind in ("priorities",):
            self.mine.keep_priorities()
        if kind in ("consume", "consume of two"):
            self.reader = self.mine.consume(1 if kind == "consume" else 2)
        if kind in ("epoch", "shared epoch"):
            self.reader = self.mine.epoch(shared=kind == "shared epoch", seed=1)
        if kind == "limiter":
            self.mine.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e6, 1e6)))
            self.fill(40)
            self.mine.draw(4)
            self.sampled = 4

    def close(self) -> None:
        if self.holder:
            self.free()
        self.mine.close(), self.empty.close()
        if self.kind != "build":
            self.other.close(), self.third.close()
        destroy(self.name)

    def fill(self, n: int) -> None:
        self.other.extend(oracle.make_rows(1, self.others, n), timeout=3 if self.kind == "build" else 30)
        self.others += n

    def stick(self) -> None:
        """Nobody drains from now on."""
        assert self.third.try_take_role(), "the writer role is not free"
        self.holder = self.third

    def free(self) -> None:
        if self.holder:
            self.holder.give_back_role()
        self.holder = None

    # ---- calls: each may be interrupted anywhere, and says by `settle` what it knows of its rows ----

    def call(self, waits: bool) -> None:
        getattr(self, "do_" + self.kind.replace(" ", "_"))(waits)

    def do_put(self, waits: bool) -> None:
        for _ in range(40 if waits else 3):
            self.mine.put(oracle.make_rows(0, self.k, 1))
            self.k += 1

    def do_large_put(self, waits: bool) -> None:
        self.mine.put(oracle.make_rows(0, self.k, LARGE))
        self.k += LARGE

    def do_extend(self, waits: bool) -> None:
        self.mine.extend(oracle.make_rows(0, self.k, 4))
        self.k += 4

    def do_build(self, waits: bool) -> None:
        self.do_extend(waits)

    def do_wait(self, waits: bool) -> None:
        ticket = self.mine.put(oracle.make_rows(0, self.k, 4))
        self.k += 4
        ticket.wait(30)

    def do_rows(self, waits: bool) -> None:
        self.mine.wait_rows(len(self.mine) + waits, 30)

    def do_draw(self, waits: bool) -> None:
        oracle.check_rows(self.mine.draw(600)[0])

    def do_empty_draw(self, waits: bool) -> None:
        self.empty.draw(5, timeout=30 if waits else 0)

    def do_newest(self, waits: bool) -> None:
        self.mine.newest(min(len(self.mine) + 5 * waits, self.mine.capacity), timeout=30)

    def do_priorities(self, waits: bool) -> None:
        rows, ids, _ = self.mine.draw_by_priority(400)
        oracle.check_rows(rows)
        self.mine.set_priorities(ids, np.linspace(0.1, 3, 400))

    def do_limiter(self, waits: bool) -> None:
        if waits:
            self.mine.set_limiter(RateLimiter(1.0, min_size=10**6, error_buffer=(-1e9, 1e9)))
        self.mine.draw(4, timeout=30)
        self.sampled += 4

    def do_consume(self, waits: bool) -> None:
        # Stored without a call: Ctrl-C behind one would come between the reader, who has given these rows, and this account.
        self.given = self.reader.draw(64 if waits else 7, timeout=30 if waits else 0)

    do_consume_of_two = do_epoch = do_consume

    def do_shared_epoch(self, waits: bool) -> None:
        self.given = self.reader.draw(7, timeout=0)

    def do_empty(self, waits: bool) -> None:
        self.mine.empty()

    def do_create(self, waits: bool) -> None:
        with Buffer.create(self.name + ".new", 10, schema=oracle.SCHEMA, ring_bytes=RING, exists="attach") as b:
            b.extend(oracle.make_rows(0, 0, 1))
        destroy(self.name + ".new")

    def do_attach(self, waits: bool) -> None:
        Buffer.attach(self.name + (".absent" if waits else ""), timeout=30).close()

    def do_close(self, waits: bool) -> None:
        b = Buffer.attach(self.name)
        b.put(oracle.make_rows(2, 0, 1))
        b.close()

    def do_keep(self, waits: bool) -> None:
        self.mine.keep_priorities()
        self.mine.stats(), self.mine.collectors(), self.mine.members()

    # ---- afterwards ----

    def settle(self, error: BaseException | None, waited: bool = False) -> None:
        """Others go on; what is stored of this handle's rows is what it was told, or one call more; then this handle goes on."""
        self.free()
        if self.given:
            self.seen += self.given[1].tolist()
            self.given = None
        if self.kind == "build":
            self.other = Buffer.attach(self.name)
            self.third = segment.attach(self.name)
        ticket = getattr(error, "ticket", None)
        if ticket is not None:
            assert isinstance(error, CommitInterrupted)
            if self.kind != "wait":
                assert error.rows == ticket.rows  # type: ignore[attr-defined]
            ticket.wait(30)
        if self.kind == "limiter":
            self.mine.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e6, 1e6)))
        self.fill(3)
        oracle.settle(self.other)
        lo, hi = self.other.window
        rows = self.other.gather(range(lo, hi))
        oracle.check_rows(rows)
        for who in (0, 1):
            k = rows["k"][rows["who"] == who]
            if self.kind != "empty":
                assert (k == np.arange(len(k))).all(), f"writer {who}: {k.tolist()}"
        most = {"put": 1, "large put": LARGE}.get(self.kind, 4)
        stored = int((rows["who"] == 0).sum())
        if self.kind != "empty":
            assert self.k <= stored <= self.k + most, f"{self.k} acknowledged, {stored} stored"
            assert (rows["who"] == 1).sum() == self.others
            if isinstance(error, CommitInterrupted) and self.kind in ("extend", "large put"):
                assert stored == self.k + error.rows
            self.k = stored
        assert self.mine._handle.check_tree() == 0
        if self.kind == "build":
            self.other.close(), self.third.close()
        self.mine.put(oracle.make_rows(0, self.k, 1), timeout=30).wait(30)
        self.k += 1
        if self.kind == "limiter":
            sampled = self.mine.limiter_state()["sampled"]
            # Who is interrupted between its permission and the end of its draw may have used up that batch's share.
            assert sampled - self.sampled in ((0,) if waited or error is None else (0, 4)), (
                f"{sampled - self.sampled} samples were counted that nobody got ({waited=}, {error!r})"
            )
            self.sampled = sampled + 3
        oracle.check_rows(self.mine.draw(3)[0])

    def account(self) -> None:
        """At the end, of who may draw a row only so often: which were lost or doubled."""
        if self.kind not in ("consume", "consume of two"):
            return
        times = 1 if self.kind == "consume" else 2
        oracle.settle(self.mine)
        with contextlib.suppress(NotEnoughRows):
            while len(self.seen) <= times * self.mine.window[1]:
                self.seen += self.reader.draw(1000)[1].tolist()
        counts = np.bincount(self.seen, minlength=self.mine.window[1])
        assert counts.max() <= times, f"ids {np.flatnonzero(counts > times)[:9]} were drawn {counts.max()} times"
        assert counts.min() == times, (
            f"{(counts < times).sum()} rows were lost, first: {np.flatnonzero(counts < times)[:9]}"
        )
        self.seen.clear()


# Which of them wait while nobody drains, or while there is nothing.
WAITS = ("put", "large put", "extend", "wait", "rows", "empty draw", "newest", "limiter", "consume", "empty", "attach")
KINDS = (*WAITS, "draw", "priorities", "epoch", "shared epoch", "consume of two", "create", "close", "keep")


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def hammer(kind: str, rounds: int, seed: int = 1) -> None:
    """SIGALRM by a timer stands for Ctrl-C: the same handler, at a moment that the kernel chooses."""
    rng = random.Random(seed)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    scene, late, hit = Scene(kind, rng), [], 0
    for turn in range(rounds):
        waits = kind in WAITS and turn % 2 == 0
        if waits and kind in ("put", "large put", "extend", "wait", "empty"):
            if kind == "empty":
                scene.other.put(oracle.make_rows(1, scene.others, 1))
                scene.others += 1
            scene.stick()
        delay, error = (SHORT if waits else 1e-3) * rng.random() + 1e-5, None
        began = time.monotonic()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                scene.call(waits)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as e:  # from the call, or while another error of it was on its way
            late.append(time.monotonic() - began - delay)
            error, hit = e, hit + 1
        except (NotEnoughRows, BufferNotFound, CommitPending, RingFull):
            assert not waits, "nothing was to be waited for so long"
        scene.settle(error, waits)
    error = None  # the frames of its traceback keep handles alive
    scene.account()
    scene.close()
    late.sort()
    tell = {q: f"{1e3 * late[min(len(late) - 1, int(q * len(late)))]:.2f}" for q in (0.5, 0.9, 0.99, 1)} if late else {}
    print(f"{kind}: {hit} of {rounds} interrupted; ms from the signal to the exception by quantile: {tell}", flush=True)
    assert hit >= rounds // 2 if kind in WAITS else hit, f"only {hit} interrupts"
    assert late[-1] < 2, late[-5:]


# ---- at every point ------------------------------------------------------------------------------------------------


@functools.cache
def _after_a_call(code: CodeType) -> set[int]:
    """Offsets before which the interpreter looks for signals: behind calls, at the start of functions, at loops' backward jumps."""
    points, behind = set(), False
    for i in dis.get_instructions(code):
        if behind:
            points.add(i.offset)
        behind = i.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
    return points


class At:
    """Raises KeyboardInterrupt at the n-th such point of shmbuf's Python."""

    def __init__(self, n: int, only: str = ""):
        self.left, self.where, self.only = n, "", only

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(HOME) or code.co_name in ("<module>", "_finalize"):
            return None
        if self.only and code.co_name != self.only:
            return self
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and not self.where and frame.f_lasti in _after_a_call(code):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt(self.where)
        return self


def at_point(n: int, call: Callable[[], None], only: str) -> tuple[str, BaseException | None]:
    at, error = At(n, only), None
    sys.settrace(at)
    try:
        call()
    except (KeyboardInterrupt, NotEnoughRows) as e:
        error = e
    finally:
        sys.settrace(None)
    return at.where, error


def every_point(kind: str, step: int = 1, only: str = "") -> None:
    """step: only every so many of them; only: in functions of that name."""
    wrong: dict[str, str] = {}
    n, tried = 1 - step, 0
    while True:
        n, tried = n + step, tried + 1
        scene = Scene(kind, random.Random(n))
        before = files()
        where, error = at_point(n, lambda scene=scene: scene.call(False), only)
        if not where:
            scene.close()
            break
        try:
            scene.settle(error)
            scene.account()
            error = None  # the frames of its traceback keep handles alive
            gc.collect()
            if kind == "limiter":
                sampled = scene.mine.limiter_state()["sampled"]
                assert sampled == scene.sampled, f"{scene.sampled - sampled} samples were given back with the traceback"
            if kind in ("create", "attach", "close"):
                assert files() <= before + 2, (
                    f"{files() - before} descriptors leaked"
                )  # two that had not become a handle
            scene.close()
        except BaseException as e:
            wrong.setdefault(where, f"{type(e).__name__}: {str(e)[:150]}")
            with contextlib.suppress(BaseException):
                scene.mine.close()
        for left in segment.names():
            if left.startswith(scene.name):
                with contextlib.suppress(BaseException):
                    destroy(left, force=True)
    for where, what in wrong.items():
        print(f"{kind}: {where}: {what}")
    print(f"{kind}: {tried - 1} points, wrong after {len(wrong)}", flush=True)
    assert tried > 10
    sys.exit(bool(wrong))


if __name__ == "__main__":
    {"hammer": hammer, "every_point": every_point}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
