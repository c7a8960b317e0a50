"""SIGSTOP, at a step and at any moment: reads go on whoever is stopped, and so do writes unless he was draining. Then they wait, run
out of time naming him and his state, and go on as soon as he is continued, or killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shmbuf import Buffer, RingFull, destroy
from shmbuf.errors import CommitPending, Lapped, NotEnoughMemory
from tests import oracle
from tests.process import workers
from tests.process.workload import wait_for

ROWS = 200
# What the process that is stopped was doing; `point`: of the failpoints, "" for wherever it is just then.
ACTS = {
    "collector in a put": "while True: b.put(oracle.make_rows(7, k, 5), timeout=0); k += 5; acks[7] = k",
    "writer": "while True: b.extend(oracle.make_rows(7, k, 5)); k += 5; acks[7] = k",
    "learner": "while True: b.set_priorities(b.draw_by_priority(16)[1], 2.0)",
    "inspector": "while True: b.stats(), b.collectors(), b.members(), b.gather(range(*b.window))",
}
ACTOR = """
import sys
from shmbuf import Buffer
from shmbuf._extension import native
from tests import oracle
name, path, point, does = sys.argv[1:]
b, acks, k = Buffer.attach(name, readonly="stats" in does), oracle.Acks(path, 16).counts, 0
if "put(" in does or "extend(" in does:
    b.put(oracle.make_rows(7, k, 5)).wait(); k = acks[7] = 5  # the ring is claimed
print("begins", flush=True)
sys.stdin.readline()
if point: assert native.arm(point + "=stop@1")
exec(does)
"""


class Stopped:
    """A process that has stopped, at a failpoint or by a signal of ours."""

    def __init__(self, name: str, acks: str, act: str, point: str = "", meanwhile: Callable[[], None] = lambda: None):
        env = {**os.environ, **({"SHMBUF_NATIVE": "failpoints"} if point else {})}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, name, acks, point, ACTS[act]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self.process.stdout.readline() == "begins\n"
        meanwhile()
        print(file=self.process.stdin, flush=True)
        self.pid = self.process.pid
        if point:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def place(unique_name, tmp_path) -> Iterator[tuple[Buffer, oracle.Acks]]:
    """A buffer with rows and priorities, drained by whoever calls."""
    acks = oracle.Acks(tmp_path / "acks", 16)
    with Buffer.create(
        unique_name, 20_000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096, timeout=0.2
    ) as buffer:
        buffer.keep_priorities()
        buffer.extend(oracle.make_rows(0, 0, ROWS), timeout=30)
        acks.counts[0] = ROWS
        yield buffer, acks
    with contextlib.suppress(FileNotFoundError):
        destroy(unique_name, force=True)


def put(buffer: Buffer, acks: oracle.Acks, n: int, extend: bool) -> None:
    rows = oracle.make_rows(0, int(acks.counts[0]), n)
    if extend:
        assert len(buffer.extend(rows, timeout=30)) == n
    else:
        buffer.put(rows, timeout=30)
    acks.counts[0] += n


def reads_go_on(buffer: Buffer) -> None:
    with Buffer.attach(buffer.name, readonly=True) as looker, Buffer.attach(buffer.name) as late:
        for b in (buffer, looker, late):
            oracle.check_rows(b.draw(50, timeout=5)[0])
            oracle.check_rows(b.gather(range(ROWS)))
            oracle.check_rows(b.newest(20)[0])
            assert len(b.epoch().draw(30)[1]) == 30
            b.stats(), b.collectors(), b.members()
            assert b.draw_by_priority(16, timeout=5)[1].max() < b.window[1]
        assert late.set_priorities(range(100), 3.0).all()
        assert np.allclose(late.priorities(range(100)), 3.0)
        assert len(late.consume().draw(3)[1]) == 3


def all_goes_on(buffer: Buffer, acks: oracle.Acks) -> None:
    reads_go_on(buffer)
    for _ in range(20):  # some rings full
        put(buffer, acks, 20, extend=False)
        put(buffer, acks, 10, extend=True)
    reads_go_on(buffer)


def writes_wait_and_say_for_whom(buffer: Buffer, acks: oracle.Acks, pid: int) -> None:
    """Names pid and state; nothing is lost of what they had put in."""
    who = rf"pid {pid} holds the writer role and is stopped \(SIGSTOP\)"
    with pytest.raises(CommitPending, match=who):
        buffer.extend(oracle.make_rows(0, int(acks.counts[0]), 5))
    acks.counts[0] += 5
    with pytest.raises(RingFull, match=who):
        for _ in range(100):
            buffer.put(oracle.make_rows(0, int(acks.counts[0]), 5))
            acks.counts[0] += 5
    reads_go_on(buffer)


def account(buffer: Buffer, acks: oracle.Acks, actor: Stopped | None = None) -> None:
    if actor:
        actor.kill()
    oracle.settle(buffer)
    buffer._handle.scrub()
    oracle.check(buffer, acks.counts, 5, whole=True)


PUTTING = ["ring_reserved", "ring_half_record", "ring_copied", "ring_published"]
DRAINING = [
    "role_locked", "role_taken", "plan_written", "plan_sealed", "txn_reserved", "txn_mid_row", "txn_copied", "txn_results", "txn_committed",
    "post_base", "post_cursor", "post_head", "txn_done", "role_leaving",
]  # fmt: skip
UPDATING = ["tree_leaf_read", "tree_leaves_set", "tree_children_read", "tree_level_done"]


@pytest.mark.parametrize("then", ["continued", "killed"])
@pytest.mark.parametrize(
    ("act", "point"),
    [
        *(("collector in a put", p) for p in PUTTING),
        ("collector in a put", "role_released"),
        *(("learner", p) for p in UPDATING),
    ],
)
def test_who_is_stopped_elsewhere_than_draining_holds_up_nobody(place, act, point, then):
    buffer, acks = place
    actor = Stopped(buffer.name, acks.path, act, point)
    all_goes_on(buffer, acks)
    if then == "continued":
        before, p = buffer.stats(), buffer._handle
        actor.go_on()
        if act == "learner":
            wait_for(lambda: buffer.stats()["priorities_set"] > before["priorities_set"] + 50, "its updates")
        else:
            wait_for(lambda: (p.help(), acks.counts[7] > 50)[1], "its rows")
    account(buffer, acks, actor)


@pytest.mark.parametrize("then", ["continued", "killed"])
@pytest.mark.parametrize("point", DRAINING)
def test_who_is_stopped_while_he_drains_holds_up_writes_which_name_him(place, point, then):
    buffer, acks = place
    # Somebody else has drained last: at the first step the actor has not signed for the role, at the last no longer.
    actor = Stopped(buffer.name, acks.path, "writer", point, lambda: put(buffer, acks, 5, extend=True))
    writes_wait_and_say_for_whom(buffer, acks, actor.pid)
    waiting = workers.fork(wait_long, buffer.name, acks.path)
    wait_for(
        lambda: any(c["pid"] == waiting and c["ring_used"] for c in buffer.collectors()), "the other collector's put"
    )
    if then == "continued":
        actor.go_on()
    else:
        actor.kill()
    assert os.waitpid(waiting, 0)[1] == 0, "a put that waited goes on"
    all_goes_on(buffer, acks)
    account(buffer, acks, actor)


@pytest.mark.parametrize("point", ["build_taken", "build_locked", "build_grown"])
def test_who_is_stopped_while_he_reserves_the_memory_is_named(unique_name, point):
    """Also where an earlier builder, who failed, has signed for it, and this one has not yet."""
    begin = (
        "import sys; from shmbuf import Buffer; from shmbuf._extension import native; b = Buffer.attach(sys.argv[1]); "
        f"assert native.arm('{point}=stop@1'); b.extend({{'x': [1] * 4}})"
    )
    with Buffer.create(unique_name, 1_000_000, timeout=0.2) as buffer:
        with pytest.raises(NotEnoughMemory):
            buffer.put({"x": np.zeros((1, 1 << 20))})
        p = subprocess.Popen(
            [sys.executable, "-c", begin, unique_name], env={**os.environ, "SHMBUF_NATIVE": "failpoints"}
        )
        os.waitid(os.P_PID, p.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RingFull, match=rf"pid {p.pid} \(state T\) has been reserving .* for 0.2 s"):
            buffer.put({"x": [1]})
        os.kill(p.pid, signal.SIGCONT)
        assert p.wait(20) == 0
        buffer.extend({"x": [1]}, timeout=30)
        assert len(buffer) == 5


def wait_long(name: str, path: str) -> None:
    acks = oracle.Acks(path, 16).counts
    with Buffer.attach(name) as b:
        for k in range(0, 200, 5):
            b.put(oracle.make_rows(3, k, 5), timeout=60)
            acks[3] = k + 5
        assert len(b.extend(oracle.make_rows(3, 200, 5), timeout=60)) == 5
        acks[3] += 5


def test_an_inspector_that_is_stopped_holds_up_nobody(place):
    buffer, acks = place
    actor = Stopped(buffer.name, acks.path, "inspector")
    for _ in range(10):
        actor.stop()
        all_goes_on(buffer, acks)
        actor.go_on()
    account(buffer, acks, actor)


STOPS = 300 if os.environ.get("SHMBUF_SOAK") else 15


@pytest.mark.timeout(STOPS * 10 + 60)
@pytest.mark.parametrize("act", [a for a in ACTS if a != "inspector"])
def test_stopped_at_random_moments(place, act):
    """Either writes go on, or their time runs out naming him; reads go on always; nothing is lost when all is over."""
    buffer, acks = place
    rng, actor, held_up = random.Random(1), Stopped(buffer.name, acks.path, act), 0
    for _ in range(STOPS):
        time.sleep(rng.random() * 0.005)  # any moment will do
        actor.stop()
        reads_go_on(buffer)
        rows = oracle.make_rows(0, int(acks.counts[0]), 5)
        try:
            buffer.extend(rows, timeout=0.5)  # no process is kept from the cores for so long
        except (CommitPending, RingFull) as e:
            assert re.search(rf"pid {actor.pid} holds the writer role and is stopped", str(e)), e
            held_up += 1
            acks.counts[0] += 5 * isinstance(e, CommitPending)
        else:
            acks.counts[0] += 5
        actor.go_on()
        with contextlib.suppress(CommitPending):
            put(buffer, acks, 5, extend=True)
    account(buffer, acks, actor)
    print(f"{act}: writes held up in {held_up} of {STOPS}")


CREATOR = """
import sys
from shmbuf import Buffer
from tests import oracle
b = Buffer.create(sys.argv[1], 20_000, schema=oracle.SCHEMA, drain=sys.argv[2], ring_bytes=4096, timeout=0.5)
b.keep_priorities()
print("created", b._drain_process.pid if b._drain_process else 0, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("then", ["continued", "killed"])
@pytest.mark.parametrize("drain", ["thread", "process"])
def test_the_creator_is_stopped(unique_name, tmp_path, drain, then):
    """Whoever needs it drains in his place: an extend by itself, rows that were only put by the standby of one who samples."""
    acks = oracle.Acks(tmp_path / "acks", 16)
    creator = subprocess.Popen(
        [sys.executable, "-c", CREATOR, unique_name, drain], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    drainer = int(creator.stdout.readline().split()[1]) or creator.pid
    with Buffer.attach(unique_name) as collector, Buffer.attach(unique_name) as learner:
        collector.extend(oracle.make_rows(0, 0, ROWS), timeout=30)
        acks.counts[0] = ROWS
        learner.draw(4)
        for pid in {creator.pid, drainer}:
            os.kill(pid, signal.SIGSTOP)
        stopped_in_the_middle = bool(learner.stats()["writer_active"])
        reads_go_on(learner)
        try:
            assert len(collector.extend(oracle.make_rows(0, ROWS, 5))) == 5
        except CommitPending as e:
            assert stopped_in_the_middle and f"pid {drainer} holds the writer role and is stopped" in str(e)
        acks.counts[0] += 5
        if not stopped_in_the_middle:
            ticket = collector.put(oracle.make_rows(0, ROWS + 5, 5))
            acks.counts[0] += 5
            learner.wait_rows(ROWS + 10, 20)
            assert ticket.done()
            all_goes_on(collector, acks)
        for pid in {creator.pid, drainer}:
            os.kill(pid, signal.SIGCONT if then == "continued" else signal.SIGKILL)
        all_goes_on(collector, acks)
        if then == "continued":
            creator.stdin.close()
        assert creator.wait(60) == (0 if then == "continued" else -signal.SIGKILL)
        account(learner, acks)
    destroy(unique_name, force=True)


def test_a_stopped_writer_that_overwrites_everything_is_named_by_readers(unique_name, tmp_path):
    """The one case in which reading waits: the rows that are asked for are being overwritten by him."""
    acks = oracle.Acks(tmp_path / "acks", 16)
    with Buffer.create(unique_name, 5, schema=oracle.SCHEMA, drain="caller", timeout=0.2) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 5), timeout=30)
        actor = Stopped(unique_name, acks.path, "writer", "txn_reserved")
        try:
            who = rf"pid {actor.pid} holds the writer role and is stopped \(SIGSTOP\)"
            calls: list[Callable[[], object]] = [
                lambda: buffer.draw(2),
                lambda: buffer.newest(2),
                lambda: buffer.epoch().draw(2),
            ]
            for call in calls:
                with pytest.raises(Lapped, match=who):
                    call()
        finally:
            actor.go_on()
        wait_for(lambda: acks.counts[7] > 50, "him to go on")
        actor.kill()
        rows, ids = buffer.draw(20, timeout=20)
        oracle.check_rows(rows)
        assert (rows["who"] == 7).all() and len(np.unique(ids)) <= 5
    destroy(unique_name, force=True)
