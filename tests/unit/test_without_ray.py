"""Without Ray everything of one machine works, and what needs it says how to get it."""

from __future__ import annotations

import builtins
import sys

import pytest

import shmbuf
from shmbuf import RemoteTensorDictReplayBuffer, ReplayBuffer, ShmStorage

HINT = r"pip install 'shmbuf\[ray\]'"


@pytest.fixture
def without_ray(monkeypatch):
    for module in [m for m in sys.modules if m == "ray" or m.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, module)
    real = builtins.__import__

    def no_ray(name, *args, **kw):
        if name == "ray" or name.startswith("ray."):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    monkeypatch.setitem(sys.modules, "ray", None)  # what importlib looks at


def test_what_needs_ray_says_how_to_get_it(without_ray):
    with pytest.raises(ImportError, match=HINT):
        RemoteTensorDictReplayBuffer.as_remote()
    with pytest.raises(ImportError, match=HINT):
        ReplayBuffer(service_backend="ray")
    with pytest.warns(FutureWarning), pytest.raises(ImportError, match=HINT):
        RemoteTensorDictReplayBuffer(use_ray_service=True)
    with pytest.raises(ImportError, match=HINT):
        shmbuf.ShardedReplayBuffer(storage=ShmStorage(5, name="never"))
    with pytest.raises(ImportError, match=HINT):
        shmbuf.ShardedReplayBuffer.attach("never")


def test_the_rest_does_without(without_ray):
    with ReplayBuffer(storage=ShmStorage(5)) as rb:
        assert rb.service_backend == "direct" and len(rb) == 0


def test_importing_shmbuf_and_its_distributed_rooms_loads_neither_ray_nor_torch(python):
    code = (
        "import sys, shmbuf, shmbuf.distributed, shmbuf.distributed.coordinator, shmbuf.rlightning.table\n"
        "print([m for m in ('ray', 'torch') if m in sys.modules])"
    )
    assert python(code) == "[]"
