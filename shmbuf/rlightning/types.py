"""What environments and policies hand over, with rlightning's fields and methods."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["BFloat16", "EnvMeta", "EnvRet", "PolicyResponse", "latency", "map_leaves"]


class BFloat16(np.ndarray):
    """uint16 whose bits are bfloat16 numbers: what ``.numpy()`` makes of such tensors. True uint16 stays a plain array."""


def map_leaves(f: Callable[[Any], Any], value: Any) -> Any:
    """``f`` of each leaf of nested mappings, lists and tuples; plain dicts, lists and tuples come back."""
    if isinstance(value, Mapping):
        return {k: map_leaves(f, v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(f, v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(f, v) for v in value)
    return f(value)


def latency(sent_ns: Any, now_ns: int | None = None) -> float:
    """Seconds since a stamp of ``time.time_ns()``, at least 0; 0.0 of what is no stamp."""
    try:
        return max(0.0, ((time.time_ns() if now_ns is None else now_ns) - sent_ns) / 1e9)
    except TypeError:
        return 0.0


def _to(device: str) -> Callable[[Any], Any]:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, BFloat16):
            leaf = torch.from_numpy(leaf.view(np.ndarray)).view(torch.bfloat16)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return move


def _as_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    if leaf.dtype == torch.bfloat16:
        return leaf.contiguous().view(torch.uint16).numpy().view(BFloat16)
    return leaf.numpy()


class _Fields(type):
    @property
    def _fields(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]


@dataclasses.dataclass
class EnvMeta(metaclass=_Fields):
    """What an environment is. num_envs: how many of them step together under this one id; None: one."""

    env_id: str | None = None
    action_space: Any = None
    observation_space: Any = None
    num_envs: int | None = None


@dataclasses.dataclass
class EnvRet:
    """What a step of an environment gave: the observation, and the reward and flags of the step that led to it.

    Args:
        env_id: whose. Of N environments that step together one id, and every leaf is [N, ...].
        observation: array, tensor, number, or a nested dict of these.
        last_reward, last_terminated, last_truncated: of the step that led to the observation; after a reset they say nothing.
        info: anything; the default chain stores none of it.
        _extra: more keys to store.
        ts_env_sent_ns: ``time.time_ns()``; never stored.
    """

    env_id: str
    observation: Any
    last_reward: Any = 0.0
    last_terminated: Any = False
    last_truncated: Any = False
    info: Any = dataclasses.field(default_factory=dict)
    _extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    ts_env_sent_ns: int = dataclasses.field(default_factory=time.time_ns)

    def __hash__(self) -> int:
        return hash(self.env_id)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Names of what is handed on: all but the id and the stamp."""
        return ENV_FIELDS

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the extra keys. KeyError: one of these has a field's name."""
        out = {name: getattr(self, name) for name in ENV_FIELDS}
        for key, value in self._extra.items():
            if key in out:
                raise KeyError(f"_extra of env {self.env_id!r} has {key!r}, which is a field's name: name it otherwise")
            out[key] = value
        return out

    def _mapped(self, f: Callable[[Any], Any]) -> EnvRet:
        names = (*ENV_FIELDS, "_extra")
        return dataclasses.replace(self, **{name: map_leaves(f, getattr(self, name)) for name in names})

    def cpu(self) -> EnvRet:
        """A copy with tensors in host memory."""
        return self._mapped(_to("cpu"))

    def cuda(self) -> EnvRet:
        """A copy with tensors in device memory."""
        return self._mapped(_to("cuda"))

    def numpy(self) -> EnvRet:
        """A copy with arrays in place of tensors; bfloat16 as `BFloat16`."""
        return self._mapped(_as_numpy)

    def mark_env_sent(self) -> None:
        """Stamp it with the present time."""
        self.ts_env_sent_ns = time.time_ns()

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Seconds since the stamp, at least 0."""
        return latency(self.ts_env_sent_ns, now_ns)


ENV_FIELDS = ("observation", "last_reward", "last_terminated", "last_truncated", "info")


class PolicyResponse(SimpleNamespace):
    """What a policy answered to an observation: ``PolicyResponse(env_id, action=..., log_prob=...)``; any names.

    ts_policy_sent_ns: ``time.time_ns()``; never stored.
    """

    def __init__(self, env_id: str, **answers: Any):
        super().__init__(env_id=env_id, **{"ts_policy_sent_ns": time.time_ns(), **answers})

    def __reduce__(self) -> tuple:
        return _unpickled, (type(self), self.__dict__)

    def to_dict(self) -> dict[str, Any]:
        """All but the id and the stamp, in the order in which they were given."""
        return {k: v for k, v in self.__dict__.items() if k not in ("env_id", "ts_policy_sent_ns")}

    def _map(self, f: Callable[[Any], Any]) -> PolicyResponse:
        self.__dict__.update({k: map_leaves(f, v) for k, v in self.to_dict().items()})
        return self

    def cpu(self) -> PolicyResponse:
        """Itself, with tensors moved to host memory."""
        return self._map(_to("cpu"))

    def cuda(self) -> PolicyResponse:
        """Itself, with tensors moved to device memory."""
        return self._map(_to("cuda"))

    def numpy(self) -> PolicyResponse:
        """Itself, with arrays in place of tensors; bfloat16 as `BFloat16`."""
        return self._map(_as_numpy)

    def mark_policy_sent(self) -> None:
        """Stamp it with the present time."""
        self.ts_policy_sent_ns = time.time_ns()

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Seconds since the stamp, at least 0."""
        return latency(self.ts_policy_sent_ns, now_ns)


def _unpickled(cls: type[PolicyResponse], attributes: dict[str, Any]) -> PolicyResponse:
    self = cls.__new__(cls)
    self.__dict__.update(attributes)
    return self
