"""Every name of the face from a second process, beside a collector in a third. Imports torch.

What is done with each name there, and what is asserted, is in `face_uses.py`."""

import multiprocessing
import traceback
from pathlib import Path

import pytest
import torch

import shmbuf
from shmbuf import PrioritizedSampler, RemoteTensorDictReplayBuffer, ShmStorage
from tests import page
from tests.process.face_uses import BATCH, CAPACITY, MISUSES, USES, Context, numbered, whole

ROUNDS = 2


def collect(name: str, turns, stop, out) -> None:
    """Four rows for each turn it is given."""
    torch.set_num_threads(1)
    written = CAPACITY
    with shmbuf.attach(name) as rb:
        while not stop.is_set():
            if turns.acquire(timeout=0.05):
                rb.extend(numbered(written, 4))
                written += 4
    out.put(written - CAPACITY)


def use(name: str, path: str, turns, out) -> None:
    torch.set_num_threads(1)
    c = Context(name, Path(path))
    said: dict[str, str | None] = {}
    for how in (USES, MISUSES) * ROUNDS:
        for method, what in how.items():
            while turns.get_value() < 50:
                turns.release()
            try:
                with shmbuf.attach(name, prefetch=2 if method == "next" else None) as rb:
                    if how is USES:
                        what(rb, c)
                    else:
                        call, error, text = what
                        with pytest.raises(error, match=text or None):
                            call(rb, c)
                        assert whole(rb[:]) and len(rb) == CAPACITY
                said.setdefault(method, None)
            except BaseException:
                said[method] = f"{'used' if how is USES else 'misused'}: {traceback.format_exc()}"
    out.put((said, c.stored))


def test_the_table_has_every_name_of_the_page():
    assert set(USES) == set(MISUSES) == page.NAMES


def test_every_name_from_a_second_process_beside_a_collector(unique_name, tmp_path):
    context = multiprocessing.get_context("fork")
    turns, stop, out, told = context.Semaphore(0), context.Event(), context.Queue(), context.Queue()
    with RemoteTensorDictReplayBuffer(
        storage=ShmStorage(CAPACITY, name=unique_name, trajectories=True),
        sampler=PrioritizedSampler(CAPACITY),
        batch_size=BATCH,
    ) as rb:
        rb.extend(numbered(0, CAPACITY))
        collector = context.Process(target=collect, args=(unique_name, turns, stop, told))
        user = context.Process(target=use, args=(unique_name, str(tmp_path / "checkpoints"), turns, out))
        for p in (collector, user):
            p.start()
        said, stored = out.get(timeout=100)
        stop.set()
        collected = told.get(timeout=60)
        for p in (collector, user):
            p.join(60)
        assert not (failed := {k: v for k, v in said.items() if v}), "\n".join(f"{k}, {v}" for k, v in failed.items())
        assert set(said) == page.NAMES and (collector.exitcode, user.exitcode) == (0, 0)
        assert collected > 1000 and rb.write_count == CAPACITY + stored + collected, "no row is lost"
        assert whole(rb[:]) and not rb.buffer.check()["findings"]
    shmbuf.destroy(unique_name)
