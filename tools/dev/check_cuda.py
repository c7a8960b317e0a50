"""``make check-cuda``: everything about device memory that a GPU has to show, as one table, in less than five minutes.

The tests of host storages over a device; deaths of a collector, a learner, the writer and the steward; two learners beside two
collectors; and figures, each beside its floor: the bytes that have to move over the bandwidth measured in this run. ``ARGS=--standin`` runs
it over the stand-in driver, where there is no GPU: then the figures mean nothing. Exit status 1: something failed or is too slow.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

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


class Line(NamedTuple):
    what: str
    got: str
    wanted: str
    good: bool | None  # None: not judged


class Sizes(NamedTuple):
    """Of the run: a GPU's, or the stand-in's."""

    capacity: int
    gathered: int
    extended: int
    copied: int  # bytes, to measure a bandwidth by
    repeats: int
    seconds: float


GPU = Sizes(1_000_000, 32_768, 4_096, 1 << 30, 50, 8.0)
STANDIN = Sizes(20_000, 2_048, 512, 16 << 20, 5, 3.0)


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
    print(json.dumps({"rows_a_second": moved / (time.monotonic() - since)}), flush=True)
    rb.close()


@contextmanager
def started(role: str, name: str, n: int, seconds: float) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tools.dev.check_cuda", "--worker", role, name, str(n), str(seconds)]
    p = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if p.stdout.readline() != "ready\n":  # type: ignore[union-attr]
            raise RuntimeError(f"worker {role} did not begin")
        yield p
    finally:
        p.kill()
        p.communicate()


# ---- the parts -------------------------------------------------------------------------------------------------------


def conformance(standin: bool) -> Iterator[Line]:
    import importlib.util

    files = [f"tests/unit/test_{name}.py" for name in CONFORMANCE]
    command = [sys.executable, "-m", "pytest", "-p", "tests.cuda.conformance", "--timeout", "100", "-x", *files]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "SHMBUF_NATIVE": "failpoints"},
        check=False,
    )
    last = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    yield Line("tests of host storages, over a device", re.sub(r"=+ ?", "", last), "all pass", done.returncode == 0)


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
    for victim in ("collector", "learner", "writer", "keeping steward"):
        name = f"check.{os.getpid()}"
        with ExitStack() as stack:
            rb = stack.enter_context(make(size, name, drain="process"))
            stack.callback(rb.buffer.destroy, force=True)
            rb.extend(rows(0, size.extended, rb._storage.device))
            others = [stack.enter_context(started(r, name, 256, 60)) for r in ("collect", "learn", "collect", "learn")]
            steward = subprocess.Popen(
                [sys.executable, "-m", "shmbuf.cuda.steward", name], stdout=subprocess.PIPE, text=True
            )
            stack.callback(steward.kill)
            steward.stdout.readline()  # type: ignore[union-attr]
            doomed = {
                "collector": others[0],
                "learner": others[1],
                "writer": rb.buffer._drain_process,
                "keeping steward": steward,
            }[victim]
            doomed.send_signal(signal.SIGKILL)
            doomed.wait()
            since = time.monotonic()
            on = [goes_on(p, since) for p in others if p is not doomed]
            yield Line(
                f"{victim} killed",
                f"{sum(on)} of {len(on)} others go on, rows right",
                "all",
                all(on) and right(rb.sample()),
            )


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
        rb = stack.enter_context(make(size, name))
        stack.callback(rb.buffer.destroy, force=True)
        rb.extend(rows(0, size.extended, rb._storage.device))
        roles = ("collect", "collect", "learn", "learn")
        workers = [stack.enter_context(started(r, name, size.extended, size.seconds)) for r in roles]
        rates = []
        for role, p in zip(roles, workers, strict=True):
            last = [line for line in p.stdout if line.startswith("{") or "torn" in line]  # type: ignore[union-attr]
            good = bool(last) and last[-1].startswith("{")
            rates.append((role, json.loads(last[-1])["rows_a_second"] if good else 0.0, good and p.wait() == 0))
        for role, rate, good in rates:
            what = "2 collectors + 2 learners: " + ("collected" if role == "collect" else "sampled and checked")
            yield Line(what, f"{rate:,.0f} rows/s", "rows right", good)


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


def figures(size: Sizes) -> Iterator[Line]:
    import numpy as np

    with make(size, f"check.{os.getpid()}") as rb:
        try:
            storage = rb._storage
            meter = Meter(storage.device)
            rb.extend(rows(0, size.extended, storage.device))
            for at in range(size.extended, size.capacity, size.extended):
                rb.put(rows(at, size.extended, storage.device))
            rb.extend(rows(0, 1, storage.device))
            bandwidth = meter.bandwidth(size)
            yield Line("device memory", f"{bandwidth / 1e9:,.0f} GB/s", "measured", None)

            n = size.gathered
            lo, hi = rb.buffer.window
            ids = np.random.default_rng(0).integers(lo, hi, n)
            gathering = storage.gathering(n)
            done = np.zeros(n, np.uint8)

            def gather() -> None:
                done[:] = 0
                assert gathering.fetch(ids, done) == n

            took, floor = meter.seconds(gather, size.repeats), 2 * n * ROW_BYTES / bandwidth
            text = f"{took * 1e6:,.0f} µs, {took / floor:.1f} × the floor of {floor * 1e6:,.1f} µs"
            yield Line(
                f"gather of {n:,} rows × {ROW_BYTES} B",
                text,
                "≤ 2 × and ≤ 150 µs",
                took <= 2 * floor and took <= 150e-6,
            )
            took = meter.seconds(rb.sample, size.repeats)
            yield Line(f"sample({n:,}), with numbers", f"{took * 1e6:,.0f} µs", "", None)

            new = rows(0, size.extended, storage.device)
            took, floor = meter.seconds(lambda: rb.extend(new), size.repeats), 4 * size.extended * ROW_BYTES / bandwidth
            text = f"{took * 1e6:,.0f} µs, {took / floor:.1f} × the floor of {floor * 1e6:,.1f} µs (into the ring, into the rows)"
            yield Line(f"device to device extend of {size.extended:,} rows", text, "≤ 2 ×", took <= 2 * floor)

            one, three = sampled(rb.buffer.name, n, size, 1), sampled(rb.buffer.name, n, size, 3)
            text = f"{three / one:.2f} × one's {one * ROW_BYTES / 1e9:,.1f} GB/s"
            yield Line("three processes sampling", text, "≥ 0.9 ×", three >= 0.9 * one)
        finally:
            rb.buffer.destroy(force=True)
    if not meter.cuda:
        yield Line("host storage to device batches", "needs a GPU", "≥ 0.8 × the link", None)
        return
    link = meter.link(size)
    with make(size._replace(capacity=200_000), None, device="cpu") as rb:
        for at in range(0, 200_000, 8192):
            rb.extend(rows(at, 8192, "cpu"))
        rb._set_prefetch(3)
        took = meter.seconds(lambda: rb.sample(device="cuda"), size.repeats)
        rate = n * ROW_BYTES / took
        text = f"{rate / 1e9:,.1f} GB/s, {rate / link:.2f} × the link's {link / 1e9:,.1f}"
        yield Line("host storage to device batches", text, "≥ 0.8 × the link", rate >= 0.8 * link)


def sampled(name: str, n: int, size: Sizes, processes: int) -> float:
    """Rows a second of all together."""
    with ExitStack() as stack:
        workers = [stack.enter_context(started("timed", name, n, size.seconds / 2)) for _ in range(processes)]
        for p in workers:
            p.stdin.write("go\n")  # type: ignore[union-attr]
            p.stdin.flush()  # type: ignore[union-attr]
        return sum(json.loads(p.stdout.readline())["rows_a_second"] for p in workers)  # type: ignore[union-attr]


# ---- the table -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--standin", action="store_true", help="over the stand-in driver of tests/cuda")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="PART", help="conformance, deaths, lost_steward, together, figures"
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

    size = STANDIN if args.standin else GPU
    where = f"{driver.by_index(0)}, driver {driver.call('cuDriverGetVersion')}"
    heading = f"OVER THE STAND-IN, no GPU: the figures mean nothing. {where}" if args.standin else where
    table, began, failed = Table(title=heading), time.monotonic(), 0
    for column in ("what", "got", "wanted", ""):
        table.add_column(column, overflow="fold")
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "figures": lambda: figures(size),
        "together": lambda: together(size),
        "deaths": lambda: deaths(size),
        "lost_steward": lambda: lost_steward(size),
        "conformance": lambda: conformance(args.standin),
    }
    for part, lines in parts.items():
        if part in args.without:
            continue
        try:
            for line in lines():
                judged = line.good if part != "figures" or not args.standin else None
                failed += judged is False
                verdict = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[judged]
                table.add_row(line.what, line.got, line.wanted, verdict)
                print(f"{time.monotonic() - began:5.0f} s  {line.what}: {line.got}", file=sys.stderr, flush=True)
        except Exception as e:
            failed += 1
            table.add_row(part, f"{type(e).__name__}: {e}", "", "[red]no[/]")
            print(f"{part}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
    table.caption = f"{time.monotonic() - began:.0f} s; {failed or 'nothing'} failed"
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
