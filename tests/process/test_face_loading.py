"""A replay buffer in DataLoader workers, which attach by name, and in other processes with batches drawn ahead. Imports torch."""

import multiprocessing
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import shmbuf
from shmbuf import RandomSampler, SamplerWithoutReplacement, ShmStorage, TensorDictReplayBuffer


def numbered(first: int, n: int) -> TensorDict:
    k = torch.arange(first, first + n)
    return TensorDict({"k": k, "obs": k[:, None].float().expand(n, 3)}, [n])


def run_through(loader: DataLoader) -> list:
    """All its batches, by workers that end by themselves and without an error."""
    iterator = iter(loader)
    batches = list(iterator)
    codes = [w.join(60) or w.exitcode for w in getattr(iterator, "_workers", ())]
    assert codes == [0] * loader.num_workers
    return batches


@pytest.mark.parametrize("method", [None, "fork", "spawn"], ids=["in this process", "fork", "spawn"])
def test_workers_draw_each_their_own_and_share_an_epoch(method, unique_name):
    with TensorDictReplayBuffer(storage=ShmStorage(1000, name=unique_name), batch_size=8) as rb:
        rb.extend(numbered(0, 200))
        workers = {} if method is None else {"num_workers": 2, "multiprocessing_context": method, "timeout": 100}
        how = {"collate_fn": rb.as_dataset(0).collate, **workers}
        rb.set_sampler(SamplerWithoutReplacement(shared=True))
        batches = run_through(DataLoader(rb.as_dataset(25), **how))
        assert all(b.batch_size == (8,) and (b["obs"][:, 0] == b["k"]).all() for b in batches)
        assert sorted(torch.cat([b["k"] for b in batches]).tolist()) == list(range(200)), "each row to one worker"
        if method != "spawn":  # whose workers take seconds to begin
            rb.set_sampler(RandomSampler())
            batches = run_through(DataLoader(rb.as_dataset(9), **how))
            assert len({tuple(b["k"].tolist()) for b in batches}) == 9, "each worker has a seed of its own"
            # The buffer itself is a data set of rows, too: torch draws the indices, workers attach and read.
            of_rows = DataLoader(rb, batch_size=32, shuffle=True, **{**how, "collate_fn": torch.stack})
            rows = torch.cat(run_through(of_rows))
            assert sorted(rows["k"].tolist()) == list(range(200)) and (rows["obs"][:, 0] == rows["k"]).all()
        assert rb.extend(numbered(200, 2)).tolist() == [200, 201] and rb.buffer.check()["findings"] == []
    shmbuf.destroy(unique_name)  # nobody is attached any more


def test_persistent_workers_go_on_where_their_seed_took_them(unique_name):
    """Each epoch of theirs began with the seed again, and drew the same rows."""

    def epochs() -> list:
        torch.manual_seed(3)
        how = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 100}
        loader = DataLoader(data := rb.as_dataset(2), collate_fn=data.collate, **how)
        return [[b["k"].tolist() for b in loader] for _ in range(3)]

    with TensorDictReplayBuffer(storage=ShmStorage(1000, name=unique_name), batch_size=8) as rb:
        rb.extend(numbered(0, 1000))
        first, again = epochs(), epochs()
        assert len({tuple(k) for epoch in first for k in epoch}) == 6
        assert first == again, "the loader's seed fixes all of them"
    shmbuf.destroy(unique_name, force=True)


def update(rb, out) -> None:
    torch.set_num_threads(1)
    how = {"index": [0], "generation": [0]}
    got = rb.submit_update_if_present(**how, patch={"k": torch.tensor([70])}).result(60)
    rb.synchronize()  # which waits for no edit of the parent's
    out.put(got.updated.tolist())


def test_a_fork_child_edits_by_a_thread_of_its_own(unique_name):
    context = multiprocessing.get_context("fork")
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=8) as rb:
        rb.extend(numbered(0, 20))
        failed = rb.submit_update_if_present(index=[0], generation=[0], patch={"no such key": torch.zeros(1)})
        with pytest.raises(KeyError):
            failed.result(60)
        out = context.Queue()
        p = context.Process(target=update, args=(rb, out))
        p.start()
        p.join(100)
        assert p.exitcode == 0 and out.get(timeout=60) == [True] and rb["k"][0] == 70
        with pytest.raises(KeyError):
            rb.synchronize()
    shmbuf.destroy(unique_name, force=True)


def test_for_batch_in_rb(unique_name):
    """For ever, whatever is stored at the time; and one pass where the sampler knows one."""
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=8) as rb:
        rb.extend(numbered(0, 20))
        for n, batch in enumerate(rb):
            assert batch.batch_size == (8,) and (batch["obs"][:, 0] == batch["k"]).all()
            if n == 50:
                rb.extend(numbered(20, 80))
            if n == 500:
                break
        assert n == 500
        rb.set_sampler(SamplerWithoutReplacement())
        for _ in range(2):
            assert sorted(k for batch in rb for k in batch["k"].tolist()) == list(range(100))
    shmbuf.destroy(unique_name)


def test_without_workers_and_without_a_number(unique_name):
    with TensorDictReplayBuffer(
        storage=ShmStorage(100, name=unique_name), batch_size=8, sampler=SamplerWithoutReplacement()
    ) as rb:
        rb.extend(numbered(0, 20))
        data = rb.as_dataset()
        got = list(DataLoader(data, batch_size=None, collate_fn=data.collate))
        assert sorted(torch.cat([b["k"] for b in got]).tolist()) == list(range(20))
        assert sorted(next(iter(DataLoader(data, 3, collate_fn=data.collate)))["k"].tolist()) == list(range(20))
        assert list(rb.as_dataset(0)) == []
        with pytest.raises(ValueError, match="num_batches=-1"):
            rb.as_dataset(-1)
    shmbuf.destroy(unique_name)
    with TensorDictReplayBuffer() as rb, pytest.raises(RuntimeError, match="batch_size not specified"):
        rb.as_dataset()


def draw(rb, out) -> None:
    torch.set_num_threads(1)
    out.put([rb.sample(timeout=60)["k"].tolist() for _ in range(4)])


def test_a_fork_child_draws_ahead_by_threads_of_its_own(unique_name):
    context = multiprocessing.get_context("fork")
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=8, prefetch=3) as rb:
        rb.extend(numbered(0, 20))
        rb.sample()
        out = context.Queue()
        p = context.Process(target=draw, args=(rb, out))
        p.start()
        theirs = out.get(timeout=60)
        p.join(60)
        assert p.exitcode == 0 and len(theirs) == 4
        assert theirs != [rb.sample()["k"].tolist() for _ in range(4)]
    shmbuf.destroy(unique_name)


ENDS = """
import sys, torch, shmbuf
rb = shmbuf.attach(sys.argv[1], prefetch=3, collate_fn=lambda td: td)
rb.sample()
it = iter(rb)
next(it)
print("drawn", flush=True)
"""


def test_an_interpreter_ends_with_batches_in_flight(unique_name):
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=8) as rb:
        rb.extend(numbered(0, 20))
        done = subprocess.run([sys.executable, "-c", ENDS, unique_name], capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["drawn"], "")
    shmbuf.destroy(unique_name)
