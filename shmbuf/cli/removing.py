"""`shminfo rm` and `shminfo gc`: buffers that go, and the memory that comes back."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.cli import looking
from shmbuf.cli.looking import ERRORS, Info, byte_is_held, look, not_found, with_remedy
from shmbuf.errors import BufferFormatError, BufferInUse, BufferNotFound
from shmbuf.printing import count, nbytes, print_json, printable


def rm_command(args: argparse.Namespace) -> int:
    """Destroy. Those that can go, go, whatever becomes of the others."""
    results = []
    for name in args.names:
        error, info = None, None
        try:
            info = look(name, args.owner) if segment.check_name(name) else None
            if info and info["kept_by"] and not args.force:
                raise BufferInUse(_kept_text(info))
            segment.destroy(name, force=args.force, owner=args.owner)
        except BufferNotFound:
            error = not_found(name, args.owner)
        except BufferFormatError as e:
            path = segment.path_of(name, args.owner)
            regular = os.path.isfile(path) and not os.path.islink(path)
            error = with_remedy(str(e), name) if regular else f"{e}. Remove it yourself: rm {path}"
        except ERRORS as e:
            error = str(e)
        removed = error is None
        waiting, size = (info["waiting_rows"], info["allocated_bytes"]) if info else (None, 0)
        later = bool(info and info["attached"])  # the memory goes when the last mapping does
        results.append(
            {
                "name": name,
                "owner": args.owner,
                "removed": removed,
                "waiting_rows": waiting,
                "freed_bytes": size if removed and not later else 0,
                "held_bytes": size if removed and later else 0,
                "error": error,
            }
        )
        if error:
            print(printable(f"shminfo: {error}"), file=sys.stderr)
        elif not args.json:
            lost = f", and with it {count(waiting, 'row')} that waited in rings" if waiting else ""
            freed = f"{nbytes(size)} are free when the last process lets go" if later else f"{nbytes(size)} freed"
            print(f"removed {name}{lost}: {freed}")
    if args.json:
        print_json(results)
    return int(any(r["error"] for r in results))


# ---- gc --------------------------------------------------------------------------------------------------------


def leftover(info: Info) -> str | None:
    """Why nobody can need this file any more; None: somebody may."""
    if info["state"] == "stale unnamed":
        return "its owner is gone, and it has no name"
    if info["state"] == "half-built" and not info["attached"]:
        return "whoever made it died before it held a row"
    if info["state"] == "damaged" and info["file_bytes"] == 0:
        return "an empty file, no buffer"
    if info["state"] == "damaged" and info["name"].startswith(segment.UNNAMED):
        try:
            return None if byte_is_held(info["path"], native.LOCK_PRESENCE) else "damaged, and it has no name"
        except OSError:
            return None
    return None


def _kept_text(info: Info) -> str:
    who, whose = (
        " ".join(map(str, info["kept_by"])),
        "" if info["owner"] == os.getuid() else f"--owner {info['owner']} ",
    )
    return (
        f"buffer {info['name']!r} is kept by its steward, pid {who}: stop it (kill {who}), or "
        f"`shminfo rm --force {whose}{info['name']}` takes the buffer from it"
    )


def unattached(info: Info) -> bool:
    """A sound buffer with a name that no process has open: its rows, if it still has them, are kept for whoever attaches next."""
    return info["state"] in ("ok", "no schema yet", looking.LOST) and not info["attached"] and not info["unnamed"]


def gc_command(args: argparse.Namespace) -> int:
    results: list[Info] = []
    kept: list[Info] = []
    stewards: list[Info] = []
    for owner, name in looking.buffers(args.owner):
        try:
            info = look(name, owner)
        except BufferNotFound:
            continue
        why = leftover(info)
        if why is None and unattached(info):
            if info["kept_by"]:  # whose word it is
                stewards.append(info)
                continue
            if not args.all_unattached:
                kept.append(info)
                continue
            rows = "its rows are lost" if info["state"] == looking.LOST else count(info["size"], "row")
            why = f"nobody is attached ({rows})"
        if why is not None:
            error = None if args.dry_run else _remove(info)
            freed = info["allocated_bytes"] if error is None else 0
            results.append({"name": name, "owner": owner, "why": why, "freed_bytes": freed, "error": error})
    freed = sum(r["freed_bytes"] for r in results)
    kept_bytes = sum(i["allocated_bytes"] for i in kept)
    if args.json:
        left = {"kept_unattached": [i["name"] for i in kept], "kept_bytes": kept_bytes}
        left["kept_by_stewards"] = [i["name"] for i in stewards]
        print_json({"dry_run": args.dry_run, "freed_bytes": freed, "removed": results, **left})
        return int(any(r["error"] for r in results))
    for r in results:
        if r["error"]:
            print(printable(f"shminfo: {r['error']}"), file=sys.stderr)
        else:
            did = "would remove" if args.dry_run else "removed"
            print(printable(f"{did} {r['name']} ({r['why']}): {nbytes(r['freed_bytes'])}"))
    gone = sum(r["error"] is None for r in results)
    would = "would free" if args.dry_run else "freed"
    print(f"{would} {freed:,} bytes in {count(gone, 'buffer')}" if gone else "nothing to remove")
    if kept:
        print(
            f"kept {count(len(kept), 'named buffer')} nobody is attached to, {nbytes(kept_bytes)}: {_names(kept)} "
            "(--all-unattached removes them too, with their rows)"
        )
    if stewards:
        print(
            f"kept {count(len(stewards), 'buffer')} that a steward keeps: {_names(stewards)} (stop it, or rm --force)"
        )
    return int(any(r["error"] for r in results))


def _names(infos: list[Info]) -> str:
    shown = ", ".join(printable(i["name"]) for i in infos[:8])
    return shown + (f" and {len(infos) - 8} more" if len(infos) > 8 else "")


def _remove(info: Info) -> str | None:
    """None, or why it stays. What somebody attached to meanwhile stays."""
    try:
        if info["state"] == "damaged":
            _unlink(info)
        else:
            segment.destroy(info["name"], owner=info["owner"])
    except BufferNotFound:  # somebody was faster
        return None
    except ERRORS as e:
        return f"{info['name']}: {e}"
    return None


def _unlink(info: Info) -> None:
    """Remove a damaged file that nobody has open, as `segment.destroy` does a sound one: this inode, not a successor's name."""
    path = info["path"]
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BufferNotFound(path) from None
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or st.st_size != info["file_bytes"]:
            raise BufferInUse(f"{path} changed while it was looked at")
        if not all(native.lock_byte(fd, at, True) for at in (native.LOCK_PRESENCE, native.LOCK_DESTROY)):
            raise BufferInUse(f"{path} is in use")
        if os.lstat(path).st_ino != st.st_ino:
            raise BufferNotFound(path)
        os.unlink(path)
    finally:
        os.close(fd)
