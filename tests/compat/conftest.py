"""TorchRL beside shmbuf in one process. Its wheels carry a compiled module for one release of torch; with another its trees are
missing, and these stand in for them: plain arrays. What is compared, its formulas and rules, is Python."""

from __future__ import annotations

import numpy as np
import torch


class _Tree:
    def __init__(self, capacity: int):
        self._values = np.full(capacity, self.empty, self.dtype)
        self.capacity = capacity

    def __getitem__(self, index):
        if isinstance(index, torch.Tensor):
            return torch.from_numpy(self._values[index.numpy()])
        return self._values[index]

    def __setitem__(self, index, value) -> None:
        index = index.numpy() if isinstance(index, torch.Tensor) else index
        self._values[index] = value.numpy() if isinstance(value, torch.Tensor) else value

    def query(self, start: int, end: int) -> float:
        return float(self.reduce(self._values[start:end]))


class SumTree(_Tree):
    empty, reduce = 0.0, staticmethod(np.sum)

    def scan_lower_bound(self, mass):
        upto = np.cumsum(self._values, dtype=np.float64)
        found = np.searchsorted(upto, mass.numpy() if isinstance(mass, torch.Tensor) else mass, side="left")
        return torch.from_numpy(found) if isinstance(mass, torch.Tensor) else found


class MinTree(_Tree):
    empty, reduce = float("inf"), staticmethod(np.min)


def stand_in() -> None:
    try:
        from torchrl.data.replay_buffers.samplers import prioritized
    except ImportError:
        return
    if prioritized.SumSegmentTreeFp32 is None:
        for kind, tree in (("Sum", SumTree), ("Min", MinTree)):
            for bits, dtype in ((32, np.float32), (64, np.float64)):
                name = f"{kind}SegmentTreeFp{bits}"
                setattr(prioritized, name, type(name, (tree,), {"dtype": dtype}))


stand_in()
