"""`shminfo check NAME`: is what the segment says true?"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

import msgpack

from shmbuf import segment
from shmbuf.cli.looking import ERRORS, LOST, Info, look, not_found
from shmbuf.errors import BufferNotFound
from shmbuf.printing import count, print_json, print_rich, printable, styled
from shmbuf.schema import Schema

PATIENCE = 2.0  # seconds to meet a moment without a transaction, and to see whether a finding was only one in progress
STALE = 1.3  # seconds that a sum may lag behind after an updater's death


def check_command(args: argparse.Namespace) -> int:
    segment.check_name(args.name)
    result = check(args.name, args.owner)
    if args.json:
        print_json(result)
    else:
        verdict = "sound" if result["sound"] else "unsound"
        print_rich(styled(f"{args.name}: ", "bold").append_text(styled(verdict)))
        checked = ", ".join(k if n is None else f"{count(n)} {k}" for k, n in result["checked"].items())
        print(printable(f"checked: {checked or 'nothing: it cannot be opened'}"))
        if result["quiet"] is False:
            print(
                "a transaction is unfinished (it runs, its writer is stopped or dead, or a pin is in its way): what it moves was not compared"
            )
        for finding in result["findings"]:
            print(printable(f"finding: {finding}"))
        if result["remedy"]:
            print(printable(result["remedy"]))
    return int(not result["sound"])


def check(name: str, owner: int) -> Info:
    """``sound``, ``findings`` (texts), ``checked`` (what → how many of them, None: it is one), ``quiet``: no transaction ran."""
    result: Info = {"name": name, "owner": owner, "path": segment.path_of(name, owner), "quiet": None, "checked": {}}
    findings: list[str] = []
    outside = look(name, owner)  # the file's type, owner and mode, and whether header and schema can be believed
    if outside["reason"]:
        findings.append(f"{outside['state']}: {outside['reason']}")
    else:
        try:
            with contextlib.closing(segment.attach(name, owner=owner, watch=True)) as handle:
                findings += _audited(handle, result)
        except BufferNotFound:
            raise BufferNotFound(not_found(name, owner)) from None
        except ERRORS as e:
            findings.append(str(e) or repr(e))
    lost = outside["state"] == LOST
    if lost:
        findings.append("rows lost: nobody has its device memory any more")
    remove = f"`shminfo rm --force {'' if owner == os.getuid() else f'--owner {owner} '}{name}` removes it"
    remedy = None
    if findings:
        remedy = (
            f"nothing can be read out of it; {remove}"
            if lost or (outside["state"] == "damaged" and not result["checked"])
            else f"attach and copy out the rows you need; {remove}"
            if result["checked"]
            else f"look at it: ls -ld {result['path']}"
        )
    return {**result, "sound": not findings, "findings": findings, "remedy": remedy}


def _audited(handle: Any, result: Info) -> list[str]:
    findings = _described(handle)
    checked: dict[str, int | None] = {"header": None, "configuration": None}
    if handle.ready:
        checked["schema"] = None
    give_up = time.monotonic() + PATIENCE
    while True:
        audit = handle.audit(STALE)
        if audit["quiet"] or time.monotonic() >= give_up:
            break
        time.sleep(0.01)
    result.update(quiet=audit["quiet"], checked={**checked, **audit["checked"]})
    return findings + audit["findings"]


def _described(handle: Any) -> list[str]:
    """What the header's own checks (which ran when it was opened) cannot know: the two msgpack parts say what it says."""
    findings = []
    if not isinstance(msgpack.unpackb(handle.config), dict):
        findings.append("the configuration is no mapping")
    if handle.ready:
        schema, row_bytes = Schema.from_bytes(handle.schema), handle.header["row_bytes"]
        if schema.row_bytes != row_bytes:
            findings.append(f"the schema's rows have {schema.row_bytes:,} bytes, the header's {row_bytes:,}")
    return findings
