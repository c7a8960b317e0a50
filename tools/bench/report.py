"""The table: on the terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date

from rich.console import Console
from rich.table import Table

from .lines import Line
from .results import Results
from .settings import Settings

HEADERS = ("what", "ours", "peers, best first", "ours ÷ best", "target", "reached")
NOTES = (
    "Ingest: rows a second from the first put until all rows are visible; queue peers have a consumer "
    "that stores into a preallocated numpy ring. Data are built once, outside the timed loop. "
    "Producers are spawned processes. Figures are medians of several rounds.",
    "Sampling: one process, one torch thread, contenders take turns, the heap keeps its pages. "
    "`torch.index_select` takes the same columns from private memory with indices drawn anew for each "
    "call, outside the timed part; all others draw their own inside it.",
    "Priorities: 256 rows are sampled by priority, then their priorities set, one after another, by one learner or several. "
    "The tree alone is called below Python; its updates are of random rows. Slices: episodes of 200 steps.",
    "Beside: two processes write at full speed; or burn CPU in Python; or copy privately as many bytes "
    "as those rows cost. Collector memory of peers is that of their numpy or torch producer here.",
    "Kills: two processes put single atari rows as fast as they can into a buffer of 1,000; after 10 to 60 ms one of them gets "
    "SIGKILL. The learner then samples 64 rows 40 times, and until one that the other put after the kill is among them; what has "
    "not ended after 5 s hangs. Rows follow from their ids. faster-fifo: the learner takes from the queue into a numpy ring.",
)


def number(value: float, unit: str) -> str:
    if unit == "s":
        small = value < 1e-3
        return f"{_digits(value * (1e6 if small else 1e3))} {'µs' if small else 'ms'}"
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{_digits(value / limit)} {suffix}"
    return _digits(value)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class Footnotes:
    def __init__(self, errors: dict[str, str]):
        self._errors, self.used = errors, []

    def mark(self, key: str) -> str:
        reason = self._errors.get(key)
        if reason is None:
            return ""
        text = f"{key.rsplit('/', 1)[-1]}: {reason}"
        if text not in self.used:
            self.used.append(text)
        return f"[{self.used.index(text) + 1}]"


def rows(lines: list[Line], notes: Footnotes) -> list[tuple[str, ...]]:
    return [_row(line, notes) for line in lines]


def _row(line: Line, notes: Footnotes) -> tuple[str, ...]:
    unit = f" {line.unit}" if line.unit not in ("s", "") else ""

    def figure(name: str, value: float | None) -> str:
        if value is None:
            return f"-{notes.mark(f'{line.errors}/{name}')}"
        return number(value, line.unit)

    others = ", ".join(f"{name} {figure(name, value)}" for name, value in line.ranked)
    goal, reached = line.goal, ""
    if goal and goal.value is not None:
        reached = f"{goal.value:.3g} {goal.unit}".strip()
        reached += {True: " ✓", False: " ✗", None: ""}[goal.met]
    ours = figure(line.us, line.ours)
    return (
        line.what,
        ours + (unit if line.ours is not None else ""),
        others,
        "" if line.ratio is None else f"{line.ratio:.2f} x",
        goal.text if goal else "",
        reached,
    )


def show(console: Console, machine: dict, table: list[tuple[str, ...]], notes: Footnotes) -> None:
    grid = Table(title="shmbuf and its peers, one run", caption=_machine(machine))
    for index, header in enumerate(HEADERS):
        grid.add_column(header, justify="right" if index in (1, 3) else "left")
    for row in table:
        grid.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(grid)
    for index, text in enumerate(notes.used, 1):
        console.print(f"[{index}] {text}", markup=False, highlight=False)


def markdown(machine: dict, table: list[tuple[str, ...]], notes: Footnotes) -> str:
    def cells(row) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"

    parts = [_machine(machine), "", cells(HEADERS), "|---|--:|---|--:|---|---|"]
    parts += [cells(row) for row in table]
    parts += ["", *(f"[{i}] {text}  " for i, text in enumerate(notes.used, 1))]
    parts += ["", *(f"- {note}" for note in NOTES), ""]
    return "\n".join(parts)


def as_json(machine: dict, settings: Settings, results: Results, lines: list[Line]) -> str:
    shown = [{**asdict(line), "ratio": line.ratio, "met": line.goal and line.goal.met} for line in lines]
    document = {
        "machine": machine,
        "settings": settings.as_dict(),
        **results.as_dict(),
        "lines": shown,
    }
    return json.dumps(document, indent=1)


def _machine(machine: dict) -> str:
    return (
        f"{machine['CPU']}, {machine['cores']} cores, {machine['memory']}, Linux {machine['kernel']}, "
        f"Python {machine['Python']}, memcpy {machine['memcpy']}, "
        f"{machine['others']} of the cores taken by others; {machine['versions']}; "
        f"{date.today().isoformat()}"
    )
