"""`shminfo`: what lies in shared memory, who is attached, and how to get rid of it. Looking leaves no trace: it maps
read-only, takes no lock and no entry in any table. Never imports torch or numpy."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import posix_ipc

from shmbuf import __version__, segment
from shmbuf._extension import native
from shmbuf.errors import BufferFormatError, BufferNotFound, ShmbufError, TooManyOpenFiles
from shmbuf.limiter import figures
from shmbuf.printing import count, living, nbytes, print_json, print_rich, printable, seconds, styled, table
from shmbuf.schema import Schema, show_key

Info = dict[str, Any]
ERRORS = (
    ShmbufError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    native.FormatError,
    posix_ipc.Error,
    msgpack.UnpackException,
)
SUMMARY = (
    "name",
    "owner",
    "path",
    "state",
    "reason",
    "mode",
    "file_bytes",
    "allocated_bytes",
    "attached",
    "unnamed",
    "capacity",
    "size",
    "row_bytes",
    "processes_alive",
    "collectors_alive",
    "rows_total",
    "write_count",
    "waiting_rows",
    "created",
    "age_seconds",
)
DEAD_SHOWN = 5  # dead entries of `show`; --json has them all

EPILOG = """examples:
  shminfo                         this user's buffers
  shminfo show pong               everything about one of them
  shminfo --json | jq '.[].name'  for programs; also: shminfo show pong --json
  shminfo rm pong breakout        remove two; --force: also while somebody is attached, or when damaged
  watch -n1 shminfo show pong     look on while it fills

exit status: 0 ok, 1 the request failed (no such buffer, in use), 2 wrong usage"""


# ---- looking ---------------------------------------------------------------------------------------------------


def buffers(owner: int | None) -> Iterator[tuple[int, str]]:
    """(owner, name) of every file named like a buffer: of one user, or of all (None)."""
    for file in sorted(os.listdir(segment.SHM_DIR)):
        found = re.fullmatch(r"shmbuf\.(\d+)\.(.*)", file, re.DOTALL)
        if found and owner in (None, int(found[1])):
            yield int(found[1]), found[2]


def look(name: str, owner: int, *, whole: bool = False) -> Info:
    """What can be known about one buffer without disturbing it; ``whole`` adds what `shminfo show` prints.

    A file that cannot be read is described, too: ``state`` is then "foreign", "unreadable" or "damaged", ``reason``
    says why, and what only its content could tell is None.

    Raises:
        BufferNotFound: no file of that name.
    """
    path = segment.path_of(name, owner)
    info: Info = {**dict.fromkeys(SUMMARY), "name": name, "owner": owner, "path": path}
    try:
        st = os.lstat(path)
        info.update(mode=f"{stat.S_IMODE(st.st_mode):04o}", file_bytes=st.st_size, allocated_bytes=st.st_blocks * 512)
        strange = not stat.S_ISREG(st.st_mode) or st.st_mode & stat.S_IWOTH
        if st.st_uid != owner and not strange:
            info.update(state="foreign", reason=f"the file belongs to uid {st.st_uid}, its name to uid {owner}")
            return info
        with contextlib.closing(segment.attach(name, owner=owner, watch=True)) as handle:
            info["attached"] = handle.attached
            _read(handle, info, whole)
    except TooManyOpenFiles:  # says nothing of the file
        raise
    except FileNotFoundError:  # BufferNotFound is one
        raise BufferNotFound(_not_found(name, owner)) from None
    except PermissionError:
        info.update(state="unreadable", reason=f"mode {stat.filemode(st.st_mode)} keeps uid {os.getuid()} out")
    except ERRORS as e:
        reason = str(e).removeprefix(path).lstrip(": ") or repr(e)
        info.update(state="foreign" if strange else "damaged", reason=reason)
    return info


def _not_found(name: str, owner: int) -> str:
    known = [n for _, n in buffers(owner)]
    others = [f"--owner {uid}" for uid, n in buffers(None) if n == name and uid != owner]
    text = f"no buffer named {name!r}; uid {owner} has " + (", ".join(known[:20]) if known else "none")
    text += f" and {len(known) - 20} more" if len(known) > 20 else ""
    return text + (f". Another user has one of that name: {' or '.join(others)}" if others else "")


def _read(handle: Any, info: Info, whole: bool) -> None:
    h = handle.header
    ready, counters = h["ready"], handle.counters()
    members, collectors, now = handle.members(), handle.collectors(), time.time()
    schema = Schema.from_bytes(handle.schema) if ready else None
    config = msgpack.unpackb(handle.config)
    alive = [m for m in members if m["alive"]]
    state = (
        "being destroyed"
        if handle.destroyed
        else "stale unnamed"
        if h["unnamed"] and not info["attached"]
        else "ok"
        if ready
        else "no schema yet"
    )
    info.update(
        **{k: h[k] for k in ("unnamed", "capacity", "created")},
        row_bytes=h["row_bytes"] if ready else None,
        **{k: counters[k] for k in ("size", "rows_total", "write_count")},
        age_seconds=max(0.0, now - h["created"]),
        state=state,
        processes_alive=len({(m["pid_namespace"], m["pid"]) for m in alive}),
        collectors_alive=sum(c["state"] == "alive" for c in collectors),
        # Put and not stored. A killed collector may have counted a record that it never published: an empty ring holds none.
        waiting_rows=sum(
            max(0, c["put_rows"] - c["stored_rows"] - c["skipped_rows"]) for c in collectors if c["ring_used"]
        ),
    )
    if not whole:
        return
    for entry in [*members, *collectors]:
        entry["age_seconds"] = max(0.0, now - entry["since"])
        entry["process_state"] = _process_state(entry)
    for c in collectors:
        c["ring_fill"] = c["ring_used"] / c["ring_bytes"]
    face = config.get("face") or {}
    sampler, arguments = face.get("sampler") or (None, {})
    size, end = counters["size"], counters["end_id"]
    rows_bytes = h["capacity"] * h["row_bytes"]
    known = (m for m in [*alive, *members, *collectors] if m["pid"] == counters["writer_pid"])
    writer: Info = next(known, {"command": None, "process_state": None})
    info.update(
        instance_id=f"{h['instance_id']:016x}",
        creator_pid=h["creator_pid"],
        schema=schema
        and {
            "payload_bytes": schema.payload_bytes,
            "row_bytes": schema.row_bytes,
            "columns": [
                {"key": list(c.key), "dtype": c.dtype, "shape": list(c.shape), "bytes": c.nbytes, "offset": c.offset}
                for c in schema.columns
            ],
        },
        window={
            "first_id": counters["first_id"] if size else None,
            "last_id": end - 1 if size else None,
            "end_id": end,
        },
        settings={
            **{k: config.get(k) for k in ("full", "timeout", "drain")},
            **{k: face.get(k) or None for k in ("class", "batch_size", "priority_key", "pin_memory")},
            "sampler": sampler,
            "sampler_arguments": arguments,
            "ring_bytes": h["ring_bytes"] or None,
            "max_collectors": h["max_collectors"],
            "max_members": h["max_members"],
        },
        config=config,
        priorities=handle.priorities,
        segment={
            "file_bytes": info["file_bytes"],
            "allocated_bytes": info["allocated_bytes"],
            "configuration_bytes": h["config_bytes"],
            "rows_bytes": rows_bytes,
            "schema_bytes": h["tree_offset"] - h["config_bytes"] - rows_bytes,
            "bookkeeping_bytes": h["rings_offset"] - h["tree_offset"],
            "rings_bytes": h["file_bytes"] - h["rings_offset"],  # a ring gets memory when a collector claims it
            "rings_allocated_bytes": max(0, info["allocated_bytes"] - h["rings_offset"]),
            "rings_in_use": len(collectors),
        },
        writer={
            "pid": counters["writer_pid"] or None,
            "active": counters["writer_active"],
            "age_seconds": counters["writer_age"] if counters["writer_age"] >= 0 else None,
            "transactions": counters["transactions"],
            "takeovers": counters["takeovers"],
            **{k: writer[k] for k in ("command", "process_state")},
        },
        limiter=figures(handle.limiter(1)),
        members=sorted(members, key=lambda m: (not m["alive"], m["since"])),
        collectors=collectors,
        counters=counters,
    )


def _process_state(entry: Info) -> str | None:
    """One letter from /proc (R, S, D, T, Z …); None if the process is gone or counted in another pid namespace."""
    try:
        here = os.stat("/proc/self/ns/pid").st_ino == entry["pid_namespace"]
    except OSError:
        return None
    same = (
        here and native.process_start_ticks(entry["pid"]) == entry["start_ticks"]
    )  # else the pid means another process
    return segment.process_state(entry["pid"]) if same else None


# ---- the commands ----------------------------------------------------------------------------------------------


def list_command(args: argparse.Namespace) -> int:
    """`shminfo list`: one line per buffer."""
    found = []
    for owner, name in buffers(None if args.all_users else args.owner):
        with contextlib.suppress(BufferNotFound):  # destroyed while we looked
            found.append(look(name, owner))
    if args.json:
        print_json(found)
    elif not found:
        print(f"no buffers of {'any user' if args.all_users else f'uid {args.owner}'} in {segment.SHM_DIR}")
    else:
        t = table(
            *["uid>"] * args.all_users,
            "name",
            "rows>",
            "capacity>",
            "bytes/row>",
            "segment>",
            "memory>",
            "attached>",
            "collectors>",
            "written>",
            "waiting>",
            "age>",
            "state",
        )
        for i in found:
            rows, numbers = (
                [count(i[k]) for k in keys]
                for keys in (
                    ("size", "capacity", "row_bytes"),
                    ("processes_alive", "collectors_alive", "rows_total", "waiting_rows"),
                )
            )
            t.add_row(
                *[str(i["owner"])] * args.all_users,
                printable(i["name"]),
                *rows,
                nbytes(i["file_bytes"]),
                nbytes(i["allocated_bytes"]),
                *numbers,
                seconds(i["age_seconds"]),
                styled(i["state"]),
            )
        print_rich(t, *(styled(f"{i['name']}: {i['reason']}") for i in found if i["reason"]))
    return 0


def show_command(args: argparse.Namespace) -> int:
    """`shminfo show NAME`: everything about one buffer."""
    segment.check_name(args.name)
    info = look(args.name, args.owner, whole=True)
    if "settings" not in info:  # only its outside is known
        text = f"{info['path']} is {info['state']}: {info['reason']}"
        raise BufferFormatError(_with_remedy(text, args.name) if info["state"] == "damaged" else text)
    if args.json:
        print_json(info)
    else:
        print_rich(_heading(info), *_tables(info))
    return 0


def _with_remedy(text: str, name: str) -> str:
    return text if "`shminfo rm" in text else f"{text}. `shminfo rm --force {name}` removes it"


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
    line("segment", info["path"], nbytes(seg["file_bytes"]), f"of which {nbytes(seg['allocated_bytes'])} have memory")
    if schema := info["schema"]:
        each, used = schema["row_bytes"], schema["payload_bytes"]
        line("", f"rows {nbytes(seg['rows_bytes'])} (each {each:,} bytes: {used:,} payload, {each - used} padding)")
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
    line(
        "writer",
        *["nobody yet"]
        if w["pid"] is None
        else [
            f"pid {w['pid']} {w['command'] or ''}".strip(),
            "active" if w["active"] else "idle (gave the role back)",
            w["process_state"] in ("T", "t") and "stopped (SIGSTOP)",
            f"last transaction {seconds(w['age_seconds'])} ago"
            if w["age_seconds"] is not None
            else "no transaction yet",
            count(w["transactions"], "transaction"),
            count(w["takeovers"], "takeover"),
        ],
    )
    if info["limiter"]:
        line("limiter", f"{info['limiter']['samples_per_insert']:g} samples an insert", info["limiter"]["text"])
    return grid


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
                living("alive" if m["alive"] else "dead", m["process_state"]),
            )
        yield from (t, *[f"and {len(dead) - DEAD_SHOWN} more dead"] * (len(dead) > DEAD_SHOWN), "")
    if not alive:
        yield "attached read-only (such handles are not listed)\n" if info["attached"] else "nobody is attached\n"
    if collectors:
        from rich.bar import Bar

        states = {s: sum(c["state"] == s for c in collectors) for s in ("alive", "dead", "closed")}
        t = table(
            "slot>",
            "pid>",
            "state",
            "ring",
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
                f"{c['ring_fill']:.0%}",
                count(c["ring_used"]),
                *(count(c[f"{k}_rows"]) for k in ("put", "stored", "skipped", "dropped", "refused")),
                seconds(c["blocked_seconds"]),
            )
        yield t


def rm_command(args: argparse.Namespace) -> int:
    """`shminfo rm NAME…`: destroy. Those that can go, go, whatever becomes of the others."""
    results = []
    for name in args.names:
        error, waiting = None, None
        try:
            waiting = look(name, args.owner)["waiting_rows"] if segment.check_name(name) else None
            segment.destroy(name, force=args.force, owner=args.owner)
        except BufferNotFound:
            error = _not_found(name, args.owner)
        except BufferFormatError as e:
            path = segment.path_of(name, args.owner)
            regular = os.path.isfile(path) and not os.path.islink(path)
            error = _with_remedy(str(e), name) if regular else f"{e}. Remove it yourself: rm {path}"
        except ERRORS as e:
            error = str(e)
        removed = error is None
        results.append({"name": name, "owner": args.owner, "removed": removed, "waiting_rows": waiting, "error": error})
        lost = f", and with it {count(waiting, 'row')} that waited in rings" if waiting else ""
        if error or not args.json:
            print(
                printable(f"shminfo: {error}") if error else f"removed {name}{lost}", file=sys.stderr if error else None
            )
    if args.json:
        print_json(results)
    return int(any(r["error"] for r in results))


def parser() -> argparse.ArgumentParser:
    """The command line. Options work before and after the command."""

    def options(p: argparse.ArgumentParser, **default: Any) -> None:
        p.add_argument("--json", action="store_true", help="for programs: complete, numbers as numbers", **default)
        p.add_argument("--owner", type=int, metavar="UID", help="another user's buffers", **default)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        options(p, default=argparse.SUPPRESS)  # one left out must not undo one before the command
        p.set_defaults(run=run)
        return p

    top = argparse.ArgumentParser(
        prog="shminfo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
        description="Look at shmbuf's buffers without disturbing them, and remove them.",
    )
    top.add_argument("--version", action="version", version=f"shminfo {__version__}")
    options(top)
    top.add_argument("--all-users", action="store_true", help="everybody's buffers")
    top.set_defaults(run=list_command)
    commands = top.add_subparsers(title="commands", metavar="{list,show,rm}")
    command("list", list_command, "list buffers (also what no command does)").add_argument(
        "--all-users", action="store_true", default=argparse.SUPPRESS, help="everybody's buffers"
    )
    command("show", show_command, "show everything about one buffer").add_argument("name")
    rm = command("rm", rm_command, "destroy buffers that nobody is attached to")
    rm.add_argument("names", metavar="name", nargs="+")
    rm.add_argument(
        "--force", action="store_true", help="also if somebody is attached (who gets StorageLost) or it is damaged"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns the exit status (argparse exits by itself, with 2)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a name shall still show the numbers
    try:
        try:
            p = parser()
            args = p.parse_args(argv)
            if args.all_users and (args.run is not list_command or args.owner is not None):
                p.error("--all-users goes with list, and not with --owner")
            args.owner = os.getuid() if args.owner is None else args.owner
            return args.run(args)
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


if __name__ == "__main__":
    sys.exit(main())
