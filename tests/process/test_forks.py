"""Everything is alive at the moment of a fork: what parent and child can each do with it afterwards. And threads, several to a handle."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from shmbuf import Buffer, destroy
from shmbuf.errors import ConcurrentUse
from tests import oracle
from tests.process import workers

FORKS = '''
import contextlib, os, signal, sys, threading, time
import numpy as np
from shmbuf import Buffer, RateLimiter, StorageLost, destroy, segment
from shmbuf.errors import ConcurrentUse, NotEnoughRows
from tests import oracle

name = sys.argv[1]
acks = oracle.Acks(sys.argv[2], 64).counts
creator = Buffer.create(name, 50_000, schema=oracle.ENDING, ring_bytes=1 << 14, trajectories=True, end_keys="done", timeout=60)
creator.keep_priorities()
learner, collector, third = (Buffer.attach(name) for _ in range(3))
other = Buffer.create(None, 500, schema=oracle.SCHEMA, ring_bytes=4096)  # unnamed, with a drain thread of its own

def put(b, who, n, wait=False):
    ticket = b.put(oracle.make_rows(who, int(acks[who]), n, ends=True), timeout=60)
    acks[who] += n
    if wait: assert len(ticket.wait(60)) == n
    return ticket

def child(depth, who):
    """Every method, of handles that were alive at the fork. The parent's tickets, rings, threads and claims are not this process's."""
    for ticket in tickets:
        assert not ticket.done() or ticket.ids().size
        try: ticket.wait(5)
        except StorageLost as e: assert "belongs to the process" in str(e), e
        else: assert settled, "waited for a ticket of the parent's"
    for i, b in enumerate((creator, learner, collector)):
        assert not b.closed and b.capacity == 50_000 and b.schema == oracle_schema and len(b) and b.window[1] and b.write_count
        assert repr(b) and not b.destroyed
        put(b, who + i, 3, wait=True)
        ids = b.extend(oracle.make_rows(who + i, int(acks[who + i]), 4, ends=True)); acks[who + i] += 4
        oracle.check_rows(b.draw(50)[0]); oracle.check_rows(b.gather(ids)); oracle.check_rows(b.newest(5)[0])
        oracle.check_rows(b.draw_by_priority(20)[0]); assert b.set_priorities(ids, 2.0).all() and (b.priorities(ids) > 1.9).all()
        b.draw_slices(4, 2), b.trajectories(), b.stats(), b.collectors(), b.drain(), b.wait_rows(1, 5)
        assert len(b.epoch().draw(20)[1]) == 20 and len(b.epoch(shared=True).draw(2)[1]) == 2
        b.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e9, 1e9))); b.draw(2, timeout=5); b.set_limiter(None)
        mine = [m for m in b.members() if m["pid"] == os.getpid()]
        assert len(mine) >= 1 and all(m["alive"] for m in mine)
        assert any(c["pid"] == os.getpid() and c["state"] == "alive" for c in b.collectors())
    assert len(own.draw(20)[1]) == 20, "an epoch of its own"
    got = consumer.draw(15)[1].tolist()
    assert len(got) == 15
    write_to.write(",".join(map(str, got)) + ","); write_to.flush()
    assert len(other.draw(5)[1]) == 5 and other.extend(oracle.make_rows(1, 0, 2)).size == 2
    if depth:
        go(depth - 1, who + 3)
    how = who % 4
    if how == 0:
        for b in (creator, learner, collector, other): b.close(); b.close()
    if how == 1: os._exit(0)  # without a word

def go(depth, who):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0, f"child {who}"
        return
    code = 1
    try: child(depth, who); code = 0
    except SystemExit: raise  # of a grandchild, which has these frames, too
    except BaseException:
        import traceback; traceback.print_exc()
    if who % 4 == 3 and not code: sys.exit(0)  # through the interpreter's shutdown
    os._exit(code)

oracle_schema = creator.schema
put(creator, 0, 40, wait=True)
other.extend(oracle.make_rows(0, 0, 20))
learner.draw(4)  # a standby from now on
put(collector, 1, 5, wait=True)
own, consumer = learner.epoch(seed=1), learner.consume()
own.draw(5)
write_to = open(sys.argv[3], "a")
write_to.write(",".join(map(str, consumer.draw(7)[1].tolist())) + ","); write_to.flush()

signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try: consumer.draw(1000, timeout=None)
except KeyboardInterrupt: pass  # what it had claimed is this process's still
else: raise AssertionError("not interrupted")

settled = True
for busy in (False, True):
    tickets = []
    holder = segment.attach(name)
    if busy:
        while not holder.try_take_role(): time.sleep(0.001)
    settled = not busy
    tickets = [put(collector, 1, 5), put(third, 2, 5)]  # open ones while the role is held: rows in rings, nobody drains
    # the children need the role: it is given back while they run
    timer = threading.Timer(0.2, holder.give_back_role) if busy else None
    if timer: timer.start()
    go(2, 10 + 10 * busy)
    if timer: timer.join()
    holder.close()
    for t in tickets: assert len(t.wait(60)) == 5
    put(creator, 0, 5, wait=True); put(collector, 1, 5, wait=True); learner.draw(9), own.draw(3)
assert creator._handle.has_thread and other._handle.has_thread
assert len(other) == 20 + 2 * 6, "what the children added to a buffer that is the parent's to end"

# Threads in the middle of calls at the fork: their locks are nobody's in the child.
stop = threading.Event()
def few():  # else the first rows would be overwritten
    return acks[1] + acks[2] < 40_000 or time.sleep(0.01)
def churn(call):
    while not stop.is_set():
        with contextlib.suppress(ConcurrentUse): call()
threads = [threading.Thread(target=churn, args=(c,)) for c in (
    lambda: few() and put(collector, 1, 3), lambda: few() and put(third, 2, 2, wait=True), lambda: learner.draw(100), lambda: own.draw(10),
    lambda: learner.set_priorities(learner.draw_by_priority(8)[1], 2.5))]  # a child may look at these rows, too
for t in threads: t.start()
settled, tickets = True, []
try:
    for i in range(int(sys.argv[4])): go(0, 30 + 3 * (i % 4))
finally:
    stop.set()
    for t in threads: t.join()
write_to.write(",".join(map(str, consumer.draw(50_000)[1].tolist())) + ","); write_to.flush()

oracle.settle(creator)
oracle.check(creator, acks, 0, whole=True, cuts=None)
seen = [int(x) for x in open(sys.argv[3]).read().split(",") if x]
assert len(seen) == len(set(seen)), "consumed twice"
assert sorted(seen) == list(range(creator.window[1])), "consumed once, by whichever process"
for b in (learner, collector, third, other, creator): b.close()
destroy(name)
'''


def test_every_method_after_a_fork_in_parent_child_and_grandchild(unique_name, tmp_path):
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        FORKS,
        unique_name,
        tmp_path / "acks",
        tmp_path / "log",
    ]
    forks = "200" if os.environ.get("SHMBUF_SOAK") else "12"
    done = subprocess.run([*map(str, command), forks], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def used(buffer: Buffer, who: int, acks: str) -> None:
    """In a process that was given the handle as an argument."""
    counts = oracle.Acks(acks, 64).counts
    for n in (1, 7, 5):
        assert len(buffer.extend(oracle.make_rows(who, int(counts[who]), n), timeout=60)) == n
        counts[who] += n
    oracle.check_rows(buffer.draw(20, timeout=60)[0])
    buffer.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_live_handle_as_argument_of_a_process(unique_name, tmp_path, method):
    context, acks = multiprocessing.get_context(method), oracle.Acks(tmp_path / "acks", 64)
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, timeout=60) as buffer:
        ticket = buffer.put(oracle.make_rows(0, 0, 5))
        acks.counts[0] = 5
        processes = [context.Process(target=used, args=(buffer, who, acks.path)) for who in (1, 2, 3)]
        for p in processes:
            p.start()
        for p in processes:
            p.join(90)
        assert [p.exitcode for p in processes] == [0] * 3 and len(ticket.wait(60)) == 5
        oracle.settle(buffer)
        oracle.check(buffer, acks.counts, 0, whole=True)
    destroy(unique_name)


def test_threads_with_handles_of_their_own_and_threads_on_one(unique_name, tmp_path):
    """Own handles: all go in. One handle: reading is free, and of two puts at once one is refused with a text that says the remedy."""
    acks, errors, refused, go = oracle.Acks(tmp_path / "acks", 64), [], [], threading.Barrier(10)
    rows = 1500

    def collect(buffer: Buffer, who: int) -> None:
        while acks.counts[who] < rows:
            try:
                ticket = buffer.put(oracle.make_rows(who, int(acks.counts[who]), 5), timeout=60)
            except ConcurrentUse as e:
                refused.append(str(e))
                continue
            acks.counts[who] += 5
            if who % 2:
                assert len(ticket.wait(60)) == 5

    def learn(buffer: Buffer) -> None:
        reader = buffer.consume()
        while acks.counts.sum() < 8 * rows:
            oracle.check_rows(buffer.draw(64, timeout=60)[0])
            buffer.set_priorities(buffer.draw_by_priority(16, timeout=60)[1], 2.0)
            oracle.check_rows(reader.draw(5, timeout=None)[0])
            buffer.stats(), buffer.collectors()

    def run(call, *arguments) -> None:
        try:
            go.wait(60)
            call(*arguments)
        except Exception as e:
            errors.append(e)

    with Buffer.create(unique_name, 8 * rows + 100, schema=oracle.SCHEMA, ring_bytes=1 << 14) as buffer:
        buffer.extend(oracle.make_rows(60, 0, 5))
        acks.counts[60] = 5
        buffer.keep_priorities()
        own = [Buffer.attach(unique_name) for _ in range(4)]
        tasks = [*((collect, b, who) for who, b in enumerate(own)), *((collect, buffer, who) for who in range(4, 8))]
        threads = [threading.Thread(target=run, args=t) for t in (*tasks, (learn, buffer), (learn, own[0]))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(100)
        assert not errors and not any(t.is_alive() for t in threads), errors
        assert all(f"attach once per thread (Buffer.attach({unique_name!r}))" in text for text in refused)
        oracle.settle(buffer)
        oracle.check(buffer, acks.counts, 0, whole=True)
        assert acks.counts[:8].tolist() == [rows] * 8 and np.isfinite(buffer.stats()["priorities"]["sum"])
        for b in own:
            b.close()
    destroy(unique_name)


def test_a_fork_child_that_is_killed_takes_nothing_along(unique_name, tmp_path):
    """It was forked with every kind of lock in its parent's hands, and dies at once."""
    acks = oracle.Acks(tmp_path / "acks", 64)
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", max_collectors=2) as buffer:
        for k in range(0, 60, 3):
            ticket = buffer.put(oracle.make_rows(0, k, 3))
            acks.counts[0] += 3
            pid = workers.fork(lambda: workers.drain(unique_name)) if k % 2 else workers.fork(buffer.draw, 1)
            workers.kill(pid)
            assert len(ticket.wait(30)) == 3
        oracle.check(buffer, acks.counts, 0, whole=True)
    destroy(unique_name)
