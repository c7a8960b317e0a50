"""Walks the failpoints: a child is killed (or stopped) at a named step, a successor takes over, the oracle judges.

Run with SHMBUF_NATIVE=failpoints in an interpreter without threads: `python -m tests.process.failpoints NAME …`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shmbuf import Buffer, RateLimiter, destroy, segment
from shmbuf._extension import native
from shmbuf.errors import Lapped
from tests import oracle
from tests.process import workers

LARGEST = 9
HITS = (1, 2, 3, 4, 5)
FILLER = 700  # streams of one row each: many more than a collector's table has entries
HAND = 10  # the first number of what an actor's other handles put under
ALPHA, EPS = 0.6, 1e-8


def rows(who: int, first: int, n: int) -> dict:
    return oracle.make_rows(who, first, n, ends=True)


@dataclass
class Actor:
    """Passes labelled steps, and dies (or stops) at the armed one."""

    name: str
    acks: np.ndarray
    spec: str
    buffer: Buffer = None  # type: ignore[assignment]

    def put(self, who: int, n: int, buffer: Buffer | None = None, **with_them) -> None:
        """The next n rows of this number."""
        record = rows(who, int(self.acks[who]), n)
        (self.buffer if buffer is None else buffer).put(record, stream=oracle.stream_of(who, record["k"]), **with_them)
        self.acks[who] += n

    def arm(self) -> None:
        assert native.arm(self.spec)

    def act(self, scenario: Scenario) -> None:
        """What a collector that helps itself does in a short life, and what the scenario adds to it."""
        self.buffer = Buffer.attach(self.name)
        scenario.before(self)
        if not scenario.late:
            self.arm()
        scenario.fresh(self)
        for n in (1, LARGEST, 4, 7, 2):
            self.put(1, n, priorities=1.0 + np.arange(n) if n % 2 else None)  # the very first builds the buffer
            self.buffer.drain()
            self.buffer.keep_priorities(ALPHA, EPS)
        if scenario.late:
            self.arm()
        prioritise(self.buffer)
        scenario.more(self)
        self.buffer.close()


def nothing(actor: Actor) -> None:
    pass


def prioritise(buffer: Buffer) -> None:
    """Updates, samples by priority under a limiter that never waits, and claims from the epoch that all share."""
    lo, hi = buffer.window
    ids = np.arange(lo, hi)
    for turn in HITS:
        buffer.set_priorities(ids[turn % 3 :: 2], np.arange(len(ids[turn % 3 :: 2])) % 10 + 1.0)
    assert buffer._handle.share_epoch(0, 1)
    for turn in HITS:
        buffer.set_limiter(RateLimiter(1.0, min_size=turn, error_buffer=(-1e9, 1e9)))
        oracle.check_rows(buffer.draw_by_priority(16)[0])
        claim(buffer, 3)


def claim(buffer: Buffer, n: int) -> list[int]:
    """Consume-once: ids that nobody else gets."""
    ids = np.empty(n, np.int64)
    got, *_ = buffer._handle.claim(None, 0, n, 7, True, False, True, 1, ids.ctypes.data)
    return ids[:got].tolist()


def hands(actor: Actor, first: int = HAND) -> None:
    """Handles that come, put and go: each claims a ring, gives it back, drains."""
    for i in HITS:
        with Buffer.attach(actor.name) as other:
            actor.put(first + i, 3, other)


def sweeps(actor: Actor) -> None:
    """Their rings are swept, and claimed again by others."""
    for first in (HAND, 2 * HAND):
        hands(actor, first)
        actor.buffer._handle.sweep()


def deaths(actor: Actor) -> None:
    """Others come, put and are killed; whoever sweeps their rings tells of it."""
    for i in HITS:
        pid = workers.fork(put_and_die, actor, HAND + i)
        assert os.WTERMSIG(wait(pid)) == signal.SIGKILL
        actor.buffer.drain()
        actor.buffer._handle.sweep()


def put_and_die(actor: Actor, who: int) -> None:
    assert native.arm("")
    buffer = Buffer.attach(actor.name)
    actor.put(who, 3, buffer)
    os.kill(os.getpid(), signal.SIGKILL)


def pins(actor: Actor) -> None:
    """Rows are pinned and let go; a pin outlives its owner, or its time; one comes between a dead writer's plan and whoever runs it."""
    while actor.buffer.window[0] == 0:  # from here on each row overwrites one
        actor.put(1, LARGEST)
        actor.buffer.drain()
    for i in HITS:
        with actor.buffer.pin() as pin:
            assert pin.valid
        assert os.WTERMSIG(wait(workers.fork(pin_and_die, actor.name))) == signal.SIGKILL
        actor.put(1, 2)
        actor.buffer.drain()
        pin = actor.buffer.pin(seconds=1e-9)
        actor.put(1, 2)
        actor.buffer.drain()
        assert not pin.valid
        pin.release()
        assert os.WTERMSIG(wait(workers.fork(plan_and_die, actor, HAND + i))) == signal.SIGKILL
        pin, end = actor.buffer.pin(seconds=None), actor.buffer.window[1]
        actor.buffer.drain()
        assert pin.valid and actor.buffer.window[1] == end
        pin.release()
        actor.buffer.drain()


def pin_and_die(name: str) -> None:
    assert native.arm("")  # the armed one is its parent
    buffer = Buffer.attach(name)
    pin = buffer.pin(seconds=None)
    assert pin.valid
    os.kill(os.getpid(), signal.SIGKILL)


def plan_and_die(actor: Actor, who: int) -> None:
    assert native.arm("plan_sealed=kill@1")
    buffer = Buffer.attach(actor.name)
    actor.put(who, 2, buffer)
    buffer.drain()


def clears(actor: Actor) -> None:
    for _ in HITS:
        actor.buffer.empty()
        actor.put(1, LARGEST)
        actor.buffer.drain()


def edits(actor: Actor) -> None:
    """Rows are changed where they lie, some of them just after they were overwritten; each is the old one or the new one."""
    for turn in HITS:
        lo, hi = actor.buffer.window
        ids = np.arange(max(lo, hi - 20), hi)
        turned = oracle.edited(actor.buffer.gather(ids))
        assert actor.buffer.edit(ids, turned, timeout=20).all()
        actor.buffer.put_edit(ids[::2], {"payload": turned["payload"][::2]})
        no_newer = {"k": actor.buffer.gather(ids[-5:])["k"], "payload": np.zeros_like(turned["payload"][-5:])}
        actor.buffer.put_edit(ids[-5:], no_newer, version="k", require_newer=True)  # which nobody may ever see
        actor.put(1, turn)
        actor.buffer.put_edit(ids[-3:], oracle.edited({"payload": turned["payload"][-3:]}))
        actor.buffer.drain()


def skips(actor: Actor) -> None:
    """While a drainer is stuck the ring overflows, again and again: drop_oldest."""
    third, skipped, times = segment.attach(actor.name), 0, 0
    for _ in range(250):  # until a drainer that was stuck goes on just while drop_oldest waits for it
        assert third.try_take_role()
        release = threading.Timer(0.004, third.give_back_role)
        release.start()
        for _ in range(4):
            actor.put(1, LARGEST)
        release.join()
        actor.buffer.drain()
        if actor.buffer.stats()["skipped_rows"] > skipped:
            skipped, times = actor.buffer.stats()["skipped_rows"], times + 1
        if times == len(HITS):
            break
    third.close()


def fill_table(actor: Actor) -> None:
    """The table of streams is full of others when the failpoint is armed."""
    for _ in range(0, FILLER, LARGEST):
        actor.put(oracle.APART, LARGEST)
        actor.buffer.drain()


def more_streams(actor: Actor) -> None:
    for _ in HITS:
        actor.put(oracle.APART, 1)
        actor.buffer.drain()


def others_first(actor: Actor) -> None:
    """What happens once in a buffer's life happens at the n-th hit to the n-th buffer: n - 1 before this one."""
    for i in range(int(actor.spec.rpartition("@")[2]) - 1):
        other = f"{actor.name}.{i}"
        with Buffer.create(other, 100, drain="caller", max_collectors=2, ring_bytes=4096) as buffer:
            buffer.extend(rows(0, 0, 3))
            buffer.keep_priorities(ALPHA, EPS)
        destroy(other)


@dataclass(frozen=True)
class Scenario:
    """The life in which a step is passed at least five times, and the buffer that it is passed in.

    Attributes:
        before, fresh, more: what the actor does besides: before it is armed, at once afterwards, at its end.
        late: armed when all is stored, before the first update: steps of whoever updates, not of the writer.
        built, kept: the buffer has its rows, and keeps priorities, before the actor comes.
        cuts: see oracle.check_links.
    """

    more: Callable[[Actor], None] = nothing
    before: Callable[[Actor], None] = nothing
    fresh: Callable[[Actor], None] = nothing
    late: bool = False
    built: bool = True
    kept: bool = True
    cuts: int | None = 0
    capacity: int = 10_000
    full: str = "block"


PLAIN, LATE, HANDS = Scenario(), Scenario(late=True), Scenario(hands)
CLEARS = Scenario(clears, capacity=64)
FULL_TABLE = Scenario(more_streams, before=fill_table, cuts=None)
# By the longest of these that a label begins with: in which lives it is killed. Each word before a "_" is a group of the test.
SCENARIOS: dict[str, tuple[Scenario, ...]] = {
    "claim": (HANDS,),
    "ring": (PLAIN,),
    "role": (PLAIN,),
    "plan": (PLAIN,),
    "txn": (PLAIN,),
    "post": (PLAIN,),
    "clear": (CLEARS,),
    "skip": (Scenario(skips, capacity=64, full="drop_oldest"),),
    "build": (Scenario(fresh=others_first, built=False),),
    "sweep": (Scenario(sweeps),),
    "slot": (HANDS,),
    "close": (HANDS,),
    "tree": (PLAIN, LATE),
    "tree_kept": (Scenario(fresh=others_first, kept=False),),
    "tree_leaf_read": (LATE,),  # the writer does not look
    "link": (PLAIN,),
    "link_cleared": (CLEARS,),
    "link_recycl": (FULL_TABLE,),
    "link_claimed": (FULL_TABLE,),
    "limiter": (PLAIN,),
    "edit": (Scenario(edits), Scenario(edits, capacity=64)),
    "epoch": (PLAIN,),
    "event": (Scenario(deaths),),
    "pin": (Scenario(pins, capacity=64),),
}


def scenarios_of(label: str) -> tuple[Scenario, ...]:
    return SCENARIOS[max((p for p in SCENARIOS if label.startswith(p)), key=len)]


def act(name: str, acks_path: str, spec: str, scenario: Scenario) -> None:
    Actor(name, oracle.Acks(acks_path).counts, spec).act(scenario)


def successor(name: str, acks_path: str) -> None:
    """Another process goes on: reads, puts, drains, updates, samples, claims; nothing may hang or be wrong."""
    acks = oracle.Acks(acks_path).counts
    buffer = Buffer.attach(name)
    five = rows(100, 0, 5)
    assert len(buffer.extend(five, stream=oracle.stream_of(100, five["k"]), timeout=20)) == 5
    acks[100] = 5
    oracle.check_rows(buffer.draw(50)[0])
    buffer.drain()  # what others still have in their rings would move the window below
    lo, hi = buffer.window
    assert buffer.edit(range(lo, hi), oracle.edited(buffer.gather(range(lo, hi))), timeout=20).all()
    oracle.check_rows(buffer.gather(range(lo, hi)))
    buffer.keep_priorities(ALPHA, EPS)
    buffer.set_limiter(RateLimiter(1.0, min_size=0, error_buffer=(-1e9, 1e9)))
    lo, hi = buffer.window
    assert buffer.set_priorities(range(lo, hi), 2.0).all()
    claimed = [i for _ in range(hi - lo) for i in claim(buffer, 7)]
    assert len(set(claimed)) == len(claimed) and max(claimed, default=-1) < hi  # of an old window: perhaps below lo
    assert hi - 1 in claimed or not claimed, "the newest row was in no window"
    oracle.check_rows(buffer.draw_by_priority(50)[0])
    buffer._handle.sweep()
    buffer.close()


def run(label: str, how: str, hit: int, directory: str, scenario: Scenario, *, kill_successor: bool = False) -> bool:
    """True if the step fired. Raises AssertionError if anything is wrong afterwards."""
    where = f"{label}={how}@{hit}"
    path = tempfile.mktemp(dir=directory)
    acks = oracle.Acks(path)
    shm = f"fp.{os.getpid()}.{where.replace('=', '.').replace('@', '.')}"
    creator = Buffer.create(
        shm,
        scenario.capacity,
        schema=oracle.ENDING if scenario.built else None,
        ring_bytes=4096,
        drain="caller",
        full=scenario.full,
        max_collectors=12,
        trajectories=True,
        end_keys="done",
    )
    try:
        if scenario.kept:
            creator.keep_priorities(ALPHA, EPS)
        pid = workers.fork(act, shm, path, where, scenario)
        status = wait(pid, stopped=how == "stop")
        if status == 0:
            return False
        if how == "kill":
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{where}: wait status {status}"
        else:
            assert os.WIFSTOPPED(status), f"{where}: wait status {status}"
            found = creator._handle.audit(0.0)["findings"]
            assert not found, f"{where}: half-way is not damaged: {found}"
            reads_go_on(creator, scenario.late, all_of_them=label.startswith("edit"))
            os.kill(pid, signal.SIGCONT)
            assert wait(pid) == 0, where
        if how == "kill" and label.startswith("edit"):  # before another edit settles it
            creator.drain()
            found = creator._handle.audit(0.0)["findings"]
            assert not found, f"{where}: {found}"
        if kill_successor:  # and who comes to finish its work, at the same step; and who comes then, at the next commit
            for again in (where, "txn_committed=kill@1"):
                recover(creator, acks.counts)
                status = wait(workers.fork(act, shm, path, again, scenario))
                assert status in (0, signal.SIGKILL), f"{where}, then {again}: wait status {status}"
        if scenario.late and how == "kill":
            heal(creator, hit, where)
        assert wait(workers.fork(successor, shm, path)) == 0, where
        workers.settle(creator)
        creator._handle.scrub()
        if scenario.full == "block":
            cuts = None if kill_successor else scenario.cuts
            s = creator.stats()
            whole = not s["clears"] and s["rows_total"] <= scenario.capacity
            oracle.check(creator, acks.counts, LARGEST, whole=whole, streams=True, cuts=cuts)
        else:
            in_order(creator)
        assert not creator._handle.audit()["findings"], f"{where}: {creator._handle.audit()}"
        sweep(creator)
        assert creator.collectors() == [], f"{where}: rings of the dead are kept"
        return True
    finally:
        creator.close()
        destroy(shm, force=True)
        os.unlink(path)
        for scratch in segment.names():
            if scratch.startswith(f"{shm}."):
                destroy(scratch, force=True)


def sweep(creator: Buffer) -> None:
    creator._handle.sweep()


def in_order(creator: Buffer) -> None:
    """Where rows may be skipped: what is there is whole, in order and once."""
    lo, hi = creator.window
    rows = creator.gather(range(lo, hi))
    oracle.check_rows(rows)
    for who in np.unique(rows["who"]):
        assert (np.diff(rows["k"][rows["who"] == who]) > 0).all(), f"writer {who}: out of order, or doubled"
    assert creator.stats()["malformed_records"] == 0
    assert creator._handle.check_tree() == 0
    oracle.check_links(creator, True, None)


def heal(creator: Buffer, hit: int, where: str) -> None:
    """An updater died between leaf and root: a standby of somebody who lives mends it by himself; or scrub() does at once."""
    if hit > 1:
        creator._handle.scrub()
    else:
        creator._handle.start_thread(True)
        deadline = time.monotonic() + 30
        while not creator._get("priorities")["scrubs"]:
            assert time.monotonic() < deadline, f"{where}: nobody mended the tree"
            time.sleep(0.005)
    assert creator._handle.check_tree() == 0, where


def recover(creator: Buffer, acks: np.ndarray) -> None:
    """Where each writer has to go on: a record that was published but not acknowledged counts."""
    workers.settle(creator)
    lo, hi = creator.window
    acks[:] = 0
    if hi > lo:
        rows = creator.gather(range(lo, hi))
        np.maximum.at(acks, rows["who"], rows["k"] + 1)


def reads_go_on(creator: Buffer, update: bool, all_of_them: bool) -> None:
    """Somebody is stopped at this step: what is stored can still be read, by one who never waits for him."""
    lo, hi = creator.window
    if hi > lo:
        rows, valid = creator.try_gather(range(lo, hi))
        oracle.check_rows({k: v[valid] for k, v in rows.items()})
        assert valid.all() or not all_of_them, "a row that is being edited can be read all the same"
        creator.draw(8)
        if update:  # of others' rows, and of the very ones
            assert creator.set_priorities(range(lo, hi), 3.0).all()
            oracle.check_rows(creator.draw_by_priority(8)[0])
    creator.stats(), creator.collectors(), creator.members()


def stopped_while_rows_are_overwritten(overwritten: int, stored: int = 4) -> None:
    """By priority the rows that stay are drawn meanwhile; if none do the reader says so when its time is over. Then all go on."""
    name = f"fp.{os.getpid()}.overwritten"
    creator = Buffer.create(name, stored, schema=oracle.SCHEMA, drain="caller")
    creator.keep_priorities(ALPHA, EPS)
    creator.extend(oracle.make_rows(0, 0, stored))

    def write() -> None:
        assert native.arm("txn_evicted=stop@1")
        Buffer.attach(name).extend(oracle.make_rows(0, stored, overwritten))

    def read() -> None:
        buffer = Buffer.attach(name)
        for stratified in (False, True):
            try:
                _, ids, _ = buffer.draw_by_priority(2000, stratified=stratified, timeout=0.1)
            except Lapped:
                assert overwritten == stored
                continue
            assert set(ids.tolist()) == set(range(overwritten, stored)), "not the rows that stay"

    writer = workers.fork(write)
    try:
        assert os.WIFSTOPPED(wait(writer, stopped=True))
        assert wait(workers.fork(read), seconds=20) == 0
        os.kill(writer, signal.SIGCONT)
        assert wait(writer) == 0
        ids = creator.draw_by_priority(64 * stored)[1]
        assert set(ids.tolist()) <= set(range(overwritten, overwritten + stored)) and ids.max() >= stored
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGKILL)
        creator.close()
        destroy(name, force=True)


def wait(pid: int, stopped: bool = False, seconds: float = 30) -> int:
    """The wait status; a child that hangs is an assertion."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG | (os.WUNTRACED if stopped else 0))
        if done:
            return status
        time.sleep(0.001)
    workers.kill(pid)
    raise AssertionError(f"child {pid} hangs")


def walk(label: str, directory: str) -> None:
    for scenario in scenarios_of(label):
        for hit in HITS:
            for how in ("kill", "stop"):
                assert run(label, how, hit, directory, scenario), f"{label} never fired for the {hit}th time"
            run(label, "kill", hit, directory, scenario, kill_successor=True)


def main(labels: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for label in labels:
            walk(label, directory)
            print(label, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(native.FAILPOINTS))
