"""The C++ driver (driver.cpp; trajectories.cpp for links.h) over the real headers: threads, killed processes, TSan, ASan + UBSan, aarch64 under qemu.

``make -C tests/native`` runs it longer.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _cannot(target):
    """Why this machine cannot build or run it."""
    target = target.removeprefix("trajectories-")
    if not shutil.which("make") or not shutil.which("g++"):
        return "make or g++ is not installed"
    if target == "aarch64":
        return next(
            (
                f"{tool} is not installed"
                for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64")
                if not shutil.which(tool)
            ),
            None,
        )
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"no 16-byte compare-and-swap for {platform.machine()}"
    flag = {"tsan": "-fsanitize=thread", "asan": "-fsanitize=address,undefined"}.get(target)
    empty = ["g++", flag or "-O0", "-x", "c++", "-", "-o", "/dev/null"]
    if flag and subprocess.run(empty, input="int main() {}", capture_output=True, text=True, check=False).returncode:
        return f"g++ has no runtime for {flag}"
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "target",
    [program + target for program in ("", "trajectories-") for target in ("run", "steps", "tsan", "asan", "aarch64")],
)
def test_no_violation(target):
    if why := _cannot(target):
        pytest.skip(why)
    done = subprocess.run(
        ["make", "-C", str(HERE), target, "SECONDS_=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "ok: " in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("header", "right", "wrong", "target", "told"),
    [
        (
            "transaction.h",
            "store(r.result, id, relaxed);",
            "store(r.result, id + 1, relaxed);",
            "run",
            "VIOLATION: ring ",
        ),
        (
            "links.h",
            "ends_.clear(joined_slot), mark(joined_slot);",
            "mark(joined_slot);",
            "trajectories-run",
            "VIOLATION: ",
        ),
    ],
)
def test_a_violation_is_found_and_told(tmp_path, header, right, wrong, target, told):
    """Headers that store a wrong result in the record, or a predecessor that stays an end: what cannot fail proves nothing."""
    if why := _cannot("steps"):
        pytest.skip(why)
    native = tmp_path / "native"
    shutil.copytree(HERE.parents[1] / "shmbuf" / "native", native)
    text = (native / header).read_text()
    broken = text.replace(right, wrong)
    assert broken != text
    (native / header).write_text(broken)
    work = tmp_path / "driver"
    shutil.copytree(HERE, work, ignore=shutil.ignore_patterns("out", "__pycache__"))
    done = subprocess.run(
        ["make", "-C", str(work), target, f"NATIVE={native}", "SECONDS_=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert told in done.stdout and "again: --seed " in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["run", "steps", "tsan", "asan", "aarch64"])
def test_limiter_and_epoch(target):
    if why := _cannot(target):
        pytest.skip(why)
    done = subprocess.run(
        ["make", "-C", str(HERE), f"words-{target}", "SECONDS_=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "ok: shared words" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("header", "line", "instead", "told"),
    [
        ("epoch.h", "if (!compare_exchange(word_, was, next)) continue;", "word_ = next;", "twice"),
        ("limiter.h", "if (load(w_.version.low, relaxed) == v)", "", "half a set"),
        ("limiter.h", "store(w_.blocked, 1u, relaxed);", "", "admit says"),
        (
            "limiter.h",
            "compare_exchange(w_.sampled, s, s + n, seq_cst)",
            "(store(w_.sampled, s + n, relaxed), true)",
            "",
        ),
    ],
)
def test_a_weaker_limiter_or_epoch_is_found_and_told(tmp_path, header, line, instead, told):
    if why := _cannot("steps"):
        pytest.skip(why)
    native = tmp_path / "native"
    shutil.copytree(HERE.parents[1] / "shmbuf" / "native", native)
    text = (native / header).read_text()
    assert line in text
    (native / header).write_text(text.replace(line, instead))
    work = tmp_path / "driver"
    shutil.copytree(HERE, work, ignore=shutil.ignore_patterns("out", "__pycache__"))
    done = subprocess.run(
        ["make", "-C", str(work), "words-steps", f"NATIVE={native}", "SECONDS_=10"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "VIOLATION: " in done.stdout and told in done.stdout and "again: --seed " in done.stdout


@pytest.mark.timeout(300)
def test_the_fuzzer_fits_the_headers():
    """`make fuzz` runs for as long as it is let; here it only has to compile."""
    if not shutil.which("clang++-14"):
        pytest.skip("clang++-14 is not installed")
    done = subprocess.run(
        [
            "clang++-14",
            "-std=c++20",
            "-fsyntax-only",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            "shmbuf/native",
            "tests/fuzz/attach.cpp",
        ]
        + (["-mcx16"] if platform.machine() == "x86_64" else []),
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
