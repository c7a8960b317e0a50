"""Writers through the replay buffer: in turn, by rank, not at all; also for who attaches by name or gets a pickle."""

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    ImmutableDatasetWriter,
    PrioritizedSampler,
    RoundRobinWriter,
    ShmStorage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)


def rows(*rewards: float) -> TensorDict:
    r = torch.tensor(rewards, dtype=torch.float32)
    return TensorDict({"k": torch.arange(len(rewards)), "next": {"reward": r[:, None]}}, [len(rewards)])


@pytest.fixture
def best(name):
    rb = TensorDictReplayBuffer(storage=ShmStorage(3, name=name), writer=TensorDictMaxValueWriter(), batch_size=8)
    yield rb
    rb.destroy(force=True)


def stored(rb) -> list[float]:
    return sorted(rb[:]["next", "reward"].reshape(-1).tolist())


def test_the_largest_stay(best):
    assert best.extend(rows(1, 5, 3)).tolist() == [0, 1, 2]
    assert best.extend(rows(0, 4)).tolist() == [-1, 0] and stored(best) == [3, 4, 5]
    assert best.add(rows(2)[0]) is None and best.add(rows(9)[0]) == 2
    assert stored(best) == [4, 5, 9] and len(best) == 3
    with pytest.raises(RuntimeError, match=r"a TensorDictMaxValueWriter decides: extend\(\)"):
        best.put(rows(7))
    assert stored(best) == [4, 5, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_columns_that_numpy_has_no_dtype_for_are_replaced_bit_for_bit(best, dtype):
    values = torch.tensor([0.5, -2, 1]).to(dtype)
    best.extend(rows(1, 2, 3).set("x", values))
    best.extend(rows(9).set("x", values[1:2]))
    got = best[:]
    best_row = got[got["next", "reward"].argmax()][None]
    assert (
        got["x"].dtype == dtype and best_row["x"].view(torch.uint8).tolist() == values[1:2].view(torch.uint8).tolist()
    )


def test_whoever_attaches_writes_the_same_way(best):
    best.extend(rows(1, 5, 3))
    other, copy = shmbuf.attach(best.name), pickle.loads(pickle.dumps(best))
    for rb, reward in ((other, 6.0), (copy, 7.0)):
        assert isinstance(rb.writer, TensorDictMaxValueWriter)
        assert rb.extend(rows(0, reward))[0] == -1
        rb.close()
    assert stored(best) == [5, 6, 7]


def test_a_row_that_replaces_another_has_the_priority_of_new_ones(name):
    rb = TensorDictReplayBuffer(
        storage=ShmStorage(2, name=name),
        sampler=PrioritizedSampler(2, alpha=1.0, beta=1.0, eps=0.0),
        writer=TensorDictMaxValueWriter(),
        batch_size=64,
    )
    rb.extend(rows(1, 2))
    rb.update_priority(torch.arange(2), torch.tensor([0.0, 4.0]))
    assert rb.extend(rows(3)).tolist() == [0]
    assert rb.buffer.priorities([0, 1]).tolist() == [4, 4]
    rb.destroy(force=True)


def test_an_immutable_buffer_takes_nothing(name):
    rb = TensorDictReplayBuffer(storage=ShmStorage(5, name=name), batch_size=2)
    rb.extend(rows(1, 2))
    assert type(rb.set_writer(ImmutableDatasetWriter())).__name__ == "TensorDictRoundRobinWriter"
    for call in (lambda: rb.extend(rows(3)), lambda: rb.add(rows(3)[0]), lambda: rb.put(rows(3)), rb.empty):
        with pytest.raises(RuntimeError):
            call()
    assert stored(rb) == [1, 2] and len(rb.sample()) == 2
    rb[0] = rows(7)[0]  # adds no row: as with TorchRL's, stored ones may be changed
    rb.set_at_("k", 5, 1)
    assert stored(rb) == [2, 7] and rb["k"].tolist() == [0, 5] and rb.write_count == 2
    rb.set_writer(RoundRobinWriter)
    assert rb.extend(rows(3)).tolist() == [2] and rb.writer._cursor == 3
    rb.destroy(force=True)


def test_generations_count_for_all_processes(name):
    rb = TensorDictReplayBuffer(
        storage=ShmStorage(4, name=name), writer=RoundRobinWriter(track_generations=True), batch_size=32
    )
    rb.extend(rows(1, 2, 3))
    assert rb.writer.generations_of(torch.tensor([[0, 3], [2, 7]])).tolist() == [[0, -1], [0, -1]]
    other = shmbuf.attach(name)
    other.extend(rows(4, 5, 6))
    assert rb.writer.generations_of(torch.arange(4)).tolist() == [1, 1, 0, 0]
    for handle in (rb, other):
        batch, info = handle.sample(return_info=True)
        assert (info["index_generation"] == handle.writer.generations_of(batch["index"])).all()
    other.close()
    rb.destroy(force=True)
