"""Ways of getting rows from many processes into one buffer, behind one small interface.

A module here holds `Host` classes (the side that owns the buffer) and a `Producer` class (the side
of a collector). They are imported by name and late: a numpy-only producer must not load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from ..rows import Row

OURS = "shmbuf"
OURS_NUMPY = "shmbuf numpy"

_WHERE = {
    OURS: ("ours", "TensorDictHost", "TensorDictProducer"),
    OURS_NUMPY: ("ours", "TensorDictHost", "NumpyProducer"),
    "cpprb": ("cpprb_mp", "Host", "Producer"),
    "faster-fifo": ("queues", "FasterFifoHost", "FasterFifoProducer"),
    "mp.Queue": ("queues", "QueueHost", "QueueProducer"),
    "torchrl": ("torchrl_shared", "TensorHost", "Producer"),
    "torchrl memmap": ("torchrl_shared", "MemmapHost", "Producer"),
    "reverb": ("reverb_server", "Host", "Producer"),
}
NAMES = tuple(_WHERE)


class Host(Protocol):
    """Owns the buffer; made full before producers start, so that no page is touched first later."""

    copies: int
    """How often a row's bytes are copied on their way into the buffer."""

    def __init__(self, row: Row, capacity: int, scratch: str) -> None: ...
    @property
    def handle(self) -> Any: ...  # what a spawned process gets
    def visible(self) -> int: ...  # rows that arrived, ever
    def sampler(self, batch_size: int) -> Callable[[], object]: ...
    def close(self) -> None: ...


class Producer(Protocol):
    def __init__(self, handle: Any, row: Row) -> None: ...
    def bind(self, batch: int) -> Callable[[], object]: ...  # a call that sends one record
    def finish(self) -> None: ...  # returns when all that was sent is on its way or in


def host(name: str) -> type[Host]:
    module, host_class, _ = _WHERE[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), host_class)


def producer(name: str) -> type[Producer]:
    module, _, producer_class = _WHERE[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), producer_class)
