"""torch.distributed.rpc: methods by RRef, as TorchRL's, and a handle that is sent and attaches. Imports torch."""

import multiprocessing
import os

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import RemoteTensorDictReplayBuffer, ShmStorage

rpc = pytest.importorskip("torch.distributed.rpc")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")

Remote = RemoteTensorDictReplayBuffer


def make(name: str) -> Remote:
    return Remote(storage=ShmStorage(100, name=name), batch_size=4)


def join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=100, _transports=["uv"])
    rpc.init_rpc(("learner", "owner")[rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve(store: str) -> None:
    join(1, store)
    rpc.shutdown()


def numbers_of(rb: Remote) -> tuple[int, list[int]]:
    """In the owner's process: the handle that came attaches there."""
    with rb:
        return os.getpid(), rb["k"].tolist()


def learn(store: str, name: str, out) -> None:
    join(0, store)
    try:
        rref = rpc.remote("owner", make, args=(name,))

        def call(method, *args, **kw):
            return rpc.rpc_sync("owner", method, (rref, *args), kw)

        k = torch.arange(10)
        assert call(Remote.extend, TensorDict({"k": k}, [10])).tolist() == k.tolist()
        assert call(Remote.add, TensorDict({"k": torch.tensor(10)}, [])) == 10
        td, info = call(Remote.sample, 5, None, True)
        assert td.batch_size == (5,) and (td["k"] == info["row_id"]).all()
        assert call(Remote.stats)["write_count"] == 11
        call(Remote.empty)
        rb = shmbuf.attach(name)
        assert len(rb) == 0
        rb.extend(TensorDict({"k": k + 5}, [10]))
        there, numbers = rpc.rpc_sync("owner", numbers_of, (rb,))
        assert there != os.getpid() and numbers == (k + 5).tolist()
        rb.close()
        out.put("done")
    except BaseException as e:
        out.put(repr(e))
        raise
    finally:
        rpc.shutdown()


def test_methods_take_an_rref_and_a_handle_attaches_where_it_arrives(unique_name, tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    owner = context.Process(target=serve, args=(str(tmp_path / "store"),))
    learner = context.Process(target=learn, args=(str(tmp_path / "store"), unique_name, out))
    for p in (owner, learner):
        p.start()
    try:
        assert out.get(timeout=150) == "done"
        for p in (owner, learner):
            p.join(60)
        assert (owner.exitcode, learner.exitcode) == (0, 0)
    finally:
        for p in (owner, learner):
            if p.is_alive():
                p.kill()
        shmbuf.destroy(unique_name, force=True)


def test_the_object_calls_its_methods_themselves():
    assert Remote.sample is Remote.sample and Remote.sample.__qualname__ == "RemoteTensorDictReplayBuffer.sample"
    assert vars(Remote)["sample"] is Remote.sample.__wrapped__
    with Remote() as rb:
        assert rb.sample.__func__ is vars(Remote)["sample"], "no wrapper on the way"

    class Mine(Remote):
        pass

    assert Mine.extend.__qualname__.endswith("Mine.extend") and Mine.extend.__wrapped__ is Remote.extend.__wrapped__
