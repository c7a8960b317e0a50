"""What the tests of many nodes share. Functions here run in processes of any node."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

WIDTH = 3
_NOTICES_DEATHS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 6,
}


class Nodes:
    """A cluster of small nodes, of which the first is this process's."""

    def __init__(self, n: int):
        head = {**self._small(), "include_dashboard": False, "_system_config": _NOTICES_DEATHS}
        self._cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._added: dict[str, Any] = {}
        self.killed: list[str] = []
        for _ in range(n - 1):
            self.add()
        ray.init(address=self._cluster.address, log_to_driver=False)
        self.here = ray.get_runtime_context().get_node_id()

    @staticmethod
    def _small() -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": 80 << 20}

    @property
    def others(self) -> list[str]:
        return list(self._added)

    @property
    def all(self) -> list[str]:
        return [self.here, *self.others]

    def add(self) -> str:
        node = started(lambda: self._cluster.add_node(**self._small()))
        self._added[node.node_id] = node
        return node.node_id

    def kill(self, node: str) -> None:
        """As a machine goes: the node, and at the same moment what runs on it."""
        dying = self._added.pop(node)
        raylet = dying.all_processes["raylet"][0].process.pid
        running = psutil.Process(raylet).children(recursive=True)
        self._cluster.remove_node(dying, allow_graceful=False)
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.killed.append(node)

    def run(self, node: str, f: Callable[..., Any], *args: Any) -> Any:
        """What f returns in a process of that node."""
        return ray.get(self.start(node, f, *args), timeout=120)

    def start(self, node: str, f: Callable[..., Any], *args: Any) -> Any:
        task = ray.remote(num_cpus=0, max_retries=0)(f)
        return task.options(scheduling_strategy=there(node)).remote(*args)

    def stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """Ray gives a node 30 s, which on a busy machine is not enough at times."""
    for _ in range(2):
        try:
            return start()
        except Exception as e:
            if "timed out during startup" not in str(e):
                raise
    return start()


def there(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def rows(first: int, n: int, **more: Any) -> TensorDict:
    """Rows that check themselves: number i has i everywhere."""
    k = torch.arange(first, first + n)
    obs = k[:, None].expand(n, WIDTH).float().clone()
    td = TensorDict({"k": k, "obs": obs, "next": {"obs": obs + 0.5}}, batch_size=[n])
    return td.update({key: torch.as_tensor(value) for key, value in more.items()})


def whole(td: TensorDict) -> bool:
    """Whether each row is one that was put, of a piece."""
    k = td["k"].float()[:, None].expand(-1, WIDTH)
    return bool((td["obs"] == k).all() and (td["next", "obs"] == k + 0.5).all())


def until(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``look()`` says when it first says something; to catch hangs, not to measure."""
    give_up = time.monotonic() + seconds
    while not (said := look()):
        assert time.monotonic() < give_up, f"not within {seconds:g} s"
        time.sleep(0.05)
    return said


def kill_actor(actor: Any) -> int:
    """SIGKILL to its process."""
    pid = ray.get(actor.pid.remote(), timeout=60)
    os.kill(pid, signal.SIGKILL)
    return pid


def restarted(actor: Any, pid: int) -> bool:
    try:
        return ray.get(actor.pid.remote(), timeout=10) != pid
    except ray.exceptions.RayError:
        return False


def extend(rb: Any, first: int, n: int, more: dict[str, Any]) -> tuple[torch.Tensor, bool]:
    """Indices, and whether this process worked in the memory itself."""
    index = rb.extend(rows(first, n, **more))
    return index, any(s["local"] for s in rb.shards()) if hasattr(rb, "shards") else rb.local is not None
