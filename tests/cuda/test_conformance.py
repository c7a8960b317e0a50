"""The tests of host storages, over a device that is the stand-in. Two interpreters: importing torch takes longer than many of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "numbers": ["buffer", "rings_and_tickets", "priorities", "edits", "slices", "epochs", "handles", "limiter", "pins"],
    "face": ["query_buffer", "replay_buffer", "sequences", "checkpoint", "loading", "face_edit", "rlightning_steps"],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_over_a_device(driver, files):
    run(driver, [f"tests/unit/test_{file}.py" for file in files])


@pytest.mark.timeout(600)
def test_over_a_device_that_is_read_by_way_of_the_host(driver):
    """As on a GPU: the switch does what it says, and the tests pass."""
    run(driver, ["tests/unit/test_face_edit.py", "tests/unit/test_sequences.py"], SHMBUF_CUDA_TENSORS="host")


@pytest.mark.timeout(600)
def test_what_a_gpu_is_asked(driver):
    run(driver, ["tests/cuda/test_on_gpu.py"], SHMBUF_TEST_GPU="1")


def run(driver: dict[str, str], files: list[str], **more: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *([] if "SHMBUF_TEST_GPU" in more else ["-p", "tests.cuda.conformance"]),
        *files,
    ]
    env = {**os.environ, **driver, **more, "STANDIN_DELAY_US": "0", "SHMBUF_NATIVE": "failpoints"}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST")}  # of this session's worker
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
