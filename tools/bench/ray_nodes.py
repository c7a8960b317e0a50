"""Many machines, as two local Ray nodes: samples on the buffer's node and across nodes beside TorchRL's, steps beside an actor call each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import samplers
from .isolate import Emitter
from .peers import OURS
from .plan import ACTOR, RAY_FACES
from .rlightning import ENVIRONMENTS
from .sampling import take_turns, time_calls
from .settings import Settings

ROWS, BATCH = 200_000, 256


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    import ray
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    os.chdir(
        spec["scratch"]
    )  # Ray's workers look for packages where the driver is, and the checkout's shmbuf is not built
    # Long turns: what is ready because somebody else had his turn does not count.
    settings = replace(settings, turn_seconds=0.3, turns=max(3, settings.turns // 8))
    node = {"num_cpus": 1, "object_store_memory": 300 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node).node_id
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    made: list[Callable[[], object]] = []
    try:
        name, rows = Path(spec["scratch"]).name, _rows(int(ROWS * settings.fill))
        for figure, names in (("sample", RAY_FACES), ("step", (OURS, ACTOR))):
            entrants = {}
            for who in names:
                emit.at(who)
                try:
                    call, end = _CALLS[figure, who](f"{name}-{len(made)}", other, rows)
                    made.append(end)
                    time_calls(contender := samplers.Contender(call), 20)
                    entrants[who] = contender
                except Exception as error:
                    emit.error(f"ray/{figure}/{who}", f"{type(error).__name__}: {error}")
            for who, seconds in take_turns(entrants, settings, emit).items():
                emit.values(f"ray/{figure}/{who}", seconds)
    finally:
        for end in made:
            end()
        ray.shutdown()
        cluster.shutdown()


def _rows(n: int) -> Any:
    from tensordict import TensorDict

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


def _there(node: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _direct(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    import shmbuf

    rb = shmbuf.TensorDictReplayBuffer(storage=shmbuf.ShmStorage(len(rows), name=name), batch_size=BATCH)
    rb.extend(rows)
    return rb.sample, lambda: rb.destroy(force=True)


def _service(name: str, node: str, rows: Any, prefetch: int = 0) -> tuple[Callable[[], object], Callable[[], object]]:
    import shmbuf

    rb = shmbuf.TensorDictReplayBuffer(
        storage=shmbuf.ShmStorage(len(rows), name=name),
        batch_size=BATCH,
        prefetch=prefetch,
        service_backend="ray",
        service_backend_options={"remote_config": _there(node)},
    )
    rb.extend(rows)
    return rb.sample, rb.shutdown


def _ahead(name: str, node: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    return _service(name, node, rows, 3)


def _near(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    import ray

    return _service(name, ray.get_runtime_context().get_node_id(), rows)


def _shards(prefetch: int) -> Callable[..., tuple[Callable[[], object], Callable[[], object]]]:
    def make(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
        import shmbuf

        storage = shmbuf.ShmStorage(len(rows), name=name)
        rb = shmbuf.ShardedReplayBuffer(storage=storage, batch_size=BATCH, prefetch=prefetch)
        for k in (0, 1):
            rb.shard(k).extend(rows[: len(rows) // 2])
        return rb.sample, rb.shutdown

    return make


def _torchrl_ahead(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    return _torchrl(name, other, rows, 3)


def _torchrl(
    name: str, other: str, rows: Any, prefetch: int | None = None
) -> tuple[Callable[[], object], Callable[[], object]]:
    from functools import partial

    from torchrl.data import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer

    rb = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, len(rows)),
        batch_size=BATCH,
        prefetch=prefetch,
        remote_config=_there(other),
        ray_init_config={},
    )
    rb.extend(rows)
    return rb.sample, rb.close


def _step() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"joints": 29, "base": 13, "command": 6, "action": 12}
    return {k: rng.standard_normal((ENVIRONMENTS, n), "f4") for k, n in shapes.items()}


def _put(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Into this node's shard, as collectors put: the ring is full all the time, so it is what storing a step takes."""
    from tensordict import TensorDict

    import shmbuf

    storage = shmbuf.ShmStorage(24 * ENVIRONMENTS, name=name)
    rb = shmbuf.ShardedReplayBuffer(storage=storage, batch_size=BATCH, nodes=None)
    step = TensorDict({k: torch.from_numpy(v) for k, v in _step().items()}, [ENVIRONMENTS])
    for _ in range(30):  # the memory is touched
        rb.extend(step)
    return lambda: rb.put(step), rb.shutdown


class _Storage:
    """What rlightning's remote storage does at least: it takes the step and copies it into its rows."""

    def __init__(self, step: dict[str, np.ndarray], steps: int):
        self.rows = {k: np.zeros((steps, *v.shape), v.dtype) for k, v in step.items()}
        self.at, self.steps = 0, steps

    def add(self, step: dict[str, np.ndarray]) -> None:
        for k, v in step.items():
            self.rows[k][self.at] = v
        self.at = (self.at + 1) % self.steps


def _actor(name: str, other: str, rows: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    import ray

    here = ray.get_runtime_context().get_node_id()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the worker has no checkout to import it from
    step = _step()
    actor = ray.remote(**_there(here))(_Storage).remote(step, 24)
    return lambda: ray.get(actor.add.remote(step)), lambda: ray.kill(actor)


_CALLS = {
    ("sample", "local"): _direct,
    ("sample", OURS): _near,
    ("sample", "shmbuf across"): _service,
    ("sample", "shmbuf across, ahead"): _ahead,
    ("sample", "shmbuf shards"): _shards(0),
    ("sample", "shmbuf shards ahead"): _shards(3),
    ("sample", "torchrl"): _torchrl,
    ("sample", "torchrl ahead"): _torchrl_ahead,
    ("step", OURS): _put,
    ("step", ACTOR): _actor,
}
