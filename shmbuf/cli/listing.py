"""`shminfo list`: one line per buffer."""

from __future__ import annotations

import argparse
import contextlib

from shmbuf import segment
from shmbuf.cli import looking
from shmbuf.errors import BufferNotFound
from shmbuf.printing import count, nbytes, print_json, print_rich, printable, seconds, styled, table

COLUMNS = (
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


def list_command(args: argparse.Namespace) -> int:
    found = []
    for owner, name in looking.buffers(None if args.all_users else args.owner):
        with contextlib.suppress(BufferNotFound):  # destroyed while we looked
            found.append(looking.look(name, owner))
    if args.json:
        print_json(found)
        return 0
    if not found:
        print(f"no buffers of {'any user' if args.all_users else f'uid {args.owner}'} in {segment.SHM_DIR}")
        return 0
    t = table(*["uid>"] * args.all_users, *COLUMNS)
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
