"""The walk of tests/process/failpoints.py over rows in device memory: `python -m tests.cuda.failpoints NAME …` with
SHMBUF_NATIVE=failpoints, over the stand-in driver.

CUDA does not survive a fork, so each run is a process of its own whose children are forked before it begins to use the device, and
wait until they are told what to do.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuf import Buffer
from shmbuf.attachment import Attachment
from tests import oracle
from tests.process import failpoints, workers
from tests.process.failpoints import HAND, HITS, LARGEST, PLAIN, Actor, Scenario

CHILDREN = 5  # of one run at most


def put_from_device(actor: Actor, who: int, n: int, buffer: Buffer | None = None) -> None:
    """The next n rows of this number, as columns that the driver reads."""
    buffer = actor.buffer if buffer is None else buffer
    rows = oracle.make_rows(who, int(actor.acks[who]), n, ends=True)
    columns = [(c.offset, c.nbytes, rows[c.key[-1]].ctypes.data) for c in buffer.schema.columns]  # type: ignore[union-attr]
    of = np.ascontiguousarray(oracle.stream_of(who, rows["k"]))
    ticket = buffer.submit_device(columns, n, False, 20.0, lambda ids, n: ids, (of, None), 0)
    assert ticket is not None, "every device ring is taken"
    actor.acks[who] += n


def puts(actor: Actor) -> None:
    """Rows from the device and from the host, round the end of the ring, in turn."""
    for n in (1, LARGEST, 4, 7, 2, 8, LARGEST):
        put_from_device(actor, 1, n)
        if n % 2:
            actor.put(1, n)
        actor.buffer.drain()


def hands(actor: Actor) -> None:
    """One handle after another has the only device ring."""
    for i in HITS:
        with Buffer.attach(actor.name) as other:
            put_from_device(actor, HAND + i, 3, other)


def edits(actor: Actor) -> None:
    puts(actor)
    failpoints.edits(actor)


PUTS, HANDS, EDITS = Scenario(puts), Scenario(hands), Scenario(edits)
SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "device_ring": (HANDS,),
    "device_put": (PUTS, Scenario(puts, capacity=64)),
    "device_copy": (PUTS, EDITS, Scenario(edits, capacity=64)),
    "device_copied": (PUTS, EDITS),
    "device_settled": (PLAIN,),
    # What the host has, too, where the bytes of the rows are at stake.
    "txn": (PUTS,),
    "plan": (PUTS,),
    "post": (PUTS,),
    "ring": (PUTS,),
    "sweep": (HANDS,),
    "slot": (HANDS,),
    "clear": (Scenario(failpoints.clears, capacity=64),),
    "edit": (EDITS, Scenario(edits, capacity=64)),
}


class Children:
    """Forked early; `fork` gives one its work, as `workers.fork` does with a new one."""

    def __init__(self, n: int) -> None:
        self.waiting: list[tuple[int, int]] = []
        for _ in range(n):
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(write)
                for _, other in self.waiting:
                    os.close(other)
                self._serve(read)
            os.close(read)
            self.waiting.append((pid, write))

    def _serve(self, read: int) -> None:
        with os.fdopen(read, "rb") as f:
            task = f.read()
        if not task:
            os._exit(0)
        target, args = pickle.loads(task)
        fork, os.fork = os.fork, lambda: 0  # this is the child
        try:
            workers.fork(lambda: (setattr(os, "fork", fork), target(*args)))
        finally:
            os._exit(1)

    def fork(self, target: Callable, *args: Any) -> int:
        pid, write = self.waiting.pop(0)
        with os.fdopen(write, "wb") as f:
            f.write(pickle.dumps((target, args)))
        return pid

    def end(self) -> None:
        for pid, write in self.waiting:
            os.close(write)
            os.waitpid(pid, 0)


def sweep(creator: Buffer) -> None:
    """A ring whose owner was killed while its device was at work is kept until that must be over."""
    deadline = time.monotonic() + 20
    while True:
        creator._handle.sweep()
        if not creator.collectors() or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def act(name: str, acks_path: str, spec: str, label: str, which: int) -> None:
    failpoints.act(name, acks_path, spec, scenarios_of(label)[which])


def scenarios_of(label: str) -> tuple[Scenario, ...]:
    return SCENARIOS[max((p for p in SCENARIOS if label.startswith(p)), key=len)]


def run(label: str, how: str, hit: int, directory: str, which: int, kill_successor: bool = False) -> bool:
    """As `failpoints.run`, in a process of its own."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            children = Children(CHILDREN)
            scenario = scenarios_of(label)[which]

            def fork(target: Callable, *args: Any) -> int:
                if target is failpoints.act:  # a scenario may be of functions that no pickle names
                    return children.fork(act, *args[:3], label, which)
                return children.fork(target, *args)

            workers.fork, failpoints.sweep = fork, sweep  # type: ignore[assignment]
            Attachment.create.__func__.__kwdefaults__["device"] = "cuda:0"  # type: ignore[attr-defined]
            code = 0 if failpoints.run(label, how, hit, directory, scenario, kill_successor=kill_successor) else 3
            children.end()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = failpoints.wait(pid, seconds=100)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 3), (
        f"{label}={how}@{hit}, life {which}: wait status {status}"
    )
    return os.WEXITSTATUS(status) == 0


def walk(label: str, directory: str, hits: tuple[int, ...]) -> None:
    for which in range(len(scenarios_of(label))):
        for hit in hits:
            for how in ("kill", "stop"):
                assert run(label, how, hit, directory, which), f"{label} never fired for the {hit}th time"
            run(label, "kill", hit, directory, which, kill_successor=True)


def main(hits: str, *labels: str) -> None:
    import cuda.bindings.driver  # noqa: F401  once, for all children; nothing of the driver is begun

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as directory:
        for label in labels:
            walk(label, directory, tuple(map(int, hits.split(","))))
            print(label, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
