"""Pins of several processes beside a writer that needs the room: what is pinned does not move, whoever is killed or stopped."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shmbuf import Buffer, Lapped, RingFull, destroy
from tests import oracle
from tests.process import workers

CAPACITY = 256


def look_in_place(name: str, stop, seed: int) -> None:
    """Pins some rows, reads them twice in place, until `stop`; dies of a torn or changed one."""
    rng = random.Random(seed)
    buffer = Buffer.attach(name)
    looked = 0
    while not stop.is_set() or not looked:
        lo, hi = buffer.window
        if lo == hi:
            buffer.wait_rows(1, 30)
            continue
        with contextlib.suppress(Lapped):
            pin = buffer.pin(rng.choice([None, rng.randrange(lo, hi)]), seconds=rng.choice([None, 10.0, 0.001]))
            once = [{k: np.array(v) for k, v in rows.items()} for _, rows in pin.parts()]
            twice = [{k: np.array(v) for k, v in rows.items()} for _, rows in pin.parts()]
            if pin.valid:
                looked += 1
                for a, b in zip(once, twice, strict=True):
                    oracle.check_rows(a)
                    assert all((a[k] == b[k]).all() for k in a)
            pin.release()
    buffer.close()


def supervise(name: str, acks_path: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    acks = oracle.Acks(acks_path, 4096)
    stop = workers.ForkedEvent()
    Buffer.create(name, CAPACITY, schema=oracle.SCHEMA, ring_bytes=1 << 14, drain="caller", max_collectors=8).close()
    who = iter(range(4096))

    def collector() -> int:
        w = next(who)
        return workers.fork(workers.collect, name, w, acks.path, 9, stop, w)

    def looker() -> int:
        return workers.fork(look_in_place, name, stop, rng.randrange(2**32))

    def drainer() -> int:
        return workers.fork(workers.drain, name)

    makers = [collector, collector, drainer, looker, looker]
    alive = [make() for make in makers]
    watch = Buffer.attach(name)
    deadline = time.monotonic() + 60 + kills
    for _ in range(kills):
        assert time.monotonic() < deadline, f"something hangs: {watch.stats()} {watch._handle.pins()}"
        before = watch.stats()["rows_total"]
        while watch.stats()["rows_total"] < before + 20:  # whatever was killed or stopped before, rows go on
            assert time.monotonic() < deadline, f"no rows: {watch.stats()} {watch._handle.pins()} {watch.members()}"
            time.sleep(1e-3)
        i = rng.randrange(len(alive))
        if (
            makers[i] is looker and rng.random() < 0.3
        ):  # a stopped one is in the way until its time is over, or for good
            os.kill(alive[i], signal.SIGSTOP)
            time.sleep(rng.random() * 0.02)
            if rng.random() < 0.5:
                os.kill(alive[i], signal.SIGCONT)
                continue
        assert workers.kill(alive[i]) == signal.SIGKILL, "a worker ended by itself"
        alive[i] = makers[i]()
    stop.set()
    for pid, make in zip(alive, makers, strict=True):
        if make is not drainer:
            assert os.waitpid(pid, 0)[1] == 0
    oracle.settle(watch)
    stats = oracle.check(watch, acks.counts, 9)
    report = watch.check()
    assert not report["findings"], report
    assert watch._handle.pins() == []
    print(f"rows={stats['rows_total']}")
    for pid, make in zip(alive, makers, strict=True):
        if make is drainer:
            workers.kill(pid)


@pytest.mark.parametrize("seed", [1, 2])
def test_pinned_rows_stay_and_the_rest_goes_on(unique_name, tmp_path, seed):
    kills = 1000 if os.environ.get("SHMBUF_SOAK") else 40
    code = f"from tests.process.test_pins import supervise as s; s({unique_name!r}, {str(tmp_path / 'acks')!r}, {kills}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110 + 2 * kills)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_dead_pinner_holds_up_nobody_though_only_a_standby_is_left(unique_name):
    """The creator drained, pinned without an end and was killed: what others put is seen by whoever samples, who never helps."""
    code = (
        "import os, signal, sys, numpy as np\nfrom shmbuf import Buffer\n"
        "b = Buffer.create(sys.argv[1], 64, schema={'k': 'int64'})\nb.extend({'k': np.arange(64)})\n"
        "pin = b.pin(seconds=None)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, unique_name], timeout=60).returncode == -signal.SIGKILL
    with Buffer.attach(unique_name) as reader, Buffer.attach(unique_name) as collector:
        reader.draw(1)  # has a standby from now on
        collector.put({"k": np.arange(64, 70)})
        deadline = time.monotonic() + 60
        while reader.window[1] < 70:
            assert time.monotonic() < deadline, (reader.stats(), reader._handle.pins())
            time.sleep(1e-3)
        assert reader._handle.pins() == []


STOPS = """
import sys
from shmbuf import Buffer
from shmbuf._extension import native
from tests import oracle
b = Buffer.attach(sys.argv[1])
native.arm("plan_sealed=stop@1")
b.extend(oracle.make_rows(7, 0, 40))
"""


def try_again(name: str, stop) -> None:
    with Buffer.attach(name) as buffer:
        while not stop.is_set():
            with contextlib.suppress(RingFull):
                buffer.empty(timeout=0.01)  # which waits for the plan


def test_rows_pinned_after_a_plan_was_sealed_can_be_gathered_though_the_writer_tries_again_and_again(unique_name):
    with Buffer.create(unique_name, 200, schema=oracle.SCHEMA, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(0, 0, 200))
        env = {**os.environ, "SHMBUF_NATIVE": "failpoints"}
        planner = subprocess.Popen([sys.executable, "-c", STOPS, unique_name], env=env)
        os.waitid(os.P_PID, planner.pid, os.WSTOPPED | os.WNOWAIT)
        pin = buffer.pin(seconds=None)
        planner.kill(), planner.wait()
        stop = workers.ForkedEvent()
        pid = workers.fork(try_again, unique_name, stop)
        try:
            for _ in range(20_000):
                buffer.gather(range(pin.first_id, pin.first_id + 16))
        finally:
            stop.set()
            assert os.waitpid(pid, 0)[1] == 0
        assert len(pin) == 200 and pin.valid
        pin.release()
        while buffer.drain():
            pass
        assert buffer.window == (40, 240)
    destroy(unique_name)


def test_an_emptying_that_a_dead_planner_sealed_waits_for_no_pin(unique_name):
    with Buffer.create(unique_name, 200, schema=oracle.SCHEMA, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(0, 0, 207))
        code = STOPS[: STOPS.index("native.arm")] + 'native.arm("plan_sealed=kill@1")\nb.empty()\n'
        env = {**os.environ, "SHMBUF_NATIVE": "failpoints"}
        done = subprocess.run([sys.executable, "-c", code, unique_name], env=env, timeout=60)
        assert done.returncode == -signal.SIGKILL
        with contextlib.suppress(Lapped), buffer.pin(seconds=None):
            assert buffer._handle.runnable and buffer.drain() and len(buffer) == 0
    destroy(unique_name)
