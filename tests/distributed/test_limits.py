"""Samples per insert over all shards of two nodes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from shmbuf import NotEnoughRows, RandomSampler, RateLimiter, ShardedReplayBuffer, ShmStorage
from shmbuf.distributed.limiting import AHEAD
from shmbuf.limiter import MinSize
from tests.distributed.helpers import kill_actor, restarted, rows, there, until

SPI, LOW, HIGH, BATCH, RECORD = 2.0, -64.0, 256.0, 16, 4


def make(name, limiter, **kw):
    storage = ShmStorage(20_000, name=name)
    return ShardedReplayBuffer(
        storage=storage, sampler=RandomSampler(), batch_size=BATCH, limiter=limiter, seed=1, **kw
    )


class Putter:
    def __init__(self, rb):
        self.rb, self.sampled = rb, 0

    def pid(self):
        return os.getpid()

    def put_for_ever(self):
        while True:
            self.rb.put(rows(0, RECORD), timeout=300)

    def sample_for_ever(self):
        while True:
            self.rb.sample(timeout=300)
            self.sampled += BATCH

    def count(self):
        return self.sampled


def somewhere(node, rb):
    return ray.remote(num_cpus=0, max_concurrency=3)(Putter).options(scheduling_strategy=there(node)).remote(rb)


def within(rb, learners):
    """The inequality, on what is stored in truth; returns (rows, sampled) of the coordinator's books."""
    limits = rb.stats()["limiter"]  # before the rows are counted: no less was sampled then
    stored = sum(s["rows_total"] for s in rb.stats()["shards"].values())
    sampled = rb.stats()["limiter"]["sampled"]
    assert stored * SPI - sampled <= HIGH + SPI * RECORD * 2, "of each shard one record may be too many"
    assert stored * SPI - limits["sampled"] >= LOW
    return stored, sampled


def test_the_ratio_holds_over_all_shards_whoever_dies(cluster, buffer_name):
    rb = make(buffer_name, RateLimiter(SPI, 8, (LOW, HIGH)))
    with pytest.raises(NotEnoughRows, match="sampling begins at 8"):
        rb.sample()
    here, there_ = somewhere(cluster.here, rb), somewhere(cluster.others[0], rb)
    for p in (here, there_):
        p.put_for_ever.remote()
    # nobody samples: both stop where the ratio says
    until(lambda: within(rb, 0)[0] * SPI >= HIGH - SPI)
    stopped = within(rb, 0)[0]
    for _ in range(10):
        assert within(rb, 0)[0] <= stopped + 2 * RECORD
    # both sides move together
    for _ in range(40):
        rb.sample(timeout=60)
        within(rb, 1)
    assert within(rb, 1)[0] > stopped
    # a learner that is killed with what it was granted, and a collector: the others go on
    learner = somewhere(cluster.others[0], rb)
    learner.sample_for_ever.remote()
    until(lambda: ray.get(learner.count.remote()) > 10 * BATCH)
    for p in (learner, there_):
        os.kill(ray.get(p.pid.remote()), signal.SIGKILL)
    before = within(rb, 2)[0]
    for _ in range(40):
        rb.sample(timeout=60)
    assert within(rb, 2)[0] > before
    # the coordinator: its books are kept by the shards
    books = rb.stats()["limiter"]["sampled"]
    pid = kill_actor(rb._coordinator)
    for _ in range(2 * AHEAD):
        rb.sample(timeout=60)
    until(lambda: restarted(rb._coordinator, pid))
    assert rb.stats()["limiter"]["sampled"] >= books
    before = within(rb, 2)[0]
    for _ in range(40):
        rb.sample(timeout=60)
    assert within(rb, 2)[0] > before
    # a shard's actor: its collector works on in the memory, and gets its caps when the actor is back
    shard = rb.shard(0)._keeper
    pid = kill_actor(shard)
    until(lambda: restarted(shard, pid))
    before = within(rb, 2)[0]
    for _ in range(60):
        rb.sample(timeout=60)
    assert within(rb, 2)[0] > before + 60 * BATCH / SPI - HIGH
    with pytest.raises(ValueError, match="could never be sampled"):
        rb.set_limiter(RateLimiter(SPI, 8, (0.0, 4.0)))
    assert rb.stats()["limiter"]["max_diff"] == HIGH, "nothing changed"
    # and at the end of a run nothing is limited, though a shard is just being started again
    pid = kill_actor(shard)
    rb.set_limiter(None)
    until(lambda: restarted(shard, pid))
    stored = rb.write_count
    until(lambda: rb.write_count > stored + 4 * HIGH)
    assert len(rb.sample()) == BATCH and rb.stats()["limiter"] is None
    rb.shutdown()


def test_a_limiter_is_set_changed_and_taken_away_while_all_work(cluster, buffer_name):
    rb = make(buffer_name, None)
    other = ShardedReplayBuffer.attach(buffer_name, batch_size=BATCH)
    here, there_ = somewhere(cluster.here, rb), somewhere(cluster.others[0], rb)
    for p in (here, there_):
        p.put_for_ever.remote()
    until(lambda: all(s["size"] > 1000 for s in rb.stats()["shards"].values()))
    rb.set_limiter(RateLimiter(SPI, 8, (LOW, HIGH)))
    until(lambda: stands_still(rb))
    limits = rb.stats()["limiter"]
    assert 0 < limits["diff"] <= limits["inserted"] * SPI, "counted from when it was set"
    before = rb.stats()["shards"]
    while rb.stats()["limiter"]["diff"] > HIGH:  # what came in before all shards had heard of it
        rb.sample(timeout=60)
    until(lambda: other.stats()["limiter"])  # it has heard of it, too
    sampled = rb.stats()["limiter"]["sampled"]
    for _ in range(150):
        rb.sample(timeout=60)
        other.sample(timeout=60)
    assert rb.stats()["limiter"]["sampled"] >= sampled + (300 - AHEAD) * BATCH
    after = rb.stats()["shards"]
    came = [after[k]["rows_total"] - before[k]["rows_total"] for k in (0, 1)]
    assert sum(came) > 200 and min(came) > 0.4 * sum(came), "each shard its half"
    assert rb.stats()["limiter"]["diff"] <= HIGH + 2 * SPI * RECORD
    rb.set_limiter(MinSize(8))
    stored = rb.write_count
    until(lambda: rb.write_count > stored + 4 * HIGH)
    assert rb.stats()["limiter"]["max_diff"] is None
    other.close()
    rb.shutdown()


def test_loaded_rows_hold_up_no_collector(cluster, buffer_name, tmp_path):
    rb = make(buffer_name, RateLimiter(SPI, 8, (LOW, HIGH)), nodes=[cluster.here])
    rb.extend(rows(0, 100), timeout=60)
    for _ in range(5):
        rb.sample(timeout=60)
    until(lambda: rb.stats()["limiter"]["inserted"] == 100)
    rb.dumps(tmp_path)
    diff = rb.stats()["limiter"]["diff"]
    rb.extend(rows(100, 20), timeout=60)
    rb.loads(tmp_path)
    assert len(rb) == 100 and rb.stats()["limiter"]["diff"] == diff, "the rows came in once more"
    rb.extend(rows(200, 20), timeout=60)
    until(lambda: rb.stats()["limiter"]["diff"] == diff + 20 * SPI)
    rb.set_limiter(None)
    rb.dumps(tmp_path)  # without one
    rb.loads(tmp_path)
    rb.set_limiter(RateLimiter(SPI, 8, (LOW, HIGH)))
    rb.loads(tmp_path)
    assert rb.stats()["limiter"]["diff"] == 0
    rb.shutdown()


def stands_still(rb):
    """The rows that were stored, if for half a second no more came."""
    before = rb.write_count
    time.sleep(0.5)
    return before if rb.write_count == before else None


def test_a_least_number_of_rows_is_counted_over_all_shards(cluster, buffer_name):
    rb = make(buffer_name, MinSize(10))
    rb.extend(rows(0, 6))
    with pytest.raises(NotEnoughRows, match="begins at 10"):
        rb.sample()
    cluster.run(cluster.others[0], lambda rb: len(rb.extend(rows(6, 6))), rb)
    assert len(rb.sample(timeout=60)) == BATCH
    with pytest.raises(NotEnoughRows, match="empty"):
        rb.empty() or rb.sample()
    rb.shutdown()
