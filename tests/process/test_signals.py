"""Ctrl-C and other signals at a wait: it ends at once, nothing stays locked, rows in the ring are not forgotten."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shmbuf import Buffer, destroy, segment
from tests import oracle
from tests.process import interrupts
from tests.process.workload import wait_for

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


def run(code: str, *arguments: object, module: bool = False, seconds: float = 100) -> str:
    """In an interpreter of its own, which ends by itself and says nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-m" if module else "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


# ---- Ctrl-C at any moment ------------------------------------------------------------------------------------------

ROUNDS = 2000 if os.environ.get("SHMBUF_SOAK") else 30
# Points of these calls, which take many: every so many of them.
STEPS = {} if os.environ.get("SHMBUF_SOAK") else {"create": 19, "close": 7}
ONLY = {"build": ["build"]}  # in the function that locks: what surrounds it is long and only looks


@pytest.mark.parametrize("kind", interrupts.KINDS)
def test_ctrl_c_at_random_moments(kind):
    """The exception comes at once; then the same handle and others go on, every row is there once."""
    print(run("tests.process.interrupts", "hammer", kind, ROUNDS, module=True))


@pytest.mark.parametrize("kind", (*interrupts.KINDS, "build"))
def test_ctrl_c_at_every_point_where_the_interpreter_lets_it_in(kind):
    print(run("tests.process.interrupts", "every_point", kind, STEPS.get(kind, 1), *ONLY.get(kind, []), module=True))


ENSEMBLE = """
import signal, sys, torch
from tensordict import TensorDict
from shmbuf import ConsumingSampler, NotEnoughRows, RateLimiter, ReplayBufferEnsemble, ShmStorage, TensorDictReplayBuffer
def make(n, limiter=None):
    rb = TensorDictReplayBuffer(storage=ShmStorage(100, drain="caller"), sampler=ConsumingSampler(), limiter=limiter)
    if n: rb.extend(TensorDict({"k": torch.arange(n)}, [n]))
    return rb
def interrupt(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for how in ("in vain", "interrupted"):
    full, short = make(10, RateLimiter(1.0, min_size=1, error_buffer=(-1e6, 1e6))), make(3)
    e = ReplayBufferEnsemble(full, short, sample_from_all=True)
    for _ in range(3):
        try:
            if how == "interrupted": signal.setitimer(signal.ITIMER_REAL, 0.05)
            e.sample(10, timeout=0.0 if how == "in vain" else None)  # five of each
        except (NotEnoughRows if how == "in vain" else KeyboardInterrupt):
            assert full.buffer.limiter_state()["sampled"] == 0
        else: raise AssertionError("filled a part of 5 from 3 rows")
    short.extend(TensorDict({"k": torch.arange(3, 9)}, [6]))
    batch = e.sample(10)
    assert sorted(batch["k"][1].tolist())[:3] == [0, 1, 2], "what was drawn for the part that could not be filled comes first"
    first = batch["k"][0].tolist()
    rest = full.sample(5)["k"].tolist() + []
    assert sorted(first + rest) == list(range(10)), "of the other part nothing is lost, nothing comes twice"
    assert sorted(batch["k"][1].tolist() + short.sample(4)["k"].tolist()) == list(range(9))
    full.close(), short.close()
"""


def test_an_ensemble_part_that_cannot_be_filled_loses_nothing():
    """Neither its own rows nor those that were drawn from other members for the same batch."""
    run(ENSEMBLE)


# ---- other signals -------------------------------------------------------------------------------------------------

RAISES = (
    HEAD
    + """
class Ended(Exception): pass
def end(number, frame): raise Ended(number)
signal.signal(signal.SIGTERM, end); signal.signal(signal.SIGHUP, end)
for what in ("extend", "draw"):
    say('waits')
    try:
        if what == "extend": buffer.extend(oracle.make_rows(0, 0, 4))
        else: buffer.draw(1, timeout=None)
    except Ended as e:
        say('ended', e.args[0] in (signal.SIGTERM, signal.SIGHUP))
sys.stdin.readline()
say(buffer.extend(oracle.make_rows(0, 4, 2)).tolist())
buffer.close()
"""
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_handler_that_raises_ends_the_wait_with_its_own_exception(stuck, number):
    buffer, holder = stuck
    process = subprocess.Popen(
        [sys.executable, "-c", RAISES, buffer.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for _ in range(2):
        assert process.stdout.readline() == "waits\n"
        until_it_sleeps(process.pid)
        process.send_signal(number)
        assert process.stdout.readline() == "ended True\n"
    holder.give_back_role()
    assert process.communicate("go on\n", timeout=30)[0] == "[4, 5]\n", (
        "four rows were in the ring, and are stored once"
    )
    assert process.returncode == 0
    oracle.settle(buffer)
    rows = buffer.gather(range(6))
    oracle.check_rows(rows)
    assert rows["k"].tolist() == list(range(6))


HANDLER_USES = """
import signal, sys
from shmbuf import Buffer, ConcurrentUse, segment
from tests import oracle
count = {"puts": 0, "refused": 0, "draws": 0}
buffer = Buffer.create(None, 20_000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096, timeout=60)
buffer.extend(oracle.make_rows(0, 0, 50))
buffer.keep_priorities()
theirs = 0
own, all_, seen = buffer.epoch(seed=1), buffer.consume(), []
def handler(*_):  # reads always; puts through the same handle, unless it interrupts a put
    global theirs
    oracle.check_rows(buffer.draw(5)[0]); oracle.check_rows(buffer.gather(buffer.draw(2)[1]))
    buffer.set_priorities(buffer.draw_by_priority(5)[1], 2.0)
    buffer.stats(), buffer.collectors(), len(buffer), own.draw(3)
    seen.extend(all_.draw(2)[1].tolist())
    count["draws"] += 1
    try:
        if theirs < 600:
            buffer.extend(oracle.make_rows(1, theirs, 2)); theirs += 2
            count["puts"] += 1
    except ConcurrentUse:
        count["refused"] += 1
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
signal.signal(signal.SIGALRM, handler)
k = 50
signal.setitimer(signal.ITIMER_REAL, 1e-3)
while min(count["puts"], count["draws"] // 3) < 60 and k < 15_000:
    buffer.put(oracle.make_rows(0, k, 3)); k += 3
    buffer.extend(oracle.make_rows(0, k, 60)); k += 60  # larger than its ring
    oracle.check_rows(buffer.draw(300)[0]); own.draw(20)
    seen.extend(all_.draw(20)[1].tolist())
signal.signal(signal.SIGALRM, signal.SIG_IGN)
oracle.settle(buffer)
rows = buffer.gather(range(*buffer.window))
oracle.check_rows(rows)
for who, n in ((0, k), (1, theirs)):
    assert rows["k"][rows["who"] == who].tolist() == list(range(n))
assert len(set(seen)) == len(seen)
while len(seen) < k + theirs: seen.extend(all_.draw(1000)[1].tolist())
assert sorted(seen) == list(range(k + theirs)), "consumed once, by the handler or by what it interrupted"
assert count["draws"] > 20, count
buffer.close()
"""


def test_an_alarm_handler_uses_the_buffer_that_it_interrupts():
    run(HANDLER_USES)


TRACES = (
    "import faulthandler\nfaulthandler.enable()\nfaulthandler.register(__import__('signal').SIGUSR1)\n"
    + HEAD
    + "say('waits')\nsay(buffer.extend(oracle.make_rows(0, 0, 4)).tolist())\n"
)


def test_faulthandler_dumps_a_waiting_process_which_then_goes_on(stuck):
    buffer, holder = stuck
    process = subprocess.Popen(
        [sys.executable, "-c", TRACES, buffer.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n"
    until_it_sleeps(process.pid)
    process.send_signal(signal.SIGUSR1)
    assert "most recent call first" in process.stderr.readline()
    until_it_sleeps(process.pid)
    holder.give_back_role()
    out, err = process.stdout.read(), process.stderr.read()  # not communicate: it knows nothing of what is read ahead
    assert (process.wait(30), out) == (0, "[0, 1, 2, 3]\n") and "in extend" in err, err


# ---- the end of the interpreter ------------------------------------------------------------------------------------

TIMES = {"numpy": 20, "torch": 20 if os.environ.get("SHMBUF_SOAK") else 8}  # torch takes long to end
# Each child of a process that has everything imported goes through the interpreter's whole shutdown.
MANY_ENDS = """
import os, sys, time
{imports}
for i in range({times}):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 2), os.close(read), os.close(write)
        break
    os.close(write)
    with open(read) as f: said = f.read()
    status = os.waitpid(pid, 0)[1]
    assert (status, said) == (0, ""), (i, status, said)
else:
    sys.exit()
{body}
"""
LIVE = """
import threading
from shmbuf import Buffer, segment
from tests import oracle
buffer, late = Buffer.attach(sys.argv[1]), Buffer.attach(sys.argv[1])
unnamed = Buffer.create(None, 1000, schema=oracle.SCHEMA, ring_bytes=4096)
empty = Buffer.create(None, 1000, schema=oracle.SCHEMA, ring_bytes=4096, drain="caller")
rows = buffer.draw(5, timeout=10)
tickets = [b.put(oracle.make_rows(99, 0, 3)) for b in (late, unnamed)]
readers = buffer.epoch(), buffer.consume(), buffer.epoch(shared=True)
readers[0].draw(3)
cycle = [buffer]; cycle.append(cycle)
def draw():
    while True: buffer.draw(200)
def put():
    k = 3
    while True: unnamed.put(oracle.make_rows(99, k, 5)); k += 5
def wait(): empty.draw(1, timeout=None)
def consume(): empty.consume().draw(1, timeout=None)
def run(call, barrier): barrier.wait(), call()
for call in (draw, put, wait, consume) if sys.argv[2:] else ():
    barrier = threading.Barrier(2)
    threading.Thread(target=run, args=(call, barrier), daemon=True).start()
    barrier.wait()
"""
LIVE_TORCH = """
rb = shmbuf.attach(sys.argv[1], batch_size=16)
batch = rb.sample(timeout=10)
view, out = batch["payload"][2:], rb.sample(out=rb.sample())
mine = TensorDictReplayBuffer(storage=ShmStorage(100), batch_size=4, sampler=PrioritizedSampler())
ticket = mine.put(TensorDict({"a": torch.zeros(3, 2), "b": torch.arange(3)}, [3]))
mine.wait_rows(3, timeout=10)
kept = mine.sample(timeout=10), iter(mine), mine.storage, mine.sampler
"""


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("imports", "body", "threads"),
    [
        ("import numpy, shmbuf\nshmbuf.Buffer", LIVE, []),
        ("import numpy, shmbuf\nshmbuf.Buffer", LIVE, ["threads"]),
        (
            "import shmbuf, torch\nfrom tensordict import TensorDict\n"
            "from shmbuf import PrioritizedSampler, ShmStorage, TensorDictReplayBuffer",
            LIVE_TORCH,
            [],
        ),
    ],
    ids=["numpy", "daemon threads in calls", "torch"],
)
def test_the_interpreter_ends_in_the_middle_of_everything(unique_name, imports, body, threads):
    """Live handles, tickets, readers, tensors and threads in calls: exit status 0, no word on stderr, the buffer goes on."""
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 10))
        times = TIMES["torch" if body is LIVE_TORCH else "numpy"]
        run(MANY_ENDS.format(imports=imports, body=body, times=times), unique_name, *threads, seconds=200)
        oracle.settle(buffer)
        lo, hi = buffer.window
        oracle.check_rows(buffer.gather(range(lo, hi)))
        assert hi == 10 + 3 * times * (body is LIVE), "what was put is stored"
        wait_for(lambda: not any(m["alive"] for m in buffer.members() if m["pid"] != os.getpid()), "the kernel")
        assert len(buffer.extend(oracle.make_rows(0, 10, 2))) == 2
    destroy(unique_name)


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
        assert run(AT_EXIT, unique_name) == "leaves\n"
        oracle.settle(buffer)
        assert buffer.write_count == 13
        assert [c["state"] for c in buffer.collectors() if c["pid"] != buffer.members()[0]["pid"]] in ([], ["closed"])
    destroy(unique_name)
