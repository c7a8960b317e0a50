"""`shminfo top NAME`: a buffer at work."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from shmbuf.cli.looking import Info
from shmbuf.cli.watching import between, last_of, looks, process, writer_parts
from shmbuf.printing import bar, count, living, nbytes, plain, printable, rate, seconds, styled, table

HINT = "q ends"
WAITS, EVENTS = 8, 4  # shown; --json has all


def top_command(args: argparse.Namespace) -> int:
    if args.once:  # an interrupted one has no result
        (_, last) = [frame for _, frame in zip(range(2), _frames(args, Keys(None)), strict=False)]
        if args.json:
            _print_line(last)
        else:
            _print_frame(last)
        return 0
    with contextlib.suppress(KeyboardInterrupt), Keys(None if args.json else sys.stdin) as keys:
        frames = _frames(args, keys)
        if args.json:
            next(frames)  # which has no rates yet
            for frame in frames:
                _print_line(frame)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            _live(frames)
        else:
            for frame in frames:
                _print_frame(frame)
    return 0


def _frames(args: argparse.Namespace, keys: Keys) -> Iterator[Info]:
    before, then = None, 0.0
    for at, info in looks(args.name, args.owner, lambda: keys.pause(args.interval)):
        yield between(before, info, at - then)
        before, then = info, at


class Keys:
    """The terminal, so set that a single key is seen; as it was, afterwards."""

    def __init__(self, stream: Any):
        self._fd = stream.fileno() if stream is not None and not stream.closed and stream.isatty() else None

    def __enter__(self) -> Keys:
        self._sigterm = signal.signal(signal.SIGTERM, self._terminate)
        if self._fd is not None:
            import termios
            import tty

            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            import termios

            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGTERM, self._sigterm)

    @staticmethod
    def _terminate(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    def pause(self, length: float) -> bool:
        """Wait; False, and early, if q was typed or the terminal is gone."""
        if self._fd is None:
            time.sleep(length)
            return True
        over = time.monotonic() + length
        while (left := over - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left)[0]:
                try:
                    typed = os.read(self._fd, 100)
                except OSError:
                    return False
                if not typed or b"q" in typed.lower():
                    return False
        return True


# ---- printing --------------------------------------------------------------------------------------------------


def _print_line(frame: Info) -> None:
    sys.stdout.write(json.dumps(plain(frame)) + "\n")
    sys.stdout.flush()


def _console() -> Any:
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def _print_frame(frame: Info) -> None:
    console = _console()
    with console.capture() as text:  # as print_rich does
        console.print(*picture(frame, console, None), sep="\n")
    sys.stdout.write("\n".join(line.rstrip() for line in text.get().split("\n")))
    sys.stdout.flush()


def _live(frames: Iterator[Info]) -> None:
    from rich.console import Group
    from rich.live import Live

    console = _console()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for frame in frames:
            live.update(Group(*picture(frame, console, console.height)), refresh=True)


def picture(frame: Info, console: Any, height: int | None) -> list[Any]:
    """One frame for a console; height None: as long as it gets. Where room is short, collectors are left out first."""
    from rich.text import Text

    title = Text(printable(frame["name"]), style="bold", no_wrap=True, overflow="ellipsis")
    title.append("  ").append_text(styled(frame["state"]))
    title.append("" if height is None else f"  {HINT}", style="dim")
    above, below = [title, _figures(frame, console.width)], []
    if waits := frame["waits"]:
        most = WAITS if height is None else max(2, min(WAITS, height // 8))
        above += ["", Text("waiting", style="bold"), *(_hanging(_wait_text(w)) for w in waits[:most])]
        if len(waits) > most:
            above.append(styled(f"  and {len(waits) - most} more", "dim"))
    if events := last_of(frame["events"], EVENTS):
        below += ["", Text("deaths", style="bold")]
        below += [_hanging(f"{seconds(e['ago_seconds'])} ago: {e['text']}") for e in events]
    if rings := frame["collectors"]:
        room = len(rings)
        if height is not None:
            used = sum(len(console.render_lines(part, pad=False)) for part in above + below)
            room = max(1, min(room, height - used - 5))  # 5: an empty line, title, heads, rule, "and n more"
        above += ["", _collectors(rings, room, console.width)]
        if room < len(rings):
            above.append(styled(f"and {len(rings) - room} more, less busy", "dim"))
    return above + below


def _hanging(text: str) -> Any:
    from rich.padding import Padding

    return Padding(styled(text, ""), (0, 0, 0, 2))


def _wait_text(w: Info) -> str:
    who = "/".join(w["roles"]) or "process"
    return f"{who} {process(w)} waits {seconds(w['waiting_seconds'])} for {w['waits_for']}" + (
        f": {w['why']}" if w["why"] else ""
    )


def _figures(f: Info, width: int) -> Any:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    c, r, w, window = f["counters"], f["rate"] or {}, f["writer"], f["window"]

    def line(label: str, *parts: Any) -> None:
        grid.add_row(label, printable(", ".join(str(p) for p in parts if p)))

    size, capacity = f["size"], f["capacity"]
    line(
        "rows",
        f"{size:,} of {capacity:,} ({size / capacity:.1%})",
        size and f"ids {window['first_id']:,} to {window['last_id']:,}",
    )
    line("in", f"{rate(r.get('put_rows'))} rows/s put", f"{rate(r.get('stored_rows'))} rows/s stored")
    line("out", f"{rate(r.get('sampled_rows'))} rows/s sampled", f"{rate(r.get('sampled_batches'))} batches/s")
    now, ever = _now_and_ever(f["replay_ratio"])
    line("replay", now, f"{ever} (rows sampled / stored)")
    line("ages", *_ages(f["ages"]))
    if f["staleness"]["ever"] is not None:
        line("staleness", *_now_and_ever(f["staleness"]), "policy versions")
    if p := f["priorities"]:
        line("priorities", p["ready"] and f"sum {p['sum']:.6g}", f"{p['applied']:,} set", f"{p['stale']:,} too late")
    grid.add_row("rings", _rings(f, r))
    line(
        "drops",
        *(f"{c[f'{k}_rows']:,} {k} ({rate(r.get(f'{k}_rows'))}/s)" for k in ("dropped", "skipped", "refused")),
    )
    line("writer", *writer_parts(w)[: None if width >= 100 else 4])
    if f["limiter"]:
        line("limiter", f["limiter"]["text"])
    line(
        "died",
        count(c["collectors_died"], "collector"),
        count(c["writers_died"], "writer"),
        count(c["processes_died"], "other process", "other processes"),
    )
    return grid


def _now_and_ever(figures: Info) -> tuple[str, str]:
    now, ever = ("-" if figures[k] is None else f"{figures[k]:.3g}" for k in ("interval", "ever"))
    return f"{now} now", f"{ever} ever"


def _ages(ages: Info) -> Iterator[str]:
    recent = ages["interval"] and ages["interval"]["rows"] > 0
    shown = ages["interval"] if recent else ages["ever"]
    if shown["p50_rows"] is None:
        yield "nothing was sampled yet"
        return
    for q in ("p50", "p90"):
        rows, old = shown[f"{q}_rows"], shown[f"{q}_seconds"]
        more = f"> {seconds(ages['clock_seconds'])}" if ages["clock_seconds"] is not None else "time unknown"
        yield f"{q} {rows:,.0f} rows ({seconds(old) if old is not None else more})"
    if not recent:
        yield "of all ever sampled"


def _rings(f: Info, r: Info) -> Any:
    from rich.text import Text

    fill = f["rings"]["fill"]
    blocked = r.get("blocked_seconds")
    parts = [
        f" {fill:.0%} of the fullest",
        f"{nbytes(f['rings']['used_bytes'])} in all",
        f"{f['waiting_rows']:,} rows wait",
        f"blocked {seconds(f['counters']['blocked_seconds'])}"
        + (f" ({blocked:.2f} s/s)" if blocked is not None else ""),
    ]
    return Text().append_text(bar(fill)).append(", ".join(parts))


def _collectors(collectors: list[Info], room: int, width: int) -> Any:
    wide = width >= 100
    states = {s: sum(c["state"] == s for c in collectors) for s in ("alive", "dead", "closed")}
    shown = collectors
    if room < len(collectors):
        shown = sorted(collectors, key=lambda c: (-c["ring_fill"], -((c["rate"] or {}).get("put_rows") or 0)))[:room]
    t = table(
        "slot>",
        "pid>",
        "state",
        "ring",
        "fill>",
        "put/s>",
        *["stored/s>", "put>", "stored>"] * wide,
        "blocked>",
        "drops>",
        title="collectors: " + ", ".join(f"{n} {s}" for s, n in states.items() if n or s == "alive"),
    )
    for c in shown:
        r = c["rate"] or {}
        blocked = r.get("blocked_seconds")
        t.add_row(
            str(c["slot"]),
            str(c["pid"]),
            living(c["state"], c["process_state"]),
            bar(c["ring_fill"], 10 if wide else 5),
            f"{c['ring_fill']:.0%}",
            rate(r.get("put_rows")),
            *[rate(r.get("stored_rows")), count(c["put_rows"]), count(c["stored_rows"])] * wide,
            "-" if blocked is None else f"{blocked:.0%}",
            count(c["dropped_rows"] + c["skipped_rows"] + c["refused_rows"]),
        )
    return t
