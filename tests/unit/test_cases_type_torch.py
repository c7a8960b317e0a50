"""Class TYPE of the real cases (shared/spec/cases.md) as TensorDicts; the rest of it is in test_cases_type.py. Snapshots, queries, slices
and priorities are tested with those."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import NotEnoughRows, SchemaError, ShmStorage, TensorDictReplayBuffer
from tests.conftest import PREFIX
from tests.unit.helpers import unmoved
from tests.unit.helpers_torch import SPEC, bits, rows, same


@pytest.fixture
def rb():
    with TensorDictReplayBuffer(storage=ShmStorage(100, schema=SPEC, drain="caller")) as rb:
        yield rb


def test_b100_dtypes_are_kept():
    spec = {"obs": (torch.uint8, (84, 84, 4)), "done": torch.bool, "k": torch.int32, "h": (torch.float16, (3,))}
    g = torch.Generator().manual_seed(0)
    td = TensorDict(
        {
            "obs": torch.randint(0, 256, (20, 84, 84, 4), dtype=torch.uint8, generator=g),
            "done": torch.randint(0, 2, (20,), generator=g).bool(),
            "k": torch.randint(-(1 << 31), 1 << 31, (20,), generator=g).int(),
            "h": torch.randn(20, 3, generator=g).half(),
        },
        [20],
    )
    with TensorDictReplayBuffer(storage=ShmStorage(50, schema=spec, drain="caller")) as rb:
        rb.extend(td)
        assert rb.buffer.schema.payload_bytes == 28_235 and rb.buffer.schema.row_bytes == 28_240
        batch = rb.sample(30)
        assert same(batch.exclude("index", "row_id"), td[batch["index"]])


def test_b102_extreme_values():
    """Every dtype with every bit pattern of its bytes is in test_replay_buffer.py; here: numbers one would look for."""
    values = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        f = torch.finfo(dtype)
        values[str(dtype)] = torch.tensor(
            [f.min, f.max, -0.0, f.smallest_normal, f.tiny / 2, float("nan"), float("inf"), -float("inf")],
            dtype=torch.float64,
        ).to(dtype)
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ):
        i = torch.iinfo(dtype)
        values[str(dtype)] = torch.tensor(
            [i.min, i.max, 0, 1, i.max - 1, i.min, i.max, 7],
            dtype=torch.uint64 if dtype == torch.uint64 else torch.int64,
        ).to(dtype)
    values["payload"] = torch.tensor([0x7FC00005, 0x7F800005, -0x0032FFFF, 1, 2, 3, 4, 5], dtype=torch.int32).view(
        torch.float32
    )
    values["c"] = torch.complex(values["torch.float32"], -values["torch.float32"])
    td = TensorDict({"odd": torch.zeros(8, 3, dtype=torch.uint8), **values}, [8])
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        rb.extend(td)
        assert all(bits(rb[:][k]) == bits(v) for k, v in td.items())


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_b102_unsupported_dtypes_are_refused_at_create(dtype):
    with pytest.raises(SchemaError, match="key 'x'"):
        TensorDictReplayBuffer(storage=ShmStorage(10, schema={"x": dtype}, drain="caller"))


def test_b103_one_error_lists_every_difference():
    with TensorDictReplayBuffer(
        storage=ShmStorage(50, schema={"obs": ("float32", (4,)), "act": "int64"}, drain="caller")
    ) as rb:
        good = TensorDict({"obs": torch.zeros(3, 4), "act": torch.zeros(3, dtype=torch.int64)}, [3])
        rb.extend(good)
        for bad, lines in (
            (good.clone().set("rew", torch.zeros(3, 2)), ["key 'rew' is not in the schema, got float32[2]"]),
            (good.exclude("act"), ["key 'act' is missing, expected int64[]"]),
            (good.clone().set("obs", torch.zeros(3, 5)), ["key 'obs': got float32[5], expected float32[4]"]),
            (
                good.exclude("obs").set("obs", TensorDict({"x": torch.zeros(3, 4)}, [3])),
                ["key 'obs' is missing", "key ('obs', 'x') is not in the schema"],
            ),
            (
                good.exclude("obs").set("observation", torch.zeros(3, 4)),
                ["key 'obs' is missing", "key 'observation' is not in the schema"],
            ),
            (
                good.exclude("obs").set("o", torch.zeros(3)).set("act", torch.zeros(3)),
                [
                    "key 'obs' is missing, expected float32[4]",
                    "key 'o' is not in the schema, got float32[]",
                    "key 'act': got float32[], expected int64[]",
                ],
            ),
        ):
            for call in (rb.put, rb.extend):
                with unmoved(rb.buffer), pytest.raises(SchemaError) as e:
                    call(bad)
                assert all(line in str(e.value) for line in lines), str(e.value)
            rb.extend(good)


def test_b105_nested_keys():
    td = TensorDict(
        {
            "next": {"obs": torch.arange(5.0), "agents": {"a": {"obs": torch.arange(10).reshape(5, 2)}}},
            "next.obs": -torch.arange(5),
        },
        [5],
    )
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        rb.extend(td)
        assert same(rb[:], td)
        batch = rb.sample(20)
        assert same(batch.exclude("index", "row_id"), td[batch["index"]])
        assert (batch["next", "obs"] == -batch["next.obs"]).all() and batch[
            "next", "agents", "a"
        ].batch_size == torch.Size([20])
        with pytest.raises(SchemaError, match=r"key \('next', 'obs'\) is missing"):
            rb.extend(td.exclude(("next", "obs")))


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (4, 16, 1)])
@pytest.mark.parametrize("how", ["extend", "put"])
def test_b109_batches_with_two_batch_dimensions(rb, shape, how):
    """An error that states the batch size and how to go on; each way it names stores what it says."""
    td = rows(0, 64).reshape(*shape)
    with unmoved(rb.buffer), pytest.raises(SchemaError) as e:
        getattr(rb, how)(td)
    assert (
        f"got batch size {list(shape)}" in str(e.value)
        and "td.reshape(-1)" in str(e.value)
        and f"td.batch_size = [{shape[0]}]" in str(e.value)
    )
    with pytest.raises(SchemaError, match="got batch size"):
        rb.add(td)
    assert rb.extend(td.reshape(-1)).tolist() == list(range(64)) and same(rb[:], rows(0, 64))
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as sequences:
        with pytest.raises(SchemaError, match="got batch size"):
            sequences.extend(td)
        assert not sequences.initialized
        td.batch_size = [shape[0]]
        assert sequences.extend(td).tolist() == list(range(shape[0]))
        assert torch.equal(sequences[1]["k"], td[1]["k"]) and sequences.buffer.schema.columns[-1].shape == shape[1:]


def test_b109_with_a_named_time_dimension(rb):
    td = TensorDict(rows(0, 64).reshape(4, 16).to_dict(), [4, 16], names=["env", "time"])
    with unmoved(rb.buffer), pytest.raises(SchemaError, match=r"got batch size \[4, 16\]"):
        rb.extend(td)


def test_b110_empty_and_list_inputs(rb):
    rb.extend(rows(0, 3))
    with unmoved(rb.buffer):  # transactions too
        for _ in range(300):
            assert rb.put(rows(0, 0)).rows == 0 and rb.extend(rows(0, 0)).tolist() == []
    td = rows(7, None)
    assert rb.extend([td, td, td]).tolist() == [3, 4, 5] and rb[3:]["k"].tolist() == [7, 7, 7]
    assert rb.put([td, td, td]).wait().tolist() == [6, 7, 8]
    with unmoved(rb.buffer):
        assert rb.put([]).rows == 0 and rb.extend([]).tolist() == []


def test_b110_nothing_as_the_first_rows():
    with TensorDictReplayBuffer(storage=ShmStorage(50, drain="caller")) as rb:
        assert (
            rb.put([]).rows == 0
            and rb.extend([]).tolist() == []
            and rb.extend(rows(0, 0)).tolist() == []
            and not rb.initialized
        )


@pytest.mark.parametrize("schema", [SPEC, None])
def test_b111_sampling_what_was_never_written(schema):
    with TensorDictReplayBuffer(storage=ShmStorage(50, schema=schema, drain="caller"), batch_size=4) as rb:
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"), unmoved(rb.buffer):
            rb.sample()
        with pytest.raises(NotEnoughRows):
            rb.sample(100)
        rb.extend(rows(0, 1))
        rb.empty()
        with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
            rb.sample()


def test_b112_a_sample_is_private_and_writable(rb):
    rb.extend(rows(0, 10))
    with shmbuf.attach(rb.name) as other:
        seen: list = []
        thread = threading.Thread(
            target=lambda: seen.extend(
                bool((b["obs"] == b["k"][:, None] * 8 + torch.arange(4)).all())
                for b in (other.sample(50) for _ in range(200))
            )
        )
        thread.start()
        for _ in range(200):
            batch = rb.sample(50)
            batch["obs"] += 1
            batch["k"].zero_()
            batch["next", "obs"] *= 0
        thread.join()
        assert len(seen) == 200 and all(seen)
        assert same(other[:], rows(0, 10)) and not batch.is_locked


CREATOR = """
import sys
import torch
from tensordict import TensorDict, tensorclass
from shmbuf import ShmStorage, TensorDictReplayBuffer

@tensorclass
class Inner:
    b: torch.Tensor

@tensorclass
class Outer:
    a: torch.Tensor
    inner: Inner

class MyReplayBuffer(TensorDictReplayBuffer):
    pass

with TensorDictReplayBuffer(storage=ShmStorage(20, name=sys.argv[1], drain="caller"), batch_size=3) as rb:
    rb.extend(Outer(a=torch.arange(6.0).reshape(3, 2), inner=Inner(b=torch.arange(3), batch_size=[3]), batch_size=[3]))
with MyReplayBuffer(storage=ShmStorage(20, name=sys.argv[2], drain="caller"), batch_size=3) as rb:
    rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
print("done")
"""


@pytest.fixture(scope="module")
def user_classes():
    """Two buffers whose creator used classes of its own __main__ and has ended."""
    names = [f"{PREFIX}{secrets.token_hex(4)}.{i}" for i in range(2)]
    done = subprocess.run([sys.executable, "-c", CREATOR, *names], capture_output=True, text=True, timeout=110)
    assert done.stdout == "done\n", done.stderr
    yield names
    for name in names:
        shmbuf.destroy(name, force=True)


@pytest.mark.xdist_group("b114")  # one creator for both
def test_b114_rows_of_a_tensorclass_of_another_script(user_classes):
    modules = set(sys.modules)
    with shmbuf.attach(user_classes[0]) as rb:
        new = {m.partition(".")[0] for m in set(sys.modules) - modules}
        assert new <= {"shmbuf", "torch", "tensordict"}, "attaching imports nothing of the user's"
        assert type(rb) is TensorDictReplayBuffer and rb.batch_size == 3
        plain = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "inner": {"b": torch.arange(3)}}, [3])
        assert type(rb[:]) is TensorDict and type(rb[:]["inner"]) is TensorDict and same(rb[:], plain)
        rb.extend(plain)
        assert rb.sample()["inner"].batch_size == torch.Size([3])


@pytest.mark.xdist_group("b114")
def test_b114_a_replay_buffer_class_of_another_script(user_classes):
    with shmbuf.Buffer.attach(user_classes[1]) as buf:
        assert len(buf) == 3
    with shmbuf.attach(user_classes[1]) as rb:
        assert isinstance(rb, TensorDictReplayBuffer) and rb.batch_size == 3 and rb["a"].tolist() == [0, 1, 2]
