"""Real segments as bytes, for those who damage them: how they are made, what lies where in them, and their checksums.

python -m tests.fuzz.segments FOLDER        the same as inputs of attach.cpp
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shmbuf import Buffer, RateLimiter, destroy, segment
from shmbuf._extension import native
from shmbuf.schema import Schema
from shmbuf.streams import resolve

PAGE, HEADER_BYTES, BUILT_AT, BUILT_BYTES = 4096, 1024, 512, 160
HEADER, BUILT = struct.Struct("<40xQ8xII8x8Q"), struct.Struct("<10Q")
MEMBER, SLOT, BLOCK, BLOCK_SLOT, RING = 256, 512, 128, 40, 4096
CAPACITY, COLLECTORS = 70, 3
Region = tuple[str, int, int]  # name, from, to


class Fields(NamedTuple):
    """What a header says: layout.h has the same names."""

    capacity: int
    max_collectors: int
    max_members: int
    control: int
    config: int
    config_used: int
    members: int
    slots: int
    blocks: int
    block_bytes: int
    config_bytes: int
    row_bytes: int
    ring_bytes: int
    schema: int
    schema_bytes: int
    rows: int
    tree: int
    links: int
    rings: int
    file_bytes: int
    stream_entries: int


def fields(data: bytes | bytearray) -> Fields:
    return Fields(*HEADER.unpack_from(data), *BUILT.unpack_from(data, BUILT_AT))


def regions(data: bytes | bytearray) -> list[Region]:
    """Where what lies in an undamaged segment."""
    f = fields(data)
    out = [
        ("header", 0, BUILT_AT),
        ("built", BUILT_AT, BUILT_AT + BUILT_BYTES),
        ("control", f.control, f.control + 896),
        ("priorities", f.control + 896, f.control + 1280),
        ("limiter", f.control + 1280, f.control + 1664),
        ("epochs", f.control + 1664, f.control + 2176),
        ("journal", f.control + PAGE, f.config),
        ("config", f.config, f.config + f.config_used),
        ("members", f.members, f.members + 4 * MEMBER),
        ("slots", f.slots, f.slots + f.max_collectors * SLOT),
        ("block 0", f.blocks, f.blocks + BLOCK + f.max_collectors * BLOCK_SLOT),
        ("block 1", f.blocks + f.block_bytes, f.blocks + f.block_bytes + BLOCK + f.max_collectors * BLOCK_SLOT),
    ]
    if f.row_bytes:
        stride = (f.file_bytes - f.rings) // f.max_collectors
        out += [
            ("schema", f.schema, f.schema + f.schema_bytes),
            ("rows", f.rows, f.tree),
            ("tree", f.tree, f.links),
            *([("links", f.links, f.rings)] if f.stream_entries else []),
            *(
                (f"ring {i}", f.rings + i * stride, f.rings + i * stride + f.ring_bytes)
                for i in range(f.max_collectors)
            ),
            *(
                (f"streams {i}", f.rings + i * stride + f.ring_bytes, f.rings + (i + 1) * stride)
                for i in range(f.max_collectors)
                if f.stream_entries
            ),
        ]
    return out


def hot_words(data: bytes | bytearray) -> list[int]:
    """Where the words lie that all else hangs on: of Control, of each slot, of both commit blocks."""
    f = fields(data)
    out = [f.control + at for at in (0, 8, 16, 128, 256, 264, 384, 392, 400, 896, 904, 912)]
    for i in range(f.max_collectors):
        out += [f.slots + i * SLOT + at for at in (0, 8, 16, 128, 384)]
    for b in (f.blocks, f.blocks + f.block_bytes):
        out += range(b, b + 80, 8)
        out += range(b + BLOCK, b + BLOCK + f.max_collectors * BLOCK_SLOT, 8)
    return out


def reseal(data: bytearray) -> None:
    """Right checksums for whatever the header says: who only flips bits gets no further than these."""
    if len(data) < 2 * PAGE:
        return
    f = fields(data)
    if f.config <= len(data) and f.config_used <= len(data):
        head = bytearray(data[:HEADER_BYTES])
        head[0:8], head[20:24], head[BUILT_AT : BUILT_AT + BUILT_BYTES] = bytes(8), bytes(4), bytes(BUILT_BYTES)
        crc = zlib.crc32(data[f.config : f.config + f.config_used], zlib.crc32(head))
        data[20:24] = crc.to_bytes(4, "little")
    if f.row_bytes and f.schema <= len(data) and f.schema_bytes <= len(data):
        built = data[BUILT_AT : BUILT_AT + BUILT_BYTES - 4] + bytes(4)
        crc = zlib.crc32(data[f.schema : f.schema + f.schema_bytes], zlib.crc32(built))
        data[BUILT_AT + BUILT_BYTES - 4 : BUILT_AT + BUILT_BYTES] = crc.to_bytes(4, "little")


# ---- making them ---------------------------------------------------------------------------------------------------

SCHEMA = {"obs": ("float32", (3,)), "next": {"done": "bool"}, "k": "int64"}  # 24 bytes a row


def rows(n: int, first: int = 0) -> dict:
    k = np.arange(first, first + n)
    return {"obs": np.repeat(k[:, None], 3, 1).astype(np.float32), "next": {"done": k % 5 == 4}, "k": k}


def _create(name: str, **kw) -> Buffer:
    return Buffer.create(
        name, CAPACITY, max_collectors=COLLECTORS, ring_bytes=RING, drain="caller", **{"schema": SCHEMA, **kw}
    )


def _configured(name: str) -> list[Buffer]:
    return [_create(name, schema=None)]


def _plain(name: str) -> list[Buffer]:
    """No trajectories: rows, tree and rings side by side, and nothing behind the last ring."""
    buf = _create(name, trajectories=False)
    for i in range(0, 130, 13):
        buf.extend(rows(13, i))
    buf.put(rows(5, 130))
    return [buf]


def _rich(name: str) -> list[Buffer]:
    """All there is: links, priorities, a limiter, epochs begun, two collectors with rows, a CLEAR and extras waiting in rings."""
    one = _create(name, full="drop_oldest")
    two = Buffer.attach(name)
    one.keep_priorities(0.6, 1e-6)
    for i in range(0, 99, 9):
        one.extend(rows(9, i), stream=np.arange(9) % 2)
        two.extend(rows(4, i), priorities=0.5)
    one.set_priorities(np.arange(40, 60), np.linspace(0, 3, 20))
    one.epoch(shared=True).draw(7)
    one.consume().draw(5)
    one.set_limiter(RateLimiter(2.0, 1, error_buffer=500))
    one.put(rows(6, 99), stream=3, priorities=2.0)
    two.put(rows(3, 44))
    handle = two._handle
    handle.clear(False, 1.0)
    two.put(rows(2, 47), stream=1)
    one.put(rows(2, 105))
    return [one, two]


def _keyed(name: str) -> list[Buffer]:
    """Trajectories by a column; the live maximum as the priority of new rows; records that go round the end of the ring."""
    buf = _create(name, schema={"episode": "int32", "done": "bool", "x": ("uint8", (211,))})
    buf.keep_priorities(1.0, 0.0, max_priority_within_buffer=True)
    for i in range(30):
        n = 1 + i % 7
        buf.extend(
            {"episode": np.full(n, i // 3, np.int32), "done": np.zeros(n, bool), "x": np.zeros((n, 211), np.uint8)}
        )
    buf.put({"episode": np.full(3, 9, np.int32), "done": np.ones(3, bool), "x": np.ones((3, 211), np.uint8)})
    return [buf]


def _on_device(name: str) -> list[Buffer]:
    """Rows in memory of a device that nobody has: what can be done without them is done."""
    buf = _create(name, schema=None)
    schema = Schema.from_spec(SCHEMA)
    marks, handle = resolve(schema, buf.config["streams"]), buf._handle
    home = (1, bytes(range(16)), native.device_bytes(CAPACITY, schema.row_bytes, 2, RING), 2)
    assert handle.try_lock_build()
    assert handle.build(schema.to_bytes(), schema.row_bytes, len(schema.columns), *marks.native(), home) == 0
    handle.unlock_build()
    buf.put(rows(5))
    return [buf]


_KILLED = """
import sys
from shmbuf import Buffer
from shmbuf._extension import native
from tests.fuzz.segments import rows
buf = Buffer.attach(sys.argv[1])
buf.extend(rows(7), stream=1)
native.arm(sys.argv[2] + "=kill@1")
buf.extend(rows(8, 7), stream=1)
"""


def _stopped_at(step: str) -> Callable[[str], list[Buffer]]:
    """A transaction whose writer was killed at a step: whoever comes next goes on with what he finds."""

    def make(name: str) -> list[Buffer]:
        buf = _create(name)
        buf.keep_priorities(0.7, 0.01)
        buf.extend(rows(66))
        command = [sys.executable, "-c", _KILLED, name, step]
        done = subprocess.run(
            command, env={**os.environ, "SHMBUF_NATIVE": "failpoints"}, cwd=Path(__file__).parents[2], check=False
        )
        assert done.returncode < 0, f"{step} was not met"
        return [buf]

    return make


MAKERS: dict[str, Callable[[str], list[Buffer]]] = {
    "configured": _configured,
    "plain": _plain,
    "rich": _rich,
    "keyed": _keyed,
    "on a device": _on_device,
    "sealed": _stopped_at("plan_sealed"),
    "committed": _stopped_at("txn_committed"),
}


def make(kind: str, name: str | None = None) -> bytes:
    """The bytes of a segment while its handles are attached."""
    name = name or f"segments.{os.getpid()}.{secrets.token_hex(4)}"
    handles: list[Buffer] = []
    try:
        handles = MAKERS[kind](name)
        return Path(segment.path_of(name)).read_bytes()
    finally:
        with contextlib.suppress(Exception):
            destroy(name, force=True)
        for handle in handles:
            handle.close()


# ---- inputs of attach.cpp ------------------------------------------------------------------------------------------


def encode(data: bytes, program: bytes = b"", flags: int = 0) -> bytes:
    """Only the words that are not 0, as runs: what the fuzzer changes then means something."""
    words = np.frombuffer(data, "<u8")
    used = np.flatnonzero(words)
    out = bytearray(struct.pack("<BBHB", flags, 1, len(data) // PAGE, len(program)) + program)
    for run in np.split(used, np.flatnonzero(np.diff(used) > 2) + 1) if len(used) else []:
        for at in range(int(run[0]), int(run[-1]) + 1, 255):
            n = min(255, int(run[-1]) + 1 - at)
            out += struct.pack("<HB", at, n) + words[at : at + n].tobytes()
    return bytes(out)


def main(folder: str) -> None:
    to = Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    for kind in MAKERS:
        data = make(kind)
        for flags in (0, 3, 4):  # as it is; resealed; read-only
            (to / f"{kind}.{flags}").write_bytes(encode(data, flags=flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
