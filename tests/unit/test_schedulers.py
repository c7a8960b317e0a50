"""Annealing of sampler attributes: TorchRL's classes, their values step by step."""

from __future__ import annotations

import json

import pytest
import torch

from shmbuf import PrioritizedSampler, RandomSampler, StalenessAwareSampler
from shmbuf.schedulers import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
from tests.unit.helpers_torch import rows


def values(scheduler, steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        scheduler.step()
        out.append(getattr(scheduler.sampler, scheduler.param_name))
    return out


def test_linear_goes_to_its_final_value_and_stays():
    s = LinearScheduler(PrioritizedSampler(beta=0.4), "beta", final_value=1.0, num_steps=4)
    assert values(s, 6) == pytest.approx([0.55, 0.7, 0.85, 1.0, 1.0, 1.0])


def test_lambda_multiplies_the_initial_value():
    s = LambdaScheduler(PrioritizedSampler(beta=0.5), "beta", lambda step: step, max_value=1.2)
    assert values(s, 3) == pytest.approx([0.5, 1.0, 1.2])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"gamma": 0.1, "n_steps": 2, "mode": "additive", "max_value": 0.65}, [0.4, 0.5, 0.5, 0.6, 0.6, 0.65]),
        ({"gamma": 0.5, "min_value": 0.09}, [0.2, 0.1, 0.09, 0.09, 0.09, 0.09]),
    ],
)
def test_step(how, expected):
    assert values(StepScheduler(PrioritizedSampler(beta=0.4), "beta", **how), 6) == pytest.approx(expected)


def test_of_a_replay_buffer_its_sampler_is_annealed(make_rb):
    rb = make_rb()
    rb.set_sampler(PrioritizedSampler(beta=0.0))
    scheduler = LinearScheduler(rb, "beta", final_value=1.0, num_steps=2)
    rb.extend(rows(0, 4))
    rb.update_priority([0, 1, 2, 3], [1.0, 8.0, 8.0, 8.0])
    assert (rb.sample(50)["priority_weight"] == 1).all()
    scheduler.step(), scheduler.step()
    batch = rb.sample(200)
    light = batch["index"] > 0
    expected = (((8 + 1e-8) / (1 + 1e-8)) ** 0.6) ** -1
    assert torch.allclose(batch["priority_weight"][light], torch.tensor(expected, dtype=torch.float32))


def test_a_whole_number_stays_one():
    sampler = StalenessAwareSampler(max_staleness=10)
    assert values(LinearScheduler(sampler, "max_staleness", final_value=1, num_steps=4), 5) == [8, 6, 3, 1, 1]
    sampler.max_staleness = 8
    assert values(StepScheduler(sampler, "max_staleness", gamma=0.5), 4) == [4, 2, 1, 0]


def test_state_goes_on_in_another_process():
    a = SchedulerList(StepScheduler(PrioritizedSampler(beta=0.4), "beta", gamma=0.1, mode="additive"))
    a.append(LinearScheduler(PrioritizedSampler(beta=0.0), "beta", 1.0, 10))
    for _ in range(3):
        a.step()
    state = json.loads(json.dumps(a.state_dict()))
    b = SchedulerList(
        [
            StepScheduler(PrioritizedSampler(beta=0.9), "beta", gamma=0.1, mode="additive"),
            LinearScheduler(PrioritizedSampler(beta=0.9), "beta", 1.0, 10),
        ]
    )
    b.load_state_dict(state)
    assert [s.sampler.beta for s in b.schedulers] == pytest.approx([0.7, 0.3])
    b.step()
    assert [s.sampler.beta for s in b.schedulers] == pytest.approx([0.8, 0.4])
    with pytest.raises(ValueError, match="state of 2 schedulers, there are 1"):
        SchedulerList(b.schedulers[0]).load_state_dict(state)


def test_bad_input():
    sampler = PrioritizedSampler()
    with pytest.raises(TypeError, match="not dict"):
        LinearScheduler({}, "beta", 1.0, 4)
    with pytest.raises(ValueError, match="RandomSampler has no attribute 'beta'"):
        LinearScheduler(RandomSampler(), "beta", 1.0, 4)
    with pytest.raises(ValueError, match="is no number"):
        LinearScheduler(sampler, "reduction", 1.0, 4)
    with pytest.raises(ValueError, match="num_steps=0"):
        LinearScheduler(sampler, "beta", 1.0, 0)
    with pytest.raises(ValueError, match="mode='geometric'"):
        StepScheduler(sampler, "beta", mode="geometric")
    with pytest.raises(ValueError, match="min_value=2 is above max_value=1"):
        LambdaScheduler(sampler, "beta", lambda s: s, 2, 1)
    scheduler = StepScheduler(sampler, "beta", gamma=-2.0)
    with pytest.raises(ValueError, match="beta=-0.8"):
        scheduler.step()
    assert sampler.beta == 0.4, "the sampler refuses, and keeps its value"
