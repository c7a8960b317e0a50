"""Batches out of all shards, and their priorities back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.attaching import numbers, positive
from shmbuf.distributed.drawing import (
    NOTHING,
    Mass,
    Part,
    Spec,
    assembled,
    counts_of,
    unit_of,
    weights_of,
)
from shmbuf.distributed.limiting import AHEAD
from shmbuf.distributed.links import Link, lost_is_gone
from shmbuf.distributed.rays import Gone, Late, Silent, ask, check_process, short
from shmbuf.distributed.sharing import REFRESH, Sharing
from shmbuf.errors import Lapped, NotEnoughRows, ShmbufError, StorageLost
from shmbuf.face.prefetching import Prefetcher
from shmbuf.priorities import as_priorities, check_weighting
from shmbuf.samplers import PrioritizedSampler, Sampler, SamplerWithoutReplacement, SliceSampler
from shmbuf.schema import show_key
from shmbuf.ticket import left_of, seconds_of

_PAUSE = 0.01
_ROUNDS = 50
"""Times in a row that shards give nothing of what is missing of a batch."""


class Unanswered(StorageLost):
    """No shard answers, but some live: whoever waits for rows waits on."""


class _Drawing(NamedTuple):
    """A batch on its way: asked of shards, how many rows each; masses that the counts were drawn with; who draws them."""

    masses: dict[int, Mass]
    asked: list[tuple[Link, int, Any]]
    sampler: Sampler


class Reading(Sharing):
    """`sample`, iterating, priorities, figures."""

    _iterator: Iterator[Any] | None = None
    _regime = -1

    def _use_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._credit = 0
        self._forget_masses()

    def _forget_masses(self) -> None:
        for link in self._links.values():
            link.last = None

    # ---- drawing ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = 0.0,
        beta: float | None = None,
    ) -> Any:
        """A batch of rows of all shards, as copies, with "shard", "row_id", "index" (the slot in its shard) and, by priority,
        "priority_weight" (float32[n]: relative to the least likely row of all shards).

        Args:
            batch_size: instead of the constructor's. return_info: True: (batch, those entries as a dict).
            timeout: seconds to wait for rows, and for the limiter; None: for ever. beta: for this call.

        With a seed (`attach`) and no prefetch the same calls draw the same of the same stored rows, unless a shard's actor is started again.

        Raises:
            NotEnoughRows: no shard has rows; or the limiter. StorageLost: all shards are lost, or none of them answers.
            TypeError: beta for a sampler that gives no weights.
        """
        self._check_open()
        n = positive(batch_size) if batch_size is not None else self.batch_size
        if n is None:
            raise RuntimeError(
                "batch_size not specified. You can specify the batch_size when constructing the replay buffer, "
                "or pass it to the sample method."
            )
        if not n:
            raise ValueError("batch_size=0: a batch out of shards has at least one row")
        if beta is not None:
            check_weighting(beta, "buffer")
            if not isinstance(self._sampler, PrioritizedSampler):
                raise TypeError(f"beta={beta}: a {type(self._sampler).__name__} gives no weights")
        if self._ahead is not None and n == self.batch_size and beta is None:
            try:
                td, info = self._ahead.take()
                return (td, info) if return_info or include_info else td
            except (NotEnoughRows, Unanswered):
                self._ahead.clear()
        since, seconds = time.monotonic(), seconds_of(timeout)
        self._permit(n, timeout)
        try:
            while True:
                try:
                    td = self._complete(self._begin(self._sampler, n, fresh=True), beta)
                    break
                except (NotEnoughRows, Unanswered):
                    left = left_of(timeout, since)
                    if seconds == 0 or (left is not None and left <= 0):
                        raise
                    time.sleep(_PAUSE)
        except BaseException:
            self._give(n)
            raise
        td, info = self._finished(td)
        return (td, info) if return_info or include_info else td

    def _readable(self) -> list[Link]:
        """The shards to sample: this train worker's, or all; without those that say nothing. Raises StorageLost, Unanswered."""
        give_up = time.monotonic() + self._settings.remote_timeout
        while True:
            links = self._living()
            if self._only is not None:
                mine = self._mine()
                links = [k for k in links if k.number in mine] or links
            found = []
            for link in links:
                try:
                    if link.usable:
                        found.append(link)
                except Gone as e:
                    self._lose(link.number, str(e))
            if not self._directory.living():
                raise StorageLost(
                    f"all {len(self._directory.shards)} shards of buffer {self.name!r} are lost: {self._lost}"
                )
            if found:
                return found
            if time.monotonic() > give_up:
                raise self._unanswered()
            time.sleep(_PAUSE)

    def _unanswered(self) -> Unanswered:
        silent = ", ".join(f"{k.number} on node {short(k.entry.node)}" for k in self._links.values() if k.silent)
        return Unanswered(
            f"no shard of buffer {self.name!r} that could be sampled has answered within {self._settings.remote_timeout:g} s; silent: {silent}. "
            "Their processes are stopped or being started again, or the network is down; none is known to be lost. timeout= waits longer"
        )

    def _mine(self) -> set[int]:
        """Of this train worker: as it was told; and what took the place of a shard that was lost."""
        assert self._only is not None
        now = time.monotonic()
        if any(k in self._lost for k in self._only) and now - self._asked_only > REFRESH:
            self._asked_only = now
            with contextlib.suppress(Gone, Silent):
                self._only = ask(self._asking("shards_of", self._worker), 1.0)
        return set(self._only or ())

    _asked_only = float("-inf")

    def _masses(self, links: list[Link], spec: Spec, fresh: bool) -> dict[int, Mass]:
        """Asked of all at once; fresh=False: what they last told will do."""
        out: dict[int, Mass] = {}
        asked: list[tuple[Link, Any]] = []
        for link in links:
            known = link.last
            if known is not None and not fresh and not link.is_local:
                out[link.number] = known
                continue
            try:
                asked.append((link, link.ask_mass(spec)))
            except Gone as e:
                self._lose(link.number, str(e))
        give_up = time.monotonic() + self._settings.remote_timeout
        for link, what in asked:
            try:
                out[link.number] = link.mass(what, give_up)
            except Gone as e:
                self._lose(link.number, str(e))
            except Silent:
                link.went_silent()
        return out

    def _begin(self, sampler: Sampler, n: int, fresh: bool, without: frozenset[int] = frozenset()) -> _Drawing:
        """Ask shards for their parts of n rows. Local rows are drawn now; others are on their way."""
        spec, unit = Spec.of(sampler, n, self._identity, self._seed), unit_of(sampler, n)
        while True:
            links = [k for k in self._readable() if k.number not in without]
            masses = self._masses(links, spec, fresh)
            if not fresh and not any(m.sum > 0 for m in masses.values()):
                masses = self._masses(links, spec, True)
            if masses or not links:
                break
            if any(k.silent for k in links):
                raise self._unanswered()
        links = [k for k in links if k.number in masses]
        if not any(m.sum > 0 for m in masses.values()) and any(k.silent for k in self._links.values()):
            raise self._unanswered()
        stratified = bool(getattr(sampler, "stratified", False))
        shares = np.array([masses[k.number].sum for k in links], np.float64)
        counts = counts_of(n // unit, shares, self._rng, stratified)
        asked = [(k, int(c) * unit) for k, c in zip(links, counts, strict=True) if c]
        asked.sort(key=lambda a: a[0].is_local)  # those of other nodes first: they draw meanwhile
        return _Drawing(masses, [(k, rows, k.ask_part(spec, rows)) for k, rows in asked], sampler)

    def _complete(self, drawing: _Drawing, beta: float | None = None) -> TensorDictBase:
        """What was asked for; what a shard cannot give is drawn from the others."""
        parts: list[tuple[int, Part]] = []
        masses, sampler, in_vain = dict(drawing.masses), drawing.sampler, 0
        while True:
            missing, failed, had = 0, set(), len(parts)
            give_up = time.monotonic() + self._settings.remote_timeout
            for link, rows, asked in drawing.asked:
                try:
                    part = link.part(asked, give_up)
                except Gone as e:
                    self._lose(link.number, str(e))
                except Silent:
                    link.went_silent()
                except (NotEnoughRows, Lapped):
                    pass
                else:
                    if len(part.td):
                        parts.append((link.number, part))
                    if isinstance(sampler, SamplerWithoutReplacement):
                        missing += rows - len(part.td)
                    continue
                failed.add(link.number)
                missing += rows
            drawn = {k for k, _ in parts}
            for k in failed - drawn:  # what it gave before was drawn by the mass it had
                masses[k] = NOTHING
            if not missing:
                break
            in_vain = in_vain + 1 if len(parts) == had else 0
            if in_vain > _ROUNDS:
                raise ShmbufError(
                    f"shards of buffer {self.name!r} gave fewer rows than they said they have, {_ROUNDS} times in a row"
                )
            drawing = self._begin(sampler, missing, True, frozenset(failed))
            for k, m in drawing.masses.items():
                if masses.get(k, NOTHING).sum == 0:
                    masses[k] = m
        return self._batch(parts, masses, sampler, beta)

    def _batch(
        self, parts: list[tuple[int, Part]], masses: dict[int, Mass], sampler: Sampler, beta: float | None
    ) -> TensorDictBase:
        if isinstance(sampler, PrioritizedSampler):
            exponent = sampler.beta if beta is None else float(beta)
            for (_, part), weights in zip(
                parts, weights_of(parts, masses, exponent, sampler.normalize == "batch"), strict=True
            ):
                part.td.set("priority_weight", weights)
        order = None
        if not isinstance(sampler, SliceSampler):
            order = torch.from_numpy(self._rng.permutation(sum(len(p.td) for _, p in parts)))
        return assembled([(k, p.td) for k, p in parts], order)

    def _finished(self, td: TensorDictBase) -> tuple[Any, dict[Any, Any]]:
        keys = ("index", "row_id", "shard", "priority_weight")
        info = {k: td.get(k) for k in keys if td.get(k, None) is not None}
        if len(self._transform):
            out = self._transform(td.unlock_())
            if isinstance(out, TensorDictBase) and out.batch_size == td.batch_size:
                out.update({k: v for k, v in info.items() if out.get(k, None) is None})
            td = out
        return td, info

    # ---- ahead ------------------------------------------------------------------------------------------------------

    def _set_prefetch(self, prefetch: int | None) -> None:
        depth = positive(prefetch, "prefetch", "a number of batches")
        if not depth:
            return
        n = self.batch_size
        if n is None:
            raise ValueError("prefetch needs a batch_size: batches of it are drawn ahead")

        def draw() -> _Drawing:
            self._permit(n, 0.0)
            try:
                return self._begin(self._sampler, n, fresh=False)
            except BaseException:
                self._give(n)
                raise

        def finish(drawing: _Drawing) -> tuple[Any, dict[Any, Any]]:
            try:
                return self._finished(self._complete(drawing))
            except BaseException:
                self._give(n)
                raise

        def refund(drawing: Any) -> None:
            self._give(n)

        self._ahead = Prefetcher(depth, draw, finish, lambda: self._sampler, refund)

    def __iter__(self) -> Iterator[Any]:
        """Batches for ever."""
        if self.batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of the replay buffer."
            )
        while True:
            yield self.sample()

    def next(self) -> Any:
        """The next batch."""
        return self.sample()

    # ---- the limiter ------------------------------------------------------------------------------------------------

    def _permit(self, n: int, timeout: float | None) -> None:
        """Until n rows may be sampled. NotEnoughRows: not within ``timeout`` seconds."""
        since, silent = time.monotonic(), None
        while True:
            if not self._directory.limited:
                return
            regime = self._directory.regime
            with self._mutex:
                if self._regime != regime:  # what another limiter granted is not this one's
                    self._credit, self._regime = 0, regime
                if self._credit >= n:
                    self._credit -= n
                    return
            left, why = left_of(timeout, since), "the coordinator does not answer"
            try:
                granted, why = self._granted(
                    n, regime, 10.0 if not timeout or left is None else min(10.0, max(0.05, left))
                )
                silent = None
            except Silent:  # it is being started again, which the default timeout allows for
                granted, silent = 0, silent or time.monotonic()
            except Gone as e:
                raise StorageLost(f"buffer {self.name!r} was shut down: {e}") from e
            if granted:
                with self._mutex:
                    self._credit += granted
                continue
            left = left_of(timeout, since)
            waiting = silent is not None and not timeout and time.monotonic() - silent < 30.0
            if left is not None and left <= 0 and not waiting:
                raise NotEnoughRows(f"the limiter of buffer {self.name!r} lets no batch of {n:,} be sampled: {why}")
            time.sleep(_PAUSE)

    def _granted(self, n: int, regime: int, seconds: float) -> tuple[int, str]:
        """Rows that may be sampled, or why none. What is answered too late is had by who asks next: nothing is granted twice."""
        with self._mutex:
            asked = self._asked.pop() if self._asked else None
        if asked is None:
            asked = self._asking("grant", n, AHEAD * n), regime
        try:
            granted, why = ask(asked[0], seconds)
        except (Late, KeyboardInterrupt):
            with self._mutex:
                self._asked.append(asked)
            raise
        return (granted, why) if asked[1] == regime else (0, "the limiter was changed")

    def _give(self, n: int) -> None:
        """n rows that were permitted are not drawn."""
        with self._mutex:
            self._credit += n

    def _refund(self) -> None:
        """Give back what was granted and not used."""
        with self._mutex:
            credit, self._credit = self._credit, 0
        if credit and self._directory.limited:
            self._asking("refund", credit, self._regime)

    # ---- priorities -------------------------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any, *, shard: Any = None, row_id: Any = None) -> None:
        """Set priorities of rows.

        Args:
            index: None: which row lay at a slot it does not say. Rows that come with their priority need none of this.
            priority: [n] or one number; finite, ≥ 0. shard, row_id: [n] each, as in a sample.

        Shards of other nodes are told without waiting; `synchronize` waits. A row that has been overwritten meanwhile is left alone, and
        counted (``priorities_stale``); so are those of shards that are lost or do not answer (``priorities_dropped``).

        Raises:
            ValueError, TypeError, IndexError: nothing was changed. Of a shard of another node row ids that it never had are counted as stale.
        """
        self._check_open()
        if index is not None:
            raise TypeError(
                "update_priority(None, priority, shard=, row_id=): an index does not say which row lay there"
            )
        shards, ids = numbers(shard, "shard"), numbers(row_id, "row_id")
        if len(shards) != len(ids):
            raise ValueError(f"{len(shards)} shards for {len(ids)} row ids")
        if isinstance(priority, torch.Tensor):
            reduce = getattr(self._sampler, "reduce", None)
            priority = priority.detach().cpu()
            priority = priority if reduce is None else reduce(priority, len(ids))
            priority = (priority.float() if priority.dtype is torch.bfloat16 else priority).numpy()
        p = as_priorities(priority, len(ids))
        self._check_priorities(p)
        unknown = set(np.unique(shards).tolist()) - {s.number for s in self._directory.shards}
        if unknown:
            raise IndexError(
                f"shard {min(unknown)}: buffer {self.name!r} never had one of that number. Nothing was changed"
            )
        if len(ids) and int(ids.min()) < 0:
            j = int(np.flatnonzero(ids < 0)[0])
            raise IndexError(f"row_id[{j}] = {ids[j]}: no row has such an id. Nothing was changed")
        here = {s.number for s in self._directory.living() if s.node == self._here}
        for k in sorted(
            np.unique(shards).tolist(), key=lambda k: k not in here
        ):  # this node's says at once what is wrong
            mine = shards == k
            if k in self._lost:
                self._dropped += int(mine.sum())
                continue
            try:
                self._link(k).prioritise(np.ascontiguousarray(ids[mine]), np.ascontiguousarray(p[mine]))
            except Gone as e:
                self._dropped += int(mine.sum())
                self._lose(k, str(e))

    def _check_priorities(self, p: np.ndarray) -> None:
        """Here, as shards of other nodes are not waited for."""
        kind, arguments = self._settings.sampler
        if "alpha" not in arguments and not isinstance(self._sampler, PrioritizedSampler):
            raise RuntimeError(f"buffer {self.name!r} keeps no priorities: it was made with sampler {kind!r}")
        bad, why = (
            ~(np.isfinite(p) & (p >= 0)),
            "a priority is a finite number ≥ 0 (of a signed error give its absolute value)",
        )
        if not bad.any():
            formula = self._sampler.arguments() if "alpha" not in arguments else arguments
            with np.errstate(all="ignore"):
                leaves = ((p.astype(np.float64) + formula["eps"]) ** formula["alpha"]).astype(np.float32)
            bad, why = (
                ~np.isfinite(leaves),
                f"(priority + eps) ** alpha, alpha={formula['alpha']:g}, leaves the range of float32",
            )
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            raise ValueError(f"priorities[{j}] = {float(p[j])!r}: {why}. Nothing was changed")

    _dropped = 0

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows, found by "shard" and "row_id", to what it holds under the priority key."""
        key = self._settings.priority_key
        name = key[0] if len(key) == 1 else key
        missing = [
            show_key(k) for k in (key, ("shard",), ("row_id",)) if data.get(k if len(k) > 1 else k[0], None) is None
        ]
        if missing:
            raise KeyError(
                f"{missing[0]} is not in the TensorDict, which has {sorted(map(str, data.keys(True, True)))}"
            )
        self.update_priority(None, data.get(name), shard=data.get("shard"), row_id=data.get("row_id"))

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait until the priorities that are on their way have arrived; those of a shard that does not answer (``remote_timeout``) are dropped,
        and counted. timeout: seconds for all; None: as long as shards answer. Returns whether none is on its way any more."""
        check_process(self._pid, f"buffer {self.name!r}")
        seconds, done = seconds_of(timeout), True
        give_up = None if seconds < 0 else time.monotonic() + seconds
        for link in list(self._links.values()):
            try:
                if link.number not in self._lost:
                    done = link.settle(give_up) and done
            except Gone as e:
                self._lose(link.number, str(e))
        return done

    # ---- figures ----------------------------------------------------------------------------------------------------

    def _every(self, method: str, local: Any) -> dict[int, Any]:
        """An answer of each shard that gives one."""
        asked = []
        for link in self._living():
            with contextlib.suppress(Gone):
                if link.usable:
                    asked.append((link, None if link.is_local else link._call(method)))
        out, give_up = {}, time.monotonic() + self._settings.remote_timeout
        for link, ref in asked:
            try:
                with lost_is_gone():
                    out[link.number] = local(link.client.local) if ref is None else link.answer(ref, give_up)
            except Gone as e:
                self._lose(link.number, str(e))
            except Silent:
                link.went_silent()
        return out

    def __len__(self) -> int:
        """Rows of all shards that answer."""
        return sum(self._every("size", len).values())

    def wait_rows(self, n: int, timeout: float | None = None) -> None:
        """Wait until at least n rows are stored in all shards. NotEnoughRows when ``timeout`` seconds are over; None: for ever."""
        since, seconds = time.monotonic(), seconds_of(timeout)
        while (stored := len(self)) < n:
            left = left_of(timeout, since)
            if seconds == 0 or (left is not None and left <= 0):
                raise NotEnoughRows(
                    f"buffer {self.name!r}: its {len(self._directory.living())} shards hold {stored:,} of {n:,} rows after {seconds:g} s"
                )
            time.sleep(0.1)

    def __bool__(self) -> bool:
        return True

    @property
    def write_count(self) -> int:
        return self.stats()["write_count"]

    def stats(self) -> dict[str, Any]:
        """``size``, ``write_count``, ``capacity`` of all shards together, ``utilization``; ``shards``: `Buffer.stats` of each; ``lost_shards``: how many;
        of this handle: ``priorities_set``, ``priorities_stale``, ``priorities_dropped`` (of lost shards), ``prefetch_queue_size``; ``limiter``."""
        every = self._every("figures", lambda rb: rb.stats())
        total = {k: sum(s[k] for s in every.values()) for k in ("size", "write_count", "capacity")}
        links = list(self._links.values())
        limits = None
        if self._directory.limited:
            with contextlib.suppress(Gone, Silent):
                limits = ask(self._asking("limits"), 5.0)
        return {
            **total,
            "utilization": total["size"] / total["capacity"] if total["capacity"] else 0.0,
            "initialized": any(s["initialized"] for s in every.values()),
            "shards": every,
            "lost_shards": len(self._lost),
            "priorities_set": sum(k.applied for k in links),
            "priorities_stale": sum(k.stale for k in links),
            "priorities_dropped": self._dropped + sum(k.dropped for k in links),
            "prefetch_queue_size": 0 if self._ahead is None else len(self._ahead),
            "limiter": limits,
        }

    def query(self, predicate: Any = None, **how: Any) -> list[Any]:
        """The trajectories of all shards, one shard's after the other's: see `ReplayBuffer.query`. All shards look at the same time."""
        found = self._of_each(lambda link: link.client._call("query", predicate, **how))
        return [t for each in found for t in each]
