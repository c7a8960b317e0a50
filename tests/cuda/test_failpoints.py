"""Every labelled step of device work, and those of the host's that move the bytes of rows: killed, stopped, killed together with who comes
to finish the work. The oracle afterwards. A step that never fires fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.process.test_failpoints import ALL

DEVICE = [label for label in ALL if label.startswith("device_")]
SHARED = [
    "ring_copied",
    "plan_sealed",
    "txn_reserved",
    "txn_mid_row",
    "txn_copied",
    "txn_committed",
    "post_head",
    "edit_raised",
    "edit_half",
]
SHARED += ["edit_settled", "clear_planned", "sweep_locked", "slot_closing"]


def walk(driver: dict[str, str], hits: str, labels: list[str], **more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.failpoints", hits, *labels],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **driver, "SHMBUF_NATIVE": "failpoints", **more},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == labels


@pytest.mark.timeout(700)
@pytest.mark.parametrize("label", DEVICE)
def test_device_steps(driver, label):
    walk(driver, "1,2,3,4,5", [label])


@pytest.mark.timeout(700)
@pytest.mark.parametrize("labels", [SHARED[i : i + 4] for i in range(0, len(SHARED), 4)], ids=lambda labels: labels[0])
def test_steps_that_host_rows_have_too(driver, labels):
    walk(driver, "1,3", labels)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("label", ["device_copy_begun", "device_put_begun", "txn_mid_row"])
def test_what_was_under_way_lands_later(driver, label):
    walk(driver, "1,2", [label], STANDIN_LATE="1", STANDIN_DELAY_US="6000")
