"""Checkpoints of a million rows with priorities: ours against TorchRL's, and against writing as many bytes to a file."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from .isolate import Emitter
from .peers import OURS
from .settings import Settings

ROWS = 1_000_000


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    rows, where = max(10_000, int(ROWS * settings.fill)), Path(spec["scratch"])
    for name in spec["contenders"]:
        emit.at(name)
        try:
            with _buffer(name, rows, where.name) as saved, _buffer(name, rows, f"{where.name}.2", fill=False) as loaded:
                for _ in range(settings.rounds):
                    shutil.rmtree(where / "checkpoint", ignore_errors=True)
                    emit.values(f"checkpoints/dumps/{name}", [_timed(lambda: saved.dumps(where / "checkpoint"))])
                    emit.values(f"checkpoints/loads/{name}", [_timed(lambda: loaded.loads(where / "checkpoint"))])
                if name == OURS:
                    size = sum(f.stat().st_size for f in (where / "checkpoint").rglob("*") if f.is_file())
                    for _ in range(settings.rounds):
                        emit.values("checkpoints/plain", [_timed(lambda: _write(where / "plain", size))])  # noqa: B023
        except Exception as error:
            emit.error(f"checkpoints/{name}", f"{type(error).__name__}: {error}")


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write(path: Path, size: int) -> None:
    """The disk's plain sequential write of as many bytes, with its fsync."""
    block = np.random.default_rng(1).bytes(8 << 20)
    with open(path, "wb") as f:
        for at in range(0, size, len(block)):
            f.write(block[: size - at])
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def _buffer(name: str, rows: int, shm: str, fill: bool = True) -> Iterator:
    if name == OURS:
        import shmbuf

        sampler = shmbuf.PrioritizedSampler(rows, 0.6, 0.4)
        rb = shmbuf.TensorDictReplayBuffer(storage=shmbuf.ShmStorage(rows, name=shm), sampler=sampler, batch_size=256)
    else:
        from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

        sampler = PrioritizedSampler(rows, 0.6, 0.4)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=256)
    try:
        for first in range(0, rows if fill else 0, 100_000):
            n = min(100_000, rows - first)
            rb.extend(
                TensorDict({"obs": torch.rand(n, 17), "action": torch.rand(n, 6), "reward": torch.rand(n, 1)}, [n])
            )
        if fill:
            rb.update_priority(torch.arange(rows), torch.rand(rows))
        yield rb
    finally:
        if name == OURS:
            rb.destroy(force=True)
