"""Ctrl-C while a checkpoint is written: nothing stays open, and the next one removes what lies about."""

from __future__ import annotations

import gc
import inspect
import os
import shutil

import numpy as np
import pytest

from shmbuf import Buffer
from shmbuf.checkpoint import directories, dump_buffer
from tests.process.interrupts import at_point, files


@pytest.fixture
def buf(name, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # many are written
    with Buffer.create(name, 20, schema={"k": "int64", "next": {"done": "bool"}}, drain="caller") as buf:
        buf.extend({"k": np.arange(20), "next": {"done": np.arange(20) % 4 == 3}})
        yield buf


@pytest.mark.parametrize("where", ["_alone", "copy_rows", "_sync_tree"])
def test_at_every_point_of_what_opens_files(buf, tmp_path, where):
    path = tmp_path / "c"
    dump_buffer(buf, path)
    n, wrong = 0, []
    while True:
        gc.collect()  # what earlier tests left open
        n, before = n + 1, files()
        at, error = at_point(n, lambda: dump_buffer(buf, path), where)
        if not at:
            break
        error = None  # noqa: F841 (the frames of its traceback keep files open)
        gc.collect()
        now = files()
        dump_buffer(buf, path)
        if now != before or os.listdir(tmp_path) != ["c"]:
            wrong.append((at, now - before, sorted(os.listdir(tmp_path))))
    # A descriptor that os.open has just returned is nobody's yet.
    opened = [
        f"directories.py:{i}"
        for i, line in enumerate(inspect.getsource(directories).splitlines(), 1)
        if "os.open(" in line
    ]
    assert [w for w in wrong if w[0].split()[0] not in opened] == []
    assert n > 3


@pytest.mark.parametrize("nth", [1, 2])
def test_while_the_old_one_is_removed(buf, tmp_path, monkeypatch, nth):
    path, remove, calls = tmp_path / "c", shutil.rmtree, []

    def interrupted(*a: object, **kw: object) -> None:
        calls.append(a)
        if len(calls) == nth:
            raise KeyboardInterrupt
        remove(*a, **kw)

    dump_buffer(buf, path)
    gc.collect()  # what earlier tests left open
    before = files()
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    for _ in range(3):
        try:
            dump_buffer(buf, path)
        except KeyboardInterrupt:
            gc.collect()
    assert len(calls) > nth and files() == before and os.listdir(tmp_path) == ["c"]
