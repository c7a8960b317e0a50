"""No command of `shminfo` crashes, hangs or leaves a traceback over a damaged or foreign file. Each seed is a process of its
own, which a crash would end; it prints what it is at."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuf import Buffer, segment
from tests.conftest import PREFIX
from tests.unit.helpers_cli import ROOT, killed_owner

pytest_plugins = ["tests.unit.fixtures_cli"]

MUTANTS = int(os.environ.get("SHMBUF_FUZZ", "15"))  # of each seed
COMMANDS = (
    "list",
    "list --json",
    "show NAME",
    "show NAME --json",
    "top NAME --once --interval 0.01",
    "top NAME --once --interval 0.01 --json",
    "check NAME",
    "check NAME --json",
    "doctor",
    "doctor --json",
    "gc --dry-run",
    "metrics",
    "metrics NAME --json",
)
PLOT = "plot NAME -o /dev/null --seconds 0.02"


def mutants(blob: bytes, seed: int, n: int) -> Iterator[tuple[str, bytes]]:
    """(what was done, the bytes), n times."""
    rng = random.Random(seed)
    members, slots, blocks = struct.unpack_from("<3Q", blob, 96)
    rows, tree, links, rings = struct.unpack_from("<4Q", blob, 544)
    regions = {
        "header": (0, 4096),
        "control": (4096, 8192),
        "journal": (8192, 12288),
        "pins": (12288, 16384),
        "edits": (16384, 20480),
        "configuration": (20480, members),
        "members": (members, slots),
        "slots": (slots, blocks),
        "blocks": (blocks, rows),
        "rows": (rows, tree),
        "tree": (tree, links),
        "links": (links, rings),
        "rings": (rings, len(blob)),
    }
    for _ in range(n):
        bad, how = (
            bytearray(blob),
            rng.choice(("cut", "grown", "flip", "flip", "word", "word", "word", "fill", "noise")),
        )
        where = rng.choice(list(regions)) if rng.random() < 0.6 else "control"
        low, high = regions[where]
        if how == "cut":
            yield f"cut to {(length := rng.choice((0, 1, 4095, 8192, rng.randrange(len(blob)))))}", blob[:length]
            continue
        if how == "grown":
            bad += bytes(rng.randrange(1, 10_000))
        elif how == "flip":
            for _ in range(rng.choice((1, 8, 100))):
                bad[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
        elif how == "word":
            for _ in range(rng.choice((1, 3, 30))):
                at = rng.randrange(low, high - 7) & ~7
                value = rng.choice((0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2, rng.getrandbits(64)))
                bad[at : at + 8] = struct.pack("<Q", value)
        elif how == "fill":
            bad[low:high] = rng.choice((b"\0", b"\xff", b"\x7f")) * (high - low)
        else:
            bad[low:high] = rng.randbytes(high - low)
        yield f"{how} {where}", bytes(bad)


def hammer(name: str, base: str, seed: int, n: int) -> None:
    """Every command over n mutants of the file ``base``, put in turn where buffer ``name`` lies. For a process of its own."""
    from shmbuf.cli import checking, looking, main

    checking.PATIENCE = 0.0
    blob, path = Path(base).read_bytes(), segment.path_of(name)
    looking.buffers = lambda owner: [(os.getuid(), name)]
    for number, (what, bad) in enumerate(mutants(blob, seed, n)):
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(bad)
        os.chmod(path, 0o600)
        for command in (*COMMANDS, *[PLOT] * (number % 5 == 0)):
            print(f"seed {seed}, mutant {number}: {what}; shminfo {command}", flush=True)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main([name if word == "NAME" else word for word in command.split()])
            assert status in (0, 1) and "Traceback" not in err.getvalue(), (status, err.getvalue())
            assert status == 0 or out.getvalue() or err.getvalue(), "a failure is said"
        assert Path(path).read_bytes() == bad, "looking changes nothing"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a buffer with a past: priorities, trajectories, a dead collector, rows that wait, a wrap."""
    name = f"{PREFIX}fuzz-base"
    code = (
        "from shmbuf import Queue; b.close(); from shmbuf import destroy; destroy(b.name)\n"
        f"b = Buffer.create({name!r}, 50, schema=SCHEMA, drain='caller', ring_bytes=4096, max_collectors=3)\n"
        "b.keep_priorities(alpha=0.6, eps=1e-6); b.set_limiter(Queue(1000))\n"
        "for i in range(5): b.extend(rows(30), stream=i)\n"
        "ids = b.draw(20)[1]; b.set_priorities(ids, 2.5); other = Buffer.attach(b.name); other.put(rows(3)); b.put(rows(9))"
    )
    killed_owner(name, code)
    file = tmp_path_factory.mktemp("fuzz") / "base"
    shutil.copy(segment.path_of(name), file)
    segment.destroy(name)
    return str(file)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_damage_never_crashes_a_command(name, base, seed):
    code = "import sys; from tests.unit.test_cli_fuzz import hammer; hammer(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, name, base, str(seed), str(MUTANTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout.splitlines()[-1:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("\n") >= MUTANTS * len(COMMANDS)


def fifo(path: str, whole: str) -> None:
    os.mkfifo(path)


def folder(path: str, whole: str) -> None:
    os.mkdir(path)


def link_to_nothing(path: str, whole: str) -> None:
    os.symlink("/no/such/file", path)


def link_to_a_buffer(path: str, whole: str) -> None:
    os.symlink(whole, path)


def link_to_itself(path: str, whole: str) -> None:
    os.symlink(path, path)


def unix_socket(path: str, whole: str) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)


def unreadable(path: str, whole: str) -> None:
    shutil.copy(whole, path)
    os.chmod(path, 0)


def empty(path: str, whole: str) -> None:
    Path(path).touch(0o600)


@pytest.mark.parametrize(
    "make", [fifo, folder, link_to_nothing, link_to_a_buffer, link_to_itself, unix_socket, unreadable, empty]
)
def test_what_is_no_buffer_never_crashes_a_command(name, only_mine, shminfo, make):
    path = segment.path_of(name)
    with Buffer.create(f"{name}.whole", 10) as buf:
        make(path, segment.path_of(buf.name))
        try:
            for command in (*COMMANDS, PLOT):
                status, out, err = shminfo(*(name if word == "NAME" else word for word in command.split()))
                assert status in (0, 1) and "Traceback" not in err, (command, err)
                if "NAME" in command and not command.startswith(("check", "metrics")) and make is not unreadable:
                    assert (status, out) == (1, "") and err.count("\n") == 1, (command, out, err)
            assert os.path.lexists(path)
        finally:
            os.rmdir(path) if make is folder else os.unlink(path)


@pytest.mark.parametrize(
    "ending", ["", ".", "\n", "\x1b[2J", "'; rm -rf x", "a/b".replace("/", "\\"), "é" * 40, "x" * 150]
)
def test_odd_file_names_never_crash_a_command(name, only_mine, shminfo, ending):
    path = segment.path_of(name) + ending
    Path(path).write_bytes(b"nonsense" * 2000)
    try:
        for command in (*COMMANDS, PLOT):
            status, out, err = shminfo(*(name + ending if word == "NAME" else word for word in command.split()))
            assert status in (0, 1) and "Traceback" not in err and "\x1b" not in out + err, (command, err)
    finally:
        os.unlink(path)
