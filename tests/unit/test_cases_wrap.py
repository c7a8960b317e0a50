"""Class WRAP of the real cases (shared/spec/cases.md): wraparound, capacity, data loss, full ring. Each test is named after its case."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from shmbuf import Buffer, CommitPending, RingFull, Schema, SchemaError, TooManyCollectors
from tests.unit.helpers import numbers, open_files, stored, stuck_drainer, unmoved


def k(first: int, n: int = 1) -> dict:
    return {"k": np.arange(first, first + n)}


@pytest.mark.parametrize("ring_bytes", [4096, 1 << 16])  # smaller, larger than the largest batch
def test_b042_one_batch_larger_than_the_buffer(name, ring_bytes):
    with Buffer.create(name, 4, schema={"k": "int64"}, drain="caller", ring_bytes=ring_bytes) as buf:
        assert buf.extend(k(0, 10)).tolist() == list(range(10))
        assert (numbers(buf), buf.write_count, len(buf)) == ([6, 7, 8, 9], 10, 4)
        total = 10
        for n in (4, 5, 8, 9, 1000):
            assert buf.extend(k(total, n)).tolist() == list(range(total, total + n))
            total += n
            assert (numbers(buf), buf.write_count, len(buf)) == (list(range(total - 4, total)), total, 4)


def test_b044_the_cursor_moves(name):
    with Buffer.create(name, 10, schema={"k": "int64"}, drain="caller") as buf:
        for i in range(6):
            buf.extend(k(4 * i, 4))
        assert (numbers(buf), len(buf), buf.write_count) == (list(range(14, 24)), 10, 24)


@pytest.mark.parametrize("capacity", [70_000, 65_536, 65_535, 256, 255])
def test_b046_batches_around_the_limits_of_small_integers(make_name, capacity):
    for n in (255, 256, 257, 65_535, 65_536):
        with Buffer.create(make_name(), capacity, schema={"k": "int64"}, drain="caller") as buf:
            assert (np.asarray(buf.extend(k(0, n))) == np.arange(n)).all()
            assert numbers(buf) == list(range(max(0, n - capacity), n)) and buf.write_count == n
            buf.extend(k(n, n))
            assert numbers(buf) == list(range(max(0, 2 * n - capacity), 2 * n)) and buf.write_count == 2 * n


@pytest.mark.parametrize("most", [255, 256, 257])
def test_b046_collectors_around_256(name, most):
    before = open_files()
    buf = Buffer.create(name, 1000, schema={"k": "int64"}, drain="caller", ring_bytes=4096, max_collectors=most)
    handles = [buf, *(Buffer.attach(name) for _ in range(most - 1))]
    for i, h in enumerate(handles):
        h.put(k(i))
    buf.drain()
    one_more = Buffer.attach(name)
    with pytest.raises(TooManyCollectors, match=f"all {most} rings have living owners"), unmoved(one_more):
        one_more.put(k(0))
    assert sorted(numbers(buf)) == list(range(most)) and len(buf.collectors()) == most
    handles[-1].put(k(most))
    handles[0].put(k(most + 1))
    buf.drain()
    assert sorted(numbers(buf)) == list(range(most + 2))
    for h in (one_more, *handles):
        h.close()
    assert open_files() == before


def test_b046_256_keys(name):
    spec = {f"key{i}": ("uint8", (i % 5,)) for i in range(256)} | {f"nest{i}": {"x": "int16"} for i in range(256)}
    with Buffer.create(name, 300, schema=spec, drain="caller") as buf:
        given = {f"key{i}": np.full((3, i % 5), i, np.uint8) for i in range(256)} | {
            f"nest{i}": {"x": np.full(3, i, "i2")} for i in range(256)
        }
        buf.extend(given)
        got = stored(buf)
        assert all((got[f"key{i}"] == i).all() and (got[f"nest{i}"]["x"] == i).all() for i in range(256))


def test_b046_256_dimensions_are_refused_with_the_limit(name):
    with pytest.raises(SchemaError, match="key 'deep': 256 dimensions; at most 32"):
        Buffer.create(name, 10, schema={"k": "int64", "deep": ("uint8", (1,) * 256)}, drain="caller")
    with Buffer.create(name, 10, schema={"deep": ("uint8", (1,) * 32)}, drain="caller") as buf:
        buf.extend({"deep": np.ones((3, *(1,) * 32), np.uint8)})
        assert stored(buf)["deep"].sum() == 3


DRAINER = """
import os, sys
from shmbuf import Buffer
from shmbuf._extension import native
buf = Buffer.attach(sys.argv[1])
assert native.arm("txn_copied=stop@1")
print("here", flush=True)
sys.stdin.readline()
while not buf.drain():   # stops itself inside its first transaction, holding the writer role
    pass
print("continued", flush=True)
sys.stdin.read()
"""


def stopped(p) -> None:
    """Until the child has stopped itself."""
    pid, status = os.waitpid(p.pid, os.WUNTRACED)
    assert pid == p.pid and os.WIFSTOPPED(status), f"wait status {status}"


def test_b048_what_put_does_when_the_ring_is_full(name, start):
    """timeout None, 0, .2 s while the drainer is stopped by SIGSTOP. That .2 s end before .4 s is a timed assertion, left out."""
    with (
        Buffer.create(name, 1000, schema={"k": ("int64", (4,))}, drain="caller", ring_bytes=4096) as buf,
        Buffer.attach(name) as other,
    ):

        def row(i: int) -> dict:
            return {"k": np.full((1, 4), i)}

        buf.extend(row(0))
        drainer = start(DRAINER, name, SHMBUF_NATIVE="failpoints")
        assert drainer.stdout.readline() == "here\n"
        buf.put(row(1))
        drainer.stdin.write("\n")
        drainer.stdin.flush()
        stopped(drainer)

        accepted, refused = [0, 1], 0
        with pytest.raises(RingFull, match="Nothing was put"):
            for i in range(2, 1000):  # until full, timeout 0
                buf.put(row(i), timeout=0)
                accepted.append(i)
        refused += 1
        assert len(accepted) == 1 + 64, "64 records of 64 bytes fill the ring; the first row was stored before"
        began = time.monotonic()
        with pytest.raises(RingFull) as e:
            buf.put(row(-1), timeout=0.2)
        assert time.monotonic() - began >= 0.2
        assert f"pid {drainer.pid} holds the writer role" in str(e.value) and "stopped (SIGSTOP)" in str(e.value)
        refused += 1
        with pytest.raises(RingFull):
            buf.put({"k": np.full((500, 4), -1)}, timeout=0)  # larger than the ring
        refused += 500
        assert buf.draw(5)[0]["k"].tolist() == [[0] * 4] * 5, "reading goes on"

        forever: list = []
        thread = threading.Thread(target=lambda: forever.append(buf.put(row(accepted[-1] + 1), timeout=None)))
        thread.start()
        others = 0
        with pytest.raises(RingFull):  # meanwhile: another handle, until full, .5 s in all
            while True:
                other.put(row(10_000 + others), timeout=0.3)
                others += 1
        assert others == 64
        assert thread.is_alive() and not forever, "None: it blocks"
        os.kill(drainer.pid, signal.SIGCONT)
        thread.join(60)
        assert not thread.is_alive() and forever[0].rows == 1, "and then completes"
        accepted.append(accepted[-1] + 1)
        assert drainer.stdout.readline() == "continued\n"
        assert len(forever[0].wait()) == 1
        buf.drain()
        got = stored(buf)["k"]
        assert (got == got[:, :1]).all()
        got = got[:, 0]
        assert got[got < 10_000].tolist() == accepted and got[got >= 10_000].tolist() == list(range(10_000, 10_064)), (
            "accepted = stored, in order"
        )
        s = buf.stats()
        assert (
            s["put_rows"],
            s["rows_total"],
            s["refused_rows"],
            s["dropped_rows"],
            s["skipped_rows"],
            s["malformed_records"],
        ) == (len(accepted) + 64, len(accepted) + 64, refused + 1, 0, 0, 0)


def test_b048_a_wait_for_the_commit_names_the_stopped_drainer(name, start):
    with Buffer.create(name, 1000, schema={"k": "int64"}, drain="caller", ring_bytes=4096) as buf:
        buf.put(k(0))
        drainer = start(DRAINER, name, SHMBUF_NATIVE="failpoints")
        drainer.stdout.readline()
        drainer.stdin.write("\n")
        drainer.stdin.flush()
        stopped(drainer)
        with pytest.raises(CommitPending) as e:
            buf.extend(k(1), timeout=0.05)
        assert f"pid {drainer.pid}" in str(e.value) and "SIGSTOP" in str(e.value)
        os.kill(drainer.pid, signal.SIGKILL)
        drainer.wait()
        assert e.value.ticket.wait(60).tolist() == [1] and numbers(buf) == [0, 1], (
            "its half of a transaction is finished by another"
        )


@pytest.mark.parametrize(("full", "rounds"), [("drop_newest", 100), ("drop_oldest", 20)])
def test_b049_overflow_with_a_drop_policy_does_not_eat_capacity(name, full, rounds):
    """100 times 10,000 puts into a ring of 64 rows, as the case says; 20 times with the second policy (10 s less)."""
    with Buffer.create(name, 10_000, schema={"k": ("int64", (4,))}, drain="caller", ring_bytes=4096, full=full) as buf:
        row = {"k": np.zeros((1, 4), np.int64)}
        value = row["k"]
        assert Schema.from_spec({"k": ("int64", (4,))}).row_bytes == 32
        buf.extend(row)
        kept = dropped = 0
        for _ in range(rounds):
            lo = buf.window[1]
            with stuck_drainer(name):
                taken = 0
                for i in range(10_000):
                    value[:] = i
                    taken += buf.put(row).rows
            buf.drain()
            s = buf.stats()
            assert taken == 64, "exactly 64 rows again"
            assert buf.collectors()[0]["ring_used"] == 0, "the ring is empty"
            assert s["rows_total"] - 1 - kept + s["dropped_rows"] + s["skipped_rows"] - dropped == 10_000
            got = buf.gather(np.arange(lo, buf.window[1]))["k"][:, 0].tolist()
            if full == "drop_newest":
                assert got == list(range(64)), "the newest are dropped"
            else:
                # nobody can take the oldest out while the drainer is stuck, so the newest go; the oldest may go when it is back
                assert got == list(range(64 - len(got), 64)) and len(got) >= 63
            kept, dropped = s["rows_total"] - 1, s["dropped_rows"] + s["skipped_rows"]
        assert kept + dropped == rounds * 10_000 == buf.stats()["put_rows"] - 1 + buf.stats()["dropped_rows"]
