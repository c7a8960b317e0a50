"""``make check-cuda``: everything about device memory that a GPU has to show, as one table, in less than five minutes.

First what needs no torch and half a minute (cuda_smoke.py); then figures, each beside its floor: the bytes that have to move over the
bandwidth measured in this run; then two learners beside two collectors; deaths of a collector, a learner, the writer and the steward;
the same rows as on the host, at random; a suite on a GPU's tensors; and the tests of host storages over a device, in what is left of
five minutes. ``ARGS=--standin`` runs it over the stand-in driver, where there is no GPU: then there are no figures. Exit status 1:
something failed or is too slow; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from tools.dev.cuda_smoke import Array, Kernels, Line, smoke

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CONFORMANCE = (
    "buffer",
    "rings_and_tickets",
    "priorities",
    "edits",
    "slices",
    "query_buffer",
    "replay_buffer",
    "epochs",
    "sequences",
)
CONFORMANCE += ("checkpoint", "loading", "face_edit", "handles", "limiter")
ROW = {"obs": ("float32", (64,)), "next": {"obs": ("float32", (64,))}, "k": "int32", "r": "float16"}  # 518 bytes
ROW_BYTES = 518


class Sizes(NamedTuple):
    """Of the run: a GPU's, or the stand-in's."""

    capacity: int
    gathered: int
    extended: int
    copied: int  # bytes, to measure a bandwidth by
    repeats: int
    seconds: float
    large: int  # rows of one large extend
    large_ring: int


GPU = Sizes(1_200_000, 32_768, 4_096, 1 << 30, 50, 8.0, 1 << 20, 2 << 30)
STANDIN = Sizes(20_000, 2_048, 512, 16 << 20, 5, 3.0, 4_096, 8 << 20)
NEEDS_GPU = "needs a GPU"
BUDGET = 300.0  # seconds for everything
BEGAN = time.monotonic()


def left() -> float:
    """Seconds of the budget, at least a minute."""
    return max(60.0, BUDGET - 10 - (time.monotonic() - BEGAN))


# ---- rows and workers ------------------------------------------------------------------------------------------------


def rows(first: int, n: int, device: Any) -> Any:
    import torch
    from tensordict import TensorDict

    k = torch.arange(first, first + n, dtype=torch.int32, device=device)
    obs = (k % 1000)[:, None] + torch.arange(64, dtype=torch.float32, device=device)
    return TensorDict({"obs": obs, "next": TensorDict({"obs": obs + 1}, [n]), "k": k, "r": (k % 7).half()}, [n])


def right(batch: Any) -> bool:
    import torch

    k = batch["k"]
    obs = (k % 1000)[:, None] + torch.arange(64, dtype=torch.float32, device=k.device)
    return bool(
        (batch["obs"] == obs).all() & (batch["next", "obs"] == obs + 1).all() & (batch["r"] == (k % 7).half()).all()
    )


def make(size: Sizes, name: str | None, **how: Any) -> Any:
    from shmbuf import ShmStorage, TensorDictReplayBuffer

    how = {"device": "cuda:0", "device_rings": 2, "ring_bytes": 16 << 20, **how}
    storage = ShmStorage(size.capacity, name=name, schema=ROW, max_collectors=16, **how)
    return TensorDictReplayBuffer(storage=storage, batch_size=size.gathered)


def worker(role: str, name: str, n: int, seconds: float) -> None:
    """A process of its own: says now and then when it had moved how many rows, and the rate at the end."""
    import shmbuf

    rb = shmbuf.attach(name)
    device, moved, since, told = rb._storage.device, 0, time.monotonic(), 0.0
    by_ring = {True: 0, False: 0}
    if role == "collect":
        _count(rb, by_ring)
        rb.extend(rows(0, n, device))  # has its device ring, if there is one
    print("ready", flush=True)
    if role.startswith("timed"):
        sys.stdin.readline()
        since = time.monotonic()
    while (now := time.monotonic()) - since < seconds:
        if role == "collect":
            rb.extend(rows(moved, n, device))
        else:
            batch = rb.sample(n, timeout=30)
            if role == "learn" and not right(batch):
                print("torn", flush=True)
                sys.exit(1)
        moved += n
        if now - told > 0.2 and role in ("collect", "learn"):
            told = now
            print(f"{now} {moved}", flush=True)
    rate = moved / (time.monotonic() - since)
    print(json.dumps({"rows_a_second": rate, "device_ring": bool(by_ring[True]) and not by_ring[False]}), flush=True)
    rb.close()


def _count(rb: Any, by_ring: dict[bool, int]) -> None:
    """Puts through a device ring of this process, and those that got none."""
    on = rb._storage._on
    if on is None:
        return
    put = on.put

    def counted(*args: Any) -> Any:
        ticket = put(*args)
        by_ring[ticket is not None] += 1
        return ticket

    on.put = counted


@contextmanager
def crew(roles: Sequence[str], name: str, n: int, seconds: float) -> Iterator[list[subprocess.Popen]]:
    """Workers, all at once: each imports torch first."""
    command = [sys.executable, "-m", "tools.dev.check_cuda", "--worker"]
    begun = [
        subprocess.Popen(
            [*command, role, name, str(n), str(seconds)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    try:
        for role, p in zip(roles, begun, strict=True):
            if p.stdout.readline() != "ready\n":  # type: ignore[union-attr]
                raise RuntimeError(f"worker {role} did not begin")
        yield begun
    finally:
        for p in begun:
            p.kill()
            p.communicate()


# ---- the parts -------------------------------------------------------------------------------------------------------


def tested(what: str, files: list[str], seconds: float, *options: str, **more: str) -> Line:
    """By pytest."""
    import importlib.util

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "100",
        "-x",
        *options,
        *files,
    ]
    if len(files) > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    env = {**os.environ, "SHMBUF_NATIVE": "failpoints", **more}
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Line(what, f"not through in {seconds:.0f} s", "all pass", False)
    said = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    failed = [line for line in said if line.startswith("FAILED")]
    return Line(what, " ".join([re.sub(r"=+ ?", "", said[-1]), *failed[:3]]), "all pass", done.returncode == 0)


def conformance(size: Sizes) -> Iterator[Line]:
    files = [f"tests/unit/test_{name}.py" for name in CONFORMANCE]
    yield tested("tests of host storages, over a device", files, left(), "-p", "tests.cuda.conformance")


def tensors(size: Sizes) -> Iterator[Line]:
    """On tensors of the device."""
    yield tested("the suite on a GPU's tensors", ["tests/cuda/test_on_gpu.py"], left(), SHMBUF_TEST_GPU="1")


def parity(size: Sizes) -> Iterator[Line]:
    from tests.cuda.test_parity import CASES, CODE

    cases = CASES[:2] + CASES[6:] if size is STANDIN else CASES
    bad = []
    for seed, kind in cases:
        name = f"check.{os.getpid()}.{seed}"
        p = subprocess.run(
            [sys.executable, "-c", CODE, name, str(seed), kind],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=left(),
        )
        if p.returncode:
            bad.append(f"{kind} {seed}: {(p.stderr.strip().splitlines() or ['killed'])[-1]}")
    text = "; ".join(bad)[:400] or f"{len(cases)} random runs"
    yield Line("rows of the device as rows of the host", text, "the same", not bad)


def goes_on(p: subprocess.Popen, since: float) -> bool:
    """Whether it moves rows after this moment; within half a minute."""
    impatient = threading.Timer(30, p.kill)
    impatient.start()
    try:
        said: Iterator[str] = p.stdout  # type: ignore[assignment]  # it ends with the process, also where that meets a torn row
        return any(line[:1].isdigit() and float(line.split()[0]) > since + 0.5 for line in said)
    finally:
        impatient.cancel()


def deaths(size: Sizes) -> Iterator[Line]:
    """One of each is killed; the others go on, and what they read is right."""
    name = f"check.{os.getpid()}"
    with ExitStack() as stack:
        rb = stack.enter_context(make(size, name, drain="process"))
        stack.callback(rb.buffer.destroy, force=True)
        rb.extend(rows(0, size.extended, rb._storage.device))
        alive = stack.enter_context(crew(("collect", "learn", "collect", "learn"), name, 256, 150))
        steward = subprocess.Popen(
            [sys.executable, "-m", "shmbuf.cuda.steward", name], stdout=subprocess.PIPE, text=True
        )
        stack.callback(steward.kill)
        steward.stdout.readline()  # type: ignore[union-attr]
        doomed = {"collector": alive[0], "learner": alive[1], "writer": rb.buffer._drain_process}
        for victim, p in {**doomed, "keeping steward": steward}.items():
            p.send_signal(signal.SIGKILL)
            p.wait()
            since = time.monotonic()
            alive = [other for other in alive if other is not p]
            on = [goes_on(other, since) for other in alive]
            text = f"{sum(on)} of {len(on)} others go on, rows right"
            yield Line(f"{victim} killed", text, "all", all(on) and right(rb.sample()))


def lost_steward(size: Sizes) -> Iterator[Line]:
    from shmbuf import StorageLost
    from shmbuf.cuda import sharing

    os.environ["SHMBUF_CUDA_SHARING"] = "ipc"
    try:
        with make(size, None) as rb:
            rb.extend(rows(0, 64, rb._storage.device))
            (pid,) = [p["pid"] for p in sharing.holders(rb.buffer._handle)]
            ok = right(rb.sample(64))
            os.kill(pid, signal.SIGKILL)
            give_up = time.monotonic() + 20
            while os.path.exists(f"/proc/{pid}") and time.monotonic() < give_up:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                time.sleep(0.01)
            try:
                rb.sample(64)
                said = "rows of a dead steward"
            except StorageLost:
                said = "StorageLost"
        yield Line("steward killed (CUDA IPC)", said, "StorageLost", ok and said == "StorageLost")
    finally:
        del os.environ["SHMBUF_CUDA_SHARING"]


def together(size: Sizes) -> Iterator[Line]:
    name = f"check.{os.getpid()}"
    with ExitStack() as stack:
        rb = stack.enter_context(make(size, name, device_rings=3))  # one of them is the maker's
        stack.callback(rb.buffer.destroy, force=True)
        rb.extend(rows(0, size.extended, rb._storage.device))
        roles = ("collect", "collect", "learn", "learn")
        workers = stack.enter_context(crew(roles, name, size.extended, size.seconds))
        rates = []
        for role, p in zip(roles, workers, strict=True):
            last = [line for line in p.stdout if line.startswith("{") or "torn" in line]  # type: ignore[union-attr]
            good = bool(last) and last[-1].startswith("{")
            told = json.loads(last[-1]) if good else {"rows_a_second": 0.0, "device_ring": False}
            rates.append((role, told["rows_a_second"], told["device_ring"], good and p.wait() == 0))
        for role, rate, by_ring, good in rates:
            if role == "collect":
                text = f"{rate:,.0f} rows/s, {'each through its' if by_ring else 'NOT all through a'} device ring"
                yield Line("2 collectors + 2 learners: collected", text, "a device ring each", good and by_ring)
            else:
                yield Line("2 collectors + 2 learners: sampled, checked", f"{rate:,.0f} rows/s", "rows right", good)


class Meter:
    """Times of work on the device, and its bandwidth."""

    def __init__(self, device: Any):
        import torch

        self.torch, self.device, self.cuda = torch, device, device.type == "cuda"

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Median of complete calls."""
        times = []
        for i in range(repeats + 3):
            self.settle()
            since = time.perf_counter()
            work()
            self.settle()
            if i >= 3:
                times.append(time.perf_counter() - since)
        return statistics.median(times)

    def settle(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize(self.device)

    def bandwidth(self, size: Sizes) -> float:
        """Bytes a second, read and written counted, of one large copy."""
        a = self.torch.zeros(size.copied, dtype=self.torch.uint8, device=self.device)
        b = self.torch.empty_like(a)
        return 2 * size.copied / self.seconds(lambda: b.copy_(a), size.repeats)

    def link(self, size: Sizes) -> float:
        """From page-locked memory of the host to the device."""
        a = self.torch.zeros(size.copied // 4, dtype=self.torch.uint8, pin_memory=True)
        b = self.torch.empty(size.copied // 4, dtype=self.torch.uint8, device=self.device)
        return size.copied // 4 / self.seconds(lambda: b.copy_(a, non_blocking=True), size.repeats)


def kernel_seconds(storage: Any, n: int, lo: int, hi: int, repeats: int) -> tuple[float, float]:
    """Of the gather of n rows of the storage: the kernel on the device's clock; and of one that moves a single row."""
    import numpy as np

    from tests.cuda.test_kernels import parameter

    schema, capacity = storage.schema(), storage.buffer.capacity
    base, row_bytes = storage.buffer._handle.device_rows, schema.row_bytes
    times = []
    with Kernels() as kernels:
        for count in (n, 1):
            at = (np.random.default_rng(0).integers(lo, hi, count) % capacity).astype(np.uint32)
            slots, outs = Array(at), [Array(np.zeros((count, *c.shape), c.numpy)) for c in schema.columns]
            columns = []
            for c, o in zip(schema.columns, outs, strict=True):
                aligned = row_bytes | c.offset | c.nbytes | base | o.address | 16
                shift = (aligned & -aligned).bit_length() - 1
                columns.append((o.address, c.offset, c.nbytes, shift, c.nbytes))
            move, blocks = parameter(base, 0, 2**64 - 1, slots.address, 0, row_bytes, count, columns)
            times.append(kernels.gather_seconds(move, blocks, repeats))
            for a in (slots, *outs):
                a.free()
    return times[0], times[1]


def figures(size: Sizes) -> Iterator[Line]:
    import numpy as np

    with make(size, f"check.{os.getpid()}") as rb:
        try:
            storage = rb._storage
            rb.extend(rows(0, 1, "cpu"))
            meter = Meter(storage.device)
            rb.extend(rows(1, size.extended - 1, storage.device))
            for at in range(size.extended, size.capacity, size.extended):
                rb.put(rows(at, size.extended, storage.device))
            rb.extend(rows(0, 1, storage.device))
            bandwidth = meter.bandwidth(size)
            yield Line("device memory", f"{bandwidth / 1e9:,.0f} GB/s", "measured", None)

            n = size.gathered
            lo, hi = rb.buffer.window
            kernel, latency = kernel_seconds(storage, n, lo, hi, size.repeats)
            floor = 2 * n * ROW_BYTES / bandwidth
            text = f"{kernel * 1e6:,.1f} µs, {kernel / floor:.1f} × the floor of {floor * 1e6:,.1f} µs; of one row {latency * 1e6:,.1f} µs"
            yield Line(f"gather of {n:,} rows × {ROW_BYTES} B: the kernel", text, "≤ 2 ×", kernel <= 2 * floor)

            ids = np.random.default_rng(0).integers(lo, hi, n)
            gathering = storage.gathering(n)
            done = np.zeros(n, np.uint8)

            def gather() -> None:
                done[:] = 0
                assert gathering.fetch(ids, done) == n

            took = meter.seconds(gather, size.repeats)
            yield Line("… the whole call", f"{took * 1e6:,.0f} µs", "≤ 150 µs", took <= 150e-6)
            took = meter.seconds(rb.sample, size.repeats)
            yield Line(f"sample({n:,}), with numbers", f"{took * 1e6:,.0f} µs", "", None)
            yield extended(rb, size.extended, meter, bandwidth, latency, size.repeats)._replace(good=None)

            one, three = sampled(rb.buffer.name, n, size, 1), sampled(rb.buffer.name, n, size, 3)
            text = f"{three / one:.2f} × one's {one * ROW_BYTES / 1e9:,.1f} GB/s"
            yield Line("three processes sampling", text, "≥ 0.9 ×", three >= 0.9 * one)
        finally:
            rb.buffer.destroy(force=True)
    with make(size, None, ring_bytes=size.large_ring, device_rings=1) as rb:
        rb.extend(rows(0, 1, "cpu"))
        yield extended(rb, size.large, meter, bandwidth, latency, max(3, size.repeats // 10))
    if not meter.cuda:
        yield Line("host storage to device batches", NEEDS_GPU, "≥ 0.8 × the link", None)
        return
    link = meter.link(size)
    with make(size._replace(capacity=200_000), None, device="cpu") as rb:
        for at in range(0, 200_000, 8192):
            rb.extend(rows(at, 8192, "cpu"))
        rb._set_prefetch(3)
        batches = 2 * size.repeats

        def flow() -> None:  # nobody waits for a batch before the next is asked for: two and more are under way
            for _ in range(batches):
                rb.sample(device="cuda")

        rate = batches * n * ROW_BYTES / meter.seconds(flow, 3)
        text = f"{rate / 1e9:,.1f} GB/s, {rate / link:.2f} × the link's {link / 1e9:,.1f}"
        yield Line("host storage to device batches", text, "≥ 0.8 × the link", rate >= 0.8 * link)


def extended(rb: Any, n: int, meter: Meter, bandwidth: float, latency: float, repeats: int) -> Line:
    """Device to device. Its floor: every byte is read and written twice, into the ring and into the rows; two launches."""
    new = rows(0, n, rb._storage.device)
    took, floor = meter.seconds(lambda: rb.extend(new), repeats), 4 * n * ROW_BYTES / bandwidth
    text = f"{took * 1e6:,.0f} µs, {took / (floor + 2 * latency):.1f} × the floor of {floor * 1e6:,.1f} µs + {2 * latency * 1e6:,.1f} µs of launches"
    return Line(f"device to device extend of {n:,} rows", text, "≤ 2 ×", took <= 2 * (floor + 2 * latency))


def sampled(name: str, n: int, size: Sizes, processes: int) -> float:
    """Rows a second of all together."""
    with crew(["timed"] * processes, name, n, size.seconds / 2) as workers:
        for p in workers:
            p.stdin.write("go\n")  # type: ignore[union-attr]
            p.stdin.flush()  # type: ignore[union-attr]
        return sum(json.loads(p.stdout.readline())["rows_a_second"] for p in workers)  # type: ignore[union-attr]


# ---- the table -------------------------------------------------------------------------------------------------------


def without_figure(line: Line) -> Line:
    """Over the stand-in: what was measured is this machine's host memory."""
    return Line(line.what, line.got if line.got == NEEDS_GPU else "runs; a figure needs a GPU", "", None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--standin", action="store_true", help="over the stand-in driver of tests/cuda")
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        metavar="PART",
        help="smoke, figures, together, deaths, lost_steward, parity, tensors, conformance",
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        role, name, n, seconds = args.worker
        worker(role, name, int(n), float(seconds))
        return 0
    sys.path.insert(0, ROOT)
    if args.standin and "STANDIN_TENSORS" not in os.environ:
        from tests.cuda import standin

        environment = {**os.environ, **standin.environment(STANDIN_DELAY_US=os.environ.get("STANDIN_DELAY_US", "20"))}
        os.execve(sys.executable, [sys.executable, "-m", "tools.dev.check_cuda", *sys.argv[1:]], environment)
    from rich.console import Console
    from rich.table import Table

    from shmbuf.cuda import driver
    from shmbuf.errors import DeviceError

    size = STANDIN if args.standin else GPU
    try:
        where = f"{driver.by_index(0)}, driver {driver.call('cuDriverGetVersion')}"
    except DeviceError as e:
        other = "" if args.standin else ". `make check-cuda ARGS=--standin` runs it over the stand-in driver"
        print(f"check_cuda: no GPU here: {e}{other}", file=sys.stderr)
        return 2
    heading = f"OVER THE STAND-IN, no GPU: no figures, and rates mean nothing. {where}" if args.standin else where
    table, began, failed = Table(title=heading), time.monotonic(), 0
    for column in ("what", "got", "wanted", ""):
        table.add_column(column, overflow="fold")
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "smoke": smoke,
        "figures": lambda: figures(size),
        "together": lambda: together(size),
        "deaths": lambda: deaths(size),
        "lost_steward": lambda: lost_steward(size),
        "parity": lambda: parity(size),
        "tensors": lambda: tensors(size),
        "conformance": lambda: conformance(size),
    }
    for part, lines in parts.items():
        if part in args.without:
            continue
        since = time.monotonic()
        try:
            for line in lines():
                line = without_figure(line) if part == "figures" and args.standin else line
                failed += line.good is False
                verdict = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[line.good]
                table.add_row(line.what, line.got, line.wanted, verdict)
                print(f"{time.monotonic() - began:5.0f} s  {line.what}: {line.got}", file=sys.stderr, flush=True)
        except Exception as e:
            failed += 1
            table.add_row(part, f"{type(e).__name__}: {e}", "", "[red]no[/]")
            print(f"{part}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        took, within = time.monotonic() - since, 30.0 if part == "smoke" and not args.standin else None
        failed += within is not None and took > within
        table.add_row(
            f"[dim]{part}: {took:.0f} s[/]", "", "" if within is None else f"≤ {within:.0f} s", "", end_section=True
        )
        print(f"{time.monotonic() - began:5.0f} s  == {part}: {took:.1f} s", file=sys.stderr, flush=True)
        if part == "smoke" and failed:
            break  # nothing else can work
    table.caption = f"{time.monotonic() - began:.0f} s; {failed or 'nothing'} failed"
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
