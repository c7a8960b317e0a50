"""Class QUERY of the real cases (shared/spec/cases.md): trajectories by predicate, and eviction. Each test is named after its case."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import (
    Buffer,
    NotEnoughRows,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ShmStorage,
    SliceSampler,
    TensorDictReplayBuffer,
    traj,
)
from shmbuf.query import query_buffer

SPEC = {"id": torch.int64, "t": torch.int64, "next": {"done": torch.bool}}
finished = traj.done.any()


def episode(number: int, n: int, first: int = 0, done: bool = True) -> TensorDict:
    ended = torch.zeros(n, dtype=torch.bool)
    ended[-1:] = done
    return TensorDict(
        {"id": torch.full((n,), number), "t": torch.arange(first, first + n), "next": {"done": ended}}, [n]
    )


@pytest.fixture
def rb(make_name):
    made = []

    def rb(capacity: int = 200, **kw) -> TensorDictReplayBuffer:
        storage = ShmStorage(capacity, name=make_name(), schema=SPEC, drain="caller", ring_bytes=1 << 14)
        made.append(TensorDictReplayBuffer(storage=storage, seed=1, **kw))
        return made[-1]

    yield rb
    for r in made:
        r.close()


def query(rb: TensorDictReplayBuffer, predicate=None) -> list:
    return query_buffer(rb.storage, predicate)


def test_b152_indices_after_a_filter(rb):
    """Of 10 trajectories of 5 rows those of ids 2, 7, 9: positions in a hit are its own, `row_id` and `index` are the buffer's."""
    rb = rb()
    for number in range(10):
        rb.extend(episode(number, 5))
    hits = query(rb, traj.id.isin([2, 7, 9]).all())
    assert [int(h.id[0]) for h in hits] == [2, 7, 9] and [h.length for h in hits] == [5, 5, 5]
    for h in hits:
        number = int(h.id[0])
        for position in range(5):  # in the trajectory
            assert (int(h[position].id), int(h[position].t)) == (number, position)
        assert h.row_id.tolist() == list(range(5 * number, 5 * number + 5)) == h.index.tolist()  # in the buffer
        stored = rb[h.index]
        assert torch.equal(stored["id"], h.id) and torch.equal(stored["t"], h.t)
        assert rb.buffer.gather(h.row_id.numpy())["t"].tolist() == [0, 1, 2, 3, 4]
        part = h[1:4]  # a slice of a hit
        assert (
            part.t.tolist() == [1, 2, 3]
            and set(part.id.tolist()) == {number}
            and part.row_id.tolist() == h.row_id[1:4].tolist()
        )


def test_b154_zero_length_and_inconsistent_lengths(rb):
    """50, 0, 50 rows, then ends on first rows: an empty one does not exist, and lengths add up to the rows stored."""
    rb = rb()
    rb.extend(episode(0, 50))
    rb.extend(episode(1, 0))
    rb.extend(episode(2, 50))
    assert [(int(f.id[0]), f.length) for f in query(rb)] == [(0, 50), (2, 50)]
    rb.extend(episode(3, 1))  # done on the first row, and again
    rb.extend(episode(4, 1))
    rb.extend(episode(5, 4))
    found = query(rb)
    assert [(int(f.id[0]), f.length) for f in found] == [(0, 50), (2, 50), (3, 1), (4, 1), (5, 4)]
    assert sum(f.length for f in found) == len(rb) == 106
    assert all(len(set(f.id.tolist())) == 1 and f.t.tolist() == list(range(f.length)) for f in found)


def test_b156_evicting_whole_trajectories(rb):
    """10,000 episodes of 1 to 30 rows, some in pieces, through 100 rows: after each, exactly the last 100 rows in their trajectories."""
    rb, rng, rows = rb(100), random.Random(156), []  # rows: (id, t), all that were put
    for number in range(10_000):
        n = rng.randint(1, 30)
        cuts = sorted({0, n, *(rng.randrange(n) for _ in range(rng.randint(0, 2)))})  # partly sent in pieces
        whole = episode(number, n)
        for a, b in itertools.pairwise(cuts):
            rb.extend(whole[a:b])
        rows = (rows + [(number, t) for t in range(n)])[-100:]
        ids, lengths = rb.buffer.listing()
        assert lengths.sum() == len(rb) == len(rows) == len(set(ids.tolist()))
        assert ids[0] == rb.buffer.window[0]
        if number % 10 == 0:
            found = query(rb)
            assert [(i, t) for f in found for i, t in zip(f.id.tolist(), f.t.tolist(), strict=True)] == rows
            firsts = [int(f.id[0]) for f in found]
            assert len(set(firsts)) == len(firsts) and firsts == sorted({i for i, _ in rows})
            assert int(found[0].row_id[0]) == rb.buffer.window[0]


def test_b158_no_finished_trajectory_yet(rb):
    """One open episode of 104 rows is no finished one; what asks for slices of 105 is told how many there are and how long; then it ends."""
    rb = rb(sampler=SliceSampler(slice_len=105))
    rb.extend(episode(0, 104, done=False))
    with pytest.raises(
        NotEnoughRows, match=r"the longest has 104 rows, slices of 105 .*; 1 trajectory is stored, 1 of them open"
    ):
        rb.sample(105)
    assert query(rb, finished) == []
    (whole,) = query(rb)
    assert whole.length == 104 and whole.t.tolist() == list(range(104))
    rb.extend(episode(0, 1, first=104))
    (done,) = query(rb, finished)
    assert done.length == 105 and query(rb, ~finished) == []
    assert rb.sample(105)["t"].tolist() == list(range(105))
    rb.set_sampler(SliceSampler(slice_len=106))
    with pytest.raises(NotEnoughRows, match=r"; 1 trajectory is stored, 0 of them open"):
        rb.sample(106)


def test_b159_a_broken_trajectory_is_kept_out(rb, tmp_path):
    """There is no word for it: its rows get priority 0, which nobody draws by priority (rows, slices; also out of a checkpoint), and a
    predicate leaves them out of queries. Uniform samplers draw them until they are overwritten."""
    rb = rb(400, sampler=PrioritizedSampler(400, alpha=1.0, beta=0.5, eps=0.0))
    other = TensorDictReplayBuffer._over(
        Buffer.attach(rb.name), {}, sampler=PrioritizedSampler(400, alpha=1.0, beta=0.5, eps=0.0)
    )
    other.extend(episode(1, 50))
    rb.extend(episode(2, 30, done=False))  # the simulator crashes here
    other.extend(episode(3, 40))
    (broken,) = query(rb, (traj.id == 2).all())
    assert broken.length == 30
    rb.update_priority(
        None, 1.0, row_id=query(rb, (traj.id == 1).all())[0].row_id
    )  # new rows get the largest that was given
    rb.update_priority(None, 0.0, row_id=broken.row_id)
    other.extend(episode(4, 60))
    assert sum(f.length for f in query(rb, finished)) == 150 and all(2 not in f.id for f in query(other, finished))
    assert float(np.sum(rb.buffer.priorities(broken.row_id.numpy()))) == 0
    for _ in range(100):
        assert 2 not in rb.sample(1000)["id"]
    assert set(rb.sample(2000)["id"].tolist()) == {1, 3, 4}
    rb.dumps(tmp_path / "c")
    with TensorDictReplayBuffer(
        storage=ShmStorage(400, drain="caller"), sampler=PrioritizedSampler(400, alpha=1.0, beta=0.5, eps=0.0)
    ) as restored:
        restored.loads(tmp_path / "c")
        (again,) = query(restored, (traj.id == 2).all())
        assert again.length == 30 and float(np.sum(restored.buffer.priorities(again.row_id.numpy()))) == 0
        assert set(restored.sample(20_000)["id"].tolist()) == {1, 3, 4}
    rb.set_sampler(PrioritizedSliceSampler(400, 1.0, 0.5, eps=0.0, slice_len=5))
    for _ in range(20):
        assert 2 not in rb.sample(1000)["id"]
    for number in range(5, 15):  # its room is used again
        other.extend(episode(number, 40))
    assert query(rb, (traj.id == 2).any()) == [] and len(rb) == 400
    other.close()
