"""The files of a checkpoint: TorchRL's directory, and beside it `shmbuf/`, with what that layout forgets.

buffer_metadata.json, storage/, writer/, sampler/, rng_state/, transform.t      as TorchRL 0.14 writes and reads them
shmbuf/state.json       version, schema with exact dtypes and file names, row ids, counters, limiter, epochs
shmbuf/streams.memmap   int64 a row, oldest first: which trajectory it belongs to, numbered by first appearance
shmbuf/heads.memmap     int64: the trajectories whose beginning was not stored any more
shmbuf/priorities.memmap  float64 a row, oldest first
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmbuf._extension import native
from shmbuf.checkpoint.directories import hold
from shmbuf.errors import CheckpointError, SchemaError
from shmbuf.schema import DTYPES, PACKED, Column, Key, Schema, as_key, dtype_name, nest, show_key

VERSION = 1
MAX_JSON = 64 << 20
MAX_NUMBER = 1 << 62
MAX_ID: int = native.MAX_ID
TD = "<class 'tensordict._td.TensorDict'>"
_RESERVED = {".", "..", ""}
_META = {"shape", "device", "_type"}  # what a meta.json says of its directory


def _plain(part: str) -> bool:
    try:
        part.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return part not in _RESERVED and "/" not in part and "\0" not in part and len(part.encode()) <= 240


def file_keys(schema: Schema) -> list[Key]:
    """Under which key each column is filed: its own, unless that cannot be a file's name."""
    taken: set[Key] = {k[:d] for k in schema.keys for d in range(1, len(k))}  # directories
    out = []
    for i, key in enumerate(schema.keys):
        file = key
        while (
            not all(_plain(part) and part not in _META for part in file) or (*file[:-1], file[-1] + ".memmap") in taken
        ):
            file = (f"column {i}",) if file == key else (file[0] + "_",)
        taken.add((*file[:-1], file[-1] + ".memmap"))
        out.append(file)
    return out


def column_path(file: Key) -> str:
    return "/".join((*file[:-1], file[-1] + ".memmap"))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def plain_dtype(dtype: str) -> str:
    """A column's dtype for those who know tensors only: packed values are their bytes."""
    return "uint8" if dtype == PACKED else dtype


def entry(dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    return {"device": "cpu", "shape": list(shape), "dtype": f"torch.{plain_dtype(dtype)}", "is_nested": False}


def write_tensordict_meta(root: Path, files: Sequence[Key], columns: Sequence[Column], batch: Sequence[int]) -> None:
    """The meta.json of a memory-mapped TensorDict in ``root``, and of those nested in it."""

    def write(directory: Path, node: Mapping[str, Any]) -> None:
        directory.mkdir(exist_ok=True)
        meta: dict[str, Any] = {}
        for name, value in node.items():
            if isinstance(value, Column):
                meta[name] = entry(value.dtype, (*batch, *value.shape))
            else:
                meta[name] = {"type": "TensorDict"}
                write(directory / name, value)
        write_json(directory / "meta.json", {**meta, "shape": list(batch), "device": "cpu", "_type": TD})

    write(root, nest(files, columns))


# ---- reading: nothing outside the directory, nothing that is not what it says --------------------------------------------


class Root:
    """An open checkpoint directory. Every file is opened relative to it, following no symbolic link."""

    def __init__(self, path: Path):
        try:
            self.path, self._fd = hold(path)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint {path}") from None
        except NotADirectoryError:
            raise CheckpointError(f"{path} is a file; a checkpoint is a directory") from None

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, name: str) -> int:
        """A descriptor of a regular file. Raises CheckpointError; FileNotFoundError."""
        parts = name.split("/")
        if not all(map(_plain, parts)):
            raise CheckpointError(f"{self.path}: {name!r} is no name of a file in a checkpoint")
        fd = os.dup(self._fd)
        try:
            for i, part in enumerate(parts):
                last = i == len(parts) - 1
                how = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (0 if last else os.O_DIRECTORY)
                below = os.open(part, how, dir_fd=fd)
                os.close(fd)
                fd = below
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{self.path}/{name} is no regular file; it is not read")
            return fd
        except FileNotFoundError:
            os.close(fd)
            raise
        except OSError as e:
            os.close(fd)
            raise CheckpointError(
                f"{self.path}/{name} cannot be opened: {e.strerror} (links are not followed)"
            ) from None
        except BaseException:
            os.close(fd)
            raise

    def has(self, name: str) -> bool:
        try:
            os.close(self.open(name))
        except FileNotFoundError:
            return False
        return True

    def json(self, name: str) -> dict[str, Any]:
        try:
            fd = self.open(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is no checkpoint, or a damaged one: {name} is missing") from None
        with open(fd, "rb") as f:
            text = f.read(MAX_JSON + 1)
        try:
            if len(text) > MAX_JSON:
                raise ValueError(f"more than {MAX_JSON:,} bytes")
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError(f"{type(value).__name__} instead of an object")
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{self.path}/{name} is damaged: {e}") from None
        return value

    def sized(self, name: str, nbytes: int) -> int:
        """A descriptor of a file of exactly so many bytes."""
        try:
            fd = self.open(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is damaged: {name} is missing") from None
        size = os.fstat(fd).st_size
        if size != nbytes:
            os.close(fd)
            raise CheckpointError(f"{self.path}/{name} is damaged: {size:,} bytes instead of {nbytes:,}")
        return fd


def number(where: str, value: Any, least: int = 0, most: int = MAX_NUMBER) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"{where} = {value!r}: a whole number from {least:,} to {most:,}")
    return value


def _dtype(text: Any) -> str:
    """Exactly what `entry` and tensordict write: NumPy would read much more into it."""
    name = text.removeprefix("torch.") if isinstance(text, str) else None
    if name not in DTYPES:
        raise SchemaError(f"dtype {str(text)[:80]!r} is none that can be stored")
    return dtype_name(name)


class Stored(NamedTuple):
    column: Column
    file: str  # below storage/


def stored_columns(root: Root, capacity: int | None = None) -> tuple[list[Stored], int]:
    """The columns that storage/meta.json and those below it describe, and the capacity."""
    out: list[Stored] = []

    def walk(prefix: Key) -> None:
        nonlocal capacity
        name = "/".join(("storage", *prefix, "meta.json"))
        meta = root.json(name)
        shape = meta.pop("shape", None)
        for each in ("device", "_type"):
            meta.pop(each, None)
        if not isinstance(shape, list) or len(shape) != 1:
            raise CheckpointError(
                f"{root.path}/{name}: batch size {shape!r}; only storages of one dimension (ndim=1) can be loaded"
            )
        size = number(f"{root.path}/{name}: shape", shape[0], 1, (1 << 32) - 1)
        if capacity is not None and size != capacity:
            raise CheckpointError(f"{root.path}/{name}: {size:,} rows, but {capacity:,} elsewhere")
        capacity = size
        for part, value in meta.items():
            if part.startswith("_") and not isinstance(value, dict):
                continue  # what later versions of tensordict note
            key = (*prefix, part)
            if not _plain(part) or not isinstance(value, dict) or len(key) > 32:
                raise CheckpointError(f"{root.path}/{name}: {part!r} is no key of a tensor")
            if value.get("type") == "TensorDict" or ("_type" in value and "dtype" not in value):
                walk(key)
                continue
            shape = value.get("shape")
            try:
                if value.get("is_nested") or not isinstance(shape, list) or not shape or shape[0] != capacity:
                    raise SchemaError(f"shape {shape!r} does not begin with {capacity:,} rows")
                dims = tuple(number(f"{root.path}/{name}: {part!r}: shape", d, 0, 1 << 30) for d in shape[1:])
                column = Column(as_key(key), _dtype(value.get("dtype")), dims)
            except SchemaError as e:
                raise CheckpointError(f"{root.path}/{name}: key {show_key(key)}: {e}") from None
            out.append(Stored(column, column_path(key)))

    walk(())
    if not out:
        raise CheckpointError(f"{root.path}/storage holds no tensors")
    assert capacity is not None
    return out, capacity


def check_files(root: Root, columns: Sequence[Stored], capacity: int) -> None:
    for c in columns:
        os.close(root.sized(f"storage/{c.file}", capacity * c.column.nbytes))
