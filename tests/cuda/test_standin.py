"""The stand-in is as strict as the driver it stands for, and NVIDIA's bindings run over it."""

from __future__ import annotations

import os
import time

import psutil

PRELUDE = """
import ctypes, os, sys
from cuda.bindings import driver as d
def ok(r):
    assert int(r[0]) == 0, r
    return r[1] if len(r) == 2 else r[1:]
def code(r):
    return int(r[0])
def begin():
    ok(d.cuInit(0))
    dev = ok(d.cuDeviceGet(0))
    ok(d.cuCtxPushCurrent(ok(d.cuDevicePrimaryCtxRetain(dev))))
    return dev
FD = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
MiB2 = 2 << 20
def properties(dev):
    p = d.CUmemAllocationProp()
    p.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type, p.location.id = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, int(dev)
    p.requestedHandleTypes = FD
    return p
def mapped(handle, dev):
    at = ok(d.cuMemAddressReserve(MiB2, 0, 0, 0))
    ok(d.cuMemMap(at, MiB2, 0, handle, 0))
    access = d.CUmemAccessDesc()
    access.location = properties(dev).location
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(d.cuMemSetAccess(at, MiB2, [access], 1))
    return at
def made(dev):
    handle = ok(d.cuMemCreate(MiB2, properties(dev), 0))
    return handle, mapped(handle, dev)
def write(at, text):
    ok(d.cuMemcpyHtoD(at, ctypes.create_string_buffer(text), len(text)))
def read(at, n):
    out = ctypes.create_string_buffer(n)
    ok(d.cuMemcpyDtoH(out, at, n))
    return out.raw
"""


def test_the_bindings_copy_there_and_back_without_torch(over):
    code = PRELUDE + (
        "dev = begin(); handle, at = made(dev)\n"
        "s = ok(d.cuStreamCreate(0)); e = ok(d.cuEventCreate(0))\n"
        "a, b = ctypes.create_string_buffer(b'0123456789', 10), ctypes.create_string_buffer(10)\n"
        "ok(d.cuMemcpyHtoDAsync(at, a, 10, s)); ok(d.cuMemcpyDtoHAsync(b, at, 10, s)); ok(d.cuEventRecord(e, s)); ok(d.cuEventSynchronize(e))\n"
        "print(b.raw.decode(), 'torch' in sys.modules)"
    )
    assert over(code) == "0123456789 False"


def test_memory_lives_on_in_whoever_imported_it(begin):
    maker = begin(
        PRELUDE
        + (
            "dev = begin(); handle, at = made(dev); write(at, b'kept')\n"
            "fd = ok(d.cuMemExportToShareableHandle(handle, FD, 0)); print(os.getpid(), int(fd), flush=True); sys.stdin.read()"
        )
    )
    pid, fd = maker.stdout.readline().split()
    user = begin(
        PRELUDE
        + (
            "fd = os.open(f'/proc/{sys.argv[1]}/fd/{sys.argv[2]}', os.O_RDWR)\n"
            "dev = begin(); handle = ok(d.cuMemImportFromShareableHandle(fd, FD)); at = mapped(handle, dev)\n"
            "print('mapped', flush=True); sys.stdin.readline(); print(read(at, 4), flush=True)"
        ),
        pid,
        fd,
    )
    assert user.stdout.readline() == "mapped\n"
    maker.kill()
    maker.wait()
    assert user.communicate("\n", timeout=60)[0] == "b'kept'\n"


def test_calls_need_a_context_and_a_fork_child_gets_none(over):
    code = PRELUDE + (
        "ok(d.cuInit(0)); print(code(d.cuStreamCreate(0)), flush=True); begin(); print(code(d.cuStreamCreate(0)), flush=True)\n"
        "if not os.fork(): print(code(d.cuInit(0)), code(d.cuDeviceGetCount()), flush=True); os._exit(0)\n"
        "os.wait()"
    )
    assert over(code).split() == ["201", "0", "3", "3"]


def test_an_address_that_is_not_mapped_is_an_error_also_when_the_copy_comes_to_it(over, tmp_path):
    code = PRELUDE + (
        "dev = begin(); handle, at = made(dev); a = ctypes.create_string_buffer(8); s = ok(d.cuStreamCreate(0))\n"
        "print(code(d.cuMemcpyHtoD(int(at) + MiB2 - 4, a, 8)))\n"
        "os.environ['STANDIN_GATE'] = gate = sys.argv[1]\n"
        "ok(d.cuMemcpyHtoDAsync(at, a, 8, s)); ok(d.cuMemUnmap(at, MiB2)); open(gate, 'w').close()\n"
        "print(code(d.cuStreamSynchronize(s)))"
    )
    assert over(code, tmp_path / "gate", STANDIN_TENSORS="0").split() == ["1", "700"]


def test_devices_follow_their_visibility(over):
    a, b = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"
    code = PRELUDE + (
        "ok(d.cuInit(0)); print(*[ok(d.cuDeviceGetUuid(ok(d.cuDeviceGet(i)))).bytes.hex()[-1] for i in range(ok(d.cuDeviceGetCount()))])"
    )
    assert over(code, STANDIN_DEVICES=f"{a},{b}") == "a b"
    assert over(code, STANDIN_DEVICES=f"{a},{b}", CUDA_VISIBLE_DEVICES="1,0") == "b a"
    assert over(code, STANDIN_DEVICES=f"{a},{b}", CUDA_VISIBLE_DEVICES=f"GPU-{b}") == "b"
    assert over(PRELUDE + "print(code(d.cuInit(0)))", CUDA_VISIBLE_DEVICES="") == "100"


def test_a_killed_process_s_copy_lands_all_the_same(begin, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    maker = begin(
        PRELUDE
        + (
            "dev = begin(); handle, at = made(dev); fd = ok(d.cuMemExportToShareableHandle(handle, FD, 0))\n"
            "a = ctypes.create_string_buffer(b'late', 4); s = ok(d.cuStreamCreate(0)); print(os.getpid(), int(fd), flush=True); sys.stdin.readline()\n"
            "ok(d.cuMemcpyHtoDAsync(at, a, 4, s)); ok(d.cuMemcpyHtoDAsync(int(at) + 64, a, 4, s)); print('begun', flush=True); sys.stdin.read()"
        ),
        STANDIN_LATE="1",
        STANDIN_GATE=str(gate),
        STANDIN_LOG=str(log),
    )
    pid, fd = maker.stdout.readline().split()
    with open(f"/proc/{pid}/fd/{fd}", "rb", buffering=0) as memory:
        maker.stdin.write("\n")
        maker.stdin.flush()
        assert maker.stdout.readline() == "begun\n"
        give_up = time.monotonic() + 60  # until the first copy is in the hands of the process that does it
        while time.monotonic() < give_up and not _handed_over(int(pid)):
            time.sleep(0.01)
        maker.kill()
        maker.wait()
        assert memory.read(4) == bytes(4)
        gate.touch()
        while time.monotonic() < give_up and not log.exists():
            time.sleep(0.01)
        memory.seek(0)
        assert memory.read(4) == b"late"


def _handed_over(pid: int) -> bool:
    """Whether the helper, a child of pid, holds a descriptor of device memory."""
    for child in psutil.Process(pid).children():
        folder = f"/proc/{child.pid}/fd"
        for fd in os.listdir(folder):
            try:
                if "standin-cuda" in os.readlink(f"{folder}/{fd}"):
                    return True
            except OSError:
                continue
    return False


def test_calls_fail_and_kill_on_request(begin, over):
    assert over(PRELUDE + "begin(); print(code(d.cuStreamCreate(0)))", STANDIN_FAIL="cuStreamCreate=2") == "2"
    p = begin(
        PRELUDE + "begin(); ok(d.cuStreamCreate(0)); print('one', flush=True); d.cuStreamCreate(0)",
        STANDIN_KILL="cuStreamCreate:2",
    )
    assert p.communicate(timeout=60)[0] == "one\n" and p.returncode == -9
