"""Buffers and replay buffers that only their callers drain, closed after the test. torch is imported where it is used."""

from __future__ import annotations

import gc

import pytest

from shmbuf import Buffer
from tests.conftest import left_behind
from tests.unit.helpers import RING, SPEC, open_files


@pytest.fixture
def make(make_name):
    made = []

    def make(capacity: int = 100, **kw) -> Buffer:
        made.append(
            Buffer.create(make_name(), capacity, **{"schema": SPEC, "drain": "caller", "ring_bytes": RING, **kw})
        )
        return made[-1]

    yield make
    for buf in made:
        buf.close()


@pytest.fixture
def buf(make) -> Buffer:
    return make()


@pytest.fixture
def make_rb(make_name):
    from shmbuf import ShmStorage, TensorDictReplayBuffer
    from tests.unit.helpers_torch import SPEC

    made = []

    def make(capacity: int = 100, face=TensorDictReplayBuffer, batch_size=None, **kw):
        storage = ShmStorage(
            capacity, **{"name": make_name(), "schema": SPEC, "drain": "caller", "ring_bytes": 1 << 14, **kw}
        )
        made.append(face(storage=storage, batch_size=batch_size))
        return made[-1]

    yield make
    for rb in made:
        rb.close()


@pytest.fixture
def rb(make_rb):
    return make_rb()


@pytest.fixture
def nothing_moves():
    """No file, no descriptor and no mapping more than before."""

    def look():
        with open("/proc/self/maps") as f:
            return left_behind(), open_files(), sum("shmbuf." in line or "/dev/shm/#" in line for line in f)

    before = look()
    yield
    if look() != before:
        gc.collect()  # slow in a large process
    assert look() == before
