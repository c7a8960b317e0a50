"""`shminfo`: what it shows of living, dead, unfinished and damaged buffers, and that looking disturbs nobody."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from shmbuf import Buffer, BufferNotFound, RingFull, StorageLost, __version__, printing, segment
from shmbuf._extension import native
from shmbuf.cli import looking
from tests.unit.helpers_cli import ROOT, SCHEMA, collector, killed_owner, row_of, rows

pytest_plugins = ["tests.unit.fixtures_cli"]

# ---- list --------------------------------------------------------------------------------------------------------


def test_list_shows_rows_sizes_and_who_is_attached(name, shminfo, shminfo_json):
    with Buffer.create(name, 1000, schema=SCHEMA) as buf, collector(name, 30):
        buf.extend(rows(12))
        (info,) = [i for i in shminfo_json("--json") if i["name"] == name]
        assert (info["size"], info["capacity"], info["rows_total"], info["row_bytes"]) == (42, 1000, 42, 32)
        assert (info["state"], info["reason"], info["attached"], info["unnamed"]) == ("ok", None, True, False)
        assert (info["processes_alive"], info["collectors_alive"]) == (2, 2)
        st = os.stat(segment.path_of(name))
        assert (info["file_bytes"], info["allocated_bytes"]) == (st.st_size, st.st_blocks * 512)
        assert info["allocated_bytes"] < info["file_bytes"], "rings are sparse"
        assert info["owner"] == os.getuid() and info["mode"] == "0600" and 0 <= info["age_seconds"] < 100
        for command in ([], ["list"]):
            status, out, _ = shminfo(*command)
            assert status == 0
            assert row_of(out, name).split()[1:4] == ["42", "1,000", "32"] and row_of(out, name).split()[-1] == "ok"


def test_list_names_a_buffer_without_schema_and_one_that_lost_its_creator(name, shminfo, shminfo_json):
    with Buffer.create(name, 10):
        code = "from shmbuf import Buffer; b = Buffer.create(None, 10); print(b.name, flush=True); input()"
        p = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        unnamed = p.stdout.readline().strip()
        try:
            found = {i["name"]: i for i in shminfo_json("--json")}
            assert found[name]["state"] == found[unnamed]["state"] == "no schema yet"
            assert found[name]["row_bytes"] is None and found[unnamed]["unnamed"]
            p.kill()
            p.wait()
            states, table = {i["name"]: i["state"] for i in shminfo_json("--json")}, shminfo()[1]
            if unnamed in table:  # another test's create may have collected it already
                assert states[unnamed] == "stale unnamed" and "stale unnamed" in row_of(table, unnamed)
        finally:
            p.kill()
            p.communicate()
            with suppress(BufferNotFound):  # another test's create collects it, too
                segment.destroy(unnamed)


def test_a_buffer_destroyed_while_the_list_is_made_is_left_out(name, shminfo_json, monkeypatch):
    with Buffer.create(name, 10):
        listed = list(looking.buffers(os.getuid()))
    segment.destroy(name)
    monkeypatch.setattr(looking, "buffers", lambda owner: listed)
    assert name in [n for _, n in listed] and name not in [i["name"] for i in shminfo_json("--json")]


def test_rows_that_wait_in_rings_are_told_of(name, shminfo, shminfo_json):
    code = (
        "import os, signal, sys; from shmbuf import Buffer; from tests.unit.helpers_cli import SCHEMA, rows\n"
        "bufs = [Buffer.create(sys.argv[1], 100, schema=SCHEMA, drain='caller'), Buffer.attach(sys.argv[1])]\n"
        "bufs[0].extend(rows(1)), bufs[0].put(rows(2)), bufs[1].put(rows(3)), os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, name], cwd=ROOT).returncode == -signal.SIGKILL
    (info,) = [i for i in shminfo_json("--json") if i["name"] == name]
    assert (info["size"], info["waiting_rows"]) == (1, 5)
    assert row_of(shminfo()[1], name).split()[-5:-3] == ["1", "5"]
    assert re.search("written +1 row, 5 waiting in rings\n", shminfo("show", name)[1])
    memory = os.stat(segment.path_of(name)).st_blocks * 512
    freed = f"{memory / (1 << 20):.1f} MiB freed"
    assert shminfo("rm", name) == (0, f"removed {name}, and with it 5 rows that waited in rings: {freed}\n", "")
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(2))
        assert "waiting" not in shminfo("show", name)[1]
    memory = os.stat(segment.path_of(name)).st_blocks * 512
    (result,) = shminfo_json("rm", name, "--json")
    assert (result["removed"], result["waiting_rows"]) == (True, 0)
    assert (result["freed_bytes"], result["held_bytes"]) == (memory, 0)


def test_list_of_a_user_without_buffers(shminfo, shminfo_json):
    assert shminfo_json("--json", "--owner", "4000000001") == []
    assert shminfo("--owner", "4000000001")[:2] == (0, "no buffers of uid 4000000001 in /dev/shm\n")


def test_list_of_all_users_says_whose(name, shminfo, shminfo_json):
    with Buffer.create(name, 10):
        assert (os.getuid(), name) in [(i["owner"], i["name"]) for i in shminfo_json("list", "--all-users", "--json")]
        line = next(x for x in shminfo("--all-users")[1].splitlines() if name in x)
        assert line.split()[:2] == [str(os.getuid()), name]


# ---- show --------------------------------------------------------------------------------------------------------


def test_show_json_is_complete(name, shminfo_json):
    settings = {"schema": SCHEMA, "timeout": 2.5, "max_collectors": 8, "ring_bytes": 1 << 16, "drain": "caller"}
    with Buffer.create(name, 100, **settings) as buf, collector(name, 130) as other:
        buf.extend(rows(20))
        info = shminfo_json("show", name, "--json")
        assert info == {
            **info,
            "capacity": 100,
            "size": 100,
            "rows_total": 150,
            "write_count": 150,
            "row_bytes": 32,
            "creator_pid": os.getpid(),
        }
        assert info["window"] == {"first_id": 50, "last_id": 149, "end_id": 150}
        assert info["schema"] == {
            "payload_bytes": 25,
            "row_bytes": 32,
            "columns": [
                {"key": ["obs"], "dtype": "float32", "shape": [3], "bytes": 12, "offset": 0},
                {"key": ["next", "obs"], "dtype": "float32", "shape": [3], "bytes": 12, "offset": 12},
                {"key": ["next", "done"], "dtype": "bool", "shape": [], "bytes": 1, "offset": 24},
            ],
        }
        assert info["settings"] == {
            "full": "block",
            "timeout": 2.5,
            "drain": "caller",
            "class": None,
            "batch_size": None,
            "sampler": None,
            "sampler_arguments": {},
            "priority_key": None,
            "pin_memory": None,
            "max_collectors": 8,
            "max_members": info["settings"]["max_members"],
            "ring_bytes": 1 << 16,
        }
        part, stride = info["segment"], native.ring_stride(1 << 16, True)
        assert (part["rings_bytes"], part["rings_allocated_bytes"], part["rings_in_use"]) == (8 * stride, 2 * stride, 2)
        assert part["file_bytes"] == sum(
            part[f"{k}_bytes"] for k in ("configuration", "schema", "rows", "bookkeeping", "rings")
        )
        assert {m["pid"]: (m["roles"], m["alive"]) for m in info["members"]} == {
            os.getpid(): (["creator", "collector"], True),
            other.pid: (["collector"], True),
        }
        assert all(m["process_state"] in "RSD" for m in info["members"])
        assert info["writer"]["pid"] == os.getpid() and not info["writer"]["active"]
        assert info["writer"]["transactions"] >= 2 and info["writer"]["takeovers"] == 0
        mine = next(c for c in info["collectors"] if c["pid"] == os.getpid())
        assert mine == {
            **mine,
            "state": "alive",
            "put_rows": 20,
            "stored_rows": 20,
            "skipped_rows": 0,
            "dropped_rows": 0,
            "refused_rows": 0,
            "ring_used": 0,
            "ring_bytes": 1 << 16,
            "ring_fill": 0.0,
        }
        assert info["counters"]["put_rows"] == 150
        assert shminfo_json("--json", "show", name).keys() == info.keys(), "before the command means the same"


def test_show_prints_settings_of_a_replay_buffer(name, shminfo):
    face = {
        "class": "TensorDictReplayBuffer",
        "batch_size": 256,
        "priority_key": ["next", "error"],
        "sampler": ["prioritized", {"alpha": 0.6}],
    }
    with Buffer.create(name, 100, schema=SCHEMA, config={"face": face}) as buf:
        buf.extend(rows(7))
        status, out, err = shminfo("show", name)
        assert (status, err) == (0, "")
        for text in (
            "7 of 100 (7.0%), row ids 0 to 6",
            "TensorDictReplayBuffer, batch size 256",
            "sampler prioritized(alpha=0.6), priority key ('next', 'error')",
            "full: block (waits for ever), drain: thread, at most 256 collectors",
            "schema: 3 columns",
            "(each 32 bytes: 25 payload, 7 padding)",
            "('next', 'done')",
            "creator, collector",
        ):
            assert text in out
        assert max(map(len, out.splitlines())) < 140, "no wider than a terminal"
        assert not any(line.endswith(" ") for line in out.splitlines())


def test_show_fill_of_a_ring_that_refuses(name, shminfo, shminfo_json):
    with Buffer.create(name, 10_000, schema=SCHEMA, full="error", ring_bytes=4096, drain="caller") as buf:
        with pytest.raises(RingFull):
            while True:
                buf.put(rows(10))
        (c,) = shminfo_json("show", name, "--json")["collectors"]
        assert c["ring_fill"] == c["ring_used"] / 4096 > 0.9 and c["put_rows"] == 110 and c["stored_rows"] == 0
        assert c["refused_rows"] == 10
        out = shminfo("show", name)[1]
        assert f"{c['ring_fill']:.0%}" in out and "10 refused" in out and "█████" in out


def test_show_of_a_buffer_without_schema(name, shminfo, shminfo_json):
    with Buffer.create(name, 10):
        info = shminfo_json("show", name, "--json")
        assert info["schema"] is None and info["collectors"] == [] and info["settings"]["ring_bytes"] is None
        assert info["writer"]["pid"] is None and info["window"] == {"first_id": None, "last_id": None, "end_id": 0}
        assert "no schema yet: the first put of any process decides it" in shminfo("show", name)[1]


def test_a_killed_collector_is_shown_as_dead(name, shminfo, shminfo_json):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller"), collector(name, 5) as p:
        p.kill()
        p.wait()
        info = shminfo_json("show", name, "--json")
        dead = next(m for m in info["members"] if m["pid"] == p.pid)
        assert (dead["alive"], dead["process_state"]) == (False, None)
        assert [(c["pid"], c["state"], c["stored_rows"]) for c in info["collectors"]] == [(p.pid, "dead", 5)]
        assert (info["processes_alive"], info["collectors_alive"]) == (1, 0)
        out = shminfo("show", name)[1]
        assert sum(str(p.pid) in line and line.rstrip().endswith("dead") for line in out.splitlines()) == 1
        assert "collectors: 0 alive, 1 dead\n" in out and "handles: 1 alive, 1 dead\n" in out, "who is listed"


def test_a_writer_that_was_killed_while_idle_is_shown_as_ended(name, shminfo, shminfo_json):
    killed_owner(name, "b.extend(rows(3))")
    assert "idle (gave the role back), its process has ended, " in shminfo("show", name)[1]
    assert shminfo_json("show", name, "--json")["writer"]["ended"] is True
    with Buffer.attach(name) as buf:
        buf.extend(rows(1))
        assert shminfo_json("show", name, "--json")["writer"]["ended"] is False
        assert "its process has ended" not in shminfo("show", name)[1]


def test_trajectories_cut_short_are_shown(name, shminfo):
    with Buffer.create(name, 100_000, schema={"k": "int64"}, drain="caller", trajectories=True, ring_bytes=4096) as buf:
        buf.extend({"k": np.arange(2)}, stream=0)
        assert "cut short" not in shminfo("show", name)[1]
        for first in range(0, 2000, 100):
            buf.extend({"k": np.arange(100)}, stream=np.arange(first, first + 100))
        cut = buf.stats()["streams_cut"]
        assert cut > 0 and f"{cut:,} trajectories cut short" in shminfo("show", name)[1]


def test_a_stopped_collector_is_shown_as_stopped(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA), collector(name, 5) as p:
        os.kill(p.pid, signal.SIGSTOP)
        os.waitpid(p.pid, os.WUNTRACED)
        assert "alive (T, stopped)" in shminfo("show", name)[1]


# ---- looking disturbs nobody -------------------------------------------------------------------------------------


def test_looking_leaves_no_trace(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller", max_collectors=4, ring_bytes=4096) as buf:
        buf.extend(rows(5))
        path = segment.path_of(name)
        before, blocks = Path(path).read_bytes(), os.stat(path).st_blocks
        fds = len(os.listdir("/proc/self/fd"))
        for command in ((), ("show", name), ("--json",), ("show", "--json", name)):
            assert shminfo(*command)[0] == 0
        assert Path(path).read_bytes() == before and os.stat(path).st_blocks == blocks
        assert len(os.listdir("/proc/self/fd")) == fds
        assert [m["pid"] for m in buf.members()] == [os.getpid()]


def test_a_look_in_progress_does_not_keep_a_buffer_from_being_destroyed(name, monkeypatch):
    Buffer.create(name, 100, schema=SCHEMA).close()
    read = looking.read

    def destroy_meanwhile(*args) -> None:
        segment.destroy(name)
        read(*args)

    monkeypatch.setattr(looking, "read", destroy_meanwhile)
    info = looking.look(name, os.getuid(), whole=True)
    assert (info["state"], info["attached"], info["members"]) == ("being destroyed", False, [])
    with pytest.raises(BufferNotFound):
        looking.look(name, os.getuid())


# ---- rm ----------------------------------------------------------------------------------------------------------


def test_rm_refuses_what_is_in_use_and_force_takes_it(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA) as buf, collector(name, 1) as p:
        status, out, err = shminfo("rm", name)
        assert (status, out) == (1, "") and "--force" in err
        assert err.startswith(f"shminfo: buffer '{name}' is attached: pid {p.pid} (")
        assert os.path.exists(segment.path_of(name))
        status, out, err = shminfo("rm", "--force", name)
        assert (status, err) == (0, "") and re.fullmatch(
            f"removed {name}: [0-9.]+ .iB are free when the last process lets go\n", out
        )
        assert not os.path.exists(segment.path_of(name))
        with pytest.raises(StorageLost):
            buf.put(rows(1))


def test_rm_of_several_removes_those_that_can_go(name, shminfo):
    second, unknown = f"{name}.2", f"{name}.3"
    for n in (name, second):
        Buffer.create(n, 10).close()
    status, out, err = shminfo("rm", name, unknown, second, "--json")
    assert status == 1 and f"no buffer named '{unknown}'" in err
    assert [(r["name"], r["removed"]) for r in json.loads(out)] == [(name, True), (unknown, False), (second, True)]
    assert [r["error"] is None for r in json.loads(out)] == [True, False, True]
    assert not {name, second} & set(segment.names())


def test_unknown_names_say_which_exist(name, shminfo):
    with Buffer.create(name, 10):
        for command in ("show", "rm"):
            status, out, err = shminfo(command, f"{name}x")
            assert (status, out) == (1, "") and f"no buffer named '{name}x'" in err and err.count("\n") == 1
            assert name in err.split("has", 1)[1] or "more" in err
        status, _, err = shminfo("show", "no/such")
        assert status == 1 and "1 to 100 characters" in err
        assert "uid 4000000001 has none" in shminfo("show", name, "--owner", "4000000001")[2]
        assert f"--owner {os.getuid()}" in shminfo("show", name, "--owner", "4000000001")[2]


# ---- files that are no buffers -----------------------------------------------------------------------------------


def spoil_random(path: str) -> None:
    Path(path).write_bytes(secrets.token_bytes(100_000))


def spoil_empty(path: str) -> None:
    Path(path).touch()


def spoil_truncated(path: str) -> None:
    other = f"{Path(path).name.split('.', 2)[2]}-whole"
    with Buffer.create(other, 1000, schema=SCHEMA) as buf:
        buf.extend(rows(3))
        with open(segment.path_of(other), "rb") as f:
            Path(path).write_bytes(f.read(210_000))
    segment.destroy(other)


def spoil_header(path: str) -> None:
    other = f"{Path(path).name.split('.', 2)[2]}-whole"
    with Buffer.create(other, 1000):
        blob = bytearray(Path(segment.path_of(other)).read_bytes())
    segment.destroy(other)
    blob[100] ^= 1
    Path(path).write_bytes(blob)


@pytest.mark.parametrize("spoil", [spoil_random, spoil_empty, spoil_truncated, spoil_header])
def test_a_damaged_file_is_listed_with_the_reason_and_goes_by_force(name, shminfo, shminfo_json, spoil):
    path = segment.path_of(name)
    spoil(path)
    os.chmod(path, 0o600)
    (info,) = [i for i in shminfo_json("--json") if i["name"] == name]
    assert info["state"] == "damaged" and info["reason"] and path not in info["reason"] and info["size"] is None
    assert info["file_bytes"] == os.stat(path).st_size
    out = shminfo()[1]
    assert row_of(out, name).endswith("damaged") and f"{name}: {info['reason']}" in out
    status, out, err = shminfo("show", name)
    assert (status, out) == (1, "") and info["reason"] in err and f"`shminfo rm --force {name}` removes it" in err
    status, out, err = shminfo("rm", name)
    assert (status, out) == (1, "") and "--force" in err and os.path.exists(path)
    assert shminfo("rm", "--force", name)[0] == 0 and not os.path.exists(path)


def make_link(path: str) -> None:
    os.symlink("/etc/passwd", path)


@pytest.mark.parametrize("make", [os.mkfifo, make_link, os.mkdir])
def test_what_is_no_regular_file_is_listed_and_never_opened_or_removed(name, shminfo, shminfo_json, make):
    path = segment.path_of(name)
    make(path)
    try:
        (info,) = [i for i in shminfo_json("--json") if i["name"] == name]
        assert info["state"] == "foreign" and "no regular file" in info["reason"]
        assert shminfo("show", name)[0] == 1
        status, _, err = shminfo("rm", "--force", name)
        assert status == 1 and f"Remove it yourself: rm {path}" in err and os.path.lexists(path)
    finally:
        if make is os.mkdir:
            os.rmdir(path)


def test_what_others_may_write_or_own_is_foreign(name, shminfo_json):
    Buffer.create(name, 10).close()
    path = segment.path_of(name)
    os.chmod(path, 0o602)
    (info,) = [i for i in shminfo_json("--json") if i["name"] == name]
    assert info["state"] == "foreign" and "writable by everybody" in info["reason"]
    os.chmod(path, 0o600)
    posing = segment.path_of(name, 4_000_000_001)
    shutil.copy(path, posing)
    try:
        (info,) = shminfo_json("--json", "--owner", "4000000001")
        assert info["state"] == "foreign"
        assert info["reason"] == f"the file belongs to uid {os.getuid()}, its name to uid 4000000001"
    finally:
        os.unlink(posing)


def test_names_from_strangers_do_not_reach_the_terminal_raw(name, shminfo, shminfo_json):
    path = os.fsencode(segment.path_of(name)) + b"\x1b[2J\xff\n"
    Path(os.fsdecode(path)).touch()
    try:
        status, out, _ = shminfo()
        assert status == 0 and "\x1b" not in out and f"{name}\\x1b[2J\\udcff\\n" in out
        assert any(i["name"].startswith(name) for i in shminfo_json("--json"))
    finally:
        os.unlink(path)


# ---- the command line --------------------------------------------------------------------------------------------


def test_usage(shminfo):
    assert shminfo("--version") == (0, f"shminfo {__version__}\n", "")
    status, out, _ = shminfo("--help")
    assert status == 0 and "examples:" in out and "shminfo rm" in out
    assert all(
        re.search(f"^    {c} ", out, re.M)
        for c in ["list", "show", "top", "check", "doctor", "rm", "gc", "metrics", "plot"]
    )
    wrong = (
        "show, rm, nonsense, --nonsense, --all-users show x, --all-users --owner 1, --owner me, --all-users top x, top, "
        "top x --interval 0, top x --interval nan, top x --interval soon, check, check x y, doctor x, gc x, plot x, "
        "plot -o x.png, plot x -o x.png --seconds -1, metrics --serve, metrics --serve 65536, metrics --serve 1.5, "
        "metrics --all-users --owner 1, gc --all-users"
    )
    for args in map(str.split, wrong.split(", ")):
        status, out, err = shminfo(*args)
        assert (status, out) == (2, "") and "usage:" in err


def python(code: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


def test_it_never_imports_torch(name):
    with Buffer.create(name, 10, schema=SCHEMA) as buf:
        buf.extend(rows(3))
        code = (
            "import sys; from shmbuf.cli import main\n"
            "name, once = sys.argv[1], ['--once', '--interval', '0.01']\n"
            "for a in (['show', name], [], ['--json'], ['top', name, *once], ['top', name, *once, '--json'], "
            "['check', name], ['gc', '--dry-run'], ['metrics', name]):\n"
            "    assert main(a) == 0, a\n"
            "assert main(['doctor']) in (0, 1)\n"
            "sys.exit(', '.join(m for m in ('torch', 'tensordict', 'numpy') if m in sys.modules) or None)"
        )
        done = python(code, name)
        assert (done.returncode, done.stderr) == (0, "")
        code = "import sys; from shmbuf.cli import main; main(['--json']); sys.exit('rich' in sys.modules)"
        assert python(code).returncode == 0, "JSON needs no tables"


def test_a_reader_that_leaves_early_is_no_error(name):
    with Buffer.create(name, 10, schema=SCHEMA):
        script = shutil.which("bash")
        code = "from shmbuf.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        command = f"'{sys.executable}' -c '{code}' show {name} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run([script, "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("0\n", "")


def test_it_prints_where_only_ascii_can_be(name):
    with Buffer.create(name, 10, schema=SCHEMA):
        done = subprocess.run(
            [sys.executable, "-m", "shmbuf.cli", "show", name],
            capture_output=True,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii()


@pytest.mark.parametrize("interpreter", [sys.executable, None], ids=["this python", "the system's python"])
def test_tools_shminfo_runs_from_the_checkout(name, interpreter, tmp_path):
    script = str(ROOT / "tools" / "shminfo")
    if interpreter is None and not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv in this checkout")
    path = ":".join(p for p in os.environ["PATH"].split(":") if ".venv" not in p)
    env = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PATH": path}
    with Buffer.create(name, 10, schema=SCHEMA):
        done = subprocess.run(
            [*([interpreter] if interpreter else []), script, "show", name, "--json"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["name"] == name


def test_tools_shminfo_says_how_to_build(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "shminfo", tmp_path / "tools")
    script = str(tmp_path / "tools" / "shminfo")
    done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "make build" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_control_page_is_looked_at_without_a_crash(name: str, seed: int) -> None:
    Buffer.create(name, 100, schema=SCHEMA).close()
    with open(segment.path_of(name), "r+b") as f:
        f.seek(4096)
        f.write(np.random.default_rng(seed).bytes(4096) if seed else b"\xff" * 4096)
    for arguments in (["list"], ["show", name], ["show", name, "--json"]):
        done = subprocess.run([sys.executable, "-m", "shmbuf.cli", *arguments], capture_output=True, text=True)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (seed, arguments, done)


def test_a_process_name_cut_inside_a_character_is_shown(name: str) -> None:
    """Linux keeps 15 bytes of it, which may end in half a character."""
    code = (
        "open('/proc/self/comm', 'wb').write('обработчик-данных'.encode()[:15]); import sys; from shmbuf import Buffer; "
        "b = Buffer.attach(sys.argv[1]); print(b.members()[-1]['command'])"
    )
    with Buffer.create(name, 100, schema=SCHEMA):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("обработ"), done


def test_counters_of_a_reused_ring_start_again(name: str) -> None:
    with Buffer.create(
        name, 100, schema=SCHEMA, drain="caller", full="error", ring_bytes=4096, max_collectors=1
    ) as looker:
        first = Buffer.attach(name)
        with pytest.raises(RingFull):
            for _ in range(200):
                first.put(rows(3))
        assert looker.collectors()[0]["refused_rows"] == 3
        first.close()
        second = Buffer.attach(name)
        second.put(rows(2))
        now = looker.collectors()[0]
        assert (now["put_rows"], now["stored_rows"], now["refused_rows"], now["incarnation"]) == (2, 0, 0, 2)
        second.close()


def test_bars_and_numbers_of_damaged_words_stay_small() -> None:
    assert [printing.bar(share, 4).plain for share in (-3.0, 0.0, 0.5, 1.0, 1e15)] == [
        "░░░░",
        "░░░░",
        "██░░",
        "████",
        "████",
    ]
    assert printing.nbytes(1 << 63) == "8388608.0 TiB" and printing.rate(0.125) == "0.12" and printing.rate(-5e18)
