"""What of Ray is used: where this process is, asking an actor, and what its silence means."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import Any

from shmbuf.errors import StorageLost

NAMESPACE = "shmbuf"  # of named actors
NODE_DIGITS = 12  # of a node's id, in the names of its segments


class Gone(Exception):
    """The actor is dead for good, or its node is."""


class Silent(Exception):
    """No answer: it is restarting, or its node does not answer in time. What was asked may have been done."""


class Late(Silent):
    """No answer yet."""


def need_ray() -> Any:
    """The module. Raises ImportError, which says what to install."""
    try:
        return importlib.import_module("ray")
    except ImportError as e:
        raise ImportError(
            "buffers of many machines need Ray: pip install 'shmbuf[ray]'. Processes of this machine need none: shmbuf.attach(name)"
        ) from e


def running(init: Mapping[str, Any] | None = None) -> Any:
    """Ray, which this process is connected to; init: how to, if it is not yet."""
    ray = need_ray()
    if not ray.is_initialized():
        ray.init(**(init or {}))
    return ray


def here() -> str:
    """The id of this process's node."""
    return running().get_runtime_context().get_node_id()


def short(node: str) -> str:
    return node[:NODE_DIGITS]


def on(node: str) -> Any:
    """Only there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def alive_nodes() -> list[str]:
    """Ids, the head's first, then in order."""
    nodes = [n for n in running().nodes() if n["Alive"]]
    head = [n["NodeID"] for n in nodes if any("head" in r for r in n["Resources"])]
    return head + sorted(n["NodeID"] for n in nodes if n["NodeID"] not in head)


def ask(ref: Any, timeout: float | None = None) -> Any:
    """The answer. What the actor raised is raised as itself; Gone and Silent say why there is none within ``timeout`` seconds."""
    ray = need_ray()
    from ray import exceptions as e

    try:
        return ray.get(ref, timeout=timeout)
    except e.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (Gone, Silent)) or not isinstance(cause, Exception):
            raise Silent(str(error)) from error
        raise cause from error
    except e.GetTimeoutError as error:
        raise Late(first_line(error)) from error
    except (e.ActorUnavailableError, e.ObjectLostError) as error:
        raise Silent(first_line(error)) from error
    except (e.RayActorError, e.ActorUnschedulableError, e.NodeDiedError, e.WorkerCrashedError) as error:
        raise Gone(first_line(error)) from error


def check_process(pid: int, what: str) -> None:
    """Raises RuntimeError in the child of a fork: Ray's connection, its threads and locks that were held stayed in the parent."""
    if os.getpid() != pid:
        raise RuntimeError(
            f"{what}: this process {os.getpid()} was forked from process {pid}, whose connection to Ray does not work here: "
            "spawn the process, or start it through Ray, and send it the handle (it pickles)"
        )


def check_alive(node: str) -> None:
    """Raises Gone if Ray knows that node to be dead."""
    if node not in alive_nodes():
        raise Gone("its node died")


def first_line(error: object) -> str:
    """Of what Ray says, which goes on for long; and what was raised in the end, if that is in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception|Interrupt)\b.*:", line)]
    said = " ".join(lines[:1]).split(" (pid=")[0][:200]
    return f"{said}: {raised[-1]:.600}" if raised else said


def lost(what: str, node: str, why: object) -> StorageLost:
    return StorageLost(f"{what} on node {short(node)} is gone: {why}")
