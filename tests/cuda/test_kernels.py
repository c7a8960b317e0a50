"""The kernels' text does what kernels.h says: run here by an interpreter of the instructions that it uses, and compiled where there is ptxas."""

from __future__ import annotations

import operator
import re
import shutil
import struct
import subprocess
from typing import Any

import numpy as np
import pytest

from shmbuf._extension import native

THREADS, CHUNKS, COLUMNS = 256, 4, 64
Column = tuple[int, int, int, int, int]  # address, offset, bytes, shift, stride


def parameter(
    base: int, at: int, mask: int, slots: int, places: int, row_bytes: int, n: int, columns: list[Column]
) -> tuple[bytes, int]:
    """As the core packs it, and the number of blocks."""
    out, blocks = struct.pack("<6Q2I", base, at, mask, slots, places, row_bytes, n, len(columns)), 0
    for address, offset, width, shift, stride in columns:
        out += struct.pack("<Q6I", address, offset, width >> shift, shift, stride, blocks, 0)
        blocks += -(-n * (width >> shift) // (THREADS * CHUNKS))
    return out.ljust(56 + 32 * COLUMNS, b"\0"), blocks


SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}  # bytes of so many bits


class Thread:
    """One thread of a kernel: registers are whole numbers, memory is one array of bytes."""

    def __init__(self, lines: list[str], labels: dict[str, int], memory: bytearray, m: bytes, block: int, thread: int):
        self.lines, self.labels, self.memory, self.m = lines, labels, memory, m
        self.r: dict[str, Any] = {"%ctaid.x": block, "%tid.x": thread, "m": 0}
        self.stores: list[int] = []

    def value(self, text: str) -> int:
        return self.r[text] if text in self.r else int(text)

    def run(self) -> None:
        at = 0
        while True:
            line = self.lines[at]
            at += 1
            if guard := re.match(r"@(!?)(%\w+) +(.*)", line):
                if bool(self.r[guard[2]]) == bool(guard[1]):
                    continue
                line = guard[3]
            what, _, rest = line.partition(" ")
            if what == "ret":
                return
            if what == "bra":
                at = self.labels[rest.strip()]
                continue
            self.step(what.split("."), [a.strip() for a in re.split(r",(?![^{\[]*[}\]])", rest)])

    def step(self, what: list[str], a: list[str]) -> None:
        bits = re.sub(r"\D", "", what[-1])
        limit = 1 << int(bits)
        if what[0] in ("ld", "st"):
            space, vector = what[1], 2 if "v2" in what else 1
            place, names = (a[1], a[0]) if what[0] == "ld" else (a[0], a[1])
            base, _, ahead = place.strip("[]").partition("+")
            address, size = self.r[base] + int(ahead or 0), SIZE[bits]
            assert address % (size * vector) == 0, f"{what}: address {address} is not aligned"
            for i, name in enumerate(names.strip("{}").split(",")):
                lo = address + i * size
                if what[0] == "st":
                    self.memory[lo : lo + size] = (self.r[name.strip()] % limit).to_bytes(size, "little")
                    self.stores.append(lo)
                else:
                    source = self.m if space == "param" else self.memory
                    assert lo >= 0 and lo + size <= len(source), f"{what}: address {lo} is outside"
                    self.r[name.strip()] = int.from_bytes(source[lo : lo + size], "little")
        elif what[0] == "setp":
            self.r[a[0]] = getattr(operator, what[1])(self.value(a[1]), self.value(a[2]))
        elif what[0] in ("mov", "cvt"):
            self.r[a[0]] = self.value(a[1]) % limit
        else:
            x, y = self.value(a[1]), self.value(a[2])
            ways = {
                "add": x + y,
                "sub": x - y,
                "mul": x * y,
                "shl": x << min(y, 64),
                "and": x & y,
                "div": x // y if y else 0,
            }
            wide = 1 << 64 if "wide" in what else limit
            self.r[a[0]] = ways[what[0]] % wide


def kernel(name: str) -> tuple[list[str], dict[str, int]]:
    body = native.device_kernels().split(f".entry {name}(")[1].split("{\n", 1)[1].split("\n}\n")[0]
    lines: list[str] = []
    labels: dict[str, int] = {}
    for text in re.sub(r"//.*", "", body).split("\n"):
        text = text.strip()
        while label := re.match(r"(\w+):", text):
            labels[label[1]] = len(lines)
            text = text[label.end() :].strip()
        lines += [part.strip() for part in text.split(";") if part.strip() and not part.strip().startswith(".reg")]
    return lines, labels


def launch(name: str, memory: bytearray, packed: tuple[bytes, int]) -> int:
    lines, labels = kernel(name)
    stored: list[int] = []
    for block in range(packed[1]):
        for thread in range(THREADS):
            t = Thread(lines, labels, memory, packed[0], block, thread)
            t.run()
            stored += t.stores
    assert len(set(stored)) == len(stored), "two threads store to one place"
    return len(stored)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("with_places", [False, True])
@pytest.mark.parametrize("shift", range(5))
def test_rows_to_columns_and_back(shift, with_places, ring):
    rng = np.random.default_rng(shift)
    unit, n, capacity, row_bytes = 1 << shift, 41, 64, 112
    widths = (unit, 3 * unit, 32 // unit * unit, unit) if unit < 16 else (16, 48, 16, 16)
    memory = bytearray(rng.integers(0, 256, 1 << 16, np.uint8).tobytes())
    base, slots_at, places_at, out_at = 4096, 512, 1024, 20480
    slots = rng.permutation(capacity)[:n].astype("<u4")
    places = rng.permutation(2 * n)[:n].astype("<u4") if with_places else np.arange(n, dtype="<u4")
    memory[slots_at : slots_at + 4 * n], memory[places_at : places_at + 4 * n] = slots.tobytes(), places.tobytes()
    at, mask = (8 * row_bytes + 6000, (1 << 13) - 1) if ring else (0, 2**64 - 1)
    base = 8192 if ring else base
    columns, offset, address = [], 0, out_at
    for width in widths:
        columns.append((address, offset, width, shift, width))
        offset, address = offset + width, address + 2 * n * width
    packed = parameter(base, at, mask, 0 if ring else slots_at, places_at if with_places else 0, row_bytes, n, columns)

    def row(j: int, k: int) -> int:
        return base + (((at + j * row_bytes) if ring else int(slots[j]) * row_bytes) + k & mask)

    before, sides = bytes(memory), []
    for address, offset, width, _, stride in columns:
        sides += [(row(j, offset + k), address + int(places[j]) * stride + k) for j in range(n) for k in range(width)]
    for name, source, target in (("shmbuf_gather", 0, 1), ("shmbuf_scatter", 1, 0)):
        memory[:] = before
        expected = bytearray(before)
        for side in sides:
            expected[side[target]] = before[side[source]]
        assert launch(name, memory, packed) == len(sides) // min(unit, 8)
        assert memory == expected, name


def test_many_columns_find_their_blocks():
    n, memory = 300, bytearray(np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8).tobytes())
    widths = [8, 1, 64, 2, 4, 16, 8]
    columns, offset, address = [], 0, 70_000 // 16 * 16
    for width in sorted(widths, reverse=True):
        shift = min(4, (width & -width).bit_length() - 1)
        columns.append((address, offset, width, shift, width))
        offset, address = offset + width, address + -(-n * width // 16) * 16
    row_bytes = 112
    before = bytes(memory)
    launch("shmbuf_gather", memory, parameter(1024, 0, 2**64 - 1, 0, 0, row_bytes, n, columns))
    for address, offset, width, _, _ in columns:
        for j in (0, 1, 127, 128, n - 1):
            assert (
                memory[address + j * width : address + (j + 1) * width]
                == before[1024 + j * row_bytes + offset :][:width]
            )


@pytest.mark.skipif(not shutil.which("ptxas"), reason="ptxas is not installed")
@pytest.mark.parametrize("device", ["sm_75", "sm_90"])
def test_it_compiles(device, tmp_path):
    file = tmp_path / "kernels.ptx"
    file.write_text(native.device_kernels())
    assert ".target sm_70\n" in native.device_kernels()
    done = subprocess.run(
        ["ptxas", f"-arch={device}", "--warning-as-error", "-o", tmp_path / "out", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
