"""What the tests of `shminfo` share: second processes to look at. Its fixtures are in fixtures_cli.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shmbuf import Buffer, segment
from shmbuf.cli import looking

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {"obs": ("float32", (3,)), "next": {"obs": ("float32", (3,)), "done": "bool"}}
COLLECTOR = """
import sys
import numpy as np
from shmbuf import Buffer
buf = Buffer.attach(sys.argv[1])
n = int(sys.argv[2])
rows = {"obs": np.ones((n, 3), "f4"), "next": {"obs": np.ones((n, 3), "f4"), "done": np.zeros(n, bool)}}
buf.extend(rows) if sys.argv[3] == "extend" else buf.put(rows)
print("put", flush=True)
sys.stdin.read()
"""
# Takes the writer's role and is stopped there, with rows in its ring.
STOPPED_WRITER = """
import os, signal, sys
from shmbuf import Buffer
from tests.unit.helpers_cli import rows
buf = Buffer.attach(sys.argv[1])
buf.extend(rows(4))
assert buf._handle.try_take_role()
buf.put(rows(7))
print("role taken", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def rows(n: int) -> dict:
    return {"obs": np.zeros((n, 3), "f4"), "next": {"obs": np.zeros((n, 3), "f4"), "done": np.zeros(n, bool)}}


@contextmanager
def collector(name: str, n: int, how: str = "extend") -> Iterator[subprocess.Popen]:
    """A second process that has put n rows and stays attached."""
    p = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR, name, str(n), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert p.stdout.readline() == b"put\n"
        yield p
    finally:
        p.kill()
        p.communicate()


@contextmanager
def stopped_writer(name: str) -> Iterator[subprocess.Popen]:
    """A process that holds the writer role, with 7 rows in its ring, and is stopped."""
    p = subprocess.Popen([sys.executable, "-c", STOPPED_WRITER, name], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert p.stdout.readline() == b"role taken\n"
        eventually(lambda: segment.process_state(p.pid) == "T")
        yield p
    finally:
        p.kill()
        p.communicate()


def in_its_own_process(*args: str, timeout: float = 60) -> tuple[int, str, str]:
    """As the fixture ``shminfo``, where a crash or a hang must not be this process's."""
    command = [sys.executable, "-m", "shmbuf.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def eventually(holds: Callable[[], Any], timeout: float = 60) -> Any:
    give_up = time.monotonic() + timeout
    while not (value := holds()):
        assert time.monotonic() < give_up, "it never came true"
        time.sleep(0.01)
    return value


def inside(name: str) -> dict[str, Any]:
    return looking.inside(name, os.getuid())


def row_of(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(name))


def killed_owner(name: str | None, code: str = "", **environment: str) -> str:
    """A process creates a buffer (None: without a name), runs the code on ``b`` and is killed; the buffer's name."""
    # The prefix: another test that creates an unnamed buffer would sweep ours away.
    script = (
        "import os, signal, sys; from shmbuf import Buffer, segment; from tests.unit.helpers_cli import SCHEMA, rows\n"
        "segment.UNNAMED = 'kept-unnamed.'\n"
        f"b = Buffer.create({name!r}, 100, drain='caller'); print(b.name, flush=True)\n{code}\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGKILL
    found = done.stdout.strip()

    def let_go() -> bool:
        with closing(segment.attach(found, watch=True)) as handle:
            return not handle.attached

    eventually(let_go)
    return found


def spoiled_copy(name: str, path: str, spoil: Callable[[bytearray], bytearray]) -> None:
    """At ``path``: a whole buffer's bytes, spoiled."""
    other = f"{name}-whole"
    with Buffer.create(other, 1000, schema=SCHEMA, ring_bytes=4096, max_collectors=4) as buf:
        buf.extend(rows(3))
        blob = bytearray(Path(segment.path_of(other)).read_bytes())
    segment.destroy(other)
    Path(path).write_bytes(spoil(blob))
    os.chmod(path, 0o600)
