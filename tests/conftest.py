"""Buffers with names of their own, removed after each test and looked for at the end; second interpreters, stopped after each."""

from __future__ import annotations

import gc
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import settings

from shmbuf import segment
from shmbuf.errors import ShmbufError

PREFIX = f"test.{os.getpid()}.{secrets.token_hex(3)}."  # of this session (of this worker, under pytest-xdist)

settings.register_profile("local", deadline=None)  # no timed assertion: the machine is shared
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def left_behind(prefix: str = PREFIX) -> list[str]:
    """Files under /dev/shm of this session's buffers."""
    start = segment.file_name(prefix)
    return sorted(f for f in os.listdir(segment.SHM_DIR) if f.startswith(start))


def unnamed_of_this_process() -> list[str]:
    found = []
    for name in segment.names():
        if name.startswith("unnamed."):
            with suppress(ShmbufError, OSError):
                handle = segment.attach(name, watch=True)
                if handle.header["creator_pid"] == os.getpid():
                    found.append(name)
                handle.close()
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    assert not left_behind()
    if not request.session.testsfailed:  # the traceback of a failure keeps its buffers alive
        gc.collect()
        assert not unnamed_of_this_process()


@pytest.fixture
def make_name() -> Iterator[Callable[[], str]]:
    """Gives names of which, after the test, no buffer is left."""
    prefix = f"{PREFIX}{secrets.token_hex(4)}"
    given: list[str] = []

    def make() -> str:
        given.append(f"{prefix}.{len(given)}")
        return given[-1]

    yield make
    for name in segment.names():
        if name.startswith(prefix):
            with suppress(ShmbufError, OSError, RuntimeError):
                segment.destroy(name, force=True)
            with suppress(OSError):
                os.unlink(segment.path_of(name))


@pytest.fixture
def name(make_name: Callable[[], str]) -> str:
    return make_name()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """``start(code, *argv, **environment)``: the code in a second interpreter, with text pipes; killed after the test."""
    running: list[subprocess.Popen] = []

    def start(code: str, *argv: object, **environment: str) -> subprocess.Popen:
        p = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, argv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        running.append(p)
        return p

    yield start
    for p in running:
        p.kill()  # SIGKILL ends a stopped one too
        p.communicate()


@pytest.fixture
def python(start: Callable[..., subprocess.Popen]) -> Callable[..., str]:
    """``python(code, *argv, **environment)``: runs it to its end in a second interpreter; what it printed, stripped."""

    def python(code: str, *argv: object, **environment: str) -> str:
        p = start(code, *argv, **environment)
        out, err = p.communicate(timeout=100)
        assert p.returncode == 0, f"exit status {p.returncode}:\n{out}\n{err}"
        return out.strip()

    return python
