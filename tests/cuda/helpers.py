"""What the tests of device memory share: code of the processes they start. No torch."""

from __future__ import annotations

import subprocess

PRELUDE = """
import os, signal, sys, time
import numpy as np
import shmbuf
from shmbuf import Buffer
SPEC = {"k": "int64", "x": ("float32", (5,))}
def rows(first, n=1):
    k = np.arange(first, first + n)
    return {"k": k, "x": (k[:, None] * 10 + np.arange(5)).astype("f4")}
def right(got):
    return bool((got["x"] == (got["k"][:, None] * 10 + np.arange(5)).astype("f4")).all())
def stored(b):
    got = b.gather(range(*b.window))
    assert right(got)
    return got["k"].tolist()
def say(*what):
    print(*what, flush=True)
def wait():
    line = sys.stdin.readline().strip()
    if not line: sys.exit("nobody is there any more")
    return line
def tried(f):
    try:
        return f()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
"""

# Makes the buffer argv[1], puts rows 0 to 9, and does what it is told.
MAKER = (
    PRELUDE
    + """
b = Buffer.create(sys.argv[1], 100, schema=SPEC, device="cuda", drain="caller", ring_bytes=4096)
b.extend(rows(0, 10)); say("made")
while (what := wait()) != "close":
    say(eval(what))
b.close(); say("closed"); wait()
"""
)
# Attaches and does what it is told.
USER = (
    PRELUDE
    + """
b = Buffer.attach(sys.argv[1]); say("attached", b.device)
while (what := wait()) != "close":
    say(tried(lambda: eval(what)))
b.close(); say("closed"); wait()
"""
)


def line(p: subprocess.Popen) -> str:
    got = p.stdout.readline()  # type: ignore[union-attr]
    if not got:
        p.wait(60)
        raise AssertionError(f"it ended with {p.returncode}: {p.stderr.read()[-3000:]}")  # type: ignore[union-attr]
    return got.strip()


def ask(p: subprocess.Popen, what: str) -> str:
    """Let it evaluate this; what it says."""
    p.stdin.write(what + "\n")  # type: ignore[union-attr]
    p.stdin.flush()  # type: ignore[union-attr]
    return line(p)
