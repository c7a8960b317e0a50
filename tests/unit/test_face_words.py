"""TorchRL's constructor keywords and methods: what each means here, or why it is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    ConsumingSampler,
    NotEnoughRows,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    ShmStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.unit.helpers import unmoved
from tests.unit.helpers_torch import SPEC, rows, same


def test_parts_may_be_functions_that_make_them():
    with ReplayBuffer(storage=lambda: ShmStorage(7), sampler=SamplerWithoutReplacement, batch_size=2) as rb:
        assert rb.storage.max_size == 7 and type(rb.sampler) is SamplerWithoutReplacement
    with ReplayBuffer() as rb:
        assert rb.storage.max_size == 1000 and type(rb.sampler) is RandomSampler


REFUSED = [
    ({"storage": 5}, TypeError, "storage is a ShmStorage, not int"),
    ({"storage": lambda: 5}, TypeError, "storage is a ShmStorage, not int"),
    ({"sampler": 5}, TypeError, "sampler is one of"),
    ({"writer": 5}, TypeError, "not int"),
    ({"checkpointer": 5}, TypeError, "int is not taken"),
    ({"sample_unit": 5}, TypeError, "sample_unit"),
    ({"collate_fn": 5}, TypeError, "collate_fn"),
    ({"generator": 5}, TypeError, "a torch.Generator, not int"),
    ({"transform_factory": 5}, TypeError, "transform_factory"),
    ({"transform": abs, "transform_factory": list}, TypeError, "mutually exclusive"),
    ({"prefetch": 2}, ValueError, "Dynamic batch-size specification is incompatible"),
    ({"prefetch": -1, "batch_size": 2}, ValueError, "prefetch=-1"),
    ({"prefetch": 2, "batch_size": 2, "sampler": ConsumingSampler}, ValueError, "Prefetching is not supported"),
    ({"prefetch": 2, "batch_size": 2, "consume_after_n_samples": 1}, ValueError, "Prefetching is not supported"),
    ({"consume_after_n_samples": 1.5}, TypeError, "positive integer"),
    ({"consume_after_n_samples": 0}, ValueError, "positive integer"),
    ({"consume_after_n_samples": 2, "sampler": ConsumingSampler}, ValueError, "conflicts"),
    (
        {"consume_after_n_samples": 2, "sampler": SamplerWithoutReplacement},
        ValueError,
        "only supports the default RandomSampler",
    ),
    ({"sampler": lambda: SamplerWithoutReplacement(drop_last=True)}, ValueError, "Samplers with drop_last=True"),
    ({"dim_extend": -1}, ValueError, "dim_extend=-1"),
    ({"dim_extend": 1}, ValueError, "dim_extend=1"),
    ({"service_backend": "process"}, ValueError, "supports 'direct' or 'ray'"),
    ({"service_backend_options": {"a": 1}}, ValueError, "service_backend_options"),
    ({"transport": "ray"}, ValueError, "transport='auto' or 'direct'"),
    ({"transport_options": {"a": 1}}, ValueError, "transport_options are only valid for a remote"),
]


@pytest.mark.parametrize(("kw", "error", "text"), REFUSED, ids=lambda v: "-".join(v) if isinstance(v, dict) else "")
def test_what_is_refused_says_why_and_leaves_nothing(kw, error, text, nothing_moves):
    with pytest.raises(error, match=text):
        TensorDictReplayBuffer(**kw)


def test_a_shared_buffer_may_draw_ahead():
    """TorchRL refuses this: its batches drawn ahead would be of one process. Here each handle draws its own."""
    with TensorDictReplayBuffer(shared=True, prefetch=2, batch_size=4) as rb:
        rb.extend(rows(0, 8))
        batch = rb.sample()
        assert same(batch.exclude("index", "row_id"), torch.cat([rows(i, 1) for i in batch["row_id"].tolist()]))
        with pickle.loads(pickle.dumps(rb)) as other:
            assert len(other.sample()) == 4 and other.stats()["prefetch_queue_size"] > 0


def test_what_has_nothing_to_change_is_taken():
    with TensorDictReplayBuffer(
        shared=True, compilable=True, dim_extend=0, service_backend="direct", transport="auto", delayed_init=True
    ) as rb:
        rb.extend(rows(0, 3))
        assert rb.share() is rb and rb.start() is rb and rb.client() is rb
        assert rb.service_backend == "direct" and rb.is_alive
        with pytest.raises(TypeError):
            TensorDictReplayBuffer(ShmStorage(3))


class LazyTensorStorage:
    """As TorchRL's looks from outside."""

    max_size = 77


LazyTensorStorage.__module__ = "torchrl.data.replay_buffers.storages.tensor"


def test_torchrls_storage_and_sampler_are_answered_by_name():
    with pytest.raises(TypeError, match=r"not LazyTensorStorage.*ShmStorage\(77\) takes its place"):
        ReplayBuffer(storage=LazyTensorStorage())
    with pytest.raises(TypeError, match=r"shmbuf\.LazyTensorStorage"):
        ReplayBuffer(sampler=LazyTensorStorage())


def test_generator_decides_what_is_drawn():
    with TensorDictReplayBuffer(generator=torch.Generator().manual_seed(3), batch_size=20) as rb:
        rb.extend(rows(0, 50))
        first = rb.sample()["k"]
        rb.set_rng(torch.Generator().manual_seed(3))
        assert (rb.sample()["k"] == first).all() and not (rb.sample()["k"] == first).all()


def test_consume_after_n_samples():
    with TensorDictReplayBuffer(consume_after_n_samples=1, batch_size=4) as rb:
        rb.extend(rows(0, 8))
        assert sorted(torch.cat([rb.sample()["k"] for _ in range(2)]).tolist()) == list(range(8))
        with pytest.raises(NotEnoughRows):
            rb.sample()


@pytest.mark.parametrize("face", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritized_faces(face, make_name):
    kw = {"priority_key": "p"} if face is TensorDictPrioritizedReplayBuffer else {}
    with face(
        alpha=0.7, beta=0.9, eps=1e-6, sync=False, storage=ShmStorage(10, name=make_name()), batch_size=4, **kw
    ) as rb:
        assert (rb.sampler.alpha, rb.sampler.beta, rb.sampler.eps) == (0.7, 0.9, 1e-6)
        rb.extend(rows(0, 10))
        rb.update_priority(torch.arange(10), torch.tensor([0.0] * 9 + [5.0]))
        assert rb.sample(2000)["k"].bincount(minlength=10)[9] > 1990
        for other in (shmbuf.attach(rb.name), pickle.loads(pickle.dumps(rb))):
            assert type(other) is face and other.prioritized_sampler.beta == 0.9
            other.close()
        with pytest.raises(ValueError, match="host memory"):
            face(alpha=0.7, beta=0.9, sampler_device="cuda")


def test_setting_another_part_returns_the_previous_one(make_rb):
    rb = make_rb(50, batch_size=4)
    rb.extend(rows(0, 5))
    before = rb.sampler
    mine = PrioritizedSampler(50)
    assert rb.set_sampler(mine) is before and rb.sampler is mine
    other, old = ShmStorage(50, drain="caller"), rb.storage
    assert rb.set_storage(other) is old and rb.storage is other and len(rb) == 0
    rb.extend(rows(3, 4))
    assert rb.sample()["k"].min() >= 3
    with pytest.raises(ValueError, match="max_capacity"), unmoved(rb.buffer):
        rb.set_storage(ShmStorage(51))
    assert rb.storage is other
    rb.set_storage(old)
    assert same(rb[:], rows(0, 5))
    other.buffer.close()
    with pytest.raises(TypeError, match="not int"):
        rb.set_writer(5)


def test_next_gives_a_pass_and_none_at_its_end(make_rb):
    rb = make_rb(batch_size=3)
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(rows(0, 7))
    for _ in range(2):
        got = [rb.next() for _ in range(4)]
        assert got[3] is None and sorted(torch.cat([b["k"] for b in got[:3]]).tolist()) == list(range(7))


def test_can_sample(make_rb):
    rb = make_rb(batch_size=4)
    assert not rb.can_sample()
    rb.extend(rows(0, 1))
    assert rb.can_sample() and rb.can_sample(1000)
    with pytest.raises(ValueError, match="batch_size=-1"):
        rb.can_sample(-1)
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        make_rb().can_sample()
    rb.set_limiter(shmbuf.MinSize(3))
    assert not rb.can_sample()
    rb.extend(rows(0, 2))
    assert rb.can_sample()
    rb.shutdown()
    assert not rb.can_sample()


def test_shutdown(make_rb):
    rb = make_rb(batch_size=4)
    rb.extend(rows(0, 3))
    rb.shutdown()
    rb.shutdown(timeout=1)
    assert not rb.is_alive
    for draw in (rb.sample, lambda: next(iter(rb))):
        with pytest.raises(RuntimeError, match=r"A shut down replay buffer cannot be sampled\."):
            draw()
    with pytest.raises(RuntimeError, match="cannot be restarted"):
        rb.start()
    with shmbuf.attach(rb.name) as other:
        assert other.is_alive and len(other.sample()) == 4, "only this handle"
    assert len(rb[:]) == 3


def test_read_all_in_order(make_rb):
    rb = make_rb(5)
    with pytest.raises(RuntimeError, match="Cannot get elements out of a non-initialized storage"):
        make_rb(5, schema=None).read_all_in_order()
    rb.extend(rows(0, 7))
    assert rb.read_all_in_order()["k"].tolist() == [5, 6, 2, 3, 4]
    assert same(rb.read_all_in_order(2), rb[:2]) and len(rb.read_all_in_order(99)) == 5


def test_collate_fn_makes_what_is_sampled(make_name):
    with TensorDictReplayBuffer(
        storage=ShmStorage(10, name=make_name()), batch_size=4, collate_fn=lambda td: td["k"]
    ) as rb:
        rb.extend(rows(0, 6))
        k, info = rb.sample(return_info=True)
        assert isinstance(k, torch.Tensor) and (k == info["row_id"]).all()
        assert rb[:].tolist() == list(range(6))


def test_state_dict_brings_back_rows_slots_priorities_and_the_generator(make_name):
    def make(n: int):
        return TensorDictReplayBuffer(
            storage=ShmStorage(n, name=make_name(), schema=SPEC, drain="caller"),
            sampler=PrioritizedSampler(n),
            generator=torch.Generator().manual_seed(5),
            batch_size=6,
        )

    for stored in (4, 10, 17):
        with make(10) as rb, make(10) as other:
            rb.extend(rows(0, stored))
            rb.update_priority(torch.arange(len(rb)), torch.arange(1.0, len(rb) + 1))
            state = rb.state_dict()
            assert set(state) == {
                "_storage",
                "_sampler",
                "_writer",
                "_transforms",
                "_batch_size",
                "_consume_after_n_samples",
                "_rng",
            }
            assert state["_writer"] == {"_cursor": stored % 10, "_write_count": stored}
            drawn = rb.sample()
            rb.extend(rows(90, 3))
            other.extend(rows(50, 2))
            other.load_state_dict(state)
            reference = torch.zeros(min(stored, 10), dtype=torch.int64)
            for i in range(stored):
                reference[i % 10] = i
            assert other["k"].tolist() == reference.tolist(), "each row in its slot; the state is a copy"
            lo, hi = other.buffer.window
            assert other.buffer.priorities(range(lo, hi)).tolist() == pytest.approx(
                [float(k % 10 + 1) for k in range(max(0, stored - 10), stored)], rel=1e-4
            )
            assert other.extend(rows(70, 1)).tolist() == [stored % 10], "and goes on where it was"
            assert other.batch_size == 6 and len(drawn) == 6
    with make(10) as rb, make(3) as small, TensorDictReplayBuffer(storage=ShmStorage(10)) as uniform:
        rb.extend(rows(0, 9))
        for other, text in ((small, "do not fit the capacity of 3"), (uniform, "sampler 'prioritized'")):
            other.extend(rows(0, 2))
            with pytest.raises(ValueError, match=text):
                other.load_state_dict(rb.state_dict())
            assert len(other) == 2
        rb.load_state_dict(make(10).state_dict())
        assert len(rb) == 0, "the state of an empty buffer"


def test_a_state_some_of_whose_rows_were_overwritten_brings_back_each_once(make_name):
    """So is the state of a full buffer that others write to meanwhile: its oldest rows are missing."""

    def make():
        return TensorDictReplayBuffer(
            storage=ShmStorage(10, name=make_name(), drain="caller"), sampler=PrioritizedSampler(10)
        )

    for missing in (1, 3, 9):
        with make() as rb, make() as other:
            rb.extend(rows(0, 17))
            state = rb.state_dict()
            kept, sampler = state["_storage"], state["_sampler"]
            kept["rows"], kept["first"] = kept["rows"][missing:], (kept["first"] + missing) % 10
            sampler["priority"], kept["streams"] = sampler["priority"][missing:], kept["streams"][missing:]
            other.load_state_dict(state)
            assert other["k"].tolist() == list(range(7 + missing, 17))


def test_a_state_has_no_row_that_is_overwritten_before_its_priority_is_read(make_name, monkeypatch):
    """It was taken with a priority of NaN, which nobody could load."""
    with TensorDictReplayBuffer(
        storage=ShmStorage(10, name=make_name(), drain="caller"), sampler=PrioritizedSampler(10)
    ) as rb:
        rb.extend(rows(0, 17))
        priorities = rb.buffer.priorities

        def late(ids):
            monkeypatch.undo()
            rb.extend(rows(17, 2))
            return priorities(ids)

        monkeypatch.setattr(rb.buffer, "priorities", late)
        state = rb.state_dict()
        rb.load_state_dict(state)
        assert rb["k"].tolist() == list(range(9, 17)) and rb.buffer.window[1] % 10 == 8


def test_query_goes_through_the_face(make_name):
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=make_name(), trajectories=True)) as rb:
        assert rb.query() == []
        for episode, length in ((0, 4), (1, 6)):
            rb.extend(TensorDict({"episode": torch.full((length,), episode), "reward": torch.ones(length)}, [length]))
        assert [t.length for t in rb.query(trajectory_key="episode")] == [4, 6]
        assert [t.length for t in rb.query(shmbuf.traj.reward.sum() > 5, trajectory_key="episode")] == [6]


def test_private_words_of_torchrls_tests(make_rb):
    rb = make_rb(5)
    rb.extend(rows(0, 7))
    assert rb._storage is rb.storage and rb._sampler is rb.sampler
    assert (rb._writer._cursor, rb.writer._write_count) == (2, 7)


def test_dumps_and_loads_and_their_other_names(make_rb, tmp_path):
    rb = make_rb(10)
    rb.extend(rows(0, 7))
    for name, (out, back) in enumerate([(rb.dumps, "loads"), (rb.dump, "load"), (rb.save, "load")]):
        out(tmp_path / str(name))
        other = make_rb(10)
        getattr(other, back)(tmp_path / str(name))
        assert same(other[:], rb[:])


def test_loads_and_dumps_take_what_the_checkpoint_rooms_take(make_rb, tmp_path):
    rb, told = make_rb(10), []
    rb.extend(rows(0, 10))

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    rb.save(tmp_path / "c", complete=True, timeout=60, progress=tell)
    assert told[-1] == (10, 10)
    told.clear()
    rb.load(tmp_path / "c", timeout=60, progress=tell)
    assert told[-1] == (10, 10) and same(rb[:], rows(0, 10))
    with rb.buffer.pin(seconds=None), pytest.raises(TimeoutError, match=r"0\.1"):  # writers wait for the pin
        rb.loads(tmp_path / "c", timeout=0.1)


def test_hooks_change_what_is_saved_and_what_is_loaded(make_rb, tmp_path):
    rb, other = (make_rb(10, schema={"k": torch.int64}) for _ in range(2))
    rb.extend(rows(0, 7).select("k"))
    rb.register_save_hook(lambda td: td.set("k", td["k"] + 1))
    rb.dumps(tmp_path / "a")
    assert rb["k"].tolist() == list(range(7))
    other.register_load_hook(lambda td: td.set("k", td["k"] * 2))
    other.loads(tmp_path / "a")
    assert other["k"].tolist() == [2, 4, 6, 8, 10, 12, 14]
