"""Trajectories that are overwritten while they are listed: what was read of their first rows by then may be anything."""

from __future__ import annotations

import numpy as np
import pytest
from tensordict import TensorDict

from shmbuf import Buffer, PrioritizedSliceSampler, ShmStorage, TensorDictReplayBuffer
from shmbuf.checkpoint import dump_buffer

SPEC = {"k": "int64", "done": "bool"}


def rows(first: int, n: int) -> dict[str, np.ndarray]:
    """Every trajectory has four rows."""
    k = np.arange(first, first + n)
    return {"k": k, "done": k % 4 == 3}


def overtake(buf: Buffer, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """n rows are stored during the next listing, which read those of the rows they overwrite half-way: too many, none, or fewer than none."""
    call, odd = buf._call, iter([2**64 - 3, 0, 99])

    def overtaken(what: str, *arguments: object) -> object:
        if what != "trajectories":
            return call(what, *arguments)
        monkeypatch.setattr(buf, "_call", call)
        end, first, counts, flags = call(what)
        buf.extend(rows(buf.write_count, n))
        lo = buf.window[0]
        counts = [c if f >= lo else next(odd) for f, c in zip(first, counts, strict=True)]
        return end, first, counts, flags

    monkeypatch.setattr(buf, "_call", overtaken)


@pytest.fixture
def buf(name):
    with Buffer.create(name, 20, schema=SPEC, end_keys="done", drain="caller") as buf:
        buf.extend(rows(0, 20))
        yield buf


def test_only_what_is_stored_is_listed(buf, monkeypatch):
    overtake(buf, monkeypatch, 6)
    listed = [tuple(t) for t in buf.trajectories()]
    assert listed == [(6, 7, 2, True, True), *((f, f + 3, 4, False, True) for f in (8, 12, 16))]


def test_a_checkpoint_has_the_trajectories_that_were_not_overtaken(buf, monkeypatch, tmp_path):
    overtake(buf, monkeypatch, 6)
    saved = dump_buffer(buf, tmp_path / "c")
    assert (saved.rows, saved.lost, saved.first_id, saved.end_id) == (14, 6, 6, 20)


def test_slices_by_priority_begin_in_stored_rows(name, monkeypatch):
    """A slice_len that only few rows have room for: all starts are listed."""
    rb = TensorDictReplayBuffer(
        storage=ShmStorage(20, name=name, drain="caller"), sampler=PrioritizedSliceSampler(20, 0.7, 0.9, slice_len=4),
        batch_size=64, priority_key="td",
    )  # fmt: skip
    with rb:
        done = (np.arange(20) % 4 == 3)[:, None]
        rb.extend(TensorDict({"k": np.arange(20), ("next", "done"): done}, [20]))
        sampler, buf = rb.sampler, rb.buffer
        call = buf._call

        def overtaken(what: str, *arguments: object) -> object:
            out = call(what, *arguments)
            if what != "trajectories":
                return out
            monkeypatch.setattr(buf, "_call", call)
            rb.extend(TensorDict({"k": np.arange(20, 26), ("next", "done"): done[:6]}, [6]))
            return out[0], out[1], [2**64 - 3, 0, *out[2][2:]], out[3]

        monkeypatch.setattr(buf, "_call", overtaken)
        starts, _ = sampler._all_starts(buf, 4, 0)
        assert starts.tolist() == [8, 12, 16]
