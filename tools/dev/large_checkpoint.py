"""Saves and loads more than 4 GiB, by one column and by three of more than 2 GiB each (B135 of the real cases): needs 7 GiB of
/dev/shm twice over, and as much disk.

    python -m tools.dev.large_checkpoint [DIRECTORY]      (part of make soak)
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shmbuf import Buffer
from shmbuf.checkpoint import dump_buffer, load_buffer

GIB = 1 << 30
CASES = {  # the columns, and the bytes of each row in one
    "one column of 5 GiB": (("x",), 1 << 16, 5 * GIB // (1 << 16) + 1),
    "three columns of 2 GiB and a row": (("x", "y", "z"), 1 << 12, 2 * GIB // (1 << 12) + 1),
}


def rows_of(keys: tuple[str, ...], width: int, first: int, n: int) -> dict[str, np.ndarray]:
    """Every byte follows from the row's number, its column and its place."""
    k = np.arange(first, first + n, dtype=np.uint64)[:, None]
    place = np.arange(width // 8, dtype=np.uint64)
    return {
        key: ((k * np.uint64(0x9E3779B97F4A7C15)) ^ (place * np.uint64(2 * i + 3))).view(np.uint8)
        for i, key in enumerate(keys)
    }


def run(name: str, keys: tuple[str, ...], width: int, n: int, into: Path) -> None:
    schema, block = {k: ("uint8", (width,)) for k in keys}, (16 << 20) // width
    with Buffer.create(None, n, schema=schema, drain="caller") as a:
        for at in range(0, n, block):
            a.extend(rows_of(keys, width, at, min(block, n - at)), timeout=60)
        start = time.monotonic()
        dump_buffer(a, into)
        saved = time.monotonic()
    with Buffer.create(None, n, schema=schema, drain="caller") as b:
        done = load_buffer(b, into)
        loaded = time.monotonic()
        assert done.rows == len(b) == n, (done, len(b), n)
        for k in [0, n - 1, *np.random.default_rng(1).integers(0, n, 1000).tolist()]:
            got, expected = b.gather([k]), rows_of(keys, width, k, 1)
            assert all((got[key] == expected[key]).all() for key in keys), f"row {k} differs"
    print(f"{name}: {n:,} rows, saved in {saved - start:.1f} s, loaded in {loaded - saved:.1f} s, equal", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, help="where to save; default: a temporary one")
    directory = parser.parse_args().directory
    with tempfile.TemporaryDirectory(dir=directory) as place:
        for name, (keys, width, n) in CASES.items():
            run(name, keys, width, n, Path(place) / "c")
            shutil.rmtree(Path(place) / "c")
    return 0


if __name__ == "__main__":
    sys.exit(main())
