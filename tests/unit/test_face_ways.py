"""Every way of writing × every writer × transforms: rows that are held back, priorities that rows carry, streams."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from shmbuf import (
    ImmutableDatasetWriter,
    PrioritizedSampler,
    RingFull,
    SchemaError,
    ShmStorage,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from shmbuf.transforms import Compose, MultiStepTransform, Transform


class Through(Transform):
    def inv(self, td):
        return td


def made(capacity: int = 100, **kw) -> TensorDictReplayBuffer:
    storage = kw.pop("storage", {})
    return TensorDictReplayBuffer(storage=ShmStorage(capacity, **storage), batch_size=kw.pop("batch_size", 2), **kw)


def ranks(*values: float) -> TensorDict:
    return TensorDict({"r": torch.tensor(values, dtype=torch.float32)}, [len(values)])


def steps(*xs: int, done: tuple[int, ...] = (), **more) -> TensorDict:
    x = torch.tensor(xs).float()
    end = torch.tensor([[i in done] for i in xs])
    td = {"x": x, "next": {"x": x + 1, "reward": torch.ones(len(xs), 1), "done": end}, **more}
    return TensorDict(td, [len(xs)])


def pairs(rb) -> list[tuple[int, int]]:
    td = rb[:]
    return sorted(zip(td["x"].int().tolist(), td["next", "x"].int().tolist(), strict=True))


# ---- writers -------------------------------------------------------------------------------------------------------

WAYS = {"add": lambda rb, r: rb.add(ranks(r)[0]), "extend": lambda rb, r: rb.extend(ranks(r))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", [None, lambda td: td, Through()], ids=["none", "function", "inverse"])
def test_no_way_of_writing_goes_past_the_writer(way, transform):
    with made(4, writer=TensorDictMaxValueWriter("r"), transform=transform) as rb:
        rb.extend(ranks(10, 20, 30, 40))
        low, high = WAYS[way](rb, 1.0), WAYS[way](rb, 50.0)
        assert rb["r"].tolist() == [50, 20, 30, 40]
        assert (low, high) == (None, 0) if way == "add" else (low.tolist(), high.tolist()) == ([-1], [0])
        rb.set_writer(ImmutableDatasetWriter())
        with pytest.raises(RuntimeError, match="doesn't allow writing"):
            WAYS[way](rb, 99.0)
        assert rb["r"].tolist() == [50, 20, 30, 40]


@pytest.mark.parametrize("transform", [None, Through()], ids=["none", "inverse"])
def test_a_deciding_writer_takes_the_priorities_that_rows_carry(transform):
    with made(
        4,
        writer=TensorDictMaxValueWriter("r"),
        sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0),
        storage={"schema": {"r": ("float32", ())}},
        transform=transform,
    ) as rb:

        def priorities():
            return rb.buffer.priorities(range(len(rb))).tolist()

        rb.extend(ranks(10, 20, 30, 40).set("td_error", torch.tensor([1.0, 2.0, 3.0, 4.0])))
        assert priorities() == [1, 2, 3, 4]
        assert rb.extend(ranks(5, 100).set("td_error", torch.tensor([8.0, 7.0]))).tolist() == [-1, 0]
        assert priorities() == [7, 2, 3, 4]
        rb.extend(ranks(200).set("td_error", torch.tensor([5.0])), update_priority=False)
        assert priorities() == [7, 7, 3, 4]
        with pytest.raises(ValueError, match="priorities"):
            rb.extend(ranks(300).set("td_error", torch.tensor([float("nan")])))
        with pytest.raises(ValueError, match="do not follow each other"):
            rb.extend(ranks(300), stream=1)
        assert rb["r"].tolist() == [100, 200, 30, 40]


def test_a_large_buffer_of_the_best_rows_fills_without_a_look_at_its_free_slots(monkeypatch):
    from shmbuf import writers

    looked = []
    monkeypatch.setattr(writers, "range", lambda *a: looked.append(a) or range(*a), raising=False)
    with made(100_000, writer=TensorDictMaxValueWriter("r")) as rb:
        rb.extend(ranks(1, 2, 3))
        rb.add(ranks(4)[0])
        assert rb["r"].tolist() == [1, 2, 3, 4]
    assert looked and max(a[-1] for a in looked) <= 100


def prioritized() -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0)
    rb = made(4, writer=TensorDictMaxValueWriter("r"), sampler=sampler, batch_size=64)
    rb.extend(ranks(10, 20, 30, 40))
    return rb


def test_a_late_priority_does_not_reach_the_row_that_took_the_place():
    with prioritized() as rb:
        batch = rb.sample()
        assert set(batch["row_id"].tolist()) == {0, 1, 2, 3}
        rb.extend(ranks(100))
        batch["td_error"] = torch.full((64,), 777.0)
        rb.update_tensordict_priority(batch)
        assert rb.buffer.priorities(range(4)).tolist() == [1, 777, 777, 777]


def test_a_row_that_is_replaced_during_the_update_does_not_leave_its_priority(monkeypatch):
    with prioritized() as rb:
        batch = rb.sample()
        batch["td_error"] = torch.full((64,), 777.0)
        update, replaced = rb.update_priority, []

        def late(*args, **kw):
            if not replaced:
                replaced.append(rb.extend(ranks(100)))
            return update(*args, **kw)

        monkeypatch.setattr(rb, "update_priority", late)
        rb.update_tensordict_priority(batch)
        new_row = rb.buffer._get("priorities").get("new_row", 1.0)
        assert rb["r"][0] == 100 and rb.buffer.priorities(range(4)).tolist() == [new_row, 777, 777, 777]


def test_rows_that_were_replaced_are_no_trajectories():
    with made(6, sampler=SliceSampler(slice_len=3), writer=TensorDictMaxValueWriter("r"), batch_size=3) as rb:
        end = torch.tensor([0, 0, 1, 0, 0, 1]).bool()[:, None]
        rb.extend(ranks(1, 2, 3, 4, 5, 6).set("next", TensorDict({"done": end}, [6])))
        assert len(rb.sample()) == 3 and len(rb.query()) == 2
        rb.extend(ranks(9).set("next", TensorDict({"done": end[:1]}, [1])))
        for call in (rb.sample, rb.query):
            with pytest.raises(RuntimeError, match="there are no trajectories"):
                call()


# ---- rows that are held back -----------------------------------------------------------------------------------------


def test_rows_that_could_not_be_stored_are_neither_lost_nor_doubled():
    with made(transform=MultiStepTransform(2, 1.0)) as rb:
        rb.extend(steps(0, 1, 2))
        wrong = steps(3, 4, 5)
        wrong["x"] = wrong["x"].double()
        for _ in range(2):
            with pytest.raises(SchemaError):
                rb.extend(wrong)
        rb.extend(steps(3, 4, 5))
        rb.extend(steps(6, 7))
        assert pairs(rb) == [(i, i + 2) for i in range(6)]


def test_a_full_ring_keeps_what_is_held_back():
    storage = {"full": "error", "drain": "caller", "ring_bytes": 1 << 20}
    with made(2000, storage=storage, transform=MultiStepTransform(1, 1.0)) as rb:
        full, n = 0, 160
        for i in range(0, n, 4):
            td = steps(*range(i, i + 4), wide=torch.zeros(4, 4096))
            try:
                rb.put(td)
            except RingFull:
                full += 1
                rb.buffer.drain()
                rb.put(td)
        rb.buffer.drain()
        assert full and pairs(rb) == [(i, i + 1) for i in range(n - 1)]


def test_threads_hold_back_one_after_the_other():
    with made(2000, transform=MultiStepTransform(1, 1.0)) as rb:

        def go(k):
            for i in range(100):
                rb.extend(steps(k * 1000 + i))

        threads = [threading.Thread(target=go, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert len(rb) == 399 and len(rb["x"].unique()) == 399
        rb.flush()
        assert len(rb["x"].unique()) == 400


def test_each_stream_has_its_own_next_steps():
    with made(transform=MultiStepTransform(2, 1.0)) as rb:
        for i in range(4):
            rb.extend(steps(i), stream=0)
            rb.extend(steps(100 + i), stream=1)
        rb.extend(steps(4, 104, 5, 105), stream=torch.tensor([0, 1, 0, 1]))
        assert pairs(rb) == [(i, i + 2) for i in (0, 1, 2, 3, 100, 101, 102, 103)]
        rb.flush()
        assert pairs(rb)[4:6] == [(4, 6), (5, 6)] and pairs(rb)[-2:] == [(104, 106), (105, 106)]
        assert sorted(len(q) for q in rb.query()) == [6, 6]  # rows are of their streams


@pytest.mark.parametrize("key", ["episode", ("collector", "traj_ids")])
def test_each_trajectory_has_its_own_next_steps(key):
    with made(transform=MultiStepTransform(2, 1.0)) as rb:
        for i in range(0, 4, 2):
            td = steps(i, 100 + i, i + 1, 101 + i, done=(3, 103))
            rb.extend(td.set(key, torch.tensor([0, 1, 0, 1])))
        assert pairs(rb) == [(i, min(i - i % 100 + 4, i + 2)) for i in (0, 1, 2, 3, 100, 101, 102, 103)]
        assert not len(rb.flush())


def test_what_is_held_back_is_stored_by_flush_and_close(name):
    import shmbuf

    rb = made(
        storage={"name": name}, transform=Compose(Compose(MultiStepTransform(2, 1.0)), MultiStepTransform(1, 1.0))
    )
    other = shmbuf.attach(name)
    rb.extend(steps(0, 1, 2, 3))
    assert pairs(rb) == [(0, 2)]
    assert len(rb.flush()) == 3 and len(pairs(rb)) == 4 and not len(rb.flush())
    rb.extend(steps(10, 11))
    assert len(rb) == 4
    rb.close()
    assert [x for x, _ in pairs(other)] == [0, 1, 2, 3, 10, 11]
    other.destroy(force=True)


def test_what_flush_cannot_store_is_still_held():
    with made(
        2000, storage={"full": "error", "drain": "caller", "ring_bytes": 1 << 20}, transform=MultiStepTransform(1, 1.0)
    ) as rb:
        td = steps(0, 1, wide=torch.zeros(2, 4096))
        rb.put(td)
        full = rb.storage
        while True:
            try:
                full.put(rb.transform[0].pending()[0][0], True, 0.0)
            except RingFull:
                break
        with pytest.raises(RingFull):
            rb.flush(timeout=0.0)
        rb.buffer.drain()
        before = len(rb)
        assert len(rb.flush()) == 1 and len(rb) == before + 1


# ---- transforms ------------------------------------------------------------------------------------------------------


def test_a_factory_is_called_once_however_many_threads_come():
    calls, inside = [], threading.Event()

    def factory():
        calls.append(1)
        inside.wait(0.2)
        return Through()

    with made(transform_factory=factory) as rb:
        threads = [threading.Thread(target=lambda: rb.extend(ranks(1))) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert len(calls) == 1 and len(rb) == 4


def test_ids_are_put_back_only_on_rows_that_are_known_to_be_the_same():
    with made(4, batch_size=16) as rb:
        rb.extend(ranks(0, 1, 2, 3))
        rb.append_transform(lambda td: td.select("r"))
        batch = rb.sample()
        assert batch["row_id"].tolist() == batch["r"].int().tolist()
        rb.append_transform(lambda td: td[torch.arange(15, -1, -1)])
        batch, info = rb.sample(return_info=True)
        assert sorted(batch.keys()) == ["r"] and "row_id" in info


def test_looking_at_the_transforms_leaves_the_fast_path_on():
    with made(4) as rb:
        assert not len(rb.transform) and not rb._touched
        rb.extend(ranks(1, 2))
        rb.transform.append(lambda td: td.set("r", td["r"] + 10))
        assert sorted(set(rb.sample(64)["r"].tolist())) == [11, 12]
