"""Class PERM of cases from public bug trackers: permissions and namespaces. Each test is named after its case."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, destroy, segment
from tests.unit.helpers import numbers

K = {"schema": {"k": "int64"}, "ring_bytes": 4096, "max_collectors": 4}
STRANGER = 54321  # uid and gid


# ---- B115: mode bits and umask -------------------------------------------------------------------------------------


def modes(name: str) -> set[int]:
    """Of every file of the buffer."""
    files = [f for f in os.listdir(segment.SHM_DIR) if name in f]
    assert files
    return {stat.S_IMODE(os.stat(f"{segment.SHM_DIR}/{f}").st_mode) for f in files}


@pytest.mark.parametrize("drain", ["caller", "thread", "process"])
@pytest.mark.parametrize(("mode", "umask"), [(0o660, 0o077), (0o640, 0o777), (None, 0o000), (None, 0o077)])
def test_b115_mode_bits_and_umask(name, drain, mode, umask):
    before = os.umask(umask)
    try:
        for late in (False, True):  # the schema at once, or by the first put
            how = {**K, "schema": None if late else K["schema"], "drain": drain}
            with Buffer.create(name, 100, **how, **({} if mode is None else {"mode": mode})) as buffer:
                assert modes(name) == {mode or 0o600}
                buffer.extend({"k": np.arange(3)})
                buffer.keep_priorities()
                with Buffer.attach(name) as other:
                    other.extend({"k": np.arange(3)})
                assert modes(name) == {mode or 0o600}
            destroy(name)
    finally:
        os.umask(before)


# ---- B117: read-only readers ---------------------------------------------------------------------------------------

AS_A_STRANGER = f"""
import os, sys
import numpy as np
import shmbuf.failures
from shmbuf import Buffer  # before the change: the interpreter's files may be closed to him
os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
"""
READ_ONLY = (
    AS_A_STRANGER
    + """
name = sys.argv[1]
def refused(call):
    try: call()
    except PermissionError as e: return str(e)
    raise AssertionError("did not raise")
with Buffer.attach(name, owner=0, readonly=True) as buf:
    maps = [line.split()[1] for line in open("/proc/self/maps") if f"shmbuf.0.{name}" in line]
    assert maps and set(maps) == {"r--s"}, maps
    rows, ids = buf.draw(8)
    assert rows["k"].tolist() == (10 * ids).tolist()
    assert buf.draw_by_priority(8)[0]["k"].shape == (8,)
    assert len(buf) == 20 and buf.gather([3])["k"] == [30]
    assert [t.rows for t in buf.trajectories()] == [10, 10]
    assert buf.draw_slices(4, 5)[2].tolist() == [5] * 4
    assert buf.epoch().draw(20)[1].shape == (20,)
    assert buf.stats()["size"] == 20 and buf.collectors() and buf.members()
    row = {"k": np.zeros(1, "i8"), "done": np.zeros(1, bool)}
    for call in (lambda: buf.put(row), lambda: buf.extend(row), lambda: buf.set_priorities([1], 2.0), lambda: buf.empty(),
                 lambda: buf.set_limiter(None), lambda: buf.destroy(force=True)):
        assert "read-only" in refused(call)
print(refused(lambda: Buffer.attach(name, owner=0)))
"""
)


def as_root() -> None:
    if os.getuid():
        pytest.skip("needs root to become another user")


@pytest.fixture
def readable(name, request):
    """A buffer that another user may read: by a mode for all (which create refuses: chmod), or by his group."""
    as_root()
    how = {} if request.param == 0o644 else {"mode": request.param, "group": STRANGER}
    spec = {"k": "int64", "done": "bool"}
    with Buffer.create(name, 100, schema=spec, drain="caller", ring_bytes=4096, max_collectors=4, **how) as buffer:
        os.chmod(segment.path_of(name), request.param)
        buffer.keep_priorities()
        buffer.extend({"k": 10 * np.arange(20), "done": np.arange(20) % 10 == 9})
        yield buffer
    destroy(name)


@pytest.mark.parametrize("readable", [0o644, 0o640], indirect=True, ids=["0644", "0640 and group"])
def test_b117_read_only_readers(readable, python):
    path = Path(segment.path_of(readable.name))
    before, content = os.stat(path), hashlib.sha256(path.read_bytes()).hexdigest()
    text = python(READ_ONLY, readable.name)
    assert str(path) in text and "readonly=True" in text, text
    after = os.stat(path)
    assert (after.st_mtime_ns, after.st_blocks) == (before.st_mtime_ns, before.st_blocks)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == content, "no hidden write"
    assert len(readable) == 20 and numbers(readable) == list(range(0, 200, 10))


@pytest.mark.parametrize("readable", [0o640], indirect=True, ids=["0640 and group"])
def test_b117_the_refusal_has_name_and_mode(readable, python):
    text = python(READ_ONLY, readable.name)
    assert readable.name in text and ("0640" in text or "0o640" in text or "rw-r-----" in text), text


# ---- B119: a pid means something only in its namespace -------------------------------------------------------------

FOREIGN = """
import os, sys
import numpy as np
name, pid = sys.argv[1], int(sys.argv[2])
if pid != os.getpid():  # as the next child of this namespace
    with open("/proc/sys/kernel/ns_last_pid", "w") as f: f.write(str(pid - 1))
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        sys.exit()
from shmbuf import Buffer
assert os.getpid() == pid, (os.getpid(), pid)
buf = Buffer.attach(name)
buf.put({"k": np.arange(3)})
print("put", flush=True)
for line in sys.stdin:
    buf.put({"k": np.arange(3)})
    print("put", flush=True)
"""


@pytest.fixture
def in_pid_namespace():
    """A command in a pid namespace of its own (/dev/shm is shared), killed after the test."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True) if shutil.which("unshare") else None
    if probe is None or probe.returncode:
        pytest.skip(f"a pid namespace is not permitted here: {probe.stderr.strip() if probe else 'no unshare'}")
    running = []

    def start(code: str, *argv: object) -> subprocess.Popen:
        command = [*unshare, sys.executable, "-c", code, *map(str, argv)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for p in running:
        p.kill()
        p.communicate()


def free_pid() -> int:
    """One that is nobody's here, and small enough for the other namespace."""
    return next(pid for pid in range(300, 30_000) if not os.path.exists(f"/proc/{pid}"))


@pytest.mark.parametrize("namesake", ["none here", "a living process here", "its own pid 1"])
def test_b119_a_collector_of_another_pid_namespace(name, in_pid_namespace, namesake):
    """Living it is not taken for dead, though nobody here has its pid; dead it is not taken for alive, though somebody has."""
    here = subprocess.Popen(["sleep", "600"]) if namesake.startswith("a living") else None
    pid = here.pid if here else 1 if "pid 1" in namesake else free_pid()
    try:
        with Buffer.create(name, 100, drain="caller", **K) as buffer:
            p = in_pid_namespace(FOREIGN, name, pid)
            assert p.stdout.readline() == "put\n"
            assert os.path.exists(f"/proc/{pid}") is not namesake.startswith("none")
            for round_ in range(1, 4):  # while the writer here drains, and looks who is dead
                buffer.drain()
                assert buffer._handle.sweep() == 0
                (c,) = buffer.collectors()
                assert (c["pid"], c["state"]) == (pid, "alive")
                assert (pid, True) in [(m["pid"], m["alive"]) for m in buffer.members()]
                assert len(buffer) == 3 * round_
                p.stdin.write("\n")
                p.stdin.flush()
                assert p.stdout.readline() == "put\n", "its ring is still its own"
            p.kill()
            p.wait()
            while not buffer._handle.sweep():  # its last rows first; the kernel lets go of its lock after its memory
                assert all(c["state"] in ("alive", "dead") for c in buffer.collectors())
                buffer.drain()
            assert buffer.collectors() == [] and len(buffer) == 12
            assert [m["pid"] for m in buffer.members() if m["alive"]] == [os.getpid()]
        destroy(name)
    finally:
        if here:
            here.kill()
            here.wait()


def test_b119_a_stopped_foreign_writer_is_replaced_when_it_dies(name, in_pid_namespace):
    code = (
        "import sys\nfrom shmbuf import segment\nh = segment.attach(sys.argv[1])\nassert h.try_take_role()\n"
        "print('holds', flush=True)\nsys.stdin.read()\n"
    )
    with Buffer.create(name, 100, drain="caller", **K) as buffer:
        p = in_pid_namespace(code, name)
        assert p.stdout.readline() == "holds\n"
        ticket = buffer.put({"k": np.arange(3)})
        assert not buffer.drain() and not ticket.done(), "pid 1 of the other namespace holds the role"
        p.kill()
        assert ticket.wait(60).tolist() == [0, 1, 2]
    destroy(name)
