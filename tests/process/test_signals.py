"""Ctrl-C and other signals at a wait: it ends at once, nothing stays locked, rows in the ring are not forgotten."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shmbuf import Buffer, destroy, segment
from tests import oracle

HEAD = """
import os, signal, sys
from shmbuf import Buffer, CommitInterrupted, CommitPending, RingFull, StorageLost
from tests import oracle
buffer = Buffer.attach(sys.argv[1])
def say(*a): print(*a, flush=True)
"""
WAITS = {
    # what waits, what ends it
    "extend": (
        "say('waits')\ntry:\n    buffer.extend(oracle.make_rows(0, 0, 4))\nexcept CommitInterrupted as e:\n"
        "    say('interrupted', e.rows)\n",
        "interrupted 4",
    ),
    "put": (
        "k = 0\ntry:\n    while True:\n        if k == 25: say('waits')\n        buffer.put(oracle.make_rows(0, k, 1)); k += 1\n"
        "except KeyboardInterrupt:\n    say('interrupted')\n",
        "interrupted",
    ),
    "large put": (
        "say('waits')\ntry:\n    buffer.put(oracle.make_rows(0, 0, 500))\nexcept CommitInterrupted as e:\n"
        "    say('interrupted', 0 < e.rows < 500)\n",
        "interrupted True",
    ),
    "wait for rows": (
        "say('waits')\ntry:\n    buffer.draw(1, timeout=None)\nexcept KeyboardInterrupt:\n    say('interrupted')\n",
        "interrupted",
    ),
}


@pytest.fixture
def stuck(unique_name):
    """A buffer whose writer role is held by somebody who does not drain."""
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096) as buffer:
        holder = segment.attach(unique_name)
        assert holder.try_take_role()
        yield buffer, holder
        holder.close()
    destroy(unique_name)


def until_it_sleeps(pid: int) -> None:
    """Its main thread is in a futex call: the wait that is to be interrupted."""
    futex = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]
    while True:
        with open(f"/proc/{pid}/syscall") as f:
            if f.read().split()[0] == futex:
                return
        time.sleep(0.001)


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_every_wait(stuck, what):
    buffer, holder = stuck
    code, answer = WAITS[what]
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + code, buffer.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n", process.stderr.read()
    until_it_sleeps(process.pid)
    process.send_signal(signal.SIGINT)
    line = process.stdout.readline().strip()
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert line == answer, (line, out, err)
    holder.give_back_role()
    oracle.settle(buffer)  # what was in the ring is stored; nothing is locked
    lo, hi = buffer.window
    rows = buffer.gather(range(lo, hi))
    oracle.check_rows(rows)
    assert rows["k"].tolist() == list(range(hi)) and (hi > 0) == (what != "wait for rows")
    assert buffer.extend(oracle.make_rows(9, 0, 2)).tolist() == [hi, hi + 1]


HANDLER_CLOSES = (
    HEAD
    + """
def close(*_):
    buffer.close()
signal.signal(signal.SIGTERM, close)
say('waits')
try:
    buffer.draw(1, timeout=None)
except StorageLost:
    say('ended')
"""
)


def test_a_signal_handler_may_close_the_handle_it_interrupts(stuck):
    buffer, _ = stuck
    process = subprocess.Popen(
        [sys.executable, "-c", HANDLER_CLOSES, buffer.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n"
    until_it_sleeps(process.pid)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "ended\n", (process.returncode, out, err)
    assert all(m["pid"] != process.pid for m in buffer.members())


AT_EXIT = (
    HEAD
    + """
rows, ids = buffer.draw(5, timeout=10)
kept = [buffer.put(oracle.make_rows(1, 0, 3)), rows, ids]
sys.modules["__main__"].keep = (buffer, kept)
say('leaves')
"""
)


def test_interpreter_shutdown_with_live_handles_and_tickets(unique_name):
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 10))
        done = subprocess.run([sys.executable, "-c", AT_EXIT, unique_name], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")
        oracle.settle(buffer)
        assert buffer.write_count == 13
        assert [c["state"] for c in buffer.collectors() if c["pid"] != buffer.members()[0]["pid"]] in ([], ["closed"])
    destroy(unique_name)
