"""`shminfo plot NAME -o FILE.png`: rates over the observed time, and the ages of the rows that were sampled."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from typing import Any

from shmbuf.cli.looking import Info
from shmbuf.cli.watching import between, edges, looks
from shmbuf.errors import ShmbufError, StorageLost
from shmbuf.printing import count, nbytes, print_json, printable, seconds

POINTS = 80  # of a curve
SHORTEST = 0.1  # seconds between two looks
COLOURS = {"put": "#4477aa", "stored": "#228833", "sampled": "#ee6677", "age": "#4477aa"}


class Missing(ShmbufError, ImportError):
    """matplotlib."""


def plot_command(args: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401  # before anything is observed in vain
    except ImportError as e:
        raise Missing(f"plots need matplotlib ({e}): pip install 'shmbuf[plot]'") from None
    folder = os.path.dirname(os.path.abspath(args.output))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: no such directory, so {args.output} cannot be written")
    seen, lost = observe(args.name, args.owner, args.seconds)
    if len(seen) < 2:
        raise lost or ShmbufError(f"buffer {args.name!r} was not observed long enough to plot anything")
    figure(seen).savefig(args.output, format="png", dpi=120)
    passed = seen[-1][0] - seen[0][0]
    if args.json:
        print_json({"file": args.output, "seconds": passed, "looks": len(seen), "lost": lost and str(lost)})
    else:
        size = nbytes(os.stat(args.output).st_size)
        print(printable(f"wrote {args.output} ({size}): {args.name} for {seconds(passed)}, {count(len(seen), 'look')}"))
    if lost:
        print(printable(f"shminfo: {lost}"), file=sys.stderr)
    return int(lost is not None)


def observe(name: str, owner: int, length: float) -> tuple[list[tuple[float, Info]], StorageLost | None]:
    """Look again and again for ``length`` seconds; Ctrl-C and the buffer's end (which is returned) end it early."""
    seen: list[tuple[float, Info]] = []
    over: float | None = None
    step = max(SHORTEST, length / POINTS)

    def pause() -> bool:
        nonlocal over
        if over is None:  # from the first look on, so that the last comes no earlier than length after it
            over = time.monotonic() + length
        left = over - time.monotonic()
        time.sleep(max(0.0, min(step, left)))
        return left > 0

    try:
        with contextlib.suppress(KeyboardInterrupt):
            for look in looks(name, owner, pause):
                seen.append(look)
    except StorageLost as e:
        return seen, e
    return seen, None


# ---- drawing ---------------------------------------------------------------------------------------------------


def figure(seen: list[tuple[float, Info]]) -> Any:
    """A matplotlib figure with two axes: rates over time, and the histogram of ages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(fig)
    above, below = fig.subplots(2, 1)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    last = seen[-1][1]
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    fig.suptitle(
        _plain(f"{last['name']}: {last['size']:,} of {last['capacity']:,} rows, {when}"), fontsize=14, fontweight="bold"
    )
    _rates(above, seen)
    _ages(below, seen)
    return fig


def _plain(text: str) -> str:
    return printable(text).replace("$", r"\$")  # no mathematics in a name


def _thousands(value: float, _: object = None) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _rates(axes: Any, seen: list[tuple[float, Info]]) -> None:
    from matplotlib.ticker import FuncFormatter

    steps = [between(a, b, max(t1 - t0, 1e-6)) for (t0, a), (t1, b) in itertools.pairwise(seen)]
    times = [t - seen[0][0] for t, _ in seen]
    passed = max(times[-1], 1e-6)
    total = between(seen[0][1], seen[-1][1], passed)["rate"]
    highest = []
    looks_of = {"put": {"linewidth": 4.0, "alpha": 0.4}, "stored": {"linewidth": 1.6}, "sampled": {"linewidth": 1.6}}
    for what, line in looks_of.items():
        values = [step["rate"][f"{what}_rows"] for step in steps]
        highest.append(max(values))
        label = f"{what}: {_thousands(total[f'{what}_rows'])}/s on average"
        axes.stairs(values, times, baseline=None, label=label, color=COLOURS[what], **line)
    some = [h for h in highest if h > 0]
    if some and max(some) > 30 * min(some):
        axes.set_yscale("symlog", linthresh=max(1.0, min(some) / 10))
    else:
        axes.set_ylim(bottom=0, top=None if some else 1)
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_xlim(0, passed)
    lost = sum(total[f"{k}_rows"] for k in ("dropped", "skipped", "refused")) * passed
    notes = f"; collectors blocked {total['blocked_seconds']:.2f} s a second" if total["blocked_seconds"] > 0 else ""
    notes += f"; {_thousands(lost)} rows dropped or refused" if lost > 0 else ""
    axes.set_title(f"Rows in and out over {seconds(passed)}{notes}", loc="left")
    axes.set_xlabel("time observed (s)")
    axes.set_ylabel("rows per second")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _ages(axes: Any, seen: list[tuple[float, Info]]) -> None:
    from matplotlib.ticker import PercentFormatter

    frame = between(seen[0][1], seen[-1][1], max(seen[-1][0] - seen[0][0], 1e-6))
    bins = [b - a for a, b in zip(seen[0][1]["ages"]["sampled"], seen[-1][1]["ages"]["sampled"], strict=True)]
    ages, when = frame["ages"]["interval"], "in this time"
    if sum(bins) <= 0:
        bins, ages, when = seen[-1][1]["ages"]["sampled"], frame["ages"]["ever"], "since the buffer was created"
    axes.set_title(f"Ages of the {sum(bins):,} rows sampled {when}", loc="left")
    axes.set_xlabel("age: rows stored after the sampled one")
    axes.set_ylabel("share of sampled rows")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    used = [k for k, n in enumerate(bins) if n > 0]
    if not used:
        axes.text(
            0.5, 0.5, "nothing was sampled yet", ha="center", va="center", transform=axes.transAxes, color="#777777"
        )
        axes.set_xticks([])
        axes.set_yticks([])
        return
    shown = range(max(0, used[0] - 1), min(len(bins), used[-1] + 2))
    total = sum(n for n in bins if n > 0)
    axes.bar(list(shown), [max(0, bins[k]) / total for k in shown], width=0.94, color=COLOURS["age"])
    step = -(-len(shown) // 16)
    axes.set_xticks(list(shown)[::step], [_range(k) for k in shown][::step])
    for q, style in (("p50", "-"), ("p90", "--")):
        age, old = ages[f"{q}_rows"], ages[f"{q}_seconds"]
        label = f"{q}: {age:,.0f} rows" + (f", {seconds(old)} old" if old is not None else "")
        axes.axvline(_position(age), color="#222222", linewidth=1.4, linestyle=style, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _range(k: int) -> str:
    low, high = edges(k)
    return str(low) if low == high else f"{low}–{high}" if high < 100 else f"{_binary(low)}+"


def _binary(n: int) -> str:
    for power, letter in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if n >= 1 << power:
            return f"{n >> power}{letter}"
    return str(n)


def _position(age: float) -> float:
    """On an axis where bin k lies from k - 0.5 to k + 0.5."""
    k = int(age).bit_length()
    low, high = edges(k)
    return k - 0.5 + (min(1.0, (age - low) / (high - low)) if high > low else 0.5)
