"""What a transform is, how several follow one another, and what is taken for one."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from shmbuf.transforms import CallableTransform, Compose, InvertTransform, Transform, as_transform


class Add(Transform):
    """Adds on the way out, multiplies on the way in: orders and directions can be told apart."""

    def __init__(self, by: float, key="a"):
        super().__init__(in_keys=[key], in_keys_inv=[key])
        self.by = by

    def _apply(self, value):
        return value + self.by

    def _inv_apply(self, value):
        return value * self.by + 1

    def state_dict(self):
        return {"by": self.by}

    def load_state_dict(self, state):
        self.by = state["by"]


class Drop(Transform):
    def inv(self, td):
        return None


class Never(Transform):
    def inv(self, td):
        raise AssertionError("called on rows that were dropped")


def two() -> TensorDict:
    return TensorDict({"a": torch.tensor([1.0, 2.0]), "n": {"b": torch.ones(2, 1)}}, [2])


def doubled(td):
    td.set("a", td["a"] * 2)
    return td


def in_place(td):
    td.apply_(lambda t: t.add_(1))
    return td


def test_forward_runs_in_order_and_inv_in_reverse_order():
    chain = Compose(Add(1), doubled)
    assert chain.forward(two())["a"].tolist() == [4.0, 6.0]
    assert Compose(doubled, Add(1)).forward(two())["a"].tolist() == [3.0, 5.0]
    assert Compose(Add(2), Add(10)).inv(two())["a"].tolist() == [(1 * 10 + 1) * 2 + 1, (2 * 10 + 1) * 2 + 1]


def test_inv_leaves_the_callers_dict_alone_and_copies_no_tensor():
    td = two()
    out = Compose(Add(3), Add(1, ("n", "b"))).inv(td)
    assert td["a"].tolist() == [1.0, 2.0] and td["n", "b"].flatten().tolist() == [1.0, 1.0]
    assert out["n", "b"].flatten().tolist() == [2.0, 2.0]
    assert Compose().inv(td)["a"] is td["a"]


def test_rows_that_one_drops_reach_no_further_one():
    assert Compose(Never(), Drop(), Add(1)).inv(two()) is None


def test_out_keys_are_written_and_in_keys_stay():
    t = Transform(in_keys="a", out_keys=[("n", "c")])
    t._apply = lambda v: v + 5
    out = t.forward(two())
    assert out["a"].tolist() == [1.0, 2.0] and out["n", "c"].tolist() == [6.0, 7.0]
    assert t.in_keys == ["a"] and t.out_keys == [("n", "c")]
    assert Transform(in_keys=("n", "b")).in_keys == [("n", "b")]
    assert Transform(in_keys=("a", ("n", "b"))).in_keys == ["a", ("n", "b")]


def test_a_missing_key_and_uneven_keys_are_named():
    with pytest.raises(KeyError, match=r"no key 'z' among 'a', \('n', 'b'\)"):
        Add(1, "z").forward(two())
    with pytest.raises(KeyError, match=r"no key 'z' among 'a', \('n', 'b'\)"):
        Add(1, "z").inv(two())
    with pytest.raises(ValueError, match=r"2 in_keys .* but 1 out_keys"):
        Transform(in_keys=["a", "b"], out_keys=["a"])


def test_a_function_runs_on_what_is_read_only():
    t = as_transform(doubled)
    assert isinstance(t, CallableTransform) and t.out_keys is None
    assert t.forward(two())["a"].tolist() == [2.0, 4.0]
    assert Compose(doubled).inv(two())["a"].tolist() == [1.0, 2.0]


def test_an_inverted_function_runs_on_what_is_stored_and_changes_the_callers_tensors():
    td = TensorDict({"a": torch.zeros(10)}, [10])
    chain = Compose(as_transform(in_place, invert=True))
    assert (chain.inv(td)["a"] == 1).all() and (td["a"] == 1).all()
    assert chain.forward(two())["a"].tolist() == [1.0, 2.0]


def test_an_inverted_transform_swaps_keys_too():
    t = as_transform(Transform(["a"], ["b"], ["c"], ["d"]), invert=True)
    assert isinstance(t, InvertTransform)
    assert (t.in_keys, t.out_keys, t.in_keys_inv, t.out_keys_inv) == (["d"], ["c"], ["b"], ["a"])


def test_a_module_is_called_in_eval_mode_and_keeps_its_state():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(3.0))

        def forward(self, td):
            return td.set("a", td["a"] * self.weight.detach())

    chain = Compose(Layer())
    assert not chain[0].fn.training
    state = chain.state_dict()
    other = Compose(Layer())
    other[0].fn.weight.data.fill_(9)
    other.load_state_dict(state)
    assert other.forward(two())["a"].tolist() == [3.0, 6.0]


def test_what_is_no_transform_is_refused():
    for wrong in (3, "a", None, Add):
        with pytest.raises(TypeError, match="a transform is a"):
            as_transform(wrong)
    chain = Compose(Add(1))
    with pytest.raises(TypeError):
        chain.insert(0, 3)
    assert len(chain) == 1


def test_a_chain_is_a_sequence():
    a, b, c = Add(1), Add(2), Add(3)
    chain = Compose(a, c)
    chain.insert(1, b)
    chain.append(doubled)
    assert list(chain)[:3] == [a, b, c] and chain[1] is b and len(chain) == 4 and chain[-1].fn is doubled
    assert isinstance(chain[:2], Compose) and list(chain[:2]) == [a, b]
    assert Compose() and not len(Compose())


def test_a_chain_pickles_and_its_state_is_checked_whole():
    chain = pickle.loads(pickle.dumps(Compose(Add(1), doubled, as_transform(Add(2), invert=True))))
    assert chain.forward(two())["a"].tolist() == [(1 + 1) * 2 * 2 + 1, (2 + 1) * 2 * 2 + 1]
    chain.load_state_dict({"0": {"by": 7}, "1": {}, "2": {"by": 8}})
    assert chain[0].by == 7 and chain[2].transform.by == 8
    with pytest.raises(KeyError, match="a state of 1 transforms"):
        chain.load_state_dict({"0": {"by": 1}})
    assert chain[0].by == 7
    with pytest.raises(KeyError, match="has no state"):
        Transform().load_state_dict({"x": 1})
