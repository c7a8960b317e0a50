"""Steps of 4,096 environments into an rlightning storage, beside a call of another process that gets the same step."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .isolate import Emitter
from .peers import OURS
from .plan import CALL
from .settings import Settings

ENVIRONMENTS, STEPS = 4096, 24
"""Steps of a rollout, as rlightning's humanoid example has them; a row has 464 bytes."""
CAPACITY = 4 * ENVIRONMENTS * STEPS
_NO = np.zeros(ENVIRONMENTS, bool)


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    torch.set_num_threads(1)
    rounds = max(3, settings.turns // 4)
    for name, measure in ((OURS, _together), (OURS, _one_by_one), (CALL, _call)):
        emit.at(name)
        try:
            for figure, values in measure(rounds, Path(spec["scratch"]).name):
                emit.values(f"rlightning/{figure}/{name}", values)
        except Exception as error:
            emit.error(f"rlightning/{measure.__name__}/{name}", f"{type(error).__name__}: {error}")


def _observation() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal((ENVIRONMENTS, n), "f4") for k, n in (("joints", 29), ("base", 13), ("command", 6))}


def _answer() -> dict[str, torch.Tensor]:
    shapes = {"action": (ENVIRONMENTS, 12), "log_prob": (ENVIRONMENTS,), "value": (ENVIRONMENTS, 1)}
    return {k: torch.rand(s) for k, s in shapes.items()}


@contextmanager
def _storage(name: str, auto: bool) -> Iterator[Any]:
    import shmbuf
    from shmbuf.rlightning import EnvMeta, Storage

    metas = [EnvMeta("v", num_envs=ENVIRONMENTS)]
    with Storage(CAPACITY, env_meta_list=metas, auto_truncate_episode=auto, name=name) as storage:
        yield storage
    shmbuf.destroy(name)


def _step(observation: Any, answer: Any, truncated: np.ndarray) -> tuple[Any, Any]:
    from shmbuf.rlightning import EnvRet, PolicyResponse

    reward = np.ones(ENVIRONMENTS, "f4")
    return EnvRet("v", observation, reward, _NO, truncated), PolicyResponse("v", **answer)


def _together(rounds: int, name: str) -> Iterator[tuple[str, list[float]]]:
    """Rollouts that end all at once: a step, and a step with its share of the end, until all can be sampled."""
    steps, shares, step = [], [], _step(_observation(), _answer(), _NO)
    with _storage(f"{name}-together", auto=False) as storage:
        for k in range(rounds + 6):  # the memory is touched in the first ones
            took = [_time(lambda: storage.add_transition(*step)) for _ in range(STEPS + 1)]
            end = _time(lambda: storage.truncate_one_episode("v"))
            if k >= 6:
                steps += took
                shares.append((sum(took) + end) / (STEPS + 1))
    yield "step", steps
    yield "rollout", shares
    yield "rows", [ENVIRONMENTS * STEPS / (s * (STEPS + 1)) for s in shares]


def _one_by_one(rounds: int, name: str) -> Iterator[tuple[str, list[float]]]:
    """Episodes of so many steps that end at different times, some at each step: as many rows are stored as steps are added."""
    observation, answer, i = _observation(), _answer(), np.arange(ENVIRONMENTS)
    steps = [_step(observation, answer, (i + t) % (STEPS + 1) == 0) for t in range(STEPS + 1)]
    with _storage(f"{name}-single", auto=True) as storage:
        took = [_time(lambda s=s: storage.add_transition(*s)) for _ in range(rounds + 6) for s in steps]
    yield "auto", took[6 * len(steps) :]


def _call(rounds: int, name: str) -> Iterator[tuple[str, list[float]]]:
    """What any call of another process costs at least that takes a step along: pickle, a pipe, an answer."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    step = {
        **_observation(),
        **{k: v.numpy() for k, v in _answer().items()},
        "done": _NO,
        "reward": np.ones(ENVIRONMENTS, "f4"),
    }

    def call() -> None:
        ours.send(step)
        ours.recv()

    try:
        for _ in range(20):
            call()
        yield "step", [_time(call) for _ in range(rounds * STEPS)]
    finally:
        ours.send(None)
        process.join(5)


def _serve(connection: Any) -> None:
    while connection.recv() is not None:
        connection.send(True)


def _time(f: Any) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
