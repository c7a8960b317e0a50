"""Benchmarks of shmbuf against its peers: `python -m tools.bench` from the repository root.

Every case runs in a process of its own, beside all its peers in one run, because only ratios
taken on the same machine in the same minutes mean anything.
"""

import sys
from pathlib import Path

# The checkout's own `shmbuf/` has no compiled extension in it: the installed package must win.
_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT in sys.path:
    sys.path.remove(_ROOT)
    sys.path.append(_ROOT)
