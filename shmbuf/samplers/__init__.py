"""Ways of drawing rows."""

from __future__ import annotations

from shmbuf.samplers.base import RandomSampler, Sampler
from shmbuf.samplers.prioritized import PrioritizedSampler

# By the name that a segment keeps: attaching imports no class of the user's.
SAMPLERS: dict[str, type[Sampler]] = {c.name: c for c in (RandomSampler, PrioritizedSampler)}

__all__ = ["SAMPLERS", "PrioritizedSampler", "RandomSampler", "Sampler"]
