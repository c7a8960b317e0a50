"""A process that keeps a buffer's device memory: ``python -m shmbuf.cuda.steward NAME``.

Memory that is shared as a descriptor goes with the last process that has it open: this is one more, until the buffer is destroyed or
SIGINT or SIGTERM comes; it opens no CUDA context. Where memory can be shared by CUDA IPC only, shmbuf starts one by itself, in which the memory is made; it leaves
when nobody is attached any more, and if it is killed the rows are lost to everybody. It does not count as attached.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from typing import Any

import msgpack

from shmbuf import segment
from shmbuf._extension import native
from shmbuf.cuda import driver, holding, memory
from shmbuf.errors import BufferNotFound, DeviceError, ShmbufError

LOOK = 0.25  # seconds between looks at whether anybody is there


class _Stop(BaseException):
    pass


def make(name: str, uuid: bytes, size: int, instance: int, why: str) -> None:
    """Make the memory in this process, say so on stdout, and hold it; stdin says whether the buffer got it."""
    handle = segment.attach(name, presence=False)
    hold = None
    try:
        if handle.header["instance_id"] != instance:
            raise BufferNotFound(f"buffer {name!r} is another one by now")
        _require_entry(name, handle)
        device = driver.by_uuid(uuid, f"{driver.uuid_text(uuid)}: ")
        mapped = memory.allocate(device, size, f"the rows of buffer {name!r}")
        hold = holding.Hold(holding.Share.of(mapped, instance, f"vmm: {why}"))
        hold.offer(handle)
        print(f"member {handle.member}", flush=True)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):  # nobody who waits for the end of its maker's output waits for ours
            os.dup2(nowhere, fd)
        if sys.stdin.readline():  # nothing: who wanted it is dead, or gave up
            _stay(handle, leave_when_alone=True)
    finally:
        if hold is not None:
            hold.withdraw()
        handle.close()
        if hold is not None:
            hold.close()


def keep(name: str, timeout: float = 0.0) -> None:
    """Hold what the buffer has, from when it has it, until it is destroyed. timeout: seconds to wait for its name."""
    handle = segment.attach_within(timeout, name, presence=False)
    hold = None
    try:
        if not msgpack.unpackb(handle.config).get("device"):
            raise ValueError(f"buffer {name!r} keeps its rows in host memory, which needs no steward")
        _require_entry(name, handle)
        if not handle.ready:
            print(f"shmbuf.cuda.steward {name}: pid {os.getpid()} is waiting for the first rows", flush=True)
        while not handle.ready:
            if handle.destroyed or not handle.linked:
                return
            time.sleep(LOOK)
        if handle.header["device_kind"] == memory.KINDS[memory.IPC]:
            raise ValueError(f"buffer {name!r} is shared by CUDA IPC, so its memory is in a steward of its own already")
        hold = holding.take(name, handle)
        print(
            f"shmbuf.cuda.steward {name}: pid {os.getpid()} keeps {hold.memory.bytes:,} bytes on {driver.uuid_text(hold.memory.uuid)}",
            flush=True,
        )
        _stay(handle, leave_when_alone=False)
    finally:
        if hold is not None:
            hold.withdraw()
        handle.close()
        if hold is not None:
            hold.close()


def _require_entry(name: str, handle: Any) -> None:
    """Nobody asks for memory who is not in the table."""
    if handle.member < 0:
        raise DeviceError(f"buffer {name!r} has no entry left for its steward: all are taken")
    handle.add_role(native.STEWARD)


def _stay(handle: Any, *, leave_when_alone: bool) -> None:
    while True:
        gone = handle.destroyed or not handle.linked
        if (gone or leave_when_alone) and not handle.attached:
            return
        select.select([], [], [], LOOK)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError
    return seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shmbuf.cuda.steward",
        description="Keep the device memory of buffer NAME while nobody else has it open, and hand it to whoever attaches. Stays in the "
        "foreground and ends at SIGINT or SIGTERM, or when the buffer is removed. Opens no CUDA context, which would cost device memory, and "
        "does not count as attached. A buffer that has no rows yet is waited for.",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait until the name exists (default: not at all)",
    )
    for option in ("--make", "--bytes", "--instance", "--why"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def stop(*_: object) -> None:
        raise _Stop

    signal.signal(signal.SIGTERM, stop)
    try:
        if args.make:
            make(args.name, driver.uuid_of(args.make), int(args.bytes), int(args.instance), args.why or "")
        else:
            keep(args.name, args.timeout)
    except (KeyboardInterrupt, _Stop):
        return 0
    except (ShmbufError, ValueError, OSError) as e:
        text = str(e).replace(segment.WAIT, "--timeout SECONDS") if isinstance(e, BufferNotFound) else str(e)
        print(
            text if args.make else f"shmbuf.cuda.steward: {text}",
            file=sys.stdout if args.make else sys.stderr,
            flush=True,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
