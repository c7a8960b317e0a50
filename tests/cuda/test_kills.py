"""Collectors of both kinds, writers, readers and an editor on one buffer in device memory, killed again and again: no row is torn, lost or doubled."""

from __future__ import annotations

import pytest

CODE = """
import ctypes, random, subprocess, sys, time
import numpy as np
from shmbuf import Buffer, destroy
from tests import oracle
from tests.cuda.actors import LARGEST
from tests.process import workers
name, acks_path, seed = sys.argv[1:]
rng = random.Random(int(seed))
acks = oracle.Acks(acks_path)
b = Buffer.create(name, 300, schema=oracle.SCHEMA, ring_bytes=8192, drain="caller", max_collectors=16, device="cuda:0", device_rings=2, timeout=60)
who = 0
def start(what):
    global who
    who += 1
    # with us, so that nobody waits for those whom we leave behind
    end_with_us = lambda: ctypes.CDLL(None).prctl(1, 9)
    command = [sys.executable, "-m", "tests.cuda.actors", what, name, acks_path, str(who)]
    return what, subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_us)
actors = [start(what) for what in ("drain", "drain", "host", "device", "device", "read", "edit")]
_, reader = actors[5]
deadline = time.monotonic() + 150
assert reader.stdout.readline() == b"read\\n", reader.wait(20)
killed = 0
while killed < 14:
    time.sleep(rng.random() * 0.4)
    for what, p in actors:
        assert p.poll() is None, f"{what} ended by itself: {p.returncode}"
    i = rng.randrange(len(actors))
    what, p = actors[i]
    p.kill(); p.wait()
    killed += 1
    b._handle.sweep()
    actors[i] = start(what)
    assert time.monotonic() < deadline
what, p = actors[5]
before = b.stats()["rows_total"]
while b.stats()["rows_total"] < before + 600 and time.monotonic() < deadline:  # it goes on
    time.sleep(0.01)
assert b.stats()["rows_total"] >= before + 600, (b.stats(), b.collectors(), b.members())
for what, p in actors:
    assert p.poll() is None, f"{what} ended by itself: {p.returncode}"
    p.kill(); p.wait()
workers.settle(b)
while b.collectors():
    b._handle.sweep()
    assert time.monotonic() < deadline + 20, b.collectors()
oracle.check(b, acks.counts, LARGEST)
assert not b.check()["findings"] and not b.stats()["malformed_records"]
print(b.stats()["takeovers"], b.stats()["rows_total"])
b.close(); destroy(name)
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("late", "seed"), [("0", 1), ("1", 2)])
def test_nobody_is_missed(begin, name, tmp_path, late, seed):
    p = begin(CODE, name, tmp_path / "acks", seed, STANDIN_LATE=late, STANDIN_DELAY_US="1500")
    out, err = p.communicate(timeout=350)
    assert p.returncode == 0, f"{out}\n{err}"
