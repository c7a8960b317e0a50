"""Batches drawn ahead: their order, their errors, their end."""

from __future__ import annotations

import gc
import pickle
import threading

import pytest
import torch

import shmbuf
from shmbuf import NotEnoughRows, SamplerWithoutReplacement, ShmStorage, TensorDictReplayBuffer
from tests.unit.helpers_torch import rows


@pytest.fixture
def ahead(make_name):
    made = []

    def make(depth: int = 3, batch_size: int = 4, capacity: int = 100, **kw):
        made.append(
            TensorDictReplayBuffer(
                storage=ShmStorage(capacity, name=make_name(), drain="caller"),
                batch_size=batch_size,
                prefetch=depth,
                **kw,
            )
        )
        return made[-1]

    yield make
    for rb in made:
        rb.close()


def test_the_same_seed_gives_the_same_batches_in_the_same_order(ahead):
    drawn = []
    for depth in (0, 1, 5):
        rb = ahead(depth, seed=7)
        rb.extend(rows(0, 60))
        drawn.append([rb.sample()["k"].tolist() for _ in range(12)])
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_pass_is_complete_and_ends_however_far_is_drawn_ahead(ahead, depth):
    rb = ahead(depth, sampler=SamplerWithoutReplacement())
    rb.extend(rows(0, 22))
    for _ in range(3):
        batches = [b["k"] for b in rb]
        assert [len(b) for b in batches] == [4, 4, 4, 4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(22))


def test_what_was_drawn_ahead_of_a_loop_that_was_left_comes_next(ahead):
    rb = ahead(2, sampler=SamplerWithoutReplacement(shuffle=False))
    rb.extend(rows(0, 24))
    got = []
    for b in rb:
        got.append(b["k"])
        if len(got) == 2:
            break
    got += [rb.sample()["k"] for _ in range(4)]
    assert torch.cat(got).tolist() == list(range(24)), "no row is lost"


def test_stats_and_synchronize(ahead):
    rb = ahead(3)
    assert rb.stats()["prefetch_queue_size"] == 0
    rb.extend(rows(0, 5))
    rb.sample()
    assert rb.stats()["prefetch_queue_size"] == 3
    rb.synchronize()
    rb.empty()
    assert rb.stats()["prefetch_queue_size"] == 0, "they are not what would be drawn now"


def test_batches_are_of_the_time_they_were_drawn(ahead):
    rb = ahead(2)
    rb.extend(rows(0, 1))
    rb.sample()
    rb.synchronize()
    rb.extend(rows(1, 99))
    assert [rb.sample()["k"].max() for _ in range(2)] == [0, 0]
    assert rb.sample(50)["k"].max() > 0, "another size is drawn now"


def test_an_empty_buffer_raises_or_waits_as_told(ahead):
    rb = ahead(3)
    for _ in range(2):
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
            rb.sample()
    got: list = []
    thread = threading.Thread(target=lambda: got.append(rb.sample(timeout=None)))
    thread.start()
    with shmbuf.attach(rb.name) as other:
        other.extend(rows(5, 1))
        thread.join(60)
    assert got and got[0]["k"].tolist() == [5] * 4
    assert rb.sample()["k"].tolist() == [5] * 4


def test_an_error_of_a_function_comes_with_its_batch(ahead):
    calls = []

    def collate(td):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the third")
        return td

    rb = ahead(1, collate_fn=collate)
    rb.extend(rows(0, 9))
    rb.sample(), rb.sample()
    with pytest.raises(ZeroDivisionError, match="the third"):
        rb.sample()
    assert len(rb.sample()) == 4


def test_return_info_is_of_the_batch_itself(ahead):
    rb = ahead(4)
    rb.extend(rows(0, 50))
    for _ in range(10):
        td, info = rb.sample(return_info=True)
        assert (info["row_id"] == td["k"]).all() and (info["index"] == td["index"]).all()


def test_handles_draw_ahead_where_they_arrive(ahead):
    rb = ahead(3)
    rb.extend(rows(0, 9))
    rb.sample()
    with pickle.loads(pickle.dumps(rb)) as other, shmbuf.attach(rb.name, prefetch=2) as named:
        for handle, depth in ((other, 3), (named, 2)):
            handle.sample(timeout=None)
            handle.sample()
            assert handle.stats()["prefetch_queue_size"] == depth
    with pytest.raises(ValueError, match="prefetch="):
        shmbuf.attach(rb.name, prefetch="2")


@pytest.mark.parametrize("end", ["shutdown", "close", "drop"])
def test_no_thread_is_left(ahead, end):
    before = threading.active_count()
    rb = ahead(3, collate_fn=lambda td: td)
    rb.extend(rows(0, 9))
    iterator = iter(rb)
    next(iterator)
    rb.sample()
    names = [t.name for t in threading.enumerate()]
    assert any(n.startswith("shmbuf-draw") for n in names)
    if end == "drop":
        threads = [t for t in threading.enumerate() if t.name.startswith("shmbuf-")]
        rb._ahead = None
        del iterator
        gc.collect()
        for t in threads:
            t.join(60)
    else:
        getattr(rb, end)()
        with pytest.raises((RuntimeError, ValueError)):
            rb.sample()
    assert not any(t.name.startswith("shmbuf-draw") for t in threading.enumerate())
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("drop", ["set_sampler", "append_transform", "close"])
def test_batches_that_are_dropped_are_given_back_to_the_limiter(ahead, make_name, drop):
    rb = ahead(3, limiter=shmbuf.RateLimiter(1.0, 1, error_buffer=(0, 1000)))
    rb.extend(rows(0, 60))
    other = shmbuf.attach(rb.name)
    rb.sample()
    rb.synchronize()
    assert other.buffer.limiter_state()["sampled"] == 16
    {
        "set_sampler": lambda: rb.set_sampler(shmbuf.NewestSampler()),
        "append_transform": lambda: rb.append_transform(lambda td: td),
        "close": rb.close,
    }[drop]()
    assert other.buffer.limiter_state()["sampled"] == 4
    other.close()


def test_where_no_thread_is_to_be_had_who_samples_draws(ahead, monkeypatch):
    def refuse(*args):
        raise RuntimeError("can't start new thread")

    rb = ahead(2)
    rb.extend(rows(0, 9))
    monkeypatch.setattr("shmbuf.face.prefetching._thread.start_new_thread", refuse)
    assert [len(rb.sample()) for _ in range(4)] == [4] * 4 and len(next(iter(rb))) == 4
    monkeypatch.undo()
    assert len(rb.sample()) == 4
