"""What people who tried to break it found, each as a test."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from shmbuf import Buffer, destroy, segment
from shmbuf.errors import BufferInUse, BufferNotFound, CommitPending, ConcurrentUse, Lapped, RingFull, StorageLost
from tests import oracle
from tests.process import workers


def interpreter(code: str, *arguments: str, failpoints: bool = False) -> subprocess.Popen:
    env = {**os.environ, **({"SHMBUF_NATIVE": "failpoints"} if failpoints else {})}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=env)


def stopped_at(name: str, point: str, rows: int) -> subprocess.Popen:
    """A process that has stopped itself at a failpoint of its extend."""
    process = interpreter(
        "import sys\nfrom shmbuf import Buffer\nfrom shmbuf._extension import native\nfrom tests import oracle\n"
        f"b = Buffer.attach(sys.argv[1])\nnative.arm('{point}=stop@1')\nb.extend(oracle.make_rows(7, 0, {rows}))\n",
        name,
        failpoints=True,
    )
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    return process


def test_first_puts_of_threads_build_once(unique_name):
    """Threads of a handle share its lock description, which does not exclude them."""
    for _ in range(30):
        with Buffer.create(unique_name, 5000, drain="thread") as buffer:
            start, acked = threading.Barrier(4), []

            def put(i: int, buffer=buffer, start=start, acked=acked) -> None:
                start.wait()
                for _ in range(3):
                    with contextlib.suppress(ConcurrentUse):
                        acked.append(len(buffer.put(oracle.make_rows(i, 0, 4)).wait(20)))

            threads = [threading.Thread(target=put, args=(i,)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(60)
            assert len(buffer) == sum(acked) > 0
            lo, hi = buffer.window
            oracle.check_rows(buffer.gather(range(lo, hi)))
        destroy(unique_name)


def test_a_stopped_builder_is_named_and_the_wait_ends(unique_name):
    with Buffer.create(unique_name, 1000, drain="caller", timeout=0.2) as buffer:
        builder = stopped_at(unique_name, "build_grown", 1)
        try:
            with pytest.raises(RingFull, match=rf"pid {builder.pid} \(state T\)"):
                buffer.put(oracle.make_rows(0, 0, 1))
        finally:
            builder.kill()
            builder.wait()
        assert buffer.extend(oracle.make_rows(0, 0, 3)).tolist() == [0, 1, 2]
    destroy(unique_name)


def test_a_stopped_writer_is_named_by_every_wait(unique_name):
    with Buffer.create(unique_name, 4, schema=oracle.SCHEMA, drain="caller", timeout=0.2) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 4))
        writer = stopped_at(unique_name, "txn_reserved", 4)
        try:
            who = rf"pid {writer.pid} holds the writer role and is stopped \(SIGSTOP\)"
            with pytest.raises(CommitPending, match=who):  # the buffer's timeout holds for the commit, too
                buffer.extend(oracle.make_rows(0, 4, 2))
            with pytest.raises(Lapped, match=who):  # all four rows are being overwritten: not "empty"
                buffer.draw(2)
            with pytest.raises(RingFull, match=who):
                buffer.empty()
        finally:
            writer.kill()
            writer.wait()
        rows, _ = buffer.draw(8)
        oracle.check_rows(rows)
    destroy(unique_name)


def test_a_storm_of_signals_does_not_keep_a_build_from_ending(unique_name):
    """tmpfs starts an interrupted reservation from nothing."""
    count = 0

    def handler(*_):
        nonlocal count
        count += 1

    with Buffer.create(unique_name, 100_000, drain="caller") as buffer:
        old = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            buffer.extend({"x": np.zeros((1, 4096), np.uint8)})  # 400 MB
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert count > 0 and len(buffer) == 1
    destroy(unique_name)


def fork_in_a_handler(name: str, what: str) -> None:
    """A signal handler forks while this process waits; the child must not go on with the parent's call."""
    buffer, holder = Buffer.attach(name), Buffer.attach(name)
    assert holder._handle.try_take_role()
    child = [-1]

    def handler(*_):
        child[0] = os.fork()
        if child[0]:
            holder._handle.give_back_role()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    me = os.getpid()
    try:
        if what == "extend":
            buffer.extend(oracle.make_rows(0, 0, 4), timeout=20)
        else:
            for k in range(0, 200, 4):
                buffer.put(oracle.make_rows(0, k, 4), timeout=20)
    except Exception as e:
        assert os.getpid() != me, f"the parent: {e!r}"
        assert "forked" in str(e), e
    if os.getpid() != me:
        buffer.close()
        os._exit(0)
    pid, status = os.waitpid(child[0], 0)
    assert (pid, status) == (child[0], 0)
    buffer.drain()
    buffer.close()
    holder.close()


@pytest.mark.parametrize("what", ["extend", "put"])
def test_a_fork_inside_a_handler_inside_a_wait(unique_name, what):
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096) as buffer:
        assert os.waitpid(workers.fork(fork_in_a_handler, unique_name, what), 0)[1] == 0
        oracle.settle(buffer)
        acks = np.array([4 if what == "extend" else 200])
        oracle.check(buffer, acks, 0, whole=True)
    destroy(unique_name)


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo", "socket", "one byte"])
def test_a_stray_entry_named_like_an_unnamed_buffer_stops_nobody(unique_name, kind):
    path = segment.path_of(f"unnamed.{unique_name}")
    make = {
        "symlink": lambda: os.symlink("/nowhere", path),
        "directory": lambda: os.mkdir(path),
        "fifo": lambda: os.mkfifo(path),
        "socket": lambda: os.mknod(path, 0o600 | 0o140000),
        "one byte": lambda: Path(path).write_bytes(b"x"),
    }
    make[kind]()
    try:
        Buffer.create(None, 10).close()
        assert os.path.lexists(path)  # nobody's business
    finally:
        os.rmdir(path) if kind == "directory" else os.unlink(path)


def test_destroy_never_takes_the_name_of_a_successor(unique_name, monkeypatch):
    """Between the two openings of destroy the buffer is replaced by another."""
    Buffer.create(unique_name, 100, schema={"a": "int64"}, drain="caller").close()
    real, calls, successor = segment._open, [0], []

    def racing(name, readonly):
        calls[0] += 1
        if calls[0] == 3:  # the third opening is the one that carries destroy's locks
            monkeypatch.setattr(segment, "_open", real)
            destroy(unique_name)
            successor.append(Buffer.create(unique_name, 100, schema={"a": "int64"}, drain="caller"))
        return real(name, readonly)

    monkeypatch.setattr(segment, "_open", racing)
    with pytest.raises(BufferNotFound):
        segment.destroy(unique_name, force=True)
    with successor[0] as buffer:
        assert not buffer._handle.destroyed and unique_name in segment.names()
        assert buffer.extend({"a": np.zeros(2, np.int64)}).tolist() == [0, 1]
        with pytest.raises(BufferInUse):
            destroy(unique_name)
    destroy(unique_name)


def test_close_in_one_thread_while_others_put_draw_and_wait(unique_name):
    for _ in range(10):
        buffer = Buffer.create(unique_name, 1000, schema=oracle.SCHEMA)
        buffer.extend(oracle.make_rows(9, 0, 1))
        ended, go = [], threading.Barrier(4)

        def run(call, buffer=buffer, ended=ended, go=go) -> None:
            go.wait()
            try:
                while True:
                    call()
            except Exception as e:
                ended.append(type(e).__name__)

        calls = [
            lambda b=buffer: b.put(oracle.make_rows(0, 0, 5)),
            lambda b=buffer: b.draw(50),
            lambda b=buffer: b.wait_rows(1000, 30),
        ]
        threads = [threading.Thread(target=run, args=(c,)) for c in calls]
        for t in threads:
            t.start()
        go.wait()
        time.sleep(0.01)  # let them be in the middle of it; nothing depends on how far they are
        buffer.close()
        for t in threads:
            t.join(20)
        assert (
            not any(t.is_alive() for t in threads) and set(ended) <= {"ValueError", "StorageLost"} and len(ended) == 3
        )
        destroy(unique_name)


def test_a_refused_destroy_leaves_the_buffer_alive(unique_name):
    """Another user may attach (mode 0660) but not remove the name: /dev/shm is sticky."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    code = (
        "import os, sys\nfrom shmbuf import destroy\nfrom shmbuf.segment import attach\nos.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "attach(sys.argv[1], owner=0).close()\n"
        "try:\n    destroy(sys.argv[1], owner=0, force=True)\nexcept PermissionError as e:\n    print('refused', 'sticky' in str(e))\n"
    )
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, mode=0o660, group=54321) as buffer:
        done = subprocess.run([sys.executable, "-c", code, unique_name], capture_output=True, text=True, timeout=60)
        assert done.stdout == "refused True\n", done.stderr
        assert len(buffer.extend(oracle.make_rows(0, 0, 3))) == 3
    destroy(unique_name)


def test_a_destroy_that_was_killed_half_way_is_finished(unique_name):
    """It was killed between the removal and the word: the drain thread sees that the file has no name, and why."""
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 1))
        buffer._handle.mark_destroying()
        assert not buffer.destroyed and buffer.stats()["linked"]
        os.unlink(segment.path_of(unique_name))
        assert not buffer.stats()["linked"]
        with pytest.raises(StorageLost):
            for k in range(1, 100_000):
                buffer.put(oracle.make_rows(0, k, 1))
                time.sleep(0.001)


def test_what_cannot_be_mapped_is_refused_and_leaves_nothing(unique_name):
    with pytest.raises(ValueError, match="cannot be mapped"):
        Buffer.create(unique_name, 10, schema={"a": "int64"}, max_collectors=65535, ring_bytes=1 << 34)
    assert unique_name not in segment.names()
    code = (
        "import resource, sys\nfrom shmbuf import Buffer, NotEnoughMemory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try:\n    Buffer.create(sys.argv[1], 10, schema={'a': 'int64'}, max_collectors=1024)\n"
        "except NotEnoughMemory as e:\n    print('RLIMIT_AS' in str(e))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, unique_name], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
    assert unique_name not in segment.names()


def test_a_failing_attach_leaks_no_descriptor(unique_name):
    code = (
        "import os, resource, sys\nfrom shmbuf import Buffer\n"
        "Buffer.attach(sys.argv[1]).close()\n"
        "n = len(os.listdir('/proc/self/fd'))\nresource.setrlimit(resource.RLIMIT_NOFILE, (n, n))\n"
        "for _ in range(50):\n    try:\n        Buffer.attach(sys.argv[1])\n    except OSError:\n        pass\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (n, n))\nprint(len(os.listdir('/proc/self/fd')) - n)\n"
    )
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller"):
        done = subprocess.run([sys.executable, "-c", code, unique_name], capture_output=True, text=True, timeout=60)
        assert done.stdout == "0\n", done.stderr
    destroy(unique_name)


def test_a_handlers_own_exception_is_not_replaced(unique_name):
    class Mine(Exception):
        pass

    def handler(*_):
        raise Mine

    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 1))
        holder = segment.attach(unique_name)
        assert holder.try_take_role()
        old = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Mine):
                buffer.put(oracle.make_rows(0, 1, 500))  # a part of it is in the ring by then
        finally:
            signal.signal(signal.SIGALRM, old)
        holder.give_back_role()
        holder.close()
        oracle.settle(buffer)
        lo, hi = buffer.window
        oracle.check_rows(buffer.gather(range(lo, hi)))
    destroy(unique_name)


def slots_offset(f: BinaryIO) -> int:
    """Of the collectors' cursors: the second of the header's regions."""
    f.seek(104)
    return int.from_bytes(f.read(8), "little")


def test_a_damaged_head_word_does_not_spin(unique_name):
    """Work is seen in the ring, and none is found: nobody may look for it for ever."""
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, drain="caller") as buffer:
        buffer.extend(oracle.make_rows(0, 0, 5))
        with open(segment.path_of(unique_name), "r+b") as f:
            slots = slots_offset(f)
            f.seek(slots + 128)
            head = int.from_bytes(f.read(8), "little")
            assert head == 640  # five rows of 120 bytes and a header, rounded up
            f.seek(slots + 128)
            f.write((head - 32).to_bytes(8, "little"))
        buffer.drain()
        buffer.close()
    destroy(unique_name, force=True)


def test_counters_never_come_out_negative_while_rings_change_hands(unique_name):
    stop = workers.ForkedEvent()
    with Buffer.create(unique_name, 1000, schema=oracle.SCHEMA, max_collectors=4) as buffer:
        pids = [workers.fork(come_and_go, unique_name, stop) for _ in range(3)]
        for _ in range(3000):
            for c in buffer.collectors():
                for key in ("put_rows", "stored_rows", "skipped_rows", "dropped_rows", "refused_rows"):
                    assert 0 <= c[key] < 1 << 40, c
        stop.set()
        assert [os.waitpid(p, 0)[1] for p in pids] == [0] * 3
    destroy(unique_name)


def come_and_go(name: str, stop) -> None:
    while not stop.is_set():
        with Buffer.attach(name) as buffer:
            buffer.put(oracle.make_rows(0, 0, 3))


def test_a_damaged_tail_costs_its_ring_and_nobody_elses_rows(unique_name):
    """What the plan did not count must not be stored: rows of the next ring would get its ids."""
    with (
        Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as first,
        Buffer.attach(unique_name) as second,
    ):
        first.extend(oracle.make_rows(0, 0, 3))
        second.extend(oracle.make_rows(1, 0, 97))
        first.put(oracle.make_rows(0, 3, 5))
        second.put(oracle.make_rows(1, 97, 3))
        with open(segment.path_of(unique_name), "r+b") as f:
            slot = slots_offset(f)
            f.seek(slot)
            tail = int.from_bytes(f.read(8), "little")
            f.seek(slot)
            f.write((tail + 8192).to_bytes(8, "little"))
        second.drain()
        s = second.stats()
        assert s["malformed_records"] == 1
        lo, hi = second.window
        rows = second.gather(range(lo, hi))
        oracle.check_rows(rows)
        k = rows["k"][rows["who"] == 1]
        assert k.tolist() == list(range(int(k[0]), 100)), "the other collector's rows are all there, once, in order"
    destroy(unique_name, force=True)


def test_waits_let_other_threads_run(unique_name):
    """The GIL is given away by every wait: of a draw beside a stopped writer, of a put larger than its ring."""
    with Buffer.create(unique_name, 4, schema=oracle.SCHEMA, drain="caller", ring_bytes=4096) as buffer:
        buffer.extend(oracle.make_rows(0, 0, 4))
        writer = stopped_at(unique_name, "txn_reserved", 4)
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        t = threading.Thread(target=tick)
        t.start()
        try:
            for wait, error in (
                (lambda: buffer.draw(2), Lapped),
                (lambda: buffer.put(oracle.make_rows(0, 4, 60), timeout=1), CommitPending),
            ):
                before = ticks[0]
                with pytest.raises(error):
                    wait()
                assert ticks[0] - before > 20, "the other thread stood still"
        finally:
            stop.set()
            t.join()
            writer.kill()
            writer.wait()
    destroy(unique_name)


def test_names_of_unnamed_buffers_cannot_be_taken():
    with pytest.raises(ValueError, match="without a name"):
        Buffer.create("unnamed.mine", 10)


def test_the_labels_in_the_headers_are_those_that_can_be_armed():
    import re
    from pathlib import Path

    native = Path(__file__).resolve().parents[2] / "shmbuf" / "native"
    used = {
        name
        for f in native.glob("*.h")
        if f.name != "failpoint.h"
        for name in re.findall(r"FAILPOINT\((\w+)\)", f.read_text())
    }
    known = set(re.findall(r'"(\w+)"', (native / "failpoint.h").read_text().split("kNames[] = {")[1].split("};")[0]))
    assert used == known


def test_attach_waits_for_a_name_that_comes(unique_name):
    with pytest.raises(BufferNotFound, match="timeout="):
        Buffer.attach(unique_name)
    with pytest.raises(BufferNotFound):
        Buffer.attach(unique_name, timeout=0.05)
    code = "import sys\nfrom shmbuf import Buffer\nprint('waits', flush=True)\nprint(Buffer.attach(sys.argv[1], timeout=60).capacity)\n"
    early = interpreter(code, unique_name)
    assert early.stdout.readline() == "waits\n"
    with Buffer.create(unique_name, 123, drain="caller"):
        assert early.communicate(timeout=60)[0] == "123\n"
    destroy(unique_name)


def test_who_only_samples_hears_of_a_forced_destroy(unique_name):
    with (
        Buffer.create(unique_name, 100, schema=oracle.SCHEMA, drain="caller") as buffer,
        Buffer.attach(unique_name) as learner,
    ):
        buffer.extend(oracle.make_rows(0, 0, 5))
        oracle.check_rows(learner.draw(3)[0])
        destroy(unique_name, force=True)
        with pytest.raises(StorageLost):
            learner.draw(3)


def test_a_destroy_that_failed_leaves_no_trace(unique_name):
    """Another user may not remove the name: when it goes by itself later, whoever is attached goes on."""
    code = (
        "import os, sys\nfrom shmbuf import destroy\nos.setgroups([54321]); os.setgid(54321); os.setuid(54322)\n"
        "try:\n    destroy(sys.argv[1], force=True, owner=0)\nexcept PermissionError as e:\n    print('refused', 'sticky' in str(e))\n"
    )
    with Buffer.create(unique_name, 100, schema=oracle.SCHEMA, mode=0o660, group=54321) as buffer:
        done = subprocess.run([sys.executable, "-c", code, unique_name], capture_output=True, text=True, timeout=60)
        assert done.stdout == "refused True\n", done.stderr
        os.unlink(segment.path_of(unique_name))
        for k in range(3):
            buffer._handle.sweep()
            assert len(buffer.extend(oracle.make_rows(0, k, 1))) == 1
        assert not buffer.destroyed


def test_a_thread_that_outlives_the_main_one_is_told_that_its_handle_is_closed():
    code = (
        "import threading, time\nfrom shmbuf import Buffer\nb = Buffer.create(None, 10, schema={'k': 'int64'})\n"
        "main = threading.main_thread()\n"
        "def work():\n"
        "    main.join()\n    b.close()\n"
        "    try:\n        b.draw(1)\n    except ValueError as e:\n        print(e)\n"
        "threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "is closed" in done.stdout and done.returncode == 0, done
