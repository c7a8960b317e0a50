"""The example over two Ray nodes, as a user runs it: it learns, and leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmbuf import segment

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_two_nodes.py"


@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(240)
def test_two_nodes_learn(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=220, cwd=tmp_path)
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines["nodes"].strip().startswith("2, shards ray_two_nodes.0.")
    drawn = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of shard", lines["rows drawn"])]
    assert len(drawn) == 2 and min(drawn) > 0.1 * sum(drawn), "rows of both nodes, in like parts"
    assert not [n for n in segment.names() if n.startswith("ray_two_nodes")]
