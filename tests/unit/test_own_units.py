"""A sample unit of the user's own, and words of TorchRL's constructors: `replacement=`, tensors of one number, dicts with int keys."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SampleUnit,
    ShmStorage,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from shmbuf.errors import BufferFormatError, SchemaError


class Twice(SampleUnit):
    """Each anchor two times, and the row before it (or itself) in between."""

    def expand(self, index, info, storage):
        assert set(info) <= {"priority_weight"}
        index = torch.as_tensor(index)
        out = torch.stack([index, (index - 1).clamp(0), index], 1).reshape(-1)
        info = {k: v.repeat_interleave(3) for k, v in info.items()}
        return out, {**info, "part": torch.arange(3).repeat(len(index)), "said": 3.0}


class Lanes(SampleUnit):
    def expand(self, index, info, storage):
        time, lane = index
        return (time.repeat_interleave(2), torch.tensor([0, 1]).repeat(len(lane))), info


def test_a_unit_of_ones_own_makes_the_batch(make_name):
    name = make_name()
    with TensorDictReplayBuffer(
        storage=ShmStorage(10, name=name, drain="caller"),
        sampler=PrioritizedSampler(10),
        sample_unit=Twice(),
        batch_size=4,
    ) as rb:
        rb.extend(TensorDict({"k": torch.arange(14)}, [14]))
        td, info = rb.sample(return_info=True)
        assert td.batch_size == (12,) and (td["k"] == td["row_id"]).all() and (td["k"] % 10 == td["index"]).all()
        slot = td["index"].reshape(4, 3)
        assert (slot[:, 0] == slot[:, 2]).all() and (slot[:, 1] == (slot[:, 0] - 1).clamp(0)).all()
        assert td["part"].tolist() == [0, 1, 2] * 4 and "said" not in td.keys(True)
        assert set(info) == {"index", "row_id", "priority_weight", "part"}
        td["td_error"] = torch.ones(12)
        rb.update_tensordict_priority(td)
        other = pickle.loads(pickle.dumps(rb))
        with other:
            assert len(other.sample()) == 12, "it travels by pickle"
        with pytest.raises(BufferFormatError, match=r"class Twice: attach\(name, sample_unit=\)"):
            shmbuf.attach(name)
        with shmbuf.attach(name, sample_unit=Twice()) as attached:
            assert len(attached.sample()) == 12


def test_a_unit_of_ones_own_over_lanes():
    with TensorDictReplayBuffer(storage=ShmStorage(6, ndim=2), sample_unit=Lanes(), batch_size=4) as rb:
        rb.extend(TensorDict({"k": torch.arange(6).reshape(2, 3)}, [2, 3]))
        td = rb.sample()
        assert td["index"].shape == (8, 2) and td["index"][:, 1].tolist() == [0, 1] * 4
        assert (td["k"] == td["index"][:, 0] + 3 * td["index"][:, 1]).all()


def test_what_is_no_unit_is_refused():
    class Nothing(SampleUnit):
        pass

    for unit in (object(), Nothing()):
        with pytest.raises(TypeError, match="sample_unit is one of"):
            ReplayBuffer(storage=ShmStorage(10), sample_unit=unit)


def test_replacement_chooses_the_class():
    assert type(RandomSampler(replacement=True)) is RandomSampler
    s = RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert type(s) is SamplerWithoutReplacement and s.drop_last and not s.shuffle
    assert type(SamplerWithoutReplacement(replacement=False)) is SamplerWithoutReplacement
    s = SliceSampler(replacement=False, slice_len=5, drop_last=True, traj_key="episode")
    assert type(s) is SliceSamplerWithoutReplacement and s.drop_last and s.slice_len == 5
    assert type(SliceSampler(slice_len=5)) is SliceSampler
    assert type(PrioritizedSliceSampler(slice_len=5)) is PrioritizedSliceSampler
    for cls, kw in ((PrioritizedSampler, {}), (PrioritizedSliceSampler, {"slice_len": 5})):
        with pytest.raises(TypeError, match=r"no (variant without replacement|without-replacement variant)"):
            cls(replacement=False, **kw)
    for cls, kw in ((SamplerWithoutReplacement, {}), (SliceSamplerWithoutReplacement, {"slice_len": 5})):
        with pytest.raises(ValueError, match="replacement=True"):
            cls(replacement=True, **kw)
    for s in (RandomSampler(), SliceSampler(slice_len=5), SliceSampler(replacement=False, slice_len=5)):
        assert type(pickle.loads(pickle.dumps(s))) is type(s)
    with ReplayBuffer(storage=ShmStorage(11), sampler=RandomSampler(replacement=False), batch_size=3) as rb:
        rb.extend(torch.arange(11))
        assert sorted(i for _ in range(4) for i in rb.sample().tolist()) == list(range(11))


def test_alpha_beta_and_eps_may_be_tensors_of_one_number():
    s = PrioritizedSampler(
        alpha=torch.tensor(0.5), beta=torch.tensor([0.25]), eps=torch.tensor(0.5, dtype=torch.float64)
    )
    assert (s.alpha, s.beta, s.eps) == (0.5, 0.25, 0.5) and type(s.beta) is float
    s.beta = torch.tensor(0.75)
    assert s.beta == 0.75
    with TensorDictReplayBuffer(storage=ShmStorage(4), sampler=s, batch_size=2) as rb:
        rb.extend(TensorDict({"k": torch.arange(4)}, [4]))
        assert rb.sample(beta=torch.tensor(0.5))["priority_weight"].tolist() == [1, 1]
    for wrong in (torch.tensor([0.1, 0.2]), torch.tensor(float("nan")), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match="a finite number"):
            PrioritizedSampler(alpha=wrong)
        with pytest.raises(ValueError, match="a finite number"):
            s.beta = wrong


def test_dicts_with_int_keys_come_back_as_they_went_in():
    with ReplayBuffer(storage=ShmStorage(10), batch_size=2) as rb:
        rb.add({"a": torch.ones(3), 30: {-1: torch.zeros(())}})
        assert {k: type(v) for k, v in rb.sample().items()} == {"a": torch.Tensor, 30: dict}
        assert rb[0][30][-1] == 0
        with pytest.raises(SchemaError, match="the buffer's are"):
            rb.add({"a": torch.ones(3), "30": {"-1": torch.zeros(())}})
    with ReplayBuffer(storage=ShmStorage(10)) as rb:
        for wrong in (
            {1: torch.ones(1), "1": torch.ones(1)},
            {2.0: torch.ones(1)},
            {True: torch.ones(1)},
            {2**63: torch.ones(1)},
        ):
            with pytest.raises(SchemaError, match="key"):
                rb.add(wrong)
        assert not rb.initialized
