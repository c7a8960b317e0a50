"""`shminfo` over buffers in device memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.cuda.helpers import MAKER, USER, ask, line
from tests.cuda.test_sharing import WAYS, begin_steward, gone, steward_of, until

SHMINFO = (
    "import sys; from shmbuf.cli import looking, main; everybody = looking.buffers\n"
    "looking.buffers = lambda owner: [b for b in everybody(owner) if b[1].startswith(sys.argv[1])]\n"
    "sys.stderr = sys.stdout; print('\\nstatus', main(sys.argv[2:]))"
)


# As a collector does whose rows lie on the device.
FROM_DEVICE = (
    "def put(k):\n"
    "    r = rows(k); c = [(c.offset, c.nbytes, r[c.key[-1]].ctypes.data) for c in b.schema.columns]\n"
    "    return b.submit_device(c, 1, True, 60.0, lambda ids, n: ids, (None, None), 0).wait(60).tolist()\n"
)


@pytest.fixture
def shminfo(over, name):
    """What it says of this test's buffers, in one line, and the exit status."""

    def run(*args: str, **environment: str) -> tuple[str, int]:
        said, status = over(SHMINFO, name, *args, **environment).rsplit("status ", 1)
        return said.strip() if "--json" in args else " ".join(said.split()), int(status)

    return run


def lose(begin, name, way):
    """A buffer of this name whose rows are lost; who is still attached to it."""
    maker = begin(MAKER, name, **way)
    assert line(maker) == "made"
    if not way:
        maker.kill()
        maker.wait()
        return
    pid = steward_of(name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    until(lambda: ask(maker, "b.destroyed") == "True")


@pytest.mark.parametrize("way", WAYS)
def test_lost_rows_are_one_state_everywhere(begin, shminfo, name, way):
    lose(begin, name, WAYS[way])
    said, status = shminfo("list")
    assert status == 0 and said.endswith("rows lost")
    for command in (["show", name], ["top", name, "--once", "--interval", "0.01"]):
        said, status = shminfo(*command)
        assert status == 0 and f"{name} rows lost" in said, said
    for command in (["list"], ["show", name], ["top", name, "--once", "--interval", "0.01"]):
        said, status = shminfo(*command, "--json")
        told = json.loads(said)
        assert (told[0] if command == ["list"] else told)["state"] == "rows lost"
    said, status = shminfo("check", name)
    assert status == 1 and f"{name}: unsound" in said and "finding: rows lost" in said and "nothing can be read" in said
    said, status = shminfo("doctor", "--json")
    lines = [x for x in json.loads(said)["findings"] if x["buffer"]]
    assert status == 1 and [x["level"] for x in lines] == ["wrong"] and "its rows are lost" in lines[0]["text"]
    said, status = shminfo("metrics")
    assert f'shmbuf_up{{buffer="{name}"}} 1.0' in said and f'shmbuf_rows_lost{{buffer="{name}"}} 1.0' in said
    said, status = shminfo(*lines[0]["remedy"].split()[1:])  # what it proposed helps
    assert status == 0 and "removed" in said, said


def test_rows_that_somebody_has_are_not_lost(begin, shminfo, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    assert shminfo("list")[0].endswith(" ok") and shminfo("check", name)[1] == 0
    assert f'shmbuf_rows_lost{{buffer="{name}"}} 0.0' in shminfo("metrics")[0]
    os.kill(maker.pid, signal.SIGSTOP)  # he does not answer, and has them
    assert shminfo("list")[0].endswith(" ok")


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_another_network_namespace_are_not_said_to_be_lost(begin, over, name, way):
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -n is not allowed here")
    maker = begin(MAKER, name, **WAYS[way])
    assert line(maker) == "made"
    apart = f"__import__('ctypes').CDLL(None).unshare(0x40000000); {SHMINFO}"
    said = " ".join(over(apart, name, "show", name).split())
    assert f"{name} ok" in said and "in another container" in said and "lost" not in said
    assert over(apart, name, "check", name).endswith("status 0")
    assert over(apart, name, "doctor").endswith("status 0")


def test_a_buffer_without_device_memory_has_no_such_figure(begin, shminfo, name):
    maker = begin(MAKER.replace('device="cuda"', "device=None"), name)
    assert line(maker) == "made"
    assert f'shmbuf_rows_lost{{buffer="{name}"' not in shminfo("metrics")[0]


def test_unattached_buffers_of_lost_rows_go_with_the_others(begin, shminfo, name):
    lose(begin, name, {})
    said, status = shminfo("gc", "--all-unattached")
    assert status == 0 and f"removed {name} (nobody is attached (its rows are lost))" in said


# ---- stewards ------------------------------------------------------------------------------------------------------


def test_what_a_steward_keeps_is_left_until_it_is_stopped_or_forced(begin, shminfo, name, driver):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    with begin_steward(name, driver) as steward:
        assert ask(maker, "close") == "closed"
        assert "steward" in shminfo("show", name)[0].split("since state")[1]
        (kept,) = [x for x in json.loads(shminfo("doctor", "--json")[0])["findings"] if x["buffer"]]
        assert kept["level"] == "ok" and f"kept by steward pid {steward.pid}" in kept["text"] and not kept["remedy"]
        said, status = shminfo("gc", "--all-unattached")
        assert status == 0 and "nothing to remove" in said and f"1 buffer that a steward keeps: {name}" in said
        said, status = shminfo("rm", name)
        assert status == 1 and f"kept by its steward, pid {steward.pid}" in said and "--force" in said
        user = begin(USER, name)
        assert line(user) == "attached cuda:0" and ask(user, "len(b)") == "10"
        assert ask(user, "close") == "closed"
        said, status = shminfo("rm", "--force", name)
        assert status == 0 and steward.wait(60) == 0


def test_the_steward_of_cuda_ipc_is_shown_as_one(begin, shminfo, name):
    maker = begin(MAKER, name, **WAYS["ipc"])
    assert line(maker) == "made"
    told = json.loads(shminfo("show", name, "--json")[0])
    assert [m["roles"] for m in told["members"] if m["pid"] == steward_of(name)] == [["steward"]]
    assert told["processes_alive"] == 1 and told["kept_by"] == []


# ---- how it is shared ----------------------------------------------------------------------------------------------


def test_why_rows_are_not_shared_by_descriptor(begin, shminfo, name):
    maker = begin(MAKER, name, SHMBUF_CUDA_SHARING="ipc")
    assert line(maker) == "made"
    for command in (["doctor"], ["show", name]):
        assert "because SHMBUF_CUDA_SHARING=ipc asked for CUDA IPC: unset it" in shminfo(*command)[0]
    assert "keep a checkpoint" in shminfo("doctor")[0]
    os.kill(pid := steward_of(name), signal.SIGSTOP)
    try:
        assert "unset SHMBUF_CUDA_SHARING" in shminfo("doctor", SHMBUF_CUDA_SHARING="ipc")[0]
        said = shminfo("doctor")[0]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"kill -CONT {pid}" in said
    assert "None" not in said and "who attaches cannot read until it does" in said and "others" not in said


def test_of_what_is_shared_by_descriptor_nothing_is_to_be_explained(begin, shminfo, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    said = shminfo("show", name)[0]
    assert "shared as a descriptor" in said and "not needed" not in said and "why not" not in said
    assert json.loads(shminfo("show", name, "--json")[0])["device"]["why_not"] is None


def test_a_stopped_holder_beside_another_one(begin, shminfo, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    second = begin(USER, name)
    assert line(second) == "attached cuda:0"
    os.kill(maker.pid, signal.SIGSTOP)
    assert "does not answer (stopped): who attaches has it from others" in shminfo("doctor")[0]


def test_by_which_ring_a_collector_s_rows_come(begin, shminfo, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    user = begin(USER.replace("b = Buffer", f"{FROM_DEVICE}b = Buffer", 1), name)
    assert line(user) == "attached cuda:0" and ask(user, "put(10)") == "[10]"
    told = json.loads(shminfo("show", name, "--json")[0])
    by = {c["pid"]: c["device_ring"] for c in told["collectors"]}
    assert by == {maker.pid: False, user.pid: True}
    said = shminfo("show", name)[0]
    assert "host ring" in said and "device ring" in said.split("rows by")[1]


def test_doctor_tells_of_cuda_without_a_buffer_there(shminfo, python, name):
    said, status = shminfo("doctor")
    assert status == 0 and "cuda:0 here): its memory can be shared as a descriptor" in said
    without = "import sys; sys.modules['cuda.bindings'] = None; " + SHMINFO
    said = " ".join(python(without, name, "doctor").split())
    assert "ok no rows in device memory from here: rows in CUDA memory need NVIDIA's cuda-bindings" in said
