"""What people did who tried to break priorities, slices, epochs and the limiter: each finding a test. No torch."""

import contextlib
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from shmbuf import Buffer, MinSize, RateLimiter, StorageLost, destroy, segment
from tests.process import workers
from tests.process.failpoints import wait

BUILT = (
    512  # offset of Built in the header: row_bytes, ring_bytes, schema_offset, schema_bytes, rows, tree, links, rings …
)


def words(path: str) -> tuple[np.memmap, dict[str, int]]:
    m = np.memmap(path, np.uint8, "r+")
    names = ("row_bytes", "ring_bytes", "schema", "schema_bytes", "rows", "tree", "links", "rings")
    return m, dict(zip(names, struct.unpack_from("<8Q", m[:1024].tobytes(), BUILT), strict=True))


@pytest.mark.parametrize("root", ["2.5e30", "7.9e30", "inf", "nan"])
def test_a_damaged_tree_leads_nowhere_else(unique_name, root):
    """Sums too large, and positive numbers behind the last node of each level: in a process of its own, for it used to crash."""
    code = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
import contextlib, numpy as np
from shmbuf import Buffer, segment
from tests.process.test_breakers_sampling import words
capacity = 262145
b = Buffer.create({unique_name!r}, capacity, schema={{"x": "float64"}}, max_collectors=1, ring_bytes=1 << 16, drain="caller")
b.keep_priorities()
b.extend({{"x": np.zeros(capacity)}})
m, at = words(segment.path_of({unique_name!r}))
m[at["tree"]:at["rings"]].view("f8")[:] = 1e30
last, c = at["tree"] + (capacity * 8 + 127) // 128 * 128, (capacity + 7) // 8
while c > 1:
    last, c = last + (c * 16 + 127) // 128 * 128 + (c * 8 + 127) // 128 * 128, (c + 7) // 8
m[last:last + 8].view("f8")[:] = float(sys.argv[1])
with contextlib.suppress(RuntimeError):
    rows, ids, _ = b.draw_by_priority(256, timeout=0.1)
    assert ids.min() >= 0 and (ids < capacity).all()
b.empty()
b._handle.scrub()
assert b._handle.check_tree() == 0
b.extend({{"x": np.ones(8)}})
assert b.draw_by_priority(64)[0]["x"].min() == 1
"""
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, timeout=100)
    with contextlib.suppress(Exception):
        destroy(unique_name, force=True)
    assert done.returncode == 0, done.stderr


def test_a_damaged_commit_block_does_not_keep_the_writer_for_ever(unique_name):
    buf = Buffer.create(unique_name, 5000, schema={"x": "int64"}, max_collectors=2, ring_bytes=1 << 16, drain="caller")
    for _ in range(400):
        buf.extend({"x": np.arange(28)})
    m = np.memmap(segment.path_of(unique_name), np.uint8, "r+")
    *_, control, _, _, _, _, blocks, block_bytes, _ = struct.unpack_from("<Q4I4Q4I8Q", m[:1024].tobytes())
    seq = int(m[control : control + 8].view("<u8")[0])
    blocks += (seq & 1) * block_bytes
    assert m[blocks : blocks + 8].view("<u8")[0] == seq
    for offset in (128 + 8, 128 + 16):  # rows_end, skip_to of the first ring
        m[blocks + offset : blocks + offset + 8].view("<u8")[0] = 2**63
    m[control + 16 : control + 24].view("<u8")[0] = seq - 1  # done_seq: as after a death between the commit and the end

    def go_on() -> None:
        with contextlib.suppress(Exception):
            Buffer.attach(unique_name).extend({"x": np.arange(28)}, timeout=1)

    assert wait(workers.fork(go_on), seconds=20) == 0
    buf.close()
    destroy(unique_name, force=True)


def test_a_change_of_the_limiter_that_dies_leaves_a_limiter(unique_name):
    """Killed at random moments of changing the ratio to and fro: there is always one of the two."""
    buf = Buffer.create(unique_name, 1000, schema={"x": "int64"}, drain="caller")
    a, b = RateLimiter(2.0, 1, error_buffer=500), RateLimiter(3.0, 1, error_buffer=500)
    buf.set_limiter(a)

    def change() -> None:
        mine = Buffer.attach(unique_name)
        for _ in range(100_000):
            mine.set_limiter(b)
            mine.set_limiter(a)

    for k in range(60):
        pid = workers.fork(change)
        for _ in range(200 + 37 * k):
            state = buf.limiter_state()
            assert state is not None and state["num"] in (2, 3), "samples and inserts go unlimited"
        workers.kill(pid)
        assert buf.limiter_state() is not None
    buf.close()
    destroy(unique_name)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.epoch().draw(2),
        lambda b: b.epoch(shared=True).draw(2),
        lambda b: b.consume().draw(2),
        lambda b: b.newest(2),
        lambda b: b.set_priorities([0], [1.0]),
        lambda b: b.draw_by_priority(2),
        lambda b: b.draw_slices(2, 2),
        lambda b: b.trajectories(),
        lambda b: b.following([0]),
        lambda b: b.wait_rows(1),
        lambda b: b.set_limiter(MinSize(1)),
        lambda b: b.keep_priorities(1.0, 0.0),
    ],
)
def test_whoever_draws_or_updates_hears_of_a_forced_destroy(unique_name, call):
    buf = Buffer.create(unique_name, 100, schema={"x": "int64", "done": "bool"}, drain="caller")
    buf.keep_priorities(1.0, 0.0)
    buf.extend({"x": np.arange(10), "done": np.zeros(10, bool)})
    call(buf)
    other = Buffer.attach(unique_name)
    call(other)
    destroy(unique_name, force=True)
    with pytest.raises(StorageLost):
        call(other)
    other.close()
    buf.close()


def test_without_a_thread_who_draws_heals_the_tree(unique_name):
    """drain="caller": an updater dies between leaf and root; draws of another find and mend it."""
    code = f"""
import numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.attach({unique_name!r})
native.arm("tree_leaves_set=kill@1")
b.set_priorities([3], [100.0])
"""
    buf = Buffer.create(unique_name, 100, schema={"x": "int64"}, drain="caller")
    buf.keep_priorities(1.0, 0.0)
    buf.extend({"x": np.arange(100)})
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "SHMBUF_NATIVE": "failpoints"}, timeout=60)
    assert done.returncode == -signal.SIGKILL and buf._handle.check_tree() > 0
    while buf._handle.check_tree():  # the test's own time limit ends it
        buf.draw_by_priority(1)
    assert buf.stats()["priorities"]["sum"] == 199.0 and buf.stats()["priorities"]["scrubs"] == 1
    buf.close()
    destroy(unique_name)
