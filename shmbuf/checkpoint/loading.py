"""`loads`: a directory back into a buffer that is there, for every process attached to it."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shmbuf._extension import native
from shmbuf.buffer import Buffer
from shmbuf.checkpoint.directories import Tell, showing
from shmbuf.checkpoint.layout import Root
from shmbuf.checkpoint.reading import Checkpoint, Files, Made
from shmbuf.checkpoint.saving import reader_of, transform_of
from shmbuf.epochs import CONSUMED, EPOCH
from shmbuf.errors import CheckpointError, SchemaError
from shmbuf.schema import Schema
from shmbuf.settings import FULL
from shmbuf.ticket import seconds_of

BLOCK_BYTES = 2 << 20
_INDEX = (("index",), ("row_id",), ("priority_weight",))


class Loaded(NamedTuple):
    """rows: how many were stored. shift: their new row ids minus those they were saved with; 0: they are the same; None: not known.
    left_out: what of the checkpoint was not used, and why."""

    rows: int
    shift: int | None
    left_out: tuple[str, ...]


def load_buffer(
    buf: Buffer,
    path: str | os.PathLike,
    *,
    timeout: float | None = None,
    progress: bool | Tell | None = None,
    hooks: Sequence[Any] = (),
) -> Loaded:
    """Into a bare `Buffer`. Arguments and errors: see `loads`."""
    with Checkpoint(path) as saved:
        return _Load(buf, saved, timeout, hooks).run(progress)


def loads(
    rb: Any, path: str | os.PathLike, *, timeout: float | None = None, progress: bool | Tell | None = None
) -> Loaded:
    """Put the rows of a checkpoint, TorchRL's or ours, in the place of those that are stored, for every process attached.

    All of the directory is checked before anything changes. Nothing in it is unpickled: a ``prefetch.pkl`` is ignored, and said.
    Rows keep their ids if these are still free here and their slots can be the same; else ids go on above. A smaller buffer takes the
    newest rows. Trajectories are what they were, but for end keys that were edited: a row ends its trajectory here if it says so. One
    that was going on stays without an end, and goes on only as a new one. Rows that others put meanwhile come in between, as usual.
    Who is killed while he loads leaves the rows that he had loaded.

    The limiter keeps this buffer's parameters, and goes on from the difference that was saved if their ratio is the same. An epoch of
    one's own goes on where it was if ids are kept; a shared one if, besides, its order has a seed (or is not shuffled).

    Args:
        timeout: seconds for storing each block of rows; None: as long as it takes.
        progress: True: a bar on stderr; or a callable (rows done, of how many).

    Raises:
        CheckpointError: no checkpoint, or a damaged one. SchemaError: its rows do not fit. TooManyCollectors: loading takes a ring. In
        these cases nothing changed. RingFull, CommitPending: a block of rows could not be stored within ``timeout``.
    """
    with Checkpoint(path) as saved:
        more = _More(rb, saved)
        done = _Load(rb.buffer, saved, timeout, getattr(rb, "_load_hooks", ())).run(progress)
        left = [*done.left_out, *more.apply(rb, done.shift)]
    ignored = [t for t in left if t.startswith("prefetch.pkl")]
    if ignored:
        warnings.warn(f"not loaded: {', '.join(ignored)}", stacklevel=2)
    return done._replace(left_out=tuple(left))


class _Load:
    def __init__(self, buf: Buffer, saved: Checkpoint, timeout: float | None, hooks: Sequence[Any]):
        if buf._readonly:
            raise PermissionError("a read-only handle cannot load rows")
        self.buf, self.saved, self.timeout = buf, saved, timeout
        made = None
        if hooks:
            from shmbuf.checkpoint.hooks import load_through
            from shmbuf.tensors import plain, tensor_leaves

            made = {k: plain(k, t) for k, t in tensor_leaves(load_through(hooks, saved.tensordict())).items()}
            short = [k for k, t in made.items() if t.ndim < 1 or t.shape[0] != saved.capacity]
            if short:
                raise CheckpointError(
                    f"load hooks gave {short[0]} with another first dimension than {saved.capacity:,}"
                )
        found = saved.schema() if made is None else Schema.from_leaves(made, 1)
        mine = buf.schema
        extra = [k for k in _INDEX if k in found.keys and (mine is None or k not in mine.keys)]
        self.schema = (
            Schema([c for c in found.columns if c.key not in extra], found.form, found.inner) if extra else found
        )
        dims = buf.config.get("dims") or {}
        if mine is None and (wanted := dims.get("ndim", 1)) != len(self.schema.inner) + 1:
            raise SchemaError(
                f"checkpoint {saved.path} has rows of {len(self.schema.inner) + 1} dimensions, the buffer's storage has ndim={wanted}"
            )
        if mine is not None:
            mine.require_same(self.schema, f"checkpoint {saved.path}")
            self.schema = mine
        elif extra and saved.state is not None:
            self.schema = found  # ours stores such a key only if the user did
        self.rows: Files | Made = saved.opened(self.schema) if made is None else Made(saved, self.schema, made)
        self.left: list[str] = list(saved.ignored)

    def run(self, progress: bool | Tell | None) -> Loaded:
        try:
            with showing(progress, "loading") as tell:
                return self._run(tell)
        finally:
            self.rows.close()

    def _run(self, tell: Tell) -> Loaded:
        buf, saved = self.buf, self.saved
        if buf.schema is None:
            buf._build(self.schema, "the checkpoint", self.timeout)
        n = min(saved.rows, buf.capacity)
        skip = saved.rows - n
        if skip:
            self.left.append(f"the {skip:,} oldest rows: the capacity is {buf.capacity:,}")
        cut_before, limiter = buf._call("counters")["streams_cut"], _Limiter(buf, saved)
        # A collector of its own, so that nobody goes on with its streams.
        with Buffer.attach(buf.name, owner=buf._owner) as loader:
            loader._full_code, loader._timeout, loader._seconds = (
                FULL.index("block"),
                self.timeout,
                seconds_of(self.timeout),
            )
            assert loader.schema is not None, "built above"
            loader._whole_steps = False  # its parts follow each other
            # Its first record claims its ring, before anything changes.
            loader._restart(self._first_id(n, skip), write_count=max(0, saved.write_count - n), timeout=self.timeout)
            limiter.count_anew()
            ids = self._put(loader, n, skip, limiter, tell)
        cut = buf._call("counters")["streams_cut"] - cut_before
        if cut:
            self.left.append(
                f"{cut:,} trajectories were cut: more had no end than the loader can keep apart (ring_bytes= makes room)"
            )
        self._finish_priorities(n)
        shift = None
        if saved.first_id is not None:
            shifts = {int(first) - (saved.first_id + skip + at) for at, first in ids}
            shift = shifts.pop() if len(shifts) == 1 else None
        return Loaded(n, shift, tuple(self.left))

    def _first_id(self, n: int, skip: int) -> int:
        """As saved, where the slots of all rows can be as they were there; else a first slot."""
        saved = self.saved
        if saved.first_id is None:  # TorchRL's: slots, and no ids
            return saved.first_slot if n == saved.capacity == self.buf.capacity else 0
        first = saved.first_id + skip
        return first if n == self.buf.capacity or first % self.buf.capacity == 0 else 0

    def _streams(self, skip: int) -> np.ndarray | None:
        """uint64: of each row, with a mark where the beginning of its trajectory is not here: it was not, or does not fit."""
        saved = self.saved
        if saved.streams is None or not self.buf.marks.keep:
            return None
        of, heads = saved.streams[skip:], saved.heads
        if skip:
            heads = np.concatenate([heads, np.intersect1d(saved.streams[:skip], of)])  # type: ignore[list-item]
        words = of.astype(np.uint64)
        if heads is not None and len(heads):
            words[np.isin(of, heads)] |= np.uint64(native.HEADLESS)
        return words

    def _put(self, loader: Buffer, n: int, skip: int, limiter: _Limiter, tell: Tell) -> list[tuple[int, int]]:
        """[(which row, its id)] of every piece whose ids follow each other."""
        saved, streams, out = self.saved, self._streams(skip), []
        wants = saved.priorities is not None and self.buf._get("priorities") is not None
        block = max(1, BLOCK_BYTES // self.schema.row_bytes)
        leaves = self._read(skip, min(block, n))
        for at in range(0, n, block):
            m = min(block, n - at)
            of = None if streams is None else streams[at : at + m]
            p = np.ascontiguousarray(saved.priorities[skip + at : skip + at + m], np.float64) if wants else None  # type: ignore[index]
            ticket = loader.submit(loader._columns, leaves, m, True, self.timeout, False, extras=(of, p), loaded=True)
            assert ticket is not None, "these leaves fit"
            if at + m < n:
                leaves = self._read(
                    skip + at + m, min(block, n - at - m)
                )  # while the drain thread stores the block before
            ticket.finish(self.timeout)
            done = at
            for size, first in ticket._native.pieces():
                out.append((done, first))
                done += size
            limiter.count_anew()  # after each: whoever kills us leaves collectors no more than a block to wait for
            tell(at + m, n)
        return out

    def _read(self, at: int, n: int) -> list[np.ndarray]:
        return [np.ascontiguousarray(a) for a in self.rows.rows(at, n)]

    def _finish_priorities(self, n: int) -> None:
        """What a new row gets: the largest priority ever set, which may have been of a row that is gone."""
        buf, saved = self.buf, self.saved
        state = buf._get("priorities")
        if state is None or not n or saved.new_row is None or saved.priorities is None:
            return
        if saved.formula != (state["alpha"], state["eps"]):
            self.left.append(
                f"the formula of priorities, alpha {saved.formula[0]:g} and eps {saved.formula[1]:g}: this buffer has "  # type: ignore[index]
                f"{state['alpha']:g} and {state['eps']:g}"
            )
        if not state["max_priority_within_buffer"]:
            buf._call("raise_new_row", saved.new_row)


class _Limiter:
    """The buffer's parameters, counted anew: the rows that are being loaded are none that samplers have to keep up with. The difference
    that was saved, where the ratio is the same. Whatever somebody else sets meanwhile stays."""

    def __init__(self, buf: Buffer, saved: Checkpoint):
        self.buf, self.before = buf, buf.limiter_state()
        self.saved = (saved.state or {}).get("limiter")
        self.mine = self._parameters(self.before)

    @staticmethod
    def _parameters(state: dict[str, Any] | None) -> tuple | None:
        return None if state is None else tuple(state[k] for k in ("num", "den", "min_size", "min_diff", "max_diff"))

    def count_anew(self) -> None:
        if self.before is None or self._parameters(self.buf.limiter_state()) != self.mine:
            return
        num, den, size, low, high = self._parameters(self.before)  # type: ignore[misc]
        stored = self.buf._call("counters")["rows_total"]
        diff, inserted = 0.0, stored
        if isinstance(self.saved, dict) and (self.saved["num"], self.saved["den"]) == (num, den):
            diff, inserted = float(self.saved["diff"]), int(self.saved["inserted"])
        size = max(0, size - max(0, inserted - stored))
        low, high = (None if d is None else round((d - diff) * den) for d in (low, high))
        self.buf._call("set_limiter", num, den, size, low, high, True)
        self.mine = self._parameters(self.buf.limiter_state())


class _More:
    """What belongs to one replay buffer: read and checked first, applied last."""

    def __init__(self, rb: Any, saved: Checkpoint):
        self.saved, self.generator, self.state = saved, getattr(rb, "_rng", None), None
        self.rng = self._rng(saved.root)
        if saved.root.has("transform.t"):
            self.state = self._transform(saved.root)
            self._try(transform_of(rb))

    def _rng(self, root: Root) -> np.ndarray | None:
        if not root.has("rng_state/meta.json"):
            return None
        meta = root.json("rng_state/meta.json").get("rng_state")
        shape = meta.get("shape") if isinstance(meta, dict) else None
        if not (isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int) and 0 < shape[0] < 1 << 20):
            raise CheckpointError(f"{self.saved.path}/rng_state/meta.json is damaged: shape {shape!r}")
        return self.saved._file("rng_state/rng_state.memmap", np.uint8, shape[0])

    def _transform(self, root: Root) -> Any:
        import torch

        try:
            with open(root.open("transform.t"), "rb") as f:
                return torch.load(f, weights_only=True, map_location="cpu")
        except Exception as e:
            raise CheckpointError(
                f"{self.saved.path}/transform.t is damaged, or holds more than tensors: {str(e).splitlines()[0][:200]}"
            ) from None

    def _try(self, transform: Any) -> None:
        try:
            copied = copy.deepcopy(transform)
        except Exception:  # it holds what cannot be copied: found out when it is applied
            return
        try:
            if copied is not None:
                copied.load_state_dict(self.state)
        except Exception as e:
            raise CheckpointError(
                f"{self.saved.path}/transform.t does not fit this buffer's transform; nothing was loaded: {e}"
            ) from None

    def apply(self, rb: Any, shift: int | None) -> list[str]:
        import torch

        left = []
        if self.rng is not None:
            state = torch.from_numpy(self.rng)
            generator = self.generator if self.generator is not None else torch.Generator()
            try:
                generator.set_state(state)
                if self.generator is None and hasattr(rb, "set_rng"):
                    rb.set_rng(generator)
            except (RuntimeError, TypeError) as e:
                left.append(f"rng_state: {e}")
        if self.state is not None:
            transform = transform_of(rb)
            if transform is None:
                left.append("transform.t: this buffer has no transform")
            else:
                transform.load_state_dict(self.state)
        epochs = (self.saved.state or {}).get("epochs")
        if isinstance(epochs, dict):
            left += _epochs(rb, epochs, shift)
        return left


def _epochs(rb: Any, epochs: dict[str, Any], shift: int | None) -> list[str]:
    reader, buf = reader_of(rb), rb.buffer
    if reader is None:
        return []
    own = epochs.get("own")
    try:
        if reader._own is not None and isinstance(own, dict):
            if shift:
                return ["the place in the epoch: rows have other ids"]
            low, high = (int(w) for w in own["word"])
            with reader._alone():
                reader._own.state = (low, high)
                reader._order, reader._fresh = int(own["order"]), bool(own["fresh"])
        elif reader.shared:
            which = EPOCH if reader.times is None else CONSUMED
            low, high = (int(w) for w in epochs["shared"][str(which)])
            same = str(buf._header["instance_id"]) == epochs.get("instance")
            if shift or (reader.shuffle and reader.seed is None and not same):
                return ["the place in what readers share: rows have other ids" if shift else
                        "the place in what readers share: its order had no seed"]  # fmt: skip
            buf._call("epoch_word", which, (low, high))
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise CheckpointError(f"the checkpoint's epochs cannot be read: {e!r}") from None
    return []
