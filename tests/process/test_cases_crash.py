"""Class CRASH of cases from public bug trackers: crash cleanup, names, lifetime. Each test is named after its case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import posix_ipc
import pytest

from shmbuf import Buffer, BufferExists, BufferInUse, BufferNotFound, StorageLost, destroy, memory, segment
from tests import oracle
from tests.process import workers
from tests.process.test_cases_info import family, shminfo, shminfo_json
from tests.process.test_cases_leak import in_own_shm
from tests.process.test_kills import run_supervisor
from tests.unit.helpers import numbers, open_files

SOAK = bool(os.environ.get("SHMBUF_SOAK"))
LONG = pytest.mark.timeout(420 if SOAK else 120)
K = {"schema": {"k": "int64"}, "drain": "caller", "ring_bytes": 4096, "max_collectors": 8}


def k(first: int, n: int = 1) -> dict:
    return {"k": np.arange(first, first + n)}


def until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within its time"
        time.sleep(0.002)


# ---- B069: an attached process that ends takes nothing with it -----------------------------------------------------

ATTACHED = """
import os, signal, sys
from shmbuf import Buffer
buf = Buffer.attach(sys.argv[1])
assert len(buf.draw(4)[1]) == 4
"""
ENDS = {
    "return": ("", 0),
    "sys.exit(1)": ("sys.exit(1)", 1),
    "exception": ("raise RuntimeError('mine')", 1),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "os._exit": ("os._exit(3)", 3),
}


def test_b069_an_attached_process_that_ends_takes_nothing_with_it(name, start):
    with Buffer.create(name, 100, **K) as buffer:
        buffer.extend(k(0, 50))
        inode = os.stat(segment.path_of(name)).st_ino
        for end, (code, expected) in ENDS.items():
            p = start(ATTACHED + code, name)
            _, err = p.communicate(timeout=60)
            assert p.returncode == expected, (end, err)
            if end == "exception":
                assert err.startswith("Traceback") and err.endswith("RuntimeError: mine\n") and err.count("Error") == 1
            else:
                assert err == "", end
        for arguments in ((), ("show", name), ("show", name, "--json")):
            assert shminfo(*arguments)[::2] == (0, "")
        assert os.stat(segment.path_of(name)).st_ino == inode and numbers(buffer) == list(range(50))
        with Buffer.attach(name) as anew:
            assert numbers(anew) == list(range(50))
    destroy(name)


# ---- B071: restart under the same name after SIGKILL ---------------------------------------------------------------

VICTIM = """
import sys
import numpy as np
from shmbuf import Buffer
buf = Buffer.create(sys.argv[1], 100, schema={"k": "int64", "x": ("uint8", (100_000,))}, exists=sys.argv[2])
buf.extend({"k": np.arange(10), "x": np.zeros((10, 100_000), "u1")})
print("stored", flush=True)
sys.stdin.read()
"""


def test_b071_restart_under_the_same_name_after_sigkill(name, start):
    creator = start(VICTIM, name, "error")
    assert creator.stdout.readline() == "stored\n", creator.stderr.read()
    reader = start(ATTACHED + "print('joined', flush=True)\nsys.stdin.read()", name)
    assert reader.stdout.readline() == "joined\n", reader.stderr.read()
    for p in (creator, reader):
        p.kill()
        p.wait()
    with pytest.raises(BufferExists, match=r"10 of 100 rows.*nobody attached") as e:
        Buffer.create(name, 100, **K)
    text = str(e.value)
    assert all(w in text for w in (f"shmbuf.attach('{name}')", 'exists="replace"', f"shminfo rm {name}")), text
    with Buffer.attach(name) as old:
        assert numbers(old) == list(range(10))
    with Buffer.create(name, 100, exists="replace", **K) as new:
        assert len(new) == new.write_count == 0 and new.schema.keys == (("k",),)
    destroy(name)


def b071_rounds(rounds: int) -> None:
    """In a /dev/shm of its own, which holds two of these buffers (10 MB and a ring each) at most."""
    used = set()
    for _ in range(rounds):
        command = [sys.executable, "-c", VICTIM, "again", "replace"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
            assert p.stdout.readline() == b"stored\n"
            p.kill()
        s = os.statvfs("/dev/shm")
        used.add(s.f_blocks - s.f_bfree)
    assert len(used) == 1 and os.listdir("/dev/shm") == [segment.file_name("again")], used


@LONG
def test_b071_space_does_not_grow():
    """50 rounds (CI: 8) of create(exists="replace"), extend, SIGKILL."""
    rounds = 50 if SOAK else 8
    in_own_shm("64m", f"from tests.process.test_cases_crash import b071_rounds as f; f({rounds})", 400 if SOAK else 110)


# ---- B073, B077: the name is removed from outside ------------------------------------------------------------------


def act_until(name: str, who: int, reads: bool, report, stop) -> None:
    """Puts, or draws and judges, until told to stop; reports how many rows or draws."""
    with Buffer.attach(name) as buffer:
        n = 0
        try:
            while not stop.is_set():
                if reads:
                    oracle.check_rows(buffer.draw(32, timeout=30)[0])
                    n += 1
                else:
                    n += buffer.put(oracle.make_rows(who, n, 3), timeout=30).rows
                report[who] = n
        except StorageLost as e:
            raise AssertionError("nobody destroyed it") from e


@pytest.mark.parametrize("drain", ["caller", "thread"])
def test_b073_b077_files_removed_under_running_processes(name, drain, tmp_path):
    """Whoever is attached goes on; new ones are told that there is no such buffer."""
    report, stop = oracle.Acks(tmp_path / "report").counts, workers.ForkedEvent()
    buffer = Buffer.create(name, 1000, schema=oracle.SCHEMA, drain=drain, max_collectors=4)
    with family() as others:
        for who in range(3):
            others.fork(act_until, name, who, who == 2, report, stop)
        until(lambda: (report[:3] > 0).all())
        removed_under(name, buffer, report)
        stop.set()
        assert others.wait_all() == [0] * 3, "each ends by itself, without an exception"
    with Buffer.create(name, 10, **K) as new:  # nothing else has to be removed; the old handle still lives
        new.extend(k(5))
        assert numbers(new) == [5] and len(buffer) > 1
        buffer.close()
        assert numbers(new) == [5] and name in segment.names()
    destroy(name)


def removed_under(name: str, buffer: Buffer, report: np.ndarray) -> None:
    before = report[:3].copy()
    files = [f for f in os.listdir(segment.SHM_DIR) if name in f]
    assert files == [segment.file_name(name)], "one file, and no second registry"
    os.unlink(segment.path_of(name))
    for call in (Buffer.attach, destroy):
        with pytest.raises(BufferNotFound, match=f"no buffer named '{name}'"):
            call(name)
    goal = before + 300
    until(lambda: (report[:3] > goal).all() and len(buffer) == 1000, 60)
    assert not buffer.destroyed and not buffer.stats()["linked"]
    lo, hi = buffer.window
    rows, valid = buffer.try_gather(np.arange(lo, hi))
    oracle.check_rows({key: v[valid] for key, v in rows.items()})


# ---- B075: attach in the moment between create and size ------------------------------------------------------------

STOPS_BEFORE_IT_HAS_A_SIZE = """
import os, signal, sys
give_size = os.posix_fallocate
def slow(*a):
    os.kill(os.getpid(), signal.SIGSTOP)
    return give_size(*a)
os.posix_fallocate = slow
"""
STOPS_WHILE_IT_IS_BUILT = """
import sys
from shmbuf._extension import native
assert native.arm("build_grown=stop@1")
"""
CREATES = """
from shmbuf import Buffer
buf = Buffer.create(sys.argv[1], 100, schema={"k": "int64"}, drain="caller")
print("created", flush=True)
sys.stdin.read()
"""


def attach_and_wait(name: str) -> None:
    with Buffer.attach(name, timeout=60) as buffer:
        buffer.wait_rows(1, timeout=60)
        assert buffer.draw(3)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("moment", ["between open and size", "while it is built"])
def test_b075_attach_in_the_middle_of_a_creation(name, start, moment):
    early = moment.startswith("between")
    env = {} if early else {"SHMBUF_NATIVE": "failpoints"}
    code = (STOPS_BEFORE_IT_HAS_A_SIZE if early else STOPS_WHILE_IT_IS_BUILT) + CREATES
    creator = start(code, name, **env)
    assert os.waitid(os.P_PID, creator.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED
    assert (name in segment.names()) is not early
    if early:
        with pytest.raises(BufferNotFound, match=r"attach\(name, timeout=…\)"):
            Buffer.attach(name)
    with family() as attachers:
        for _ in range(10):
            attachers.fork(attach_and_wait, name)
        os.kill(creator.pid, signal.SIGCONT)
        assert creator.stdout.readline() == "created\n"
        with Buffer.attach(name) as buffer:
            buffer.extend(k(0))
            assert attachers.wait_all() == [0] * 10
    creator.communicate()
    destroy(name)

    creator = start(code, name, **env)
    os.waitid(os.P_PID, creator.pid, os.WSTOPPED | os.WNOWAIT)
    creator.kill()
    creator.wait()
    if early:
        assert name not in segment.names(), "the memory had no name: nothing is left"
        return
    (info,) = [i for i in shminfo_json() if i["name"] == name]
    assert info["state"] not in ("ok", "damaged") and not info["attached"]
    status, out, err = shminfo("rm", name)
    assert (status, err) == (0, "") and out.startswith(f"removed {name}: ") and out.endswith(" freed\n")
    assert name not in segment.names()


def test_b075_an_orphan_of_size_0_can_be_listed_and_removed(name):
    open(segment.path_of(name), "xb").close()
    (info,) = [i for i in shminfo_json() if i["name"] == name]
    assert info["state"] == "damaged" and "0 bytes" in info["reason"]
    status, _, err = shminfo("rm", name)
    assert status == 1 and f"`shminfo rm --force {name}` removes it" in err
    assert shminfo("rm", "--force", name)[::2] == (0, "")
    assert name not in segment.names()


# ---- B076: a create that fails leaves nothing ----------------------------------------------------------------------

LIMITED = """
import os, resource, sys
from shmbuf import Buffer, NotEnoughMemory, destroy, segment
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
big = {"schema": {"x": ("uint8", (1000,))}, "drain": "caller", "max_collectors": 4}
for _ in range(3):
    try: Buffer.create(sys.argv[1], 1_100_000, **big)
    except NotEnoughMemory as e: text = str(e)
    else: raise AssertionError("did not raise")
    assert sys.argv[1] not in segment.names()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with Buffer.create(sys.argv[1], 1_100_000, **big) as buf: assert buf.schema is not None
destroy(sys.argv[1])
print(text)
"""


def test_b076_a_create_that_fails_leaves_nothing(name, python):
    text = python(LIMITED, name)
    assert "1,100,000 rows × 1,000 bytes" in text and "RLIMIT_FSIZE" in text and name not in segment.names(), text


def test_b076_the_text_has_the_bytes_asked_and_allowed(name, python):
    text = python(LIMITED, name)
    amounts = [int(w.replace(",", "")) for w in re.findall(r"\d[\d,]*\d", text)]
    assert any(n > 1_100_000_000 for n in amounts), f"asked: {text}"
    assert 1 << 20 in amounts, f"allowed: {text}"


# ---- B078: unlink of something already gone ------------------------------------------------------------------------


def destroy_all(name: str, rounds: int, round_, ready, outcome, me: int) -> None:
    for i in range(1, rounds + 1):
        ready[me] = i
        while round_[0] < i:
            time.sleep(0.0001)
        try:
            destroy(name)
            outcome[me] = 1
        except BufferNotFound:
            outcome[me] = 2
        except BufferInUse as e:
            outcome[me] = 3 if "is being destroyed by another process" in str(e) else 4


def test_b078_two_destroy_at_the_same_time(name, tmp_path):
    """1,000 rounds (CI: 200). Documented for the second: BufferNotFound, a FileNotFoundError, or that another is at it."""
    shared = oracle.Acks(tmp_path / "shared").counts
    round_, ready, outcome = shared[:1], shared[8:10], shared[16:18]
    rounds = 1000 if SOAK else 200
    with family() as destroyers:
        for me in range(2):
            destroyers.fork(destroy_all, name, rounds, round_, ready, outcome, me)
        for i in range(1, rounds + 1):
            Buffer.create(name, 10, **K).close()
            until(lambda i=i: (ready == i).all())
            outcome[:] = 0
            round_[0] = i
            until(lambda: (outcome > 0).all())
            assert sorted(outcome) in ([1, 2], [1, 3]), f"round {i}: {outcome}"
            assert name not in segment.names()
        assert destroyers.wait_all() == [0, 0]


def test_b078_a_destroy_in_the_middle_of_another(name, monkeypatch):
    Buffer.create(name, 10, **K).close()
    unlink, seen = posix_ipc.unlink_shared_memory, []

    def meanwhile(*args) -> None:
        monkeypatch.setattr(posix_ipc, "unlink_shared_memory", unlink)
        with pytest.raises((BufferNotFound, BufferInUse)) as e:
            destroy(name)
        seen.append(e.value)
        unlink(*args)

    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", meanwhile)
    destroy(name)
    assert name not in segment.names() and len(seen) == 1
    assert isinstance(seen[0], BufferNotFound) or "being destroyed by another process" in str(seen[0]), seen[0]


def test_b078_destroy_twice_and_after_an_outside_rm(name, python):
    with Buffer.create(name, 10, **K) as buffer:
        destroy(name, force=True)
        with pytest.raises(FileNotFoundError):
            destroy(name)
        buffer.destroy()  # of a handle: nothing
    with Buffer.create(name, 10, **K) as buffer:
        os.unlink(segment.path_of(name))
        with pytest.raises(FileNotFoundError):
            destroy(name)
        buffer.destroy()
    code = "import os, sys\nfrom shmbuf import Buffer, segment\nb = Buffer.create(None, 10)\nos.unlink(segment.path_of(b.name))\n"
    for end in ("", "del b", "b.close()"):
        p = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, timeout=60)
        assert (p.returncode, p.stdout, p.stderr) == (0, "", ""), end


# ---- B079: finalisers at interpreter shutdown ----------------------------------------------------------------------

GLOBAL_HANDLE = """
import multiprocessing, sys
import numpy as np
from shmbuf import Buffer

def role(kind, name):
    global keep
    if kind == "creator":
        keep = Buffer.create(None, 10, schema={"k": "int64"}, drain="thread")
        keep.extend({"k": np.arange(3)})
        print(keep.name, flush=True)
    else:
        keep = Buffer.attach(name)
        if kind == "collector": keep.put({"k": np.arange(3)})
        else: keep.draw(3, timeout=60)

if __name__ == "__main__":
    kind, how, name = sys.argv[1:]
    if how == "main": role(kind, name)
    else:
        p = multiprocessing.get_context(how).Process(target=role, args=(kind, name))
        p.start()
        p.join()
        sys.exit(p.exitcode)
"""


@LONG
@pytest.mark.parametrize("how", ["main", "fork", "spawn"])
@pytest.mark.parametrize("kind", ["creator", "collector", "reader"])
def test_b079_a_script_ends_with_a_global_handle(name, tmp_path, kind, how):
    """20 runs each (CI: 2)."""
    (script := tmp_path / "script.py").write_text(GLOBAL_HANDLE)
    with Buffer.create(name, 1000, schema=K["schema"], drain="thread") as buffer:
        buffer.extend(k(0, 3))
        for i in range(20 if SOAK else 2):
            command = [sys.executable, script, kind, how, name]
            p = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
            assert (p.returncode, p.stderr) == (0, "")
            if kind == "creator":
                assert not os.path.exists(segment.path_of(p.stdout.strip())), "an unnamed buffer outlives its creator"
            if kind == "collector":
                buffer.wait_rows(3 * (i + 2), timeout=30)
            assert [m["pid"] for m in buffer.members() if m["alive"]] == [os.getpid()]
    destroy(name)


# ---- B081: only the owner's end counts -----------------------------------------------------------------------------

OWNER = """
import sys
from shmbuf import Buffer
from tests import oracle
buf = Buffer.create(sys.argv[1], 1000, schema=oracle.SCHEMA, drain="thread")
buf.extend(oracle.make_rows(7, 0, 1))
print("created", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_b081_collectors_and_the_creator_leave_the_others_go_on(name, start, tmp_path, end):
    """Documented: a named buffer lives until it is destroyed."""
    creator = start(OWNER, name)
    assert creator.stdout.readline() == "created\n", creator.stderr.read()
    report, stops = oracle.Acks(tmp_path / "report").counts, [workers.ForkedEvent() for _ in range(4)]
    with family() as others:
        pids = [others.fork(act_until, name, who, who == 3, report, stops[who]) for who in range(4)]
        until(lambda: (report[:4] > 0).all())
        stops[0].set()
        assert others.wait(pids[0]) == 0
        for leave in ("collector", "creator"):
            if leave == "creator" and end == "exit":
                assert creator.communicate("\n", timeout=30) == ("", "") and creator.returncode == 0
            elif leave == "creator":
                creator.kill()
                creator.wait()
            goal = report[1:4] + (20_000 if SOAK else 1000)
            until(lambda goal=goal: (report[1:4] > goal).all(), 60)
        for stop in stops:
            stop.set()
        assert others.wait_all() == [0] * 3
    assert not report[8:12].any()
    with Buffer.attach(name) as buffer:
        oracle.settle(buffer)
        acks = report[:8].copy()
        acks[3], acks[7] = 0, 1
        oracle.check(buffer, acks, 0)
    destroy(name)


# ---- B082: dead readers are forgotten ------------------------------------------------------------------------------


def b082(name: str, rounds: int) -> None:
    def read_and_die() -> None:
        attached = Buffer.attach(name)
        attached.draw(3)
        os.kill(os.getpid(), signal.SIGKILL)

    with Buffer.create(name, 100, **K) as buffer:
        buffer.extend(k(0, 10))
        blocks, files = os.stat(segment.path_of(name)).st_blocks, open_files()
        for _ in range(rounds):
            pid = workers.fork(read_and_die)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        assert (os.stat(segment.path_of(name)).st_blocks, open_files()) == (blocks, files)
        members = buffer.members()
        assert [m["pid"] for m in members if m["alive"]] == [os.getpid()]
        assert len(members) <= memory.MAX_MEMBERS < rounds
        with Buffer.attach(name):
            alive = [m["pid"] for m in buffer.members() if m["alive"]]
            assert alive == [os.getpid()] * 2, "the entries of the dead are used again"
        assert len(buffer.collectors()) == 1
    destroy(name)


@LONG
def test_b082_dead_readers_are_forgotten(name):
    """1,000 rounds (CI: 300, more than the table has entries). Dead entries stay visible, as dead, until they are needed."""
    rounds = 1000 if SOAK else 300
    run_supervisor(f"from tests.process.test_cases_crash import b082; b082({name!r}, {rounds})", 400 if SOAK else 110)


# ---- B084: a quiet normal run --------------------------------------------------------------------------------------

TRAINER = {
    "numpy": """
import shmbuf
from shmbuf import Buffer
rb = Buffer.create("{name}", 1_000_000)
rb.wait_rows(40, timeout=200)
print(rb.draw(32)[0]["obs"].shape, flush=True)
""",
    "torch": """
import shmbuf
from shmbuf import RandomSampler, ShmStorage, TensorDictReplayBuffer
rb = TensorDictReplayBuffer(storage=ShmStorage(10_000, name="{name}"), sampler=RandomSampler(), batch_size=32)
rb.wait_rows(40, timeout=200)
print(tuple(rb.sample()["obs"].shape), flush=True)
""",
}
COLLECTOR = """
import numpy as np
import shmbuf
from shmbuf import Buffer
rb = Buffer.attach("{name}", timeout=200)
for step in range(4):
    obs = np.zeros((10, 17), "f4")
    rb.put({{"obs": obs, "next": {{"obs": obs, "reward": np.zeros(10, "f4"), "done": np.zeros(10, bool)}}}})
print(rb.draw(32, timeout=60)[0]["obs"].shape, flush=True)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("last", "face"), [("trainer", "numpy"), ("collector", "numpy"), ("trainer", "torch")])
def test_b084_two_interpreters_as_in_the_readme(name, start, last, face):
    """Started independently, closed in both orders; the last one destroys."""
    code = {"trainer": TRAINER[face], "collector": COLLECTOR}
    end = {who: "input()\nrb.close()\n" + f"shmbuf.destroy('{name}')" * (who == last) for who in code}
    running = {who: start(code[who].format(name=name) + end[who]) for who in code}
    for p in running.values():
        assert p.stdout.readline() == "(32, 17)\n", p.stderr.read()
    for who in sorted(code, key=lambda w: w == last):
        out, err = running[who].communicate("\n", timeout=60)
        assert (running[who].returncode, out, err) == (0, "", ""), who
    assert name not in segment.names()


# ---- B085: descriptor 0 is a descriptor ----------------------------------------------------------------------------

CLOSED_STANDARD_FILES = """
import os, sys
import numpy as np
from shmbuf import Buffer, destroy
name, drain, answer = sys.argv[1:]
for fd in range(3): os.close(fd)
def files(): return sorted(int(f) for f in os.listdir("/proc/self/fd"))
try:
    before = files()
    assert before[0] == 0 and not {1, 2} & set(before), before  # 0: of this listing
    buf = Buffer.create(name, 10, schema={"k": "int64"}, drain=drain)
    other = Buffer.attach(name)
    assert 0 in files()
    buf.extend({"k": np.arange(3)}); other.extend({"k": np.arange(3, 6)})
    assert buf.gather(np.arange(6))["k"].tolist() == list(range(6)) and other.draw(4)[1].shape == (4,)
    other.close(); buf.close()
    destroy(name)
    assert files() == before, (files(), before)
    text = "ok"
except BaseException as e: text = repr(e)
with open(answer, "w") as f: f.write(text)
"""


@pytest.mark.parametrize("drain", ["caller", "thread", "process"])
def test_b085_with_descriptors_0_1_2_closed(name, start, tmp_path, drain):
    p = start(CLOSED_STANDARD_FILES, name, drain, tmp_path / "answer")
    assert p.wait(60) == 0
    assert (tmp_path / "answer").read_text() == "ok"


# ---- B087: names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "a/b", "../x", ".", "a" * 101, "a" * 255, "a" * 256, "a b", "é", "x\n", "\0"])
def test_b087_names_that_are_refused_before_anything_is_made(bad):
    before = (open_files(), sorted(f for f in os.listdir(segment.SHM_DIR) if bad and bad in f))
    for call in (lambda: Buffer.create(bad, 10, **K), lambda: Buffer.attach(bad), lambda: destroy(bad)):
        with pytest.raises(ValueError, match="1 to 100 characters out of A-Z a-z 0-9"):  # ASCII: so many bytes
            call()
    assert (open_files(), sorted(f for f in os.listdir(segment.SHM_DIR) if bad and bad in f)) == before


@pytest.mark.parametrize("length", [30, 31, 100])
def test_b087_long_names_work_with_all_that_belongs_to_them(length):
    full = f"b087.{os.getpid()}".ljust(length, "x")
    with Buffer.create(full, 10, **K) as buffer, Buffer.attach(full) as other:
        buffer.keep_priorities()
        other.extend(k(0, 3))
        assert numbers(buffer) == [0, 1, 2] and buffer.draw_by_priority(2)[1].shape == (2,)
    destroy(full)


def test_b087_a_name_that_was_destroyed_and_made_anew_is_another_buffer(name):
    with Buffer.create(name, 10, **K) as old, Buffer.attach(name) as also_old:
        old.extend(k(0, 3))
        destroy(name, force=True)
        with Buffer.create(name, 10, **K) as new:
            new.extend(k(100, 2))
            assert numbers(old) == numbers(also_old) == [0, 1, 2] and numbers(new) == [100, 101]
            assert old.destroyed and also_old.destroyed and not new.destroyed
            for handle in (old, also_old):
                with pytest.raises(StorageLost, match="destroyed"):
                    handle.put(k(7))
            old.destroy(force=True)
            assert numbers(new) == [100, 101] and name in segment.names()
    destroy(name)
