"""Transforms of rows on their way into the buffer and out of it. They need no TorchRL, and TorchRL's own are taken as well."""

from shmbuf.transforms.base import (
    CallableTransform,
    Compose,
    ForeignTransform,
    InvertTransform,
    Transform,
    as_transform,
)

__all__ = ["CallableTransform", "Compose", "ForeignTransform", "InvertTransform", "Transform", "as_transform"]
