"""`python -m tools.bench`: run the cases, print the table."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from . import machine, peers, plan, report
from .isolate import Outcome, run_case
from .lines import lines
from .results import Results
from .settings import FULL, QUICK, Settings

REVERB_PYTHON = Path(sys.prefix, "reverb", "bin", "python")


def main() -> int:
    args = _arguments()
    settings = QUICK if args.quick else FULL
    chosen = {"rounds": args.rounds, "timeout": args.timeout}
    settings = replace(settings, **{k: v for k, v in chosen.items() if v is not None})
    cases = plan.cases(args.only)
    if args.list:
        print(*(case.name for case in cases), sep="\n")
        return 0

    # Piped into a file, the table may be as wide as it needs.
    console, results = Console(width=None if sys.stdout.isatty() else 180), Results()
    others = machine.Others()
    for number in range(args.passes):
        for index, case in enumerate(cases, 1):
            start = time.monotonic()
            error = _run(case, settings, results)
            console.print(
                f"pass {number + 1}, case {index}/{len(cases)}: {case.name}, "
                f"{time.monotonic() - start:.0f} s{f' - {error}' if error else ''}",
                markup=False,
                highlight=False,
            )

    about = machine.describe()
    copied = max(results.values.get("memcpy", [0]))
    about["memcpy"] = f"{copied / 1e9:.1f} GB/s"
    about["others"] = f"{others.share():.0%}"
    table, notes = lines(results, settings), report.Footnotes(results.errors)
    cells = report.rows(table, notes)
    report.show(console, about, cells, notes)
    if args.markdown:
        args.markdown.write_text(report.markdown(about, cells, notes))
    if args.json:
        args.json.write_text(report.as_json(about, settings, results, table))
    # A peer may fail; shmbuf may not.
    return int(any(key.endswith((peers.OURS, peers.OURS_NUMPY)) for key in results.errors))


def _run(case: plan.Case, settings: Settings, results: Results) -> str | None:
    python = sys.executable
    if case.contender == "reverb":
        if not REVERB_PYTHON.exists():
            missing = "not installed (tools/bench/requirements-reverb.txt)"
            results.add(case, Outcome(error=missing))
            return missing
        python = str(REVERB_PYTHON)
    spec = case.spec(settings)
    while True:
        outcome = run_case(spec, settings.timeout, python)
        results.add(case, outcome)
        if outcome.error is None or outcome.at not in spec["contenders"]:
            return outcome.error
        # One of several in a process brought it down: the others get their figures without it.
        spec["contenders"].remove(outcome.at)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small fills, one short round")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="cases with this in their name, or matching this pattern; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--passes", type=int, default=1, help="run everything so many times")
    parser.add_argument("--rounds", type=int, help="rounds of each ingest figure")
    parser.add_argument("--timeout", type=float, help="seconds after which a case counts as hung")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
