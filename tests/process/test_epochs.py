"""Drawing without replacement by readers in several processes, some of which are killed. No torch."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughRows, destroy
from tests.process.workers import ForkedEvent, fork, kill

READERS = 4


class Log:
    """Ids that each reader got, in memory that outlives it."""

    def __init__(self, path, most: int = 400_000):
        self._ids = np.memmap(path, np.int64, "w+", shape=(READERS, most))
        self._ends = np.memmap(f"{path}.n", np.int64, "w+", shape=(READERS, 2))  # how many ids, how many ends of epochs

    def add(self, who: int, ids: np.ndarray, ran_out: bool = False) -> None:
        n = self._ends[who, 0]
        self._ids[who, n : n + len(ids)] = ids
        self._ends[who] += (len(ids), ran_out)

    def of(self, who: int) -> np.ndarray:
        return self._ids[who, : self._ends[who, 0]]

    def all(self) -> np.ndarray:
        return np.concatenate([self.of(w) for w in range(READERS)])

    @property
    def epochs(self) -> int:
        return int(self._ends[:, 1].sum())


def numbered(first: int, n: int) -> dict:
    k = np.arange(first, first + n)
    return {"k": k, "twice": 2 * k}


def read(name: str, who: int, log: Log, batches: int, n: int) -> None:
    with Buffer.attach(name) as buffer:
        reader = buffer.epoch(shared=True)
        for _ in range(batches):
            rows, ids = reader.draw(n, timeout=30)
            assert (rows["k"] == ids).all() and (rows["twice"] == 2 * ids).all()
            log.add(who, ids, reader.ran_out)


def reap(pids: list[int]) -> list[int]:
    return [os.waitpid(pid, 0)[1] for pid in pids]


def test_four_readers_share_an_epoch_every_row_exactly_once(unique_name, tmp_path):
    size, n, epochs = 12_000, 50, 3
    log = Log(tmp_path / "log")
    with Buffer.create(unique_name, size, schema={"k": "int64", "twice": "int64"}) as buffer:
        buffer.extend(numbered(0, size))
        batches = size * epochs // n // READERS
        assert reap([fork(read, unique_name, w, log, batches, n) for w in range(READERS)]) == [0] * READERS
        assert (np.bincount(log.all(), minlength=size) == epochs).all()
        assert log.epochs == epochs, "of each epoch exactly one reader saw the end"
        shares = [len(np.unique(log.of(w))) for w in range(READERS)]
        assert min(shares) > size // READERS, "over the epochs readers get different rows"
    destroy(unique_name)


@pytest.mark.parametrize("times", range(3))
def test_a_killed_readers_rows_count_as_seen(unique_name, tmp_path, times):
    size, n, batches = 12_000, 10, 280
    log = Log(tmp_path / "log")
    with Buffer.create(unique_name, size, schema={"k": "int64", "twice": "int64"}) as buffer:
        buffer.extend(numbered(0, size))
        pids = [fork(read, unique_name, w, log, batches, n) for w in range(READERS)]
        while not len(log.of(0)):
            time.sleep(0.0005)
        kill(pids[0])
        assert reap(pids[1:]) == [0] * (READERS - 1)
        got = log.all()
        assert len(np.unique(got)) == len(got) and log.epochs == 0
        assert all(len(log.of(w)) == batches * n for w in range(1, READERS))
        last = buffer.epoch(shared=True)
        rest = []
        while not last.ran_out:
            rest.append(last.draw(100)[1])
        seen = np.concatenate([got, *rest])
        assert len(np.unique(seen)) == len(seen) and size - n <= len(seen) <= size, "at most a batch is lost"
    destroy(unique_name)


@pytest.mark.parametrize("times", [1, 3])
def test_consuming_while_collectors_write_and_readers_die(unique_name, tmp_path, times):
    log, stop = Log(tmp_path / "log"), ForkedEvent()
    with Buffer.create(unique_name, 4000, schema={"k": "int64", "twice": "int64"}, ring_bytes=1 << 14) as buffer:

        def collect(who: int) -> None:
            with Buffer.attach(unique_name) as b:
                i = 0
                while not stop.is_set():
                    b.put(numbered(i, 7), timeout=20)
                    i += 7
                    time.sleep(1e-4)

        def consume(who: int) -> None:
            with Buffer.attach(unique_name) as b:
                reader = b.consume(times)
                while True:
                    try:
                        rows, ids = reader.draw(16, timeout=0.5 if stop.is_set() else 5)
                    except NotEnoughRows:
                        if stop.is_set():
                            return
                        continue
                    assert (rows["twice"] == 2 * rows["k"]).all()
                    log.add(who, ids)

        collectors = [fork(collect, w) for w in range(2)]
        readers = [fork(consume, w) for w in range(READERS)]
        deadline = time.monotonic() + 60
        while buffer.write_count < 8000 and time.monotonic() < deadline:
            time.sleep(0.01)
        kill(readers[0])
        while buffer.write_count < 20_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        assert reap(collectors + readers[1:]) == [0] * (1 + READERS)
        counts = np.bincount(log.all())
        assert counts.max() <= times, "nobody got a row more often, whoever died"
        rows, (lo, hi) = buffer.write_count, buffer.window
        assert rows >= 20_000 and (counts[lo:hi] >= 1).sum() >= hi - lo - 16 and len(counts) <= hi
    destroy(unique_name)


def test_one_reader_that_dies_again_and_again_at_the_claim(unique_name, tmp_path):
    """Killed at random moments, most of them between claim and copy: who comes next goes on, and gets none of the rows again."""
    log = Log(tmp_path / "log")
    rng = np.random.default_rng(1)
    with Buffer.create(unique_name, 60_000, schema={"k": "int64", "twice": "int64"}) as buffer:
        buffer.extend(numbered(0, 60_000))

        def consume(who: int) -> None:
            b = Buffer.attach(unique_name)
            reader = b.consume()
            while True:
                log.add(who, reader.draw(4)[1])

        for _ in range(12):
            pid = fork(consume, 0)
            before = len(log.of(0))
            while len(log.of(0)) == before:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
            kill(pid)
        got = log.of(0)
        assert len(np.unique(got)) == len(got)
        rest = buffer.consume().draw(60_000)[1]
        assert not len(np.intersect1d(rest, got)) and len(rest) + len(got) >= 60_000 - 12 * 8
    destroy(unique_name)
