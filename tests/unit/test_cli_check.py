"""`shminfo check`: sound buffers pass, whatever state they are in, and each damage is a finding."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from shmbuf import Buffer, segment
from shmbuf.cli import checking
from tests.unit.helpers import stuck_drainer
from tests.unit.helpers_cli import SCHEMA, collector, in_its_own_process, killed_owner, rows, spoiled_copy

pytest_plugins = ["tests.unit.fixtures_cli"]
CONTROL, MAX_COLLECTORS = 4096, 4


def make(name: str, **how) -> Buffer:
    return Buffer.create(
        name, 100, schema=SCHEMA, **{"drain": "caller", "ring_bytes": 4096, "max_collectors": MAX_COLLECTORS, **how}
    )


def test_a_buffer_at_work_is_sound(name, shminfo, shminfo_json):
    with make(name) as buf, collector(name, 40):
        buf.keep_priorities(alpha=0.6, eps=1e-6)
        for _ in range(5):
            buf.extend(rows(33))
            ids = buf.draw(20)[1]
            buf.set_priorities(ids, 2.5)
        buf.put(rows(3))
        result = shminfo_json("check", name, "--json")
        assert (result["sound"], result["findings"], result["quiet"], result["remedy"]) == (True, [], True, None)
        assert {"header", "configuration", "schema"} < set(result["checked"]), "and what the core looked at"
        assert result["checked"]["header"] is None and all(
            n is None or isinstance(n, int) for n in result["checked"].values()
        )
        status, out, err = shminfo("check", name)
        assert (status, err) == (0, "")
        verdict, checked = out.splitlines()
        assert verdict == f"{name}: sound" and checked.startswith("checked: header, configuration, schema, ")


def test_without_a_schema_and_without_anybody_it_is_sound(name, shminfo_json):
    Buffer.create(name, 100).close()
    result = shminfo_json("check", name, "--json")
    assert result["sound"] and "schema" not in result["checked"]


def test_of_a_killed_owner_it_is_sound(name, shminfo_json):
    killed_owner(name, "b.extend(rows(30)), b.put(rows(4))")
    assert shminfo_json("check", name, "--json")["sound"]


def test_looking_leaves_no_trace(name, shminfo):
    with make(name) as buf:
        buf.extend(rows(5))
        before = Path(segment.path_of(name)).read_bytes()
        for command in (("check", name), ("top", name, "--once", "--interval", "0.01"), ("metrics", name), ("doctor",)):
            shminfo(*command)
        assert Path(segment.path_of(name)).read_bytes() == before
        assert [m["pid"] for m in buf.members()] == [os.getpid()]


def test_a_stuck_writer_does_not_hold_it_up(name, shminfo_json):
    with make(name) as buf, stuck_drainer(name):
        buf.put(rows(4))
        assert shminfo_json("check", name, "--json")["sound"]


def offsets(name: str) -> dict[str, int]:
    """Where the header says its regions are (layout.h)."""
    with open(segment.path_of(name), "rb") as f:
        head = f.read(1024)
    first = dict(zip(("members", "slots", "blocks"), struct.unpack_from("<3Q", head, 96), strict=True))
    return {**first, **dict(zip(("rows", "tree", "links", "rings"), struct.unpack_from("<4Q", head, 544), strict=True))}


@pytest.mark.parametrize(
    ("region", "at", "value"),
    [
        ("control", 128, struct.pack("<Q", 7)),  # reserve below the cursor
        ("control", 264, struct.pack("<Q", 1 << 40)),  # a cursor that nothing was stored up to
        ("slots", 0, struct.pack("<Q", 1 << 40)),  # a tail beyond the ring
        ("slots", 0, struct.pack("<Q", 8)),  # a tail behind its head
        ("tree", 0, b"\x3f" * 64),  # not the sum of its leaves
        ("links", 0, b"\x77" * 2400),
    ],
    ids=["reserve", "cursor", "tail", "head", "tree", "links"],
)
def test_a_damaged_word_is_a_finding(name, shminfo_json, region, at, value):
    with make(name) as buf:
        buf.keep_priorities(alpha=1.0, eps=0.0)
        buf.extend(rows(60))
        buf.set_priorities(buf.draw(10)[1], 3.0)
    assert shminfo_json("check", name, "--json")["sound"]
    with open(segment.path_of(name), "r+b") as f:
        f.seek({"control": CONTROL, **offsets(name)}[region] + at)
        f.write(value)
    status, out, err = in_its_own_process("check", name, "--json")
    assert (status, err) == (1, ""), out
    result = json.loads(out)
    assert not result["sound"] and result["findings"] and "copy out the rows you need" in result["remedy"]
    status, out, err = in_its_own_process("check", name)
    assert (status, err) == (1, "") and out.startswith(f"{name}: unsound\n")
    assert [line for line in out.splitlines() if line.startswith("finding: ")] == [
        f"finding: {f}" for f in result["findings"]
    ]
    assert f"`shminfo rm --force {name}` removes it" in out


def test_what_cannot_be_opened_is_a_finding(name, shminfo_json):
    path = segment.path_of(name)

    def flip(blob: bytearray) -> bytearray:
        blob[100] ^= 1
        return blob

    spoiled_copy(name, path, flip)
    result = shminfo_json("check", name, "--json", status=1)
    assert (result["checked"], result["quiet"], result["sound"]) == ({}, None, False)
    assert len(result["findings"]) == 1 and result["findings"][0].startswith("damaged: ")
    assert result["remedy"] == f"nothing can be read out of it; `shminfo rm --force {name}` removes it"
    os.chmod(path, 0o602)
    (finding,) = shminfo_json("check", name, "--json", status=1)["findings"]
    assert finding.startswith("foreign: ") and "writable by everybody" in finding


def test_of_nothing_the_status_is_1_and_of_wrong_usage_2(name, shminfo):
    status, out, err = shminfo("check", name, "--json")
    assert (status, out) == (1, "") and f"no buffer named '{name}'" in err
    assert shminfo("check", "a/b")[0] == 1 and shminfo("check")[0] == 2


def test_a_finding_of_a_moment_is_looked_at_again(name, shminfo_json, monkeypatch):
    """A transaction in progress is no damage: what it was is decided when it is over."""
    moments = [
        {"quiet": False, "findings": ["half-way"], "checked": {}},
        {"quiet": True, "findings": [], "checked": {}},
    ]

    class Handle:
        ready, config = False, b"\x80"

        def audit(self, patience: float) -> dict:
            return moments.pop(0)

    result: dict = {}
    assert checking._audited(Handle(), result) == [] and moments == [] and result["quiet"]
