"""`shminfo dump`."""

from __future__ import annotations

import json

import pytest

from shmbuf import cli
from shmbuf.checkpoint import load_buffer
from tests.unit.helpers import numbers, rows


@pytest.mark.parametrize("options", [[], ["--complete"], ["--progress"]])
def test_it_saves_what_is_stored(make, tmp_path, capsys, options):
    buf, into = make(), make(schema=None)
    buf.extend(rows(0, 7))
    assert cli.main(["dump", buf.name, str(tmp_path / "c"), *options]) == 0
    assert "7 rows" in capsys.readouterr().out
    load_buffer(into, tmp_path / "c")
    assert numbers(into) == list(range(7)) == numbers(buf)


def test_json(make, tmp_path, capsys):
    buf = make()
    buf.extend(rows(0, 7))
    assert cli.main(["dump", "--json", buf.name, str(tmp_path / "c")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["lost"], told["path"]) == (7, 0, str(tmp_path / "c"))


def test_what_is_wrong_is_said(make, tmp_path, capsys):
    assert cli.main(["dump", "no.such.buffer", str(tmp_path / "c")]) == 1
    assert "no buffer named" in capsys.readouterr().err
    assert cli.main(["dump", make(schema=None).name, str(tmp_path / "c")]) == 1
    assert "no schema yet" in capsys.readouterr().err
    buf = make()
    buf.extend(rows(0, 1))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.tex").write_text("")
    assert cli.main(["dump", buf.name, str(tmp_path / "taken")]) == 1
    assert "thesis.tex" in capsys.readouterr().err
