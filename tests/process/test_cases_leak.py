"""Class LEAK of cases from public bug trackers: leaks, limits, SIGBUS, memory blow-up, use after close. Each test is named after its case."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from shmbuf import Buffer, NotEnoughMemory, destroy, segment
from shmbuf._extension import native
from tests import oracle
from tests.process import workers
from tests.process.test_cases_info import family, shminfo_json
from tests.process.test_kills import run_supervisor
from tests.unit.helpers import open_files

SOAK = bool(os.environ.get("SHMBUF_SOAK"))


def in_own_shm(size: str, code: str, timeout: float = 110) -> str:
    """Run code where /dev/shm is a tmpfs of ``size`` of its own; what it printed."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"a mount namespace is not permitted here: {probe.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount + ' && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- B088: file descriptors do not grow with samples ---------------------------------------------------------------


def b088(name: str, batches: int) -> None:
    """In a fresh interpreter with 256 descriptors at most; 64 collectors in processes of their own, and two that sample."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    stop, go = workers.ForkedEvent(), workers.ForkedEvent()
    before = open_files()
    with (
        Buffer.create(name, 1000, schema=oracle.SCHEMA, ring_bytes=1 << 14, max_collectors=64) as buffer,
        family() as f,
    ):
        assert open_files() - before <= 3, "what a handle takes"
        for who in range(64):
            f.fork(hold, name, who, stop)
        f.fork(keep_batches, name, batches, go)
        buffer.wait_rows(64, timeout=60)
        go.set()
        keep_batches(name, batches, go)
        assert len([c for c in buffer.collectors() if c["state"] == "alive"]) == 64
        stop.set()
        assert f.wait_all() == [0] * 65
        assert open_files() - before <= 3
    destroy(name)


def hold(name: str, who: int, stop) -> None:
    with Buffer.attach(name) as buffer:
        buffer.put(oracle.make_rows(who, 0, 1))
        files = open_files()
        while not stop.is_set():
            time.sleep(0.01)
        assert open_files() == files


def keep_batches(name: str, batches: int, go) -> None:
    with Buffer.attach(name) as buffer:
        while not go.is_set():
            time.sleep(0.001)
        kept = [buffer.draw(8)]
        files = open_files()
        kept += [buffer.draw(8) for _ in range(batches)]
        assert open_files() == files
        for rows, _ in kept[:: batches // 100]:
            oracle.check_rows(rows)


def test_b088_kept_samples_take_no_descriptors(name):
    """10,000 kept batches in each of two processes."""
    run_supervisor(f"from tests.process.test_cases_leak import b088; b088({name!r}, 10_000)")


def test_b088_kept_samples_of_tensors_take_no_descriptors(name):
    """10,000 (CI: 2,000), kept, at the face."""
    torch = pytest.importorskip("torch")
    from tensordict import TensorDict

    from shmbuf import ShmStorage, TensorDictReplayBuffer

    with TensorDictReplayBuffer(storage=ShmStorage(100, name=name), batch_size=4) as rb:
        rb.extend(TensorDict({"a": torch.arange(50.0)[:, None].expand(50, 3), "b": torch.arange(50.0)}, [50]))
        kept = [rb.sample()]
        files = open_files()
        kept += [rb.sample() for _ in range(10_000 if SOAK else 2000)]
        assert open_files() == files
        assert not any(t.is_shared() for t in kept[-1].values())
        rb.extend(TensorDict({"a": torch.zeros(100, 3), "b": torch.zeros(100)}, [100]))
        assert all((batch["a"] == batch["b"][:, None]).all() for batch in kept) and sum(b["b"].sum() for b in kept) > 0
    destroy(name)


# ---- B090: too little shared memory is an error at create ----------------------------------------------------------

TOO_LITTLE = """
import os
import numpy as np
from shmbuf import Buffer, NotEnoughMemory, destroy
def create(name, mib):
    return Buffer.create(name, mib, schema={"x": ("uint8", (1 << 20,))}, drain="caller", ring_bytes=1 << 20, max_collectors=4)
def refused(*args):
    try: create(*args)
    except NotEnoughMemory as e: return str(e)
    raise AssertionError("did not raise")
s = os.statvfs("/dev/shm")
free = s.f_bavail * s.f_frsize
text = refused("big", 1024)
assert os.listdir("/dev/shm") == []
assert os.statvfs("/dev/shm").f_bavail * s.f_frsize == free
with create("first", 40) as first:
    second = refused("second", 40)
    assert len(os.listdir("/dev/shm")) == 1
    first.extend({"x": np.full((40, 1 << 20), 7, "u1")})   # every page of it is there
    assert len(first) == 40 and (first.gather([0, 39])["x"] == 7).all()
    assert "needs 4" in second and "/dev/shm" in second, second
destroy("first")
assert os.listdir("/dev/shm") == []
print(free, text)
"""


def test_b090_too_little_shared_memory_is_an_error_at_create():
    free, text = in_own_shm("64m", TOO_LITTLE).split(maxsplit=1)
    needed = int(re.search(r"needs ([\d,]+) bytes", text)[1].replace(",", ""))
    assert 1 << 30 <= needed < 1.02 * (1 << 30)
    left = int(re.search(r"/dev/shm.{0,40} has ([\d,]+) left", text)[1].replace(",", ""))
    assert int(free) - (1 << 20) < left <= int(free)  # a part of it is the configuration's
    assert "--shm-size" in text and "Nothing was created" in text, text


def test_b090_the_text_has_the_total_too():
    text = in_own_shm("64m", TOO_LITTLE)
    assert f"{64 << 20:,}" in text, f"how large /dev/shm is: {text}"


# ---- B092: tell the user the price before allocating ---------------------------------------------------------------

ATARI = {"obs": ("uint8", (3, 84, 84)), "next": {"obs": ("uint8", (3, 84, 84))}}


def test_b092_too_large_is_said_at_once(name):
    files = sorted(os.listdir(segment.SHM_DIR))
    with pytest.raises(NotEnoughMemory) as e:
        Buffer.create(name, 10**9, schema=ATARI, drain="caller")
    needed = int(re.search(r"needs ([\d,]+) bytes", str(e.value))[1].replace(",", ""))
    assert "1,000,000,000 rows × 42,336 bytes" in str(e.value)
    assert 10**9 * 42_336 <= needed <= 1.01 * 10**9 * 42_336
    assert name not in segment.names() and {f for f in os.listdir(segment.SHM_DIR) if name in f} <= set(files)


def test_b092_what_is_used_is_what_was_said(name):
    """The stated parts add up to what /dev/shm gives, within 1 %; rows are what arithmetic says."""
    with Buffer.create(name, 2000, schema=ATARI, drain="caller") as buffer:
        s = shminfo_json("show", name)["segment"]
        assert s["rows_bytes"] == 2000 * 2 * 21_168 == 84_672_000
        stated = sum(s[part + "_bytes"] for part in ("rows", "configuration", "schema", "bookkeeping"))
        used = os.stat(segment.path_of(name)).st_blocks * 512
        assert abs(used - stated) <= 0.01 * stated and used - s["rows_bytes"] <= 2000 * 48 + 1_000_000
        row = {"obs": np.zeros((1, 3, 84, 84), "u1"), "next": {"obs": np.zeros((1, 3, 84, 84), "u1")}}
        for _ in range(3000):
            buffer.put(row)
        buffer.drain()
        ring = buffer.collectors()[0]["ring_bytes"]
        assert len(buffer) == 2000
        grown = os.stat(segment.path_of(name)).st_blocks * 512 - used
        assert ring <= grown <= 1.01 * ring, "one ring, as soon as somebody puts, and nothing more"
    destroy(name)


# ---- B093: steady state is flat ------------------------------------------------------------------------------------


def resident(pid: int) -> dict[str, int]:
    """Bytes by kind: VmRSS and its parts RssAnon, RssFile, RssShmem."""
    with open(f"/proc/{pid}/status") as f:
        return {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in f if line.startswith(("VmRSS", "Rss", "VmHWM"))
        }


def put_growing(name: str, until_rows: list[int], report, go) -> None:
    """Trajectories of 10 to 500 rows; waits for go[0] to reach i before it passes until_rows[i]."""
    with Buffer.attach(name) as buffer:
        total, n = 0, 10
        for stage, rows in enumerate(until_rows):
            while go[0] < stage:
                time.sleep(0.001)
            while total < rows:
                done = np.zeros(n, bool)
                done[-1] = True
                buffer.put({"x": np.full((n, 100), total, np.float32), "done": done})
                total += n
                n = n + 7 if n < 490 else 10
            report[0] = stage + 1
        while go[0] < len(until_rows):
            time.sleep(0.001)


def sample_on(name: str, report, stop) -> None:
    with Buffer.attach(name) as buffer:
        while not stop.is_set():
            rows, _, _ = buffer.draw_slices(8, 5, timeout=60)
            assert (rows["x"] == rows["x"][:, :1]).all()
            report[1] += 1


def b093(name: str, directory: str) -> None:
    words = oracle.Acks(f"{directory}/words").counts
    report, go, stop = words[:4], words[8:9], workers.ForkedEvent()
    spec = {"x": ("float32", (100,)), "done": "bool"}
    with Buffer.create(name, 1000, schema=spec, ring_bytes=1 << 18, max_collectors=4) as buffer, family() as f:
        pids = [
            f.fork(put_growing, name, [40_000, 200_000], report, go),
            f.fork(sample_on, name, report, stop),
            os.getpid(),
        ]

        def measure(stage: int) -> list[dict]:
            deadline = time.monotonic() + 100
            while report[0] < stage:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            sampled = report[1]
            while report[1] < sampled + 3000:
                time.sleep(0.005)
            assert buffer.drain() is not None and len(buffer) == 1000
            shm.add(os.stat(segment.path_of(name)).st_blocks)
            return [resident(pid) for pid in pids]

        shm: set[int] = set()
        first = measure(1)
        go[0] = 1
        last = measure(2)
        go[0] = 2
        stop.set()
        assert f.wait_all() == [0, 0]
        assert len(shm) == 1, "/dev/shm"
        for who, a, b in zip(("collector", "sampler", "creator"), first, last, strict=True):
            # Not RssFile: the code of libraries, which the kernel pages in as it likes. CPython's heap grows by 1 MiB at a time,
            # more than 2 % of so small a process; keeping one row of each put, or one batch of each draw, would be 60 MB.
            grown = sum(b[kind] - a[kind] for kind in ("RssAnon", "RssShmem"))
            assert abs(grown) <= max(0.02 * a["VmRSS"], 2 << 20), f"the {who} after 40 fills: {a}, after 200: {b}"
    destroy(name)


def test_b093_steady_state_is_flat(name, tmp_path):
    """200 capacities of trajectories of 10 to 500 rows."""
    run_supervisor(f"from tests.process.test_cases_leak import b093; b093({name!r}, {str(tmp_path)!r})")


# ---- B095: views in, copies out ------------------------------------------------------------------------------------


def peak_growth(call: Callable) -> int:
    """By how many bytes the peak of this process's memory exceeds what it has now."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = resident(os.getpid())["VmRSS"]
    call()
    return resident(os.getpid())["VmHWM"] - before


def test_b095_views_in_copies_out(name):
    torch = pytest.importorskip("torch")
    from tensordict import TensorDict

    from shmbuf import ShmStorage, TensorDictReplayBuffer

    big = torch.arange(8_000_000, dtype=torch.float32).reshape(1_000_000, 8)
    views = {
        "every thousandth row": big[::1000],
        "rows of a transposed": big.t()[:8].t()[:500],
        "transposed storage": big[:8, :8].t(),
        "one row, expanded": big[:1].expand(1000, 8),
        "rows of stride 0": big[:1000, :1].expand(1000, 8),
        "a piece of a split": torch.split(big, 1000)[17],
        "backwards, by index": big[torch.arange(999, -1, -1)],
    }
    spec = {"x": ("float32", (8,))}
    with TensorDictReplayBuffer(storage=ShmStorage(2000, name=name, schema=spec, drain="caller")) as rb:
        rb.extend(TensorDict({"x": big[:2000]}, [2000]))  # pages of the ring and the rows are there
        address, total = big.data_ptr(), 2000
        for what, view in views.items():
            grown = peak_growth(lambda v=view: rb.extend(TensorDict({"x": v}, [len(v)])))
            assert grown < 8 << 20, f"{what}: {grown:,} bytes more for {view.numel() * 4:,} bytes of rows"
            total += len(view)
            ids = np.arange(total - len(view), total)
            assert (rb.buffer.gather(ids)["x"] == view.contiguous().numpy()).all(), what
            assert big.data_ptr() == address and not big.is_shared() and rb.write_count == total, what
        rb.add(TensorDict({"x": big[7, :1].expand(8)}, []))
        assert (rb.buffer.gather([total])["x"] == 56).all()
        rb.extend(TensorDict({"x": big.t()[:8].t()}, [1_000_000]))
        assert (rb[:]["x"].sort(0)[0] == big[-2000:]).all()
        out = rb.sample(100)["x"]
        assert out.is_contiguous() and out.untyped_storage().nbytes() < 100 * 8 * 4 + 4096
        out.zero_()
        assert big.data_ptr() == address and not big.is_shared() and big[1, 0] == 8 and (rb[:]["x"] > 0).all()
    destroy(name)


# ---- B097: close with views that are still referenced --------------------------------------------------------------


def test_b097_close_with_arrays_that_are_still_referenced(name):
    Buffer.create(name, 10, schema=oracle.SCHEMA, drain="caller").close()
    with Buffer.attach(name) as buffer:
        buffer.extend(oracle.make_rows(1, 0, 10))
    kept = []
    with pytest.raises(ValueError, match=r"^user$") as e, Buffer.attach(name) as buffer:
        kept.append(buffer.draw(5))
        raise ValueError("user")
    assert e.value.__context__ is None and buffer.closed
    with Buffer.attach(name) as buffer:
        kept += [buffer.draw(5), (buffer.gather(range(10)), None)]
    assert buffer.closed
    for rows, _ in kept:
        oracle.check_rows(rows)
    destroy(name)
    for rows, _ in kept:
        oracle.check_rows(rows)


# ---- B098: 64 fast producers ---------------------------------------------------------------------------------------

FRAME = {"obs": ("uint8", (84, 84, 4)), "k": "int32"}  # 28,228 bytes


def put_frames(name: str, who: int, report, stop) -> None:
    row = {"obs": np.full((1, 84, 84, 4), who, np.uint8), "k": np.zeros(1, np.int32)}
    with Buffer.attach(name) as buffer:
        while not stop.is_set():
            report[who] += buffer.put(row, timeout=60).rows
            report[64 + who] += 1


def b098(name: str, directory: str, full: str, seconds: float) -> None:
    """The writer at a tenth: somebody holds its role nine tenths of the time and does nothing."""
    report, stop = oracle.Acks(f"{directory}/report").counts, workers.ForkedEvent()
    capacity, collectors = 500, 64
    with (
        Buffer.create(
            name, capacity, schema=FRAME, ring_bytes=1 << 18, max_collectors=collectors, full=full, drain="thread"
        ) as buffer,
        family() as f,
    ):
        used = lambda: os.stat(segment.path_of(name)).st_blocks * 512  # noqa: E731
        ring = native.ring_stride(native.ring_bytes(1 << 18, buffer.schema.row_bytes), False)
        price = used() + collectors * ring
        holder = segment.attach(name, presence=False)
        pids = [f.fork(put_frames, name, who, report, stop) for who in range(collectors)]
        deadline = time.monotonic() + 60
        while not (report[64:128] > 0).all():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert used() == price, "the rows, and a ring for each of 64"
        first = sum(map(private, pids))
        began = time.monotonic()
        while time.monotonic() - began < seconds or not (len(buffer) == capacity and held_up(buffer, full)):
            assert time.monotonic() - began < seconds + 60, buffer.stats()
            if holder.try_take_role():
                time.sleep(0.009)
                holder.give_back_role()
            time.sleep(0.001)
        assert used() == price
        last = sum(map(private, pids))
        assert last <= 1.02 * first, f"{last:,} bytes, {first:,} at the start"
        holder.close()
        stop.set()
        assert f.wait_all() == [0] * collectors
        while any(c["ring_used"] for c in buffer.collectors()):
            buffer.drain()
        s = buffer.stats()
        assert s["rows_total"] == report[:64].sum() and s["skipped_rows"] == 0
        assert s["dropped_rows"] == report[64:128].sum() - report[:64].sum() and s["refused_rows"] == 0
        rows = buffer.gather(np.arange(*buffer.window))
        assert (rows["obs"] == rows["obs"][:, :1, :1, :1]).all()
    destroy(name)


def held_up(buffer: Buffer, full: str) -> bool:
    s = buffer.stats()
    return s["blocked_seconds"] > 0 if full == "block" else s["dropped_rows"] > 0


def private(pid: int) -> int:
    return resident(pid)["RssAnon"]


@pytest.mark.parametrize("full", ["block", "drop_newest"])
def test_b098_64_fast_producers_and_a_slow_writer(name, tmp_path, full):
    """For 20 s (CI: 2)."""
    directory = str(tmp_path)
    run_supervisor(
        f"from tests.process.test_cases_leak import b098; b098({name!r}, {directory!r}, {full!r}, {20 if SOAK else 2})"
    )


# ---- B099: absurd sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [("capacity", v) for v in (0, -1, 2**40, 2**63 - 1, 2**64, 1.5, True)]
    + [("ring_bytes", v) for v in (0, -1, 2**40, 2**64)]
    + [("row", 2**40), ("row", 2**63)],
)
def test_b099_absurd_sizes(name, setting, value):
    files, before = open_files(), [f for f in os.listdir(segment.SHM_DIR) if name in f]
    how = {"schema": {"x": "int64"}, "drain": "caller", "max_collectors": 4, "ring_bytes": 4096}
    capacity = value if setting == "capacity" else 10
    if setting == "row":
        how["schema"] = {"x": ("uint8", (value,))}
    elif setting == "ring_bytes":
        how["ring_bytes"] = value
    with pytest.raises((ValueError, OverflowError, NotEnoughMemory)) as e:
        Buffer.create(name, capacity, **how)
    text = str(e.value)
    if isinstance(e.value, NotEnoughMemory):  # a number of rows that may be, elsewhere
        assert value == 2**40 and setting == "capacity" and f"{2**40:,} rows" in text and f"needs {2**43:,}"[:8] in text
    else:
        assert {"row": "'x'"}.get(setting, setting) in text, text
    assert (open_files(), [f for f in os.listdir(segment.SHM_DIR) if name in f]) == (files, before)
