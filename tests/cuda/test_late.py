"""Copies that a dead process had begun land all the same, later: by then others may want to have written other rows there."""

from __future__ import annotations

import pytest

VICTIM = """
import os, sys, threading
from shmbuf import Buffer
from tests import oracle
b = Buffer.attach(sys.argv[1])
b._place.map(b._handle)
for k in range(12):  # a copy each
    b.put(oracle.make_rows(1, k, 1))
threading.Timer(0.03, os.kill, (os.getpid(), 9)).start()
while True:
    b.drain()
"""
SUCCESSOR = """
import os, subprocess, sys, time
import numpy as np
from shmbuf import Buffer, destroy
from tests import oracle
name, log = sys.argv[1:]
b = Buffer.create(name, 16, schema=oracle.SCHEMA, ring_bytes=4096, drain="caller", device="cuda:0")
env = {**os.environ, "STANDIN_LATE": "1", "STANDIN_DELAY_US": "80000", "STANDIN_LOG": log}
landed_late, k = 0, 0
def lines():
    return len(open(log).readlines()) if os.path.exists(log) else 0
for turn in range(20):
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, name], env=env)
    assert victim.wait(60) == -9
    before = lines()
    for _ in range(8):  # all slots, again and again
        ids = b.extend(oracle.make_rows(2, k, 16), timeout=30)
        k += 16
    time.sleep(0.12)  # what is under way has landed: the log tells how much it was
    landed_late += lines() - before
    rows = b.gather(ids)
    oracle.check_rows(rows)
    assert (rows["who"] == 2).all() and (rows["k"] == np.arange(k - 16, k)).all(), (rows["who"], rows["k"])
    b._handle.sweep()
    if landed_late and turn >= 3:
        break
assert b.stats()["takeovers"], "the writer was killed in none of its transactions"
b.close(); destroy(name)
print(landed_late)
"""


def test_what_lands_after_its_writers_death_meets_no_other_rows(over, name, tmp_path):
    landed = over(f"VICTIM = {VICTIM!r}\n{SUCCESSOR}", name, tmp_path / "log", STANDIN_DELAY_US="0")
    assert int(landed) > 0, "no copy landed late: nothing was tested"


@pytest.mark.parametrize("how", ["pid", "namespace", "namespace, at work for long"])
def test_a_ring_of_one_who_died_while_its_device_filled_it_is_kept_until_that_is_over(over, name, how):
    """The words that a killed collector leaves; whoever sweeps reads them."""
    code = """
import os, struct, subprocess, sys, time
import numpy as np
from shmbuf import Buffer, destroy, segment
from tests import oracle
from tests.fuzz import segments
name, how = sys.argv[1:]
b = Buffer.create(name, 100, schema=oracle.SCHEMA, ring_bytes=4096, drain="caller", device="cuda:0")
rows = oracle.make_rows(1, 0, 3)
columns = [(c.offset, c.nbytes, rows[c.key[-1]].ctypes.data) for c in b.schema.columns]
dies = '''
import os, sys
from shmbuf import Buffer
from tests import oracle
from shmbuf._extension import native
b = Buffer.attach(sys.argv[1])
rows = oracle.make_rows(1, 0, 3)
columns = [(c.offset, c.nbytes, rows[c.key[-1]].ctypes.data) for c in b.schema.columns]
native.arm("device_put_begun=kill@1")
b.submit_device(columns, 3, False, 20.0, lambda ids, n: ids, (None, None), 0)
'''
p = subprocess.Popen([sys.executable, "-c", dies, name])
assert p.wait(60) == -9
(collector,) = b.collectors()
assert collector["state"] == "dead" and not collector["ring_used"]
data = np.memmap(segment.path_of(name), np.uint8, "r+")
f = segments.fields(data[:8192].tobytes())
at = f.slots + collector["slot"] * segments.SLOT
words = data[at : at + 512].view(np.uint64)
assert words[7], "no sign that its device was at work"
if how != "pid":  # of which nothing is seen here
    owner = bytes(data[at : at + 512])
    where = owner.index(struct.pack("<Q", os.stat("/proc/self/ns/pid").st_ino))
    data[at + where : at + where + 8].view(np.uint64)[0] += 1
begun = time.monotonic_ns()
words[7] = begun - (60_000_000_000 if "long" in how else 0)
b._handle.sweep()
kept = [c["state"] for c in b.collectors()]
assert kept == ["dead"] or time.monotonic_ns() - begun > 5e7, kept
while b.collectors():
    b._handle.sweep()
    time.sleep(0.005)
took = time.monotonic_ns() - begun
assert took >= (1e8 if how == "pid" else 2e9), took
t = b.submit_device(columns, 3, False, 20.0, lambda ids, n: ids, (None, None), 0)
assert t is not None and len(t.wait(20)) == 3, "its device ring is free again"
b.close(); destroy(name)
"""
    over(code, name, how, SHMBUF_NATIVE="failpoints")
