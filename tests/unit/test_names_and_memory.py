"""Names: allowed, taken, unknown, gone. Memory: too little of it is an error that names the place, the numbers and the remedy,
and leaves nothing behind."""

from __future__ import annotations

import gc
import io
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
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
    NotEnoughMemory,
    Schema,
    SchemaError,
    StorageLost,
    destroy,
    segment,
)
from tests.conftest import left_behind
from tests.unit.helpers import SPEC, numbers, open_files, raw, rows, same, stored, unmoved

SMALL = {"schema": {"k": "int64"}, "drain": "caller", "ring_bytes": 4096, "max_collectors": 4}


def k(*numbers: int) -> dict:
    return {"k": np.array(numbers, np.int64)}


@pytest.fixture
def nothing_moves():
    """No file, no descriptor and no mapping more than before."""

    def look():
        with open("/proc/self/maps") as f:
            return left_behind(), open_files(), sum("shmbuf." in line or "/dev/shm/#" in line for line in f)

    before = look()
    yield
    if look() != before:
        gc.collect()  # slow in a large process
    assert look() == before


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
    with pytest.raises(BufferFormatError, match="magic: this is not a shmbuf segment"):
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
        ("mode", 0o604),
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


# ---- too little memory, by faked figures ---------------------------------------------------------------------------

PLACES = {
    "_shm_free": ("/dev/shm", "Enlarge it"),
    "_mem_available": ("the machine (MemAvailable)", "Free memory"),
    "_cgroup_headroom": ("the memory cgroup", "Raise the container's or job's memory limit"),
}
BIG = {
    "schema": {"x": ("uint8", (1000,))},
    "drain": "caller",
    "ring_bytes": 1 << 20,
}  # capacity 1000: 1,000,000 + 1,048,576 bytes
HEADROOM = 16 << 20


@pytest.fixture
def left(monkeypatch):
    """left(place, bytes): that place has so much, the others plenty."""

    def left(place: str, bytes_: int | None) -> None:
        for f in PLACES:
            monkeypatch.setattr(segment, f, lambda f=f: bytes_ if f == place else 1 << 50)

    return left


@pytest.mark.parametrize("place", PLACES)
def test_too_little_left_names_the_place_the_numbers_and_the_remedy(name, left, place, nothing_moves):
    where, remedy = PLACES[place]
    left(place, HEADROOM + 2_000_000)
    with pytest.raises(NotEnoughMemory) as e:
        Buffer.create(name, 1000, **BIG)
    text = str(e.value)
    assert isinstance(e.value, MemoryError)
    assert (
        f"1,000 rows × 1,000 bytes, with one ring of 1,048,576, needs 2,048,576 bytes, {where} has {HEADROOM + 2_000_000:,} left. {remedy}"
        in text
    )
    assert "choose a smaller capacity" in text and "Nothing was created" in text


@pytest.mark.parametrize("place", PLACES)
def test_the_limit_is_exact(name, left, place):
    left(place, HEADROOM + 2_048_576)
    with Buffer.create(name, 1000, **BIG) as buf:
        buf.extend({"x": np.zeros((3, 1000), np.uint8)})


@pytest.mark.parametrize("place", PLACES)
def test_not_even_the_configuration_fits(name, left, place, nothing_moves):
    left(place, 1000)
    with pytest.raises(NotEnoughMemory, match="the buffer's configuration needs"):
        Buffer.create(name, 1000, drain="caller")


def test_figures_that_the_system_does_not_give_do_not_count(name, monkeypatch):
    monkeypatch.setattr(segment, "_mem_available", lambda: None)
    monkeypatch.setattr(segment, "_cgroup_headroom", lambda: None)
    Buffer.create(name, 1000, **BIG).close()


@pytest.mark.parametrize("place", PLACES)
def test_a_first_put_that_cannot_be_funded_leaves_the_buffer_as_it_was(name, left, place):
    with Buffer.create(name, 1000, drain="caller", ring_bytes=1 << 20) as buf:
        size = os.path.getsize(segment.path_of(name))
        left(place, HEADROOM + 2_000_000)
        with pytest.raises(NotEnoughMemory):
            buf.put({"x": np.zeros((3, 1000), np.uint8)})
        assert buf.schema is None and len(buf) == 0 and os.path.getsize(segment.path_of(name)) == size
        buf.extend({"x": np.zeros((3, 10), np.uint8)})
        assert len(buf) == 3, "a smaller one fits, and nobody had decided the schema yet"


def test_numbers_beyond_64_bits(name, nothing_moves):
    with pytest.raises(NotEnoughMemory, match="302,231,454,903,"):
        Buffer.create(name, (1 << 48) - 1, schema={"x": ("uint8", (1 << 30,))}, drain="caller")


def fake_files(monkeypatch, files: dict[str, str]) -> None:
    def fake_open(path, *args):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(segment, "open", fake_open, raising=False)


@pytest.mark.parametrize(
    ("files", "headroom"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/\n"}, None),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/memory.current": "5\n",
            },
            None,
        ),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "100\n",
                "/sys/fs/cgroup/memory.current": "30\n",
            },
            70,
        ),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "100\n",
                "/sys/fs/cgroup/memory.current": "130\n",
            },
            0,
        ),
        # file cache can be taken back; the tightest cgroup above counts, and one without a limit does not
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/memory.max": "100\n",
                "/sys/fs/cgroup/a/b/memory.current": "90\n",
                "/sys/fs/cgroup/a/b/memory.stat": "anon 5\ninactive_file 40\nactive_file 3\n",
                "/sys/fs/cgroup/a/memory.max": "120\n",
                "/sys/fs/cgroup/a/memory.current": "110\n",
                "/sys/fs/cgroup/memory.max": "max\n",
            },
            10,
        ),
        # version 1, beside others
        (
            {
                "/proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/job\n0::/unified\n",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400\n",
                "/sys/fs/cgroup/memory/job/memory.stat": "inactive_file 9\ntotal_inactive_file 50\n",
            },
            650,
        ),
    ],
)
def test_what_the_cgroup_leaves(monkeypatch, files, headroom):
    fake_files(monkeypatch, files)
    assert segment._cgroup_headroom() == headroom


def test_mem_available(monkeypatch):
    assert 0 < segment._mem_available() < 1 << 50
    fake_files(monkeypatch, {"/proc/meminfo": "MemTotal: 10 kB\nMemAvailable:     7 kB\n"})
    assert segment._mem_available() == 7 * 1024


# ---- too little memory, really: a small /dev/shm of one's own ------------------------------------------------------

SMALL_SHM = """
import os, sys
import numpy as np
from shmbuf import Buffer, NotEnoughMemory, destroy, segment
MiB = 1 << 20
def free(): return segment._shm_free()
def files(): return sorted(os.listdir("/dev/shm"))
def blocks(name): return os.stat(segment.path_of(name)).st_blocks * 512
def raises(call):
    try: call()
    except NotEnoughMemory as e: return str(e)
    raise AssertionError("did not raise")
def unchecked(): segment.require_memory = lambda need, what: None  # so that the kernel says no, not the look ahead
def fill(leave):
    with open("/dev/shm/filler", "wb") as f: os.posix_fallocate(f.fileno(), 0, free() - leave)
x = lambda n, size: {"x": np.full((n, size), 7, np.uint8)}
"""


@pytest.fixture(scope="module")
def unshare():
    """Runs code where /dev/shm is a tmpfs of `size` of its own."""
    probe = (
        subprocess.run(
            ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True, text=True
        )
        if shutil.which("unshare")
        else None
    )
    if probe is None or probe.returncode:
        pytest.skip(f"a mount namespace is not permitted here: {probe.stderr.strip() if probe else 'no unshare'}")

    def run(size: str, code: str) -> None:
        mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c "$1"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, sys.executable, SMALL_SHM + code],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_small_shm_says_no_early_and_keeps_nothing(unshare):
    unshare(
        "64m",
        """
before = free()
text = raises(lambda: Buffer.create("big", 100_000, schema={"x": ("uint8", (1000,))}, drain="caller"))
assert "/dev/shm has" in text and "--shm-size" in text and "100,000 rows" in text and "needs 104,194,304 bytes" in text, text
assert files() == [] and free() == before
with Buffer.create("fits", 20_000, schema={"x": ("uint8", (1000,))}, drain="caller") as b:
    b.extend(x(3, 1000))
destroy("fits")
assert files() == [] and free() == before
""",
    )


def test_small_shm_that_says_no_late_is_an_error_and_keeps_nothing(unshare):
    """posix_fallocate meets ENOSPC: no SIGBUS, and the part it had got is given back."""
    unshare(
        "64m",
        """
unchecked()
before = free()
for _ in range(3):
    text = raises(lambda: Buffer.create("big", 100_000, schema={"x": ("uint8", (1000,))}, drain="caller"))
    assert "/dev/shm has" in text and files() == [] and free() == before, (text, files(), before - free())
fill(100 << 10)
left = free()
text = raises(lambda: Buffer.create("any", 10, drain="caller"))
assert "the buffer's configuration needs" in text and files() == ["filler"] and free() == left
""",
    )


def test_small_shm_a_first_put_that_meets_enospc_leaves_the_small_segment_usable(unshare):
    unshare(
        "64m",
        """
unchecked()
with Buffer.create("b", 100_000, drain="caller", ring_bytes=MiB) as b, Buffer.attach("b") as c:
    before, size = blocks("b"), os.path.getsize(segment.path_of("b"))
    for h in (b, c, b):
        raises(lambda: h.put(x(2, 1000)))
        assert (blocks("b"), os.path.getsize(segment.path_of("b"))) == (before, size)
        assert b.schema is None and len(b) == 0 and c.stats()["put_rows"] == 0
    c.extend(x(5, 100))
    b.extend(x(6, 100))
    assert len(b) == len(c) == 11 and (b.draw(20)[0]["x"] == 7).all()
""",
    )


def test_small_shm_a_ring_that_cannot_be_funded(unshare):
    unshare(
        "64m",
        """
with Buffer.create("b", 10_000, schema={"x": ("uint8", (1000,))}, drain="caller", ring_bytes=8 * MiB) as b, Buffer.attach("b") as c:
    b.extend(x(5, 1000))
    fill(4 * MiB)
    left, used = free(), blocks("b")
    for _ in range(3):
        text = raises(lambda: c.put(x(2, 1000)))
        assert "no 8,388,608 bytes left for this collector's ring" in text and "Nothing was put" in text, text
        assert free() == left and blocks("b") == used and len(b.collectors()) == 1 and b.stats()["put_rows"] == 5
    assert (c.draw(20)[0]["x"] == 7).all()
    b.extend(x(5, 1000))
    os.unlink("/dev/shm/filler")
    c.extend(x(3, 1000))
    assert len(b) == 13 and len(b.collectors()) == 2
    grown = blocks("b")
    c.close()
    b.drain(); b._handle.sweep()
    assert blocks("b") <= grown - 8 * MiB, "the ring of a closed handle is given back"
""",
    )


def test_small_shm_filled_to_the_brim_never_faults(unshare):
    """All memory was reserved before the first row, so a full /dev/shm afterwards hurts nobody."""
    unshare(
        "64m",
        """
with Buffer.create("b", 20_000, schema={"x": ("uint8", (1000,))}, drain="caller", ring_bytes=MiB) as b:
    b.put(x(1, 1000))
    fill(0)
    for _ in range(50): b.extend(x(1000, 1000))
    b.empty(); b.extend(x(20_000, 1000))
    assert len(b) == 20_000 and (b.gather(np.arange(*b.window))["x"] == 7).all()
""",
    )


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


def test_at_most_three_descriptors_per_handle(make_name):
    before = open_files()
    with Buffer.create(make_name(), 10, drain="thread") as buf:
        assert open_files() - before <= 3
        buf.extend(rows(0, 3))
        buf.draw(2)
        assert open_files() - before <= 3
        several = [Buffer.attach(buf.name) for _ in range(10)]
        for other in several:
            other.extend(rows(3))
            other.draw(1)
        assert open_files() - before <= 3 * 11
        for other in several:
            other.close()
        assert open_files() - before <= 3
    assert open_files() == before


@pytest.mark.parametrize(
    ("spec", "capacity"),
    [
        ({"k": "bool"}, 1),
        ({"k": "bool"}, 100_000),
        (SPEC, 10_000),
        (
            {
                "obs": ("float32", (17,)),
                "action": ("float32", (6,)),
                "next": {"obs": ("float32", (17,)), "reward": "float32", "done": "bool", "terminated": "bool"},
            },
            50_000,
        ),
        ({"obs": ("uint8", (4, 84, 84)), "next": {"obs": ("uint8", (4, 84, 84))}}, 200),
    ],
)
@pytest.mark.parametrize("collectors", [1, 3])
def test_segment_size(make_name, spec, capacity, collectors):
    """segment ≤ capacity × (row bytes + 48) + 1 MB + rings in use."""
    with Buffer.create(make_name(), capacity, schema=spec, drain="caller") as buf:
        handles = [buf, *(Buffer.attach(buf.name) for _ in range(collectors - 1))]
        assert buf.schema is not None
        n = min(capacity, 50)
        for h in handles:
            h.put(
                {
                    key: np.zeros((n, *c.shape), c.numpy)
                    for key, c in zip(buf.schema.keys, buf.schema.columns, strict=True)
                }
            )
        ring = buf.collectors()[0]["ring_bytes"]
        memory = os.stat(segment.path_of(buf.name)).st_blocks * 512
        assert memory <= capacity * (buf.schema.payload_bytes + 48) + 1_000_000 + collectors * ring
        assert memory >= capacity * buf.schema.row_bytes + collectors * ring, "all of it is there already"
        for h in handles:
            h.close()


def test_everything_else_in_the_file_stays_untouched_by_odd_row_sizes(make_name):
    """Rows of 1 to 40 bytes in a buffer of prime capacity: neighbours keep their bytes."""
    for size in (1, 3, 7, 8, 9, 40):
        with Buffer.create(make_name(), 13, schema={"x": ("uint8", (size,))}, drain="caller", ring_bytes=4096) as buf:
            data = np.arange(30 * size, dtype=np.uint64).astype(np.uint8).reshape(30, size)
            for i in range(30):
                buf.put({"x": data[i : i + 1]})
            buf.drain()
            assert raw(stored(buf)["x"]) == raw(data[17:]) and same(buf.gather([20]), {"x": data[20:21]})
