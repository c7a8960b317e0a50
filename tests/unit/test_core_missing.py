"""What who imports shmbuf without its compiled core is told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "shmbuf"


@pytest.mark.parametrize("checkout", [True, False])
def test_it_is_said_whether_a_checkout_hides_what_is_installed(tmp_path, checkout):
    (tmp_path / "shmbuf").mkdir()
    shutil.copy(PACKAGE / "_extension.py", tmp_path / "shmbuf")
    (tmp_path / "shmbuf/__init__.py").touch()
    if checkout:
        (tmp_path / "CMakeLists.txt").touch()
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import shmbuf._extension"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: shmbuf's compiled core is missing") and "make build" in said
    assert ("run from another directory" in said and str(tmp_path) in said) is checkout
