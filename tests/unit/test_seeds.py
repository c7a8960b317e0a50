"""`set_rng` and `seed=` make every sampler repeatable for the same stored rows, in this and in another process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    Buffer,
    NewestSampler,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)

MAKERS = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7),
    "stratified": lambda: PrioritizedSampler(alpha=0.7, stratified=True),
    "epochs": SamplerWithoutReplacement,
    "drop_last": lambda: SamplerWithoutReplacement(drop_last=True),
    "newest": NewestSampler,
    "staleness": StalenessAwareSampler,
    "staleness uniform": lambda: StalenessAwareSampler(30, "uniform"),
    "staleness own": lambda: StalenessAwareSampler(staleness_weight_fn=lambda s: 1 / (s.abs() + 1)),
}
ROWS, BATCH, BATCHES = 40, 8, 12


def fill(rb) -> None:
    k = torch.arange(ROWS)
    rb.extend(TensorDict({"k": k, "policy_version": k}, [ROWS]))
    if isinstance(rb.sampler, PrioritizedSampler):
        rb.update_priority(k, 1.0 + k % 7)


def draws(rb) -> list[list[int]]:
    return [rb.sample(BATCH)["row_id"].tolist() for _ in range(BATCHES)]


@pytest.fixture(params=MAKERS)
def rb(request, make_name):
    storage = shmbuf.ShmStorage(100, name=make_name(), drain="caller")
    with shmbuf.TensorDictReplayBuffer(storage=storage, sampler=MAKERS[request.param](), batch_size=BATCH) as rb:
        fill(rb)
        yield rb
        rb.destroy()


def own_function(rb) -> bool:
    return callable(getattr(rb.sampler, "staleness_weight_fn", None))


def test_the_same_generator_state_draws_the_same(rb):
    results = []
    for state in (3, 3, 4):
        with shmbuf.attach(rb.name) as other:
            if own_function(rb):
                other.set_sampler(rb.sampler)
            other.set_rng(torch.Generator().manual_seed(state))
            results.append(draws(other))
    assert results[0] == results[1]
    if not isinstance(rb.sampler, NewestSampler):
        assert results[0] != results[2] and len({tuple(b) for b in results[0]}) > 1


def test_a_generator_set_back_repeats_in_the_same_handle(rb):
    generator, results = torch.Generator(), []
    for _ in range(2):
        if isinstance(rb.sampler, SamplerWithoutReplacement):
            while not rb.sampler.ran_out:  # where an epoch ends the next order is drawn
                rb.sample(BATCH)
        rb.set_rng(generator.manual_seed(5))
        results.append(draws(rb))
    assert results[0] == results[1]


def test_the_same_seed_draws_the_same(rb):
    results = []
    for seed in (11, 11, 12):
        with shmbuf.attach(rb.name, seed=seed) as other:
            if own_function(rb):
                other.set_sampler(rb.sampler)
            results.append(draws(other))
    assert results[0] == results[1]
    assert isinstance(rb.sampler, NewestSampler) or results[0] != results[2]


def test_unseeded_handles_draw_differently(rb):
    if isinstance(rb.sampler, NewestSampler):
        pytest.skip("nothing to draw")
    with shmbuf.attach(rb.name) as a, shmbuf.attach(rb.name) as b:
        if own_function(rb):
            a.set_sampler(rb.sampler), b.set_sampler(rb.sampler)
        assert draws(a) != draws(b)


STRANGER = """
import json, sys, torch, shmbuf
from tests.unit.test_seeds import MAKERS, draws
rb = shmbuf.attach(sys.argv[1], seed=21)
out = {}
for name, make in MAKERS.items():
    if not name.startswith("staleness own"):
        rb.set_sampler(make())
        rb.buffer.seed(21)
        seeded = draws(rb)
        rb.set_sampler(make())
        rb.set_rng(torch.Generator().manual_seed(22))
        out[name] = [seeded, draws(rb)]
        rb.set_rng(None)
print(json.dumps(out))
"""


def test_another_process_draws_the_same(make_name):
    """All kinds in one process, which has to import torch."""
    storage = shmbuf.ShmStorage(100, name=make_name(), drain="caller")
    with shmbuf.TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.7)) as rb:
        fill(rb)
        done = subprocess.run([sys.executable, "-c", STRANGER, rb.name], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        there = json.loads(done.stdout)
        assert len(there) == len(MAKERS) - 1
        for name, results in there.items():
            rb.set_rng(None)
            rb.set_sampler(MAKERS[name]())
            rb.buffer.seed(21)
            assert draws(rb) == results[0], name
            rb.set_sampler(MAKERS[name]())
            rb.set_rng(torch.Generator().manual_seed(22))
            assert draws(rb) == results[1], name
        rb.destroy()


@pytest.mark.parametrize("kind", ["shared", "consuming"])
def test_what_readers_share_is_repeatable_by_the_samplers_own_seed(make_name, kind):
    """Their order is everybody's: no handle's seed can decide it. The same seed orders the same rows of another buffer the same."""
    results = []
    for seed in (1, 1, 2, None, None):
        with Buffer.create(make_name(), 100, schema={"k": "int64"}, drain="caller") as buf:
            buf.extend({"k": torch.arange(ROWS).numpy()})
            buf.seed(7)
            reader = buf.epoch(shared=True, seed=seed) if kind == "shared" else buf.consume(2, seed=seed)
            results.append([reader.draw(BATCH)[1].tolist() for _ in range(2 * ROWS // BATCH)])
    assert results[0] == results[1] != results[2] and results[3] != results[4]
