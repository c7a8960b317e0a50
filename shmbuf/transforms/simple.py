"""Keys that are renamed, kept or left out; dtypes that are cast. Names and arguments are TorchRL's."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from shmbuf.transforms.base import Keys, Transform


class DTypeCastTransform(Transform):
    """Casts ``dtype_in`` to ``dtype_out`` on what is read, and back on what is stored.

    Args:
        dtype_in, dtype_out: the two dtypes.
        in_keys: None: every tensor of ``dtype_in`` on the way out, and (without ``in_keys_inv``) of ``dtype_out`` on the way in.
        out_keys, in_keys_inv, out_keys_inv: see `Transform`; with ``in_keys``, the default is that nothing is cast on the way in.

    Raises:
        ValueError: out-keys without in-keys.
    """

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        if (in_keys is None and out_keys is not None) or (in_keys_inv is None and out_keys_inv is not None):
            raise ValueError(
                "out_keys need in_keys, and out_keys_inv in_keys_inv: which is cast to which is not known else"
            )
        super().__init__(
            in_keys, out_keys, [] if in_keys is not None and in_keys_inv is None else in_keys_inv, out_keys_inv
        )
        self.dtype_in, self.dtype_out = dtype_in, dtype_out

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return _cast_all(td, self.dtype_in, self.dtype_out) if self.in_keys is None else super().forward(td)

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        return _cast_all(td, self.dtype_out, self.dtype_in) if self.in_keys_inv is None else super().inv(td)

    def _apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_out)

    def _inv_apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype_in)


class DoubleToFloat(DTypeCastTransform):
    """float64 to float32 on what is read, and back on what is stored; see `DTypeCastTransform`."""

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, in_keys_inv: Keys = None, out_keys_inv: Keys = None
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


def _cast_all(td: TensorDictBase, source: torch.dtype, target: torch.dtype) -> TensorDictBase:
    for key, value in list(td.items(True, True)):
        if isinstance(value, torch.Tensor) and value.dtype == source:
            td.set(key, value.to(target))
    return td


class ExcludeTransform(Transform):
    """Leaves keys out of what is read; ``inverse``: of what is stored. Keys that are not there are ignored."""

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys, self.inverse = [unravel_key(k) for k in excluded_keys], inverse

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td if self.inverse else td.exclude(*self.excluded_keys)

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        return td.exclude(*self.excluded_keys) if self.inverse else td


class SelectTransform(Transform):
    """Keeps only these keys of what is read, and "reward" and "done" beside them unless told otherwise."""

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = [unravel_key(k) for k in selected_keys]
        self.keep_rewards, self.keep_dones = keep_rewards, keep_dones

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        more = [k for k, kept in (("reward", self.keep_rewards), ("done", self.keep_dones)) if kept]
        return td.select(*self.selected_keys, *more, strict=False)
