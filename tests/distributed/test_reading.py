"""Batches out of several shards, without Ray: its actors are threads of this process."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuf import (
    CheckpointError,
    LinearScheduler,
    NotEnoughRows,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    ShardedReplayBuffer,
    ShmStorage,
    SliceSampler,
    StorageLost,
    TensorDictReplayBuffer,
)
from shmbuf.distributed import links
from shmbuf.distributed.drawing import Spec
from shmbuf.distributed.limiting import AHEAD
from shmbuf.errors import TooManyCollectors
from tests.distributed.helpers import until
from tests.distributed.offline import FAR, HERE, forked
from tests.process.interrupts import at_point


def rows(first, priorities):
    n = len(priorities)
    done = {"done": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"k": torch.arange(first, first + n), "td_error": torch.as_tensor(priorities), "next": done}, [n])


def prioritized(**how):
    return PrioritizedSampler(alpha=0.7, beta=0.5, **how)


VALUES = [[4.0, 0.5, 3.0], [0.01, 20.0], [7.0] * 40]


@pytest.fixture
def three(offline, name):
    """Rows of VALUES: the first shard is this node's."""
    cluster = offline.sharded(name, [HERE, FAR, "c" * 56], prioritized())
    for k, (rb, values) in enumerate(zip(cluster.rows, VALUES, strict=True)):
        rb.extend(rows(100 * k, values))
    return cluster


@pytest.mark.parametrize("normalize", ["buffer", "batch"])
@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_weights_are_those_of_one_buffer_with_the_same_rows(three, normalize, beta):
    """leaf of each row, by the formula: what one buffer says of its batch holds for any batch of these rows."""
    rb = three.handle(prioritized(normalize=normalize), 64)
    one = TensorDictReplayBuffer(storage=ShmStorage(50), sampler=prioritized(normalize=normalize))
    for k, values in enumerate(VALUES):
        one.extend(rows(100 * k, values))
    leaf = {100 * k + i: np.float32((v + 1e-8) ** 0.7) for k, vs in enumerate(VALUES) for i, v in enumerate(vs)}
    for drawn in (rb.sample(beta=beta), rb.sample(3, beta=beta), one.sample(64, beta=beta)):
        leaves = np.array([leaf[k] for k in drawn["k"].tolist()], np.float64)
        least = min(leaf.values()) if normalize == "buffer" else leaves.min()
        np.testing.assert_allclose(drawn["priority_weight"].numpy(), (leaves / least) ** -beta, rtol=1e-6)
    rb.close()
    one.close()


def test_rows_of_all_shards_are_waited_for(three):
    rb = three.handle(prioritized(), 4)
    n = sum(map(len, VALUES))
    rb.wait_rows(n, timeout=0)
    with pytest.raises(NotEnoughRows, match=f"3 shards hold {n} of {n + 1} rows"):
        rb.wait_rows(n + 1, timeout=0.2)
    threading.Timer(0.2, three.rows[1].extend, [rows(500, [1.0])]).start()
    rb.wait_rows(n + 1, timeout=60)
    with pytest.raises(ValueError, match="at least one row"):
        rb.sample(0)
    rb.close()


def numbers(rb):
    return [rb.shard(k)[:]["k"].tolist() for k in range(3)]


def test_a_checkpoint_has_the_shards_that_had_rows_and_the_others_are_emptied(offline, name, tmp_path):
    cluster = offline.sharded(name, [HERE, FAR, "c" * 56], prioritized())
    rb = cluster.handle(prioritized(), 4)
    with pytest.raises(RuntimeError, match="none of its shards has ever had a row"):
        rb.dumps(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    for k in (0, 2):
        cluster.rows[k].extend(rows(100 * k, VALUES[k]))
    rb.dumps(tmp_path / "c")
    for k in range(3):
        cluster.rows[k].extend(rows(100 * k, VALUES[k]))
    rb.loads(tmp_path / "c")
    assert numbers(rb) == [[0, 1, 2], list(range(200, 240)), []]
    more = tmp_path / "c" / "sharded.json"
    more.write_text(more.read_text().replace('["shard-0"', '["shard-0", "shard-0", "shard-0"'))
    with pytest.raises(ValueError, match="4 shards, the buffer 3"):
        rb.loads(tmp_path / "c")
    more.write_text("{}")
    for bad in (tmp_path / "c", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint of a sharded buffer"):
            rb.loads(bad)
    assert numbers(rb) == [[0, 1, 2], list(range(200, 240)), []]
    rb.close()


def segments_mapped():
    with open("/proc/self/maps") as maps:
        return Counter(line.split("/", 1)[1] for line in maps if "/dev/shm/" in line)


def test_annealing_makes_no_new_handles_and_draws_differ(three):
    rb = three.handle(prioritized(), 16, seed=7)
    rb.sample()
    mapped = segments_mapped()
    annealing, seen = LinearScheduler(rb.sampler, "beta", 1.0, 300), set()
    for _ in range(300):
        annealing.step()
        seen.add(tuple(rb.sample()["k"].tolist()))
    assert rb.sampler.beta == 1.0 and len(seen) > 290
    assert segments_mapped() == mapped, "no handle more than the first batch needed"
    assert [len(it._drawers) for it in three.it] == [0, 1, 1] and len(rb._links[0]._drawers) == 1
    rb.close()
    until(lambda: [len(it._drawers) for it in three.it] == [0, 0, 0])


def test_a_handle_that_is_collected_leaves_its_ways_of_drawing(three):
    rb = three.handle(SamplerWithoutReplacement(), 60)
    assert len(rb.sample()) == 60 and [len(it._drawers) for it in three.it] == [0, 1, 1]
    del rb
    gc.collect()
    until(lambda: [len(it._drawers) for it in three.it] == [0, 0, 0])


def test_a_shard_keeps_few_ways_of_drawing(three):
    """Handles with epochs of their own that were killed: nobody said leave."""
    drawers = three.it[1]._drawers
    drawers._pool.most = 3
    for _ in range(10):
        three.handle(SamplerWithoutReplacement(), 4).sample()
        assert len(drawers) <= 3
    with contextlib.ExitStack() as using:
        for k in range(3):
            using.enter_context(drawers._use(Spec("random", {}, str(k))))
        with pytest.raises(TooManyCollectors, match="3 ways of drawing"):
            drawers.mass(Spec("random", {}, "one more"))
    assert drawers.mass(Spec("random", {}, "one more")).size == 2


def test_a_seed_repeats_batches_and_shards_draw_different_numbers(offline, name):
    cluster = offline.sharded(name, [HERE, FAR, "c" * 56], RandomSampler())
    for k, rb in enumerate(cluster.rows):
        rb.extend(rows(1000 * k, [1.0] * 500))
    first, again, other = (cluster.handle(RandomSampler(), 60, seed=s) for s in (11, 11, 12))
    a, b = [[rb.sample()["k"].tolist() for _ in range(5)] for rb in (first, again)]
    assert a == b != [other.sample()["k"].tolist() for _ in range(5)]
    of_shard = [{k % 1000 for batch in a for k in batch if k // 1000 == s} for s in range(3)]
    assert len(of_shard[1] & of_shard[2]) < 50, "about 100 of 500 each"
    for rb in (first, again, other):
        rb.close()


def test_rows_of_a_shard_that_fails_later_keep_their_weights(three, monkeypatch):
    """It gave a part of the batch; what others could not give was asked of it, too, and it gave nothing more."""
    rb = three.handle(prioritized(), 200)
    rb.sample()
    drawn, part = Counter(), type(rb._links[1]).part

    def sometimes(link, asked, give_up):
        drawn[link.number] += 1
        if (link.number, drawn[link.number]) in ((2, 1), (1, 2), (0, 2)):
            raise NotEnoughRows("emptied a moment ago")
        return part(link, asked, give_up)

    monkeypatch.setattr(type(rb._links[1]), "part", sometimes)
    batch = rb.sample()
    assert len(batch) == 200 and drawn[1] >= 2, "it was asked twice"
    leaves = torch.tensor([(VALUES[s][k % 100] + 1e-8) ** 0.7 for s, k in zip(batch["shard"], batch["k"], strict=True)])
    of_one = batch["priority_weight"] * leaves**0.5
    assert batch["priority_weight"].isfinite().all() and (batch["priority_weight"] > 0).all()
    for shard in batch["shard"].unique():
        mine = of_one[batch["shard"] == shard]
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), rtol=1e-5, atol=0)
    rb.close()


def test_a_shard_without_its_segment_is_lost_and_the_others_are_sampled(three):
    """The actor lives, as after a restart on a node whose /dev/shm was cleared."""
    rb, ahead = three.handle(prioritized()), three.handle(prioritized(), prefetch=2)
    rb.sample(), ahead.sample()
    rb.update_priority(None, 1.0, shard=[1], row_id=[0])
    rb.synchronize()
    late = three.handle(prioritized())
    late.sample()
    shard = three.it[1]
    shard.destroy()
    for it, lost in ((rb, {0, 2}), (ahead, {0, 2}), (late, {0, 2})):
        if it is late:
            it.update_priority(None, 1.0, shard=[1, 2], row_id=[0, 0])
            with pytest.warns(RuntimeWarning, match="shard 1 on node bbbbbbbbbbbb is lost"):
                it.synchronize()
            stats = it.stats()
            assert (stats["priorities_dropped"], stats["priorities_stale"], stats["priorities_set"]) == (1, 0, 1)
        else:
            with pytest.warns(RuntimeWarning, match="shard 1 on node bbbbbbbbbbbb is lost"):
                until(lambda it=it: it.sample(64) is not None and it.stats()["lost_shards"] == 1)
        assert set(it.sample(500)["shard"].tolist()) == lost and len(it) == 43
        assert sorted(t.length for t in it.query()) == [3, 40]
    three.it[0].destroy()  # this node's own
    with pytest.warns(RuntimeWarning, match="shard 0 on node aaaaaaaaaaaa is lost"):
        rb.update_priority(None, 1.0, shard=[0], row_id=[0])
        assert set(rb.sample(50)["shard"].tolist()) == {2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        until(lambda: three.coordinator._it._directory.of(0).lost is not None)
        new = three.handle(prioritized())  # to which that is no news
        assert set(new.sample(50)["shard"].tolist()) == {2} and new.stats()["lost_shards"] == 2
    for it in (rb, ahead, late, new):
        it.close()


def test_no_shard_answers_is_no_empty_buffer(offline, name):
    cluster = offline.sharded(name, [FAR, "c" * 56], prioritized(), remote_timeout=0.3)
    cluster.rows[0].extend(rows(0, [1.0] * 5))
    rb = cluster.handle(prioritized(), 8)
    assert set(rb.sample()["shard"].tolist()) == {0}
    for shard in cluster.shards:
        shard.stop()
    for _ in range(2):  # also where nobody is asked any more
        with pytest.raises(StorageLost, match="silent: 0 on node bbbbbbbbbbbb, 1 on node cccccccccccc"):
            rb.sample()
    cluster.shards[1].go_on()
    until(lambda: not rb.shards()[1]["silent"] or rb._links[1].usable)
    with pytest.raises(StorageLost, match=r"silent: 0 on node bbbbbbbbbbbb\. Their"):
        rb.sample()
    going_on = threading.Timer(0.5, cluster.shards[0].go_on)
    going_on.start()
    assert set(rb.sample(timeout=60)["shard"].tolist()) == {0}, "who waits for rows waits for an answer, too"
    rb.close()


def test_a_stopped_shard_is_waited_for_once(offline, name):
    """By priorities: eight are on their way before one is waited for; then all are dropped, and counted."""
    cluster = offline.sharded(name, [HERE, FAR], prioritized(), remote_timeout=0.3)
    for k, it in enumerate(cluster.rows):
        it.extend(rows(100 * k, [1.0] * 5))
    rb = cluster.handle(prioritized(), 8)
    rb.sample(100)
    cluster.shards[1].stop()
    for _ in range(50):
        rb.update_priority(None, [2.0, 3.0], shard=[0, 1], row_id=[1, 1])
    sent = cluster.shards[1].calls.count("prioritise")
    assert sent == links.MOST_UPDATES + 1, "then it was known to be silent"
    assert rb.synchronize() is True, "nobody waits for ever"
    stats = rb.stats()
    assert (stats["priorities_set"], stats["priorities_dropped"]) == (50, 50)
    assert set(rb.sample(100)["shard"].tolist()) == {0}
    cluster.shards[1].go_on()
    until(lambda: set(rb.sample(100)["shard"].tolist()) == {0, 1})
    rb.update_priority(None, 5.0, shard=[1], row_id=[1])
    assert rb.synchronize() is True and rb.stats()["priorities_set"] == 51
    cluster.shards[1].stop()
    rb.update_priority(None, 5.0, shard=[1], row_id=[1])
    assert rb.synchronize(timeout=0.01) is False, "not yet, and not dropped"
    cluster.shards[1].go_on()
    assert rb.synchronize() is True and rb.stats()["priorities_set"] == 52
    rb.close()


def test_who_samples_does_not_wait_for_who_waits_for_priorities(offline, name):
    cluster = offline.sharded(name, [HERE, FAR], prioritized(), remote_timeout=3600.0)
    for it in cluster.rows:
        it.extend(rows(0, [1.0] * 5))
    rb = cluster.handle(RandomSampler(), 8)
    rb.sample(100)
    gate, entered = threading.Event(), threading.Event()
    prioritise = cluster.it[1].prioritise

    def held(*args):
        entered.set()
        assert gate.wait(60)
        return prioritise(*args)

    cluster.it[1].prioritise = held
    waiting = threading.Thread(
        target=lambda: [rb.update_priority(None, 1.0, shard=[1], row_id=[0]) for _ in range(links.MOST_UPDATES + 1)]
    )
    waiting.start()
    assert entered.wait(60)
    until(lambda: cluster.shards[1].calls.count("prioritise") == links.MOST_UPDATES + 1)
    assert set(rb.sample(100)["shard"].tolist()) == {0, 1} and waiting.is_alive()
    gate.set()
    waiting.join(60)
    assert rb.synchronize() and rb.stats()["priorities_set"] == links.MOST_UPDATES + 1
    rb.close()


def test_few_rows_without_replacement_fill_any_batch(offline, name):
    cluster = offline.sharded(name, [HERE, FAR], RandomSampler())
    for k, it in enumerate(cluster.rows):
        it.extend(rows(100 * k, [1.0] * (2 + k)))
    rb = cluster.handle(SamplerWithoutReplacement(), 400)
    batch = rb.sample()
    assert len(batch) == 400
    times = Counter(batch["k"].tolist())
    for first, n in ((0, 2), (100, 3)):
        mine = [times[first + i] for i in range(n)]
        assert max(mine) - min(mine) <= 1
    rb.close()


def test_indices_that_cannot_be_are_found_before_anything_is_changed(offline, name):
    cluster = offline.sharded(name, [FAR, HERE], prioritized())
    for it in cluster.rows:
        it.extend(rows(0, [1.0] * 5))
    rb = cluster.handle(prioritized(), 8)
    rb.sample(64)
    for ids, text in (([0, 5], "ids.0. = 5"), ([-1, 0], r"row_id\[0\] = -1"), ([0, -3], r"row_id\[1\] = -3")):
        with pytest.raises(IndexError, match=text):
            rb.update_priority(None, 9.0, shard=[0, 1], row_id=ids)
        assert rb.synchronize() and "prioritise" not in cluster.shards[0].calls
        assert [it.buffer.priorities([0])[0] for it in cluster.rows] == pytest.approx([1.0, 1.0])
    rb.close()


def test_a_batch_is_finished_by_the_sampler_that_drew_it(three):
    rb = three.handle(prioritized(), 16)
    drawing = rb._begin(rb.sampler, 16, True)
    rb.set_sampler(RandomSampler())
    assert rb._complete(drawing)["priority_weight"].isfinite().all()
    drawing = rb._begin(rb.sampler, 16, True)
    rb.set_sampler(prioritized())
    assert rb._complete(drawing).get("priority_weight", None) is None
    rb.set_sampler(RandomSampler())
    with pytest.raises(TypeError, match="gives no weights"):
        rb.sample(beta=0.5)
    rb.close()


def test_prioritized_slices_have_the_weight_of_their_first_row(offline, name):
    sampler = PrioritizedSliceSampler(alpha=1.0, beta=0.5, slice_len=2)
    cluster = offline.sharded(name, [HERE, FAR], sampler)
    for k, it in enumerate(cluster.rows):
        it.extend(rows(100 * k, torch.arange(1.0, 9.0) * (k + 1)))
    for normalize in ("buffer", "batch"):
        rb = cluster.handle(PrioritizedSliceSampler(alpha=1.0, beta=0.5, slice_len=2, normalize=normalize), 40)
        batch = rb.sample()
        k, w = batch["k"].reshape(-1, 2), batch["priority_weight"].reshape(-1, 2)
        assert (k.diff(dim=1) == 1).all() and (w[:, 0] == w[:, 1]).all()
        leaf = (k[:, 0] % 100 + 1.0) * (1 + k[:, 0] // 100)
        least = 1.0 if normalize == "buffer" else leaf.min()
        torch.testing.assert_close(w[:, 0], (leaf / least) ** -0.5, rtol=1e-6, atol=0)
        rb.close()


def test_trajectories_shorter_than_a_slice_make_a_shorter_batch(offline, name):
    sampler = SliceSampler(slice_len=4, strict_length=False)
    cluster = offline.sharded(name, [HERE, FAR], sampler)
    for k, it in enumerate(cluster.rows):
        it.extend(rows(100 * k, [1.0] * 3))
    rb = cluster.handle(SliceSampler(slice_len=4, strict_length=False), 24)
    batch = rb.sample()
    assert len(batch) == 18 and (batch["k"].reshape(-1, 3) % 100 == torch.arange(3)).all()
    rb.close()


def test_a_train_worker_asks_once_a_second_at_most_where_its_shards_are(offline, name):
    cluster = offline.sharded(name, [HERE, FAR], RandomSampler())
    for k, it in enumerate(cluster.rows):
        it.extend(rows(100 * k, [1.0] * 5))
    cluster.coordinator._it.workers = {0: [1]}
    rb = cluster.handle(RandomSampler(), 8, worker=0, only=[1])
    assert set(rb.sample()["shard"].tolist()) == {1}
    cluster.shards[1].die()
    with pytest.warns(RuntimeWarning, match="is lost"):
        assert set(rb.sample()["shard"].tolist()) == {0}
    for _ in range(30):
        rb.sample()
    assert 1 <= cluster.coordinator.calls.count("shards_of") < 30
    rb._asked_only = float("-inf")  # a second later
    cluster.coordinator._it.workers = {0: [0]}
    rb.sample()
    assert rb._only == [0]
    rb.close()


def test_the_child_of_a_fork_is_told_so_and_does_not_hang(three):
    rb = three.handle(prioritized(), 8, prefetch=2)
    rb.sample()
    with rb._mutex, rb._links[1]._lock:  # held by whoever forks at the wrong moment
        uses = (rb.sample, rb.shards, rb.synchronize, lambda: rb.extend(rows(0, [1.0])), lambda: len(rb))
        for use in (*uses, lambda: rb.update_priority(None, 1.0, shard=[1], row_id=[0])):
            said = forked(use)
            assert said.startswith("RuntimeError") and "forked from process" in said and "pickles" in said
    assert len(rb.sample()) == 8
    rb.close()


@pytest.mark.parametrize("sampler", [RandomSampler, prioritized])
def test_a_far_shard_that_was_empty_is_drawn_once_it_has_rows(offline, name, sampler):
    cluster = offline.sharded(name, [HERE, FAR], sampler())
    cluster.rows[0].extend(rows(0, [1.0] * 10))
    rb = cluster.handle(sampler(), 32, prefetch=2)

    def shards():
        return {k for _ in range(4) for k in rb.sample()["shard"].tolist()}

    assert shards() == {0}
    for first in (100, 200):
        cluster.rows[1].extend(rows(first, [1.0] * 90))
        until(lambda: 1 in shards())
        cluster.rows[1].empty()
        until(lambda: shards() == {0})
    rb.close()


def test_ctrl_c_while_a_put_finds_its_shard_keeps_nobody_out(three):
    rb = three.handle(prioritized(), 4)
    n, error = 0, None
    while True:
        rb._home, n = None, n + 1
        at, error = at_point(n, lambda: rb.put(rows(500, [1.0])), "_target")
        if not at:
            break
        other = threading.Thread(target=lambda: rb.put(rows(600, [1.0]), timeout=30), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), at
    assert n > 5 and error is None
    rb.close()


@pytest.mark.parametrize("bad", [{"prefetch": -1}, {"seed": "x"}, {"limiter": "x"}])
def test_what_cannot_be_is_said_before_anything_is_made(name, bad, monkeypatch):
    monkeypatch.setattr("shmbuf.distributed.sharded.running", lambda init: pytest.fail("something was made"))
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        ShardedReplayBuffer(storage=ShmStorage(10, name=name), batch_size=2, **bad)


def test_a_stopped_coordinator_grants_once_and_a_timeout_is_kept(three):
    rb = three.handle(prioritized(), 4)
    rb._directory = replace(rb._directory, limited=True)
    coordinator = three.coordinator
    coordinator.stop()
    for _ in range(3):
        with pytest.raises(NotEnoughRows, match="the coordinator does not answer"):
            rb.sample(timeout=0.2)
    coordinator.go_on()
    for _ in range(AHEAD):
        rb.sample(timeout=30)
    assert coordinator._it.granted == AHEAD * 4
    rb.close()


def test_rows_of_a_silent_shard_are_no_empty_storage(offline, name):
    cluster = offline.sharded(name, [HERE, FAR], prioritized(), remote_timeout=0.3)
    cluster.rows[0].extend(rows(0, [1.0]))
    cluster.rows[0].empty()
    cluster.rows[1].extend(rows(100, [1.0] * 5))
    rb = cluster.handle(prioritized(), 4)
    cluster.shards[1].stop()
    for _ in range(2):
        with pytest.raises(StorageLost, match="silent: 1 on node"):
            rb.sample()
    cluster.shards[1].go_on()
    assert len(rb.sample(timeout=60)) == 4
    rb.close()


def test_emptying_goes_past_a_dead_shard(three):
    rb = three.handle(prioritized(), 4)
    three.shards[1].die()
    with pytest.warns(RuntimeWarning, match="shard 1 .* is lost"):
        rb.empty()
    assert [len(three.rows[k]) for k in (0, 2)] == [0, 0] and rb.stats()["lost_shards"] == 1
    rb.close()


def test_a_loss_is_told_to_all_even_where_warnings_are_errors(three):
    rb = three.handle(prioritized(), 4)
    three.shards[1].die()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            rb.empty()
    until(lambda: three.coordinator._it.directory().of(1).lost is not None)
    rb.close()
