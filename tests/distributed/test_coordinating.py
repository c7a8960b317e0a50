"""The coordinator's books and the way to a shard, with actors that are plain objects: no Ray."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from shmbuf import RateLimiter, ShmbufError, StorageLost
from shmbuf.distributed import coordinator as coordinating
from shmbuf.distributed import joining
from shmbuf.distributed.coordinator import Coordinator
from shmbuf.distributed.directory import Entry, Reserved, Routes, Settings, coordinator_name, shard_name
from shmbuf.distributed.limiting import Report
from shmbuf.distributed.places import Place, Recipe
from shmbuf.distributed.rays import Gone, Silent
from shmbuf.distributed.writing import Writing, _Makeshift
from shmbuf.limiter import MinSize
from shmbuf.rlightning.table import EpisodeTable
from tests.distributed.helpers import until

SPI, HIGH = 1.0, 64.0
LIMITER = RateLimiter(SPI, 1, (-8.0, HIGH))
NODES = [f"{k}" * 56 for k in range(3)]


class Shard:
    """What the coordinator asks of a shard. Collectors keep its ring full. down: its actor is being started again. mute: it says nothing."""

    def __init__(self):
        self.rows, self.limit, self.down, self.mute, self.asked = 0, None, False, False, 0
        self.state = self.books = None
        for name in ("cap", "hold", "held"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    def _cap(self, cap, numbers):
        self.asked += 1
        self.books = numbers or self.books
        if cap is None or cap >= 0:
            self.limit = cap
        said = Report(self.rows, True, self.limit)  # at once: what it lets in comes later
        self.rows = self.rows + 5 if self.limit is None else max(self.rows, self.limit)
        return said

    def _hold(self, version, state, numbers):
        self.state, self.books = state, numbers

    def _held(self):
        return self.state, self.books


class Method:
    def __init__(self, f):
        self.f = f

    def options(self, **how):
        return self

    def remote(self, *args):
        if self.f.__name__ == "_hold":  # whose answer nobody waits for
            return self.f(*args)
        return Ref(self.f, args)


class Ref:
    def __init__(self, f, args):
        self.shard, self.f, self.args = f.__self__, f, args

    def ready(self):
        return not self.shard.mute

    def get(self):
        if self.shard.down:
            raise Silent("it is being started again")
        return self.f(*self.args)


class Ray:
    """Of what a coordinator needs. shards: actors by name."""

    def __init__(self):
        self.shards, self.again = {}, False

    def get_runtime_context(self):
        return SimpleNamespace(was_current_actor_reconstructed=self.again)

    def wait(self, refs, num_returns=1, timeout=None):
        ready = [r for r in refs if r.ready()]
        if len(ready) < len(refs):
            time.sleep(min(timeout, 0.005))
        return ready, [r for r in refs if r not in ready]


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(coordinating, "need_ray", lambda: ray)
    monkeypatch.setattr(coordinating, "alive_nodes", lambda: NODES)
    monkeypatch.setattr(coordinating, "ask", lambda ref, timeout=None: ref.get())
    monkeypatch.setattr(coordinating, "actor", lambda name: ray.shards[int(name.rsplit("/", 1)[1])])
    monkeypatch.setattr(coordinating, "named_shards", lambda name: dict(ray.shards))
    monkeypatch.setattr(coordinating, "end_shards", lambda name, entries, timeout: ray.shards.clear())
    monkeypatch.setattr(coordinating, "_TICK", 0.001)
    return ray


def settings(limiter=None):
    return Settings("b", Recipe(b"", "b"), ("random", {}), 8, ("td_error",), limiter, True, {}, 5.0)


def entry(number):
    return Entry(number, NODES[number], Place(NODES[number], f"b.{number}", b"", b"", {}))


def made(ray, limiter, n=2, again=False):
    ray.again = again
    c = Coordinator(settings(limiter), None)
    for k in range(0 if again else n):
        assert c.reserve(NODES[k])[:2] == ("make", k)
        joined(c, ray, k)
    return c


def joined(c, ray, k):
    ray.shards[k] = Shard()
    ray.shards[k].limit = 0 if c.directory().limited else None
    c.joined(entry(k))


def rows(ray):
    return sum(s.rows for s in ray.shards.values())


def stands(ray):
    before = rows(ray)
    time.sleep(0.05)
    return rows(ray) == before


def end(c):
    c.shutdown(1.0)


def test_shards_insert_what_the_limiter_lets_them_and_one_that_is_down_stops_nobody(ray):
    c = made(ray, LIMITER)
    until(lambda: rows(ray) == HIGH)
    assert [s.rows for s in ray.shards.values()] == [32, 32] and c.directory().limited
    ray.shards[1].down = True
    for _ in range(20):
        before = rows(ray)
        assert c.grant(8, 8) == (8, "")
        until(lambda before=before: rows(ray) > before)
    until(lambda: ray.shards[0].rows > 150)
    assert rows(ray) <= HIGH + 160
    ray.shards[1].down = False
    for _ in range(20):
        until(lambda: c.grant(8, 8)[0])
    until(lambda: ray.shards[1].rows > 80)
    end(c)


def test_a_shard_that_says_nothing_slows_nobody_and_is_asked_once(ray):
    c = made(ray, LIMITER)
    until(lambda: rows(ray) == HIGH)
    ray.shards[1].mute = True
    time.sleep(0.02)
    before, asked = ray.shards[1].asked, ray.shards[0].asked
    for _ in range(50):
        until(lambda: c.grant(8, 8)[0])
    assert ray.shards[1].asked == before and ray.shards[0].asked > asked
    until(lambda: ray.shards[0].rows >= 32 + 50 * 8 - 32)
    ray.shards[1].mute = False
    until(lambda: ray.shards[1].asked > before)
    end(c)


def test_without_a_limiter_caps_go_away_also_of_a_shard_that_was_down_or_joins_later(ray):
    c = made(ray, LIMITER)
    until(lambda: rows(ray) == HIGH)
    ray.shards[1].down = True
    reserved = c.reserve(NODES[2])
    assert reserved == ("make", 2, True, -1)
    c.limit(None, 8)
    until(lambda: ray.shards[0].limit is None)
    assert ray.shards[1].limit is not None and not c.directory().limited and c.limits() is None
    ray.shards[2] = Shard()
    ray.shards[2].limit = 0  # as it was made
    c.joined(entry(2))
    ray.shards[1].down = False
    until(lambda: all(s.limit is None for s in ray.shards.values()))
    assert c.grant(8, 32) == (32, "")
    until(lambda: not c._capless and not c._pending)
    asked = ray.shards[0].asked
    time.sleep(0.05)
    assert ray.shards[0].asked == asked, "nobody is asked any more"
    c.limit(LIMITER, 8)
    until(lambda: ray.shards[0].asked > asked)
    end(c)


def test_a_limiter_is_set_and_changed_live(ray):
    c = made(ray, None)
    for shard in ray.shards.values():
        shard.rows = 1000
    with pytest.raises(ValueError, match="could never be sampled"):
        c.limit(RateLimiter(1.0, 1, (0.0, 4.0)), 8)
    before = c.directory()
    assert not before.limited
    c.limit(LIMITER, 8)
    assert c.directory().limited and c.directory().version > before.version and c.directory(before.version) is not None
    until(lambda: stands(ray))
    assert 2000 + HIGH <= rows(ray) <= 2000 + HIGH + 40, "what came in before all had heard of it, too"
    regime = c.directory().regime
    while c.grant(8, 8)[0]:
        pass
    sampled = c.limits()["sampled"]
    c.refund(8, regime)
    assert c.limits()["sampled"] == sampled - 8
    c.limit(RateLimiter(2.0, 1, (-16.0, 640.0)), 8)
    c.refund(8, regime)
    assert c.limits()["sampled"] == sampled, "what another limiter granted is not given back to this one"
    until(lambda: c.limits()["diff"] > 600)
    with pytest.raises(ValueError, match="could never be sampled"):
        c.limit(RateLimiter(1.0, 1, (0.0, 4.0)), 8)
    assert c.limits()["samples_per_insert"] == 2.0
    c.limit(MinSize(5), 8)
    until(lambda: all(s.limit is None for s in ray.shards.values()))
    assert c.directory().limited and c.grant(8, 32) == (32, "")
    end(c)


def test_a_coordinator_that_is_started_again_goes_on_with_what_the_shards_hold(ray):
    c = made(ray, LIMITER)
    until(lambda: rows(ray) == HIGH)
    for _ in range(5):
        assert c.grant(8, 8)[0]
    until(lambda: rows(ray) == HIGH + 40)
    version = c.directory().version
    c._publish()
    c._stopping.set()  # it is dead
    time.sleep(0.05)
    again = made(ray, LIMITER, again=True)
    assert again.directory().version > version + 10 and again.directory().next == 2
    assert again.limits()["sampled"] == 40
    time.sleep(0.05)
    assert rows(ray) == HIGH + 40, "nothing was promised twice"
    for _ in range(5):
        assert again.grant(8, 8)[0]
    until(lambda: rows(ray) == HIGH + 80)
    again.limit(None, 8)
    again._stopping.set()
    time.sleep(0.05)
    third = made(ray, LIMITER, again=True)
    assert not third.directory().limited and third.grant(8, 8) == (8, ""), "not what the constructor was told"
    end(third)


def test_loading_makes_nobody_wait(ray):
    c = made(ray, LIMITER)
    until(lambda: rows(ray) == HIGH)
    saved = c.kept()
    ray.shards[0].rows += 1000
    until(lambda: c.limits()["diff"] > 1000)
    c.recount(saved)
    assert c.limits()["diff"] == saved["diff"]
    until(lambda: c.grant(8, 8)[0])
    until(lambda: rows(ray) == HIGH + 1008)
    end(c)


def test_who_makes_a_shard_says_so_or_is_taken_for_dead(ray, monkeypatch):
    c = made(ray, None, 0)
    assert c.reserve(NODES[0])[:2] == ("make", 0) and c.reserve(NODES[0])[:2] == ("wait", 0)
    monkeypatch.setattr(coordinating, "_MAKING", 0.2)
    give_up = time.monotonic() + 0.5
    while time.monotonic() < give_up:
        c.making(NODES[0], 0)
        assert c.reserve(NODES[0]).what == "wait"
    until(lambda: c.reserve(NODES[0]) == ("make", 1, False, 0))
    c.making(NODES[0], 0)
    c.failed(NODES[0], 0)  # of one that was thought dead
    assert c.reserve(NODES[0]).what == "wait"
    c.failed(NODES[0], 1)
    assert c.reserve(NODES[0]) == ("make", 2, False, -1)
    ray.shards[2] = Shard()
    first = c.joined(Entry(2, NODES[0], entry(0).place))
    assert c.joined(Entry(2, NODES[0], entry(0).place)) == first, "who waited for it may say so, too"
    assert c.reserve(NODES[0])[:2] == ("there", 2)
    end(c)
    for late in (lambda: c.reserve(NODES[1]), lambda: c.joined(entry(1))):
        with pytest.raises(ShmbufError, match="being shut down"):
            late()


def test_a_new_coordinator_removes_what_another_left(ray):
    ray.shards[0] = Shard()
    c = made(ray, None, 0)
    assert not ray.shards and c.reserve(NODES[0]).number == 0
    end(c)


def test_environments_are_streams_that_nobody_else_numbers():
    routes = Routes(EpisodeTable(2, ["a", "b"], None), [0, 1])
    streams = [routes.route(e, {0, 1})[1] for e in ("a", "b", "c", "a")]
    assert streams == [1 << 32, (1 << 32) + 1, (1 << 32) + 2, 1 << 32]


# ---- the way to a shard ----------------------------------------------------------------------------------------------


def test_a_put_waits_for_a_shard_no_longer_than_it_may(monkeypatch):
    """It is made nevertheless."""
    go_on, told = threading.Event(), []
    answers = [Reserved("wait", 3)] * 3 + [Reserved("make", 4)]

    def patiently(coordinator, method, *args, timeout=None):
        if method == "reserve":
            return answers.pop(0) if len(answers) > 1 else answers[0]
        told.append((method, *args))

    def make_shard(settings, number, node, limited, still, joined):
        assert go_on.wait(60)
        joined(Entry(number, node, None))

    monkeypatch.setattr(joining, "patiently", patiently)
    monkeypatch.setattr(joining, "make_shard", make_shard)
    monkeypatch.setattr(joining, "_tell_of", lambda *args: told.append("looked"))
    with pytest.raises(ShmbufError, match=r"still being made after 0.3 s. Nothing was stored"):
        joining.join(settings(), None, NODES[0], 0.3)
    assert told == ["looked"], "whether it is there though nobody says so"
    go_on.set()
    until(lambda: ("joined", Entry(4, NODES[0], None)) in told)
    assert joining.join(settings(), None, NODES[0], 60.0) == 4


def test_who_takes_over_looks_first_for_what_the_dead_left(monkeypatch):
    told = []
    answers = {"reserve": Reserved("make", 4, False, 3)}
    monkeypatch.setattr(joining, "patiently", lambda c, method, *args, **how: told.append(args) or answers.get(method))
    monkeypatch.setattr(joining, "actor", lambda name: SimpleNamespace(open=Method(Shard()._held)))
    monkeypatch.setattr(joining, "ask", lambda ref, timeout: entry(0).place)
    monkeypatch.setattr(joining, "make_shard", lambda *args: told.append("made"))

    assert joining.join(settings(), None, NODES[0]) == 3 and (Entry(3, NODES[0], entry(0).place),) in told
    monkeypatch.setattr(joining, "actor", lambda name: told.append(name) or {}["none"])
    assert joining.join(settings(), None, NODES[0]) == 4 and told[-2:] == ["shmbuf.b/3", "made"]


class Maker:
    """A Ray in which one shard is made."""

    def __init__(self):
        self.did = []
        self.open, self.destroy = Method(self._open), Method(self._destroy)

    def remote(self, *args, **how):
        return (lambda kind: self) if "concurrency_groups" in how else self

    def options(self, **how):
        return self

    def wait(self, refs, timeout):
        self.did.append("waited")
        return (refs, []) if len(self.did) > 3 else ([], refs)

    def kill(self, shard):
        self.did.append("killed")

    def _open(self):
        return entry(0).place

    def _destroy(self):
        self.did.append("destroyed")

    mute = down = False


def test_a_shard_that_nobody_takes_is_not_left(monkeypatch):
    """The buffer is shut down while it is made, as after Ctrl-C in the constructor."""
    for late in (False, True):
        ray, told = Maker(), []
        monkeypatch.setattr(joining, "need_ray", lambda ray=ray: ray)
        monkeypatch.setattr(joining, "on", lambda node: None)
        monkeypatch.setattr(joining, "ask", lambda ref, timeout=None: ref.get())

        def joined(made, late=late, told=told):
            told.append(made)
            if late:
                raise ShmbufError("it is being shut down")

        def make(ray=ray, joined=joined):
            joining.make_shard(settings(), 0, NODES[0], False, lambda: ray.did.append("still"), joined)

        if late:
            with pytest.raises(ShmbufError, match="being shut down"):
                make()
        else:
            make()
        assert told == [entry(0)]
        assert ray.did == ["waited", "still", "waited", "still", "waited"] + ["destroyed", "killed"] * late


class Writer(Writing):
    """answers: what the coordinator says, by method."""

    def __init__(self, auto_shards, **answers):
        self._settings = settings()._replace(auto_shards=auto_shards)
        self._lost, self._here, self.answers, self.known = {}, NODES[0], answers, []
        self._directory = SimpleNamespace(on=lambda node: None, living=lambda: [entry(1)])
        self._begin_writing()

    def _asking(self, method, *args):
        return self.answers[method]

    def _know(self, number):
        self.known.append(number)

    def _joined(self, timeout, since):
        self.answers["route"] = (7, 1 << 32)
        return 7


@pytest.fixture
def asked(monkeypatch):
    def ask(answer, timeout=None):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("shmbuf.distributed.writing.ask", ask)


def test_an_environment_whose_shards_are_all_lost(asked):
    writer = Writer(False, route=None)
    for _ in range(2):
        with pytest.raises(StorageLost, match="all shards of buffer 'b' are lost"):
            writer._target("a", None, 0.0)
    writer.answers["route"] = (2, 5)
    assert writer._target("a", None, 0.0) == (2, 5) and writer.known == [2]
    assert Writer(True, route=None)._target("a", None, 0.0) == (7, 1 << 32), "one is made, as for rows without a name"
    with pytest.raises(ValueError, match="routes no environments"):
        Writer(False, route=LookupError("a"))._target("a", None, 0.0)
    with pytest.raises(StorageLost, match="was shut down"):
        Writer(False, route=Gone("dead"))._target("a", None, 0.0)


def test_a_coordinator_that_is_silent_once_is_asked_again(asked):
    writer = Writer(False, home=Silent("it is started again"))
    assert writer._target(None, None, 0.0) == (1, None), "any shard, for now"
    writer.answers["home"] = 2
    assert writer._target(None, None, 0.0) == (2, None)
    writer.answers["home"] = 1
    assert writer._target(None, None, 0.0) == (2, None), "where it has begun it stays"
    assert isinstance(Writer(False, home=Silent("x"))._from_coordinator("home", None, 0.0), _Makeshift)
    with pytest.raises(ShmbufError, match=r"within 0.1 s. Nothing was stored"):
        Writer(False, route=Silent("x"))._target("a", 0.1, time.monotonic())


def test_who_waits_for_another_threads_shard_waits_no_longer_than_he_may(asked):
    writer = Writer(False, home=1)
    begun, done = threading.Event(), threading.Event()

    def hold():
        with writer._settling:
            begun.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    begun.wait(60)
    with pytest.raises(ShmbufError, match=r"another thread .* for 0.1 s. Nothing was stored"):
        writer._target(None, 0.1, time.monotonic())
    done.set()
    other.join()
    writer._target(None, 0.1, time.monotonic())


def test_a_buffer_called_like_a_shard_is_none():
    names = ["b", "b.0", "b.shard.0", "b.shard"]
    actors = [coordinator_name(n) for n in names] + [shard_name(n, k) for n in names for k in (0, 10)]
    assert len(set(actors)) == 12
