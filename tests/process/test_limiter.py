"""The rate limiter across processes: the ratio, changes, deaths, and that nobody sleeps on. No torch."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from shmbuf import Buffer, CommitPending, NotEnoughRows, Queue, RateLimiter, RingFull, destroy
from tests.process.workers import ForkedEvent, fork, kill

RECORD, BATCH = 5, 16


def rows(n: int) -> dict:
    return {"k": np.arange(n)}


def collect(name: str, stop: ForkedEvent) -> None:
    with Buffer.attach(name) as buffer:
        while not stop.is_set():
            try:
                buffer.put(rows(RECORD), timeout=0.2)
            except (RingFull, CommitPending) as e:
                assert "collectors wait for samplers" in str(e) or "writer role" in str(e) or "drains" in str(e), str(e)


def learn(name: str, stop: ForkedEvent) -> None:
    with Buffer.attach(name) as buffer:
        while not stop.is_set():
            try:
                assert len(buffer.draw(BATCH, timeout=0.2)[1]) == BATCH
            except NotEnoughRows as e:
                assert "samplers wait for collectors" in str(e), str(e)


def reap(*pids: int) -> list[int]:
    return [os.waitpid(pid, 0)[1] for pid in pids]


@pytest.mark.parametrize("spi", [0.5, 1, 4, 8])
def test_two_collectors_and_two_learners_keep_the_ratio(unique_name, spi):
    stop, error = ForkedEvent(), 2 * max(BATCH, spi)
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}, ring_bytes=1 << 14) as buffer:
        buffer.set_limiter(RateLimiter(spi, min_size=50, error_buffer=error), batch=BATCH)
        low, high = 50 * spi - error, 50 * spi + error
        pids = [fork(collect, unique_name, stop) for _ in range(2)] + [fork(learn, unique_name, stop) for _ in range(2)]
        give_up = time.monotonic() + 60
        while buffer.limiter_state()["sampled"] < 5000 and time.monotonic() < give_up:
            time.sleep(0.02)
        stop.set()
        assert reap(*pids) == [0] * 4
        inserted, sampled = (buffer.limiter_state()[w] for w in ("inserted", "sampled"))
        assert sampled >= 5000 and sampled % BATCH == 0
        assert low <= inserted * spi - sampled <= high + RECORD * spi
        assert abs(inserted * spi / sampled - 1) < 0.1
    destroy(unique_name)


@pytest.mark.parametrize("size", [1, 50])
def test_a_queue_between_processes(unique_name, size):
    """Waits for ever on both sides: a lost wake-up hangs here."""
    total = 1500
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}) as buffer:
        buffer.set_limiter(Queue(size))

        def collector() -> None:
            with Buffer.attach(unique_name) as b:
                for _ in range(total):
                    b.extend(rows(1), timeout=None)

        def learner() -> None:
            with Buffer.attach(unique_name) as b:
                for _ in range(total):
                    b.draw(1, timeout=None)

        pids = [fork(f) for f in (collector, collector, learner, learner)]
        assert reap(*pids) == [0] * 4
        state = buffer.limiter_state()
        assert (state["inserted"], state["sampled"], state["diff"]) == (2 * total, 2 * total, 0)
    destroy(unique_name)


def test_three_samplers_wait_and_each_is_woken(unique_name):
    """One wake-up at a time has to reach whoever can go on, not only who armed the word last."""
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}) as buffer:
        buffer.set_limiter(Queue(50))

        def learner(n: int) -> None:
            with Buffer.attach(unique_name) as b:
                for _ in range(1000 // n):
                    b.draw(n, timeout=None)

        pids = [fork(learner, n) for n in (1, 5, 25)]
        for _ in range(3000):
            buffer.extend(rows(1), timeout=None)
        assert reap(*pids) == [0] * 3
    destroy(unique_name)


def test_a_change_by_any_process_frees_the_blocked_side(unique_name):
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}) as buffer:
        buffer.set_limiter(Queue(3))
        buffer.extend(rows(3))

        def collector() -> None:
            with Buffer.attach(unique_name) as b:
                b.extend(rows(10), timeout=None)
                b.extend(rows(1), timeout=None)

        def changer(limiter) -> None:
            with Buffer.attach(unique_name) as b:
                b.set_limiter(limiter)

        pid = fork(collector)
        while not buffer.limiter_state()["writer_waits_for_samples"]:
            time.sleep(0.005)
        assert reap(fork(changer, Queue(1000))) == [0] and reap(pid) == [0]
        assert buffer.write_count == 14

        def learner() -> None:
            with Buffer.attach(unique_name) as b:
                b.draw(14, timeout=None)
                b.draw(14, timeout=None)

        pid = fork(learner)
        while buffer.limiter_state()["sampled"] < 14:
            time.sleep(0.005)
        assert reap(fork(changer, None)) == [0] and reap(pid) == [0]
    destroy(unique_name)


def test_a_learner_killed_between_its_acquiring_and_its_draw(unique_name):
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}) as buffer:
        buffer.set_limiter(RateLimiter(2.0, min_size=1, error_buffer=40), batch=8)
        stop = ForkedEvent()

        def dies() -> None:
            b = Buffer.attach(unique_name)
            b.acquire_samples(8, None)
            os.kill(os.getpid(), signal.SIGKILL)

        collector = fork(collect, unique_name, stop)
        for _ in range(10):
            assert os.waitpid(fork(dies), 0)[1] == signal.SIGKILL
            for _ in range(20):
                buffer.draw(8, timeout=30)
        stop.set()
        assert reap(collector) == [0]
        assert buffer.limiter_state()["sampled"] == 10 * 8 * 21, "what the dead had acquired is spent, and nothing else"
    destroy(unique_name)


def test_killed_while_they_wait(unique_name):
    """Sleepers that die leave nothing behind that the others need."""
    with Buffer.create(unique_name, 5000, schema={"k": "int64"}) as buffer:
        buffer.set_limiter(Queue(4))

        def learner() -> None:
            Buffer.attach(unique_name).draw(4, timeout=None)

        def collector() -> None:
            b = Buffer.attach(unique_name)
            while True:
                b.extend(rows(1), timeout=None)

        for _ in range(5):
            pid = fork(learner)
            time.sleep(0.05)
            kill(pid)
        pid = fork(collector)
        while buffer.write_count < 4:
            time.sleep(0.005)
        kill(pid)
        buffer.draw(2, timeout=30)  # a row of the dead may be in its ring, and come in now
        for _ in range(10):
            buffer.draw(1, timeout=30)
            buffer.extend(rows(1), timeout=30)
    destroy(unique_name)
