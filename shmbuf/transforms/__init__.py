"""Transforms of rows on their way into the buffer and out of it. They need no TorchRL, and TorchRL's own are taken as well."""

from shmbuf.transforms.base import (
    CallableTransform,
    Compose,
    ForeignTransform,
    InvertTransform,
    Transform,
    as_transform,
)
from shmbuf.transforms.simple import DoubleToFloat, DTypeCastTransform, ExcludeTransform, SelectTransform

__all__ = [
    "CallableTransform",
    "Compose",
    "DTypeCastTransform",
    "DoubleToFloat",
    "ExcludeTransform",
    "ForeignTransform",
    "InvertTransform",
    "SelectTransform",
    "Transform",
    "as_transform",
]
