"""Seeded bugs: each must be caught by at least one test, or the tests have a hole.

    python tools/dev/mutants.py [--list] [--jobs N] [--json] [NAME …]

``mutants.toml`` holds them: one replacement in one file, what goes wrong for a user, and the tests that should notice, fastest first.
Each is applied to a copy of the tree of its own, the core compiled there with the flags of the project's build, and its tests run
one after another until one fails. Before that all these tests must pass in an unmutated copy: a test that fails anyway catches
nothing. Caught means: tests were collected and one failed, the process died of a signal, or it did not end ("hang") in a time that
the unmutated one is far below. Whatever else happens (does not compile, no such test) is an error, not a catch.

Runs in the project's environment (``make build``). Where namespaces are permitted every run gets a /dev/shm and pids of its own, so
that nothing a broken core leaves behind outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_suffix(".toml")
MODULES = ("_native", "_native_failpoints")
USED = "_native_failpoints"  # by all tests here, so that of a mutant one module has to be compiled; no failpoint is armed by itself
LIBRARY = "libnanobind-static.a"
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.so", "out")
FIRST = 300.0  # seconds for a test without a mutant
PATIENCE, LEAST = 6, 40.0  # a hang: so many times what that took, and at least so many seconds


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    breaks: str  # for a user
    tests: tuple[str, ...]  # pytest node ids, each perhaps with " -k …"

    @property
    def native(self) -> bool:
        return self.file.startswith("shmbuf/native/")

    def problem(self, root: Path = ROOT) -> str | None:
        """Why it cannot be run: it is stale, or its tests are gone."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if (n := text.count(self.old)) != 1:
            return f"its old text is found {n} times in {self.file}, must be once"
        if self.old == self.new:
            return "it changes nothing"
        for test in self.tests:
            file, _, function = re.split(r"\[| -k ", test)[0].partition("::")
            where = root / file
            if not where.is_file() or not re.search(
                rf"\b(def|class) {re.escape(function.split('::')[0])}\b", where.read_text()
            ):
                return f"there is no test {test}"
        return None if self.tests else "it names no test"

    def apply(self, root: Path) -> None:
        if why := self.problem(root):
            raise RuntimeError(why)
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def load(path: Path = DATA) -> list[Mutant]:
    with path.open("rb") as f:
        found = [Mutant(**{**m, "tests": tuple(m["tests"])}) for m in tomllib.load(f)["mutant"]]
    twice = {m.name for m in found if sum(m.name == o.name for o in found) > 1}
    if twice:
        raise ValueError(f"two mutants of one name: {', '.join(sorted(twice))}")
    return found


@dataclass(frozen=True)
class Outcome:
    """Of one test run, or of a mutant (then `by` is the test that caught it)."""

    verdict: str  # caught, hang, crash, passed, skipped, error; of a mutant: survived for passed
    seconds: float
    by: str = ""
    detail: str = ""

    @property
    def caught(self) -> bool:
        return self.verdict in ("caught", "hang", "crash")


class Workshop:
    """A directory with the unmutated tree, built, and a Python that sees its packages but not the checkout's editable install."""

    def __init__(self, directory: Path):
        self.directory, self.base = directory, directory / "base"
        self.python = directory / "python" / "bin" / "python"
        self._recipes: dict[str, list[str]] = {}  # of each module: one compilation and one link

    # ---- environments -------------------------------------------------------------------------------------------

    def open(self) -> None:
        shutil.copytree(ROOT, self.base, ignore=NOT_COPIED)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.python.parents[1]], check=True)
        # As a line of a .pth the directory is searched, but its own .pth files, the editable install's hook among them, are not run.
        own = Path(self._says("import sysconfig; print(sysconfig.get_path('purelib'))"))
        (own / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self._isolate = self._namespaces()

    def _says(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    @staticmethod
    def _namespaces() -> list[str]:
        """A prefix that gives a command its own /dev/shm and its own pids, if that is permitted."""
        prefix = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        prefix += ['mount -t tmpfs -o mode=1777 tmpfs /dev/shm && "$@"; exit $?', "sh"]
        if not shutil.which("unshare"):
            return []
        permitted = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
        return prefix if permitted else []

    def _environment(self, tree: Path) -> dict[str, str]:
        ours = ("PYTHON", "SHMBUF_", "PYTEST_", "MAKE", "MFLAGS")
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        env.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", SHMBUF_NATIVE="failpoints")
        # CI: hypothesis tries the same each time. CXXFLAGS: a warning in tests/native about what a mutant left unused is no catch.
        return {**env, "CI": "1", "CXXFLAGS": "-Wno-error"}

    # ---- building -----------------------------------------------------------------------------------------------

    def build_base(self) -> None:
        build, tools = self.base / "build", Path(sys.executable).parent
        ninja = tools / "ninja"
        if not ninja.exists():
            raise RuntimeError(
                f"{ninja} is missing: run this with the Python of the project's environment (make build)"
            )
        configure = [tools / "cmake", "-S", self.base, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        # -O1: as wrong at any level, and compiled in half the time.
        self._run(
            *configure, f"-DPython_EXECUTABLE={sys.executable}", "-DSHMBUF_FAILPOINTS=ON", "-DSHMBUF_OPTIMIZE=-O1"
        )
        self._run(ninja, "-C", build, LIBRARY)
        for module in MODULES:
            said = self._run(ninja, "-C", build, "-t", "commands", module)
            self._recipes[module] = [x for x in said.splitlines() if re.search(r"module\.cpp|-o _native", x)]
        for module in MODULES:
            self._make(module, self.base)

    def _make(self, module: str, tree: Path) -> None:
        """One of the modules out of this tree's sources, into its package."""
        build = tree / "build"
        (build / "CMakeFiles" / f"{module}.dir" / "shmbuf" / "native").mkdir(parents=True, exist_ok=True)
        if tree != self.base:
            os.symlink(self.base / "build" / LIBRARY, build / LIBRARY)
        for line in self._recipes[module]:
            self._run("sh", "-c", line.replace(str(self.base), str(tree)), cwd=build)
        (made,) = build.glob(f"{module}.*.so")
        shutil.move(made, tree / "shmbuf" / made.name)

    def _run(self, *command: object, **how: Any) -> str:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **how)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(map(str, command))}:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def verify(self, tree: Path) -> None:
        """Raises unless this tree's package and both modules are what an interpreter imports there."""
        code = "import shmbuf, shmbuf._native as a, shmbuf._native_failpoints as b; print(shmbuf.__file__, a.__file__, b.__file__, sep='\\n')"
        said = self._run(self.python, "-c", code, cwd=tree, env=self._environment(tree))
        if wrong := [p for p in said.split() if not Path(p).is_relative_to(tree / "shmbuf")]:
            raise RuntimeError(f"{wrong} was imported, which is not under {tree}")

    # ---- running ------------------------------------------------------------------------------------------------

    def test(self, tree: Path, test: str, limit: float) -> Outcome:
        """One node id there, alone."""
        inner = max(1, int(limit) - 5)  # pytest's, which says where it hung; ours is for what does not even hear that
        pytest = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "-o", f"timeout={inner}"]
        node, *chosen = test.split(" -k ")
        command = [*self._isolate, self.python, *pytest, node, *(f"-k={k}" for k in chosen)]
        began = time.monotonic()
        p = subprocess.Popen(
            list(map(str, command)), cwd=tree, env=self._environment(tree), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, late = p.communicate(timeout=limit)[0], False
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            late = True
            try:  # a stray of the run may hold the pipe open where there are no pid namespaces
                said = p.communicate(timeout=5)[0]
            except subprocess.TimeoutExpired:
                said = ""
        verdict = "hang" if late else _verdict(p.returncode, said)
        return Outcome(verdict, time.monotonic() - began, test, "" if verdict == "passed" else _why(said))

    def mutate(self, m: Mutant, limits: dict[str, float]) -> Outcome:
        tree = self.directory / f"m-{m.name}"
        began = time.monotonic()
        try:
            shutil.copytree(self.base, tree, ignore=shutil.ignore_patterns("build"))
            m.apply(tree)
            if m.native:  # also for tests that compile the headers themselves: what does not compile is no mutant
                self._make(USED, tree)
            self.verify(tree)
            out = Outcome("error", 0.0, detail="none of its tests can run here")
            for test in m.tests:
                if test not in limits:
                    continue
                out = self.test(tree, test, limits[test])
                if out.verdict != "passed":
                    break
            verdict = {"passed": "survived", "skipped": "error"}.get(out.verdict, out.verdict)
            return Outcome(verdict, time.monotonic() - began, out.by if out.caught else "", out.detail)
        except RuntimeError as e:
            return Outcome("error", time.monotonic() - began, detail=str(e))
        finally:
            shutil.rmtree(tree, ignore_errors=True)


def _verdict(code: int, said: str) -> str:
    if code == 0:
        return "passed" if re.search(r"\b\d+ passed", said) or not re.search(r"\b\d+ skipped", said) else "skipped"
    if code < 0 or code > 128:
        return "crash"
    if "Timeout (>" in said or "+ Timeout +" in said:
        return "hang"
    # 1: some failed. An error is a fixture's: what the test left behind, or an import that does not work, which is no catch.
    return "caught" if code == 1 and re.search(r"\b\d+ failed|\bERROR at teardown", said) else "error"


def _why(said: str) -> str:
    for pattern in (r"VIOLATION: .*", r"^(?:E  |Fatal|ERROR|FAILED).*"):
        if found := re.search(pattern, said, re.MULTILINE):
            return found[0].strip()
    return said[-500:].strip()


# ---- the whole of it -----------------------------------------------------------------------------------------------


def each(jobs: int, work: Callable, items: Iterable) -> list:
    pool = ThreadPoolExecutor(jobs)
    try:
        return list(pool.map(work, items))
    finally:  # after Ctrl-C what runs still ends, but nothing more begins
        pool.shutdown(cancel_futures=True)


def measure(shop: Workshop, tests: list[str], jobs: int, say: Callable[[str], None]) -> dict[str, float]:
    """How long each may take, from what it takes unmutated. Raises RuntimeError if one does not pass there."""

    def one(test: str) -> Outcome:
        out = shop.test(shop.base, test, FIRST)
        say(f"{out.verdict:8} {out.seconds:6.1f} s  {test}")
        return out

    outs = each(jobs, one, tests)
    if failed := [o for o in outs if o.verdict not in ("passed", "skipped")]:
        text = "\n".join(f"  {o.by}: {o.verdict}: {o.detail}" for o in failed)
        raise RuntimeError(f"these tests do not pass without any mutant, so nothing can be learnt from them:\n{text}")
    return {o.by: max(LEAST, PATIENCE * o.seconds) for o in outs if o.verdict == "passed"}


def run(mutants: list[Mutant], jobs: int, say: Callable[[str], None]) -> list[Outcome]:
    if stale := [f"{m.name}: {why}" for m in mutants if (why := m.problem())]:
        raise RuntimeError("\n".join(stale))
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as directory:
        shop = Workshop(Path(directory).resolve())
        shop.open()
        shop.build_base()
        shop.verify(shop.base)
        limits = measure(shop, sorted({t for m in mutants for t in m.tests}), jobs, say)

        def one(m: Mutant) -> Outcome:
            out = shop.mutate(m, limits)
            say(f"{out.verdict:8} {out.seconds:6.1f} s  {m.name}: {out.by or out.detail}")
            return out

        order = sorted(mutants, key=lambda m: not m.native)  # the long ones first
        outs = dict(zip(order, each(jobs, one, order), strict=True))
    return [outs[m] for m in mutants]


def table(mutants: list[Mutant], outs: list[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    t = Table(title=f"{sum(o.caught for o in outs)} of {len(outs)} seeded bugs caught", show_lines=True)
    for column in ("mutant", "file", "what it breaks", "caught by", "s"):
        t.add_column(column, no_wrap=column == "mutant", overflow="fold", justify="right" if column == "s" else "left")
    for m, o in zip(mutants, outs, strict=True):
        how = "" if o.verdict == "caught" else f" ({o.verdict})"
        by = Text(o.by.removeprefix("tests/") + how) if o.caught else Text(o.verdict, "bold red")
        t.add_row(m.name, m.file.removeprefix("shmbuf/"), m.breaks, by, f"{o.seconds:.0f}")
    Console(width=None if sys.stdout.isatty() else 160).print(t)


def main() -> int:
    parser = argparse.ArgumentParser(description="Seeded bugs that the tests must catch.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="what there is, without running it")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--json", action="store_true", help="results as JSON instead of a table")
    args = parser.parse_args()
    mutants = load()
    if unknown := set(args.names) - {m.name for m in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}; --list shows them")
    mutants = [m for m in mutants if not args.names or m.name in args.names]
    if args.list:
        for m in mutants:
            print(f"{m.name:36} {m.file:38} {m.breaks}")
        return 0
    began = time.monotonic()
    try:
        outs = run(mutants, max(1, args.jobs), lambda line: print(line, file=sys.stderr, flush=True))
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([{**asdict(m), **asdict(o)} for m, o in zip(mutants, outs, strict=True)], indent=1))
    else:
        table(mutants, outs)
    bad = [m.name for m, o in zip(mutants, outs, strict=True) if not o.caught]
    print(f"{len(outs) - len(bad)} of {len(outs)} caught in {time.monotonic() - began:,.0f} s", file=sys.stderr)
    if bad:
        print(f"not caught: {', '.join(bad)}. Each is a hole in the tests, or no bug.", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
