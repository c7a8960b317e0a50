"""Rows on their way in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from shmbuf.errors import CommitPending, SchemaError
from shmbuf.face.priorities import Priorities
from shmbuf.face.transforming import Transforming
from shmbuf.forms import Rows, as_batch, take_apart, take_items
from shmbuf.lanes import cells
from shmbuf.schema import Key
from shmbuf.storage import stack
from shmbuf.ticket import Ticket, left_of
from shmbuf.transforms.base import Compose, Prepared, parts_of
from shmbuf.writers import WRITERS, RoundRobinWriter, TensorDictRoundRobinWriter, Writer


class Writing(Transforming, Priorities):
    """`extend`, `put`, `add`, `empty`."""

    _takes_forms = True

    def extend(
        self,
        tensordicts: Any,
        *,
        update_priority: bool | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows; returns when every sampler of every process can draw them.

        Args:
            tensordicts: a TensorDict of batch size [n] (with ndim > 1 of ndim dimensions; any strides, any device; dtypes are never
                converted), or a list of TensorDicts to stack. Of a `ReplayBuffer` also the other forms of rows that it names, with
                the rows in front, and lists of one a row. ``index``, ``row_id`` and ``priority_weight`` are dropped unless the schema has them.
            update_priority: False: ignore the priorities that the rows carry under the priority key.
            stream: whose next steps these rows are: one number, or one a row; see `Buffer.put`.
            timeout: seconds; None: the buffer's.

        Returns:
            LongTensor[n]: the rows' indices; with ndim > 1 [n, ndim], time, then the lane. [0] if a transform drops the batch.

        Raises:
            SchemaError: lists every difference. RingFull: the time is over. In both cases nothing was stored.
            CommitPending: the rows are in the ring and will be stored; ``.ticket`` waits for them.
        """
        return self._write(tensordicts, timeout, stream=stream, prioritise=update_priority)

    def put(self, data: Any, *, stream: Any = None, timeout: float | None = None) -> Ticket:
        """Hand rows to this process's ring and return at once; ``ticket.wait()`` gives their indices. What collectors call.

        timeout: seconds to wait for room in the ring; None: the buffer's.
        """
        if self._decides is not None:
            self._decides.check_write()
            raise RuntimeError(
                f"put() does not wait for what is stored, by which a {type(self._decides).__name__} decides: extend()"
            )
        return self._write(data, timeout, stream=stream, wait=False)

    def add(self, data: TensorDictBase, *, stream: Any = None, timeout: float | None = None) -> Any:
        """Store one row, a TensorDict of batch size [] or (of a `ReplayBuffer`) another form; returns its index, or None if a drop
        policy took it. With ndim > 1: one time step, whose indices [cells, ndim] are returned.

        Transforms are given it as a batch of one row. Where they store another number of rows than one, LongTensor[n] is returned;
        [0] if they drop it. timeout: seconds; None: the buffer's.
        """
        index = self._write(data, timeout, single=True, stream=stream)
        if self._storage.ndim > 1 or len(index) > 1:
            return index
        if not len(index):
            return index if self._transforms() else None
        return int(index) if index[0] >= 0 else None

    def flush(self, *, timeout: float | None = None) -> torch.Tensor:
        """Store the rows that transforms hold back (`MultiStepTransform`), each with as many steps as there are. `close` does it too.

        Returns LongTensor[n]: their indices. Errors: as `extend`; what could not be stored is still held back.
        """
        timeout, since, stored = self._timeout(timeout), time.monotonic(), []
        with self._alone(timeout), self._putting:
            parts = parts_of(self.transform) if self._transforms() else []
            for i in reversed(range(len(parts))):
                for rows, stream, commit in parts[i].pending():
                    made = Compose(*parts[:i]).prepared(rows, stream, self._trajectory_keys())
                    both = Prepared(made.rows, made.stream, _both(commit, made.commit))
                    stored.append(self._commit(both, stream, left_of(timeout, since), None))
        done = [t.wait(left_of(timeout, since)) if isinstance(t, Ticket) else t for t in stored]
        return torch.cat(done) if done else torch.zeros(0, dtype=torch.int64)

    def set_writer(self, writer: Any) -> Any:
        """Place rows another way from now on, through this handle. Returns the previous writer. TypeError: none of shmbuf's."""
        before, made = self._writer, self._made_writer(writer)
        self._use_writer(made)
        return before

    @classmethod
    def _made_writer(cls, writer: Any) -> Writer:
        if writer is None:
            return RoundRobinWriter() if cls._takes_forms else TensorDictRoundRobinWriter()
        made = writer() if callable(writer) and not isinstance(writer, Writer) else writer
        if not isinstance(made, Writer):
            raise TypeError(
                f"writer must be either a Writer or a callable returning a writer instance; one of shmbuf's "
                f"({', '.join(c.__name__ for c in WRITERS.values())}), not {type(made).__name__}"
            )
        return made

    def _use_writer(self, writer: Writer) -> None:
        writer.register_storage(self._storage)
        self._writer, self._decides = (
            writer,
            None if type(writer) in (RoundRobinWriter, TensorDictRoundRobinWriter) else writer,
        )

    def _write(
        self,
        data: Any,
        timeout: float | None,
        *,
        single: bool = False,
        wait: bool = True,
        stream: Any = None,
        prioritise: bool | None = None,
    ) -> Any:
        """What `extend`, `add` and `put` end in: transforms, then the writer; indices, or a ticket if it is not waited for."""
        if self._decides is not None:
            self._decides.check_write()
            kind = type(self._decides).__name__
            if not wait:
                raise RuntimeError(f"put() does not wait for what is stored, by which a {kind} decides: extend()")
            if stream is not None:
                raise ValueError(
                    f"stream={stream!r}: rows that a {kind} places do not follow each other. Nothing was stored."
                )
        changed = self._touched and self._transforms() > 0
        if not changed and self._decides is None:
            given = self._one(data) if single else self._batch(data)
            return self._store(given, timeout, not wait, wait, single=single, stream=stream, prioritise=prioritise)
        rows: Any = data
        if not changed or (isinstance(data, list) and not single):
            rows = self._one(data) if single else self._batch(data)
        if changed and isinstance(rows, Rows):
            rows = as_batch(rows, data)
        if single and is_tensor_collection(rows):  # as a batch of one
            rows, single = rows.unsqueeze(self._storage.time_dim), False
        timeout, since = self._timeout(timeout), time.monotonic()
        with self._alone(timeout), self._putting:
            made = self._prepared(rows, stream) if changed else Prepared(rows, stream)
            done = self._commit(made, stream, left_of(timeout, since), prioritise, single)
        return done.wait(left_of(timeout, since)) if wait and isinstance(done, Ticket) else done

    def _commit(
        self, made: Prepared, given: Any, timeout: float | None, prioritise: bool | None, single: bool = False
    ) -> Any:
        """Give prepared rows to the writer or the ring; what transforms hold back moves on only if that went well."""
        if made.rows is None:
            rows: Any = TensorDict({}, batch_size=[0])
        elif isinstance(made.rows, Rows):
            rows = made.rows
        else:
            rows = self._one(made.rows) if single else self._batch(made.rows)
        stream = None if given is None else made.stream
        try:
            if self._decides is not None:
                done: Any = self._placed(rows, timeout, prioritise)
            else:
                done = self._store(rows, timeout, True, False, single=single, stream=stream, prioritise=prioritise)
        except CommitPending as e:  # rows are in the ring
            if e.rows:
                made.commit()
            raise
        made.commit()
        return done

    def _placed(self, rows: Any, timeout: float | None, prioritise: bool | None = None) -> torch.Tensor:
        """LongTensor[n]: where the writer put each row; -1: nowhere."""
        assert self._decides is not None
        key = self._priority_key
        p = None if key is None or prioritise is False else self._sent_priorities(rows, key, False)
        if p is not None:
            self.buffer.extras(len(p), None, p)  # what is refused changes nothing
        return self._decides.extend(rows, timeout=timeout, priority_key=key, priorities=p)

    def empty(self, empty_write_count: bool = True, *, timeout: float | None = None) -> None:
        """Forget all rows, for every process; indices start again at 0. timeout: seconds; None: the buffer's.

        Batches that other handles have drawn ahead (``prefetch``) are still given out.
        """
        self._writer.check_write()
        timeout, since = self._timeout(timeout), time.monotonic()
        with self._alone(timeout):
            self.buffer.empty(empty_write_count=empty_write_count, timeout=left_of(timeout, since))
        self._drop_ahead()

    def _store(
        self,
        td: Any,
        timeout: float | None,
        wake: bool,
        wait: bool,
        single: bool = False,
        stream: Any = None,
        prioritise: bool | None = None,
        inner: tuple[int, ...] | None = None,
    ) -> Any:
        """Lock, first build, room and commit share one timeout. inner: the rows are `cells` already."""
        ticket, since, storage, key = None, time.monotonic(), self._storage, self._priority_key
        if storage.ndim > 1 and not inner:
            (td, inner), single = cells(td, single, storage.ndim, storage.time_dim), False
        priorities = None if key is None or prioritise is False else self._sent_priorities(td, key, single)
        lock = self._lock
        mine = lock._is_owned()
        try:  # the usual case, without the cost of a context manager; see `_alone`
            if mine or lock.acquire(False):
                ticket = storage.put(td, wake, timeout, single, key, stream, priorities, inner)
        finally:
            if not mine:
                try:  # noqa: SIM105
                    lock.release()
                except RuntimeError:
                    pass
        if ticket is not None and not wait:
            return ticket
        timeout = self._timeout(timeout)
        if ticket is None:
            with self._alone(timeout):
                ticket = storage.put(td, wake, left_of(timeout, since), single, key, stream, priorities, inner)
        return ticket.wait(left_of(timeout, since)) if wait else ticket

    def _sent_priorities(self, td: Any, key: Key, single: bool) -> np.ndarray | None:
        """What rows carry under the priority key, if anybody draws by priority."""
        name = key[0] if len(key) == 1 else key
        held = td._tensordict if type(td) is TensorDict else None
        if held is not None and key[0] not in held:  # the usual case
            return None
        if len(getattr(td, "batch_size", ())) != (0 if single else 1):  # the storage says so
            return None
        p = td.get(name, None) if is_tensor_collection(td) else None
        if not isinstance(p, torch.Tensor) or not self.buffer._get("wants_priorities"):
            return None
        n = 1 if single else td.batch_size[0]
        p = self._reduced(p.reshape(1, *p.shape) if single else p, n).expand(n)
        return p.detach().cpu().to(torch.float64).numpy().reshape(n)

    def _batch(self, data: Any) -> Any:
        if type(data) is TensorDict or isinstance(data, TensorDictBase):
            return data
        if isinstance(data, list) and not data:
            return TensorDict({}, batch_size=[0])
        if self._takes_forms:
            if not isinstance(data, list):
                return take_apart(data, False, self._storage.ndim)
            if not all(isinstance(d, TensorDictBase) for d in data):
                return take_items(data)
        if isinstance(data, (list, tuple)):
            if not data:
                return TensorDict({}, batch_size=[0])
            return stack(list(data))
        if is_tensor_collection(data):
            return data
        return self._collect(data, None)

    def _one(self, data: Any) -> Any:
        if isinstance(data, TensorDictBase):
            return data
        if self._takes_forms:
            return take_apart(data, True, self._storage.ndim)
        return data if is_tensor_collection(data) else self._collect(data, [])

    @staticmethod
    def _collect(data: Any, batch_size: list | None) -> TensorDictBase:
        size = "[n]" if batch_size is None else batch_size
        hint = f": TensorDict(d, batch_size={size}) makes one of it, a Buffer takes dicts of arrays"
        raise SchemaError(
            f"rows are a TensorDict{'' if batch_size is not None else ' or a list of them'}, not {type(data).__name__}"
            + (hint if isinstance(data, Mapping) else "")
        )


def _both(first: Callable[[], object], then: Callable[[], object]) -> Callable[[], object]:
    return lambda: (first(), then())
