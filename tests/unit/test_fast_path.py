"""Which tensors the core takes as they are: the same ones, whether it asks them through DLPack's exchange API or through Python."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from shmbuf import ShmStorage, TensorDictReplayBuffer, storage, tensors
from shmbuf.errors import SchemaError
from shmbuf.schema import DTYPES, nest
from tests.unit.helpers_torch import bits, rows, same

N = 3
NAMES = [name for name in DTYPES if hasattr(torch, name)]
exchange = pytest.mark.skipif(storage._EXCHANGE is None, reason="this torch has no exchange API")


def columns_of(rb, way: str):
    """The buffer's columns for the core, with or without the exchange API."""
    schema = rb.buffer.schema
    with pytest.MonkeyPatch.context() as patch:
        if way == "asked":
            patch.setattr(storage, "_EXCHANGE", None)
        dtypes = [getattr(torch, c.dtype) for c in schema.columns]
        return storage.of_tensors(schema.native(dtypes), dtypes)


def make(spec: dict) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=ShmStorage(50, schema=spec, drain="caller"))


def takes(rb, columns, leaf, n: int = N) -> bool:
    """Whether the core stores it without conversion; if so, its bytes are what the tensor says."""
    td = {"x": leaf}
    ticket = rb.buffer._handle.put_leaves(columns, list(td.values()), n, 0, 1.0, False, True)
    if ticket is None:
        return False
    assert ticket.wait(1.0) == 0
    count = 1 if n < 0 else n
    assert bits(rb[len(rb) - count :]["x"].reshape(leaf.shape)) == bits(leaf)
    rb.empty()
    return True


def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes 0 and 1 only: valid for bool, too."""
    size = torch.empty(0, dtype=dtype).element_size()
    flat = torch.arange(int(torch.Size(shape).numel()) * size, dtype=torch.uint8) % 2
    return flat.view(dtype).reshape(shape)


def every_dtype() -> dict[str, torch.dtype]:
    return {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["exchange", "asked"])
@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_columns_dtype_is_taken(name, way):
    """Also where DLPack has one word for two dtypes: torch's uint1 … uint7 are its uint8."""
    with make({"x": (name, (2,))}) as rb:
        columns, own = columns_of(rb, way), getattr(torch, name)
        assert takes(rb, columns, raw(own, N, 2))
        for other in every_dtype().values():
            try:
                t = torch.empty(N, 2, dtype=other)
            except (RuntimeError, TypeError, NotImplementedError):
                continue  # quantised and the like: not made this way
            if other != own:
                assert not takes(rb, columns, t), f"{other} was taken for {own}"


def empty_in(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    t.untyped_storage().resize_(nbytes)
    return t


ODD = {
    "plain": lambda: torch.randn(N, 4),
    "one row": lambda: torch.randn(1, 4).expand(N, 4),
    "strided": lambda: torch.randn(N, 8)[:, ::2],
    "rows apart": lambda: torch.randn(2 * N, 4)[::2],
    "transposed": lambda: torch.randn(4, N).T,
    "offset": lambda: torch.randn(N + 2, 4)[2:],
    "another shape": lambda: torch.randn(N, 5),
    "another number of rows": lambda: torch.randn(N + 1, 4),
    "a dimension too many": lambda: torch.randn(N, 4, 1),
    "a dimension too few": lambda: torch.randn(N * 4),
    "scalar": lambda: torch.randn(()),
    "requires grad": lambda: torch.randn(N, 4, requires_grad=True),
    "in a graph": lambda: torch.randn(N, 4, requires_grad=True) * 2,
    "negative": lambda: torch.randn(N, 4, dtype=torch.complex64).conj().imag,
    "negative, contiguous": lambda: torch._neg_view(torch.randn(N, 4)),
    "zero tensor": lambda: torch._efficientzerotensor(N, 4),
    "without memory": lambda: empty_in(torch.randn(N, 4), 0),
    "meta": lambda: torch.empty(N, 4, device="meta"),
    "sparse": lambda: torch.randn(N, 4).to_sparse(),
    "sparse rows": lambda: torch.randn(N, 4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(4)] * N),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(4)] * N, layout=torch.jagged),
    "parameter": lambda: torch.nn.Parameter(torch.randn(N, 4)),
    "functional": lambda: torch._to_functional_tensor(torch.randn(N, 4)),
    "shared": lambda: torch.randn(N, 4).share_memory_(),
    "copy on write": lambda: torch._lazy_clone(torch.randn(N, 4)),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(N, 4), 0.1, 0, torch.qint8),
    "no tensor": lambda: [[0.0] * 4] * N,
    "nothing": lambda: None,
}
PLAIN = {"plain", "offset", "requires grad", "in a graph", "shared", "copy on write"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["exchange", "asked"])
@pytest.mark.parametrize("form", ODD)
def test_only_plain_tensors_are_taken(form, way):
    try:
        leaf = ODD[form]()
    except (RuntimeError, AttributeError, NotImplementedError):
        pytest.skip("this torch makes none")
    with make({"x": ("float32", (4,))}) as rb:
        columns = columns_of(rb, way)
        assert takes(rb, columns, leaf) == (form in PLAIN)
        assert takes(rb, columns, torch.ones(N, 4)), "what was refused left nothing behind"


@pytest.mark.parametrize("way", ["exchange", "asked"])
def test_what_is_only_promised_is_not_taken(way):
    z = torch.randn(N, 2, dtype=torch.complex64)
    with make({"x": ("complex64", (2,))}) as rb:
        columns = columns_of(rb, way)
        assert takes(rb, columns, z)
        assert not takes(rb, columns, z.conj()) and not takes(rb, columns, torch._neg_view(z))
    with make({"x": "int64"}) as rb:
        assert not takes(rb, columns_of(rb, way), torch._neg_view(torch.arange(N)))


@pytest.mark.parametrize("way", ["exchange", "asked"])
def test_strides_of_dimensions_without_extent_do_not_matter(way):
    with make({"x": ("float32", (1, 4))}) as rb:
        columns = columns_of(rb, way)
        assert takes(rb, columns, torch.randn(N, 4).as_strided((N, 1, 4), (4, 77, 1)))
        assert takes(rb, columns, torch.randn(4).as_strided((1, 1, 4), (99, 77, 1)), 1)
        assert takes(rb, columns, torch.randn(4).as_strided((1, 4), (77, 1)), -1)
        assert not takes(rb, columns, torch.randn(N, 1, 8)[:, :, ::2])
    with make({"x": ("float32", (0, 2)), "k": "int64"}) as rb:
        for x in (torch.empty(N, 0, 2), torch.empty(N, 0, 8)[..., ::4]):
            leaves = [x, torch.arange(N)]
            ticket = rb.buffer._handle.put_leaves(columns_of(rb, way), leaves, N, 0, 1.0, False, True)
            assert ticket is not None and ticket.wait(1.0) == 0


@exchange
def test_a_capsule_of_something_else_is_an_error():
    import datetime

    with make({"x": "float32"}) as rb:
        columns = columns_of(rb, "asked")
        with pytest.raises(ValueError):
            columns.set_exchange(datetime.datetime_CAPI, [torch.zeros(1)])
        with pytest.raises(ValueError):
            columns.set_exchange(storage._EXCHANGE, [])
        assert takes(rb, columns, torch.zeros(N))


@exchange
def test_a_column_whose_sample_dlpack_cannot_describe_is_asked():
    with make({"x": "float32"}) as rb:
        columns = columns_of(rb, "asked")
        columns.set_exchange(storage._EXCHANGE, [None])
        assert takes(rb, columns, torch.ones(N)) and not takes(rb, columns, torch.ones(N, dtype=torch.float64))


@pytest.mark.parametrize("way", ["exchange", "asked"])
def test_a_buffer_works_both_ways(way, monkeypatch):
    if way == "asked":
        monkeypatch.setattr(storage, "_EXCHANGE", None)
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller"), batch_size=4) as rb:
        rb.extend(rows(0, 5))
        rb.add(rows(5, None))
        assert same(rb[:], rows(0, 6))
        out = rb.sample()
        assert rb.sample(out=out) is out and same(out.select("obs", "next", "k"), rb[out["index"]])
        with pytest.raises(SchemaError):
            rb.extend(TensorDict({**rows(0, 2), "k": torch.zeros(2)}, [2]))
        with pytest.raises(SchemaError, match="share memory"):
            rb.sample(out=TensorDict({**out, "obs": out["next", "obs"]}, [4]))
        assert len(rb) == 6


# ---- samples are put together without TensorDict's constructor -------------------------------------------------------

KEYS = [
    (("a",),),
    (("next", "obs"), ("a",), ("next", "deep", "x"), ("b",), ("next", "done")),
    (("x", "x", "x"), ("x", "y")),
]


@pytest.mark.parametrize("keys", KEYS)
def test_a_tree_holds_each_leaf_under_its_key(keys):
    leaves = [torch.full((2, 1), i) for i in range(len(keys))]
    got = tensors.make_tensordict(tensors.tree_of(keys), leaves, torch.Size((2,)))
    made = TensorDict(nest(keys, leaves), [2])
    assert list(got.keys(True)) == list(made.keys(True)) and same(got, made)
    assert all(got[key] is leaf for key, leaf in zip(keys, leaves, strict=True))


def test_of_two_leaves_of_one_key_the_later_is_shown():
    first, second = torch.zeros(2), torch.ones(2)
    got = tensors.make_tensordict(
        tensors.tree_of((("index",), ("k",), ("index",))), [first, first, second], torch.Size((2,))
    )
    assert list(got.keys()) == ["index", "k"] and got["index"] is second and got["k"] is first


@pytest.mark.parametrize("way", ["_wrap", "_constructed"])
def test_a_sample_is_an_ordinary_tensordict(way, monkeypatch):
    monkeypatch.setattr(tensors, "_wrap", getattr(tensors, way))
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller"), batch_size=4) as rb:
        rb.extend(rows(0, 5))
        batch = rb.sample()
        made = TensorDict(batch.to_dict(), batch_size=[4])
        assert vars(batch).keys() == vars(made).keys() and vars(batch["next"]).keys() == vars(made["next"]).keys()
        assert batch.device is None and not batch.is_locked and batch.names == [None]
        for change in (
            lambda td: td.clone(),
            lambda td: td[1:3],
            lambda td: td.reshape(2, 2),
            lambda td: torch.cat([td, td]),
            lambda td: td.flatten_keys("."),
            lambda td: td.to(torch.float64),
            lambda td: pickle.loads(pickle.dumps(td)),
            lambda td: td.set("new", torch.zeros(4)),
            lambda td: td.set(("next", "new"), torch.zeros(4)),
            lambda td: td.del_("obs"),
            lambda td: td.apply(lambda t: t + 1),
        ):
            assert same(change(batch), change(made))
        locked = batch.lock_()
        with pytest.raises(RuntimeError):
            locked["next"]["obs2"] = torch.zeros(4)
        batch.unlock_()
        batch["k"].untyped_storage().resize_(800)
        assert batch["k"].resize_(100).shape == (100,) and not batch["next", "obs"].requires_grad
