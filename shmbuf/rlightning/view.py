"""`BufferView`: rows as a dataset."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase


class BufferView:
    """A TensorDict as something with a length and items, for a ``DataLoader``. Items are views of its rows, no copies.

    Args:
        data: batch size [n, ...], such as `Storage.get_data` gives.
    """

    def __init__(self, data: TensorDictBase):
        self.data = data
        self.capacity = len(data)

    def __len__(self) -> int:
        return self.capacity

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]
