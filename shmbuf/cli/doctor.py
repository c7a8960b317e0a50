"""`shminfo doctor`: what is wrong, or will be, with this user's buffers and the machine they live on, each with its remedy."""

from __future__ import annotations

import argparse
import os
import shlex

from shmbuf import segment
from shmbuf.cli import looking, machine
from shmbuf.cli.looking import Info, all_inside
from shmbuf.cli.removing import leftover, unattached
from shmbuf.cli.watching import (
    event_text,
    pin_text,
    pinned_by,
    process,
    stopped_drainers,
    why_not_descriptor,
    writer_stopped,
)
from shmbuf.errors import DeviceError, NotEnoughMemory
from shmbuf.printing import count, nbytes, print_json, print_rich, printable, seconds, styled

IDLE = 5.0  # seconds without a transaction while rows wait, after which that is told
LEVELS = {"ok": "green", "hint": "yellow", "wrong": "red"}


class Report:
    """What was found. ``level``: "ok", "hint" (works, but look at it) or "wrong" (exit status 1)."""

    def __init__(self) -> None:
        self.lines: list[Info] = []

    def say(self, check: str, level: str, text: str, remedy: str | None = None, buffer: str | None = None) -> None:
        self.lines.append({"check": check, "level": level, "buffer": buffer, "text": text, "remedy": remedy})

    @property
    def wrong(self) -> bool:
        return any(line["level"] == "wrong" for line in self.lines)


def doctor_command(args: argparse.Namespace) -> int:
    report, owner = Report(), None if args.all_users else args.owner
    facts = machine.facts(_used())
    machine.examine(facts, report.say)
    found = list(all_inside(owner))
    _cuda(report, any(info.get("device") for info in found))
    for info in found:
        examine(info, report)
    if args.json:
        print_json({"healthy": not report.wrong, "findings": report.lines, "machine": facts, "buffers": len(found)})
        return int(report.wrong)
    for line in report.lines:
        where = f"{line['buffer']}: " if line["buffer"] else ""
        print_rich(styled(f"{line['level']:<6}", LEVELS[line["level"]]).append_text(styled(where + line["text"], "")))
        if line["remedy"]:
            print(printable(f"       {line['remedy']}"))
    whose = "all users" if args.all_users else f"uid {args.owner}"
    bad, hints = (sum(line["level"] == level for line in report.lines) for level in ("wrong", "hint"))
    print(f"{count(len(found), 'buffer')} of {whose} looked at: {bad or 'nothing'} wrong, {count(hints, 'hint')}")
    return int(report.wrong)


def _cuda(report: Report, used: bool) -> None:
    """What this process sees of CUDA; where no buffer is there (``used``), nothing of it is amiss. Opens no context."""
    from shmbuf.cuda import driver, memory

    try:
        for device in driver.devices():
            why = memory.why_not_vmm(device)
            way = (
                f"its memory can be shared by CUDA IPC at most: {why}"
                if why
                else "its memory can be shared as a descriptor"
            )
            asked = "unset SHMBUF_CUDA_SHARING" if why == memory.ASKED else None
            remedy = asked or driver.surroundings() or None if why else None
            report.say("cuda", "hint" if why and used else "ok", f"{device}: {way}", remedy)
    except (DeviceError, NotEnoughMemory) as e:
        text = "rows in device memory cannot be read from here" if used else "no rows in device memory from here"
        report.say("cuda", "hint" if used else "ok", f"{text}: {e}")


def _used() -> int:
    """Memory of all users' buffers, as far as this one may see them."""
    total = 0
    for owner, name in looking.buffers(None):
        try:
            total += os.lstat(segment.path_of(name, owner)).st_blocks * 512
        except OSError:  # gone
            continue
    return total


def examine(info: Info, report: Report) -> None:
    """Everything about one buffer. A sound one without a fault is one "ok" line."""
    name, before = info["name"], len(report.lines)
    whose = "" if info["owner"] == os.getuid() else f" --owner {info['owner']}"

    def say(check: str, level: str, text: str, remedy: str | None = None) -> None:
        report.say(check, level, text, remedy, name)

    if why := leftover(info):
        say("leftover", "wrong", f"{why}; {nbytes(info['allocated_bytes'])} are held", f"shminfo gc{whose}")
        return
    if info["state"] in ("damaged", "foreign", "unreadable"):
        path = shlex.quote(info["path"])  # of a name that no buffer can have only the file can be removed
        ours = f"shminfo rm --force{whose} {name}" if segment.NAME.fullmatch(name) else f"rm {path}"
        remedy = ours if info["state"] == "damaged" else f"ls -ld {path}"
        say("readable", "wrong", f"{info['state']}: {info['reason']}", remedy)
        return
    if info["state"] in ("being destroyed", "being built"):
        return
    if info["state"] == "half-built":
        text = "whoever reserved the memory of its rows died; the next put does it again"
        say("half_built", "hint", text, f"shminfo rm{whose} {name}    # if nobody will put")
    if info["state"] == looking.LOST:
        d, force = info["device"], " --force" if info["attached"] else ""
        text = f"nobody has its device memory ({d['uuid']}, {nbytes(d['bytes'])}) any more: its rows are lost"
        say("device", "wrong", text, f"shminfo rm{force}{whose} {name}")
        return
    if unattached(info) and info["kept_by"]:
        who = ", ".join(map(str, info["kept_by"]))
        say("kept", "ok", f"nobody is attached: {count(info['size'], 'row')}, kept by steward pid {who}")
    elif unattached(info):
        size = nbytes(info["allocated_bytes"])
        text = f"nobody is attached: {count(info['size'], 'row')}, {size}, {seconds(info['age_seconds'])} old, kept for whoever attaches"
        say("unattached", "hint", text, f"shminfo rm{whose} {name}    # if its rows are no longer needed")
    if info["device"]:
        _device(info, say, whose)
    _writer(info, say)
    _collectors(info, say)
    if info["counters"]["malformed_records"]:
        n = count(info["counters"]["malformed_records"], "record")
        text = f"{n} in its rings could not be read and were left out: a collector's memory is damaged"
        say("records", "wrong", text, f"shminfo check{whose} {name}")
    if c := info["counters"]["streams_cut"]:
        text = f"trajectories cut short: {c:,}, by more streams at a time than a ring's table has room for"
        say("streams", "hint", text, f"shminfo show{whose} {name}    # a larger ring_bytes has a larger table")
    if len(report.lines) == before:
        last = (
            f"; the last death, {seconds(info['events'][-1]['ago_seconds'])} ago: {event_text(info['events'][-1])}"
            if info["events"]
            else ""
        )
        say("buffer", "ok", f"{info['state']}, {count(info['size'], 'row')}{last}")


def _device(info: Info, say: machine.Say, whose: str) -> None:
    d, name = info["device"], info["name"]
    others = any(p["answers"] for p in d["holders"])
    for p in d["holders"]:
        if not p["answers"] and info["owner"] == os.getuid():  # to other users nobody hands it
            then = "who attaches has it from others" if others else "who attaches cannot read until it does"
            still = looking.stopped(segment.process_state(p["pid"]))
            text = f"{process(p)} has its device memory and does not answer{' (stopped)' if still else ''}: {then}"
            say("device", "hint", text, f"kill -CONT {p['pid']}" if still else None)
    if d["kind"] == "ipc" and d["holders"]:
        text = f"its device memory dies with its steward, {', '.join(map(process, d['holders']))}"
        save = f"shminfo dump{whose} {name} PATH    # keep a checkpoint"
        say("device", "hint", f"{text}; not shared by descriptor{why_not_descriptor(d)}", save)


def _writer(info: Info, say: machine.Say) -> None:
    waiting, w, limiter = info["waiting_rows"], info["writer"], info["limiter"]
    if not waiting:
        return
    age = w["age_seconds"] if w["age_seconds"] is not None else info["age_seconds"]
    rows = f"{count(waiting, 'row')} wait in rings, the last transaction was {seconds(age)} ago"
    if who := writer_stopped(info):
        say(
            "writer",
            "wrong",
            f"the writer, {who}, is stopped (state {w['process_state']}): {rows}",
            f"kill -CONT {w['pid']}",
        )
    elif (idle := stopped_drainers(info)) and not w["active"]:
        who = ", ".join(process(m) for m in idle)
        say("writer", "wrong", f"who should store rows, {who}, is stopped: {rows}", f"kill -CONT {idle[0]['pid']}")
    elif age < IDLE:
        return
    elif limiter and limiter["collectors_wait"]:
        say("limiter", "hint", f"{rows}: {limiter['text']}", f"shminfo top {info['name']}")
    elif (pin := pinned_by(info)) and not w["active"]:
        still = looking.stopped(looking.process_state(pin))
        say(
            "pin",
            "wrong" if still else "hint",
            f"{rows}: {pin_text(pin)}",
            f"kill {'-CONT ' if still else ''}{pin['pid']}",
        )
    elif w["active"]:
        state = f"in state {w['process_state']}" if w["process_state"] else "in another pid namespace, or gone"
        say(
            "writer",
            "wrong",
            f"the writer, {process(w)}, {state}, does not go on: {rows}",
            f"cat /proc/{w['pid']}/stack",
        )
    elif not info["attached"]:
        say("writer", "hint", f"{rows}, and nobody is attached: whoever attaches and reads stores them", _drain(info))
    elif info["settings"]["drain"] == "caller":
        say("writer", "hint", f'{rows}: by drain="caller" they wait for a reader', _drain(info))
    else:
        say("writer", "wrong", f"nobody stores what was put: {rows}", _drain(info))


def _drain(info: Info) -> str:
    return f"python -m shmbuf.drain --leave-when-alone {info['name']}"


def _collectors(info: Info, say: machine.Say) -> None:
    for c in info["collectors"]:
        if c["state"] == "alive" and looking.stopped(c["process_state"]):
            say("collector", "hint", f"collector {process(c)} is stopped", f"kill -CONT {c['pid']}")
        if c["state"] != "dead":
            continue
        if not (info["attached"] or c["ring_used"]):  # whoever attaches next frees it
            continue
        left = max(0, c["put_rows"] - c["stored_rows"] - c["skipped_rows"]) if c["ring_used"] else 0
        text = f"collector {process(c)} died; " + (
            f"{count(left, 'row')} lie in its ring ({c['ring_fill']:.0%} full)"
            if left
            else "its ring is empty, not yet freed"
        )
        say("collector", "wrong" if info["attached"] else "hint", text, _drain(info))
