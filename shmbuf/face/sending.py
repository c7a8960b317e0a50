"""Batches on their way to a device, while the learner goes on with the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import is_tensor_collection

from shmbuf.errors import DeviceError


def target(device: Any) -> torch.device:
    """The device, with its number. Raises DeviceError: this torch or process does not have it."""
    to = torch.device(device)
    if to.type != "cuda":
        return to
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


def each_tensor(batch: Any, do: Callable[[torch.Tensor], Any]) -> Any:
    """The same, with what `do` makes of each tensor."""
    if is_tensor_collection(batch):
        return batch.apply(do)
    if isinstance(batch, torch.Tensor):
        return do(batch)
    if isinstance(batch, Mapping):
        return type(batch)({k: each_tensor(v, do) for k, v in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(v, do) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(each_tensor(v, do) for v in batch)
    return batch


class Streams:
    """What `Sender` asks of CUDA."""

    def __init__(self, device: torch.device):
        self.device = device
        self._own = torch.cuda.Stream(device)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """What is begun within goes on beside the caller's stream."""
        return torch.cuda.stream(self._own)

    def mark(self) -> Any:
        return self._own.record_event()

    def follow(self, mark: Any) -> None:
        """What the caller begins from now on comes after what was before the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def used_here(self, t: torch.Tensor) -> None:
        """The memory is not given to another tensor before what the caller begins with this one is over."""
        if t.is_cuda:
            t.record_stream(torch.cuda.current_stream(self.device))


class Sent:
    """A batch that is being copied; :meth:`received` by the thread that uses it."""

    def __init__(self, batch: Any, mark: Any, streams: Streams):
        self._batch, self._mark, self._streams = batch, mark, streams

    def received(self) -> Any:
        self._streams.follow(self._mark)
        each_tensor(self._batch, self._used)
        return self._batch

    def _used(self, t: torch.Tensor) -> torch.Tensor:
        self._streams.used_here(t)
        return t


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
