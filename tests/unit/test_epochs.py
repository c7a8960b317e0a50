"""Drawing without replacement, consuming, newest first: what a batch holds, at the numpy and the TensorDict level."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

import shmbuf
from shmbuf import (
    Buffer,
    ConsumingSampler,
    Lapped,
    NotEnoughRows,
    RateLimiter,
    StorageLost,
)
from tests.unit.helpers import k, rows, stuck_drainer


def take(reader, n: int, batches: int = 1, **kw) -> list[list[int]]:
    return [reader.draw(n, **kw)[1].tolist() for _ in range(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for b in batches for i in b]


@pytest.fixture
def ten(make) -> Buffer:
    buf = make(10, schema={"k": "int64"})
    buf.extend(k(*range(10)))
    return buf


# ---- epochs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_batches_of_4_from_10_rows_are_4_4_2(ten, shared):
    reader = ten.epoch(shared=shared, seed=1)
    for _ in range(3):
        ran_out, batches = [], []
        for _ in range(3):
            batches += take(reader, 4)
            ran_out.append(reader.ran_out)
        assert [len(b) for b in batches] == [4, 4, 2] and ran_out == [False, False, True]
        assert sorted(flat(batches)) == list(range(10))


@pytest.mark.parametrize("shared", [False, True])
def test_drop_last_gives_whole_batches_only(ten, shared):
    reader = ten.epoch(shared=shared, drop_last=True, seed=1)
    for _ in range(5):
        first, second = take(reader, 4, 2)
        assert len(first) == len(second) == 4 and not {*first} & {*second} and reader.ran_out


def test_epochs_have_different_orders_and_rows_equal_chances(make):
    buf = make(5, schema={"k": "int64"})
    buf.extend(k(*range(5)))
    reader, counts = buf.epoch(seed=7), {}
    for _ in range(6000):
        order = tuple(flat(take(reader, 5)))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 120
    chi = sum((c - 50) ** 2 / 50 for c in counts.values())
    assert chi < 119 + 8 * (2 * 119) ** 0.5, chi


@pytest.mark.parametrize("shared", [False, True])
def test_without_shuffle_the_oldest_come_first(ten, shared):
    reader = ten.epoch(shared=shared, shuffle=False)
    assert take(reader, 4, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_a_new_row_enters_the_next_epoch_and_an_overwritten_one_is_passed_over(ten):
    reader = ten.epoch(shuffle=False)
    assert take(reader, 3) == [[0, 1, 2]]
    ten.extend(k(10, 11, 12, 13, 14))  # 0 to 4 are gone
    assert take(reader, 3) == [[5, 6, 7]], "3 and 4 are replaced within the batch"
    assert take(reader, 3) == [[8, 9]] and reader.ran_out
    assert take(reader, 4, 3) == [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    ten.extend(k(*range(15, 40)))
    assert take(reader, 10) == [list(range(30, 40))], "an epoch that was overwritten whole is over"


def test_rows_that_were_replaced_keep_the_order(make):
    buf = make(20, schema={"k": "int64"})
    buf.extend(k(*range(20)))
    reader = buf.epoch(shuffle=False)
    claim, calls = reader._claim, []

    def slow(n, ids, of):  # rows are overwritten between the claim and the copy
        got = claim(n, ids, of)
        if not calls:
            buf.extend(k(20, 21, 22))
        calls.append(n)
        return got

    reader._claim = slow
    assert take(reader, 6) == [[3, 4, 5, 6, 7, 8]] and calls == [6, 3]
    assert take(reader, 20) == [list(range(9, 20))], "the new ones are of the next epoch"


def test_the_last_batch_shrinks_when_its_rows_vanish_and_an_empty_one_is_none(ten):
    reader = ten.epoch(shuffle=False)
    take(reader, 8)
    ten.extend(k(*range(10, 19)))  # of the epoch only 9 is left
    assert take(reader, 5) == [[9]]
    dropping = ten.epoch(shuffle=False, drop_last=True)
    assert take(dropping, 4) == [[9, 10, 11, 12]]
    ten.extend(k(*range(19, 24)))  # 9 to 13 are gone: 5 of the epoch are left
    assert take(dropping, 4) == [[14, 15, 16, 17]]
    ten.extend(k(*range(24, 28)))
    assert take(dropping, 4) == [[18, 19, 20, 21]]


def test_with_drop_last_replaced_rows_may_bring_the_end_nearer(ten):
    reader = ten.epoch(shuffle=False, drop_last=True)
    ten.extend(k(10))
    claim, calls = reader._claim, []

    def slow(n, ids, of):
        got = claim(n, ids, of)
        if not calls:
            ten.extend(k(11))
        calls.append(n)
        return got

    reader._claim = slow
    assert take(reader, 5) == [[2, 3, 4, 5, 6]] and reader.ran_out, "four rows are left, no batch"
    assert take(reader, 5) == [[2, 3, 4, 5, 6]], "the next epoch"


def overwriting(reader, *acts) -> None:
    """Does act i between the reader's i-th claim and its copy."""
    claim, todo = reader._claim, list(acts)

    def slow(*args):
        got = claim(*args)
        if todo and (act := todo.pop(0)):
            act()
        return got

    reader._claim = slow


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_ends_without_a_batch_is_told(ten, drop_last):
    reader = ten.epoch(shuffle=False, drop_last=drop_last)
    assert take(reader, 4) == [[0, 1, 2, 3]] and not reader.ran_out
    ten.extend(k(*range(10, 18 + 2 * (not drop_last))))  # of the epoch two rows are left, or none
    with pytest.raises(NotEnoughRows, match="has ended without another batch of 4"):
        reader.draw(4, into_next=False)
    assert reader.ran_out
    first = 8 if drop_last else 10
    assert take(reader, 4, 2) == [[first, *range(first + 1, first + 4)], [*range(first + 4, first + 8)]]
    assert reader.ran_out == drop_last
    if not drop_last:
        assert take(reader, 4) == [[18, 19]] and reader.ran_out
    take(reader, 4), ten.extend(k(*range(20, 34)))
    assert len(take(reader, 4)[0]) == 4 and reader.ran_out, "a plain draw goes on into the next epoch, and says so"
    assert len(take(reader, 4)[0]) == 4


def test_with_drop_last_what_a_whole_batch_leaves_replaces_overwritten_rows(ten):
    reader = ten.epoch(shuffle=False, drop_last=True)
    assert take(reader, 4) == [[0, 1, 2, 3]]
    overwriting(reader, lambda: ten.extend(k(*range(10, 16))))  # of 4 to 7, after them 8 and 9: less than a batch
    assert take(reader, 4) == [[6, 7, 8, 9]] and reader.ran_out
    assert take(reader, 4) == [[6, 7, 8, 9]] and not reader.ran_out, "the next epoch"


def test_an_emptied_buffer_ends_the_epoch_too(ten):
    reader = ten.epoch(shuffle=False)
    take(reader, 4), ten.empty()
    with pytest.raises(NotEnoughRows, match="has ended without another batch"):
        reader.draw(4, into_next=False)
    ten.extend(k(100, 101))
    assert len(take(reader, 4)[0]) == 2 and reader.ran_out


def test_the_end_of_a_shared_epoch_is_told_by_the_reader_that_met_it(ten):
    a, b = ten.epoch(shared=True, drop_last=True, shuffle=False), ten.epoch(shared=True, drop_last=True, shuffle=False)
    assert take(a, 4) == [[0, 1, 2, 3]]
    overwriting(b, lambda: ten.extend(k(*range(10, 17))))
    with pytest.raises(NotEnoughRows, match="has ended"):
        b.draw(4, into_next=False)
    assert b.ran_out and not a.ran_out
    assert take(a, 4) == [[7, 8, 9, 10]] and not a.ran_out


def test_one_timeout_for_all_that_a_draw_waits_for(make, monkeypatch):
    buf, given = make(10, schema={"k": "int64"}), []
    buf.extend(k(0, 1))
    slow = type(buf)._wait_schema
    monkeypatch.setattr(buf, "_wait_schema", lambda t: (time.sleep(0.2), slow(buf, t))[1], raising=False)
    acquire = buf.acquire_samples
    monkeypatch.setattr(buf, "acquire_samples", lambda n, t=0.0: (given.append(t), acquire(n, t))[1], raising=False)
    for draw in (buf.epoch(drop_last=True).draw, buf.newest):
        since = time.monotonic()
        with pytest.raises(NotEnoughRows):
            draw(5, timeout=0.3)
        assert time.monotonic() - since < 0.45 and given[-1] < 0.15
    reader = buf.consume()
    reader.draw(2), (since := time.monotonic())
    with pytest.raises(NotEnoughRows, match=r"within 0\.3 s"):
        reader.draw(2, timeout=0.3)
    assert time.monotonic() - since < 0.45 and given[-1] < 0.15


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_larger_than_the_buffer(ten, shared):
    dropping = ten.epoch(shared=shared, drop_last=True)
    with pytest.raises(
        ValueError, match=r"batch size \(11\) is greater than the number of stored rows \(10, capacity 10"
    ):
        dropping.draw(11)
    with pytest.raises(ValueError, match="11"):
        dropping.draw(11, timeout=None)  # it would wait for ever
    assert len(take(dropping, 10)[0]) == 10
    if not shared:
        assert len(take(ten.epoch(), 1000)[0]) == 10


def test_with_drop_last_a_timeout_waits_for_a_batch(make):
    buf = make(10, schema={"k": "int64"})
    buf.extend(k(0, 1, 2))
    reader = buf.epoch(drop_last=True)
    with pytest.raises(ValueError, match=r"stored rows \(3\)"):
        reader.draw(5)
    with pytest.raises(NotEnoughRows, match=r"holds 3 rows, 5 are needed"):
        reader.draw(5, timeout=0.05)
    t = threading.Timer(0.1, lambda: buf.extend(k(3, 4)))
    t.start()
    assert sorted(take(reader, 5, timeout=30)[0]) == [0, 1, 2, 3, 4]
    t.join()


def test_an_empty_buffer_and_an_emptied_one(make):
    buf = make(10, schema={"k": "int64"})
    reader, consuming = buf.epoch(), buf.consume()
    for draw in (reader.draw, consuming.draw, buf.newest):
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
            draw(3)
        with pytest.raises(ValueError, match="n=-1"):
            draw(-1)
    buf.extend(k(*range(8)))
    take(reader, 3), take(consuming, 3)
    buf.empty()
    for draw in (reader.draw, consuming.draw, buf.newest):
        with pytest.raises(NotEnoughRows):
            draw(3)
    buf.extend(k(100, 101, 102))
    for draw in (reader.draw, consuming.draw, buf.newest):
        assert sorted(draw(3)[0]["k"].tolist()) == [100, 101, 102], "nothing of before"


def test_before_the_first_rows_there_is_no_schema(make):
    buf = make(10, schema=None)
    with pytest.raises(NotEnoughRows):
        buf.epoch(shared=True).draw(2)
    assert buf.epoch(shared=True).draw(0, timeout=0)[1].tolist() == [] if buf.schema else True
    threading.Timer(0.1, lambda: buf.extend(k(5))).start()
    assert take(buf.epoch(shared=True), 4, timeout=30) == [[0]]


def test_two_readers_share_an_epoch_and_two_do_not(ten):
    other = Buffer.attach(ten.name)
    a, b = ten.epoch(shared=True), other.epoch(shared=True)
    batches = take(a, 3) + take(b, 3) + take(a, 3) + take(b, 3)
    assert sorted(flat(batches)) == list(range(10)) and b.ran_out and not a.ran_out
    c, d = ten.epoch(), other.epoch()
    assert sorted(flat(take(c, 5, 2))) == sorted(flat(take(d, 5, 2))) == list(range(10))
    other.close()


def test_who_shares_has_to_have_the_same_options(ten):
    ten.epoch(shared=True, seed=3)
    with pytest.raises(ValueError, match=r"chose drop_last=False, asked for drop_last=True"):
        ten.epoch(shared=True, seed=3, drop_last=True)
    with pytest.raises(
        ValueError, match=r"chose shuffle=True, drop_last=False, asked for shuffle=False, drop_last=True"
    ):
        ten.epoch(shared=True, seed=3, shuffle=False, drop_last=True)
    with pytest.raises(ValueError, match="chose another seed than 4"):
        ten.epoch(shared=True, seed=4)
    ten.consume(3)
    with pytest.raises(ValueError, match="chose max_sample_count=3, asked for max_sample_count=1"):
        ten.consume()
    with pytest.raises(ValueError, match="chose seed=None, asked for seed=1"):
        ten.consume(3, seed=1)
    ten.epoch(shared=True, seed=3), ten.consume(3)  # as before


def test_a_read_only_handle(ten):
    reader = Buffer.attach(ten.name, readonly=True)
    ten.consume()
    for shared in (reader.epoch(shared=True), reader.consume()):
        with pytest.raises(PermissionError, match="read-only handle cannot take rows"):
            shared.draw(3)
    own = reader.epoch()
    assert sorted(flat(take(own, 5, 2))) == list(range(10)) and reader.newest(2)[1].tolist() == [9, 8]
    reader.close()


def test_threads_of_one_reader_get_each_row_once_an_epoch(make):
    buf = make(40, schema={"k": "int64"})
    buf.extend(k(*range(40)))
    reader, got, interval = buf.epoch(), [], sys.getswitchinterval()

    def work():
        for _ in range(200):
            got.extend(take(reader, 10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert np.bincount(flat(got)).tolist() == [8 * 200 * 10 // 40] * 40


def test_same_seed_same_order(ten):
    twice = []
    for _ in range(2):
        ten.seed(5)
        twice.append(take(ten.epoch(), 4, 6))
    assert twice[0] == twice[1] and twice[0][:3] != twice[0][3:]
    assert take(ten.epoch(seed=8), 4, 6) == take(ten.epoch(seed=8), 4, 6) != take(ten.epoch(seed=9), 4, 6)
    assert take(ten.epoch(), 10) != take(ten.epoch(), 10)


def test_while_one_transaction_overwrites_everything_it_is_not_an_empty_buffer(ten):
    with stuck_drainer(ten.name):
        assert sorted(flat(take(ten.epoch(), 5, 2))) == list(range(10))


# ---- consuming -----------------------------------------------------------------------------------------------------


def test_each_row_is_consumed_once(ten):
    reader = ten.consume()
    assert sorted(flat(take(reader, 4, 2)) + flat(take(reader, 4))) == list(range(10)), "the last batch is shorter"
    assert reader.ran_out
    with pytest.raises(NotEnoughRows, match=r"no new rows: all 10 of buffer .* have been taken; timeout= waits"):
        reader.draw(1)
    ten.extend(k(10, 11))
    assert sorted(take(reader, 4)[0]) == [10, 11]
    with pytest.raises(NotEnoughRows, match=r"none came within 0\.05 s"):
        reader.draw(1, timeout=0.05)


@pytest.mark.parametrize("times", [2, 5])
def test_each_row_is_consumed_so_often(ten, times):
    reader = ten.consume(times)
    got = flat(take(reader, 3, 2))
    ten.extend(k(10, 11, 12, 13))  # the first four rows are overwritten; what was drawn of them is less
    while True:
        try:
            got += flat(take(reader, 7))
        except NotEnoughRows:
            break
    counts = np.bincount(got, minlength=14)
    assert (counts[4:] == times).all() and (counts[:4] <= times).all()


def test_a_batch_is_filled_across_windows_and_waits_for_the_rest(ten):
    reader = ten.consume(shuffle=False)
    assert take(reader, 6) == [[0, 1, 2, 3, 4, 5]]
    ten.extend(k(10, 11, 12))
    assert take(reader, 6) == [[6, 7, 8, 9, 10, 11]]
    t = threading.Timer(0.15, lambda: ten.extend(k(13, 14)))
    t.start()
    assert take(reader, 3, timeout=30) == [[12, 13, 14]]
    t.join()
    since = time.monotonic()
    ten.extend(k(15))
    assert take(reader, 3, timeout=0.1) == [[15]], "what was claimed is given, and not lost to the timeout"
    assert time.monotonic() - since >= 0.1


def test_rows_that_are_still_in_a_ring_are_new_too(ten):
    reader = ten.consume()
    take(reader, 10)
    ten.put(k(10, 11))
    assert ten.window == (0, 10) and sorted(take(reader, 4)[0]) == [10, 11]
    with stuck_drainer(ten.name):
        ten.put(k(12))
        with pytest.raises(NotEnoughRows):
            reader.draw(1)
    assert take(reader, 4) == [[12]]


def test_a_waiting_reader_hears_that_the_buffer_is_destroyed(make_name):
    buf = Buffer.create(make_name(), 10, schema={"k": "int64"})
    reader, heard = buf.consume(), []

    def wait():
        try:
            reader.draw(1, timeout=30)
        except StorageLost as e:
            heard.append(str(e))

    buf.extend(k(1))
    take(reader, 1)
    t = threading.Thread(target=wait)
    t.start()
    time.sleep(0.1)
    shmbuf.destroy(buf.name, force=True)
    t.join(10)
    buf.close()
    assert heard and "destroyed" in heard[0]


@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (65_537, ValueError), (True, TypeError), (1.5, TypeError)])
def test_bad_counts(ten, bad, error):
    with pytest.raises(error, match=f"max_sample_count={bad}"):
        ten.consume(bad)
    with pytest.raises(error, match=f"max_sample_count={bad}"):
        ConsumingSampler(bad)
    with pytest.raises(TypeError, match="seed='x'"):
        ten.epoch(seed="x")


# ---- newest --------------------------------------------------------------------------------------------------------


def test_the_newest_first(ten):
    assert ten.newest(3)[0]["k"].tolist() == [9, 8, 7]
    ten.extend(k(10))
    got, ids = ten.newest(10)
    assert ids.tolist() == got["k"].tolist() == list(range(10, 0, -1))
    with pytest.raises(ValueError, match="n=11"):
        ten.newest(11)
    assert ten.newest(0)[1].tolist() == []


def test_the_newest_of_too_few(make):
    buf = make(10, schema={"k": "int64"})
    buf.extend(k(0, 1))
    with pytest.raises(NotEnoughRows, match="holds 2 rows, 3 are needed"):
        buf.newest(3)


# ---- the limiter counts what was drawn -----------------------------------------------------------------------------


def test_a_short_batch_gives_the_rest_back(ten):
    ten.set_limiter(RateLimiter(4.0, error_buffer=1000))
    take(ten.epoch(), 64)
    assert ten.limiter_state()["sampled"] == 10
    reader = ten.consume()
    take(reader, 64)
    with pytest.raises(NotEnoughRows):
        reader.draw(5)
    assert ten.limiter_state()["sampled"] == 20


def test_both_words_for_the_count():
    assert ConsumingSampler(max_times_sampled=4).max_sample_count == ConsumingSampler(4).max_times_sampled == 4
    with pytest.raises(TypeError, match="not both"):
        ConsumingSampler(3, max_times_sampled=2)


def test_rows_overwritten_all_the_time_are_lapped(ten):
    reader = ten.epoch()
    claim = reader._claim

    def overwritten(n, ids, of):
        got = claim(n, ids, of)
        ten.extend(k(*range(10)))
        return got

    reader._claim = overwritten
    with pytest.raises(Lapped, match="overwritten faster than they are copied"):
        reader.draw(4)


def test_rows_are_whole(make):
    buf = make(100)
    buf.extend(rows(0, 100))
    got, ids = buf.epoch().draw(64)
    assert (got["obs"][:, 0] == 8 * ids).all() and (got["next"]["obs"] == got["obs"] + 4).all()


def test_a_fork_child_begins_an_epoch_of_its_own(make):
    import os

    buf = make(1000, schema={"k": "int64"})
    buf.extend({"k": np.arange(1000)})
    epoch = buf.epoch()
    epoch.draw(10)
    ids = []
    for _ in range(2):
        r, w = os.pipe()
        if not (pid := os.fork()):
            os.write(w, epoch.draw(50)[1].tobytes())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        ids.append(np.frombuffer(os.read(r, 4000), np.int64).tolist())
        os.close(r), os.close(w)
    assert ids[0] != ids[1] and len(set(ids[0])) == len(set(ids[1])) == 50
