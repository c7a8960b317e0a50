"""Class HANG of cases from public bug trackers: deadlocks, lost wake-ups, waiting. Each test is named after its case."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughRows, RateLimiter, StorageLost, destroy, segment
from tests import oracle
from tests.process import workers
from tests.process.test_cases_info import family
from tests.process.test_signals import until_it_sleeps
from tests.unit.helpers import numbers, stuck_drainer

SOAK = bool(os.environ.get("SHMBUF_SOAK"))
K = {"k": "int64"}

# ---- B060: the drainer dies while producers wait -------------------------------------------------------------------

DRAINER = """
import sys
from shmbuf import Buffer
from shmbuf._extension import native
buf = Buffer.attach(sys.argv[1])
assert native.arm("txn_copied=stop@1")
print("here", flush=True)
sys.stdin.readline()
while not buf.drain():  # stops itself inside its first transaction, with the writer role
    pass
"""


@contextlib.contextmanager
def stopped_drainer(name: str, start, rows: dict):
    """A process that was SIGSTOPped while it stores these rows, which somebody else put."""
    with Buffer.attach(name) as other:
        p = start(DRAINER, name, SHMBUF_NATIVE="failpoints")
        assert p.stdout.readline() == "here\n", p.stderr.read()
        other.put(rows)
        p.stdin.write("\n")
        p.stdin.flush()
        assert os.waitid(os.P_PID, p.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED
        yield p


def put_for_ever(name: str, who: int, n: int) -> None:
    with Buffer.attach(name) as buffer:
        for k in range(n):
            assert buffer.put(oracle.make_rows(who, k, 1), timeout=None).rows == 1


def test_b060_the_drainer_is_killed_while_four_producers_wait(name, start):
    """Documented: whoever waits takes the free role. Without a time: put(timeout=None)."""
    with Buffer.create(name, 1000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096, max_collectors=8) as buffer:
        with stopped_drainer(name, start, oracle.make_rows(0, 0, 1)) as drainer, family() as producers:
            pids = [producers.fork(put_for_ever, name, who, 100) for who in range(1, 5)]
            for pid in pids:
                until_it_sleeps(pid)
            full = [c for c in buffer.collectors() if c["pid"] in pids]
            assert len(full) == 4 and all(c["ring_used"] > 4096 - 256 for c in full), "each waits for room in its ring"
            assert len(buffer) == 0
            drainer.kill()
            assert producers.wait_all() == [0] * 4
        acks = np.array([1, 100, 100, 100, 100])
        oracle.settle(buffer)
        oracle.check(buffer, acks, 0, whole=True)
    destroy(name)


@pytest.mark.parametrize("what", ["put", "extend", "draw", "wait_rows"])
def test_b060_close_from_another_thread_ends_every_wait(name, what):
    with Buffer.create(name, 100, schema=K, drain="caller", ring_bytes=4096) as keeper, stuck_drainer(name):
        buffer, ended, tid = Buffer.attach(name), [], []
        calls = {
            "put": lambda: [buffer.put({"k": np.zeros(1, "i8")}, timeout=None) for _ in range(1000)],
            "extend": lambda: buffer.extend({"k": np.zeros(1, "i8")}, timeout=None),
            "draw": lambda: buffer.draw(1, timeout=None),
            "wait_rows": lambda: buffer.wait_rows(1, timeout=None),
        }

        def run() -> None:
            tid.append(threading.get_native_id())
            try:
                calls[what]()
            except Exception as e:
                ended.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        while not tid:
            thread.join(0.001)
        until_it_sleeps(f"self/task/{tid[0]}")
        buffer.close()
        thread.join(30)
        assert not thread.is_alive() and isinstance(ended[0], StorageLost) and "closed" in str(ended[0])
        assert len(keeper) == 0
    destroy(name)


# ---- B062: a lock whose owner died ---------------------------------------------------------------------------------

HOLDER = """
import os, sys
from shmbuf import Buffer, segment
from shmbuf._extension import native
name, lock = sys.argv[1:]
if lock == "presence": keep = Buffer.attach(name)
else:
    keep = segment.attach(name, presence=False)
    if lock == "role": assert keep.try_take_role()
    if lock == "build": assert keep.try_lock_build()
    if lock == "destroy":
        fd = segment._open("/" + segment.file_name(name), False)
        assert native.lock_byte(fd, native.LOCK_DESTROY, True)
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("lock", ["presence", "role", "build", "destroy"])
def test_b062_the_holder_of_a_lock_is_killed(name, start, lock):
    with Buffer.create(name, 100, schema=None if lock == "build" else K, drain="caller", timeout=20) as buffer:
        p = start(HOLDER, name, lock)
        assert p.stdout.readline() == "holds\n", p.stderr.read()
        p.kill()
        p.wait()
        assert buffer.extend({"k": np.arange(3)}).tolist() == [0, 1, 2]
        assert numbers(buffer) == [0, 1, 2]
    destroy(name)  # not forced


STEPS = """
import sys
import numpy as np
from shmbuf import Buffer, RateLimiter
from shmbuf._extension import native
name, point = sys.argv[1:]
buf, other = Buffer.attach(name), Buffer.attach(name)
late = point.startswith("tree")  # of who updates, not of the writer
assert late or native.arm(point + "=kill@1")
buf.extend({"k": np.arange(100)})
buf.keep_priorities(1.0, 0.0)
assert not late or native.arm(point + "=kill@1")
buf.set_priorities(range(100), np.arange(100) % 7 + 1.0)
buf.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e9, 1e9)))
buf.draw_by_priority(8)
buf.epoch(shared=True).draw(8)
other.extend({"k": np.arange(100, 103)})
other.close()
buf._handle.sweep()
print("never fired")
"""
LOCKED = [
    *("claim_locked", "sweep_locked", "build_locked", "role_taken"),
    *("tree_leaves_set", "tree_children_read", "tree_level_done", "limiter_taken", "epoch_claimed"),
]


@pytest.mark.parametrize("point", LOCKED)
def test_b062_killed_inside_registration_role_build_tree_limiter_and_epoch(name, start, point):
    """Documented: the tree at the latest a second after an updater died, here at once by scrub(). test_failpoints.py has the
    other steps, and a second kill."""
    schema = None if point == "build_locked" else K
    with Buffer.create(name, 1000, schema=schema, drain="caller", max_collectors=4, timeout=20) as buffer:
        p = start(STEPS, name, point, SHMBUF_NATIVE="failpoints")
        out, err = p.communicate(timeout=60)
        assert (p.returncode, out, err) == (-signal.SIGKILL, "", "")
        ids = buffer.extend({"k": np.arange(1000, 1003)})
        buffer.keep_priorities(1.0, 0.0)
        buffer._handle.scrub()
        buffer._handle.sweep()
        lo, hi = buffer.window
        assert ids.tolist() == [hi - 3, hi - 2, hi - 1] and buffer._handle.check_tree() == 0
        p = buffer.priorities(range(lo, hi))
        assert buffer._get("priorities")["sum"] == p.sum() > 0, "the total is the sum of the leaves"
        assert buffer.set_priorities(ids, 5.0).all()
        buffer.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e9, 1e9)))
        assert len(buffer.draw_by_priority(8)[1]) == 8 and len(buffer.epoch(shared=True).draw(3)[1]) == 3
        assert all(c["state"] == "alive" or c["ring_used"] == 0 for c in buffer.collectors())
        with Buffer.attach(name) as other:
            assert other.extend({"k": np.zeros(1, "i8")}).tolist() == [hi]
    destroy(name)


# ---- B064: interpreter exit with a surviving child -----------------------------------------------------------------

OUTLIVED = """
import os, sys, time
import numpy as np
from shmbuf import Buffer
name = None if sys.argv[1] == "unnamed" else sys.argv[1]
buf = Buffer.create(name, 10, schema={"k": "int64"}, drain=sys.argv[2])
buf.extend({"k": np.arange(3)})
child = os.fork()
if not child:
    if sys.argv[3] == "used": buf.extend({"k": np.arange(3)})
    print(os.getpid(), buf.name, flush=True)
    time.sleep(600)
    os._exit(0)
os.read(sys.stdin.fileno(), 1)
"""


@pytest.mark.parametrize(
    ("drain", "use"), [("thread", "unused"), ("thread", "used"), ("process", "unused"), ("caller", "used")]
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_b064_the_parent_ends_while_its_forked_child_sleeps(name, start, named, drain, use):
    parent = start(OUTLIVED, name if named else "unnamed", drain, use)
    child, called = parent.stdout.readline().split()
    try:
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(30) == 0  # the child sleeps for ten minutes
        assert os.path.exists(f"/proc/{child}/stat")
        assert (called in segment.names()) == named
        if named and use == "unused":
            attached = [m["pid"] for m in look(name) if m["alive"]]
            assert int(child) not in attached and parent.pid not in attached
            destroy(name)  # not forced: the child holds nothing of its parent's
    finally:
        os.kill(int(child), signal.SIGKILL)
    assert parent.stderr.read() == ""


def look(name: str) -> list[dict]:
    with contextlib.closing(segment.attach(name, watch=True)) as handle:
        return handle.members()


CHILD_EXITS = """
import os, sys
import numpy as np
from shmbuf import Buffer
buf = Buffer.create(None, 10_000, schema={"k": "int64"}, drain=sys.argv[1])
buf.extend({"k": np.arange(3)})
for _ in range(3):
    if not os.fork(): sys.exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert buf.extend({"k": np.arange(100)}).size == 100
print(len(buf), len(Buffer.attach(buf.name)))
"""


@pytest.mark.parametrize("drain", ["thread", "process", "caller"])
def test_b064_a_childs_exit_prints_nothing_and_changes_nothing(start, drain):
    p = start(CHILD_EXITS, drain)
    out, err = p.communicate(timeout=60)
    assert (p.returncode, out, err) == (0, "303 303\n", "")


# ---- B065: asking for more than there is ---------------------------------------------------------------------------


def test_b065_asking_for_more_than_there_is(name):
    with Buffer.create(name, 100, schema=K, drain="caller") as buffer:
        buffer.keep_priorities(1.0, 0.0)
        for call in (
            lambda: buffer.draw(8),
            lambda: buffer.draw(8, timeout=0.2),
            lambda: buffer.draw_by_priority(8),
            lambda: buffer.epoch().draw(8),
            lambda: buffer.consume().draw(8),
        ):
            with pytest.raises(NotEnoughRows, match="empty"):
                call()
        with pytest.raises(NotEnoughRows, match=r"no rows after 0\.2 s"):
            buffer.wait_rows(8, timeout=0.2)
        buffer.extend({"k": np.arange(3)})
        with pytest.raises(NotEnoughRows, match="holds 3 rows, 8 are needed"):
            buffer.newest(8, timeout=0.2)
        with pytest.raises(NotEnoughRows, match="holds 3 rows, 8 are needed"):
            buffer.wait_rows(8, timeout=0.2)
        for rows, ids in (buffer.draw(8), buffer.draw_by_priority(8)[:2]):
            assert len(ids) == len(rows["k"]) == 8, "with replacement: as many as asked for"
        epoch = buffer.epoch()
        _, ids = epoch.draw(8)
        assert sorted(ids) == [0, 1, 2] and epoch.ran_out and epoch.at_end, "documented, and it says so"
        with pytest.raises(NotEnoughRows):
            buffer.epoch(drop_last=True).draw(8, timeout=0.2)
    destroy(name)


# ---- B067: all buffers are "in flight" -----------------------------------------------------------------------------


def test_b067_what_readers_keep_stops_nobody(name, tmp_path):
    """10,000 kept batches beside collectors at full speed (CI: 2,000)."""
    acks, stop = oracle.Acks(tmp_path / "acks"), workers.ForkedEvent()
    with Buffer.create(name, 5000, schema=oracle.SCHEMA, max_collectors=4) as buffer, family() as collectors:
        for who in range(2):
            collectors.fork(workers.collect, name, who, acks.path, 24, stop, who)
        kept, figures = [], []
        for _ in range(10_000 if SOAK else 2000):
            rows, _ = buffer.draw(8, timeout=30)
            kept.append(rows)
            figures.append(hash(rows["payload"].tobytes()))
        before = acks.counts[:2].copy()
        while (acks.counts[:2] < before + 2 * 5000).any():  # each fills the buffer twice more, all batches kept
            oracle.check_rows(buffer.draw(8)[0])
        stop.set()
        assert collectors.wait_all() == [0, 0]
        for rows, was in zip(kept, figures, strict=True):
            oracle.check_rows(rows)
            assert hash(rows["payload"].tobytes()) == was, "a kept batch has changed"
        oracle.settle(buffer)
        s = oracle.check(buffer, acks.counts, 0)
        assert s["dropped_rows"] == s["skipped_rows"] == 0
    destroy(name)


# ---- B068: everything in one process -------------------------------------------------------------------------------

ALONE = """
import sys
import numpy as np
from shmbuf import Buffer
for i in range(int(sys.argv[2])):
    with Buffer.create(None, 1000, drain=sys.argv[1], ring_bytes=1 << 16, max_collectors=4) as buf:
        for k in range(0, 100, 10): t = buf.put({"k": np.arange(k, k + 10)})
        t.wait()
        rows, ids = buf.draw(32)
        assert (rows["k"] == ids).all() and len(buf) == 100
print("done")
"""


@pytest.mark.parametrize("drain", ["caller", "thread"])
def test_b068_create_put_sync_sample_in_one_process(start, drain):
    """1,000 times (CI: 100); no separate writer is started."""
    p = start(ALONE, drain, 1000 if SOAK else 100)
    out, err = p.communicate(timeout=100)
    assert (p.returncode, out, err) == (0, "done\n", "")


def test_b068_one_thread_with_a_ring_that_is_full(name):
    """More than the ring holds, and nobody else: the put drains by itself."""
    with Buffer.create(name, 10_000, schema=K, drain="caller", ring_bytes=4096) as buffer:
        for i in range(1000):
            buffer.put({"k": np.arange(i, i + 1)}, timeout=None)
        buffer.drain()
        assert numbers(buffer) == list(range(1000))
    destroy(name)
