"""Edits for older versions only, at both levels."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import Buffer, ShmStorage, TensorDictReplayBuffer

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_only_rows_of_older_versions_change(make, dtype, shape):
    with make(8, schema={"x": "float32", "v": (dtype, shape)}, drain="caller", ring_bytes=4096) as buf:
        low, high = (-100, 100) if dtype[0] != "u" else (3, 250)  # as bytes, -100 would be the larger one
        stored = np.array([low, low, high, high], dtype).reshape(4, *shape)
        buf.put({"x": np.zeros(4, np.float32), "v": stored}).wait()
        new = np.array([low, high, low, high], dtype).reshape(4, *shape)
        edit = {"x": np.ones(4, np.float32), "v": new}
        ticket = buf.put_edit(range(4), edit, version="v", require_newer=True)
        assert ticket.wait(30).tolist() == [False, True, False, False]
        assert ticket.not_newer().tolist() == [True, False, True, True]
        assert buf.gather(range(4))["x"].tolist() == [0, 1, 0, 0]
        ticket = buf.put_edit(range(4), {"x": np.full(4, 2, np.float32), "v": new}, version=("v",))
        assert ticket.wait(30).tolist() == [True, True, False, True], "≥ without require_newer"
        rows = buf.gather(range(4))
        assert (
            rows["x"].tolist() == [2, 2, 0, 2] and (rows["v"].ravel() == np.array([low, high, high, high], dtype)).all()
        )
        assert buf.stats()["edited_rows"] == 4 and buf.stats()["stale_edits"] == 0 and not buf.check()["findings"]


def test_nan_is_no_newer_version_and_a_gone_row_is_neither(make):
    with make(4, schema={"x": "float32", "v": "float64"}, drain="caller") as buf:
        buf.put({"x": np.zeros(5, np.float32), "v": np.array([0, 1, np.nan, 3, 4])}).wait()
        ticket = buf.put_edit([0, 1, 2], {"v": np.array([9, np.nan, 9])}, version="v")
        assert ticket.wait(30).tolist() == [False] * 3 and ticket.not_newer().tolist() == [False, True, True]
        assert buf.stats()["stale_edits"] == 1


def test_a_large_versioned_edit_goes_in_several_records(make):
    with make(1000, schema={"x": "float32", "v": "int64"}, drain="thread", ring_bytes=4096) as buf:
        for first in range(0, 1000, 100):
            buf.put({"x": np.zeros(100, np.float32), "v": np.arange(first, first + 100)}).wait()
        made = buf.edit(
            range(1000),
            {"x": np.ones(1000, np.float32), "v": np.full(1000, 500)},
            version="v",
            require_newer=True,
            timeout=60,
        )
        assert (made == (np.arange(1000) < 500)).all() and (buf.gather(range(1000))["x"] == made).all()


@pytest.mark.parametrize(
    ("kw", "error", "text"),
    [
        ({"version": "w"}, KeyError, "none of the keys to edit"),
        ({"version": "two"}, ValueError, "one number a row is needed"),
        ({"version": "half"}, ValueError, "one number a row is needed"),
        ({"version": "flag"}, ValueError, "one number a row is needed"),
    ],
)
def test_what_is_no_version_is_refused(make, kw, error, text):
    schema = {"v": "int64", "two": ("int64", (2,)), "half": "float16", "flag": "bool"}
    with make(4, schema=schema, drain="caller") as buf:
        row = {
            "v": np.zeros(1, np.int64),
            "two": np.zeros((1, 2), np.int64),
            "half": np.zeros(1, np.float16),
            "flag": np.zeros(1, bool),
        }
        buf.put(row).wait()
        with pytest.raises(error, match=text):
            buf.edit([0], row, **kw)
        assert buf.stats()["edited_rows"] == 0


def test_update_if_present_with_lanes_and_slots_without_rows():
    with TensorDictReplayBuffer(storage=ShmStorage(6, ndim=2, batch_shape=(2,), drain="caller")) as rb:
        index = rb.extend(TensorDict({"x": torch.zeros(2, 3, 2), "v": torch.full((2, 3), 5)}, [2, 3]))
        generation = torch.zeros(index.shape[:-1], dtype=torch.int64)
        new = torch.arange(12.0).reshape(*generation.shape, 2)
        got = rb.update_if_present(index=index, generation=generation, patch={"x": new}, version_key="v", version=6)
        assert got.updated.tolist() == [True] * 6
        assert (rb.storage.get(tuple(index.reshape(-1, 2).unbind(-1)))["x"] == new.reshape(6, 2)).all()
    with TensorDictReplayBuffer(storage=ShmStorage(6, drain="caller")) as rb:
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
        got = rb.update_if_present(
            index=torch.tensor([2, 5]), generation=torch.tensor([0, -1]), patch={"x": torch.ones(2)}
        )
        assert got.updated.tolist() == [True, False] and got.stale_count == 1
        assert rb["x"].tolist() == [0, 0, 1]
        for slot in (-1, 6):
            with pytest.raises(IndexError, match="capacity is 6"):
                rb.update_if_present(index=[slot], generation=[0], patch={"x": torch.ones(1)})
        for patch in ({"x": torch.ones(1, 2)}, {"x": torch.ones(1, dtype=torch.int64)}):
            with pytest.raises(ValueError, match="key 'x'"):
                rb.update_if_present(index=[0], generation=[0], patch=patch)


def test_another_handle_sees_what_was_compared(make):
    """Edits that lie in two rings before either is made: the one that comes second is compared with the first one's version."""
    with make(4, schema={"x": "int64", "v": "int64"}, drain="caller", max_collectors=4) as buf:
        buf.put({"x": np.zeros(1, np.int64), "v": np.zeros(1, np.int64)}).wait()
        other = Buffer.attach(buf.name)
        tickets = [
            b.put_edit([0], {"x": np.array([i]), "v": np.array([7])}, version="v", require_newer=True)
            for i, b in enumerate((buf, other), 1)
        ]
        made = [bool(t.wait(30)[0]) for t in tickets]
        assert sorted(made) == [False, True]
        assert buf.gather([0])["x"][0] == 1 + made.index(True)
        other.close()
