"""One rlightning storage, several processes that add to it, a learner that attached; one of them is killed. Imports torch."""

import multiprocessing
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import shmbuf
from shmbuf import RingFull, SliceSampler
from shmbuf.rlightning import Storage
from tests.process import rlightning_workers as w

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 120


@pytest.fixture
def crew():
    """``crew(target, *args)`` starts a process; gives it and the other end of its pipe. They are ended after the test."""
    running = []

    def start(target, name, *args, before=()):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(name, *before, theirs, *args), daemon=True)
        process.start()
        theirs.close()
        running.append(process)
        return process, ours

    yield start
    for p in running:
        p.kill()
        p.join(SECONDS)


def told(connection, seconds=SECONDS):
    assert connection.poll(seconds), "nothing was heard of a process"
    return connection.recv()


def wait_for(connection, what):
    """Hear it out until it says this; the last number it said before."""
    last = -1
    while (said := told(connection)) != what:
        last = said
    return last


def judge(rows):
    """Every row is complete, and of one environment, episode and step throughout."""
    o = rows["observation"]
    assert torch.equal(rows["next_observation"], o + 1)
    assert torch.equal(rows["reward"], (o + 1).double())
    assert torch.equal(rows["action"], torch.stack([o, -o], -1))


def episodes_of(storage, who):
    """Of each stored episode of these environments: (lane, episode). Each is whole and in order."""
    data, found = storage.get_data(), []
    for e in data:
        values = e["observation"].tolist()
        env, episode, first = w.parts(values[0])
        assert [w.parts(v) for v in values] == [(env, episode, first + i) for i in range(len(values))]
        assert first == 0 and len(values) == w.LENGTHS[episode % len(w.LENGTHS)]
        if env // w.GROUP == who:
            found.append((env % w.GROUP, episode))
    return found


@pytest.mark.parametrize("stall", [True, False], ids=["in the middle of an episode", "anywhere"])
def test_a_killed_adder_leaves_whole_episodes_and_the_others_go_on(crew, name, stall):
    rng = random.Random(4)
    with Storage(100_000, unit="episode", name=name) as storage:
        victim, heard = crew(w.add, name, 7 if stall else None, before=(0,))
        survivor, other = crew(w.add, name, None, before=(1,))
        assert told(other) == 0
        acked = wait_for(heard, "middle") if stall else wait_for(heard, 5)
        with shmbuf.attach(name, batch_size=64) as learner:
            judge(learner.sample())
            if not stall:
                time.sleep(rng.random() * 0.05)
            victim.kill()
            victim.join(SECONDS)
            acked = max([acked, *drained(heard)])
            before = max([-1, *drained(other)])
            while told(other) < before + 20:  # the other one goes on
                judge(learner.sample())
            other.send("stop")
            wait_for(other, "end")
            survivor.join(SECONDS)
            assert survivor.exitcode == 0
            # Of the dead one's environments: every episode whose truncation returned, perhaps the one that was being stored, and
            # of the one it was in the middle of nothing: no row of it was ever in a sample, for they are not in the buffer.
            got = episodes_of(storage, 0)
            assert len(set(got)) == len(got)
            whole = {(lane, k) for lane in range(w.GROUP) for k in range(acked + 1)}
            assert whole <= set(got) and {k for _, k in set(got) - whole} <= {acked + 1}
            if stall:
                assert set(got) == whole and acked == 6
            assert len(episodes_of(storage, 1)) == len(storage) - len(got)
            rows = learner[:]
            judge(rows)
            assert len(rows) == sum(e.batch_size[0] for e in storage.get_data())
        with shmbuf.attach(name, sampler=SliceSampler(slice_len=9), batch_size=90) as slices:
            o = slices.sample()["observation"].reshape(-1, 9)
            assert torch.equal(o, o[:, :1] + torch.arange(9))
        storage.buffer.check()
    shmbuf.destroy(name)


def drained(connection):
    out = []
    try:
        while connection.poll(0):
            said = connection.recv()
            if isinstance(said, int):
                out.append(said)
    except EOFError:
        pass
    return out


def test_two_fill_a_storage_exactly(crew, name):
    with Storage(1000, "standard", "episode", name=name) as storage:
        pair = [crew(w.fill, name) for _ in range(2)]
        for _, c in pair:
            assert told(c) == "ready"
        for _, c in pair:
            c.send("go")
        answers = [told(c) for _, c in pair]
        assert sum(n for n, _ in answers) == 333 and all("Current size is 999" in text for _, text in answers)
        assert len(storage) == 333 and all(n > 0 for n, _ in answers)
        assert np.ravel(storage.get_data()["observation"].tolist()).tolist().count(0) == 6
        for p, _ in pair:
            p.join(SECONDS)
            assert p.exitcode == 0
    shmbuf.destroy(name)


def test_whoever_is_killed_while_it_pushes_holds_up_nobody(crew, name):
    with Storage(10, "standard", name=name, timeout=0.2) as storage:
        holder, heard = crew(w.hold, name)
        assert told(heard) == "inside"
        rows = {"observation": torch.arange(3)}
        with pytest.raises(RingFull, match=r"another process has been pushing.*0.2 s. Nothing was stored"):
            storage.add_episode(rows)
        assert len(storage) == 0
        holder.kill()
        holder.join(SECONDS)
        give_up = time.monotonic() + SECONDS
        while (
            len(storage) == 0 and time.monotonic() < give_up
        ):  # the kernel drops the lock a moment after the process is gone
            try:
                storage.add_episode(rows)
            except RingFull:
                continue
        assert storage.get_data()["observation"].tolist() == [0, 1, 2]
    shmbuf.destroy(name)


def test_a_forks_child_adds_under_numbers_of_its_own(name):
    code = f"""
import os, sys, torch
from shmbuf.rlightning import Storage
s = Storage(100, unit="episode", name={name!r}, exists="attach")
s.add_episode({{"observation": torch.arange(2)}})
pid = os.fork()
s.add_episode({{"observation": torch.arange(3) + (10 if pid else 20)}})
if not pid:
    sys.stdout.flush(), os._exit(0 if len(s) >= 2 else 1)
assert os.waitpid(pid, 0)[1] == 0
print(sorted(e["observation"].tolist() for e in s.get_data()))
print(len(set(s.buffer.gather(range(*s.buffer.window))["episode"]["id"].tolist())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[[0, 1], [10, 11, 12], [20, 21, 22]]", "3"]
    shmbuf.destroy(name)


def test_the_example():
    script = Path(__file__).resolve().parents[2] / "examples" / "rlightning_storage.py"
    done = subprocess.run([sys.executable, script, "--steps", "100"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    episodes, _, _, least, _, most = done.stdout.replace(",", "").split()[:6]
    assert int(episodes) > 128 and int(least) >= 1 and int(most) <= 99
