"""`shminfo dump NAME PATH`: a checkpoint of a buffer, while others go on."""

from __future__ import annotations

import argparse

from shmbuf.buffer import Buffer
from shmbuf.errors import SchemaError
from shmbuf.printing import count, print_json, printable


def dump_command(args: argparse.Namespace) -> int:
    from shmbuf.checkpoint import dump_buffer

    buf = Buffer.attach(args.name, owner=args.owner, readonly=not args.complete)
    try:
        if buf.schema is None:
            raise SchemaError(
                f"buffer {args.name!r} has no schema yet: nobody has put rows, so there is nothing to save"
            )
        face = buf.config.get("face") or {}
        arguments = (face.get("sampler") or [None, {}])[1]
        saved = dump_buffer(
            buf,
            args.path,
            complete=args.complete,
            progress=not args.json and args.progress,
            batch_size=face.get("batch_size"),
            beta=float(arguments.get("beta", 0.4)),
        )
    finally:
        buf.close()
    if args.json:
        print_json({"path": args.path, **saved._asdict()})
    else:
        lost = f", without {count(saved.lost, 'row')} that were overwritten meanwhile" if saved.lost else ""
        print(printable(f"{args.path}: {count(saved.rows, 'row')} of {args.name}{lost}"))
    return 0
