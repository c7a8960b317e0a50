"""Processes that run over the stand-in driver."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.cuda import standin


@pytest.fixture(scope="session")
def driver() -> dict[str, str]:
    """The environment in which processes find the stand-in as their CUDA driver."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return standin.environment()


@pytest.fixture
def begin(start: Callable[..., subprocess.Popen], driver: dict[str, str]) -> Callable[..., subprocess.Popen]:
    """As `start`, over the stand-in."""
    return lambda code, *argv, **more: start(code, *argv, **{**driver, **more})


@pytest.fixture
def over(python: Callable[..., str], driver: dict[str, str]) -> Callable[..., str]:
    """As `python`, over the stand-in."""
    return lambda code, *argv, **more: python(code, *argv, **{**driver, **more})
