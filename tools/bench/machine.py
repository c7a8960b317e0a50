"""The machine: what it is, what it copies in a second, what a process of it holds."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from .isolate import Emitter
from .settings import Settings

PACKAGES = (
    "shmbuf",
    "torch",
    "tensordict",
    "torchrl",
    "cpprb",
    "faster-fifo",
    "stable-baselines3",
    "tianshou",
    "numpy",
)


def run(spec: dict, settings: Settings, emit: Emitter) -> None:
    emit.values("memcpy", [memcpy_rate()])


def memcpy_rate(size: int = 32 << 20, repeats: int = 20) -> float:
    """Bytes a second of one thread, the best of several."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def once() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    return size / min(once() for _ in range(repeats))


def process_memory() -> float:
    """MB of this process that are its own: anonymous and file pages, not shared memory."""
    status = Path("/proc/self/status").read_text()
    kib = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("RssAnon", "RssFile"))
    return sum(kib) * 1024 / 1e6


class Others:
    """What processes that are not ours take of the cores meanwhile: on a busy machine no figure means much."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait; with what the host stole
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return busy / os.sysconf("SC_CLK_TCK"), own, time.monotonic()

    def share(self) -> float:
        busy, own, seconds = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / (seconds * (os.cpu_count() or 1))


def describe() -> dict[str, str]:
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "CPU": cpu[1] if cpu else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "?",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "platform": sys.platform,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
