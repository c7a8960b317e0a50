"""Class INFO of cases from public bug trackers: inspection and statistics. Each test is named after its case."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shmbuf import Buffer, RateLimiter, RingFull, destroy, segment
from tests import oracle
from tests.process import workers
from tests.unit.helpers import stuck_drainer

SOAK = bool(os.environ.get("SHMBUF_SOAK"))


class Family:
    """Children that are forked here. Those that nobody waited for are killed at the end."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def fork(self, target: Callable, *args: object) -> int:
        self.pids.append(workers.fork(target, *args))
        return self.pids[-1]

    def wait(self, pid: int, seconds: float = 100) -> int:
        """The wait status; a child that hangs is an assertion."""
        deadline = time.monotonic() + seconds
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, f"child {pid} hangs"
            time.sleep(0.002)
        self.pids.remove(pid)
        return done[1]

    def wait_all(self) -> list[int]:
        return [self.wait(pid) for pid in list(self.pids)]


@contextlib.contextmanager
def family() -> Iterator[Family]:
    made = Family()
    try:
        yield made
    finally:
        for pid in made.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def shminfo(*arguments: str, **how) -> tuple[int, str, str]:
    """The console script in a process of its own: exit status, stdout, stderr."""
    code = "import sys; from shmbuf.cli import main; sys.exit(main())"
    p = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, **how)
    return p.returncode, p.stdout, p.stderr


def shminfo_json(*arguments: str):
    status, out, err = shminfo(*arguments, "--json")
    assert (status, err) == (0, ""), err
    return json.loads(out)


# ---- B167: counters mean what they say -----------------------------------------------------------------------------


def test_b167_counters_mean_what_they_say(name):
    """Samples are counted where a limiter counts them; prefetching comes with prefetching."""
    spec = {"schema": {"k": "int64"}, "drain": "caller", "ring_bytes": 4096, "full": "error"}
    with Buffer.create(name, 4, **spec) as buffer:
        buffer.keep_priorities(1.0, 0.0)
        buffer.set_limiter(RateLimiter(1.0, min_size=1, error_buffer=(-1e9, 1e9)))
        buffer.extend({"k": np.arange(10)})
        for _ in range(2):
            buffer.draw(3)
        assert buffer.set_priorities([8, 9, 0], 2.0).tolist() == [True, True, False]
        with stuck_drainer(name):
            more = 0
            with pytest.raises(RingFull):
                while True:
                    buffer.put({"k": np.arange(1)})
                    more += 1
            s = buffer.stats()
            assert (s["write_count"], s["rows_total"], s["put_rows"], s["size"]) == (10, 10, 10 + more, 4)
            assert (s["priorities_set"], s["priorities_stale"]) == (2, 1)
            assert (s["refused_rows"], s["dropped_rows"], s["skipped_rows"], s["malformed_records"]) == (1, 0, 0, 0)
            assert (s["limiter"]["inserted"], s["limiter"]["sampled"]) == (10, 6)
        buffer.drain()
        s = buffer.stats()
        assert (s["write_count"], s["refused_rows"], s["size"]) == (10 + more, 1, 4)
    destroy(name)


# ---- B169: the inspector changes nothing ---------------------------------------------------------------------------


def unchanged(path: str) -> tuple:
    st = os.stat(path)
    with open(path, "rb") as f:
        return st.st_ino, st.st_size, st.st_blocks, st.st_mtime_ns, st.st_mode, hashlib.sha256(f.read()).hexdigest()


EVERY = ((), ("show", "NAME"), ("show", "NAME", "--json"))


def inspect(name: str) -> list[int]:
    return [shminfo(*(name if a == "NAME" else a for a in arguments))[0] for arguments in EVERY]


def test_b169_a_quiet_buffer_and_one_whose_owner_is_dead(name, start):
    code = (
        "import sys, numpy as np\nfrom shmbuf import Buffer\n"
        "b = Buffer.create(sys.argv[1], 100, drain='caller', ring_bytes=4096, max_collectors=4)\nb.extend({'k': np.arange(50)})\n"
        "b.keep_priorities()\nb.put({'k': np.arange(3)})\nprint('made', flush=True)\nsys.stdin.read()\n"
    )
    p = start(code, name)
    assert p.stdout.readline() == "made\n"
    for state in ("quiet", "dead"):
        if state == "dead":
            p.kill()
            p.wait()
        before, files = unchanged(segment.path_of(name)), sorted(os.listdir(segment.SHM_DIR))
        with contextlib.closing(segment.attach(name, watch=True)) as handle:
            members = handle.members()
        assert inspect(name) == [0] * 3
        assert unchanged(segment.path_of(name)) == before, state
        assert {f for f in files if name in f} == {f for f in os.listdir(segment.SHM_DIR) if name in f}
        with contextlib.closing(segment.attach(name, watch=True)) as handle:
            assert handle.members() == [{**m, "alive": state == "quiet"} for m in members], "no registration left"
        info = shminfo_json("show", name)
        assert (info["size"], info["waiting_rows"], info["attached"]) == (50, 3, state == "quiet")
    destroy(name)


def as_a_stranger(name: str) -> tuple[int, str, str]:
    """`shminfo show` of root's buffer by another user, after a first one by root that loads what it needs."""
    code = (
        "import contextlib, io, os, sys\nfrom shmbuf.cli import main\ncall = ['show', sys.argv[1], '--owner', '0']\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(call)\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\nsys.exit(main(call))\n"
    )
    p = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, timeout=60)
    return p.returncode, p.stdout, p.stderr


def test_b169_missing_foreign_damaged_and_half_made(name, start):
    """Exit codes: 0 shown, 1 there is none or it cannot be read, 2 wrong usage."""
    path = segment.path_of(name)
    status, out, err = shminfo("show", name)
    assert (status, out) == (1, "") and f"no buffer named '{name}'" in err and not os.path.exists(path)
    assert shminfo("show")[0] == 2 and shminfo("--no-such-option")[0] == 2
    Buffer.create(name, 10, schema={"k": "int64"}, drain="caller").close()
    os.chmod(path, 0o644)
    before = unchanged(path)
    if os.getuid() == 0:
        assert as_a_stranger(name)[::2] == (0, "")
        assert unchanged(path) == before
        os.chmod(path, 0o600)
        before = unchanged(path)
        status, out, err = as_a_stranger(name)
        assert (status, out) == (1, "") and "uid 54321" in err and "-rw-------" in err, err
    assert unchanged(path) == before
    destroy(name)
    with Buffer.create(name, 10, drain="caller"):  # being made: no schema yet
        before = unchanged(path)
        assert inspect(name) == [0] * 3 and unchanged(path) == before
    destroy(name)
    with open(path, "wb") as f:
        f.write(b"\0" * 5000)
    before = unchanged(path)
    assert inspect(name) == [0, 1, 1] and unchanged(path) == before
    os.unlink(path)


@pytest.mark.timeout(2000 if SOAK else 120)
def test_b169_a_live_buffer_under_load(name, tmp_path):
    """1,000 looks (CI: 12), of a process each; meanwhile collectors and a reader lose nothing."""
    acks, stop = oracle.Acks(tmp_path / "acks"), workers.ForkedEvent()
    with Buffer.create(name, 2000, schema=oracle.SCHEMA, max_collectors=4) as buffer, family() as others:
        for who in range(2):
            others.fork(workers.collect, name, who, acks.path, 8, stop, who)
        while not (acks.counts[:2] > 0).all():
            time.sleep(0.002)
        written = 0
        for _ in range((1000 if SOAK else 12) // 4):
            assert inspect(name) == [0] * 3
            info = shminfo_json("show", name)
            assert info["rows_total"] >= written and info["collectors_alive"] == 2
            assert {m["pid"] for m in info["members"] if m["alive"]} == {os.getpid(), *others.pids}
            written = info["rows_total"]
        stop.set()
        assert others.wait_all() == [0, 0]
        oracle.settle(buffer)
        oracle.check(buffer, acks.counts, 0)
    destroy(name)


# ---- B171: a message that names the cause --------------------------------------------------------------------------


def test_b171_a_full_ring_behind_a_stopped_drainer_names_it(name, start):
    from tests.process.test_cases_hang import stopped_drainer

    with Buffer.create(name, 1000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096) as buffer:
        buffer.extend(oracle.make_rows(8, 0, 1))
        with stopped_drainer(name, start, oracle.make_rows(9, 0, 1)) as drainer:
            with pytest.raises(RingFull) as e:
                for i in range(1000):
                    buffer.put(oracle.make_rows(0, i, 1), timeout=0.2)
            text = str(e.value)
            assert f"the ring of collector {buffer._handle.slot} has no room after 0.2 s" in text, text
            assert f"pid {drainer.pid} holds the writer role and is stopped (SIGSTOP)" in text and "s ago" in text, text
            for advice in ("nlarge", "larger", "shm", "ring_bytes", "memory"):
                assert advice not in text, text
            os.kill(drainer.pid, signal.SIGCONT)
        oracle.settle(buffer)
        acks = np.zeros(10, np.int64)
        acks[[0, 8, 9]] = i, 1, 1
        oracle.check(buffer, acks, 0, whole=True)
    destroy(name)
