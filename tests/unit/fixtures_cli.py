"""Fixtures of the tests of `shminfo`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from shmbuf import cli
from shmbuf.cli import looking


@pytest.fixture
def shminfo(capsys: pytest.CaptureFixture) -> Callable:
    """Runs it in this process: (exit status, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(map(str, args)))
        except SystemExit as e:
            status = e.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def shminfo_json(shminfo: Callable) -> Callable:
    """What it prints as JSON; ``status``: with which it has to end."""

    def run(*args: str, status: int = 0):
        got, out, err = shminfo(*args)
        assert (got, err) == (status, ""), (got, err, out)
        return json.loads(out)

    return run


@pytest.fixture
def only_mine(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`shminfo` sees no other test's buffers: those whose names begin with ``name``, which is returned."""
    everybody = looking.buffers

    def buffers(owner: int | None) -> list[tuple[int, str]]:
        return [(uid, n) for uid, n in everybody(owner) if n.startswith(name)]

    monkeypatch.setattr(looking, "buffers", buffers)
    return name
