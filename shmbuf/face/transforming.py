"""The transforms of one handle: inverted on what is stored, forward on what is read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDictBase, is_tensor_collection

from shmbuf.face.base import Face
from shmbuf.schema import Key
from shmbuf.streams import TRAJECTORY_KEYS
from shmbuf.transforms.base import CALLED, Prepared, parts_of

if TYPE_CHECKING:
    from shmbuf.transforms import Compose

Self = TypeVar("Self", bound="Transforming")
_MAKING = threading.RLock()  # chains, each once


def _new_lock() -> None:  # another thread of the parent may have held it at the fork
    global _MAKING
    _MAKING = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


class Transforming(Face):
    """What happens to rows on their way in and out."""

    _transform: Compose | None = None
    _factory: Callable[[], Any] | None = None  # of the chain, called at its first use

    def _set_transforms(self, transform: Any, factory: Callable[[], Any] | None, delayed: bool | None) -> None:
        if transform is not None and factory is not None:
            raise TypeError(
                f"transform and transform_factory are mutually exclusive. "
                f"Got transform={transform} and transform_factory={factory}."
            )
        if factory is not None and not callable(factory):
            raise TypeError(f"transform_factory is a function without arguments, not {type(factory).__name__}")
        self._factory = factory
        if factory is not None and delayed is False:
            transform, self._factory = factory(), None
        if transform is not None:
            self._transform = _composed(transform)

    @property
    def _touched(self) -> bool:
        """Whether a batch needs more than being drawn."""
        return bool(
            self._collate is not None or self._factory is not None or (self._transform and len(self._transform))
        )

    @property
    def transform(self) -> Compose:
        """All of them, as a `Compose`. What is put into it is used from the next call on."""
        if self._transform is None:
            with _MAKING:
                if self._transform is None:  # nobody else's thread made it meanwhile
                    self._transform = _composed(self._factory() if self._factory is not None else None)
                    self._factory = None
        return self._transform

    def append_transform(self: Self, transform: Any, *, invert: bool = False) -> Self:
        """Run it last on what is read, through this handle, and its inverse first on what is stored.

        Args:
            transform: a `shmbuf.transforms.Transform`, TorchRL's, or a function of a TensorDict (on what is read).
            invert: the other way round: forward on what is stored, the inverse on what is read. A function that changes tensors in
                place then changes the caller's.
        """
        return self.insert_transform(len(self.transform), transform, invert=invert)

    def insert_transform(self: Self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Run it as number ``index``. Otherwise as `append_transform`. Raises ValueError, TypeError."""
        from shmbuf.transforms import as_transform

        chain, i = self.transform, index
        if i < 0:
            i += len(chain)
        if not 0 <= i <= len(chain):
            raise ValueError(f"index {index} for one of {len(chain) + 1} places among {len(chain)} transforms")
        chain.insert(i, as_transform(transform, invert=invert))
        self._drop_ahead()
        return self

    def _parts(self) -> list[Any]:
        return list(self.transform) if self._transforms() else []

    def _transforms(self) -> int:
        """How many there are."""
        return 0 if self._transform is None and self._factory is None else len(self.transform)

    def _inverted(self, rows: Any) -> Any:
        """Rows as they are to be stored, none of which is held back for later; None: none of them."""
        return self._prepared(rows, None).rows if self._transforms() else rows

    def _prepared(self, rows: Any, stream: Any) -> Prepared:
        return self.transform.prepared(rows, stream, self._trajectory_keys())

    def flush(self, *, timeout: float | None = None) -> torch.Tensor:
        raise NotImplementedError

    def _holds(self) -> bool:
        """Whether a transform holds rows back."""
        return self._transform is not None and any(p.pending() for p in parts_of(self._transform))

    def _trajectory_keys(self) -> tuple[Key, ...]:
        """Where rows may say which trajectory they belong to."""
        chosen = self.buffer.config.get("streams") or {}
        return (tuple(chosen["traj_key"]),) if "traj_key" in chosen else TRAJECTORY_KEYS

    def _forward(self, rows: Any) -> Any:
        if not self._transforms():
            return rows
        with rows.unlock_() if is_tensor_collection(rows) else contextlib.nullcontext():
            return self.transform(rows)

    def _finished(self, td: TensorDictBase) -> Any:
        """A batch that was drawn as it is given out. What the sampler says of the rows stays in it if a transform takes it out and the
        rows are known to be the same: all transforms are shmbuf's, or a tensor of theirs came through as it was."""
        said = {k: td.get(k) for k in self._info_keys() if k in td.keys(True)}
        came = {_place(v) for v in td.values(True, True) if isinstance(v, torch.Tensor)}
        out = td if self._storage.presents is None else self._storage.presents(td.copy())
        out = out if self._collate is None else self._collate(out)
        out = self._forward(out)
        if out is td or not isinstance(out, TensorDictBase) or out.batch_size != td.batch_size:
            return out
        lost = {k: v for k, v in said.items() if k not in out.keys(True)}
        if lost and (self._only_known() or any(_place(v) in came for v in out.values(True, True))):
            out.update(lost)
        return out

    def _only_known(self) -> bool:
        """Whether what is done to a batch is shmbuf's own, which keeps the order of rows."""
        return self._collate is None and all(
            type(t).__module__.startswith("shmbuf.transforms.") and not isinstance(t, CALLED)
            for t in parts_of(self.transform)
        )

    def _info_keys(self) -> tuple[Any, ...]:
        more = self._unit.info_keys if self._unit is not None else ()
        return (*self._sampler.info_keys, *more, *(("index_generation",) if self._writer.tracks_generations else ()))


def _place(value: Any) -> tuple[Any, ...]:
    """The same for two tensors that show the same numbers in the same order."""
    if not isinstance(value, torch.Tensor):
        return ()
    return value.data_ptr(), value.dtype, value.shape, value.stride(), value.device


def _composed(transform: Any) -> Compose:
    from shmbuf.transforms import Compose, as_transform

    if transform is None:
        return Compose()
    made = as_transform(transform)
    return made if isinstance(made, Compose) else Compose(made)
