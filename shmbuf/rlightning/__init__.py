"""rlightning's storage of a buffer over shared memory: `Storage`, `EpisodeTable`, `BufferView`, and what they take."""

from shmbuf.rlightning.chain import (
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
)
from shmbuf.rlightning.storage import Storage
from shmbuf.rlightning.table import EpisodeTable
from shmbuf.rlightning.types import EnvMeta, EnvRet, PolicyResponse
from shmbuf.rlightning.view import BufferView

__all__ = [
    "BufferView",
    "EnvMeta",
    "EnvRet",
    "EpisodeTable",
    "PolicyResponse",
    "Storage",
    "default_env_ret_preprocess_fn",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
]
