"""Batches that threads draw ahead, given out in the order in which they were drawn."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from shmbuf.errors import NotEnoughRows

_FINISHERS = 4  # threads that transform, at most


class Drawn(NamedTuple):
    """A batch with its info, or None where the pass was over before; whether it was the last of its pass."""

    batch: tuple[Any, dict[Any, Any]] | None
    last: bool


class _Coming(NamedTuple):
    """A batch on its way, and the draw that it comes from; None: that was done at once."""

    batch: Future[Drawn]
    draw: Future[tuple[Any, bool]] | None


class Prefetcher:
    """``depth`` batches ahead. One thread draws, so that the order of an epoch and of a seed is kept; others transform.

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
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, _Coming]] = deque()
        self._turns = 0
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def take(self) -> tuple[Any, dict[Any, Any]]:
        """The next batch. Raises what drawing it raised; NotEnoughRows at once, as drawing does not wait."""
        while True:
            drawn = self._next(0)[1].batch.result()
            if drawn.batch is not None:
                return drawn.batch

    def iterate(self) -> Iterator[Any]:
        """Batches to the end of the pass, beginning with those that are there."""
        with self._lock:
            self._turns += 1
            turn = self._turns
            self._require_open()
            self._threads_now()[0].submit(self._begin)
        first = True
        try:
            while True:
                of, coming = self._next(turn)
                try:
                    drawn = coming.batch.result()
                except NotEnoughRows:
                    if first or not self._sampler().ran_out:
                        raise
                    return
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
            found = self._queue.popleft() if self._queue else (turn, self._submit(turn > 0))
            while len(self._queue) < self.depth:
                self._queue.append((turn, self._submit(turn > 0)))
        return found

    def _threads_now(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        if self._threads is None:
            self._threads = (
                ThreadPoolExecutor(1, thread_name_prefix="shmbuf-draw"),
                ThreadPoolExecutor(min(self.depth, _FINISHERS), thread_name_prefix="shmbuf-finish"),
            )
        return self._threads

    def _submit(self, within: bool) -> _Coming:
        draws, finishes = self._threads_now()
        try:
            draw = draws.submit(self._drawn, within)
            return _Coming(finishes.submit(self._finished, draw), draw)
        except (
            RuntimeError
        ):  # the interpreter is ending, and its pools take no more work: who still samples draws by himself
            if self._closed:
                raise
            future: Future[Drawn] = Future()
            try:
                batch, last = self._drawn(within)
                future.set_result(Drawn(None if batch is None else self._finish(batch), last))
            except BaseException as e:
                future.set_exception(e)
            return _Coming(future, None)

    def _begin(self) -> None:
        self._sampler().ran_out = False  # by the thread that draws: an iteration is a thread's

    def _drawn(self, within: bool) -> tuple[Any, bool]:
        sampler = self._sampler()
        if within and sampler.ran_out:
            return None, True
        batch = self._draw()
        return batch, within and sampler.ran_out

    def _finished(self, drawn: Future[tuple[Any, bool]]) -> Drawn:
        batch, last = drawn.result()
        return Drawn(None if batch is None else self._finish(batch), last)

    def synchronize(self) -> None:
        """Wait until what is being drawn is there. Raises the first error of drawing it, but for want of rows."""
        with self._lock:
            waiting = [coming.batch for _, coming in self._queue]
        for future in waiting:
            with contextlib.suppress(NotEnoughRows, CancelledError):
                future.result()

    def clear(self) -> None:
        """Forget the batches that were drawn ahead, which go to ``refund``."""
        with self._lock:
            dropped = [coming for _, coming in self._queue]
            self._queue.clear()
        for batch, draw in dropped:
            batch.cancel()
            if draw is not None:
                draw.cancel()
                draw.add_done_callback(self._returned)

    def _returned(self, draw: Future[tuple[Any, bool]]) -> None:
        if not draw.cancelled() and draw.exception() is None and (batch := draw.result()[0]) is not None:
            self._refund(batch)

    def close(self) -> None:
        """Forget them and end the threads, whose draw of the moment is waited for."""
        self.clear()
        with self._lock:
            self._closed, threads, self._threads = True, self._threads, None
        for pool in threads or ():
            pool.shutdown(wait=True, cancel_futures=True)
