"""Hostile places: a whole run (`tests.process.workload`) inside each works to its end, or the first call that cannot says why.

A place that the kernel does not let us make is skipped with the kernel's reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, TooManyCollectors, destroy, memory, segment
from tests import oracle
from tests.process import workers, workload
from tests.unit.helpers import stuck_drainer

STRANGER = 54321  # a uid and gid that nobody has
EMPTY_PROC = 'mount -t tmpfs -o size=64k tmpfs /proc && exec "$@"'
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
OWN_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def sh(script: str, *before: str) -> list[str]:
    return [*before, "sh", "-c", script, "sh"]


def possible(*inside: str) -> None:
    """Skips unless the kernel lets us have this place."""
    done = subprocess.run([*inside, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(inside[:3])}: {done.stderr.strip()}")


def needs_root(what: str) -> None:
    if os.getuid():
        pytest.skip(f"setuid to {what}: only root may")


def python_in(inside: list[str], code: str, *arguments: object, rc: int = 0, **how) -> str:
    done = subprocess.run(
        [*inside, sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=90, **how
    )
    assert done.returncode == rc, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


# ---- few descriptors, none for stdio, no threads, no /proc ----------------------------------------------------------


@pytest.mark.parametrize("limit", [64, 16])
def test_few_descriptors(unique_name, tmp_path, limit):
    workload.run(unique_name, tmp_path, lambda role: sh(f'ulimit -n {limit}; exec "$@"'))


def test_so_few_descriptors_that_a_handle_finds_none_is_said(unique_name):
    code = (
        "import os, sys, resource\nfrom shmbuf import Buffer, TooManyOpenFiles\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))) + 1,) * 2)\n"
        "try:\n    while True: os.dup(0)\nexcept OSError: pass\n"
        "try:\n    Buffer.attach(sys.argv[1])\nexcept TooManyOpenFiles as e:\n    print('ulimit -n' in str(e))\n"
    )
    with Buffer.create(unique_name, 10, schema=oracle.SCHEMA, drain="caller"):
        assert python_in([], code, unique_name) == "True"
    destroy(unique_name)


def test_stdin_stdout_and_stderr_closed(unique_name, tmp_path):
    workload.run(unique_name, tmp_path, lambda role: sh('exec "$@" <&- >&- 2>&-'))


WRITES_TO_STDIO = """
import os, sys
from shmbuf import Buffer
buffer = Buffer.attach(sys.argv[1])
for fd in (0, 1, 2):  # as any C library, or a child process, does with its messages
    try:
        os.write(fd, b"warning: something is deprecated" * 8)
    except OSError:
        pass
buffer.close()
"""


def test_what_is_written_to_a_closed_stderr_does_not_end_up_in_the_buffer(unique_name):
    """The lowest free descriptor is 0, 1 or 2: the segment must not get it."""
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(0, 0, 50))
    python_in(sh('exec "$@" <&- >&- 2>&-'), WRITES_TO_STDIO, unique_name)
    with Buffer.attach(unique_name) as buffer:
        oracle.check_rows(buffer.gather(range(50)))
        assert buffer.extend(oracle.make_rows(0, 50, 1)).tolist() == [50]
    destroy(unique_name)


NO_THREADS = """
import os, resource, sys
from shmbuf import Buffer
from tests import oracle
from tests.process.workload import become
become(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
with Buffer.create(None, 1000, schema=oracle.SCHEMA, ring_bytes=1 << 14, timeout=60) as buffer:
    roles = [m["roles"] for m in buffer.members()]
    assert roles == [["creator"]], f"claims a thread that could not be started: {roles}"
    k = 0
    while k < 3000:  # 20 rings full
        k += buffer.put(oracle.make_rows(0, k, 10)).rows
    assert buffer.extend(oracle.make_rows(0, k, 5)).tolist() == list(range(k, k + 5))
    oracle.check_rows(buffer.draw(50)[0])
try:
    Buffer.create(None, 1000, schema=oracle.SCHEMA, drain="process")
except OSError as e:
    print(e)
print([n for n in os.listdir("/dev/shm") if n.startswith("shmbuf.54321.")])
"""


def test_no_thread_can_be_started_for_the_drain_so_callers_help(unique_name):
    needs_root(f"{STRANGER}, whose processes can be limited")
    said = python_in([], NO_THREADS).splitlines()
    assert "Resource temporarily unavailable" in said[0] and said[1] == "[]", said


def test_without_proc_all_but_the_creator_work(unique_name, tmp_path):
    possible(*sh(EMPTY_PROC, "unshare", "-m"))
    workload.run(unique_name, tmp_path, lambda role: [] if role == "create" else sh(EMPTY_PROC, "unshare", "-m"))


def test_without_proc_creating_says_what_is_missing(unique_name):
    """The name is given through /proc/self/fd."""
    possible(*sh(EMPTY_PROC, "unshare", "-m"))
    code = (
        "import os, sys\nfrom shmbuf import Buffer\ntry:\n    Buffer.create(sys.argv[1], 10)\nexcept OSError as e:\n"
        "    print(type(e).__name__, e)\nprint(len([n for n in os.listdir('/dev/shm') if n.endswith(sys.argv[1])]))\n"
    )
    error, left = python_in(sh(EMPTY_PROC, "unshare", "-m"), code, unique_name).splitlines()
    assert left == "0"
    assert "/proc is not mounted" in error and not error.startswith("FileNotFoundError"), error


# ---- a small /dev/shm ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_shm():
    possible(*sh(SMALL_SHM, "unshare", "-m"))
    return sh(SMALL_SHM, "unshare", "-m")


def test_a_whole_run_in_64_megabytes(small_shm, unique_name, tmp_path):
    finished = workload.start("whole", unique_name, tmp_path, inside=small_shm)
    workload.finish([finished], tmp_path)


FULL = """
import os, sys, threading
import numpy as np
from shmbuf import Buffer, NotEnoughMemory, destroy, memory, segment
from tests import oracle
def free(): return memory.shm_free()
def fill():
    with open("/dev/shm/filler", "wb") as f:
        for piece in (1 << 20, 1 << 12):
            try:
                while True: os.posix_fallocate(f.fileno(), os.fstat(f.fileno()).st_size, piece)
            except OSError: pass
    assert free() == 0
def empty(): os.unlink("/dev/shm/filler")
def refused(call, *words):
    try: call()
    except NotEnoughMemory as e: assert all(w in str(e) for w in words), e
    else: raise AssertionError("did not raise")
rows = lambda k, n=5: oracle.make_rows(0, k, n)
"""
FULL_AT_EVERY_CALL = (
    FULL
    + """
size = 0
def flat():
    now = sum(os.stat("/dev/shm/" + n).st_blocks for n in os.listdir("/dev/shm") if n != "filler")
    assert now == size, (now, size)
for drain in ("thread", "caller"):
    fill()
    refused(lambda: Buffer.create("new", 10, drain=drain), "needs", "bytes has 0 left", "--shm-size"); flat()
    refused(lambda: Buffer.create("new", 10, schema=oracle.SCHEMA, drain=drain), "bytes has 0 left"); flat()
    refused(lambda: Buffer.create(None, 10, drain=drain), "bytes has 0 left"); flat()
    empty()
    with Buffer.create("b", 5000, ring_bytes=1 << 20, drain=drain) as b, Buffer.attach("b") as c:
        fill()
        for h in (b, c):  # the first put builds
            refused(lambda: h.put(rows(0)), "5,000 rows", "bytes has 0 left", "--shm-size")
        assert b.schema is None and len(b) == 0
        empty()
        b.extend(rows(0))
        b.keep_priorities()
        fill()
        for _ in range(3):  # the claim of a ring
            refused(lambda: c.put(rows(5)), "no 1,048,576 bytes left for this collector's ring", "Nothing was put")
        k = 5
        while k < 15000:  # three times round
            b.put(rows(k, 50)); k += 50
        b.extend(rows(k))
        oracle.check_rows(b.draw(100)[0])
        oracle.check_rows(c.draw(100)[0])
        ids = c.draw_by_priority(64)[1]
        assert c.set_priorities(ids, 2.0).all()
        assert len(c.consume().draw(5000)[1]) == 5000 and len(b.epoch().draw(100)[1]) == 100
        d = Buffer.attach("b"); d.draw(5); d.close()
        b.empty(); b.extend(rows(k + 5, 50))
        assert len(c) == 50
        empty()
        c.extend(rows(k))
        fill()
    destroy("b")
    size = 0
    empty()
    assert os.listdir("/dev/shm") == []
"""
)


def test_dev_shm_is_full_at_each_kind_of_call(small_shm):
    python_in(small_shm, FULL_AT_EVERY_CALL)


CLAIMS_BESIDE_A_FILLER = (
    FULL
    + """
b = Buffer.create("b", 10_000, schema=oracle.SCHEMA, ring_bytes=4 << 20, max_collectors=64)
b.extend(rows(0))
stop, said = threading.Event(), {"ok": 0, "no": 0}
def others():
    while not stop.is_set():
        fill_some()
def fill_some():
    with open("/dev/shm/filler", "wb") as f:
        try:
            while not stop.is_set(): os.posix_fallocate(f.fileno(), os.fstat(f.fileno()).st_size, 1 << 18)
        except OSError: pass
        os.ftruncate(f.fileno(), 0)
t = threading.Thread(target=others); t.start()
k = 5
try:
    while min(said.values()) < 30:
        with Buffer.attach("b") as c:
            try:
                c.put(rows(k)); k += 5; said["ok"] += 1
            except NotEnoughMemory as e:
                assert "for this collector's ring" in str(e), e
                said["no"] += 1
finally:
    stop.set(); t.join()
oracle.settle(b)
assert b.write_count == k
stored = b.gather(range(k))
oracle.check_rows(stored)
assert sorted(stored["k"].tolist()) == list(range(k))
b.close(); destroy("b")
"""
)


def test_dev_shm_fills_up_while_collectors_claim_rings(small_shm):
    """Whoever claims gets all of the ring, or an error: no SIGBUS, whatever is free in the middle of it."""
    python_in(small_shm, CLAIMS_BESIDE_A_FILLER)


# ---- other users ---------------------------------------------------------------------------------------------------


def test_a_whole_run_of_two_users(unique_name, tmp_path):
    """Created by one, with mode 0660 and a group; collectors, learner and inspector are another."""
    needs_root("another user")
    tmp_path.chmod(0o777)
    acks = oracle.Acks(tmp_path / "acks", 8).counts
    os.chmod(tmp_path / "acks", 0o666)
    for at in (*tmp_path.parents,)[:3]:
        at.chmod(at.stat().st_mode | 0o011)
    watchers, owner = [], (os.getuid(), STRANGER)
    with Buffer.create(unique_name, workload.CAPACITY, **workload.CREATE, mode=0o660, group=STRANGER) as buffer:
        watchers = [workload.start(role, unique_name, tmp_path, *owner) for role in ("learn", "look")]
        collectors = [workload.start(f"collect{who}", unique_name, tmp_path, *owner) for who in (0, 1)]
        workload.finish(collectors, tmp_path)
        (tmp_path / workload.STOP).touch()
        workload.finish(watchers, tmp_path)
        oracle.settle(buffer)
        oracle.check(buffer, acks, 0, streams=True)
        assert {c["uid"] for c in buffer.collectors()} <= {STRANGER}
    destroy(unique_name)


LOOKS = """
import sys
from shmbuf import Buffer, NotEnoughRows
from tests import oracle
from tests.process.workload import become
become(54321)
def no(call):
    try: call()
    except (PermissionError, ValueError) as e: print(type(e).__name__, str(e).replace("\\n", " "))
    else: print("it let us")
no(lambda: Buffer.attach(sys.argv[1], owner=0))
try:
    b = Buffer.attach(sys.argv[1], owner=0, readonly=True)
except PermissionError as e:
    print("PermissionError", e)
    sys.exit()
oracle.check_rows(b.draw(20)[0])
oracle.check_rows(b.gather(range(5)))
oracle.check_rows(b.newest(3)[0])
assert len(b) == 20 and b.stats()["size"] == 20 and b.collectors() and b.members()
no(lambda: b.put(oracle.make_rows(0, 0, 1)))
no(lambda: b.destroy(force=True))
no(lambda: b.set_priorities([1], 1.0))
no(lambda: b.consume().draw(1))
print(len(b.epoch().draw(20)[1]))
"""


@pytest.mark.parametrize(("mode", "may_look"), [(0o644, True), (0o600, False)])
def test_another_user_looks_or_is_told_that_he_may_not(unique_name, mode, may_look):
    """World access has to be given by hand (the constructor refuses it), and then it is to look only."""
    needs_root("another user")
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(0, 0, 20))
        os.chmod(segment.path_of(unique_name), mode)
        said = python_in([], LOOKS, unique_name).splitlines()
        path = segment.path_of(unique_name)
        assert said[0].startswith(f"PermissionError {path}: uid 54321 may not open it (mode"), said[0]
        if may_look:
            assert "look with readonly=True" in said[0]
            assert all("read-only" in s for s in said[1:5]) and said[5:] == ["20"], said
        else:
            assert said[1:] == [f"PermissionError {path}: uid 54321 may not open it (mode 0o600)"], said
        assert len(buffer.extend(oracle.make_rows(0, 20, 3))) == 3
    destroy(unique_name)


# ---- limits on memory ----------------------------------------------------------------------------------------------


def own_cgroup() -> Path:
    """A memory cgroup (v2) under this process's own; skips where there is none to be had."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((x[3:] for x in lines if x.startswith("0::")), None)
    at = Path("/sys/fs/cgroup") / (path or "/").lstrip("/")
    if path is None or not (at / "memory.max").exists():
        pytest.skip(f"{at}/memory.max: no such file (no cgroup v2 with a memory controller here)")
    child = at / f"shmbuf-test-{os.getpid()}"
    try:
        child.mkdir()
        (child / "memory.max").write_text(str(256 << 20))
    except OSError as e:
        if child.exists():
            child.rmdir()
        pytest.skip(str(e))
    return child


TOO_LARGE_FOR_ITS_CGROUP = """
import sys
from shmbuf import Buffer, NotEnoughMemory
try:
    Buffer.create(None, 300_000, schema={"x": ("uint8", (1000,))})
except NotEnoughMemory as e:
    print(e)
Buffer.create(None, 10_000, schema={"x": ("uint8", (1000,))}).close()
"""


def test_a_memory_cgroup_says_no_before_the_oom_killer(unique_name, tmp_path):
    at = own_cgroup()
    inside = sh(f'echo $$ > {at}/cgroup.procs && exec "$@"')
    try:
        said = python_in(inside, TOO_LARGE_FOR_ITS_CGROUP)
        assert "the memory cgroup has" in said and "300,000 rows" in said and "limit" in said, said
        workload.finish([workload.start("whole", unique_name, tmp_path, inside=inside)], tmp_path)
        assert "oom_kill 0" in (at / "memory.events").read_text()
    finally:
        at.rmdir()


LIMITED = """
import resource, sys
import numpy as np
from shmbuf import Buffer, destroy
from tests import oracle
def size(field): return int(open("/proc/self/statm").read().split()[field]) * 4096
kind, field = {"AS": (resource.RLIMIT_AS, 0), "DATA": (resource.RLIMIT_DATA, 5)}[sys.argv[2]]
resource.setrlimit(kind, (size(field) + (4 << 20), resource.RLIM_INFINITY))  # less than a thread's stack
def said(call):
    try: call()
    except MemoryError as e: print(type(e).__name__, e)
    else: print("ok")
said(lambda: Buffer.attach(sys.argv[1]).close())
with Buffer.create(None, 1000, schema=oracle.SCHEMA, max_collectors=8, ring_bytes=1 << 14, timeout=60) as small:
    for k in range(0, 3000, 10): small.put(oracle.make_rows(0, k, 10))
    small.extend(oracle.make_rows(0, 3000, 5))
    said(lambda: small.draw(1_000_000))
    oracle.check_rows(small.draw(100)[0])
    said(lambda: small.set_priorities(np.zeros(1, np.int64), 1.0) if small.keep_priorities() else None)
"""


@pytest.mark.parametrize("kind", ["AS", "DATA"])
def test_an_address_space_or_data_limit(unique_name, kind):
    """What does not fit is a MemoryError that names the limit; what fits works, by helping if no thread has room for its stack."""
    with Buffer.create(unique_name, 100_000, schema={"x": ("uint8", (1000,))}, drain="caller") as buffer:
        attach, draw, rest = python_in([], LIMITED, unique_name, kind).splitlines()
        assert draw.startswith(("MemoryError", "NotEnoughMemory", "_ArrayMemoryError")) and rest == "ok"
        if kind == "DATA":  # shared memory does not count
            assert attach == "ok"
        else:
            assert attach.startswith("NotEnoughMemory") and "RLIMIT_AS" in attach, attach
        buffer.extend({"x": np.zeros((3, 1000), np.uint8)})
    destroy(unique_name)


# ---- pid namespaces ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_pids():
    possible(*OWN_PIDS)
    return OWN_PIDS


def test_a_whole_run_where_everybody_is_pid_1(own_pids, unique_name, tmp_path):
    workload.run(unique_name, tmp_path, lambda role: own_pids)


HOLDS = """
import os, signal, sys
from shmbuf import Buffer, segment
from tests import oracle
buffer = Buffer.attach(sys.argv[1])
buffer.put(oracle.make_rows(int(sys.argv[2]), 0, 5))
if sys.argv[3] == "role":
    handle = segment.attach(sys.argv[1])
    assert handle.try_take_role()
print(os.getpid(), flush=True)
signal.pause()
"""


def holder(inside: list[str], name: str, who: int, what: str = "") -> subprocess.Popen:
    command = [*inside, sys.executable, "-c", HOLDS, name, str(who), what]
    p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "1\n"
    return p


def test_the_same_pid_in_two_namespaces_is_not_mistaken(own_pids, unique_name):
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as buffer:
        first, second = (holder(own_pids, unique_name, who) for who in (0, 1))
        states = lambda: [(c["pid"], c["state"]) for c in buffer.collectors()]  # noqa: E731
        try:
            assert states() == [(1, "alive")] * 2
            first.kill()
            first.wait()
            workload.wait_for(lambda: states()[0][1] == "dead", "the kernel to let go of the killed one")
            assert states() == [(1, "dead"), (1, "alive")]
            assert [m["alive"] for m in buffer.members() if m["pid"] == 1] == [False, True]
            assert buffer.drain() and len(buffer) == 10, "both one's rows are stored"
            assert buffer._handle.sweep() == 1 and states() == [(1, "alive")]
        finally:
            for p in (first, second):
                p.kill()
                p.wait()
        workload.wait_for(lambda: states() == [(1, "dead")], "the second")
        buffer._handle.sweep()
        assert states() == []
    destroy(unique_name)


def test_a_writer_of_another_pid_namespace_is_not_taken_for_our_process_of_that_pid(own_pids, unique_name):
    """Its pid 1 is not ours, so what /proc says here about pid 1 is not about it."""
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller", timeout=0.2) as buffer:
        there = holder(own_pids, unique_name, 0, "role")
        try:
            with pytest.raises(TimeoutError) as e:
                buffer.extend(oracle.make_rows(1, 0, 3))
            assert "another pid namespace" in str(e.value), e.value
            assert "is in state" not in str(e.value) and "is gone" not in str(e.value)
        finally:
            there.kill()
            there.wait()
        assert len(buffer.extend(oracle.make_rows(1, 3, 3), timeout=30)) == 3
        assert buffer.write_count == 11
    destroy(unique_name)


def test_a_learner_by_priority_that_comes_before_the_first_rows_waits_for_them(unique_name):
    """The first put has built the buffer; the transaction that gives rows priorities is still to come."""
    with Buffer.create(unique_name, 100, drain="caller") as buffer, Buffer.attach(unique_name) as learner:
        learner.keep_priorities()
        buffer.put(oracle.make_rows(0, 0, 5))
        rows, ids, _ = learner.draw_by_priority(8, timeout=30)
        oracle.check_rows(rows)
        assert ids.max() < 5
    destroy(unique_name)


# ---- many collectors that come and go ------------------------------------------------------------------------------

COMERS = 20_000 if os.environ.get("SHMBUF_SOAK") else 300  # more than the table of members has entries
AT_ONCE = 4


def come_and_go(name: str, who: int, acks_path: str) -> None:
    acks = oracle.Acks(acks_path, COMERS + 1).counts
    buffer = Buffer.attach(name)
    for n in (1, 7, 3):
        acks[who] += buffer.put(oracle.make_rows(who, int(acks[who]), n), timeout=60).rows
    if who % 3 == 0:
        buffer.close()
    elif who % 3 == 1:
        os.kill(os.getpid(), 9)
    os._exit(0)  # with the ring in use, and without a word


@pytest.mark.timeout(max(120, COMERS // 10))
@pytest.mark.parametrize("drain", ["thread", "caller"])
def test_collectors_come_and_go(unique_name, tmp_path, drain):
    acks = oracle.Acks(tmp_path / "acks", COMERS + 1)
    used = lambda: os.stat(segment.path_of(unique_name)).st_blocks * 512  # noqa: E731
    with Buffer.create(
        unique_name, COMERS * 11, schema=oracle.SCHEMA, ring_bytes=1 << 16, max_collectors=AT_ONCE, drain=drain
    ) as buffer:
        empty, running, most = used(), {}, 0
        for who in range(COMERS):
            running[workers.fork(come_and_go, unique_name, who, acks.path)] = who
            if len(running) == AT_ONCE:
                pid, status = os.waitpid(-1, 0)
                assert status == (9 if running.pop(pid) % 3 == 1 else 0), "a collector was refused a ring"
            most = max(most, used())
        assert all(os.waitpid(pid, 0)[1] == (9 if who % 3 == 1 else 0) for pid, who in running.items())
        oracle.settle(buffer)
        oracle.check(buffer, acks.counts, 0, whole=True)
        assert buffer.write_count == COMERS * 11
        buffer._handle.sweep()
        assert buffer.collectors() == [] and used() == empty
        ring = buffer._header["ring_bytes"]
        assert most <= empty + AT_ONCE * (ring + 8192), (most, empty)
        assert len(buffer.members()) <= memory.MAX_MEMBERS
        with Buffer.attach(unique_name) as late:
            late.draw(1)
            mine = [m for m in buffer.members() if m["alive"] and "creator" not in m["roles"]]
            assert len(mine) == 1 and "reader" in mine[0]["roles"], "the table of members has no room left"
    destroy(unique_name)


def test_a_table_that_is_really_full_says_so_and_who_leaves_makes_room(unique_name):
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", max_collectors=3) as buffer:
        handles = [Buffer.attach(unique_name) for _ in range(4)]
        for who, h in enumerate(handles[:3]):
            h.put(oracle.make_rows(who, 0, 2))
        for _ in range(2):
            with pytest.raises(TooManyCollectors, match=r"all 3 rings have living owners.*larger max_collectors"):
                handles[3].put(oracle.make_rows(3, 0, 2))
        assert len(handles[3].draw(2, timeout=5)[1]) == 2, "reading needs no ring"
        with stuck_drainer(unique_name):
            handles[1].put(oracle.make_rows(1, 2, 2))
            handles[1].close()  # its rows cannot be drained now, so its ring cannot be given away
            with pytest.raises(TooManyCollectors):
                handles[3].put(oracle.make_rows(3, 0, 2))
        handles[3].put(oracle.make_rows(3, 0, 2)).wait(30)
        assert buffer.write_count == 10
        for h in handles:
            h.close()
    destroy(unique_name)
