"""Keys that are renamed, kept or left out; dtypes and devices that are cast; numbers and images that are scaled. Names and arguments are TorchRL's."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection, unravel_key

from shmbuf.transforms.base import Keys, Transform, found_in


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


class DeviceCastTransform(Transform):
    """Moves what is read to ``device``, and what is stored to ``orig_device``. A copy has arrived when the call returns.

    Args:
        device: where rows that are read go.
        orig_device: where rows that are stored go; default: the CPU, where the ring lies.
        in_keys, out_keys, in_keys_inv, out_keys_inv: see `Transform`. Neither in_keys nor in_keys_inv: all rows, whole. Else only
            these keys, and the TensorDict has no device of its own any more.
    """

    def __init__(
        self,
        device: torch.device | str | int,
        orig_device: torch.device | str | int | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.device = torch.device(device)
        self.orig_device = torch.device("cpu" if orig_device is None else orig_device)
        self._whole = not self.in_keys and not self.in_keys_inv

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        # A TensorDict with a device would move each tensor back to it.
        return td.to(self.device) if self._whole else super().forward(td.copy().clear_device_())

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        if self._whole:
            return td.to(self.orig_device)
        return super().inv(td.copy().clear_device_()) if self.in_keys_inv else td

    def _apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.device)

    def _inv_apply(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.orig_device)

    def __repr__(self) -> str:
        return f"DeviceCastTransform(device={self.device}, orig_device={self.orig_device}, in_keys={self.in_keys})"


class RenameTransform(Transform):
    """Gives keys other names on what is read, and with ``in_keys_inv`` on what is stored (``out_keys_inv`` become ``in_keys_inv``).

    Args:
        create_copy: the old name stays beside the new one; both show one tensor.

    Raises:
        ValueError: a key is an old and a new name, or one of them twice: the order would matter.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys or [], out_keys or [], in_keys_inv or [], out_keys_inv)
        self.create_copy = create_copy
        _check_names("", self.in_keys or [], self.out_keys or [], create_copy)
        if self.in_keys_inv != self.out_keys_inv:  # the same names, in order: nothing is renamed
            _check_names("_inv", self.out_keys_inv or [], self.in_keys_inv or [], create_copy)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return self._renamed(td, self.in_keys, self.out_keys)

    def inv(self, td: TensorDictBase) -> TensorDictBase | None:
        # A key that goes would go from the caller's dict.
        return self._renamed(td.copy(), self.out_keys_inv, self.in_keys_inv) if self.in_keys_inv else td

    def _renamed(self, td: TensorDictBase, old: list[NestedKey] | None, new: list[NestedKey] | None) -> TensorDictBase:
        pairs = list(zip(old or (), new or (), strict=True))
        found: list[Any] = [
            found_in(self, td, source) for source, _ in pairs
        ]  # all of them, before the first is renamed
        for (source, target), value in zip(pairs, found, strict=True):
            if self.create_copy:
                td.set(target, value.copy() if is_tensor_collection(value) else value)
            elif source != target:
                td.rename_key_(source, target)
        return td


def _check_names(of: str, old: list[NestedKey], new: list[NestedKey], create_copy: bool) -> None:
    both = [k for k in new if k in old]
    twice = [k for k in new if new.count(k) > 1] + [k for k in old if old.count(k) > 1 and not create_copy]
    if both or twice:
        raise ValueError(
            f"in_keys{of} and out_keys{of}: {(both or twice)[0]!r} is {'an old and a new name' if both else 'there twice'}, so the "
            f"order would matter: {old} to {new}. Use one RenameTransform after another"
        )


class _Affine(Transform):
    """x * scale + loc, or the other way round, (x - loc) / scale."""

    loc: torch.Tensor
    scale: torch.Tensor
    standard_normal: bool

    def _apply(self, value: torch.Tensor) -> torch.Tensor:
        return self._standard(value) if self.standard_normal else self._scaled(value)

    def _inv_apply(self, value: torch.Tensor) -> torch.Tensor:
        return self._scaled(value) if self.standard_normal else self._standard(value)

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale.to(value.device) + self.loc.to(value.device)

    def _standard(self, value: torch.Tensor) -> torch.Tensor:
        return (value - self.loc.to(value.device)) / self.scale.to(value.device)

    def state_dict(self) -> dict[str, Any]:
        return {"loc": self.loc, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"loc", "scale"}:
            raise KeyError(f"{type(self).__name__} has a state of 'loc' and 'scale'; got {sorted(state)}")
        self.loc, self.scale = state["loc"], state["scale"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loc={self.loc}, scale={self.scale}, in_keys={self.in_keys})"


class ObservationNorm(_Affine):
    """``x * scale + loc`` on what is read, ``(x - loc) / scale`` on what is stored (there only with ``in_keys_inv``).

    Args:
        loc, scale: numbers or tensors that broadcast against an entry. There is no environment to learn them from here.
        standard_normal: the two formulas are swapped.
        eps: the least ``scale``, if that is a plain number; a tensor is taken as it is. Default: 1e-6.

    Raises:
        ValueError: no in_keys, loc or scale.
    """

    def __init__(
        self,
        loc: float | torch.Tensor | None = None,
        scale: float | torch.Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float | None = None,
    ) -> None:
        if in_keys is None or loc is None or scale is None:
            missing = [n for n, v in (("loc", loc), ("scale", scale), ("in_keys", in_keys)) if v is None]
            raise ValueError(
                f"ObservationNorm needs {', '.join(missing)}: nothing tells them from the rows of a buffer"
            )
        super().__init__(in_keys, out_keys, in_keys_inv or [], out_keys_inv)
        self.standard_normal, self.eps = bool(standard_normal), 1e-6 if eps is None else eps
        dtype = torch.get_default_dtype()
        self.loc = loc if isinstance(loc, torch.Tensor) else torch.tensor(loc, dtype=dtype)
        self.scale = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=dtype).clamp_min(self.eps)


class RewardScaling(_Affine):
    """``reward * scale + loc`` on what is read, or, ``standard_normal``, ``(reward - loc) / scale``. ``scale`` is at least 1e-6."""

    def __init__(
        self,
        loc: float | torch.Tensor,
        scale: float | torch.Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool = False,
    ) -> None:
        super().__init__(["reward"] if in_keys is None else in_keys, out_keys)
        self.standard_normal = bool(standard_normal)
        self.loc = torch.as_tensor(loc)
        self.scale = torch.as_tensor(scale).clamp_min(1e-6)


class ToTensorImage(Transform):
    """Images [..., W, H, C] of 0 to 255 as [..., C, W, H] of 0 to 1, on what is read.

    Args:
        from_int: divide by 255. None: if the image is not of a floating dtype.
        unsqueeze: an image of 3 dimensions gets a first one of size 1.
        dtype: of the result; default: torch's default dtype.
        in_keys: default ``["pixels"]``.
        shape_tolerant: an image whose last dimension is not 3 keeps the order of its dimensions.

    Raises:
        ValueError (when called): an entry of fewer than 3 dimensions.
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys)
        self.from_int, self.unsqueeze, self.shape_tolerant = from_int, unsqueeze, shape_tolerant
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def _apply(self, value: torch.Tensor) -> torch.Tensor:
        if value.ndim < 3:
            raise ValueError(
                f"an image of shape {tuple(value.shape)}: ToTensorImage needs at least 3 dimensions, W, H, C"
            )
        if not self.shape_tolerant or value.shape[-1] == 3:
            value = value.movedim(-1, -3)
        if self.from_int or (self.from_int is None and not value.is_floating_point()):
            value = value / 255
        value = value.to(self.dtype)
        return value.unsqueeze(0) if self.unsqueeze and value.ndim == 3 else value
