"""What can be known about a buffer from outside. Looking leaves no trace: it maps read-only, takes no lock and no entry in
any table."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import posix_ipc

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.errors import BufferFormatError, BufferNotFound, ShmbufError, TooManyOpenFiles
from shmbuf.limiter import figures
from shmbuf.schema import Schema

Info = dict[str, Any]
ERRORS = (
    ShmbufError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    native.FormatError,
    native.MapError,
    posix_ipc.Error,
    msgpack.UnpackException,
)
LOST = "rows lost"  # of device memory that nobody has any more
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
    "kept_by",
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


def buffers(owner: int | None) -> Iterator[tuple[int, str]]:
    """(owner, name) of every file named like a buffer: of one user, or of all (None)."""
    for file in sorted(os.listdir(segment.SHM_DIR)):
        found = re.fullmatch(r"shmbuf\.(\d+)\.(.+)", file, re.DOTALL)
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
            read(handle, info, whole)
    except TooManyOpenFiles:  # says nothing of the file
        raise
    except FileNotFoundError:  # BufferNotFound is one
        raise BufferNotFound(not_found(name, owner)) from None
    except PermissionError:
        info.update(state="unreadable", reason=f"mode {stat.filemode(st.st_mode)} keeps uid {os.getuid()} out")
    except ERRORS as e:
        reason = str(e).removeprefix(path).lstrip(": ") or repr(e)
        info.update(state="foreign" if strange else "damaged", reason=reason)
    return info


def inside(name: str, owner: int) -> Info:
    """`look` at the whole of a buffer. Raises BufferNotFound, BufferFormatError (only its outside is known), ValueError."""
    segment.check_name(name)
    info = look(name, owner, whole=True)
    if "settings" not in info:
        text = f"{info['path']} is {info['state']}: {info['reason']}"
        raise BufferFormatError(with_remedy(text, name) if info["state"] == "damaged" else text)
    return info


def all_inside(owner: int | None) -> Iterator[Info]:
    """Every buffer, with the whole of those that can be read; one destroyed meanwhile is left out."""
    for uid, name in buffers(owner):
        with contextlib.suppress(BufferNotFound):
            yield look(name, uid, whole=True)


def not_found(name: str, owner: int) -> str:
    known = [n for _, n in buffers(owner)]
    others = [f"--owner {uid}" for uid, n in buffers(None) if n == name and uid != owner]
    text = f"no buffer named {name!r}; uid {owner} has " + (", ".join(known[:20]) if known else "none")
    text += f" and {len(known) - 20} more" if len(known) > 20 else ""
    return text + (f". Another user has one of that name: {' or '.join(others)}" if others else "")


def with_remedy(text: str, name: str) -> str:
    return text if "`shminfo rm" in text else f"{text}. `shminfo rm --force {name}` removes it"


def byte_is_held(path: str, at: int) -> bool:
    """Does a process hold this lock byte? Only asks: takes nothing."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        F_OFD_GETLK, flock = 36, "@hhqqi4x"
        answer = fcntl.fcntl(fd, F_OFD_GETLK, struct.pack(flock, fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
        return bool(struct.unpack(flock, answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def process_state(entry: Info) -> str | None:
    """One letter from /proc (R, S, D, T, Z …); None if the process is gone or counted in another pid namespace."""
    try:
        here = os.stat("/proc/self/ns/pid").st_ino == entry["pid_namespace"]
    except OSError:
        return None
    same = (
        here and native.process_start_ticks(entry["pid"]) == entry["start_ticks"]
    )  # else the pid means another process
    return segment.process_state(entry["pid"]) if same else None


def stopped(state: str | None) -> bool:
    return state in ("T", "t")


def read(handle: Any, info: Info, whole: bool) -> None:
    """Fill in what an open handle tells."""
    h = handle.header
    ready, counters = h["ready"], handle.counters()
    members, collectors, now = handle.members(), handle.collectors(), time.time()
    schema = Schema.from_bytes(handle.schema) if ready else None
    config = msgpack.unpackb(handle.config)
    alive = [m for m in members if m["alive"]]
    device = _device(handle, h, config)
    info.update(
        **{k: h[k] for k in ("unnamed", "capacity", "created")},
        row_bytes=h["row_bytes"] if ready else None,
        **{k: counters[k] for k in ("size", "rows_total", "write_count")},
        age_seconds=max(0.0, now - h["created"]),
        state=_state(handle, h, info, device),
        # Of a buffer that is shared by CUDA IPC the steward is part: it leaves with the last process.
        kept_by=[m["pid"] for m in alive if "steward" in m["roles"] and device and device["kind"] != "ipc"],
        processes_alive=len({(m["pid_namespace"], m["pid"]) for m in alive if "steward" not in m["roles"]}),
        collectors_alive=sum(c["state"] == "alive" for c in collectors),
        # Put and not stored. A killed collector may have counted a record that it never published: an empty ring holds none.
        waiting_rows=sum(
            max(0, c["put_rows"] - c["stored_rows"] - c["skipped_rows"]) for c in collectors if c["ring_used"]
        ),
    )
    if not whole:
        return
    segment.name_writer(counters, handle.inode, members)
    for entry in [*members, *collectors]:
        entry["age_seconds"] = max(0.0, now - entry["since"])
        entry["process_state"] = process_state(entry)
    for c in collectors:
        c["ring_fill"] = c["ring_used"] / c["ring_bytes"]
    known = (m for m in [*alive, *members, *collectors] if m["pid"] == counters["writer_pid"])
    writer: Info = next(known, {"command": None, "process_state": None})
    pid, here = counters["writer_pid"], counters["writer_pid_namespace"] == segment.pid_namespace()
    life = writer["process_state"] if writer["command"] is not None else segment.process_state(pid)
    ended = bool(pid) and here and life in (None, "Z", "X")
    info.update(
        instance_id=f"{h['instance_id']:016x}",
        creator_pid=h["creator_pid"],
        schema=schema and _columns(schema),
        window=_window(counters),
        settings=_settings(h, config),
        config=config,
        priorities=handle.priorities,
        segment=_segment(h, info, len(collectors)),
        device=device,
        writer={
            "pid": pid or None,
            "active": counters["writer_active"],
            "ended": ended,
            "age_seconds": counters["writer_age"] if counters["writer_age"] >= 0 else None,
            "transactions": counters["transactions"],
            "takeovers": counters["takeovers"],
            **{k: writer[k] for k in ("command", "process_state")},
        },
        limiter=figures(handle.limiter(1)),
        pins=sorted(handle.pins(), key=lambda p: p["first_id"]),
        members=sorted(members, key=lambda m: (not m["alive"], m["since"])),
        collectors=collectors,
        ages=handle.ages(),
        events=[{**e, "ago_seconds": max(0.0, now - e["at"])} for e in handle.events()],
        counters=counters,
    )


def _state(handle: Any, header: Info, info: Info, device: Info | None) -> str:
    if handle.destroyed and not (device and device["lost"] and handle.linked):
        return "being destroyed"
    if header["unnamed"] and not info["attached"]:
        return "stale unnamed"
    if header["ready"]:
        return LOST if device and device["lost"] else "ok"
    try:
        st = os.lstat(info["path"])
        if st.st_ino == handle.inode and st.st_size > header["config_bytes"]:  # memory for the first rows is taken
            return "being built" if byte_is_held(info["path"], native.LOCK_BUILD) else "half-built"
    except FileNotFoundError:
        return "being destroyed"
    return "no schema yet"


def _columns(schema: Schema) -> Info:
    return {
        "payload_bytes": schema.payload_bytes,
        "row_bytes": schema.row_bytes,
        "columns": [
            {"key": list(c.key), "dtype": c.dtype, "shape": list(c.shape), "bytes": c.nbytes, "offset": c.offset}
            for c in schema.columns
        ],
    }


def _window(counters: Info) -> Info:
    size, end = counters["size"], counters["end_id"]
    return {
        "first_id": counters["first_id"] if size else None,
        "last_id": end - 1 if size else None,
        "end_id": end,
    }


def _settings(h: Info, config: Info) -> Info:
    face = config.get("face") or {}
    sampler, arguments = face.get("sampler") or (None, {})
    return {
        **{k: config.get(k) for k in ("full", "timeout", "drain")},
        **{k: face.get(k) or None for k in ("class", "batch_size", "priority_key", "pin_memory")},
        "sampler": sampler,
        "sampler_arguments": arguments,
        "ring_bytes": h["ring_bytes"] or None,
        "max_collectors": h["max_collectors"],
        "max_members": h["max_members"],
    }


def _device(handle: Any, h: Info, config: Info) -> Info | None:
    """Of rows in device memory: which, how much, how it is shared, and who has it; those are asked. None: the rows are in the segment."""
    wish = config.get("device")
    if not wish:
        return None
    from shmbuf.cuda import memory, sharing

    kinds = {code: kind for kind, code in memory.KINDS.items()}
    kind, give_up = kinds.get(h["device_kind"]), time.monotonic() + sharing.SETTLE
    while True:
        alive = [m for m in handle.members() if m["alive"]]
        apart = any(not sharing.reachable(m) for m in alive)  # in another container: cannot be asked, and may have it
        holders = sharing.holders(handle) if kind else []
        if holders or apart or not (kind and alive) or time.monotonic() > give_up:
            break
        time.sleep(0.05)  # one that has just been handed it offers it in a moment
    why = next((p["why"] for p in holders if p["answers"]), "") if kind == memory.IPC else ""
    return {
        "uuid": wish["uuid"],
        "kind": kind,
        "bytes": h["device_bytes"] or None,
        "rings": wish["rings"],
        "holders": holders,
        "lost": bool(kind) and not holders and not apart,
        "why_not": why.removeprefix("vmm: ") or None,
    }


def _segment(h: Info, info: Info, rings: int) -> Info:
    rows_bytes = 0 if h["device_kind"] else h["capacity"] * (info["row_bytes"] or 0)
    return {
        "file_bytes": info["file_bytes"],
        "allocated_bytes": info["allocated_bytes"],
        "configuration_bytes": h["config_bytes"],
        "rows_bytes": rows_bytes,
        "schema_bytes": h["tree_offset"] - h["config_bytes"] - rows_bytes,
        "bookkeeping_bytes": h["rings_offset"] - h["tree_offset"],
        "rings_bytes": h["file_bytes"] - h["rings_offset"],  # a ring gets memory when a collector claims it
        "rings_allocated_bytes": max(0, info["allocated_bytes"] - h["rings_offset"]),
        "rings_in_use": rings,
    }
