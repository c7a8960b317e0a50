"""The script of the README, as it is pasted: it ends well, by itself, and leaves nothing. Imports torch."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

from shmbuf import ShmbufError, segment

README = Path(__file__).resolve().parents[2] / "README.md"


def creators() -> set[int]:
    """Of the buffers without a name."""
    found = set()
    for name in segment.names():
        if name.startswith(segment.UNNAMED):
            with (
                contextlib.suppress(ShmbufError, OSError),
                contextlib.closing(segment.attach(name, watch=True)) as handle,
            ):
                found.add(handle.header["creator_pid"])
    return found


def test_the_script_runs_as_pasted(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [b for b in blocks if "__main__" in b]
    (script := tmp_path / "pasted.py").write_text(code)
    p = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    out, err = p.communicate(timeout=110)
    assert (p.returncode, err) == (0, ""), err
    assert out == "torch.Size([256, 4]) collectors seen: [0, 1] 4000 rows\n"
    assert p.pid not in creators()
