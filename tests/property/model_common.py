"""A process that does one command at a time on a buffer of its own, each acknowledged through a pipe: so a test that kills and stops
such processes knows what was in flight."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np

from shmbuf import Buffer, MinSize, RateLimiter
from shmbuf._extension import native
from shmbuf.errors import CommitPending, Lapped, NotEnoughRows, RingFull
from tests import oracle
from tests.process import workers

RING = 4096
ALPHA, EPS = 1.0, 0.0  # then priorities are the leaves
DEADLINE = 30.0
KILLED, STOPPED = "killed", "stopped"


class Hand:
    """What a worker does on command; what it returns and raises goes back through the pipe."""

    buffer: Buffer

    def create(self, name: str, capacity: int, full: str, late: bool) -> None:
        self.buffer = Buffer.create(
            name,
            capacity,
            schema=None if late else oracle.ENDING,
            ring_bytes=RING,
            max_collectors=6,
            full=full,
            drain="caller",
            trajectories=True,
            end_keys="done",
        )
        self.tickets: list = []

    def attach(self, name: str) -> None:
        self.buffer, self.tickets = Buffer.attach(name), []

    def put(self, who: int, k: int, n: int, p: list | None, wait: bool) -> tuple[int, list | None]:
        """How many rows went in, and their ids if it waited for them."""
        rows = oracle.make_rows(who, k, n, ends=True)
        try:
            ticket = self.buffer.put(rows, stream=oracle.stream_of(who, rows["k"]), priorities=p, timeout=0)
        except CommitPending as e:
            ticket = e.ticket
        self.tickets.append((k, ticket))
        if wait:
            with contextlib.suppress(CommitPending):
                return ticket.rows, ticket.wait(0).tolist()
        return ticket.rows, None

    def done(self) -> list[tuple[int, list[int]]]:
        """(first k, ids) of puts that are committed."""
        done = [(k, t.ids().tolist()) for k, t in self.tickets if t.done()]
        self.tickets = [(k, t) for k, t in self.tickets if not t.done()]
        return done

    def forked(self, who: int, n: int, spec: str) -> int:
        """A fork child puts through the handle that it inherits, and closes it; its wait status."""

        def child() -> None:
            assert native.arm(spec)
            self.put(who, 0, n, None, False)
            self.buffer.close()

        return os.waitpid(workers.fork(child), 0)[1]

    def drain(self) -> bool:
        return self.buffer.drain()

    def draw(self, n: int) -> tuple:
        rows, ids = self.buffer.draw(n)
        return shown(rows, ids)

    def draw_by_priority(self, n: int, stratified: bool) -> tuple:
        rows, ids, _ = self.buffer.draw_by_priority(n, stratified=stratified)
        return shown(rows, ids)

    def slices(self, n: int, length: int) -> tuple:
        rows, ids, lens = self.buffer.draw_slices(n, length, strict=False)
        workers.check_slices(rows, ids, lens)
        return shown(rows, ids)

    def consume(self, n: int) -> tuple:
        rows, ids = self.buffer.consume(seed=3).draw(n)
        return shown(rows, ids)

    def keep(self) -> None:
        self.buffer.keep_priorities(ALPHA, EPS, timeout=0)

    def set(self, ids: list, p: list) -> list[bool]:
        return self.buffer.set_priorities(ids, np.array(p, float)).tolist()

    def limiter(self, size: int | None) -> None:
        self.buffer.set_limiter(
            None if size is None else MinSize(size) if size % 2 else RateLimiter(2.0, size, (-1e9, 1e9))
        )

    def empty(self) -> None:
        self.buffer.empty(timeout=0)

    def close(self) -> None:
        self.buffer.close()


def shown(rows: dict, ids: np.ndarray) -> tuple:
    oracle.check_rows(rows)
    return list(zip(ids.tolist(), rows["who"].tolist(), rows["k"].tolist(), strict=True))


def obey(pipe: Any) -> None:
    hand = Hand()
    while True:
        try:
            command, arguments, spec = pipe.recv()
        except EOFError:
            return
        assert native.arm(spec)
        try:
            reply = (None, getattr(hand, command)(*arguments))
        except (RingFull, NotEnoughRows, Lapped, TimeoutError, RuntimeError) as e:
            reply = (type(e).__name__, str(e))
        native.arm("")
        pipe.send(reply)


class Worker:
    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = workers.fork(self.obey, theirs)
        theirs.close()
        self.who = -1  # of its handle

    def obey(self, theirs: Any) -> None:
        self.pipe.close()
        obey(theirs)

    def call(self, command: str, arguments: tuple, spec: str) -> Any:
        self.pipe.send((command, arguments, spec))
        return self.answer()

    def answer(self) -> Any:
        """(error, result); or KILLED, or STOPPED."""
        give_up = time.monotonic() + DEADLINE
        while not self.pipe.poll(0.002):
            done, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                return STOPPED
            if done:
                assert status == signal.SIGKILL, f"a worker ended with wait status {status}"
                return KILLED
            assert time.monotonic() < give_up, "a call hangs"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            status = os.waitpid(self.pid, 0)[1]
            assert status == signal.SIGKILL, f"a worker ended with wait status {status}"
            return KILLED
