"""Storages of [time, lane]: rows come back where TorchRL would put them, lanes are streams, records are whole time steps."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

import shmbuf
from shmbuf import ReplayBuffer, SchemaError, ShmStorage, TensorDictReplayBuffer


def batch(b: int, t: int, first: int = 0) -> TensorDict:
    k = torch.arange(first, first + b * t).reshape(b, t)
    return TensorDict(
        {
            "k": k,
            "lane": torch.arange(b)[:, None].expand(b, t),
            "next": {"done": torch.zeros(b, t, 1, dtype=torch.bool)},
        },
        [b, t],
    )


def make(name, size=14, **kw):
    parts = {k: kw.pop(k) for k in ("sampler", "sample_unit") if k in kw}
    storage = ShmStorage(size, name=name, ndim=2, drain="caller", **kw)
    return TensorDictReplayBuffer(storage=storage, batch_size=6, **parts)


def test_cells_lie_time_first(name):
    with make(name, 13, batch_shape=(2,)) as rb:
        assert rb.storage.max_size == 14
        index = rb.extend(batch(2, 3))
        assert index.tolist() == [[t, b] for t in range(3) for b in range(2)]
        assert rb.storage.shape == (3, 2) and len(rb) == 6 and rb.write_count == 6
        assert rb[:]["k"].equal(batch(2, 3)["k"]) and rb.storage[:]["k"].equal(batch(2, 3)["k"].T)
        assert rb.add(batch(2, 1, 50)[:, 0]).tolist() == [[3, 0], [3, 1]]
        assert rb[:]["k"][:, 3].tolist() == [50, 51]


def test_a_capacity_that_is_no_multiple_is_refused_before_anything_changes(name):
    with make(name, 13) as rb:
        with pytest.raises(SchemaError, match=r"max_size=13 is no multiple of 2.*batch_shape=\(2,\).*14"):
            rb.extend(batch(2, 3))
        assert not rb.initialized
        assert len(rb.extend(batch(13, 1))) == 13


def test_other_lanes_are_refused(name):
    with make(name, 12) as rb:
        rb.extend(batch(2, 3))
        with pytest.raises(SchemaError, match=r"\[3\].*\[2\]"):
            rb.extend(batch(3, 2))
        with pytest.raises(SchemaError, match="ndim=2"):
            rb.extend(batch(2, 3)[0])
        assert len(rb) == 6


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(0, 1),
        (slice(None), 1),
        (0, 1),
        ...,
        torch.tensor([0, 1, 1]),
        (1, -1),
        (slice(None), slice(0, 3, 2)),
        (slice(None), slice(-2, None)),
        (..., 1),
        (0, ...),
        (..., slice(None), 0),
        (slice(None), torch.tensor([2, -1])),
        (torch.tensor([[1], [0]]), slice(1, 2)),
        (0, torch.tensor([2, 0])),
        (torch.tensor([1, 0, 1]), 2),
        (slice(None), None, 1),
        (0, torch.tensor([True, False, True])),
        [1, 0],
        ([0, 1], [2, 0]),
        torch.tensor([[True, False, True], [False, True, False]]),
    ],
)
def test_indexing_is_that_of_a_tensor(name, index):
    with make(name) as rb:
        data = batch(2, 3)
        rb.extend(data)
        assert rb[index]["k"].equal(data["k"][index])
        slots = torch.arange(6).reshape(3, 2).T  # of [lane, time]
        assert rb.storage.cells_at(index).tolist() == slots[index].tolist()
        other = index.T if isinstance(index, torch.Tensor) and index.dtype is torch.bool else index
        if other is index and isinstance(index, tuple):
            return
        assert rb.storage[other]["k"].equal(data["k"].T[other])


@pytest.mark.parametrize(
    "index", [2, (0, 3), (0, -4), (slice(None), torch.tensor([3])), (torch.tensor([2]), 0), (0, 0, 0)]
)
def test_what_is_not_there_is_refused(name, index):
    with make(name) as rb:
        rb.extend(batch(2, 3))
        with pytest.raises(IndexError):
            rb[index]
        with pytest.raises(IndexError):
            rb.set_at_("k", 0, index)


@pytest.mark.parametrize("time_dim", [0, 1])
def test_what_a_sample_calls_index_names_the_same_cells_everywhere(name, time_dim):
    """TorchRL reads with the two dimensions exchanged, and writes without; here both are (time, lane)."""
    storage = ShmStorage(14, name=name, ndim=2, drain="caller")
    with TensorDictReplayBuffer(storage=storage, batch_size=6, dim_extend=time_dim) as rb:
        data = batch(2, 4)
        rb.extend(data if time_dim else data.transpose(0, 1))
        td, info = rb.sample(return_info=True)
        pair = torch.tensor([[3, 1], [0, 1]])  # as many rows as dimensions
        for index, k in (
            (td["index"], td["k"]),
            (info["index"], td["k"]),
            (tuple(i.numpy() for i in info["index"]), td["k"]),
            (td["index"].reshape(3, 2, 2), td["k"].reshape(3, 2)),
            (pair, data["k"][pair[:, 1], pair[:, 0]]),
        ):
            assert rb[index]["k"].equal(k) and rb.storage[index]["k"].equal(k)
            rb.set_at_("k", k + 1000, index)
            assert rb[index]["k"].equal(k + 1000)
            rb[index] = rb[index].set("k", k)
            assert rb[index]["k"].equal(k) and rb["k"].sum() == data["k"].sum()


@pytest.mark.parametrize(
    "sampler",
    [shmbuf.RandomSampler, shmbuf.PrioritizedSampler, shmbuf.SamplerWithoutReplacement],
    ids=lambda s: s.__name__,
)
def test_samples_say_time_and_lane_and_can_be_fed_back(name, sampler):
    with make(name, sampler=sampler()) as rb:
        rb.extend(batch(2, 4))
        td, info = rb.sample(return_info=True)
        assert td["index"].shape == (6, 2) and [i.shape for i in info["index"]] == [(6,)] * 2
        assert rb.storage[info["index"]]["k"].equal(td["k"]) and td["index"][:, 1].equal(td["lane"])
        if sampler is shmbuf.PrioritizedSampler:
            assert rb.update_priority(td["index"], torch.ones(6)).all()
            assert rb.update_priority(info["index"], torch.zeros(6)).all()
            rb.update_priority(rb.extend(batch(2, 2, 90)), torch.tensor([[0.0, 0.0], [0.0, 9.0]]))
            everything = torch.tensor([[t, b] for t in range(4) for b in range(2)])
            rb.update_priority(everything, torch.zeros(8))
            hot = rb.sample(200)
            assert (hot["k"] == 93).float().mean() > 0.9


def test_slices_stay_in_their_lane_whatever_the_ring_splits_and_another_collector_puts(name):
    sampler = shmbuf.SliceSampler(slice_len=3)
    with make(name, 600, sampler=sampler, ring_bytes=4096) as rb, pickle.loads(pickle.dumps(rb)) as other:
        for i in range(2):
            rb.extend(batch(3, 150, 1000 * i))
            other.put(batch(3, 5, 1000 * i + 500))
        td = rb.sample(300)
        k = td["k"].reshape(-1, 3)
        # A lane goes on with the same lane of its collector's next batch: from 149 to 1000, and from 504 to 1500.
        assert (
            torch.isin(k.diff(dim=1), torch.tensor([1, 851, 996])).all() and (k.diff(dim=1) == 1).float().mean() > 0.9
        )
        assert td["index"][:, 1].equal(td["lane"])
        assert (rb[:]["lane"] == torch.arange(3)[:, None]).all()


def test_forms_have_lanes_too(name):
    with ReplayBuffer(storage=ShmStorage(12, name=name, ndim=2), batch_size=4) as rb:
        x = torch.arange(12.0).reshape(2, 3, 2)
        rb.extend(x)
        assert rb[:].equal(x)
        with pickle.loads(pickle.dumps(rb)) as there:
            assert there.storage.ndim == 2 and there[:].equal(x)


# ---- what readers can name, writers can change; and what is saved comes back ------------------------------------------


def test_an_edit_names_cells_as_a_sample_does(name):
    with make(name, 12, batch_shape=(3,)) as rb:
        rb.extend(batch(3, 4))
        rb.set_at_("k", torch.tensor([99]), torch.tensor([[2, 1]]))
        assert rb["k"][1, 2] == 99 and (rb["k"] == 99).sum() == 1
        whole = rb["k"].clone()
        rb.set_("k", rb["k"])
        rb[:] = rb[:]
        rb.write_all(rb.read_all_in_order())
        assert rb["k"].equal(whole)
        with pytest.raises(IndexError, match="-1 of the time dimension"):
            rb.set_at_("k", torch.tensor([0]), torch.tensor([[-1, 1]]))


def test_rows_that_are_no_whole_steps_are_refused(name):
    with make(name, 12, batch_shape=(3,)) as rb:
        rb.extend(batch(3, 2))
        row = {"k": np.zeros(1, np.int64), "lane": np.zeros(1, np.int64), "next": {"done": np.zeros((1, 1), bool)}}
        with pytest.raises(SchemaError, match=r"1 rows are no whole time steps: .* 3 cells a step"):
            rb.buffer.put(row)
        assert len(rb) == 6 and rb["k"].shape == (3, 2)


def test_a_checkpoint_keeps_the_lanes(name, tmp_path):
    with make(name, 12, batch_shape=(3,)) as rb:
        rb.extend(batch(3, 4))
        rb.dumps(tmp_path / "a")
        with make(f"{name}.b", 12) as other:
            other.loads(tmp_path / "a")
            assert other["k"].equal(rb["k"]) and other.storage.shape == (4, 3)
            other.extend(batch(3, 1, 50))
            assert other["k"][:, 0].tolist() == [50, 51, 52]
        with make(f"{name}.c", 12) as fresh:
            flat = TensorDictReplayBuffer(storage=ShmStorage(12, drain="caller"))
            with pytest.raises(SchemaError, match="rows of 2 dimensions, the buffer's storage has ndim=1"):
                flat.loads(tmp_path / "a")
            flat.extend(batch(1, 5)[0])
            flat.dumps(tmp_path / "flat")
            flat.close()
            with pytest.raises(SchemaError, match="rows of 1 dimensions, the buffer's storage has ndim=2"):
                fresh.loads(tmp_path / "flat")
            assert not fresh.initialized


def test_a_checkpoint_keeps_forms_and_python_values(tmp_path):
    rb = ReplayBuffer(storage=ShmStorage(10, drain="caller"), batch_size=2)
    rb.extend([{"a": torch.ones(2), "s": "hello"}, {"a": torch.zeros(2), "s": "wörld"}])
    rb.dumps(tmp_path / "a")
    other = ReplayBuffer(storage=ShmStorage(10, drain="caller"), batch_size=2)
    other.loads(tmp_path / "a")
    assert [other[i]["s"] for i in range(2)] == ["hello", "wörld"] and other[1]["a"].tolist() == [0, 0]
    rb.close(), other.close()


def test_time_first_where_dim_extend_says_so(make_name):
    name = make_name()
    k = torch.arange(8).reshape(4, 2)  # [T, lanes]
    with TensorDictReplayBuffer(
        storage=ShmStorage(12, name=name, ndim=2, drain="caller"), dim_extend=0, batch_size=4
    ) as rb:
        index = rb.extend(TensorDict({"k": k, "v": torch.zeros(4, 2, dtype=torch.int64)}, [4, 2]))
        assert index.tolist() == [[t, lane] for t in range(4) for lane in range(2)]
        assert rb[:]["k"].tolist() == rb["k"].tolist() == k.tolist()
        assert rb[1:3, 0]["k"].tolist() == [2, 4]
        rb.set_at_("k", k[1] + 50, 1)
        rb[3] = TensorDict({"k": k[3] + 60, "v": torch.ones(2, dtype=torch.int64)}, [2])
        assert rb["k"].tolist() == [[0, 1], [52, 53], [4, 5], [66, 67]]
        rb.write_all(rb.read_all_in_order())
        td = rb.sample()
        assert (td["k"] == rb["k"][tuple(td["index"].T)]).all()
        new = torch.arange(8).reshape(4, 2) * 10
        got = rb.update_if_present(index=index, generation=rb.writer.generations_of(index), patch={"k": new})
        assert got.updated.all() and rb["k"].tolist() == new.tolist()
        for other in (shmbuf.attach(name), pickle.loads(pickle.dumps(rb))):
            with other:
                assert other["k"].tolist() == new.tolist(), "others read it the same way"
    with pytest.raises(ValueError, match="dim_extend=1 with a storage of ndim=3"):
        TensorDictReplayBuffer(storage=ShmStorage(8, ndim=3), dim_extend=1)
    with TensorDictReplayBuffer(storage=ShmStorage(12, ndim=3), dim_extend=0) as rb:
        k = torch.arange(12).reshape(3, 2, 2)
        rb.extend(TensorDict({"k": k}, [3, 2, 2]))
        assert rb["k"].tolist() == k.tolist() and rb.storage["k"].tolist() == k.tolist()


@pytest.mark.parametrize("done_key", [("next", "done"), None])
@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_windows_stay_in_their_lane_and_say_where(name, boundary, done_key):
    unit = shmbuf.Sequence(3, episode_boundary=boundary, done_key=done_key, burn_in=1)
    with make(name, 15, sample_unit=unit) as rb:
        rb.extend(batch(3, 4))
        rb.extend(batch(3, 3, 100))  # time goes round: the oldest two steps are overwritten
        lane = [2, 3, 100, 101, 102]
        td, info = rb.sample(40, return_info=True)
        assert td["index"].shape == td["anchor_index"].shape == (160, 2)
        assert [i.shape for i in info["index"]] == [(160,)] * 2
        assert (td["lane"].reshape(-1, 4) == td["lane"].reshape(-1, 4)[:, :1]).all()
        assert td["anchor_index"][:, 1].equal(td["lane"]) and (td["anchor_row_id"] % 15 % 3 == td["lane"]).all()
        k, valid = td["k"].reshape(-1, 4), td["validity_mask"].reshape(-1, 4)
        for row, ok, of in zip(k.tolist(), valid.tolist(), td["lane"][::4].tolist(), strict=True):
            mine = [x + (4 if x < 100 else 3) * of for x in lane]
            at = [mine.index(x) for x in row]
            assert all(b - a == 1 for a, b, x, y in zip(at, at[1:], ok, ok[1:], strict=False) if x and y), (row, ok)
        index, said = unit.expand((torch.tensor([1]), torch.tensor([2])), {}, rb.storage)
        assert isinstance(index, tuple) and index[1].tolist() == [2] * 4
        assert said["anchor_index"].tolist() == [[1, 2]] * 4


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_tensorclasses_have_lanes(name, dim_extend):
    x = torch.arange(24.0).reshape(2, 6, 2) if dim_extend else torch.arange(24.0).reshape(6, 2, 2)
    with ReplayBuffer(storage=ShmStorage(14, name=name, ndim=2), batch_size=4, dim_extend=dim_extend) as rb:
        rb.extend(Point(x=x, y=x[..., 0].long(), batch_size=x.shape[:2]))
        assert rb.add(Point(x=torch.ones(2, 2), y=torch.ones(2).long(), batch_size=[2])).tolist() == [[6, 0], [6, 1]]
        assert isinstance(rb[:], Point) and rb[:].x.narrow(dim_extend, 0, 6).equal(x)
        assert rb.sample().batch_size == (4,)
        for wrong in ([], [2], [2, 6, 2]):
            with pytest.raises(SchemaError, match=r"with ndim=2 extend\(\) takes 2 dimensions"):
                rb.extend(Point(x=torch.zeros(2, 6, 2), y=torch.zeros(2, 6, 2), batch_size=[2, 6, 2][: len(wrong)]))
