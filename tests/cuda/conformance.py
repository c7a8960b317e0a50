"""A pytest plugin: the tests of host storages, over rows in device memory. What a test makes without a word about its device is made
on ``SHMBUF_TEST_DEVICE`` (default: cuda:0). Over the stand-in:

    LD_LIBRARY_PATH=$(python -m tests.cuda.standin) python -m pytest -p tests.cuda.conformance tests/unit/test_buffer.py
"""

from __future__ import annotations

import os

import pytest

from shmbuf.attachment import Attachment

DEVICE = os.environ.get("SHMBUF_TEST_DEVICE", "cuda:0")

# By test, or by file: why it is not asked of a device.
NOT_ON_A_DEVICE: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    Attachment.create.__func__.__kwdefaults__["device"] = DEVICE  # type: ignore[attr-defined]
    from shmbuf.storage import ShmStorage

    ShmStorage.__init__.__kwdefaults__["device"] = DEVICE  # type: ignore[index]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        where = item.nodeid.split("[")[0]
        for name, why in NOT_ON_A_DEVICE.items():
            if where == name or where.startswith(name + "::"):
                item.add_marker(pytest.mark.skip(reason=why))
