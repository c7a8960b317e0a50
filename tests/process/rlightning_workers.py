"""What the processes of test_rlightning.py do. Every value of a row follows from its environment, episode and step."""

from __future__ import annotations

import time
from typing import Any

LENGTHS = (3, 9, 5, 1, 14)  # of an environment's episodes in turn, in rows; every environment of a group
GROUP = 4  # environments that step together


def meta(env_id: str) -> list[Any]:
    from shmbuf.rlightning import EnvMeta

    return [EnvMeta(env_id, num_envs=GROUP)]


def number(who: int, lane: int, episode: int, step: int) -> int:
    return ((who * GROUP + lane) * 1_000_000 + episode) * 100 + step


def parts(value: int) -> tuple[int, int, int]:
    """(environment among all, episode, step)"""
    return value // 100_000_000, value // 100 % 1_000_000, value % 100


def add_step(storage: Any, who: int, episode: int, step: int) -> None:
    import numpy as np

    from shmbuf.rlightning import EnvRet, PolicyResponse

    value = np.array([number(who, lane, episode, step) for lane in range(GROUP)])
    no = np.zeros(GROUP, bool)
    storage.add_transition(
        EnvRet(f"env-{who}", value, last_reward=value.astype("f8"), last_terminated=no, last_truncated=no),
        PolicyResponse(f"env-{who}", action=np.stack([value, -value], 1)),
    )


def add(name: str, who: int, connection: Any, stall_at: int | None) -> None:
    """Add episodes until told anything; tells of each that is stored. In the middle of number stall_at: says so, and stands still."""
    from shmbuf.rlightning import Storage

    storage = Storage.attach(name, env_meta_list=meta(f"env-{who}"))
    episode = 0
    while not connection.poll(0):
        length = LENGTHS[episode % len(LENGTHS)]
        for step in range(length + 1):
            if episode == stall_at and step == length - 1:
                connection.send("middle")
                time.sleep(600)
            add_step(storage, who, episode, step)
        storage.truncate_one_episode(f"env-{who}")
        connection.send(episode)
        episode += 1
    connection.send("end")
    storage.close()


def fill(name: str, connection: Any) -> None:
    """Push episodes of three rows to a storage in which nothing is overwritten; tells how many fitted before one did not."""
    import torch

    from shmbuf.rlightning import Storage

    storage = Storage.attach(name)
    connection.send("ready")
    connection.recv()
    fitted = 0
    try:
        while True:
            storage.add_episode({"observation": torch.full((3,), fitted)})
            fitted += 1
    except RuntimeError as e:
        connection.send((fitted, str(e)))
    storage.close()


def hold(name: str, connection: Any) -> None:
    """Stand still in the middle of pushing to a storage in which nothing is overwritten."""
    from shmbuf.rlightning import Storage
    from shmbuf.rlightning.pushing import _alone

    storage = Storage.attach(name)
    with _alone(storage.buffer, None):
        connection.send("inside")
        time.sleep(600)
