"""The class PRIO of cases from public bug trackers, each with its numbers: priorities, distribution, weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.helpers import k
from tests.unit.helpers_priorities import all_priorities, at_rest, chi2_p, drawn, prioritised, state, total


def weights_of_rows(buf, batch: int = 64, **how) -> np.ndarray:
    """float[rows]: the weight that each row came with, once all have been seen."""
    seen: dict[int, float] = {}
    while len(seen) < len(buf):
        _, ids, w = buf.draw_by_priority(batch, **how)
        for i, x in zip(ids.tolist(), w.tolist(), strict=True):
            assert seen.setdefault(i, x) == x
    return np.array([seen[i] for i in sorted(seen)])


def test_b001_weights_have_the_right_sign_formula_and_values(make):
    buf = prioritised(make, [1, 2, 3, 4])
    for beta, expected in (
        (1.0, [1, 0.5, 1 / 3, 0.25]),
        (0.5, [1, 0.70710678, 0.57735027, 0.5]),
    ):
        raw = (4 * np.array([0.1, 0.2, 0.3, 0.4])) ** -beta  # (N·P)^-beta: 2.5, 1.25, .833333, .625 at beta = 1
        got = weights_of_rows(buf, beta=beta)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        np.testing.assert_allclose(got, raw / raw.max(), atol=1e-6)
    assert weights_of_rows(buf, beta=0.0).tolist() == [1.0] * 4


def test_b003_the_scope_of_normalisation_is_an_option_and_n_the_live_count(make):
    buf = prioritised(make, [1, 2, 3, 4], capacity=8)
    for scope, expected in (("buffer", {2: 1 / 3, 3: 0.25}), ("batch", {2: 1.0, 3: 0.75})):
        while True:  # a batch that holds only the rows with p = 3 and p = 4
            _, ids, w = buf.draw_by_priority(3, beta=1.0, normalize=scope)
            if set(ids.tolist()) == {2, 3}:
                break
        np.testing.assert_allclose(w, [expected[i] for i in ids.tolist()], atol=1e-6)
    # By the 8 of the capacity instead of the 4 live rows the raw weight of p = 1 would be 1.25, its share the same.
    assert total(buf) == 10


@pytest.mark.parametrize("before", [0, 1, 3])
def test_b004_the_newest_row_takes_part(make, before):
    """Also right after a wrap."""
    buf = prioritised(make, [1.0] * 4)
    for i in range(before):
        buf.extend(k(4 + i))
    count = np.bincount(drawn(buf, 40_000) - before, minlength=4)
    assert (abs(count - 10_000) <= 450).all(), count


def test_b004_one_row_is_always_returned(make):
    buf = prioritised(make, [1.0], capacity=4)
    assert set(drawn(buf, 10_000).tolist()) == {0}


@pytest.mark.parametrize("capacity", [1, 2, 4096])
def test_b006_a_buffer_filled_to_exactly_its_capacity_can_be_sampled(make, capacity):
    buf = prioritised(make, [0.5] * capacity)
    for _ in range(10_000):
        rows, ids, w = buf.draw_by_priority(1)
        assert 0 <= ids[0] < capacity and rows["k"][0] == ids[0] and w[0] == 1.0


def test_b007_never_past_the_last_live_row_and_the_weight_is_of_the_row_returned(make):
    buf, rng = prioritised(make, [1.0] * 100, capacity=500, alpha=0.6, eps=1e-8), np.random.default_rng(7)
    for turn in range(1000):
        p = rng.random(100) + 1e-8
        buf.set_priorities(np.arange(100), p)
        leaf = ((p + 1e-8) ** 0.6).astype(np.float32).astype(np.float64)
        rows, ids, w = buf.draw_by_priority(1000 if turn < 999 else 1_000_000, beta=0.7)
        assert (ids >= 0).all() and (ids < 100).all() and (rows["k"] == ids).all()
        np.testing.assert_allclose(w, (leaf[ids] / leaf.min()) ** -0.7, rtol=1e-6)
    at_rest(buf)


def test_b008_zero_priorities_are_not_drawn_and_do_not_hang(make):
    buf = prioritised(make, [0, 0, 5, 0])
    assert set(drawn(buf, 100_000, 32).tolist()) == {2}
    buf.set_priorities(range(4), 0.0)
    assert total(buf) == 0
    for stratified in (False, True):
        with pytest.raises(RuntimeError, match="all 4 priorities are 0"):
            buf.draw_by_priority(32, stratified=stratified)
    buf.set_priorities([1], 1e-30)
    assert set(drawn(buf, 320, 32).tolist()) == {1}


def test_b010_a_negative_priority_is_an_error(make):
    buf = prioritised(make, [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"priorities\[3\] = -3\.0.*absolute value"):
        buf.set_priorities(range(4), [1, 1, 1, -3])
    assert all_priorities(buf).tolist() == [1] * 4 and total(buf) == 4


def test_b011_where_eps_goes(make):
    buf = prioritised(make, [0, 1], alpha=0.5, eps=0.01)
    leaf = np.array([0.1, 1.004988])
    assert total(buf) == pytest.approx(leaf.sum(), abs=1e-6)
    count = np.bincount(drawn(buf, 200_000), minlength=2)
    assert chi2_p(count, 200_000 * np.array([0.090499, 0.909501])) > 1e-4
    np.testing.assert_allclose(weights_of_rows(buf, beta=1.0), [1, 0.1 / 1.004988], atol=1e-6)
    np.testing.assert_allclose(all_priorities(buf), [0, 1], atol=1e-6)


def test_b013_a_huge_priority_leaves_no_residue(make):
    buf = prioritised(make, [1.0] * 1000)
    buf.set_priorities([0], 1e8)
    assert np.mean(drawn(buf, 1000) == 0) > 0.99
    buf.set_priorities([0], 1.0)
    assert total(buf) == 1000
    assert chi2_p(np.bincount(drawn(buf, 1_000_000, 10_000), minlength=1000), np.full(1000, 1000.0)) > 1e-4


@pytest.mark.parametrize("live, last", [(False, 9.0), (True, 0.1)], ids=["historic", "live"])
def test_b014_the_default_priority_follows_one_rule(make, live, last):
    buf = prioritised(make, [], capacity=3, max_priority_within_buffer=live)
    other = type(buf).attach(buf.name)  # all collectors obey the same
    buf.extend(k(0, 1, 2))
    assert all_priorities(buf).tolist() == [1.0] * 3  # the first ever
    buf.set_priorities(range(3), [9, 1, 1])
    buf.extend(k(3))  # overwrites the row with 9
    assert buf.priorities([3])[0] == (1.0 if live else 9.0)
    buf.set_priorities(range(*buf.window), 0.1)
    for handle in (buf, other):
        handle.extend(k(4))
        assert buf.priorities([buf.window[1] - 1])[0] == pytest.approx(last, rel=1e-6)
    other.close()


def test_b016_of_a_row_named_twice_the_last_value_stays(make):
    buf = prioritised(make, [1.0] * 8)
    assert buf.set_priorities([3, 3, 3], [1, 9, 4]).all()
    assert all_priorities(buf).tolist() == [1, 1, 1, 4, 1, 1, 1, 1] and total(buf) == 11
    buf.set_priorities([3, 5], [2, 2])
    assert all_priorities(buf).tolist() == [1, 1, 1, 2, 1, 2, 1, 1] and total(buf) == 10
    at_rest(buf)


def test_b018_stratified_draws_are_stratified(make):
    buf = prioritised(make, [1.0] * 4)
    for _ in range(1000):
        assert sorted(buf.draw_by_priority(4, stratified=True)[1].tolist()) == [0, 1, 2, 3]
    independent = [len(set(buf.draw_by_priority(4)[1].tolist())) for _ in range(1000)]
    assert (
        chi2_p(  # 4 distinct of 4: 4!/4^4, 1 of 4: 4/4^4 …
            np.bincount(independent, minlength=5)[1:], 1000 * np.array([4, 84, 144, 24]) / 256
        )
        > 1e-4
    )
    buf.set_priorities(range(4), [1, 1, 1, 997])
    for _ in range(1000):
        assert (buf.draw_by_priority(4, stratified=True)[1] == 3).sum() >= 3


CREATE = """
import sys
from shmbuf import Buffer, PrioritizedSampler, ShmStorage, TensorDictReplayBuffer
name, argument, value = sys.argv[1], sys.argv[2], float(sys.argv[3])
def face():
    rb = TensorDictReplayBuffer(storage=ShmStorage(10, name=name), sampler=PrioritizedSampler(10, **{argument: value}))
    rb.destroy()
def buffer():
    buf = Buffer.create(None, 10, schema={"k": "int64"}, drain="caller")
    buf.keep_priorities(**{argument: value}) if argument == "alpha" else buf.draw_by_priority(1, beta=value)
for call in (face, buffer):
    try:
        call()
    except ValueError as e:
        print("ValueError", e)
    except RuntimeError as e:
        print("taken")
    else:
        print("taken")
"""


@pytest.mark.parametrize("argument, value", [("alpha", -0.5), ("alpha", "nan"), ("beta", -1), ("beta", "nan")])
def test_b019_bad_alpha_or_beta_is_an_exception_not_an_abort(python, name, argument, value):
    lines = python(CREATE, name, argument, value).splitlines()
    assert len(lines) == 2
    assert all(f"{argument}={float(value)}: a finite number ≥ 0" in line for line in lines), lines
    from shmbuf import segment

    assert name not in segment.names()


def test_b019_beta_above_1_is_taken(python, name, make):
    """Documented: any finite number ≥ 0."""
    assert python(CREATE, name, "beta", 1.5).splitlines() == ["taken"] * 2
    np.testing.assert_allclose(weights_of_rows(prioritised(make, [1, 4]), beta=1.5), [1, 0.125], atol=1e-6)


def test_state_names_its_formula(make):
    has = state(prioritised(make, [1.0], alpha=0.5, eps=0.25))
    assert (has["alpha"], has["eps"], has["max_priority_within_buffer"], has["ready"]) == (0.5, 0.25, False, True)
