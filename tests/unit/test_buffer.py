"""`Buffer`, the numpy-level handle, in one process. Everything is deterministic: drain="caller", and a stuck drainer is a second
handle that holds the writer role."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from shmbuf import (
    Buffer,
    BufferNotFound,
    CommitInterrupted,
    CommitPending,
    ConcurrentUse,
    Lapped,
    NotEnoughRows,
    RingFull,
    Schema,
    StorageLost,
    TooManyCollectors,
    destroy,
    segment,
)
from tests.unit.helpers import SPEC, figures, numbers, raw, rows, same, stored, stuck_drainer, unmoved

RING = 4096
ROW = Schema.from_spec(SPEC).row_bytes
RECORD = -(-(32 + ROW) // 32) * 32  # bytes in the ring of a put of one row
FITS = RING // RECORD  # such puts fill the ring
WHOLE = (RING // 2 - 32) // ROW  # rows of the largest record


@pytest.fixture
def make(make_name):
    made = []

    def make(capacity: int = 100, **kw) -> Buffer:
        made.append(
            Buffer.create(make_name(), capacity, **{"schema": SPEC, "drain": "caller", "ring_bytes": RING, **kw})
        )
        return made[-1]

    yield make
    for buf in made:
        buf.close()


@pytest.fixture
def buf(make) -> Buffer:
    return make()


def fill(buf: Buffer, first: int) -> int:
    """Puts of one row until the ring has no room; how many went in. Only with full="error" or timeout=0, and a stuck drainer."""
    n = 0
    with pytest.raises(RingFull):
        while True:
            buf.put(rows(first + n), timeout=0)
            n += 1
    return n


# ---- put, extend, gather, draw -------------------------------------------------------------------------------------


def test_a_new_buffer_is_empty(buf):
    assert (len(buf), buf.window, buf.write_count, buf.capacity) == (0, (0, 0), 0, 100)
    assert buf.schema == Schema.from_spec(SPEC)


def test_extend_returns_ids_and_the_rows_can_be_gathered_at_once(buf):
    ids = buf.extend(rows(0, 5))
    assert ids.dtype == np.int64 and ids.tolist() == [0, 1, 2, 3, 4]
    assert buf.extend(rows(5, 1)).tolist() == [5]
    assert same(buf.gather(ids), rows(0, 5)) and same(buf.gather([5]), rows(5))
    assert (len(buf), buf.window, buf.write_count) == (6, (0, 6), 6)


def test_a_put_is_stored_when_somebody_drains(buf):
    ticket = buf.put(rows(0, 3))
    assert (ticket.rows, ticket.done(), len(buf)) == (3, False, 0)
    assert buf.drain() is True
    assert (ticket.done(), len(buf)) == (True, 3)
    assert ticket.wait(0).tolist() == [0, 1, 2] == ticket.ids().tolist()
    assert buf.drain() is False, "nothing is left to move"


def test_waiting_for_a_ticket_drains(buf):
    assert buf.put(rows(0, 3)).wait(0).tolist() == [0, 1, 2] and len(buf) == 3


def test_gather_keeps_the_order_and_repeats(buf):
    buf.extend(rows(0, 10))
    wanted = [7, 0, 7, 9, 3]
    assert buf.gather(wanted)["k"].tolist() == wanted
    assert buf.gather(np.array(wanted, np.uint8))["k"].tolist() == wanted
    assert buf.gather([])["obs"].shape == (0, 4) and buf.gather([])["next"]["done"].dtype == bool


def test_gather_of_ids_that_are_not_stored_names_how_many_and_the_window(make):
    buf = make(4)
    with pytest.raises(
        Lapped, match=r"2 of 2 ids are not stored \(first: 0\); the buffer is empty|2 of 2 .* the buffer is empty"
    ):
        buf.gather([0, 1])
    buf.extend(rows(0, 6))
    with pytest.raises(Lapped, match=r"3 of 4 ids are not stored \(first: 1\); stored now: 2 to 5"):
        buf.gather([5, 1, 6, -1])
    got, valid = buf.try_gather([5, 1, 6, -1, 2])
    assert valid.tolist() == [True, False, False, False, True] and got["k"][valid].tolist() == [5, 2]


def test_ids_go_on_and_the_window_is_the_last_of_them(make):
    buf = make(4)
    assert buf.extend(rows(0, 3)).tolist() == [0, 1, 2] and buf.window == (0, 3)
    assert buf.extend(rows(3, 3)).tolist() == [3, 4, 5] and buf.window == (2, 6)
    assert numbers(buf) == [2, 3, 4, 5] and len(buf) == 4


def test_draw_gives_whole_rows_and_their_ids(make):
    buf = make(8)
    buf.extend(rows(0, 13))
    got, ids = buf.draw(500)
    assert ids.dtype == np.int64 and set(ids.tolist()) == set(range(5, 13)) and (got["k"] == ids).all()
    assert same(got, {k: v for k, v in buf.gather(ids).items()})
    assert buf.draw(0)[1].shape == (0,) and buf.draw(0)[0]["obs"].shape == (0, 4)
    with pytest.raises(ValueError):
        buf.draw(-1)


def test_draw_is_uniform(make):
    buf = make(50)
    buf.extend(rows(0, 80))
    ids = buf.draw(50_000)[1]
    counts = np.bincount(ids, minlength=80)
    assert counts[:30].sum() == 0
    assert (abs(counts[30:] - 1000) < 8 * 1000**0.5).all(), "eight standard deviations"


def test_draws_differ_from_call_to_call_and_from_handle_to_handle(buf):
    buf.extend(rows(0, 100))
    with Buffer.attach(buf.name) as other:
        assert len({raw(b.draw(50)[1]) for b in (buf, buf, other, other)}) == 4


def test_a_large_draw_is_whole_and_a_seed_repeats_it(make_name):
    """A draw of several MiB is cut into parts, which several threads copy."""
    with Buffer.create(make_name(), 300, schema={"k": "int64", "x": ("int64", (1023,))}, drain="caller") as buf:
        k = np.arange(300)
        buf.extend({"k": k, "x": k[:, None] * 1000 + np.arange(1023)})
        draws = []
        for seed in (1, 2, 1):
            buf._handle.seed(seed)
            got, ids = buf.draw(1100)  # 9 MiB
            assert (got["k"] == ids).all() and (got["x"] == ids[:, None] * 1000 + np.arange(1023)).all()
            draws.append(raw(ids))
        assert draws[0] == draws[2] != draws[1]
        assert len(np.unique(np.frombuffer(draws[0], np.int64))) > 250


def test_rows_are_copies(buf):
    buf.extend(rows(0, 3))
    got, _ = buf.draw(4)
    for leaf in (got["obs"], got["next"]["obs"], got["k"]):
        leaf[...] = 77
    assert same(stored(buf), rows(0, 3))


def test_the_callers_arrays_may_be_reused_right_after_put(buf):
    given = rows(0, 3)
    ticket = buf.put(given)
    given["obs"][:] = -1
    given["k"][:] = -1
    assert same(buf.gather(ticket.wait()), rows(0, 3))


def test_the_first_put_decides_the_schema(make):
    buf = make(schema=None)
    assert (buf.schema, len(buf), buf.write_count, buf.window) == (None, 0, 0, (0, 0))
    assert buf.stats()["initialized"] is False and buf.collectors() == []
    assert buf.try_gather([0])[1].tolist() == [False]
    buf.empty()
    assert buf.extend(rows(0, 2)).tolist() == [0, 1]
    assert buf.schema == Schema.from_spec(SPEC) and buf.stats()["initialized"] is True


def test_the_first_put_of_another_handle_decides_too(make):
    buf = make(schema=None)
    with Buffer.attach(buf.name) as other:
        other.extend(rows(0, 2))
        assert buf.schema == other.schema and same(stored(buf), rows(0, 2))
        buf.extend(rows(2, 2))
        assert numbers(other) == [0, 1, 2, 3]


def test_example_decides_the_schema(make):
    one = {k: v for k, v in rows(0, 1).items() if k != "next"}
    example = {"obs": one["obs"][0], "k": one["k"][0], ("next", "done"): True}
    assert make(schema=None, example=example).schema == Schema.from_spec(
        {"obs": ("float32", (4,)), "k": "int64", "next": {"done": "bool"}}
    )
    assert make(schema={"a": "float64"}, example={"a": 1.5}).schema == Schema.from_spec({"a": "float64"})


# ---- more rows than fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [WHOLE, WHOLE + 1, 2 * WHOLE, FITS, 5 * WHOLE + 3, 500])
def test_extend_larger_than_the_ring(make, n):
    buf = make(1000)
    assert buf.extend(rows(0, n)).tolist() == list(range(n))
    assert same(stored(buf), rows(0, n)) and buf.stats()["put_rows"] == n


@pytest.mark.parametrize("ring", [RING, 1 << 16])  # several records; one record longer than the capacity
@pytest.mark.parametrize("n", [7, 8, 13, 14, 15, 100, 500])
def test_extend_larger_than_the_capacity_keeps_the_last_rows(make, n, ring):
    buf = make(7, ring_bytes=ring)
    buf.extend(rows(1000, 3))
    assert buf.extend(rows(0, n)).tolist() == list(range(3, 3 + n)), "every id is returned"
    assert numbers(buf) == list(range(n - 7, n))
    assert same(stored(buf), rows(n - 7, 7))
    assert (len(buf), buf.window, buf.write_count) == (7, (n - 4, n + 3), n + 3)


def test_capacity_of_one(make):
    buf = make(1)
    for k in range(5):
        assert buf.extend(rows(k)).tolist() == [k] and numbers(buf) == [k]
    assert buf.draw(3)[1].tolist() == [4, 4, 4]


# ---- empty ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "next_id"), [(1, 10), (9, 10), (10, 10), (11, 20), (25, 30)])
def test_empty_forgets_all_rows_and_ids_go_on_at_slot_0(make, before, next_id):
    buf = make(10)
    ids = buf.extend(rows(0, before))
    buf.empty()
    assert (len(buf), buf.write_count, buf.window) == (0, 0, (next_id, next_id))
    assert not buf.try_gather(ids)[1].any()
    with pytest.raises(NotEnoughRows):
        buf.draw(1)
    assert buf.extend(rows(100, 3)).tolist() == list(range(next_id, next_id + 3)), "never one of the old ids"
    assert numbers(buf) == [100, 101, 102] and buf.write_count == 3
    s = buf.stats()
    assert (s["clears"], s["rows_total"], s["first_id"], s["end_id"]) == (1, before + 3, next_id, next_id + 3)


def test_empty_may_keep_the_write_count(buf):
    buf.extend(rows(0, 5))
    buf.empty(empty_write_count=False)
    assert (len(buf), buf.write_count) == (0, 5)
    buf.extend(rows(0, 2))
    assert (len(buf), buf.write_count) == (2, 7)
    buf.empty()
    assert buf.write_count == 0


def test_empty_of_an_empty_buffer_is_nothing_but_counted(buf):
    buf.empty()
    buf.empty()
    assert (len(buf), buf.window) == (0, (0, 0)) and buf.extend(rows(0, 2)).tolist() == [0, 1]
    assert buf.stats()["clears"] == 2


def test_empty_keeps_the_order_of_the_handles_own_puts(buf):
    before = buf.put(rows(0, 3))
    buf.empty()
    buf.put(rows(3, 2))
    buf.drain()
    assert before.wait(0).tolist() == [0, 1, 2], "they were stored, and then forgotten"
    assert numbers(buf) == [3, 4] and buf.window == (100, 102)


@pytest.mark.parametrize("emptier", [0, 1])
def test_empty_forgets_every_row_put_before_it_also_from_other_rings(buf, emptier):
    with Buffer.attach(buf.name) as other:
        handles = [buf, other]
        for h in handles:
            h.extend(rows(0))  # claims its ring
        waiting = handles[1 - emptier].put(rows(7))
        handles[emptier].empty()
        assert waiting.done() and numbers(buf) == []
        handles[1 - emptier].extend(rows(8))
        assert numbers(buf) == [8]


def test_empty_that_cannot_store_what_others_put_before_it_changes_nothing(buf):
    with Buffer.attach(buf.name) as other:
        buf.extend(rows(0))
        other.extend(rows(1))
        with stuck_drainer(buf.name):
            other.put(rows(2))
            with pytest.raises(RingFull):
                buf.empty(timeout=0.05)
        buf.drain()
        assert numbers(buf) == [0, 1, 2]


def test_empty_while_nobody_drains_times_out_and_happens_later(buf):
    buf.extend(rows(0, 3))
    with stuck_drainer(buf.name):
        with pytest.raises(CommitPending) as e:
            buf.empty(timeout=0)
        assert len(buf) == 3 and not e.value.ticket.done()
    e.value.ticket.wait(0)
    assert len(buf) == 0


# ---- stats, collectors, members ------------------------------------------------------------------------------------


def test_stats_count_exactly(make):
    buf = make(10)
    assert {
        "size",
        "write_count",
        "capacity",
        "utilization",
        "initialized",
        "put_rows",
        "dropped_rows",
        "skipped_rows",
        "refused_rows",
        "blocked_seconds",
        "transactions",
        "takeovers",
        "writer_pid",
        "writer_active",
        "writer_age",
        "malformed_records",
        "clears",
        "rows_total",
        "first_id",
        "end_id",
        "reserve",
    } <= buf.stats().keys()
    assert buf.stats()["writer_age"] == -1
    buf.extend(rows(0, 4))
    buf.put(rows(4, 9))
    s = buf.stats()
    assert (s["put_rows"], s["rows_total"], s["size"], s["utilization"], s["end_id"], s["transactions"]) == (
        13,
        4,
        4,
        0.4,
        4,
        1,
    )
    buf.drain()
    s = buf.stats()
    assert (s["put_rows"], s["rows_total"], s["size"], s["utilization"]) == (13, 13, 10, 1.0)
    assert (s["first_id"], s["end_id"], s["reserve"], s["transactions"]) == (3, 13, 13, 2)
    assert [
        s[k] for k in ("dropped_rows", "skipped_rows", "refused_rows", "clears", "malformed_records", "takeovers")
    ] == [0] * 6
    assert s["writer_age"] >= 0 and s["writer_active"] is False


def test_collectors_and_members(buf):
    assert buf.collectors() == []
    buf.put(rows(0, 2))
    with Buffer.attach(buf.name) as other:
        other.put(rows(2, 1))
        mine, theirs = buf.collectors()
        assert [c["state"] for c in (mine, theirs)] == ["alive", "alive"] and mine["ring_bytes"] == RING
        assert (mine["put_rows"], mine["stored_rows"], mine["ring_used"]) == (2, 0, -(-(32 + 2 * ROW) // 32) * 32)
        assert (theirs["put_rows"], theirs["stored_rows"], theirs["ring_used"]) == (1, 0, RECORD)
        other.drain()
        assert [(c["stored_rows"], c["ring_used"]) for c in buf.collectors()] == [(2, 0), (1, 0)]
        other.draw(1)
        roles = sorted(m["roles"] for m in buf.members())
        assert roles == [["collector", "reader"], ["creator", "collector"]] and all(m["alive"] for m in buf.members())
    assert len(buf.members()) == 1
    assert [c["state"] for c in buf.collectors()] in (["alive", "closed"], ["alive"])


# ---- a full ring ---------------------------------------------------------------------------------------------------


def test_block_helps_itself_when_nobody_drains(buf):
    for k in range(5 * FITS):
        buf.put(rows(k))
    buf.drain()
    assert buf.stats()["rows_total"] == 5 * FITS and buf.window[1] == 5 * FITS


def test_block_waits_until_the_time_is_over_and_moves_nothing(buf):
    with stuck_drainer(buf.name):
        assert fill(buf, 0) == FITS
        buf.stats()
        before = figures(buf)
        with pytest.raises(RingFull) as e:
            buf.put(rows(FITS, 3), timeout=0.05)
        after = figures(buf)
        assert after.pop("refused_rows") == before.pop("refused_rows") + 3
        assert after.pop("blocked_seconds") >= before.pop("blocked_seconds") + 0.05
        assert after == before
        text = str(e.value)
        assert (
            "no room after 0.05 s" in text
            and f"{FITS * RECORD:,} of {RING:,} bytes used" in text
            and "Nothing was put" in text
        )
        assert f"3 rows of {ROW} bytes to put" in text
    assert buf.put(rows(FITS)).wait(0).tolist() == [FITS]
    assert numbers(buf) == list(range(FITS + 1)), "what was refused left nothing in the ring"


def test_block_is_woken_by_whoever_makes_room(buf):
    with stuck_drainer(buf.name):
        fill(buf, 0)
        done: list = []
        thread = threading.Thread(target=lambda: done.append(buf.put(rows(FITS, 2))))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not done, "no room, and no end of patience"
    buf2 = Buffer.attach(buf.name)
    buf2.drain()
    thread.join(60)
    assert not thread.is_alive() and done[0].wait().tolist() == [FITS, FITS + 1]
    buf2.close()
    assert numbers(buf) == list(range(FITS + 2))


def test_error_raises_at_once_and_counts(make):
    buf = make(full="error")
    with stuck_drainer(buf.name):
        for k in range(FITS):
            buf.put(rows(k))
        for _ in range(3):
            with pytest.raises(RingFull, match="Nothing was put"):
                buf.put(rows(99, 2), timeout=None)
        assert buf.stats()["refused_rows"] == 6 and buf.stats()["put_rows"] == FITS
    buf.drain()
    assert numbers(buf) == list(range(FITS))


def test_error_means_a_full_ring_even_if_this_handle_could_drain(make):
    buf = make(full="error")
    for k in range(FITS):
        buf.put(rows(k))
    with pytest.raises(RingFull):
        buf.put(rows(FITS))
    buf.drain()
    buf.put(rows(FITS)).wait()
    assert numbers(buf) == list(range(FITS + 1))


def test_drop_newest_drops_what_is_being_put_and_counts(make):
    buf = make(full="drop_newest")
    for k in range(FITS):
        assert buf.put(rows(k)).rows == 1
    ticket = buf.put(rows(FITS, 3))
    assert ticket.rows == 0 and ticket.done() and ticket.wait(0).tolist() == []
    assert buf.extend(rows(FITS)).tolist() == [], "extend too: it drops before it drains"
    s = buf.stats()
    assert (s["dropped_rows"], s["put_rows"], s["refused_rows"], s["skipped_rows"]) == (4, FITS, 0, 0)
    buf.drain()
    assert numbers(buf) == list(range(FITS))


def test_drop_newest_of_a_put_larger_than_the_ring_keeps_its_first_records(make):
    buf = make(full="drop_newest")
    ticket = buf.put(rows(0, 100))
    assert 0 < ticket.rows < 100 and ticket.rows % WHOLE == 0
    assert ticket.wait().tolist() == list(range(ticket.rows))
    assert buf.stats()["dropped_rows"] == 100 - ticket.rows and numbers(buf) == list(range(ticket.rows))


def test_drop_oldest_drops_nothing_while_somebody_can_make_room(make):
    buf = make(1000, full="drop_oldest")
    for k in range(10 * FITS):
        assert buf.put(rows(k)).rows == 1
    buf.drain()
    s = buf.stats()
    assert (s["skipped_rows"], s["dropped_rows"]) == (0, 0) and numbers(buf) == list(range(10 * FITS))


def test_drop_oldest_with_a_stuck_drainer_loses_no_more_than_it_must(make):
    buf = make(1000, full="drop_oldest")
    buf.extend(rows(10_000))
    with stuck_drainer(buf.name):
        tickets = [buf.put(rows(k)) for k in range(FITS + 5)]
    buf.drain()
    s, got = buf.stats(), [k for t in tickets for k in t.wait(0).tolist()]
    assert s["rows_total"] - 1 + s["skipped_rows"] + s["dropped_rows"] == FITS + 5, "each row is stored or counted"
    assert len(got) == s["rows_total"] - 1 == len(buf) - 1
    assert s["put_rows"] - 1 == FITS + 5 - s["dropped_rows"]
    assert s["skipped_rows"] + s["dropped_rows"] == 5, "rows that fitted are not dropped for rows that were not taken"


def test_drop_oldest_skips_whole_puts_when_the_writer_comes_back(make):
    """Whichever way the two meet: each row is stored or counted, in order, and each ticket knows. In some of the tries the writer finds
    the request to skip."""
    buf = make(1000, full="drop_oldest")
    buf.extend(rows(10_000))
    skipped = dropped = 0
    for attempt in range(200):
        lo = buf.window[1]
        with stuck_drainer(buf.name):
            tickets = [buf.put(rows(3 * i, 3)) for i in range(RING // 192)]  # full: 21 records of 192 bytes
            thread = threading.Thread(target=lambda tickets=tickets: tickets.append(buf.put(rows(3 * len(tickets), 3))))
            thread.start()
            thread.join(0.001 * (attempt % 8))  # within the put's patience of 20 ms, or before it
        thread.join(60)
        buf.drain()
        s, k = buf.stats(), buf.gather(np.arange(lo, buf.window[1]))["k"].tolist()
        gone = s["skipped_rows"] + s["dropped_rows"] - skipped - dropped
        assert gone in (0, 3) and len(k) == 66 - gone and k == sorted(set(k)) and len(tickets) == 22
        stored_puts = [t.wait(0).tolist() != [] for t in tickets]
        assert stored_puts == [3 * i in k and 3 * i + 2 in k for i in range(22)], "each ticket knows"
        assert s["skipped_rows"] == skipped or not stored_puts[0], "the oldest"
        assert s["dropped_rows"] == dropped or not stored_puts[-1], "the newest, if nobody could take the oldest out"
        skipped, dropped = s["skipped_rows"], s["dropped_rows"]
        assert sum(c["skipped_rows"] for c in buf.collectors()) == skipped
        if skipped >= 9:
            break
    assert skipped >= 9, "not once in 200 tries"


def test_drop_oldest_never_passes_an_empty(make):
    buf = make(1000, full="drop_oldest")
    buf.extend(rows(0, 3))
    with stuck_drainer(buf.name):
        with pytest.raises(CommitPending):
            buf.empty(timeout=0)
        for k in range(FITS + 3):
            buf.put(rows(100 + k))
    buf.drain()
    assert buf.stats()["clears"] == 1 and min(numbers(buf)) >= 100


# ---- tickets -------------------------------------------------------------------------------------------------------


def test_tickets_wait_in_any_order_and_more_than_once(buf):
    tickets = [buf.put(rows(10 * i, i + 1)) for i in range(5)]
    expected = np.split(np.arange(15), np.cumsum([1, 2, 3, 4]))
    for i in (3, 0, 4, 2, 1, 3, 0):
        assert tickets[i].wait(0).tolist() == expected[i].tolist()
        assert buf.gather(tickets[i].ids())["k"].tolist() == list(range(10 * i, 10 * i + i + 1))


def test_tickets_outlive_the_bytes_of_their_records(make):
    buf = make(10_000)
    early = [buf.put(rows(k)) for k in range(5)]
    buf.extend(rows(5, 20 * FITS))  # the ring's bytes are written over many times
    late = buf.put(rows(0))
    assert [t.wait(0).tolist() for t in early] == [[k] for k in range(5)]
    assert late.wait(0).tolist() == [5 + 20 * FITS]


def test_a_dropped_ticket_object_does_not_matter(make):
    buf = make(10_000)
    for k in range(10 * FITS):
        buf.put(rows(k))
    assert buf.extend(rows(0)).tolist() == [10 * FITS]


def test_a_timeout_gives_a_ticket_that_works_later(buf):
    with stuck_drainer(buf.name):
        with pytest.raises(CommitPending) as e:
            buf.extend(rows(0, 3), timeout=0.01)
        ticket = e.value.ticket
        assert e.value.rows == 3 == ticket.rows and "3 of 3 rows" in str(e.value) and isinstance(e.value, TimeoutError)
        assert not ticket.done() and len(buf) == 0
        with pytest.raises(CommitPending) as again:
            ticket.wait(0)
        assert again.value.ticket is ticket
    assert ticket.wait(0).tolist() == [0, 1, 2] and numbers(buf) == [0, 1, 2]


def test_the_buffers_timeout_holds_where_the_call_gives_none(make):
    buf = make(timeout=0.02)
    with stuck_drainer(buf.name):
        for attempt in range(3):
            with pytest.raises(CommitPending, match=r"not committed after 0\.0[12]\d* s"):  # what the put left of it
                buf.extend(rows(attempt))
        with pytest.raises(RingFull, match=r"no room after 0.02 s"):
            for k in range(3, 1000):
                buf.put(rows(k))
        with pytest.raises(RingFull, match=r"no room \("):
            buf.put(rows(k), timeout=0)
        with pytest.raises(CommitPending):  # there is room for the request
            buf.empty()
    buf.drain()
    assert (len(buf), buf.stats()["rows_total"], buf.stats()["clears"]) == (0, k, 1)


def test_a_put_larger_than_the_ring_that_runs_out_of_time_says_how_many_rows_went_in(buf):
    with stuck_drainer(buf.name):
        with pytest.raises(CommitPending) as e:
            buf.extend(rows(0, 500), timeout=0.01)
        went_in = e.value.rows
        assert 0 < went_in < 500 and went_in == e.value.ticket.rows
        assert f"{went_in} of 500 rows are in the ring" in str(e.value)
        assert buf.stats()["refused_rows"] == 500 - went_in
    assert e.value.ticket.wait(0).tolist() == list(range(went_in)) and numbers(buf) == list(range(went_in))


def test_an_interrupt_while_waiting_carries_the_ticket(buf):
    """The signal may come at any instruction, so the handler raises only when it finds the main thread inside the wait."""
    from shmbuf.buffer import Ticket

    def handler(signum, frame):
        if frame.f_code is Ticket.wait.__code__ and frame.f_lineno != frame.f_code.co_firstlineno:
            raise KeyboardInterrupt

    def pester():
        while not stop.wait(0.001):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    stop, before = threading.Event(), signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=pester)
    try:
        with stuck_drainer(buf.name):
            ticket = buf.put(rows(0, 3))
            thread.start()
            with pytest.raises(CommitInterrupted) as e:
                ticket.wait()
            stop.set()
            thread.join()
    finally:
        stop.set()
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(e.value, KeyboardInterrupt) and e.value.rows == 3
    assert e.value.ticket.wait(0).tolist() == [0, 1, 2]


def test_a_ticket_can_be_waited_for_after_close(buf):
    buf.extend(rows(0, 3))
    with Buffer.attach(buf.name) as other:
        pending, committed = other.put(rows(3, 2)), other.put(rows(5, 1))
        committed.wait()
        unwaited = other.put(rows(6, 2))
    assert [t.wait(0).tolist() for t in (pending, committed, unwaited)] == [[3, 4], [5], [6, 7]], "close() drained them"
    assert all(t.done() for t in (pending, committed, unwaited))


def test_a_ticket_whose_record_was_written_over_can_be_waited_for_after_close(make):
    buf = make(10_000)
    with Buffer.attach(buf.name) as other:
        early = other.put(rows(0))
        other.extend(rows(1, 20 * FITS))
    assert early.wait(0).tolist() == [0] and early.done()


def test_a_ticket_of_a_part_of_a_put_can_be_waited_for_after_close(make):
    buf = make(10_000, full="drop_newest")
    with Buffer.attach(buf.name) as other:
        early = other.put(rows(0, 100))  # more than the ring holds
        went_in = early.rows
        other.drain()
        for k in range(10 * FITS):
            other.extend(rows(k))
    assert 0 < went_in < 100
    assert early.wait(0).tolist() == list(range(went_in)) and early.done()


def test_a_ticket_whose_handle_closed_too_early_says_so(buf):
    buf.extend(rows(0))
    other = Buffer.attach(buf.name)
    with stuck_drainer(buf.name):
        ticket = other.put(rows(1))
        other.close()
    with pytest.raises(StorageLost, match="their ids are not known here"):
        ticket.wait(0)
    assert ticket.done() is False
    assert "pending" in repr(ticket)
    buf.drain()
    assert numbers(buf) == [0, 1], "whoever is attached stores them"


# ---- who drains ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", ["thread", "process"])
def test_rows_become_visible_without_the_producers_help(make, drain):
    """A read-only handle never drains, so what it sees was drained by the thread or the process."""
    buf = make(drain=drain)
    assert buf._handle.has_thread is (drain == "thread")
    with Buffer.attach(buf.name, readonly=True) as onlooker:
        buf.put(rows(0, 3))
        onlooker.wait_rows(3, timeout=60)
        for k in range(3, 50):
            buf.put(rows(k))
        onlooker.wait_rows(50, timeout=60)
        assert numbers(onlooker) == list(range(50))
    process = buf._drain_process
    buf.close()
    destroy(buf.name)
    if process is not None:
        assert process.wait(60) == 0, "the drain process ends with the buffer"


def test_caller_means_no_thread_at_all(buf):
    before = len(os.listdir("/proc/self/task"))
    buf.extend(rows(0, 3))
    buf.draw(5)
    assert buf._handle.has_thread is False and len(os.listdir("/proc/self/task")) == before


def test_a_sampling_handle_stands_by_unless_the_caller_drains(make):
    buf = make(drain="thread")
    buf.extend(rows(0, 3))
    with Buffer.attach(buf.name) as other:
        assert other._handle.has_thread is False
        other.draw(1)
        assert other._handle.has_thread is True
        assert {"reader", "standby"} <= {r for m in buf.members() for r in m["roles"]}


# ---- waiting for rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SPEC, None])
def test_draw_on_empty_raises_at_once_or_waits_as_told(make, schema):
    buf = make(schema=schema)
    for timeout in (0, 0.02):
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"), unmoved(buf):
            buf.draw(1, timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        buf.draw(1, timeout=-1)


@pytest.mark.parametrize("schema", [SPEC, None])
def test_a_waiting_draw_is_woken_by_another_threads_put(make, schema):
    buf = make(schema=schema)
    got: list = []
    thread = threading.Thread(target=lambda: got.append(buf.draw(4, timeout=None)))
    thread.start()
    with Buffer.attach(buf.name) as other:
        other.put(rows(7))
        thread.join(60)
    assert not thread.is_alive() and got[0][0]["k"].tolist() == [7] * 4


def test_wait_rows(buf):
    buf.extend(rows(0, 3))
    buf.wait_rows(3, 0)
    with pytest.raises(NotEnoughRows, match="holds 3 rows, 4 are needed"):
        buf.wait_rows(4, 0)
    with pytest.raises(ValueError, match="capacity"):
        buf.wait_rows(101)
    buf.put(rows(3))
    buf.wait_rows(4, 0)


# ---- several handles, threads --------------------------------------------------------------------------------------


def test_two_handles_share_everything_and_each_keeps_its_order(buf):
    with Buffer.attach(buf.name) as other:
        for k in range(20):
            (buf, other)[k % 2].put(rows(k))
        buf.drain()
        k = numbers(other)
        assert (
            sorted(k) == list(range(20))
            and [x for x in k if x % 2] == list(range(1, 20, 2))
            and [x for x in k if not x % 2] == list(range(0, 20, 2))
        )


def test_a_second_thread_that_puts_through_the_same_handle_is_told(buf):
    with stuck_drainer(buf.name):
        fill(buf, 0)
        outcome: list = []

        def blocked():
            while not outcome:
                with suppress(ConcurrentUse):  # it may meet the main thread's short try
                    outcome.append(buf.put(rows(FITS)))

        thread = threading.Thread(target=blocked)
        thread.start()
        with pytest.raises(ConcurrentUse, match="attach once per thread"):
            while True:  # until the other thread is inside its put
                with suppress(RingFull):
                    buf.put(rows(0), timeout=0)
                thread.join(0.001)  # lets it run
        assert len(buf) == 0, "reading is free"
    thread.join(60)
    buf.drain()
    assert outcome[0].rows == 1 and numbers(buf) == list(range(FITS + 1))


def test_more_handles_than_rings(make):
    buf = make(max_collectors=2)
    buf.extend(rows(0))
    with Buffer.attach(buf.name) as second, Buffer.attach(buf.name) as third:
        second.extend(rows(1))
        with pytest.raises(TooManyCollectors, match="all 2 rings have living owners"), unmoved(third):
            third.extend(rows(2))
        assert third.draw(3)[1].shape == (3,), "it may read"
        second.close()
        assert third.extend(rows(2)).tolist() == [2], "the ring of a closed handle is used again"
    assert numbers(buf) == [0, 1, 2]


def test_a_read_only_handle_reads_and_never_writes(buf):
    buf.extend(rows(0, 3))
    with Buffer.attach(buf.name, readonly=True) as onlooker:
        assert (
            same(stored(onlooker), rows(0, 3)) and onlooker.draw(2)[1].shape == (2,) and onlooker.stats()["size"] == 3
        )
        with unmoved(buf):
            for call in (lambda: onlooker.put(rows(3)), lambda: onlooker.extend(rows(3)), lambda: onlooker.empty()):
                with pytest.raises(PermissionError, match="read-only"):
                    call()
        assert onlooker.drain() is False
    assert len(buf.members()) == 1, "it leaves no trace"


# ---- pickles, ends -------------------------------------------------------------------------------------------------


def test_a_handle_pickles_as_its_name(buf, python):
    buf.extend(rows(0, 3))
    blob = pickle.dumps(buf)
    assert len(blob) < 500
    with pickle.loads(blob) as other:
        other.extend(rows(3, 2))
    assert numbers(buf) == [0, 1, 2, 3, 4]
    assert (
        python(
            "import sys, pickle; print(pickle.loads(bytes.fromhex(sys.argv[1])).draw(3)[0]['k'].max() < 5, 'torch' in sys.modules)",
            blob.hex(),
        )
        == "True False"
    )


def test_a_pickle_of_another_buffer_of_that_name_is_refused(make, make_name):
    name = make_name()
    old = Buffer.create(name, 10, schema=SPEC, drain="caller")
    blob = pickle.dumps(old)
    old.close()
    destroy(name)
    with pytest.raises(BufferNotFound):
        pickle.loads(blob)
    with (
        Buffer.create(name, 10, schema=SPEC, drain="caller"),
        pytest.raises(StorageLost, match="the name means another one now"),
    ):
        pickle.loads(blob)


def test_a_closed_handle_says_so(buf):
    buf.extend(rows(0, 3))
    with Buffer.attach(buf.name) as other:
        other.extend(rows(3))
    assert other.closed and "closed" in repr(other)
    other.close()
    for call in (
        lambda: other.put(rows(0)),
        lambda: other.extend(rows(0)),
        lambda: other.draw(1),
        lambda: other.gather([0]),
        lambda: len(other),
        lambda: other.window,
        lambda: other.write_count,
        lambda: other.stats(),
        lambda: other.collectors(),
        lambda: other.members(),
        lambda: other.empty(),
        lambda: other.drain(),
        lambda: other.wait_rows(1),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_close_drains_what_the_handle_put(buf):
    buf.extend(rows(0))
    with Buffer.attach(buf.name) as other:
        other.put(rows(1, 5))
        assert len(buf) == 1
    assert numbers(buf) == [0, 1, 2, 3, 4, 5]


def test_destroyed_under_its_users(buf):
    buf.extend(rows(0, 3))
    destroy(buf.name, force=True)
    for call in (lambda: buf.put(rows(3)), lambda: buf.extend(rows(3)), lambda: buf.empty()):
        with pytest.raises(StorageLost, match="destroyed"):
            call()
    assert numbers(buf) == [0, 1, 2], "what is mapped can still be read"
    with pytest.raises(StorageLost):
        buf.wait_rows(50)


@pytest.mark.parametrize("wait", ["draw", "put", "ticket"])
def test_destroy_wakes_those_who_wait(make, wait):
    buf = make()
    failed: list = []

    def waiting(call):
        try:
            call()
        except StorageLost as e:
            failed.append(e)

    with stuck_drainer(buf.name):
        if wait == "draw":
            call = lambda: buf.draw(1, timeout=None)  # noqa: E731
        elif wait == "put":
            fill(buf, 0)
            call = lambda: buf.put(rows(0))  # noqa: E731
        else:
            call = buf.put(rows(0)).wait
        thread = threading.Thread(target=waiting, args=(call,))
        thread.start()
        segment.destroy(buf.name, force=True)
        thread.join(60)
    assert not thread.is_alive() and failed and "destroyed" in str(failed[0])
