"""Device memory goes from process to process, and stays as long as somebody has it: over the stand-in driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from shmbuf import segment
from shmbuf.cuda import sharing
from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line

TEN = str(list(range(10)))
A, B = "0000000a-0000-4000-8000-000000000001", "0000000b-0000-4000-8000-000000000002"
WAYS = {"vmm": {}, "ipc": {"STANDIN_VMM": "0"}}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def until(true, seconds=60.0):
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.01)


def steward_of(name) -> int:
    """Its pid, from the table of members."""
    handle = segment.attach(name, watch=True)
    try:
        (pid,) = [p["pid"] for p in sharing.holders(handle) if p["kind"] == "ipc"]
        return pid
    finally:
        handle.close()


def gone(pid) -> bool:
    """And none of its threads holds its files open: the first of them may be a zombie before the others are through."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return True
    return len(threads) < 2 and segment.process_state(pid) in (None, "Z")


def test_memory_of_a_steward_is_whole_blocks(begin, name):
    """An IPC handle opens the driver's whole block to others: nothing else of its maker lies in it."""
    maker = begin(MAKER, name, STANDIN_VMM="0")
    assert line(maker) == "made"
    handle = segment.attach(name, watch=True)
    assert handle.header["device_kind"] == 2 and handle.header["device_bytes"] == 2 << 20
    handle.close()
    assert ask(maker, "stored(b)") == TEN


# ---- from process to process ---------------------------------------------------------------------------------------


def test_whoever_attaches_reads_and_writes_the_same_memory(begin, name, way):
    maker, user = begin(MAKER, name, **way), None
    assert line(maker) == "made"
    user = begin(USER, name, **way)
    assert line(user) == "attached cuda:0"
    assert ask(user, "stored(b)") == TEN
    assert ask(user, "b.extend(rows(10, 2)).tolist()") == "[10, 11]"
    assert ask(maker, "stored(b)[-3:]") == "[9, 10, 11]"
    assert ask(user, "'torch' in sys.modules") == "False"


def test_keys_of_few_bytes_beside_a_large_one_arrive(begin, name, way):  # B138
    spec = "{'one': 'uint8', 'two': ('uint8', (2,)), 'three': ('int16', (3,)), 'large': ('float32', (1000003,))}"
    fill = "{k: np.full((3, *((s,) if s else ())), v, d) for k, s, v, d in (('one', 0, 7, 'u1'), ('two', 2, 8, 'u1'), ('three', 3, 9, 'i2'), ('large', 1000003, 0.5, 'f4'))}"
    maker = begin(
        PRELUDE
        + f"b = Buffer.create(sys.argv[1], 5, schema={spec}, device='cuda', drain='caller', max_collectors=2)\nb.extend({fill}); say('made'); wait()",
        name,
        **way,
    )
    assert line(maker) == "made"
    look = "[sorted(set(np.unique(a).tolist())) for a in b.gather([0, 1, 2]).values()]"
    for _ in range(2):
        user = begin(USER, name, **way)
        assert line(user) == "attached cuda:0"
        assert ask(user, look) == "[[7], [8], [9], [0.5]]"


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_memory_stays_when_its_maker_goes(begin, name, end, way):  # B140
    maker = begin(MAKER, name, **way)
    assert line(maker) == "made"
    user = begin(USER, name, **way)
    assert line(user) == "attached cuda:0"
    if end == "close":
        assert ask(maker, "close") == "closed"
    else:
        maker.kill()
        maker.wait()
    assert ask(user, "stored(b)") == TEN
    assert ask(user, "b.extend(rows(10)).tolist()") == "[10]"
    third = begin(USER, name, **way)  # from the second
    assert line(third) == "attached cuda:0"
    assert ask(third, "stored(b)[-1]") == "10"


def test_with_the_last_of_them_the_rows_are_lost_and_everybody_hears_it(begin, over, name, way):
    maker = begin(MAKER, name, **way)
    assert line(maker) == "made"
    pid = steward_of(name) if way else None
    maker.kill()
    maker.wait()
    if pid:
        until(lambda: gone(pid))
    said = over(PRELUDE + "say(tried(lambda: Buffer.attach(sys.argv[1])))", name, **way)
    assert said.startswith("StorageLost: the device memory of buffer") and "shminfo rm" in said and "steward" in said
    show = over("from shmbuf.cli import main; import sys; sys.exit(main(['show', sys.argv[1]]))", name, **way)
    assert "held by nobody: the rows are lost" in " ".join(show.split())
    assert over(PRELUDE + "shmbuf.destroy(sys.argv[1]); say(sys.argv[1] in shmbuf.segment.names())", name) == "False"


def test_a_stopped_holder_is_passed_over_and_named_if_he_is_the_only_one(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    second = begin(USER, name)
    assert line(second) == "attached cuda:0"
    os.kill(maker.pid, signal.SIGSTOP)
    third = begin(USER, name)
    assert line(third) == "attached cuda:0"  # from the second
    assert ask(third, "b._place.hold.memory.kind") == "vmm"
    for p in (second, third):
        assert ask(p, "close") == "closed"
    impatient = USER.replace("b = Buffer", "import shmbuf.cuda.sharing as s; s.PATIENCE = 0.5; b = Buffer")
    last = begin(impatient, name)
    assert line(last) == "attached cuda:0"  # it can put; it has no rows
    said = ask(last, "b.gather([0])")
    assert said.startswith("DeviceError") and f"pid {maker.pid}" in said and f"kill -CONT {maker.pid}" in said
    os.kill(maker.pid, signal.SIGCONT)
    assert ask(last, "stored(b)") == TEN  # the next call asks again


def test_only_the_same_user_is_handed_it(begin, python, name):
    if os.getuid():
        pytest.skip("needs root, to be another user")
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    handle = segment.attach(name, watch=True)
    address = sharing.address_of(handle.header["instance_id"], handle.members()[0])
    handle.close()
    code = (
        "import os, socket, sys; os.setuid(int(sys.argv[2])); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(30)\n"
        "s.connect(chr(0) + sys.argv[1]); p, fds, *_ = socket.recv_fds(s, 4096, 1); print(len(p) > 50, len(fds))"
    )
    assert python(code, address[1:], 0) == "True 1"
    assert python(code, address[1:], 12345) == "False 0"


# ---- stewards ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def begin_steward(name, driver):
    """One that keeps the memory, when it has it."""
    env = {**os.environ, **driver}
    steward = subprocess.Popen(
        [sys.executable, "-m", "shmbuf.cuda.steward", name], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "keeps" in steward.stdout.readline()
        yield steward
    finally:
        steward.kill()
        steward.communicate()


def test_a_steward_keeps_rows_while_nobody_else_does(begin, name, driver):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    with begin_steward(name, driver) as steward:
        maker.kill()
        maker.wait()
        user = begin(USER, name)
        assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN
        assert ask(user, "b.destroy()") == "None"  # a steward does not count as attached
        assert steward.wait(60) == 0


def test_a_steward_that_nobody_could_ask_keeps_nothing(begin, name, driver):
    maker = begin(MAKER.replace("b = Buffer", "shmbuf.memory.MAX_MEMBERS = 1; b = Buffer"), name)
    assert line(maker) == "made"
    keeper = subprocess.run(
        [sys.executable, "-m", "shmbuf.cuda.steward", name],
        env={**os.environ, **driver},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert keeper.returncode == 1 and "no entry left" in keeper.stderr


def test_the_death_of_the_steward_is_the_end_for_everybody_at_once(begin, name):
    way = WAYS["ipc"]
    maker = begin(MAKER, name, **way)
    assert line(maker) == "made"
    reader = begin(USER, name, **way)
    assert line(reader) == "attached cuda:0" and ask(reader, "stored(b)") == TEN
    collector = begin("import sys; sys.modules['cuda.bindings.driver'] = None\n" + USER, name)
    assert line(collector).startswith("attached GPU-") and ask(collector, "b.put(rows(10)).rows") == "1"
    waiting = begin(USER, name, **way)
    assert line(waiting) == "attached cuda:0"
    waiting.stdin.write("b.wait_rows(50)\n")
    waiting.stdin.flush()
    pid = steward_of(name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    for what in ("b.gather([0])", "b.draw(2)", "b.put(rows(11))", "b.extend(rows(11))"):
        said = ask(reader, what)
        assert said.startswith("StorageLost: the device memory of buffer") and "steward" in said, (what, said)
    assert line(waiting).startswith("StorageLost: the device memory of buffer")
    until(
        lambda: ask(collector, "b.put(rows(11))").startswith("StorageLost")
    )  # as soon as one of those who saw it said so
    assert maker.poll() is None and ask(maker, "tried(lambda: b.draw(1))").startswith("StorageLost")


def test_who_may_only_look_outlives_the_steward(begin, name):
    maker = begin(MAKER, name, **WAYS["ipc"])
    assert line(maker) == "made"
    user = begin(USER.replace("attach(sys.argv[1])", "attach(sys.argv[1], readonly=True)"), name, **WAYS["ipc"])
    assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN
    steward = steward_of(name)
    maker.kill()
    maker.wait()
    os.kill(steward, signal.SIGKILL)
    until(lambda: ask(user, "b._place.lost") == "True")
    until(
        lambda: (
            ask(user, "b._place.hold.connection in __import__('shmbuf.cuda').cuda.sharing.server()._sockets") == "False"
        )
    )
    for what in ("b.gather([1])", "b.draw(1)"):
        assert ask(user, what).startswith("StorageLost")


def test_who_has_other_files_in_the_place_of_the_connection_reads_no_rows_of_a_dead_steward(begin, name):
    maker = begin("import socket\n" + MAKER.replace("eval(what)", "tried(lambda: eval(what))"), name, **WAYS["ipc"])
    assert line(maker) == "made"
    os.kill(steward_of(name), signal.SIGKILL)
    until(lambda: ask(maker, "b.destroyed") == "True")
    assert ask(maker, "globals().update(others=[socket.socketpair() for _ in range(20)])") == "None"
    for what in ("b.gather([1])", "b.draw(1)", "b.put(rows(10))"):
        assert ask(maker, what).startswith("StorageLost")


def test_several_threads_draw_what_a_steward_holds(begin, name):
    threads = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def draws():\n"
        "    with ThreadPoolExecutor(4) as pool: return set(pool.map(lambda _: right(b.draw(4)[0]), range(2000)))\n"
    )
    maker = begin(threads + MAKER.replace("eval(what)", "tried(lambda: eval(what))"), name, **WAYS["ipc"])
    assert line(maker) == "made" and ask(maker, "draws()") == "{True}"


def test_a_steward_that_is_not_needed_leaves(begin, name):
    maker = begin(MAKER, name, **WAYS["ipc"])
    assert line(maker) == "made"
    pid = steward_of(name)
    assert ask(maker, "close") == "closed"
    until(lambda: gone(pid))


def test_a_steward_leaves_when_the_buffer_is_not_built_after_all(begin, name):
    code = MAKER.replace("b = Buffer", "shmbuf._extension.native.arm('build_described=kill'); b = Buffer", 1)
    maker = begin(code, name, SHMBUF_NATIVE="failpoints", **WAYS["ipc"])
    maker.wait(60)
    assert maker.returncode == -signal.SIGKILL
    handle = segment.attach(name, watch=True)
    pids = [m["pid"] for m in handle.members() if m["pid"] != maker.pid]
    handle.close()
    for pid in pids:
        until(lambda pid=pid: gone(pid))


# ---- devices -------------------------------------------------------------------------------------------------------


def test_devices_are_found_by_uuid_and_the_caller_s_stays_current(begin, name):  # B143
    both = {"STANDIN_DEVICES": f"{A},{B}"}
    maker = begin(MAKER.replace('device="cuda"', 'device="cuda:1"'), name, **both)
    assert line(maker) == "made" and ask(maker, "b.device") == "cuda:1"
    turned = begin(USER, name, **both, CUDA_VISIBLE_DEVICES="1,0")
    assert line(turned) == "attached cuda:0" and ask(turned, "stored(b)") == TEN
    with_current = USER.replace(
        "b = Buffer",
        "from shmbuf.cuda import driver as d; d.call('cuCtxPushCurrent', d.context(d.by_index(0))); at = lambda: int(d.call('cuCtxGetDevice')); b = Buffer",
    )
    other = begin(with_current, name, **both)
    assert line(other) == "attached cuda:1" and ask(other, "at()") == "0"
    assert ask(other, "(stored(b), b.extend(rows(10)), b.close(), at())[-1]") == "0"


def test_a_device_that_is_not_visible_is_named_with_those_that_are(begin, name):  # B143
    both = {"STANDIN_DEVICES": f"{A},{B}"}
    maker = begin(MAKER.replace('device="cuda"', 'device="cuda:1"'), name, **both)
    assert line(maker) == "made"
    blind = begin(USER, name, **both, CUDA_VISIBLE_DEVICES="0")
    assert line(blind) == f"attached GPU-{B}"
    said = ask(blind, "b.gather([0])")
    assert (
        said.startswith("DeviceError")
        and f"GPU-{B}" in said
        and f"GPU-{A}" in said
        and "CUDA_VISIBLE_DEVICES=0" in said
    )
    assert ask(blind, "b.put(rows(10)).rows") == "1" and ask(maker, "(b.drain(), stored(b)[-1])[1]") == "10"


def test_a_process_without_the_bindings_puts_and_says_why_it_cannot_read(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    plain = begin("import sys; sys.modules['cuda.bindings.driver'] = None\n" + USER, name)
    assert line(plain).startswith("attached GPU-")
    assert ask(plain, "b.put(rows(10)).rows") == "1"
    for what in ("b.gather([0])", "b.draw(2)"):
        said = ask(plain, what)
        assert said.startswith("DeviceError") and "shmbuf[cuda]" in said
    assert ask(maker, "(b.drain(), stored(b)[-1])[1]") == "10"


def test_a_context_that_cannot_take_the_kernels_is_told_in_the_driver_s_words(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    user = begin(USER, name, STANDIN_FAIL="cuModuleLoadData=801")
    assert line(user) == "attached cuda:0"
    said = ask(user, "b.gather([0])")
    assert said.startswith("DeviceError") and "cuModuleLoadData" in said and "CUDA_ERROR_NOT_SUPPORTED" in said
    assert ask(user, "b.put(rows(10)).rows") == "1"


def test_a_driver_that_does_not_count_its_devices_is_told_in_its_words(begin, name):
    assert line(begin(MAKER, name)) == "made"
    user = begin(USER, name, STANDIN_FAIL="cuDeviceGetCount=999")
    assert line(user).startswith("attached GPU-")
    said = ask(user, "b.gather([0])")
    assert said.startswith(f"DeviceError: the rows of buffer {name!r} are on GPU-") and "cuDeviceGetCount: 999" in said


def test_who_finds_it_takes_its_device_as_it_is_and_no_other(begin, name):
    both = {"STANDIN_DEVICES": f"{A},{B}"}
    maker = begin(MAKER, name, **both)
    assert line(maker) == "made"
    other = begin(USER, name, **both)
    assert line(other) == "attached cuda:0"
    same = "Buffer.create(sys.argv[1], 100, schema=SPEC, drain='caller', ring_bytes=4096, exists='attach', device={}).device"
    assert ask(other, same.format("'cuda:0', device_rings=3")) == "cuda:0"
    assert ask(other, same.format("None")) == "cuda:0"
    said = ask(other, same.format("'cuda:1'"))
    assert said.startswith("BufferExists") and f"GPU-{A}" in said and f"GPU-{B}" in said


def test_a_fork_child_puts_and_says_why_it_cannot_read(over, name, way):  # B142
    code = PRELUDE + (
        "b = Buffer.create(sys.argv[1], 100, schema=SPEC, device='cuda', drain='caller', ring_bytes=4096); b.extend(rows(0, 3))\n"
        "host = Buffer.create(None, 10, schema=SPEC, drain='caller'); host.extend(rows(0, 3))\n"
        "if not os.fork():\n"
        "    for f in (lambda: b.gather([0]), lambda: b.draw(1), lambda: Buffer.attach(b.name).gather([0]), lambda: Buffer.create(None, 5, device='cuda')):\n"
        "        said = tried(f); say('DeviceError' in said and 'spawn' in said or said)\n"
        "    say(stored(host), b.put(rows(3)).rows); os._exit(0)\n"
        "os.wait(); b.drain(); say(stored(b))"
    )
    assert over(code, name, **way).splitlines() == ["True"] * 4 + ["[0, 1, 2] 1", "[0, 1, 2, 3]"]


def test_a_fork_while_a_thread_starts_the_driver_is_one_of_a_process_that_uses_it(over):
    code = PRELUDE + (
        "import threading\nfrom cuda.bindings import driver as d\n"
        "init, inside, go_on = d.cuInit, threading.Event(), threading.Event()\n"
        "d.cuInit = lambda flags: (inside.set(), go_on.wait(), init(flags))[2]\n"
        "from shmbuf.cuda import driver\n"
        "t = threading.Thread(target=driver.bindings); t.start(); inside.wait()\n"
        "if not os.fork():\n"
        "    signal.alarm(20)\n"
        "    said = tried(driver.bindings); say('DeviceError' in said and 'spawn' in said or said); os._exit(0)\n"
        "say(os.wait()[1]); go_on.set(); t.join(); say(len(driver.devices()))\n"
    )
    assert over(code).splitlines() == ["True", "0", "1"]


def test_a_fork_child_that_lives_on_keeps_no_memory_and_holds_nobody_up(begin, name):
    code = MAKER.replace('say("made")', 'child = os.fork()\nif not child: time.sleep(1000)\nsay("made")')
    maker = begin(code, name)
    assert line(maker) == "made"
    child = int(ask(maker, "child"))
    try:
        assert device_files(maker.pid) == 3  # the driver has its own of them, and of what it stages
        maker.kill()
        maker.wait()
        until(lambda: device_files(child) == 2)  # the driver's own
        user = begin(USER, name)
        user.stdout.readline()
        user.wait(60)
        assert "StorageLost" in user.stderr.read()
    finally:
        os.kill(child, signal.SIGKILL)


def device_files(pid) -> int:
    """Descriptors of device memory that the process has open."""
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found += "standin-cuda" in os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def test_another_network_namespace_is_named_as_the_cause(begin, name):  # B149
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -n is not allowed here")
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    code = USER.replace(
        "b = Buffer",
        "os.unshare(0x40000000) if hasattr(os, 'unshare') else __import__('ctypes').CDLL(None).unshare(0x40000000); b = Buffer",
    )
    apart = begin(code, name)
    assert line(apart) == "attached cuda:0"
    said = ask(apart, "b.gather([0])")
    assert said.startswith("DeviceError") and "namespace" in said and f"pid {maker.pid}" in said
    assert ask(apart, "b.put(rows(10)).rows") == "1"
    assert ask(apart, "Buffer.create(None, 5, schema=SPEC, drain='caller').extend(rows(0, 2)).tolist()") == "[0, 1]"


# ---- what the driver cannot do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ({"STANDIN_VMM": "0"}, "no virtual memory management"),
        ({"STANDIN_FD": "0"}, "cannot be exported as a file descriptor"),
        ({"STANDIN_FAIL": "cuMemCreate=801"}, "CUDA_ERROR_NOT_SUPPORTED"),
        ({"STANDIN_FAIL": "cuMemExportToShareableHandle=801"}, "CUDA_ERROR_NOT_SUPPORTED"),
        ({"STANDIN_FAIL": "cuMemImportFromShareableHandle=801"}, "CUDA_ERROR_NOT_SUPPORTED"),
    ],
)
def test_where_descriptors_do_not_work_a_steward_is_taken_and_doctor_says_why(begin, over, name, why, told):
    maker = begin(MAKER, name, **why)
    assert line(maker) == "made" and ask(maker, "stored(b)") == TEN
    assert ask(maker, "b._place.hold.memory.kind") == "ipc"
    cli = "from shmbuf.cli import main; import sys; main(sys.argv[1:])"
    for command in (["doctor"], ["show", name]):
        said = " ".join(over(cli, *command, COLUMNS="400").split())
        assert "steward" in said and told in said, said


def test_where_nothing_works_both_reasons_are_given_and_nothing_is_left(over, name):
    code = (
        PRELUDE
        + "say(tried(lambda: Buffer.create(sys.argv[1], 100, schema=SPEC, device='cuda'))); say(sys.argv[1] in shmbuf.segment.names())"
    )
    said, left = over(code, name, STANDIN_VMM="0", STANDIN_FAIL="cuIpcGetMemHandle=801").splitlines()
    assert (
        said.startswith("DeviceError")
        and "no virtual memory management" in said
        and "cuIpcGetMemHandle" in said
        and 'device="cpu"' in said
    )
    assert left == "False"
    said, left = over(code, name, STANDIN_VMM="0", STANDIN_IPC="0").splitlines()
    assert said.startswith("DeviceError") and "namespaces" in said and left == "False"


def test_too_little_device_memory_changes_nothing(over, name):
    code = PRELUDE + (
        "b = Buffer.create(sys.argv[1], 1_000_000, device='cuda', drain='caller')\n"
        "say(tried(lambda: b.put(rows(0)))); say(b.schema, len(b))\n"
        "os.environ['STANDIN_MEMORY'] = str(1 << 30); say(b.extend(rows(0, 2)).tolist(), stored(b))"
    )
    said, none, works = over(code, name, STANDIN_MEMORY=str(8 << 20)).splitlines()
    assert said.startswith("NotEnoughMemory") and "CUDA_ERROR_OUT_OF_MEMORY" in said and "nvidia-smi" in said
    assert none == "None 0" and works == "[0, 1] [0, 1]"


@pytest.mark.parametrize("device", ["cuda:x", "gpu", "cuda:", "mps", "GPU-12"])
def test_devices_that_are_none(over, device):
    said = over(PRELUDE + "say(tried(lambda: Buffer.create(None, 5, device=sys.argv[1])))", device)
    assert said.startswith("ValueError") and "nvidia-smi -L" in said
