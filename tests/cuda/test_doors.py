"""Numbers that lie on a device are taken wherever numbers are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import Buffer, Sequence, ShmStorage, TensorDictReplayBuffer
from tests.cuda.tensors import of_device
from tests.cuda.test_face import TORCH

ROW = {"k": "int64", "done": "bool"}


def rows(first: int, n: int) -> dict:
    return {"k": np.arange(first, first + n), "done": np.zeros(n, bool)}


@pytest.fixture
def buffer(name):
    with Buffer.create(None, 100, schema=ROW, drain="caller", trajectories=True) as made:
        yield made


def test_the_stand_in_refuses_numpy_as_a_device_s_tensor_does():
    for look in (np.asarray, lambda t: t.numpy(), lambda t: (t + 1).reshape(-1).numpy()):
        with pytest.raises(TypeError, match="cuda:0"):
            look(of_device([1, 2]))


def test_streams(buffer):
    stream = of_device([0, 1, 0, 1, 0, 1])
    assert buffer.extend(rows(0, 6), stream=stream).tolist() == list(range(6))
    assert buffer.trajectory(5).tolist() == [1, 3, 5]
    assert buffer.extend(rows(6, 2), stream=of_device(1)).tolist() == [6, 7]
    with pytest.raises(ValueError, match="stream of dtype float32"):
        buffer.put(rows(0, 2), stream=of_device([0.0, 1.0]))


def test_priorities_and_ids(buffer):
    buffer.keep_priorities(1.0, 0.0)
    buffer.extend(rows(0, 4), priorities=of_device([1.0, 0.0, 0.0, 0.0]).requires_grad_())
    assert set(buffer.draw_by_priority(20)[1].tolist()) == {0}
    assert buffer.set_priorities(of_device([0, 2]), of_device([0.0, 3.0])).tolist() == [True, True]
    assert set(buffer.draw_by_priority(20)[1].tolist()) == {2}
    assert buffer.gather(of_device([3, 1]))["k"].tolist() == [3, 1]
    assert buffer.edit(of_device([3]), {"k": np.array([30])}).tolist() == [True]


def test_a_replay_buffer_s_streams(name):
    storage = ShmStorage(100, drain="caller", trajectories=True)
    td = TensorDict({"k": torch.arange(4)}, [4])
    with TensorDictReplayBuffer(storage=storage, batch_size=2) as rb:
        rb.extend(td, stream=of_device([0, 1, 0, 1]))
        assert rb.buffer.trajectory(3).tolist() == [1, 3]


def test_windows_about_indices_of_a_device():
    storage = ShmStorage(100, drain="caller", trajectories=True)
    with TensorDictReplayBuffer(storage=storage, batch_size=2) as rb:
        rb.extend(TensorDict({"k": torch.arange(10), "done": torch.zeros(10, dtype=torch.bool)}, [10]))
        plain = Sequence(3).expand(torch.tensor([4, 7]), {}, rb.storage)
        moved = Sequence(3).expand(of_device([4, 7]), {}, rb.storage)
        assert torch.equal(plain[0], moved[0]) and plain[1].keys() == moved[1].keys()
        assert all(torch.equal(plain[1][k], moved[1][k]) for k in plain[1])


def test_out_takes_the_numbers_on_the_host_or_on_the_device(over):
    code = TORCH + (
        "from shmbuf.on_device import OnDevice\nfrom shmbuf import SchemaError\nfrom tests.cuda.tensors import CUDA, of_device\n"
        "class Streams:\n    def __init__(self, device): pass\n"
        "rb = TensorDictReplayBuffer(storage=ShmStorage(100, device='cuda:0', drain='caller'), batch_size=8); rb.extend(td(0, 50))\n"
        "s = rb._storage; s.schema(); s._on = OnDevice(CUDA, Streams); s._on.stream = lambda: 0\n"
        "def out(numbers, columns=of_device):\n"
        "    made = td(0, 8).apply(columns)\n"
        "    for key in ('row_id', 'index'): made[key] = numbers(torch.zeros(8, dtype=torch.int64))\n"
        "    return made\n"
        "for numbers in (of_device, lambda t: t):\n"
        "    into = out(numbers); assert rb.sample(out=into) is into\n"
        "    plain = {k: into.get(k).as_subclass(torch.Tensor) for k in ('k', 'row_id', 'index', 'obs')}\n"
        "    assert torch.equal(plain['k'], plain['row_id']) and torch.equal(plain['index'], plain['row_id'] % 100) and right(plain)\n"
        "try:\n    rb.sample(out=out(of_device, lambda t: t)); raise AssertionError\n"
        "except SchemaError as e:\n    assert 'cuda:0 tensor' in str(e), e"
    )
    over(code)
