"""The compiled core, and what to do when it is missing."""

from __future__ import annotations

import importlib
import os
import pathlib
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
    _home = pathlib.Path(__file__).resolve().parent.parent
    _hides = (
        f" {_home} is a checkout, and what is imported from there hides an installed shmbuf: run from another directory (Ray's workers "
        "import from their driver's), or install with `pip install -e .`."
        if (_home / "CMakeLists.txt").exists()
        else ""
    )
    raise ImportError(
        f"shmbuf's compiled core is missing or does not load ({error}). Build it with `pip install .` in a checkout "
        f"(needs a C++20 compiler: g++ >= 12 or clang >= 14), or `make build` for development.{_hides}"
    ) from error

__all__ = ["native"]
