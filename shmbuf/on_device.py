"""Tensors of rows that live on a CUDA device: where they are made, on which stream, and how the core is told of them. And what a batch
that was made beside its user's stream needs before it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from shmbuf import devices
from shmbuf.buffer import Buffer
from shmbuf.errors import DeviceError, NotEnoughMemory, TooManyOpenFiles
from shmbuf.schema import Schema
from shmbuf.ticket import Ticket


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
    """What is asked of CUDA: a stream beside those of the user, from which batches are handed over to his."""

    def __init__(self, device: torch.device):
        self.device = device
        self._own = torch.cuda.Stream(device)

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """What is begun within goes on beside the caller's stream; what is allocated within belongs to the stream of ours."""
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
    """A batch on whose tensors work goes on, on a stream of ours; :meth:`received` by the thread that uses it."""

    def __init__(self, batch: Any, mark: Any, streams: Any):
        self._batch, self._mark, self._streams = batch, mark, streams

    def received(self) -> Any:
        self._streams.follow(self._mark)
        each_tensor(self._batch, self._used)
        return self._batch

    def _used(self, t: torch.Tensor) -> torch.Tensor:
        self._streams.used_here(t)
        return t


TENSORS = "SHMBUF_CUDA_TENSORS"  # =host: batches of rows on a device are the host's tensors
_HERE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class OnDevice:
    """Of a buffer whose rows are on a device. ``device``: where its tensors are. Rows are mapped at their first use, not here.

    That is the buffer's device, but for a driver with no GPU behind it, whose memory is the host's: then the CPU.
    """

    def __init__(self, device: torch.device, streams: Callable[[torch.device], Any] = Streams):
        self.device = device
        self._make = streams if device.type == "cuda" or streams is not Streams else None
        self._streams: Any = None  # with the first batch: it opens a context

    @classmethod
    def of(cls, buffer: Buffer) -> OnDevice | None:
        """None: this torch has no CUDA, or this process does not see the device, or a test says so: rows are read by way of the host, if at
        all."""
        from shmbuf.cuda import driver, memory

        place = buffer._place
        if os.environ.get(TENSORS) == "host":
            return None
        assert place.wish is not None
        with contextlib.suppress(DeviceError, NotEnoughMemory):
            if torch.cuda.is_available():
                return cls(torch.device("cuda", driver.by_uuid(driver.uuid_of(place.wish["uuid"])).index))
            mapped = place.hold.memory.mapped if place.hold is not None else None
            if mapped is not None and memory.is_host(mapped.address):
                return cls(torch.device("cpu"))
        return None

    # ---- streams ------------------------------------------------------------------------------------------------

    def streams(self) -> Any:
        """None: there are none, what is begun is over."""
        if self._streams is None and self._make is not None:
            self._streams = self._make(self.device)
        return self._streams

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Around the making of a batch: it does not come after what the caller's stream has to do, and its memory is not that stream's to
        give out again."""
        self._require_no_capture()
        streams = self.streams()
        return _HERE if streams is None else streams.aside()

    def sent(self, *batches: Any) -> tuple[Any, ...]:
        """What was made aside, to be received."""
        streams = self.streams()
        if streams is None:
            return batches
        mark = streams.mark()
        return tuple(Sent(batch, mark, streams) for batch in batches)

    def _require_no_capture(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise DeviceError(
                "rows cannot be put or drawn while a CUDA graph is being captured: which rows they are is decided on the host. Draw before, "
                "and copy into the tensors that the graph reads: sample(out=...)"
            )

    def stream(self) -> int:
        """Torch's current stream of this thread, which work on tensors that torch made has to follow."""
        self._require_no_capture()
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


class Placed:
    """Of a `ShmStorage`: where its rows and batches are."""

    if TYPE_CHECKING:

        @property
        def buffer(self) -> Buffer: ...

    schema: Callable[[], Schema]
    _prepare: Callable[[Schema], None]
    _make: dict[str, Any]
    _buffer: Buffer | None = None
    _ready: Schema | None = None
    _on: OnDevice | None = None  # with the schema, where the rows are on a device
    _later = False  # whether there is one is seen when the rows are mapped

    @property
    def device(self) -> torch.device:
        """Where the rows live, and batches of them are; the CPU, where this process reads them by way of the host."""
        made = self._buffer
        if self._on is None and made is not None and made.device != "cpu" and made.schema is not None:
            self.schema()
            if self._later and made._place.error is None:  # else it has just been asked for
                self._look_again(demand=False)
            return torch.device("cpu") if self._on is None else self._on.device
        if self._on is not None:
            return self._on.device
        where = str(self._make["device"] or "cpu") if self._buffer is None else self._buffer.device
        return torch.device("cuda" if devices.is_uuid(where) else where)

    def _look_again(self, demand: bool = True) -> None:
        """Before the first reading: rows are mapped. Raises why they cannot be, if there are any, and ``demand``."""
        try:
            self.buffer._place.require(self.buffer._bare)
        except (DeviceError, NotEnoughMemory, TooManyOpenFiles):
            if demand and len(self.buffer):
                raise
            return
        self._prepare(self.schema())
        self._later = False

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Around the making of a batch in fresh memory: of rows on a device, on a stream of this storage's own (see `sent`)."""
        if self._ready is None and self.buffer._place.wish is not None and self.buffer.schema is not None:
            self.schema()
        return _HERE if self._on is None else self._on.aside()

    def sent(self, *batches: Any) -> tuple[Any, ...]:
        """What was made aside: where there are streams, as what its user has to receive."""
        return batches if self._on is None else self._on.sent(*batches)

    def delivered(self, td: TensorDictBase) -> TensorDictBase:
        """A sample, with what the host knows of its rows (their numbers, weights, masks) where they are, too."""
        return td if self._on is None or self._on.device.type == "cpu" else td.to(self._on.device)
