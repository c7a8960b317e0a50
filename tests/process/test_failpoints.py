"""Every labelled step of the core, its first five passages each: killed; stopped and continued; killed, and who comes to finish the
work killed at the same step, and who comes then at the next commit. The oracle afterwards. A step that never fires fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.failpoints import SCENARIOS

SOURCES = Path(__file__).parents[2] / "shmbuf" / "native"
HEADERS = [h.read_text() for h in SOURCES.glob("*.h") if h.name != "failpoint.h"]
ALL = sorted({label for text in HEADERS for label in re.findall(r"\bFAILPOINT\((\w+)\)", text)})
LABELS = [label for label in ALL if not label.startswith("device_")]  # those: tests/cuda/test_failpoints.py
TOGETHER = 4  # labels that one interpreter walks


def group_of(label: str) -> str:
    return label.split("_")[0]


def chunks() -> list:
    out = []
    for group in dict.fromkeys(map(group_of, LABELS)):
        mine = [label for label in LABELS if group_of(label) == group]
        parts = [mine[i : i + TOGETHER] for i in range(0, len(mine), TOGETHER)]
        out += [pytest.param(p, id=group if len(parts) == 1 else f"{group} {i + 1}") for i, p in enumerate(parts)]
    return out


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


def test_every_step_in_the_code_is_known_and_every_known_one_is_in_the_code():
    assert run("-c", "from shmbuf._extension import native; print(*sorted(native.FAILPOINTS))").split() == ALL
    assert set(map(group_of, LABELS)) == {group_of(prefix) for prefix in SCENARIOS}


@pytest.mark.parametrize("labels", chunks())
def test_killed_stopped_and_taken_over(labels):
    assert run("-m", "tests.process.failpoints", *labels).split() == labels


@pytest.mark.parametrize(("overwritten", "stored"), [(4, 4), (3, 4), (20, 100)])
def test_a_reader_by_priority_beside_a_stopped_writer(overwritten, stored):
    run(
        "-c",
        f"from tests.process.failpoints import stopped_while_rows_are_overwritten as f; f({overwritten}, {stored})",
    )
