"""What a `Buffer`, the numpy-level handle, stores and gives back, in one process. Everything is deterministic: drain="caller", and a
stuck drainer is a second handle that holds the writer role."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmbuf import Buffer, CommitPending, Lapped, NotEnoughRows, RingFull, Schema
from tests.unit.helpers import (
    FITS,
    RECORD,
    RING,
    ROW,
    SPEC,
    WHOLE,
    numbers,
    raw,
    rows,
    same,
    stored,
    stuck_drainer,
    unmoved,
)

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
        "ring_used_bytes",
        "ring_fill",
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
        roles = sorted([r for r in m["roles"] if r != "device"] for m in buf.members())
        assert roles == [["collector", "reader"], ["creator", "collector"]] and all(m["alive"] for m in buf.members())
    assert len(buf.members()) == 1
    assert [c["state"] for c in buf.collectors()] in (["alive", "closed"], ["alive"])


def test_stats_tell_how_full_the_rings_are(make):
    def fill_of(buf):
        return buf.stats()["ring_used_bytes"], buf.stats()["ring_fill"]

    assert fill_of(make(schema=None)) == (0, 0.0)
    buf = make()
    assert fill_of(buf) == (0, 0.0)
    buf.put(rows(0))
    with Buffer.attach(buf.name) as other, Buffer.attach(buf.name, readonly=True) as onlooker:
        for k in range(3):
            other.put(rows(k))
        for b in (buf, other, onlooker):
            assert fill_of(b) == (4 * RECORD, 3 * RECORD / RING), "the sum, and the fullest"
        buf.drain()
        assert fill_of(onlooker) == (0, 0.0)


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
