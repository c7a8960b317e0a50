"""SIGKILL one of two collectors in its write loop; then the learner reads while the other collector writes on.

Each round has processes and a buffer of its own. A row carries its id and numbers that follow from it: a torn row shows.
All processes come out of one server that has loaded the imports and nothing else: a round imports nothing.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import random
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from threading import Lock

import numpy as np

from . import peers
from .isolate import Emitter
from .plan import CPPRB_PRIORITISED, KILL_OUTCOMES
from .rows import ROWS, Row
from .settings import Settings

CAPACITY, BATCH = 1_000, 64
READS = 40
"""Reads after the kill: 2,560 draws find one torn row among 1,000 in nine rounds of ten."""
LIMIT, QUIET = 5.0, 2.0
"""Seconds until a round counts as hung; who finished no call in the last of them is the one that hangs."""
TURN = 1.0
"""Seconds after which a round without an end waits on the side: the next one begins."""
PAUSE = (0.010, 0.060)
START_LIMIT = 30.0
_OTHER, _VICTIM, _READS, _TORN, _CALM = range(5)
"""Counters that all processes of a round see: finished puts, finished reads, torn rows; whether the hurry is over."""
_IMPORTS = {
    peers.OURS: ["torch", "tensordict", "shmbuf.replay_buffer", "shmbuf.storage", "shmbuf.samplers"],
    "torchrl": ["torch", "torchrl.data"],
    "cpprb": ["cpprb"],
    CPPRB_PRIORITISED: ["cpprb"],
    "faster-fifo": ["faster_fifo"],
}


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    row, name = spec["row"], spec["contender"]
    emit.at(name)
    os.environ["PYTHONSAFEPATH"] = "1"  # the server's imports are those installed, not the checkout it starts in
    os.environ["TMPDIR"] = tempfile.tempdir = spec["scratch"]  # what the killed leave behind goes with it
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS[name])
    with ThreadPoolExecutor(settings.kills) as pool:
        starts = (f"{spec['scratch']}-{n}" for n in range(settings.kills))
        turn = Lock()
        rounds = list(pool.map(lambda scratch: _round(context, name, row, scratch, turn), starts))
    for outcome in KILL_OUTCOMES:
        emit.values(f"kills/{row}/{outcome}/{name}", [float(sum(outcome in found for found in rounds))])
    if reason := next((found["raised"] for found in rounds if "raised" in found), None):
        emit.error(f"kills/{row}/raised/{name}", reason)


# ---- the side that looks at the clock -------------------------------------------------------------------------------


def _round(context, name: str, row: str, scratch: str, turn: Lock) -> dict[str, str]:
    """What went wrong, with the message if there is one; `fine` if nothing did."""
    turn.acquire()
    counters, (ours, theirs) = context.RawArray(c_int64, 5), context.Pipe()
    learner = context.Process(target=_learn, args=(theirs, name, row, scratch, random.uniform(*PAUSE), counters))
    learner.start()
    theirs.close()
    collectors: list[int] = []
    ended = waiting = False
    try:
        collectors += map(os.pidfd_open, _receive(ours))
        _receive(ours)
        if waiting := not ours.poll(TURN):
            turn.release()
        found = _outcome(ours, counters)
        ended = not found.keys() & {"learner", "collector", "unseen"}
    finally:
        for collector in collectors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(collector, signal.SIGKILL)
            os.close(collector)
        learner.join(LIMIT if ended else 0)
        learner.kill()
        learner.join()
        if not waiting:
            turn.release()
    return found


def _receive(connection: Connection):
    """What the learner says before the kill; until then no failure is an outcome."""
    if not connection.poll(START_LIMIT):
        raise RuntimeError(f"no kill within {START_LIMIT:.0f} s")
    answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _outcome(connection: Connection, counters) -> dict[str, str]:
    found, before = {}, None
    if not connection.poll(LIMIT - QUIET - TURN):
        before = list(counters)
    if before is None or connection.poll(QUIET):
        try:
            error = connection.recv()
        except EOFError:
            error = RuntimeError("the learner died")
        if error is not None:
            found["raised"] = str(error)
    else:
        found |= {who: "" for who, at in (("learner", _READS), ("collector", _OTHER)) if counters[at] == before[at]}
        if not found:
            found["unseen"] = ""  # both go on, but no row put after the kill was read
        found["hung"] = ""
    if counters[_TORN]:
        found["torn"] = ""
    return found or {"fine": ""}


# ---- the learner and its collectors ---------------------------------------------------------------------------------


def _learn(connection: Connection, name: str, row_name: str, scratch: str, pause: float, counters) -> None:
    row, host, processes = MarkedRow.of(row_name), None, {}
    try:
        host = _host(name)(row, CAPACITY, scratch)
        sample = host.sampler(BATCH)
        context = mp.get_context("forkserver")
        # The server that this process came from, as is meant: Python 3.11 would start another here, with all imports.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
        for index in (_OTHER, _VICTIM):
            arguments = (_base(name), host.handle, row_name, index, counters)
            processes[index] = context.Process(target=_collect, args=arguments, daemon=True)
            processes[index].start()
        connection.send([process.pid for process in processes.values()])
        victim, other = processes[_VICTIM], processes[_OTHER]
        while not (counters[_VICTIM] and counters[_OTHER]):
            if not (victim.is_alive() and other.is_alive()):
                raise RuntimeError("a collector ended before the kill")
            sample()  # also makes room in a queue
        time.sleep(pause)
        victim.kill()
        victim.join()
        counters[_CALM], under_way = 1, counters[_OTHER] + 1
        connection.send("killed")

        seen = False
        while not seen or counters[_READS] < READS:
            batch = _flat(row, sample())
            counters[_READS] += 1
            whole, ids = _whole(row, batch)
            counters[_TORN] += int((~whole).sum())
            seen |= bool(((ids >> 32 == 1 + _OTHER) & (ids & 0xFFFFFFFF > under_way) & whole).any())
            if not other.is_alive():
                raise RuntimeError("the other collector ended")
        connection.send(None)
    except Exception as error:
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        if host is not None:
            host.close()


def _collect(name: str, handle, row_name: str, index: int, counters) -> None:
    row = MarkedRow.of(row_name)
    producer = peers.producer(name)(handle, row)
    send, number = producer.bind(1), 0
    while True:
        number += 1
        row.mark((1 + index) << 32 | number)
        send()
        counters[index] = number
        if counters[_CALM]:
            time.sleep(0.001)  # so that no torn row is overwritten before it can be read


# ---- rows that tell whether they are whole --------------------------------------------------------------------------


@dataclass(frozen=True)
class MarkedRow(Row):
    """Its rows follow from their ids. Of the arrays made last, `mark` changes the id in place: what a producer was
    bound to sends another row then."""

    made: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str) -> MarkedRow:
        row = ROWS[name]
        return cls(row.name, row.capacity, row.columns)

    def arrays(self, n: int, seed: int = 0) -> dict[str, np.ndarray]:
        self.made.update(_payload(self, np.arange(1, n + 1)))
        return dict(self.made)

    def tensordict(self, arrays: dict[str, np.ndarray]):
        import torch
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}  # not cloned
        return TensorDict(self.nested(tensors), batch_size=[len(arrays["action"])])

    def mark(self, number: int) -> None:
        for name, array in _payload(self, np.array([number])).items():
            self.made[name][...] = array


def _payload(row: Row, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The id itself is the int64 column."""
    made = {}
    for index, column in enumerate(row.columns):
        mixed, shape = _mix(ids, index), (len(ids), *column.shape)
        match column.dtype:
            case "int64":
                made[column.flat] = ids.astype(np.int64)
            case "uint8":  # the same 8 bytes again and again
                made[column.flat] = np.repeat(mixed, column.nbytes // 8).view(np.uint8).reshape(shape)
            case "float32":
                made[column.flat] = (mixed >> np.uint64(40)).astype(np.float32).reshape(shape)
            case _:
                made[column.flat] = (mixed & np.uint64(1)).astype(bool).reshape(shape)
    return made


def _mix(ids: np.ndarray, column: int) -> np.ndarray:
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(column + 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(27))


def _whole(row: Row, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are what their ids say; and the ids. A row that was never written is not."""
    ids = batch["action"].reshape(-1)
    whole = ids > 0
    for name, expected in _payload(row, ids).items():
        whole &= (batch[name].reshape(len(ids), -1) == expected.reshape(len(ids), -1)).all(1)
    return whole, ids


def _flat(row: Row, batch) -> dict[str, np.ndarray]:
    if isinstance(batch, dict):
        return batch
    return {column.flat: batch[column.key].numpy() for column in row.columns}


# ---- hosts that the other cases do not have -------------------------------------------------------------------------


def _base(name: str) -> str:
    return "cpprb" if name == CPPRB_PRIORITISED else name


def _host(name: str) -> Callable[[Row, int, str], peers.Host]:
    return {CPPRB_PRIORITISED: PrioritizedHost, "faster-fifo": FifoHost}.get(name) or peers.host(name)


class PrioritizedHost:
    copies = 1

    def __init__(self, row: Row, capacity: int, scratch: str):
        from cpprb import MPPrioritizedReplayBuffer

        from .peers.cpprb_mp import env_dict

        self.handle = MPPrioritizedReplayBuffer(capacity, env_dict(row), ctx=mp.get_context("spawn"))
        for chunk in row.chunks(capacity):
            self.handle.add(**chunk)

    def visible(self) -> None:
        return None

    def sampler(self, batch_size: int) -> Callable[[], object]:
        return lambda: self.handle.sample(batch_size)

    def close(self) -> None:
        pass


class FifoHost:
    """The learner is the consumer: a read stores what has come, then takes rows out of the numpy ring."""

    copies = 3

    def __init__(self, row: Row, capacity: int, scratch: str):
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  teaches pickle about the queue

        from .peers.queues import QUEUE_BYTES, Store

        self.handle = faster_fifo.Queue(max_size_bytes=2 * QUEUE_BYTES)  # more than is put until the kill
        self.handle.reallocate_msg_buffer(QUEUE_BYTES // 4)
        self._names, self._capacity, self._count = [c.flat for c in row.columns], capacity, 0
        self._store = Store(row, capacity)
        for chunk in row.chunks(capacity):
            self._store.add(tuple(chunk.values()))

    def visible(self) -> int:
        return self._count

    def sampler(self, batch_size: int) -> Callable[[], object]:
        rng = np.random.default_rng()

        def sample() -> dict[str, np.ndarray]:
            with suppress(queue.Empty):
                for message in self.handle.get_many_nowait(max_messages_to_get=1000):
                    self._count += self._store.add(message)
            chosen = rng.integers(0, self._capacity, batch_size)
            return {n: column[chosen] for n, column in zip(self._names, self._store._columns, strict=True)}

        return sample

    def close(self) -> None:
        pass
