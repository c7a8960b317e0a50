"""What a buffer and a collector of it cost: bytes per row, descriptors, resident memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .isolate import Emitter
from .peers import OURS
from .rows import ROWS
from .settings import Settings

# A collector as a user writes it: numpy only. Its own interpreter, so nothing else is counted.
COLLECTOR = """
import json, os, re, sys
import numpy as np

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def megabytes():
    status = open("/proc/self/status").read()
    return sum(int(re.search(key + r":\\s+(\\d+)", status)[1]) for key in ("RssAnon", "RssFile")) * 1024 / 1e6

name, columns, count = json.loads(sys.argv[1])
data = {}
for *path, last, dtype, shape in columns:
    node = data
    for part in path:
        node = node.setdefault(part, {})
    node[last] = np.zeros((count, *shape), dtype)
answer = {"numpy": megabytes()}
import shmbuf
before = descriptors()
buffer = shmbuf.Buffer.attach(name)
for _ in range(20):
    ticket = buffer.put(data)
ticket.wait(30)
buffer.draw(1)
answer |= {"descriptors": descriptors() - before, "collector": megabytes(), "torch": "torch" in sys.modules}
print(json.dumps(answer))
"""


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    import shmbuf

    emit.at(OURS)
    row = ROWS[spec["row"]]
    capacity, name = settings.capacity(row), Path(spec["scratch"]).name
    buffer = shmbuf.Buffer.create(name, capacity, schema=row.schema())
    try:
        # No ring is in use yet, so this is all the rest.
        allocated = sum(f.stat().st_blocks * 512 for f in Path("/dev/shm").glob(f"*{name}*"))
        emit.values(f"memory/{row.name}/segment", [allocated])
        emit.values(f"memory/{row.name}/beyond rows", [allocated / capacity - row.nbytes])
        columns = [[*c.key, c.dtype, list(c.shape)] for c in row.columns]
        answer = subprocess.run(
            [sys.executable, "-c", COLLECTOR, json.dumps([name, columns, 64])],
            cwd=spec["scratch"],  # not the checkout, whose sources would shadow the package
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            raise RuntimeError(answer.stderr.strip().splitlines()[-1])
        figures = json.loads(answer.stdout)
        if figures.pop("torch"):
            raise RuntimeError("the collector imported torch")
        for key, value in figures.items():
            emit.values(f"memory/{row.name}/{key}", [value])
    finally:
        buffer.close()
        shmbuf.destroy(name)
