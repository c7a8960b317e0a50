"""Ingest: rows a second from the first put until all of them are visible in the buffer."""

from __future__ import annotations

import multiprocessing as mp
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from . import peers
from .isolate import Emitter
from .machine import process_memory
from .rows import ROWS, Row
from .settings import Settings


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    row, name = ROWS[spec["row"]], spec["contender"]
    emit.at(name)
    host = peers.host(name)(row, settings.capacity(row), spec["scratch"])
    crew = Crew(name, host, row, max(settings.producers))
    try:
        for count in settings.producers:
            # Large records first: they touch every page that is on the way.
            crew.round(count, max(settings.batches), settings.warm_seconds)
            for batch in settings.batches:
                crew.round(count, batch, settings.warm_seconds)
                rates = [crew.round(count, batch, settings.round_seconds) for _ in range(settings.rounds)]
                emit.values(f"ingest/{row.name}/{batch}/{count}/{name}", rates)
        emit.values(f"collector/{row.name}/{name}", [crew.memory()])
    finally:
        crew.close()
        host.close()


class Crew:
    """Producer processes that wait for orders. Each connects when it is first needed."""

    def __init__(self, name: str, host: peers.Host, row: Row, count: int):
        context = mp.get_context("spawn")
        self._host, self._connections, self._processes = host, [], []
        self._sent = host.visible() or 0
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, name, host.handle, row.name), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._ask(self._connections, ("hello",))

    def round(self, count: int, batch: int, seconds: float) -> float:
        """Rows per second of `count` producers that put for `seconds`."""
        rows, start, end = self.finish(self.start(count, batch, seconds))
        return rows / (end - start)

    def start(self, count: int, batch: int, seconds: float) -> list[Connection]:
        chosen = self._connections[:count]
        self._ask(chosen, ("bind", batch))
        order = ("run", batch, time.perf_counter() + 0.02, seconds)
        for connection in chosen:
            connection.send(order)
        return chosen

    def finish(self, chosen: list[Connection]) -> tuple[int, float, float]:
        """Rows, the time of the first put, and the time when all of them were visible."""
        reports = [_answer(connection) for connection in chosen]
        starts, rows, ends = zip(*reports, strict=True)
        self._sent += sum(rows)
        return sum(rows), min(starts), self._wait_visible(max(ends))

    def memory(self) -> float:
        """MB of anonymous and file pages of the first producer; shared pages are the buffer's."""
        return self._ask(self._connections[:1], ("memory",))[0]

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(5)

    def _wait_visible(self, end: float) -> float:
        visible = self._host.visible()
        if visible is None or visible >= self._sent:
            return end
        while self._host.visible() < self._sent:
            time.sleep(0.0005)
        return time.perf_counter()

    @staticmethod
    def _ask(connections: list[Connection], order: tuple) -> list:
        for connection in connections:
            connection.send(order)
        return [_answer(connection) for connection in connections]


def _answer(connection: Connection):
    """What a producer sends back; its failure is this case's failure."""
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError("a producer died") from None
    if isinstance(answer, Exception):
        raise RuntimeError(f"{type(answer).__name__}: {answer}") from answer
    return answer


def _serve(connection: Connection, name: str, handle, row_name: str) -> None:
    producer, sends = None, {}
    while (order := connection.recv()) is not None:
        try:
            match order:
                case ("hello",):
                    peers.producer(name)  # the imports
                    answer = None
                case ("bind", batch):
                    producer = producer or peers.producer(name)(handle, ROWS[row_name])
                    if batch not in sends:
                        sends[batch] = producer.bind(batch)
                    answer = None
                case ("run", batch, start_at, seconds):
                    answer = _put_for(sends[batch], producer.finish, start_at, seconds, batch)
                case ("memory",):
                    answer = process_memory()
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(answer)


def _put_for(send, finish, start_at: float, seconds: float, batch: int):
    # perf_counter is the same clock in every process of the machine.
    clock, records = time.perf_counter, 0
    time.sleep(max(0.0, start_at - clock()))
    start = clock()
    end = start + seconds
    while clock() < end:
        send()
        records += 1
    finish()
    return start, records * batch, clock()
