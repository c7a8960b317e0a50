"""SIGKILL at random moments, of collectors, learners, drain processes and the creator, while the others go on."""

import os
import subprocess
import sys

import numpy as np
import pytest

from shmbuf import Buffer, destroy
from tests import oracle
from tests.process import soak

KILLS = 10_000 if os.environ.get("SHMBUF_SOAK") else 280


def run_supervisor(code: str, timeout: float = 110) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(KILLS + 60)
def test_random_kills_of_everybody(tmp_path):
    """See tests/process/soak.py, which is this for longer."""
    legs = "soak.LEGS" if KILLS > 1000 else "[leg._replace(kills=40) for leg in soak.LEGS]"
    code = f"from tests.process import soak; print(soak.soak({KILLS}, 1, {str(tmp_path)!r}, {legs}).text())"
    assert "hangs=0 torn=0 lost=0 doubled=0" in run_supervisor(code, timeout=KILLS + 50)


def test_kills_in_the_middle_of_a_transaction(tmp_path, monkeypatch):
    monkeypatch.setenv("SHMBUF_NATIVE", "failpoints")
    code = f"from tests.process import soak; print(soak.takeovers({KILLS // 10}, 1, {str(tmp_path)!r}).text())"
    assert f"{soak.ARMED:38}" in run_supervisor(code)


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
