"""One case in one process: what crashes or hangs there costs only its own figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEEP_PAGES = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""The heap keeps what was freed: else fresh outputs cost page faults or not, depending on what
the contenders beside them in the same process did to the heap."""


@dataclass
class Outcome:
    records: list[dict] = field(default_factory=list)
    error: str | None = None
    at: str | None = None
    """The contender that was at work when it ended."""


def run_case(spec: dict, timeout: float, python: str = sys.executable) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="shmbuf-bench-") as scratch:
        out, log = Path(scratch, "records"), Path(scratch, "log")
        command = [python, "-m", "tools.bench.case", json.dumps({**spec, "scratch": scratch})]
        with log.open("wb") as sink:
            # A session of its own, so that its children can be ended with it.
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **(KEEP_PAGES if spec["kind"] in ("sample", "beside", "prio", "slices") else {})},
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            try:
                code = child.wait(timeout)
                error = None if code == 0 else _reason(log, code)
            except subprocess.TimeoutExpired:
                error = f"no end within {timeout:.0f} s"
            finally:
                _end_session(child)
                _sweep(Path(scratch).name)
        return _read(out, error)


def _end_session(child: subprocess.Popen) -> None:
    # SIGTERM spares multiprocessing's resource tracker, which then unlinks what the others left.
    for signum, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + patience
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
            while time.monotonic() < deadline:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(0.05)
    child.wait()


def _sweep(name: str) -> None:
    """Buffers are named after the case's scratch folder; a killed case leaves its own behind."""
    for segment in Path("/dev/shm").glob(f"*{name}*"):
        segment.unlink(missing_ok=True)


def _reason(log: Path, code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    # The message of the traceback that came last, not the chatter of other processes after it.
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or [line for line in lines if line] or [f"exit status {code}"])[-1][:200]


def _read(out: Path, error: str | None) -> Outcome:
    outcome = Outcome(error=error)
    for line in out.read_text().splitlines() if out.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off by the kill
        if "at" in record:
            outcome.at = record["at"]
        else:
            outcome.records.append(record)
    return outcome


class Emitter:
    """The case's side: one JSON line per figure, on disk as soon as it is known."""

    def __init__(self, scratch: str):
        self._path = Path(scratch, "records")

    def values(self, key: str, values: list[float]) -> None:
        self._write({"key": key, "values": values})

    def error(self, key: str, reason: str) -> None:
        self._write({"key": key, "error": reason[:200]})

    def at(self, contender: str) -> None:
        self._write({"at": contender})

    def _write(self, record: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
