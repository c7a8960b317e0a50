"""Where rows go: in turn, by rank, or nowhere."""

from __future__ import annotations

import heapq
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf.errors import SchemaError
from shmbuf.writers import (
    WRITERS,
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)


@pytest.fixture
def make(make_name):
    opened = []

    def made(writer, capacity=4):
        storage = shmbuf.ShmStorage(capacity, name=make_name(), drain="caller")
        opened.append(storage.buffer)
        writer.register_storage(storage)
        return storage, writer

    yield made
    for buffer in opened:
        buffer.close()


def ranked(values, first=0) -> TensorDict:
    v = torch.tensor(values, dtype=torch.float32)
    return TensorDict({"r": v, "k": torch.arange(first, first + len(v)), "n": {"x": v[:, None] * 2}}, [len(v)])


def whole(storage) -> list[tuple[float, int]]:
    """Rows that are stored, each checked against itself."""
    td = storage[:]
    assert (td["n", "x"][:, 0] == td["r"] * 2).all()
    return list(zip(td["r"].tolist(), td["k"].tolist(), strict=True))


def test_rows_go_in_turn(make):
    _, w = make(RoundRobinWriter())
    assert w.extend(ranked([1, 2, 3])).tolist() == [0, 1, 2]
    assert (w._cursor, w.write_count) == (3, 3)
    assert w.extend(ranked([4, 5])).tolist() == [3, 0]
    assert w.state_dict() == {"_cursor": 1, "_write_count": 5}
    with pytest.raises(AttributeError):
        w._cursor = 0


def test_the_best_rows_stay_and_the_others_get_minus_one(make):
    storage, w = make(TensorDictMaxValueWriter("r"))
    assert w.extend(ranked([3, 1, 2])).tolist() == [0, 1, 2]
    # one is appended, 5 takes the place of 1, 0 finds none, 4 that of 2
    assert w.extend(ranked([9, 5, 0, 4], first=10)).tolist() == [3, 1, -1, 2]
    assert whole(storage) == [(3, 0), (5, 11), (4, 13), (9, 10)]
    assert w.write_count == 4


def test_a_row_that_is_replaced_within_its_own_batch_is_not_stored(make):
    storage, w = make(TensorDictMaxValueWriter("r"), capacity=1)
    assert w.extend(ranked(list(range(10)))).tolist() == [-1] * 9 + [0]
    assert whole(storage) == [(9, 9)]
    assert w.extend(ranked(list(range(10)), first=50)).tolist() == [-1] * 10  # an equal rank replaces nothing
    assert whole(storage) == [(9, 9)]


@pytest.mark.parametrize("capacity", [1, 3, 8, 17])
def test_as_a_list_that_is_sorted(make, capacity):
    storage, w = make(TensorDictMaxValueWriter("r"), capacity)
    rng, best, k = np.random.default_rng(capacity), [], 0
    for _ in range(25):
        values = rng.integers(0, 1000, rng.integers(1, 7)).astype(float)
        slots = w.extend(ranked(values, first=k))
        best = heapq.nlargest(capacity, best + list(values))
        got = whole(storage)
        assert sorted((r for r, _ in got), reverse=True) == best
        for j, slot in enumerate(slots.tolist()):
            assert slot == -1 or got[slot] == (values[j], k + j)
        k += len(values)
    assert len(storage) == capacity


def test_what_another_handle_wrote_or_changed_counts(make):
    storage, w = make(TensorDictMaxValueWriter("r"))
    other = pickle.loads(pickle.dumps(w))
    buffer = shmbuf.Buffer.attach(storage.name)
    other.register_storage(shmbuf.ShmStorage.over(buffer))
    w.extend(ranked([10, 20, 30, 40]))
    assert other.extend(ranked([15], first=100)).tolist() == [0]
    assert w.extend(ranked([12, 17], first=200)).tolist() == [-1, 0]
    buffer.edit(buffer.ids_of(np.array([3])), {"r": np.array([1], np.float32)})
    assert other.extend(ranked([2], first=300)).tolist() == [3]
    storage.buffer.empty()
    assert w.extend(ranked([0.5], first=400)).tolist() == [0]
    buffer.close()


def test_a_known_state_is_not_read_again(make, monkeypatch):
    storage, w = make(TensorDictMaxValueWriter("r"))
    w.extend(ranked([1, 2, 3, 4]))
    monkeypatch.setattr(type(storage), "get", lambda *_: pytest.fail("read the whole column again"))
    assert w.extend(ranked([5, 6])).tolist() == [0, 1]
    assert w.extend(ranked([7])).tolist() == [2]


def test_a_batch_that_does_not_fit_changes_nothing(make):
    storage, w = make(TensorDictMaxValueWriter("r"))
    w.extend(ranked([1, 2, 3]))
    before = whole(storage)
    with pytest.raises(SchemaError):
        w.extend(ranked([8, 9]).exclude("k"))
    with pytest.raises(KeyError, match="rank key 'r': there is no such key"):
        w.extend(ranked([8, 9]).exclude("r"))
    with pytest.raises(TypeError):
        w.extend(ranked([8])[0])
    assert whole(storage) == before
    assert w.extend(ranked([])).tolist() == []


def test_ranks_of_several_values_and_of_nan():
    r = torch.tensor([[1.0, 5.0, 3.0, 2.0], [4.0, 0.0, 0.0, float("nan")]])
    td = TensorDict({"r": r, "one": r[:, :1].long(), "none": r[:, :0]}, [2])
    ranks = {k: TensorDictMaxValueWriter("r", k).rank(td)[0] for k in ("sum", "max", "min", "mean", "median")}
    assert ranks == {"sum": 11, "max": 5, "min": 1, "mean": 2.75, "median": 2}
    assert TensorDictMaxValueWriter("r").rank(td)[1] == -np.inf
    assert TensorDictMaxValueWriter("one", "mean").rank(td).tolist() == [1, 4]  # one number is not reduced
    with pytest.raises(ValueError, match="no number"):
        TensorDictMaxValueWriter("none").rank(td)
    with pytest.raises(ValueError, match="reduction='best'"):
        TensorDictMaxValueWriter(reduction="best")


def test_a_nan_is_the_first_to_go(make):
    storage, w = make(TensorDictMaxValueWriter("r"), capacity=2)
    w.extend(ranked([float("nan"), 1]).exclude("n"))
    assert w.extend(ranked([float("nan"), -5, 3], first=9).exclude("n")).tolist() == [-1, -1, 0]
    assert storage["k"].tolist() == [11, 1]


def test_an_immutable_buffer_refuses_rows(make):
    storage, w = make(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
        w.extend(ranked([1]))
    with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
        w.check_write()
    assert len(storage) == 0 and w.write_count == 0 and w.state_dict() == {}


def test_arguments_rebuild_each_kind():
    assert set(WRITERS) == {
        "RoundRobinWriter",
        "TensorDictRoundRobinWriter",
        "TensorDictMaxValueWriter",
        "ImmutableDatasetWriter",
    }
    w = TensorDictMaxValueWriter(("a", "b"), "max")
    again = WRITERS[w.name](**w.arguments())
    assert (again.rank_key, again.reduction) == (("a", "b"), "max") and repr(again) == repr(w)
    assert TensorDictMaxValueWriter().rank_key == ("next", "reward")
    assert TensorDictRoundRobinWriter().arguments() == {} and WRITERS["RoundRobinWriter"]().in_turn
    with pytest.raises(RuntimeError, match="has no storage yet"):
        _ = w.write_count


def test_several_dimensions_are_refused():
    class Wide:
        ndim = 2

    with pytest.raises(ValueError, match="more than one dimension"):
        TensorDictMaxValueWriter().register_storage(Wide())
