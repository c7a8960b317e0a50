"""The class STALE of cases from public bug trackers; B022 is in tests/process/test_priorities_concurrent.py."""

from __future__ import annotations

import pytest

from shmbuf import Buffer
from tests.unit.helpers import k
from tests.unit.helpers_priorities import at_rest, prioritised, state, total


@pytest.mark.parametrize("other_process", [False, True], ids=["same", "other"])
def test_b020_an_update_for_a_row_that_was_overwritten_is_dropped(make, python, other_process):
    buf = prioritised(make, [1.0] * 4)
    stale = 1  # the handle of k = 1, kept by a learner
    buf.extend(k(4, 5))  # k = 0, 1 are gone; k = 5 lies where k = 1 lay
    before = total(buf)
    if other_process:
        code = (
            "import sys; from shmbuf import Buffer; b = Buffer.attach(sys.argv[1]); print(b.set_priorities([1], 100.0))"
        )
        assert python(code, buf.name) == "[False]"
    else:
        assert buf.set_priorities([stale], 100.0).tolist() == [False]
    assert (state(buf)["stale"], state(buf)["applied"]) == (1, 0)
    assert buf.priorities([5])[0] == 1.0 and total(buf) == before == 4
    assert state(buf)["new_row"] == 1.0  # nor did it raise what new rows get
    at_rest(buf)


def test_b020_a_batch_reaches_the_rows_that_are_left(make):
    buf = prioritised(make, [1.0] * 4)
    buf.extend(k(4, 5))
    assert buf.set_priorities([0, 1, 2, 3, 4, 5], [9, 9, 2, 3, 4, 5]).tolist() == [False, False, True, True, True, True]
    assert buf.priorities([2, 3, 4, 5]).tolist() == [2, 3, 4, 5] and total(buf) == 14
    assert (buf.stats()["priorities_stale"], buf.stats()["priorities_set"]) == (2, 4)


def test_b020_after_empty_no_old_handle_reaches_a_new_row(make):
    buf = prioritised(make, [1.0] * 4)
    buf.empty()
    buf.extend(k(10, 11, 12, 13))  # the same slots
    assert not buf.set_priorities([0, 1, 2, 3], 100.0).any()
    assert total(buf) == 4 and Buffer.attach(buf.name).priorities(range(*buf.window)).tolist() == [1] * 4


def test_b020_by_the_face(make_name):
    torch = pytest.importorskip("torch")
    from tensordict import TensorDict

    from shmbuf import PrioritizedSampler, ShmStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(
        storage=ShmStorage(4, name=make_name(), drain="caller"),
        sampler=PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0),
        batch_size=32,
    )
    rb.extend(TensorDict({"k": torch.arange(4)}, [4]))
    sample = rb.sample()
    rb.extend(TensorDict({"k": torch.arange(4, 6)}, [2]))
    sample["td_error"] = torch.where(sample["k"] < 2, 100.0, 0.5)
    assert {0, 1} & set(sample["k"].tolist())
    rb.update_tensordict_priority(sample)
    expected = {i: 0.5 if i in sample["row_id"].tolist() else 1.0 for i in (2, 3)} | {4: 1.0, 5: 1.0}
    assert rb.buffer.priorities([2, 3, 4, 5]).tolist() == [expected[i] for i in (2, 3, 4, 5)]
    assert state(rb.buffer)["stale"] == int((sample["k"] < 2).sum())
    rb.close()
