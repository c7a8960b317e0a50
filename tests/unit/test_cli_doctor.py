"""`shminfo doctor` names each fault with its remedy, and `shminfo gc` removes what nobody can need."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmbuf import Buffer, BufferNotFound, MinSize, Queue, memory, segment
from shmbuf.cli import doctor, looking, machine
from tests.unit.helpers import k, stuck_drainer
from tests.unit.helpers_cli import ROOT, SCHEMA, collector, killed_owner, rows, spoiled_copy, stopped_writer

pytest_plugins = ["tests.unit.fixtures_cli"]


@pytest.fixture
def diagnose(only_mine, shminfo_json):
    """{check: line} of this test's buffers that are not "ok"; ``status``: with which doctor has to end."""

    def run(status: int) -> dict[str, dict]:
        result = shminfo_json("doctor", "--json", status=status)
        assert result["healthy"] == (status == 0)
        return {x["check"]: x for x in result["findings"] if x["buffer"] and x["level"] != "ok"}

    return run


@pytest.fixture(autouse=True)
def a_sound_machine(request, monkeypatch):
    monkeypatch.setattr(doctor, "_cuda", lambda report, used: None)  # it would begin the driver in this process
    if "machine" not in request.node.name:
        monkeypatch.setattr(machine, "examine", lambda facts, say: None)


# ---- buffers -----------------------------------------------------------------------------------------------------


def test_a_buffer_at_work_is_healthy(name, only_mine, diagnose, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA) as buf, collector(name, 5):
        buf.extend(rows(3))
        assert diagnose(0) == {}
        status, out, err = shminfo("doctor")
        assert (status, err) == (0, "")
        assert out == f"ok    {name}: ok, 8 rows\n1 buffer of uid {os.getuid()} looked at: nothing wrong, 0 hints\n"


def test_a_stopped_writer_is_named_while_rows_wait(name, diagnose, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller"), stopped_writer(name) as p:
        line = diagnose(1)["writer"]
        assert line["level"] == "wrong" and line["remedy"] == f"kill -CONT {p.pid}"
        assert f"the writer, pid {p.pid} (" in line["text"] and "is stopped (state T): 7 rows wait" in line["text"]
        assert re.search(r"the last transaction was [0-9.]+ (s|min) ago$", line["text"])
        status, out, _ = shminfo("doctor")
        assert (
            status == 1 and f"wrong {name}: the writer, pid {p.pid}" in out and f"\n       kill -CONT {p.pid}\n" in out
        )


def test_who_should_store_and_is_stopped_while_idle_is_named(name, diagnose, start):
    code = (
        "import sys; from shmbuf import Buffer; from tests.unit.helpers_cli import SCHEMA\n"
        "b = Buffer.create(sys.argv[1], 100, schema=SCHEMA); print('made', flush=True); sys.stdin.read()"
    )
    p = start(code, name, PYTHONPATH=str(ROOT))
    assert p.stdout.readline() == "made\n"
    os.kill(p.pid, signal.SIGSTOP)
    os.waitpid(p.pid, os.WUNTRACED)
    with Buffer.attach(name) as buf:
        buf.put(rows(2))
        line = diagnose(1)["writer"]
        assert line["remedy"] == f"kill -CONT {p.pid}" and f"pid {p.pid} (" in line["text"]


def test_a_writer_that_does_not_go_on_is_told_after_a_while(name, diagnose, monkeypatch):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf, stuck_drainer(name):
        buf.put(rows(2))
        monkeypatch.setattr(doctor, "IDLE", 1000.0)
        assert diagnose(0) == {}
        monkeypatch.setattr(doctor, "IDLE", 0.0)
        line = diagnose(1)["writer"]
        assert "does not go on: 2 rows wait" in line["text"] and line["remedy"] == f"cat /proc/{os.getpid()}/stack"


def test_rows_that_wait_for_samplers_are_a_hint_with_the_limiters_numbers(name, diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "IDLE", 0.0)
    with Buffer.create(name, 100, schema={"k": "int64"}, drain="caller") as buf:
        buf.set_limiter(Queue(2))
        buf.extend(k(1, 2, 3))
        buf.put(k(4))
        buf.drain()
        line = diagnose(0)["limiter"]
        assert line["level"] == "hint" and "collectors wait for samplers" in line["text"]
        buf.set_limiter(MinSize(1))
        line = diagnose(0)["writer"]
        assert line["level"] == "hint" and 'drain="caller"' in line["text"]


def test_rows_left_in_the_rings_of_a_buffer_nobody_has_are_a_hint(name, diagnose, monkeypatch):
    monkeypatch.setattr(doctor, "IDLE", 0.0)
    killed_owner(name, "b.extend(rows(1)), b.put(rows(4))")
    found = diagnose(0)
    assert "1 row, " in found["unattached"]["text"] and found["unattached"]["remedy"].startswith(f"shminfo rm {name} ")
    assert found["writer"]["remedy"] == f"python -m shmbuf.drain --leave-when-alone {name}"
    assert "4 rows wait in rings" in found["writer"]["text"] and "4 rows lie in its ring" in found["collector"]["text"]
    command = found["writer"]["remedy"].replace("python", sys.executable, 1).split()
    assert subprocess.run(command, timeout=100).returncode == 0
    assert diagnose(0).keys() == {"unattached"}, "what it proposed helps"


def test_a_dead_collector_is_named(name, diagnose):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller"), collector(name, 6, "put") as p:
        p.kill()
        p.wait()
        line = diagnose(1)["collector"]
        assert line["level"] == "wrong" and f"collector pid {p.pid} (" in line["text"] and "6 rows lie" in line["text"]


def test_damaged_and_foreign_files_are_named(name, diagnose):
    path = segment.path_of(name)
    Path(path).write_bytes(b"nonsense" * 10_000)
    os.chmod(path, 0o600)
    line = diagnose(1)["readable"]
    assert line["remedy"] == f"shminfo rm --force {name}" and "damaged" in line["text"]
    os.chmod(path, 0o602)
    assert diagnose(1)["readable"]["remedy"] == f"ls -ld {path}"


def test_remedies_for_another_users_buffers_say_whose(name, diagnose, shminfo_json):
    Path(path := segment.path_of(name, 4_000_000_001)).touch()
    try:
        os.chown(path, 4_000_000_001, -1)
        result = shminfo_json("doctor", "--json", "--owner", "4000000001", status=1)
        (line,) = [x for x in result["findings"] if x["buffer"] == name]
        assert line["remedy"] == "shminfo gc --owner 4000000001"
        both = shminfo_json("doctor", "--json", "--all-users", status=1)
        assert name in [x["buffer"] for x in both["findings"]] and diagnose(0) == {}
    except PermissionError:
        pytest.skip("only root gives files away")
    finally:
        os.unlink(path)


# ---- leftovers, and gc -------------------------------------------------------------------------------------------


def half_built(name: str) -> int:
    """Somebody was killed while he reserved memory for the first rows; the bytes of memory that the file holds."""
    code = (
        "from shmbuf._extension import native; native.arm('build_grown=kill@1'); b.extend(rows(3)); "
        "raise AssertionError('it was not killed')"
    )
    killed_owner(name, code, SHMBUF_NATIVE="failpoints")
    return os.stat(segment.path_of(name)).st_blocks * 512


def test_a_half_built_buffer_is_named_and_removed(name, only_mine, diagnose, shminfo, shminfo_json):
    size = half_built(name)
    assert looking.look(name, os.getuid())["state"] == "half-built"
    line = diagnose(1)["leftover"]
    assert line["remedy"] == "shminfo gc" and "died before it held a row" in line["text"]
    with Buffer.attach(name):
        assert diagnose(0)["half_built"]["level"] == "hint", "somebody may still put"
        assert shminfo_json("gc", "--json")["removed"] == []
    assert shminfo("gc")[1].endswith(f"freed {size:,} bytes in 1 buffer\n")
    assert diagnose(0) == {}
    with pytest.raises(BufferNotFound):
        segment.attach(name, watch=True)


def test_a_buffer_that_is_being_built_is_no_leftover(name, only_mine, shminfo_json):
    half_built(name)
    handle = segment.attach(name, presence=False)
    assert handle.try_lock_build()
    assert looking.look(name, os.getuid())["state"] == "being built"
    assert shminfo_json("gc", "--json")["removed"] == []
    handle.unlock_build()
    assert looking.look(name, os.getuid())["state"] == "half-built"
    handle.close()


@pytest.fixture
def unnamed(monkeypatch):
    """A buffer without a name whose owner was killed; the only one that `shminfo` sees."""
    found = killed_owner(None, "b.extend(rows(9))")
    everybody = looking.buffers
    monkeypatch.setattr(looking, "buffers", lambda owner: [x for x in everybody(owner) if x[1] == found])
    yield found
    if os.path.exists(segment.path_of(found)):
        segment.destroy(found)


def test_a_stale_unnamed_buffer_is_named_and_removed_with_its_bytes(unnamed, shminfo, shminfo_json):
    size = os.stat(segment.path_of(unnamed)).st_blocks * 512
    assert size > 4096
    (line,) = shminfo_json("doctor", "--json", status=1)["findings"]
    assert (line["check"], line["level"], line["remedy"]) == ("leftover", "wrong", "shminfo gc")
    dry = shminfo_json("gc", "--dry-run", "--json")
    assert (dry["dry_run"], dry["freed_bytes"]) == (True, size) and os.path.exists(segment.path_of(unnamed))
    assert shminfo("gc", "--dry-run")[1].splitlines()[-1] == f"would free {size:,} bytes in 1 buffer"
    result = shminfo_json("gc", "--json")
    assert result == {**dry, "dry_run": False} and [r["name"] for r in result["removed"]] == [unnamed]
    assert not os.path.exists(segment.path_of(unnamed))
    assert shminfo("gc") == (0, "nothing to remove\n", "")
    assert shminfo_json("doctor", "--json")["healthy"]


def test_named_buffers_stay_unless_it_is_asked_for(name, only_mine, shminfo, shminfo_json):
    Buffer.create(name, 100, schema=SCHEMA).close()
    with Buffer.create(f"{name}.in-use", 100, schema=SCHEMA) as buf:
        buf.extend(rows(2))
        size = os.stat(segment.path_of(name)).st_blocks * 512
        result = shminfo_json("gc", "--json")
        assert (result["removed"], result["freed_bytes"]) == ([], 0)
        assert (result["kept_unattached"], result["kept_bytes"]) == ([name], size)
        status, out, _ = shminfo("gc")
        assert (
            status == 0
            and out.startswith("nothing to remove\nkept 1 named buffer nobody is attached to")
            and name in out
        )
        status, out, _ = shminfo("gc", "--all-unattached")
        assert status == 0 and out.startswith(f"removed {name} (nobody is attached (0 rows)): ")
        assert out.endswith(f"freed {size:,} bytes in 1 buffer\n")
        assert not os.path.exists(segment.path_of(name)) and len(buf) == 2


def test_empty_files_and_damaged_unnamed_ones_go_and_damaged_named_ones_stay(
    name, only_mine, shminfo_json, monkeypatch
):
    nobodys = f"{segment.UNNAMED}{name}"
    monkeypatch.setattr(
        looking, "buffers", lambda owner: [(owner, n) for n in segment.names() if n.startswith((name, nobodys))]
    )
    paths = {n: segment.path_of(n) for n in (name, f"{name}.damaged", nobodys)}
    try:
        Path(paths[name]).touch(0o600)
        for n in (f"{name}.damaged", nobodys):
            spoiled_copy(name, paths[n], lambda blob: blob[:50_000])
        with open(paths[nobodys], "rb") as f:
            size = os.fstat(f.fileno()).st_blocks * 512
        result = shminfo_json("gc", "--json")
        assert sorted(r["name"] for r in result["removed"]) == sorted([name, nobodys]) and result["freed_bytes"] == size
        assert [os.path.exists(p) for p in paths.values()] == [False, True, False]
    finally:
        for p in paths.values():
            if os.path.exists(p):
                os.unlink(p)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)], ids=["fifo", "folder", "link"]
)
def test_what_is_no_regular_file_is_left_alone(name, only_mine, shminfo_json, make):
    path = segment.path_of(name)
    make(path)
    try:
        assert shminfo_json("gc", "--json", "--all-unattached")["removed"] == []
        (line,) = shminfo_json("doctor", "--json", status=1)["findings"]
        assert line["remedy"] == f"ls -ld {path}" and os.path.lexists(path)
    finally:
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def test_what_somebody_attached_to_meanwhile_stays_and_is_said(unnamed, shminfo, monkeypatch):
    with Buffer.attach(unnamed):
        monkeypatch.setattr("shmbuf.cli.removing.leftover", lambda info: "it looked stale a moment ago")
        status, out, err = shminfo("gc")
        assert (status, out) == (1, "nothing to remove\n") and f"'{unnamed}' is attached" in err
    assert os.path.exists(segment.path_of(unnamed))


# ---- the machine -------------------------------------------------------------------------------------------------

SOUND = {
    "shm_bytes": 8 << 30,
    "shm_free_bytes": 4 << 30,
    "shm_used_by_buffers_bytes": 1 << 30,
    "memory_available_bytes": 16 << 30,
    "cgroup_headroom_bytes": None,
    "open_files_limit": 1024,
    "file_size_limit_bytes": None,
    "remove_ipc": False,
}


def examined(**facts) -> dict[str, dict]:
    report = doctor.Report()
    machine.examine({**SOUND, **facts}, report.say)
    return {x["check"]: x for x in report.lines}


@pytest.mark.parametrize(
    ("facts", "check", "level", "text", "remedy"),
    [
        ({"shm_free_bytes": 1 << 20}, "shm", "wrong", "no buffer can be created", "remount,size="),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 60 << 20}, "shm", "hint", "64.0 MiB", "--shm-size"),
        ({"shm_free_bytes": 100 << 20}, "shm", "hint", "nearly full", "shminfo gc"),
        ({"memory_available_bytes": 1 << 20}, "memory_available", "wrong", "1.0 MiB left", "ps aux"),
        ({"memory_available_bytes": 1 << 30}, "memory_available", "hint", "it ends first", "ps aux"),
        ({"cgroup_headroom_bytes": 1 << 20}, "cgroup_headroom", "wrong", "the memory cgroup", "/proc/self/cgroup"),
        ({"open_files_limit": 64}, "open_files", "hint", "64 files", "ulimit -n"),
        ({"open_files_limit": 8}, "open_files", "wrong", "8 files", "ulimit -n"),
        ({"file_size_limit_bytes": 1 << 30}, "file_size", "hint", "1.0 GiB", "ulimit -f"),
        ({"file_size_limit_bytes": 4096}, "file_size", "wrong", "4.0 KiB", "ulimit -f"),
        ({"remove_ipc": True}, "remove_ipc", "hint", "RemoveIPC=yes", "loginctl enable-linger"),
    ],
)  # fmt: skip
def test_machine_faults_have_their_remedies(facts, check, level, text, remedy):
    assert {x["level"] for x in examined().values()} == {"ok"}
    found = examined(**facts)
    assert {c for c, x in found.items() if x["level"] != "ok"} == {check}
    line = found[check]
    assert line["level"] == level and text in line["text"] and remedy in line["remedy"]


def test_machine_facts_are_this_machines(monkeypatch):
    used = 123
    facts = machine.facts(used)
    shm = os.statvfs("/dev/shm")
    assert facts["shm_bytes"] == shm.f_blocks * shm.f_frsize and 0 <= facts["shm_free_bytes"] <= facts["shm_bytes"]
    assert facts["shm_used_by_buffers_bytes"] == used and facts["memory_available_bytes"] > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert machine.facts(0)["open_files_limit"] == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(memory, "cgroup_headroom", lambda: (1 << 63) - 4096)
    assert machine.facts(0)["cgroup_headroom_bytes"] is None, "cgroup v1's word for no limit"


def test_machine_in_json_and_in_words(only_mine, shminfo, shminfo_json):
    status, out, _ = shminfo("doctor")
    result = shminfo_json("doctor", "--json", status=status)
    assert result["machine"].keys() == SOUND.keys()
    lines = [x for x in result["findings"] if x["buffer"] is None]
    assert {x["check"] for x in lines} == examined().keys()
    assert "/dev/shm has " in out and "RLIMIT" in str(lines) and out.count("\n") >= len(lines)


@pytest.mark.parametrize(
    ("files", "uid", "expected"),
    [
        ({}, 1000, True),  # logind's default
        ({"a.conf": "[Login]\nRemoveIPC=no\n"}, 1000, False),
        (
            {"a.conf": "[Login]\nRemoveIPC=no\n", "b.conf": "[Login]\nRemoveIPC = yes\n"},
            1000,
            True,
        ),  # the last one counts
        ({"a.conf": "[Login]\n#RemoveIPC=no\n"}, 1000, True),
        ({"a.conf": "\x00\xff no section"}, 1000, True),
        ({}, 999, False),
        ({}, 0, False),
    ],
)
def test_machine_that_removes_ipc(tmp_path, monkeypatch, files, uid, expected):
    (tmp_path / "seats").mkdir()
    (tmp_path / "linger").mkdir()
    for file, text in files.items():
        (tmp_path / file).write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(machine, "LOGIND", (str(tmp_path / "*.conf"),))
    monkeypatch.setattr(machine, "LOGIND_RUNS", str(tmp_path / "seats"))
    monkeypatch.setattr(machine, "LINGER", str(tmp_path / "linger"))
    monkeypatch.setattr(machine.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann"))
    assert machine.removes_ipc(uid) is expected
    (tmp_path / "linger" / "ann").touch()
    assert not machine.removes_ipc(uid), "her session has no end"
    (tmp_path / "linger" / "ann").unlink()
    (tmp_path / "seats").rmdir()
    assert not machine.removes_ipc(uid), "there is no logind"
