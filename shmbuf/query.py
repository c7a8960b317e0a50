"""Trajectories that a predicate holds for, out of a buffer or a TensorDict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import unravel_key

from shmbuf._extension import native
from shmbuf.buffer import Buffer
from shmbuf.presenting import values_of
from shmbuf.queries.boundaries import cannot_split, find_start_stop_traj, lengths_of, one_a_row
from shmbuf.queries.language import Condition, Expression, TrajectoryPredicate, column_of, traj
from shmbuf.queries.trajectory import Trajectory, wrap_trajectory
from shmbuf.schema import PACKED, Column, Key, Schema, as_key, show_key
from shmbuf.storage import ShmStorage, torch_dtype
from shmbuf.streams import resolve
from shmbuf.tensors import make_tensordict, tensor_leaves, tree_of

__all__ = [
    "Trajectory",
    "TrajectoryPredicate",
    "filter_trajectories",
    "find_start_stop_traj",
    "iter_trajectories",
    "query_buffer",
    "traj",
]

CHUNK_BYTES = 64 << 20  # of rows that are looked at together: more trajectories are looked at in several goes
_NUMBERS: tuple[Key, Key] = (("row_id",), ("index",))
Predicate = Callable[[Trajectory], Any]


class _Rows:
    """Trajectories that lie one after another in a TensorDict: what predicates are computed on."""

    def __init__(self, td: TensorDictBase, lengths: np.ndarray, known: Any = None):
        self.td, self.lengths, self._known = td, lengths, known
        self._upto = np.cumsum(lengths)

    def column(self, key: Key) -> torch.Tensor:
        return column_of(self.td, key, self._known)

    def trajectory(self, i: int) -> Trajectory:
        return Trajectory(self.td[int(self._upto[i] - self.lengths[i]) : int(self._upto[i])])

    def matching(self, predicate: Any) -> np.ndarray:
        """The positions of those that it holds for."""
        k = len(self.lengths)
        if predicate is None or k == 0:
            return np.arange(k)
        if not isinstance(predicate, TrajectoryPredicate):
            predicate = TrajectoryPredicate(predicate)
        return np.flatnonzero(predicate.evaluate(self))


def _checked(predicate: Any) -> Any:
    if isinstance(predicate, (Condition, Expression)):
        predicate()  # raises what it lacks
    if predicate is not None and not callable(predicate):
        raise TypeError(
            f"a predicate is made of traj, as in traj.length > 10, or any callable of a Trajectory; got {predicate!r}"
        )
    return predicate


# ---- of a TensorDict --------------------------------------------------------------------------------------------------


def _flat(td: Any) -> TensorDictBase:
    if not isinstance(td, TensorDictBase):
        raise TypeError(f"trajectories are split out of a TensorDictBase, not {type(td).__name__}")
    if td.batch_dims != 1:
        raise ValueError(
            f"trajectories are split out of data with a single batch dimension, got batch_size={list(td.batch_size)}"
        )
    return td


def iter_trajectories(td: TensorDictBase, trajectory_key: Any = None) -> Iterator[Trajectory]:
    """The trajectories of a flat batch of rows [n] that lie in order, as views.

    Args:
        trajectory_key: the entry with ids, one a row; default: the first of ("collector", "traj_ids"), "traj_ids" and "episode" that is
            there, else the end flags done, terminated and truncated under "next", else those at the root, with a UserWarning.

    Raises:
        TypeError, ValueError: td is no TensorDict of one batch dimension. KeyError: nothing tells trajectories apart.
    """
    rows = _split(_flat(td), trajectory_key)
    yield from map(rows.trajectory, range(len(rows.lengths)))


def filter_trajectories(
    td: TensorDictBase, predicate: Predicate | None = None, *, trajectory_key: Any = None
) -> list[Trajectory]:
    """Those of `iter_trajectories` that ``predicate`` holds for. Errors: also as of predicates, see `TrajectoryPredicate.evaluate`."""
    predicate = _checked(predicate)
    rows = _split(_flat(td), trajectory_key)
    return [rows.trajectory(int(i)) for i in rows.matching(predicate)]


def _split(td: TensorDictBase, trajectory_key: Any) -> _Rows:
    return _Rows(td, lengths_of(td, trajectory_key) if td.batch_size[0] else np.zeros(0, np.int64))


# ---- of a buffer ------------------------------------------------------------------------------------------------------


class _Listed(NamedTuple):
    """Trajectories of a buffer: the ids of their rows, one trajectory after another, and how many each has."""

    ids: np.ndarray
    lengths: np.ndarray

    def chunks(self, row_bytes: int) -> Iterator[_Listed]:
        """Whole trajectories, about CHUNK_BYTES together."""
        most, upto, at = max(1, CHUNK_BYTES // max(1, row_bytes)), np.cumsum(self.lengths), 0
        while at < len(upto):
            before = int(upto[at - 1]) if at else 0
            to = max(at + 1, int(np.searchsorted(upto, before + most, "right")))
            yield _Listed(self.ids[before : upto[to - 1]], self.lengths[at:to])
            at = to

    def only(self, which: np.ndarray) -> _Listed:
        chosen = np.zeros(len(self.lengths), bool)
        chosen[which] = True
        return _Listed(self.ids[np.repeat(chosen, self.lengths)], self.lengths[chosen])

    def without(self, gone: np.ndarray) -> tuple[_Listed, np.ndarray | None]:
        """Each cut behind the last of its rows that is ``gone`` (bool[m]); bool[m] of what stays, or None for all."""
        if not gone.any():
            return self, None
        upto = np.cumsum(self.lengths)
        at = np.flatnonzero(gone)
        begin = upto - self.lengths
        np.maximum.at(begin, np.searchsorted(upto, at, "right"), at + 1)
        stays = np.arange(len(self.ids)) >= np.repeat(begin, self.lengths)
        left = upto - begin
        return _Listed(self.ids[stays], left[left > 0]), stays


def query_buffer(
    storage: ShmStorage,
    predicate: Predicate | None = None,
    *,
    trajectory_key: Any = None,
    transforms: Sequence[Callable[[TensorDictBase], TensorDictBase]] = (),
) -> list[Trajectory]:
    """The stored trajectories that ``predicate`` holds for (None: all), by their first stored rows; copies.

    Args:
        predicate: built from `traj`: only the keys it reads are fetched for all; or any callable of a `Trajectory`.
        trajectory_key: default: the buffer's own trajectories. Another key costs a look at that column of all rows; then the rows with
            one id, in the order they were stored in, up to one that an end key marks, are a trajectory: collectors that write
            at once need ids of their own.
        transforms: applied to what the predicate sees and to the results, in order, each to several whole trajectories at once, one after
            another. For the predicate one is left out if its ``out_keys`` say that it cannot matter.

    Each result is whole, unless its beginning was overwritten, also while the call went on; it has the buffer's keys, "index" and
    "row_id". It matches as it is returned, and lay in the buffer during the call.

    Raises:
        KeyError: the predicate, or trajectory_key, names a key that is not there; or nothing tells trajectories apart. What the predicate
        raises. ValueError: a transform changed the number of rows.
    """
    predicate, buffer = _checked(predicate), storage.buffer
    transforms = list(transforms)
    if buffer.schema is None:
        return []
    schema, asked = storage.schema(), _keys_of(predicate)
    if asked is not None and not transforms:
        _require(schema, asked)
    listed = _listed(buffer, schema, trajectory_key)
    found: list[tuple[int, Trajectory]] = []
    if predicate is not None:
        kept, keys = _plan(transforms, asked)
        if keys is not None:
            listed = _chosen(storage, schema, listed, predicate, kept, keys)
    for part in listed.chunks(schema.row_bytes):
        td, part = _fetched(storage, part, schema.columns)
        rows = _Rows(_transformed(td, transforms), part.lengths)
        which = rows.matching(predicate)
        firsts = part.ids[np.cumsum(part.lengths) - part.lengths]
        given = _Rows(storage.delivered(rows.td), part.lengths)  # chosen on the host, of a device too
        found += zip(firsts[which].tolist(), _apart(given, which), strict=True)
    return [t for _, t in sorted(found, key=_order(storage, [first for first, _ in found]))]


def _chosen(
    storage: ShmStorage, schema: Schema, listed: _Listed, predicate: Any, transforms: list, keys: set[Key]
) -> _Listed:
    """What matches by the columns it needs alone."""
    columns = [c for c in schema.columns if any(c.key[: len(k)] == k for k in keys)]
    parts = []
    numbers = any(k[0] in ("index", "row_id") for k in keys)
    for part in listed.chunks(sum(c.nbytes for c in columns) + 16):
        td, part = _fetched(storage, part, columns, numbers)
        rows = _Rows(_transformed(td, transforms), part.lengths, schema.keys if not transforms else None)
        parts.append(part.only(rows.matching(predicate)))
    if not parts:
        return listed
    return _Listed(np.concatenate([p.ids for p in parts]), np.concatenate([p.lengths for p in parts]))


def _order(storage: ShmStorage, firsts: list[int]) -> Callable[[tuple[int, Trajectory]], Any]:
    """By first row; where rows have a batch coordinate, by that before."""
    if storage.ndim == 1 or not hasattr(storage, "lane_of"):
        return lambda found: found[0]
    lane = dict(zip(firsts, storage.lane_of(np.array(firsts, np.int64)).tolist(), strict=True))
    return lambda found: (lane[found[0]], found[0])


def _apart(rows: _Rows, which: np.ndarray) -> list[Trajectory]:
    """Trajectories with memory of their own where others, that are not wanted, lie beside them."""
    if len(which) < len(rows.lengths):
        return [rows.trajectory(int(i)).clone() for i in which]
    others: dict[Key, Any] = {}
    leaves = tensor_leaves(rows.td, others=others) if type(rows.td) is TensorDict else None
    if not leaves or others:
        return [rows.trajectory(int(i)) for i in which]
    tree, sizes = tree_of(tuple(leaves)), rows.lengths.tolist()
    parts = zip(*(t.split(sizes) for t in leaves.values()), strict=True)
    return [
        wrap_trajectory(make_tensordict(tree, list(p), torch.Size((n,)))) for p, n in zip(parts, sizes, strict=True)
    ]


# ---- rows -------------------------------------------------------------------------------------------------------------


def _fetched(
    storage: ShmStorage, listed: _Listed, columns: Sequence[Column], numbers: bool = True
) -> tuple[TensorDictBase, _Listed]:
    """Copies of these columns and, with ``numbers``, "index" and "row_id"; without what is not stored any more, and what came before it."""
    buffer, ids = storage.buffer, listed.ids
    leaves, valid = _fetch(buffer, columns, ids)
    lo, stays = buffer._get("window")[1], None
    if len(ids) and not (valid.all() and ids.min() >= lo):
        listed, stays = listed.without(~valid | (ids < lo))
    if stays is not None:
        kept = torch.from_numpy(stays)
        leaves = [t[kept] for t in leaves]
    keys = tuple(c.key for c in columns)
    if numbers:
        row_id = torch.from_numpy(listed.ids.copy())
        leaves += [row_id, torch.remainder(row_id, buffer.capacity)]
        keys += _NUMBERS
    td: TensorDictBase = make_tensordict(tree_of(keys), leaves, torch.Size((len(listed.ids),)))
    for c in columns:
        if c.dtype == PACKED:
            td.set(c.key, values_of(td.get(c.key)))
    return td, listed


def _fetch(buffer: Buffer, columns: Sequence[Column], ids: np.ndarray) -> tuple[list[torch.Tensor], np.ndarray]:
    if not columns:  # they are stored if the window says so afterwards
        return [], np.ones(len(ids), bool)
    into = native.Columns()
    for c in columns:
        into.add(c.offset, c.nbytes, list(c.shape), "", None)
    leaves = [torch.empty((len(ids), *c.shape), dtype=torch_dtype(c)) for c in columns]
    valid = buffer.fetch_into(into, [t.data_ptr() for t in leaves], np.ascontiguousarray(ids))
    return leaves, valid


# ---- where they begin and end -----------------------------------------------------------------------------------------


def _listed(buffer: Buffer, schema: Schema, trajectory_key: Any) -> _Listed:
    marks = buffer.marks
    if trajectory_key is None:
        if marks.keep:
            return _Listed(*buffer.listing())
        marks = resolve(schema, {})
    else:
        key = as_key(unravel_key(trajectory_key))
        column = next((c for c in schema.columns if c.key == key), None)
        if column is None:
            raise KeyError(f"trajectory_key {show_key(key)} not found in data: {', '.join(map(show_key, schema.keys))}")
        if marks.keep and marks.trajectory == column:
            return _Listed(*buffer.listing())
        marks = resolve(schema, {})._replace(trajectory=column)
    if marks.trajectory is None:
        if not marks.ends:
            raise cannot_split(", ".join(map(show_key, schema.keys)))
        warnings.warn(
            f"buffer {buffer.name!r} keeps no trajectories, and its rows have no ids: splitting on the end flags "
            f"{', '.join(show_key(c.key) for c in marks.ends)} mixes the rows of collectors that write at once. Create it with "
            "trajectories=True.",
            UserWarning,
            stacklevel=4,
        )
    return _scanned(buffer, [c for c in (marks.trajectory, *marks.ends) if c is not None], marks.trajectory is not None)


def _scanned(buffer: Buffer, columns: list[Column], by_id: bool) -> _Listed:
    """Out of all rows' ids (the first column, if any) and end flags."""
    _, lo, hi = buffer._get("window")
    ids = np.arange(lo, hi, dtype=np.int64)
    leaves, valid = _fetch(buffer, columns, ids)
    n = int(valid.sum())
    signals = [one_a_row(t[torch.from_numpy(valid)], n, c.key).numpy() for t, c in zip(leaves, columns, strict=True)]
    ids = ids[valid]
    is_end = np.zeros(n, bool)
    for flags in signals[by_id:]:
        is_end |= flags != 0
    if by_id:
        order = np.argsort(signals[0], kind="stable")
        ids, is_end, of = ids[order], is_end[order], signals[0][order]
        is_end[:-1] |= of[1:] != of[:-1]
    if n:
        is_end[-1] = True
    at = np.flatnonzero(is_end)
    lengths = np.diff(at, prepend=-1)
    begin = np.argsort(ids[at - lengths + 1] if n else at, kind="stable")
    moved = np.repeat((at - lengths + 1)[begin] - (np.cumsum(lengths[begin]) - lengths[begin]), lengths[begin])
    return _Listed(ids[np.arange(n) + moved], lengths[begin])


# ---- transforms -------------------------------------------------------------------------------------------------------


def _keys_of(predicate: Any) -> set[Key] | None:
    """What it reads, None if that is not known."""
    asked = getattr(predicate, "required_keys", None)
    keys = asked() if callable(asked) else None
    return None if keys is None else {as_key(unravel_key(k)) for k in keys}


def _require(schema: Schema, keys: set[Key]) -> None:
    have = {*schema.keys, *_NUMBERS}
    for key in keys:
        if key not in have and ("next", *key) not in have:
            show = key[0] if len(key) == 1 else key
            raise KeyError(
                f"Key {show!r} not found (looked up root and ('next', ...)); the buffer has {', '.join(map(show_key, schema.keys))}"
            )


def _plan(transforms: list, asked: set[Key] | None) -> tuple[list, set[Key] | None]:
    """Which transforms, and which keys of the buffer, a predicate that reads ``asked`` needs; None: whole rows, and all transforms."""
    if asked is None:
        return transforms, None
    keys = asked | {("next", *k) for k in asked if len(k) == 1}
    kept: list = []
    for t in reversed(transforms):
        out = [as_key(unravel_key(k)) for k in getattr(t, "out_keys", None) or ()]
        if not out:  # it may do anything to anything
            return transforms, None
        if any(a[: len(b)] == b[: len(a)] for a in out for b in keys):
            kept.insert(0, t)
            keys |= {as_key(unravel_key(k)) for k in getattr(t, "in_keys", None) or ()}
    return kept, keys


def _transformed(td: TensorDictBase, transforms: list) -> TensorDictBase:
    n = td.batch_size
    for t in transforms:
        td = t(td)
        if not isinstance(td, TensorDictBase) or td.batch_size != n:
            got = f"batch size {list(td.batch_size)}" if isinstance(td, TensorDictBase) else type(td).__name__
            raise ValueError(
                f"transform {t!r} made {got} of rows of batch size {list(n)}: a query cannot tell where trajectories begin then"
            )
    return td
