"""Drawing by priority and updating: against peers' buffers in one process, the tree alone, and several learners or updaters.

A call is `sample(256)` and then the update of those rows' priorities, as a learner does.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from . import samplers
from .ingest import Crew
from .isolate import Emitter
from .peers import OURS
from .plan import ALONE, APART, BURNING, PRIORITISED, UPDATING
from .rows import ROWS, Row
from .sampling import check_memory, take_turns, time_calls
from .settings import Settings

ALPHA, BETA = 0.6, 0.4
UNIFORM = "uniform"


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    {"prio": _beside_peers, "learners": _learners, "updaters": _updaters}[spec["kind"]](spec, settings, emit)


# ---- one process ----------------------------------------------------------------------------------------------------


def _beside_peers(spec: dict, settings: Settings, emit: Emitter) -> None:
    row = ROWS[spec["row"]]
    capacity, batch, prefix = settings.capacity(row), settings.batch_size, f"prio/{row.name}"
    with ExitStack() as stack:
        entrants: dict[str, samplers.Contender] = {}
        for name in spec["contenders"]:
            emit.at(name)
            try:
                check_memory(capacity * row.nbytes)
                built = stack.enter_context(_build(name, row, capacity, batch, spec["scratch"]))
                for contender in built.values():
                    time_calls(contender, 3)
                entrants |= built
            except Exception as error:
                emit.error(f"{prefix}/{name}", f"{type(error).__name__}: {error}")
        for name, seconds in take_turns(entrants, settings, emit).items():
            emit.values(f"{prefix}/{name}", seconds)


@contextmanager
def _build(name: str, row: Row, capacity: int, batch: int, scratch: str) -> Iterator[dict[str, samplers.Contender]]:
    if name == OURS:
        from shmbuf import RandomSampler, attach

        with (
            _buffer(row, capacity, batch, Path(scratch).name) as buffer,
            attach(buffer.name, sampler=RandomSampler()) as uniform,
        ):
            yield _ours(buffer, uniform, capacity, batch)
    else:
        yield {name: samplers.Contender(_PEERS[name](row, capacity, batch))}


@contextmanager
def _buffer(row: Row, capacity: int, batch: int, name: str) -> Iterator:
    """Ours, full, each row with a priority of its own."""
    import shmbuf
    from shmbuf import PrioritizedSampler, ShmStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(
        storage=ShmStorage(capacity, name=name, example=row.tensordict(row.arrays(1))[0]),
        sampler=PrioritizedSampler(capacity, ALPHA, BETA),
        batch_size=batch,
    )
    try:
        for chunk in row.chunks(capacity):
            buffer.extend(row.tensordict(chunk))
        buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
        yield buffer
    finally:
        buffer.close()
        shmbuf.destroy(name)


def _ours(buffer, uniform, capacity: int, batch: int) -> dict[str, samplers.Contender]:
    """The whole call, its parts, and the tree alone."""
    error, native = torch.rand(batch), buffer.buffer._handle
    ids, leaves = np.empty(batch, np.int64), np.empty(batch, np.float32)
    applied, p = np.empty(batch, np.uint8), np.random.default_rng(1).random(batch, dtype=np.float32)

    def call() -> None:
        td = buffer.sample()
        td["td_error"] = error
        buffer.update_tensordict_priority(td)

    def draw() -> None:
        assert native.choose_by_priority(batch, False, ids.ctypes.data, leaves.ctypes.data) == batch

    def update() -> None:
        status, _ = native.set_priorities(ids.ctypes.data, p.ctypes.data, batch, 4, applied.ctypes.data)
        assert status == 0 and applied.all()

    def elsewhere() -> None:  # other rows than the ones just touched
        ids[:] = np.random.randint(0, capacity, batch)

    return {
        OURS: samplers.Contender(call),
        UNIFORM: samplers.Contender(uniform.sample),
        "sample": samplers.Contender(buffer.sample),
        "tree draw": samplers.Contender(draw),
        "tree update": samplers.Contender(update, elsewhere),
    }


def _torchrl(row: Row, capacity: int, batch: int) -> Callable[[], object]:
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity, ALPHA, BETA), batch_size=batch
    )
    for chunk in row.chunks(capacity):
        buffer.extend(row.tensordict(chunk))
    buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
    error = torch.rand(batch)

    def call() -> None:
        td = buffer.sample()
        td["td_error"] = error
        buffer.update_tensordict_priority(td)

    return call


def _cpprb(row: Row, capacity: int, batch: int) -> Callable[[], object]:
    from cpprb import PrioritizedReplayBuffer

    from .peers.cpprb_mp import env_dict

    buffer = PrioritizedReplayBuffer(capacity, env_dict(row), alpha=ALPHA)
    rng = np.random.default_rng(1)
    for chunk in row.chunks(capacity):
        buffer.add(**chunk, priorities=rng.random(len(chunk["obs"])))
    error = rng.random(batch)

    def call() -> None:
        buffer.update_priorities(buffer.sample(batch, beta=BETA)["indexes"], error)

    return call


def _tianshou(row: Row, capacity: int, batch: int) -> Callable[[], object]:
    from tianshou.data import Batch, PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(capacity, ALPHA, BETA)
    full = samplers.filled(row, capacity)
    terminated = full["next_terminated"][:, 0]
    # Straight into its arrays and its tree: a million calls of `add` would take minutes.
    buffer.set_batch(
        Batch(
            obs=full["obs"],
            act=full["action"],
            rew=full["next_reward"][:, 0],
            terminated=terminated,
            truncated=np.zeros_like(terminated),
            done=full["next_done"][:, 0],
            obs_next=full["next_obs"],
        )
    )
    buffer._size = capacity
    rng = np.random.default_rng(1)
    buffer.weight[np.arange(capacity)] = rng.random(capacity) ** ALPHA
    error = rng.random(batch)

    def call() -> None:
        _, indices = buffer.sample(batch)
        buffer.update_weight(indices, error)

    return call


_PEERS = {"torchrl": _torchrl, "cpprb": _cpprb, "tianshou": _tianshou}
assert (OURS, *_PEERS) == PRIORITISED


# ---- several processes ----------------------------------------------------------------------------------------------


def _learners(spec: dict, settings: Settings, emit: Emitter) -> None:
    """Calls a second, in sum, of 1, 2 and 4 learner processes; and of 2 that share nothing, which is what the machine has to give."""
    emit.at(OURS)
    row, name = ROWS[spec["row"]], Path(spec["scratch"]).name
    size = settings.capacity(row), settings.batch_size
    place, rounds = f"learners/{row.name}", range(settings.beside_rounds)
    with _buffer(row, *size, name):
        workers = Workers(4, _learn, name, settings.batch_size)
        try:
            for count in (1, 2, 4):
                workers.round(count, settings.warm_seconds)
                rates = [workers.round(count, settings.round_seconds) for _ in rounds]
                emit.values(f"{place}/{count}/{OURS}", rates)
        finally:
            workers.close()
        with _buffer(row, *size, name + ".other"):
            apart = [Workers(1, _learn, n, settings.batch_size) for n in (name, name + ".other")]
            rates = []
            try:
                for seconds in (settings.warm_seconds, *[settings.round_seconds] * len(rounds)):
                    for each in apart:
                        each.start(1, seconds)
                    rates.append(sum(each.finish(1) for each in apart))
                emit.values(f"{place}/{APART}/{OURS}", rates[1:])
            finally:
                for each in apart:
                    each.close()


def _updaters(spec: dict, settings: Settings, emit: Emitter) -> None:
    """Updates a second of 2 processes together; and rows a second of a collector: alone, beside two that update, beside two
    that only burn CPU."""
    from .beside import Burners

    emit.at(OURS)
    row, name = ROWS[spec["row"]], Path(spec["scratch"]).name
    capacity, seconds = settings.capacity(row), settings.round_seconds
    with _buffer(row, capacity, settings.batch_size, name) as buffer:
        workers = Workers(2, _update, name, settings.batch_size)
        crew = Crew(OURS, _Host(buffer), row, 1)
        burners = Burners(2, 1 << 12)
        rates: dict[str, list[float]] = {phase: [] for phase in (ALONE, UPDATING, BURNING)}
        updates = []
        try:
            workers.round(2, settings.warm_seconds)
            crew.round(1, 64, settings.warm_seconds)
            for _ in range(settings.beside_rounds):
                updates.append(workers.round(2, seconds) * settings.batch_size)
                rates[ALONE].append(crew.round(1, 64, seconds))
                workers.start(2, seconds + 0.2)
                time.sleep(0.1)
                rates[UPDATING].append(crew.round(1, 64, seconds))
                workers.finish(2)
                burners.start(seconds + 0.2, 0.0)
                time.sleep(0.1)
                rates[BURNING].append(crew.round(1, 64, seconds))
                burners.finish()
        finally:
            for group in (workers, crew, burners):
                group.close()
    emit.values(f"updaters/{row.name}/updates/{OURS}", updates)
    for phase, values in rates.items():
        emit.values(f"updaters/{row.name}/{phase}/{OURS}", values)


class _Host:
    """The buffer that is there, as a crew's."""

    copies = 2

    def __init__(self, buffer):
        self.handle, self._buffer = buffer.name, buffer

    def visible(self) -> int:
        return self._buffer.write_count


class Workers:
    """Processes that repeat one call for as long as they are told, and say how often they did."""

    def __init__(self, count: int, main: Callable, *args: object):
        context = mp.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, main, args), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for connection in self._connections:
            connection.recv()  # ready

    def round(self, count: int, seconds: float) -> float:
        """Calls a second, in sum."""
        self.start(count, seconds)
        return self.finish(count)

    def start(self, count: int, seconds: float) -> None:
        at = time.perf_counter() + 0.02
        for connection in self._connections[:count]:
            connection.send((at, seconds))

    def finish(self, count: int) -> float:
        return sum(connection.recv() for connection in self._connections[:count])

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(5)


def _serve(connection: Connection, main: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    call = main(*args)
    call()
    connection.send("ready")
    while (order := connection.recv()) is not None:
        at, seconds = order
        clock, calls = time.perf_counter, 0
        time.sleep(max(0.0, at - clock()))
        end = at + seconds
        while clock() < end:
            call()
            calls += 1
        connection.send(calls / (clock() - at))


def _learn(name: str, batch: int) -> Callable[[], object]:
    import shmbuf

    buffer, error = shmbuf.attach(name), torch.rand(batch)

    def call() -> None:
        td = buffer.sample()
        td["td_error"] = error
        buffer.update_tensordict_priority(td)

    return call


def _update(name: str, batch: int) -> Callable[[], object]:
    """Random rows, as they lie now; the numbers are drawn beforehand."""
    import shmbuf

    buffer, rng = shmbuf.Buffer.attach(name), np.random.default_rng()
    capacity, p = buffer.capacity, rng.random(batch)
    back = [rng.integers(0, capacity, batch) for _ in range(256)]
    turn = 0

    def call() -> None:
        nonlocal turn
        turn += 1
        end = buffer.window[1]
        buffer.set_priorities(end - 1 - back[turn % len(back)], p)

    return call
