"""SIGKILL at random moments: of collectors, of the drain process, of the creator, while the others go on."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shmbuf import Buffer, destroy
from tests import oracle
from tests.process import workers

LARGEST = 24
KILLS = 2000 if os.environ.get("SHMBUF_SOAK") else 200


def supervise(name: str, acks_path: str, kills: int, seed: int, capacity: int) -> None:
    """Run in a fresh interpreter (no threads of its own, so it may fork): kill and replace until `kills` are done."""
    rng = random.Random(seed)
    acks = oracle.Acks(acks_path, 8192)
    stop = workers.ForkedEvent()
    Buffer.create(
        name,
        capacity,
        schema=oracle.SCHEMA,
        ring_bytes=1 << 14,
        drain="caller",
        max_collectors=8,
        trajectories=capacity < 1000,  # looking at every one takes its time
    ).close()
    who = iter(range(8192))
    collectors = {
        w: workers.fork(workers.collect, name, w, acks.path, LARGEST, stop, w) for w in (next(who) for _ in range(4))
    }
    drainers = [workers.fork(workers.drain, name) for _ in range(2)]
    reader = workers.fork(read_until, name, stop)
    watch = Buffer.attach(name)
    done = 0
    deadline = time.monotonic() + kills / 2
    while done < kills:
        assert time.monotonic() < deadline, f"only {done} kills: something hangs: {watch.stats()} {watch.collectors()}"
        time.sleep(rng.random() * 0.03)
        if rng.random() < 0.5:
            w = rng.choice(list(collectors))
            status = workers.kill(collectors.pop(w))
            new = next(who)
            collectors[new] = workers.fork(workers.collect, name, new, acks.path, LARGEST, stop, new)
        else:
            i = rng.randrange(len(drainers))
            status = workers.kill(drainers[i])
            drainers[i] = workers.fork(workers.drain, name)
        assert status == signal.SIGKILL, f"a worker ended by itself with wait status {status}"
        done += 1
    stop.set()
    for pid in [*collectors.values(), reader]:
        assert os.waitpid(pid, 0)[1] == 0
    oracle.settle(watch)
    stats = oracle.check(watch, acks.counts, LARGEST, streams=True)
    print(f"kills={done} rows={stats['rows_total']} acked={acks.counts.sum()} takeovers={stats['takeovers']}")
    assert stats["rows_total"] > 0
    for pid in drainers:
        workers.kill(pid)


def read_until(name: str, stop) -> None:
    buffer = Buffer.attach(name)
    while not stop.is_set():
        rows, _ = buffer.draw(32, timeout=30)
        oracle.check_rows(rows)
    buffer.close()


def run_supervisor(code: str, timeout: float = 110) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(KILLS + 20)
@pytest.mark.parametrize("capacity", [300, 1_000_000], ids=["wraps", "whole"])
def test_random_kills_of_collectors_and_writers(capacity, tmp_path, unique_name):
    out = run_supervisor(
        "from tests.process.test_kills import supervise; "
        f"supervise({unique_name!r}, {str(tmp_path / 'acks')!r}, {KILLS}, 1, {capacity})",
        timeout=KILLS / 2 + 10,
    )
    assert f"kills={KILLS}" in out


CREATOR = """
import sys, time
from shmbuf import Buffer
from tests import oracle
buffer = Buffer.create(sys.argv[1], 100_000, schema=oracle.SCHEMA, drain="thread")
print("created", flush=True)
time.sleep(600)
"""


def test_creator_killed_the_rest_goes_on(tmp_path, unique_name):
    creator = subprocess.Popen([sys.executable, "-c", CREATOR, unique_name], stdout=subprocess.PIPE, text=True)
    assert creator.stdout.readline() == "created\n"
    collector, learner = Buffer.attach(unique_name), Buffer.attach(unique_name)
    collector.put(oracle.make_rows(0, 0, 10)).wait(10)
    learner.draw(4)  # from now on it keeps a standby
    creator.kill()
    creator.wait()
    # The collector only puts and never waits: what makes its rows visible is the learner's sleeping standby.
    ticket = collector.put(oracle.make_rows(0, 10, 10))
    learner.wait_rows(20, timeout=20)
    assert ticket.done()
    assert collector.extend(oracle.make_rows(0, 20, 5)).tolist() == list(range(20, 25))
    members = learner.members()
    assert [m["alive"] for m in members if "creator" in m["roles"]] == [False]
    acks = np.zeros(1, np.int64)
    acks[0] = 25
    oracle.check(learner, acks, 0, whole=True)
    collector.close()
    learner.close()
    destroy(unique_name)


PUT_AND_SLEEP = """
import sys, time
from shmbuf import Buffer
from tests import oracle
buffer = Buffer.attach(sys.argv[1])
buffer.put(oracle.make_rows(0, 0, 7))
print("put", flush=True)
time.sleep(600)
"""


def test_collector_killed_its_ring_is_drained_and_reused(unique_name, tmp_path):
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", max_collectors=1) as buffer:
        acks = oracle.Acks(tmp_path / "acks")
        victim = subprocess.Popen([sys.executable, "-c", PUT_AND_SLEEP, unique_name], stdout=subprocess.PIPE, text=True)
        assert victim.stdout.readline() == "put\n"
        victim.kill()
        victim.wait()
        assert len(buffer) == 0
        assert [c["state"] for c in buffer.collectors()] == ["dead"]
        # The only ring belongs to a dead collector: the next one drains it, then takes it over.
        assert buffer.extend(oracle.make_rows(1, 0, 3)).tolist() == [7, 8, 9]
        acks.counts[0], acks.counts[1] = 7, 3
        oracle.check(buffer, acks.counts, 0, whole=True)
    destroy(unique_name)
