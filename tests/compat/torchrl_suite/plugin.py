"""A pytest plugin: in `torchrl.data` and below, the names of replay buffers, storages, samplers and writers are ours.

    pytest -p tests.compat.torchrl_suite.plugin CHECKOUT/test/rb/test_query.py …

Which tests are not run, and why, stands in left_out.toml: each entry is a decision. A test that is left out by a pattern and one
that is not there any more are both told at the end. With `--left-out` exactly those tests are run, to look at their failures.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

import shmbuf
from tests.compat.conftest import stand_in

_BUFFERS = (
    "ReplayBuffer",
    "TensorDictReplayBuffer",
    "RemoteTensorDictReplayBuffer",
    "PrioritizedReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "ReplayBufferEnsemble",
)
_SAMPLERS = (
    "RandomSampler",
    "SamplerWithoutReplacement",
    "PrioritizedSampler",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "PrioritizedSliceSampler",
    "StalenessAwareSampler",
    "ConsumingSampler",
    "SamplerEnsemble",
)
_WRITERS = ("RoundRobinWriter", "TensorDictRoundRobinWriter", "TensorDictMaxValueWriter", "ImmutableDatasetWriter")
_QUERY = (
    "Trajectory",
    "TrajectoryPredicate",
    "filter_trajectories",
    "find_start_stop_traj",
    "iter_trajectories",
    "traj",
)
_UNITS = ("Sequence", "Transition", "SampleUnit")
_MODULES = (
    "torchrl.data",
    "torchrl.data.replay_buffers",
    "torchrl.data.replay_buffers.query",
    "torchrl.data.replay_buffers.replay_buffers",
    "torchrl.data.replay_buffers.sample_units",
    "torchrl.data.replay_buffers.samplers",
    "torchrl.data.replay_buffers.samplers.prioritized",
    "torchrl.data.replay_buffers.storages",
    "torchrl.data.replay_buffers.utils",
    "torchrl.data.replay_buffers.writers",
)


class LazyTensorStorage(shmbuf.ShmStorage):
    """The one storage name that a script changes, changed: TorchRL's arguments for places in memory mean nothing here."""

    def __init__(self, max_size: int, *, device: Any = "cpu", ndim: int = 1, **placement: Any):
        unknown = set(placement) - {
            "scratch_dir",
            "existsok",
            "compilable",
            "consolidated",
            "shared_init",
            "auto_cleanup",
            "cleanup_memmap",
        }
        if unknown:
            raise TypeError(f"unexpected {unknown}")
        super().__init__(max_size, ndim=ndim, device=device if str(device) != "auto" else "cpu", drain="caller")


class LazyMemmapStorage(LazyTensorStorage):
    pass


class ListStorage(LazyTensorStorage):
    def __init__(self, max_size: int | None = None, **placement: Any):
        super().__init__(1000 if max_size is None else max_size, **placement)


def rebind() -> None:
    ours: dict[str, Any] = {
        n: getattr(shmbuf, n) for n in (*_BUFFERS, *_SAMPLERS, *_WRITERS, *_QUERY, *_UNITS) if hasattr(shmbuf, n)
    }
    ours |= {c.__name__: c for c in (LazyTensorStorage, LazyMemmapStorage, ListStorage)}
    for name in _MODULES:
        module = importlib.import_module(name)
        for known, thing in ours.items():
            if hasattr(module, known):
                setattr(module, known, thing)


def left_out() -> dict[str, str]:
    """Pattern of node ids, from the file's name on → reason."""
    entries = tomllib.loads(Path(__file__).with_name("left_out.toml").read_text())["left_out"]
    return {pattern: entry["why"] for entry in entries for pattern in entry["tests"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--left-out", action="store_true", help="run only the tests that left_out.toml names")


def pytest_configure(config: pytest.Config) -> None:
    stand_in()
    rebind()
    sys.path.insert(0, str(Path(config.args[0].partition("::")[0]).parent))  # where _rb_common lies


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns, used, kept, out = left_out(), set(), [], []
    for item in items:
        test = item.nodeid.rsplit("/", 1)[-1]
        met = next((p for p in patterns if fnmatch.fnmatchcase(test, p.replace("[", "[[]"))), None)
        if met is None:
            kept.append(item)
        else:
            used.add(met)
            out.append(item)
    if config.option.left_out:
        kept, out = out, kept
    items[:] = kept
    config.hook.pytest_deselected(items=out)
    config.stash[_LEFT] = (len(out), sorted(set(patterns) - used))


_LEFT = pytest.StashKey[tuple[int, list[str]]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    n, unused = config.stash.get(_LEFT, (0, []))
    passed = len(terminalreporter.stats.get("passed", ()))
    terminalreporter.write_line(f"TorchRL's own tests: {passed:,} pass, {n:,} are left out (left_out.toml says why)")
    if unused and not config.option.keyword:
        terminalreporter.write_line(f"patterns that met no test: {', '.join(unused)}")
