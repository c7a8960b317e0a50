"""What a buffer tells of its life: deaths, how old the rows drawn were, whether it is sound."""

import os
import signal
import time

import numpy as np
import pytest

from shmbuf import Buffer, Schema, estimate, segment
from tests.process import workers

SPEC = {"k": "int64", "done": "bool"}


def rows(first: int, n: int) -> dict:
    k = np.arange(first, first + n)
    return {"k": k, "done": k % 10 == 9}


@pytest.fixture
def buffer(name):
    with Buffer.create(name, 64, schema=SPEC, drain="caller") as b:
        yield b


def test_ages_and_counts_of_what_was_drawn(buffer):
    for k in range(0, 128, 8):
        buffer.extend(rows(k, 8))
    before = buffer.ages()
    assert sum(before["sampled"]) == before["sum"] == 0
    _, ids = buffer.draw(1000)
    ages = 127 - ids
    now, stats = buffer.ages(), buffer.stats()
    bits = np.array([int(a).bit_length() for a in ages])
    assert now["sampled"][:8] == np.bincount(bits, minlength=8)[:8].tolist() and sum(now["sampled"]) == 1000
    assert now["sum"] == ages.sum()
    assert (stats["sampled_batches"], stats["sampled_rows"], stats["replay_ratio"]) == (1, 1000, 1000 / 128)
    buffer.newest(5)
    buffer.draw_slices(3, 4)
    buffer.epoch().draw(7)
    buffer.gather([100])  # not a sample
    assert buffer.stats()["sampled_rows"] == 1000 + 5 + 12 + 7
    (me,) = buffer.members()
    assert (me["sampled_batches"], me["sampled_rows"]) == (4, 1024)


def test_a_reader_that_may_not_write_is_not_counted(buffer):
    buffer.extend(rows(0, 8))
    with Buffer.attach(buffer.name, readonly=True) as watcher:
        watcher.draw(5)
    assert buffer.stats()["sampled_rows"] == 0


def test_the_clock_tells_when_how_much_was_stored(buffer):
    assert buffer.ages()["clock"] == []
    for k in range(0, 640, 2):
        buffer.extend(rows(k, 2))
    clock = buffer.ages()["clock"]
    ends, ago = zip(*clock, strict=True)
    assert list(ends) == sorted(ends) and list(ago) == sorted(ago, reverse=True) and ends[-1] == 640
    assert ends[-1] - ends[0] >= buffer.capacity, "ages up to the capacity can be told in seconds"


def killed(name: str, act) -> int:
    """Forks a process that attaches, acts and is then killed; its pid."""
    pid = os.fork()
    if not pid:
        try:
            handle = Buffer.attach(name)
            act(handle)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


def noticed(buffer: Buffer, number: int) -> dict:
    deadline = time.monotonic() + 60
    while len(buffer.events()) < number:
        assert time.monotonic() < deadline, buffer.events()
        buffer._handle.sweep()
    assert len(buffer.events()) == number
    return buffer.events()[-1]


def test_who_died(buffer):
    buffer.extend(rows(0, 8))
    pid = killed(buffer.name, lambda b: b.put(rows(0, 5)))
    buffer._handle.sweep()  # finds 5 rows in a dead one's ring
    buffer.drain()
    event = noticed(buffer, 1)
    assert (event["kind"], event["pid"], event["rows"]) == ("collector_died", pid, 5)
    pid = killed(buffer.name, lambda b: b.draw(2))
    event = noticed(buffer, 2)
    assert (event["kind"], event["pid"]) == ("process_died", pid) and abs(event["at"] - time.time()) < 600
    pid = killed(buffer.name, lambda b: b._handle.try_take_role())
    buffer.put(rows(0, 3))
    buffer.drain()
    writer = [e for e in buffer.events() if e["kind"] == "writer_died"]
    assert len(writer) == 1 and writer[0]["pid"] == pid and writer[0]["rows"] == 0 and writer[0]["seconds"] > 0
    assert [e["number"] for e in buffer.events()] == list(range(len(buffer.events())))
    stats = buffer.stats()
    assert (stats["collectors_died"], stats["writers_died"]) == (1, 1) and stats["processes_died"] >= 1
    assert len(buffer) == 16


def test_whoever_leaves_in_order_has_not_died(buffer):
    def act() -> None:
        with Buffer.attach(buffer.name) as b:
            b.extend(rows(0, 3))
            b.draw(2)

    assert os.waitstatus_to_exitcode(os.waitpid(workers.fork(act), 0)[1]) == 0
    for _ in range(3):
        buffer._handle.sweep()
        buffer.drain()
    assert buffer.events() == []


def test_a_sound_buffer_and_an_emptied_one_have_no_findings(buffer):
    buffer.keep_priorities(0.6, 1e-6)
    for k in range(0, 200, 10):
        buffer.extend(rows(k, 10))
    report = buffer.check()
    assert report["findings"] == [] and report["quiet"]
    assert (report["checked"]["rows"], report["checked"]["leaves"]) == (64, 64)
    assert report["checked"]["trajectories"] == 7 and report["checked"]["links"] == 64 - 7
    buffer.empty()
    assert buffer.check()["findings"] == []
    buffer.extend(rows(0, 10))
    assert buffer.check()["findings"] == []


def test_damage_is_found(buffer):
    buffer.keep_priorities(0.6, 1e-6)
    buffer.extend(rows(0, 60))
    h = buffer._handle.header
    with open(segment.path_of(buffer.name), "r+b") as f:
        f.seek(h["tree_offset"] + 8 * 17)
        leaf = f.read(8)
        f.seek(h["tree_offset"] + 8 * 17)
        f.write(np.float32(99.0).tobytes() + leaf[4:])
        f.flush()
        found = buffer.check()["findings"]
        assert len(found) == 1 and "tree, level 0, node 2: not the sum of what is below" in found[0]
        f.seek(h["tree_offset"] + 8 * 17)
        f.write(leaf[:4] + b"\x07\0\0\0")
    assert any("leaf of row 17: it belongs to another row" in x for x in buffer.check()["findings"])


def test_what_a_buffer_would_take(name):
    spec = {"obs": ("uint8", (84, 84)), "next": {"done": "bool"}}
    e = estimate(1000, schema=spec, ring_bytes=1 << 16, max_collectors=4)
    assert e.columns == {"'obs'": 7_056_000, "('next', 'done')": 1000}
    with Buffer.create(name, 1000, schema=spec, ring_bytes=1 << 16, max_collectors=4) as b:
        used = os.stat(segment.path_of(name)).st_blocks * 512
        assert abs(e.total - used) <= 0.01 * used
        b.put({"obs": np.zeros((1, 84, 84), np.uint8), "next": {"done": np.zeros(1, bool)}})
        assert abs(e.total + e.ring - os.stat(segment.path_of(name)).st_blocks * 512) <= 0.01 * used
    assert f"{e.total:,}" in str(e) and "'obs'" in str(e)
    assert (
        estimate(
            1000,
            example={"obs": np.zeros((84, 84), np.uint8), "next": {"done": True}},
            ring_bytes=1 << 16,
            max_collectors=4,
        )
        == e
    )
    assert estimate(1000, schema=Schema.from_spec(spec), trajectories=False).trajectories == 0 < e.trajectories
    with pytest.raises(ValueError, match="schema= or example="):
        estimate(10)
    with pytest.raises(ValueError, match="capacity=0"):
        estimate(0, schema=spec)


@pytest.mark.parametrize("watch", [True, False])
def test_a_handle_from_before_the_schema_checks_what_came_later(name, watch):
    with Buffer.create(name, 64) as buf:
        early = segment.attach(name, watch=watch)
        buf.extend(rows(0, 8))
        report = early.audit()
        assert report["findings"] == [] and report["checked"]["rows"] == 8
        early.close()
