"""`state_dict` and `load_state_dict` of rows that are no TensorDicts of tensors, and of more dimensions than one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmbuf import ReplayBuffer, ShmStorage, TensorDictReplayBuffer


def make(n: int, cls=ReplayBuffer, **kw):
    return cls(storage=ShmStorage(n, drain="caller", **kw), batch_size=3)


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
