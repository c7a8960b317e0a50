"""Transforms of rows on their way into the buffer and out of it. They need no TorchRL, and TorchRL's own are taken as well."""

from shmbuf.transforms.base import (
    CallableTransform,
    Compose,
    ForeignTransform,
    InvertTransform,
    Transform,
    as_transform,
)
from shmbuf.transforms.simple import (
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    SelectTransform,
    ToTensorImage,
)
from shmbuf.transforms.time import BurnInTransform, CatFrames, MultiStepTransform, Reward2GoTransform

__all__ = [
    "BurnInTransform",
    "CallableTransform",
    "CatFrames",
    "Compose",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DoubleToFloat",
    "ExcludeTransform",
    "ForeignTransform",
    "InvertTransform",
    "MultiStepTransform",
    "ObservationNorm",
    "RenameTransform",
    "Reward2GoTransform",
    "RewardScaling",
    "SelectTransform",
    "ToTensorImage",
    "Transform",
    "as_transform",
]
