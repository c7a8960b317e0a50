"""Run the models of the protocols: SPIN for what may interleave, small C programs for what may be reordered.

    python tools/dev/models.py [--soak] [--list] [--jobs N] [NAME …]

Every entry says what it expects: a model of what the code does must hold; a mutant of it must fail, or the model could not have
found the bug. ``tests/models/test_models.py`` runs the entries marked ci. Needs ``spin`` and ``gcc``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "tests" / "models"


@dataclass(frozen=True)
class Result:
    ok: bool
    verdict: str
    states: int
    seconds: float
    detail: str


@dataclass(frozen=True)
class Spin:
    """One model with its flags, explored exhaustively: no deadlock and no violated assertion, or (mutants) one of the two."""

    model: str
    flags: str
    holds: bool = True
    soak: bool = False
    cc: str = "-O0"  # compiling the verifier costs more than running most of them
    limit: int = 60  # seconds of processor time: the machine may be busy

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.model.removesuffix(".pml"), self.flags]))

    def missing(self) -> str | None:
        return next((f"{tool} is not installed" for tool in ("spin", "gcc") if not shutil.which(tool)), None)

    def run(self) -> Result:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="shmbuf-model-") as where:
            out = self._explore(Path(where))
        seconds = time.monotonic() - began
        errors = re.search(r"errors: (\d+)", out)
        found = re.search(r"assertion violated .*|invalid end state.*\(at depth", out)
        states = re.search(r"(\d+) states, stored", out)
        incomplete = re.search(
            r"max search depth too small|out of memory|memory limit|hash array full|timed out|interrupted", out
        )
        if errors and int(errors[1]) and found:
            verdict = "fails"
        elif errors and not int(errors[1]) and not incomplete:
            verdict = "holds"
        else:
            verdict = "no answer: " + (incomplete[0] if incomplete else out[-2000:])
        expected = "holds" if self.holds else "fails"
        return Result(verdict == expected, verdict, int(states[1]) if states else 0, seconds, found[0] if found else "")

    def _explore(self, where: Path) -> str:
        def call(*command: str) -> str:
            limited = ["sh", "-c", 'ulimit -t "$0" && exec "$@"', str(self.limit), *command]
            done = subprocess.run(limited, cwd=where, capture_output=True, text=True, check=False)
            timed_out = (
                f"timed out after {self.limit} s" if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL) else ""
            )
            return done.stdout + done.stderr + timed_out

        shutil.copy(MODELS / self.model, where / "model.pml")
        out = call("spin", "-a", *self.flags.split(), "model.pml")
        if not (where / "pan.c").exists():
            return out
        memory = "24000" if self.soak else "3000"
        options = ["-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={memory}", "-DVECTORSZ=2048", *self.cc.split()]
        out = call("gcc", *options, "-o", "pan", "pan.c")
        if not (where / "pan").exists():
            return out
        return call("./pan", "-m1000000", f"-w{26 if self.soak else 21}")


@dataclass(frozen=True)
class Litmus:
    """One C file, its two threads meeting again and again: natively on this machine's memory model, or under TSan. Weak by nature;
    the verdicts of a model checker for weak memory are recorded in the files."""

    file: str
    tool: str  # "native", "tsan"
    flags: str = ""
    holds: bool = True
    soak: bool = False
    milliseconds: int = 400

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.file, self.tool, self.flags]))

    def missing(self) -> str | None:
        return None if shutil.which("gcc") else "gcc is not installed"

    def run(self) -> Result:
        began = time.monotonic()
        length = self.milliseconds * (25 if self.soak else 1)
        with tempfile.TemporaryDirectory(prefix="shmbuf-litmus-") as where:
            program = str(Path(where) / "litmus")
            tool = ["-O1", "-g", "-fsanitize=thread"] if self.tool == "tsan" else ["-O2"]
            options = [
                "-std=gnu11",
                *tool,
                "-Wall",
                "-Wno-tsan",
                "-pthread",
                f"-DMILLISECONDS={length}",
                *self.flags.split(),
            ]
            built = subprocess.run(
                ["gcc", *options, str(MODELS / self.file), "-o", program], capture_output=True, text=True, check=False
            )
            if built.returncode:
                return Result(False, "does not build", 0, time.monotonic() - began, built.stderr)
            # newer kernels map where TSan's shadow must be
            fixed = ["setarch", "-R"] if self.tool == "tsan" and shutil.which("setarch") else []
            done = subprocess.run(
                [*fixed, program],
                capture_output=True,
                text=True,
                check=False,
                timeout=length / 1000 + 60,
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
            )
        rounds = re.search(r"(\d+) rounds", done.stdout)
        bad = re.search(r"Assertion.*|WARNING: ThreadSanitizer.*", done.stderr)
        verdict = "holds" if done.returncode == 0 else "fails" if bad else f"no answer: {done.stderr[-500:]}"
        expected = "holds" if self.holds else "fails"
        return Result(
            verdict == expected,
            verdict,
            int(rounds[1]) if rounds else 0,
            time.monotonic() - began,
            bad[0] if bad else "",
        )


Entry = Spin | Litmus
BIG = "-O2"


def _mutants(model: str, *flags: str, cc: str = "-O0") -> list[Entry]:
    return [Spin(model, f, holds=False, cc=cc) for f in flags]


ENTRIES: list[Entry] = [
    # rings → writer → rows, killed anywhere
    Spin("commit.pml", "", cc=BIG),
    Spin("commit.pml", "-DFREE -DCRASHES=1", cc=BIG),
    Spin("commit.pml", "-DMAXREC=5 -DCRASHES=3", soak=True, cc=BIG, limit=600),
    Spin("commit.pml", "-DFREE -DMAXREC=5 -DCRASHES=3", soak=True, cc=BIG, limit=600),
    *_mutants("commit.pml", "-DFREE -DM1", "-DM2", "-DFREE -DM3", "-DM4", "-DM5"),
    # transactions and the sealed plan
    Spin("txn.pml", "-DSEAL -DSC=1", cc=BIG),
    Spin("txn.pml", "-DSEAL -DSC=2 -DCRASHES=1", cc=BIG),
    Spin("txn.pml", "-DSEAL -DSC=4 -DCRASHES=1", cc=BIG),
    Spin("txn.pml", "-DSEAL -DSC=4 -DUPD"),
    Spin("txn.pml", "-DSEAL -DSC=5 -DVICTIM"),
    Spin("txn.pml", "-DSEAL -DSC=6"),
    Spin("txn.pml", "-DSEAL -DSC=1 -DCRASHES=3", soak=True, cc=BIG, limit=600),
    Spin("txn.pml", "-DSEAL -DSC=2", soak=True, cc=BIG, limit=600),
    Spin("txn.pml", "-DSEAL -DSC=3 -DLINKS", soak=True, cc=BIG, limit=900),
    Spin("txn.pml", "-DSEAL -DSC=4", soak=True, cc=BIG, limit=600),
    Spin("txn.pml", "-DSEAL -DSC=4 -DCLEAR_POST", soak=True, cc=BIG, limit=600),
    Spin("txn.pml", "-DSEAL -DSC=6 -DCRASHES=3", soak=True, cc=BIG),
    *_mutants(
        "txn.pml",
        "-DSC=1 -DRELAX",
        "-DSC=2 -DRELAX",
        "-DSEAL -DSC=1 -DLATESEAL",
        "-DSEAL -DSC=4 -DBASE_FIRST",
        "-DSEAL -DSC=4 -DUPD -DKEEPGEN",
        "-DSEAL -DSC=5",
        "-DSEAL -DSC=6 -DSKIPNOW",
        "-DSC=3 -DLINKS -DRELAX -DLINK_T3",
    ),
    # the writer role and its sleepers
    Spin("role.pml", "-DSLICE"),
    Spin("role.pml", "-DSLICE -DCRASH1"),
    Spin("role.pml", "-DSLICE -DSAMEFD -DMUTEX"),
    Spin("role.pml", "-DSLICE -DREADER -DCRASH1"),
    Spin("role.pml", "-DSLICE -DDRAIN", cc=BIG),
    Spin("role.pml", "-DRETRY"),
    Spin("role.pml", "-DRETRY -DSAMEFD -DMUTEX"),
    Spin("role.pml", "-DSLICE -DDRAIN -DREADER -DCRASH1 -DSAMEFD -DMUTEX", soak=True, cc=BIG, limit=600),
    Spin("role.pml", "-DRETRY -DDRAIN -DREADER", soak=True, cc=BIG, limit=600),
    *_mutants("role.pml", "-DRETRY -DNORECHECK", "-DRETRY -DNOHAND", "-DRETRY -DCRASH1", "-DSLICE -DSAMEFD"),
    # the rate limiter's sleepers
    Spin("limiter.pml", "", cc=BIG),
    Spin("limiter.pml", "-DKILLER -DSLICE", cc=BIG),
    Spin("limiter.pml", "-DNODRAIN -DFULL -DPUTS=3"),
    Spin("limiter.pml", "-DNODRAIN -DNUM=2 -DPUTS=4 -DTAKES=3"),
    Spin("limiter.pml", "-DNODRAIN -DDEN=2 -DN=2 -DPUTS=6"),
    Spin("limiter.pml", "-DPUTS=3", soak=True, cc=BIG, limit=600),
    Spin("limiter.pml", "-DNODRAIN -DFULL -DPUTS=4 -DTAKES=2", soak=True, cc=BIG, limit=600),
    *_mutants(
        "limiter.pml",
        "-DNOWAKE",
        "-DNODRAIN -DNOWAKE",
        "-DWAKER_NOFENCE",
        "-DWRITER_NOFENCE",
        "-DPLAIN_RUNNABLE",
        "-DNORECHECK",
        "-DSLEEPER_NOFENCE",
        "-DNARROW",
        "-DKILLER",
        "-DNODRAIN -DNUM=2 -DPUTS=4 -DTAKES=3 -DONEBIT",
    ),
    # a collector's slot
    Spin("slot.pml", "", cc=BIG),
    Spin("slot.pml", "-DCRASHES=4", soak=True, cc=BIG, limit=600),
    *_mutants("slot.pml", "-DNORECHECK", "-DNOREDRAIN", "-DNOLOCK", "-DUNLOCKFIRST"),
    # pins
    Spin("edit.pml", "", cc=BIG),
    Spin("edit.pml", "-DKILLS=3", cc=BIG),
    Spin("edit.pml", "-DVERSIONS -DKILLS=2", cc=BIG),
    Spin("edit.pml", "-DTWO", soak=True, cc=BIG, limit=600),
    *_mutants("edit.pml", "-DNORAISE", "-DNOSTRIPE", "-DEVENEARLY", "-DHALF", "-DMARKLATE", cc=BIG),
    Spin("pin.pml", ""),
    Spin("pin.pml", "-DREVOKE"),
    *_mutants(
        "pin.pml", "-DNOFENCE", "-DP1LATE", "-DWAITIN", "-DLOWERALWAYS", "-DREVOKE -DBLIND", "-DREVOKE -DLATEREVOKE"
    ),
    # the birth of a segment
    Spin("build.pml", ""),
    Spin("build.pml", "-DTHREADS -DMUTEX"),
    *_mutants("build.pml", "-DEARLY", "-DBUILT_EARLY", "-DNORECHECK", "-DTHREADS"),
    # priorities
    Spin("leaf.pml", "", cc=BIG),
    Spin("leaf.pml", "-DLAST=5 -DCRASHES=3", soak=True, cc=BIG, limit=600),
    *_mutants("leaf.pml", "-DNOGEN", "-DPLAIN", "-DNOSIGN", "-DNOREDO"),
    Spin("tree16.pml", ""),
    Spin("tree16.pml", "-DDIE"),
    Spin("tree16.pml", "-DTHREE", soak=True, cc=BIG, limit=900),
    *_mutants("tree16.pml", "-DSINGLE", "-DTHREE -DTAGLAST", "-DTHREE -DCAS8", "-DTHREE -DNOTAG"),
    Spin("tree16.pml", "-DTHREE -DSKIPEQ", holds=False, cc="-O2 -DREVERSE"),
    # memory order
    *(
        Litmus(f, tool, soak=soak)
        for f in ("ring.c", "sleep.c", "reserve.c", "block.c", "tree.c")
        for tool in ("native", "tsan")
        for soak in (False, True)
    ),
    Litmus("ring.c", "tsan", "-DTAIL_ST=memory_order_relaxed", holds=False),
    Litmus("ring.c", "tsan", "-DHEAD_ST=memory_order_relaxed", holds=False),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only entries whose name contains this")
    parser.add_argument("--soak", action="store_true", help="the long ones too (up to 24 GB)")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    chosen = [
        e for e in ENTRIES if (args.soak or not e.soak) and (not args.names or any(n in e.name for n in args.names))
    ]
    if args.list:
        for e in chosen:
            print(f"{'holds' if e.holds else 'fails'}  {'soak' if e.soak else 'ci  '}  {e.name}")
        return 0
    if not chosen:
        print("no entry has such a name; --list shows them", file=sys.stderr)
        return 2

    def one(entry: Entry) -> bool:
        if why := entry.missing():
            print(f"skip   {entry.name}: {why}", flush=True)
            return True
        r = entry.run()
        what = "ok  " if r.ok else f"BAD (must {'hold' if entry.holds else 'fail'})"
        unit = "states" if isinstance(entry, Spin) else "rounds"
        print(
            f"{what}  {entry.name}: {r.verdict}, {r.states:,} {unit}, {r.seconds:.1f} s  {r.detail[:100]}", flush=True
        )
        return r.ok

    with ThreadPoolExecutor(args.jobs) as pool:
        return 0 if all(list(pool.map(one, chosen))) else 1


if __name__ == "__main__":
    sys.exit(main())
