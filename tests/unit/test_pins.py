"""Rows that stay where they are: what a pin shows, whom it holds up, how it ends."""

import copy

import numpy as np
import pytest

from shmbuf import Buffer, Lapped, NotEnoughRows, RingFull, StorageLost, TooManyPins, destroy, pins, segment
from shmbuf._extension import native

SPEC = {"k": "int64", "v": ("float32", (3,)), "b": "bool"}
ROW = 24


def rows(first: int, n: int) -> dict:
    k = np.arange(first, first + n)
    return {"k": k, "v": vectors(k), "b": k % 2 == 1}


def vectors(k: np.ndarray) -> np.ndarray:
    return (3 * k[:, None] + np.arange(3)).astype(np.float32)


@pytest.fixture
def full(name):
    """Capacity 100, rows 30 to 129; ids are the numbers in k."""
    buf = Buffer.create(name, 100, schema=SPEC, drain="caller", ring_bytes=4096, timeout=0.1)
    for k in range(0, 130, 10):
        buf.extend(rows(k, 10))
    yield buf
    buf.close()


def check(ids: np.ndarray, part: dict) -> None:
    assert (part["k"] == ids).all() and (part["v"] == vectors(ids)).all() and (part["b"] == (ids % 2 == 1)).all()


def test_the_rows_in_place_in_two_parts_where_the_storage_wraps(full):
    with full.pin() as pin:
        assert (pin.first_id, pin.end_id, len(pin), pin.valid) == (30, 130, 100, True)
        parts = pin.parts()
        assert [ids.tolist() for ids, _ in parts] == [list(range(30, 100)), list(range(100, 130))]
        for ids, part in parts:
            check(ids, part)
            assert part["v"].shape == (len(ids), 3) and part["v"].strides == (ROW, 4)
            assert part["k"].dtype == np.int64 and not part["k"].flags.writeable and not part["k"].flags.owndata


def test_it_holds_up_whoever_needs_its_slots_and_nobody_else(full):
    with full.pin(50, seconds=None) as pin:
        assert len(pin) == 80
        full.extend(rows(130, 20))  # in place of 30 to 49
        with pytest.raises(RingFull, match=r"pid \d+ \(.*\) has pinned the rows from id 50 on, until it is released"):
            for k in range(150, 1000, 10):
                full.put(rows(k, 10))
        assert full.window == (50, 150) and len(full) == 100
        assert set(full.draw(1000)[0]["k"]) <= set(range(50, 150))
        assert pin.valid
        for ids, part in pin.parts():
            check(ids, part)
    full.drain()
    lo, hi = full.window
    assert hi > 150
    assert (full.gather(np.arange(lo, hi))["k"] == np.arange(lo, hi)).all()


def test_the_least_of_several_counts(full):
    held = [full.pin(i, seconds=None) for i in (60, 40, 50)]
    full.extend(rows(130, 10))
    ticket = full.put(rows(140, 1))
    for pin, room in zip(held[:0:-1], (40, 50), strict=True):
        del room
        assert not ticket.done()
        full.drain()
        assert not ticket.done()
        pin.release()
    full.drain()
    assert ticket.done()
    held[0].release()
    held[0].release()  # twice is once


def test_it_is_revoked_when_its_time_is_over_and_the_room_is_needed(full):
    with (
        pytest.raises(Lapped, match=r"did not hold to the end: it was revoked after 0\.01 s"),
        full.pin(seconds=0.01) as pin,
    ):
        full.put(rows(130, 10))
        while full.window[1] < 140:
            full.drain()
        assert not pin.valid
    with full.pin(seconds=1e-9) as pin:  # nobody needs the room
        assert pin.valid


def test_the_users_error_is_not_hidden_by_a_revoked_pin(full):
    with pytest.raises(KeyError), full.pin(seconds=1e-9):
        full.put(rows(130, 10))
        while full.window[1] < 140:
            full.drain()
        raise KeyError


def test_views_outlive_pin_handle_and_buffer(full):
    with full.pin() as pin:
        parts = pin.parts()
    full.close()
    assert not pin.valid
    destroy(full.name)
    for ids, part in parts:
        check(ids, part)
    with pytest.raises(StorageLost, match=r"pin\(\) again"):
        pin.parts()


def test_closing_a_handle_releases_its_pins(full):
    with Buffer.attach(full.name) as other:
        pin = other.pin(seconds=None)
        ticket = full.put(rows(130, 10))
        full.drain()
        assert not ticket.done() and pin.valid
    full.drain()
    assert ticket.done() and not pin.valid


def test_an_emptied_buffer_still_shows_what_was_pinned(full):
    with full.pin() as pin:
        parts = pin.parts()
        full.empty()
        assert len(full) == 0
        ticket = full.put(rows(200, 10))
        full.drain()
        assert not ticket.done(), "slot 0 belongs to a pinned row"
        for ids, part in parts:
            check(ids, part)
        assert pin.valid
    full.drain()
    assert ticket.done() and full.draw(1)[0]["k"][0] >= 200


def test_a_record_longer_than_the_buffer_waits_for_every_pin(name):
    with Buffer.create(name, 10, schema=SPEC, drain="caller") as buf:
        buf.extend(rows(0, 10))
        with buf.pin(9, seconds=None):
            ticket = buf.put(rows(10, 25))
            buf.drain()
            assert not ticket.done()
        buf.drain()
        assert ticket.done() and buf.window == (25, 35)


def test_bad_input(full, name):
    with pytest.raises(Lapped, match="row 29 cannot be pinned: stored now are 30 to 129"):
        full.pin(29)
    with pytest.raises(IndexError, match="first_id=130: no such row has been stored; the newest is 129"):
        full.pin(130)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="seconds="):
            full.pin(seconds=seconds)
    with pytest.raises(IndexError, match="first_id=-1"):
        full.pin(-1)
    with Buffer.attach(name, readonly=True) as watcher, pytest.raises(PermissionError, match="read-only"):
        watcher.pin()
    held = [full.pin() for _ in range(16)]
    with pytest.raises(TooManyPins, match=r"all 16 pins of buffer .* are in use: pid \d+ since"):
        full.pin()
    del held
    full.pin().release()
    full.empty()
    with pytest.raises(NotEnoughRows, match="holds no rows to pin"):
        full.pin()


def test_it_is_seen_from_outside(full):
    assert full._handle.pins() == []
    with full.pin(40):
        watcher = segment.attach(full.name, watch=True)
        (entry,) = watcher.pins()
        assert entry["first_id"] == 40 and entry["alive"] and 0 < entry["seconds_left"] <= 5
        watcher.close()
    assert full._handle.pins() == []


def test_native_refuses_what_is_not_pinned(full):
    assert native.STATUSES[full._handle.pin(10**6, 1.0)[0]] == "unknown_row"


def test_a_pin_that_was_released_early_held_as_long_as_it_was_asked_to(full):
    with full.pin() as pin:
        pin.release()
    assert not pin.valid


def test_closing_drains_what_its_own_pin_held_up(full):
    with Buffer.attach(full.name) as other:
        other.pin(seconds=None)
        kept = other.pin(seconds=None)
        assert len(kept) == 100
        other.put(rows(130, 5))
    assert full.window == (35, 135)


def test_pins_in_a_row_leave_room_for_what_waits(full):
    first = full.pin(seconds=None)
    ticket = full.put(rows(130, 10))
    full.drain()
    assert not ticket.done()
    second = full.pin(seconds=None)  # keeps what is not wanted
    assert (first.first_id, second.first_id) == (30, 40)
    with pytest.raises(Lapped, match="about to be overwritten"):
        full.pin(39)
    first.release()
    full.drain()
    assert ticket.done() and second.valid and full.pin().first_id == 40


def test_a_copy_is_the_same_pin_and_releasing_it_again_leaves_later_ones_alone(full):
    pin = full.pin(seconds=None)
    same = copy.copy(pin)
    same.release()
    assert not pin.valid
    later = full.pin(seconds=None)  # in the same place
    pin.release()
    del pin, same
    assert later.valid and len(full._handle.pins()) == 1


def test_whoever_is_interrupted_while_he_pins_holds_nothing(full, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pins.Pin, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        full.pin(seconds=None)
    assert full._handle.pins() == []


def test_a_revoked_pin_shows_nothing_more(full):
    pin = full.pin(seconds=0.01)
    full.put(rows(130, 10))
    while full.window[1] < 140:
        full.drain()
    with pytest.raises(Lapped, match="did not hold to the end"):
        pin.parts()


def test_a_plan_that_a_pin_holds_up_holds_up_no_reader(name, python):
    """The writer dies with its plan sealed; then somebody pins: all rows can be read, priorities be asked for and the one death
    is counted once, while whoever comes waits for the pin."""
    code = """
import os, sys
import numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.create(sys.argv[1], 64, schema={"k": "int64"}, drain="caller", ring_bytes=4096)
b.extend({"k": np.arange(64)})
pid = os.fork()
if not pid:
    assert native.arm("plan_sealed=kill@1")
    b.put({"k": np.arange(64, 128)})
    b.drain()
os.waitpid(pid, 0)
with b.pin(seconds=None):
    for _ in range(20):
        b.drain()
    b.keep_priorities(1.0, 0.0, timeout=20)
    print(len(b.draw_by_priority(5)[1]), b.stats()["takeovers"])
    print(len(b.draw(100)[1]), b.gather(range(64))["k"].sum(), b.stats()["rows_total"])
b.drain()
print(b.window)
"""
    assert python(code, name, SHMBUF_NATIVE="failpoints").splitlines() == ["5 1", "100 2016 64", "(64, 128)"]
