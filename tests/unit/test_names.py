"""Names and settings: allowed, taken, unknown, gone; buffers without a name."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import stat
import threading

import numpy as np
import posix_ipc
import pytest

from shmbuf import (
    Buffer,
    BufferExists,
    BufferFormatError,
    BufferInUse,
    BufferNotFound,
    Schema,
    SchemaError,
    StorageLost,
    destroy,
    segment,
)
from tests.unit.helpers import SMALL, k, numbers, open_files, unmoved

# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["", " ", "a b", "a/b", "/a", "..", ".", "a\n", "a\0", "é", "日本", "a" * 101, b"a", 5, ("a",), "a:b", "a*"]
)
@pytest.mark.parametrize(
    "call", [lambda n: Buffer.create(n, 10, **SMALL), Buffer.attach, destroy], ids=["create", "attach", "destroy"]
)
def test_a_name_that_is_not_allowed(bad, call, nothing_moves):
    with pytest.raises(ValueError, match=r"1 to 100 characters out of A-Z a-z 0-9 . _ - are allowed") as e:
        call(bad)
    assert repr(bad) in str(e.value)


@pytest.mark.parametrize("tail", ["a", "A.b_c-d", "...", "-", "0"])
def test_names_that_are_allowed(name, tail):
    for full in (name + tail, (name + tail).ljust(100, "x")):
        with Buffer.create(full, 10, **SMALL) as buf:
            buf.extend(k(1))
            assert full in segment.names() and os.path.exists(f"/dev/shm/shmbuf.{os.getuid()}.{full}")
        destroy(full)
        assert full not in segment.names()


def test_a_name_that_nobody_has(name, make_name, nothing_moves):
    other = make_name()
    with Buffer.create(other, 10, **SMALL):
        for call in (Buffer.attach, destroy):
            with pytest.raises(BufferNotFound, match=f"no buffer named '{name}'") as e:
                call(name)
            assert isinstance(e.value, FileNotFoundError) and "Known: " in str(e.value)
    destroy(other)


def test_a_name_that_another_user_has_is_told(name, monkeypatch):
    uid = os.getuid() + 12345
    path = segment.path_of(name, uid)
    open(path, "wb").close()
    try:
        with pytest.raises(BufferNotFound, match=f"uid {uid} has one"):
            Buffer.attach(name)
    finally:
        os.unlink(path)


def test_a_name_that_is_taken_says_how_to_go_on(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        buf.extend(k(1, 2, 3))
        before = open_files()
        with pytest.raises(BufferExists) as e, unmoved(buf):
            Buffer.create(name, 10, **SMALL)
        assert open_files() == before
        text = str(e.value)
        assert "3 of 10 rows" in text and f"pid {os.getpid()}" in text and isinstance(e.value, FileExistsError)
        assert all(
            w in text
            for w in ('exists="attach"', 'exists="replace"', f"shmbuf.destroy('{name}')", f"shminfo rm {name}")
        )
    with pytest.raises(BufferExists, match="nobody attached"):
        Buffer.create(name, 10, **SMALL)


def test_a_name_that_something_else_has(name):
    with open(segment.path_of(name), "wb") as f:
        f.write(b"not a segment" * 1000)
    with pytest.raises(BufferExists):
        Buffer.create(name, 10, **SMALL)
    with pytest.raises(
        BufferFormatError, match=f"magic: this is not a shmbuf segment.*`shminfo rm --force {name}` removes it"
    ):
        Buffer.attach(name)
    with pytest.raises(BufferFormatError):
        destroy(name)
    assert os.path.getsize(segment.path_of(name)) == 13_000
    destroy(name, force=True)
    assert not os.path.exists(segment.path_of(name))


@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 8192, 1 << 20])
def test_a_file_of_zeros(name, size):
    with open(segment.path_of(name), "wb") as f:
        f.truncate(size)
    before = open_files()
    with pytest.raises(BufferFormatError):
        Buffer.attach(name)
    assert open_files() == before
    destroy(name, force=True)
    assert not os.path.exists(segment.path_of(name))


def test_only_private_regular_files_are_opened(name, tmp_path):
    Buffer.create(name, 10, **SMALL).close()
    path = segment.path_of(name)
    os.chmod(path, 0o602)
    with pytest.raises(BufferFormatError, match="writable by everybody"):
        Buffer.attach(name)
    os.chmod(path, 0o600)
    os.rename(path, path + "x")
    os.symlink(path + "x", path)
    try:
        with pytest.raises(BufferFormatError, match="no regular file"):
            Buffer.attach(name)
    finally:
        os.unlink(path)
        os.rename(path + "x", path)
    Buffer.attach(name).close()


# ---- exists= -------------------------------------------------------------------------------------------------------


def test_exists_attach_takes_what_is_there(name):
    with (
        Buffer.create(name, 10, exists="attach", **SMALL) as buf,
        Buffer.create(name, 10, exists="attach", **SMALL) as other,
    ):
        buf.extend(k(1))
        other.extend(k(2))
        assert numbers(buf) == numbers(other) == [1, 2]
        before = open_files()
        with pytest.raises(BufferExists, match="capacity: has 10, asked for 11"), unmoved(buf):
            Buffer.create(name, 11, exists="attach", **SMALL)
        with pytest.raises(SchemaError, match=r"key 'k': got int32\[\], expected int64\[\]"), unmoved(buf):
            Buffer.create(name, 10, exists="attach", schema={"k": "int32"}, drain="caller")
        assert open_files() == before
    with Buffer.create(name, 10, exists="attach", drain="caller") as again:
        assert numbers(again) == [1, 2]


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("max_collectors", 5, "max_collectors: has 4, asked for 5"),
        ("full", "error", "full: has 'drop_newest', asked for 'error'"),
        ("timeout", 2.0, "timeout: has 1.0, asked for 2.0"),
        ("drain", "process", "drain: has 'caller', asked for 'process'"),
        ("ring_bytes", 1 << 16, "ring_bytes: has 4096, asked for 65536"),
    ],
)
def test_exists_attach_checks_what_was_asked_for(name, setting, value, text):
    made = {**SMALL, "full": "drop_newest", "timeout": 1.0}
    with Buffer.create(name, 10, **made) as buf:
        before = open_files()
        with pytest.raises(BufferExists, match=text), unmoved(buf):
            Buffer.create(name, 10, exists="attach", **{**made, setting: value})
        assert open_files() == before
        with Buffer.create(name, 10, exists="attach") as other:
            assert other.config["full"] == "drop_newest", "what was not asked for is taken as it is"


def test_exists_attach_gives_the_schema_if_there_is_none(name):
    bare = {key: v for key, v in SMALL.items() if key != "schema"}
    with Buffer.create(name, 10, **bare) as buf, Buffer.create(name, 10, exists="attach", **SMALL):
        assert buf.schema == Schema.from_spec({"k": "int64"})


def test_exists_replace_only_when_nobody_is_attached(name):
    buf = Buffer.create(name, 10, exists="replace", **SMALL)
    buf.extend(k(1))
    with pytest.raises(BufferInUse, match=f"buffer '{name}' is attached: this process"), unmoved(buf):
        Buffer.create(name, 20, exists="replace", **SMALL)
    buf.close()
    with Buffer.create(name, 20, exists="replace", **SMALL) as new:
        assert (new.capacity, len(new)) == (20, 0)


def test_destroy_only_when_nobody_is_attached(name, start):
    Buffer.create(name, 10, **SMALL).close()
    p = start(
        "import sys; from shmbuf import Buffer; b = Buffer.attach(sys.argv[1]); print(flush=True); sys.stdin.read()",
        name,
    )
    p.stdout.readline()
    with pytest.raises(BufferInUse, match=f"is attached: pid {p.pid}"):
        destroy(name)
    p.communicate()
    destroy(name)
    with pytest.raises(BufferNotFound):
        destroy(name)


def test_each_attached_process_is_told_once(name, start):
    p = start(
        "import sys; from shmbuf import Buffer; b = [Buffer.attach(sys.argv[1]) for _ in range(3)]; print(flush=True); sys.stdin.read()",
        name,
    )
    with Buffer.create(name, 10, **SMALL), Buffer.attach(name):
        p.stdout.readline()
        with pytest.raises(
            BufferInUse,
            match=f"is attached: pid {p.pid} \\([^)]*\\), this process \\(.close\\(\\) its handles first\\)\\. Close",
        ):
            destroy(name)
        with pytest.raises(BufferExists) as e:
            Buffer.create(name, 10, **SMALL)
        assert str(e.value).count(f"{p.pid}") == 1, e.value
    with pytest.raises(BufferInUse, match=f"is attached: pid {p.pid} \\([^)]*\\)\\. Close"):
        destroy(name)


def test_a_destroyed_name_can_be_used_again_at_once(name):
    for i in range(3):
        with Buffer.create(name, 10 + i, **SMALL) as buf:
            destroy(name, force=True)
            with Buffer.create(name, 5, **SMALL) as new:
                new.extend(k(i))
                with pytest.raises(StorageLost):
                    buf.put(k(1))
                assert numbers(new) == [i]
        destroy(name)


def test_of_two_creators_one_wins(make_name):
    for _ in range(20):
        name, won, lost, gate = make_name(), [], [], threading.Barrier(3)

        def create(name=name, won=won, lost=lost, gate=gate):
            gate.wait()
            try:
                won.append(Buffer.create(name, 10, **SMALL))
            except BufferExists as e:
                lost.append(e)

        threads = [threading.Thread(target=create) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert (len(won), len(lost)) == (1, 2)
        won[0].close()


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1, -(1 << 60), 1 << 48, 1.0, 2.5, float("nan"), "10", None, True])
def test_a_capacity_that_is_none(name, capacity, nothing_moves):
    with pytest.raises(ValueError, match=r"capacity=.*: a number of rows ≥ 1"):
        Buffer.create(name, capacity, **SMALL)


def test_a_numpy_capacity(name):
    with Buffer.create(name, np.int32(7), **SMALL) as buf:
        assert buf.capacity == 7


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_collectors", 0),
        ("max_collectors", -1),
        ("max_collectors", 65_536),
        ("ring_bytes", 0),
        ("ring_bytes", -1),
        ("ring_bytes", (1 << 34) + 1),
        ("full", "wait"),
        ("full", None),
        ("drain", "nobody"),
        ("drain", None),
        ("exists", True),
        ("timeout", -1),
        ("timeout", float("nan")),
        ("mode", 0o666),
        ("mode", 0o606),
        ("config", {"x": object()}),
        ("config", {"x": 1 << 70}),
    ],
)
def test_a_setting_that_is_none(name, setting, value, nothing_moves):
    with pytest.raises(ValueError) as e:
        Buffer.create(name, 10, **{**SMALL, setting: value})
    assert setting in str(e.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"k": "nonsense"},
        {"k": object},
        {},
        {"k": ("int8", ((1 << 30) + 1,))},
        {"k": ("uint8", (0, 1 << 70))},
        {"k": ("uint8", (0, 1 << 63))},
    ],
)
def test_a_schema_that_cannot_be(name, schema, nothing_moves):
    with pytest.raises(SchemaError):
        Buffer.create(name, 10, schema=schema, drain="caller")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o640])
def test_mode_is_not_masked(name, mode):
    before = os.umask(0o077)
    try:
        Buffer.create(name, 10, mode=mode, **SMALL).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(segment.path_of(name)).st_mode) == mode


# ---- unnamed buffers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_an_unnamed_buffer_dies_with_its_owners_handle(end):
    buf = Buffer.create(None, 10, **SMALL)
    path = segment.path_of(buf.name)
    buf.extend(k(1, 2))
    other = Buffer.attach(buf.name)
    Buffer.attach(buf.name).close()
    assert buf.name.startswith("unnamed.") and os.path.exists(path), "another handle's end is not its own"
    if end == "close":
        buf.close()
    elif end == "with":
        with buf:
            pass
    else:
        del buf
        gc.collect()
    assert not os.path.exists(path)
    assert numbers(other) == [1, 2]
    with pytest.raises(StorageLost):
        other.put(k(3))
    other.close()


CREATE_UNNAMED = """
import os, sys
import numpy as np
from shmbuf import Buffer
b = Buffer.create(None, 10, schema={"k": "int64"}, drain="caller")
b.extend({"k": np.arange(3)})
print(b.name, flush=True)
if sys.argv[1] == "wait": sys.stdin.read()
elif sys.argv[1] == "raise": raise SystemExit(0)
"""


@pytest.mark.parametrize("end", ["return", "raise"])
def test_an_unnamed_buffer_dies_with_its_process(python, end):
    assert not os.path.exists(segment.path_of(python(CREATE_UNNAMED, end)))


def test_an_unnamed_buffer_whose_owner_was_killed_is_collected_by_the_next_create(start, name):
    p = start(CREATE_UNNAMED, "wait")
    orphan = p.stdout.readline().strip()
    Buffer.create(name, 10, **SMALL).close()
    assert os.path.exists(segment.path_of(orphan)), "its owner lives"
    p.send_signal(signal.SIGKILL)
    p.wait()
    destroy(name)
    Buffer.create(name, 10, **SMALL).close()
    assert not os.path.exists(segment.path_of(orphan))


def test_an_unnamed_buffer_is_not_collected_while_anybody_is_attached(start, name):
    p = start(CREATE_UNNAMED, "wait")
    orphan = p.stdout.readline().strip()
    with Buffer.attach(orphan) as heir:
        p.send_signal(signal.SIGKILL)
        p.wait()
        Buffer.create(name, 10, **SMALL).close()
        heir.extend(k(7))
        assert numbers(heir) == [0, 1, 2, 7]
    destroy(name)
    Buffer.create(name, 10, **SMALL).close()
    assert not os.path.exists(segment.path_of(orphan))


def test_a_named_buffer_survives_its_creator(python, name):
    python(
        "import sys, numpy as np; from shmbuf import Buffer; Buffer.create(sys.argv[1], 10, drain='caller').extend({'k': np.arange(3)})",
        name,
    )
    with Buffer.attach(name) as buf:
        assert numbers(buf) == [0, 1, 2]


# ---- what a segment is to others -----------------------------------------------------------------------------------


def test_plain_posix_ipc_opens_the_segment_and_sees_the_magic(name):
    with Buffer.create(name, 10, **SMALL) as buf:
        buf.extend(k(1))
        size = os.path.getsize(segment.path_of(name))
        shm = posix_ipc.SharedMemory(f"/shmbuf.{os.getuid()}.{name}")
        with mmap.mmap(shm.fd, shm.size, prot=mmap.PROT_READ) as m:
            assert m[:8] == b"SHMBUF\r\n" and shm.size == size
        shm.close_fd()
        assert os.path.getsize(segment.path_of(name)) == size and numbers(buf) == [1]
    posix_ipc.unlink_shared_memory(f"/shmbuf.{os.getuid()}.{name}")
    with pytest.raises(BufferNotFound):
        Buffer.attach(name)
