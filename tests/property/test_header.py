"""Damaged segments: whatever the bytes say, attaching ends in BufferFormatError or works, and then every call ends, soon, in a result
or in an error that its documentation names. Never in a signal, never not at all. tests/fuzz/attach.cpp does the same below Python."""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from shmbuf import Buffer, ShmbufError, segment
from tests.conftest import PREFIX
from tests.fuzz import segments
from tests.process import workers
from tests.unit.helpers import SMALL, k, stuck_drainer

PATIENCE = 30  # seconds for all calls on one segment; they take a fraction of one
EXAMPLES = int(os.environ.get("SHMBUF_HEADER_EXAMPLES", "200"))
ROOT = Path(__file__).parents[2]


class Worker:
    """A second interpreter that lives as long as nothing kills it."""

    def __init__(self) -> None:
        self.told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.told,
            text=True,
            cwd=ROOT,
        )

    def use(self, name: str, readonly: bool) -> dict[str, str]:
        assert self.process.stdin and self.process.stdout
        self.told.truncate(0)
        print(json.dumps([name, readonly]), file=self.process.stdin, flush=True)
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            self.end()
            pytest.fail(f"it hangs: {self.last_words()}")
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"it died, status {self.process.wait()}: {self.last_words()}")
        return json.loads(answer)

    def last_words(self) -> str:
        self.told.seek(0)
        return self.told.read()[-3000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@functools.cache
def _pool() -> list[Worker]:
    pool: list[Worker] = []
    atexit.register(lambda: [w.end() for w in pool])
    return pool


def worker() -> Worker:
    pool = _pool()
    if not pool or pool[0].process.poll() is not None:
        pool[:] = [Worker()]
    return pool[0]


@functools.cache
def whole(kind: str) -> bytes:
    return segments.make(kind)


# ---- damage --------------------------------------------------------------------------------------------------------

Damage = tuple[Any, ...]
HURTFUL = st.one_of(
    st.sampled_from(
        [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 2, 2**64 - 1]
    ),
    st.integers(0, 300),
    st.integers(0, 2**64 - 1),
    st.floats(width=64).map(lambda x: int.from_bytes(struct.pack("<d", x), "little")),
)
DELTA = st.sampled_from([1, -1, 2, 4, 8, -8, 16, -16, 31, 32, -32, 64, 70, -70, 4096, -4096, 2**32, 2**63])
# Every region is as likely as any other, a third of all goes to the words that all hangs on, and words that hold something come
# before zeros: (which region, which word, one that is not 0).
WHERE = st.tuples(st.integers(0, 1000), st.integers(0, 4095), st.booleans())
DAMAGES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), WHERE, st.sampled_from([1, 2, 4, 8]), HURTFUL),
        st.tuples(st.just("add"), WHERE, DELTA),
        st.tuples(st.just("flip"), WHERE, st.integers(0, 63)),
        st.tuples(st.just("fill"), WHERE, st.integers(1, 5000), st.integers(0, 255)),
        st.tuples(st.just("copy"), WHERE, WHERE, st.integers(1, 600)),
        st.tuples(st.just("cut"), st.integers(-9000, 9000)),
    ),
    min_size=1,
    max_size=5,
)


@functools.cache
def words_of(kind: str) -> list[tuple[list[int], list[int]]]:
    """By region: the words, and those that are not 0."""
    data = whole(kind)
    places = [list(range(start, end - 7, 8)) for _, start, end in segments.regions(data)]
    places = [words for words in places if words]  # rows on a device have no place here
    places += [segments.hot_words(data)] * (len(places) // 2)
    return [(words, [at for at in words if any(data[at : at + 8])] or words) for words in places]


def place(kind: str, where: tuple[int, int, bool]) -> int:
    region, word, used = where
    words = words_of(kind)[region % len(words_of(kind))][used]
    return words[word % len(words)]


def damaged(kind: str, damages: list[Damage], resealed: bool) -> bytes:
    base = whole(kind)
    data, size = bytearray(base), len(base)
    at = functools.partial(place, kind)
    for what, *how in damages:
        if what == "set":
            width = how[1]
            data[at(how[0]) : at(how[0]) + width] = (how[2] % (1 << 8 * width)).to_bytes(width, "little")
        elif what == "add":
            p = at(how[0])
            data[p : p + 8] = ((int.from_bytes(data[p : p + 8], "little") + how[1]) % (1 << 64)).to_bytes(8, "little")
        elif what == "flip":
            data[at(how[0]) + how[1] // 8] ^= 1 << how[1] % 8
        elif what == "fill":
            p, n = at(how[0]), min(how[1], size - at(how[0]))
            data[p : p + n] = bytes([how[2]]) * n
        elif what == "copy":
            a, b = at(how[0]), at(how[1])
            n = min(how[2], size - a, size - b)
            data[b : b + n] = data[a : a + n]
    if resealed:
        segments.reseal(data)
    for what, *how in damages:
        if what == "cut":  # or more of it
            data = data[: size + how[0]] if how[0] < 0 else data + bytes(how[0])
    return bytes(data)


def check(kind: str, data: bytes, readonly: bool) -> dict[str, str]:
    name = f"{PREFIX}{secrets.token_hex(4)}"
    path = segment.path_of(name)
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as f:
            f.write(data)
        outcomes = worker().use(name, readonly)
    finally:
        os.unlink(path)
    bad = {k: v for k, v in outcomes.items() if v.startswith("UNEXPECTED")}
    assert not bad, "\n".join(f"{k}: {v}" for k, v in bad.items())
    return outcomes


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("kind", segments.MAKERS)
def test_what_is_whole_works(kind: str, readonly: bool) -> None:
    """So the calls below do get somewhere."""
    outcomes = check(kind, whole(kind), readonly)
    assert outcomes["attach"] == outcomes["len"] == outcomes["stats"] == "ok"
    if kind == "on a device":  # which this process does not have
        assert outcomes["draw"] == outcomes["gather"] == "DeviceError" and (readonly or outcomes["put"] == "ok"), (
            outcomes
        )
    elif kind != "configured":
        assert outcomes["draw"] == "ok" or (readonly and kind == "rich" and outcomes["draw"] == "PermissionError")
    if kind == "rich" and not readonly:
        assert {k for k, v in outcomes.items() if v != "ok"} <= {"keep_priorities"}


@pytest.mark.timeout(1200)
@given(kind=st.sampled_from(sorted(segments.MAKERS)), damages=DAMAGES, resealed=st.booleans(), readonly=st.booleans())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
def test_what_is_damaged_ends_in_an_error_or_works(
    kind: str, damages: list[Damage], resealed: bool, readonly: bool
) -> None:
    event(check(kind, damaged(kind, damages, resealed), readonly)["attach"])


HURT: dict[str, tuple[str, Callable[[segments.Fields], dict[int, int]]]] = {
    "a ring size that no doubling reaches": ("plain", lambda f: {48: 2**63 + 1}),
    "a window of 2^40 rows": ("rich", lambda f: {f.control + 128: 0, f.control + 256: 0, f.control + 264: 2**40}),
    "ids beyond 63 bits": (
        "plain",
        lambda f: dict.fromkeys((f.control + 128, f.control + 264, *cursors(f)), 2**63 + 70),
    ),
    "ids that run over": ("rich", lambda f: dict.fromkeys((f.control + 128, f.control + 264, *cursors(f)), 2**64 - 5)),
    # The only free ring is the last thing in the file; a record there would begin 8 bytes before its end.
    "a position that is no multiple": (
        "plain",
        lambda f: {slot(f, 1) + 384: 0x101, slot(f, 2): 4088, slot(f, 2) + 128: 4088, **heads(f, 2, 4088)},
    ),
    "a sealed plan from nowhere": (
        "rich",
        lambda f: {f.control + 8: seq(f) + 1, **heads(f, 0, 2**63), **heads(f, 1, 4091)},
    ),
}


def slot(f: segments.Fields, i: int) -> int:
    return f.slots + i * segments.SLOT


def cursors(f: segments.Fields) -> tuple[int, int]:
    return f.blocks + 8, f.blocks + f.block_bytes + 8


def heads(f: segments.Fields, i: int, value: int) -> dict[int, int]:
    at = segments.BLOCK + i * segments.BLOCK_SLOT
    return {f.blocks + at: value, f.blocks + f.block_bytes + at: value}


def seq(f: segments.Fields) -> int:
    data = whole("rich")
    return int.from_bytes(data[f.control : f.control + 8], "little")


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("what", HURT)
def test_words_that_once_did_harm(what: str, readonly: bool) -> None:
    kind, words = HURT[what]
    data = bytearray(whole(kind))
    for at, word in words(segments.fields(data)).items():
        data[at : at + 8] = word.to_bytes(8, "little")
    segments.reseal(data)
    check(kind, bytes(data), readonly)


def test_a_damaged_ring_of_ones_own_does_not_keep_a_put(name: str) -> None:
    """drop_oldest beside a writer that is stuck: the collector itself looks for the first record that it may give up."""

    def put() -> None:
        with Buffer.create(name, 1000, full="drop_oldest", **SMALL) as buf, stuck_drainer(name):
            n = 0
            while buf.stats()["ring_fill"] < 0.95:
                buf.put(k(n), timeout=0)
                n += 1
            data = np.memmap(segment.path_of(name), np.uint8, "r+")
            f = segments.fields(data[:8192].tobytes())
            data[f.rings : f.rings + 8] = 0  # the length of the first record
            for _ in range(8):
                with suppress(ShmbufError):
                    buf.put(k(1), timeout=0.05)

    pid = workers.fork(put)
    deadline = time.monotonic() + PATIENCE
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    if not done[0]:
        workers.kill(pid)
    assert done == (pid, 0), "it hangs" if not done[0] else done
