"""What this machine, and this process's limits, leave for buffers."""

from __future__ import annotations

import configparser
import glob
import os
import pwd
import resource
from collections.abc import Callable
from typing import Any

from shmbuf import memory, segment
from shmbuf.printing import nbytes

Say = Callable[..., None]
SMALL = 64 << 20  # what docker gives a container's /dev/shm
UNLIMITED = 1 << 60  # cgroup v1 writes "none" as a large number
FEW_FILES = 256
LOGIND = (  # the later wins, and drop-ins over main files
    "/usr/lib/systemd/logind.conf",
    "/etc/systemd/logind.conf",
    "/usr/lib/systemd/logind.conf.d/*.conf",
    "/run/systemd/logind.conf.d/*.conf",
    "/etc/systemd/logind.conf.d/*.conf",
)
LOGIND_RUNS = "/run/systemd/seats"
LINGER = "/var/lib/systemd/linger"
ENLARGE = "mount -o remount,size=8G /dev/shm    # docker: --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"


def facts(used: int) -> dict[str, Any]:
    """Numbers in bytes (files: a count), None where there is no limit or nothing says. ``used``: by buffers."""
    shm, headroom = os.statvfs(segment.SHM_DIR), memory.cgroup_headroom()

    def limit(which: int) -> int | None:
        soft = resource.getrlimit(which)[0]
        return None if soft == resource.RLIM_INFINITY else soft

    return {
        "shm_bytes": shm.f_blocks * shm.f_frsize,
        "shm_free_bytes": shm.f_bavail * shm.f_frsize,
        "shm_used_by_buffers_bytes": used,
        "memory_available_bytes": memory.mem_available(),
        "cgroup_headroom_bytes": None if headroom is None or headroom > UNLIMITED else headroom,
        "open_files_limit": limit(resource.RLIMIT_NOFILE),
        "file_size_limit_bytes": limit(resource.RLIMIT_FSIZE),
        "remove_ipc": removes_ipc(os.getuid()),
    }


def examine(f: dict[str, Any], say: Say) -> None:
    """Tell ``say(check, level, text, remedy)``; level: "ok", "hint" (nothing is wrong yet) or "wrong"."""
    free, size, used = f["shm_free_bytes"], f["shm_bytes"], f["shm_used_by_buffers_bytes"]
    text = f"{segment.SHM_DIR} has {nbytes(size)}, {nbytes(free)} free; buffers use {nbytes(used)}"
    if free < memory.HEADROOM:
        say("shm", "wrong", f"{text}: no buffer can be created", ENLARGE)
    elif size <= SMALL:
        say("shm", "hint", f"{text}: that holds small buffers only", ENLARGE)
    elif free < size // 20:
        say("shm", "hint", f"{text}: nearly full", "shminfo gc --dry-run")
    else:
        say("shm", "ok", text)
    for key, where, remedy in (
        ("memory_available_bytes", "the machine's memory (MemAvailable)", "ps aux --sort=-rss | head"),
        ("cgroup_headroom_bytes", "the memory cgroup", "cat /proc/self/cgroup    # raise that cgroup's memory limit"),
    ):
        left = f[key]
        if left is None:
            say(key.rsplit("_", 1)[0], "ok", f"{where}: no limit")
        elif left < memory.HEADROOM:
            say(key.rsplit("_", 1)[0], "wrong", f"{where} has {nbytes(left)} left: no buffer can be created", remedy)
        elif left < free // 2:
            say(
                key.rsplit("_", 1)[0],
                "hint",
                f"{where} has {nbytes(left)} left, less than {segment.SHM_DIR} has: it ends first",
                remedy,
            )
        else:
            say(key.rsplit("_", 1)[0], "ok", f"{where} has {nbytes(left)} left")
    files = f["open_files_limit"]
    if files is not None and files < FEW_FILES:
        text = f"a process may have {files:,} files open (RLIMIT_NOFILE), a handle on a buffer takes one, and two while it opens"
        say("open_files", "wrong" if files < 16 else "hint", text, "ulimit -n 4096")
    else:
        say("open_files", "ok", f"a process may have {'any number of' if files is None else f'{files:,}'} files open")
    largest = f["file_size_limit_bytes"]
    if largest is None:
        say("file_size", "ok", "files may have any size (RLIMIT_FSIZE)")
    else:
        level = "wrong" if largest < memory.HEADROOM else "hint"
        say(
            "file_size",
            level,
            f"no file, and so no buffer, may be larger than {nbytes(largest)} (RLIMIT_FSIZE)",
            "ulimit -f unlimited",
        )
    if f["remove_ipc"]:
        say(
            "remove_ipc",
            "hint",
            "systemd-logind removes this user's buffers when his last session ends (RemoveIPC=yes)",
            "loginctl enable-linger    # or RemoveIPC=no in /etc/systemd/logind.conf",
        )
    else:
        say("remove_ipc", "ok", "buffers stay when this user logs out (RemoveIPC)")


def removes_ipc(uid: int) -> bool:
    """Does systemd-logind remove what this user has in /dev/shm with his last session? (Its default is yes.)"""
    if not os.path.isdir(LOGIND_RUNS) or uid < 1000 or uid == 65534:  # system users are spared
        return False
    try:
        if os.path.exists(f"{LINGER}/{pwd.getpwuid(uid).pw_name}"):  # a session without end
            return False
    except KeyError:
        pass
    found = "yes"
    for pattern in LOGIND:
        for path in sorted(glob.glob(pattern)):
            config = configparser.ConfigParser(strict=False, interpolation=None)
            try:
                config.read(path)
            except (configparser.Error, UnicodeDecodeError):
                continue
            found = config.get("Login", "RemoveIPC", fallback=found)
    return found.strip().lower() not in ("no", "false", "0", "off")
