"""The transforms of one handle: inverted on what is stored, forward on what is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tensordict import TensorDictBase, is_tensor_collection

from shmbuf.face.base import Face

if TYPE_CHECKING:
    from shmbuf.transforms import Compose

Self = TypeVar("Self", bound="Transforming")


class Transforming(Face):
    """What happens to rows on their way in and out."""

    _transform: Compose | None = None
    _factory: Callable[[], Any] | None = None  # of the chain, called at its first use
    _touched = False  # whether a batch needs more than being drawn

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
        self._touched = self._touched or transform is not None or factory is not None

    @property
    def transform(self) -> Compose:
        """All of them, as a `Compose`."""
        if self._transform is None:
            self._transform = _composed(self._factory() if self._factory is not None else None)
            self._factory, self._touched = None, True
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
        """Rows as they are to be stored; None: none of them."""
        return self.transform.inv(rows) if self._transforms() else rows

    def _forward(self, rows: Any) -> Any:
        if not self._transforms():
            return rows
        with rows.unlock_() if is_tensor_collection(rows) else contextlib.nullcontext():
            return self.transform(rows)

    def _finished(self, td: TensorDictBase) -> Any:
        """A batch that was drawn as it is given out. What the sampler says of the rows stays in it if a transform takes it out."""
        said = {k: td.get(k) for k in self._info_keys() if k in td.keys(True)}
        out = td if self._storage.presents is None else self._storage.presents(td.copy())
        out = out if self._collate is None else self._collate(out)
        out = self._forward(out)
        if out is not td and isinstance(out, TensorDictBase) and out.batch_size == td.batch_size:
            for key, value in said.items():
                if key not in out.keys(True):
                    out.set(key, value)
        return out

    def _info_keys(self) -> tuple[Any, ...]:
        more = self._unit.info_keys if self._unit is not None else ()
        return (*self._sampler.info_keys, *more, *(("index_generation",) if self._writer.tracks_generations else ()))


def _composed(transform: Any) -> Compose:
    from shmbuf.transforms import Compose, as_transform

    if transform is None:
        return Compose()
    made = as_transform(transform)
    return made if isinstance(made, Compose) else Compose(made)
