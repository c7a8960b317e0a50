"""Ray nodes on one machine: a cluster for each file, never two at a time. Segments carry the node's id, so nodes share nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from shmbuf import segment

pytest.importorskip("ray")

from tests.distributed.helpers import Nodes
from tests.distributed.offline import Offline


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if getattr(request.config.option, "loadgroup", False):
        assert all(
            i.nodeid.endswith("@ray") for i in request.session.items if "cluster" in getattr(i, "fixturenames", ())
        )
    nodes = Nodes(2)
    yield nodes
    nodes.stop()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offline]:
    """Without Ray: actors are threads of this process."""
    it = Offline(monkeypatch)
    yield it
    it.end()


@pytest.fixture
def buffer_name(cluster: Nodes, make_name: Callable[[], str]) -> Iterator[str]:
    """After the test no segment of that name is left, but those of nodes that the test killed."""
    name = make_name()
    yield name
    start = segment.file_name(name)
    left = [f for f in os.listdir(segment.SHM_DIR) if f.startswith(start)]
    killed = [f for f in left if any(f.endswith(node[:12]) for node in cluster.killed)]
    for f in killed:
        os.unlink(f"{segment.SHM_DIR}/{f}")
    assert sorted(left) == sorted(killed)
