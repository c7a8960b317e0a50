"""Rows on a GPU as the tensors of a GPU. Asked for by ``SHMBUF_TEST_GPU=1``, as the driver is begun in this process (check_cuda does);
over the stand-in the device's tensors are the host's, and what is asked of streams is left out."""

from __future__ import annotations

import os

import pytest
import torch
from tensordict import TensorDict

from shmbuf import PrioritizedSampler, Sequence, ShmStorage, SliceSampler, TensorDictReplayBuffer, traj

pytestmark = pytest.mark.skipif(os.environ.get("SHMBUF_TEST_GPU") != "1", reason="SHMBUF_TEST_GPU=1 asks for a GPU")
N = 400


def td(first: int, n: int, device: torch.device | str) -> TensorDict:
    k = torch.arange(first, first + n, device=device)
    obs = k[:, None] * 10.0 + torch.arange(16, device=device)
    step = TensorDict({"obs": obs + 1, "done": (k % 5 == 4)[:, None], "reward": k.float()[:, None]}, [n])
    return TensorDict({"obs": obs, "next": step, "k": k}, [n])


def right(batch: TensorDict, device: torch.device, ends: bool = True) -> None:
    assert {v.device for v in batch.values(True, True)} == {device}
    k = batch["k"].reshape(-1)
    wanted = td(0, N, device)[k]
    for key in (("obs",), ("next", "obs"), ("next", "reward"), *[("next", "done")] * ends):
        assert torch.equal(batch[key].reshape(wanted[key].shape), wanted[key]), key
    assert torch.equal(batch["row_id"].reshape(-1), k)


@pytest.fixture
def made():
    """A filled replay buffer, and where its tensors are."""
    open_ = []

    def make(n: int = N, **how):
        storage = ShmStorage(1000, device="cuda:0", device_rings=2)
        rb = TensorDictReplayBuffer(storage=storage, batch_size=64, priority_key="p", **how)
        open_.append(rb)
        rb.extend(td(0, 1, "cpu"))
        device = rb.storage.device
        if torch.cuda.is_available():
            assert device.type == "cuda"
        rb.extend(td(1, n - 1, device))
        return rb, device

    yield make
    for rb in open_:
        rb.close()


def test_samples_and_the_whole(made):
    rb, device = made()
    right(rb.sample(), device)
    batch, info = rb.sample(return_info=True)
    right(batch, device)
    assert info["index"].device == device and torch.equal(info["index"], batch["index"])
    assert rb[:]["k"].tolist() == list(range(N)) and rb[:].device in (None, device)
    assert torch.equal(rb[torch.tensor([3, 1], device=device)]["k"], torch.tensor([3, 1], device=device))
    assert rb.sample(device="cpu")["k"].device.type == "cpu"


@pytest.mark.parametrize("numbers", ["device", "cpu"])
def test_out(made, numbers):
    rb, device = made()
    out = td(0, 64, device)
    for key in ("row_id", "index"):
        out[key] = torch.zeros(64, dtype=torch.int64, device=device if numbers == "device" else "cpu")
    assert rb.sample(out=out) is out
    assert torch.equal(out["k"], out["row_id"].to(device)) and torch.equal(out["index"], out["row_id"] % 1000)
    out["row_id"], out["index"] = out["row_id"].to(device), out["index"].to(device)
    right(out, device)


def test_slices_and_windows(made):
    rb, device = made(sampler=SliceSampler(slice_len=4))
    batch = rb.sample()
    right(batch, device, ends=False)  # a slice's last row is marked
    k = batch["k"].reshape(-1, 4)
    assert batch["next", "done"].reshape(-1, 4).all(0).tolist() == [False, False, False, True]
    assert torch.equal(k[:, 1:], k[:, :-1] + 1) and (k[:, 0] // 5 == k[:, 3] // 5).all()
    rb, device = made(sample_unit=Sequence(3))
    batch = rb.sample()
    right(batch, device)
    assert batch["validity_mask"].device == device


def test_priorities(made):
    rb, device = made(sampler=PrioritizedSampler(1000, alpha=1.0, beta=1.0))
    batch = rb.sample()
    right(batch, device)
    assert batch["priority_weight"].device == device
    batch["p"] = torch.where(batch["k"] == batch["k"][0], 5.0, 0.0)
    rb.update_tensordict_priority(batch)
    rb.update_priority(torch.arange(N, device=device), (torch.arange(N, device=device) == 7).double())
    assert set(rb.sample()["k"].tolist()) == {7}


def test_edits(made):
    rb, device = made()
    rb.set_at_("obs", torch.full((2, 16), -1.0, device=device), torch.tensor([5, 6], device=device))
    assert (rb[5]["obs"] == -1).all() and (rb[7]["obs"] == td(7, 1, device)["obs"][0]).all()
    rb.extend(td(N, 700, device))  # round the storage
    assert rb[:]["k"].sort()[0].tolist() == list(range(100, 1100))


def test_queries(made):
    rb, _ = made()
    found = rb.query((traj.length == 5) & (traj.reward.sum() > 1000))
    assert len(found) == sum(5 * f + 10 > 1000 for f in range(0, N, 5))
    assert all(f["k"].tolist() == list(range(f["k"][0], f["k"][0] + 5)) for f in found)


def test_batches_ahead_on_a_side_stream(made):
    """The learner works on a stream of its own, late: what it got must not be written over by the batches that follow."""
    rb, device = made(prefetch=3)
    cuda = device.type == "cuda"
    side = torch.cuda.Stream(device) if cuda else None
    sums, ks = [], []
    with torch.cuda.stream(side):  # of None: nothing
        for _ in range(40):
            batch = rb.sample()
            if cuda:
                torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
            sums.append(batch["obs"].double().sum(1).clone())
            ks.append(batch["k"].clone())
            del batch
    if cuda:
        side.synchronize()
    for total, k in zip(sums, ks, strict=True):
        assert torch.equal(total, k.double() * 160 + 120)


def test_a_sample_waits_for_nothing_of_the_caller_s_stream(made):
    rb, device = made()
    if device.type != "cuda":
        pytest.skip("streams are a GPU's")
    rb.sample()
    torch.cuda._sleep(2_000_000_000)  # a second or so
    done = torch.cuda.Event()
    done.record()
    batch = rb.sample()
    assert not done.query(), "it came back after the caller's stream was through"
    torch.cuda.synchronize()
    right(batch, device)


def test_what_is_put_comes_after_the_caller_s_stream(made):
    rb, device = made(n=2)
    late = td(0, 64, device)
    if device.type == "cuda":
        torch.cuda._sleep(200_000_000)
    late["k"].add_(2)
    late["obs"].add_(20)
    for key in ("obs", "reward"):
        late["next", key].add_(20 if key == "obs" else 2)
    late["next", "done"].copy_((late["k"] % 5 == 4)[:, None])
    rb.extend(late)
    right(rb.sample(), device)


def test_a_graph_that_is_captured_gets_no_rows(made):
    from shmbuf.errors import DeviceError

    rb, device = made()
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    kept = torch.zeros(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(DeviceError, match="graph"):
            rb.sample()
        kept.add_(1)
    graph.replay()
    right(rb.sample(), device)
