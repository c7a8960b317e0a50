"""Replay buffers by name, pickled, closed, and of parts that cannot be."""

from __future__ import annotations

import gc
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    Buffer,
    BufferExists,
    BufferFormatError,
    BufferInUse,
    BufferNotFound,
    PrioritizedSampler,
    Queue,
    RandomSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    Sequence,
    ShmStorage,
    StalenessAwareSampler,
    StepScheduler,
    StorageLost,
    TensorDictReplayBuffer,
    segment,
)
from tests.unit.helpers import open_files
from tests.unit.helpers_torch import rows, same

FACES = [ReplayBuffer, TensorDictReplayBuffer, RemoteTensorDictReplayBuffer]


# ---- names, pickles, ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_attach_gives_the_same_class_and_settings(make_rb, face):
    kw = {} if face is ReplayBuffer else {"priority_key": ("agent", "prio")}
    made = make_rb(face=lambda **k: face(**k, **kw), batch_size=5)
    made.extend(rows(0, 3))
    with shmbuf.attach(made.name) as rb:
        assert (
            type(rb) is face and rb.batch_size == 5 and isinstance(rb.sampler, RandomSampler) and rb.name == made.name
        )
        assert rb._priority_key == made._priority_key
        assert rb.sample().batch_size == torch.Size([5]) and rb.extend(rows(3, 2)).tolist() == [3, 4]
        assert same(made[:], rows(0, 5))
    with shmbuf.attach(made.name, batch_size=2) as rb:
        assert rb.batch_size == 2 and made.batch_size == 5, "of this handle only"
    with shmbuf.attach(made.name, readonly=True) as rb:
        assert rb.sample().batch_size == torch.Size([5])
        with pytest.raises(PermissionError):
            rb.extend(rows(0, 1))


def test_attach_to_a_numpy_level_buffer(name):
    with shmbuf.Buffer.create(name, 10, schema={"k": "int64"}, drain="caller") as buf:
        buf.extend({"k": np.arange(3)})
        with shmbuf.attach(name) as rb:
            assert type(rb) is ReplayBuffer and rb["k"].tolist() == [0, 1, 2] and rb.batch_size is None


def test_attach_to_nothing(name):
    for how in ({}, {"timeout": 0.05}):
        with pytest.raises(BufferNotFound):
            shmbuf.attach(name, **how)
    with pytest.raises(ValueError):
        shmbuf.attach("not/allowed")


@pytest.mark.parametrize(
    "face",
    [{"class": "Unknown"}, {"class": "ReplayBuffer", "sampler": ["nonsense", {}]}, {"sampler": 5}, {"batch_size": "x"}],
)
def test_attach_to_a_face_this_process_cannot_make(name, face):
    with shmbuf.Buffer.create(name, 10, drain="caller", config={"face": face}):
        before = open_files()
        with pytest.raises(BufferFormatError):
            shmbuf.attach(name)
        gc.collect()
        assert open_files() == before


def test_a_name_that_is_taken(make_rb, rb):
    with pytest.raises(BufferExists):
        TensorDictReplayBuffer(storage=ShmStorage(100, name=rb.name, drain="caller"))
    with TensorDictReplayBuffer(storage=ShmStorage(100, name=rb.name, exists="attach"), batch_size=3) as other:
        other.extend(rows(0, 2))
        assert len(rb) == 2 and other.sample().batch_size == torch.Size([3])


def test_attach_waits_for_the_name(make_name):
    name, made = make_name(), []
    thread = threading.Timer(
        0.1, lambda: made.append(TensorDictReplayBuffer(storage=ShmStorage(10, name=name, drain="caller")))
    )
    thread.start()
    with shmbuf.attach(name, timeout=60) as rb:
        thread.join()
        assert rb.name == made[0].name == name
    made[0].close()


def test_destroy_and_destroyed(rb):
    other = shmbuf.attach(rb.name)
    with pytest.raises(BufferInUse):
        other.destroy()
    assert not rb.destroyed
    shmbuf.attach(rb.name).destroy(force=True)
    assert rb.destroyed
    rb.destroy()
    with pytest.raises(BufferNotFound):
        shmbuf.attach(rb.name)


@pytest.mark.parametrize("face", FACES)
def test_a_pickle_attaches_with_this_handles_settings(make_rb, face):
    rb = make_rb(face=face, batch_size=5)
    rb.extend(rows(0, 3))
    blob = pickle.dumps(rb)
    assert len(blob) < 1000
    with pickle.loads(blob) as other:
        assert type(other) is face and other.batch_size == 5
        other.extend(rows(3, 2))
    assert same(rb[:], rows(0, 5))
    with shmbuf.attach(rb.name, batch_size=2) as here, pickle.loads(pickle.dumps(here)) as other:
        assert other.batch_size == 2


def test_the_context_manager_closes(make_rb, rb):
    with rb as same_one:
        assert same_one is rb
        rb.extend(rows(0, 3))
    for call in (
        lambda: rb.extend(rows(0, 1)),
        lambda: rb.sample(1),
        lambda: len(rb),
        lambda: rb[0],
        lambda: rb.stats(),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    rb.close()
    with shmbuf.attach(rb.name) as again:
        assert len(again) == 3, "a named buffer stays"


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_an_unnamed_buffer_dies_with_its_owner(end):
    rb = TensorDictReplayBuffer(storage=ShmStorage(10, drain="caller"))
    rb.extend(rows(0, 3))
    path, other = segment.path_of(rb.name), pickle.loads(pickle.dumps(rb))
    assert os.path.exists(path) and len(other) == 3
    if end == "close":
        rb.close()
    elif end == "with":
        with rb:
            pass
    else:
        del rb
        gc.collect()
    assert not os.path.exists(path)
    with pytest.raises(StorageLost):
        other.extend(rows(0, 1))
    other.close()


def test_the_default_storage_is_unnamed():
    with ReplayBuffer() as rb:
        rb.extend(rows(0, 3))
        assert rb.buffer.capacity == 1000 and rb.name.startswith("unnamed.") and len(rb.storage) == 3


@pytest.mark.parametrize("kw", [{"storage": 5}, {"storage": torch.zeros(3)}, {"sampler": 5}, {"sampler": "random"}])
def test_parts_that_are_none(kw):
    with pytest.raises(TypeError):
        TensorDictReplayBuffer(**kw)


def test_parts_may_be_made_by_a_callable():
    with TensorDictReplayBuffer(
        storage=lambda: ShmStorage(20, drain="caller"), sampler=RandomSampler, batch_size=2
    ) as rb:
        rb.extend(rows(0, 3))
        assert rb.buffer.capacity == 20 and rb.sample().batch_size == torch.Size([2])


@pytest.mark.parametrize("kw", [{"device": "mps"}, {"device": "meta"}, {"ndim": 0}])
def test_storage_arguments_that_cannot_be(kw):
    with pytest.raises(ValueError):
        ShmStorage(10, **kw)


def test_a_sampler_given_to_attach_is_the_one_that_draws(make_rb):
    rb = make_rb(schema={"policy_version": torch.int64})
    rb.extend(TensorDict({"policy_version": torch.arange(10)}, [10]))
    mine = StalenessAwareSampler(max_staleness=2, staleness_weight_fn=lambda s: s + 1)
    mine.consumer_version, unit = 9, Sequence(2, done_key=None)
    with shmbuf.attach(rb.name, sampler=mine, sample_unit=unit) as other:
        assert other.sampler is mine and other._unit is unit
        assert other.sample(50)["anchor_index"].min() == 7
        scheduler = StepScheduler(mine, "max_staleness", gamma=0.0, n_steps=1)
        scheduler.step()
        assert other.sample(50)["anchor_index"].min() == 9
        with pickle.loads(pickle.dumps(other)) as copy:  # its arguments travel, nothing else
            assert copy.sampler.max_staleness == 0 and copy.sampler.consumer_version == 0


@pytest.mark.parametrize(
    "kw, error",
    [
        ({"seed": "abc"}, TypeError),
        ({"seed": 1.5}, TypeError),
        ({"seed": True}, TypeError),
        ({"sampler": 5}, TypeError),
        ({"sample_unit": 5}, TypeError),
        ({"batch_size": -1}, ValueError),
        ({"sampler": PrioritizedSampler(max_capacity=3)}, ValueError),
    ],
    ids=str,
)
def test_what_attach_refuses_leaves_nothing_attached(rb, nothing_moves, kw, error):
    with pytest.raises(error, match=next(iter(kw)) if "sampler" not in kw else None):
        shmbuf.attach(rb.name, **kw)
    with pytest.raises(error):
        pickle.loads(pickle.dumps(rb)).set_sampler(5) if error is TypeError else rb.sample(-1)


@pytest.mark.parametrize("exists", ["error", "attach", "replace"])
@pytest.mark.parametrize(
    "kw",
    [
        {"seed": "abc"},
        {"seed": 2.0},
        {"limiter": Queue(3), "batch_size": 4},
        {"sampler": PrioritizedSampler(alpha=0.9), "limiter": "late"},
    ],
    ids=str,
)
def test_a_constructor_that_raises_leaves_no_buffer(make_name, monkeypatch, exists, kw):
    name = make_name()
    if kw.get("limiter") == "late":  # what goes wrong when the buffer is there
        kw = {**kw, "limiter": Queue(3)}
        monkeypatch.setattr(Buffer, "set_limiter", lambda *a, **k: (_ for _ in ()).throw(TimeoutError("limiter")))
    storage = ShmStorage(10, name=name, drain="caller", exists=exists)
    with pytest.raises((TypeError, ValueError, TimeoutError), match=r"seed|batch|limiter"):
        TensorDictReplayBuffer(storage=storage, **kw)
    assert name not in segment.names()
    monkeypatch.undo()
    with TensorDictReplayBuffer(storage=storage, seed=3) as rb:  # the storage is as it was
        assert rb.name == name


def test_a_constructor_that_raises_leaves_what_it_found(make_rb):
    rb = make_rb(schema={"k": torch.int64})
    rb.buffer.keep_priorities(0.5, 0.0)
    storage = ShmStorage(100, name=rb.name, drain="caller", exists="attach")
    with pytest.raises(ValueError, match="one formula"):
        TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(alpha=0.9))
    assert not rb.destroyed and rb.name in segment.names()
    opened = ShmStorage(100, name=rb.name, drain="caller", exists="attach")
    buffer = opened.buffer  # the user's: it stays open
    with pytest.raises(ValueError, match="one formula"):
        TensorDictReplayBuffer(storage=opened, sampler=PrioritizedSampler(alpha=0.9))
    assert opened.buffer is buffer and not buffer.closed
    buffer.close()


def test_seeds_of_a_buffer_are_whole_numbers(rb):
    for bad in ("abc", 1.5, None, True):
        with pytest.raises(TypeError, match="seed="):
            rb.buffer.seed(bad)
    for good in (0, -1, 2**70, np.int64(3)):
        rb.buffer.seed(good)
