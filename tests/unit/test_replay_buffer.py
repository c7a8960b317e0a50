"""The faces TorchRL users know, in one process: what they store, sample and wait for."""

from __future__ import annotations

import inspect
import re
import threading
import time

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    CommitPending,
    MinSize,
    NotEnoughRows,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    RingFull,
    SchemaError,
    ShmStorage,
    TensorDictReplayBuffer,
)
from shmbuf.samplers import SAMPLERS
from tests.unit.helpers import stuck_drainer, unmoved
from tests.unit.helpers_torch import SPEC, rows, same

FACES = [ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer]


# ---- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("schema", [SPEC, None])
def test_extend_put_add_return_the_rows_indices(make_rb, face, schema):
    rb = make_rb(10, face, schema=schema)
    indices = rb.extend(rows(0, 4))
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2, 3]
    ticket = rb.put(rows(4, 3))
    assert ticket.rows == 3 and len(rb) == 4
    indices = ticket.wait()
    assert indices.dtype == torch.int64 and indices.tolist() == [4, 5, 6]
    index = rb.add(rows(7, None))
    assert type(index) is int and index == 7
    assert rb.extend(rows(8, 4)).tolist() == [8, 9, 0, 1], "slots, as in TorchRL"
    assert (len(rb), rb.write_count) == (10, 12)
    assert rb["k"].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("capacity", "n"), [(4, 10), (7, 8), (7, 14), (10, 1000)])
def test_extend_larger_than_the_capacity(make_rb, capacity, n):
    rb = make_rb(capacity)
    assert rb.extend(rows(0, n)).tolist() == [i % capacity for i in range(n)], "every index is returned"
    assert (len(rb), rb.write_count) == (capacity, n)
    reference = torch.zeros(capacity, dtype=torch.int64)
    for i in range(n):
        reference[i % capacity] = i
    assert rb["k"].tolist() == reference.tolist(), "the last rows win"


def test_a_list_of_rows_is_stacked(rb):
    assert rb.extend([rows(k, None) for k in range(5)]).tolist() == [0, 1, 2, 3, 4]
    assert rb.put((rows(5, None), rows(6, None))).wait().tolist() == [5, 6]
    assert same(rb[:], rows(0, 7))
    with unmoved(rb.buffer):
        assert rb.extend([]).tolist() == [] and rb.put([]).rows == 0


def test_a_sample_can_be_stored_again(rb):
    rb.extend(rows(0, 5))
    batch = rb.sample(20)
    batch["priority_weight"] = torch.ones(20)
    assert rb.extend(batch).tolist() == list(range(5, 25))
    assert rb["k"][5:].tolist() == batch["k"].tolist() and sorted(rb[0].keys()) == ["k", "next", "obs"]


def test_a_sample_as_the_first_rows_does_not_make_its_index_a_column(rb, make_rb):
    rb.extend(rows(0, 5))
    other = make_rb(schema=None)
    other.extend(rb.sample(6))
    assert sorted(other[0].keys()) == ["k", "next", "obs"]


def test_index_is_stored_if_the_schema_has_it(make_rb):
    rb = make_rb(schema={"index": torch.int64, "x": torch.float32})
    rb.extend(TensorDict({"index": torch.tensor([7, 8]), "x": torch.zeros(2)}, [2]))
    assert rb["index"].tolist() == [7, 8]
    with pytest.raises(SchemaError, match="key 'index' is missing"):
        rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))


def test_the_priority_key_is_exempt_from_the_key_check(make_name):
    for key, given in (("td_error", "td_error"), ("prio", "prio"), (("agent", "prio"), ("agent", "prio"))):
        with TensorDictReplayBuffer(
            storage=ShmStorage(100, name=make_name(), schema=SPEC, drain="caller"), priority_key=key
        ) as rb:
            td = rows(0, 3)
            td[given] = torch.ones(3)
            rb.extend(td)
            assert sorted(rb[0].keys()) == ["k", "next", "obs"], "stored if and only if the schema has it"
            td["other"] = torch.ones(3)
            with pytest.raises(SchemaError, match="key 'other' is not in the schema, got float32"), unmoved(rb.buffer):
                rb.extend(td)


def test_rows_are_copied_in_and_out(rb):
    td = rows(0, 3)
    ticket = rb.put(td)
    td["obs"].fill_(-1)
    ticket.wait()
    for got in (rb.sample(5), rb[0], rb[:], rb[[0, 1]], rb["obs"]):
        (got if isinstance(got, torch.Tensor) else got["obs"]).fill_(9)
    assert same(rb[:], rows(0, 3))


def test_empty(rb):
    rb.extend(rows(0, 30))
    rb.empty()
    assert (len(rb), rb.write_count, rb.initialized) == (0, 0, True)
    assert rb.extend(rows(50, 3)).tolist() == [0, 1, 2], "indices start again at 0"
    assert rb.sample(10)["row_id"].min() >= 100, "ids never repeat"
    rb.empty(empty_write_count=False)
    assert (len(rb), rb.write_count) == (0, 3)


# ---- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_sample(make_rb, face):
    rb = make_rb(10, face, batch_size=7)
    rb.extend(rows(0, 14))
    td = rb.sample()
    assert td.batch_size == torch.Size([7]) and td["next"].batch_size == torch.Size([7])
    assert (
        sorted(td.keys()) == ["index", "k", "next", "obs", "row_id"]
        and td["index"].dtype == td["row_id"].dtype == torch.int64
    )
    td = rb.sample(3000)
    assert (
        (td["row_id"] == td["k"]).all()
        and (td["index"] == td["k"] % 10).all()
        and set(td["k"].tolist()) == set(range(4, 14))
    )
    reference = rows(0, 14)[td["k"]]
    assert same(td.exclude("index", "row_id"), reference)
    assert rb.sample(0).batch_size == torch.Size([0]) and rb.batch_size == 7


def test_samples_are_uniform(make_rb):
    rb = make_rb(50)
    rb.extend(rows(0, 70))
    counts = torch.bincount(rb.sample(50_000)["index"], minlength=50)
    assert (abs(counts - 1000) < 8 * 1000**0.5).all(), "eight standard deviations"


@pytest.mark.parametrize("n", [-1, 1.5, "4", True, [4]])
def test_a_batch_size_that_is_none(rb, n):
    rb.extend(rows(0, 3))
    with pytest.raises(ValueError, match="batch_size="):
        rb.sample(n)
    with pytest.raises(ValueError, match="batch_size="):
        TensorDictReplayBuffer(storage=ShmStorage(10), batch_size=n)


def test_no_batch_size_anywhere(rb):
    rb.extend(rows(0, 3))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        rb.sample()
    with pytest.raises(RuntimeError, match=r"Cannot iterate over the replay buffer. Batch_size was not specified"):
        next(iter(rb))


def test_iterating_samples_for_ever(make_rb):
    rb = make_rb(batch_size=4)
    rb.extend(rows(0, 3))
    for _, td in zip(range(5), rb, strict=False):
        assert td.batch_size == torch.Size([4])


def test_return_info_and_include_info_in_torchrls_orders(make_rb):
    """(batch_size, return_info, include_info); of Remote…: (batch_size, include_info, return_info)."""
    for face in (ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer):
        rb = make_rb(face=face)
        rb.extend(rows(0, 5))
        with_info = [
            ((True,), {}),
            ((), {"return_info": True}),
            ((), {"include_info": True}),
            ((False, True), {}),
            ((None, True), {}),
            ((), {"return_info": True, "include_info": False}),
        ]
        for args, kw in with_info:
            td, info = rb.sample(3, *args, **kw)
            assert (info["index"] == td["index"]).all() and (info["row_id"] == td["row_id"]).all()
        for args, kw in [
            ((), {}),
            ((False,), {}),
            ((False, False), {}),
            ((None, False), {}),
            ((), {"include_info": None}),
        ]:
            assert isinstance(rb.sample(3, *args, **kw), TensorDict)
    assert list(inspect.signature(RemoteTensorDictReplayBuffer.sample).parameters)[1:4] == [
        "batch_size",
        "include_info",
        "return_info",
    ]
    assert list(inspect.signature(TensorDictReplayBuffer.sample).parameters)[1:4] == [
        "batch_size",
        "return_info",
        "include_info",
    ]


# ---- an empty buffer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SPEC, None])
def test_sample_on_empty_raises_at_once_or_waits_as_told(make_rb, schema):
    rb = make_rb(schema=schema, batch_size=4)
    for timeout in (0, 0.02):
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"), unmoved(rb.buffer):
            rb.sample(timeout=timeout)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    with pytest.raises(ValueError, match="timeout"):
        rb.sample(timeout=-1)


@pytest.mark.parametrize("schema", [SPEC, None])
@pytest.mark.parametrize("same_handle", [True, False])
def test_a_waiting_sample_is_woken_by_another_threads_put(make_rb, schema, same_handle):
    rb = make_rb(schema=schema, batch_size=4)
    got: list = []
    thread = threading.Thread(target=lambda: got.append(rb.sample(timeout=None)))
    thread.start()
    other = rb if same_handle else shmbuf.attach(rb.name)
    other.put(rows(7, 1))
    thread.join(60)
    assert not thread.is_alive() and got and got[0]["k"].tolist() == [7] * 4
    other.close()


def test_wait_rows(rb):
    rb.put(rows(0, 3))
    rb.wait_rows(3, timeout=0)
    assert len(rb) == 3
    with pytest.raises(NotEnoughRows, match="holds 3 rows, 4 are needed"):
        rb.wait_rows(4, timeout=0.01)


def test_before_the_first_rows(make_rb):
    rb = make_rb(schema=None)
    assert (len(rb), rb.write_count, rb.initialized, rb.stats()["initialized"]) == (0, 0, False, False)
    for index in (0, slice(None), "k"):
        with pytest.raises(RuntimeError, match="non-initialized storage"):
            rb[index]
    rb.empty()
    rb.extend(rows(0, 2))
    assert rb.initialized and rb.buffer.schema.keys == (("obs",), ("next", "obs"), ("next", "done"), ("k",))


# ---- full rings ----------------------------------------------------------------------------------------------------


def test_a_timeout_says_how_many_rows_went_in_and_gives_a_ticket(rb):
    with stuck_drainer(rb.name):
        with pytest.raises(CommitPending, match="3 of 3 rows") as e:
            rb.extend(rows(0, 3), timeout=0)
        with pytest.raises(CommitPending) as large:
            rb.extend(rows(3, 5000), timeout=0.01)
        assert f"{large.value.rows:,} of 5,000 rows are in the ring" in str(large.value)
        with pytest.raises(RingFull) as full:
            rb.put(rows(0, 300), timeout=0)
        assert "300 rows of 48 bytes to put" in str(full.value)
    indices = e.value.ticket.wait()
    assert indices.dtype == torch.int64 and indices.tolist() == [0, 1, 2]
    assert large.value.ticket.wait().tolist() == [i % 100 for i in range(3, 3 + large.value.rows)]


def test_add_when_the_ring_is_full(make_rb):
    rb = make_rb(ring_bytes=4096)
    with stuck_drainer(rb.name):
        tickets = []
        with pytest.raises(RingFull):
            while True:
                tickets.append(rb.put(rows(len(tickets), 1), timeout=0))
        with pytest.raises(RingFull) as e:
            rb.add(rows(0, None), timeout=0)
        assert "Nothing was put" in str(e.value)
        assert re.search("1 rows? of 48 bytes to put", str(e.value)), str(e.value)
    assert rb.add(rows(len(tickets), None)) == len(tickets)


def test_add_of_a_row_that_the_drop_policy_takes(make_rb):
    rb = make_rb(ring_bytes=4096, full="drop_newest")
    with stuck_drainer(rb.name):
        while rb.put(rows(0, 1)).rows:
            pass
        assert rb.extend(rows(0, 3)).tolist() == []
        assert rb.add(rows(0, None)) is None
    assert rb.stats()["dropped_rows"] == 5


# ---- several threads ------------------------------------------------------------------------------------------------


def test_threads_share_one_face(make_rb):
    rb = make_rb(10_000)
    seen: list = []

    def write(who: int):
        for i in range(100):
            rb.extend(rows(1000 * who + i, 1))

    def read():
        for _ in range(100):
            td = rb.sample(20, timeout=None)
            seen.append(bool((td["next", "obs"] == td["obs"] + 4).all() and (td["obs"][:, 0] == 8 * td["k"]).all()))

    threads = [threading.Thread(target=write, args=(w,)) for w in range(3)] + [
        threading.Thread(target=read) for _ in range(2)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    k = rb["k"]
    for w in range(3):
        assert k[k // 1000 == w].tolist() == list(range(1000 * w, 1000 * w + 100)), (
            "each thread's rows, once and in order"
        )
    assert len(seen) == 200 and all(seen)


def test_stats_have_torchrls_keys_too(rb):
    rb.extend(rows(0, 30))
    s = rb.stats()
    assert {
        k: s[k] for k in ("size", "write_count", "capacity", "utilization", "prefetch_queue_size", "initialized")
    } == {
        "size": 30,
        "write_count": 30,
        "capacity": 100,
        "utilization": 0.3,
        "prefetch_queue_size": 0,
        "initialized": True,
    }


def test_repr_says_what_it_is(rb, make_rb):
    rb.extend(rows(0, 3))
    assert "3 of 100 rows" in repr(rb) and "RandomSampler" in repr(rb) and "float32[4]" in repr(rb)
    assert "no schema yet" in repr(make_rb(schema=None)) and "not made yet" in repr(ShmStorage(5))
    rb.close()
    assert "closed" in repr(rb)


@pytest.mark.parametrize("kind", SAMPLERS.values(), ids=SAMPLERS)
def test_who_samples_keeps_a_standby(name, kind):
    sampler = kind(slice_len=2) if "slice" in kind.name else kind()
    with TensorDictReplayBuffer(storage=ShmStorage(20, name=name), sampler=sampler) as rb:
        rb.extend(
            TensorDict({"policy_version": torch.zeros(8), "next": {"done": torch.zeros(8, 1, dtype=torch.bool)}}, [8])
        )
        assert not rb.buffer._standby
        rb.sample(4)
        assert rb.buffer._standby and any("reader" in m["roles"] for m in rb.buffer.members())


@pytest.mark.parametrize("kind", SAMPLERS.values(), ids=SAMPLERS)
def test_a_samples_waits_share_one_timeout(name, kind):
    """The limiter lets it through late; then there is no row."""
    sampler = kind(slice_len=2) if "slice" in kind.name else kind()
    schema = {"policy_version": torch.float32, "next": {"done": (torch.bool, (1,))}}
    with TensorDictReplayBuffer(
        storage=ShmStorage(20, name=name, schema=schema, drain="caller"), sampler=sampler, limiter=MinSize(5)
    ) as rb:
        threading.Timer(0.6, lambda: rb.set_limiter(None)).start()
        since = time.monotonic()
        with pytest.raises(NotEnoughRows):
            rb.sample(4, timeout=1.0)
        assert 0.9 < time.monotonic() - since < 1.5


def test_next_goes_on_after_it_found_no_rows(make_rb):
    rb = make_rb(10, batch_size=2)
    for _ in range(2):
        with pytest.raises(NotEnoughRows):
            rb.next()
    rb.extend(rows(0, 4))
    assert rb.next().batch_size == (2,)
