"""`shminfo`: what lies in shared memory, who is attached, and how to get rid of it. Looking leaves no trace: it maps read-only,
takes no lock and no entry in any table. Never imports torch or numpy."""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgpack
import posix_ipc

from shmbuf import __version__, segment
from shmbuf._extension import native
from shmbuf.errors import BufferFormatError, BufferInUse, BufferNotFound, ShmbufError
from shmbuf.schema import Schema, show_key

Info = dict[str, Any]
ERRORS = (ShmbufError, OSError, ValueError, TypeError, RuntimeError, native.FormatError, posix_ipc.Error, msgpack.UnpackException)
SUMMARY = ("name", "owner", "path", "state", "reason", "unnamed", "capacity", "size", "row_bytes", "file_bytes", "allocated_bytes",
           "attached", "processes_alive", "collectors_alive", "rows_total", "write_count", "created", "age_seconds", "mode")
DEAD_SHOWN = 5  # dead entries of `show`; --json has them all

EPILOG = """examples:
  shminfo                         this user's buffers
  shminfo show pong               everything about one of them
  shminfo --json | jq '.[].name'  for programs; also: shminfo show pong --json
  shminfo rm pong breakout        remove two; --force: also while somebody is attached, or when damaged
  watch -n1 shminfo show pong     look on while it fills

exit status: 0 ok, 1 the request failed (no such buffer, in use …), 2 wrong usage"""


# ---- looking -----------------------------------------------------------------------------------------------------------


def buffers(owner: int | None) -> Iterator[tuple[int, str]]:
    """(owner, name) of every file named like a buffer: of one user, or of all (None)."""
    for file in sorted(os.listdir(segment.SHM_DIR)):
        found = re.fullmatch(r"shmbuf\.(\d+)\.(.*)", file, re.DOTALL)
        if found and owner in (None, int(found[1])):
            yield int(found[1]), found[2]


def look(name: str, owner: int, *, whole: bool = False) -> Info:
    """What can be known about one buffer without disturbing it; ``whole`` adds what `shminfo show` prints.

    A file that cannot be read is described, too: ``state`` is then "foreign", "unreadable" or "damaged", ``reason`` says why and
    what only the content could tell is None.

    Raises:
        BufferNotFound: no file of that name.
    """
    path = segment.path_of(name, owner)
    info: Info = {**dict.fromkeys(SUMMARY), "name": name, "owner": owner, "path": path}
    try:
        st = os.lstat(path)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL byte in the name
        raise BufferNotFound(_not_found(name, owner)) from None
    info.update(mode=f"{stat.S_IMODE(st.st_mode):04o}", file_bytes=st.st_size, allocated_bytes=st.st_blocks * 512)
    if stat.S_ISREG(st.st_mode) and st.st_uid != owner:
        info.update(state="foreign", reason=f"the file belongs to uid {st.st_uid}, its name to uid {owner}")
        return info
    try:
        with closing(segment.attach(name, owner=owner, watch=True)) as handle:
            info["attached"] = _presence(path)
            _read(handle, info, whole)
    except BufferNotFound:
        raise BufferNotFound(_not_found(name, owner)) from None
    except PermissionError:
        info.update(state="unreadable", reason=f"mode {stat.filemode(st.st_mode)} does not let uid {os.getuid()} read it")
    except ERRORS as e:
        info.update(state="damaged" if stat.S_ISREG(st.st_mode) else "foreign", reason=str(e).removeprefix(f"{path}: "))
    return info


def _not_found(name: str, owner: int) -> str:
    known = [n for _, n in buffers(owner)]
    others = [str(uid) for uid, n in buffers(None) if n == name and uid != owner]
    there = f" uid {owner} has: {', '.join(known[:20])}{' …' if len(known) > 20 else ''}." if known else f" uid {owner} has no buffers."
    return f"no buffer named {name!r}.{there}" + (f" Another user has one of that name: --owner {' or '.join(others)}." if others else "")


def _presence(path: str) -> bool:
    """Whether anybody is attached, by the lock that the kernel drops at death. Asking takes no lock."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:  # struct flock: type, whence, start, length, pid
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, native.LOCK_PRESENCE, 1, 0))
        return struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK
    finally:
        os.close(fd)


def _read(handle: Any, info: Info, whole: bool) -> None:
    h = handle.header
    ready, counters, now = h["ready"], handle.counters(), time.time()
    members, collectors = handle.members(), handle.collectors()
    alive = [m for m in members if m["alive"]]
    info.update(
        state="being destroyed" if handle.destroyed else "stale unnamed" if h["unnamed"] and not info["attached"] else
        "ok" if ready else "no schema yet",
        unnamed=h["unnamed"], capacity=h["capacity"], size=counters["size"], row_bytes=h["row_bytes"] if ready else None,
        processes_alive=len({(m["pid_namespace"], m["pid"]) for m in alive}),
        collectors_alive=sum(c["state"] == "alive" for c in collectors), rows_total=counters["rows_total"],
        write_count=counters["write_count"], created=h["created"], age_seconds=max(0.0, now - h["created"]))
    config = msgpack.unpackb(handle.config)
    schema = Schema.from_bytes(handle.schema) if ready else None
    if not whole:
        return
    for entry in [*members, *collectors]:
        entry["age_seconds"] = max(0.0, now - entry["since"])
        entry["process_state"] = _process_state(entry)
    for c in collectors:
        c["ring_fill"] = c["ring_used"] / c["ring_bytes"]
    face = config.get("face") or {}
    sampler, arguments = face.get("sampler") or (None, {})
    empty = counters["size"] == 0
    rows_bytes = h["capacity"] * h["row_bytes"]
    writer = next((m for m in [*alive, *members, *collectors] if m["pid"] == counters["writer_pid"]), None)
    info.update(
        instance_id=f"{h['instance_id']:016x}", creator_pid=h["creator_pid"],
        schema=None if schema is None else {
            "payload_bytes": schema.payload_bytes, "row_bytes": schema.row_bytes,
            "columns": [{"key": list(c.key), "dtype": c.dtype, "shape": list(c.shape), "bytes": c.nbytes, "offset": c.offset}
                        for c in schema.columns]},
        window={"first_id": None if empty else counters["first_id"], "last_id": None if empty else counters["end_id"] - 1,
                "end_id": counters["end_id"]},
        settings={"full": config.get("full"), "timeout": config.get("timeout"), "drain": config.get("drain"),
                  "class": face.get("class"), "batch_size": face.get("batch_size"), "sampler": sampler, "sampler_arguments": arguments,
                  "priority_key": face.get("priority_key") or None, "pin_memory": face.get("pin_memory"),
                  "max_collectors": h["max_collectors"], "max_members": h["max_members"], "ring_bytes": h["ring_bytes"] or None},
        config=config,
        segment={"file_bytes": info["file_bytes"], "allocated_bytes": info["allocated_bytes"],
                 "configuration_bytes": h["config_bytes"], "rows_bytes": rows_bytes,
                 "schema_bytes": h["rings_offset"] - h["config_bytes"] - rows_bytes if ready else 0,
                 "rings_bytes": h["file_bytes"] - h["rings_offset"],  # address space; a ring gets memory when a collector claims it
                 "rings_allocated_bytes": max(0, info["allocated_bytes"] - h["rings_offset"]), "rings_in_use": len(collectors)},
        writer={"pid": counters["writer_pid"] or None, "command": writer and writer["command"],
                "process_state": writer and writer["process_state"], "active": counters["writer_active"],
                "last_transaction_seconds": counters["writer_age"] if counters["writer_age"] >= 0 else None,
                "transactions": counters["transactions"], "takeovers": counters["takeovers"]},
        members=sorted(members, key=lambda m: (not m["alive"], m["since"])), collectors=collectors, counters=counters)


def _process_state(entry: Info) -> str | None:
    """One letter from /proc (R, S, D, T, Z …); None if the process is gone, or is numbered in another pid namespace."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != entry["pid_namespace"] or native.process_start_ticks(entry["pid"]) != entry["start_ticks"]:
            return None  # the pid means another process here
        with open(f"/proc/{entry['pid']}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None


# ---- words and numbers for people --------------------------------------------------------------------------------------


def printable(text: Any) -> str:
    """Names, commands and settings are anybody's bytes: none of them gets to command the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def nbytes(n: float | None) -> str:
    if n is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:,} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def seconds(s: float | None) -> str:
    if s is None:
        return "–"
    for limit, unit, size in ((10, "s", 1), (120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if s < limit:
            return f"{s:.1f} s" if limit == 10 else f"{s / size:.0f} {unit}"
    return f"{s / 86_400:.0f} d"


def count(n: int | None) -> str:
    return "–" if n is None else f"{n:,}"


def plural(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def plain(value: Any) -> Any:
    """As JSON can hold it: configurations may hold bytes, inf and nan."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def print_json(value: Any) -> None:
    import json

    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def print_rich(*parts: Any) -> None:
    """Tables to stdout; as wide as they need to be when nobody's terminal limits them."""
    from rich.console import Console

    tty = sys.stdout.isatty()
    console = Console(width=None if tty else 2000, markup=False, emoji=False, highlight=False)
    with console.capture() as text:  # written in one go: a closed pipe then is our exception, not rich's exit
        for part in parts:
            console.print(part)
    out = text.get()
    sys.stdout.write(out if tty else "\n".join(line.rstrip() for line in out.split("\n")))


def table(*columns: str, title: str | None = None) -> Any:
    """A table; a column's name ending in ">" is set flush right."""
    from rich import box
    from rich.table import Table

    t = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for c in columns:
        t.add_column(c.rstrip(">"), justify="right" if c.endswith(">") else "left", overflow="fold")
    return t


STATE_STYLE = {"ok": "green", "alive": "green", "no schema yet": "cyan", "dead": "red", "damaged": "red", "closed": "dim"}


def state_text(state: str, more: str = "") -> Any:
    from rich.text import Text

    return Text(state + more, style="yellow" if more else STATE_STYLE.get(state, "yellow"))


def living(state: str, entry: Info) -> Any:
    """alive, dead or closed, and what /proc says of it when that matters."""
    letter = entry["process_state"]
    if state == "alive" and letter in ("T", "t"):
        return state_text(state, f", stopped ({letter})")
    return state_text(state if state != "alive" or letter is None else f"alive ({letter})", "") if letter is None else _green(f"{state} ({letter})", state)


def _green(text: str, state: str) -> Any:
    from rich.text import Text

    return Text(text, style=STATE_STYLE.get(state, ""))
