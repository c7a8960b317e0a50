"""Who drains, several handles and threads on one buffer, pickles and ends, in one process."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from contextlib import suppress

import pytest

from shmbuf import (
    Buffer,
    BufferInUse,
    BufferNotFound,
    ConcurrentUse,
    RingFull,
    StorageLost,
    TooManyCollectors,
    destroy,
    failures,
    segment,
)
from tests.unit.helpers import FITS, SPEC, fill, numbers, rows, same, stored, stuck_drainer, unmoved

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


@pytest.mark.parametrize("drain", ["caller", "thread"])
def test_short_lived_collectors_use_each_others_rings(make, drain):
    buf = make(drain=drain)
    buf.extend(rows(0))
    for i in range(1, 30):
        with Buffer.attach(buf.name) as collector:
            collector.extend(rows(i))
    assert len(buf.collectors()) <= 3, "but for one that was still being drained"


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


def test_destroyed_is_known_to_every_handle(make):
    buf = make()
    with Buffer.attach(buf.name) as other, Buffer.attach(buf.name, readonly=True) as onlooker:
        assert [b.destroyed for b in (buf, other, onlooker)] == [False] * 3
        destroy(buf.name, force=True)
        assert [b.destroyed for b in (buf, other, onlooker)] == [True] * 3
    with pytest.raises(ValueError, match="closed"):
        other.destroyed  # noqa: B018


def test_a_handle_destroys_its_buffer_and_no_other_of_that_name(make, make_name):
    buf = make()
    with Buffer.attach(buf.name) as other:
        with pytest.raises(BufferInUse, match="is attached: this process"):
            buf.destroy()
        assert buf.closed and not other.destroyed
        with Buffer.attach(buf.name) as third:
            third.destroy(force=True)
            assert third.closed and third.destroyed and other.destroyed
            third.destroy()
        with pytest.raises(BufferNotFound):
            Buffer.attach(buf.name)
        with Buffer.create(buf.name, 5, schema=SPEC, drain="caller") as new:
            other.destroy(force=True)
            buf.destroy(force=True)
            assert not new.destroyed and len(Buffer.attach(buf.name)) == 0


def test_a_read_only_handle_destroys_nothing(buf):
    with Buffer.attach(buf.name, readonly=True) as onlooker:
        with pytest.raises(PermissionError, match="read-only"):
            onlooker.destroy(force=True)
        assert not onlooker.closed and not buf.destroyed


def test_an_unnamed_buffer_can_be_destroyed_too():
    with Buffer.create(None, 5, schema=SPEC, drain="caller") as buf:
        buf.destroy()
        assert buf.closed and buf.destroyed and buf.name not in segment.names()


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


def test_nothing_is_remembered_of_a_handle_that_ended(name):
    before = dict(failures.attached)
    with Buffer.create(name, 10, schema={"k": "int64"}) as buf:
        assert len(failures.attached) == len(before) + 1
        for _ in range(3):
            Buffer.attach(name).close()
        Buffer.attach(name)  # dropped unclosed
        gc.collect()
        buf.close()
    destroy(name)
    assert failures.attached == before
