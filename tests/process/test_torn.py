"""The class TORN of the case list, and the hunt for torn rows from 1 byte to 1 MB."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from shmbuf import Buffer, destroy, segment
from shmbuf.errors import ConcurrentUse, NotEnoughRows
from tests import oracle
from tests.process import workers


def stamp(name: str, width: int, who: int, stop) -> None:
    """Rows whose every word is k, and a scalar k beside them."""
    buffer = Buffer.attach(name)
    k = who
    while not stop.is_set():
        n = 1 + k % 3
        ks = k + 4 * np.arange(n, dtype=np.int64)
        buffer.put({"wide": np.repeat((ks & 0xFF).astype(np.uint8)[:, None], width, 1), "k": ks}, timeout=30)
        k += 4 * n
    buffer.close()


def judge(name: str, stop, out, batch: int) -> None:
    buffer = Buffer.attach(name)
    seen = 0
    while not stop.is_set() or not seen:
        rows, _ = buffer.draw(batch, timeout=30)
        want = (rows["k"] & 0xFF).astype(np.uint8)
        assert (rows["wide"].min(axis=1) == want).all() and (rows["wide"].max(axis=1) == want).all(), "torn row"
        seen += batch
    out.put(seen)
    buffer.close()


@pytest.mark.parametrize(
    ("width", "capacity", "batch"),
    [(1, 50, 64), (1000, 64, 32), (8192, 64, 32), (1 << 20, 12, 4)],
    ids=["1B", "1kB", "b050_8kB", "1MB"],
)
def test_torn_row_hunt(unique_name, width, capacity, batch):
    """B050: capacity so small that slots recycle at once, four collectors at full speed, four readers."""
    context = multiprocessing.get_context("fork")
    stop, out = context.Event(), context.Queue()
    with Buffer.create(unique_name, capacity, schema={"wide": ("uint8", (width,)), "k": "int64"}) as buffer:
        tasks = [(stamp, (unique_name, width, w, stop)) for w in range(4)] + [
            (judge, (unique_name, stop, out, batch)) for _ in range(4)
        ]
        assert workers.run_all("fork", tasks, 4, stop) == [0] * 8
        assert sum(out.get(timeout=5) for _ in range(4)) > 0
        assert buffer.write_count > 10 * capacity, "slots did not recycle"
    destroy(unique_name)


def test_b051_publish_never_overtakes_data(unique_name):
    """Rows of 64 KiB stamped at both ends; producer and drainer on different cores."""
    context = multiprocessing.get_context("fork")
    stop, out = context.Event(), context.Queue()
    with Buffer.create(
        unique_name, 32, schema={"wide": ("uint8", (65536,)), "k": "int64"}, ring_bytes=1 << 18, drain="process"
    ) as buffer:
        tasks = [(stamp, (unique_name, 65536, 0, stop)), (judge, (unique_name, stop, out, 8))]
        assert workers.run_all("fork", tasks, 3, stop) == [0, 0]
        assert out.get(timeout=5) > 0 and buffer.write_count > 1000
    destroy(unique_name)


def test_b055_one_drainer_at_a_time_and_a_third_takes_over(tmp_path, unique_name):
    acks = oracle.Acks(tmp_path / "acks")
    Buffer.create(unique_name, 100_000, schema=oracle.SCHEMA, drain="caller").close()
    start = [sys.executable, "-m", "shmbuf.drain", unique_name]
    first, second = (subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(2))
    said = [p.stdout.readline() for p in (first, second)]
    assert all("drains" in s for s in said), (
        said
    )  # one "drains", and the other "stands by, pid N drains", or both at once
    buffer = Buffer.attach(unique_name)
    k = 0
    for p in (first, second):
        for _ in range(200):
            buffer.put(oracle.make_rows(0, k, 5))
            k += 5
        p.kill()
        p.wait()
    third = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    assert "drains" in third.stdout.readline()
    acks.counts[0] = k
    while buffer.write_count < k:
        time.sleep(0.001)  # the third drains what is left: this handle does not help
    oracle.check(buffer, acks.counts, 0, whole=True)
    third.send_signal(signal.SIGTERM)
    assert third.wait(10) == 0
    buffer.close()
    destroy(unique_name)


def test_b055_the_role_excludes_processes_and_threads(unique_name):
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as buffer:
        other = segment.attach(unique_name)
        for a, b in ((buffer._handle, other), (other, buffer._handle)):
            assert a.try_take_role() and not b.try_take_role() and not a.try_take_role()
            a.give_back_role()
            assert b.try_take_role()
            b.give_back_role()
        other.close()
    destroy(unique_name)


def test_b056_threads_on_one_handle(unique_name):
    """Putting through one handle from four threads: a clear error for the second, exact counts; reading is free."""
    with Buffer.create(unique_name, 50_000, schema=oracle.SCHEMA) as buffer:
        put, refused, errors, stop = [0] * 4, [0] * 4, [], threading.Event()

        def putter(i: int) -> None:
            while not stop.is_set():
                try:
                    buffer.put(oracle.make_rows(i, put[i], 3))
                    put[i] += 3
                except ConcurrentUse:
                    refused[i] += 1

        def reader() -> None:
            try:
                while not stop.is_set():
                    oracle.check_rows(buffer.draw(32, timeout=10)[0])
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=putter, args=(i,)) for i in range(4)] + [
            threading.Thread(target=reader) for _ in range(4)
        ]
        for t in threads:
            t.start()
        while sum(put) < 20_000:
            time.sleep(0.01)
        stop.set()
        for t in threads:
            t.join(20)
        assert not errors
        oracle.settle(buffer)
        acks = np.array(put, np.int64)
        assert oracle.check(buffer, acks, 0)["rows_total"] == sum(put)
    destroy(unique_name)


def fill(name: str, stop) -> None:
    buffer = Buffer.attach(name)
    buffer.put({"x": np.full((5, 16), 7, np.int64)})
    buffer.close()


def test_b057_length_grows_only_after_the_data_is_there(unique_name):
    stop = workers.ForkedEvent()
    empty = 0
    for _ in range(60):  # the case says 1,000 buffers: the soak's number
        with Buffer.create(unique_name, 1000, schema={"x": ("int64", (16,))}, drain="thread") as buffer:
            pid = workers.fork(fill, unique_name, stop)
            while True:
                try:
                    rows, _ = buffer.draw(4)
                except NotEnoughRows as e:
                    assert "empty" in str(e)
                    empty += 1
                    continue
                assert (rows["x"] == 7).all(), "an unwritten row was sampled"
                if len(buffer) == 5:
                    break
            assert os.waitpid(pid, 0)[1] == 0
        destroy(unique_name)
    assert empty > 0


def come_and_go(name: str, stop) -> None:
    while not stop.is_set():
        buffer = Buffer.attach(name)
        buffer.put(oracle.make_rows(0, 0, 1))
        buffer.close()


def test_b059_looking_while_members_come_and_go(unique_name):
    stop = workers.ForkedEvent()
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, max_collectors=16) as buffer:
        pids = [workers.fork(come_and_go, unique_name, stop) for _ in range(12)]
        watch = segment.attach(unique_name, watch=True)
        entries = 0
        for _ in range(3000):
            for m in [*watch.members(), *watch.collectors()]:
                entries += 1
                assert m["pid"] > 0 and m["command"] and m["since"] > 1e9, m
            for c in watch.collectors():
                assert c["put_rows"] >= 0 and c["stored_rows"] >= 0 and 0 <= c["ring_used"] <= c["ring_bytes"], c
            counters = watch.counters()
            assert all(v >= 0 for k, v in counters.items() if k != "writer_age"), counters
        stop.set()
        assert [os.waitpid(p, 0)[1] for p in pids] == [0] * 12
        assert entries > 0 and buffer.write_count > 0
        watch.close()
    destroy(unique_name)
