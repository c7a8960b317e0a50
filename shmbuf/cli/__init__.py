"""`shminfo`: what lies in shared memory, who is attached, what goes on, what is wrong, and how to get rid of it.

Looking leaves no trace: it maps read-only, takes no lock and no entry in any table. Never imports torch, and numpy only to
plot. Each command's module is imported when the command is given.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from typing import Any

from shmbuf import __version__
from shmbuf.cli.looking import ERRORS
from shmbuf.printing import printable

EPILOG = """examples:
  shminfo                         this user's buffers
  shminfo show pong               everything about one of them
  shminfo --json | jq '.[].name'  for programs; also: shminfo show pong --json
  shminfo top pong                rates, ages, who waits for whom, live; q ends
  shminfo top pong --json | jq -c '[.time, .rate.put_rows, .rate.sampled_rows]'
  shminfo check pong              is it sound?
  shminfo doctor                  what is wrong here, each with its remedy
  shminfo gc --dry-run            what dead processes left behind; without --dry-run it goes
  shminfo rm pong breakout        remove two; --force: also what is attached, damaged or kept by a steward
  shminfo metrics --serve 9100    for Prometheus, on http://127.0.0.1:9100/metrics
  shminfo plot pong -o pong.png   rates of 10 seconds, and ages of sampled rows

exit status: 0 ok, 1 the request failed or something is wrong (no such buffer, in use, a finding), 2 wrong usage"""


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: {what}, {low:g} to {high:g}")
    return value


def _interval(text: str) -> float:
    return _number(text, 0.01, 86_400, "a number of seconds")


def _port(text: str) -> int:
    value = _number(text, 0, 65_535, "a port")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r}: a port, a whole number")
    return int(value)


def parser() -> argparse.ArgumentParser:
    """The command line. Options work before and after the command."""

    def options(p: argparse.ArgumentParser, **default: Any) -> None:
        p.add_argument("--json", action="store_true", help="for programs: complete, numbers as numbers", **default)
        p.add_argument("--owner", type=int, metavar="UID", help="another user's buffers", **default)

    def command(name: str, where: str, text: str, *, all_users: bool = False) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        options(p, default=argparse.SUPPRESS)  # one left out must not undo one before the command
        if all_users:
            p.add_argument("--all-users", action="store_true", default=argparse.SUPPRESS, help="everybody's buffers")
        p.set_defaults(run=f"{where}:{name}_command", takes_all_users=all_users)
        return p

    top = argparse.ArgumentParser(
        prog="shminfo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        description="Look at shmbuf's buffers without disturbing them, and remove them.",
    )
    top.add_argument("--version", action="version", version=f"shminfo {__version__}")
    options(top)
    top.add_argument("--all-users", action="store_true", help="everybody's buffers (list, doctor, metrics)")
    top.set_defaults(run="listing:list_command", takes_all_users=True)
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    command("list", "listing", "list buffers (also what no command does)", all_users=True)
    command("show", "showing", "show everything about one buffer").add_argument("name")
    _looking_commands(command)
    rm = command("rm", "removing", "destroy buffers that nobody is attached to")
    rm.add_argument("names", metavar="name", nargs="+")
    rm.add_argument(
        "--force",
        action="store_true",
        help="also if somebody is attached (who gets StorageLost), a steward keeps it, or it is damaged",
    )
    gc = command("gc", "removing", "remove what dead processes left: stale unnamed buffers, half-made and empty files")
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.add_argument(
        "--all-unattached",
        action="store_true",
        help="also named buffers nobody is attached to, with their rows, which else are kept for whoever attaches next; not what a steward keeps",
    )
    return top


def _looking_commands(command: Any) -> None:
    p = command("top", "top", "watch one buffer: rates, ages of sampled rows, who waits for whom; q or Ctrl-C ends")
    p.add_argument("name")
    p.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    p.add_argument("--once", action="store_true", help="one interval, then end")
    command("check", "checking", "verify one buffer: header, cursors, rings, priorities, links").add_argument("name")
    command("doctor", "doctor", "tell what is wrong with buffers and machine, and the remedies", all_users=True)
    p = command("metrics", "metrics", "print or serve the figures for Prometheus", all_users=True)
    p.add_argument("names", metavar="name", nargs="*", help="default: every buffer there is")
    p.add_argument("--serve", type=_port, metavar="PORT", help="serve them until Ctrl-C; 0: any free port")
    p.add_argument("--address", default="127.0.0.1", help="to serve on (default 127.0.0.1: this machine only)")
    p = command("dump", "dumping", "save one buffer into a directory (a checkpoint) while others go on")
    p.add_argument("name")
    p.add_argument("path")
    p.add_argument(
        "--complete", action="store_true", help="keep every row: writers wait (otherwise the oldest may be left out)"
    )
    p.add_argument("--progress", action="store_true", help="a bar on stderr")
    p = command("plot", "plotting", "observe one buffer and draw its rates and the ages of sampled rows (PNG)")
    p.add_argument("name")
    p.add_argument("-o", "--output", metavar="FILE.png", required=True)
    p.add_argument("--seconds", type=_interval, default=10.0, help="how long to look (default 10)")


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns the exit status (argparse exits by itself, with 2)."""
    for each in ("stdout", "stderr"):
        if getattr(sys, each) is None:  # it was closed
            setattr(sys, each, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a name shall still show the numbers
    try:
        try:
            p = parser()
            args = p.parse_args(argv)
            if args.all_users and (not args.takes_all_users or args.owner is not None):
                p.error("--all-users goes with list, doctor and metrics, and not with --owner")
            args.owner = os.getuid() if args.owner is None else args.owner
            where, name = args.run.split(":")
            run = getattr(importlib.import_module(f"shmbuf.cli.{where}"), name)
            return int(run(args))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except ERRORS as e:
        print(printable(f"shminfo: {e}"), file=sys.stderr)
        return 1
