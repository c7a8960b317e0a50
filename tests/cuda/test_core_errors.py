"""A device that fails: for a while, for ever, or without saying whether what it was doing is over."""

from __future__ import annotations

import pytest

from tests.cuda.test_core import BEGIN

NO_MEMORY = "cuMemAlloc=2,cuMemHostAlloc=2,cuStreamCreate=2,cuEventCreate=2,cuMemHostRegister=2"


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync=700", "cuEventSynchronize=700"])
def test_a_writer_whose_device_fails_leaves_the_work_to_others(over, name, call):
    over(
        BEGIN
        + """
import subprocess
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0")
victim = '''
import os, sys
import numpy as np
from shmbuf import Buffer
from shmbuf.errors import DeviceError
b = Buffer.attach(sys.argv[1])
os.environ["STANDIN_FAIL"] = sys.argv[2]
t = b.put({"k": np.arange(7)})
assert b._handle.help() == 0 and "CUDA_ERROR" in b._handle.device_error, b._handle.device_error
os.environ["STANDIN_FAIL"] = ""
assert b._handle.help() == 0 and not b._handle.try_take_role()
os.environ["STANDIN_FAIL"] = sys.argv[2]
try:
    b.gather([0])
    raise AssertionError
except DeviceError as e:
    assert "CUDA_ERROR" in str(e)
print("failed", flush=True)
assert len(t.wait(30)) == 7  # somebody else stored them
'''
b.extend({"k": np.arange(2)})
p = subprocess.Popen([sys.executable, "-c", victim, name, sys.argv[2]], stdout=subprocess.PIPE)
assert p.stdout.readline() == b"failed\\n"
assert b.drain() and (b.gather(range(2, 9))["k"] == np.arange(7)).all()
assert p.wait(60) == 0
b.close(); destroy(name)
""",
        name,
        call,
    )


@pytest.mark.parametrize("drain", ["caller", "thread"])
@pytest.mark.parametrize(
    "call", ["cuMemcpyHtoDAsync=2", "cuEventRecord=900", "cuEventSynchronize=304", "cuLaunchKernel=999"]
)
def test_an_error_that_passes_does_not_end_the_writing(over, name, call, drain):
    over(
        BEGIN
        + """
import time
from shmbuf import failures
b = Buffer.create(name, 100, schema={"k": "int64"}, drain=sys.argv[3], device="cuda:0")
ids = b.extend({"k": np.arange(20)})
os.environ["STANDIN_FAIL"] = sys.argv[2]
t = b.put({"k": np.arange(7)}) if "Launch" not in sys.argv[2] else b.submit_edit([(b.schema.columns[0].offset, 8)], [(new := np.arange(50, 70)).ctypes.data], ids, False, 60.0)
while b._handle.device_error is None:
    b._handle.help()
assert "CUDA_ERROR" in b._handle.device_error or "CUDA error" in b._handle.device_error
text = failures.held_up_text(b)
other = Buffer.attach(name, readonly=True)
said = failures.held_up_text(other)
assert f"pid {os.getpid()}" in said and f"cannot write to the device now: CUDA error {sys.argv[2].split('=')[1]}" in said, said
if "cuMemcpy" in sys.argv[2]:
    import contextlib, io
    from shmbuf import cli
    os.environ["COLUMNS"] = "250"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main(["show", name])
    assert "cannot write to the device: CUDA error 2" in " ".join(shown.getvalue().split()), shown.getvalue()
other.close()
assert "this process cannot write to the device now (cu" in text and sys.argv[2].split("=")[0] in text, text
os.environ["STANDIN_FAIL"] = ""
t.wait(60)
assert b._handle.device_error is None and "the device" not in failures.held_up_text(b), failures.held_up_text(b)
assert not any(m["device_error"] for m in b.members())
if "Launch" in sys.argv[2]:
    assert (b.gather(ids)["k"] == np.arange(50, 70)).all()
else:
    assert (b.gather(range(20, 27))["k"] == np.arange(7)).all()
b.close(); destroy(name)
""",
        name,
        call,
        drain,
    )


def test_who_writes_needs_no_memory_for_it(over, name):
    """Of the device, or pinned: there was some when the rows were mapped."""
    over(
        BEGIN
        + """
b = Buffer.create(name, 3000, schema={"k": "int64", "x": ("float32", (200,))}, ring_bytes=1 << 22, drain="caller", device="cuda:0")
b.extend({"k": np.arange(1), "x": np.zeros((1, 200), "f4")})
os.environ["STANDIN_FAIL"] = sys.argv[2]
n = 2000
x = np.random.default_rng(0).normal(size=(n, 200)).astype("f4")
for i in range(3):
    ids = b.extend({"k": np.arange(n), "x": x}, timeout=60)
b.edit(ids, {"x": -x}, timeout=60)
b.edit(ids[:5], {"k": np.arange(1, 6)}, version="k", timeout=60)
assert b._handle.device_error is None
os.environ["STANDIN_FAIL"] = ""
got = b.gather(ids)
assert (got["x"] == -x).all() and (got["k"][:5] == np.arange(1, 6)).all() and (got["k"][5:] == np.arange(5, n)).all()
b.close(); destroy(name)
""",
        name,
        NO_MEMORY,
        STANDIN_DELAY_US="0",
    )


def test_what_may_still_be_under_way_is_waited_for(over, name, tmp_path):
    """The writer's stream cannot be waited for: others write there only when his process is over; until then the word that tells of it stays."""
    over(
        BEGIN
        + """
import signal, subprocess, time
gate = sys.argv[2]
b = Buffer.create(name, 8, schema={"k": "int64"}, drain="caller", device="cuda:0")
b.extend({"k": np.arange(2)})
victim = '''
import os, sys
import numpy as np
from shmbuf import Buffer
b = Buffer.attach(sys.argv[1])
os.environ["STANDIN_GATE"] = sys.argv[2]
os.environ["STANDIN_FAIL"] = "cuEventSynchronize=304,cuStreamSynchronize=304"
t = b.put({"k": np.arange(100, 107)})
assert b._handle.help() == 0 and "304" in b._handle.device_error, b._handle.device_error
os.environ["STANDIN_FAIL"] = ""
began = __import__("time").monotonic()
while __import__("time").monotonic() - began < 0.3:  # after its error it tries again; not while its own copy may land
    b._handle.help()
assert not b._handle.try_take_role()
print("failed", flush=True)
sys.stdin.readline()
'''
began = time.monotonic()
p = subprocess.Popen([sys.executable, "-c", victim, name, gate], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert p.stdout.readline() == b"failed\\n"
refused = not b._handle.try_take_role() and not b._handle.try_take_role()
assert refused or time.monotonic() - began > 9, "the role was given while copies may be under way"
p.kill(); p.wait(60)
while b.window[1] < 9:
    b.drain()
assert (b.gather(range(2, 9))["k"] == np.arange(100, 107)).all()
assert b._handle.device_error is None
b.close(); destroy(name)
""",
        name,
        tmp_path / "gate",
    )


def test_a_put_that_may_still_be_under_way_keeps_its_ring(over, name, tmp_path):
    over(
        BEGIN
        + """
from shmbuf.errors import DeviceError
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0", device_rings=2)
one, two = Buffer.attach(name), Buffer.attach(name)
k = np.arange(6)
def put(x):
    return x.submit_device([(0, 8, k.ctypes.data)], 6, False, 20.0, lambda ids, n: ids, (None, None), 0)
put(one).wait(20)
os.environ["STANDIN_FAIL"] = "cuEventSynchronize=304,cuStreamSynchronize=304"
for text in ("304", "an earlier put of this handle failed"):
    try:
        put(one)
    except DeviceError as e:
        assert text in str(e), e
    else:
        raise AssertionError("it went through")
    os.environ["STANDIN_FAIL"] = ""
assert len(put(two).wait(20)) == 6 and len(one.extend({"k": k})) == 6
slot = one._handle.slot
one.close()
b._handle.sweep()
assert slot in [c["slot"] for c in b.collectors()], "the ring of one whose device may still write to it was swept"
two.close(); b.close(); destroy(name)
""",
        name,
    )


def test_the_kernels_are_loaded_once(over, name):
    """By one process, however many handles it has."""
    over(
        BEGIN
        + """
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0")
ids = b.extend({"k": np.arange(5)})
os.environ["STANDIN_FAIL"] = "cuModuleLoadData=2"
for _ in range(3):
    with Buffer.attach(name) as other:
        assert (other.gather(ids)["k"] == np.arange(5)).all()
b.close(); destroy(name)
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0")
b.extend({"k": np.arange(5)})
b.close(); destroy(name)
""",
        name,
    )
