"""What the tests of the rlightning face share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmbuf.rlightning import EnvMeta, EnvRet, PolicyResponse, Storage


@pytest.fixture
def make() -> Iterator[Callable[..., Storage]]:
    """Storages that are closed after the test."""
    made: list[Storage] = []

    def make(capacity: int = 100, *args: Any, **kw: Any) -> Storage:
        made.append(Storage(capacity, *args, drain="caller", **kw))
        return made[-1]

    yield make
    for s in made:
        s.close()


def step(s: Storage, env_id: str, value: float, **kw: Any) -> None:
    """One step; observation, reward and action follow from its value."""
    s.add_transition(EnvRet(env_id, value, last_reward=value, **kw), PolicyResponse(env_id, action=int(value) * 10))


def episode(s: Storage, first: int, rows: int, env_id: str = "e") -> None:
    """An episode whose rows' observations are first, first + 1 …"""
    for k in range(rows + 1):
        step(s, env_id, float(first + k))
    s.truncate_one_episode(env_id)


def vector(n: int, t: int, env_id: str = "v", **kw: Any) -> tuple[EnvRet, PolicyResponse]:
    """Step t of n environments: observation 100 i + t, reward t, action 1000 i + t."""
    i = np.arange(n)
    flags = {k: np.zeros(n, bool) for k in ("last_terminated", "last_truncated")}
    for k, of in kw.items():
        flags[k] = np.isin(i, of)
    e = EnvRet(env_id, (100.0 * i + t).astype("f4"), last_reward=np.full(n, t, "f4"), **flags)
    return e, PolicyResponse(env_id, action=torch.from_numpy(1000 * i + t))


def metas(n: int, env_id: str = "v") -> list[EnvMeta]:
    return [EnvMeta(env_id, num_envs=n)]


def seen(s: Storage, key: str = "observation") -> Any:
    """A column as get_data has it; of a list of episodes a list."""
    data = s.get_data()
    return [d[key].tolist() for d in data] if isinstance(data, list) else data[key].tolist()
