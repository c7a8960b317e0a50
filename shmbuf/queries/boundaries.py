"""Where trajectories begin and end in rows that lie in order: by their ids, or by end flags."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuf.schema import Key, as_key, show_key
from shmbuf.streams import END_KEYS

# TorchRL's order, which is not that of shmbuf.streams: what is asked about is a TensorDict of anybody's.
TRAJECTORY_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("traj_ids",), ("episode",))


def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: int | torch.Tensor | range | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where trajectories begin and end in the physical order of a storage, as TorchRL's function of this name.

    Args:
        trajectory: ids [T, *B], one a row; where it changes a trajectory ends. Or
        end: bool[T, *B], True at the last row of each.
        at_capacity: the storage is full, so its last row is followed by its first; else its last row is an end.
        cursor: the last written row (of several, the last one): an end, if the storage is full.
        device: where to compute.

    Returns:
        start, stop: int64[N, 1 + len(B)]: row, then batch coordinates, both inclusive, column after column; lengths: int64[N].
        A trajectory that goes on at row 0 has start > stop. A column without any end has one at its last row.

    Raises:
        TypeError: not exactly one of trajectory and end. RuntimeError: it is empty or has no dimension, or so has cursor.
    """
    signal = trajectory if trajectory is not None else end
    if signal is None or (trajectory is not None and end is not None):
        raise TypeError("Exactly one of `trajectory` and `end` must be given")
    if signal.ndim == 0:
        raise RuntimeError("Expected the end-of-trajectory signal to be at least 1-dimensional, [T, *B].")
    if not len(signal):
        raise RuntimeError("Cannot recover trajectory boundaries from an empty (T=0) input.")
    home = signal.device
    signal = signal if device is None else signal.to(device)
    is_end = signal != signal.roll(-1, 0) if trajectory is not None else signal.to(torch.bool).clone()
    if not at_capacity:
        is_end[-1] = True
    elif cursor is not None:
        is_end[_last(cursor)] = True
    is_end[-1] |= ~is_end.any(0)  # one that is the whole column
    # Columns one after another, each in time order: by the last batch coordinate, then by the others, as TorchRL has them.
    by_column = is_end.transpose(0, -1).reshape(-1, len(is_end))
    column, stop = by_column.nonzero(as_tuple=True)
    first = torch.ones_like(column, dtype=torch.bool)
    first[1:] = column[1:] != column[:-1]
    begin = first.nonzero().squeeze(-1)
    after = torch.empty_like(stop)  # the stop before each one's own, in its column; of the first, the column's last
    after[1:] = stop[:-1]
    after[begin] = stop[torch.cat([begin[1:], begin.new_tensor([len(stop)])]) - 1]
    start = (after + 1) % len(is_end)
    lengths = (stop - start) % len(is_end) + 1
    where: list[torch.Tensor] = []
    if is_end.ndim > 1:
        last, *others = torch.unravel_index(column, (is_end.shape[-1], *is_end.shape[1:-1]))
        where = [*others, last]
    out = torch.stack([start, *where], -1), torch.stack([stop, *where], -1), lengths
    return tuple(t.to(home) for t in out)  # type: ignore[return-value]


def _last(cursor: Any) -> int:
    if isinstance(cursor, range):
        if not len(cursor):
            raise RuntimeError("cursor must not be an empty range.")
        return cursor[-1]
    if isinstance(cursor, (torch.Tensor, np.ndarray)):
        flat = cursor.reshape(-1)
        if not len(flat):
            raise RuntimeError("cursor must not be an empty tensor.")
        cursor = flat[-1].item()
    if isinstance(cursor, bool) or not isinstance(cursor, (int, np.integer)):
        raise RuntimeError(f"cursor={cursor!r}: an integer, a 1d tensor or a range")
    return int(cursor)


def one_a_row(signal: torch.Tensor, rows: int, key: Key) -> torch.Tensor:
    """[rows]. Raises RuntimeError for several numbers a row."""
    if signal.numel() != rows:
        raise RuntimeError(
            f"key {show_key(key)} has rows of shape {list(signal.shape[1:])}: where a trajectory begins is told by one number a row"
        )
    return signal.reshape(rows)


def cannot_split(have: str) -> KeyError:
    ends = [k for group in END_KEYS for k in group]
    return KeyError(
        "Cannot split data into trajectories: there is neither an id ("
        + ", ".join(map(show_key, TRAJECTORY_KEYS))
        + ") nor an end flag ("
        + ", ".join(map(show_key, ends))
        + f") in data: {have}. Pass trajectory_key."
    )


def lengths_of(td: TensorDictBase, trajectory_key: Any = None) -> np.ndarray:
    """int64[k]: the lengths of the trajectories of td, of batch size [n > 0], whose rows are in order.

    Raises KeyError: nothing tells, or trajectory_key is not there. Warns where only end flags tell.
    """
    n = td.batch_size[0]
    keys = TRAJECTORY_KEYS if trajectory_key is None else (as_key(trajectory_key),)
    for key in keys:
        ids = td.get(key, None)
        if ids is not None:
            return _lengths(trajectory=one_a_row(ids, n, key))
    if trajectory_key is not None:
        raise KeyError(f"trajectory_key {show_key(keys[0])} not found in data: {_have(td)}")
    for group in END_KEYS:
        flags = {key: f for key in group if (f := td.get(key, None)) is not None}
        if flags:
            warnings.warn(
                f"No trajectory id was found; splitting on the end-of-episode flags {', '.join(map(show_key, flags))}: a trajectory "
                "whose last row carries none is merged with the next one. Store ids, or pass trajectory_key.",
                UserWarning,
                stacklevel=3,
            )
            return _lengths(end=torch.stack([one_a_row(f != 0, n, key) for key, f in flags.items()]).any(0))
    raise cannot_split(_have(td))


def _have(td: TensorDictBase) -> str:
    return ", ".join(sorted(show_key(as_key(k)) for k in td.keys(True, True)))


def _lengths(**signal: torch.Tensor) -> np.ndarray:
    return find_start_stop_traj(**signal, at_capacity=False)[2].cpu().numpy().astype(np.int64)  # type: ignore[arg-type]
