"""The page of `RemoteTensorDictReplayBuffer`: its examples with the import and the storage changed, its names, its parameters."""

from __future__ import annotations

import inspect
import tempfile

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from tests import page
from tests.unit.helpers import unmoved

FACE = shmbuf.RemoteTensorDictReplayBuffer


def test_append_transform():
    from shmbuf import ReplayBuffer, ShmStorage

    rb = ReplayBuffer(storage=ShmStorage(10), batch_size=4)
    data = TensorDict({"a": torch.zeros(10)}, [10])

    def t(data):
        data += 1
        return data

    rb.append_transform(t, invert=True)
    rb.extend(data)
    assert (data == 1).all() and (rb[:]["a"] == 1).all()
    rb.close()


def test_dumps():
    from shmbuf import PrioritizedSampler, ShmStorage, TensorDictReplayBuffer

    # Build and populate the replay buffer
    S = 1_000_000
    sampler = PrioritizedSampler(S, 1.1, 1.0)
    storage = ShmStorage(S)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)

    for _ in range(100):
        td = TensorDict(
            {
                "obs": torch.randn(100, 3, 4),
                "next": {"obs": torch.randn(100, 3, 4)},
                "td_error": torch.rand(100),
            },
            [100],
        )
        rb.extend(td)
        sample = rb.sample(32)
        rb.update_tensordict_priority(sample)
    # save and load the buffer
    with tempfile.TemporaryDirectory() as tmpdir:
        rb.dumps(tmpdir)

        sampler = PrioritizedSampler(S, 1.1, 1.0)
        storage = ShmStorage(S)
        rb_load = TensorDictReplayBuffer(storage=storage, sampler=sampler)
        rb_load.loads(tmpdir)
        assert len(rb) == len(rb_load)

    assert len(rb) == 10_000 and all(
        torch.equal(a, b) for a, b in zip(rb[:].values(True, True), rb_load[:].values(True, True), strict=True)
    )
    ids = range(10_000)
    assert rb.buffer.priorities(ids) == pytest.approx(rb_load.buffer.priorities(ids), rel=1e-12)
    rb.close()
    rb_load.close()


def test_query():
    from shmbuf import ShmStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=ShmStorage(1000, trajectories=True))
    for reward, length in ((3.0, 60), (1.0, 60), (9.0, 40), (2.0, 70)):
        done = torch.arange(length) == length - 1
        rb.extend(
            TensorDict(
                {
                    "observation": torch.full((length, 2), reward),
                    "next": {"reward": torch.full((length, 1), reward), "done": done[:, None]},
                },
                [length],
            )
        )

    from shmbuf import traj

    good_trajs = rb.query((traj.reward.sum() > 100) & (traj.length >= 50))
    observations = good_trajs[0].observation
    assert [t.length for t in good_trajs] == [60, 70]
    assert torch.equal(observations, torch.full((60, 2), 3.0))
    rb.close()


def test_stats(capsys):
    from shmbuf import ReplayBuffer, ShmStorage

    rb = ReplayBuffer(storage=ShmStorage(10))
    rb.extend(torch.arange(5))
    snapshot = rb.stats()
    print(snapshot["size"], snapshot["write_count"], snapshot["capacity"])
    assert capsys.readouterr().out == "5 5 10\n"
    assert snapshot["utilization"] == 0.5 and snapshot["prefetch_queue_size"] == 0 and snapshot["initialized"] is True
    rb.close()


@pytest.mark.parametrize("name", sorted({**page.METHODS, **page.MORE}))
def test_every_method_takes_what_the_page_says(name):
    """Its parameters, of the same names, kinds, defaults and order; what we take besides has a default and comes after them."""
    theirs = list(inspect.signature({**page.METHODS, **page.MORE}[name]).parameters.values())
    ours = list(inspect.signature(getattr(FACE, name)).parameters.values())
    assert inspect.getdoc(inspect.getattr_static(FACE, name)), "it has a docstring"
    for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        if any(p.kind is kind for p in theirs):
            assert any(p.kind is kind for p in ours)
    theirs = [p for p in theirs if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours[: len(positional)]] == [
        (p.name, p.kind, p.default) for p in positional
    ]
    by_name = {p.name: p for p in ours}
    rest = any(p.kind is p.VAR_KEYWORD for p in ours)  # handed on to one that takes them
    for p in theirs[len(positional) :]:
        assert p.name in by_name or rest
        if p.name in by_name:
            assert (by_name[p.name].kind, by_name[p.name].default) == (p.kind, p.default)
    for p in ours:
        if p.name not in {q.name for q in theirs} and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            assert p.kind is p.KEYWORD_ONLY and p.default is not p.empty


@pytest.mark.parametrize("name", page.PROPERTIES)
def test_every_property_can_only_be_read(name, rb):
    assert isinstance(inspect.getattr_static(FACE, name), property) and inspect.getdoc(
        inspect.getattr_static(FACE, name)
    )
    with pytest.raises(AttributeError), unmoved(rb.buffer):
        setattr(rb, name, 5)


def test_the_constructors_own_keywords(make_name):
    storage = shmbuf.ShmStorage(10, name=make_name(), drain="caller")
    with FACE(storage=storage, **page.CONSTRUCTOR) as rb:
        assert rb.service_backend == "direct" and rb.is_alive and rb.start() is rb and rb.client() is rb
    as_remote = inspect.getattr_static(FACE, "as_remote")
    assert isinstance(as_remote, classmethod)
