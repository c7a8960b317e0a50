"""What follows and what came before, along the last batch dimension: sums of rewards, several steps at once, frames, burn-in."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase

from shmbuf.rows import on_host
from shmbuf.transforms.base import Keys, Prepared, Transform, as_keys, found_in

DONE_KEYS: tuple[NestedKey, ...] = ("done", "truncated", "terminated")
PADDINGS = ("same", "constant")


def _next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))


def _ends(transform: Transform, td: TensorDictBase, key: NestedKey) -> torch.Tensor:
    """bool[*batch]: the row is the last of its trajectory."""
    done = found_in(transform, td, key)
    if done.shape[td.ndim :].numel() != 1:
        raise ValueError(
            f"{type(transform).__name__}: {key!r} of shape {tuple(done.shape)} in rows of batch size {list(td.batch_size)}: a "
            "trajectory ends for all at once, one flag for each row"
        )
    return done.reshape(td.batch_size).bool()


def _to_end(ends: torch.Tensor) -> torch.Tensor:
    """int64[*batch]: the place, along the last dimension, of the end of the trajectory; of the last row, if it has none."""
    n = ends.shape[-1]
    at = torch.arange(n, device=ends.device).expand(ends.shape)
    return at.where(ends, n - 1).flip(-1).cummin(-1).values.flip(-1)


def _as_wide(rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return rows.reshape(*rows.shape, *(1,) * (value.ndim - rows.ndim))


class Reward2GoTransform(Transform):
    """Rewards to go, on what is stored: ``G[t] = r[t] + gamma * G[t + 1]``, up to the end of the trajectory.

    All rows of a trajectory must come in one extend: its rows after the last end flag are summed as far as there are any.

    Args:
        gamma: discount, a number or a tensor of one.
        in_keys: rewards [*batch, T, ...]; default ``[("next", "reward")]``.
        out_keys: where the sums go; default: in the place of the rewards.
        done_key: the end flags are at ``("next", done_key)``, one for each row or as many as rewards.

    Raises:
        RuntimeError (when called): a row of the batch without an end. KeyError: no rewards or end flags.
    """

    def __init__(
        self,
        gamma: float | torch.Tensor = 1.0,
        in_keys: Keys = None,
        out_keys: Keys = None,
        done_key: NestedKey = "done",
    ) -> None:
        sources = [("next", "reward")] if in_keys is None else in_keys
        super().__init__([], [], sources if out_keys is None else out_keys, sources)
        self.gamma, self.done_key = float(gamma), done_key

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        key = _next(self.done_key)
        done, t = found_in(self, td, key).bool(), td.ndim - 1
        if not td.ndim or not done.any(t).all():
            raise RuntimeError(
                f"Reward2GoTransform: no end at {key!r} in rows of batch size {list(td.batch_size)}, or not in each of them: "
                "rewards to go are known when a trajectory has ended. Extend with whole trajectories"
            )
        sums = []
        for source in self.out_keys_inv or ():
            reward = found_in(self, td, source)
            if done.shape != reward.shape[: done.ndim]:
                if done.shape[td.ndim :].numel() != 1:
                    raise ValueError(f"{tuple(done.shape)} end flags for rewards {source!r} of {tuple(reward.shape)}")
                ends = done.reshape(td.batch_size)
            else:
                ends = done
            sums.append(_to_go(reward, _as_wide(ends, reward).expand(reward.shape), self.gamma, t))
        for target, value in zip(self.in_keys_inv or (), sums, strict=True):
            td.set(target, value)
        return td


def _to_go(reward: torch.Tensor, done: torch.Tensor, gamma: float, t: int) -> torch.Tensor:
    """``b[t] = r[t] + a[t] * b[t + 1]`` in log2(T) steps: after each, b[t] has twice as many rewards in it (Hillis and Steele, 1986)."""
    b = reward.movedim(t, -1).clone() if reward.is_floating_point() else reward.movedim(t, -1) * 1.0
    a = (~done).movedim(t, -1) * torch.tensor(gamma, dtype=b.dtype, device=b.device)
    step, n = 1, b.shape[-1]
    while step < n:
        b[..., :-step] += a[..., :-step] * b[..., step:]
        a[..., :-step] *= a[..., step:].clone()
        step *= 2
    return b.movedim(-1, t)


class MultiStepTransform(Transform):
    """Several steps at once, on what is stored: row t has the rewards of ``k`` steps, and the "next" entries of row ``t + k - 1``.

    k is ``n_steps``, or as many as the trajectory still has. The last ``n_steps`` rows are held back, of each ``stream=`` its own, in
    each process that uses this object, until the rows after them come (or the buffer's `flush` or `close`): an extend with no more than
    these stores nothing. Rows that could not be stored change nothing in that. Of rows with a trajectory column, one after another those
    of each trajectory follow each other, and none are held back once its last row is an end. Neither a pickle nor a fork takes them along. The end flags stay the row's own, so that trajectories stay whole in the buffer; `NStep` forms steps
    when rows are read, with the flags of the last of them, and holds nothing back.

    Written besides: "steps_to_next_obs" int64[*batch], k; "gamma", ``gamma ** k``; "nonterminal", k > 1 (TorchRL's meaning); and
    ("next", "original_reward"), or with several ``reward_keys`` "original_" before the name of each.

    Args:
        n_steps: at least 1; can be set at any time. gamma: discount.
        reward_keys: under "next"; default ``["reward"]``. done_key: the end flag under "next".
        done_keys: left as they are; default done, truncated, terminated.
        mask_key: False in it: "nonterminal" is False. Ignored if not there.

    Raises:
        ValueError: n_steps below 1; (when called) rows that do not fit those held back. KeyError: no rewards or end flags. Nothing is
        held or emitted then.
    """

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Keys = None,
        done_key: NestedKey | None = None,
        done_keys: Keys = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__([], [], None, None)
        self.n_steps, self.gamma = n_steps, gamma
        self.reward_keys = as_keys(reward_keys) or ["reward"]
        self.done_key: NestedKey = "done" if done_key is None else done_key
        self.done_keys = list(DONE_KEYS) if done_keys is None else as_keys(done_keys) or []
        self.mask_key: NestedKey = "mask" if mask_key is None else mask_key
        self._held: dict[Any, TensorDictBase] = {}  # by ("stream" or "trajectory", which); None: of all
        self._of = os.getpid()

    @property
    def n_steps(self) -> int:
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"n_steps={value!r}: a whole number, at least 1")
        self._n_steps = value

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        made = self.prepared(td)
        made.commit()
        return made.rows

    def prepared(self, td: TensorDictBase, stream: Any = None, trajectory_keys: Sequence[NestedKey] = ()) -> Prepared:
        one = not td.ndim
        rows: Any = td.unsqueeze(0) if one else td
        held, kept, out = dict(self._mine()), dict[Any, TensorDictBase](), []
        for of, mine, ending in self._split(rows, stream, trajectory_keys):
            before = held.get(of)
            if before is not None:
                mine = self._joined(before, mine)
            ready, kept[of] = self._cut(mine, ending)
            if ready is not None:
                out.append((of, ready))

        def commit() -> None:
            self._mine().update(kept)
            self._held = {k: v for k, v in self._held.items() if v.shape[-1]}

        if not out:
            return Prepared(None, stream, commit)
        if isinstance(stream, (np.ndarray, torch.Tensor, list, tuple)) and np.ndim(stream):
            stream = np.concatenate([np.full(len(r), of[1], np.int64) for of, r in out])
        made = torch.cat([r for _, r in out], -1) if len(out) > 1 else out[0][1]
        return Prepared(made.squeeze(0) if one else made, stream, commit)

    def _split(
        self, rows: Any, stream: Any, trajectory_keys: Sequence[NestedKey]
    ) -> list[tuple[Any, TensorDictBase, bool]]:
        """Rows by whom they belong to, in the order of their first ones; and whether nothing comes after an end flag of theirs."""
        of, kind = None if stream is None else np.asarray(on_host(stream)), "stream"
        if of is None and rows.ndim == 1:
            found = (rows.get(k, None) for k in trajectory_keys)
            value = next((v for v in found if isinstance(v, torch.Tensor)), None)
            if value is not None and value.numel() == len(rows):
                of, kind = value.detach().reshape(-1).cpu().numpy(), "trajectory"
        if of is None or not of.ndim:
            return [(None if of is None else (kind, of.item()), rows, False)]
        if rows.ndim != 1 or of.shape != (len(rows),):
            raise ValueError(
                f"stream of shape {list(of.shape)} for rows of batch size {list(rows.batch_size)}: one for each row"
            )
        places: dict[Any, list[int]] = {}
        for i, which in enumerate(of.tolist()):
            places.setdefault(which, []).append(i)
        return [((kind, which), rows[torch.tensor(at)], kind == "trajectory") for which, at in places.items()]

    @staticmethod
    def _joined(held: TensorDictBase, rows: TensorDictBase) -> TensorDictBase:
        a, b = held.batch_size[:-1], rows.batch_size[:-1]
        if a != b or set(held.keys(True, True)) != set(rows.keys(True, True)):
            raise ValueError(
                f"rows of batch size {list(rows.batch_size)} and keys {sorted(map(str, rows.keys(True, True)))} after rows held back "
                f"of {list(held.batch_size)} and {sorted(map(str, held.keys(True, True)))}; flush() gives those back first"
            )
        both: list[Any] = [held, rows]
        return torch.cat(both, -1)  # type: ignore[return-value]

    def _cut(self, rows: TensorDictBase, ending: bool) -> tuple[TensorDictBase | None, TensorDictBase]:
        """Rows that have all their steps, and those to hold back; ending: of a trajectory that has ended, none."""
        n = rows.shape[-1]
        if not n:
            return None, rows
        done = ending and bool(_ends(self, rows, _next(self.done_key))[..., -1].all())
        keep = 0 if done else min(self.n_steps, n)
        out = self._stepped(rows)[..., : n - keep]
        return (out if out.shape[-1] else None), rows[
            ..., n - keep :
        ].clone()  # a collector writes into its tensors again

    def pending(self) -> list[tuple[TensorDictBase, Any, Callable[[], object]]]:
        return [
            (
                self._stepped(rows),
                of[1] if of is not None and of[0] == "stream" else None,
                functools.partial(self._mine().pop, of, None),
            )
            for of, rows in self._mine().items()
        ]

    def flush(self) -> TensorDictBase | None:
        """The rows held back, with as many steps as there are, and none held any more. None if there are none.

        They went through this transform already: in a replay buffer, its `flush` stores them.
        """
        out: list[Any] = [rows for rows, _, _ in self.pending()]
        self._held = {}
        return torch.cat(out, -1) if out else None  # type: ignore[return-value]

    def _mine(self) -> dict[Any, TensorDictBase]:
        if self._of != os.getpid():  # after a fork, the parent's
            self._held, self._of = {}, os.getpid()
        return self._held

    def _stepped(self, td: TensorDictBase) -> TensorDictBase:
        ends, t = _ends(self, td, _next(self.done_key)), td.shape[-1]
        at = torch.arange(t, device=ends.device).expand(ends.shape)
        last = torch.minimum(at + self.n_steps - 1, _to_end(ends))
        steps = last - at + 1
        rewards = [found_in(self, td, _next(k)) for k in self.reward_keys]
        first = torch.arange(ends[..., 0].numel(), device=ends.device).reshape(*ends.shape[:-1], 1) * t
        later = td.get("next").exclude(*self.reward_keys, *self.done_keys).reshape(-1)[first + last]
        out = td.copy()
        out.get("next").update(later)
        for key, reward in zip(self.reward_keys, rewards, strict=True):
            flat, total = reward.flatten(0, td.ndim - 1), torch.zeros_like(reward)
            for i in range(min(self.n_steps, t)):
                ahead = flat[first + torch.minimum(at + i, last)] * self.gamma**i
                total = total + ahead.where(_as_wide(i < steps, ahead), 0)
            out.set(_next(self._original(key)), reward)
            out.set(_next(key), total)
        out.set("steps_to_next_obs", steps)
        out.set("gamma", self.gamma**steps)
        mask = td.get(self.mask_key, None)
        more = steps > 1
        out.set("nonterminal", more if mask is None else more & mask.reshape(more.shape).bool())
        return out

    def _original(self, key: NestedKey) -> NestedKey:
        if len(self.reward_keys) == 1:
            return "original_reward"
        return f"original_{key}" if isinstance(key, str) else (*key[:-1], f"original_{key[-1]}")

    def state_dict(self) -> dict[str, Any]:
        return {"held": dict(self._mine())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"held"}:
            raise KeyError(f"MultiStepTransform has a state of 'held'; got {sorted(state)}")
        self._held, self._of = dict(state["held"]), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}}

    def __repr__(self) -> str:
        return f"MultiStepTransform(n_steps={self.n_steps}, gamma={self.gamma}, reward_keys={self.reward_keys})"


class CatFrames(Transform):
    """The N last frames beside one another, on what is read: slices [T] with end flags, or [*batch, T].

    Frames before a trajectory's (or a row of the batch's) first one are padding. Time is the batch dimension named "time", else the
    last. Of ``("next", key)`` beside ``key``, the frames are the last N - 1 of ``key``'s and then the next one.

    Args:
        N: how many. dim: negative, the dimension they are joined along; it must be one of the frame's own.
        in_keys: default ``["pixels"]``.
        padding: "same": the trajectory's first frame again; "constant": ``padding_value``.
        as_inverse: on what is stored, not on what is read.
        reset_key: for TorchRL's environments, of which there are none here: ignored.
        done_key: the end flag, under "next"; default "done".
        future: the N coming frames, this one first, padded after the trajectory's end; without end flags a row of the batch is one
            trajectory.
        mask_key: if given, bool[*batch, T, N] is written there: this frame is padding.

    Raises:
        ValueError: N, dim or padding; (when called) rows without a batch dimension. KeyError: no frames or end flags.
    """

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        reset_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        future: bool = False,
        mask_key: NestedKey | None = None,
    ) -> None:
        if isinstance(N, bool) or not isinstance(N, int) or N < 1:
            raise ValueError(f"N={N!r}: a whole number of frames, at least 1")
        if dim >= 0:
            raise ValueError(f"dim={dim}: it must be negative, as batch sizes differ")
        if padding not in PADDINGS:
            raise ValueError(f"padding={padding!r}: one of {PADDINGS}")
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys)
        self.N, self.dim, self.padding, self.padding_value = N, dim, padding, padding_value
        self.as_inverse, self.future, self.mask_key, self.reset_key = as_inverse, future, mask_key, reset_key
        self.done_key: NestedKey = "done" if done_key is None else done_key

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.as_inverse else self._joined(td)

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        return self._joined(td) if self.as_inverse else td

    def _joined(self, td: TensorDictBase) -> TensorDictBase:
        if not td.ndim:
            raise ValueError("CatFrames: rows without a batch dimension; time is the last one")
        t = td.names.index("time") if "time" in td.names else td.ndim - 1
        key = _next(self.done_key)
        if self.future and td.get(key, None) is None:
            ends = torch.zeros(td.batch_size, dtype=torch.bool)
        else:
            ends = _ends(self, td, key)
        which, padded = self._windows(ends.movedim(t, -1))
        keys = list(zip(self.in_keys or (), self.out_keys or (), strict=True))
        windows = {k: self._window(found_in(self, td, k), td.ndim, t, which, padded, k) for k, _ in keys}
        for source, target in keys:
            window = windows[source]
            root = unravel_key(source[1:]) if isinstance(source, tuple) and source[0] == "next" else None
            at = window.ndim + self.dim - 1
            if root in windows and not self.future:
                before = windows[root].narrow(at, 1, self.N - 1)
                window = torch.cat([before, window.narrow(at, self.N - 1, 1)], at)
            td.set(target, window.flatten(at, at + 1))
        if self.mask_key is not None:
            td.set(self.mask_key, padded.movedim(-2, t))
        return td

    def _windows(self, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[*batch, T] to the places along T of each window's frames, int64[*batch, T, N], and which of them are padding."""
        at = torch.arange(ends.shape[-1], device=ends.device).expand(ends.shape)
        step = torch.arange(self.N, device=ends.device)
        if self.future:
            which, bound = at[..., None] + step, _to_end(ends)[..., None]
            return which.minimum(bound), which > bound
        first = torch.zeros_like(at)
        first[..., 1:] = at[..., 1:].where(ends[..., :-1], 0).cummax(-1).values
        which, bound = at[..., None] + step - (self.N - 1), first[..., None]
        return which.maximum(bound), which < bound

    def _window(
        self, value: torch.Tensor, batch_dims: int, t: int, which: torch.Tensor, padded: torch.Tensor, key: NestedKey
    ) -> torch.Tensor:
        """[*batch, *frame] to [*batch, *frame] with N before dim."""
        if -self.dim > value.ndim - batch_dims:
            raise ValueError(
                f"CatFrames: dim={self.dim} of {key!r} of shape {tuple(value.shape)} is none of the frame's own: {batch_dims} are the "
                "batch's"
            )
        which, padded = which.to(value.device), padded.to(value.device)
        by_time = value.movedim(t, batch_dims - 1)
        row = torch.arange(which[..., 0, 0].numel(), device=value.device).reshape(*which.shape[:-2], 1, 1)
        out = by_time.flatten(0, batch_dims - 1)[row * which.shape[-2] + which]
        if self.padding == "constant":
            out = out.masked_fill(_as_wide(padded, out), self.padding_value)
        return out.movedim(batch_dims, out.ndim + self.dim - 1).movedim(batch_dims - 1, t)

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, in_keys={self.in_keys}, out_keys={self.out_keys})"


class BurnInTransform(Transform):
    """Runs modules over the first steps of sequences [*batch, T], on what is read: the rest, T - burn_in steps, starts in their state.

    Args:
        modules: TensorDictModules that take sequences, one or several, run in order, without gradients and on their own device.
        burn_in: how many steps.
        out_keys: the states, read under "next" at the last of these steps and written at the first that is left. Default: all of the
            modules' out-keys under "next".

    Raises:
        TypeError: something else than a TensorDictModule. ValueError: burn_in below 0; (when called) no more steps than that.
    """

    def __init__(
        self,
        modules: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        burn_in: int,
        out_keys: Keys = None,
    ) -> None:
        found = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        for m in found:
            if not isinstance(m, TensorDictModuleBase):
                raise TypeError(f"BurnInTransform: modules must be TensorDictModules, not {type(m).__name__}")
        if isinstance(burn_in, bool) or not isinstance(burn_in, int) or burn_in < 0:
            raise ValueError(f"burn_in={burn_in!r}: a whole number of steps, at least 0")
        given = as_keys(out_keys)
        if given is None:
            given = [k for m in found for k in as_keys(m.out_keys) or () if _under_next(k)]
        states = [unravel_key(k[1:]) if _under_next(k) else k for k in given]
        super().__init__(None)
        self.in_keys = list(dict.fromkeys(k for m in found for k in as_keys(m.in_keys) or ()))
        self.out_keys = list(dict.fromkeys(states))
        self.modules, self.burn_in = found, burn_in

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if not self.burn_in:
            return td
        steps = td.shape[-1] if td.ndim else 0
        if td.ndim < 2 or steps <= self.burn_in:
            raise ValueError(
                f"BurnInTransform: batch size {list(td.batch_size)}: sequences [B, T] with T above burn_in={self.burn_in}"
            )
        burnt, out = td[..., : self.burn_in], td[..., self.burn_in :]
        with torch.no_grad():
            for m in self.modules:
                weight = next(m.parameters(), None)
                burnt = m(burnt if weight is None else burnt.to(weight.device))
        for key in self.out_keys or ():
            state = found_in(self, burnt, _next(key)).select(td.ndim - 1, -1)
            old = out.get(key, None)
            if old is None:
                shape = (*out.batch_size, *state.shape[td.ndim - 1 :])
                old = torch.zeros(shape, dtype=state.dtype, device=td.device or state.device)
            else:
                old = old.clone()  # what was sampled stays as it was
            old.select(td.ndim - 1, 0).copy_(state)
            out.set(key, old)
        return out

    def __repr__(self) -> str:
        return f"BurnInTransform(burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _under_next(key: NestedKey) -> bool:
    return isinstance(key, tuple) and key[0] == "next"
