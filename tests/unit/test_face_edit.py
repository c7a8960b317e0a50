"""Rows changed in place through the face."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from shmbuf import PrioritizedSampler, ReplayBuffer, SchemaError, ShmStorage, TensorDictReplayBuffer
from tests.unit.helpers import unmoved
from tests.unit.helpers_torch import rows, same
from tests.unit.test_indexing_torch import LARGE


@pytest.fixture
def full(make_rb):
    rb = make_rb(10)
    rb.extend(rows(0, 10))
    return rb


INDICES = [2, -1, slice(2, 5), slice(None, None, 3), [1, 7], torch.tensor([0, 9, 3]), torch.arange(10) % 2 == 0, ...]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_set_at_changes_these_rows_and_no_others(full, index):
    expected = rows(0, 10)
    expected["obs"][index] = -1.0
    value = torch.full_like(expected["obs"][index], -1)
    assert full.set_at_("obs", value, index) is full
    assert same(full[:], expected)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_replaced_by_index(full, index):
    expected, new = rows(0, 10), rows(100, 10)
    full[index] = new[index]
    expected[index] = new[index]
    assert same(full[:], expected)


def test_a_number_or_one_row_goes_to_all(full):
    full.set_at_("k", 7, [1, 2])
    full.set_at_("obs", torch.arange(4.0), slice(5, 8))
    assert full["k"].tolist() == [0, 7, 7, 3, 4, 5, 6, 7, 8, 9]
    assert full["obs"][5:8].tolist() == [[0, 1, 2, 3]] * 3


def test_set_and_update_change_all_rows(full):
    assert full.set_("k", torch.arange(10) + 50) is full
    assert full["k"].tolist() == list(range(50, 60))
    obs = torch.randn(10, 4)
    full.update_({"obs": obs, "next": {"obs": -obs}}, clone=True)
    assert (full["obs"] == obs).all() and (full["next", "obs"] == -obs).all()
    full.update_(rows(0, 10), keys_to_update=["k", ("next", "obs")])
    assert full["k"].tolist() == list(range(10)) and (full["obs"] == obs).all()
    full["k"] = torch.zeros(10, dtype=torch.int64)
    assert full["k"].tolist() == [0] * 10


def test_what_was_read_in_order_can_be_written_back(make_rb):
    rb = make_rb(10)
    rb.extend(rows(0, 6))
    part = rb.read_all_in_order(end=3)
    part["k"] += 10
    rb.write_all(part, end=3)
    assert rb["k"].tolist() == [10, 11, 12, 3, 4, 5]
    part = rb.read_all_in_order(4)
    part["k"] *= 0
    rb.write_all(part)
    assert rb["k"].tolist() == [0, 0, 0, 0, 4, 5]
    rb.extend(rows(6, 4))
    rb.write_all(rows(20, 10))
    assert same(rb[:], rows(20, 10))
    with pytest.raises(RuntimeError, match=r"batch size \[3\] for an index of shape \[10\]"), unmoved(rb.buffer):
        rb.write_all(rows(0, 3))
    sample = rb.sample(1)
    rb[int(sample["index"])] = sample[0]
    assert same(rb[:], rows(20, 10)), "a sample's own numbers are no keys"


WRONG = [
    (lambda rb: rb.set_("nope", torch.zeros(10)), KeyError, "'nope' is not stored"),
    (lambda rb: rb.set_at_(("next", "nope"), 0, 1), KeyError, "is not stored"),
    (lambda rb: rb.update_({"obs": torch.zeros(10, 4), "nope": torch.zeros(10)}), KeyError, "'nope'"),
    (lambda rb: rb.update_({}, keys_to_update=["obs"]), KeyError, "keys_to_update"),
    (lambda rb: rb.update_(5), TypeError, "not int"),
    (lambda rb: rb.set_("obs", torch.zeros(9, 4)), RuntimeError, r"shape \[9, 4\] for 10 rows: \[10, 4\]"),
    (lambda rb: rb.set_("obs", torch.zeros(4)), RuntimeError, r"shape \[4\]"),
    (lambda rb: rb.set_at_("obs", torch.zeros(3), [0, 1]), RuntimeError, r"\[2, 4\] is needed"),
    (lambda rb: rb.set_at_("obs", torch.zeros(2, 4).double(), [0, 1]), SchemaError, "expected float32, got float64"),
    (lambda rb: rb.set_at_("k", 0.5, [0]), SchemaError, "expected int64"),
    (lambda rb: rb.set_at_("k", 0, 10), IndexError, "10"),
    (lambda rb: rb.set_at_("k", 0, torch.ones(9, dtype=torch.bool)), IndexError, r"mask of shape \[9\]: 10 rows"),
    (lambda rb: rb.set_at_("k", 0, True), IndexError, "bool"),
    (lambda rb: rb.__setitem__(0, 5), SchemaError, "not int"),
    (lambda rb: rb.__setitem__(0, rows(0, None).exclude("k")), SchemaError, "'k' is missing"),
    (lambda rb: rb.__setitem__(0, rows(0, None).set("more", torch.zeros(()))), SchemaError, "'more' is not in"),
    (lambda rb: rb.__setitem__(slice(0, 3), rows(0, 2)), RuntimeError, r"batch size \[2\]"),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_is_refused_changes_nothing(full, call, error, text):
    with pytest.raises(error, match=text), unmoved(full.buffer):
        call(full)
    assert same(full[:], rows(0, 10))


def test_update_if_present_leaves_other_rows_alone(make_name):
    storage = ShmStorage(4, name=make_name(), schema={"x": "float32", "v": "int64"}, drain="caller")
    with TensorDictReplayBuffer(storage=storage) as rb:

        def put(*v: int):
            rb.extend(TensorDict({"x": torch.zeros(len(v)), "v": torch.tensor(v)}, [len(v)]))

        put(5, 5, 5, 5)
        handle = {"index": torch.arange(4), "generation": torch.zeros(4, dtype=torch.int64)}
        put(9)  # overwrites slot 0
        got = rb.update_if_present(**handle, patch={"x": torch.ones(4)})
        assert got.updated.tolist() == [False, True, True, True]
        assert (got.updated_count, got.stale_count, got.version_rejected) == (3, 1, None)
        assert rb["x"].tolist() == [0, 1, 1, 1]
        new = dict(version_key="v", version=torch.tensor([6, 6, 4, 5]), require_newer=True)
        future = rb.submit_update_if_present(**handle, patch={"x": torch.full((4,), 2.0)}, **new)
        rb.synchronize()
        got = future.result(60)
        assert got.updated.tolist() == [False, True, False, False]
        assert (got.updated_count, got.stale_count, got.version_rejected_count) == (1, 1, 2)
        assert rb["x"].tolist() == [0, 2, 1, 1] and rb["v"].tolist() == [9, 6, 5, 5]
        twice = {"index": torch.tensor([3, 3, 3]), "generation": torch.zeros(3, dtype=torch.int64)}
        got = rb.update_if_present(**twice, patch={"x": torch.arange(3.0)}, version_key="v", version=[7, 8, 8])
        assert got.updated.tolist() == [False, False, True] and rb["x"][3] == 2
        for kw, error, text in [
            ({"version_key": "v"}, ValueError, "provided together"),
            ({"version_key": "a.b", "version": 1}, ValueError, "Dotted-string"),
            ({"version_key": "x", "version": 1}, ValueError, "may not appear in patch"),
            ({"version_key": "w", "version": 1}, KeyError, "'w'"),
        ]:
            with pytest.raises(error, match=text), unmoved(rb.buffer):
                rb.update_if_present(**handle, patch={"x": torch.zeros(4)}, **kw)
        with pytest.raises(ValueError, match="same number of records"):
            rb.update_if_present(index=[0, 1], generation=[0], patch={})
        rb.shutdown()
        with pytest.raises(RuntimeError, match="cannot accept updates"):
            rb.submit_update_if_present(**handle, patch={})


@pytest.mark.parametrize(
    "index",
    [
        [True, False, True, False, False],
        torch.tensor([0, 2]),
        [0, 2],
        np.array([0, 2]),
        slice(0, 3, 2),
        (0, 2),
        [-5, 2],
    ],
)
def test_an_index_means_the_same_to_a_write_as_to_a_read(make_rb, index):
    rb = make_rb()
    rb.extend(rows(0, 5))
    read = rb[index]["k"]
    rb.set_at_("k", torch.full((len(read),), 99), index)
    assert rb[index]["k"].tolist() == [99, 99] and (rb[:]["k"] == 99).sum() == 2


@pytest.mark.parametrize(
    "index", [None, (), [True, False], torch.zeros(0, dtype=torch.bool), [0.5], True, *LARGE], ids=repr
)
def test_what_is_no_index_is_refused_and_changes_nothing(make_rb, index):
    rb = make_rb()
    rb.extend(rows(0, 5))
    for write in (lambda: rb.set_at_("k", torch.tensor(99), index), lambda: rb.__setitem__(index, rows(99, None))):
        with pytest.raises(IndexError), unmoved(rb.buffer):
            write()
    assert rb[:]["k"].tolist() == list(range(5))


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**70, -(2**63) - 1])
def test_no_row_has_a_number_that_int64_does_not_hold(make_name, number):
    with TensorDictReplayBuffer(
        storage=ShmStorage(5, name=make_name(), drain="caller"), sampler=PrioritizedSampler(5)
    ) as rb:
        rb.extend(rows(0, 5))
        for call in (
            lambda: rb.update_priority(number, 2.0),
            lambda: rb.update_priority([0, number], 2.0),
            lambda: rb.update_priority(None, 2.0, row_id=[number]),
            lambda: rb.mark_update([number]),
        ):
            with pytest.raises(IndexError, match=str(number)), unmoved(rb.buffer):
                call()


@pytest.mark.parametrize("index", [2**63, [2**64 - 1], np.uint64(2**64 - 1)], ids=repr)
def test_large_numbers_are_no_index_of_several_dimensions_either(make_name, index):
    with TensorDictReplayBuffer(
        storage=ShmStorage(12, name=make_name(), drain="caller", ndim=2, batch_shape=(3,))
    ) as rb:
        rb.extend(TensorDict({"k": torch.arange(6).reshape(3, 2)}, [3, 2]))
        for call in (lambda: rb[index], lambda: rb.set_at_("k", 9, index)):
            with pytest.raises(IndexError), unmoved(rb.buffer):
                call()


BEFORE = [
    lambda rb: rb.set_("k", torch.zeros(0)),
    lambda rb: rb.set_at_("k", 0, 0),
    lambda rb: rb.update_({"k": torch.zeros(0)}),
    lambda rb: rb.write_all(rows(0, 2)),
    lambda rb: rb.__setitem__(0, rows(0, None)),
    lambda rb: rb.update_if_present(index=[0], generation=[0], patch={"k": [1]}),
]


@pytest.mark.parametrize("call", BEFORE, ids=["set_", "set_at_", "update_", "write_all", "setitem", "if_present"])
def test_before_the_first_rows_there_is_nothing_to_change(make_rb, call):
    rb = make_rb(schema=None)
    with pytest.raises(
        RuntimeError, match=r"has no rows yet, so there is nothing to change: extend\(\) stores the first"
    ):
        call(rb)
    assert not rb.initialized


def test_before_the_first_rows_nothing_can_be_marked(make_name):
    with TensorDictReplayBuffer(storage=ShmStorage(5, name=make_name()), sampler=PrioritizedSampler(5)) as rb:
        for call in (lambda: rb.mark_update([0]), lambda: rb.update_priority([0], 1.0)):
            with pytest.raises(IndexError, match="0 rows are stored"):
                call()


NO_ROWS = [[1], (1,), [[1]], ["a"], [None], [rows(0, None), 1], [torch.zeros(4)]]


@pytest.mark.parametrize("value", NO_ROWS, ids=[str(i) for i in range(len(NO_ROWS))])
def test_a_list_of_something_else_than_rows_is_refused_by_name(full, value):
    kind = type(value[-1]).__name__  # as extend() says it
    for call in (
        lambda: full.__setitem__(0, value),
        lambda: full.__setitem__([0], value),
        lambda: full.write_all(value),
        lambda: full.write_all(value, 1),
    ):
        with pytest.raises(SchemaError, match=f"a list to store holds TensorDicts, not {kind}"), unmoved(full.buffer):
            call()
    assert same(full[:], rows(0, 10))


def test_one_row_is_no_batch_to_write_all(make_rb):
    rb = make_rb(10)
    rb.extend(rows(0, 4))
    with pytest.raises(SchemaError, match=r"batch size \[n\]; got one row"), unmoved(rb.buffer):
        rb.write_all(rows(0, None))


FORMS = [  # rows, one row, and what is no row of theirs
    (torch.arange(6.0), torch.tensor(9.0), torch.tensor([9.0]), 5),
    (np.arange(12).reshape(6, 2), np.array([7, 7]), np.array([7]), torch.tensor([7, 7])),
    (
        {"a": torch.arange(6), "b": [torch.zeros(6, 2)]},
        {"a": torch.tensor(9), "b": [torch.ones(2)]},
        {"a": torch.tensor(9)},
        5,
    ),
    ([f"row {i}" for i in range(6)], "another", 5j, ["another"]),
]


@pytest.mark.parametrize(("many", "one", "wrong", "other"), FORMS, ids=["tensor", "array", "dict", "text"])
def test_rows_of_other_forms_are_replaced_by_index(make_name, many, one, wrong, other):
    """As TorchRL's `rb[index] = rows` of tensors: by what `extend` and `add` take, and what `rb[index]` gives."""

    with ReplayBuffer(storage=ShmStorage(6, name=make_name(), drain="caller")) as rb:
        rb.extend(many)
        before = [repr(rb[i]) for i in range(6)]
        for value in (wrong, other):
            with pytest.raises((SchemaError, RuntimeError)), unmoved(rb.buffer):
                rb[2] = value
        rb[2] = one
        assert [repr(rb[i]) for i in range(6)] == [*before[:2], repr(one), *before[3:]]
        rb[[0, 1]] = rb[[4, 5]]
        assert [repr(rb[i]) for i in range(6)] == [*before[4:], repr(one), *before[3:]]
        rb.write_all(many)
        assert [repr(rb[i]) for i in range(6)] == before
        with pytest.raises((SchemaError, RuntimeError)), unmoved(rb.buffer):
            rb[[0, 1]] = many


# ---- numbers and Python values ----------------------------------------------------------------------------------------

DTYPES = {"u": "uint8", "i": "int32", "l": "uint64", "f": "float32", "h": "float16", "b": "bool", "q": "float8_e4m3fn"}
DAMAGED = [
    ("u", 300),
    ("u", -1),
    ("u", [1, 2, 999]),
    ("u", 1.0),
    ("i", 2**40),
    ("i", np.array([2**33 + 1] * 3)),
    ("i", np.array([1, 2, 3])),
    ("i", np.int64(3)),
    ("i", [np.int64(1)] * 3),
    ("i", torch.tensor(3)),
    ("i", [torch.tensor(3)] * 3),
    ("i", "3"),
    ("i", [None, 1, 2]),
    ("l", -1),
    ("l", 2**64),
    ("f", 1e300),
    ("f", 2**24 + 1),
    ("f", np.float64(0.1)),
    ("f", 1j),
    ("h", 70000.0),
    ("q", 1e9),
    ("b", 5),
    ("b", -1),
    ("b", 0.0),
]
KEPT = [
    ("u", [0, 255, True]),
    ("i", -(2**31)),
    ("i", np.array([1, 2, 3], ">i4")),
    ("i", np.int32(3)),
    ("l", 2**64 - 1),
    ("f", 0.1),
    ("f", [1, float("inf"), -2.5]),
    ("f", np.float32(0.1)),
    ("f", np.arange(9.0, dtype="f4")[::3]),
    ("h", [1, 2, 65504.0]),
    ("q", 0.5),
    ("b", [True, 0, 1]),
]


@pytest.fixture
def dtypes(make_name):
    with TensorDictReplayBuffer(storage=ShmStorage(3, name=make_name(), schema=DTYPES, drain="caller")) as rb:
        rb.extend(TensorDict({k: torch.zeros(3).to(getattr(torch, d)) for k, d in DTYPES.items()}, [3]))
        yield rb


@pytest.mark.parametrize(("key", "value"), DAMAGED, ids=str)
def test_a_number_that_its_column_cannot_hold_is_refused(dtypes, key, value):
    for call in (
        lambda: dtypes.set_at_(key, value, [0, 1, 2]),
        lambda: dtypes.set_(key, [value] * 3 if np.ndim(value) == 0 else value),
        lambda: dtypes.update_({key: [value] * 3 if np.ndim(value) == 0 else value}),
        lambda: dtypes.update_if_present(
            index=[0, 1, 2], generation=[0, 0, 0], patch={key: [value] * 3 if np.ndim(value) == 0 else value}
        ),
    ):
        with pytest.raises(SchemaError, match="Nothing was changed"), unmoved(dtypes.buffer):
            call()


@pytest.mark.parametrize(("key", "value"), KEPT, ids=str)
def test_a_number_that_its_column_holds_is_taken(dtypes, key, value):
    dtypes.set_at_(key, value, [0, 1, 2])
    expected = [x + 0 for x in np.broadcast_to(np.asarray(value, object), 3).tolist()]
    assert [x + 0 for x in dtypes[key].tolist()] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "version", [300, -1, 2.5, torch.tensor(300), np.array([1, 2, 256]), torch.tensor(2.5)], ids=str
)
def test_a_version_that_its_column_cannot_hold_is_refused(dtypes, version):
    with pytest.raises(SchemaError, match="Nothing was changed"), unmoved(dtypes.buffer):
        dtypes.update_if_present(
            index=[0, 1, 2], generation=[0, 0, 0], patch={"f": [1.0, 2.0, 3.0]}, version_key="u", version=version
        )


@pytest.mark.parametrize(
    ("index", "generation", "error"),
    [([5], [0], IndexError), ([-1], [0], IndexError), ([0.7], [0], TypeError), ([0], [2**61], IndexError)],
)
def test_an_update_of_what_is_no_slot_is_refused(dtypes, index, generation, error):
    with pytest.raises(error), unmoved(dtypes.buffer):
        dtypes.update_if_present(index=index, generation=generation, patch={"u": [1]})


def test_an_update_of_what_never_was_a_row_is_stale(dtypes):
    with unmoved(dtypes.buffer):
        got = dtypes.update_if_present(index=[0, 1], generation=[-1, -7], patch={"u": [1, 1]})
    assert got.updated.tolist() == [False, False] and got.stale_count == 2


def test_cells_to_update_are_those_of_the_lanes(make_name):
    with TensorDictReplayBuffer(
        storage=ShmStorage(6, name=make_name(), ndim=2, batch_shape=(2,), drain="caller")
    ) as rb:
        rb.extend(TensorDict({"k": torch.arange(6).reshape(2, 3)}, [2, 3]))
        for index in ([[0, 2]], [[0, -1]], [[-1, 0]], [[3, 0]]):
            with pytest.raises(IndexError), unmoved(rb.buffer):
                rb.update_if_present(index=torch.tensor(index), generation=[0], patch={"k": [9]})
        rb.update_if_present(index=torch.tensor([[2, 1]]), generation=[0], patch={"k": [9]})
        assert rb["k"].tolist() == [[0, 1, 2], [3, 4, 9]]


def test_rows_are_named_by_id(full):
    batch = full.sample(4)
    full.extend(rows(50, 8))  # slots 0 to 7
    before = full["k"].clone()
    stale = full.stats()["stale_edits"]
    gone = batch["row_id"] < 8
    assert full.set_at_("k", -batch["k"] - 1, None, row_id=batch["row_id"]) is full
    before[batch["index"][~gone]] = -batch["k"][~gone] - 1
    assert full["k"].equal(before) and full.stats()["stale_edits"] - stale == int(gone.sum())
    full.set_at_("k", torch.tensor([[7], [8]]), None, row_id=torch.tensor([[8], [9]]))
    assert full["k"][8:].tolist() == [7, 8]
    with pytest.raises(TypeError, match="not both"), unmoved(full.buffer):
        full.set_at_("k", 0, [1], row_id=[1])
    with pytest.raises(IndexError, match="no such row"), unmoved(full.buffer):
        full.set_at_("k", 0, None, row_id=[8, 99])


def test_python_values_are_edited_as_they_are_put(make_name):
    def text(*s: str):
        return TensorDict({"x": torch.arange(float(len(s))), "s": NonTensorStack(*s)}, [len(s)])

    with TensorDictReplayBuffer(storage=ShmStorage(4, name=make_name(), drain="caller"), batch_size=2) as rb:

        def stored():
            return [rb[i]["s"] for i in range(len(rb))]

        rb.extend(text("a", "b", "c"))
        rb.extend([TensorDict({"x": torch.tensor(3.0), "s": "d"}, [])])
        assert stored() == ["a", "b", "c", "d"]
        rb.write_all(rb.read_all_in_order())
        assert stored() == ["a", "b", "c", "d"]
        rb[0] = rb[1]
        rb[[2, 3]] = rb[[3, 2]]
        assert stored() == ["b", "b", "d", "c"] and rb["x"].tolist() == [1, 1, 3, 2]
        rb[[0, 1]] = [rb[2], rb[3]]
        assert stored() == ["d", "c", "d", "c"]
        rb.set_at_("s", ["e", [1, 2]], [0, 1])
        rb.set_at_("s", {"k": [3]}, 2)
        assert stored() == ["e", [1, 2], {"k": [3]}, "c"]
        rb.set_at_("s", "same", slice(0, 2)).set_at_("s", ["one", "list"], -1)
        assert stored() == ["same", "same", {"k": [3]}, ["one", "list"]]
        rb.set_("s", rb["s"])
        rb.update_(text("m", "n", "o", "p"), keys_to_update=["s"])
        assert stored() == ["m", "n", "o", "p"]
        got = rb.update_if_present(index=[0, 2], generation=[0, 0], patch={"s": ["q", None]})
        assert got.updated.all() and stored() == ["q", "n", None, "p"]
        for call in (
            lambda: rb.set_at_("s", ["a"], [0, 1]),
            lambda: rb.set_("s", "one for all"),
            lambda: rb.set_at_("s", torch.zeros(1), [0]),
            lambda: rb.set_at_("s", "x" * 500, [0]),
            lambda: rb.set_at_("s", object(), [0]),
            lambda: rb.set_at_("x", "text", [0]),
            lambda: rb.__setitem__(0, TensorDict({"x": "text", "s": "a"}, [])),
        ):
            with pytest.raises((SchemaError, RuntimeError)), unmoved(rb.buffer):
                call()


def test_of_edits_in_the_background_that_fail_only_the_first_is_kept(full):
    how = {"index": [0], "generation": [0]}
    for key in ("first", "second", "third"):
        with pytest.raises(KeyError):
            full.submit_update_if_present(**how, patch={key: torch.zeros(1)}).result(60)
    full.submit_update_if_present(**how, patch={"k": torch.tensor([5])}).result(60)
    assert len(full._pending) <= 2
    with pytest.raises(KeyError, match="first"):
        full.synchronize()
    full.synchronize()
    assert full["k"][0] == 5


def test_a_plain_tensor_and_what_it_means_otherwise_are_written_alike(make_rb):
    """The core takes [n, *shape] tensors and int64 slots as they are; all else goes the long way round."""
    rb, like = make_rb(10), make_rb(10)
    for b in (rb, like):
        b.extend(rows(0, 10))
        b.extend(rows(10, 7))  # round the end: row ids are 7 to 16, and their slots begin with 10 to 16
    index = torch.tensor([0, 9, -1, 3, -10, 6])
    obs = torch.randn(6, 4)
    assert rb._set_plain("obs", obs, index, None) and not rb._set_plain("obs", obs.tolist(), index, None)
    like.set_at_("obs", obs, index.tolist())
    assert same(rb[:], like[:]) and (rb["obs"][[9, 3, 0, 6]] == obs[[2, 3, 4, 5]]).all(), (
        "of a row named twice the last"
    )
    for value, at in (
        (obs.double(), index),
        (obs.expand(2, 6, 4)[0].t().contiguous().t(), index),  # rows that do not lie one after another
        (obs, index.int()),
        (obs, index[None]),
        (obs[:1], index),
        (obs, index.tolist()),
        (obs, torch.tensor([0, 1, 2, 3, 4, 10])),
        (obs, torch.tensor([0, 1, 2, 3, 4, -11])),
        (obs[:0], index[:0]),
    ):
        assert not rb._set_plain("obs", value, at, None)
    assert not rb._set_plain("next", obs, index, None) and not rb._set_plain(["obs"], obs, index, None)
    assert same(rb[:], like[:])
    assert rb._set_plain(("next", "obs"), obs, None, torch.tensor([16, 7, 3, 8, 9, 10])), "row 3 is gone"
    like.set_at_(("next", "obs"), obs[[0, 1, 3, 4, 5]], [6, 7, 8, 9, 0])
    assert same(rb[:], like[:]) and rb.buffer.stats()["stale_edits"] == 1
    assert not rb._set_plain("obs", obs[:1], None, torch.tensor([17])), "not stored yet"
    with pytest.raises(IndexError, match=r"17.*no such row"):
        rb.set_at_("obs", obs[:1], None, row_id=torch.tensor([17]))


@pytest.mark.parametrize("made", [3, "rows", [1], {"k": 1}])
def test_an_inverse_transform_that_makes_no_rows_is_named(made):
    with TensorDictReplayBuffer(storage=ShmStorage(10, drain="caller")) as rb:
        rb.extend(TensorDict({"k": torch.arange(3)}, [3]))
        rb.append_transform(lambda td: made, invert=True)
        for change in (lambda: rb.__setitem__(slice(0, 2), rb[:2]), lambda: rb.write_all(rb[:2])):
            with pytest.raises(SchemaError, match=f"made {type(made).__name__} of the rows"):
                change()
        assert rb["k"].tolist() == [0, 1, 2]
