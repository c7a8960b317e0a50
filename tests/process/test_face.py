"""The lines of the README, from processes started every way, whichever of them extends first. Imports torch."""

import multiprocessing
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import RandomSampler, RemoteTensorDictReplayBuffer, ShmStorage, TensorDictReplayBuffer

METHODS = ["spawn", "fork", "forkserver"]


def transitions(who: int, n: int) -> TensorDict:
    x = torch.arange(n, dtype=torch.float32)[:, None] + 1000 * who
    return TensorDict(
        {
            "obs": x.expand(n, 4).clone(),
            "action": torch.full((n,), who),
            "next": {"obs": x.expand(n, 4) + 1, "reward": x, "done": torch.zeros(n, 1, dtype=torch.bool)},
        },
        batch_size=[n],
    )


def judge(batch: TensorDict) -> None:
    x = batch["obs"][:, :1]
    assert (batch["obs"] == x).all() and (batch["next", "obs"] == x + 1).all() and (batch["next", "reward"] == x).all()
    assert ((x[:, 0] // 1000).long() == batch["action"]).all()


def collect(buffer, who: int) -> None:
    """`buffer`: the replay buffer itself, unpickled here, or its name."""
    torch.set_num_threads(1)
    rb = shmbuf.attach(buffer) if isinstance(buffer, str) else buffer
    assert type(rb) is RemoteTensorDictReplayBuffer and rb.batch_size == 16
    tickets = [rb.put(transitions(who, 10)) for _ in range(5)]
    assert all(len(t.wait(20)) == 10 for t in tickets)
    index = rb.extend(transitions(who, 7))
    assert index.dtype == torch.int64 and len(index) == 7
    judge(rb.sample())
    rb.close()


@pytest.mark.parametrize("method", METHODS)
def test_main_creates_and_never_extends_collectors_do(method, unique_name):
    """One collector gets the object, which pickles, another only the name; run twice in a row too."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["tests.process.test_face"])
    for _ in range(2):
        rb = RemoteTensorDictReplayBuffer(
            storage=ShmStorage(10_000, name=unique_name), sampler=RandomSampler(), batch_size=16
        )
        assert len(rb) == 0 and not rb.initialized
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            rb.sample()
        processes = [context.Process(target=collect, args=(how, w)) for w, how in enumerate((rb, unique_name))]
        for p in processes:
            p.start()
        judge(rb.sample(timeout=100))
        for p in processes:
            p.join(100)
        assert [p.exitcode for p in processes] == [0, 0]
        assert len(rb) == rb.write_count == 2 * 57
        judge(rb[:])
        assert sorted(rb.sample(500)["action"].unique().tolist()) == [0, 1]
        rb.close()
        shmbuf.destroy(unique_name)


STRANGER = """
import sys, torch, shmbuf
from tests.process.test_face import judge, transitions
rb = shmbuf.attach(sys.argv[1])
assert type(rb).__name__ == "TensorDictReplayBuffer" and rb.batch_size == 8
if sys.argv[2] == "first":
    assert not rb.initialized
    rb.extend(transitions(3, 20))
judge(rb.sample(timeout=60))
print(rb.extend(transitions(4, 5)).tolist())
"""


@pytest.mark.parametrize("first", ["first", "second"])
def test_a_second_interpreter_that_only_knows_the_name(first, unique_name):
    with TensorDictReplayBuffer(storage=ShmStorage(1000, name=unique_name), batch_size=8) as rb:
        if first == "second":
            rb.extend(transitions(3, 20))
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, unique_name, first], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["[20,", "21,", "22,", "23,", "24]"]
        assert len(rb) == 25
        judge(rb[20:])
    shmbuf.destroy(unique_name)


def extend_first(name: str, columns: list, barrier, out) -> None:
    rb = shmbuf.attach(name)
    barrier.wait(60)
    try:
        rb.extend(TensorDict({k: torch.zeros(3, i + 1) for i, k in enumerate(columns)}, batch_size=[3]))
        out.put(("won", columns))
    except shmbuf.SchemaError as e:
        out.put(("refused", str(e)))


def test_two_first_extends_at_once_one_wins_the_other_is_checked(unique_name):
    context = multiprocessing.get_context("fork")
    for same in (True, False):
        with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name)) as rb:
            barrier, out = context.Barrier(2), context.Queue()
            schemas = [["a", "b"], ["a", "b"] if same else ["a", "c"]]
            processes = [context.Process(target=extend_first, args=(unique_name, s, barrier, out)) for s in schemas]
            for p in processes:
                p.start()
            results = sorted(out.get(timeout=60) for _ in range(2))
            for p in processes:
                p.join(20)
            if same:
                assert [r[0] for r in results] == ["won", "won"] and len(rb) == 6
            else:
                assert [r[0] for r in results] == ["refused", "won"] and len(rb) == 3
                assert "'c'" in results[0][1] and "'b'" in results[0][1]
        shmbuf.destroy(unique_name)


def test_after_a_fork_the_childs_first_use_attaches_anew(unique_name):
    context = multiprocessing.get_context("fork")
    with RemoteTensorDictReplayBuffer(storage=ShmStorage(1000, name=unique_name), batch_size=16) as rb:
        rb.extend(transitions(0, 20))  # the parent has a ring and a drain thread
        p = context.Process(target=collect, args=(rb, 1))
        p.start()
        p.join(60)
        assert p.exitcode == 0
        assert len(rb) == 77
        rb.extend(transitions(0, 3))
        judge(rb[:])
        assert len({c["slot"] for c in rb.buffer.collectors() if c["state"] == "alive"}) == 1
    shmbuf.destroy(unique_name)


def test_threads_sample_different_sizes_at_once(unique_name):
    import threading

    with TensorDictReplayBuffer(storage=ShmStorage(1000, name=unique_name)) as rb:
        rb.extend(transitions(2, 500))
        failed = []

        def sample(n: int) -> None:
            try:
                for _ in range(300):
                    batch = rb.sample(n)
                    assert batch.batch_size == (n,) and batch["obs"].shape == (n, 4)
                    judge(batch)
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=sample, args=(n,)) for n in (1, 7, 300, 4000)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not failed
    shmbuf.destroy(unique_name)


def test_out_whose_tensors_share_memory_is_refused(unique_name):
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=4) as rb:
        rb.extend(TensorDict({"a": torch.zeros(5, 3), "b": torch.ones(5, 3)}, [5]))
        out = rb.sample()
        out["b"] = out["a"]
        with pytest.raises(shmbuf.SchemaError, match="share memory"):
            rb.sample(out=out)
        big = torch.zeros(8, 3)
        out["a"], out["b"] = big[:4], big[3:7]
        with pytest.raises(shmbuf.SchemaError, match="share memory"):
            rb.sample(out=out)
        out["b"] = big[4:]
        assert rb.sample(out=out) is out and (big[:4] == 0).all() and (big[4:] == 1).all()
    shmbuf.destroy(unique_name)


def test_tensors_without_memory_are_refused(unique_name):
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=4) as rb:
        rb.extend(TensorDict({"a": torch.zeros(5, 3)}, [5]))
        gone = torch.zeros(5, 3)
        gone.untyped_storage().resize_(0)  # as FSDP does
        with pytest.raises(shmbuf.SchemaError, match=r"'a'.*without memory"):
            rb.extend(TensorDict({"a": gone}, [5]))
        out = rb.sample()
        out["a"].untyped_storage().resize_(0)
        with pytest.raises(shmbuf.SchemaError, match="'a'"):
            rb.sample(out=out)
        assert len(rb) == rb.write_count == 5
    shmbuf.destroy(unique_name)


def test_slices_beside_emptying(unique_name):
    import threading

    with TensorDictReplayBuffer(storage=ShmStorage(100, name=unique_name), batch_size=4) as rb:
        rb.extend(transitions(1, 50))
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                rb.empty()
                rb.extend(transitions(1, 50))

        t = threading.Thread(target=churn)
        t.start()
        try:
            for _ in range(300):
                rows = rb[:]
                judge(rows)
                rb["obs"]
        finally:
            stop.set()
            t.join(30)
    shmbuf.destroy(unique_name)


def test_columns_called_index_or_row_id(unique_name):
    with TensorDictReplayBuffer(
        storage=ShmStorage(10, name=unique_name, schema={"index": "int64", "x": "float32"}), batch_size=4
    ) as rb:
        rb.extend(TensorDict({"index": torch.full((3,), 77), "x": torch.arange(3.0)}, [3]))
        batch = rb.sample()
        assert (batch["index"] == batch["x"].long()).all() and (
            rb[:]["index"] == 77
        ).all()  # a sample's index is the slot
        assert rb.sample(out=batch) is batch and (batch["index"] == batch["x"].long()).all()
    shmbuf.destroy(unique_name)
    with (
        TensorDictReplayBuffer(storage=ShmStorage(10, name=unique_name)) as rb,
        pytest.raises(shmbuf.SchemaError, match="name it otherwise"),
    ):
        rb.extend(TensorDict({"index": {"k": torch.zeros(3)}}, [3]))
    shmbuf.destroy(unique_name)
