"""`shminfo plot`: a PNG of rates and ages."""

from __future__ import annotations

import pickle
import signal
import struct
import subprocess
import sys

import pytest

from shmbuf import Buffer, segment
from shmbuf.cli import plotting
from tests.unit.helpers_cli import ROOT, SCHEMA, inside, rows

pytest.importorskip("matplotlib")
pytest_plugins = ["tests.unit.fixtures_cli"]


def is_png(path) -> bool:
    """Its signature, a size worth looking at, and its end."""
    blob = path.read_bytes()
    width, height = struct.unpack(">II", blob[16:24])
    return blob[:8] == b"\x89PNG\r\n\x1a\n" and width > 800 and height > 600 and blob[-8:-4] == b"IEND"


@pytest.fixture
def seen(name) -> list:
    """Three looks, ten seconds apart: 100 and then 300 rows went in, 1000 out."""
    with Buffer.create(name, 1000, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(50))
        out = [(100.0, inside(name))]
        buf.extend(rows(100))
        out.append((110.0, inside(name)))
        buf.extend(rows(300))
        buf.draw(1000)
        out.append((120.0, inside(name)))
    return out


def test_it_writes_a_png_and_says_so(name, shminfo, shminfo_json, tmp_path):
    file = tmp_path / "a b.png"
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(80))
        buf.draw(50)
        status, out, err = shminfo("plot", name, "-o", str(file), "--seconds", "0.3")
        assert (status, err) == (0, "") and out.startswith(f"wrote {file} (") and is_png(file)
        file.unlink()
        result = shminfo_json("plot", name, "-o", str(file), "--seconds", "0.3", "--json")
        assert result["file"] == str(file) and result["looks"] >= 3 and result["seconds"] >= 0.3 and is_png(file)
        assert result["lost"] is None


def test_the_figure_has_two_axes_with_titles_units_and_the_rates(seen):
    fig = plotting.figure(seen)
    above, below = fig.axes
    assert above.get_title(loc="left") == "Rows in and out over 20 s"
    assert (above.get_xlabel(), above.get_ylabel()) == ("time observed (s)", "rows per second")
    labels = [t.get_text() for t in above.get_legend().get_texts()]
    assert labels == ["put: 20/s on average", "stored: 20/s on average", "sampled: 50/s on average"]
    put, stored, sampled = (list(p.get_data().values) for p in above.patches)
    assert (put, stored, sampled) == ([10, 30], [10, 30], [0, 100])
    assert list(above.patches[0].get_data().edges) == [0, 10, 20]
    assert below.get_title(loc="left") == "Ages of the 1,000 rows sampled in this time"
    assert "rows stored after" in below.get_xlabel() and below.get_ylabel() == "share of sampled rows"
    assert sum(bar.get_height() for bar in below.patches) == pytest.approx(1)
    p50, p90 = (t.get_text() for t in below.get_legend().get_texts())
    assert p50.startswith("p50: ") and p90.startswith("p90: ") and " rows" in p50
    assert seen[0][1]["name"] in fig.get_suptitle()


def test_percentiles_stand_on_their_bars(seen):
    for age in (0, 1, 2, 3, 4.5, 127, 128, 1000, 1 << 40):
        k = int(age).bit_length()
        assert k - 0.5 <= plotting._position(age) <= k + 0.5
    assert [plotting._range(k) for k in (0, 1, 2, 7, 10, 11, 21, 41)] == [
        "0",
        "1",
        "2–3",
        "64+",
        "512+",
        "1Ki+",
        "1Mi+",
        "1Ti+",
    ]


def test_of_a_buffer_that_rests_and_of_one_without_schema(name, tmp_path, seen, shminfo):
    resting = plotting.figure([seen[2], (130.0, seen[2][1])])
    assert "since the buffer was created" in resting.axes[1].get_title(loc="left")
    segment.destroy(name)
    with Buffer.create(name, 10):
        assert shminfo("plot", name, "-o", str(tmp_path / "x.png"), "--seconds", "0.1")[0] == 0
        assert is_png(tmp_path / "x.png")
        empty = plotting.figure([(0.0, inside(name)), (1.0, inside(name))])
        assert [t.get_text() for t in empty.axes[1].texts] == ["nothing was sampled yet"]


def test_errors_come_before_anything_is_observed(name, shminfo, tmp_path, monkeypatch):
    monkeypatch.setattr(plotting, "observe", None)
    status, out, err = shminfo("plot", name, "-o", str(tmp_path / "no" / "x.png"))
    assert (status, out) == (1, "") and f"{tmp_path / 'no'}: no such directory" in err
    monkeypatch.undo()
    status, out, err = shminfo("plot", name, "-o", str(tmp_path / "x.png"))
    assert (status, out) == (1, "") and f"no buffer named '{name}'" in err and not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_how_to_get_it(name, start, tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from shmbuf.cli import main; "
        "sys.exit(main(['plot', sys.argv[1], '-o', sys.argv[2]]))"
    )
    p = start(code, name, tmp_path / "x.png")
    _, err = p.communicate(timeout=60)
    assert p.returncode == 1 and "pip install 'shmbuf[plot]'" in err and err.count("\n") == 1


def test_a_buffer_destroyed_meanwhile_is_plotted_as_far_as_it_was_seen(name, shminfo, tmp_path, monkeypatch):
    file, looked = tmp_path / "x.png", []

    def sleep(length: float) -> None:
        looked.append(length)
        if len(looked) == 3:
            segment.destroy(name)

    Buffer.create(name, 10, schema=SCHEMA).close()
    monkeypatch.setattr(plotting.time, "sleep", sleep)
    status, out, err = shminfo("plot", name, "-o", str(file), "--seconds", "60")
    assert status == 1 and err == f"shminfo: buffer '{name}' was destroyed while shminfo looked at it\n"
    assert "3 looks" in out and is_png(file)


def test_ctrl_c_plots_what_was_seen(name, tmp_path):
    file = tmp_path / "x.png"
    with Buffer.create(name, 10, schema=SCHEMA):
        code = (
            "import sys; from shmbuf.cli import main, plotting\n"
            "between = plotting.looks\n"
            "def looks(*a):\n"
            "    for i, look in enumerate(between(*a)):\n"
            "        yield look\n"
            "        if i == 2: print('seen', flush=True)\n"
            "plotting.looks = looks; sys.exit(main(['plot', sys.argv[1], '-o', sys.argv[2], '--seconds', '600']))"
        )
        p = subprocess.Popen([sys.executable, "-c", code, name, str(file)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert p.stdout.readline() == "seen\n"
            p.send_signal(signal.SIGINT)
            out, _ = p.communicate(timeout=60)
            assert p.returncode == 0 and out.startswith("wrote ") and is_png(file)
        finally:
            p.kill()
            p.communicate()


def test_matplotlib_is_not_left_in_a_state_of_ours(seen):
    """No pyplot: an application that calls this keeps its own backend."""
    code = (
        "import sys, pickle; from shmbuf.cli import plotting; plotting.figure(pickle.load(sys.stdin.buffer)); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(seen), timeout=60, cwd=ROOT)
    assert done.returncode == 0
