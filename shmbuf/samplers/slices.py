"""Slices of trajectories, with TorchRL's arguments and results."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.errors import NotEnoughRows
from shmbuf.samplers.base import Sampler, gather, wait_for_rows
from shmbuf.samplers.passes import PassSampler
from shmbuf.schema import Key, as_key, show_key
from shmbuf.streams import END_KEYS
from shmbuf.ticket import left_of
from shmbuf.trajectories import BY, MAX_TRIES

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer
    from shmbuf.storage import ShmStorage

_NUMBERS: tuple[Any, ...] = ("index", "row_id")


def _key(key: Any) -> Key | None:
    return None if key is None else as_key(key)


def _keys(end_key: Any, end_keys: Any) -> list[Key] | None:
    if end_key is not None and end_keys is not None:
        raise RuntimeError("`end_key` and `end_keys` are exclusive arguments")
    if end_key is not None:
        return [as_key(end_key)]
    return None if end_keys is None else [as_key(k) for k in end_keys]


class SliceSampler(Sampler):
    """Slices of consecutive rows of one trajectory each, flat: batch size [num_slices * slice_len].

    Args:
        num_slices, slice_len: one of the two; the batch size says the other.
        end_key, end_keys: columns whose true value ends a trajectory. traj_key: the column with its number. Given to a buffer's
            constructor they become the buffer's; later they have to be (`ShmStorage(traj_key=, end_keys=)`). Default: the buffer's.
        truncated_key: where the ends of slices are marked; None: nowhere.
        init_key: its column, if stored, gets True where a slice begins; None: leave it.
        strict_length: only of trajectories of at least slice_len rows; False: shorter ones are taken whole, the batch is smaller.
        pad_output: fill those up with repetitions of their last row, which ("collector", "mask") tells; needs strict_length=False.
        span: slices may be cut at the trajectory's beginning and end: True: down to one row; i: to slice_len - i rows; a pair.
        replacement: False: it is a `SliceSamplerWithoutReplacement`, which takes the other keywords.
        by: "trajectory": one uniformly, then the start, as TorchRL draws; "start": uniformly of all starts.
        cache_values, compile, use_gpu, step_key, fragmented: TorchRL's, without effect: rows know their neighbours.

    ``sample`` adds, next to truncated_key, ("next", "truncated"): True at the last row of each slice, ("next", "done"): it or the
    stored flag, and ("next", "terminated"), in the shape of those stored, else bool[B, 1]. Of rows that have none of the three under
    "next", but at the top (rlightning's), the stored flags are those. What is added must be left out where slices are stored as rows
    again, unless the rows have these keys: ``batch.exclude("next")``, or truncated_key=None.

    Raises when sampling: RuntimeError: the batch size is not divisible. NotEnoughRows: no trajectory is that long. Lapped.
    """

    name: ClassVar[str] = "slice"

    def __new__(cls, *_: Any, replacement: bool = True, **__: Any) -> Any:
        without = cls is SliceSampler and not replacement
        return super().__new__(SliceSamplerWithoutReplacement if without else cls)

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Any = None,
        traj_key: Any = None,
        ends: Any = None,
        trajectories: Any = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: Any = False,
        span: Any = False,
        use_gpu: Any = False,
        step_key: Any = "step_count",
        fragmented: bool = False,
        by: str = "trajectory",
        replacement: bool = True,
    ):
        if not replacement:
            raise TypeError(f"replacement=False: {type(self).__name__} has no variant without replacement")
        if (num_slices is None) == (slice_len is None):
            raise TypeError(
                f"Either num_slices or slice_len must be not None, and not both. Got num_slices={num_slices} and slice_len={slice_len}."
            )
        for what, n in (("num_slices", num_slices), ("slice_len", slice_len)):
            if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1):
                raise ValueError(f"{what}={n!r}: a number ≥ 1")
        if ends is not None or trajectories is not None:
            raise ValueError(
                "ends and trajectories cannot be given: rows come and go in other processes, and know themselves where their "
                "trajectory ends; name the columns with end_key= or traj_key="
            )
        if pad_output and strict_length:
            raise ValueError(
                "pad_output=True needs strict_length=False: with strict_length=True there is nothing to pad"
            )
        if by not in BY:
            raise ValueError(f"by={by!r}: one of {', '.join(BY)}")
        self.num_slices = None if num_slices is None else int(num_slices)
        self.slice_len = None if slice_len is None else int(slice_len)
        self.end_keys, self.traj_key = _keys(end_key, end_keys), _key(traj_key)
        self.truncated_key, self.init_key = _key(truncated_key), _key(init_key)
        self.strict_length, self.pad_output, self.by = bool(strict_length), bool(pad_output), by
        sides = span if isinstance(span, (tuple, list)) else (span, span)
        if len(sides) != 2 or not all(isinstance(s, (bool, int, np.integer)) and s >= 0 for s in sides):
            raise ValueError(f"span={span!r}: a bool, a number of rows ≥ 0, or a pair of these (left, right)")
        self.span: tuple[Any, ...] = tuple(s if isinstance(s, bool) else int(s) for s in sides)
        self._seen: Any = None  # the marks that were checked

    def arguments(self) -> dict[str, Any]:
        return {
            "num_slices": self.num_slices,
            "slice_len": self.slice_len,
            "end_keys": None if self.end_keys is None else [list(k) for k in self.end_keys],
            "traj_key": None if self.traj_key is None else list(self.traj_key),
            "truncated_key": None if self.truncated_key is None else list(self.truncated_key),
            "init_key": None if self.init_key is None else list(self.init_key),
            "strict_length": self.strict_length,
            "pad_output": self.pad_output,
            "span": list(self.span),
            "by": self.by,
        }

    @property
    def info_keys(self) -> tuple[Any, ...]:  # type: ignore[override]
        flags = () if self.truncated_key is None else self._flag_keys()
        named = [k[0] if len(k) == 1 else k for k in (*flags, *(() if self.init_key is None else (self.init_key,)))]
        return (*_NUMBERS, *named, *([("collector", "mask")] if self.pad_output else []))

    def _flag_keys(self) -> tuple[Key, Key, Key]:
        assert self.truncated_key is not None
        path = self.truncated_key[:-1]
        return self.truncated_key, (*path, "done"), (*path, "terminated")

    def _stored_flags(self, td: TensorDictBase) -> list[torch.Tensor | None]:
        """done, terminated, truncated. Where none is under "next" those at the top are meant, as the ends of trajectories are."""
        truncated, done, terminated = self._flag_keys()
        flags = [td.get(k, None) for k in (done, terminated, truncated)]
        if truncated[0] != "next" or any(f is not None for f in flags):
            return flags
        top = (td.get((*truncated[1:-1], k), None) for k in ("done", "terminated", "truncated"))
        return [f if f is None else f.clone() for f in top]

    # ---- the buffer's trajectories ------------------------------------------------------------------------------

    def trajectory_settings(self) -> dict[str, Any]:
        out: dict[str, Any] = {"trajectories": True}
        if self.traj_key is not None:
            out["traj_key"] = self.traj_key
        # Of all of a usual group those count that there are, as nothing given means.
        if self.end_keys is not None and not any(set(self.end_keys) == set(g) for g in END_KEYS):
            out["end_keys"] = self.end_keys
        return out

    def prepare(self, storage: ShmStorage) -> None:
        if storage.buffer.schema is not None:
            self._check_keys(storage.buffer)

    def _check_keys(self, buffer: Buffer) -> None:
        """Raises RuntimeError, ValueError if the buffer's rows are not linked by the keys asked for."""
        if buffer.marks is self._seen:
            return
        buffer.require_trajectories()
        marks = buffer.marks
        has = marks.trajectory.key if marks.trajectory else None
        hint = "the keys are fixed when a buffer is created: give them to ShmStorage or Buffer.create"
        if self.traj_key is not None and self.traj_key != has:
            raise ValueError(
                f"traj_key={show_key(self.traj_key)}, but the rows of buffer {buffer.name!r} are linked by "
                f"{show_key(has) if has else 'no trajectory key'}; {hint}(traj_key={show_key(self.traj_key)})"
            )
        ends = {c.key for c in marks.ends}
        asked = self.end_keys
        if asked is not None and any(set(asked) == set(g) for g in END_KEYS):
            stored = set(buffer.schema.keys)  # type: ignore[union-attr]
            asked = [k for k in asked if k in stored] or asked
        if asked is not None and not set(asked) <= ends:
            raise ValueError(
                f"end_keys={', '.join(map(show_key, asked))}, but trajectories of buffer {buffer.name!r} end by "
                f"{', '.join(map(show_key, sorted(ends))) or 'no key'}; {hint}(end_keys=[{', '.join(map(show_key, asked))}])"
            )
        self._seen = marks

    # ---- drawing ------------------------------------------------------------------------------------------------

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """How many slices, how long."""
        by, what = (
            (self.num_slices, "number of slices") if self.num_slices is not None else (self.slice_len, "slice length")
        )
        assert by is not None
        if batch_size % by or not batch_size:
            raise RuntimeError(
                f"The batch-size must be divisible by the {what}, got batch_size={batch_size} and "
                f"{'num_slices' if self.num_slices is not None else 'slice_len'}={by}."
            )
        return (by, batch_size // by) if self.num_slices is not None else (batch_size // by, by)

    def _beyond(self, length: int) -> list[int]:
        """How many rows beyond its trajectory a slice may reach, left and right."""
        out = []
        for side in self.span:
            rows = length - 1 if side is True else int(side)
            if rows >= length:
                raise ValueError(
                    f"span={self.span}: the left and right span must be lower than the slice length, {length}"
                )
            out.append(rows)
        return out

    def _ready(self, storage: ShmStorage, timeout: float | None) -> Buffer:
        wait_for_rows(storage, timeout)
        buffer = storage.buffer
        self._check_keys(buffer)
        if not buffer._standby:
            buffer._become_reader()
        return buffer

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        n, length = self._shape(batch_size)
        left, right = self._beyond(length)
        since = time.monotonic()
        buffer = self._ready(storage, timeout)
        how: dict[str, Any] = dict(
            strict=self.strict_length, by=self.by, left=left, right=right, timeout=timeout, since=since
        )
        ids, lens = buffer.choose_slices(n, length, **how)

        def again(bad: np.ndarray) -> np.ndarray:
            new, lens[bad] = buffer.choose_slices(len(bad), length, **how)
            return new

        td = gather(storage, ids.reshape(-1), again, unit=length, pin=pin)
        return self._finish(storage, td, lens, length, out)

    def _finish(
        self,
        storage: ShmStorage,
        td: TensorDictBase,
        lens: np.ndarray,
        length: int,
        out: TensorDictBase | None,
        weights: np.ndarray | None = None,
    ) -> TensorDictBase:
        """Leave out what lies behind a slice's end, or tell; mark ends and beginnings."""
        mask = torch.from_numpy((np.arange(length) < lens[:, None]).reshape(-1))
        begin = np.arange(len(lens)) * length
        if weights is not None:
            td.set("priority_weight", torch.from_numpy(np.repeat(weights, length)))
        if not self.pad_output and not mask.all():
            td = td[mask]
            lens = lens[lens > 0]
            begin = np.cumsum(lens) - lens
        first, last = torch.from_numpy(begin), torch.from_numpy(begin + lens - 1)
        if self.truncated_key is not None:
            truncated_key, done_key, terminated_key = self._flag_keys()
            stored = self._stored_flags(td)
            like = next((s for s in stored if s is not None), None)
            shape = (*td.batch_size, *((1,) if like is None else like.shape[1:]))
            truncated = torch.zeros(shape, dtype=torch.bool, device=None if like is None else like.device)
            truncated[last] = True
            done, terminated, cut = (None if s is None else s.to(torch.bool) for s in stored)
            ends = [e for e in ((terminated, cut) if done is None else (done,)) if e is not None and e.shape == shape]
            td.set(truncated_key, truncated)
            td.set(done_key, functools.reduce(torch.logical_or, ends, truncated.clone()))
            td.set(terminated_key, torch.zeros_like(truncated) if terminated is None else terminated)
        if self.init_key is not None and (init := td.get(self.init_key, None)) is not None:
            init[first] = True
        if self.pad_output:
            td.set(("collector", "mask"), mask)
        return td if out is None else storage._copy_into(out, td)  # type: ignore[arg-type]


class SliceSamplerWithoutReplacement(PassSampler, SliceSampler):
    """One slice of each trajectory a pass, of this handle's own passes; the other arguments are `SliceSampler`'s.

    Args:
        drop_last: leave out the last batch of a pass if it has fewer slices than asked for.
        shuffle: False: trajectories in the order of their last rows.

    A pass goes over the trajectories that are stored when it begins, up to the row that is then their last. Rows and trajectories
    that come meanwhile are for the next pass. Of one whose first rows are overwritten the rest is drawn from; one of which less is
    left than a slice needs is passed over. So none is drawn twice a pass. The last batch of a pass may be smaller; the next
    `sample` begins another. There is no span, by or pad_output.
    """

    name: ClassVar[str] = "slice_without_replacement"

    def __init__(
        self,
        *,
        drop_last: bool = False,
        shuffle: bool = True,
        shared: bool = False,
        replacement: bool = False,
        **slices: Any,
    ):
        if replacement:
            raise ValueError("replacement=True: this sampler draws without; SliceSampler draws with")
        if shared:
            raise ValueError(
                "shared=True: readers of a buffer cannot share a pass over trajectories, which grow; each has passes of its own"
            )
        for other in ("span", "by", "pad_output"):
            if other in slices:
                raise TypeError(f"{other}: a slice of each trajectory is drawn uniformly from the whole of it")
        SliceSampler.__init__(self, **slices)
        self.drop_last, self.shuffle = bool(drop_last), bool(shuffle)
        self._left: list[int] = []  # last rows of the trajectories still to be drawn from; popped from the end
        self._of: str | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()

    def arguments(self) -> dict[str, Any]:
        kept = {k: v for k, v in super().arguments().items() if k not in ("pad_output", "span", "by")}
        return {**kept, "drop_last": self.drop_last, "shuffle": self.shuffle}

    def __reduce__(self) -> tuple:  # a copy begins with a pass of its own
        return functools.partial(type(self), **self.arguments()), ()

    def _begin(self, buffer: Buffer, length: int, rng: np.random.Generator) -> None:
        ends, _, rows, _ = (np.asarray(x, np.int64) for x in buffer._call("trajectories"))
        ends = ends[rows >= (length if self.strict_length else 1)]
        self._left = (rng.permutation(ends) if self.shuffle else ends[::-1]).tolist()

    def _next(self, buffer: Buffer, length: int, rng: np.random.Generator) -> tuple[int, np.ndarray] | None:
        """The last row of the next trajectory of this pass, and a slice of it."""
        while self._left:
            end = self._left.pop()
            ids = self._slice(buffer, end, length, rng)
            if ids is not None:
                return end, ids
        return None

    def _rows(self, buffer: Buffer, end: int, length: int) -> int:
        """Of a trajectory that can be drawn from; 0: it cannot."""
        rows = buffer._call("trajectory_rows", end)
        return 0 if self.strict_length and rows < length else rows

    def _slice(self, buffer: Buffer, end: int, length: int, rng: np.random.Generator) -> np.ndarray | None:
        rows = self._rows(buffer, end, length)
        if not rows:
            return None
        ids = np.empty(min(rows, length), np.int64)
        back = int(rng.integers(rows - len(ids) + 1))
        return ids if buffer._call("stretch", end, back, len(ids), ids.ctypes.data) else None

    def _last(self, buffer: Buffer, n: int, length: int) -> bool:
        """Whether no batch of n is left of this pass, which is over then."""
        there: list[int] = []
        while self._left and len(there) < (n if self.drop_last else 1):
            end = self._left.pop()
            if self._rows(buffer, end, length):
                there.append(end)
        if len(there) < (n if self.drop_last else 1):
            self._left = []
            return True
        self._left += reversed(there)
        return False

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        n, length = self._shape(batch_size)
        since, passed = time.monotonic(), False
        for _ in range(MAX_TRIES):
            buffer = self._ready(storage, left_of(timeout, since))
            rng = buffer.generator()
            if self._pid != os.getpid():  # another thread of the parent may have held it at the fork
                self._lock, self._pid = threading.Lock(), os.getpid()
            with self._lock:
                chosen, over = self._choose(buffer, n, length, rng, left_of(timeout, since))
            passed = passed or over
            td, lens = self._copy(storage, buffer, chosen, length, rng, pin)
            if lens.all() or (lens.any() and not self.drop_last):
                with self._lock:
                    last = self._last(buffer, n, length)
                self._came(last or passed, last)
                return self._finish(storage, td, lens, length, out)
            passed = True
            self._pass_over(buffer, n)
        raise buffer._slices_lapped(length)

    def _choose(
        self, buffer: Buffer, n: int, length: int, rng: np.random.Generator, timeout: float | None
    ) -> tuple[list[tuple[int, np.ndarray]], bool]:
        """Slices of the next trajectories, and whether the pass before has ended without them."""
        if self._of != buffer.name:
            self._left, self._of = [], buffer.name
        passed = False
        for _ in range(3):
            under_way = bool(self._left)
            if not under_way:
                self._begin(buffer, length, rng)
            chosen: list[tuple[int, np.ndarray]] = []
            while len(chosen) < n and (found := self._next(buffer, length, rng)) is not None:
                chosen.append(found)
            if len(chosen) == n or (chosen and not self.drop_last):
                return chosen, passed
            if under_way:
                passed = True
                self._pass_over(buffer, n)
            else:
                buffer.choose_slices(1, length, strict=self.strict_length, timeout=timeout)  # says why there is none
        raise NotEnoughRows(
            f"buffer {buffer.name!r} has {len(chosen):,} trajectories to draw slices of {length:,} rows from; batches of {n:,} "
            "slices were asked for, and with drop_last=True smaller ones are left out"
        )

    def _pass_over(self, buffer: Buffer, n: int) -> None:
        """So much of the pass has been overwritten that no batch is left of it."""
        if not self._into_next:
            self._came_to_nothing()
            raise NotEnoughRows(
                f"the pass has ended without another batch of {n:,} slices: rows of buffer {buffer.name!r} were overwritten "
                "before their turn; the next call begins another pass"
            )

    def _copy(
        self,
        storage: ShmStorage,
        buffer: Buffer,
        chosen: list[tuple[int, np.ndarray]],
        length: int,
        rng: np.random.Generator,
        pin: bool,
    ) -> tuple[TensorDictBase, np.ndarray]:
        ends = [end for end, _ in chosen]
        lens = np.array([len(ids) for _, ids in chosen], np.int64)

        def padded(ids: np.ndarray) -> np.ndarray:
            return np.pad(ids, (0, length - len(ids)), mode="edge")

        def again(bad: np.ndarray) -> np.ndarray:
            new = np.zeros((len(bad), length), np.int64)
            for row, j in enumerate(bad.tolist()):
                ids = self._slice(buffer, ends[j], length, rng)  # of what is left of it
                if ids is None:
                    with self._lock:
                        found = self._next(buffer, length, rng)
                    if found is None:  # the batch gets smaller: any row, to be left out
                        ids, lens[j] = np.array([buffer.window[1] - 1]), 0
                        new[row] = padded(ids)
                        continue
                    ends[j], ids = found
                lens[j] = len(ids)
                new[row] = padded(ids)
            return new

        ids = np.concatenate([padded(ids) for _, ids in chosen])
        return gather(storage, ids, again, unit=length, pin=pin), lens
