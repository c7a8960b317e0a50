"""`shminfo show NAME`: everything about one buffer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from shmbuf.cli.looking import Info, inside
from shmbuf.cli.watching import event_text, last_of, pin_text, process, why_not_descriptor, writer_parts
from shmbuf.printing import count, living, nbytes, print_json, print_rich, printable, seconds, styled, table
from shmbuf.schema import show_key

DEAD_SHOWN = 5  # dead entries; --json has them all


def show_command(args: argparse.Namespace) -> int:
    info = inside(args.name, args.owner)
    if args.json:
        print_json(info)
    else:
        print_rich(_heading(info), *_tables(info))
    return 0


def _heading(info: Info) -> Any:
    from rich.table import Table

    size, capacity, c, s, seg, w = (info[k] for k in ("size", "capacity", "counters", "settings", "segment", "writer"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold")

    def line(label: str, *parts: Any) -> None:
        grid.add_row(label, printable(", ".join(str(p) for p in parts if p)))

    grid.add_row(info["name"], styled(info["state"]))
    first, last, _ = info["window"].values()
    line("rows", f"{size:,} of {capacity:,} ({size / capacity:.1%})", size and f"row ids {first:,} to {last:,}")
    line(
        "written",
        count(c["rows_total"], "row"),
        info["waiting_rows"] and f"{info['waiting_rows']:,} waiting in rings",
        c["write_count"] != c["rows_total"] and f"{c['write_count']:,} since the buffer was emptied",
        *(f"{c[f'{k}_rows']:,} {k}" for k in ("skipped", "dropped", "refused") if c[f"{k}_rows"]),
        c["blocked_seconds"] and f"collectors blocked {seconds(c['blocked_seconds'])} in all",
        c["streams_cut"] and f"{count(c['streams_cut'], 'trajectory', 'trajectories')} cut short",
        c["malformed_records"] and count(c["malformed_records"], "malformed record"),
    )
    if p := info["priorities"]:
        line(
            "priorities",
            f"alpha {p['alpha']:g}, eps {p['eps']:g}",
            p["ready"] and f"sum {p['sum']:.6g}, a new row gets {p['new_row']:.4g}",
            f"{p['applied']:,} set, {p['stale']:,} came too late",
            p["scrubs"] and f"{count(p['scrubs'], 'repair')} after an updater's death",
        )
    ratio = f"{c['sampled_rows'] / c['rows_total']:.3g} for each row stored" if c["rows_total"] else ""
    line("sampled", count(c["sampled_rows"], "row"), f"in {count(c['sampled_batches'], 'batch', 'batches')}", ratio)
    line("segment", info["path"], nbytes(seg["file_bytes"]), f"of which {nbytes(seg['allocated_bytes'])} have memory")
    if d := info["device"]:
        line("device", *device_parts(d))
    if schema := info["schema"]:
        each, used = schema["row_bytes"], schema["payload_bytes"]
        where = f"{nbytes(capacity * each)}, on the device" if info["device"] else nbytes(seg["rows_bytes"])
        line("", f"rows {where} (each {each:,} bytes: {used:,} payload, {each - used} padding)")
        line(
            "",
            f"rings {nbytes(seg['rings_bytes'])} ({s['max_collectors']:,} x {nbytes(s['ring_bytes'])}: "
            f"{seg['rings_in_use']:,} in use, {nbytes(seg['rings_allocated_bytes'])} have memory)",
        )
        line(
            "",
            f"configuration {nbytes(seg['configuration_bytes'])}, schema {nbytes(seg['schema_bytes'])}, "
            f"priorities and trajectories {nbytes(seg['bookkeeping_bytes'])}",
        )
    line(
        "owner",
        f"uid {info['owner']}",
        f"mode {info['mode']}",
        f"created {seconds(info['age_seconds'])} ago by pid {info['creator_pid']}",
        info["unnamed"] and "unnamed: goes with its creator",
    )
    patience = "for ever" if s["timeout"] is None else f"{s['timeout']} s"
    line(
        "settings",
        f"full: {s['full']}" + (f" (waits {patience})" if s["full"] == "block" else ""),
        f"drain: {s['drain']}",
        f"at most {count(s['max_collectors'], 'collector')}",
    )
    if s["class"]:
        arguments = ", ".join(f"{k}={v!r}" for k, v in s["sampler_arguments"].items())
        line(
            "class",
            s["class"],
            f"batch size {s['batch_size'] or 'not set'}",
            f"sampler {s['sampler']}({arguments})",
            s["priority_key"] and f"priority key {show_key(tuple(s['priority_key']))}",
            s["pin_memory"] and "pin_memory",
        )
    line("writer", *writer_parts(w))
    for pin in info["pins"]:
        line(
            "pin",
            pin_text(pin) if pin["alive"] else f"of a dead process, {process(pin)}: goes with the next transaction",
        )
    if info["limiter"]:
        line("limiter", f"{info['limiter']['samples_per_insert']:g} samples an insert", info["limiter"]["text"])
    return grid


WAYS = {
    "vmm": "shared as a descriptor (lives while anybody has it)",
    "ipc": "shared by CUDA IPC (lives while its steward does)",
    None: "to be made with the first rows",
}


def device_parts(d: Info) -> Iterator[str]:
    """Where the rows are, how they are shared and by whom held."""
    yield d["uuid"]
    yield d["bytes"] and f"{nbytes(d['bytes'])} for rows and {count(d['rings'], 'device ring')}"
    yield WAYS[d["kind"]]
    if d["holders"]:
        yield "held by " + ", ".join(
            f"{process(p)}{'' if p['answers'] else ' (does not answer)'}" for p in d["holders"]
        )
    elif d["lost"]:
        yield "held by nobody: the rows are lost"
    elif d["kind"]:
        yield "those attached are in another container, or network or pid namespace, and cannot be asked for it from here"
    if d["kind"] == "ipc" and d["holders"]:
        yield f"not by descriptor{why_not_descriptor(d)}"


def _tables(info: Info) -> Iterator[Any]:
    members, collectors, schema = info["members"], info["collectors"], info["schema"]
    yield ""
    if schema:
        columns = schema["columns"]
        t = table("key", "dtype", "shape", "bytes>", "offset>", title=f"schema: {count(len(columns), 'column')}")
        for c in columns:
            t.add_row(show_key(tuple(c["key"])), c["dtype"], str(c["shape"]), count(c["bytes"]), count(c["offset"]))
        yield from (t, "")
    else:
        yield "no schema yet: the first put of any process decides it\n"
    alive = [m for m in members if m["alive"]]
    dead = members[len(alive) :][::-1]  # the latest first
    if members:
        title = f"handles: {len(alive)} alive" + (f", {len(dead)} dead" if dead else "")
        t = table("pid>", "command", "roles", "slot>", "since>", "state", title=title)
        for m in alive + dead[:DEAD_SHOWN]:
            t.add_row(
                str(m["pid"]),
                printable(m["command"]),
                ", ".join(m["roles"]) or "-",
                count(m["slot"]),
                f"{seconds(m['age_seconds'])} ago",
                living("alive" if m["alive"] else "dead", m["process_state"])
                + (f", cannot write to the device: CUDA error {m['device_error']}" if m["device_error"] else ""),
            )
        yield from (t, *[f"and {len(dead) - DEAD_SHOWN} more dead"] * (len(dead) > DEAD_SHOWN), "")
    if info["kept_by"] and not info["attached"]:
        yield "nobody is attached; its steward keeps its rows\n"
    elif not alive:
        yield "attached read-only (such handles are not listed)\n" if info["attached"] else "nobody is attached\n"
    if collectors:
        from rich.bar import Bar

        states = {s: sum(c["state"] == s for c in collectors) for s in ("alive", "dead", "closed")}
        t = table(
            "slot>",
            "pid>",
            "state",
            "ring",
            *["rows by"] * bool(info["device"]),
            "fill>",
            "bytes>",
            "rows put>",
            "stored>",
            "skipped>",
            "dropped>",
            "refused>",
            "blocked>",
            title="collectors: " + ", ".join(f"{n} {s}" for s, n in states.items() if n or s == "alive"),
        )
        for c in collectors:
            t.add_row(
                str(c["slot"]),
                str(c["pid"]),
                living(c["state"], c["process_state"]),
                Bar(1.0, 0, c["ring_fill"], width=10),
                *["device ring" if c["device_ring"] else "host ring"] * bool(info["device"]),
                f"{c['ring_fill']:.0%}",
                count(c["ring_used"]),
                *(count(c[f"{k}_rows"]) for k in ("put", "stored", "skipped", "dropped", "refused")),
                seconds(c["blocked_seconds"]),
            )
        yield t
    if info["events"]:
        yield ""
        for e in last_of(info["events"], DEAD_SHOWN):
            yield styled(f"{seconds(e['ago_seconds'])} ago: {event_text(e)}", "")
