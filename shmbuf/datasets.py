"""Rows of a `Buffer` out to, and in from, files other programs know: npz, HDF5, Minari, LeRobot. Trajectories stay whole.

Each needs its own library (``pip install shmbuf[datasets]``: h5py and minari; lerobot by itself), imported when it is used. No torch here.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shmbuf.buffer import Buffer
from shmbuf.schema import Key, flatten, nest

SEPARATOR = "/"
_ORDER = "__trajectory__"  # int64 a row: which trajectory, numbered in the order of their last rows


def _library(name: str, how: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ImportError(f"{name} is needed for this, and cannot be imported ({e}): {how}") from None


def _parts(buf: Buffer) -> Iterator[dict[str, Any]]:
    """Rows trajectory by trajectory; all as one where none are kept."""
    if buf.schema is None:
        raise RuntimeError(f"buffer {buf.name!r} has no schema yet: there is nothing to export")
    if buf.marks.keep:
        for _, rows in buf.export():
            yield rows
    elif len(buf):
        rows, valid = buf.try_gather(np.arange(*buf.window))
        yield nest(buf.schema.keys, (a[valid] for a in flatten(rows).values()))


def _put(buf: Buffer, parts: Iterable[Mapping[str, Any]]) -> int:
    """Each part as a stream of its own. Returns how many rows."""
    n = 0
    # A handle of its own, so that nobody goes on with what it put.
    with Buffer.attach(buf.name, owner=buf._owner) as writer:
        for i, rows in enumerate(parts):
            writer.schema  # noqa: B018  # the first part may give it
            own = writer.schema is None or not writer.marks.keep or writer.marks.trajectory is not None
            n += len(writer.extend(rows, stream=None if own or (i == 0 and writer.schema is None) else i))
    return n


def _columns(buf: Buffer) -> tuple[dict[Key, np.ndarray], np.ndarray]:
    parts = [flatten(p) for p in _parts(buf)]
    assert buf.schema is not None
    sizes = [len(next(iter(p.values()))) for p in parts]
    if not parts:
        return {c.key: np.empty((0, *c.shape), c.numpy) for c in buf.schema.columns}, np.empty(0, np.int64)
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}, np.repeat(np.arange(len(parts)), sizes)


def _split(columns: Mapping[Key, np.ndarray], order: np.ndarray) -> Iterator[dict[str, Any]]:
    cuts = [0, *(np.flatnonzero(np.diff(order)) + 1), len(order)]
    for lo, hi in itertools.pairwise(cuts):
        if hi > lo:
            yield nest(columns.keys(), (a[lo:hi] for a in columns.values()))


def to_npz(buf: Buffer, path: str | os.PathLike) -> int:
    """All rows into one file of numpy arrays [n, *shape], named by their keys joined with ``/``. Returns n."""
    columns, order = _columns(buf)
    np.savez(path, **{SEPARATOR.join(k): a for k, a in columns.items()}, **{_ORDER: order})  # type: ignore[arg-type]
    return len(order)


def from_npz(buf: Buffer, path: str | os.PathLike) -> int:
    """Put the rows of such a file, or of any npz whose arrays agree in their first dimension (as one trajectory). No pickles."""
    with np.load(path, allow_pickle=False) as file:
        columns = {tuple(name.split(SEPARATOR)): file[name] for name in file.files if name != _ORDER}
        n = len(next(iter(columns.values()))) if columns else 0
        order = file[_ORDER] if _ORDER in file.files else np.zeros(n, np.int64)
    return _put(buf, _split(columns, order))


def to_hdf5(buf: Buffer, path: str | os.PathLike) -> int:
    """All rows into an HDF5 file: a data set [n, *shape] per key, nested keys as groups. Needs h5py. Returns n."""
    h5py = _library("h5py", "pip install h5py")
    columns, order = _columns(buf)
    with h5py.File(path, "w") as file:
        for key, a in {**columns, (_ORDER,): order}.items():
            file.create_dataset(SEPARATOR.join(key), data=a)
    return len(order)


def from_hdf5(buf: Buffer, path: str | os.PathLike) -> int:
    """Put the rows of such a file. Needs h5py. Returns how many."""
    h5py = _library("h5py", "pip install h5py")
    columns: dict[Key, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: columns.__setitem__(tuple(name.split("/")), item[()]) if hasattr(item, "shape") else None
        )
    n = len(next(iter(columns.values()))) if columns else 0
    order = columns.pop((_ORDER,), np.zeros(n, np.int64))
    return _put(buf, _split(columns, order))


def from_minari(buf: Buffer, dataset: Any) -> int:
    """Put the episodes of a Minari data set, or of the one of that id: ``observation``, ``action``, and under ``next`` observation,
    reward, terminated, truncated, done. Needs minari. Returns how many rows."""
    minari = _library("minari", 'pip install "minari[hdf5]"')
    if isinstance(dataset, str):
        dataset = minari.load_dataset(dataset)

    def rows(e: Any) -> dict[str, Any]:
        ends = {"terminated": np.asarray(e.terminations, bool), "truncated": np.asarray(e.truncations, bool)}
        seen = _each(e.observations, lambda a: a[:-1]), _each(e.observations, lambda a: a[1:])
        after = {"observation": seen[1], "reward": np.asarray(e.rewards), **ends}
        after["done"] = ends["terminated"] | ends["truncated"]
        return {"observation": seen[0], "action": _each(e.actions, lambda a: a), "next": after}

    return _put(buf, (rows(e) for e in dataset.iterate_episodes()))


def _each(tree: Any, f: Any) -> Any:
    return {k: _each(v, f) for k, v in tree.items()} if isinstance(tree, Mapping) else f(np.asarray(tree))
