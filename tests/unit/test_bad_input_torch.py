"""Input that is odd or wrong, as TensorDicts: taken byte for byte, or refused with a SchemaError that names the key, what was got and
what was expected; then nothing has moved and the producer can go on."""

from __future__ import annotations

import os
import types
import warnings

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorDict, tensorclass

from shmbuf import Schema, SchemaError, ShmStorage, TensorDictReplayBuffer
from tests.unit.helpers import unmoved
from tests.unit.helpers_torch import SPEC, bits, rows, same

pytestmark = pytest.mark.filterwarnings("ignore")  # sparse CSR and nested tensors are beta


@pytest.fixture(params=["schema", "first rows"])
def rb(request):
    """With rows in it; its schema was given, or came from the first rows."""
    storage = ShmStorage(50, schema=SPEC if request.param == "schema" else None, drain="caller", ring_bytes=1 << 14)
    with TensorDictReplayBuffer(storage=storage) as rb:
        rb.extend(rows(0, 3))
        yield rb


def changed(key, value, n: int = 2) -> TensorDict:
    td = rows(10, n)
    return td.exclude(key) if value is None else td.set(key, value)


def refused(rb, given, *texts: str, calls=None) -> None:
    for call in calls or (rb.put, rb.extend):
        with unmoved(rb.buffer), pytest.raises(SchemaError) as e:
            call(given)
        for text in texts:
            assert text in str(e.value), str(e.value)
    n = len(rb)
    assert rb.extend(rows(n, 2)).tolist() == [n, n + 1] and rb.add(rows(n + 2, None)) == n + 2, "the producer can go on"
    assert same(rb[:], rows(0, n + 3))


def taken(rb, given, like: TensorDict) -> None:
    n = len(rb)
    assert rb.extend(given).tolist() == list(range(n, n + len(like)))
    assert same(rb[n:], like)
    assert rb.extend(rows(90, 1)).tolist() == [n + len(like)] and same(rb[-1], rows(90, None))


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "texts"),
    [
        ("obs", None, ["key 'obs' is missing, expected float32[4]"]),
        (("next", "obs"), None, ["key ('next', 'obs') is missing, expected float32[4]"]),
        ("next", None, ["key ('next', 'obs') is missing", "key ('next', 'done') is missing, expected bool[]"]),
        ("extra", torch.zeros(2, 7, dtype=torch.int16), ["key 'extra' is not in the schema, got int16[7]"]),
        (
            ("next", "agent", "obs"),
            torch.zeros(2),
            ["key ('next', 'agent', 'obs') is not in the schema, got float32[]"],
        ),
        ("obs", torch.zeros(2, 4, dtype=torch.float64), ["key 'obs': got float64[4], expected float32[4]"]),
        ("obs", torch.zeros(2, 4, dtype=torch.bfloat16), ["key 'obs': got bfloat16[4], expected float32[4]"]),
        ("obs", torch.zeros(2, 4, dtype=torch.int32), ["key 'obs': got int32[4], expected float32[4]"]),
        ("k", torch.zeros(2, dtype=torch.int32), ["key 'k': got int32[], expected int64[]"]),
        ("k", torch.zeros(2, dtype=torch.uint64), ["key 'k': got uint64[], expected int64[]"]),
        (("next", "done"), torch.zeros(2, dtype=torch.uint8), ["key ('next', 'done'): got uint8[], expected bool[]"]),
        ("obs", torch.zeros(2, 5), ["key 'obs': got float32[5], expected float32[4]"]),
        ("obs", torch.zeros(2), ["key 'obs': got float32[], expected float32[4]"]),
        ("obs", torch.zeros(2, 2, 2), ["key 'obs': got float32[2, 2], expected float32[4]"]),
        ("obs", torch.zeros(2, 4, 1), ["key 'obs': got float32[4, 1], expected float32[4]"]),
        ("k", torch.zeros(2, 1, dtype=torch.int64), ["key 'k': got int64[1], expected int64[]"]),
        ("obs", torch.zeros(2, 4, device="meta"), ["key 'obs': got a meta tensor"]),
        ("obs", torch.zeros(2, 4).to_sparse(), ["key 'obs': got a sparse_coo tensor, expected a dense one"]),
        (
            "obs",
            lambda: torch.zeros(2, 4).to_sparse_csr(),
            ["key 'obs': got a sparse_csr tensor, expected a dense one"],
        ),
        ("obs", lambda: torch.zeros(2, 4).to_mkldnn(), ["key 'obs': got a _mkldnn tensor, expected a dense one"]),
        (
            "obs",
            lambda: torch.quantize_per_tensor(torch.zeros(2, 4), 0.1, 0, torch.quint8),
            ["key 'obs'", "quint8", "expected float32[4]"],
        ),
        ("extra", "text", ["key 'extra': non-tensor data (str) cannot be stored"]),
        ("k", NonTensorData("text", [2]), ["key 'k': non-tensor data (str) cannot be stored"]),
        (
            ("next", "info"),
            NonTensorData({"a": 1}, [2]),
            ["key ('next', 'info'): non-tensor data (dict) cannot be stored"],
        ),
        (
            "obs",
            TensorDict({"x": torch.zeros(2, 4)}, [2]),
            ["key 'obs' is missing, expected float32[4]", "key ('obs', 'x') is not in the schema, got float32[4]"],
        ),
        (
            "next",
            torch.zeros(2, 4),
            ["key 'next' is not in the schema, got float32[4]", "key ('next', 'obs') is missing"],
        ),
        ("", torch.zeros(2), ["key '' is not in the schema, got float32[]"]),
    ],
    ids=lambda v: str(v) if isinstance(v, tuple) else None,
)
def test_refused(rb, key, value, texts):
    refused(rb, changed(key, value() if isinstance(value, types.FunctionType) else value), *texts)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(rb, layout):
    ragged = torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)], layout=layout)
    refused(rb, changed("obs", ragged), "key 'obs': got a nested tensor, expected a dense one")


def test_a_stack_of_text_is_refused(rb):
    td = torch.stack([rows(k, None).set("text", f"number {k}") for k in range(2)])
    refused(rb, td, "key 'text': non-tensor data", "cannot be stored")


def test_every_difference_is_listed_in_one_error(rb):
    td = (
        rows(0, 2)
        .exclude("obs")
        .set("k", torch.zeros(2, dtype=torch.int32))
        .set("Obs", torch.zeros(2, 4))
        .set(("next", "obs"), torch.zeros(2, 5))
    )
    refused(
        rb,
        td,
        "key 'obs' is missing, expected float32[4] (did you mean it by 'Obs'?)",
        "key 'Obs' is not in the schema, got float32[4]",
        "key 'k': got int32[], expected int64[]",
        "key ('next', 'obs'): got float32[5], expected float32[4]",
    )


def test_wrong_batch_sizes_are_refused(rb):
    one = "got batch size []: extend() and put() take a batch of rows, batch size [n]", "add()"
    refused(rb, rows(0, None), *one)
    refused(rb, rows(0, 6).reshape(2, 3), "got batch size [2, 3]", "td.reshape(-1)", "td.batch_size = [2]")
    refused(rb, rows(0, 2), "got batch size [2]: add() takes one row", calls=[rb.add])
    refused(rb, [rows(0, 2), rows(2, 2)], "got batch size [2, 2]")


def test_the_first_rows_may_be_wrong_too():
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        for bad in (
            rows(0, None),
            rows(0, 6).reshape(2, 3),
            TensorDict({}, [2]),
            TensorDict({"next": {}}, [2]),
            rows(0, 2).set("t", NonTensorData(object(), [2])),
            TensorDict({"x": torch.zeros(2, 3).to_sparse()}, [2]),
            TensorDict({"x": torch.zeros(2, 3, device="meta")}, [2]),
            5,
            None,
            "text",
            {"x": torch.zeros(2)},
            torch.zeros(2),
            np.zeros(2),
            [1, 2],
            [torch.zeros(2)],
            [rows(0, None), 5],
            TensorDict({"x": torch.quantize_per_tensor(torch.zeros(2, 4), 0.1, 0, torch.quint8)}, [2]),
        ):
            for call in (rb.put, rb.extend):
                with pytest.raises(SchemaError):
                    call(bad)
            assert not rb.initialized and len(rb) == 0 and rb.stats()["put_rows"] == 0
        assert rb.extend(rows(0, 2)).tolist() == [0, 1] and rb.buffer.schema == Schema.from_spec(SPEC)


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        "text",
        torch.zeros(2, 4),
        np.zeros(3),
        {"obs": torch.zeros(2, 4)},
        {1, 2},
        object(),
        [1, 2],
        [torch.zeros(4)],
        ["text"],
        [rows(0, None), 5],
    ],
    ids=lambda v: type(v).__name__,
)
def test_rows_that_are_no_tensordict(rb, given):
    refused(rb, given, "TensorDict")
    refused(rb, given, "TensorDict", calls=[rb.add])


def test_a_dict_is_told_what_to_do(rb):
    given = {"obs": torch.zeros(2, 4)}
    refused(rb, given, "TensorDict(d, batch_size=[n])", "Buffer")
    refused(rb, given, "TensorDict(d, batch_size=[])", calls=[rb.add])


def test_a_list_that_cannot_be_stacked(rb):
    refused(rb, [rows(0, None), rows(1, None).exclude("k")], "cannot be stacked")
    refused(rb, [rows(0, None), rows(1, None).set("obs", torch.zeros(5))], "obs")


def test_a_list_of_different_dtypes_is_not_converted():
    with TensorDictReplayBuffer(storage=ShmStorage(50, schema={"x": torch.float32}, drain="caller")) as rb:
        rb.extend(TensorDict({"x": torch.zeros(1)}, [1]))
        # torch.stack would promote, and 2**53 + 1 become a float32
        with pytest.raises(SchemaError, match="'x'"), unmoved(rb.buffer):
            rb.extend([TensorDict({"x": torch.tensor(1.0)}, []), TensorDict({"x": torch.tensor(2**53 + 1)}, [])])


def test_a_lazy_stack_of_different_shapes(rb):
    lazy = LazyStackedTensorDict(rows(0, None), rows(1, None).set("obs", torch.zeros(5)))
    refused(rb, lazy, "'obs'")


def test_a_lazy_stack_of_different_keys(rb):
    refused(rb, LazyStackedTensorDict(rows(0, None), rows(1, None).exclude("k")), "key 'k' is missing")


def fate_in_a_child(rb, td) -> str:
    """What an extend in a forked child comes to: "refused", "stored", "raised …" or the signal that killed it."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            rb.extend(td, timeout=20)
            fate = "stored"
        except SchemaError as e:
            fate = "refused" if "'obs'" in str(e) else f"refused: {e}"
        except BaseException as e:
            fate = f"raised {type(e).__name__}"
        os.write(write, fate.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        fate = f.read()
    status = os.waitpid(pid, 0)[1]
    return f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else fate


def test_a_tensor_without_memory_does_not_crash_the_process(rb):
    """A zero tensor (forward-mode autograd makes them) says it is on the CPU and contiguous; its address is 0."""
    zero = torch._efficientzerotensor(2, 4)
    assert fate_in_a_child(rb, changed("obs", zero)) in ("refused", "stored")
    assert same(rb[:3], rows(0, 3)) and (len(rb) == 3 or (len(rb) == 5 and (rb[3:]["obs"] == 0).all()))
    n = len(rb)
    assert rb.extend(rows(5, 1)).tolist() == [n]


def test_a_fake_tensor_does_not_crash_the_process(rb):
    """torch.compile and FakeTensorMode: device "cpu", no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2, 4)
    assert fate_in_a_child(rb, changed("obs", fake)) == "refused"
    assert same(rb[:], rows(0, 3)) and rb.extend(rows(3, 1)).tolist() == [3]


# ---- taken, byte for byte ------------------------------------------------------------------------------------------


def strided(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(t.shape[0] * 3, *(2 * d for d in t.shape[1:]), dtype=t.dtype)
    view = wide[tuple(slice(None, None, s) for s in (3, *(2,) * (t.ndim - 1)))]
    view.copy_(t)
    return view


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.permute(*reversed(range(t.ndim))).contiguous().permute(*reversed(range(t.ndim)))


def read_only(t: torch.Tensor) -> torch.Tensor:
    a = t.numpy().copy()
    a.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(a)


def with_offset(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(t[:1]), t])[1:]


class Subclass(torch.Tensor):
    pass


def requires_grad(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t


FORMS = {
    "as it is": lambda t: t,
    "strided": strided,
    "transposed": transposed,
    "read-only": read_only,
    "with a storage offset": with_offset,
    "requires grad": requires_grad,
    "in a graph": lambda t: requires_grad(t).clone(),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "subclass": lambda t: t.as_subclass(Subclass),
    "subclass, strided": lambda t: strided(t).as_subclass(Subclass),
    "memory-mapped": lambda t: MemoryMappedTensor.from_tensor(t) if t.numel() else t,
    "shared": lambda t: t.clone().share_memory_(),
    "inference": lambda t: inference(t),
}
COLUMNS = {
    "f": ("float32", (2, 3)),
    "b": "bool",
    "i": "int64",
    "u": ("uint8", (5,)),
    "c": ("complex64", (2,)),
    "h": ("float16", (1,)),
    "bf": ("bfloat16", (3,)),
    "nest": {"d": "float64", "zero": ("float32", (0, 2)), "z": ("complex128", ())},
}


def inference(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


def samples(n: int) -> TensorDict:
    g = torch.Generator().manual_seed(3)
    td = TensorDict({}, [n])
    for c in Schema.from_spec(COLUMNS).columns:
        dtype = getattr(torch, c.dtype)
        raw = torch.randint(0, 256, (n, *c.shape, dtype.itemsize), dtype=torch.uint8, generator=g)
        td[c.key] = (raw & 1 if c.dtype == "bool" else raw).view(dtype).reshape(n, *c.shape)
    return td


@pytest.mark.parametrize("given_schema", [True, False])
@pytest.mark.parametrize("n", [1, 2, 300])
@pytest.mark.parametrize("form", FORMS)
def test_taken(form, n, given_schema):
    given = samples(n)
    odd = {
        k: t if form == "read-only" and t.dtype == torch.bfloat16 else FORMS[form](t)
        for k, t in given.items(True, True)
    }
    td = TensorDict({}, [n])
    for k, t in odd.items():
        td[k] = t
    assert all(td[k] is odd[k] for k in odd), "the TensorDict itself changed nothing"
    with TensorDictReplayBuffer(
        storage=ShmStorage(1000, schema=COLUMNS if given_schema else None, drain="caller", ring_bytes=1 << 14)
    ) as rb:
        assert rb.extend(td).tolist() == list(range(n)) and rb.buffer.schema == Schema.from_spec(COLUMNS)
        assert same(rb[:], given)
        assert not any(
            t.requires_grad or t.is_inference() or type(t) is not torch.Tensor for t in rb[:].values(True, True)
        ), "plain tensors come back"
        index = rb.add(td[0])
        assert same(rb[index], given[0])


def test_zero_strides_are_read_as_what_they_show(rb):
    td = rows(3, 4)
    td["obs"], td["k"], td["next", "done"] = (
        torch.arange(4.0).expand(4, 4),
        torch.tensor(7).expand(4),
        torch.tensor([True]).expand(4),
    )
    assert td["obs"].stride() == (0, 1)
    taken(rb, td, td.clone())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_conjugate_and_negative_views_are_resolved(dtype):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 2, generator=g, dtype=torch.float64)
    z = torch.view_as_complex(x).to(dtype)
    part = torch.float64 if dtype == torch.complex128 else torch.float16 if dtype == torch.complex32 else torch.float32
    forms = {"conj": z.conj(), "strided conj": torch.cat([z, z])[::2].conj()}
    for form in forms.values():
        assert form.is_conj()
    imaginary = z.conj().imag
    assert imaginary.is_neg()
    with TensorDictReplayBuffer(
        storage=ShmStorage(50, schema={"z": (dtype, (3,)), "im": (part, (3,))}, drain="caller")
    ) as rb:
        for form in forms.values():
            rb.empty()
            rb.extend(TensorDict({"z": form, "im": imaginary}, [4]))
            got = rb[:]
            assert bits(got["z"]) == bits(form.clone().resolve_conj()) and bits(got["im"]) == bits(
                imaginary.clone().resolve_neg()
            )
            real = torch.view_as_real(form.resolve_conj())
            assert torch.equal(torch.view_as_real(got["z"]), real) and torch.equal(got["im"], -z.imag)
            assert rb.add(TensorDict({"z": form[1], "im": imaginary[1]}, [])) == 4 and bits(rb[4]["z"]) == bits(form[1])


def test_zero_rows_are_checked_and_are_nothing(rb):
    with unmoved(rb.buffer):
        ticket = rb.put(rows(0, 0))
        assert (
            (ticket.rows, ticket.done()) == (0, True)
            and ticket.wait().dtype == torch.int64
            and ticket.wait().shape == (0,)
        )
        assert rb.extend(rows(0, 0)).shape == (0,)
    refused(rb, rows(0, 0).set("obs", torch.zeros(0, 5)), "key 'obs': got float32[5], expected float32[4]")
    refused(rb, rows(0, 0).exclude("k"), "key 'k' is missing")


def test_zero_rows_as_the_first_decide_nothing():
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        assert rb.extend(TensorDict({"x": torch.zeros(0)}, [0])).tolist() == [] and not rb.initialized
        assert rb.extend(rows(0, 2)).tolist() == [0, 1]


@tensorclass
class Next:
    obs: torch.Tensor
    done: torch.Tensor


@tensorclass
class Step:
    obs: torch.Tensor
    next: Next
    k: torch.Tensor


@pytest.mark.parametrize(
    "kind",
    [
        "lazy stack",
        "tensorclass",
        "nested tensorclass",
        "locked",
        "view",
        "other key order",
        "inner batch sizes",
        "names",
        "td.shape[0] of a slice",
    ],
)
def test_other_kinds_of_tensordict(rb, kind):
    td = rows(3, 4)
    given = {
        "lazy stack": lambda: LazyStackedTensorDict(*[td[i] for i in range(4)]),
        "tensorclass": lambda: Step(
            obs=td["obs"],
            next=Next(obs=td["next", "obs"], done=td["next", "done"], batch_size=[4]),
            k=td["k"],
            batch_size=[4],
        ),
        "nested tensorclass": lambda: td.clone().set(
            "next", Next(obs=td["next", "obs"], done=td["next", "done"], batch_size=[4])
        ),
        "locked": lambda: td.clone().lock_(),
        "view": lambda: torch.cat([td, td]).reshape(2, 4)[1],
        "other key order": lambda: TensorDict(
            {
                "k": td["k"],
                "next": TensorDict({"done": td["next", "done"], "obs": td["next", "obs"]}, [4]),
                "obs": td["obs"],
            },
            [4],
        ),
        "inner batch sizes": lambda: TensorDict(
            {
                "k": td["k"],
                "obs": td["obs"],
                "next": TensorDict({"obs": td["next", "obs"], "done": td["next", "done"]}, [4]),
            },
            [4],
        ),
        "names": lambda: TensorDict(td.to_dict(), [4], names=["time"]),
        "td.shape[0] of a slice": lambda: torch.cat([rows(50, 9), td, rows(70, 2)])[9:13],
    }[kind]()
    taken(rb, given, td)
    n = len(rb)
    if kind != "lazy stack":
        assert rb.add(given[2]) == n and same(rb[n], td[2])


def test_one_tensor_under_two_keys(rb):
    td = rows(3, 4)
    td["next", "obs"] = td["obs"]
    taken(rb, td, td.clone())


def test_dtypes_of_a_schema_by_every_name():
    names = {
        "a": torch.float32,
        "b": "torch.bfloat16",
        "c": np.int16,
        "d": float,
        "e": torch.half,
        "f": bool,
        "g": torch.cdouble,
    }
    assert [c.dtype for c in Schema.from_spec(names).columns] == [
        "float32",
        "bfloat16",
        "int16",
        "float64",
        "float16",
        "bool",
        "complex128",
    ]
    for dtype in (torch.quint8, torch.qint32, torch.bits8) if hasattr(torch, "bits8") else (torch.quint8, torch.qint32):
        with pytest.raises(SchemaError, match="key 'x'"):
            Schema.from_spec({"x": dtype})
