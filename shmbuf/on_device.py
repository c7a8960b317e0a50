"""Tensors of rows that live on a CUDA device: where they are made, and how the core is told of them."""

from __future__ import annotations

from typing import Any

import torch

from shmbuf.buffer import Buffer
from shmbuf.errors import DeviceError
from shmbuf.schema import Schema
from shmbuf.ticket import Ticket


class OnDevice:
    """Of a buffer whose rows are mapped here. ``device``: where its tensors are.

    That is the buffer's device, but for a driver with no GPU behind it, whose memory is the host's: then the CPU.
    """

    def __init__(self, buffer: Buffer):
        from shmbuf.cuda import memory

        place = buffer._place
        place.require(buffer._handle)
        assert place.hold is not None
        held = place.hold.memory
        if memory.is_host(held.address):
            self.device = torch.device("cpu")
        elif not torch.cuda.is_available():
            raise DeviceError(
                f"the rows of buffer {buffer.name!r} are on {held.device}, and this torch ({torch.__version__}) has no CUDA: install one that "
                "has, or read rows as numpy arrays by shmbuf.Buffer"
            )
        else:
            self.device = torch.device("cuda", held.device.index)

    def stream(self) -> int:
        """Torch's current stream of this thread, which work on tensors that torch made has to follow."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def holds(self, t: torch.Tensor) -> bool:
        return t.device == self.device

    @staticmethod
    def columns(schema: Schema, leaves: list[torch.Tensor]) -> list[tuple[int, int, int]]:
        """(offset in the row, bytes, address) of contiguous tensors [n, *shape] in column order."""
        return [(c.offset, c.nbytes, t.data_ptr()) for c, t in zip(schema.columns, leaves, strict=True)]

    def put(
        self,
        buffer: Buffer,
        schema: Schema,
        leaves: list[torch.Tensor],
        n: int,
        wake: bool,
        timeout: float | None,
        convert: Any,
        extras: Any,
    ) -> Ticket | None:
        """Through this handle's device ring. None: it gets none, all are taken."""
        return buffer.submit_device(self.columns(schema, leaves), n, wake, timeout, convert, extras, self.stream())
