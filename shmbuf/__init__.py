"""shmbuf: a replay buffer that many processes share. `import shmbuf` loads no torch; the names below load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        (
            "BufferExists",
            "BufferFormatError",
            "BufferInUse",
            "BufferNotFound",
            "CheckpointError",
            "CommitInterrupted",
            "CommitPending",
            "ConcurrentUse",
            "DeviceError",
            "Lapped",
            "NotEnoughMemory",
            "NotEnoughRows",
            "RingFull",
            "SchemaError",
            "ShmbufError",
            "StorageLost",
            "TooManyCollectors",
            "TooManyOpenFiles",
            "TooManyPins",
        ),
        "errors",
    ),
    "Schema": "schema",
    "destroy": "segment",
    "Buffer": "buffer",
    "Pin": "pins",
    **dict.fromkeys(("Estimate", "estimate"), "memory"),
    "TrajectorySpan": "trajectories",
    **dict.fromkeys(
        (
            "Trajectory",
            "TrajectoryPredicate",
            "filter_trajectories",
            "find_start_stop_traj",
            "iter_trajectories",
            "traj",
        ),
        "query",
    ),
    "Ticket": "ticket",
    "ShmStorage": "storage",
    **dict.fromkeys(("RandomSampler", "PrioritizedSampler"), "samplers"),
    **dict.fromkeys(
        ("SamplerWithoutReplacement", "ConsumingSampler", "NewestSampler", "StalenessAwareSampler", "SamplerEnsemble"),
        "samplers",
    ),
    **dict.fromkeys(("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler"), "samplers"),
    **dict.fromkeys(("SampleUnit", "Transition", "Sequence", "NStep"), "samplers"),
    **dict.fromkeys(("ReplayBufferEnsemble", "StorageEnsemble"), "ensemble"),
    **dict.fromkeys(
        ("ParameterScheduler", "LambdaScheduler", "LinearScheduler", "StepScheduler", "SchedulerList"), "schedulers"
    ),
    **dict.fromkeys(
        ("RoundRobinWriter", "TensorDictRoundRobinWriter", "TensorDictMaxValueWriter", "ImmutableDatasetWriter"),
        "writers",
    ),
    **dict.fromkeys(
        ("Transform", "Compose", "DTypeCastTransform", "DoubleToFloat", "ExcludeTransform", "SelectTransform"),
        "transforms",
    ),
    **dict.fromkeys(
        ("DeviceCastTransform", "RenameTransform", "ObservationNorm", "RewardScaling", "ToTensorImage"),
        "transforms",
    ),
    **dict.fromkeys(("Reward2GoTransform", "MultiStepTransform", "CatFrames", "BurnInTransform"), "transforms"),
    **dict.fromkeys(("RateLimiter", "MinSize", "Queue"), "limiter"),
    "ShardedReplayBuffer": "distributed",
    **dict.fromkeys(
        (
            "attach",
            "ReplayBuffer",
            "TensorDictReplayBuffer",
            "RemoteTensorDictReplayBuffer",
            "PrioritizedReplayBuffer",
            "TensorDictPrioritizedReplayBuffer",
        ),
        "replay_buffer",
    ),
}
__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from shmbuf.buffer import Buffer
    from shmbuf.distributed import ShardedReplayBuffer
    from shmbuf.ensemble import ReplayBufferEnsemble, StorageEnsemble
    from shmbuf.errors import *  # noqa: F403
    from shmbuf.limiter import MinSize, Queue, RateLimiter
    from shmbuf.memory import Estimate, estimate
    from shmbuf.pins import Pin
    from shmbuf.query import (
        Trajectory,
        TrajectoryPredicate,
        filter_trajectories,
        find_start_stop_traj,
        iter_trajectories,
        traj,
    )
    from shmbuf.replay_buffer import (
        PrioritizedReplayBuffer,
        RemoteTensorDictReplayBuffer,
        ReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        attach,
    )
    from shmbuf.samplers import (
        ConsumingSampler,
        NewestSampler,
        NStep,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        SamplerEnsemble,
        SamplerWithoutReplacement,
        SampleUnit,
        Sequence,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StalenessAwareSampler,
        Transition,
    )
    from shmbuf.schedulers import LambdaScheduler, LinearScheduler, ParameterScheduler, SchedulerList, StepScheduler
    from shmbuf.schema import Schema
    from shmbuf.segment import destroy
    from shmbuf.storage import ShmStorage
    from shmbuf.ticket import Ticket
    from shmbuf.trajectories import TrajectorySpan
    from shmbuf.transforms import (
        BurnInTransform,
        CatFrames,
        Compose,
        DeviceCastTransform,
        DoubleToFloat,
        DTypeCastTransform,
        ExcludeTransform,
        MultiStepTransform,
        ObservationNorm,
        RenameTransform,
        Reward2GoTransform,
        RewardScaling,
        SelectTransform,
        ToTensorImage,
        Transform,
    )
    from shmbuf.writers import (
        ImmutableDatasetWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
    )


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shmbuf' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shmbuf.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
