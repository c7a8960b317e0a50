"""The words and numbers of a put that did not go through, or of a wait that took too long."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.errors import (
    CommitInterrupted,
    CommitPending,
    ConcurrentUse,
    NotEnoughMemory,
    RingFull,
    StorageLost,
    TooManyCollectors,
)
from shmbuf.limiter import collectors_text, waiting_text

if TYPE_CHECKING:
    from shmbuf.attachment import Attachment
    from shmbuf.buffer import Buffer
    from shmbuf.ticket import Ticket


def put_failed(buffer: Buffer, status: str, ticket: Ticket, seconds: float) -> None:
    n, rows = ticket._native.asked, ticket.rows
    if status == "dropped":
        return  # asked for, and counted
    if status == "full":
        text = _ring_full_text(buffer, n, seconds)
        if rows:
            raise CommitPending(f"{rows:,} of {n:,} rows are in the ring and will be stored; then {text}", ticket, rows)
        raise RingFull(f"{text} Nothing was put.")
    if status == "interrupted":
        raise CommitInterrupted(f"interrupted: {rows:,} of {n:,} rows are in the ring and will be stored", ticket, rows)
    if status == "concurrent":
        raise ConcurrentUse(
            "another thread is putting through this handle; a Buffer handle puts from one thread: attach "
            f"once per thread (Buffer.attach({buffer.name!r}))"
        )
    if status == "none_free":
        raise TooManyCollectors(
            f"buffer {buffer.name!r}: all {buffer._header['max_collectors']} rings have living owners. Close "
            "some, or create the buffer with a larger max_collectors"
        )
    if status == "no_memory":
        raise NotEnoughMemory(
            f"/dev/shm has no {buffer._header['ring_bytes']:,} bytes left for this collector's ring; enlarge "
            "it, or create the buffer with smaller ring_bytes. Nothing was put"
        )
    if status == "readonly":
        raise PermissionError(f"this handle on buffer {buffer.name!r} is read-only")
    if status == "forked":
        raise StorageLost("this process was forked inside a signal handler inside the call: the call is the parent's")
    raise buffer._lost(f"{status} while rows were being put ({rows:,} of {n:,} are in its ring)")


def _ring_full_text(buffer: Buffer, n: int, seconds: float) -> str:
    me = next((c for c in buffer.collectors() if c["pid"] == os.getpid() and c["slot"] == buffer._handle.slot), None)
    used = f"{me['ring_used']:,} of {me['ring_bytes']:,} bytes used, " if me else ""
    waited = "" if buffer._full == "error" or seconds <= 0 else f" after {seconds:g} s"
    return (
        f"the ring of collector {buffer._handle.slot} has no room{waited} ({used}{n:,} rows of "
        f"{buffer._schema.row_bytes if buffer._schema else 0:,} bytes to put): {held_up_text(buffer)}"
    )


def held_up_text(buffer: Attachment) -> str:
    """Why rows stay in the rings: because of the limiter, of a pin, or of whoever drains."""
    if limited := collectors_text(buffer._call("limiter", 1)):
        return f"{limited}. Sample more, or set_limiter()."
    pinned = pins_text(buffer)
    return f"{pinned}." if pinned and not buffer._call("counters")["writer_active"] else writer_text(buffer)


def pins_text(buffer: Attachment) -> str | None:
    """Who keeps the writer from overwriting the oldest rows."""
    held = [p for p in buffer._call("pins") if p["alive"]]  # a dead one's is swept
    if not held:
        return None
    first = min(held, key=lambda p: p["first_id"])
    left = (
        "until it is released" if first["seconds_left"] is None else f"for at most {first['seconds_left']:.1f} s more"
    )
    return f"pid {first['pid']} ({first['command']}) has pinned the rows from id {first['first_id']:,} on, {left}"


# By the id of the native handle, until its end; no WeakValueDictionary: Ctrl-C in its callback would be swallowed.
attached: dict[int, weakref.ref[Attachment]] = {}
log = logging.getLogger("shmbuf")
LONG_WAIT = 30.0  # seconds; then twice as long, and so on


def _long_wait(handle: Any, seconds: float) -> None:
    """Called by waits that last."""
    known = attached.get(id(handle))
    buffer = known() if known else None
    if buffer is not None:
        log.warning("%s", long_wait_text(buffer, seconds))


class Waiting:
    """Around a wait that naps in Python: seen from outside and with a word now and then, like those of the core."""

    def __init__(self, buffer: Attachment):
        self._buffer, self._since, self._next = buffer, 0.0, LONG_WAIT

    def __enter__(self) -> Waiting:
        return self

    def tick(self) -> None:
        """Before each nap."""
        now = time.monotonic()
        if not self._since:
            self._since = now
            self._buffer._call("wait_for", native.FOR_ROWS)
        if now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            try:
                log.warning("%s", long_wait_text(self._buffer, now - self._since))
            except Exception as e:  # a log handler's, say: no reason to end the wait
                sys.unraisablehook(
                    SimpleNamespace(
                        exc_type=type(e), exc_value=e, exc_traceback=e.__traceback__, err_msg=None, object=log
                    )
                )  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        if self._since:
            with contextlib.suppress(ValueError, StorageLost):  # closed or destroyed meanwhile
                self._buffer._call("wait_for", 0)


def long_wait_text(buffer: Attachment, seconds: float) -> str:
    """What this process has been waiting for, and why it is not there."""
    slot, member = buffer._handle.slot, buffer._handle.member
    what = next((m["waits_for"] for m in buffer._call("members") if m["member"] == member), None)
    counters = buffer._call("counters")
    begin = f"buffer {buffer.name!r}: waiting for {seconds:.0f} s"
    if what == "limiter":
        state = buffer._call("limiter", 1)
        return f"{begin} to sample: {waiting_text(state, 1) if state else 'the limiter has gone'}"
    if what in ("rows", "schema"):
        alive = sum(c["state"] == "alive" for c in buffer._call("collectors"))
        why = held_up_text(buffer) if counters["ring_used_bytes"] else "the rings are empty"
        return f"{begin} for rows: {counters['size']:,} are stored, {alive} collectors are attached; {why}"
    mine = next((c for c in buffer._call("collectors") if c["slot"] == slot), None)
    ring = (
        f"the ring of collector {slot} ({mine['ring_used']:,} of {mine['ring_bytes']:,} bytes used)"
        if mine
        else "its ring"
    )
    return f"{begin} for {'room in' if what == 'room' else 'what lies in'} {ring}: {held_up_text(buffer)}"


native.set_long_wait(_long_wait, LONG_WAIT)


def writer_text(buffer: Attachment) -> str:
    """Who moves rows out of the rings, and who cannot because of his device."""
    broken = [device_error_text(m) for m in buffer._call("members") if m["alive"] and m["device_error"]]
    if error := buffer._handle.device_error:  # more than its number
        broken = [f"this process cannot write to the device now ({error})", *broken]
    return "; ".join([*broken, _holder_text(buffer)])


def device_error_text(member: dict[str, Any]) -> str:
    return (
        f"pid {member['pid']} ({member['command']}) cannot write to the device now: CUDA error {member['device_error']}"
    )


def _holder_text(buffer: Attachment) -> str:
    c = buffer._call("counters")
    segment.name_writer(c, buffer._get("inode"), buffer._call("members"))
    pid = c["writer_pid"]
    if not c["writer_active"]:
        if buffer._drain == "caller":
            return 'this buffer is drained by its callers: drain(), extend() with full="block", or whoever waits.'
        last = f"pid {pid} did last" if pid else "nobody did yet"
        return f"nobody drains at this moment ({last}). Enlarge ring_bytes, or give the drain more of a core."
    here = c["writer_pid_namespace"] == segment.pid_namespace()
    state = segment.process_state(pid) if here else "of another pid namespace"
    doing = {
        "T": "is stopped (SIGSTOP): continue it with SIGCONT or kill it",
        "Z": "is a zombie",
        None: "is gone",
    }.get(state, f"is in state {state}" if here else f"is {state}")
    age = (
        f"the last transaction was {c['writer_age']:.1f} s ago"
        if c["writer_age"] >= 0
        else "there was no transaction yet"
    )
    return f"pid {pid} holds the writer role and {doing} ({age})."
