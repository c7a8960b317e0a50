"""What the tests of slice samplers share: episodes, and replay buffers over unnamed-by-us storages."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from shmbuf import ShmStorage, TensorDictReplayBuffer


def episodes(*lengths: int, first: int = 0, done_shape: tuple[int, ...] = (1,)) -> TensorDict:
    """Rows t = 0, 1 … over all episodes; the last of each is done and terminated."""
    n = sum(lengths)
    done = torch.zeros(n, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    done = done.reshape(n, *done_shape)
    return TensorDict(
        {
            "t": torch.arange(first, first + n),
            "episode": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + 1000 * first,
            "is_init": torch.zeros(n, 1, dtype=torch.bool),
            "next": {"done": done, "terminated": done.clone(), "t": torch.arange(first, first + n) + 1},
        },
        [n],
    )


@pytest.fixture
def make(make_name):
    made = []

    def make(sampler, *data: TensorDict, batch_size=None, capacity=200, face=TensorDictReplayBuffer, **kw):
        storage = ShmStorage(capacity, name=make_name(), drain="caller", ring_bytes=1 << 14, **kw)
        rb = face(storage=storage, sampler=sampler, batch_size=batch_size, seed=3)
        made.append(rb)
        for td in data:
            rb.extend(td)
        return rb

    yield make
    for rb in made:
        rb.close()
