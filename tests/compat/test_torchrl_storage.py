"""TorchRL's own replay buffers over our storage, samplers and writer."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("torchrl.data")
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritized
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

import shmbuf
from shmbuf import PrioritizedSampler
from shmbuf.integrations import TorchRLSampler, TorchRLStorage, TorchRLWriter
from tests.cuda.tensors import of_device


def rows(first: int, n: int) -> TensorDict:
    k = torch.arange(first, first + n)
    done = (k % 5 == 4)[:, None]
    return TensorDict(
        {"k": k, "obs": k[:, None].expand(n, 3).float().clone(), "next": {"reward": k[:, None].float(), "done": done}},
        [n],
    )


@pytest.fixture
def made():
    open_ = []

    def make(n: int = 20, **options) -> TorchRLStorage:
        open_.append(TorchRLStorage(n, **options))
        return open_[-1]

    yield make
    for storage in open_:
        if not storage.buffer.closed:
            storage.buffer.destroy(force=True)


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_round_trip_and_wrap(made, cls):
    rb = cls(storage=made(10), batch_size=4)
    assert isinstance(rb.writer, TorchRLWriter)
    assert rb.extend(rows(0, 7)).tolist() == list(range(7))
    assert rb.add(rows(7, 1)[0]) == 7 and len(rb) == 8
    assert rb.extend(rows(8, 4)).tolist() == [8, 9, 0, 1]
    assert len(rb) == 10 and rb.write_count == 12 and rb.writer._cursor == 2
    assert rb[:]["k"].tolist() == [10, 11, *range(2, 10)] and rb[3]["k"] == 3
    batch = rb.sample()
    assert (batch["obs"][:, 0].long() == batch["k"]).all() and (
        batch["next", "reward"][:, 0].long() == batch["k"]
    ).all()
    rb.empty()
    assert len(rb) == 0 and rb.extend(rows(0, 2)).tolist() == [0, 1]


def test_values_are_set_in_place(made):
    rb = TensorDictReplayBuffer(storage=made())
    rb.extend(rows(0, 8))
    new = rows(100, 2)
    rb[torch.tensor([2, 5])] = new
    assert rb[:]["k"].tolist() == [0, 1, 100, 3, 4, 101, 6, 7] and len(rb) == 8 and rb.write_count == 8


def test_torchrls_samplers_draw_from_it(made):
    rb = TensorDictReplayBuffer(storage=made(), sampler=SamplerWithoutReplacement(), batch_size=5)
    rb.extend(rows(0, 20))
    assert sorted(torch.cat([rb.sample()["k"] for _ in range(4)]).tolist()) == list(range(20))
    rb.set_sampler(SliceSampler(slice_len=5, end_key=("next", "done")))
    rb.extend(rows(20, 7))  # wraps: 20..26 over 0..6
    for _ in range(20):
        k = rb.sample(10)["k"].reshape(2, 5)
        assert (k.diff(dim=1) == 1).all(), "a slice follows time, across the write head too"


def test_a_writer_that_chose_other_slots_is_told(made):
    storage = made()
    rb = TensorDictReplayBuffer(storage=storage)
    rb.set_writer(RoundRobinWriter())
    rb.extend(rows(0, 3))
    other = TorchRLStorage.open(storage.name)
    TensorDictReplayBuffer(storage=other).extend(rows(3, 2))
    with pytest.raises(RuntimeError, match="index 5 on, the writer had chosen 3"):
        rb.extend(rows(5, 1))
    other.buffer.close()


def test_priorities_reach_the_rows_that_were_drawn(made):
    rb = TensorDictReplayBuffer(
        storage=made(10), sampler=TorchRLSampler(PrioritizedSampler(10, alpha=1.0, beta=1.0)), batch_size=64
    )
    assert isinstance(rb.sampler, TorchRLPrioritized)
    rb.extend(rows(0, 10))
    batch = rb.sample()
    assert {"row_id", "priority_weight"} <= set(batch.keys())
    assert (batch["row_id"] == batch["k"]).all() and (batch["index"] == batch["k"]).all()
    batch["td_error"] = torch.where(batch["k"] == 3, 1.0, 0.0)
    rb.update_tensordict_priority(batch)
    rb.update_priority(torch.arange(10), torch.eye(10)[5])
    rb.update_priority(of_device(torch.arange(10)), of_device(torch.eye(10)[3]))
    assert rb.sample()["k"].unique().tolist() == [3]
    late = rb.sample()
    rb.extend(rows(10, 10))  # every row is overwritten: what is late is dropped
    late["td_error"] = torch.full((64,), 1e6)
    rb.update_tensordict_priority(late)
    p = rb.storage.buffer.stats()
    assert p["priorities_stale"] == 64 and len(set(rb.sample(512)["k"].tolist())) == 10


def test_a_seed_repeats_its_draws(made):
    storage = made()
    seen = []
    for _ in range(2):
        rb = TensorDictReplayBuffer(
            storage=storage,
            sampler=TorchRLSampler(shmbuf.RandomSampler()),
            generator=torch.Generator().manual_seed(3),
            batch_size=8,
        )
        if not len(rb):
            rb.extend(rows(0, 20))
        seen.append([rb.sample()["k"].tolist() for _ in range(3)])
    assert seen[0] == seen[1]


def child(storage, first: int) -> None:
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(first, 5))


def test_processes_share_it(made):
    storage = made(100, name=f"torchrl-{torch.randint(2**40, ()).item()}")
    rb = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=32)
    rb.extend(rows(0, 5))
    context = multiprocessing.get_context("spawn")
    p = context.Process(target=child, args=(storage, 5))
    p.start()
    p.join(120)
    assert p.exitcode == 0 and len(rb) == 10 and rb.write_count == 10
    assert rb.extend(rows(10, 1)).tolist() == [10]
    assert set(rb.sample(400)["k"].tolist()) == set(range(11))
    face = shmbuf.attach(storage.name)
    assert sorted(face[:]["k"].tolist()) == list(range(11))
    face.close()
    copy = pickle.loads(pickle.dumps(storage))
    assert len(copy) == 11
    copy.buffer.close()


def test_state_dict(made):
    storage = made()
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(0, 6))
    state = storage.state_dict()
    rb.extend(rows(6, 6))
    storage.load_state_dict(state)
    assert rb[:]["k"].tolist() == list(range(6))


def test_after_a_wrap_the_oldest_row_is_the_oldest_again(made):
    storage = made(4)
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(0, 6))
    storage.load_state_dict(storage.state_dict())
    assert rb[:]["k"].tolist() == [4, 5, 2, 3]
    rb.extend(rows(100, 1))
    assert rb[:]["k"].tolist() == [4, 5, 100, 3]


def test_after_a_wrap_of_several_dimensions_too(made):
    storage = made(12, ndim=2, batch_shape=(3,))
    rb = TensorDictReplayBuffer(storage=storage)
    rb.extend(TensorDict({"k": torch.arange(18).reshape(3, 6)}, [3, 6]))
    before = rb[:]["k"].tolist()
    storage.load_state_dict(storage.state_dict())
    assert rb[:]["k"].tolist() == before
    storage.shm.put(TensorDict({"k": torch.full((1, 3), 99)}, [1, 3])).wait()
    left = rb[:]["k"]
    assert (left == 99).sum() == 3 and sorted(left[left != 99].tolist()) == [3, 4, 5, 9, 10, 11, 15, 16, 17]


def test_an_edit_moves_the_revision(made):
    rb = TensorDictReplayBuffer(storage=made(4))
    rb.extend(rows(0, 4))
    before = rb.storage._mutation_revision
    rb.storage.set(torch.tensor([0]), rows(9, 1), set_cursor=False)
    assert rb.storage._mutation_revision != before


@pytest.mark.parametrize("drawn", [False, True])
def test_new_rows_get_the_priorities_they_carry_and_no_late_ones(made, drawn):
    sampler = TorchRLSampler(PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0))
    rb = TensorDictReplayBuffer(storage=made(4), sampler=sampler, batch_size=64)

    def carrying(first: int, n: int, p: float) -> TensorDict:
        return rows(first, n).set("td_error", torch.full((n,), p))

    def priorities() -> list[float]:
        buffer = rb.storage.buffer
        return buffer.priorities(buffer.ids_of(torch.arange(4).numpy())).tolist()

    rb.extend(carrying(0, 4, 5.0))
    late = rb.sample() if drawn else None
    rb.extend(carrying(4, 2, 50.0))
    rb.add(carrying(6, 1, 70.0)[0])
    assert priorities() == [50, 50, 70, 5]
    if late is not None:
        late["td_error"] = torch.full((64,), 1000.0)
        rb.update_tensordict_priority(late)
        assert priorities() == [50, 50, 70, 1000]


def test_wrong_use(made):
    with pytest.raises(TypeError, match="give them to the ShmStorage"):
        TorchRLStorage(shmbuf.ShmStorage(5), name="x")
    with pytest.raises(TypeError, match=r"one of shmbuf's samplers, not SamplerWithoutReplacement"):
        TorchRLSampler(SamplerWithoutReplacement())

    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(5), sampler=TorchRLSampler(shmbuf.RandomSampler()), batch_size=2
    )
    rb.extend(rows(0, 3))
    with pytest.raises(TypeError, match="not from a LazyTensorStorage"):
        rb.sample()
    rb = TensorDictReplayBuffer(storage=made())
    rb.extend(rows(0, 3))
    with pytest.raises(shmbuf.SchemaError, match="extra"):
        rb.extend(rows(0, 3).set("extra", torch.zeros(3)))
    assert len(rb) == 3 and rb.write_count == 3


@pytest.mark.parametrize("n", [7, 23])
def test_checkpoints_of_torchrls_buffer_over_our_storage(tmp_path, n):
    """Rows at their slots: into another such buffer, into TorchRL's own storage, and from it."""
    rb = ReplayBuffer(storage=TorchRLStorage(10), batch_size=4)
    own = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    for i in range(n):
        for each in (rb, own):
            each.extend(TensorDict({"x": torch.tensor([i]), "next": {"r": torch.tensor([i * 0.5])}}, [1]))
    rb.dumps(tmp_path / "ours"), own.dumps(tmp_path / "theirs")
    for path in ("ours", "theirs"):
        for storage in (TorchRLStorage(10), LazyTensorStorage(10)):
            other = ReplayBuffer(storage=storage, batch_size=4)
            other.loads(tmp_path / path)
            assert len(other) == min(n, 10) and (other[:]["x"] == own[:]["x"]).all(), (path, storage)
            assert (other[:]["next", "r"] == own[:]["next", "r"]).all()
            assert other.extend(TensorDict({"x": torch.tensor([n]), "next": {"r": torch.zeros(1)}}, [1])).tolist() == [
                n % 10
            ]
    rb.dumps(tmp_path / "ours")  # again


def test_what_would_change_copies_says_so():
    rb = ReplayBuffer(storage=TorchRLStorage(10), batch_size=4)
    rb.extend(TensorDict({"x": torch.arange(5)}, [5]))
    for change in (
        lambda: rb.set_at_("x", torch.tensor([7]), torch.tensor([0])),
        lambda: rb.set_("x", torch.zeros(5, dtype=torch.int64)),
        lambda: rb.update_(TensorDict({"x": torch.zeros(5, dtype=torch.int64)}, [5])),
    ):
        with pytest.raises(NotImplementedError, match="nothing was changed"):
            change()
    assert rb[:]["x"].tolist() == [0, 1, 2, 3, 4]
