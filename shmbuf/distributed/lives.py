"""The beginning and the end of an actor that keeps a segment."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shmbuf.distributed.places import Place
from shmbuf.distributed.rays import Late, ask, need_ray

_LOOK = 1.0
_SAY, _OPENING = 60.0, 600.0
"""Seconds until it is said that Ray has not begun an actor, for which it may find no place, and until that is an error."""
PLACES = frozenset({"scheduling_strategy", "resources", "num_gpus", "label_selector", "accelerator_type"})
"""Options with one of these say where the actor is to be."""


def opened(keeper: Any, config: Mapping[str, Any]) -> Place:
    """Its place, when the segment is made. Says so if Ray does not begin the actor. Raises Gone, Silent, RuntimeError."""
    open_, pid = (getattr(keeper, m).options(concurrency_group="looking").remote() for m in ("open", "pid"))
    since, said = time.monotonic(), False
    while True:
        try:
            return ask(open_, _LOOK)
        except Late:
            waited = time.monotonic() - since
        if waited < _SAY:
            continue
        try:
            ask(pid, 0.0)
            return ask(open_)  # it is there, and the making takes its time
        except Late:
            pass
        text = _no_place(config, waited)
        if waited > _OPENING:
            raise RuntimeError(f"the actor of the replay buffer could not be started: {text}")
        if not said:
            warnings.warn(f"{text}. It is waited for, {_OPENING:g} s in all", RuntimeWarning, stacklevel=4)
            said = True


def _no_place(config: Mapping[str, Any], waited: float) -> str:
    wanted = {k: v for k, v in config.items() if k in PLACES or k in ("num_cpus", "memory")}
    asked = {k: getattr(v, "node_id", v) for k, v in wanted.items()}
    text = f"Ray has not begun the actor of the replay buffer in {waited:.3g} s, it may have no place for it: it asks for {asked}"
    with contextlib.suppress(Exception):
        ray = need_ray()
        have, free = ray.cluster_resources(), ray.available_resources()
        amounts = {k: f"{free.get(k, 0):g} of {v:g}" for k, v in sorted(have.items()) if ":" not in k}
        text += f"; free in the cluster are {amounts}"
    return text


class Life:
    """Of a keeper. It ends once: with `end`; when nobody in this process has its owner, or a client that this gave out, any more; or with
    the interpreter."""

    def __init__(self, keeper: Any):
        at_exit = functools.partial(_ended_at_exit, weakref.ref(self))
        self._gone = weakref.finalize(self, _left_alone, keeper, os.getpid(), at_exit)
        self._gone.atexit = False
        atexit.register(at_exit)  # after Ray's own, so it is called before

    def end(self, timeout: float) -> None:
        found = self._gone.detach()
        if found is not None:
            keeper, pid, at_exit = found[2]
            atexit.unregister(at_exit)
            end(keeper, pid, timeout)


def _ended_at_exit(life: Any) -> None:
    it = life()
    if it is not None:
        it.end(10.0)


def _left_alone(keeper: Any, pid: int, at_exit: Any) -> None:
    atexit.unregister(at_exit)
    apart(end, keeper, pid, 10.0)


def end(keeper: Any, pid: int, timeout: float) -> None:
    ray = need_ray()
    if pid != os.getpid() or not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        ask(keeper.destroy.options(concurrency_group="looking").remote(), timeout)
    with contextlib.suppress(Exception):
        ray.kill(keeper)


def apart(work: Callable[..., Any], *args: Any) -> None:
    """By a thread: the garbage collector may call in the middle of anything, Ray's own work too."""
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        _thread.start_new_thread(work, args)
