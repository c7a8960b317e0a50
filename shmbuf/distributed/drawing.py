"""Drawing a batch out of many shards: how many rows of each, and what weight they have.

A row i of shard k, whose mass is M_k of ΣM, is drawn with probability ``q_i = M_k / ΣM * p_i / T_k``: p_i is its leaf, (priority + eps) ** alpha,
and T_k the sum of the shard's leaves when it drew. Its weight is ``(q_i / q_min) ** -beta``, q_min over the rows of all shards
(Schaul et al. 2016, eq. 3.4 divided by its maximum). At rest T_k = M_k, and both are those of one buffer that holds all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.attaching import attach
from shmbuf.distributed.pool import Pool
from shmbuf.errors import NotEnoughRows
from shmbuf.samplers import (
    SAMPLERS,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)


class Mass(NamedTuple):
    """Of a shard: rows, sum of what they are drawn by (of a uniform sampler: rows), the least of it."""

    size: int
    sum: float
    least: float


NOTHING = Mass(0, 0.0, float("inf"))


class Part(NamedTuple):
    """What a shard drew. leaves: float64[n], of a prioritised sampler; mass: just before the draw."""

    td: Any
    leaves: np.ndarray | None
    mass: Mass


_KINDS = (RandomSampler, PrioritizedSampler, SliceSampler, PrioritizedSliceSampler, SamplerWithoutReplacement)


def check_sampler(sampler: Any) -> Sampler:
    """Whether shards can draw this way, each for itself. Raises TypeError, ValueError."""
    if type(sampler) not in _KINDS:
        raise TypeError(
            f"{type(sampler).__name__}: shards draw, each for itself, by one of {', '.join(k.__name__ for k in _KINDS)}"
        )
    if getattr(sampler, "normalize", "buffer") not in ("buffer", "batch"):
        raise ValueError(f"normalize={sampler.normalize!r}")
    return sampler


def is_prioritized(sampler: Sampler) -> bool:
    return isinstance(sampler, PrioritizedSampler)


def unit_of(sampler: Sampler, batch: int) -> int:
    """Rows that have to be drawn together, out of one shard. Raises RuntimeError if the batch is not made of them."""
    if not isinstance(sampler, SliceSampler):
        return 1
    return sampler._shape(batch)[1]


def spec_of(sampler: Sampler, batch: int | None) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the sampler of one shard. batch: rows of a batch of all shards; None: it is only to say what it needs."""
    arguments = sampler.arguments()
    arguments.pop("max_capacity", None)
    if isinstance(sampler, SliceSampler) and batch is not None:
        arguments.update(num_slices=None, slice_len=unit_of(sampler, batch))
    return sampler.name, arguments


class Spec(NamedTuple):
    """How a shard is to draw: name and arguments of its sampler. owner: of whom it is, if it is one handle's own; seed: of that one."""

    kind: str
    arguments: dict[str, Any]
    owner: str | None = None
    seed: int | None = None

    @classmethod
    def of(cls, sampler: Sampler, n: int, owner: str, seed: int | None) -> Spec:
        """Of batches of n rows by this handle. What may change from draw to draw is not in it: weights are made of the leaves, by who draws."""
        kind, arguments = spec_of(sampler, n)
        if is_prioritized(sampler):
            arguments.update(beta=1.0, normalize="buffer")
        alone = isinstance(sampler, SamplerWithoutReplacement)
        if alone:
            arguments["drop_last"] = False
        return cls(kind, arguments, owner if alone or seed is not None else None, seed)

    def at(self, shard: int) -> Spec:
        """That shard's: shards draw different numbers."""
        if self.seed is None:
            return self
        words = np.random.SeedSequence([self.seed % 2**64, shard]).generate_state(1, np.uint64)
        return self._replace(seed=int(words[0] >> np.uint64(1)))


class Drawer:
    """Draws from one segment, on its node. rb: an attached replay buffer with the shard's sampler."""

    def __init__(self, rb: Any):
        self.rb = rb

    def mass(self) -> Mass:
        buffer = self.rb.buffer
        size = len(buffer) if buffer.schema is not None else 0
        if not size:
            return NOTHING
        if not is_prioritized(self.rb.sampler):
            return Mass(size, float(size), 1.0)
        state = buffer._get("priorities")
        return Mass(size, state["sum"], state["min"]) if state and state["sum"] > 0 else NOTHING

    def draw(self, n: int) -> Part:
        """n rows, fewer where trajectories end. Raises NotEnoughRows."""
        rb = self.rb
        mass = self.mass()
        if is_prioritized(rb.sampler):
            if not mass.sum:
                raise NotEnoughRows(f"no row of buffer {rb.name!r} has a priority above 0")
            td, leaves = rb.sampler.with_leaves(rb.storage, n)
            return Part(td, leaves.astype(np.float64), mass)
        td = rb.sampler.sample(rb.storage, n)
        if not isinstance(rb.sampler, SamplerWithoutReplacement):
            return Part(td, None, mass)
        tds, missing = [td], n - len(td)
        while missing and len(tds[-1]):  # into the next epoch; a batch may be longer than several
            tds.append(rb.sampler.sample(rb.storage, missing))
            missing -= len(tds[-1])
        whole: Any = td if len(tds) == 1 else torch.cat(tds)  # type: ignore[arg-type]
        return Part(whole, None, mass)


class Drawers:
    """Those of one segment, for each way of drawing. segment: its name.

    At most ``most``: another one takes the place of the one that was idle longest, whose epoch begins anew if it is asked for again.
    """

    def __init__(self, segment: Callable[[], str], most: int):
        self._segment = segment
        self._pool: Pool[Drawer] = Pool(most, lambda drawer: drawer.rb.close(), self._full)

    def __len__(self) -> int:
        return len(self._pool)

    def _full(self, n: int) -> str:
        return f"{n} ways of drawing from segment {self._segment()!r} are in use at the same time, and no more are kept. Nothing was drawn"

    def _use(self, spec: Spec) -> Any:
        def make() -> Drawer:
            return Drawer(attach(self._segment(), sampler=SAMPLERS[spec.kind](**spec.arguments), seed=spec.seed))

        return self._pool.use((spec.owner, repr(spec)), make)

    def mass(self, spec: Spec) -> Mass:
        with self._use(spec) as drawer:
            return drawer.mass()

    def draw(self, spec: Spec, n: int) -> tuple[Part, Mass]:
        """And the mass there is for the next one."""
        with self._use(spec) as drawer:
            return drawer.draw(n), drawer.mass()

    def leave(self, owner: str) -> None:
        """That handle draws no more."""
        self._pool.drop(lambda key: key[0] == owner)

    def close(self) -> None:
        self._pool.drop(lambda key: True)


def counts_of(n: int, masses: np.ndarray, rng: np.random.Generator, stratified: bool = False) -> np.ndarray:
    """int64: how many of n draws go to each shard, by mass. stratified: one from each of n equal shares of the sum."""
    total = masses.sum()
    if not total > 0:
        raise NotEnoughRows("Cannot sample from an empty storage. No shard holds rows that can be drawn")
    if not stratified:
        return rng.multinomial(n, masses / total)
    points = (np.arange(n) + rng.random(n)) / n * total
    which = np.minimum(np.searchsorted(np.cumsum(masses), points, side="right"), np.flatnonzero(masses)[-1])
    return np.bincount(which, minlength=len(masses))


def weights_of(
    parts: list[tuple[int, Part]], masses: dict[int, Mass], beta: float, by_batch: bool
) -> list[torch.Tensor]:
    """float32 weights of the rows of each part. masses: by shard, those that the counts were drawn with."""
    total = sum(m.sum for m in masses.values())
    probabilities = []
    for k, part in parts:
        assert part.leaves is not None
        probabilities.append(masses[k].sum / total * part.leaves / part.mass.sum)
    every = [q.min() for q in probabilities if len(q)]
    if not by_batch:
        drawn = dict(parts)
        for k, m in masses.items():
            at = drawn[k].mass if k in drawn else m
            if at.sum > 0:
                every.append(m.sum / total * at.least / at.sum)
    least = min(every, default=1.0)
    return [torch.from_numpy(((q / least) ** -beta).astype(np.float32)) for q in probabilities]


def assembled(parts: list[tuple[int, TensorDictBase]], order: torch.Tensor | None) -> TensorDictBase:
    """One batch, with "shard". order: where its rows go; None: one shard's after the other's."""
    for k, td in parts:
        td.set("shard", torch.full(td.batch_size, k, dtype=torch.int64))
    tds = [td for _, td in parts]
    if len(tds) == 1:
        return tds[0]  # its rows are in no order
    whole: Any = torch.cat(tds)  # type: ignore[arg-type]
    return whole if order is None else whole[order]
