"""The compiled core, and what to do when it is missing."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"shmbuf runs on Linux (x86-64, aarch64) only, this is {sys.platform}: "
        "it needs O_TMPFILE, open-file-description locks and futexes."
    )
# Tests use a second build, whose steps can be killed by name.
_MODULE = "shmbuf._native_failpoints" if os.environ.get("SHMBUF_NATIVE") == "failpoints" else "shmbuf._native"
try:
    native: Any = importlib.import_module(_MODULE)  # its interface: _native.pyi
except ImportError as error:
    raise ImportError(
        f"shmbuf's compiled core is missing or does not load ({error}). Build it with `pip install .` in a checkout "
        "(needs a C++20 compiler: g++ >= 12 or clang >= 14), or `make build` for development."
    ) from error

__all__ = ["native"]
