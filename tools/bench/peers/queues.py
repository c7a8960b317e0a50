"""Queues with a consumer process that stores the rows into a preallocated numpy ring."""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Callable
from ctypes import c_int64
from multiprocessing.sharedctypes import RawValue

import numpy as np

from ..rows import Row

QUEUE_BYTES = 64 << 20
"""What may be under way, the same for both queues; more only adds to the backlog."""


class Store:
    """The consumer's ring: a numpy array per column."""

    def __init__(self, row: Row, capacity: int):
        self._columns = [np.ones((capacity, *c.shape), c.dtype) for c in row.columns]
        self._capacity, self._at = capacity, 0

    def add(self, message: tuple[np.ndarray, ...]) -> int:
        n, at = len(message[0]), self._at
        first = min(n, self._capacity - at)
        for column, array in zip(self._columns, message, strict=True):
            column[at : at + first] = array[:first]
            if first < n:
                column[: n - first] = array[first:]
        self._at = (at + n) % self._capacity
        return n


def consume(receive: Callable[[], list], row: Row, capacity: int, count, ready) -> None:
    store = Store(row, capacity)
    ready.set()
    while True:
        for message in receive():
            if message is None:
                return
            count.value += store.add(message)


class _Host:
    copies = 3  # pickled, unpickled, stored

    def __init__(self, row: Row, capacity: int, scratch: str):
        self._context = mp.get_context("spawn")
        self._count, ready = RawValue(c_int64, 0), self._context.Event()
        self.handle = self._queue(row)
        self._consumer = self._context.Process(
            target=self._main, args=(self.handle, row, capacity, self._count, ready), daemon=True
        )
        self._consumer.start()
        if not ready.wait(60):
            raise RuntimeError("the consumer did not start")

    def visible(self) -> int:
        return self._count.value

    def close(self) -> None:
        self.handle.put(None)
        self._consumer.join(10)


class QueueHost(_Host):
    def _queue(self, row: Row):
        # Bounded by messages; sized for 64-row ones, so that large rows stay within the budget.
        return self._context.Queue(max(4, min(4096, QUEUE_BYTES // (64 * row.nbytes))))

    @staticmethod
    def _main(handle, row, capacity, count, ready) -> None:
        consume(lambda: [handle.get()], row, capacity, count, ready)


class FasterFifoHost(_Host):
    def _queue(self, row: Row):
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  teaches pickle about the queue

        return faster_fifo.Queue(max_size_bytes=QUEUE_BYTES)

    @staticmethod
    def _main(handle, row, capacity, count, ready) -> None:
        handle.reallocate_msg_buffer(QUEUE_BYTES // 4)  # else it reads few messages at a time

        def receive() -> list:
            try:
                return handle.get_many(max_messages_to_get=1000, timeout=1.0)
            except queue.Empty:
                return []

        consume(receive, row, capacity, count, ready)


class QueueProducer:
    def __init__(self, handle, row: Row):
        self._row, self._queue = row, handle

    def bind(self, batch: int) -> Callable[[], object]:
        message = tuple(self._row.arrays(batch).values())
        return lambda: self._queue.put(message)

    def finish(self) -> None:
        pass


class FasterFifoProducer(QueueProducer):
    def bind(self, batch: int) -> Callable[[], object]:
        message = tuple(self._row.arrays(batch).values())
        return lambda: self._queue.put(message, timeout=60.0)
