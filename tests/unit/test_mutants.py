"""The seeded bugs of tools/dev/mutants.py still fit the code and name tests that there are. `make mutants` runs them."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tomllib")

_path = Path(__file__).resolve().parents[2] / "tools" / "dev" / "mutants.py"
_spec = importlib.util.spec_from_file_location("shmbuf_mutants", _path)
mutants = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)

ALL = mutants.load()


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.name)
def test_it_applies_once_and_its_tests_exist(mutant):
    assert mutant.problem() is None
    assert mutant.breaks.endswith(".") and len(mutant.breaks) > 20


def test_enough_of_them_in_every_protocol():
    assert sum(m.native for m in ALL) >= 12 and sum(not m.native for m in ALL) >= 6
    protocols = {
        "ring",
        "transaction",
        "role",
        "gather",
        "registry",
        "handle",
        "priority_tree",
        "links",
        "limiter",
        "epoch",
    }
    assert protocols <= {Path(m.file).stem for m in ALL if m.native}


def test_what_does_not_fit_any_more_is_told(tmp_path):
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").write_text("def test_a():\n    assert True\n")
    good = mutants.Mutant("name", "code.py", "a = 1", "a = 2", "It breaks.", ("test_code.py::test_a",))
    assert good.problem(tmp_path) is None
    for change, told in (
        ({"old": "= 1"}, "found 2 times"),
        ({"old": "c = 1"}, "found 0 times"),
        ({"file": "gone.py"}, "found 0 times"),
        ({"new": "a = 1"}, "changes nothing"),
        ({"tests": ()}, "names no test"),
        ({"tests": ("test_code.py::test_a", "test_code.py::test_b")}, "no test test_code.py::test_b"),
        ({"tests": ("test_code.py::test",)}, "no test test_code.py::test"),
        ({"tests": ("test_gone.py::test_a[1]",)}, "no test test_gone.py::test_a[1]"),
    ):
        assert told in (replace(good, **change).problem(tmp_path) or ""), change
    good.apply(tmp_path)
    assert (tmp_path / "code.py").read_text() == "a = 2\nb = 1\n"


@pytest.mark.parametrize(
    ("code", "said", "verdict"),
    [
        (0, "3 passed in 0.1s", "passed"),
        (0, "1 skipped in 0.1s", "skipped"),
        (0, "1 passed, 1 skipped in 0.1s", "passed"),
        (1, "1 failed, 2 passed in 0.1s", "caught"),
        (1, "ERROR at teardown of test_a\n1 passed, 1 error in 0.1s", "caught"),
        (1, "ERROR at setup of test_a\n1 error in 0.1s", "error"),
        (1, "E   Failed: Timeout (>55.0s) from pytest-timeout.\n1 failed in 55.1s", "hang"),
        (2, "ERROR collecting tests/test_a.py\nE   ImportError\n1 error in 0.1s", "error"),
        (4, "ERROR: not found: tests/test_a.py::test_b", "error"),
        (5, "no tests ran in 0.1s", "error"),
        (-11, "Fatal Python error: Segmentation fault", "crash"),
        (139, "Fatal Python error: Segmentation fault", "crash"),
    ],
)
def test_only_a_test_that_ran_and_failed_catches(code, said, verdict):
    assert mutants._verdict(code, said) == verdict
    assert mutants.Outcome(verdict, 0.0).caught == (verdict in ("caught", "hang", "crash"))
