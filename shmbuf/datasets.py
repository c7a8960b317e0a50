"""Rows of a `Buffer`, or of a replay buffer, out to, and in from, files others know: npz, HDF5, Minari, LeRobot. Trajectories stay whole.

Each needs its own library (``pip install shmbuf[datasets]``: h5py and minari; ``pip install lerobot`` by itself), imported when it is
used. No torch here.

What holds of all of them:

- Out: ``to_…`` writes what is stored when it comes by; rows that are overwritten meanwhile are left out. Dtypes torch has and numpy lacks
  go out as their raw bits, and come back into a column of that dtype.
- In: every episode is a stream of its own, so trajectories, slices and queries see the boundaries that the file has. Dtypes are never
  converted. What does not fit the buffer's schema is a SchemaError that names the file, the buffer and every difference, and nothing is
  put (where a later episode differs from the first, it says what is in already). A buffer without a schema gets that of the first episode.
- More rows than the buffer's capacity: they are put in the file's order like any others, so the last ones stay, the oldest (also rows
  that were in the buffer before) are overwritten, and a UserWarning says so.
- A file that cannot be read to its end raises its library's error; the episodes before are in the buffer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shmbuf.buffer import Buffer
from shmbuf.errors import SchemaError
from shmbuf.schema import Column, Key, as_key, flatten, nest, show_key

SEPARATOR = "/"
_ORDER = "__trajectory__"  # int64 a row: which trajectory, numbered in the order of their last rows
_TERMINATED, _TRUNCATED, _DONE = ("next", "terminated"), ("next", "truncated"), ("next", "done")
_ENDS: tuple[Key, ...] = (_TERMINATED, _TRUNCATED, _DONE)
_LEROBOT_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # LeRobot's DEFAULT_FEATURES


def _library(name: str, how: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ImportError(f"{name} is needed for this, and cannot be imported ({e}): {how}") from None


# ---- rows out of a buffer, and into one ---------------------------------------------------------------------------


def _of_buffers(f: Callable[..., int]) -> Callable[..., int]:
    """Takes a replay buffer, too: its numpy-level handle."""

    @functools.wraps(f)
    def run(buf: Any, *args: Any, **how: Any) -> int:
        under = getattr(buf, "buffer", buf)
        if not isinstance(under, Buffer):
            raise TypeError(f"{f.__name__} takes a Buffer or a replay buffer, not {type(buf).__name__}")
        return f(under, *args, **how)

    return run


def _parts(buf: Buffer, incomplete: bool = True) -> Iterator[tuple[bool, dict[Key, np.ndarray]]]:
    """Trajectory by trajectory: whether it has ended, and its rows. All rows as one where no trajectories are kept."""
    if buf.schema is None:
        raise RuntimeError(f"buffer {buf.name!r} has no schema yet: there is nothing to export")
    if buf.marks.keep:
        for span, rows in buf.export():
            if incomplete or (span.ended and not span.head_missing):
                yield span.ended, flatten(rows)
    elif len(buf):
        out, valid = buf.try_gather(np.arange(*buf.window))
        yield False, {k: a[valid] for k, a in flatten(out).items()}


def _put(buf: Buffer, parts: Iterable[Mapping[Key, np.ndarray]], what: str) -> int:
    """Each part as a stream of its own. Returns how many rows."""
    n = 0
    # A handle of its own, so that nobody goes on with what it put.
    with Buffer.attach(buf.name, owner=buf._owner) as writer:
        for i, leaves in enumerate(parts):
            schema = writer.schema  # the first part may give it
            unnamed = schema is None or not writer.marks.keep or writer.marks.trajectory is not None
            try:
                n += len(writer.extend(nest(leaves.keys(), leaves.values()), stream=None if unnamed else i))
            except SchemaError as e:
                which = f"episode {i} of {what}" if n else what
                before = f" (the {n:,} rows of those before it are in)" if n else ""
                raise SchemaError(f"{which} does not fit buffer {buf.name!r}{before}: {e}") from None
    if n > buf.capacity:
        warnings.warn(
            f"{what} has {n:,} rows, buffer {buf.name!r} room for {buf.capacity:,}: the last ones put are there, the others overwritten",
            stacklevel=3,
        )
    return n


def _chosen(buf: Buffer, keys: Sequence[Any] | None) -> list[Column]:
    """The columns under these keys, in the schema's order. Raises SchemaError naming a key that is none."""
    if buf.schema is None:
        raise RuntimeError(f"buffer {buf.name!r} has no schema yet: there is nothing to export")
    columns = list(buf.schema.columns)
    if keys is None:
        return columns
    wanted = [as_key(k) for k in keys]
    for k in wanted:
        if not any(c.key[: len(k)] == k for c in columns):
            raise SchemaError(
                f"keys= names {show_key(k)}, which is not in the schema: {', '.join(map(show_key, buf.schema.keys))}"
            )
    return [c for c in columns if any(c.key[: len(k)] == k for k in wanted)]


def _fitted(buf: Buffer, leaves: Mapping[Key, np.ndarray], made_up: Iterable[Key] = ()) -> dict[Key, np.ndarray]:
    """As the buffer's columns have it: [n] or [n, 1]. Without what the file does not say itself, where there is no such column."""
    out = dict(leaves)
    if buf.schema is None:
        return out
    columns = {c.key: c for c in buf.schema.columns}
    for key in made_up:
        if key not in columns:
            out.pop(key, None)
    for key, a in out.items():
        shape = columns[key].shape if key in columns else a.shape[1:]
        if shape != a.shape[1:] and [d for d in shape if d != 1] == [d for d in a.shape[1:] if d != 1]:
            out[key] = a.reshape(len(a), *shape)
    return out


# ---- npz, HDF5 -----------------------------------------------------------------------------------------------------


def _columns(buf: Buffer) -> dict[str, np.ndarray]:
    """All rows by their names in a file, and which trajectory each is of. In memory twice."""
    columns = {c.key: c for c in _chosen(buf, None)}
    for key in columns:
        if any(SEPARATOR in part or part in ("", ".", "..") for part in key) or key == (_ORDER,):
            raise SchemaError(f"key {show_key(key)} cannot be a name in the file: parts are joined with {SEPARATOR!r}")
    parts = [p for _, p in _parts(buf)]
    sizes = [len(next(iter(p.values()))) for p in parts]
    out = {
        SEPARATOR.join(k): np.concatenate([np.empty((0, *c.shape), c.numpy), *(p[k] for p in parts)])
        for k, c in columns.items()
    }
    return {**out, _ORDER: np.repeat(np.arange(len(parts)), sizes)}


def _split(arrays: Mapping[str, np.ndarray], what: str) -> Iterator[dict[Key, np.ndarray]]:
    sizes = {name: len(a) if a.ndim else None for name, a in arrays.items()}
    if not arrays.keys() - {_ORDER}:
        raise SchemaError(f"{what} holds no arrays")
    if None in sizes.values() or len(set(sizes.values())) > 1:
        each = ", ".join(f"{name}: {n}" for name, n in sizes.items())
        raise SchemaError(f"{what}: arrays have different numbers of rows (first dimension): {each}")
    columns = {tuple(name.split(SEPARATOR)): a for name, a in arrays.items() if name != _ORDER}
    n = next(iter(sizes.values())) or 0
    order = arrays.get(_ORDER, np.zeros(n, np.int64))
    for lo, hi in itertools.pairwise([0, *(np.flatnonzero(np.diff(order)) + 1), n]):
        if hi > lo:
            yield {k: a[lo:hi] for k, a in columns.items()}


@_of_buffers
def to_npz(buf: Buffer, path: str | os.PathLike) -> int:
    """All rows into one npz file of arrays [n, *shape], named by their keys joined with ``/``; ``__trajectory__`` int64[n] tells which
    trajectory a row is of. A file of that name is replaced. Returns n.

    Raises:
        RuntimeError: no schema yet. SchemaError: a key with ``/`` in it. OSError
    """
    columns = _columns(buf)
    with zipfile.ZipFile(path, "w") as file:  # np.savez reserves names that a column may have
        for name, a in columns.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array(f, a, allow_pickle=False)
    return len(columns[_ORDER])


@_of_buffers
def from_npz(buf: Buffer, path: str | os.PathLike) -> int:
    """Put the rows of such a file, or of any npz whose arrays agree in their first dimension (as one trajectory). Returns how many.

    Raises:
        FileNotFoundError. ValueError: no npz file, or pickled objects in it: they are never loaded.
        SchemaError: arrays of different lengths, or that do not fit the buffer's schema. Nothing was put. As `Buffer.extend`.
    """
    what = os.fspath(path)
    if not zipfile.is_zipfile(path):
        with open(path, "rb"):  # a missing one says so itself
            raise ValueError(f"{what} is no npz file")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return _put(buf, _split(arrays, what), what)


@_of_buffers
def to_hdf5(buf: Buffer, path: str | os.PathLike) -> int:
    """All rows into an HDF5 file: a data set [n, *shape] per key, nested keys as groups, and ``__trajectory__`` as in `to_npz`. A file of
    that name is replaced. Needs h5py. Returns n.

    Raises:
        ImportError: says what to install. RuntimeError, SchemaError, OSError: as `to_npz`.
    """
    h5py = _library("h5py", "pip install h5py")
    columns = _columns(buf)
    with h5py.File(path, "w") as file:
        for name, a in columns.items():
            file.create_dataset(name, data=a)
    return len(columns[_ORDER])


@_of_buffers
def from_hdf5(buf: Buffer, path: str | os.PathLike) -> int:
    """Put the rows of such a file, or of any whose data sets agree in their first dimension (as one trajectory). Needs h5py. Returns how
    many.

    Raises:
        ImportError: says what to install. FileNotFoundError. OSError: no HDF5 file. SchemaError: as `from_npz`.
    """
    h5py = _library("h5py", "pip install h5py")
    arrays: dict[str, np.ndarray] = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item[()])

    with h5py.File(path, "r") as file:
        file.visititems(take)
    what = os.fspath(path)
    return _put(buf, _split(arrays, what), what)


# ---- Minari --------------------------------------------------------------------------------------------------------


@_of_buffers
def to_minari(
    buf: Buffer, dataset_id: str, *, keys: Sequence[Any] | None = None, incomplete: bool = True, **about: Any
) -> int:
    """Each trajectory as an episode of a new Minari data set. Needs minari. `from_minari` gives the same rows again.

    The rows are those of TorchRL: ``observation`` and ``action``, each one array or a tree of them, and under ``next`` the same
    ``observation``, ``reward``, and at least one of ``terminated``, ``truncated``, ``done`` (done is either of the others; without
    ``terminated`` it is those that are done and not truncated). Of an episode of n rows Minari stores n + 1 observations: each row's
    next observation has to be the following row's observation.

    A trajectory that is not over (its collector is still at it, or died) is an episode whose last row is marked truncated, in the
    file only. One whose first rows are overwritten begins with the oldest that is stored.

    Args:
        dataset_id: ``"(namespace/)(env/)name-v0"``; Minari puts it under ``$MINARI_DATASETS_PATH`` (``~/.minari/datasets``).
        keys: the columns to write, a key standing for all under it. Default: all, which must be the above.
        incomplete: False leaves out trajectories that are not over or whose first rows are overwritten.
        about: for ``minari.create_dataset_from_buffers``: env, author, description, … The spaces are those of env, or without one
            boxes as wide as the dtypes. Images are stored as they are, unless ``jpeg_encoding=True``.

    Returns:
        how many rows were written. They are all in memory on the way, twice.

    Raises:
        ImportError: says what to install. RuntimeError: no trajectory to write, or the buffer keeps none.
        SchemaError: columns that Minari has no place for, or that it needs and are not there.
        ValueError: an observation that is not the one before's next, or ``done`` where a row is neither terminated nor truncated: names
        the trajectory and row; an id that is none, or taken. Nothing was written.
    """
    minari = _library("minari", "pip install shmbuf[datasets]")
    for needed in ("PIL", "h5py") if about.get("data_format") is None else ("PIL",):  # which minari misses too late
        _library(needed, "pip install shmbuf[datasets]")
    if not re.fullmatch(r"([-\w][-\w/]*[-\w]/)?[-\w]+-v\d+", dataset_id):  # for another one Minari makes a folder first
        raise ValueError(f"dataset_id={dataset_id!r}: an id is (namespace/)(env/)name-v0")
    columns = {c.key: c for c in _chosen(buf, keys)}
    _require_minari(columns)
    buf.require_trajectories()
    episodes = [
        _episode(minari.data_collector.EpisodeBuffer, {k: a for k, a in part.items() if k in columns}, ended, i)
        for i, (ended, part) in enumerate(_parts(buf, incomplete))
    ]
    if not episodes:
        raise RuntimeError(f"buffer {buf.name!r} has no trajectory to write")
    if about.get("env") is None:
        spaces = _library("gymnasium", "pip install shmbuf[datasets]").spaces
        for name in ("observation", "action"):
            tree = _under(columns, (name,))
            about.setdefault(f"{name}_space", _space(spaces, tree))
    about = {"jpeg_encoding": False, **about}
    minari.create_dataset_from_buffers(dataset_id, episodes, **about)
    return sum(len(e) for e in episodes)


def _under(leaves: Mapping[Key, Any], prefix: Key) -> Any:
    """The tree below a key; None if there is none."""
    if prefix in leaves:
        return leaves[prefix]
    found = {k[len(prefix) :]: a for k, a in leaves.items() if k[: len(prefix)] == prefix}
    return nest(found.keys(), found.values()) or None


def _require_minari(columns: Mapping[Key, Column]) -> None:
    seen = {k[1:] for k in columns if k[0] == "observation"}
    after = {k[2:] for k in columns if k[:2] == ("next", "observation")}
    lines = [f"{show_key(('next', 'observation', *k))} is missing" for k in sorted(seen - after)]
    lines += [f"{show_key(('observation', *k))} is missing" for k in sorted(after - seen)]
    if not seen | after:
        lines.append("'observation' and ('next', 'observation') are missing")
    for k in sorted(seen & after):
        a, b = columns[("observation", *k)], columns[("next", "observation", *k)]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{show_key(b.key)} is {b}, {show_key(a.key)} {a}")
    if not any(k[0] == "action" for k in columns):
        lines.append("'action' is missing")
    if ("next", "reward") not in columns:
        lines.append("('next', 'reward') is missing")
    if not any(k in columns for k in _ENDS):
        lines.append("none of ('next', 'terminated'), ('next', 'truncated'), ('next', 'done') is there")
    for k, c in columns.items():
        if k[0] in ("observation", "action") or k[:2] == ("next", "observation"):
            continue
        if k != ("next", "reward") and k not in _ENDS:
            lines.append(f"{show_key(k)} has no place in a Minari episode; leave it out with keys=")
        elif np.prod(c.shape, dtype=int) != 1:
            lines.append(f"{show_key(k)}: one number a row is expected, not {c}")
    if lines:
        raise SchemaError("these rows are no Minari episodes:\n  " + "\n  ".join(lines))


def _episode(kind: Any, part: Mapping[Key, np.ndarray], ended: bool, i: int) -> Any:
    n = len(next(iter(part.values())))
    observations = {}
    for key, a in part.items():
        if key[0] == "observation":
            after = part[("next", *key)]
            x, y = after[:-1], a[1:]
            differ = (x != y) & ~((x != x) & (y != y))  # NaN is the same as NaN
            other = np.flatnonzero(differ.any(axis=tuple(range(1, differ.ndim))))
            if len(other):
                raise ValueError(
                    f"trajectory {i}, row {other[0]} of {n}: {show_key(('next', *key))} is not the following row's "
                    f"{show_key(key)}, and Minari stores them once. Nothing was written"
                )
            observations[key] = np.concatenate([a, after[-1:]])
    flat = {k: part[k].reshape(n) for k in (("next", "reward"), *_ENDS) if k in part}
    done = flat.get(_DONE)
    none = np.zeros(n, bool)
    truncated = flat.get(_TRUNCATED, none).astype(bool)
    terminated = flat.get(_TERMINATED, none if done is None else done.astype(bool) & ~truncated).astype(bool)
    if done is not None:
        if _TRUNCATED not in flat:
            truncated = done.astype(bool) & ~terminated
        wrong = np.flatnonzero(done.astype(bool) != (terminated | truncated))
        if len(wrong):
            raise ValueError(
                f"trajectory {i}, row {wrong[0]} of {n}: done={bool(done[wrong[0]])} where terminated={bool(terminated[wrong[0]])} and "
                f"truncated={bool(truncated[wrong[0]])}: Minari has no done of its own. Nothing was written"
            )
    if not ended:
        truncated = truncated.copy()
        truncated[-1] = True
    return kind(
        observations=_under(observations, ("observation",)),
        actions=_under(part, ("action",)),
        rewards=flat[("next", "reward")],
        terminations=terminated,
        truncations=truncated,
    )


def _space(spaces: Any, tree: Any) -> Any:
    if isinstance(tree, dict):
        return spaces.Dict({k: _space(spaces, v) for k, v in tree.items()})
    dtype = np.dtype(tree.numpy)
    if dtype.kind == "b":
        return spaces.MultiBinary(tree.shape) if tree.shape else spaces.Discrete(2)
    if dtype.kind == "c":
        raise SchemaError(f"key {show_key(tree.key)}: {dtype} has no Minari space")
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, tree.shape, dtype.type)


@_of_buffers
def from_minari(buf: Buffer, dataset: Any) -> int:
    """Put the episodes of a Minari data set, or of the one of that id, each as a trajectory. Needs minari. Returns how many rows.

    Rows have ``observation`` and ``action``, each one array or the tree the data set has (a tuple's items under ``"0"``, ``"1"``, …), and
    under ``next`` ``observation``, ``reward``, ``terminated``, ``truncated`` and ``done`` (bool, either of the two). Infos are left out. The
    last four are [n]; in a buffer that has them as [n, 1] (as TorchRL) they are that. Of the three ends, those that the buffer's
    schema lacks are left out.

    Raises:
        ImportError: says what to install. FileNotFoundError: no such data set. SchemaError: does not fit; nothing was put.
        As `Buffer.extend`.
    """
    if isinstance(dataset, str):
        dataset = _library("minari", "pip install shmbuf[datasets]").load_dataset(dataset)

    def rows(e: Any) -> dict[Key, np.ndarray]:
        ends = {"terminated": np.asarray(e.terminations, bool), "truncated": np.asarray(e.truncations, bool)}
        ends["done"] = ends["terminated"] | ends["truncated"]
        after = {"observation": _each(e.observations, lambda a: a[1:]), "reward": np.asarray(e.rewards), **ends}
        seen = _each(e.observations, lambda a: a[:-1])
        return flatten({"observation": seen, "action": _each(e.actions, lambda a: a), "next": after})

    what = f"Minari data set {getattr(getattr(dataset, 'spec', None), 'dataset_id', '')!r}"
    return _put(buf, (_fitted(buf, rows(e), _ENDS) for e in dataset.iterate_episodes() if len(e.rewards)), what)


def _each(tree: Any, f: Any) -> Any:
    if isinstance(tree, tuple):
        tree = {str(i): v for i, v in enumerate(tree)}
    return {k: _each(v, f) for k, v in tree.items()} if isinstance(tree, Mapping) else f(np.asarray(tree))


# ---- LeRobot -------------------------------------------------------------------------------------------------------


@_of_buffers
def to_lerobot(
    buf: Buffer,
    repo_id: str,
    *,
    fps: int,
    task: str,
    root: str | os.PathLike | None = None,
    keys: Sequence[Any] | None = None,
    incomplete: bool = True,
    **about: Any,
) -> int:
    """Each trajectory as an episode of a new LeRobot data set on disk, a row a frame. Needs lerobot. `from_lerobot` gives the same rows.

    A key is the feature of its parts joined with ``.``: ``("observation", "state")`` is ``observation.state``, ``("next", "reward")`` is
    ``next.reward``. A uint8 column of three dimensions, three of it channels, first or last, is an image (a PNG, so nothing is lost), every
    other column an array of its dtype; one number a row has shape (1,). Videos are not encoded: turn the images of the finished data
    set into videos with LeRobot's own tools.

    A trajectory that is not over is an episode like the others, its flags as they are; one whose first rows are overwritten begins with
    the oldest that is stored.

    Args:
        repo_id: its name, ``"user/name"``. Nothing is uploaded.
        fps: frames in a second, from which LeRobot makes timestamps.
        task: what is done in the episodes, in words.
        root: the folder, which must not be there yet; None: ``$HF_LEROBOT_HOME/repo_id``.
        keys: the columns to write, a key standing for all under it (next observations, say, are the following frame's, and most
            users of LeRobot have no need of them). Default: all.
        incomplete: False leaves out trajectories that are not over or whose first rows are overwritten.
        about: for ``LeRobotDataset.create``: robot_type, image_writer_threads, …

    Returns:
        how many rows were written.

    Raises:
        ImportError: says what to install. RuntimeError: no trajectory to write, or the buffer keeps none; LeRobot could not write one (the
        statistics of 0.4.4 fail for float16, and for columns of 2 dimensions in a one-frame episode among others).
        SchemaError: a key or dtype that LeRobot cannot hold. FileExistsError: the folder is there. ValueError: fps, task. Nothing is
        left on disk.
    """
    kind = _lerobot()
    if not fps > 0:
        raise ValueError(f"fps={fps}: a number of frames a second above 0")
    if not isinstance(task, str):
        raise ValueError(f"task={task!r}: what is done in the episodes, in words")
    names = {c.key: ".".join(c.key) for c in _chosen(buf, keys)}
    features = {names[c.key]: _feature(c) for c in _chosen(buf, keys)}
    buf.require_trajectories()
    parts = (part for _, part in _parts(buf, incomplete))
    first = next(parts, None)
    if first is None:
        raise RuntimeError(f"buffer {buf.name!r} has no trajectory to write")
    about = {"use_videos": False, **about}
    dataset, n = kind.create(repo_id=repo_id, fps=fps, features=features, root=root, **about), 0
    try:
        try:
            for part in itertools.chain([first], parts):
                arrays = {name: part[k].reshape(len(part[k]), *features[name]["shape"]) for k, name in names.items()}
                for i in range(len(next(iter(arrays.values())))):
                    dataset.add_frame({**{name: a[i] for name, a in arrays.items()}, "task": task})
                    n += 1
                dataset.save_episode()
        finally:
            if dataset.image_writer is not None:  # threads that about asks for
                dataset.stop_image_writer()
        dataset.finalize()
    except BaseException as e:
        with contextlib.suppress(Exception):  # otherwise its end would write into the folder
            dataset.finalize()
        shutil.rmtree(dataset.root, ignore_errors=True)  # create() made it
        if not isinstance(e, (ValueError, TypeError)):
            raise
        raise RuntimeError(
            f"LeRobot could not write the episode that ends with row {n} of buffer {buf.name!r}: {e}. {dataset.root} is removed"
        ) from e
    return n


def _lerobot() -> Any:
    return _library("lerobot.datasets.lerobot_dataset", "pip install lerobot").LeRobotDataset


def _feature(c: Column) -> dict[str, Any]:
    if any("." in part or "/" in part for part in c.key):
        raise SchemaError(
            f"key {show_key(c.key)} cannot be a LeRobot feature: parts are joined with '.', and '/' is refused"
        )
    if c.key[0] in (*_LEROBOT_OWN, "task") and len(c.key) == 1:
        raise SchemaError(f"key {show_key(c.key)} is one that LeRobot writes itself: leave it out with keys=")
    if len(c.shape) > 5 or np.dtype(c.numpy).kind == "c" or 0 in c.shape:
        raise SchemaError(f"key {show_key(c.key)}: {c} cannot be a LeRobot feature (up to 5 dimensions, real numbers)")
    if c.dtype == "uint8" and len(c.shape) == 3 and 3 in (c.shape[0], c.shape[2]):
        names = ["channels", "height", "width"] if c.shape[0] == 3 else ["height", "width", "channels"]
        return {"dtype": "image", "shape": c.shape, "names": names}
    return {"dtype": c.numpy, "shape": c.shape or (1,), "names": None}


@_of_buffers
def from_lerobot(
    buf: Buffer, dataset: Any, *, root: str | os.PathLike | None = None, keys: Sequence[str] | None = None
) -> int:
    """Put the episodes of a LeRobot data set, each as a trajectory, a frame a row. Needs lerobot. Returns how many rows.

    A feature's key is its name, split at the dots. Values have the feature's dtype and shape, [n, 1] for one number (in a buffer that has
    it as [n], that); images are uint8 in the shape the feature has, channels first or last. A data set without any of ``next.done``,
    ``next.terminated``, ``next.truncated`` does not tell why an episode ends: rows get ``("next", "done")`` bool[n, 1], True in an episode's last
    one (unless the buffer's schema has no such key). Next observations are there only if the data set stores them: LeRobot's own do
    not, the following row has them. delta_timestamps and image_transforms of the data set have no effect.

    Args:
        dataset: a LeRobotDataset, whole or some of its episodes; or a repo_id.
        root: where that one lies, if not in LeRobot's own place. One that is not there LeRobot looks for on the hub.
        keys: names of the features to take. Default: all but ``timestamp``, ``frame_index``, ``episode_index``, ``index`` and ``task_index``,
            of which those in the buffer's schema are taken.

    Raises:
        ImportError: says what to install. ValueError: a video or text among the features, or a data set that is being recorded.
        SchemaError: no such feature, or it does not fit the buffer; nothing was put. As `Buffer.extend`.
    """
    if isinstance(dataset, (str, os.PathLike)):
        dataset = _lerobot()(os.fspath(dataset), root=root)
    what = f"LeRobot data set {dataset.repo_id!r}"
    features, has = dataset.features, set() if buf.schema is None else set(buf.schema.keys)
    names = [k for k in features if k not in _LEROBOT_OWN or (k,) in has] if keys is None else list(keys)
    for name in names:
        if name not in features:
            raise SchemaError(f"{what} has no feature {name!r}: {', '.join(features)}")
        if features[name]["dtype"] in ("video", "string", "language"):
            raise ValueError(
                f"{what}: feature {name!r} is {features[name]['dtype']}, which is not read here: name the others with keys=, or record "
                "cameras as images (use_videos=False). Nothing was put"
            )
    table = dataset.hf_dataset
    if len(table) != dataset.num_frames:
        raise ValueError(
            f"{what} has {dataset.num_frames:,} frames, of which {len(table):,} can be read: finalize() it and open it anew"
        )
    marked = any(tuple(name.split(".")) in _ENDS for name in features)

    def rows(lo: int, hi: int) -> dict[Key, np.ndarray]:
        out = {tuple(name.split(".")): _values(table, name, features[name], lo, hi) for name in names}
        if not marked:
            out[_DONE] = (np.arange(lo, hi) == hi - 1)[:, None]
        return _fitted(buf, out, () if marked else (_DONE,))

    episode = np.asarray(table.select_columns(["episode_index"]).with_format("numpy")["episode_index"][:])
    cuts = [0, *(np.flatnonzero(np.diff(episode)) + 1), len(episode)]
    return _put(buf, (rows(int(lo), int(hi)) for lo, hi in itertools.pairwise(cuts) if hi > lo), what)


def _values(table: Any, name: str, feature: Mapping[str, Any], lo: int, hi: int) -> np.ndarray:
    image, shape = feature["dtype"] == "image", tuple(feature["shape"])
    dtype = np.dtype("uint8" if image else feature["dtype"])
    # numpy's formatter makes float32 of every float unless it is told
    a = np.asarray(table.select_columns([name]).with_format("numpy", dtype=dtype)[lo:hi][name])
    named = feature.get("names")
    first = named[0] if isinstance(named, (list, tuple)) and named else ""
    if image and (a.shape[1:] != shape or first.startswith("channel")):
        a = np.moveaxis(a, -1, 1)  # decoded images have their channels last
    return a.reshape(hi - lo, *shape)
