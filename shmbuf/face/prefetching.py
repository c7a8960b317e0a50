"""Batches that threads draw ahead, given out in the order in which they were drawn.

Ctrl-C may come anywhere in the thread that asks. So it shares only what C code locks and lets go of in one step with those that work
for it (``with`` of a plain lock, a SimpleQueue): a Python-level Condition, as in an executor, a Future or a thread's start, could be left
held, and they would wait for ever.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from shmbuf.errors import NotEnoughRows

_FINISHERS = 4  # threads that transform, at most


class Drawn(NamedTuple):
    """A batch with its info, or None where the pass was over before; whether it was the last of its pass."""

    batch: tuple[Any, dict[Any, Any]] | None
    last: bool


class _Event:
    """Happens once."""

    def __init__(self) -> None:
        self._pending = _thread.allocate_lock()
        self._pending.acquire()

    def happen(self) -> None:
        self._pending.release()

    def wait(self) -> None:
        with self._pending:
            pass


class _Coming:
    """A batch on its way. Nobody changes ``drawn`` or ``dropped`` but under the prefetcher's lock."""

    def __init__(self, within: bool):
        self.within = within
        self.drawn: tuple[Any, bool] | None = None
        self.dropped = False
        self._there = _Event()
        self._outcome: Drawn | BaseException | None = None  # None: it was dropped

    def settle(self, outcome: Drawn | BaseException | None) -> None:
        self._outcome = outcome
        self._there.happen()

    def result(self) -> Drawn | None:
        """Waits. Raises what drawing or transforming it raised."""
        self._there.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class _Threads:
    """One that draws, so that the order of an epoch and of a seed is kept, and some that transform. They keep nothing alive but what waits
    for them."""

    def __init__(self, finishers: int):
        self.draws: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.finishes: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._ended = [_Event() for _ in range(finishers + 1)]
        self._pid = os.getpid()

    def start(self) -> None:
        """Raises RuntimeError: no more threads are to be had, or the interpreter is ending."""
        jobs = [(self.draws, "shmbuf-draw"), *[(self.finishes, "shmbuf-finish")] * (len(self._ended) - 1)]
        begun, failed = _Event(), []

        def begin() -> None:  # Thread.start() waits as it must not, so no thread that gets signals calls it
            for (queue, name), ended in zip(jobs, self._ended, strict=True):
                try:
                    threading.Thread(target=_work, args=(queue, ended), name=name, daemon=True).start()
                except RuntimeError as e:
                    failed.append(e)
                    ended.happen()
            begun.happen()

        _thread.start_new_thread(begin, ())
        begun.wait()
        if failed:
            raise failed[0]

    def tell_to_end(self) -> None:
        for queue in (self.draws, *[self.finishes] * (len(self._ended) - 1)):
            queue.put(None)

    def left(self) -> None:
        """Nobody asks any more: collected, perhaps by one of them, so nobody waits for them; or the interpreter ends, which does."""
        self.tell_to_end() if threading.main_thread().is_alive() else self.end()

    def end(self) -> None:
        """When they have done what waits for them."""
        if self._pid != os.getpid():
            return
        self.draws.put(None)
        self._ended[0].wait()
        for _ in self._ended[1:]:
            self.finishes.put(None)
        for ended in self._ended[1:]:
            ended.wait()


def _work(queue: SimpleQueue[Callable[[], Any] | None], ended: _Event) -> None:
    try:
        while (job := queue.get()) is not None:
            job()
            del job  # or it would keep what it did alive until the next
    finally:
        ended.happen()


class Prefetcher:
    """``depth`` batches ahead.

    Args:
        draw: () → a batch. It must not wait for rows: the end of the interpreter waits for it.
        finish: what is done to a batch afterwards, by several threads at once, in any order; → (batch, info).
        sampler: () → the sampler of the moment, whose ``ran_out`` ends an iteration.
        refund: is given each batch that was drawn and is not given out, by any thread.
        receive: what an iteration gives out of a finished batch, by the thread that asks.
    """

    def __init__(
        self,
        depth: int,
        draw: Callable[[], Any],
        finish: Callable[[Any], Any],
        sampler: Callable[[], Any],
        refund: Callable[[Any], Any] = lambda batch: None,
        receive: Callable[[Any], Any] = lambda batch: batch,
    ):
        self.depth, self._draw, self._finish, self._sampler, self._refund = depth, draw, finish, sampler, refund
        self._receive = receive
        self.forget()

    def forget(self) -> None:
        """Nothing is drawn ahead, and there are no threads: so it is in the child of a fork."""
        self._lock = _thread.allocate_lock()
        self._queue: deque[tuple[int, _Coming]] = deque()
        self._turns = 0
        self._threads: _Threads | None = None
        self._end: Any = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def take(self) -> tuple[Any, dict[Any, Any]]:
        """The next batch. Raises what drawing it raised; NotEnoughRows at once, as drawing does not wait."""
        while True:
            drawn = self._received(self._next(0)[1])
            if drawn is not None and drawn.batch is not None:
                return drawn.batch

    def iterate(self) -> Iterator[Any]:
        """Batches to the end of the pass, beginning with those that are there."""
        with self._lock:
            self._turns += 1
            turn = self._turns
            self._require_open()
            try:
                self._started().draws.put(self._begin)
            except RuntimeError:  # as in _submit
                self._begin()
        first = True
        try:
            while True:
                of, coming = self._next(turn)
                try:
                    drawn = self._received(coming)
                except NotEnoughRows:
                    if first or not self._sampler().ran_out:
                        raise
                    return
                if drawn is None:
                    continue
                if drawn.batch is None:
                    if of == turn:
                        return
                    continue  # the end of a pass that another loop left
                first = False
                yield self._receive(drawn.batch[0])
                if drawn.last and of == turn:
                    return
        finally:
            self._sampler().ran_out = True  # also where the loop was left: the next sample() is nobody's iteration

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("A shut down replay buffer cannot be sampled.")

    def _next(self, turn: int) -> tuple[int, _Coming]:
        """A batch and whose it is: of which iteration; 0: of none."""
        with self._lock:
            self._require_open()
            while len(self._queue) < self.depth + 1:
                coming = _Coming(turn > 0)
                try:
                    self._submit(coming)
                    self._queue.append((turn, coming))
                except BaseException:
                    coming.dropped = True
                    raise
            found = self._queue.popleft()
        return found

    def _received(self, coming: _Coming) -> Drawn | None:
        """What was drawn, for who has taken it from the queue; if he is interrupted it is nobody's."""
        try:
            return coming.result()
        except KeyboardInterrupt:
            self._drop([coming])
            raise

    def _started(self) -> _Threads:
        if self._threads is None:
            threads = self._threads = _Threads(min(self.depth, _FINISHERS))
            try:
                threads.start()
                self._end = weakref.finalize(self, threads.left)
            except BaseException:
                self._threads = None
                threads.tell_to_end()
                raise
        return self._threads

    def _submit(self, coming: _Coming) -> None:
        try:
            threads = self._started()
        except RuntimeError:  # the interpreter is ending and has no more threads: who still samples draws by himself
            try:
                coming.drawn = self._drawn(coming.within)  # nobody else knows of it yet, and the lock is held
            except BaseException as e:
                return coming.settle(e)
            return self._finish_one(coming)

        def draw() -> None:
            self._draw_one(coming)
            if coming.drawn is not None:
                threads.finishes.put(lambda: self._finish_one(coming))

        threads.draws.put(draw)

    def _begin(self) -> None:
        self._sampler().ran_out = False  # by the thread that draws: an iteration is a thread's

    def _draw_one(self, coming: _Coming) -> None:
        if coming.dropped:
            return coming.settle(None)
        try:
            drawn = self._drawn(coming.within)
        except BaseException as e:
            return coming.settle(e)
        with self._lock:
            coming.drawn, dropped = drawn, coming.dropped
        if dropped:
            self._returned(drawn)

    def _drawn(self, within: bool) -> tuple[Any, bool]:
        sampler = self._sampler()
        if within and sampler.ran_out:
            return None, True
        batch = self._draw()
        return batch, within and sampler.ran_out

    def _finish_one(self, coming: _Coming) -> None:
        assert coming.drawn is not None
        if coming.dropped:
            return coming.settle(None)
        batch, last = coming.drawn
        try:
            coming.settle(Drawn(None if batch is None else self._finish(batch), last))
        except BaseException as e:
            coming.settle(e)

    def synchronize(self) -> None:
        """Wait until what is being drawn is there. Raises the first error of drawing it, but for want of rows."""
        with self._lock:
            waiting = [coming for _, coming in self._queue]
        for coming in waiting:
            with contextlib.suppress(NotEnoughRows):
                coming.result()

    def clear(self) -> None:
        """Forget the batches that were drawn ahead, which go to ``refund``."""
        with self._lock:
            dropped = [coming for _, coming in self._queue]
            self._queue.clear()
        self._drop(dropped)

    def _drop(self, dropped: list[_Coming]) -> None:
        with self._lock:
            drawn = [coming.drawn for coming in dropped]
            for coming in dropped:
                coming.dropped = True
        for each in drawn:
            if each is not None:
                self._returned(each)

    def _returned(self, drawn: tuple[Any, bool]) -> None:
        if drawn[0] is not None:
            self._refund(drawn[0])

    def close(self) -> None:
        """Forget them and end the threads, whose draw of the moment is waited for."""
        self._closed = True
        self.clear()
        with self._lock:
            end, threads, self._end, self._threads = self._end, self._threads, None, None
        if end is not None:
            end.detach()
        if threads is not None:
            threads.end()
