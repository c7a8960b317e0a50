"""Look into any buffer while it is in use, from a process that has nothing to do with it.

    python examples/attach_and_watch.py NAME          (NAME: "cartpole" while examples/dqn_cartpole.py runs)

Read-only, numpy only: it starts in a fraction of a second, disturbs nobody, and can run as often as you like.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from shmbuf import Buffer, BufferNotFound
from shmbuf.schema import flatten


def main(name: str) -> int:
    rows, seconds = 0, 0.0  # at the last look
    while True:
        try:
            buffer = Buffer.attach(
                name, readonly=True
            )  # anew each time: a kept handle would not notice the buffer's end
        except BufferNotFound as e:
            print(e if not seconds else f"{name} is gone")
            return 0 if seconds else 1
        with buffer:
            now, written = time.monotonic(), buffer.write_count
            rate = f"{(written - rows) / (now - seconds):,.0f} rows/s" if seconds else ""
            print(
                f"{len(buffer):,} of {buffer.capacity:,} rows  {len(buffer.collectors())} collectors  {rate}",
                flush=True,
            )
            if len(buffer):
                sample, ids = buffer.draw(64, timeout=10)
                print(
                    "  a sample:",
                    ", ".join(f"{'/'.join(k)} {list(a.shape)}" for k, a in flatten(sample).items()),
                    f" ids {ids.min()} to {ids.max()}",
                    flush=True,
                )
        rows, seconds = written, now
        time.sleep(1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1]))
