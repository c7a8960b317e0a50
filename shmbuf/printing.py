"""Words, numbers and tables of `shminfo`, for people and for programs. rich is imported where a table is made."""

from __future__ import annotations

import math
import sys
from typing import Any


def printable(text: Any) -> str:
    """Names, commands and settings are anybody's bytes: none of them gets to command the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def nbytes(n: float | None) -> str:
    if n is None or n < 1024:
        return "-" if n is None else f"{n} B"
    power = min(4, (int(n).bit_length() - 1) // 10)
    return f"{n / 1024**power:.1f} {' KMGT'[power]}iB"


def seconds(s: float | None) -> str:
    if s is None or s < 10:
        return "-" if s is None else f"{s:.1f} s"
    return (
        f"{s:.0f} s"
        if s < 120
        else f"{s / 60:.0f} min"
        if s < 7200
        else (f"{s / 3600:.0f} h" if s < 172_800 else f"{s / 86_400:.0f} d")
    )


def count(n: int | None, what: str = "", many: str = "") -> str:
    return "-" if n is None else f"{n:,}" + (f" {what if n == 1 else many or what + 's'}" if what else "")


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:.2g}" if 0 < abs(per_second) < 10 else f"{per_second:,.0f}"


def plain(value: Any) -> Any:
    """As JSON can hold it: configurations may hold bytes, inf and nan."""
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    known = value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def print_json(value: Any) -> None:
    import json

    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def print_rich(*parts: Any) -> None:
    """Tables to stdout, each as wide as it is: numbers folded into narrow columns help nobody."""
    from rich.console import Console

    console = Console(width=2000, markup=False, emoji=False, highlight=False)
    with console.capture() as text:  # written in one go: a closed pipe then is our exception, not rich's exit
        console.print(*parts, sep="\n")
    sys.stdout.write("\n".join(line.rstrip() for line in text.get().split("\n")))


def table(*columns: str, title: str | None = None) -> Any:
    """A table; a column whose name ends in ">" is set flush right."""
    from rich import box
    from rich.table import Table

    t = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for c in columns:
        t.add_column(c.rstrip(">"), justify="right" if c.endswith(">") else "left", no_wrap=True)
    return t


STYLES = {
    **dict.fromkeys(("ok", "alive", "sound"), "green"),
    **dict.fromkeys(("no schema yet", "being built"), "cyan"),
    **dict.fromkeys(("dead", "damaged", "rows lost", "wrong", "unsound"), "red"),
    "closed": "dim",
}


def styled(text: Any, style: str | None = None) -> Any:
    from rich.text import Text

    return Text(printable(text), style=STYLES.get(text, "yellow") if style is None else style)


def bar(share: float, width: int = 10) -> Any:
    """How full something is, 0 to 1."""
    from rich.text import Text

    full = round(min(max(share, 0.0), 1.0) * width)
    return Text("█" * full, style="red" if share > 0.9 else "green").append("░" * (width - full), style="dim")


def living(state: str, letter: str | None) -> Any:
    """alive, dead or closed, and the state of its process."""
    if letter in ("T", "t"):
        return styled(f"{state} ({letter}, stopped)")
    return styled(f"{state} ({letter})" if letter else state, STYLES.get(state, ""))
