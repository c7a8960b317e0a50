"""What `make check-cuda` says where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

from tools.dev import check_cuda
from tools.dev.cuda_smoke import Line


def test_without_a_gpu_it_is_one_line_and_wrong_usage():
    code = "import sys; sys.modules['cuda.bindings'] = None; from tools.dev import check_cuda; sys.exit(check_cuda.main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=check_cuda.ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert "no GPU here: " in said and "cuda-bindings" in said and "make check-cuda ARGS=--standin" in said


def test_a_suite_s_line_says_how_many_passed():
    line = check_cuda.tested("names", ["tests/unit/test_names.py"], 100, "-k", "test_")
    assert line.good and " passed" in line.got


def test_over_the_stand_in_nothing_is_held_against_a_floor():
    line = check_cuda.without_figure(Line("gather", "9 µs, 4.0 × the floor of 2 µs", "≤ 2 ×", False))
    assert check_cuda.without_figure(Line("batches", "needs a GPU", "≥ 0.8 ×", None)).got == "needs a GPU"
    assert line.good is None and not line.wanted and "floor" not in line.got
