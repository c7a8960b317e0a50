"""Every labelled step of claim, build, ring, role, transaction, clear, skip, sweep and close, of the links of streams, the tree of
priorities, the limiter and the epochs: kill at hits 1 to 3, kill the
successor too, stop and continue; the oracle afterwards. A step that never fires fails."""

import os
import subprocess
import sys

import pytest

GROUPS = {
    "claim": 4,
    "ring": 4,
    "role": 2,
    "plan": 2,
    "txn": 8,
    "post": 4,
    "clear": 1,
    "skip": 1,
    "build": 4,
    "sweep": 2,
    "slot": 1,
    "close": 1,
    "tree": 5,
    "link": 11,
    "limiter": 3,
    "epoch": 1,
}


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "SHMBUF_NATIVE": "failpoints"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names() -> list[str]:
    return run("-c", "from shmbuf._extension import native; print(*native.FAILPOINTS)").split()


def test_every_group_is_walked():
    assert sorted({n.split("_")[0] for n in names()}) == sorted(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_kill_stop_and_successor(group):
    mine = [n for n in names() if n.split("_")[0] == group]
    assert len(mine) == GROUPS[group]
    assert [line.split()[0] for line in run("-m", "tests.process.failpoints", *mine).splitlines()] == mine


@pytest.mark.parametrize(("overwritten", "stored"), [(4, 4), (3, 4), (20, 100)])
def test_a_reader_by_priority_beside_a_stopped_writer(overwritten, stored):
    run(
        "-c",
        f"from tests.process.failpoints import stopped_while_rows_are_overwritten as f; f({overwritten}, {stored})",
    )
