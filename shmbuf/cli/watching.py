"""What went on in a buffer between two looks at it: rates, ages, who waits for whom, what died."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from typing import Any

from shmbuf.cli.looking import Info, inside, stopped
from shmbuf.errors import BufferNotFound, StorageLost
from shmbuf.printing import count, seconds

RATES = ("put_rows", "sampled_rows", "sampled_batches", "dropped_rows", "skipped_rows", "refused_rows")


def looks(name: str, owner: int, pause: Callable[[], bool]) -> Iterator[tuple[float, Info]]:
    """(monotonic time, what was seen), again and again until ``pause`` says that it is enough (False).

    Raises:
        BufferNotFound, BufferFormatError: at once. StorageLost: the buffer went while we looked.
    """
    first = inside(name, owner)
    info = first
    while True:
        yield time.monotonic(), info
        if not pause():
            return
        try:
            info = inside(name, owner)
        except BufferNotFound:
            raise StorageLost(f"buffer {name!r} was destroyed while shminfo looked at it") from None
        if info["state"] == "being destroyed":
            raise StorageLost(f"buffer {name!r} was destroyed while shminfo looked at it")
        if info["instance_id"] != first["instance_id"]:
            raise StorageLost(
                f"buffer {name!r} was destroyed while shminfo looked at it; the name means another one now"
            )


def between(before: Info | None, now: Info, passed: float) -> Info:
    """Figures of the time between two looks, ``passed`` seconds; None before the first interval is over.

    ``rate``: each a second. ``ages``: of sampled rows, in rows stored after them and in seconds.
    """
    c, old = now["counters"], before["counters"] if before else None
    rate: Info | None = None
    if old:
        rate = {k: (c[k] - old[k]) / passed for k in RATES}
        rate["stored_rows"] = (c["rows_total"] - old["rows_total"]) / passed
        rate["blocked_seconds"] = (c["blocked_seconds"] - old["blocked_seconds"]) / passed
    return {
        "time": time.time(),
        **{k: now[k] for k in ("name", "owner", "instance_id", "state", "attached", "capacity", "size")},
        "seconds": passed if before else None,
        "window": now["window"],
        "rows_total": c["rows_total"],
        "waiting_rows": now["waiting_rows"],
        "rate": rate,
        "replay_ratio": {
            "interval": old and _ratio(c["sampled_rows"] - old["sampled_rows"], c["rows_total"] - old["rows_total"]),
            "ever": _ratio(c["sampled_rows"], c["rows_total"]),
        },
        "ages": {
            "interval": before and ages_of(_minus(now["ages"], before["ages"]), now),
            "ever": ages_of(now["ages"], now),
            "clock_seconds": now["ages"]["clock"][0][1] if now["ages"]["clock"] else None,
        },
        "staleness": {
            "interval": before and _staleness(_minus(now["ages"], before["ages"])),
            "ever": _staleness(now["ages"]),
        },
        "rings": {"used_bytes": c["ring_used_bytes"], "fill": c["ring_fill"]},
        **{k: now[k] for k in ("priorities", "writer", "limiter")},
        "collectors": [_collector(entry, before, passed) for entry in now["collectors"]],
        "waits": waits(now),
        "events": [{**e, "text": event_text(e)} for e in now["events"]],
        "counters": c,
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None


def _minus(ages: Info, before: Info) -> Info:
    return {
        "sampled": [a - b for a, b in zip(ages["sampled"], before["sampled"], strict=True)],
        **{k: ages[k] - before[k] for k in ("sum", "staleness_sum", "staleness_rows")},
    }


def _staleness(ages: Info) -> float | None:
    return _ratio(ages["staleness_sum"], ages["staleness_rows"])


def _collector(entry: Info, before: Info | None, passed: float) -> Info:
    """One ring's line. What it did before this incarnation was another collector's."""
    own = ("slot", "incarnation")
    old = before and next((c for c in before["collectors"] if all(c[k] == entry[k] for k in own)), None)
    totals = ("put_rows", "stored_rows", "dropped_rows", "skipped_rows", "refused_rows", "blocked_seconds")
    rate = {k: (entry[k] - (old[k] if old else 0)) / passed for k in totals} if before else None
    shown = ("pid", "command", "state", "process_state", "ring_used", "ring_bytes", "ring_fill")
    return {**{k: entry[k] for k in (*own, *shown, *totals)}, "rate": rate}


# ---- ages ------------------------------------------------------------------------------------------------------


def edges(k: int) -> tuple[int, int]:
    """The least and the largest age that bin k of a histogram by bit length counts."""
    return (1 << k - 1 if k else 0), (1 << k) - 1


def percentile(bins: list[int], q: float, most: int) -> float | None:
    """By linear interpolation within a bin, ages being at most ``most``; None: nothing was counted."""
    total, below = sum(n for n in bins if n > 0), 0
    for k, n in enumerate(bins):
        if n > 0 and below + n >= q * total:
            low, high = edges(k)
            high = max(low, min(high, most))
            return low + (high - low) * max(0.0, q * total - below) / n
        below += max(0, n)
    return None


def ages_of(ages: Info, now: Info) -> Info:
    """Rows sampled, and their ages: mean, p50, p90 in rows, the percentiles also in seconds (None: before the clock began)."""
    bins, clock, end = ages["sampled"], now["ages"]["clock"], now["counters"]["end_id"]
    p = {f"p{q}": percentile(bins, q / 100, min(now["capacity"], now["counters"]["rows_total"]) - 1) for q in (50, 90)}
    n = sum(bins)
    return {
        "rows": n,
        "mean_rows": _ratio(ages["sum"], n),
        **{f"{k}_rows": v for k, v in p.items()},
        **{f"{k}_seconds": None if v is None else seconds_old(v, clock, end) for k, v in p.items()},
    }


def seconds_old(age: float, clock: list[tuple[int, float]], end: int) -> float | None:
    """How long ago the row was stored after which ``age`` rows were; ``clock``: (end id then, seconds ago), oldest first."""
    at = end - age
    points = [*clock, (end, 0.0)] if clock and clock[-1][0] < end else clock
    i = bisect.bisect_left(points, at, key=lambda point: point[0])
    if i == len(points) or (i == 0 and points[0][0] != at):
        return None
    if i == 0 or points[i][0] == at:
        return points[i][1]
    (id0, ago0), (id1, ago1) = points[i - 1], points[i]
    return ago0 + (ago1 - ago0) * (at - id0) / (id1 - id0) if id1 > id0 else ago1


# ---- who waits for whom, and what died -------------------------------------------------------------------------


def process(entry: Info) -> str:
    return f"pid {entry['pid']}" + (f" ({entry['command']})" if entry["command"] else "")


def writer_stopped(info: Info) -> str | None:
    """The writer holds its role and is stopped, so nothing is stored until it goes on: who it is."""
    w = info["writer"]
    return process(w) if w["active"] and stopped(w["process_state"]) else None


def pinned_by(info: Info) -> Info | None:
    """Who keeps the oldest rows from being overwritten."""
    return next((p for p in info["pins"] if p["alive"]), None)


def pin_text(pin: Info) -> str:
    left = "until it is released" if pin["seconds_left"] is None else f"for at most {seconds(pin['seconds_left'])} more"
    return f"{process(pin)} has pinned the rows from id {pin['first_id']:,} on, {left}"


def writer_parts(w: Info) -> list[Any]:
    """The writer's heartbeat in words."""
    if w["pid"] is None:
        return ["nobody yet"]
    return [
        f"pid {w['pid']} {w['command'] or ''}".strip(),
        "active" if w["active"] else "idle (gave the role back)",
        "stopped (SIGSTOP)" if stopped(w["process_state"]) else w["ended"] and "its process has ended",
        f"last transaction {seconds(w['age_seconds'])} ago" if w["age_seconds"] is not None else "no transaction yet",
        count(w["transactions"], "transaction"),
        count(w["takeovers"], "takeover"),
    ]


def why_not_descriptor(device: Info) -> str:
    """Of memory that is shared by CUDA IPC; to be put behind a "not by descriptor"."""
    if not device["why_not"]:
        return "; its steward, which knows why, does not answer"
    from shmbuf.cuda.memory import ASKED

    if device["why_not"] == ASKED:
        return f", because {ASKED} asked for CUDA IPC: unset it before the buffer is made"
    return f", because {device['why_not']}"


def stopped_drainers(info: Info) -> list[Info]:
    """Those whose task it is to store rows, if every one of them is stopped."""
    drainers = [m for m in info["members"] if m["alive"] and {"drainer", "standby"} & set(m["roles"])]
    return drainers if all(stopped(m["process_state"]) for m in drainers) else []


def waits(info: Info) -> list[Info]:
    """Every handle that waits, the longest first: for what, since when, and why it is not there."""
    found = [
        {
            **{k: m[k] for k in ("pid", "command", "roles", "slot", "waits_for", "waiting_seconds")},
            "why": _why(m["waits_for"], info),
        }
        for m in info["members"]
        if m["alive"] and m["waits_for"]
    ]
    return sorted(found, key=lambda w: -w["waiting_seconds"])


def _why(what: str, info: Info) -> str:
    limiter, waiting = info["limiter"], info["waiting_rows"]
    if what == "schema":
        return "the first put of any process decides it"
    if what == "limiter" and limiter:
        return str(limiter["text"])
    if what == "rows" and not waiting:
        return f"{count(info['size'], 'row')} stored, none on the way: collectors have to put more"
    if what not in ("rows", "room", "commit"):
        return ""
    if who := writer_stopped(info):
        return f"the writer, {who}, is stopped: kill -CONT {info['writer']['pid']}"
    if limiter and limiter["collectors_wait"]:
        return str(limiter["text"])
    w = info["writer"]
    if (pin := pinned_by(info)) and not w["active"]:
        return pin_text(pin)
    if w["active"]:
        return f"the writer, {process(w)}, is at it" + (
            f", its last transaction was {seconds(w['age_seconds'])} ago" if w["age_seconds"] is not None else ""
        )
    return "nobody holds the writer role: whoever waits takes it"


def event_text(e: Info) -> str:
    """One line: what died, and what became of its rows."""
    kind = e["kind"].removesuffix("_died")
    if kind == "collector":
        rest = f"; {count(e['rows'], 'row')} still lay in its ring"
    elif kind == "writer":
        rest = (
            f"; its transaction of {count(e['rows'], 'row')} was finished for it"
            if e["rows"]
            else "; another took over"
        )
        rest += f", {e['seconds']:.3g} s after its last sign of life"
    else:
        rest = ""
    return f"{kind} {process(e)} died{rest}"


def last_of(events: list[Any], n: int) -> list[Any]:
    return events[-n:][::-1]
