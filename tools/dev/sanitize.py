"""The Python tests over a core built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tools/dev/sanitize.py [--fast] [--torch] [--build-only] [pytest arguments …]

Builds both modules in build/asan and runs the tests of a copy of the tree there, in an environment that sees this one's packages
but not its installed shmbuf. Every report goes to a file, so that one of a process which a test started, or of one whose crash a
test expects, is noticed too: any report fails the run. Needs g++ with libasan and libubsan, cmake, ninja and nanobind.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
COPIED = ("shmbuf", "tests", "tools", "examples", "README.md", "pyproject.toml", "CMakeLists.txt", "Makefile")
LEFT_OUT = ("tests/native", "tests/models", "tests/compat", "tests/fuzz", "tests/process/test_examples.py")
# Those have sanitizers of their own, or are C; the last three want torch, in processes of their own or by way of the README.
IN_TORCH = ("tests/process/test_face.py", "tests/process/test_readme.py")
# A limit on the address space is one on the sanitizer's shadow, of terabytes, first.
LIMITED = (
    "tests/process/test_breakers.py::test_what_cannot_be_mapped_is_refused_and_leaves_nothing",
    "tests/process/test_environments.py::test_an_address_space_or_data_limit",
)
FAST = ("tests/unit", "tests/property")  # and no torch


class CannotBuild(RuntimeError):
    """Something that the build needs is not installed."""


def runtimes() -> list[str]:
    """What must be in the process before the interpreter: both runtimes, and what they look up as they start."""
    found = []
    for library in ("libasan.so", "libubsan.so", "libstdc++.so"):
        asked = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=False)
        path = asked.stdout.strip()
        if not os.path.isabs(path):  # g++ gives the name back where there is none
            raise CannotBuild(f"g++ has no {library}")
        found.append(os.path.realpath(path))
    return found


def tool(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if path is None:
        raise CannotBuild(f"{name} is not installed")
    return path


@contextlib.contextmanager
def alone(build: Path) -> Iterator[None]:
    """One run at a time in one folder."""
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(build: Path, source: Path = ROOT, modules: Sequence[str] = ("_native", "_native_failpoints")) -> Path:
    """Build the modules of `source` in `build`, copy its tree beside them; returns the interpreter that sees only these."""
    runtimes()
    cmake, ninja = tool("cmake"), tool("ninja")
    objects, tree, venv = build / "objects", build / "tree", build / "venv"
    configure = [
        cmake,
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DCMAKE_CXX_COMPILER=g++",
        f"-DCMAKE_CXX_FLAGS={FLAGS}",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-g1",
        "-DSHMBUF_OPTIMIZE=-O0",  # builds in a third of the time of -O1
        "-DSHMBUF_FAILPOINTS=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run([*configure, "-S", source, "-B", objects], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", objects, "--target", *modules], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree, ignore_errors=True)
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, tree / name, ignore=shutil.ignore_patterns("out", "__pycache__", "*.so"))
        elif (source / name).exists():
            shutil.copy(source / name, tree / name)
    for module in modules:
        (built,) = objects.glob(f"{module}.*.so")
        shutil.copy(built, tree / "shmbuf")
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    asked = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # A plain path, whose own .pth files are not read: one of these may lead to an installed shmbuf.
    Path(asked.stdout.strip(), "sanitized.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n")
    return python


def environment(reports: Path) -> dict[str, str]:
    """Where sanitizers look; whatever they find, in any process that inherits it, goes to a file under `reports`."""
    common = f"abort_on_error=1:halt_on_error=1:print_stacktrace=1:log_path={reports}/report"
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes()),
        # Leaks: CPython leaves much behind at its end. Allocations of absurd size are tests of MemoryError.
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": common,
        "PYTHONMALLOC": "malloc",  # small objects, too, have an end that is guarded
        "PYTHONFAULTHANDLER": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "",
    }


def run(
    build: Path,
    python: Path,
    command: Sequence[str],
    more: Mapping[str, str] = MappingProxyType({}),
    *,
    show: bool = False,
) -> tuple[int, str, dict[str, str]]:
    """`python *command` in the copied tree: its exit status, its output (none if it is to `show` at once), the reports by file name."""
    reports, tree = build / "reports", build / "tree"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    env = {**environment(reports), **more}
    where = "import shmbuf, shmbuf._native as n; print(shmbuf.__file__, n.__file__)"
    seen = subprocess.run([python, "-c", where], cwd=tree, env=env, capture_output=True, text=True, check=False)
    paths = seen.stdout.split()
    if seen.returncode or not paths or any(Path(p).parent != tree / "shmbuf" for p in paths):
        raise RuntimeError(f"not the sanitized copy: {seen.stdout}{seen.stderr}")
    to = None if show else subprocess.PIPE
    done = subprocess.run(
        [python, *command], cwd=tree, env=env, stdout=to, stderr=subprocess.STDOUT, text=True, check=False
    )
    return (
        done.returncode,
        done.stdout or "",
        {p.name: p.read_text(errors="replace") for p in sorted(reports.iterdir())},
    )


def imports_torch(file: Path) -> bool:
    return "torch" in file.name or any(
        word in file.read_text() for word in ("import torch", "helpers_torch", "make_rb", "from tensordict")
    )


def chosen(tree: Path, fast: bool, torch: bool) -> list[str]:
    """The test files to run."""
    out = []
    for file in sorted((tree / "tests").rglob("test_*.py")):
        name = str(file.relative_to(tree))
        if name.startswith(LEFT_OUT) or (fast and not name.startswith(FAST)):
            continue
        if torch or not (imports_torch(file) or name in IN_TORCH):
            out.append(name)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "asan", help="the folder (default: build/asan)")
    parser.add_argument("--fast", action="store_true", help="unit and property tests only")
    parser.add_argument("--torch", action="store_true", help="also tests that import torch")
    parser.add_argument("--build-only", action="store_true")
    args, more = parser.parse_known_args(argv)
    build = args.build.resolve()
    with alone(build):
        python = prepare(build)
        if args.build_only:
            return 0
        files = (
            []
            if any(not m.startswith("-") and (build / "tree" / m.split("::")[0]).exists() for m in more)
            else chosen(build / "tree", args.fast, args.torch)
        )
        tests = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--timeout=600",
            *(f"--deselect={t}" for t in LIMITED),
            *files,
            *more,
        ]
        status, _, reports = run(build, python, tests, show=True)
    for name, text in reports.items():
        print(f"---- {build / 'reports' / name}\n{text}")
    print(f"{len(reports)} reports, pytest exit status {status}")
    return 1 if reports else status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotBuild as e:
        sys.exit(f"sanitize.py: {e}")
