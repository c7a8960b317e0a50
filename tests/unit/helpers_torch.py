"""What the TensorDict-level tests share."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

SPEC = {"obs": (torch.float32, (4,)), "next": {"obs": (torch.float32, (4,)), "done": torch.bool}, "k": torch.int64}


def rows(first: int, n: int | None = 1) -> TensorDict:
    """n rows of SPEC (None: one, without a batch dimension), numbered from `first`; every value follows from the number."""
    k = torch.arange(first, first + (1 if n is None else n))
    obs = k[:, None] * 8.0 + torch.arange(4)
    td = TensorDict({"obs": obs, "next": TensorDict({"obs": obs + 4, "done": k % 3 == 0}, [len(k)]), "k": k}, [len(k)])
    return td[0] if n is None else td


def bits(t: torch.Tensor) -> bytes:
    """The values as stored: no sign or conjugation left to do."""
    t = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(t.view(torch.uint8).tolist()) if t.numel() else b""


def same(a: TensorDictBase, b: TensorDictBase) -> bool:
    """Same batch size, keys, dtypes, shapes and bytes."""
    x, y = ({k: v for k, v in td.items(True, True)} for td in (a, b))
    return (
        a.batch_size == b.batch_size
        and x.keys() == y.keys()
        and all(x[k].dtype == y[k].dtype and x[k].shape == y[k].shape and bits(x[k]) == bits(y[k]) for k in x)
    )
