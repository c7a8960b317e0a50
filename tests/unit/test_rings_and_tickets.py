"""A full ring and every policy for it, and the tickets of what is in one, in one process. Everything is deterministic:
drain="caller", and a stuck drainer is a second handle that holds the writer role."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from shmbuf import Buffer, CommitInterrupted, CommitPending, RingFull, StorageLost
from tests.unit.helpers import FITS, RECORD, RING, ROW, WHOLE, figures, fill, numbers, rows, stuck_drainer

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
            with pytest.raises(CommitPending, match=r"not committed after 0\.0\d* s"):
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
    from shmbuf import Ticket

    def handler(signum, frame):
        if frame.f_code is Ticket.finish.__code__ and frame.f_lineno != frame.f_code.co_firstlineno:
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
