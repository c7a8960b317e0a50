"""The rate limiter in one process: its inequalities, what each side is told, and changes while somebody waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from shmbuf import Buffer, CommitPending, MinSize, NotEnoughRows, Queue, RateLimiter, RingFull
from shmbuf.limiter import scaled
from tests.unit.helpers import RING, SMALL, k, numbers, stuck_drainer


@pytest.fixture
def small(make):
    """A buffer of the column k, of 1000 rows."""

    def small(limiter=None, batch: int = 1, **kw) -> Buffer:
        buf = make(1000, **{**SMALL, **kw})
        if limiter is not None:
            buf.set_limiter(limiter, batch=batch)
        return buf

    return small


def fill(buf: Buffer, n: int, each: int = 1) -> int:
    """Puts of `each` rows, at most n rows, until one is not committed at once; rows stored before and now."""
    for _ in range(n // each):
        try:
            buf.extend(k(*range(each)), timeout=0)
        except CommitPending:
            break
    return buf.write_count


def admitted(buf: Buffer, n: int) -> None:
    """n rows that the limiter lets in, committed when it returns, whoever drains."""
    for _ in range(n):
        buf.extend(k(0))
    assert buf.write_count == n


def background(work) -> threading.Thread:
    t = threading.Thread(target=work, daemon=True)
    t.start()
    return t


def ended(t: threading.Thread) -> bool:
    t.join(30)
    return not t.is_alive()


# ---- the inequalities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spi", "inserts", "samples"), [(0.5, 20, 10), (1, 10, 10), (4, 2, 8), (2.5, 4, 10)])
def test_as_reverbs_inequalities_say(small, spi, inserts, samples):
    """diff = inserted * spi - sampled stays between min_diff and max_diff, whoever comes first."""
    error = 2 * max(1, spi)
    buf = small(RateLimiter(spi, min_size=1, error_buffer=error))
    low, high = spi - error, spi + error
    inserted = fill(buf, 1000)
    # a row is admitted while diff + spi <= max_diff; Reverb's can_insert, for one row
    assert inserted == int(high / spi) and buf.limiter_state()["writer_waits_for_samples"]
    sampled = 0
    for _ in range(50):
        try:
            while True:
                buf.draw(1)
                sampled += 1
        except NotEnoughRows:
            pass
        inserted = buf.write_count
        assert low <= inserted * spi - sampled <= high
        assert inserted * spi - sampled - 1 < low, "sampling stops only where one more would go below"
        inserted = fill(buf, 1000)
        assert low <= inserted * spi - sampled <= high
    assert inserted >= 50 and abs(inserted * spi - sampled) <= max(-low, high)


def test_nothing_is_sampled_before_min_size_and_everything_inserted(small):
    buf = small(RateLimiter(2.0, min_size=30, error_buffer=10))
    for n in range(29):
        assert fill(buf, 1) == n + 1
        with pytest.raises(
            NotEnoughRows, match=rf"inserted {n + 1} rows, sampling begins at 30: samplers wait for collectors"
        ):
            buf.draw(1)
    assert fill(buf, 1) == 30 and len(buf.draw(4)[1]) == 4
    assert fill(buf, 1000) == 37, "30 * 2 + 10 + 4 sampled, in rows"


def test_min_size_limits_nothing_else(small):
    buf = small(MinSize(5))
    fill(buf, 4)
    with pytest.raises(NotEnoughRows, match="sampling begins at 5"):
        buf.draw(1)
    assert fill(buf, 500) == 504
    for _ in range(10):
        buf.draw(900)
    assert buf.stats()["limiter"]["samplers_wait"] is False


@pytest.mark.parametrize("size", [1, 2, 50])
def test_queue_ping_pong(small, size):
    buf = small(Queue(size))
    sampled = 0
    for _ in range(5):
        assert fill(buf, 1000) == sampled + size  # and one more row waits in the ring
        with pytest.raises(NotEnoughRows, match="a row more would go below 0: samplers wait for collectors"):
            while True:
                buf.draw(1)
                sampled += 1
        assert sampled == buf.write_count


def test_a_record_may_overshoot_by_its_length(small):
    buf = small(Queue(10))
    assert fill(buf, 1000, each=7) == 14, "diff was 7 and a row more allowed: the record of 7 came in whole"
    assert buf.limiter_state()["diff"] == 14


# ---- who waits, and what he is told --------------------------------------------------------------------------------


def test_a_collector_is_told_that_samplers_are_awaited(small):
    buf = small(Queue(3), ring_bytes=RING)
    assert fill(buf, 10) == 3
    with pytest.raises(
        CommitPending, match=r"collectors wait for samplers: inserted 3 x 1 - sampled 0 = 3, and a row more"
    ):
        buf.extend(k(0), timeout=0.05)
    with pytest.raises(
        RingFull, match=r"no room.*collectors wait for samplers: inserted 3 x 1 - sampled 0 = 3.*Nothing was put"
    ):
        while True:
            buf.put(k(0), timeout=0)
    buf.set_limiter(None)
    buf.drain()
    assert len(buf) > 3 and buf.stats()["limiter"] is None
    assert buf.limiter is None


def test_who_waits_for_rows_that_are_held_up_is_told(small):
    buf = small(Queue(3))
    fill(buf, 10)
    with pytest.raises(
        NotEnoughRows, match=r"holds 3 rows, 5 are needed \(after 0\.05 s\); collectors wait for samplers"
    ):
        buf.wait_rows(5, 0.05)


def test_without_a_limiter_the_drainer_is_blamed(small):
    buf = small(MinSize(3), ring_bytes=RING)
    with stuck_drainer(buf.name), pytest.raises(RingFull, match="holds the writer role"):
        while True:
            buf.put(k(0), timeout=0)


def test_stats_say_who_waits(small):
    buf = small(RateLimiter(4.0, min_size=2, error_buffer=8))
    s = buf.stats()["limiter"]
    assert s["samplers_wait"] and not s["collectors_wait"]
    assert (s["samples_per_insert"], s["min_size"], s["min_diff"], s["max_diff"]) == (4.0, 2, 0.0, 16.0)
    fill(buf, 100)
    s = buf.stats()["limiter"]
    assert s["collectors_wait"] and not s["samplers_wait"] and "collectors wait for samplers" in s["text"]
    assert (s["inserted"], s["sampled"], s["diff"]) == (4, 0, 16.0)
    buf.draw(2)
    s = buf.stats()["limiter"]
    assert not s["samplers_wait"] and "inserted 4 x 4 - sampled 2 = 14" in s["text"]


def test_a_waiting_sampler_says_so_when_its_time_is_over(small):
    buf = small(Queue(5))
    since = time.monotonic()
    with pytest.raises(
        NotEnoughRows, match=r"lets no batch of 2 be sampled after 0\.1 s: inserted 0 rows, sampling begins at 1"
    ):
        buf.acquire_samples(2, 0.1)
    assert time.monotonic() - since >= 0.1
    fill(buf, 1)
    with pytest.raises(
        NotEnoughRows, match=r"timeout= waits: inserted 1 x 1 - sampled 0 = 1; 2 rows more would go below 0"
    ):
        buf.draw(2)


def test_a_batch_that_can_never_be_is_refused_at_once(small):
    buf = small(Queue(5))
    fill(buf, 5)
    since = time.monotonic()
    with pytest.raises(ValueError, match=r"a batch of 6 can never be sampled.*difference of 5.*below 0"):
        buf.draw(6, timeout=None)
    assert time.monotonic() - since < 5
    assert len(buf.draw(5)[1]) == 5


def test_a_draw_that_raises_gives_its_samples_back(small):
    buf = small(RateLimiter(1.0, error_buffer=10))
    fill(buf, 4)
    before = buf.limiter_state()
    with pytest.raises(RuntimeError, match="keeps no priorities"):
        buf.draw_by_priority(3)
    with pytest.raises(KeyError), buf.sampling(3, 0.0):
        raise KeyError
    assert buf.limiter_state() == before
    buf.draw(3)
    assert buf.limiter_state()["sampled"] == 3


def test_a_refund_frees_a_waiting_sampler(small):
    buf = small(Queue(4))
    other = Buffer.attach(buf.name)
    fill(buf, 4)
    buf.acquire_samples(3)
    t = background(lambda: other.draw(4, timeout=None))
    time.sleep(0.1)
    assert t.is_alive()
    buf.refund_samples(3)
    assert ended(t)
    other.close()


def test_a_read_only_handle(small):
    buf = small(Queue(4))
    fill(buf, 4)
    reader = Buffer.attach(buf.name, readonly=True)
    with pytest.raises(PermissionError, match="limiter, which counts samples"):
        reader.draw(1)
    with pytest.raises(PermissionError, match="cannot change the limiter"):
        reader.set_limiter(None)
    assert reader.limiter == Queue(4) and reader.stats()["limiter"]["collectors_wait"] is False
    assert reader.gather([0])["k"].tolist() == [0]
    buf.set_limiter(None)
    assert len(reader.draw(3)[1]) == 3
    reader.close()


def test_a_read_only_handle_that_finds_nothing_writes_nothing(make):
    """Its refund would wake a sampler, in memory that it must not write."""
    buf = make(10, schema={"k": "int64"}, drain="thread")
    reader = Buffer.attach(buf.name, readonly=True)
    t = background(lambda: buf.draw(1, timeout=None))
    for _ in range(50):
        with pytest.raises(NotEnoughRows):
            reader.draw(1)
        time.sleep(0.002)
    buf.extend(k(1))
    assert ended(t)
    reader.close()


# ---- changes -------------------------------------------------------------------------------------------------------


def test_a_change_frees_whichever_side_is_blocked(small):
    buf = small(Queue(2), drain="thread")
    admitted(buf, 2)
    other = Buffer.attach(buf.name)
    t = background(lambda: buf.extend(k(7, 8, 9), timeout=None))
    time.sleep(0.05)
    assert t.is_alive()
    other.set_limiter(Queue(5))
    assert ended(t) and buf.write_count == 5
    buf.draw(5)
    t = background(lambda: buf.draw(5, timeout=None))
    time.sleep(0.05)
    assert t.is_alive()
    other.set_limiter(None)
    assert ended(t)
    other.close()


def test_a_batch_that_waits_and_can_never_be_any_more_is_told(small):
    buf = small(Queue(10))
    heard = []

    def wait():
        try:
            buf.draw(8, timeout=None)
        except ValueError as e:
            heard.append(str(e))

    t = background(wait)
    time.sleep(0.05)
    Buffer.attach(buf.name).set_limiter(Queue(3))
    t.join(2)
    if t.is_alive():  # it waits on under limits that cannot be met: until they are changed again
        buf.set_limiter(None)
        buf.extend(k(1))
        assert ended(t)
    else:
        assert "can never be sampled" in heard[0]


def test_what_is_set_can_be_read_by_everybody(small):
    buf = small()
    other = Buffer.attach(buf.name)
    for limiter in (Queue(7), MinSize(3), RateLimiter(4.0, 2, (-100.0, 300.0)), None):
        buf.set_limiter(limiter)
        assert other.limiter == limiter
    buf.set_limiter(RateLimiter(0.5, error_buffer=20))
    assert other.limiter == RateLimiter(0.5, 1, (-19.5, 20.5))
    other.close()


@pytest.mark.parametrize("before", [None, MinSize(1), Queue(900)], ids=repr)
def test_set_in_a_full_buffer_it_counts_from_then_on(small, before):
    buf = small(before)
    buf.extend(k(*range(800)))
    buf.draw(100)
    buf.set_limiter(RateLimiter(4.0, min_size=500, error_buffer=32), batch=8)
    assert buf.limiter_state(0)["diff"] == 0
    assert fill(buf, 100) == 808, "error_buffer / 4 rows ahead, whatever came before"
    for _ in range(8):
        buf.draw(8)
    with pytest.raises(NotEnoughRows, match="since the limiter was set, = -28"):
        buf.draw(8)


def test_what_nobody_limited_does_not_count(small):
    """MinSize has the ratio of a Queue; samples drawn under it are no debt."""
    buf = small(MinSize(1))
    buf.extend(k(*range(10)))
    buf.draw(900)
    buf.set_limiter(Queue(50))
    assert buf.limiter_state()["diff"] == 0 and fill(buf, 100) == 60


def test_with_the_same_ratio_the_count_goes_on(small):
    buf = small(RateLimiter(2.0, min_size=1, error_buffer=16))
    fill(buf, 1000)
    assert buf.write_count == 9
    buf.set_limiter(RateLimiter(2.0, min_size=1, error_buffer=32))
    assert buf.limiter_state()["diff"] == 18 and fill(buf, 1000) == 17
    buf.set_limiter(RateLimiter(2.0, min_size=1, error_buffer=16))
    with pytest.raises(CommitPending):
        buf.extend(k(0), timeout=0)


def test_set_before_the_first_rows_and_before_the_schema(make):
    buf = make(100, schema=None)
    buf.set_limiter(RateLimiter(1.0, min_size=10, error_buffer=5))
    with pytest.raises(NotEnoughRows, match="inserted 0 rows, sampling begins at 10"):
        buf.acquire_samples(1)
    assert fill(buf, 100) == 15


def test_emptying_while_the_limiter_blocks(small):
    buf = small(Queue(3), drain="thread")
    admitted(buf, 3)
    ticket = buf.put(k(7))  # waits for samplers
    buf.empty(timeout=20)
    assert len(buf) == 0 and ticket.done()
    buf.set_limiter(None)
    buf.extend(k(5))
    assert numbers(buf) == [5]


# ---- no lost wake-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limiter", "each"), [(Queue(1), 1), (Queue(50), 7), (RateLimiter(4.0, error_buffer=16), 8)], ids=repr
)
@pytest.mark.parametrize("drain", ["thread", "caller"])
def test_each_side_blocks_and_is_woken_by_the_other(small, limiter, each, drain):
    """For ever with timeout=None: a wake-up that is lost hangs, and the test's time is over."""
    buf = small(limiter, drain=drain)
    spi = limiter.samples_per_insert if isinstance(limiter, RateLimiter) else 1
    total = 400
    samplers = [Buffer.attach(buf.name) for _ in range(2)]

    def collect():
        for i in range(total):
            buf.extend(k(i), timeout=None)

    def sample(reader):
        for _ in range(int(total * spi) // each // 2 - 10):
            reader.draw(each, timeout=None)

    threads = [background(collect), *(background(lambda r=r: sample(r)) for r in samplers)]
    assert all(ended(t) for t in threads[1:])
    buf.set_limiter(None)  # what the samplers left over
    assert ended(threads[0]) and buf.write_count == total
    for r in samplers:
        r.close()


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limiter", "text"),
    [
        (RateLimiter(0), "samples_per_insert=0"),
        (RateLimiter(-1.0), r"samples_per_insert=-1\.0"),
        (RateLimiter(float("nan")), "samples_per_insert=nan"),
        (RateLimiter("4"), "samples_per_insert='4'"),
        (RateLimiter(4.0, min_size=-1), "min_size=-1"),
        (RateLimiter(4.0, min_size=1.5), r"min_size=1\.5"),
        (RateLimiter(4.0, error_buffer=float("inf")), "error_buffer=inf"),
        (RateLimiter(4.0, error_buffer=(0.0, float("nan"))), r"error_buffer=\(0\.0, nan\)"),
        (RateLimiter(4.0, error_buffer=(0.0, 1.0, 2.0)), "error_buffer="),
        (RateLimiter(4.0, error_buffer=1e30), "out of range"),
        (RateLimiter(4.0, error_buffer=(10.0, -10.0)), "min_diff=10 is above max_diff=-10"),
        (RateLimiter(4.0, error_buffer=3.0), r"batch of 1\)"),
        (
            RateLimiter(4.0, min_size=100, error_buffer=(0.0, 300.0)),
            r"max_diff=300 is less than min_size \* samples_per_insert = 400",
        ),
        (MinSize(-1), "min_size=-1"),
        (MinSize("1"), "min_size='1'"),
        (Queue(0), "size=0"),
        (Queue(True), "size=True"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_and_nothing_changed(small, limiter, text):
    buf = small(Queue(7))
    with pytest.raises(ValueError, match=text):
        buf.set_limiter(limiter)
    assert buf.limiter == Queue(7)


def test_batches_that_do_not_fit_the_error_buffer():
    for limiter in (RateLimiter(1.0, error_buffer=64), Queue(100)):
        with pytest.raises(ValueError, match=r"batch of 256"):
            scaled(limiter, 256)
    scaled(RateLimiter(1.0), 256), scaled(RateLimiter(1.0), 10_000), scaled(Queue(256), 256)


def test_the_face_checks_its_batch_size_and_shows_the_limiter(make_name):
    import torch
    from tensordict import TensorDict

    import shmbuf

    name = make_name()
    with pytest.raises(ValueError, match="batch of 32"):
        shmbuf.ReplayBuffer(storage=shmbuf.ShmStorage(100, name=name), batch_size=32, limiter=Queue(16))
    with pytest.raises(shmbuf.BufferNotFound):
        shmbuf.attach(name)
    storage = shmbuf.ShmStorage(100, name=name, drain="caller")
    with shmbuf.ReplayBuffer(storage=storage, batch_size=8, limiter=Queue(16)) as rb:
        rb.extend(TensorDict({"x": torch.zeros(16)}, [16]))
        assert rb.limiter == Queue(16) and rb.stats()["limiter"]["diff"] == 16
        rb.sample(), rb.sample()
        with pytest.raises(NotEnoughRows, match="samplers wait for collectors"):
            rb.sample()
        with shmbuf.attach(name) as other:
            assert other.limiter == Queue(16)
            with pytest.raises(ValueError, match="batch of 8"):
                other.set_limiter(Queue(4))
            other.set_limiter(None)
        assert rb.limiter is None and len(rb.sample()) == 8
        rb.set_limiter(Queue(1000))
        shown = subprocess.run(
            [sys.executable, "-m", "shmbuf.cli", "show", name], capture_output=True, text=True, timeout=60
        ).stdout
        assert "1 samples an insert" in shown and "samplers wait for collectors" in shown
        rb.destroy()


def test_ratios_are_kept_as_fractions(small):
    buf = small(RateLimiter(1 / 3, min_size=1, error_buffer=3.0))
    state = buf.limiter_state()
    assert (state["num"], state["den"]) == (1, 3)
    for _ in range(300):
        fill(buf, 3)
        buf.draw(1)
    assert np.isclose(buf.limiter_state()["diff"], 0)


def test_a_change_is_one_step(small, monkeypatch):
    """Nobody may find the buffer without a limiter in between."""
    buf = small(MinSize(1))
    buf.extend(k(*range(10)))
    buf.draw(900)
    real, calls = buf._call, []
    monkeypatch.setattr(buf, "_call", lambda method, *a: (calls.append(method), real(method, *a))[1])
    buf.set_limiter(Queue(50))
    assert calls.count("set_limiter") == 1 and buf.limiter_state()["diff"] == 0


def test_what_is_left_of_a_timeout(small):
    buf = small(MinSize(1))
    fill(buf, 3)
    assert (
        buf.acquire_samples(1, 5.0) == 5.0 and buf.acquire_samples(1, 0) == 0 and buf.acquire_samples(1, None) is None
    )
    buf.set_limiter(MinSize(4))
    t = threading.Timer(0.3, lambda: fill(buf, 1))
    t.start()
    assert 0 < buf.acquire_samples(1, 20.0) < 19.8
    assert ended(t)


def test_a_refund_hides_no_error(small):
    buf = small(Queue(4))
    fill(buf, 4)
    with pytest.raises(KeyError), buf.sampling(3, 0.0):
        buf.close()
        raise KeyError
