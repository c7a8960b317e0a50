"""The examples as a user runs them: they end well with a small target, and end cleanly whatever happens. Import torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from shmbuf import Buffer, BufferNotFound, segment

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENDLESS = ("--target-return", "1e9")


class Run:
    """An example in a process group of its own, as a shell starts it, with small settings and a buffer of its own name."""

    def __init__(self, script: str, name: str, out: Path, *options: str):
        self.name = name
        self.process = subprocess.Popen(
            [
                sys.executable,
                EXAMPLES / script,
                "--name",
                name,
                "--out",
                out,
                "--warmup",
                "300",
                "--evaluate-every",
                "20",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.group = self.process.pid

    def wait_rows(self, n: int) -> Buffer:
        """Attach, once n rows are there."""
        while self.process.poll() is None:
            try:
                buffer = Buffer.attach(self.name, readonly=True)
                if len(buffer) >= n:
                    return buffer
                buffer.close()
            except BufferNotFound:
                pass
            time.sleep(0.05)
        pytest.fail(f"ended before it wrote {n} rows:\n{self.process.stdout.read()}")

    def members(self) -> list[psutil.Process]:
        """Processes of the group that are not yet gone."""
        found = []
        for p in psutil.process_iter(["pid", "status"]):
            try:
                if os.getpgid(p.pid) == self.group and p.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(p)
            except ProcessLookupError:
                pass
        return found

    def end(self) -> tuple[int, str]:
        """Exit status and output, once neither process nor buffer is left."""
        output, _ = self.process.communicate()
        assert not psutil.wait_procs(self.members(), timeout=10)[1], "processes are left"
        assert not [n for n in segment.names() if n.startswith(self.name)], "buffers are left"
        return self.process.returncode, output


@pytest.fixture
def example(unique_name, tmp_path):
    runs = []

    def start(script: str, *options: str) -> Run:
        runs.append(Run(script, unique_name, tmp_path / "pictures", *options))
        return runs[-1]

    yield start
    for run in runs:
        for p in run.members():
            p.kill()
        run.process.wait()
        run.process.stdout.close()


@pytest.mark.parametrize(("script", "target"), [("dqn_cartpole", "30"), ("sac_vector", "-1900")])
def test_reaches_its_target_and_says_what_it_did(example, tmp_path, script, target):
    status, output = example(f"{script}.py", "--target-return", target, "--collectors", "2").end()
    assert status == 0, output
    lines = dict(
        line.strip().split("  ", 1) for line in output.splitlines() if line.startswith("  ") and " s  in " not in line
    )
    lines = {key: text.strip() for key, text in lines.items()}
    assert list(lines) == ["rows written", "per collector", "batches sampled", "final return", "picture"], output
    written, collectors = lines["rows written"], lines["per collector"].split()
    assert int(written.split()[0].replace(",", "")) == sum(int(n.replace(",", "")) for n in collectors) >= 300
    assert len(collectors) == 2
    assert int(lines["batches sampled"].split()[0].replace(",", "")) >= 20
    assert float(lines["final return"].split()[0]) >= float(target)
    picture = Path(lines["picture"])
    assert picture == tmp_path / "pictures" / f"{script}.png" and picture.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in output and "Warning" not in output, output


def test_killed_collector_ends_everything(example):
    run = example("dqn_cartpole.py", *ENDLESS)
    with run.wait_rows(300) as buffer:
        victim = buffer.collectors()[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    status, output = run.end()
    assert status == 1 and "ended with exit code -9" in output and "Traceback" not in output, output


def test_gives_up_in_time(example):
    status, output = example("dqn_cartpole.py", *ENDLESS, "--timeout", "1").end()
    assert status == 1 and "gave up" in output, output


def test_ctrl_c_ends_everything_without_a_traceback_and_a_watcher_sees_it_end(example):
    run = example("dqn_cartpole.py", *ENDLESS)
    run.wait_rows(300).close()
    watcher = subprocess.Popen(
        [sys.executable, EXAMPLES / "attach_and_watch.py", run.name], stdout=subprocess.PIPE, text=True
    )
    seen = [watcher.stdout.readline() for _ in range(4)]
    os.killpg(run.group, signal.SIGINT)  # a terminal sends it to all of them
    status, output = run.end()
    assert status == 130 and "interrupted" in output and "Traceback" not in output, output
    rest, _ = watcher.communicate()
    assert watcher.returncode == 0 and rest.endswith(f"{run.name} is gone\n"), rest
    assert "of 100,000 rows" in seen[0] and "collectors" in seen[0] and "rows/s" in seen[2], seen
    assert "observation [64, 4]" in seen[1] and "next/terminated [64]" in seen[1], seen


def test_vectorised_rows_never_lead_from_one_episode_into_the_next(example):
    """Every stored row obeys the pendulum's equations of motion, also past the automatic resets after 200 steps."""
    run = example("sac_vector.py", *ENDLESS, "--warmup", "4000")
    with run.wait_rows(2500) as buffer:  # 8 environments: more than one episode each
        rows = buffer.gather(np.arange(*buffer.window))
    os.killpg(run.group, signal.SIGINT)
    status, output = run.end()
    assert status == 130 and "Traceback" not in output, output
    cos, sin, speed = rows["observation"].T.astype(np.float64)
    after = rows["next"]["observation"]
    new_speed = np.clip(speed + 0.05 * (15 * sin + 3 * 2 * rows["action"][:, 0]), -8, 8)
    angle = np.arctan2(sin, cos) + 0.05 * new_speed
    assert np.allclose(after, np.stack([np.cos(angle), np.sin(angle), new_speed], 1), atol=1e-4)
    assert rows["next"]["done"].any() and not rows["next"]["terminated"].any()


def test_two_learners():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "two_learners.py", "--rows", "8000"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.count("beta 1.00") == 2 and "64 slices of 8 steps" in done.stdout and "8,000 rows in" in done.stdout
    )
