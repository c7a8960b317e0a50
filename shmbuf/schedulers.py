"""Annealing of a sampler's attributes (beta, max_staleness, …), with TorchRL's names and signatures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shmbuf.replay_buffer import ReplayBuffer
from shmbuf.samplers import Sampler

Number = Any  # an int, a float or a tensor


class ParameterScheduler:
    """Sets an attribute of a sampler at every `step`. Only this process's sampler: others anneal their own.

    Args:
        obj: a replay buffer, whose sampler of the moment is adjusted, or a sampler.
        param_name: of the attribute, e.g. "beta". An attribute that is an int stays one (rounded).
        min_value, max_value: bounds of what is set; None: none.

    Raises:
        TypeError, ValueError: not something with a sampler; no such attribute, or not a number.
    """

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        min_value: float | None = None,
        max_value: float | None = None,
    ):
        if not isinstance(obj, (ReplayBuffer, Sampler)):
            raise TypeError(f"a scheduler takes a ReplayBuffer or a Sampler, not {type(obj).__name__}")
        self.sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        self.param_name = param_name
        if not hasattr(self.sampler, param_name):
            raise ValueError(f"{type(self.sampler).__name__} has no attribute {param_name!r}")
        value = getattr(self.sampler, param_name)
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
            raise ValueError(f"{param_name}={value!r} of {type(self.sampler).__name__} is no number")
        low, high = (-math.inf if min_value is None else min_value), (math.inf if max_value is None else max_value)
        if not low <= high:
            raise ValueError(f"min_value={min_value!r} is above max_value={max_value!r}")
        self._min_val, self._max_val = low, high
        self.initial_val: Number = value.clone() if isinstance(value, torch.Tensor) else value
        self._whole = isinstance(value, int)
        self._exact: Number = self.initial_val  # not rounded
        self._step_cnt = 0

    def step(self) -> None:
        """Set the attribute to its next value."""
        self._step_cnt += 1
        value = self._step()
        if isinstance(value, torch.Tensor):
            value = value.clamp(self._min_val, self._max_val)
        else:
            value = min(max(value, self._min_val), self._max_val)
        self._exact = value
        self._set()

    def _step(self) -> Number:
        raise NotImplementedError

    def _set(self) -> None:
        setattr(self.sampler, self.param_name, round(self._exact) if self._whole else self._exact)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: how many steps were made, from where, and the value now."""
        return {"step_count": self._step_cnt, "initial_value": self.initial_val, "value": self._exact}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`; the attribute gets the value it had then."""
        self._step_cnt = int(state_dict["step_count"])
        self.initial_val, self._exact = state_dict["initial_value"], state_dict["value"]
        self._set()


class LambdaScheduler(ParameterScheduler):
    """initial value × ``lambda_fn(step)``, step = 1, 2, …"""

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], float],
        min_value: float | None = None,
        max_value: float | None = None,
    ):
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = lambda_fn

    def _step(self) -> Number:
        return self.initial_val * self.lambda_fn(self._step_cnt)


class LinearScheduler(ParameterScheduler):
    """From the initial value to ``final_value`` in ``num_steps`` equal steps, where it stays."""

    def __init__(self, obj: ReplayBuffer | Sampler, param_name: str, final_value: float, num_steps: int):
        super().__init__(obj, param_name)
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps!r}: at least 1")
        initial = self.initial_val
        self.final_val = torch.as_tensor(final_value).to(initial) if isinstance(initial, torch.Tensor) else final_value
        self.num_steps = num_steps

    def _step(self) -> Number:
        if self._step_cnt >= self.num_steps:
            return self.final_val
        return self.initial_val + (self.final_val - self.initial_val) / self.num_steps * self._step_cnt


class StepScheduler(ParameterScheduler):
    """Every ``n_steps`` the value is multiplied by ``gamma`` ("multiplicative"), or gamma is added ("additive")."""

    def __init__(
        self,
        obj: ReplayBuffer | Sampler,
        param_name: str,
        gamma: float = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: float | None = None,
        max_value: float | None = None,
    ):
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in ("multiplicative", "additive"):
            raise ValueError(f"mode={mode!r}: multiplicative or additive")
        if n_steps < 1:
            raise ValueError(f"n_steps={n_steps!r}: at least 1")
        self.gamma, self.n_steps, self.mode = gamma, n_steps, mode

    def _step(self) -> Number:
        now = getattr(self.sampler, self.param_name)
        value = self._exact if self._whole and round(self._exact) == now else now  # somebody else may have set it
        if self._step_cnt % self.n_steps:
            return value
        return value + self.gamma if self.mode == "additive" else value * self.gamma


class SchedulerList:
    """Several schedulers that step together."""

    def __init__(self, schedulers: ParameterScheduler | Iterable[ParameterScheduler]):
        self.schedulers = [schedulers] if isinstance(schedulers, ParameterScheduler) else list(schedulers)

    def append(self, scheduler: ParameterScheduler) -> None:
        self.schedulers.append(scheduler)

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): s.state_dict() for i, s in enumerate(self.schedulers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict) != len(self.schedulers):
            raise ValueError(f"the state of {len(state_dict)} schedulers, there are {len(self.schedulers)}")
        for i, scheduler in enumerate(self.schedulers):
            scheduler.load_state_dict(state_dict[str(i)])
