"""Tensors that behave as a device's where there is no device."""

from __future__ import annotations

from typing import Any

import torch

CUDA = torch.device("cuda", 0)


class OfDevice(torch.Tensor):
    """Says that it is on cuda:0, and has to be moved before numpy looks at it; so has what is made of it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def of_device(values: Any, dtype: torch.dtype | None = None) -> OfDevice:
    return torch.as_tensor(values, dtype=dtype).as_subclass(OfDevice)
