"""From start to shutdown, and what a handle is in other processes."""

from __future__ import annotations

from typing import Any, TypeVar

from shmbuf.attaching import unpickle
from shmbuf.face.editing import Editing
from shmbuf.face.reading import Reading
from shmbuf.samplers.sequences import named

Self = TypeVar("Self", bound="Lifetime")


class Lifetime(Reading, Editing):
    """TorchRL's words for a service, of a handle that is one by itself; closing, pickling."""

    @property
    def service_backend(self) -> str:
        """ "direct": every process works on the memory itself."""
        return "direct"

    @property
    def is_alive(self) -> bool:
        """Whether this handle samples: before `shutdown` and `close`."""
        return not (self._shut or self.buffer.closed)

    def start(self: Self) -> Self:
        """Itself, which needs no start. RuntimeError after `shutdown`."""
        if self._shut:
            raise RuntimeError("A shut down replay buffer cannot be restarted.")
        return self

    def client(self: Self) -> Self:
        """Itself: it may be sent to any process of the machine."""
        return self

    def share(self: Self, shared: bool = True) -> Self:
        """Itself, which is shared in any case."""
        return self

    def synchronize(self) -> None:
        """Wait for the batches that are being drawn ahead and for `submit_update_if_present`. Raises the first error of theirs."""
        if self._ahead is not None:
            self._ahead.synchronize()
        with self._editing:
            pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def shutdown(self, timeout: float | None = None) -> None:
        """Let this handle sample no more, after `synchronize`, whose error it raises. Other handles go on; `close` lets go of the buffer.

        timeout: nothing: no wait of this is long.
        """
        if self._shut:
            return
        self._shut = True
        try:
            self.synchronize()
        finally:
            self._end_threads()

    def _end_threads(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        with self._editing:
            editor, self._editor = self._editor, None
        if editor is not None:
            editor.shutdown(wait=True)

    def close(self) -> None:
        """Let go of the buffer, after `flush`, whose error it raises. An unnamed one ends with the handle that made it; a named one stays
        until `shmbuf.destroy`."""
        try:
            if self._holds() and not (self.buffer.closed or self.buffer.destroyed):
                self.flush()
        finally:
            self._end_threads()
            self.buffer.close()

    def destroy(self, *, force: bool = False) -> None:
        """Close this handle and remove the buffer: see `Buffer.destroy`."""
        self._end_threads()
        self.buffer.destroy(force=force)

    @property
    def destroyed(self) -> bool:
        """Whether somebody destroyed the buffer."""
        return self.buffer.destroyed

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """A Ray actor class of it, whose ``remote(…)`` constructs one; remote_config: for ``ray.remote``. ImportError says what to install.
        For clients that attach where they can: ``service_backend="ray"``."""
        from shmbuf.distributed.service import as_remote

        return as_remote(cls, remote_config)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple:
        own: dict[str, Any] = {
            "batch_size": self._batch_size,
            "dim_extend": self._storage._time_dim,
            "sampler": [self._sampler.name, self._sampler.arguments()],
        }
        own["writer"] = [self._writer.name, self._writer.arguments()]
        if self._unit is not None:
            own["sample_unit"] = named(self._unit) or self._unit
        if self._ahead is not None:
            own["prefetch"] = self._ahead.depth
        for key, value in (
            ("transform", self._transform),
            ("transform_factory", self._factory),
            ("collate_fn", self._collate),
        ):
            if value is not None:
                own[key] = value
        return unpickle, (type(self), self.buffer, own)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buffer!r}, sampler={self._sampler!r}, batch_size={self._batch_size})"
