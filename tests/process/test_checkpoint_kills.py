"""B125 and its kin: whoever is killed while saving leaves the old checkpoint or the new one, whole; whoever saves beside writers saves
whole rows of one instant."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, destroy, segment
from shmbuf.checkpoint import dump_buffer, load_buffer

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"k": "int64", "mix": ("int64", (60,)), "next": {"done": "bool"}}
WIDTH = 60

SAVER = """
import os, signal, sys
from shmbuf import Buffer
from shmbuf.checkpoint import directories, dump_buffer, snapshot
name, path, kill_at, exchange, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
snapshot.MAX_BLOCK_ROWS = 500
steps = 0
def step(what):
    global steps
    if steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1
directories.step = step
if exchange == "no":
    directories.exchange = lambda *_: False
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
buf = Buffer.attach(name)
print("ready", flush=True)
try:
    dump_buffer(buf, path)
except OSError as e:
    print(type(e).__name__, e)
    raise SystemExit(3)
print(steps, flush=True)
"""


def rows(first: int, n: int) -> dict:
    k = np.arange(first, first + n)
    return {"k": k, "mix": (k[:, None] * 7919 + np.arange(WIDTH)) ^ 0x5A5A, "next": {"done": k % 10 == 9}}


def whole(got: dict) -> bool:
    k = got["k"]
    expected = {"mix": (k[:, None] * 7919 + np.arange(WIDTH)) ^ 0x5A5A}
    return bool((got["mix"] == expected["mix"]).all() and (got["next"]["done"] == (k % 10 == 9)).all())


def priority_of(k: np.ndarray) -> np.ndarray:
    return 1.0 + k % 13


@pytest.fixture
def grown(make_name, tmp_path):
    """A checkpoint of 1,000 rows, and the buffer, which has 2,000 now."""
    name = make_name()
    with Buffer.create(name, 4000, schema=SPEC, drain="caller") as buf:
        buf.keep_priorities(0.6)
        for first in (0, 1000):
            ids = buf.extend(rows(first, 1000))
            buf.set_priorities(ids, priority_of(ids))
            if not first:
                dump_buffer(buf, tmp_path / "c")
        yield buf, tmp_path / "c"
    destroy(name, force=True)


def save(
    buf: Buffer, path: Path, kill_at: int = -1, exchange: str = "yes", limit: int = 0
) -> subprocess.CompletedProcess:
    arguments = [buf.name, str(path), str(kill_at), exchange, str(limit)]
    return subprocess.run(
        [sys.executable, "-c", SAVER, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def check(buf: Buffer, path: Path, make_name) -> int:
    """The number of rows in it, all of them right."""
    name = make_name()
    with Buffer.create(name, 4000, drain="caller") as into:
        into.keep_priorities(0.6)
        load_buffer(into, path)
        ids = np.arange(*into.window)
        got = into.gather(ids)
        assert whole(got) and got["k"].tolist() == list(range(len(ids)))
        assert into.priorities(ids) == pytest.approx(buf.priorities(ids), rel=1e-12)
        assert into.priorities(ids) == pytest.approx(priority_of(got["k"]), rel=1e-6)  # leaves are float32
    destroy(name, force=True)
    return len(ids)


@pytest.mark.parametrize("exchange", ["yes", "no"])
def test_b125_killed_at_every_step(grown, make_name, exchange):
    buf, path = grown
    seen, at = set(), 0
    while True:
        done = save(buf, path, at, exchange)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        n = check(buf, path, make_name)
        assert n in (1000, 2000), (at, n)
        if n == 2000 and 2000 not in seen:  # put the old one back, so that the steps that follow have something to lose
            published = at
        seen.add(n)
        at += 1
    assert seen == {1000, 2000} and at > 10 and published < at
    assert check(buf, path, make_name) == 2000
    assert os.listdir(path.parent) == [path.name]  # what the dead ones left is collected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_b125_killed_at_random_times(grown, make_name, how):
    buf, path = grown
    rng = random.Random(3)
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVER, buf.name, str(path), "-1", "yes", "0"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.03)
        child.send_signal(how)
        child.wait(60)
        child.stdout.close()
        assert check(buf, path, make_name) in (1000, 2000)
    assert save(buf, path).returncode == 0
    assert check(buf, path, make_name) == 2000 and os.listdir(path.parent) == [path.name]


def test_a_limit_of_file_size_leaves_the_old_one(grown, make_name):
    buf, path = grown
    done = save(buf, path, limit=100_000)
    assert done.returncode == 3 and "RLIMIT_FSIZE" in done.stdout and "unchanged" in done.stdout
    assert check(buf, path, make_name) == 1000 and os.listdir(path.parent) == [path.name]


COLLECTOR = """
import sys, time
import numpy as np
from shmbuf import Buffer
from tests.process.test_checkpoint_kills import rows
buf, at = Buffer.attach(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    buf.put(rows(at, 20))
    at += 20
"""


def test_a_snapshot_beside_two_writers_has_whole_rows_and_whole_trajectories(make_name, tmp_path):
    """TorchRL saved 8,966 torn rows of 10,240 here."""
    name, into_name = make_name(), make_name()
    buf = Buffer.create(name, 10_240, schema=SPEC)
    into = Buffer.create(into_name, 10_240, drain="caller")
    children = [
        subprocess.Popen([sys.executable, "-c", COLLECTOR, name, str(who * 10**9)], cwd=ROOT, stdout=subprocess.PIPE)
        for who in (0, 1)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == b"ready\n"
        buf.wait_rows(10_240, 60)
        saved_any = 0
        for turn in range(6):
            saved = dump_buffer(buf, tmp_path / "c", complete=turn % 2 == 1)
            assert saved.rows + saved.lost <= 10_240
            saved_any += saved.rows
            load_buffer(into, tmp_path / "c")
            got = into.gather(np.arange(*into.window))
            k = got["k"]
            assert len(k) == saved.rows and whole(got)
            for who in (0, 1):
                mine = k[k // 10**9 == who]
                assert (np.diff(mine) == 1).all()  # nothing missing in between
            for t in into.trajectories():
                ks = into.gather(into.trajectory(t.end))["k"]
                assert (np.diff(ks) == 1).all() and len(ks) <= 10
                assert t.head_missing == (ks[0] % 10 != 0) and t.ended == (ks[-1] % 10 == 9)
            assert into.check()["findings"] == []
        assert saved_any > 10_000
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
        for each, of in ((buf, name), (into, into_name)):
            each.close()
            destroy(of, force=True)


def test_b132_restored_while_collectors_put(make_name, tmp_path):
    """A load replaces what is stored, however often it is called: every (collector, number) is there at most once, no row is torn, no
    trajectory of one episode is continued by another, and the segment takes no more memory."""
    name = make_name()
    buf = Buffer.create(name, 10_240, schema=SPEC)
    watcher = Buffer.attach(name)
    children = [
        subprocess.Popen([sys.executable, "-c", COLLECTOR, name, str(who * 10**9)], cwd=ROOT, stdout=subprocess.PIPE)
        for who in (0, 1)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == b"ready\n"
        buf.wait_rows(10_240, 60)
        memory = {os.stat(segment.path_of(name)).st_size}
        for turn in range(6):
            if turn % 2 == 0:
                saved = dump_buffer(buf, tmp_path / "c")
            assert load_buffer(buf, tmp_path / "c").rows == saved.rows
            memory.add(os.stat(segment.path_of(name)).st_size)
            with watcher.pin(seconds=None) as pin:
                got = watcher.gather(np.arange(pin.first_id, pin.end_id))
            assert whole(got) and len(np.unique(got["k"])) == len(got["k"]) <= 10_240
        assert len(memory) == 1, "as computed at create"
        for child in children:
            child.kill()
            child.wait()
        buf.drain()
        got = buf.gather(np.arange(*buf.window))
        assert whole(got) and len(np.unique(got["k"])) == len(got["k"])
        for t in buf.trajectories():
            ks = buf.gather(buf.trajectory(t.end))["k"]
            assert (np.diff(ks) == 1).all() and len(ks) <= 10
        assert buf.check()["findings"] == []
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
        watcher.close()
        buf.close()
        destroy(name, force=True)


MEMORY = """
import sys
import numpy as np
from shmbuf import Buffer
from shmbuf.checkpoint import dump_buffer, load_buffer

def private():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) << 10

rows, n = int(sys.argv[2]), 1000
with Buffer.create(None, rows, schema={"obs": ("uint8", (4, 1024)), "next": {"done": "bool"}}) as a:
    for at in range(0, rows, n):
        a.extend({"obs": np.full((n, 4, 1024), at // n % 251, np.uint8), "next": {"done": np.zeros(n, bool)}})
    base, most = private(), [0]
    def tell(done, total):
        most[0] = max(most[0], private())
    dump_buffer(a, sys.argv[1], progress=tell)
    load_buffer(a, sys.argv[1], progress=tell)
    assert a.gather([a.window[1] - 1])["obs"][0, 0, 0] == (rows // n - 1) % 251 and most[0]
    print((most[0] - base) >> 20)
"""


def test_b136_memory_while_saving_and_loading(tmp_path):
    """1 GiB of rows (an eighth of it where the machine has less room) is saved and loaded in blocks: with at most 64 MiB of private memory
    more. How long that takes, beside a plain copy: tools/bench/checkpoints.py."""
    room = shutil.disk_usage(segment.SHM_DIR).free > 3 << 30 and shutil.disk_usage(tmp_path).free > 4 << 30
    rows = 262_000 if room else 32_000
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c"), str(rows)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64
