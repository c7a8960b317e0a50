"""How much memory a buffer takes, and how much there is: asked before the kernel is, because the OOM killer comes before ENOSPC."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmbuf import streams
from shmbuf._extension import native
from shmbuf.errors import NotEnoughMemory
from shmbuf.schema import Schema, flatten, show_key
from shmbuf.settings import check_settings

SHM_DIR = "/dev/shm"
MAX_MEMBERS = 256
HEADROOM = 16 << 20  # left free for everybody else


def _read_int(path: str) -> int | None:
    try:
        with open(path) as f:
            return int(f.read())
    except (OSError, ValueError):  # absent, or "max"
        return None


def cgroup_headroom() -> int | None:
    """What this process's memory cgroup (v2 or v1) and those above it still allow, file cache counted as free."""
    try:
        with open("/proc/self/cgroup") as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return None
    least: int | None = None
    for _, controllers, path in lines:
        if controllers == "":
            root, limit, usage, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            root, limit, usage, cache = (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            )
        else:
            continue
        while True:
            at = root + (path if path != "/" else "")
            most, used = _read_int(f"{at}/{limit}"), _read_int(f"{at}/{usage}")
            if most is not None and used is not None:
                try:
                    with open(f"{at}/memory.stat") as f:
                        used -= next((int(x.split()[1]) for x in f if x.startswith(cache)), 0)
                except OSError:
                    pass
                least = min(x for x in (least, max(0, most - used)) if x is not None)
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return least


def mem_available() -> int | None:
    try:
        with open("/proc/meminfo") as f:
            return next((int(x.split()[1]) * 1024 for x in f if x.startswith("MemAvailable:")), None)
    except OSError:
        return None


def shm_free() -> int:
    s = os.statvfs(SHM_DIR)
    return s.f_bavail * s.f_frsize


def shm_size() -> int:
    s = os.statvfs(SHM_DIR)
    return s.f_blocks * s.f_frsize


def require(need: int, what: str, parts: Estimate | None = None) -> None:
    """The OOM killer comes before ENOSPC does, so look first. Raises NotEnoughMemory."""
    left = {
        "/dev/shm": shm_free(),
        "the machine (MemAvailable)": mem_available(),
        "the memory cgroup": cgroup_headroom(),
    }
    where, least = min(((k, v) for k, v in left.items() if v is not None), key=lambda kv: kv[1])
    if need + HEADROOM > least:
        raise NotEnoughMemory(too_little(need, what, where, least, parts))


def too_little(need: int, what: str, where: str, left: int, parts: Estimate | None = None) -> str:
    remedy = {
        "/dev/shm": "Enlarge it (docker: --shm-size=… or --ipc=host; Kubernetes: an emptyDir with medium: Memory; "
        "else: mount -o remount,size=… /dev/shm)",
        "the memory cgroup": "Raise the container's or job's memory limit",
    }.get(where, "Free memory")
    if where == "/dev/shm":
        where = f"/dev/shm of {shm_size():,} bytes"
    return (
        f"{what} needs {need:,} bytes, {where} has {left:,} left. {remedy}, choose a smaller capacity, or remove "
        "buffers nobody needs (`shminfo` lists them). Nothing was created." + (f" Bytes:\n{parts}" if parts else "")
    )


def unmappable(why: object) -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    most = f"{limit:,} bytes" if limit != resource.RLIM_INFINITY else "unlimited"
    return (
        f"{why}: more than this process may map; its address space (RLIMIT_AS, `ulimit -v`) is {most}. A buffer is mapped with "
        "all its rings: one made with a smaller max_collectors or ring_bytes is smaller"
    )


def too_large(need: int, what: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    most = f"{limit:,} bytes" if limit != resource.RLIM_INFINITY else "unlimited, but for the file system"
    return (
        f"{what} needs {need:,} bytes, more than a file may have here: RLIMIT_FSIZE (`ulimit -f`) is {most}. "
        "Nothing was built."
    )


@dataclass(frozen=True)
class Estimate:
    """Bytes of shared memory that a buffer takes. ``print`` it for a table."""

    capacity: int
    columns: dict[str, int]  # of each key, all rows
    padding: int
    priorities: int
    trajectories: int
    configuration: int
    ring: int  # of each collector, from its first put on
    max_collectors: int
    device: int = 0  # in device memory, where the rows live there: they and the device rings

    @property
    def total(self) -> int:
        """Reserved, of the host's memory, when the schema is known."""
        rows = 0 if self.device else sum(self.columns.values()) + self.padding
        return rows + self.priorities + self.trajectories + self.configuration

    def __str__(self) -> str:
        parts = {} if self.device else {**self.columns, "padding": self.padding}
        parts |= {"priorities": self.priorities, "trajectories": self.trajectories, "configuration": self.configuration}
        lines = [f"{n:>20,}  {what}" for what, n in parts.items() if n]
        lines += [
            f"{self.total:>20,}  in all, for {self.capacity:,} rows",
            f"{self.ring:>20,}  more for each collector",
        ]
        if self.device:
            lines.append(f"{self.device:>20,}  of device memory, for the rows and device rings")
        return "\n".join(lines)


def estimate(
    capacity: int,
    *,
    schema: Mapping | Schema | None = None,
    example: Mapping | None = None,
    max_collectors: int = 256,
    ring_bytes: int | None = None,
    trajectories: bool | None = None,
    traj_key: Any = None,
    end_keys: Any = None,
) -> Estimate:
    """What a buffer would take, without making one. Arguments as those of `Buffer.create`, of which the schema or an example is needed.

    Raises SchemaError, ValueError.
    """
    check_settings(capacity, max_collectors, ring_bytes, full="block", drain="thread", exists="error")
    if (schema is None) == (example is None):
        raise ValueError("schema= or example= is needed, and not both")
    if example is not None:
        import numpy as np  # shminfo, which never needs it, starts without

        known = Schema.from_leaves({k: np.asarray(v) for k, v in flatten(example).items()}, 0)
    else:
        known = schema if isinstance(schema, Schema) else Schema.from_spec(schema)  # type: ignore[arg-type]
    keep = streams.resolve(known, streams.settings(trajectories, traj_key, end_keys)).keep
    return of(known, int(capacity), max_collectors, ring_bytes or 0, keep)


def of(
    schema: Schema,
    capacity: int,
    max_collectors: int,
    ring_bytes: int,
    keep: bool,
    config_bytes: int = 0,
    device_rings: int | None = None,
) -> Estimate:
    """device_rings: None: the rows live in host memory."""
    ring = native.ring_bytes(ring_bytes, schema.row_bytes)
    priorities = native.bookkeeping_bytes(capacity, False)
    return Estimate(
        capacity,
        {show_key(c.key): c.nbytes * capacity for c in schema.columns},
        (schema.row_bytes - schema.payload_bytes) * capacity,
        priorities,
        native.bookkeeping_bytes(capacity, keep) - priorities,
        config_bytes or native.config_bytes(max_collectors, MAX_MEMBERS, 1024),
        native.ring_stride(ring, keep),
        max_collectors,
        0
        if device_rings is None
        else native.device_bytes(capacity, schema.row_bytes, device_rings=device_rings, ring_bytes=ring),
    )
