"""Memory: too little of it is an error that names the place, the numbers and the remedy, and leaves nothing behind; how much of it,
and how many descriptors, a buffer takes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughMemory, memory, segment
from shmbuf._extension import native
from shmbuf.schema import Schema
from tests.unit.helpers import SPEC, open_files, raw, rows, same, stored

# ---- too little memory, by faked figures ---------------------------------------------------------------------------

PLACES = {
    "shm_free": ("/dev/shm", "Enlarge it"),
    "mem_available": ("the machine (MemAvailable)", "Free memory"),
    "cgroup_headroom": ("the memory cgroup", "Raise the container's or job's memory limit"),
}
BIG = {
    "schema": {"x": ("uint8", (1000,))},
    "drain": "caller",
    "ring_bytes": 1 << 20,
}
NEED = 1_000_000 + (1 << 20) + native.bookkeeping_bytes(1000, False)  # of capacity 1000
HEADROOM = 16 << 20


@pytest.fixture
def left(monkeypatch):
    """left(place, bytes): that place has so much, the others plenty."""

    def left(place: str, bytes_: int | None) -> None:
        for f in PLACES:
            monkeypatch.setattr(memory, f, lambda f=f: bytes_ if f == place else 1 << 50)

    return left


@pytest.mark.parametrize("place", PLACES)
def test_too_little_left_names_the_place_the_numbers_and_the_remedy(name, left, place, nothing_moves):
    where, remedy = PLACES[place]
    left(place, HEADROOM + 2_000_000)
    with pytest.raises(NotEnoughMemory) as e:
        Buffer.create(name, 1000, **BIG)
    text = str(e.value)
    if where == "/dev/shm":
        where = f"/dev/shm of {memory.shm_size():,} bytes"
    assert isinstance(e.value, MemoryError)
    assert (
        f"1,000 rows × 1,000 bytes, with one ring of 1,048,576, needs {NEED:,} bytes, {where} has {HEADROOM + 2_000_000:,} left. {remedy}"
        in text
    )
    assert "choose a smaller capacity" in text and "Nothing was created" in text


@pytest.mark.parametrize("place", PLACES)
def test_the_limit_is_exact(name, left, place):
    left(place, HEADROOM + NEED)
    with Buffer.create(name, 1000, **BIG) as buf:
        buf.extend({"x": np.zeros((3, 1000), np.uint8)})


@pytest.mark.parametrize("place", PLACES)
def test_not_even_the_configuration_fits(name, left, place, nothing_moves):
    left(place, 1000)
    with pytest.raises(NotEnoughMemory, match="the buffer's configuration needs"):
        Buffer.create(name, 1000, drain="caller")


def test_figures_that_the_system_does_not_give_do_not_count(name, monkeypatch):
    monkeypatch.setattr(memory, "mem_available", lambda: None)
    monkeypatch.setattr(memory, "cgroup_headroom", lambda: None)
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
    with pytest.raises(NotEnoughMemory, match=r"4,611,686,0\d\d,"):
        Buffer.create(name, (1 << 32) - 1, schema={"x": ("uint8", (1 << 30,))}, drain="caller")


def fake_files(monkeypatch, files: dict[str, str]) -> None:
    def fake_open(path, *args):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(memory, "open", fake_open, raising=False)


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
    assert memory.cgroup_headroom() == headroom


def test_mem_available(monkeypatch):
    assert 0 < memory.mem_available() < 1 << 50
    fake_files(monkeypatch, {"/proc/meminfo": "MemTotal: 10 kB\nMemAvailable:     7 kB\n"})
    assert memory.mem_available() == 7 * 1024


# ---- too little memory, really: a small /dev/shm of one's own ------------------------------------------------------

SMALL_SHM = """
import os, sys
import numpy as np
from shmbuf import Buffer, NotEnoughMemory, destroy, memory, segment
from shmbuf._extension import native
MiB = 1 << 20
def free(): return memory.shm_free()
def files(): return sorted(os.listdir("/dev/shm"))
def blocks(name): return os.stat(segment.path_of(name)).st_blocks * 512
def raises(call):
    try: call()
    except NotEnoughMemory as e: return str(e)
    raise AssertionError("did not raise")
def unchecked(): memory.require = lambda need, what, parts=None: None  # so that the kernel says no, not the look ahead
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
assert "/dev/shm of " in text and "--shm-size" in text and "100,000 rows" in text and f"needs {100_000_000 + (4 << 20) + native.bookkeeping_bytes(100_000, False):,} bytes" in text, text
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
    assert "/dev/shm of " in text and files() == [] and free() == before, (text, files(), before - free())
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


FEW_FILES = """
import errno, os, resource, sys
from shmbuf import Buffer, ShmbufError, TooManyOpenFiles, destroy
name = sys.argv[1]
first = Buffer.create(name, 10, schema={"k": "int64"}, drain="caller")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
others = []
while True:
    try: others.append(os.dup(0))
    except OSError: break
for left in range(2):
    if left: os.close(others.pop())
    for call in (lambda: Buffer.create(None, 10, drain="caller"), lambda: Buffer.create(None, 10, drain="process"),
                 lambda: Buffer.attach(name), lambda: Buffer.attach(name, readonly=True, timeout=60), lambda: destroy(name)):
        try: call()
        except TooManyOpenFiles as e:
            assert isinstance(e, OSError) and isinstance(e, ShmbufError) and e.errno == errno.EMFILE, repr(e)
            assert "64" in str(e) and "RLIMIT_NOFILE" in str(e) and "`ulimit -n`" in str(e), e
        else: raise AssertionError("did not raise")
for fd in others: os.close(fd)
Buffer.attach(name).close()
first.close()
destroy(name)
assert not [f for f in os.listdir("/dev/shm") if f.startswith(f"shmbuf.{os.getuid()}.{name}")]
"""


def test_no_descriptor_left_is_an_error_that_says_the_limit(python, name):
    python(FEW_FILES, name)


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


@pytest.mark.parametrize("ring", [1 << 20, 1 << 33])
def test_device_memory_is_the_rows_and_the_rings(ring):
    schema = Schema.from_spec({"x": ("uint8", (1000,))})
    found = memory.of(schema, 4096, 8, ring, False, device_rings=3)
    assert found.device == 4096 * schema.row_bytes + 3 * ring
