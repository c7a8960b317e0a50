"""Kills at random, for long: collectors, learners, drain processes and the creator, one or two at a time, stopped and continued in
between, while all of them put, draw, update, claim, wait and help. Nothing may hang, be torn, lost or doubled; what it takes from
the death of whoever wrote to the next commit is measured.

    python -m tests.process.soak [--kills 10000] [--seed 1]      (make soak)

A fresh interpreter without threads, as it forks. Watches only: it never drains while others live.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shmbuf import Buffer, destroy, segment
from tests import oracle
from tests.process import workers
from tests.process.workers import LARGEST, LIVES, MARK, Job

DEADLINE = 60.0  # seconds until something that should happen at once counts as a hang
COLLECTORS, LEARNERS, DRAINERS = 3, 3, 2
HELD, SEEN, OTHER = "stopped while it held the writer role", "seen holding it just before", "anybody else"
CALM, BUSY = "calm", "busy"  # cores are free; everybody does what he can
ARMED = "at a labelled step of a transaction"
STEPS = (
    "role_taken",
    "plan_sealed",
    "txn_reserved",
    "txn_mid_row",
    "txn_copied",
    "txn_committed",
    "post_head",
    "txn_done",
)


class Leg(NamedTuple):
    """One buffer, and how many kills it lives through."""

    capacity: int
    kills: int
    drain: str = "thread"
    ends: bool = True  # streams, slices, links
    limited: bool = False
    clears: bool = False
    late: bool = False  # the first put makes the schema

    calm: bool = False  # pauses: what is measured is the take-over, not who gets a core

    @property
    def whole(self) -> bool:  # every row ever put is still there at the end
        return self.capacity >= 1_000_000

    @property
    def pace(self) -> tuple[float, float]:
        return (4e-4, 4e-3) if self.calm else (3e-3, 0) if self.whole else (0, 5e-4)


LEGS = (
    Leg(1_500, 120),
    Leg(1_500, 120, drain="caller", late=True),
    Leg(1_500_000, 60, ends=False),
    Leg(700, 120, limited=True),
    Leg(3_000, 120, drain="caller", clears=True),
    Leg(1_500_000, 60, drain="caller", ends=False, late=True),
    Leg(40, 60, limited=True, drain="caller"),
)
CHECK_EVERY = 60  # kills


@dataclass
class Figures:
    kills: Counter = field(default_factory=Counter)  # by role
    stops: int = 0
    pairs: int = 0
    checks: int = 0
    rows: int = 0
    takeovers: int = 0
    idle: int = 0  # kills when no row waited, of which no time is taken
    until_commit: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    until_free: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    since_free: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def killed(self) -> int:
        return self.kills.total()

    def text(self) -> str:
        lines = [
            f"kills={self.killed} ({', '.join(f'{k} {n}' for k, n in sorted(self.kills.items()))}) pairs={self.pairs} "
            f"stops={self.stops} checks={self.checks} rows={self.rows:,} takeovers={self.takeovers} idle={self.idle}",
            "hangs=0 torn=0 lost=0 doubled=0",
            "from SIGKILL to the next commit, while rows wait, ms:",
            *percentiles(self.until_commit),
            "of which until the kernel has let go of the writer's lock (the process has died, its memory is unmapped), ms:",
            *percentiles(self.until_free),
            "and from then on, ms:",
            *percentiles(self.since_free),
        ]
        return "\n".join(lines)


def percentiles(seconds: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    for calm in (CALM, BUSY):
        for who in (ARMED, HELD, SEEN, OTHER):
            if some := seconds.get((calm, who)):
                p50, p99, most = np.percentile(np.array(some) * 1e3, [50, 99, 100])
                yield f"  {calm}, {who:38} n={len(some):<5} p50={p50:.2f} p99={p99:.2f} max={most:.2f}"


class Hang(AssertionError):
    pass


class Crew:
    """Everybody who works on one buffer."""

    def __init__(self, leg: Leg, rng: random.Random, figures: Figures, directory: str):
        self.leg, self.rng, self.figures = leg, rng, figures
        acks = oracle.Acks(tempfile.mktemp(dir=directory), 1 << 15)
        name = f"soak.{os.getpid()}.{secrets.token_hex(4)}"
        self.job = Job(name, acks, ends=leg.ends, limited=leg.limited, clears=leg.clears, pace=leg.pace)
        self.at: dict[int, tuple[str, Callable[[], int]]] = {}  # pid → role, and how to get another one
        self.next_who = 1000  # not APART
        self.blocks = self.bystander = 0
        self.spec = ""  # of the failpoint that who comes next is armed with
        self.watch = self.begin()

    # ---- who works ----

    def seed(self) -> int:
        return self.rng.getrandbits(32)

    def start(self, role: str, begin: Callable[[], int]) -> int:
        pid = begin()
        self.at[pid] = (role, begin)
        return pid

    def begin(self) -> Buffer:
        """The creator, killed at once now and then: then another one comes."""
        leg = self.leg
        make = lambda: workers.fork(workers.create, self.job, leg.capacity, leg.drain, leg.late, self.seed())  # noqa: E731
        while self.rng.random() < 0.5:
            pid = make()
            time.sleep(self.rng.random() * 0.02)
            assert workers.kill(pid) == signal.SIGKILL, "a creator ended by itself"
            self.figures.kills["creator"] += 1
        creator = self.start("creator", make)
        self.at[creator] = ("creator", self.learner)  # there is no second one: who follows him only learns
        return Buffer.attach(self.job.name, timeout=DEADLINE)

    def learner(self) -> int:
        return workers.fork(workers.armed, self.spec, workers.attend, self.job, self.seed())

    def collector(self) -> int:
        who, self.next_who = self.next_who, self.next_who + LIVES
        return workers.fork(workers.armed, self.spec, workers.feed, self.job, who, self.seed())

    def drainer(self) -> int:
        return workers.fork(workers.armed, self.spec, workers.drain, self.job.name)

    def gather(self) -> None:
        self.bystander = workers.fork(workers.mark, self.job)
        for _ in range(COLLECTORS):
            self.start("collector", self.collector)
        for _ in range(1 if self.leg.calm else LEARNERS):
            self.start("learner", self.learner)
        for _ in range(DRAINERS):
            self.start("drainer", self.drainer)
        self.until(self.job.marked.is_set, "the first rows, and priorities of them")
        if self.leg.limited:  # not before: learners wait for the mark, and it is a row
            self.watch.set_limiter(workers.limiter(), batch=32)
        self.fds = self.open_files()

    def open_files(self) -> tuple[int, int]:
        with open(f"/proc/{self.bystander}/maps") as maps:
            return len(os.listdir(f"/proc/{self.bystander}/fd")), sum("shmbuf" in line for line in maps)

    # ---- kills ----

    def disturb(self) -> None:
        """One turn: a kill or two, of whoever; or a stop and a continuation."""
        self.look()
        time.sleep(self.rng.random() * 0.03)
        what = self.rng.random()
        if what < 0.12:
            return self.pause(self.anybody())
        victims = [self.anybody()]
        how = OTHER
        if what < 0.75 and (writer := self.writer()) is not None:
            victims, how = [writer], SEEN
            if what < 0.45 and self.stopped_writing(writer):
                how = HELD
                time.sleep(self.rng.random() * 0.005)
                if not self.leg.limited:
                    self.until(lambda: self.watch._handle.counters()["ring_used_bytes"], "rows wait")
        if self.rng.random() < 0.1:
            victims = list(dict.fromkeys([*victims, self.anybody()]))
            self.figures.pairs += len(victims) > 1
        self.kill(victims, how)

    def takeover(self) -> None:
        """Somebody new stops at a step of his own transaction, in the middle; then he is killed. (The build with failpoints.)"""
        self.look()
        pid = self.anybody()
        role, again = self.at.pop(pid)
        assert workers.kill(pid) == signal.SIGKILL
        self.figures.kills[role] += 1
        self.spec = f"{self.rng.choice(STEPS)}=stop@{self.rng.randint(1, 15)}"
        pid = self.start("learner" if role == "creator" else role, again)
        self.spec = ""
        self.until(lambda: os.WIFSTOPPED(self.poll(pid, os.WUNTRACED)), "it writes")
        self.until(lambda: self.watch._handle.counters()["ring_used_bytes"], "rows wait")
        time.sleep(self.rng.random() * 0.005)
        self.kill([pid], ARMED)

    def poll(self, pid: int, options: int = 0) -> int:
        done, status = os.waitpid(pid, os.WNOHANG | options)
        assert not done or os.WIFSTOPPED(status), f"pid {pid} ended by itself with wait status {status}"
        return status

    def anybody(self) -> int:
        return self.rng.choice(list(self.at))

    def writer(self) -> int | None:
        """Who holds the role now."""
        for _ in range(100):
            c = self.watch._handle.counters()
            if c["writer_active"] and c["writer_pid"] in self.at:
                return c["writer_pid"]
        return None

    def stopped_writing(self, pid: int) -> bool:
        """Stop it; True if it held the role then, and holds it still: it is for certain killed in the middle of its writing."""
        os.kill(pid, signal.SIGSTOP)
        self.until(lambda: segment.process_state(pid) == "T", f"pid {pid} stops")
        c = self.watch._handle.counters()
        if c["writer_active"] and c["writer_pid"] == pid:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    def pause(self, pid: int) -> None:
        self.figures.stops += 1
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * 0.02)
        self.watch.stats(), self.watch.collectors(), self.watch.members()  # whoever is stopped, these never wait
        if self.rng.random() < 0.5:
            os.kill(pid, signal.SIGCONT)
        else:
            self.kill([pid], None)

    def kill(self, victims: list[int], how: str | None) -> None:
        """SIGKILL; watch until somebody commits; then replace them."""
        counters, first = self.watch._handle.counters, victims[0]
        timed = how is not None and not self.leg.limited
        if timed and not any(counters()["ring_used_bytes"] for _ in range(200)):
            timed, self.figures.idle = False, self.figures.idle + 1
        free = commit = None
        base = counters()["transactions"]
        with fine_sleeps():
            since = time.perf_counter()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            while timed:
                c, now = counters(), time.perf_counter() - since
                if how == OTHER:
                    free = 0.0
                elif free is None:
                    base = c["transactions"]  # up to here it may have been the victim's
                    if not c["writer_active"] or c["writer_pid"] != first:
                        free = now
                    continue
                if c["transactions"] > base:
                    commit = now
                    break
                if now > DEADLINE:
                    raise self.hang(f"no commit for {DEADLINE} s after the death of pid {victims}")
                time.sleep(2e-5)
        if timed:
            key = (CALM if self.leg.calm else BUSY, how)
            self.figures.until_commit[key].append(commit)
            if how != OTHER:
                self.figures.until_free[key].append(free)
                self.figures.since_free[key].append(commit - free)
        for pid in victims:
            role, again = self.at.pop(pid)
            status = self.reap(pid)
            assert status == signal.SIGKILL, f"the {role}, pid {pid}, ended by itself with wait status {status}"
            self.figures.kills[role] += 1
            self.start("learner" if role == "creator" else role, again)

    # ---- rest ----

    def check(self, last: bool) -> None:
        """All end by themselves; then the oracle, and whether anything was left behind."""
        assert self.open_files() == self.fds, (
            f"descriptors, mappings of the bystander: {self.fds} → {self.open_files()}"
        )
        self.look()
        if self.leg.limited:
            self.watch.set_limiter(None)
        self.job.stop.set()
        for pid, (role, _) in list(self.at.items()):
            if role == "drainer":
                workers.kill(pid)
            else:
                status = self.reap(pid)
                assert status == 0, f"the {role}, pid {pid}, ended with wait status {status}"
        assert self.reap(self.bystander) == 0
        self.at.clear()
        watch, leg = self.watch, self.leg
        workers.settle(watch)
        watch._handle.scrub()  # nobody is left who would, within a second
        whole = leg.whole and watch.stats()["rows_total"] <= leg.capacity
        assert whole or not leg.whole, "the buffer of which all rows were to be there has wrapped"
        stats = oracle.check(watch, self.job.acks.counts, LARGEST, whole=whole, streams=leg.ends)
        self.judge_priorities()
        assert not watch._handle.audit()["findings"], watch._handle.audit()  # what a user's check() looks at
        watch._handle.sweep()
        assert [c["state"] for c in watch.collectors()] == [], watch.collectors()
        blocks = os.stat(segment.path_of(self.job.name)).st_blocks
        self.blocks = self.blocks or blocks
        assert blocks <= self.blocks, f"the segment took {self.blocks * 512:,} bytes at first, {blocks * 512:,} now"
        self.figures.checks += 1
        if last:
            self.figures.rows += stats["rows_total"]
            self.figures.takeovers += stats["takeovers"]
        else:
            self.job.stop, self.job.marked = workers.ForkedEvent(), workers.ForkedEvent()

    def judge_priorities(self) -> None:
        """Each row has the priority that was computed for it, or one of a new row."""
        lo, hi = self.watch.window
        ids = np.arange(lo, hi)
        rows, p = self.watch.gather(ids), self.watch.priorities(ids)
        good = np.isclose(p, value_of(rows), rtol=1e-5) | np.isclose(p, 1.0) | np.isclose(p, MARK)
        if self.leg.clears:  # and then new rows get the largest of what was set since
            good |= (p >= 0.1) & (p < 1)
        assert good.all(), (
            f"{(~good).sum()} of {len(ids)} priorities are other rows': {ids[~good][:5]} have {p[~good][:5]}"
        )
        leaves = (p + workers.EPS) ** workers.ALPHA
        np.testing.assert_allclose(self.watch._get("priorities")["sum"], leaves.sum(), rtol=1e-5)

    def reap(self, pid: int) -> int:
        done = [0, 0]

        def ended() -> bool:
            done[:] = os.waitpid(pid, os.WNOHANG)
            return done[0] == pid

        self.until(ended, f"pid {pid} ends")
        return done[1]

    def look(self) -> None:
        """Nobody has ended by himself."""
        for pid in (*self.at, self.bystander):
            done, status = os.waitpid(pid, os.WNOHANG)
            role = self.at.get(pid, ("bystander", None))[0]
            assert not done, f"the {role}, pid {pid}, ended by itself with wait status {status}"

    def until(self, met: Callable[[], Any], what: str) -> None:
        give_up = time.monotonic() + DEADLINE
        while not met():
            if time.monotonic() > give_up:
                raise self.hang(f"not within {DEADLINE} s: {what}")
            time.sleep(2e-4)

    def hang(self, what: str) -> Hang:
        text = [what, f"stats: {self.watch.stats()}", "collectors:", *map(str, self.watch.collectors()), "members:"]
        text += [*map(str, self.watch.members()), "processes:"]
        for pid in (*self.at, self.bystander):
            text.append(f"  {pid} {self.at.get(pid, ('bystander',))[0]}: {state_of(pid)}")
        return Hang("\n".join(text))

    def end(self) -> None:
        for pid in (*self.at, self.bystander):
            if pid:
                with contextlib.suppress(ChildProcessError):
                    workers.kill(pid)
        self.at.clear()
        self.watch.close()
        destroy(self.job.name, force=True)
        os.unlink(self.job.acks.path)


def value_of(rows: dict) -> np.ndarray:
    return workers.value_of(rows["who"], rows["k"])


def state_of(pid: int) -> str:
    """Of each of its threads: state, where in the kernel, which system call."""
    out = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for what in ("comm", "wchan", "syscall"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/{what}") as f:
                    out.append(f.read().strip() or "-")
            out.append(f"state {segment.process_state(int(task))};")
    return " ".join(out) or "gone"


@contextlib.contextmanager
def fine_sleeps():
    """Naps of microseconds, not 50 more; not for children, who would inherit it."""
    prctl, slack = ctypes.CDLL(None).prctl, 29
    prctl(slack, 1000, 0, 0, 0)
    try:
        yield
    finally:
        prctl(slack, 50_000, 0, 0, 0)


def soak(kills: int, seed: int, directory: str, legs: tuple[Leg, ...] = LEGS, turn: Callable = Crew.disturb) -> Figures:
    """Kills so many, over as many buffers as it takes. Raises AssertionError if anything hangs or is wrong."""
    rng, figures, began, fds = random.Random(seed), Figures(), time.monotonic(), 0
    for leg in itertools.cycle(legs):
        crew = Crew(leg, rng, figures, directory)
        try:
            to = min(kills, figures.killed + leg.kills)
            while figures.killed < to:
                crew.gather()
                pause = min(to, figures.killed + CHECK_EVERY)
                while figures.killed < pause:
                    turn(crew)
                crew.check(last=figures.killed >= to)
        finally:
            crew.end()
        assert not os.path.exists(segment.path_of(crew.job.name))
        now = len(os.listdir("/proc/self/fd"))
        fds = fds or now
        assert now == fds, f"the supervisor had {fds} descriptors after the first buffer, {now} after this one"
        print(f"{time.monotonic() - began:.0f} s: {figures.killed} kills, {leg}", flush=True)
        if figures.killed >= kills:
            return figures
    raise AssertionError("no legs")


def takeovers(kills: int, seed: int, directory: str) -> Figures:
    """So many are killed in the middle of a transaction, while cores are free. In the build with failpoints."""
    return soak(kills, seed, directory, (Leg(1_500, CHECK_EVERY, calm=True),), Crew.takeover)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--takeovers", action="store_true", help="only these: kills in the middle of a transaction")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print((takeovers if args.takeovers else soak)(args.kills, args.seed, directory).text(), flush=True)
    if not args.takeovers:
        again = [sys.executable, "-m", __spec__.name, "--takeovers", "--kills", str(args.kills // 20)]
        subprocess.run(again, check=True, env={**os.environ, "SHMBUF_NATIVE": "failpoints"})


if __name__ == "__main__":
    main()
