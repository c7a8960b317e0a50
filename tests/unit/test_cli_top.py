"""`shminfo top`: rates and ages, who waits for whom, and a terminal that is as it was afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shmbuf import Buffer, Queue, RingFull, segment
from shmbuf.cli import looking, top, watching
from tests.unit.helpers import k, stuck_drainer
from tests.unit.helpers_cli import ROOT, SCHEMA, collector, eventually, inside, rows, stopped_writer

pytest_plugins = ["tests.unit.fixtures_cli"]
ONCE = ("--once", "--json")


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """What happens in each of top's pauses, instead of time going by."""

    def set_it(action: Callable[[], object]) -> None:
        monkeypatch.setattr(top.Keys, "pause", lambda self, length: (action(), True)[1])

    return set_it


# ---- figures -----------------------------------------------------------------------------------------------------


def test_rates_are_what_went_on_between_two_looks(name, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(50))
        buf.draw(8)

        def work() -> None:
            buf.extend(rows(20))
            buf.draw(30), buf.draw(10)

        meanwhile(work)
        frame = shminfo_json("top", name, *ONCE)
        assert frame["seconds"] > 0 and frame["name"] == name and abs(frame["time"] - time.time()) < 100
        in_all = {what: round(r * frame["seconds"], 6) for what, r in frame["rate"].items()}
        assert in_all == {
            "put_rows": 20,
            "stored_rows": 20,
            "sampled_rows": 40,
            "sampled_batches": 2,
            "dropped_rows": 0,
            "skipped_rows": 0,
            "refused_rows": 0,
            "blocked_seconds": 0,
        }
        assert frame["replay_ratio"] == {"interval": 2.0, "ever": 48 / 70}
        assert (frame["size"], frame["rows_total"], frame["waiting_rows"]) == (70, 70, 0)
        (mine,) = frame["collectors"]
        assert (mine["pid"], mine["put_rows"]) == (os.getpid(), 70)
        assert mine["rate"]["put_rows"] * frame["seconds"] == pytest.approx(20)
        ages = frame["ages"]
        assert (ages["interval"]["rows"], ages["ever"]["rows"]) == (40, 48)
        assert 0 <= ages["interval"]["p50_rows"] <= ages["interval"]["p90_rows"] < 128
        assert frame["staleness"] == {"interval": None, "ever": None}


def test_refused_and_dropped_rows_are_in_the_rates(name, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller", full="error", ring_bytes=4096) as buf:

        def work() -> None:
            with pytest.raises(RingFull):
                while True:
                    buf.put(rows(10))

        meanwhile(work)
        frame = shminfo_json("top", name, *ONCE)
        assert frame["rate"]["refused_rows"] * frame["seconds"] == pytest.approx(10)
        assert frame["waiting_rows"] == frame["counters"]["put_rows"] == 110
        assert frame["collectors"][0]["ring_fill"] == frame["rings"]["fill"] > 0.9


def test_a_collector_in_a_reused_slot_starts_its_rates_again(name, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller", max_collectors=1) as looker:
        first = Buffer.attach(name)
        first.extend(rows(30))
        looker.drain()
        others = [first]

        def work() -> None:
            others.pop().close()
            others.append(Buffer.attach(name))
            others[0].extend(rows(5))

        meanwhile(work)
        frame = shminfo_json("top", name, *ONCE)
        others[0].close()
        (entry,) = frame["collectors"]
        assert (entry["put_rows"], entry["incarnation"]) == (5, 2)
        assert entry["rate"]["put_rows"] * frame["seconds"] == pytest.approx(5)


@pytest.mark.parametrize(
    ("bins", "q", "expected"),
    [
        ([], 0.5, None),
        ([0, 0], 0.5, None),
        ([4], 0.5, 0),
        ([0, 4], 0.9, 1),
        ([0, 0, 0, 10], 0.5, 5.5),
        ([0, 0, 0, 10], 0.9, 6.7),
        ([5, 0, 0, 0, 5], 0.5, 0),
        ([5, 0, 0, 0, 5], 0.6, 9.4),
        ([0] * 20 + [2], 1.0, (1 << 20) - 1),
        ([-3, 0, 0, 10], 0.5, 5.5),  # of a damaged one
    ],
)
def test_percentiles_of_a_histogram_by_bit_length(bins, q, expected):
    assert watching.percentile(bins, q, 1 << 30) == (None if expected is None else pytest.approx(expected))


def test_no_percentile_is_above_the_largest_age_there_can_be():
    assert watching.percentile([0, 0, 0, 10], 0.5, 5) == pytest.approx(4.5)
    assert watching.percentile([0, 0, 0, 10], 1.0, 4) == watching.percentile([0, 0, 0, 10], 1.0, 2) == 4


def test_every_age_lies_within_the_edges_of_its_bin():
    for age in (*range(70), (1 << 40) - 1, 1 << 40):
        low, high = watching.edges(age.bit_length())
        assert low <= age <= high
    assert all(watching.edges(n)[1] + 1 == watching.edges(n + 1)[0] for n in range(64))


CLOCK = [(100, 10.0), (200, 9.0), (200, 4.0), (300, 2.0)]


@pytest.mark.parametrize(
    ("age", "end", "expected"),
    [
        (0, 300, 2.0),  # the newest row is as old as the last word of the clock
        (50, 300, 3.0),  # id 250: half-way from 200, where it still was 4 s ago, to 300
        (100, 300, 9.0),  # when 200 was reached, not when it was last seen
        (150, 300, 9.5),
        (200, 300, 10.0),
        (201, 300, None),  # before the clock began
        (0, 400, 0.0),
        (50, 400, 1.0),
    ],
)
def test_an_age_in_rows_becomes_seconds_through_the_clock(age, end, expected):
    assert watching.seconds_old(age, CLOCK, end) == (None if expected is None else pytest.approx(expected))
    assert watching.seconds_old(age, [], end) is None


def test_ages_in_seconds_are_those_of_the_rows(name, shminfo_json, meanwhile):
    """The buffer's own clock: what was stored before the draw is older than what came after, and younger than the buffer."""
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(100))
        meanwhile(lambda: buf.draw(500))
        frame = shminfo_json("top", name, *ONCE)
        ages, old = frame["ages"]["interval"], inside(name)["age_seconds"]
        assert ages["rows"] == 500 and 30 < ages["p50_rows"] < 64 and 64 <= ages["p90_rows"] <= 99
        for q in ("p50", "p90"):
            assert ages[f"{q}_seconds"] is None or 0 <= ages[f"{q}_seconds"] <= old


def test_the_table_has_the_same_figures(name, shminfo, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        meanwhile(lambda: (buf.extend(rows(60)), buf.draw(60)))
        status, out, err = shminfo("top", name, "--once", "--interval", "7")
        assert (status, err) == (0, "")
        assert out.startswith(f"{name}  ok\n") and "q ends" not in out
        assert re.search(r"^rows +60 of 100 \(60\.0%\), ids 0 to 59$", out, re.M)
        assert re.search(r"^in +[0-9,.e+]+ rows/s put, [0-9,.e+]+ rows/s stored$", out, re.M)
        assert re.search(r"^replay +1 now, 1 ever \(rows sampled / stored\)$", out, re.M)
        assert re.search(r"^ages +p50 \d+ rows", out, re.M)
        assert re.search(rf"^writer +pid {os.getpid()} ", out, re.M)
        assert re.search(rf"^ +0 +{os.getpid()} +alive", out, re.M)
        assert max(map(len, out.splitlines())) <= 80 and not any(x.endswith(" ") for x in out.splitlines())


def test_priorities_and_limiter_are_told(name, shminfo, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema={"k": "int64"}, drain="caller") as buf:
        buf.keep_priorities(alpha=1.0, eps=0.0)
        buf.set_limiter(Queue(4))
        buf.extend(k(1, 2, 3, 4))
        meanwhile(lambda: None)
        frame = shminfo_json("top", name, *ONCE)
        assert frame["priorities"]["sum"] == 4 and frame["limiter"]["samples_per_insert"] == 1
        out = shminfo("top", name, "--once")[1]
        assert re.search(r"^priorities +sum 4, 0 set, 0 too late$", out, re.M)
        assert re.search(r"^limiter +\S", out, re.M)


# ---- who waits for whom ------------------------------------------------------------------------------------------


def test_a_stopped_writer_is_named_with_the_remedy(name, shminfo, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller"), stopped_writer(name) as p:
        meanwhile(lambda: None)
        w = shminfo_json("top", name, *ONCE)["writer"]
        assert (w["pid"], w["active"], w["process_state"]) == (p.pid, True, "T")
        out = shminfo("top", name, "--once")[1]
        assert re.search(rf"^writer +pid {p.pid} .*stopped \(SIGSTOP\)", out, re.M)
        assert re.search(rf"^ +\d+ +{p.pid} +alive \(T, stopped\)", out, re.M)


def test_who_waits_for_a_stopped_writer_says_for_whom(name, start, shminfo, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller"), stopped_writer(name) as p:
        code = (
            "import sys; from shmbuf import Buffer; from tests.unit.helpers_cli import rows\n"
            "Buffer.attach(sys.argv[1]).extend(rows(1), timeout=100)"
        )
        waiter = start(code, name, PYTHONPATH=str(ROOT))
        (w,) = eventually(lambda: watching.waits(inside(name)))
        assert (w["pid"], w["waits_for"]) == (waiter.pid, "commit") and 0 <= w["waiting_seconds"] < 100
        assert w["why"] == f"the writer, pid {p.pid} ({w['command']}), is stopped: kill -CONT {p.pid}"
        meanwhile(lambda: None)
        (again,) = shminfo_json("top", name, *ONCE)["waits"]
        assert again["why"] == w["why"] and again["waiting_seconds"] >= w["waiting_seconds"]
        out = " ".join(shminfo("top", name, "--once")[1].split())
        assert f"collector pid {waiter.pid}" in out and f"is stopped: kill -CONT {p.pid}" in out


@pytest.mark.parametrize(
    ("code", "what", "why"),
    [
        ("b.draw(1, timeout=100)", "rows", "0 rows stored, none on the way: collectors have to put more"),
        ("b.extend(rows(1), timeout=100)", "commit", "the writer, pid {me} "),
        (
            "b.put(rows(60), timeout=100), b.put(rows(60), timeout=100), b.put(rows(60), timeout=100)",
            "room",
            "the writer, pid {me} ",
        ),
    ],
    ids=["rows", "commit", "room"],
)
def test_who_waits_says_for_what(name, start, code, what, why):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller", ring_bytes=4096), stuck_drainer(name):
        before = "import sys; from shmbuf import Buffer; from tests.unit.helpers_cli import rows; b = Buffer.attach(sys.argv[1]);"
        p = start(before + code, name, PYTHONPATH=str(ROOT))
        (w,) = eventually(lambda: watching.waits(inside(name)))
        assert (w["pid"], w["waits_for"]) == (p.pid, what) and w["why"].startswith(why.format(me=os.getpid()))


def test_who_waits_for_the_limiter_says_its_numbers(name, start):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.set_limiter(Queue(4))
        code = "import sys; from shmbuf import Buffer; Buffer.attach(sys.argv[1]).draw(1, timeout=100)"
        buf.extend(rows(1))
        buf.draw(1)
        p = start(code, name)
        (w,) = eventually(lambda: watching.waits(inside(name)))
        assert (w["pid"], w["waits_for"]) == (p.pid, "limiter") and "samplers wait for collectors" in w["why"]


def test_who_waits_for_the_schema(name, start):
    with Buffer.create(name, 100):
        p = start("import sys; from shmbuf import Buffer; Buffer.attach(sys.argv[1]).draw(1, timeout=100)", name)
        (w,) = eventually(lambda: watching.waits(inside(name)))
        assert w["pid"] == p.pid and w["waits_for"] in ("schema", "rows") and w["why"]


def test_deaths_are_listed(name, shminfo, shminfo_json, meanwhile):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf, collector(name, 5, "put") as p:
        p.kill()
        p.wait()
        eventually(lambda: (buf._handle.sweep(), buf.drain(), inside(name)["events"])[-1])
        meanwhile(lambda: None)
        frame = shminfo_json("top", name, *ONCE)
        (event,) = [e for e in frame["events"] if e["kind"] == "collector_died"]
        assert event["pid"] == p.pid and 0 <= event["ago_seconds"] < 100
        assert event["text"].startswith(f"collector pid {p.pid} (") and "still lay in its ring" in event["text"]
        assert frame["counters"]["collectors_died"] == 1
        out = " ".join(shminfo("top", name, "--once")[1].split())
        assert f"ago: collector pid {p.pid}" in out and "1 collector, 0 writers, " in out
        assert f"collector pid {p.pid}" in shminfo("show", name)[1]


def test_the_text_of_every_kind_of_death():
    e = {"pid": 7, "command": "python", "rows": 3, "seconds": 0.0625}
    assert watching.event_text({**e, "kind": "collector_died"}) == (
        "collector pid 7 (python) died; 3 rows still lay in its ring"
    )
    assert watching.event_text({**e, "kind": "writer_died"}) == (
        "writer pid 7 (python) died; its transaction of 3 rows was finished for it, 0.0625 s after its last sign of life"
    )
    assert watching.event_text({**e, "kind": "writer_died", "rows": 0}) == (
        "writer pid 7 (python) died; another took over, 0.0625 s after its last sign of life"
    )
    assert watching.event_text({**e, "kind": "process_died", "command": ""}) == "process pid 7 died"


# ---- the end -----------------------------------------------------------------------------------------------------


def test_of_nothing_and_of_what_is_no_buffer(name, shminfo):
    status, out, err = shminfo("top", name, "--once")
    assert (status, out) == (1, "") and f"no buffer named '{name}'" in err
    with open(segment.path_of(name), "wb") as f:
        f.write(b"nonsense" * 10_000)
    status, out, err = shminfo("top", name, "--once")
    assert (status, out) == (1, "") and "damaged" in err and "Traceback" not in err


@pytest.mark.parametrize("how", [("--once",), ("--once", "--json"), ("--json",), ()])
def test_a_buffer_destroyed_meanwhile_ends_it_and_is_said(name, shminfo, meanwhile, how):
    with Buffer.create(name, 100, schema=SCHEMA):
        meanwhile(lambda: segment.destroy(name, force=True))
        status, out, err = shminfo("top", name, *how)
        assert (status, err) == (1, f"shminfo: buffer '{name}' was destroyed while shminfo looked at it\n")
        assert "--once" not in how or out == ""


def test_a_buffer_destroyed_within_a_look_is_destroyed(name, shminfo, meanwhile, monkeypatch):
    """Its memory is still mapped then, and says so."""
    read, looks = looking.read, []

    def destroy_within(*args) -> None:
        looks.append(args)
        if len(looks) == 2:
            segment.destroy(name)
        read(*args)

    Buffer.create(name, 100, schema=SCHEMA).close()
    meanwhile(lambda: None)
    monkeypatch.setattr(looking, "read", destroy_within)
    status, out, err = shminfo("top", name, "--once")
    assert (status, out) == (1, "") and err == f"shminfo: buffer '{name}' was destroyed while shminfo looked at it\n"


def test_another_buffer_of_the_name_is_not_taken_for_it(name, shminfo, meanwhile):
    Buffer.create(name, 100, schema=SCHEMA).close()

    def replace() -> None:
        segment.destroy(name)
        Buffer.create(name, 100, schema=SCHEMA).close()

    meanwhile(replace)
    status, out, err = shminfo("top", name, "--once")
    assert (status, out) == (1, "") and err.endswith("the name means another one now\n")


def test_json_lines_until_ctrl_c(name):
    with Buffer.create(name, 100, schema=SCHEMA) as buf:
        command = [sys.executable, "-m", "shmbuf.cli", "top", name, "--json", "--interval", "0.05"]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            buf.extend(rows(3))
            frames = [json.loads(p.stdout.readline()) for _ in range(3)]
            assert [f["name"] for f in frames] == [name] * 3 and all(f["rate"] and f["seconds"] > 0 for f in frames)
            assert frames[-1]["rows_total"] == 3
            p.send_signal(signal.SIGINT)
            out, err = p.communicate(timeout=60)
            assert (p.returncode, err) == (0, "") and all(json.loads(line) for line in out.splitlines())
        finally:
            p.kill()
            p.communicate()


# ---- a terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """`shminfo` on a pseudo-terminal of its own."""

    def __init__(self, columns: int, lines: int, *args: str):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmbuf.cli", *args],
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            text=True,
        )
        self.seen = ""

    def read_until(self, pattern: str) -> str:
        give_up = time.monotonic() + 60
        while not re.search(pattern, self.plain(), re.S):
            assert time.monotonic() < give_up, self.plain()
            assert self.process.poll() is None, (self.process.stderr.read(), self.plain())
            self._read(0.1)
        return self.plain()

    def _read(self, wait: float) -> bool:
        if not select.select([self.master], [], [], wait)[0]:
            return False
        self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
        return True

    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.replace("\x1b[H", "\n")).replace("\r", "")

    def end(self) -> tuple[int, str]:
        status, (_, err) = None, self.process.communicate(timeout=60)
        status = self.process.returncode
        while self._read(0):
            pass
        return status, err


@contextmanager
def terminal(columns: int, lines: int, *args: str) -> Iterator[Terminal]:
    t = Terminal(columns, lines, *args)
    try:
        yield t
    finally:
        t.process.kill()
        t.process.communicate()
        os.close(t.master)
        os.close(t.slave)


@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03"], ids=["q", "Q", "ctrl-c"])
def test_a_live_view_of_60_columns_ends_quietly_with_the_terminal_as_it_was(name, key):
    with (
        Buffer.create(name, 10_000, schema=SCHEMA) as buf,
        collector(name, 30),
        terminal(60, 40, "top", name, "--interval", "0.1") as t,
    ):
        buf.extend(rows(12))
        t.read_until(r"42 of 10,000.*collectors: 2 alive.*42 of 10,000")
        assert "\x1b[?1049h" in t.seen, "on the other screen: what was on this one comes back"
        assert not termios.tcgetattr(t.slave)[3] & termios.ECHO
        os.write(t.master, key)
        assert t.end() == (0, "")
        assert t.seen.rstrip().endswith("\x1b[?1049l") and t.seen.count("\x1b[?25h") == 1, "screen and cursor are back"
        assert termios.tcgetattr(t.slave) == t.before
        lines = t.plain().split("\n")
        assert max(map(len, lines)) <= 60 and any("rows/s put" in line for line in lines)


def test_a_live_view_tells_that_the_buffer_was_destroyed(name):
    with (
        Buffer.create(name, 100, schema=SCHEMA),
        terminal(100, 30, "top", name, "--interval", "0.1") as t,
    ):
        t.read_until("0 of 100")
        segment.destroy(name, force=True)
        status, err = t.end()
        assert (status, err) == (1, f"shminfo: buffer '{name}' was destroyed while shminfo looked at it\n")
        assert t.seen.count("\x1b[?1049l") == 1 and termios.tcgetattr(t.slave) == t.before


def test_a_terminal_too_small_for_all_collectors_says_how_many_are_left_out(name):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller", ring_bytes=4096) as buf:
        handles = [Buffer.attach(name) for _ in range(30)]
        for h in handles:
            h.extend(rows(1))
        with terminal(60, 24, "top", name, "--interval", "0.1") as t:
            screen = t.read_until("and [0-9]+ more, less busy.*and [0-9]+ more, less busy")
            os.write(t.master, b"q")
            assert t.end() == (0, "")
        shown = len(re.findall(rf"{os.getpid()} +alive", screen.split("and ")[0]))
        assert shown >= 1 and shown + int(re.search("and ([0-9]+) more", screen)[1]) == 30
        for h in handles:
            h.close()
        assert len(buf) == 30


def test_sigterm_gives_the_terminal_back_too(name):
    with Buffer.create(name, 100, schema=SCHEMA), terminal(80, 24, "top", name) as t:
        t.read_until("0 of 100")
        t.process.terminate()
        assert t.end() == (128 + signal.SIGTERM, "")
        assert t.seen.count("\x1b[?1049l") == 1 and termios.tcgetattr(t.slave) == t.before
