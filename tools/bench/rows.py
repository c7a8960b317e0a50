"""The two kinds of rows that are measured, as numpy arrays and as TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

Key = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def flat(self) -> str:
        """The name for peers that know no nesting."""
        return "_".join(self.key)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Row:
    name: str
    capacity: int
    columns: tuple[Column, ...]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def arrays(self, n: int, seed: int = 0) -> dict[str, np.ndarray]:
        """n random rows, keyed by flat name."""
        rng = np.random.default_rng(seed)
        return {c.flat: _random(rng, c.dtype, (n, *c.shape)) for c in self.columns}

    def chunks(self, total: int) -> Iterator[dict[str, np.ndarray]]:
        """The same random rows again and again, `total` in all: what fills a buffer."""
        size = min(total, max(1, (16 << 20) // self.nbytes))
        chunk = self.arrays(size)
        for done in range(0, total, size):
            n = min(size, total - done)
            yield {name: array[:n] for name, array in chunk.items()}

    def nested(self, arrays: dict[str, np.ndarray]) -> dict:
        """Flat arrays as the nested dictionary they stand for."""
        tree: dict = {}
        for column in self.columns:
            node = tree
            for part in column.key[:-1]:
                node = node.setdefault(part, {})
            node[column.key[-1]] = arrays[column.flat]
        return tree

    def tensordict(self, arrays: dict[str, np.ndarray]):
        import torch
        from tensordict import TensorDict

        n = len(next(iter(arrays.values())))
        tensors = {c.flat: torch.from_numpy(arrays[c.flat]).clone() for c in self.columns}
        return TensorDict(self.nested(tensors), batch_size=[n])

    def schema(self) -> dict:
        """As `shmbuf.Buffer.create` takes it."""
        return {c.key[0] if len(c.key) == 1 else c.key: (c.dtype, c.shape) for c in self.columns}


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "float32":
        return rng.random(shape, dtype=np.float32)
    if dtype == "bool":
        return rng.random(shape) < 0.01
    return rng.integers(0, 6 if dtype == "int64" else 256, shape, dtype=dtype)


def _transition(obs: tuple[str, tuple[int, ...]], action: tuple[str, tuple[int, ...]]):
    return (
        Column(("obs",), *obs),
        Column(("action",), *action),
        Column(("next", "obs"), *obs),
        Column(("next", "reward"), "float32", (1,)),
        Column(("next", "done"), "bool", (1,)),
        Column(("next", "terminated"), "bool", (1,)),
    )


ROWS = {
    row.name: row
    for row in (
        Row("mujoco", 1_000_000, _transition(("float32", (17,)), ("float32", (6,)))),
        Row("atari", 20_000, _transition(("uint8", (4, 84, 84)), ("int64", ()))),
    )
}
