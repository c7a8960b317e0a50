"""The compiled core, and what to do when it is missing."""

from __future__ import annotations

import os
import sys

if not sys.platform.startswith("linux"):
    raise ImportError(f"shmbuf runs on Linux (x86-64, aarch64) only, this is {sys.platform}: "
                      "it needs O_TMPFILE, open-file-description locks and futexes.")
try:
    if os.environ.get("SHMBUF_NATIVE") == "failpoints":  # tests: the second build, whose steps can be killed by name
        from shmbuf import _native_failpoints as native  # type: ignore[attr-defined]
    else:
        from shmbuf import _native as native
except ImportError as error:
    raise ImportError(
        f"shmbuf's compiled core is missing or does not load ({error}). Build it with `pip install .` in a checkout "
        "(needs a C++20 compiler: g++ >= 12 or clang >= 14), or `make build` for development."
    ) from error

__all__ = ["native"]
