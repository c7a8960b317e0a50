"""The first part of ``make check-cuda``: whether the driver does what shmbuf asks of it, without torch, in half a minute. And the kernels,
timed on the device by its own clock."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SPEC = {"k": "int64", "x": ("float32", (16,)), "b": ("uint8", (3,))}


class Line(NamedTuple):
    what: str
    got: str
    wanted: str
    good: bool | None  # None: not judged


def rows(first: int, n: int) -> dict[str, np.ndarray]:
    k = np.arange(first, first + n)
    x = (k[:, None] * 10 + np.arange(16)).astype("f4")
    return {"k": k, "x": x, "b": (k[:, None] + np.arange(3)).astype("u1")}


def right(got: dict[str, Any]) -> bool:
    wanted = rows(0, int(got["k"].max(initial=0)) + 1)
    return len(got["k"]) > 0 and all((got[c] == wanted[c][got["k"]]).all() for c in SPEC)


# Attaches, reads all of argv[1], puts ten rows and stays.
OTHER = """
import sys
from shmbuf import Buffer
from tools.dev.cuda_smoke import right, rows
b = Buffer.attach(sys.argv[1])
print(right(b.gather(range(*b.window))) and b.extend(rows(len(b), 10)).tolist()[-1], flush=True)
sys.stdin.readline()
print(right(b.gather(range(*b.window))) and len(b), flush=True)
"""


def smoke() -> Iterator[Line]:
    """Each line is one thing that has to work before anything else can."""
    yield from _tried("driver, devices", _devices)
    yield from _tried("kernels: PTX loads", _kernels_load)
    yield from _tried("host memory of /dev/shm registered, copied from", _registered)
    yield from _tried("put, gather, draw, edit", lambda: _operations("vmm"))
    yield from _tried("put from device memory", _from_device)
    yield from _tried("rows handed over as a descriptor", lambda: _two_processes("vmm"))
    yield from _tried("rows shared by CUDA IPC", lambda: _two_processes("ipc"))
    yield from _tried("attaching and putting opens no context", _no_context)


def _tried(what: str, do: Callable[[], str]) -> Iterator[Line]:
    try:
        yield Line(what, do(), "works", True)
    except Exception as e:
        yield Line(what, f"{type(e).__name__}: {e}"[:400], "works", False)


def _devices() -> str:
    from shmbuf.cuda import driver, memory

    device = driver.by_index(0)
    why = memory.why_not_vmm(device)
    return f"{device}, driver {driver.call('cuDriverGetVersion')}; as a descriptor: {why or 'yes'}"


def _kernels_load() -> str:
    with Kernels() as k:
        return f"{len(k.text):,} characters"


def _registered() -> str:
    from shmbuf.cuda import driver

    n = 1 << 20
    path = f"/dev/shm/shmbuf.check.{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, n)
        with mmap.mmap(fd, n) as m, driver.current(driver.by_index(0)):
            view = np.frombuffer(m, np.uint8)
            view[:] = np.arange(n) % 251
            driver.call("cuMemHostRegister", view.ctypes.data, n, 0)
            there = Array(np.zeros(n, np.uint8))
            try:
                driver.call("cuMemcpyHtoDAsync", there.address, view.ctypes.data, n, 0)
                driver.call("cuStreamSynchronize", 0)
                same = bool((there.back() == view).all())
            finally:
                there.free()
                driver.call("cuMemHostUnregister", view.ctypes.data)
                del view
        if not same:
            raise AssertionError("other bytes arrived")
        return "1 MiB"
    finally:
        os.close(fd)
        os.unlink(path)


@contextlib.contextmanager
def _buffer(sharing: str = "vmm", **how: Any) -> Iterator[Any]:
    from shmbuf import Buffer

    if sharing == "ipc":
        os.environ["SHMBUF_CUDA_SHARING"] = "ipc"
    try:
        b = Buffer.create(f"smoke.{os.getpid()}", 1000, schema=SPEC, device="cuda:0", drain="caller", **how)
        try:
            if (kind := b._place.hold.memory.kind) != sharing:  # type: ignore[union-attr]
                raise AssertionError(f"shared as {kind}: {b._place.hold.memory.why}")  # type: ignore[union-attr]
            yield b
        finally:
            b.destroy(force=True)
    finally:
        os.environ.pop("SHMBUF_CUDA_SHARING", None)


def _operations(sharing: str) -> str:
    with _buffer(sharing) as b:
        b.extend(rows(0, 600))
        ids = np.random.default_rng(0).permutation(600)
        got = b.gather(ids)
        if not right(got) or (got["k"] != ids).any() or not right(b.draw(300)[0]):
            raise AssertionError("other rows than were put")
        b.edit([7], {"x": np.full((1, 16), -1, "f4")})
        if (b.gather([7])["x"] != -1).any() or not right(b.gather([6, 8])):
            raise AssertionError("the edit is not there, or reaches further than its row")
        b.edit([7], {"x": rows(7, 1)["x"]})
        b.extend(rows(600, 900))  # round the storage
        if not right(b.gather(range(*b.window))):
            raise AssertionError("other rows than were put, behind the end")
    return "1,500 rows"


def _from_device() -> str:
    from shmbuf.cuda import driver

    with _buffer(device_rings=1) as b, driver.current(driver.by_index(0)):
        host = rows(0, 200)
        arrays = [Array(host[c.key[-1]]) for c in b.schema.columns]
        try:
            columns = [(c.offset, c.nbytes, a.address) for c, a in zip(b.schema.columns, arrays, strict=True)]
            b.submit_device(columns, 200, False, 20.0, lambda ids, n: ids, (None, None), 0).wait(20)
            out = [Array(np.zeros((200, *c.shape), c.numpy)) for c in b.schema.columns]
            arrays += out
            into = [(c.offset, c.nbytes, a.address) for c, a in zip(b.schema.columns, out, strict=True)]
            ids, done = np.arange(200)[::-1].copy(), np.zeros(200, np.uint8)
            n = b._handle.gather_device(into, 200, ids.ctypes.data, done.ctypes.data)
            got = {c.key[-1]: a.back() for c, a in zip(b.schema.columns, out, strict=True)}
        finally:
            for a in arrays:
                a.free()
        if n != 200 or not right(got) or (got["k"] != ids).any():
            raise AssertionError("other rows than were put")
    return "200 rows, there and back"


@contextlib.contextmanager
def _other(name: str, code: str = OTHER) -> Iterator[subprocess.Popen]:
    p = subprocess.Popen(
        [sys.executable, "-c", code, name], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield p
    finally:
        p.kill()
        p.communicate()


def _two_processes(sharing: str) -> str:
    with _buffer(sharing) as b:
        b.extend(rows(0, 500))
        with _other(b.name) as p:
            if p.stdout.readline() != "509\n":  # type: ignore[union-attr]
                raise AssertionError("the other process did not find the rows, or could not put")
            if not right(b.gather(range(510))):
                raise AssertionError("its rows are not here")
            b.close()  # its maker goes
            p.stdin.write("on\n")  # type: ignore[union-attr]
            p.stdin.flush()  # type: ignore[union-attr]
            if p.stdout.readline() != "510\n":  # type: ignore[union-attr]
                raise AssertionError("the rows did not outlive their maker")
    return "510 rows, and after their maker"


def _no_context() -> str:
    from shmbuf.cuda import driver

    code = (
        "import sys\nfrom shmbuf import Buffer\nfrom tools.dev.cuda_smoke import rows\nfrom shmbuf.cuda import driver\n"
        "b = Buffer.attach(sys.argv[1]); print(b.extend(rows(10, 3)).tolist(), driver._contexts, b.device, flush=True)"
    )
    with _buffer() as b:
        b._handle.start_thread(False)  # who drains
        b.extend(rows(0, 10))
        with driver.current(driver.by_index(0)):
            before = driver.call("cuMemGetInfo")[0]
        with _other(b.name, code) as p:
            said = p.stdout.readline().strip()  # type: ignore[union-attr]
        if said != "[10, 11, 12] {} cuda:0":
            raise AssertionError(said or "it ended")
    return f"{before >> 20:,} MiB free"


# ---- device memory and kernels ---------------------------------------------------------------------------------------


class Array:
    """An array's bytes in device memory of its own; within a current context."""

    def __init__(self, a: np.ndarray):
        from shmbuf.cuda import driver

        a = np.ascontiguousarray(a)
        self.shape, self.dtype, self.nbytes = a.shape, a.dtype, a.nbytes
        self.address = int(driver.call("cuMemAlloc", max(a.nbytes, 1)))
        if a.nbytes:
            driver.call("cuMemcpyHtoD", self.address, a.ctypes.data, a.nbytes)

    def back(self) -> np.ndarray:
        from shmbuf.cuda import driver

        out = np.empty(self.shape, self.dtype)
        if out.nbytes:
            driver.call("cuMemcpyDtoH", out.ctypes.data, self.address, out.nbytes)
        return out

    def free(self) -> None:
        from shmbuf.cuda import driver

        driver.call("cuMemFree", self.address)


class Kernels:
    """The core's kernels, launched from here; the device's context is current within."""

    def __init__(self) -> None:
        from shmbuf._extension import native
        from shmbuf.cuda import driver

        self.text = native.device_kernels()
        self._stack = contextlib.ExitStack()
        self._call, self._d = driver.call, driver.bindings()
        self._device = driver.by_index(0)
        self._current = driver.current

    def __enter__(self) -> Kernels:
        with self._stack as stack:
            stack.enter_context(self._current(self._device))
            module = self._call("cuModuleLoadData", self.text.encode() + b"\0")
            stack.callback(self._call, "cuModuleUnload", module)
            self._gather = self._call("cuModuleGetFunction", module, b"shmbuf_gather")
            self._call("cuModuleGetFunction", module, b"shmbuf_scatter")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def gather_seconds(self, move: bytes, blocks: int, repeats: int) -> float:
        """Of one launch, on the device's own clock; the median."""
        parameter = ctypes.create_string_buffer(move)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        events = [self._call("cuEventCreate", 0) for _ in range(2)]
        times = []
        try:
            for i in range(repeats + 3):
                self._call("cuEventRecord", events[0], 0)
                self._call("cuLaunchKernel", self._gather, blocks, 1, 1, 256, 1, 1, 0, 0, ctypes.addressof(pointers), 0)
                self._call("cuEventRecord", events[1], 0)
                self._call("cuEventSynchronize", events[1])
                if i >= 3:
                    times.append(self._call("cuEventElapsedTime", *events) * 1e-3)
        finally:
            for e in events:
                self._call("cuEventDestroy", e)
        return statistics.median(times)
