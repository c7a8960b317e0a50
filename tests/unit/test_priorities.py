"""Priorities at the numpy level: what is refused, what rows get, what is drawn, who may, and when they begin."""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest

from shmbuf import Buffer, BufferFormatError, NotEnoughRows, segment
from tests.unit.helpers import SMALL, k, rows, stuck_drainer
from tests.unit.helpers_priorities import (
    all_priorities,
    at_rest,
    chi2_p,
    drawn,
    no_change,
    prioritised,
    state,
    total,
)

IDS = [0, 1, 2, 3]


@pytest.fixture
def kept(make) -> Buffer:
    return prioritised(make, [1.0, 2.0, 3.0, 4.0], capacity=8)


@pytest.fixture
def elsewhere(start, kept):
    """Asks another process, that attached before, for the priorities and their sum as it sees them."""
    p = start(
        "import sys; from shmbuf import Buffer; b = Buffer.attach(sys.argv[1])\n"
        "for line in sys.stdin: print(b.priorities(range(*b.window)).tobytes().hex(), b._get('priorities'), flush=True)",
        kept.name,
    )

    def ask() -> str:
        p.stdin.write("\n")
        p.stdin.flush()
        return p.stdout.readline()

    assert ask()
    return ask


@pytest.mark.parametrize(
    "ids, p, error, text",
    [
        (IDS, [1, 2, np.nan, 4], ValueError, r"priorities\[2\] = nan: a priority is a finite number ≥ 0"),
        (IDS, [np.inf, 2, 3, 4], ValueError, r"priorities\[0\] = inf"),
        (IDS, [1, 2, 3, -np.inf], ValueError, r"priorities\[3\] = -inf"),
        (IDS, [1, -0.5, np.nan, 4], ValueError, r"priorities\[1\] = -0\.5"),
        (IDS, [1, 2, 3], ValueError, r"shape \[3\] for 4 rows.*shape \[4\]"),
        (IDS, [1, 2, 3, 4, 5], ValueError, r"shape \[5\] for 4 rows"),
        (IDS, [[1, 2, 3, 4]], ValueError, r"shape \[1, 4\] for 4 rows"),
        (IDS, [], ValueError, r"shape \[0\] for 4 rows"),
        (IDS, ["1", "2", "3", "4"], TypeError, "dtype <U1: real numbers"),
        (IDS, [1j, 2, 3, 4], TypeError, "dtype complex128: real numbers"),
        (IDS, [True, False, True, True], TypeError, "dtype bool: real numbers"),
        (IDS, [None] * 4, TypeError, "dtype object: real numbers"),
        (IDS, np.array([1, 2, 3, 4], "M8[s]"), TypeError, "real numbers"),
        ([0, 1, 2, 4], 1.0, IndexError, r"ids\[3\] = 4: no such row has been stored; stored now: 0 to 3"),
        ([0, -1, 2, 3], 1.0, IndexError, r"ids\[1\] = -1: no such row"),
        ([0, 2**62, 2, 3], 1.0, IndexError, rf"ids\[1\] = {2**62}: no such row"),
        ([0.0, 1.0, 2.0, 3.0], 1.0, TypeError, "row ids of dtype float64: integers"),
        (IDS, [1, 2, 1e39, 4], ValueError, r"priorities\[2\] = 1e\+39: .*leaves the range of float32"),
        (IDS, [1, 2, 3, 1e-50], ValueError, r"priorities\[3\] = 1e-50: .*leaves the range of float32"),
        (IDS, np.array([1, 2, np.nan, 4], np.float32), ValueError, r"priorities\[2\] = nan"),
        (IDS, np.array([1, 2, -3, 4], np.int64), ValueError, r"priorities\[2\] = -3"),
    ],
)
def test_bad_input_names_position_and_value_and_changes_nothing(kept, elsewhere, ids, p, error, text):
    other, there = Buffer.attach(kept.name), elsewhere()
    with no_change(kept, other), pytest.raises(error, match=text):
        kept.set_priorities(ids, p)
    assert elsewhere() == there
    other.close()


@pytest.mark.parametrize(
    "p, error, text",
    [
        ([1, np.nan], ValueError, r"priorities\[1\] = nan"),
        ([-1, 1], ValueError, r"priorities\[0\] = -1"),
        ([1, np.inf], ValueError, r"priorities\[1\] = inf"),
        ([1, 1e39], ValueError, r"priorities\[1\] = 1e\+39: .*float32"),
        ([1, 2, 3], ValueError, r"shape \[3\] for 2 rows"),
        (["a", "b"], TypeError, "real numbers"),
    ],
)
def test_rows_with_bad_priorities_are_not_put(kept, elsewhere, p, error, text):
    there = elsewhere()
    with no_change(kept), pytest.raises(error, match=text):
        kept.put(k(4, 5), priorities=p)
    assert elsewhere() == there
    assert kept.extend(k(4)).tolist() == [4]


@pytest.mark.parametrize("name, value", [("alpha", -0.1), ("alpha", float("nan")), ("alpha", float("inf")), ("alpha", "1"), ("alpha", True), ("eps", -1e-9), ("eps", float("nan")), ("eps", None)])  # fmt: skip
def test_a_formula_out_of_range(make, name, value):
    buf = make(**SMALL)
    with pytest.raises(ValueError, match=rf"{name}={value!r}: a finite number ≥ 0"):
        buf.keep_priorities(**{name: value})
    assert state(buf) is None
    buf.keep_priorities()  # nothing was settled


@pytest.mark.parametrize("how, text", [({"beta": -0.1}, "beta=-0.1"), ({"beta": float("nan")}, "beta=nan"), ({"beta": float("inf")}, "beta=inf"), ({"beta": None}, "beta=None"), ({"normalize": "max"}, "normalize='max': one of buffer, batch")])  # fmt: skip
def test_a_weighting_out_of_range(kept, how, text):
    with no_change(kept), pytest.raises(ValueError, match=text):
        kept.draw_by_priority(4, **how)
    with no_change(kept), pytest.raises(ValueError, match="n=-1"):
        kept.draw_by_priority(-1)


def test_nothing_is_stored(make):
    buf = prioritised(make, [], capacity=4)
    with pytest.raises(NotEnoughRows, match="Cannot sample from an empty storage"):
        buf.draw_by_priority(1)
    with pytest.raises(IndexError, match=r"ids\[0\] = 0: .*the buffer is empty"):
        buf.set_priorities([0], 1.0)
    assert buf.set_priorities([], []).tolist() == [] and buf.priorities([]).tolist() == []
    rows, ids, w = buf.draw_by_priority(0)
    assert len(ids) == len(w) == len(rows["k"]) == 0


def test_none_are_kept(make):
    buf = make(**SMALL)
    buf.extend(k(0), priorities=3.0)  # ignored, as documented
    for call in (
        lambda: buf.set_priorities([0], 1.0),
        lambda: buf.priorities([0]),
        lambda: buf.draw_by_priority(1),
    ):
        with pytest.raises(RuntimeError, match=r"keeps no priorities: keep_priorities\(alpha, eps\) first"):
            call()


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6, 0.8, 1.0])
def test_priorities_from_1e_minus_12_to_1e12_in_one_tree_are_read_back(make, alpha):
    p = np.logspace(-12, 12, 2401)
    buf = prioritised(make, p, alpha=alpha)
    np.testing.assert_allclose(all_priorities(buf), p, rtol=1e-5)
    order = np.random.default_rng(2).permutation(len(p))
    buf.set_priorities(order, p)
    np.testing.assert_allclose(all_priorities(buf)[order], p, rtol=1e-5)
    at_rest(buf)
    assert total(buf) == pytest.approx((p**alpha).sum(), rel=1e-6)
    _, ids, w = buf.draw_by_priority(1000, beta=1.0)
    leaf = np.float64(np.float32(p[np.argsort(order)][ids] ** alpha))
    np.testing.assert_allclose(w, np.float32(p[0] ** alpha) / leaf, rtol=1e-6)


def test_eps_is_taken_off_again(make):
    p = np.logspace(-6, 6, 500)
    buf = prioritised(make, p, alpha=0.6, eps=1e-8)
    np.testing.assert_allclose(all_priorities(buf), p, rtol=1e-5)


def test_alpha_0_forgets_priorities(make):
    assert np.isnan(all_priorities(prioritised(make, [1.0] * 10, alpha=0.0))).all()


def test_alpha_0_draws_uniformly(make):
    buf = prioritised(make, [1.0] * 10, alpha=0.0)
    buf.set_priorities(range(10), np.arange(10) * 100.0)
    assert total(buf) == 10
    assert chi2_p(np.bincount(drawn(buf, 10_000), minlength=10), np.full(10, 1000.0)) > 1e-4
    assert buf.draw_by_priority(10, beta=1.0)[2].tolist() == [1.0] * 10


@pytest.mark.parametrize("alpha, p", [(1.0, 3.5e38), (0.5, 1e78), (2.0, 1e20), (1.0, 1e-46), (3.0, 1e-20)])
def test_a_leaf_outside_float32_is_refused(make, alpha, p):
    buf = prioritised(make, [1.0, 1.0], alpha=alpha)
    with (
        no_change(buf),
        pytest.raises(ValueError, match=r"priorities\[1\] .*leaves the range of float32. Nothing was changed"),
    ):
        buf.set_priorities([0, 1], [1.0, p])
    with no_change(buf), pytest.raises(ValueError, match=r"priorities\[0\] .*leaves the range of float32"):
        buf.put(k(3), priorities=p)


def test_every_real_dtype_and_one_for_all(kept):
    for dtype in ("f2", "f4", "f8", ">f4", "i1", "u2", "i8", "u8"):
        kept.set_priorities(IDS, np.array([4, 3, 2, 1], dtype))
        assert all_priorities(kept).tolist() == [4, 3, 2, 1], dtype
        assert kept.set_priorities(IDS, 1.0).all()
    kept.set_priorities(IDS, np.arange(8.0)[::2])
    kept.set_priorities(np.array([3, 2], "i2"), [7, 8])
    assert all_priorities(kept).tolist() == [0, 2, 8, 7]


def test_rows_bring_their_priorities_others_get_the_running_maximum(make):
    buf = prioritised(make, [], capacity=8)
    buf.extend(k(0, 1), priorities=[0.25, 5.0])
    buf.extend(k(2))
    assert all_priorities(buf).tolist() == [0.25, 5.0, 5.0]
    buf.extend(k(3, 4), priorities=7.0)
    buf.set_priorities([0], 9.0)
    assert state(buf)["new_row"] == 9.0
    buf.extend(k(5))
    buf.set_priorities([0, 5], 1.0)  # the maximum that ever was stays
    buf.extend(k(6))
    assert all_priorities(buf).tolist() == [1, 5, 5, 7, 7, 1, 9]
    at_rest(buf)


def test_max_priority_within_buffer_follows_the_stored_rows(make):
    buf = prioritised(make, [3.0, 9.0, 1.0], capacity=8, max_priority_within_buffer=True)
    assert state(buf)["new_row"] == 9.0
    buf.set_priorities([1], 2.0)
    assert state(buf)["new_row"] == 3.0
    buf.extend(k(3), priorities=4.0)
    buf.extend(k(4))
    assert all_priorities(buf).tolist() == [3, 2, 1, 4, 4]
    at_rest(buf)


def test_records_larger_than_ring_and_capacity_bring_theirs(make):
    buf = make(50, schema={"k": "int64"}, ring_bytes=4096)
    buf.keep_priorities(1.0, 0.0)
    n = np.arange(1000)
    buf.extend(k(*n), priorities=1.0 + n)
    assert all_priorities(buf).tolist() == (1.0 + n[-50:]).tolist()
    assert total(buf) == (1.0 + n[-50:]).sum()
    at_rest(buf)


def test_around_the_wrap_again_and_again(make):
    """Rows, priorities and sums agree with a plain list."""
    buf, rng, plain = prioritised(make, [], capacity=13), np.random.default_rng(3), []
    for _ in range(400):
        n = int(rng.integers(1, 20))
        p = rng.integers(1, 100, n).astype(float)
        at = len(plain)
        buf.extend(k(*range(at, at + n)), priorities=p)
        plain += p.tolist()
        ids = rng.integers(0, len(plain), 5)
        new = rng.integers(0, 100, 5).astype(float)
        live = ids >= len(plain) - 13
        assert (buf.set_priorities(ids, new) == live).all()
        for i, x in zip(ids[live], new[live], strict=True):
            plain[i] = x
        lo, hi = buf.window
        assert buf.priorities(range(lo, hi)).tolist() == plain[lo:hi] and total(buf) == sum(plain[lo:hi])
    assert np.isnan(buf.priorities([0, 10**6])).all()
    at_rest(buf)


def test_empty_resets(make):
    buf = prioritised(make, [5.0, 6.0, 7.0, 8.0])
    buf.empty()
    assert total(buf) == 0 and state(buf)["min"] == 0 and state(buf)["new_row"] == 1.0
    with pytest.raises(NotEnoughRows):
        buf.draw_by_priority(1)
    ids = buf.extend(k(1, 2))
    assert buf.priorities(ids).tolist() == [1.0, 1.0] and total(buf) == 2
    at_rest(buf)


def test_normalize_by_batch(kept):
    for _ in range(50):
        _, ids, w = kept.draw_by_priority(3, beta=1.0, normalize="batch")
        np.testing.assert_allclose(w, (ids + 1.0).min() / (ids + 1.0), rtol=1e-6)


def test_a_seed_repeats_draws(kept):
    for stratified in (False, True):
        kept.seed(5)
        first = kept.draw_by_priority(64, stratified=stratified)[1].tolist()
        kept.seed(5)
        assert kept.draw_by_priority(64, stratified=stratified)[1].tolist() == first
        assert kept.draw_by_priority(64, stratified=stratified)[1].tolist() != first


# ---- when they begin, who may -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 3, 8, 21])
def test_a_buffer_that_begins_late_gives_the_rows_that_are_there_theirs(make, rows):
    buf = make(8, schema={"k": "int64"})
    if rows:
        buf.extend(k(*range(rows)), priorities=9.0)  # nobody keeps them yet
    other = Buffer.attach(buf.name)
    other.keep_priorities(0.5, 0.0)
    live = min(rows, 8)
    assert all_priorities(buf).tolist() == [1.0] * live and total(buf) == live
    buf.extend(k(100), priorities=16.0)
    assert total(other) == min(live, 7) + 4.0
    at_rest(buf)
    other.close()


def test_before_there_is_a_schema(make):
    buf = make(8, schema=None)
    buf.keep_priorities(1.0, 0.0)
    other = Buffer.attach(buf.name)
    other.extend(k(0, 1), priorities=[2.0, 3.0])
    assert all_priorities(buf).tolist() == [2.0, 3.0]
    other.close()


def test_all_processes_use_one_formula(make, python):
    buf = prioritised(make, [2.0], alpha=0.6, eps=1e-8)
    code = (
        "import sys; from shmbuf import Buffer; b = Buffer.attach(sys.argv[1])\n"
        "b.keep_priorities(0.6, 1e-8)\n"
        "for alpha, eps, live in ((0.7, 1e-8, False), (0.6, 1e-6, False), (0.6, 1e-8, True)):\n"
        "    try: b.keep_priorities(alpha, eps, max_priority_within_buffer=live)\n"
        "    except ValueError as e: print(e)"
    )
    with no_change(buf):
        lines = python(code, buf.name).splitlines()
    assert len(lines) == 3
    for line, asked in zip(lines, ("alpha=0.7", "eps=1e-06", "max_priority_within_buffer=True"), strict=True):
        assert "keeps priorities with alpha=0.6, eps=1e-08, max_priority_within_buffer=False; asked for" in line
        assert asked in line and "all processes use one formula" in line


def test_a_formula_of_zeros_is_one(make):
    buf = prioritised(make, [2.0], alpha=0.0, eps=0.0)
    assert state(buf)["alpha"] == 0 and state(buf)["eps"] == 0
    with pytest.raises(ValueError, match="all processes use one formula"):
        buf.keep_priorities(0.0, 0.0, max_priority_within_buffer=True)


def test_whoever_drains_is_stuck_while_a_buffer_begins_to_keep_priorities(make):
    buf = make(8, schema={"k": "int64"})
    buf.extend(k(0))
    with stuck_drainer(buf.name), pytest.raises(TimeoutError, match=r"did not get priorities within 0\.05 s"):
        buf.keep_priorities(1.0, 0.0, timeout=0.05)
    buf.keep_priorities(1.0, 0.0)  # it goes on where it stood
    assert all_priorities(buf).tolist() == [1.0]


def test_a_read_only_handle_draws_and_looks_but_sets_nothing(kept):
    look = Buffer.attach(kept.name, readonly=True)
    with no_change(kept):
        assert all_priorities(look).tolist() == [1, 2, 3, 4]
        rows, ids, _ = look.draw_by_priority(100)
        assert (rows["k"] == ids).all()
        look.keep_priorities(1.0, 0.0)  # the same: nothing to do
        with pytest.raises(PermissionError, match="a read-only handle cannot set priorities"):
            look.set_priorities([0], 1.0)
    look.close()


def test_a_read_only_handle_cannot_begin(make):
    buf = make(8, schema={"k": "int64"})
    look = Buffer.attach(buf.name, readonly=True)
    with pytest.raises(PermissionError, match="read-only handle cannot make the buffer keep priorities"):
        look.keep_priorities(1.0, 0.0)
    assert state(buf) is None
    look.close()


def test_a_pickled_handle_sets_the_same_priorities(kept):
    copy = pickle.loads(pickle.dumps(kept))
    copy.set_priorities([0], 8.0)
    assert kept.priorities([0])[0] == 8.0 and state(copy) == state(kept)
    copy.close()


def test_a_fork_child_sets_and_draws(kept):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            kept.set_priorities(IDS, [0, 0, 6, 0])
            code = 0 if set(kept.draw_by_priority(64)[1].tolist()) == {2} else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert all_priorities(kept).tolist() == [0, 0, 6, 0] and total(kept) == 6
    at_rest(kept)


def test_a_closed_handle_says_so(kept):
    handle = Buffer.attach(kept.name)
    handle.close()
    for call in (
        lambda: handle.set_priorities([0], 1.0),
        lambda: handle.priorities([0]),
        lambda: handle.draw_by_priority(1),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


# ---- shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [5, 64, 1000])
@pytest.mark.parametrize("stratified", [False, True], ids=["proportional", "stratified"])
def test_rows_are_drawn_by_their_shares(make, capacity, stratified):
    p = np.random.default_rng(capacity).integers(0, 50, capacity) + 0.0
    p[0] = 0
    buf = prioritised(make, p)
    n = 200_000
    count = np.bincount(drawn(buf, n, 1000, stratified=stratified), minlength=capacity)
    assert (count[p == 0] == 0).all()
    if not stratified:
        assert chi2_p(count[p > 0], n * p[p > 0] / p.sum()) > 1e-4
    else:  # of each batch a row gets its share rounded down or up, but for the strata at its two ends
        assert (abs(count - n * p / p.sum()) <= n / 1000 * 2).all()
        assert ((count - n * p / p.sum()) ** 2).sum() < n  # a multinomial would have about n
        # within the strata positions are uniform: one draw of a batch of one has the proportional shares
        single = np.bincount(drawn(buf, 20_000, 1, stratified=True), minlength=capacity)
        if capacity == 5:
            assert chi2_p(single[p > 0], 20_000 * p[p > 0] / p.sum()) > 1e-4


def test_alpha_shapes_the_shares(make):
    p = np.array([1.0, 4, 16, 64, 256])
    buf = prioritised(make, p, alpha=0.5)
    assert chi2_p(np.bincount(drawn(buf, 100_000), minlength=5), 100_000 * np.array([1, 2, 4, 8, 16]) / 31) > 1e-4


@pytest.mark.parametrize("alpha, eps", [(200.0, 1.0), (1.0, 1e39), (2.0, 1e200), (1e308, 1e-8 + 0.5)])
def test_a_formula_that_gives_new_rows_no_leaf_is_refused(make, alpha, eps):
    buf = make(**SMALL)
    with pytest.raises(ValueError, match=r"alpha=.* eps=.*float32"):
        buf.keep_priorities(alpha, eps)
    buf.keep_priorities(100.0, 1.0)


def test_a_refused_first_put_does_not_fix_the_schema(make):
    buf = make(100, schema=None)
    buf.keep_priorities()
    for wrong in ({"priorities": [1.0, float("nan")]}, {"priorities": [1.0, -1.0]}, {"stream": "x"}, {"stream": 3}):
        with pytest.raises((ValueError, TypeError)):
            buf.put({"x": np.zeros(2)}, **wrong)
        assert buf.schema is None and len(buf) == 0
    buf.extend({"y": np.zeros(2, "f4"), "done": np.zeros(2, bool)}, stream=3, priorities=[1.0, 2.0])
    assert buf.priorities([0, 1]).tolist() == pytest.approx([1.0, 2.0])


def test_a_damaged_formula_is_said_and_not_the_priority(make):
    buf = make(drain="caller")
    buf.keep_priorities(0.6)
    buf.extend(rows(0, 3))
    word = struct.pack("<d", -0.6)  # as Formula::pack stores alpha
    with open(segment.path_of(buf.name), "r+b") as f:
        data = f.read(1 << 20)
        places = [at for at in range(0, len(data) - 8, 8) if data[at : at + 8] == word]
        assert len(places) == 1
        f.seek(places[0])
        f.write(struct.pack("<d", float("nan")))
    for call in (lambda: buf.set_priorities([0], 2.0), lambda: buf.extend(rows(3, 1), priorities=1.5)):
        with pytest.raises(BufferFormatError, match="formula of priorities has alpha nan"):
            call()
