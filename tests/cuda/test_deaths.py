"""Whoever dies at a call of the driver leaves a buffer that others make, map and use: over the stand-in."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line
from tests.cuda.test_sharing import WAYS, until

MAKES = (
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
)
MAKES += ("cuMemImportFromShareableHandle", "cuMemcpyHtoD", "cuMemUnmap", "cuModuleLoadData")
MAPS = (
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
    "cuModuleLoadData",
    "cuStreamCreate",
    "cuMemHostAlloc",
)
WRITES = ("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize")
READS = ("cuLaunchKernel", "cuEventRecord", "cuEventSynchronize")
WHEN = ("before", "after")
# Makes or finds the buffer argv[1].
EITHER = MAKER.replace('drain="caller"', 'drain="caller", exists="attach"').replace("b.extend(rows(0, 10)); ", "")
TEN = str(list(range(10)))


def killed(p) -> None:
    """What it said is of no interest: it died of what it was told to."""
    p.communicate(timeout=100)
    assert p.returncode == -signal.SIGKILL


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("call", MAKES)
def test_another_builds_what_a_dead_maker_did_not(begin, over, name, call, when):
    killed(begin(MAKER, name, STANDIN_KILL=f"{call}:1{':after' * (when == 'after')}"))
    if call == "cuModuleLoadData":  # it was built, and its maker the only one who had it
        said = over(PRELUDE + "say(tried(lambda: Buffer.attach(sys.argv[1])))", name)
        assert said.startswith("StorageLost") and "nobody is attached" in said
        replace = MAKER.replace('drain="caller"', 'drain="caller", exists="replace"')
        assert line(begin(replace, name)) == "made"
        return
    second = begin(EITHER, name)
    assert line(second) == "made"
    assert ask(second, "b.extend(rows(0, 10)).tolist()") == TEN
    user = begin(USER, name)
    assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("call", ["cuMemAlloc", "cuIpcGetMemHandle"])
def test_a_steward_that_dies_while_it_is_made_is_an_error_and_no_buffer(over, name, call, when):
    code = (
        PRELUDE
        + "say(tried(lambda: Buffer.create(sys.argv[1], 100, schema=SPEC, device='cuda'))); say(sys.argv[1] in shmbuf.segment.names())"
    )
    said, left = over(code, name, STANDIN_KILL=f"{call}:1{':after' * (when == 'after')}", **WAYS["ipc"]).splitlines()
    assert said.startswith("DeviceError") and "steward" in said and left == "False"


@pytest.mark.parametrize("when", WHEN)
def test_a_steward_that_is_stopped_while_it_is_made_is_named_killed_and_no_buffer(over, name, when):
    code = PRELUDE + (
        "from shmbuf.cuda import holding\n"
        "holding.STEWARD_STARTS, within = 2.0, holding._line_within\n"
        "def stopped(p, seconds):\n"
        "    line = within(p, 60.0) if sys.argv[2] == 'after' else ''\n"
        "    os.kill(p.pid, signal.SIGSTOP)\n"
        "    while shmbuf.segment.process_state(p.pid) != 'T': time.sleep(0.01)\n"
        "    return line or within(p, seconds)\n"
        "holding._line_within = stopped\n"
        "say(tried(lambda: Buffer.create(sys.argv[1], 100, schema=SPEC, device='cuda')))\n"
        "say(holding._stewards[0].wait(60), sys.argv[1] in shmbuf.segment.names())\n"
    )
    said, left = over(code, name, when, **WAYS["ipc"]).splitlines()
    assert said.startswith("DeviceError") and "its steward, pid " in said and "(stopped)" in said and " 2 s" in said
    assert left == "-9 False"


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("call", MAPS)
def test_one_who_dies_at_its_first_read_disturbs_nobody(begin, name, call, when):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    killed(
        begin(
            USER.replace('say("attached"', 'stored(b); say("attached"'),
            name,
            STANDIN_KILL=f"{call}:1{':after' * (when == 'after')}",
        )
    )
    user = begin(USER, name)
    assert line(user) == "attached cuda:0"
    assert ask(user, "b.extend(rows(10)).tolist()") == "[10]" and ask(maker, "stored(b)[-1]") == "10"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("call", WRITES)
def test_rows_of_a_writer_who_dies_at_it_are_stored_once(begin, name, tmp_path, call, when, late):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    log = {"STANDIN_LATE": "1", "STANDIN_LOG": str(tmp_path / "log")} if late else {}
    writer = begin(
        USER + "\n", name, STANDIN_KILL=f"{call}:1{':after' * (when == 'after')}", STANDIN_DELAY_US="20000", **log
    )
    assert line(writer) == "attached cuda:0"
    writer.stdin.write("(b.put(rows(10, 20)), b.drain())\n")
    writer.stdin.flush()
    killed(writer)
    until(lambda: ask(maker, "(b.drain(), len(b))[1]") == "30")
    for first in (30, 60, 90):  # what may land late does not land in what comes after it
        assert ask(maker, f"b.extend(rows({first}, 30)).tolist()[0]") == str(first)
        assert ask(maker, "stored(b)[-1]") == str(first + 29)
    assert ask(maker, "stored(b) == list(range(20, 120))") == "True"
    assert ask(maker, "b.stats()['malformed_records']") == "0"


@pytest.mark.parametrize("call", READS)
def test_a_reader_who_dies_disturbs_nobody(begin, name, call):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    reader = begin(USER, name, STANDIN_KILL=f"{call}:1")
    assert line(reader) == "attached cuda:0"
    reader.stdin.write("b.draw(3)\n")
    reader.stdin.flush()
    killed(reader)
    assert ask(maker, "b.extend(rows(10, 100)).tolist()[-1]") == "109" and ask(maker, "stored(b)[0]") == "10"


def test_a_thousand_times_attached_and_let_go_leaves_nothing(begin, over, name):  # B150
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    code = PRELUDE + (
        "def count():\n"
        "    maps = open('/proc/self/maps').read()\n"
        "    return len(os.listdir('/proc/self/fd')), maps.count('standin-cuda'), len(os.listdir('/proc/self/task'))\n"
        "first = None\n"
        "for i in range(1000):\n"
        "    with Buffer.attach(sys.argv[1]) as b: assert right(b.draw(4)[0])\n"
        "    first = first or i == 9 and count()\n"
        "say(first, count(), count() == first)"
    )
    others = [begin(code, name) for _ in range(1)]
    said = over(code, name)
    assert said.endswith("True"), said
    for p in others:
        assert p.communicate(timeout=100)[0].strip().endswith("True")
    assert ask(maker, "len(os.listdir('/proc/self/fd')) < 40") == "True"


def test_the_steward_s_memory_is_let_go_as_often(begin, over, name):
    maker = begin(MAKER, name, **WAYS["ipc"])
    assert line(maker) == "made"
    code = PRELUDE + (
        "count = lambda: (len(os.listdir('/proc/self/fd')), open('/proc/self/maps').read().count('standin-cuda'))\n"
        "for i in range(200):\n"
        "    with Buffer.attach(sys.argv[1]) as b: assert right(b.draw(4)[0])\n"
        "    if i == 9: first = count()\n"
        "say(first, count(), first == count())"
    )
    assert over(code, name, **WAYS["ipc"]).endswith("True")


def test_rows_are_whole_while_copies_dawdle(begin, name):  # B139
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    busy = begin(
        PRELUDE + "b = Buffer.attach(sys.argv[1]); say('on'); n = 10\nwhile True: b.extend(rows(n, 37)); n += 37",
        name,
        STANDIN_DELAY_US="3000",
    )
    assert line(busy) == "on"
    reader = begin(USER, name, STANDIN_DELAY_US="3000")
    assert line(reader) == "attached cuda:0"
    assert ask(reader, "all(right(b.draw(20)[0]) for _ in range(300))") == "True"
    assert int(ask(maker, "b.window[1]")) > 200 and busy.poll() is None
    os.kill(busy.pid, signal.SIGKILL)
    until(
        lambda: ask(reader, "(b.drain(), len(stored(b)))[1]") == "100"
    )  # what it had begun to write over, as no thread drains
