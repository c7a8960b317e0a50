"""Calls of the replay buffer's face, ours against TorchRL's, in one process by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from tensordict import TensorDict

from . import samplers
from .isolate import Emitter
from .peers import OURS
from .plan import FACE_CALLS
from .sampling import take_turns, time_calls
from .settings import Settings

ROWS = {"extend": 100_000, "set_at": 1_000_000}
ROWS_SET = 256


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    for call in FACE_CALLS:
        rows = int(ROWS[call] * settings.fill)
        with ExitStack() as stack:
            entrants: dict[str, samplers.Contender] = {}
            for name in spec["contenders"]:
                emit.at(name)
                try:
                    rb = stack.enter_context(_buffer(name, rows, f"{Path(spec['scratch']).name}-{call}"))
                    contender = samplers.Contender(_CALLS[call](rb))
                    time_calls(contender, 5)
                    entrants[name] = contender
                except Exception as error:
                    emit.error(f"face/{call}/{name}", f"{type(error).__name__}: {error}")
            for name, seconds in take_turns(entrants, settings, emit).items():
                emit.values(f"face/{call}/{name}", seconds)


@contextmanager
def _buffer(name: str, rows: int, shm: str) -> Iterator:
    if name == OURS:
        import shmbuf

        rb = shmbuf.TensorDictReplayBuffer(storage=shmbuf.ShmStorage(rows, name=shm), batch_size=256)
        try:
            rb.extend(_rows(rows))
            yield rb
        finally:
            rb.close()
            shmbuf.destroy(shm)
    else:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=256)
        rb.extend(_rows(rows))
        yield rb


def _rows(n: int) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.rand(n, 17),
            "action": torch.rand(n, 6),
            "next": {
                "observation": torch.rand(n, 17),
                "reward": torch.rand(n, 1),
                "done": torch.zeros(n, 1, dtype=torch.bool),
            },
        },
        [n],
    )


def _scaled(td: TensorDict) -> TensorDict:
    return td.set(("next", "reward"), td["next", "reward"] * 0.1)


def _extend_one(rb) -> Callable[[], object]:
    rb.append_transform(_scaled)
    row = _rows(1)
    return lambda: rb.extend(row)


def _set_at(rb) -> Callable[[], object]:
    values = torch.rand(ROWS_SET, 1)
    return lambda: rb.set_at_(("next", "reward"), values, torch.randint(len(rb), (ROWS_SET,)))


_CALLS = {"extend": _extend_one, "set_at": _set_at}
assert tuple(_CALLS) == FACE_CALLS
