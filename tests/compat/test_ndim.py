"""TorchRL's storages of two dimensions beside ours: same indices, same reads."""

from __future__ import annotations

import secrets

import pytest
import torch
from tensordict import TensorDict

import shmbuf

torchrl_data = pytest.importorskip("torchrl.data")


def batch(b: int, t: int, first: int) -> TensorDict:
    return TensorDict({"k": torch.arange(first, first + b * t).reshape(b, t)}, [b, t])


@pytest.mark.parametrize("sizes", [[3], [3, 6], [7], [2, 3, 4, 5]])
def test_indices_and_reads_are_theirs(sizes):
    theirs = torchrl_data.TensorDictReplayBuffer(storage=torchrl_data.LazyTensorStorage(13, ndim=2), batch_size=4)
    storage = shmbuf.ShmStorage(13, name=f"compat.{secrets.token_hex(6)}", ndim=2, batch_shape=(2,), drain="caller")
    ours = shmbuf.TensorDictReplayBuffer(storage=storage, batch_size=4)
    try:
        first = 0
        for t in sizes:
            data = batch(2, t, first)
            first += 2 * t
            assert ours.extend(data).equal(theirs.extend(data))
            assert len(ours) == len(theirs)
            assert ours.storage.shape == theirs._storage.shape and ours.storage.max_size == theirs._storage.max_size
            assert ours[:]["k"].equal(theirs[:]["k"]) and ours["k"].equal(theirs["k"])
            assert ours.storage[:]["k"].equal(theirs._storage[:]["k"])
            assert ours[:, -1]["k"].equal(theirs[:, -1]["k"])
        (a, mine), (b, other) = ours.sample(return_info=True), theirs.sample(return_info=True)
        assert a["index"].shape == b["index"].shape and len(mine["index"]) == len(other["index"])
        assert theirs._storage[mine["index"]]["k"].equal(a["k"])
    finally:
        ours.destroy(force=True)
