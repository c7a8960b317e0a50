"""What seeded bugs (tools/dev/mutants.toml) showed that no other test looked at."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, RateLimiter, destroy, segment
from shmbuf.errors import BufferFormatError, BufferNotFound

SMALL = {"schema": {"k": "int64"}, "drain": "caller"}

FORKS = """
import os, sys, time
import numpy as np
from shmbuf import Buffer
b = Buffer.create(sys.argv[1], 10, schema={"k": "int64"}, drain="caller")
b.extend({"k": np.arange(3)})
assert sys.argv[2] == "idle" or b._handle.try_take_role()
pid = os.fork()
if pid: print(pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("parent", ["idle", "draining"])
def test_a_fork_child_that_never_uses_the_handle_holds_nothing_of_its_dead_parents(name, start, parent):
    p = start(FORKS, name, parent)
    child = int(p.stdout.readline())
    try:
        p.send_signal(signal.SIGKILL)
        p.wait()
        os.kill(child, 0)  # it lives, and so would every lock of a description that it kept
        with Buffer.attach(name) as buf:
            deadline = time.monotonic() + 60  # its other threads end a little later than it does
            while [m["alive"] for m in buf.members() if "creator" in m["roles"]] != [False]:
                assert time.monotonic() < deadline, buf.members()
                time.sleep(1e-3)
            assert [c["state"] for c in buf.collectors()] == ["dead"]
            assert buf.extend({"k": np.arange(3, 5)}, timeout=20).tolist() == [3, 4]
        destroy(name)  # nobody is attached
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_child_that_ends_leaves_its_parents_unnamed_buffer(python):
    code = """
import os
import numpy as np
from shmbuf import Buffer
b = Buffer.create(None, 10, schema={"k": "int64"}, drain="caller")
b.extend({"k": np.arange(3)})
pid = os.fork()
if not pid:
    b.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
with Buffer.attach(b.name) as again:
    print(len(again), b.destroyed)
"""
    assert python(code) == "3 False"


def test_a_schema_that_was_changed_behind_its_back_is_damaged(name):
    """The column of another name would be as well formed, and the rows as long."""
    with Buffer.create(name, 10, schema={"kilo": "int64"}, drain="caller") as buf:
        buf.extend({"kilo": np.arange(3)})
    path = Path(segment.path_of(name))
    whole = path.read_bytes()
    assert whole.count(b"kilo") == 1
    path.write_bytes(whole.replace(b"kilo", b"lima"))
    with pytest.raises(BufferFormatError, match=r"crc: the schema is damaged"), Buffer.attach(name) as buf:
        buf.gather([0])
    path.write_bytes(whole)
    with Buffer.attach(name) as buf:
        assert buf.gather([2])["kilo"].tolist() == [2]


def test_settings_that_were_changed_behind_its_back_are_damage(name):
    with Buffer.create(name, 10, config={"note": "alpha"}, **SMALL):
        pass
    path = Path(segment.path_of(name))
    whole = path.read_bytes()
    assert whole.count(b"alpha") == 1
    path.write_bytes(whole.replace(b"alpha", b"omega"))
    with pytest.raises(BufferFormatError, match=r"header_crc: the header is damaged"):
        Buffer.attach(name)
    path.write_bytes(whole)
    with Buffer.attach(name) as buf:
        assert buf.config["note"] == "alpha"


def test_a_transaction_that_was_begun_is_finished_as_it_was_planned(python, name):
    """Its writer dies when the old rows are overwritten; by then a ring that comes earlier has rows, too. Planned anew they would
    take the ids, and of the rows that are already gone some would count as stored."""
    code = """
import os, sys
import numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.create(sys.argv[1], 16, schema={"k": "int64"}, drain="caller")
b.extend({"k": np.arange(16)})
pid = os.fork()
if not pid:
    other = Buffer.attach(sys.argv[1])
    native.arm("txn_copied=kill@1")
    other.extend({"k": np.arange(100, 104)})
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 9
b.put({"k": np.arange(200, 202)})
b.drain()
print(*b.window, *b.gather(np.arange(16, 22))["k"])
"""
    assert python(code, name, SHMBUF_NATIVE="failpoints") == "6 22 100 101 102 103 200 201"


def test_an_update_that_loses_the_race_for_a_sum_is_in_it(python, name):
    """One reads eight leaves; another changes one of them and reads them, too; the first stores its sum, which lacks the change.
    The second, whose sum is refused, has to read again."""
    code = """
import os, signal, sys
import numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.create(sys.argv[1], 100, schema={"k": "int64"}, drain="caller")
b.keep_priorities(1.0, 0.0)
b.extend({"k": np.arange(100)})
def update(row):
    pid = os.fork()
    if not pid:
        other = Buffer.attach(sys.argv[1])
        native.arm("tree_children_read=stop@1")
        other.set_priorities([row], [5.0])
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    return pid
for pid in [update(3), update(4)]:
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0
print(b._handle.check_tree(), b.stats()["priorities"]["sum"])
"""
    assert python(code, name, SHMBUF_NATIVE="failpoints") == "0 108.0"


def test_in_the_middle_of_an_emptying_no_id_is_readable_that_was_never_given(python, name):
    """The first live id moves before the end: the other way round readers would see what lies in slots that hold no row yet."""
    code = """
import os, signal, sys
import numpy as np
from shmbuf import Buffer
from shmbuf._extension import native
b = Buffer.create(sys.argv[1], 16, schema={"k": "int64"}, drain="caller")
b.extend({"k": np.arange(5)})
pid = os.fork()
if not pid:
    other = Buffer.attach(sys.argv[1])
    native.arm("post_base=stop@1")
    other.empty()
    os._exit(0)
assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
print(len(b), int(b.try_gather(np.arange(16))[1].sum()), end=" ")
os.kill(pid, signal.SIGCONT)
assert os.waitpid(pid, 0)[1] == 0
print(len(b), *b.extend({"k": np.arange(2)}))
"""
    assert python(code, name, SHMBUF_NATIVE="failpoints") == "0 0 0 16 17"


def test_a_draw_that_raises_gives_back_no_more_than_it_took(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        buf.extend({"k": np.arange(10)})
        buf.set_limiter(RateLimiter(1.0, error_buffer=(-100, 100)))
        buf.draw(7)
        with pytest.raises(KeyError), buf.sampling(3, 0.0):
            raise KeyError
        assert buf.limiter_state()["sampled"] == 7


def test_who_destroys_too_late_leaves_the_successor_its_name(name, monkeypatch):
    """All is checked but the locks; meanwhile another one destroys the buffer and makes a new one of that name."""
    Buffer.create(name, 10, **SMALL).close()
    real, successor = segment.native.lock_byte, []

    def late(fd: int, at: int, exclusive: bool) -> bool:
        if not successor:
            successor.append(None)
            destroy(name)
            successor[0] = Buffer.create(name, 10, **SMALL)
        return real(fd, at, exclusive)

    monkeypatch.setattr(segment.native, "lock_byte", late)
    with pytest.raises(BufferNotFound, match="the name means another one now"):
        segment.destroy(name, force=True)
    with successor[0] as buf:
        assert name in segment.names() and not buf.destroyed
        assert buf.extend({"k": np.arange(2)}).tolist() == [0, 1]
