"""The numpy-level tests over a core built with AddressSanitizer and UndefinedBehaviorSanitizer, and a proof that these see what is
wrong. `make sanitize` runs all tests so. The build is kept in build/asan and done anew when a source changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tools.dev import sanitize

CHOSEN = (
    "tests/unit/test_buffer.py",
    "tests/unit/test_bad_input.py",
    "tests/unit/test_cases_wrap.py",
    "tests/unit/test_rings_and_tickets.py",
    "tests/unit/test_priorities.py",
    "tests/unit/test_slices.py",
    "tests/unit/test_epochs.py",
    "tests/unit/test_limiter.py",
    "tests/unit/test_schema.py",
    "tests/property/test_header.py",
    "tests/property/test_model.py",
)
# Few examples of each property here: hypothesis is slow under them, and `make sanitize` does all.
FEW = {"SHMBUF_HEADER_EXAMPLES": "40"}


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    if "LD_PRELOAD" in os.environ:
        pytest.skip("runs under sanitizers already")
    try:
        sanitize.runtimes(), sanitize.tool("cmake"), sanitize.tool("ninja")
    except (sanitize.CannotBuild, OSError) as e:
        pytest.skip(str(e))


def shown(status: int, output: str, reports: dict[str, str]) -> str:
    return f"status {status}\n{output[-4000:]}\n" + "\n".join(f"{k}\n{v[:6000]}" for k, v in reports.items())


@pytest.mark.timeout(900)
def test_nothing_is_reported() -> None:
    build = sanitize.ROOT / "build" / "asan"
    with sanitize.alone(build):
        python = sanitize.prepare(build)
        files = [f for f in CHOSEN if (build / "tree" / f).exists()]
        assert files == list(CHOSEN)
        done = sanitize.run(build, python, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], FEW)
    assert done[0] == 0 and not done[2], shown(*done)
    assert "[100%]" in done[1]


# A reader that copies a byte too many of each column: out of the caller's array with the last row.
TOO_FAR = ("gather.h", "p + columns_[c].offset, columns_[c].bytes);", "p + columns_[c].offset, columns_[c].bytes + 1);")
# A shift by more than the word has bits, which computes something all the same.
UNDEFINED = (
    "bindings.h",
    "return now_ns() + u64(seconds * 1e9);",
    "return now_ns() + u64(seconds * 1e9) + (u64(1) << (64 + int(seconds < 1e9)) >> 63);",
)


@pytest.mark.skipif(not os.environ.get("SHMBUF_SOAK"), reason="builds the core again: make soak")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("header", "right", "wrong", "told"), [(*TOO_FAR, "heap-buffer-overflow"), (*UNDEFINED, "shift exponent")]
)
def test_what_is_wrong_is_reported(tmp_path: Path, header: str, right: str, wrong: str, told: str) -> None:
    source, build = tmp_path / "source", tmp_path / "build"
    for name in ("shmbuf", "tests"):
        shutil.copytree(
            sanitize.ROOT / name, source / name, ignore=shutil.ignore_patterns("out", "__pycache__", "*.so")
        )
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(sanitize.ROOT / name, source / name)
    file = source / "shmbuf" / "native" / header
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    python = sanitize.prepare(build, source, modules=("_native",))
    status, output, reports = sanitize.run(
        build, python, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_buffer.py"]
    )
    assert status != 0, output
    assert any(told in text for text in reports.values()), shown(status, output, reports)


@pytest.mark.timeout(900)
def test_a_report_of_a_process_that_nobody_asks_about_is_noticed(tmp_path: Path) -> None:
    """A child that dies, whose parent does not care: status 0, and yet a report. The same code without the mistake leaves none."""
    build = sanitize.ROOT / "build" / "asan"
    code = """
import subprocess, sys
child = '''
import numpy as np
from shmbuf import Buffer
buf = Buffer.create(None, 10, schema={"k": ("uint8", (64,))}, drain="caller")
buf.extend({"k": np.ones((10, 64), np.uint8)})
out, ids, done = np.empty(64 * %s, np.uint8), np.arange(4), np.zeros(4, np.uint8)
at = lambda a: a.__array_interface__["data"][0]
print(buf._handle.fetch(buf._columns, [at(out)], 4, at(ids), at(done)))
'''
subprocess.run([sys.executable, "-c", child % sys.argv[1]], capture_output=True)
"""
    with sanitize.alone(build):
        python = sanitize.prepare(build)
        for rows, seen in (("4", False), ("3", True)):
            status, output, reports = sanitize.run(build, python, ["-c", code, rows])
            assert status == 0 and bool(reports) == seen, shown(status, output, reports)
    assert "heap-buffer-overflow" in "".join(reports.values()) and "copy_" in "".join(reports.values())
