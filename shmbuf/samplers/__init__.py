"""Ways of drawing rows."""

from __future__ import annotations

from shmbuf.samplers.base import RandomSampler, Sampler
from shmbuf.samplers.ensemble import SamplerEnsemble
from shmbuf.samplers.epochs import ConsumingSampler, NewestSampler, SamplerWithoutReplacement
from shmbuf.samplers.prioritized import PrioritizedSampler
from shmbuf.samplers.prioritized_slices import PrioritizedSliceSampler
from shmbuf.samplers.sequences import NStep, SampleUnit, Sequence, Transition
from shmbuf.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from shmbuf.samplers.staleness import StalenessAwareSampler

# By the name that a segment keeps: attaching imports no class of the user's.
SAMPLERS: dict[str, type[Sampler]] = {
    c.name: c
    for c in (
        RandomSampler,
        PrioritizedSampler,
        SamplerWithoutReplacement,
        ConsumingSampler,
        NewestSampler,
        StalenessAwareSampler,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        PrioritizedSliceSampler,
    )
}

__all__ = [
    "SAMPLERS",
    "ConsumingSampler",
    "NStep",
    "NewestSampler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "Transition",
]
