"""The stand-in driver of standin.cpp, built when it is older than its source. ``python -m tests.cuda.standin`` prints its folder, to be
put into LD_LIBRARY_PATH, so that NVIDIA's bindings and the core find it as ``libcuda.so.1``."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
FOLDER = SOURCE.parents[2] / "build" / "standin"
_COMPILE = ("g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")


def folder() -> Path:
    """Where libcuda.so.1 and its helper lie, up to date."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    newest = max(f.stat().st_mtime for f in (SOURCE, SOURCE.with_suffix(".h")))
    with open(FOLDER / ".lock", "w") as lock:  # several pytest workers begin at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, options in (("libcuda.so.1", ("-fPIC", "-shared")), ("standin-late", ("-DSTANDIN_LATE_MAIN",))):
            made = FOLDER / name
            if not made.exists() or made.stat().st_mtime <= newest:
                new = FOLDER / f"{name}.new"  # whoever runs over the old one keeps it
                subprocess.run([*_COMPILE, *options, "-o", new, SOURCE], check=True)
                os.replace(new, made)
    return FOLDER


def environment(**more: str) -> dict[str, str]:
    """What a process needs to run over it, with torch's tensors; ``more``: the variables that standin.cpp lists."""
    path = ":".join(filter(None, (str(folder()), os.environ.get("LD_LIBRARY_PATH", ""))))
    return {"LD_LIBRARY_PATH": path, "STANDIN_TENSORS": "1", **more}


if __name__ == "__main__":
    print(folder())
