"""Small Python values in columns of bounded length: each entry is one msgpack value, filled up with zeros. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from shmbuf.errors import BufferFormatError, SchemaError

DTYPE = "msgpack"
LEAST = 64


def pack(value: Any, what: str) -> bytes:
    """One value's bytes. ``what`` begins the SchemaError of a value that would not come back equal (a tuple, an object, 2**64)."""
    try:
        return msgpack.packb(value, strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise SchemaError(
            f"{what}: {type(value).__name__} cannot be stored ({e}): None, bool, int of 64 bits, float, str, bytes, and "
            "lists and dicts of them can"
        ) from None


def bound_of(packed: Iterable[bytes]) -> int:
    """What a column gets whose first values these are: the next power of two of 4 times the longest, at least 64."""
    return max(LEAST, 1 << (4 * max(map(len, packed), default=0) - 1).bit_length())


def encode(values: Sequence[Any], max_bytes: int, what: str = "values") -> np.ndarray:
    """uint8[n, max_bytes] for a column ``("msgpack", max_bytes)``. Raises SchemaError naming the value that is too long."""
    return fill([pack(v, f"{what}, row {i}") for i, v in enumerate(values)], max_bytes, what)


def fill(packed: Sequence[bytes], max_bytes: int, what: str) -> np.ndarray:
    out = np.zeros((len(packed), max_bytes), np.uint8)
    for i, each in enumerate(packed):
        if len(each) > max_bytes:
            raise SchemaError(
                f"{what}, row {i}: the value has {len(each):,} bytes as msgpack, the column holds {max_bytes:,}; make the buffer "
                f'with a schema that says ("msgpack", {bound_of([each])}) or an example as long, or shorten it. Nothing was stored.'
            )
        out[i, : len(each)] = np.frombuffer(each, np.uint8)
    return out


def decode(column: np.ndarray) -> list[Any]:
    """The values of uint8[n, max_bytes]. Raises BufferFormatError where the bytes are no value."""
    out = []
    for i, row in enumerate(column):
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(len(row), 1))
        unpacker.feed(row.tobytes())
        try:
            out.append(unpacker.unpack())
        except (ValueError, msgpack.UnpackException) as e:
            raise BufferFormatError(f"entry {i} of a msgpack column is no value: {type(e).__name__} {e}") from None
    return out
