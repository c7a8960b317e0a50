"""What a sampled row becomes: itself, a window of its trajectory, or an n-step transition. Under any sampler, as ``sample_unit=``."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.errors import NotEnoughRows
from shmbuf.lanes import coordinates
from shmbuf.samplers.base import Sampler, gather, wait_for_rows
from shmbuf.schema import Key, as_key, show_key
from shmbuf.ticket import left_of

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer
    from shmbuf.storage import ShmStorage

BOUNDARIES = ("pad", "stop", "include_reset")
NEXT_DONE: Key = ("next", "done")
_FLAGS = ("done", "terminated", "truncated")


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r}: a number ≥ {least}")
    return int(value)


class SampleUnit:
    """Makes a batch of the rows that a sampler draws, the anchors. Those of this module travel with the buffer's name, as samplers
    do. One of your own is a subclass with an `expand`; it travels by pickle, and `attach` has to be given it.

    Attributes:
        name: of the kind, in the segment. info_keys: what ``sample(return_info=True)`` gives besides the sampler's.
        rows_per_anchor: of a batch; 0: not known.
    """

    name: ClassVar[str]
    info_keys: tuple[str, ...] = ()
    rows_per_anchor: int = 0

    def expand(self, index: Any, info: dict[str, Any], storage: ShmStorage) -> tuple[Any, dict[str, Any]]:
        """TorchRL's: the indices of the batch's rows, of those of the anchors, and what is to be said about each row.

        Args:
            index: LongTensor[n]; of a storage of more dimensions a tuple of one for each. info: what the sampler says about each anchor.

        What is returned is read as ``storage[index]`` reads it: the rows that lie there then.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expand()")

    def arguments(self) -> dict[str, Any]:
        """What another process needs to rebuild it: numbers, strings, lists."""
        return {}

    def trajectory_settings(self) -> dict[str, Any]:
        """As a `Sampler`'s."""
        return {}

    def sample(
        self,
        sampler: Sampler,
        storage: ShmStorage,
        n: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        **how: Any,
    ) -> TensorDictBase:
        """The batch of n anchors. Other arguments and errors: the sampler's."""
        timeout = wait_for_rows(storage, timeout)
        drawn = sampler.sample(storage, n, timeout=timeout, **how)
        said = (k for k in sampler.info_keys if k not in ("index", "row_id"))
        told = {k: t for k in said if (t := drawn.get(k, None)) is not None}
        index = drawn.get("index")
        if storage.ndim > 1:
            index = storage.located(drawn).get("index").unbind(-1)
        index, info = self.expand(index, dict(told), storage)
        slots = (storage.slots_of(index) if storage.ndim > 1 else torch.as_tensor(index)).reshape(-1).cpu().numpy()
        ids_of = storage.buffer.ids_of
        td = gather(storage, ids_of(slots), lambda bad: ids_of(slots[bad]), pin=pin)
        each = {k: torch.as_tensor(v) for k, v in info.items() if k not in ("index", "row_id")}
        each = {k: t for k, t in each.items() if t.ndim and len(t) == len(slots)}
        for key, values in each.items():
            td.set(key, values)
        self.info_keys = tuple(k for k in each if k not in told)
        return td if out is None else storage._copy_into(out, td)

    def numbered(self, td: TensorDictBase) -> TensorDictBase:
        """A batch that was put together of several, as if it had been drawn as one."""
        return td

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.arguments().items())})"


class Transition(SampleUnit):
    """The anchors themselves."""

    name = "transition"
    rows_per_anchor = 1

    def sample(self, sampler: Sampler, storage: ShmStorage, n: int, **how: Any) -> TensorDictBase:
        return sampler.sample(storage, n, **how)


class _Anchors:
    """Row ids that a sampler drew, with what it says about each; some may be drawn again.

    Attributes:
        kept: bool[n]: not those that there are no others for.
    """

    def __init__(self, sampler: Sampler, storage: ShmStorage, n: int, timeout: float | None, how: dict[str, Any]):
        self._sampler, self._storage, self._how = sampler, storage, how
        self._timeout, self._since = timeout, time.monotonic()
        first = sampler.sample(storage, n, timeout=timeout, **how)
        self.ids = first["row_id"].numpy().copy()
        self.kept = np.ones(len(self.ids), bool)
        said = (k for k in sampler.info_keys if k not in ("index", "row_id"))
        self.info = {k: t for k in said if (t := first.get(k, None)) is not None}

    def _more(self, n: int) -> TensorDictBase:
        return self._sampler.sample(self._storage, n, timeout=left_of(self._timeout, self._since), **self._how)

    def again(self, which: np.ndarray) -> np.ndarray:
        """Other ones, since rows about them are overwritten. A weight normalised by its batch is so by the batch of this draw."""
        begin = 0
        while begin < len(which):  # the end of an epoch may come in between
            try:
                td = self._more(len(which) - begin)
            except NotEnoughRows:  # the others, which may be drawn but once, must not be lost to that
                self.kept[which[begin:]] = False
                if not self.kept.any():
                    raise
                break
            at = which[begin : begin + td.batch_size[0]]
            for key, values in self.info.items():
                values[torch.from_numpy(at)] = td.get(key)
            self.ids[at] = td["row_id"].numpy()
            begin += len(at)
        return self.ids[which]

    def drop(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """What is left of the arrays, the ids and the info."""
        if self.kept.all():
            return arrays
        kept = torch.from_numpy(self.kept)
        self.info = {k: t[kept] for k, t in self.info.items()}
        self.ids = self.ids[self.kept]
        return tuple(a[self.kept] for a in arrays)


class Sequence(SampleUnit):
    """A window about each anchor: ``burn_in`` rows before it, ``length`` from it on, ``bootstrap`` behind them, flat.

    Args:
        episode_boundary: at the end of a trajectory (and at its newest row):
            "pad": the last row is repeated and marked invalid; "stop": the window begins earlier so that it ends there, and is
            padded if its trajectory is shorter; "include_reset": on to whatever was stored next, whoever stored it.
        done_key: an end key of the buffer; None: all that is stored is one trajectory, in the order of storage.
        dilation: every dilation-th row.

    Rows before a trajectory begins are its first one, invalid. A batch of n anchors has n * (burn_in + length + bootstrap) rows and,
    for each, "sequence_id", "step_in_sequence", "learning_mask", "validity_mask", "anchor_index", and "anchor_row_id", through which
    `update_tensordict_priority` gives each anchor the largest priority of its valid rows. What the sampler says about an anchor
    stands at each row.

    Raises:
        ValueError: a number out of range, or done_key is no end key of the buffer. RuntimeError: it keeps no trajectories.
    """

    name = "sequence"
    info_keys = ("sequence_id", "step_in_sequence", "learning_mask", "validity_mask", "anchor_index", "anchor_row_id")

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: Any = NEXT_DONE,
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ):
        self.length, self.dilation = _count("length", length, 1), _count("dilation", dilation, 1)
        self.burn_in, self.bootstrap = _count("burn_in", burn_in, 0), _count("bootstrap", bootstrap, 0)
        if episode_boundary not in BOUNDARIES:
            raise ValueError(f"episode_boundary={episode_boundary!r}: one of {', '.join(BOUNDARIES)}")
        self.episode_boundary = episode_boundary
        self.done_key = None if done_key is None else as_key(done_key)
        self.total = self.rows_per_anchor = self.burn_in + self.length + self.bootstrap

    def arguments(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "episode_boundary": self.episode_boundary,
            "done_key": None if self.done_key is None else list(self.done_key),
            "burn_in": self.burn_in,
            "bootstrap": self.bootstrap,
            "dilation": self.dilation,
        }

    @property
    def _follows_streams(self) -> bool:
        return self.done_key is not None and self.episode_boundary != "include_reset"

    def trajectory_settings(self) -> dict[str, Any]:
        if not self._follows_streams:
            return {}
        return {"trajectories": True, **({} if self.done_key == NEXT_DONE else {"end_keys": [self.done_key]})}

    def _check(self, buffer: Buffer) -> None:
        buffer.require_trajectories()
        ends = [c.key for c in buffer.marks.ends]
        if self.done_key not in ends and self.done_key != NEXT_DONE:  # which stands for whatever the buffer has
            raise ValueError(
                f"done_key={show_key(self.done_key)}, but trajectories of buffer {buffer.name!r} end by "  # type: ignore[arg-type]
                f"{', '.join(map(show_key, ends)) or 'no key'}; the keys are fixed when it is created (end_keys=)"
            )

    def windows(self, buffer: Buffer, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row ids int64[n, total] about int64[n] anchors, and bool[n, total]: valid."""
        ahead, behind = self.dilation * (self.length + self.bootstrap - 1), self.dilation * self.burn_in
        offset = self.dilation * (np.arange(self.total) - self.burn_in)
        shifts = self.episode_boundary == "stop"
        reach = behind + (ahead if shifts else 0)
        if self._follows_streams:
            self._check(buffer)
            after, n_after = buffer.walk_forward(anchors, ahead + 1)
            before, n_before = buffer.walk_back(anchors, reach + 1)
            to_stop, to_start = n_after - 1, n_before - 1
        else:
            (lo, hi), step = buffer.window, math.prod(buffer.schema.inner)  # type: ignore[union-attr]
            to_stop, to_start = (hi - 1 - anchors) // step, (anchors - lo) // step
        gone = (to_stop < 0) | (to_start < 0)  # overwritten already: the gather will ask for another
        to_stop, to_start = np.maximum(to_stop, 0)[:, None], np.maximum(to_start, 0)[:, None]
        shift = np.clip(ahead - to_stop, 0, to_start) if shifts else np.zeros_like(to_stop)
        at = offset - shift
        valid = (at <= to_stop) & (at >= -to_start)
        at = np.clip(at, -to_start, to_stop)
        if not self._follows_streams:
            ids = anchors[:, None] + at * step
        else:
            line = np.concatenate([before[:, :0:-1], after], axis=1)  # ids by offset, from -reach to ahead
            ids = np.take_along_axis(line, at + reach, axis=1)
        ids[gone] = anchors[gone, None]
        return ids, valid

    def expand(self, index: Any, info: dict[str, Any], storage: ShmStorage) -> tuple[Any, dict[str, Any]]:
        """TorchRL's: the windows about these indices, and info with each anchor's entries repeated and the unit's own."""
        slots = storage.slots_of(index) if storage.ndim > 1 else torch.as_tensor(index)
        anchors = storage.buffer.ids_of(slots.reshape(-1).cpu().numpy())
        ids, valid = self.windows(storage.buffer, anchors)
        values = {k: torch.as_tensor(v) for k, v in info.items()}
        repeated = {k: v.repeat_interleave(self.total, dim=0) if v.ndim else info[k] for k, v in values.items()}
        located = _located(torch.from_numpy(ids.reshape(-1)), storage)
        entries = self._entries(anchors, valid, storage)
        return located if storage.ndim == 1 else located.unbind(-1), {**repeated, **entries}

    def _entries(self, anchors: np.ndarray, valid: np.ndarray, storage: ShmStorage) -> dict[str, torch.Tensor]:
        n, steps = len(anchors), torch.arange(self.total)
        learning = (steps >= self.burn_in) & (steps < self.burn_in + self.length)
        row_id = torch.from_numpy(anchors).repeat_interleave(self.total)
        return {
            "sequence_id": torch.arange(n).repeat_interleave(self.total),
            "step_in_sequence": steps.repeat(n),
            "learning_mask": learning.repeat(n),
            "validity_mask": torch.from_numpy(valid.reshape(-1)),
            "anchor_index": _located(row_id, storage),
            "anchor_row_id": row_id,
        }

    def sample(
        self,
        sampler: Sampler,
        storage: ShmStorage,
        n: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        **how: Any,
    ) -> TensorDictBase:
        timeout, buffer = wait_for_rows(storage, timeout), storage.buffer
        if self._follows_streams:
            self._check(buffer)
        if out is not None:
            storage.require_out(out, n * self.total, {(k,): () for k in self.info_keys})
        anchors = _Anchors(sampler, storage, n, timeout, how)
        ids, valid = self.windows(buffer, anchors.ids)

        def again(bad: np.ndarray) -> np.ndarray:
            new, valid[bad] = self.windows(buffer, anchors.again(bad))
            new[~anchors.kept[bad]] = -1
            return new

        td = gather(storage, ids.reshape(-1), again, unit=self.total, pin=pin)
        (valid,) = anchors.drop(valid)
        for key, values in anchors.info.items():
            td.set(key, values.repeat_interleave(self.total, dim=0))
        for name, values in self._entries(anchors.ids, valid, storage).items():
            td.set(name, values)
        return td if out is None else storage._copy_into(out, td)

    def numbered(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("sequence_id", torch.arange(len(td) // self.total).repeat_interleave(self.total))


def _located(ids: torch.Tensor, storage: ShmStorage) -> torch.Tensor:
    """As "index" has it: slots, or coordinates [n, ndim]."""
    slots = ids % storage.buffer.capacity
    return slots if storage.ndim == 1 else coordinates(slots, storage.schema().inner)


class NStep(SampleUnit):
    """n-step transitions: of each anchor the row, but under "next" what the last row used has, and the sum of rewards.

    Args:
        n: rows at most, fewer before the trajectory's end and before the newest row.
        gamma: the discount.
        reward_key: default: ("next", "reward") or "reward", whichever is stored.

    Of rows with the reward at the top, as rlightning's, "done", "terminated", "truncated" and what is called ``next_…`` are the last
    row's, too. All else is the row's own. Flags with which a sampler marks its slices are left out.

    The reward becomes ``Σ gamma**i * reward_i``. The batch gets "steps_to_next_obs", int64: rows used, k; and "bootstrap_discount",
    float32: ``gamma**k``, or 0 if the last of them is terminal: ("next", "terminated") if that is stored, else ("next", "done") and
    not truncated (without "next": "terminated" …). Both in the shape of the reward. The stored next observation counts, so that a
    truncated trajectory's last one is its own.

    Raises:
        ValueError: n or gamma out of range. KeyError: no reward is stored. RuntimeError: the buffer keeps no trajectories.
    """

    name = "nstep"
    rows_per_anchor = 1
    info_keys = ("steps_to_next_obs", "bootstrap_discount")

    def __init__(self, n: int, gamma: float = 0.99, reward_key: Any = None):
        self.n = _count("n", n, 1)
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float, np.number)) or not 0 <= gamma <= 1:
            raise ValueError(f"gamma={gamma!r}: a number from 0 to 1")
        self.gamma = float(gamma)
        self.reward_key = None if reward_key is None else as_key(reward_key)

    def arguments(self) -> dict[str, Any]:
        key = None if self.reward_key is None else list(self.reward_key)
        return {"n": self.n, "gamma": self.gamma, "reward_key": key}

    def trajectory_settings(self) -> dict[str, Any]:
        return {"trajectories": True}

    def _reward_key(self, stored: Collection[Key]) -> Key:
        keys = [self.reward_key] if self.reward_key is not None else [("next", "reward"), ("reward",)]
        for key in keys:
            if key in stored:
                return key
        raise KeyError(f"no reward is stored under {' or '.join(map(show_key, keys))}; NStep(reward_key=) names it")

    @staticmethod
    def _of_the_last(td: TensorDictBase, reward: Key) -> list[str]:
        names, flat = list(td.keys()), reward[0] != "next"
        return [k for k in names if k == "next" or (flat and (k in _FLAGS or k.startswith("next_")))]

    @staticmethod
    def _terminal(last: TensorDictBase) -> torch.Tensor | None:
        for path in (("next",), ()):
            done, terminated, truncated = (last.get((*path, k), None) for k in _FLAGS)
            if terminated is not None:
                return terminated.to(torch.bool)
            if done is not None:
                return done.to(torch.bool) if truncated is None else done.to(torch.bool) & ~truncated.to(torch.bool)
        return None

    def sample(
        self,
        sampler: Sampler,
        storage: ShmStorage,
        n: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
        **how: Any,
    ) -> TensorDictBase:
        timeout, buffer = wait_for_rows(storage, timeout), storage.buffer
        buffer.require_trajectories()
        shapes = {c.key: c.shape for c in storage.schema().columns}
        key = self._reward_key(shapes)
        if out is not None:
            storage.require_out(out, n, {(k,): shapes[key] for k in self.info_keys})
        anchors = _Anchors(sampler, storage, n, timeout, how)
        ids, used = buffer.walk_forward(anchors.ids, self.n)

        def again(bad: np.ndarray) -> np.ndarray:
            new, used[bad] = buffer.walk_forward(anchors.again(bad), self.n)
            new[~anchors.kept[bad]] = -1
            return new

        # Behind a trajectory's end its last row is repeated, so that the last of n is always the last one used.
        rows = gather(storage, ids.reshape(-1), again, unit=self.n)
        (used,) = anchors.drop(used)
        n = len(used)
        last = rows[self.n - 1 :: self.n]
        td = rows[:: self.n].clone()
        reward = rows.get(key).reshape(n, self.n, *rows.get(key).shape[1:])
        steps = torch.from_numpy(used).to(reward.device)
        i = torch.arange(self.n, device=reward.device)
        discount = torch.where(i < steps[:, None], self.gamma ** i.to(torch.float64), 0.0)
        shape = (n, *(1,) * (reward.ndim - 2))
        total = (reward.to(torch.float64) * discount.reshape(n, self.n, *shape[1:])).sum(1)
        for name in self._of_the_last(td, key):
            td.set(name, last.get(name).clone())
        td.set(key, total.to(reward.dtype if reward.is_floating_point() else torch.float32))
        factor = (self.gamma ** steps.to(torch.float64)).reshape(shape).expand(total.shape)
        terminal = self._terminal(last)
        if terminal is not None and terminal.numel() != factor.numel():
            terminal = terminal.reshape(n, -1).any(1).reshape(shape)
        if terminal is not None:
            factor = factor.masked_fill(terminal.reshape(shape if terminal.numel() == n else factor.shape), 0.0)
        td.set("steps_to_next_obs", steps.reshape(shape).expand(total.shape).clone())
        td.set("bootstrap_discount", factor.to(torch.float32).contiguous())
        for name, values in anchors.info.items():
            if as_key(name)[-1] not in _FLAGS:  # of the slice that the anchor was drawn with
                td.set(name, values)
        if pin:
            td = td.pin_memory()
        return td if out is None else storage._copy_into(out, td)


# By the name that a segment keeps.
UNITS: dict[str, type[SampleUnit]] = {c.name: c for c in (Transition, Sequence, NStep)}


def checked_unit(unit: Any) -> SampleUnit:
    if not isinstance(unit, SampleUnit) or (named(unit) is None and type(unit).expand is SampleUnit.expand):
        known = ", ".join(c.__name__ for c in UNITS.values())
        raise TypeError(
            f"sample_unit is one of {known}, or a SampleUnit with an expand() of its own, not {type(unit).__name__}"
        )
    return unit


def named(unit: SampleUnit) -> list[Any] | None:
    """What a segment keeps of it; None: a class of the user's, which attaching does not import."""
    return [unit.name, unit.arguments()] if type(unit) in UNITS.values() else None


def unit_of(said: Any) -> SampleUnit | None:
    """Out of what a segment says, or a pickle. Raises ValueError, KeyError, TypeError."""
    if said is None or isinstance(said, SampleUnit):
        return said
    if said[0] not in UNITS:
        raise ValueError(f"its sample unit is of class {said[0]}: attach(name, sample_unit=)")
    return UNITS[said[0]](**said[1])


def anchor_priorities(
    ids: torch.Tensor, valid: torch.Tensor | None, priority: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a `Sequence` batch: the anchors' row ids and the largest priority of each one's valid rows."""
    ids = ids.reshape(-1)
    priority = priority.reshape(-1).expand(ids.shape).to(ids.device)
    if valid is not None:  # an anchor's own row is valid always
        ids, priority = ids[valid.reshape(-1)], priority[valid.reshape(-1)]
    anchors, of = torch.unique(ids, return_inverse=True)
    largest = torch.zeros_like(anchors, dtype=priority.dtype)
    return anchors, largest.scatter_reduce_(0, of, priority, "amax", include_self=False)
