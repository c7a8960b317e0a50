"""Batches on their way to a device, while the learner goes on with the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shmbuf import devices
from shmbuf.errors import DeviceError
from shmbuf.on_device import Sent, Streams, each_tensor


def target(device: Any) -> torch.device:
    """The device, with its number. Raises ValueError: it is none. DeviceError: this torch or process does not have it."""
    try:
        to = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f'device={device!r}: a batch can go to "cpu", "cuda", "cuda:1" (as this process counts) or a torch.device'
            + (". UUIDs say where rows live: ShmStorage(device=…)" if devices.is_uuid(str(device)) else "")
        ) from None
    if to.type != "cuda":
        return to
    if torch.version.cuda is None and torch.version.hip is None:
        raise DeviceError(
            f"device={str(device)!r}: no CUDA device is to be had by this torch ({torch.__version__}), which was built without CUDA: install a "
            "CUDA build of torch"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device={str(device)!r}: no CUDA device is to be had by this torch ({torch.__version__}) in this process; look at nvidia-smi, "
            "CUDA_VISIBLE_DEVICES and torch.version.cuda"
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if to.index is None else to.index
    if index >= count:
        raise DeviceError(f"device={str(device)!r}: this process sees {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


class Sender:
    """To one device, on a stream of its own. From page-locked memory the copies do not wait; torch gives that memory out again when the copy
    out of it is over, so that two batches are under way at most as long as one is being drawn."""

    def __init__(self, device: torch.device, streams: Callable[[torch.device], Any] = Streams):
        self.device = device
        self.pins = device.type == "cuda"
        self._streams = streams(device) if device.type == "cuda" or streams is not Streams else None

    def send(self, batch: Any) -> Any:
        """Begin; returns what has to be received, or the batch where nothing goes on in the background."""
        if self._streams is None:
            return each_tensor(batch, lambda t: t.to(self.device))
        with self._streams.aside():
            moved = each_tensor(batch, lambda t: t.to(self.device, non_blocking=True))
            mark = self._streams.mark()
        return Sent(moved, mark, self._streams)
