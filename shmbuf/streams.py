"""Which columns tell where a trajectory goes on and where it ends; chosen at a buffer's birth, resolved with its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shmbuf.errors import SchemaError
from shmbuf.schema import Column, Key, Schema, as_key, show_key

END_KEYS: tuple[tuple[Key, ...], ...] = (  # the first group of which one is in the schema
    (("next", "done"), ("next", "terminated"), ("next", "truncated")),
    (("done",), ("terminated",), ("truncated",)),
)
TRAJECTORY_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",), ("traj_ids",))
MAX_END_KEYS = 4


class Marks(NamedTuple):
    keep: bool
    ends: tuple[Column, ...]
    trajectory: Column | None

    def native(self) -> tuple[bool, list[tuple[int, int]], tuple[int, int]]:
        place = (self.trajectory.offset, self.trajectory.nbytes) if self.trajectory else (0, 0)
        return self.keep, [(c.offset, c.nbytes) for c in self.ends], place


def settings(trajectories: bool | None, traj_key: Any, end_keys: Any) -> dict[str, Any]:
    """For the buffer's configuration. Raises SchemaError, ValueError."""
    if trajectories not in (None, True, False):
        raise ValueError(f"trajectories={trajectories!r}: True, False, or None (if the rows tell)")
    out: dict[str, Any] = {"keep": trajectories}
    if traj_key is not None:
        out["traj_key"] = list(as_key(traj_key))
    if end_keys is not None:
        single = isinstance(end_keys, str) or (
            end_keys and all(isinstance(k, str) for k in end_keys) and isinstance(end_keys, tuple)
        )
        keys = [end_keys] if single else list(end_keys)
        if len(keys) > MAX_END_KEYS:
            raise ValueError(f"{len(keys)} end keys: at most {MAX_END_KEYS}")
        out["end_keys"] = [list(as_key(k)) for k in keys]
    if trajectories is False and len(out) > 1:
        raise ValueError("trajectories=False, but traj_key or end_keys is given")
    return out


def resolve(schema: Schema, chosen: Mapping[str, Any]) -> Marks:
    """Raises SchemaError naming a key that is not in the schema."""
    columns = {c.key: c for c in schema.columns}

    def column(key: Any, what: str) -> Column:
        key = tuple(key)
        if key not in columns:
            raise SchemaError(f"{what}={show_key(key)} is not in the schema: {', '.join(map(show_key, schema.keys))}")
        return columns[key]

    if chosen.get("keep") is False:
        return Marks(False, (), None)
    if "end_keys" in chosen:
        ends = tuple(column(k, "end_keys") for k in chosen["end_keys"])
    else:
        ends = next(
            (tuple(columns[k] for k in g if k in columns) for g in END_KEYS if any(k in columns for k in g)), ()
        )
        ends = tuple(c for c in ends if c.dtype in ("bool", "uint8"))
    trajectory = next((columns[k] for k in TRAJECTORY_KEYS if k in columns), None)
    if "traj_key" in chosen:
        trajectory = column(chosen["traj_key"], "traj_key")
    return Marks(bool(chosen.get("keep") or ends or trajectory), ends, trajectory)
