"""From an environment's return and a policy's response to a row: rlightning's chain of functions, and its default links.

One step is a dict of both parties' keys; an episode is T + 1 steps, of which T rows are made: a row holds the observation and
action of its step, and of the next step the observation, the reward and the flags, which are there called ``last_…``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shmbuf.rlightning.types import ENV_FIELDS, BFloat16, EnvRet, PolicyResponse
from shmbuf.schema import DTYPES

__all__ = [
    "default_env_ret_preprocess_fn",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
    "identity",
    "places",
]


NUMBERS = (bool, int, float, np.generic)


def is_number(value: Any) -> bool:
    """One that has no dtype of its own, or one that an array of such may go on with: Python's and numpy's."""
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
    )


FLOATS = frozenset(name for name in DTYPES if getattr(torch, name).is_floating_point or getattr(torch, name).is_complex)
_INTS = {name: torch.iinfo(getattr(torch, name)) for name in DTYPES if name not in FLOATS and name != "bool"}
_RANGE = {name: (i.min, i.max) for name, i in _INTS.items()}


def fits(value: Any, dtype: str) -> bool:
    """Whether a number can be stored so: of floats no more is lost than of Python's, of others nothing."""
    if isinstance(value, np.generic):
        value = value.item()
    if dtype == "bool":
        return bool(value in (0, 1))
    if dtype in FLOATS:
        return isinstance(value, float) or abs(value) < 1 << 127
    least, most = _RANGE[dtype]
    return isinstance(value, int) and least <= value <= most


_NONE: Mapping[tuple[str, ...], str] = {}


def identity(value: Any) -> Any:
    return value


def default_env_ret_preprocess_fn(
    data: dict[str, Any], env_ret: EnvRet, obs_preprocessor: Callable, reward_preprocessor: Callable
) -> dict[str, Any]:
    """Put the return's fields and extra keys into the step, observation and reward preprocessed. TypeError: no EnvRet."""
    if not isinstance(env_ret, EnvRet):
        raise TypeError(f"env_ret is an EnvRet, not {type(env_ret).__name__}")
    fields = env_ret.to_dict()
    fields["observation"] = obs_preprocessor(env_ret.observation)
    fields["last_reward"] = reward_preprocessor(env_ret.last_reward)
    data.update(fields)
    return data


def default_policy_resp_preprocess_fn(data: dict[str, Any], policy_resp: PolicyResponse) -> dict[str, Any]:
    """Put what the policy answered into the step; it wins over the environment's keys. TypeError: no PolicyResponse."""
    if not isinstance(policy_resp, PolicyResponse):
        raise TypeError(f"policy_resp is a PolicyResponse, not {type(policy_resp).__name__}")
    data.update(policy_resp.to_dict())
    return data


def default_preprocess_fn(
    data: dict[str, Any],
    env_ret: EnvRet | None = None,
    policy_resp: PolicyResponse | None = None,
    obs_preprocessor: Callable = identity,
    reward_preprocessor: Callable = identity,
    env_ret_preprocess_fn: Callable = default_env_ret_preprocess_fn,
    policy_resp_preprocess_fn: Callable = default_policy_resp_preprocess_fn,
) -> dict[str, Any]:
    """The step with what is given put into it, the environment's first. ValueError: neither, or of different environments."""
    if env_ret is None and policy_resp is None:
        raise ValueError("At least one of env_ret and policy_resp is needed")
    if env_ret is not None and policy_resp is not None:
        theirs, answers = getattr(env_ret, "env_id", None), getattr(policy_resp, "env_id", None)
        if theirs != answers:
            raise ValueError(f"Mismatched env_id: the env_ret is of {theirs!r}, the policy_resp of {answers!r}")
    if env_ret is not None:
        data = env_ret_preprocess_fn(data, env_ret, obs_preprocessor, reward_preprocessor)
    if policy_resp is not None:
        data = policy_resp_preprocess_fn(data, policy_resp)
    return data


@functools.lru_cache(4096)
def places(name: str) -> tuple[tuple[str, int], ...]:
    """Under which names a step's key goes into rows, and of which step each: 0: the row's own, 1: the one after it."""
    if "info" in name:
        return ()
    if name == "observation":
        return ("observation", 0), ("next_observation", 1)
    next_one = ((name.removeprefix("last_"), 1),) if name.startswith("last_") else ()
    return next_one if name in ENV_FIELDS else (*next_one, (name, 0))


def default_postprocess_fn(episode: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Rows of an episode: of each key's T + 1 values tensors [T, ...], nested as the values are.

    Keys with "info" in their name are dropped; ``last_x`` becomes ``x``, of the next step; "observation" also gives
    "next_observation"; all others are of the row's own step, so what the policy answered last is not stored.
    Python floats become float32, integers int64, bools bool.
    """
    return rows_of(episode, {})


def rows_of(episode: Mapping[str, Sequence[Any]], scalars: Mapping[tuple[str, ...], str]) -> dict[str, Any]:
    """`default_postprocess_fn`, with the dtypes that numbers become under keys of rows, where these are decided."""
    out: dict[str, Any] = {}
    for name, values in episode.items():
        for where, step in places(name):  # what is not stored need not fit: after a reset, last_… may be anything
            out[where] = stack(name, values[1:] if step else values[:-1], (where,), scalars)
    return out


def stack(
    name: str, values: Sequence[Any], key: tuple[str, ...] = (), scalars: Mapping[tuple[str, ...], str] = _NONE
) -> Any:
    """Values of all steps as one tensor, or a nested dict of them. ValueError names the key of those that cannot be."""
    first = values[0]
    if isinstance(first, Mapping):
        odd = next((v for v in values if not isinstance(v, Mapping) or v.keys() != first.keys()), None)
        if odd is not None:
            shown = list(odd) if isinstance(odd, Mapping) else type(odd).__name__
            raise ValueError(f"key {name!r}: the first step has {list(first)}, another {shown}")
        return {k: stack(f"{name}.{k}", [v[k] for v in values], (*key, k), scalars) for k in first}
    if key in scalars and all(is_number(v) for v in values):
        dtype = scalars[key]
        if (odd := next((v for v in values if not fits(v, dtype)), None)) is not None:
            raise ValueError(f"key {name!r}: got the {type(odd).__name__} {odd!r}, expected {dtype}")
        plain = [v.item() if isinstance(v, np.generic) else v for v in values]
        return torch.tensor(plain, dtype=getattr(torch, dtype))
    if all(isinstance(v, NUMBERS) for v in values) and (
        len({type(v) for v in values}) > 1 or not isinstance(first, np.generic)
    ):
        return torch.tensor([v.item() if isinstance(v, np.generic) else v for v in values])
    tensors = [as_tensor(name, v) for v in values]
    for i, t in enumerate(tensors):
        if (t.dtype, t.shape) != (tensors[0].dtype, tensors[0].shape):
            raise ValueError(
                f"key {name!r}: {tensors[0].dtype}{list(tensors[0].shape)} in the first step, {t.dtype}{list(t.shape)} in step {i}"
            )
    return torch.stack(tensors)


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """A leaf as a tensor of its own dtype. ValueError names the key of what is none."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, BFloat16):
        return torch.from_numpy(np.ascontiguousarray(value.view(np.ndarray))).view(torch.bfloat16)
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"key {name!r}: {type(value).__name__} is no array, tensor or number: {e}") from None
