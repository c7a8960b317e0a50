"""What is done with each name of the face in a second process, beside a collector, and what must hold: `USES`, `MISUSES`.

Rows: every value of a row follows from its number ``k``, but for ``note``, which the edits change. A collector extends at most 400 rows
during a use, so that in a buffer of 1,000 the rows that a use stored are there to its end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import (
    CheckpointError,
    ImmutableDatasetWriter,
    PrioritizedSampler,
    RandomSampler,
    RemoteTensorDictReplayBuffer,
    SchemaError,
    ShmStorage,
    traj,
)
from tests import page

CAPACITY, BATCH, EPISODE, OWN = 1000, 16, 10, 10**9


def numbered(first: int, n: int) -> TensorDict:
    k = torch.arange(first, first + n)
    following = {
        "obs": k[:, None].float().expand(n, 8),
        "reward": k[:, None].float(),
        "done": (k % EPISODE == EPISODE - 1)[:, None],
    }
    return TensorDict({"k": k, "note": torch.zeros(n, dtype=torch.int64), "next": following}, [n])


def whole(td: Any) -> bool:
    """Each row is one that was handed in; at least one."""
    k = td["k"][..., None]
    return bool(
        k.numel()
        and (td["next", "obs"] == k.float()).all()
        and (td["next", "reward"] == k.float()).all()
        and (td["next", "done"] == (k % EPISODE == EPISODE - 1)).all()
    )


class Context:
    """What the uses share in their process."""

    def __init__(self, name: str, path: Path):
        self.name, self.path, self.stored, self.replaced = name, path, 0, 0

    def rows(self, n: int) -> TensorDict:
        """The next n rows of this process, to be stored at once."""
        self.stored += n
        return numbered(OWN + self.stored - n, n)

    def others(self, n: int) -> TensorDict:
        """n rows of no other's numbers, to replace stored ones."""
        self.replaced += n
        return numbered(2 * OWN + self.replaced - n, n)

    def directory(self) -> Path:
        self.path.mkdir(exist_ok=True)
        return self.path / f"checkpoint-{len(list(self.path.iterdir()))}"

    @staticmethod
    def another() -> RemoteTensorDictReplayBuffer:
        """A buffer of this process's own, of the same parts."""
        return RemoteTensorDictReplayBuffer(
            storage=ShmStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY), batch_size=BATCH
        )


RB = RemoteTensorDictReplayBuffer


def twice(td):
    return td.set("twice", td["k"] * 2)


def plus(td):
    return td.set("twice", td["twice"] + 1)


def noted(td):
    return td.set("note", td["note"] + 7)


def tripled(td):
    return td.set("note", td["note"] * 3)


def add(rb: RB, c: Context) -> None:
    row = c.rows(1)[0]
    i = rb.add(row)
    assert type(i) is int and 0 <= i < CAPACITY and rb[i]["k"] == row["k"]


def append_transform(rb: RB, c: Context) -> None:
    assert rb.append_transform(twice) is rb
    for td in (rb.sample(), rb[:], rb[[3, 5]], rb.next()):
        assert (td["twice"] == 2 * td["k"]).all()
    rb.append_transform(noted, invert=True)
    i = rb.extend(c.rows(3))
    assert rb.storage[i]["note"].tolist() == [7] * 3 and "twice" not in rb.storage[i]
    with shmbuf.attach(c.name) as other:
        assert "twice" not in other.sample(), "a handle's own"


def as_remote(rb: RB, c: Context) -> None:
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ImportError, match="pip install"):
            type(rb).as_remote()
    else:
        assert type(rb).as_remote() is not None


def batch_size(rb: RB, c: Context) -> None:
    assert rb.batch_size == BATCH == len(rb.sample())


def itself(name: str) -> Callable[[RB, Context], None]:
    def use(rb: RB, c: Context) -> None:
        assert getattr(rb, name)() is rb and whole(rb.sample())

    return use


def saving(dump: str, load: str) -> Callable[[RB, Context], None]:
    def use(rb: RB, c: Context) -> None:
        i, path = rb.extend(c.rows(2)), c.directory()
        mine = rb[i]["k"].tolist()
        assert getattr(rb, dump)(path) is None
        with c.another() as other:
            assert getattr(other, load)(path) is None
            k = other["k"]
            assert whole(other[:]) and len(k.unique()) == len(k) == len(other) and set(mine) <= set(k.tolist())
            assert whole(other.sample())

    return use


def empty(rb: RB, c: Context) -> None:
    gone = rb[rb.extend(c.rows(3))]["k"].tolist()
    count = rb.write_count
    rb.empty(empty_write_count=False)
    assert rb.write_count >= count and len(rb) <= 400 and rb.buffer.window[0] % CAPACITY == 0
    rb.extend(c.rows(CAPACITY))  # full again
    assert len(rb) == CAPACITY and not set(gone) & set(rb["k"].tolist())


def extend(rb: RB, c: Context) -> None:
    rows = c.rows(5)
    i = rb.extend(rows)
    assert i.dtype == torch.int64 and i.shape == (5,) and (rb[i]["k"] == rows["k"]).all()
    rb.update_priority(torch.arange(CAPACITY), 2.0)
    for taken in (True, False):
        rated = [row.set("td_error", torch.tensor(1.0)) for row in c.rows(3)]
        i = rb.extend(rated, update_priority=taken)
        p = rb.buffer.priorities(rb.buffer.ids_of(i.numpy()))
        assert p == pytest.approx(1.0, rel=1e-4) if taken else (p > 1.5).all(), "of a new row: the largest"
        assert "td_error" not in rb[i]


def initialized(rb: RB, c: Context) -> None:
    assert rb.initialized is True


def insert_transform(rb: RB, c: Context) -> None:
    rb.append_transform(plus)
    assert rb.insert_transform(0, twice) is rb and len(rb.transform) == 2
    td = rb.sample()
    assert (td["twice"] == 2 * td["k"] + 1).all() and whole(td)


def is_alive(rb: RB, c: Context) -> None:
    assert rb.is_alive
    rb.close()
    assert not rb.is_alive


def following(rb: RB, c: Context) -> None:
    for _ in range(3):
        assert whole(rb.next()) and len(rb.next()) == BATCH
    taken = [batch for batch, _ in zip(rb, range(3), strict=False)]
    assert all(map(whole, taken)) and len(taken) == 3


def query(rb: RB, c: Context) -> None:
    rb.extend(c.rows(-c.stored % EPISODE + EPISODE))  # a handle's own stream: what is left of an episode, and one
    first = OWN + c.stored
    rb.extend(c.rows(2 * EPISODE + 5))
    for hits in (
        rb.query((traj.reward.sum() > -1) & (traj.length >= 2)),
        rb.query(lambda t: t.length >= 2),
        rb.query(),
    ):
        assert hits
        for t in hits:
            assert (t.reward.reshape(-1) == t.k.float()).all(), "no torn row"
        mine = [t.k.tolist() for t in hits if t.k[0] >= first and t.k[0] < 2 * OWN]
        assert mine == [
            list(range(a, b)) for a, b in ((first, first + 10), (first + 10, first + 20), (first + 20, first + 25))
        ]


def read_all_in_order(rb: RB, c: Context) -> None:
    assert whole(rb.read_all_in_order()) and len(rb.read_all_in_order()) == CAPACITY == len(rb)
    assert whole(rb.read_all_in_order(5)) and len(rb.read_all_in_order(end=5)) == 5


def register_save_hook(rb: RB, c: Context) -> None:
    path = c.directory()
    rb.register_save_hook(noted)
    rb.set_("note", torch.ones(CAPACITY, dtype=torch.int64))
    rb.dumps(path)
    with c.another() as other:
        other.loads(path)
        assert set(other["note"].tolist()) <= {7, 8} and 8 in other["note"]
        assert 8 not in rb["note"], "what is stored stays"


def register_load_hook(rb: RB, c: Context) -> None:
    path = c.directory()
    rb.dumps(path)
    with c.another() as other:
        other.register_load_hook(noted)
        other.loads(path)
        assert (other["note"] >= 7).all() and whole(other[:])


def sample(rb: RB, c: Context) -> None:
    td, info = rb.sample(return_info=True)
    assert whole(td) and len(td) == BATCH and (info["row_id"] == td["row_id"]).all()
    assert (td["row_id"] % CAPACITY == td["index"]).all() and td["priority_weight"].shape == (BATCH,)
    assert len(rb.sample(7)) == 7 and len(rb.sample(7, True)) == len(rb.sample(7, None, True)) == 2
    again = rb.sample(out=td)
    assert again is td and whole(td)


def sampler(rb: RB, c: Context) -> None:
    assert type(rb.sampler) is PrioritizedSampler and rb.sampler.alpha == PrioritizedSampler(CAPACITY).alpha


def service_backend(rb: RB, c: Context) -> None:
    assert rb.service_backend == "direct"


def set_(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(3))
    assert rb.set_("note", torch.full((CAPACITY,), 3)) is rb
    assert rb[i]["note"].tolist() == [3] * 3 and whole(rb[:])


def set_at_(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(4))
    assert rb.set_at_("note", torch.arange(2), i[1:3]) is rb
    assert rb[i]["note"].tolist() == [0, 0, 1, 0] and whole(rb[i])
    rb[i[:2]] = c.others(2)
    assert rb[i]["note"].tolist() == [0, 0, 1, 0] and whole(rb[i]) and (rb[i[:2]]["k"] >= 2 * OWN).all()


def set_sampler(rb: RB, c: Context) -> None:
    before = rb.sampler
    assert rb.set_sampler(RandomSampler()) is before and type(rb.sampler) is RandomSampler
    assert whole(rb.sample()) and "priority_weight" not in rb.sample()
    with shmbuf.attach(c.name) as other:
        assert type(other.sampler) is PrioritizedSampler


def set_storage(rb: RB, c: Context) -> None:
    mine, theirs = ShmStorage(CAPACITY), rb.storage
    assert rb.set_storage(mine) is theirs and rb.storage is mine and len(rb) == 0
    rb.extend(numbered(0, 4))
    assert rb.sample()["k"].max() < 4 and len(rb) == 4
    rb.set_storage(theirs)
    mine.buffer.close()
    assert whole(rb.sample()) and len(rb) == CAPACITY


def set_writer(rb: RB, c: Context) -> None:
    before = rb.writer
    assert rb.set_writer(ImmutableDatasetWriter()) is before
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        rb.extend(numbered(0, 2))
    rb.set_writer(before)
    extend(rb, c)


def shutdown(rb: RB, c: Context) -> None:
    rb.shutdown(timeout=5)
    assert not rb.is_alive
    with pytest.raises(RuntimeError, match="shut down"):
        rb.sample()
    with shmbuf.attach(c.name) as other:
        assert other.is_alive and whole(other.sample())


def stats(rb: RB, c: Context) -> None:
    said = rb.stats()
    assert said["size"] == said["capacity"] == CAPACITY and said["utilization"] == 1 and said["initialized"] is True
    assert said["prefetch_queue_size"] == 0 and said["write_count"] <= rb.write_count
    assert all(isinstance(said[k], (int, float)) for k in ("size", "capacity", "utilization", "write_count"))


def storage(rb: RB, c: Context) -> None:
    assert type(rb.storage) is ShmStorage and rb.storage.max_size == CAPACITY and whole(rb.storage[:])


def transform(rb: RB, c: Context) -> None:
    assert len(rb.transform) == 0
    rb.append_transform(twice)
    assert len(rb.transform) == 1


def update_(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(3))
    fives = torch.full((CAPACITY,), 5)
    assert rb.update_({"note": fives, "nonsense": fives}, keys_to_update=["note"]) is rb
    assert rb[i]["note"].tolist() == [5] * 3 and whole(rb[:])
    rb.update_(TensorDict({"note": fives + 1}, [CAPACITY]), clone=True)
    assert rb[i]["note"].tolist() == [6] * 3


def write_all(rb: RB, c: Context) -> None:
    part = rb.read_all_in_order(5)
    rb.write_all(part, 5)
    assert whole(rb[:])
    rb.write_all(rb.read_all_in_order())
    assert whole(rb[:])


def write_count(rb: RB, c: Context) -> None:
    before = rb.write_count
    rb.extend(c.rows(6))
    assert before + 6 <= rb.write_count <= before + 406


def writer(rb: RB, c: Context) -> None:
    assert type(rb.writer).__name__ == "TensorDictRoundRobinWriter" and 0 <= rb.writer._cursor < CAPACITY


def as_dataset(rb: RB, c: Context) -> None:
    batches = list(rb.as_dataset(3))
    assert len(batches) == 3 and all(map(whole, batches))


def can_sample(rb: RB, c: Context) -> None:
    assert rb.can_sample() and rb.can_sample(5)


def state_dict(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(2))
    mine, state = rb[i]["k"].tolist(), rb.state_dict()
    rows = state["_storage"]["rows"]
    assert (
        whole(rows) and len(rows) <= CAPACITY and set(mine) <= set(rows["k"].tolist()) and state["_batch_size"] == BATCH
    )
    with c.another() as other:
        other.load_state_dict(state)
        assert sorted(other["k"].tolist()) == sorted(rows["k"].tolist()) and whole(other[:])


def mark_update(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(4))
    ids = rb.buffer.ids_of(i.numpy())
    rb.update_priority(i, 0.5)
    rb.mark_update(i[:2])
    p = rb.buffer.priorities(ids)
    assert p[2:] == pytest.approx(0.5, rel=1e-4) and (p[:2] > 0.6).all()


def update_priority(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(4))
    ids = rb.buffer.ids_of(i.numpy())
    assert rb.update_priority(i, torch.arange(1.0, 5)).all() and rb.update_priority(None, 2.0, row_id=ids[:1]).all()
    assert rb.buffer.priorities(ids) == pytest.approx([2, 2, 3, 4], rel=1e-4)


def update_tensordict_priority(rb: RB, c: Context) -> None:
    i, stale = rb.extend(c.rows(4)), rb.stats()["priorities_stale"]
    td = rb[i]
    td["row_id"] = torch.from_numpy(rb.buffer.ids_of(i.numpy()))
    td["td_error"] = torch.arange(1.0, 5)
    td["row_id"][3] -= CAPACITY  # of what lay there before
    rb.update_tensordict_priority(td)
    assert rb.buffer.priorities(td["row_id"][:3].numpy()) == pytest.approx([1, 2, 3], rel=1e-4)
    assert rb.stats()["priorities_stale"] == stale + 1


def set_rng(rb: RB, c: Context) -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    rb.set_rng(generator)
    assert whole(rb.sample()) and not torch.equal(generator.get_state(), before), "it decides what is drawn"


def update_if_present(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(3))
    ids = torch.from_numpy(rb.buffer.ids_of(i.numpy()))
    old = torch.tensor([ids[0] // CAPACITY, ids[1] // CAPACITY, ids[2] // CAPACITY - 1])
    got = rb.update_if_present(index=i, generation=old, patch={"note": torch.full((3,), 4)})
    assert got.updated.tolist() == [True, True, False] and rb[i]["note"].tolist() == [4, 4, 0] and whole(rb[i])


def submit_update_if_present(rb: RB, c: Context) -> None:
    i = rb.extend(c.rows(1))
    generation = torch.from_numpy(rb.buffer.ids_of(i.numpy())) // CAPACITY
    future = rb.submit_update_if_present(index=i, generation=generation, patch={"note": torch.tensor([8])})
    rb.synchronize()
    assert future.done() and future.result().updated.all() and rb[i]["note"].tolist() == [8]


USES: dict[str, Callable[[RB, Context], None]] = {
    "add": add,
    "append_transform": append_transform,
    "as_dataset": as_dataset,
    "as_remote": as_remote,
    "batch_size": batch_size,
    "can_sample": can_sample,
    "client": itself("client"),
    "dump": saving("dump", "load"),
    "dumps": saving("dumps", "loads"),
    "empty": empty,
    "extend": extend,
    "initialized": initialized,
    "insert_transform": insert_transform,
    "is_alive": is_alive,
    "load": saving("dump", "load"),
    "load_state_dict": state_dict,
    "loads": saving("dumps", "loads"),
    "mark_update": mark_update,
    "next": following,
    "query": query,
    "read_all_in_order": read_all_in_order,
    "register_load_hook": register_load_hook,
    "register_save_hook": register_save_hook,
    "sample": sample,
    "sampler": sampler,
    "save": saving("save", "load"),
    "service_backend": service_backend,
    "set_": set_,
    "set_at_": set_at_,
    "set_rng": set_rng,
    "set_sampler": set_sampler,
    "set_storage": set_storage,
    "set_writer": set_writer,
    "share": itself("share"),
    "shutdown": shutdown,
    "start": itself("start"),
    "state_dict": state_dict,
    "stats": stats,
    "storage": storage,
    "submit_update_if_present": submit_update_if_present,
    "synchronize": submit_update_if_present,
    "transform": transform,
    "update_": update_,
    "update_if_present": update_if_present,
    "update_priority": update_priority,
    "update_tensordict_priority": update_tensordict_priority,
    "write_all": write_all,
    "write_count": write_count,
    "writer": writer,
}


def too_many(name: str) -> tuple[Callable[[RB, Context], Any], type[Exception], str]:
    """Of those that take nothing that could be wrong."""
    return lambda rb, c: getattr(rb, name)(1, 2, 3), TypeError, "positional argument"


def read_only(name: str) -> tuple[Callable[[RB, Context], Any], type[Exception], str]:
    return lambda rb, c: setattr(rb, name, 5), AttributeError, name


def foreign(c: Context) -> Path:
    path = c.directory()
    path.mkdir()
    (path / "photo").write_text("kept")
    return path


# What is done, the error, and what its text says. Nothing is changed by any of them.
MISUSES: dict[str, tuple[Callable[[RB, Context], Any], type[Exception], str]] = {
    "add": (lambda rb, c: rb.add(numbered(0, 2)), SchemaError, r"add\(\) takes one row"),
    "append_transform": (lambda rb, c: rb.append_transform(5), TypeError, "int"),
    "as_dataset": (lambda rb, c: rb.as_dataset(-1), ValueError, "num_batches=-1"),
    "as_remote": too_many("as_remote"),
    "can_sample": (lambda rb, c: rb.can_sample(-1), ValueError, "batch_size=-1"),
    "client": too_many("client"),
    "dump": (lambda rb, c: rb.dump(foreign(c)), CheckpointError, "photo"),
    "dumps": (lambda rb, c: rb.dumps(foreign(c)), CheckpointError, "photo"),
    "empty": (lambda rb, c: rb.empty(timeout="soon"), ValueError, "timeout='soon'"),
    "extend": (lambda rb, c: rb.extend(numbered(0, 3).set("k", torch.zeros(3))), SchemaError, "expected int64"),
    "insert_transform": (lambda rb, c: rb.insert_transform(5, twice), ValueError, "index 5"),
    "load": (lambda rb, c: rb.load(c.path / "nowhere"), CheckpointError, "nowhere"),
    "load_state_dict": (lambda rb, c: rb.load_state_dict({}), KeyError, "_storage"),
    "loads": (lambda rb, c: rb.loads(c.path / "nowhere"), CheckpointError, "nowhere"),
    "mark_update": (lambda rb, c: rb.mark_update([CAPACITY]), IndexError, "out of range"),
    "next": too_many("next"),
    "query": (lambda rb, c: rb.query(5), TypeError, "predicate"),
    "read_all_in_order": (lambda rb, c: rb.read_all_in_order("a"), TypeError, "slice"),
    "register_load_hook": (lambda rb, c: rb.register_load_hook(5), TypeError, "hook is a function"),
    "register_save_hook": (lambda rb, c: rb.register_save_hook(5), TypeError, "hook is a function"),
    "sample": (lambda rb, c: rb.sample(-1), ValueError, "batch_size=-1"),
    "save": (lambda rb, c: rb.save(foreign(c)), CheckpointError, "photo"),
    "set_": (lambda rb, c: rb.set_("nothing", torch.zeros(CAPACITY)), KeyError, "nothing"),
    "set_at_": (lambda rb, c: rb.set_at_("note", 1, CAPACITY), IndexError, "out of"),
    "set_rng": (lambda rb, c: rb.set_rng(5), TypeError, "a torch.Generator, not int"),
    "set_sampler": (lambda rb, c: rb.set_sampler(5), TypeError, "sampler"),
    "set_storage": (lambda rb, c: rb.set_storage(5), TypeError, "storage is a ShmStorage, not int"),
    "set_writer": (lambda rb, c: rb.set_writer(5), TypeError, "not int"),
    "share": too_many("share"),
    "shutdown": too_many("shutdown"),
    "start": too_many("start"),
    "state_dict": too_many("state_dict"),
    "stats": too_many("stats"),
    "submit_update_if_present": (
        lambda rb, c: rb.submit_update_if_present(index=[0, 1], generation=[0], patch={}).result(60),
        ValueError,
        "same number",
    ),
    "synchronize": too_many("synchronize"),
    "update_": (lambda rb, c: rb.update_({"note": torch.zeros(3).long()}), RuntimeError, "shape"),
    "update_if_present": (
        lambda rb, c: rb.update_if_present(index=[0, 1], generation=[0], patch={}),
        ValueError,
        "same number",
    ),
    "update_priority": (lambda rb, c: rb.update_priority([0], float("nan")), ValueError, "nan"),
    "update_tensordict_priority": (lambda rb, c: rb.update_tensordict_priority(numbered(0, 2)), KeyError, "td_error"),
    "write_all": (lambda rb, c: rb.write_all(numbered(0, 3)), RuntimeError, r"batch size \[3\]"),
    **{name: read_only(name) for name in page.PROPERTIES},
}
