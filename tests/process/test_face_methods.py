"""Every method that reads or sets, from a second process, beside a collector. Imports torch."""

import multiprocessing

import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import PrioritizedSampler, RemoteTensorDictReplayBuffer, ShmStorage


def numbered(first: int, n: int) -> TensorDict:
    k = torch.arange(first, first + n)
    return TensorDict({"k": k, "next": {"obs": k[:, None].float().expand(n, 8)}}, [n])


def whole(td) -> bool:
    """Each row is one that was handed in."""
    return bool((td["next", "obs"] == td["k"][..., None]).all())


def use(name: str, out) -> None:
    torch.set_num_threads(1)
    rb = shmbuf.attach(name, prefetch=2, seed=3)
    try:
        assert type(rb) is RemoteTensorDictReplayBuffer and rb.batch_size == 16 and rb.sample(timeout=60) is not None
        for _ in range(30):
            td, info = rb.sample(return_info=True)
            assert whole(td) and (info["row_id"] == td["row_id"]).all() and whole(rb.sample(7)) and whole(rb.next())
            assert whole(rb[:]) and whole(rb[[0, 3, -1]]) and whole(rb.read_all_in_order(20)) and whole(rb[5])
            assert len(rb["k"]) == len(rb) and rb.can_sample() and rb.initialized and rb.is_alive
            td["td_error"] = torch.rand(16)
            rb.update_tensordict_priority(td)
            rb.update_priority(torch.arange(4), 0.5)
            rb.mark_update(torch.arange(2))
            assert rb.put(numbered(1_000_000, 3)).rows == 3
            assert len(rb.extend(numbered(2_000_000, 5))) == 5
            assert isinstance(rb.add(numbered(3_000_000, 1)[0]), int)
            state = rb.state_dict()["_storage"]["rows"]
            assert whole(state) and len(state) <= rb.storage.max_size
            stats = rb.stats()
            assert stats["size"] == stats["capacity"] == len(rb) and stats["write_count"] <= rb.write_count
        rb.shutdown()
        out.put("done")
    except BaseException as e:
        out.put(repr(e))
        raise
    finally:
        rb.close()


def test_every_method_from_a_second_process_beside_a_collector(unique_name):
    context = multiprocessing.get_context("fork")
    with RemoteTensorDictReplayBuffer(
        storage=ShmStorage(200, name=unique_name), sampler=PrioritizedSampler(200), batch_size=16
    ) as rb:
        rb.extend(numbered(0, 200))
        out = context.Queue()
        p = context.Process(target=use, args=(unique_name, out))
        p.start()
        written, said = 200, None
        while said is None and p.is_alive():
            rb.extend(numbered(written, 4))
            written += 4
            if not out.empty():
                said = out.get(timeout=60)
        said = said or out.get(timeout=60)
        p.join(60)
        assert (said, p.exitcode) == ("done", 0)
        assert rb.write_count == written + 30 * 9, "no row is lost"
    shmbuf.destroy(unique_name)
