"""The drain as a process of its own: ``python -m shmbuf.drain NAME``.

Moves rows from the collectors' rings into the buffer until the buffer is destroyed, or SIGINT or SIGTERM comes. A second one
stands by and takes over when the first is gone. It does not count as attached: `destroy` need not wait for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import msgpack

from shmbuf import devices, segment
from shmbuf.errors import BufferNotFound, ShmbufError


class _Stop(BaseException):
    pass


def run(name: str, *, leave_when_alone: bool = False, quiet: bool = False) -> None:
    """Drain buffer ``name`` in this process, until it is destroyed or (leave_when_alone) nobody is attached any more."""
    handle = segment.attach(name, presence=False)
    place = devices.Place(name, msgpack.unpackb(handle.config).get("device"))
    try:
        others = [
            m["pid"] for m in handle.members() if m["alive"] and "drainer" in m["roles"] and m["pid"] != os.getpid()
        ]
        if not quiet:
            print(
                f"shmbuf.drain {name}: pid {os.getpid()} "
                + (f"stands by, pid {others[0]} drains" if others else "drains"),
                flush=True,
            )
        place.map_when_ready(handle, leave_when_alone)
        handle.drain_until(leave_when_alone)
    finally:
        place.withdraw()
        handle.close()
        place.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shmbuf.drain", description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--leave-when-alone", action="store_true", help="end when nobody is attached any more")
    args = parser.parse_args(argv)

    def stop(*_: object) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    try:
        run(args.name, leave_when_alone=args.leave_when_alone, quiet=args.leave_when_alone)
    except (KeyboardInterrupt, _Stop):
        return 0
    except (ShmbufError, ValueError, PermissionError) as e:
        if args.leave_when_alone and isinstance(e, BufferNotFound):  # it ended before this process had begun
            return 0
        print(f"shmbuf.drain: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
