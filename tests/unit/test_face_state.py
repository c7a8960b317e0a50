"""`state_dict` and `load_state_dict` of rows that are no TensorDicts of tensors, and of more dimensions than one."""

from __future__ import annotations

import io

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import shmbuf
from shmbuf import (
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    ShmStorage,
    SliceSampler,
    TensorDictReplayBuffer,
)
from shmbuf.transforms import Transform


def make(n: int, cls=ReplayBuffer, face=(), **kw):
    return cls(storage=ShmStorage(n, drain="caller", **kw), **{"batch_size": 3, **dict(face)})


def numbered(first: int, n: int) -> TensorDict:
    return TensorDict({"k": torch.arange(first, first + n)}, [n])


@pytest.mark.parametrize("stored", [3, 5, 8])
@pytest.mark.parametrize(
    "row",
    [
        lambda i: torch.tensor(i),
        lambda i: {"a": torch.full((2,), i), "b": (torch.tensor(float(i)), [torch.tensor([i])])},
        lambda i: {"text": f"row {i}", "k": torch.tensor(i)},
    ],
    ids=["tensor", "pytree", "with a value"],
)
def test_rows_of_any_form_come_back_in_their_slots(row, stored):
    with make(5) as rb, make(5) as fresh, make(5) as used:
        rb.extend([row(i) for i in range(stored)])
        used.extend([row(90), row(91)])
        state = rb.state_dict()
        rb.extend([row(70)])
        for other in (fresh, used):
            other.load_state_dict(state)
            slots = [max(i for i in range(stored) if i % 5 == s) for s in range(min(stored, 5))]
            for slot, i in enumerate(slots):
                assert str(other[slot]) == str(_read(row(i))), "the row, in its slot"
            assert int(other.extend([row(80)])) == stored % 5, "and goes on where it was"


def _read(row):
    """A row read alone, as it went in."""
    with make(5) as rb:
        rb.extend([row])
        return rb[0]


def test_lanes_come_back_where_they_were():
    def steps(first: int, n: int) -> TensorDict:
        k = torch.arange(first, first + n)
        return TensorDict({"k": torch.stack([k, k + 100])}, [2, n])

    for stored in (2, 3, 4):
        with make(6, TensorDictReplayBuffer, ndim=2) as rb, make(6, TensorDictReplayBuffer, ndim=2) as other:
            rb.extend(steps(0, stored))
            other.load_state_dict(rb.state_dict())
            assert other[:]["k"].tolist() == rb[:]["k"].tolist()
            assert other.extend(steps(50, 1)).tolist() == rb.extend(steps(50, 1)).tolist()


def test_a_state_of_another_form_or_dimension_changes_nothing():
    with make(6) as tensors, make(6, TensorDictReplayBuffer) as dicts, make(6, TensorDictReplayBuffer, ndim=2) as lanes:
        tensors.extend(torch.arange(4))
        dicts.extend(TensorDict({"data": torch.arange(5)}, [5]))
        lanes.extend(TensorDict({"data": torch.arange(4).reshape(2, 2)}, [2, 2]))
        for rb, state, text in (
            (tensors, dicts.state_dict(), "rows are a TensorDict, the buffer's are a tensor"),
            (dicts, tensors.state_dict(), "rows are a tensor, the buffer's are a TensorDict"),
            (dicts, lanes.state_dict(), r"time steps of shape \[2\], the buffer has ndim=1"),
            (lanes, dicts.state_dict(), r"time steps of shape \[\], the buffer has ndim=2"),
        ):
            before = len(rb)
            with pytest.raises(ValueError, match=text):
                rb.load_state_dict(state)
            assert len(rb) == before


def test_what_does_not_fit_changes_nothing_not_even_the_transforms():
    class Adds(Transform):
        by = 1

        def forward(self, td):
            return td

        def state_dict(self):
            return {"by": self.by}

        def load_state_dict(self, state):
            self.by = state["by"]

    with make(6, TensorDictReplayBuffer) as rb:
        rb.extend(numbered(0, 4))
        one, two = Adds(), Adds()
        rb.append_transform(one).append_transform(two)
        state = rb.state_dict()
        more = {**state, "_transforms": {**state["_transforms"], "2": {}}}
        half = {**state, "_transforms": {"0": {"by": 7}, "1": {}}}
        numbers = {**state, "_rng": (torch.zeros(3, dtype=torch.uint8), "cpu")}
        parted = {**state, "_sampler": {"name": "random", "arguments": {}, "priority": torch.ones(3)}}
        state["_storage"]["rows"] = state["_storage"]["rows"][:2]
        for bad in (more, half, numbers, parted):
            with pytest.raises((KeyError, ValueError, RuntimeError)):
                rb.load_state_dict(bad)
            assert rb["k"].tolist() == [0, 1, 2, 3] and (one.by, two.by) == (1, 1)


def test_a_saved_state_brings_back_schema_streams_counters_and_a_column_named_index():
    face = {"sampler": SliceSampler(slice_len=2), "limiter": RateLimiter(2.0, 1)}
    spec = {"k": "int64", "index": "int64", "s": ("msgpack", 300), ("next", "done"): ("bool", (1,))}
    with (
        make(6, TensorDictReplayBuffer, face, trajectories=True, schema=spec) as rb,
        make(6, TensorDictReplayBuffer, face, trajectories=True) as fresh,
    ):
        for i in range(8):  # two streams in turn
            step = TensorDict(
                {"k": torch.tensor([i]), "index": torch.tensor([i + 50]), "s": NonTensorStack("x" * i)}, [1]
            )
            rb.extend(step.set(("next", "done"), torch.tensor([[i == 6]])), stream=i % 2)
        file = io.BytesIO()
        torch.save(rb.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=False)
        before = sorted(t["k"].tolist() for t in rb.query())
        rb.extend(rb[:1], stream=0)
        for other in (fresh, rb):
            other.load_state_dict(state)
            assert sorted(t["k"].tolist() for t in other.query()) == before == [[2, 4, 6], [3, 5, 7]]
            assert other["k"].tolist() == [6, 7, 2, 3, 4, 5] and other["index"].tolist() == [56, 57, 52, 53, 54, 55]
            assert other[3]["s"] == "xxx" and other.write_count == 8
            assert other.buffer.schema == rb.buffer.schema
        left = rb.stats()["limiter"]["diff"]
        assert left == fresh.stats()["limiter"]["diff"]


def test_taking_a_state_is_no_draw():
    with make(6, TensorDictReplayBuffer, {"limiter": RateLimiter(1.0, 1)}) as rb:
        rb.extend(numbered(0, 4))
        before = rb.stats()
        rb.state_dict()
        after = rb.stats()
        assert {k: after[k] for k in ("sampled_batches", "sampled_rows", "replay_ratio", "limiter")} == {
            k: before[k] for k in ("sampled_batches", "sampled_rows", "replay_ratio", "limiter")
        }


def test_arguments_of_the_sampler_come_back_or_are_refused():
    def priority(**kw):
        return make(6, TensorDictReplayBuffer, {"sampler": PrioritizedSampler(6, eps=0.0, **kw)})

    with priority(alpha=0.5) as rb, priority(alpha=0.5, reduction="mean") as other, priority(alpha=1.0) as third:
        for each in (rb, other, third):
            each.extend(numbered(0, 4))
        rb.update_priority(torch.arange(4), 5.0)
        rb.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 3.0]))
        rb.sampler.beta = 0.9
        state = rb.state_dict()
        third.extend(numbered(4, 1))
        with pytest.raises(ValueError, match="alpha"):
            third.load_state_dict(state)
        assert len(third) == 5 and third.sampler.beta == 0.4
        other.load_state_dict(state)
        assert other.sampler.beta == 0.9 and other.sampler.reduction == "max"
        slot = other.extend(numbered(9, 1)).numpy()
        assert other.buffer.priorities(other.buffer.ids_of(slot)).tolist() == pytest.approx([5.0], rel=1e-3)
    with make(6, TensorDictReplayBuffer, {"sampler": SliceSampler(slice_len=2)}) as rb:
        rb.extend(TensorDict({"k": torch.arange(4), "next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}, [4]))
        state, sampler = rb.state_dict(), rb.sampler
        rb.load_state_dict(state)
        assert rb.sampler is sampler, "the same arguments: the user's own object stays"
        rb.set_sampler(SliceSampler(slice_len=3))
        rb.load_state_dict(state)
        assert rb.sampler.slice_len == 2


def test_no_process_sees_a_row_that_the_state_does_not_have(monkeypatch):
    """The place of a full buffer's oldest row was found by storing others first."""
    with make(5, TensorDictReplayBuffer) as rb, make(5, TensorDictReplayBuffer) as other:
        rb.extend(numbered(0, 7))
        state, seen = rb.state_dict(), []
        watching = shmbuf.attach(other.name)
        submit = shmbuf.Buffer.submit

        def look(self, *args, **kw):
            ticket = submit(self, *args, **kw)
            ticket.wait()
            seen.append(watching["k"].tolist())
            return ticket

        monkeypatch.setattr(shmbuf.Buffer, "submit", look)
        other.load_state_dict(state)
        assert seen == [[5, 6, 2, 3, 4]] and other.write_count == 7
        watching.close()
