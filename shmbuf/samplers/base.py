"""What a sampler is, and the uniform one. A sampler chooses rows and has them copied; a row that was overwritten meanwhile is
chosen again, so that every row returned was in the buffer during the call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from shmbuf.errors import Lapped
from shmbuf.reading import address_of
from shmbuf.ticket import left_of

if TYPE_CHECKING:
    from shmbuf.storage import ShmStorage

MAX_TRIES = 1000


class Sampler:
    """A way of drawing rows. Its arguments travel with the buffer's name, so that others who attach draw the same way.

    Attributes:
        name: of the kind, in the segment.
        info_keys: what ``sample(return_info=True)`` gives beside the batch.
        ran_out: the last batch was the last one of its kind; iterating over the replay buffer stops there.
    """

    name: ClassVar[str]
    info_keys: ClassVar[tuple[Any, ...]] = ("index", "row_id")
    ran_out: bool = False

    def arguments(self) -> dict[str, Any]:
        """What another process needs to rebuild it: numbers, strings, lists."""
        return {}

    def check_capacity(self, max_size: int) -> None:
        """Before there is a buffer. Raises ValueError."""

    def trajectory_settings(self) -> dict[str, Any]:
        """What a buffer that is made for it is told about trajectories, as far as its maker does not say: see `Buffer.create`."""
        return {}

    def prepare(self, storage: ShmStorage) -> None:
        """Called once for every handle that will draw this way, before its first draw. Raises what makes it impossible."""

    def sample(self, storage: ShmStorage, batch_size: int, *args: Any, **how: Any) -> TensorDictBase:
        """A batch with "index" and "row_id". Keywords: out, timeout, pin, and those of this call alone that the kind of sampler names."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.arguments().items())})"


class RandomSampler(Sampler):
    """Uniform with replacement over the rows stored at the moment of the draw.

    Args:
        replacement: False: it is a `SamplerWithoutReplacement`, which takes the other keywords.
    """

    name = "random"

    def __new__(cls, *, replacement: bool = True, **how: Any) -> Any:
        if cls is not RandomSampler or replacement:
            return super().__new__(cls)
        from shmbuf.samplers.epochs import SamplerWithoutReplacement

        return SamplerWithoutReplacement(**how)

    def __init__(self, *, replacement: bool = True):
        if not replacement:
            raise TypeError(f"{type(self).__name__} has no variant without replacement")

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        return storage.draw(batch_size, out=out, timeout=timeout, pin=pin)


def wait_for_rows(storage: ShmStorage, timeout: float | None) -> float | None:
    """Until there is a row; the handle is one that samples from now on. Returns what is left of timeout.

    Raises NotEnoughRows, StorageLost.
    """
    buffer = storage.buffer
    if not buffer._standby:
        buffer._become_reader()
    if buffer.schema is None or not len(buffer):
        since = time.monotonic()
        buffer.wait_rows(1, timeout)
        timeout = left_of(timeout, since)
    storage.schema()
    return timeout


def gather(
    storage: ShmStorage,
    ids: np.ndarray,
    again: Callable[[np.ndarray], np.ndarray],
    *,
    unit: int = 1,
    out: TensorDictBase | None = None,
    pin: bool = False,
) -> TensorDictBase:
    """The rows of int64 ids, in order, with "index" and "row_id".

    Args:
        again: units (``unit`` consecutive ids each) of which a row has been overwritten → their new ids [k, unit]; negative ones:
            leave the unit out.
        out: a TensorDict of the batch's size to copy into.

    Raises:
        Lapped: a unit was overwritten again and again.
    """
    n = len(ids)
    ids = np.ascontiguousarray(ids, np.int64)
    rows = storage.gathering(n, pin=pin)
    done = np.zeros(n, np.uint8)
    for _ in range(MAX_TRIES):
        if rows.fetch(ids, done) == n:
            break
        bad = np.flatnonzero(~done.reshape(-1, unit).all(axis=1))
        done.reshape(-1, unit)[bad] = 0
        new = np.asarray(again(bad)).reshape(len(bad), unit)
        ids.reshape(-1, unit)[bad] = new
        done.reshape(-1, unit)[bad[new[:, 0] < 0]] = 1  # not to be fetched
    else:
        raise Lapped(
            f"rows are overwritten faster than {unit} of them can be found and copied; the capacity of "
            f"{storage.buffer.capacity:,} rows is too small for this write rate"
        )
    td = rows.tensordict(ids)
    if n and (ids < 0).any():
        td = td[torch.from_numpy(ids >= 0)]
    return td if out is None else out.update_(td)


def pick(storage: ShmStorage, n: int, timeout: float | None) -> np.ndarray:
    """int64[n] ids, uniform with replacement. Raises NotEnoughRows, Lapped, StorageLost."""
    ids, buffer = np.empty(n, np.int64), storage.buffer
    buffer.wait_readable(lambda: buffer._call("choose", n, address_of(ids)) >= n, timeout)
    return ids


def with_rows(td: TensorDictBase, **rows: np.ndarray | torch.Tensor) -> TensorDict:
    """td with further entries of one value a row."""
    for key, value in rows.items():
        td.set(key, torch.as_tensor(value))
    return td  # type: ignore[return-value]
