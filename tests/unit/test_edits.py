"""Rows changed where they lie, by id: what an edit sets, whom it reaches, what it leaves alone."""

import numpy as np
import pytest

from shmbuf import Buffer, CommitPending, Queue, RingFull, SchemaError
from shmbuf._extension import native
from tests.unit.helpers import SMALL, SPEC, figures, k, numbers, rows, same, stored, stuck_drainer


@pytest.fixture
def buf(make):
    """Capacity 100, rows 30 to 129; ids are the numbers in k."""
    buf = make(100, schema=SPEC, drain="caller", ring_bytes=4096, max_collectors=4)
    for first in range(0, 130, 10):
        buf.extend(rows(first, 10))
    return buf


def test_some_keys_of_some_rows_and_nothing_else(buf):
    before, other = stored(buf), Buffer.attach(buf.name)
    new = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.float32)
    assert other.edit([31, 129, 77], {"next": {"obs": new}}).tolist() == [True] * 3
    expected = {**before, "next": {**before["next"], "obs": before["next"]["obs"].copy()}}
    expected["next"]["obs"][[1, 99, 47]] = new
    assert same(stored(buf), expected)
    assert (buf.write_count, buf.window, len(buf)) == (130, (30, 130), 100)
    assert buf.stats()["edited_rows"] == 3 and not buf.check()["findings"]
    other.close()


def test_of_an_id_named_twice_the_last_stays(buf):
    assert buf.edit([50, 51, 50], k(1, 2, 3)).all()
    assert buf.gather([50, 51])["k"].tolist() == [3, 2]


def test_a_row_that_was_overwritten_is_left_out_and_counted(buf):
    before = stored(buf)
    assert buf.edit([29, 30, 0], k(-1, -2, -3)).tolist() == [False, True, False]
    assert buf.stats()["stale_edits"] == 2
    assert numbers(buf) == [-2, *before["k"][1:].tolist()], "slot 29 holds row 129, which is another one"


def test_rows_put_before_are_found_and_rows_put_meanwhile_are_not_hit(make):
    buf = make(4, **SMALL)
    ids = buf.extend(k(0, 1, 2, 3))
    ticket = buf.put(k(4, 5))  # lies in the ring, before the edit: row 0 and 1 are gone when that is made
    edit = buf.put_edit(ids, k(10, 11, 12, 13))
    assert not ticket.done() and not edit.done()
    assert edit.wait().tolist() == [False, False, True, True] and ticket.wait().tolist() == [4, 5]
    assert numbers(buf) == [12, 13, 4, 5]
    assert repr(edit).startswith("EditTicket(4 rows, done")


def test_an_emptied_row_is_stale(buf):
    buf.empty()
    assert buf.edit([129], k(7)).tolist() == [False]


def test_larger_than_the_ring(make):
    buf = make(5000, **SMALL)
    ids = np.concatenate([buf.extend(k(*range(n, n + 100))) for n in range(0, 5000, 100)])
    assert buf.edit(ids, k(*range(5000, 0, -1))).all()
    assert numbers(buf) == list(range(5000, 0, -1))


def test_priorities_and_trajectories_stay(make):
    buf = make(50, schema={"k": "int64", "done": "bool"}, end_keys="done", trajectories=True, drain="caller")
    buf.keep_priorities(1.0, 0.0)
    ids = buf.extend({"k": np.arange(10), "done": np.arange(10) == 4}, priorities=np.arange(10) + 1.0)
    spans = buf.trajectories()
    buf.edit(ids, {"k": np.zeros(10, np.int64), "done": np.zeros(10, bool)})
    assert buf.priorities(ids).tolist() == list(range(1, 11)) and buf.trajectories() == spans
    assert not buf.gather(ids)["done"].any()


def test_no_limiter_holds_it_up_and_what_came_before_it_comes_first(make):
    buf = make(1000, **SMALL)
    buf.set_limiter(Queue(2))
    ids = buf.extend(k(0, 1))
    waiting = buf.put(k(2))
    assert not buf.drain() and not waiting.done()
    assert buf.edit(ids, k(7, 8)).all()
    assert numbers(buf) == [7, 8, 2]


def test_while_the_drainer_is_stuck_it_waits_and_says_for_whom(buf):
    before = figures(buf)
    with stuck_drainer(buf.name):
        with pytest.raises(CommitPending, match="holds the writer role") as e:
            buf.edit([40], k(-1), timeout=0.05)
        assert figures(buf)["edited_rows"] == before["edited_rows"]
        assert buf.gather([40])["k"] == 40
        with pytest.raises((RingFull, CommitPending), match=r"no room"):
            for _ in range(1000):
                buf.put_edit([40], k(-2), timeout=0.01)
    assert e.value.ticket.wait(20).tolist() == [True]
    buf.drain()
    assert buf.gather([40])["k"] == -2


@pytest.mark.parametrize(
    ("ids", "new", "error", "text"),
    [
        (
            [130],
            {"k": np.zeros(1, np.int64)},
            IndexError,
            r"ids\[0\] = 130: no such row has been stored; stored now: 30 to 129",
        ),
        ([40, -1], {"k": np.zeros(2, np.int64)}, IndexError, r"ids\[1\] = -1"),
        ([40], {"k": np.zeros(2, np.int64)}, SchemaError, r"'k': got int64\[2\], expected int64\[1\]"),
        ([40], {"k": np.zeros(1, np.int32)}, SchemaError, r"'k': got int32\[1\], expected int64\[1\]"),
        ([40], {"z": np.zeros(1)}, SchemaError, "'z': not in the schema"),
        (
            [40],
            {"next": {"obs": np.zeros((1, 3), "f4")}, "k": [1.5]},
            SchemaError,
            r"(?s)float32\[1, 3\].*'k': got float64",
        ),
        ([40], [1], SchemaError, "a mapping of key to array, not list"),
        ([1.5], {"k": np.zeros(1, np.int64)}, (TypeError, ValueError), "float64"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(buf, ids, new, error, text):
    before, content = figures(buf), stored(buf)
    with pytest.raises(error, match=text):
        buf.edit(ids, new)
    assert figures(buf) == before and same(stored(buf), content)


def test_of_no_rows_or_no_keys_nothing_happens(buf):
    before = figures(buf)
    assert buf.edit([], {"k": np.zeros(0, np.int64)}).tolist() == []
    assert buf.edit([40], {}).tolist() == []
    assert figures(buf) == before


def test_a_read_only_handle_may_not(buf):
    reader = Buffer.attach(buf.name, readonly=True)
    with pytest.raises(PermissionError):
        reader.edit([40], k(1))
    reader.close()


def test_a_row_too_long_for_the_ring_is_refused_with_the_remedy(make):
    buf = make(10, schema={"a": ("uint8", (1900,)), "b": ("uint8", (100,))}, drain="caller", ring_bytes=4096)
    buf.extend({"a": np.zeros((1, 1900), "u1"), "b": np.zeros((1, 100), "u1")})
    assert buf.edit([0], {"b": np.ones((1, 100), "u1")}).all()
    assert buf.edit([0], {"a": np.ones((1, 1900), "u1")}).all()


def test_a_pinned_row_may_be_edited_and_its_pin_says_so(buf):
    with buf.pin(seconds=None) as pin:
        assert pin.valid
        buf.edit([50], k(-1))
        assert not pin.valid
        pin.release()
    with buf.pin(120, seconds=None) as pin:
        buf.edit([50], k(-2))
        assert pin.valid, "another stripe"


def test_a_restart_says_where_ids_go_on(make):
    buf = make(10, **SMALL)
    other = Buffer.attach(buf.name)
    assert buf._restart(1234, write_count=99) == 1234
    assert (len(buf), buf.write_count, other.window) == (0, 99, (1234, 1234))
    assert other.extend(k(*range(13))).tolist() == list(range(1234, 1247))
    assert numbers(buf) == list(range(3, 13)) and buf.write_count == 112 and not buf.check()["findings"]
    for wrong in ({"first_id": -1}, {"first_id": 2**61}, {"first_id": 0, "write_count": 2**61}):
        with pytest.raises(ValueError, match="numbers up to 2305841909702066176"):
            buf._restart(**{"write_count": 0, **wrong})
    assert len(buf) == 10
    other.put(k(5))  # another's, which comes first
    assert buf._restart(1247, write_count=3) == 1257 and (len(buf), buf.write_count) == (0, 3), (
        "the same slot, next time"
    )
    assert buf._restart(0, write_count=4) == 1260 and buf.write_count == 4
    assert buf._restart(native.MAX_ID, write_count=native.MAX_ID) == native.MAX_ID
    assert other.extend(k(*range(25))).tolist() == list(range(native.MAX_ID, native.MAX_ID + 25))
    assert numbers(buf) == list(range(15, 25)) and not buf.check()["findings"]
    buf.empty()
    assert buf.window[1] % 10 == 0 and buf.window[1] > native.MAX_ID
    other.close()


def test_arrays_as_they_are_stored_and_others_are_edited_alike(make):
    schema = {"a": ("float32", (2,)), "b": "int64", "next": {"a": ("float32", (2,))}}
    plain, like = make(8, schema=schema, drain="caller"), make(8, schema=schema, drain="caller")
    first = {"a": np.zeros((12, 2), "f4"), "b": np.arange(12), "next": {"a": np.ones((12, 2), "f4")}}
    for b in (plain, like):
        b.extend(first)
    ids = np.array([4, 11, 3, 4], np.int64)  # 3 is gone, 4 comes twice
    new = np.arange(8, dtype="f4").reshape(4, 2)
    mapping = {"a": new[:, ::-1].copy()[:, ::-1], ("next", "a"): np.repeat(new, 2, 0)[::2], "b": np.arange(4)}
    assert plain.edit(ids, {k: np.ascontiguousarray(v) for k, v in mapping.items()}).tolist() == [
        True,
        True,
        False,
        True,
    ]
    nested = {"a": mapping["a"].tolist(), "b": mapping["b"].tolist(), "next": {"a": mapping["next", "a"].tolist()}}
    as_stored = {
        "a": np.array(nested["a"], ">f4"),
        "b": mapping["b"],
        "next": {"a": np.array(nested["next"]["a"], "f4")},
    }
    assert like.edit(ids.tolist(), as_stored).tolist() == [True, True, False, True]
    assert same(stored(plain), stored(like)) and plain.stats()["stale_edits"] == 1
    for wrong in (ids.astype(np.int32), ids[::2][:2], ids[:, None]):
        plain.edit(wrong, {"b": np.zeros(wrong.size, np.int64)})
    with pytest.raises(SchemaError, match="given twice"):
        plain.edit(ids, {"b": np.zeros(4, np.int64), ("b",): np.zeros(4, np.int64)})
    with pytest.raises(SchemaError, match="mask"):
        plain.edit(ids, {"b": np.ma.masked_array(np.zeros(4, np.int64), [0, 1, 0, 0])})
