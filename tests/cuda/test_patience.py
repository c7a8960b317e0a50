"""How long those who have the memory and do not answer are waited for: no longer than the caller says, and hardly at all if all of them
are stopped. Over the stand-in; what is counted is what they are asked for, not the clock."""

from __future__ import annotations

import os
import signal

import pytest

from shmbuf import segment
from shmbuf.cuda import sharing
from shmbuf.errors import DeviceError
from tests.cuda.helpers import MAKER, USER, ask, line
from tests.cuda.test_face import TORCH
from tests.cuda.test_sharing import TEN, WAYS, steward_of, until

# What was asked for, and how long each was waited for; how often and with what patience; what was logged.
COUNTED = """
import logging
import shmbuf.cuda.sharing as sharing
waited, patience, logged, ask_one, ask = [], [], [], sharing._ask_one, sharing.ask
def counting(name, seconds):
    try: return ask_one(name, seconds)
    except TimeoutError: waited.append(seconds); raise
sharing._ask_one = counting
sharing.ask = lambda handle, what, *given: (patience.append(given[0] if given else None), ask(handle, what, *given))[1]
class Kept(logging.Handler):
    def emit(self, record): logged.append(record.getMessage())
logging.getLogger("shmbuf").addHandler(Kept())
def asked():
    got = len(patience), sum(waited) <= 0.5 * len(patience)
    patience.clear(); waited.clear()
    return got
"""
ONCE = "(1, True)"
FACE = (
    COUNTED
    + TORCH
    + """
def tried(f):
    try: return f()
    except Exception as e: return f"{type(e).__name__}: {e}"
"""
)
LOOP = "say('attached')\nwhile (what := sys.stdin.readline().strip()): say(tried(lambda: eval(what)))"


def stop(name, maker, way) -> int:
    """The only one who has the memory; his pid."""
    pid = steward_of(name) if way == "ipc" else maker.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: segment.process_state(pid) == "T")
    return pid


@pytest.mark.parametrize("way", WAYS)
def test_the_only_holder_that_is_stopped_is_named_at_once_at_every_door(begin, name, way):
    maker = begin(MAKER, name, **WAYS[way])
    assert line(maker) == "made"
    pid = stop(name, maker, way)
    try:
        user = begin(
            COUNTED + USER.replace("attach(sys.argv[1])", "attach(sys.argv[1], timeout=60)"), name, **WAYS[way]
        )
        assert line(user) == "attached cuda:0" and ask(user, "asked()") == ONCE
        (warned,) = eval(ask(user, "logged"))
        assert repr(name) in warned and f"kill -CONT {pid}" in warned and "can put" in warned
        assert ask(user, "b.put(rows(10)).rows") == "1" and ask(user, "asked()") == "(0, True)"
        doors = ["b.draw(2)", "b.draw(2, timeout=60)", "b.draw(2, timeout=None)", "b.gather([0])"]
        doors += ["b.submit_device([], 1, True, 60.0, lambda ids, n: ids, (None, None), 0)"]
        for door in doors:
            said = ask(user, door)
            assert said.startswith("DeviceError") and f"pid {pid} " in said and f"kill -CONT {pid}" in said, said
            assert ask(user, "asked()") == ONCE, door
        assert ask(user, "b.drain()") in ("True", "False") and ask(user, "asked()") == ONCE
        assert ask(user, "len(logged)") == "1"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(user, "stored(b)[:10]") == TEN


@pytest.mark.parametrize("way", WAYS)
def test_so_it_is_at_the_doors_of_a_replay_buffer(begin, name, way):
    maker = begin(
        TORCH
        + "rb = shmbuf.TensorDictReplayBuffer(storage=ShmStorage(100, name=sys.argv[1], device='cuda', drain='caller'), batch_size=4)\n"
        "rb.extend(td(0, 10)); say('made'); sys.stdin.readline()",
        name,
        **WAYS[way],
    )
    assert line(maker) == "made"
    pid = stop(name, maker, way)
    try:
        user = begin(FACE + "rb = shmbuf.attach(sys.argv[1], timeout=60)\n" + LOOP, name, **WAYS[way])
        assert line(user) == "attached" and ask(user, "asked()") == ONCE and ask(user, "len(logged)") == "1"
        assert ask(user, "rb._storage.device, len(rb), asked()") == "(device(type='cpu'), 10, (0, True))"
        for door in ("rb.sample()", "rb.sample(timeout=60)", "rb.sample(device='cpu')", "rb[:]", "rb['k']", "rb[3]"):
            said = ask(user, door)
            assert said.startswith("DeviceError") and f"kill -CONT {pid}" in said, (door, said)
            assert ask(user, "asked()") == ONCE, door
        assert ask(user, "rb.put(td(10, 2)).rows") == "2" and ask(user, "asked()") == "(0, True)"
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(user, "right(rb.sample())") == "True"


def test_batches_drawn_ahead_that_found_it_stopped_are_no_answer_later(begin, name):
    maker = begin(
        TORCH + "rb = TensorDictReplayBuffer(storage=ShmStorage(100, name=sys.argv[1], device='cuda'), batch_size=4)\n"
        "rb.extend(td(0, 10)); say('made'); sys.stdin.readline()",
        name,
    )
    assert line(maker) == "made"
    pid = stop(name, maker, "vmm")
    try:
        user = begin(FACE + "rb = shmbuf.attach(sys.argv[1], batch_size=4, prefetch=3)\n" + LOOP, name)
        assert line(user) == "attached"
        assert f"kill -CONT {pid}" in ask(user, "rb.sample(timeout=60)")
        ask(user, "rb._ahead.synchronize()")  # those that were begun have failed, too
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(user, "[right(rb.sample()) for _ in range(5)]") == str([True] * 5)


def test_and_of_rlightning_s_storage(begin, name):
    maker = begin(
        TORCH
        + "from shmbuf.rlightning import Storage, EnvRet, PolicyResponse\ns = Storage(100, name=sys.argv[1], device='cuda')\n"
        "for t in range(6):\n"
        "    s.add_transition(EnvRet('e', observation=torch.full((3,), float(t)), last_reward=torch.tensor(1.0), last_terminated=torch.tensor(False),\n"
        "        last_truncated=torch.tensor(False)), PolicyResponse('e', action=torch.tensor([t])))\n"
        "s.truncate_one_episode('e'); say('made'); sys.stdin.readline()",
        name,
    )
    assert line(maker) == "made"
    pid = stop(name, maker, "vmm")
    try:
        user = begin(
            FACE + "from shmbuf.rlightning import Storage\ns = Storage.attach(sys.argv[1], timeout=60)\n" + LOOP, name
        )
        assert line(user) == "attached" and ask(user, "asked()") == ONCE and ask(user, "len(logged)") == "1"
        said = ask(user, "s.get_data()")
        assert said.startswith("DeviceError") and f"kill -CONT {pid}" in said and ask(user, "asked()") == ONCE
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ask(user, "len(s.get_data())") == "5"


def test_who_is_only_busy_is_waited_for_as_long_as_the_caller_says(begin, name):
    deaf = MAKER.replace(
        'say("made")', "import shmbuf.cuda.sharing as s; s._Server.answer = lambda *_: time.sleep(0.05); say('made')"
    )
    maker = begin(deaf, name)
    assert line(maker) == "made"
    short = COUNTED.replace("logged, ask_one", "logged, sharing.PATIENCE, sharing.ANSWER, ask_one").replace(
        "[], [], [], sharing", "[], [], [], 0.3, 0.1, sharing"
    )
    user = begin(short + USER.replace("attach(sys.argv[1])", "attach(sys.argv[1], timeout=0.25)"), name)
    assert line(user) == "attached cuda:0"
    for door, at_most in (
        ("None", 0.25),
        ("b.draw(2)", 0.0),
        ("b.draw(2, timeout=0.2)", 0.2),
        ("b.wait_rows(11, 0.2)", 0.2),
        ("b.submit_device([], 1, True, 0.15, lambda ids, n: ids, (None, None), 0)", 0.15),
    ):
        ask(user, door)
        (given,) = eval(ask(user, "(list(patience), patience.clear())[0]"))
        assert 0 <= given <= at_most, (door, given)
    said = ask(user, "b.gather([0])")
    assert said.startswith("DeviceError") and "busy" in said
    for door in ("b.gather([0])", "b.draw(2, timeout=None)"):
        ask(user, "patience.clear()")
        assert ask(user, door).startswith("DeviceError") and ask(user, "patience") == "[None]"


# ---- the asking itself, with a clock of its own --------------------------------------------------------------------


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Table:
    """Of members that have the memory and do not answer."""

    header, member = {"instance_id": 1}, -1

    def __init__(self, pids: list[int]):
        self._of = [dict(member=i, pid=p, since=0.0, alive=True, command="x", uid=0) for i, p in enumerate(pids)]

    def members(self) -> list[dict]:
        return [dict(m) for m in self._of]


@pytest.mark.parametrize("patience", [None, 0.0, 3.0, 60.0])
@pytest.mark.parametrize("stopped, busy", [(1, 0), (100, 0), (0, 1), (0, 4), (3, 2)])
def test_no_longer_than_the_caller_s_patience_but_for_a_look(monkeypatch, patience, stopped, busy):
    clock, names = Clock(), []

    def silent(name, seconds):
        names.append(name)
        clock.sleep(seconds)
        raise TimeoutError

    monkeypatch.setattr(sharing, "time", clock)
    monkeypatch.setattr(sharing, "_ask_one", silent)
    monkeypatch.setattr(segment, "process_state", lambda pid: "T" if pid < stopped else "S")
    with pytest.raises(DeviceError, match="kill -CONT 0 " if stopped else "busy"):
        sharing.ask(Table(list(range(stopped + busy))), "it", patience)
    limit = sharing.STOPPED if not busy else max(sharing.PATIENCE if patience is None else patience, sharing.ANSWER)
    assert limit - sharing.AGAIN <= clock.now <= limit + sharing.STOPPED + 0.15
    assert len(set(names)) >= (busy or stopped), "each of them was asked"
