"""Queries over buffers: against the same written in plain Python over the rows as they were put."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import Buffer, ShmStorage, Trajectory, traj
from shmbuf import query as module
from shmbuf.query import query_buffer

SPEC = {"env": torch.int64, "t": torch.int64, "reward": (torch.float32, (1,)), "next": {"done": torch.bool}}


def part(env: int, first: int, n: int, done: bool = True) -> TensorDict:
    t = torch.arange(first, first + n)
    ended = torch.zeros(n, dtype=torch.bool)
    ended[-1:] = done
    reward = (env + t / 100).float().unsqueeze(-1)
    return TensorDict({"env": torch.full((n,), env), "t": t, "reward": reward, "next": {"done": ended}}, [n])


@pytest.fixture
def storage(make_name):
    made = []

    def storage(capacity: int = 100, **kw) -> ShmStorage:
        made.append(
            ShmStorage(
                capacity, **{"name": make_name(), "schema": SPEC, "drain": "caller", "ring_bytes": 1 << 14, **kw}
            )
        )
        made[-1].open({})
        return made[-1]

    yield storage
    for s in made:
        s.buffer.close()


def put(storage: ShmStorage, td: TensorDict, stream=None) -> None:
    storage.put(td, stream=stream).wait()


def shown(found: list[Trajectory]) -> list[list[tuple[int, int]]]:
    return [list(zip(f.env.tolist(), f.t.tolist(), strict=True)) for f in found]


def test_all_and_some(storage):
    s = storage()
    assert query_buffer(s) == [] == query_buffer(s, traj.length > 1)
    for env, n in enumerate((5, 3, 7)):
        put(s, part(env, 0, n))
    found = query_buffer(s)
    assert shown(found) == [[(e, t) for t in range(n)] for e, n in enumerate((5, 3, 7))]
    assert all(type(f) is Trajectory for f in found)
    kept = query_buffer(s, (traj.reward.sum() > 4) & (traj.length >= 4))
    assert shown(kept) == [[(2, t) for t in range(7)]]
    assert kept[0].row_id.tolist() == list(range(8, 15)) == kept[0].index.tolist()
    assert set(kept[0].keys()) == {"env", "t", "reward", "next", "row_id", "index"}
    assert kept[0].reward.dtype == torch.float32 and kept[0].reward.shape == (7, 1) and kept[0].batch_size == (7,)
    assert shown(query_buffer(s, traj.row_id.first() == 5)) == [[(1, 0), (1, 1), (1, 2)]]
    assert shown(query_buffer(s, lambda t: t.length == 3)) == [[(1, 0), (1, 1), (1, 2)]]


def test_results_are_copies(storage):
    s = storage(10)
    put(s, part(0, 0, 5))
    put(s, part(1, 0, 5))
    for found in (query_buffer(s), query_buffer(s, traj.length > 1), query_buffer(s, lambda t: t.env[0] == 0)):
        found[0].reward.fill_(-1)
        assert (query_buffer(s)[0].reward >= 0).all()
        assert len(found) == 1 or (found[1].reward >= 0).all()
    kept = query_buffer(s)
    put(s, part(2, 0, 10))
    assert shown(kept) == [[(0, t) for t in range(5)], [(1, t) for t in range(5)]]


def test_after_a_wrap(storage):
    s = storage(10)
    for env, n in ((0, 5), (1, 3), (2, 4)):
        put(s, part(env, 0, n))
    assert shown(query_buffer(s)) == [[(0, 2), (0, 3), (0, 4)], [(1, t) for t in range(3)], [(2, t) for t in range(4)]]
    wrapped = query_buffer(s, traj.env.first() == 2)
    assert wrapped[0].row_id.tolist() == [8, 9, 10, 11] and wrapped[0].index.tolist() == [8, 9, 0, 1]


def test_a_row_that_stays_after_the_buffer_was_emptied_is_none(storage):
    s = storage(10)
    put(s, part(0, 0, 5, done=False))
    s.buffer.empty()
    assert query_buffer(s) == []
    put(s, part(0, 5, 3))
    assert shown(query_buffer(s)) == [[(0, 5), (0, 6), (0, 7)]]


@pytest.mark.parametrize("capacity", [1000, 150])
def test_interleaved_streams_and_collectors(storage, capacity):
    """Three collectors of three environments each, one row at a time, some a step of all: each stream's runs, as they were put."""
    s, rng = storage(capacity, trajectories=True), random.Random(capacity)
    handles = [ShmStorage.over(Buffer.attach(s.name)) for _ in range(3)]
    clock = {(c, e): 0 for c in range(3) for e in range(3)}
    began, order = dict.fromkeys(clock, 0), []
    runs: dict[tuple[int, int, int], list[int]] = {}
    for _ in range(400):
        c = rng.randrange(3)
        rows, streams = [], []
        for e in rng.sample(range(3), rng.randint(1, 3)):
            done = rng.random() < 0.1
            rows.append(part(10 * c + e, clock[c, e], 1, done))
            streams.append(e)
            runs.setdefault((c, e, began[c, e]), []).append(clock[c, e])
            order.append((c, e, began[c, e], clock[c, e]))
            clock[c, e] += 1
            began[c, e] = clock[c, e] if done else began[c, e]
        put(handles[c], torch.cat(rows), np.array(streams))
    live = set(order[-capacity:])
    expected = []
    for c, e, b, t in order:
        run = [x for x in runs[c, e, b] if (c, e, b, x) in live]
        if run and t == run[0]:
            expected.append([(10 * c + e, x) for x in run])
    assert shown(query_buffer(s)) == expected and len(expected) > 20
    long = (traj.length >= 5) & (traj.t.last() - traj.t.first() + 1 == traj.length)
    assert shown(query_buffer(s, long)) == [x for x in expected if len(x) >= 5]
    for h in handles:
        h.buffer.close()


def test_missing_keys(storage):
    s = storage()
    with pytest.raises(KeyError, match=r"'nothing' not found.*reward"):
        query_buffer(s, traj.nothing.sum() > 1)
    put(s, part(0, 0, 5))
    for predicate in (traj.nothing.sum() > 1, (traj.length > 99) & (traj["a", "b"] > 1).any()):
        with pytest.raises(KeyError, match=r"not found.*reward"):
            query_buffer(s, predicate)
    with pytest.raises(KeyError, match=r"trajectory_key .*nothing.* not found in data: "):
        query_buffer(s, trajectory_key="nothing")
    with pytest.raises(TypeError, match=r"any\(\) or \.all\(\)"):
        query_buffer(s, traj.t > 1)
    with pytest.raises(KeyError, match="'next' not found"):  # names no tensor
        query_buffer(s, (traj["next"] > 1).any())


def test_the_schema_comes_later(storage):
    s = storage(schema=None)
    assert query_buffer(s, traj.t.sum() > 1) == []
    put(s, part(3, 0, 2))
    assert shown(query_buffer(s, traj.t.sum() == 1)) == [[(3, 0), (3, 1)]]


@pytest.mark.parametrize("keep", [None, False])
def test_another_key(storage, keep):
    """Ids that the buffer does not split by: two interleaved, and one used again after its end."""
    s = storage(trajectories=keep)
    for t in range(4):
        for env in (7, 8):
            put(s, part(env, t, 1, done=t == 3))
    put(s, part(7, 4, 2))
    expected = [[(7, t) for t in range(4)], [(8, t) for t in range(4)], [(7, 4), (7, 5)]]
    assert shown(query_buffer(s, trajectory_key="env")) == expected
    assert shown(query_buffer(s, traj.length < 4, trajectory_key="env")) == expected[2:]
    wrapped = storage(9, trajectories=keep)
    for t in range(7):
        put(wrapped, torch.cat([part(env, t, 1, False) for env in (7, 8)]))
    assert shown(query_buffer(wrapped, trajectory_key="env")) == [
        [(8, t) for t in range(2, 7)],
        [(7, t) for t in range(3, 7)],
    ]


def test_the_buffers_own_key(storage):
    s = storage(traj_key="env")
    for t in range(3):
        put(s, torch.cat([part(env, t, 1, done=t == 2) for env in (4, 5)]))
    expected = [[(4, 0), (4, 1), (4, 2)], [(5, 0), (5, 1), (5, 2)]]
    assert shown(query_buffer(s)) == expected == shown(query_buffer(s, trajectory_key="env"))


def test_a_buffer_that_keeps_none(storage):
    s = storage(trajectories=False)
    for env, n in enumerate((2, 3)):
        put(s, part(env, 0, n))
    with pytest.warns(UserWarning, match=r"keeps no trajectories.*trajectories=True"):
        assert [f.length for f in query_buffer(s)] == [2, 3]
    bare = storage(schema={"x": torch.float32})
    put(bare, TensorDict({"x": torch.zeros(4)}, [4]))
    with pytest.raises(KeyError, match=r"Cannot split data into trajectories.*in data: 'x'"):
        query_buffer(bare)
    ids = storage(schema={"episode": torch.int64, "x": torch.float32}, trajectories=False)
    put(ids, TensorDict({"episode": torch.tensor([1, 2, 1, 2, 2]), "x": torch.arange(5.0)}, [5]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [f.x.tolist() for f in query_buffer(ids)] == [[0, 2], [1, 3, 4]]


def test_in_chunks(storage, monkeypatch):
    s = storage(2000)
    for env in range(50):
        put(s, part(env, 0, 1 + env % 7))
    whole = [shown(query_buffer(s, p)) for p in (None, traj.env.first().isin([3, 30, 49]), lambda t: t.length == 4)]
    for size in (1, 100, 1000):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)
        again = [shown(query_buffer(s, p)) for p in (None, traj.env.first().isin([3, 30, 49]), lambda t: t.length == 4)]
        assert again == whole
    assert [len(x) for x in whole] == [50, 3, 7]


# ---- rows that are overwritten while the query looks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "predicate, at",
    [(p, at) for p in (traj.length >= 3, traj.t.count() >= 2, (traj.env >= 0).all()) for at in (1, 2)] + [(None, 1)],
    ids=repr,
)
def test_overwritten_between_two_looks(storage, monkeypatch, at, predicate):
    """Before the at-th fetch of rows, 7 more are put: what is returned matches, ends as it did, and lacks only what is gone."""
    s = storage(20, trajectories=True)
    for env in range(4):
        put(s, part(env, 0, 5), stream=env)
    before, real, calls = shown(query_buffer(s)), module._fetch, []

    def fetch(buffer, columns, ids):
        calls.append(1)
        if len(calls) == at:
            put(s, part(9, 0, 7), stream=9)
        return real(buffer, columns, ids)

    monkeypatch.setattr(module, "_fetch", fetch)
    found = query_buffer(s, predicate)
    assert len(calls) == (1 if predicate is None else 2)
    assert all(predicate is None or predicate(f) for f in found)
    cut = [x[2:] if x[0][0] == 1 else x for x in before[1:]]  # environment 0 and two rows of environment 1 are gone
    assert shown(found) == cut


def put_before_fetch(monkeypatch, at: int, deed) -> None:
    real, calls = module._fetch, []

    def fetch(buffer, columns, ids):
        calls.append(1)
        if len(calls) == at:
            deed()
        return real(buffer, columns, ids)

    monkeypatch.setattr(module, "_fetch", fetch)


def test_one_that_does_not_match_any_more_as_it_is_returned(storage, monkeypatch):
    s = storage(20, trajectories=True)
    for env in range(4):
        put(s, part(env, 0, 5), stream=env)
    put_before_fetch(monkeypatch, 2, lambda: put(s, part(9, 0, 7), stream=9))
    assert shown(query_buffer(s, traj.length >= 4)) == [
        [(e, t) for t in range(5)] for e in (2, 3)
    ]  # 3 rows of 1 are left


def test_the_order_is_that_of_what_is_left(storage, monkeypatch):
    s = storage(8, trajectories=True)
    put(s, part(0, 0, 1, False), stream=0)
    put(s, part(1, 0, 3), stream=1)
    put(s, part(0, 1, 4), stream=0)
    put_before_fetch(monkeypatch, 1, lambda: put(s, part(2, 0, 1), stream=2))
    assert shown(query_buffer(s)) == [[(1, 0), (1, 1), (1, 2)], [(0, 1), (0, 2), (0, 3), (0, 4)]]


def test_a_walk_led_astray(storage, monkeypatch):
    """A listing in which rows, overwritten since, are followed back to other trajectories' live rows."""
    s = storage(20, trajectories=True)
    for env in range(4):
        put(s, part(env, 0, 5), stream=env)
    put(s, part(4, 0, 5), stream=4)  # rows 0 to 4 are gone
    real = s.buffer.listing
    monkeypatch.setattr(
        type(s.buffer), "listing", lambda self: (np.concatenate([[11, 3], real()[0]]), np.array([7, 5, 5, 5]))
    )
    assert shown(query_buffer(s)) == [[(e, t) for t in range(5)] for e in (1, 2, 3, 4)]
    assert shown(query_buffer(s, traj.length == 5)) == [[(e, t) for t in range(5)] for e in (1, 2, 3, 4)]


def test_cut(storage):
    listed = module._Listed(np.arange(10), np.array([3, 4, 3]))
    gone = np.zeros(10, bool)
    assert listed.without(gone)[1] is None
    gone[[0, 4, 8, 9]] = True
    left, stays = listed.without(gone)
    assert left.ids.tolist() == [1, 2, 5, 6] and left.lengths.tolist() == [2, 2] and stays.sum() == 4
    assert listed.without(np.ones(10, bool))[0].lengths.tolist() == []


# ---- transforms -------------------------------------------------------------------------------------------------------------


class Double:
    """Doubles one key; says so, or not."""

    def __init__(self, key, says: bool = True):
        self.key, self.calls = key, 0
        self.in_keys, self.out_keys = ([key], [key]) if says else ([], [])

    def __call__(self, td):
        self.calls += 1
        td[self.key] = td[self.key] * 2
        return td


def test_predicate_and_results_see_transformed_rows(storage):
    s = storage()
    for env, n in enumerate((5, 3, 7), 1):
        put(s, part(env, 0, n))
    t, r = Double("t"), Double("reward")
    found = query_buffer(s, traj.t.last() == 12, transforms=[t, r])
    assert [f.env[0].item() for f in found] == [3] and found[0].t.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert float(found[0].reward[0]) == 6 and (t.calls, r.calls) == (2, 1)
    assert query_buffer(s, traj.t.last() == 99, transforms=[t, r]) == [] and (t.calls, r.calls) == (3, 1)
    assert len(query_buffer(s, traj.length > 4, transforms=[t, r])) == 2 and (t.calls, r.calls) == (4, 2)
    found = query_buffer(s, lambda x: x.t[-1] == 12, transforms=[t, r])
    assert [f.length for f in found] == [7] and (t.calls, r.calls) == (5, 3)
    silent = Double("t", says=False)
    assert len(query_buffer(s, traj.reward.max() > 6, transforms=[silent, r])) == 1 and silent.calls == 1
    assert [f.length for f in query_buffer(s, traj.t.last() == 12, transforms=[silent, r])] == [7]


def test_keys_that_a_transform_makes(storage):
    s = storage()
    put(s, part(1, 0, 4))

    class Sum:
        in_keys, out_keys = ["t", "env"], [("made", "sum")]

        def __call__(self, td):
            return td.set(("made", "sum"), td["t"] + td["env"])

    class Next(Double):
        def __init__(self):
            super().__init__("reward")
            self.in_keys, self.out_keys = ["reward"], [("next", "extra")]

        def __call__(self, td):
            return td.set(("next", "extra"), td["reward"] * 100)

    found = query_buffer(s, (traj["made", "sum"].max() == 4) & (traj.extra.max() > 100), transforms=[Sum(), Next()])
    assert [f["made", "sum"].tolist() for f in found] == [[1, 2, 3, 4]]
    with pytest.raises(KeyError, match="not found"):
        query_buffer(s, traj.other.sum() > 1, transforms=[Sum()])
    with pytest.raises(ValueError, match=r"batch size \[2\] of rows of batch size \[4\]"):
        query_buffer(s, transforms=[lambda td: td[:2]])
