"""Each model of a protocol holds, and each mutant of it fails: see tools/dev/models.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

_path = Path(__file__).resolve().parents[2] / "tools" / "dev" / "models.py"
_spec = importlib.util.spec_from_file_location("shmbuf_models", _path)
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


@pytest.mark.timeout(600)  # each is limited in processor time
@pytest.mark.parametrize("entry", [e for e in models.ENTRIES if not e.soak], ids=lambda e: e.name)
def test_verdict(entry):
    if why := entry.missing():
        pytest.skip(why)
    result = entry.run()
    assert result.ok, f"must {'hold' if entry.holds else 'fail'}: {result.verdict} {result.detail}"


def test_every_model_and_litmus_file_is_run_and_has_a_mutant():
    files = {p.name for p in Path(__file__).parent.iterdir() if p.suffix in (".pml", ".c")}
    assert files == {getattr(e, "model", None) or e.file for e in models.ENTRIES}
    assert {p for p in files if p.endswith(".pml")} == {
        e.model for e in models.ENTRIES if isinstance(e, models.Spin) and not e.holds
    }
