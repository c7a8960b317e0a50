"""`dumps`: a buffer, or a replay buffer, into a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmbuf.buffer import Buffer
from shmbuf.checkpoint import layout
from shmbuf.checkpoint.directories import Tell, replacing, showing
from shmbuf.checkpoint.layout import write_json, write_tensordict_meta
from shmbuf.checkpoint.snapshot import Copied, copy_rows, state_of, write_array
from shmbuf.epochs import CONSUMED, EPOCH, EpochReader
from shmbuf.schema import Column

FLT_MAX = float(np.finfo(np.float32).max)


class Saved(NamedTuple):
    """rows: in the checkpoint. lost: of the instant, left out because they were overwritten before they were copied."""

    rows: int
    lost: int
    first_id: int
    end_id: int


def dump_buffer(
    buf: Buffer,
    path: str | os.PathLike,
    *,
    complete: bool = False,
    timeout: float = 60.0,
    progress: bool | Tell | None = None,
    batch_size: int | None = None,
    beta: float = 0.4,
    epochs: dict[str, Any] | None = None,
    hooked: bool = False,
    more: Callable[[Path], None] | None = None,
) -> Saved:
    """A bare `Buffer`, without torch. Arguments and errors: see `dumps`. more: writes further files into the directory."""
    if buf.schema is None:
        raise RuntimeError("Cannot save a non-initialized storage.")
    schema = buf.schema
    files = layout.file_keys(schema)
    with showing(progress, "saving") as tell, replacing(path) as made:
        storage = made / "storage"
        write_tensordict_meta(storage, files, schema.columns, [buf.capacity])
        copied = copy_rows(buf, storage, files, complete=complete, timeout=timeout, tell=tell)
        n = copied.end - copied.first
        write_json(storage / "storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": n})
        write_json(made / "buffer_metadata.json", {"batch_size": batch_size, "consume_after_n_samples": None})
        (made / "writer").mkdir()
        cursor = (copied.first_slot + n) % buf.capacity
        write_json(made / "writer/metadata.json", {"cursor": cursor, "write_count": copied.counters["write_count"]})
        if copied.priorities is not None:
            _trees(made / "sampler", buf, copied, beta)
        own = made / "shmbuf"
        own.mkdir()
        state = {
            "version": layout.VERSION,
            "rows": n,
            "hooked": hooked,
            **state_of(buf, copied, files),
            "epochs": epochs or _words(buf),
        }
        for name in ("streams", "heads", "priorities"):
            array = getattr(copied, name)
            if array is not None:
                write_array(own / f"{name}.memmap", array)
        state["heads"] = 0 if copied.heads is None else len(copied.heads)
        write_json(own / "state.json", state)
        if more is not None:
            more(made)
    return Saved(n, copied.lost, copied.first, copied.end)


def _trees(directory: Path, buf: Buffer, copied: Copied, beta: float) -> None:
    """TorchRL's: the leaves of its sum and min trees."""
    directory.mkdir()
    p, state = copied.priorities, buf._get("priorities")
    assert p is not None
    leaves = np.power(np.where(np.isnan(p), 1.0, p) + state["eps"], state["alpha"])
    begin = buf.capacity - copied.first_slot  # of `leaves`: what lies at slot 0 if they go beyond the last one
    for name, empty in (("sumtree", 0.0), ("mintree", FLT_MAX)):
        tree = np.empty(buf.capacity)
        tree[copied.first_slot : copied.first_slot + len(p)] = leaves[:begin]
        rest = max(0, len(p) - begin)
        tree[:rest] = leaves[begin:]
        tree[rest : copied.first_slot] = tree[copied.first_slot + len(p) :] = empty
        write_array(directory / f"{name}.memmap", tree)
    known = len(p) > 0 and not np.isnan(p).all()
    top = float((copied.first_slot + np.nanargmax(p)) % buf.capacity) if known else 0.0
    meta = {"_alpha": state["alpha"], "_beta": beta, "_eps": state["eps"], "_max_priority": [state["new_row"], top]}
    write_json(
        directory / "sampler_metadata.json", {**meta, "_max_capacity": float(buf.capacity), "_schema_version": 1}
    )


def _words(buf: Buffer) -> dict[str, Any]:
    """Where the shared epochs stand: how far everybody is, and through which rows."""
    words = {str(which): list(buf._call("epoch_word", which)) for which in (EPOCH, CONSUMED)}
    return {"shared": words, "instance": str(buf._header["instance_id"])}


def reader_of(rb: Any) -> EpochReader | None:
    readers = getattr(rb.sampler, "_readers", None)
    return readers.get(rb.buffer) if readers is not None else None


def _epochs(rb: Any) -> dict[str, Any]:
    out, reader = _words(rb.buffer), reader_of(rb)
    if reader is not None and reader._own is not None:
        out["own"] = {"word": list(reader._own.state), "order": reader._order, "fresh": reader._fresh}
    return out


def dumps(
    rb: Any,
    path: str | os.PathLike,
    *,
    complete: bool = False,
    timeout: float = 60.0,
    progress: bool | Tell | None = None,
) -> Saved:
    """Save a replay buffer into the directory ``path``, so that TorchRL can read it, too.

    It holds the rows of one instant, while others may go on writing: rows they overwrite before they are copied are left out, always the
    oldest. If none is left, a newer instant is saved, at last with ``complete``. Rows still in rings are not saved. The directory appears
    at once and whole: a kill at any moment leaves what was there before, or the new one. Missing parents are made.

    Args:
        complete: keep all rows of the instant: writers that need the room wait, at most ``timeout`` seconds.
        progress: True: a bar on stderr; or a callable (rows done, of how many).

    Returns:
        `Saved`: how many rows, and how many were left out.

    Raises:
        RuntimeError: nothing has ever been put. CheckpointError: the place is taken by something else. OSError: no room: what
        was there is unchanged. Lapped: writers were waiting, with ``complete`` or because all else was lost, for longer than ``timeout``.
    """
    more = _More(rb)
    return dump_buffer(
        rb.buffer,
        path,
        complete=complete,
        timeout=timeout,
        progress=progress,
        batch_size=rb.batch_size,
        beta=float(getattr(rb.sampler, "beta", 0.4)),
        epochs=_epochs(rb),
        hooked=bool(more.hooks),
        more=more,
    )


class _More:
    """The files that need torch."""

    def __init__(self, rb: Any):
        self.hooks = list(getattr(rb, "_save_hooks", ()))
        self.rng = getattr(rb, "_rng", None)
        transform = transform_of(rb)
        self.transform = transform.state_dict() if transform is not None else {}

    def __call__(self, made: Path) -> None:
        if self.rng is not None:
            state = self.rng.get_state().numpy()
            write_tensordict_meta(
                made / "rng_state", [("rng_state",)], [Column(("rng_state",), "uint8", state.shape)], []
            )
            state.tofile(made / "rng_state/rng_state.memmap")
        if self.transform:
            import torch

            torch.save(self.transform, made / "transform.t")
        if self.hooks:
            from shmbuf.checkpoint.hooks import save_through

            save_through(self.hooks, made / "storage")


def transform_of(rb: Any) -> Any:
    """Not by the property ``transform``, which would make an empty one."""
    found = getattr(rb, "_transform", None)
    return found if hasattr(found, "state_dict") else None
