"""Beside a CUDA graph that somebody captures: what the core has the driver do neither breaks it nor becomes part of it."""

from __future__ import annotations

import pytest

from tests.cuda.test_core import BEGIN

CAPTURE = (
    BEGIN
    + """
from shmbuf.errors import DeviceError
b = Buffer.create(name, 100, schema={"k": "int64"}, drain=sys.argv[2], device="cuda:0")
m = b._place.hold.memory
ok(d.cuCtxPushCurrent(d.CUcontext(m.context)))
s = ok(d.cuStreamCreate(1))
mode = getattr(d.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{sys.argv[3]}")
def begin():
    ok(d.cuStreamBeginCapture(s, mode))
def end():
    return int(d.cuStreamEndCapture(s)[0])
"""
)


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@pytest.mark.parametrize("drain", ["thread", "caller"])
def test_draining_beside_a_capture(over, name, drain, mode):
    """By the thread, or by the very thread that captures."""
    over(
        CAPTURE
        + """
b.extend({"k": np.arange(3)})
begin()
first = b.window[1]
for i in range(8):
    ids = b.put({"k": np.arange(10 * i, 10 * i + 10)}).wait(30)
    b.edit(ids[:2], {"k": np.array([-1, -2])}, timeout=30)
    assert (b.gather(ids)["k"] == [-1, -2, *range(10 * i + 2, 10 * i + 10)]).all()
assert b._handle.device_error is None
other = Buffer.attach(name)  # maps rows, and unmaps them
assert other._handle.header["device_kind"] == 1 and len(other.draw(5)[1]) == 5
other._handle.unmap_rows()
assert end() == 0, "the capture was broken"
assert b.window[1] == first + 80
other.close(); b.close(); destroy(name)
""",
        name,
        drain,
        mode,
    )


def test_a_captured_stream_is_refused_and_stays_whole(over, name):
    over(
        CAPTURE
        + """
k, out, done = np.arange(6), np.zeros(6, np.int64), np.zeros(6, np.uint8)
ids = b.extend({"k": k})
def put():
    return b.submit_device([(0, 8, k.ctypes.data)], 6, False, 20.0, lambda ids, n: ids, (None, None), int(s))
def gather():
    return b._handle.gather_device([(0, 8, out.ctypes.data)], 6, ids.ctypes.data, done.ctypes.data, int(s))
put().wait(20)
begin()
before = b.counters()["ring_used_bytes"] if hasattr(b, "counters") else b._handle.counters()["ring_used_bytes"]
for refused in (put, gather, lambda: b._handle.draw_device([(0, 8, out.ctypes.data)], 6, ids.ctypes.data, 0, 1.0, int(s))):
    try:
        refused()
    except (DeviceError, native.Gone) as e:
        assert "in a CUDA graph capture" in str(e) and "before it" in str(e), e
    else:
        raise AssertionError("it was not refused")
assert not out.any() and not done.any() and b._handle.counters()["ring_used_bytes"] == before and not b.collectors()[0]["ring_used"]
assert len(b.put({"k": k}).wait(20)) == 6
assert end() == 0, "the capture was broken"
ids = put().wait(20)
assert gather() == 6 and (out == k).all()
b.close(); destroy(name)
""",
        name,
        "caller",
        "GLOBAL",
    )
