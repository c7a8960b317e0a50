"""Ctrl-C at every point of a put where the interpreter lets it in: other threads of the process still put through the handle."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

from shmbuf import ShmStorage, TensorDictReplayBuffer
from tests.process.interrupts import at_point


def rows(n: int) -> TensorDict:
    return TensorDict({"k": torch.arange(n)}, [n])


def tried(lock: threading.RLock, free: list[bool]) -> None:  # type: ignore[valid-type]
    free.append(lock.acquire(timeout=10))
    if free[0]:
        lock.release()


@pytest.mark.parametrize("through", [None, lambda td: td], ids=["plain", "through a transform"])
@pytest.mark.parametrize("what", ["extend", "set_at_"])
def test_no_thread_is_locked_out(through, what):
    with TensorDictReplayBuffer(storage=ShmStorage(1000, drain="caller"), transform=through) as rb:
        rb.extend(rows(2))
        call = {"extend": lambda: rb.extend(rows(2)), "set_at_": lambda: rb.set_at_("k", 5, 1)}[what]
        n, locked = 0, []
        while True:
            n += 1
            where, error = at_point(n, call, "")
            if not where:
                break
            error = None  # noqa: F841 (the frames of its traceback would keep what they hold)
            free: list[bool] = []
            other = threading.Thread(target=tried, args=(rb._lock, free))
            other.start()
            other.join()
            if free != [True]:
                locked.append(where)
                rb._lock.release()
            rb.extend(rows(1))
        assert n > 20 and not locked
