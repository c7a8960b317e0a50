"""Transforms of a replay buffer: inverse on the way in, forward on the way out."""

from __future__ import annotations

import pickle

import pytest
import torch

import shmbuf
from shmbuf import ShmStorage, TensorDictReplayBuffer
from tests.unit.helpers import unmoved
from tests.unit.helpers_torch import rows, same

transforms = pytest.importorskip("shmbuf.transforms")


def plus_one(td):
    return td.set("k", td["k"] + 1)


def first_only(td):
    return td.select("k")


class Doubled(transforms.Transform):
    """k is stored halved."""

    def forward(self, td):
        return td.set("k", td["k"] * 2)

    def inv(self, td):
        return td.set("k", td["k"] // 2)


class Dropped(transforms.Transform):
    def inv(self, td):
        return None


def factory():
    return plus_one


def test_forward_on_whatever_is_read(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 6))
    assert rb.append_transform(plus_one) is rb and len(rb.transform) == 1
    td, info = rb.sample(return_info=True)
    assert (td["k"] == td["row_id"] + 1).all() and (info["row_id"] == td["row_id"]).all()
    assert rb[:]["k"].tolist() == rb["k"].tolist() == rb.read_all_in_order()["k"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rb[2]["k"] == 3 and rb[[0, 5]]["k"].tolist() == [1, 6]
    assert rb.storage["k"].tolist() == list(range(6)), "as they were stored"


def test_in_order_forward_and_in_reverse_order_inverse(make_rb):
    rb = make_rb(batch_size=5)
    rb.append_transform(Doubled()).append_transform(plus_one)
    rb.extend(rows(4, 2))
    assert rb.storage["k"].tolist() == [2, 2] and rb["k"].tolist() == [5, 5]
    rb.insert_transform(0, plus_one)
    assert rb["k"].tolist() == [7, 7]
    for index in (4, -4):
        with pytest.raises(ValueError, match=f"index {index}"):
            rb.insert_transform(index, plus_one)
    with pytest.raises(TypeError):
        rb.append_transform(5)


def test_what_a_transform_drops_is_not_stored(make_rb):
    rb = make_rb()
    rb.append_transform(Dropped())
    with unmoved(rb.buffer):
        assert rb.extend(rows(0, 3)).tolist() == rb.put(rows(0, 3)).wait().tolist() == []
        assert rb.add(rows(0, None)).tolist() == []


def test_add_is_a_batch_of_one_row_to_a_transform(make_rb):
    rb = make_rb()
    seen = []
    rb.append_transform(lambda td: seen.append(td.batch_size) or td, invert=True)
    assert rb.add(rows(3, None)) == 0 and seen == [torch.Size([1])]
    assert same(rb.storage[:], rows(3, 1))


def test_a_transform_that_takes_keys_out_does_not_take_the_samples_numbers(make_rb):
    rb = make_rb(batch_size=5)
    rb.extend(rows(0, 6))
    rb.append_transform(first_only)
    assert sorted(rb.sample().keys()) == ["index", "k", "row_id"]


@pytest.mark.parametrize("way", ["pickle", "attach", "factory"])
def test_they_travel_by_pickle_and_are_a_handles_own(make_name, way):
    kw = {"transform_factory": factory} if way == "factory" else {"transform": plus_one}
    with TensorDictReplayBuffer(storage=ShmStorage(10, name=make_name(), drain="caller"), batch_size=4, **kw) as rb:
        rb.extend(rows(0, 1))
        assert rb["k"].tolist() == [1]
        with shmbuf.attach(rb.name) as other:
            assert other["k"].tolist() == [0], "not by name"
        other = shmbuf.attach(rb.name, **kw) if way == "attach" else pickle.loads(pickle.dumps(rb))
        with other:
            assert other["k"].tolist() == [1] and other.sample(timeout=None)["k"].tolist() == [1] * 4


def test_drawn_ahead_batches_are_transformed_and_a_new_transform_counts_at_once(make_name):
    storage = ShmStorage(10, name=make_name(), drain="caller")
    with TensorDictReplayBuffer(storage=storage, batch_size=4, prefetch=3, transform=plus_one) as rb:
        rb.extend(rows(0, 1))
        assert [rb.sample()["k"].tolist() for _ in range(5)] == [[1] * 4] * 5
        rb.append_transform(plus_one)
        assert rb.sample()["k"].tolist() == [2] * 4


def test_priorities_still_find_their_rows(make_name):
    storage = ShmStorage(10, name=make_name(), drain="caller")
    with shmbuf.TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, transform=first_only) as rb:
        rb.extend(rows(0, 10))
        td = rb.sample(50)
        td["td_error"] = (td["k"] == 3).float()
        rb.update_tensordict_priority(td)
        assert "priority_weight" in td and set(rb.sample(20)["k"].tolist()) >= {3}
