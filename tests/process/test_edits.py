"""Readers beside editors in other processes: every row is the old one or the new one, whole; no edit reaches another row."""

import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from shmbuf import Buffer, destroy
from tests import oracle
from tests.process import workers


def edit(name: str, seed: int, stop) -> None:
    """Turn the payload of random rows, some of which are being overwritten."""
    buffer, rng = Buffer.attach(name), np.random.default_rng(seed)
    while not stop.is_set():
        lo, hi = buffer.window
        ids = np.unique(rng.integers(max(0, lo - 5), hi, rng.integers(1, 40)))
        rows, valid = buffer.try_gather(ids)
        oracle.check_rows({k: v[valid] for k, v in rows.items()})
        right = oracle.payload(rows["who"], rows["k"])  # what two editors make of it, one of them may undo
        new = np.where(rng.integers(0, 2, len(ids)).astype(bool)[:, None], right, ~right)
        buffer.edit(ids[valid], {"payload": new[valid]}, timeout=30)
    buffer.close()


def read(name: str, stop, out) -> None:
    buffer, seen, turned = Buffer.attach(name), 0, 0
    while not stop.is_set() or not seen:
        lo, hi = buffer.window
        rows, valid = buffer.try_gather(np.arange(lo, hi))
        rows = {k: v[valid] for k, v in rows.items()}
        oracle.check_rows(rows)
        drawn, _ = buffer.draw(64, timeout=30)
        oracle.check_rows(drawn)
        seen += len(rows["k"])
        turned += int((rows["payload"] != oracle.payload(rows["who"], rows["k"])).any(axis=1).sum())
    out.put((seen, turned))
    buffer.close()


def test_no_torn_row_beside_editors_and_collectors(unique_name, tmp_path):
    context = multiprocessing.get_context("fork")
    stop, out, acks = context.Event(), context.Queue(), oracle.Acks(tmp_path / "acks")
    with Buffer.create(unique_name, 64, schema=oracle.SCHEMA, ring_bytes=1 << 14) as buffer:
        buffer.extend(oracle.make_rows(7, 0, 64))
        tasks = [
            (edit, (unique_name, 1, stop)),
            (edit, (unique_name, 2, stop)),
            (read, (unique_name, stop, out)),
            (read, (unique_name, stop, out)),
            (workers.collect, (unique_name, 3, acks.path, 5, stop, 1)),
        ]
        assert workers.run_all("fork", tasks, 4, stop) == [0] * 5
        seen, turned = map(sum, zip(*(out.get(timeout=5) for _ in range(2)), strict=True))
        s = buffer.stats()
        assert seen > 1000 and 0 < turned < seen
        assert s["edited_rows"] > 100 and s["malformed_records"] == 0 and not buffer.check()["findings"]
    destroy(unique_name)


def test_killed_editors_leave_no_half_edit(unique_name):
    context = multiprocessing.get_context("fork")
    with Buffer.create(unique_name, 64, schema=oracle.SCHEMA, ring_bytes=1 << 14, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(7, 0, 64))
        rng = np.random.default_rng(3)
        for turn in range(40):
            stop = context.Event()
            p = context.Process(target=edit, args=(unique_name, turn, stop))
            p.start()
            before = buffer.stats()["edited_rows"]
            while buffer.stats()["edited_rows"] <= before + int(rng.integers(0, 200)):
                oracle.check_rows(buffer.draw(64)[0])
                assert p.is_alive()
            os.kill(p.pid, signal.SIGKILL)
            p.join()
            oracle.check_rows(buffer.gather(range(64)))
            assert buffer.edit(range(64), oracle.edited(buffer.gather(range(64))), timeout=30).all()
            oracle.check_rows(buffer.gather(range(64)))
        assert not buffer.check()["findings"] and buffer.stats()["malformed_records"] == 0
    destroy(unique_name)


VERSIONED = {"v": "int64", "who": "int64", "pay": ("int64", (8,))}
ROUNDS, ROWS = 200, 16


def versioned(name: str, who: int, together, out) -> None:
    """All say the same version at a time. Tells of every (row, version) whether it was this process's edit that was made."""
    buffer, mine = Buffer.attach(name), []
    for v in range(1, ROUNDS + 1):
        together.wait(60)
        pay = np.full((ROWS, 8), v * 1000 + who)
        edit = {"v": np.full(ROWS, v), "who": np.full(ROWS, who), "pay": pay}
        made = buffer.edit(range(ROWS), edit, version="v", require_newer=True, timeout=60)
        mine.append(made.tolist())
    out.put((who, mine))
    buffer.close()


def test_each_version_of_a_row_is_one_process_s(unique_name):
    context = multiprocessing.get_context("fork")
    out, together = context.Queue(), context.Barrier(3)
    with Buffer.create(unique_name, ROWS, schema=VERSIONED, ring_bytes=1 << 14) as buffer:
        buffer.extend({"v": np.zeros(ROWS, int), "who": np.zeros(ROWS, int), "pay": np.zeros((ROWS, 8), int)})
        everyone = [context.Process(target=versioned, args=(unique_name, who, together, out)) for who in (1, 2, 3)]
        for p in everyone:
            p.start()
        said = dict(out.get(timeout=120) for _ in everyone)
        for p in everyone:
            p.join(60)
            assert p.exitcode == 0
        made = np.array([said[who] for who in (1, 2, 3)])  # [process, version, row]
        assert made.sum(0).max() == 1, "no version was made twice"
        assert made[:, -1].sum(0).tolist() == [1] * ROWS, "and the largest once in each row"
        last = buffer.gather(range(ROWS))
        assert (last["v"] == ROUNDS).all() and (last["who"] == 1 + made[:, -1].argmax(0)).all()
        assert (last["pay"] == (ROUNDS * 1000 + last["who"])[:, None]).all()
        assert buffer.stats()["edited_rows"] == made.sum() and not buffer.check()["findings"]
    destroy(unique_name)


STOPS = """
import sys, numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.attach(sys.argv[1])
ids = np.array(eval(sys.argv[2]))
native.arm("edit_half=stop@1")
b.edit(ids, {"y": np.arange(len(ids)) + 1000})
"""


@pytest.mark.parametrize(
    "ids", [[3, 5, 3, 3, 7], list(range(2000)), list(range(1999, -1, -1))], ids=["twice", "rising", "falling"]
)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT], ids=["killed", "goes on"])
def test_rows_under_a_stopped_edit_are_read_as_they_will_be(unique_name, ids, end):
    """Of a row that is named twice the last values; in whatever order the ids came, and however many they are."""
    with Buffer.create(unique_name, 2000, schema={"x": "int64", "y": "int64"}, drain="caller") as buffer:
        buffer.extend({"x": np.arange(2000), "y": np.zeros(2000, np.int64)})
        env = {**os.environ, "SHMBUF_NATIVE": "failpoints"}
        editor = subprocess.Popen([sys.executable, "-c", STOPS, unique_name, repr(ids)], env=env)
        os.waitid(os.P_PID, editor.pid, os.WSTOPPED | os.WNOWAIT)
        becomes = np.zeros(2000, np.int64)
        becomes[ids] = np.arange(len(ids)) + 1000  # the last one stays
        for _ in range(2):
            rows = buffer.gather(range(2000))
            assert (rows["x"] == np.arange(2000)).all() and (rows["y"] == becomes).all()
            rows, drawn = buffer.draw(500)
            assert (rows["y"] == becomes[drawn]).all()
            editor.send_signal(end)  # nothing, once it has ended
            editor.wait(60)
        buffer.drain()
        assert not buffer.check()["findings"]
    destroy(unique_name)
