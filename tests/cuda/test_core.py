"""The core over the driver: order with the caller's streams, his context, handles without the rows."""

from __future__ import annotations

BEGIN = """
import ctypes, os, sys
import numpy as np
from cuda.bindings import driver as d
from shmbuf import Buffer, destroy
from shmbuf._extension import native
name = sys.argv[1]
def ok(r):
    assert int(r[0]) == 0, r
    return r[1] if len(r) == 2 else r[1:]
def device(handle, rows):  # what this handle maps of it
    hold = rows._place.hold.memory.mapped
    handle.map_rows(hold.address, hold.bytes, hold.context)
    return hold
"""


def test_work_of_the_callers_stream_comes_first(over, name):
    """What makes the rows of a put, and what still reads the memory that a gather fills."""
    over(
        BEGIN
        + """
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0")
m = b._place.hold.memory.mapped
ok(d.cuCtxPushCurrent(d.CUcontext(m.context)))
s = ok(d.cuStreamCreate(1)); n = 50
made, out = ok(d.cuMemAlloc(8 * n)), ok(d.cuMemAlloc(8 * n))
def to(address, array, stream):
    ok(d.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, stream)); ok(d.cuStreamSynchronize(stream))
def late(number):
    os.environ["STANDIN_DELAY_US"] = str(number)
late(0)
old, new, kept = np.arange(n), np.arange(1000, 1000 + n), np.zeros(n, np.int64)
to(made, old, s); to(out, old, s)
late(40000)
for _ in range(12):  # many, and each late: whoever does not wait is there before
    ok(d.cuMemcpyHtoDAsync(made, old.ctypes.data, old.nbytes, s))
ok(d.cuMemcpyHtoDAsync(made, new.ctypes.data, new.nbytes, s))
ids = b.submit_device([(0, 8, int(made))], n, False, 20.0, lambda ids, n: ids, (None, None), int(s)).wait(20)
assert (b.gather(ids)["k"] == new).all()
for _ in range(12):
    ok(d.cuMemcpyDtoHAsync(kept.ctypes.data, out, kept.nbytes, s))  # of what was there
done = np.zeros(n, np.uint8)
assert b._handle.gather_device([(0, 8, int(out))], n, ids.ctypes.data, done.ctypes.data, int(s)) == n
late(0)
ok(d.cuStreamSynchronize(s))
assert (kept == old).all()
to_host = np.zeros(n, np.int64)
ok(d.cuMemcpyDtoH(to_host.ctypes.data, out, to_host.nbytes))
assert (to_host == new).all()
b.close(); destroy(name)
""",
        name,
    )


def test_the_callers_context_stays_his(over, name):
    over(
        BEGIN
        + """
import threading
def current():
    return int(ok(d.cuCtxGetCurrent()))
ok(d.cuInit(0))
ours = ok(d.cuDevicePrimaryCtxRetain(1))
def use():
    before = current()
    b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0")
    ids = b.extend({"k": np.arange(9)})
    b.gather(ids), b.draw(5), b.edit(ids, {"k": np.arange(9)}), b.empty()
    assert current() == before
    with __import__("contextlib").suppress(Exception):
        b._handle.map_rows(1, 1, 1)
    assert current() == before
    b.close(); destroy(name)
    assert current() == before
use()
ok(d.cuCtxPushCurrent(ours)); assert current() == int(ours)
use()
t = threading.Thread(target=use); t.start(); t.join()
""",
        name,
        STANDIN_DEVICES="5add1e00-0000-4000-8000-000000000001,5add1e00-0000-4000-8000-000000000002",
    )


def test_a_handle_without_the_rows_puts_and_says_why_it_does_nothing_else(over, name):
    over(
        BEGIN
        + """
from shmbuf import segment
STATUS = native.STATUSES
def refused(call):
    try:
        call()
    except native.Gone as e:
        return STATUS[e.args[0]], e.args[1]
    raise AssertionError("it was not refused")
b = Buffer.create(name, 100, schema={"k": "int64", "v": "float32"}, drain="caller", device="cuda:0")
b.extend({"k": np.arange(5), "v": np.zeros(5, "f4")})
bare = segment.attach(name)
rows = [np.arange(3), np.zeros(3, "f4")]
t = bare.put_leaves(b._columns, rows, 3, 0, 1.0, False, False)
assert STATUS[t.status] == "ok" and t.rows == 3
assert bare.help() == 0 and not bare.try_take_role() and STATUS[t.wait(0.05)] == "timeout"
assert bare.size == 5 and bare.window == (0, 0, 5)
ids, done, out = np.arange(3), np.zeros(3, np.uint8), np.zeros(3, np.int64)
columns = [(0, 8, out.ctypes.data)]
for call in (lambda: bare.fetch(b._columns, [out.ctypes.data, np.zeros(3, "f4").ctypes.data], 3, ids.ctypes.data, done.ctypes.data),
             lambda: bare.gather_device(columns, 3, ids.ctypes.data, done.ctypes.data),
             lambda: bare.put_device(columns, 3, 0, 1.0, False)):
    why, text = refused(call)
    assert why == "unmapped" and "does not map" in text, (why, text)
assert not done.any()
why, text = refused(lambda: bare.view_rows())
assert why == "device" and "device memory" in text
m = b._place.hold.memory.mapped
for address, size in ((0, m.bytes), (m.address + 8, m.bytes), (m.address, 100)):
    why, text = refused(lambda: bare.map_rows(address, size, m.context))
    assert why == "device" and "the rows and 1 device rings take" in text, text
bare.map_rows(m.address, m.bytes, m.context)
assert bare.device_rows == m.address and STATUS[t.wait(5.0)] == "ok" and bare.size == 8
assert refused(lambda: bare.map_rows(m.address, m.bytes, m.context))[1].startswith("the rows are mapped already")
assert [e["on_device"] for e in b.members()] == [True, True]
bare.unmap_rows(); bare.unmap_rows()
assert bare.device_rows is None and refused(lambda: bare.gather_device(columns, 3, ids.ctypes.data, done.ctypes.data))[0] == "unmapped"
bare.map_rows(m.address, m.bytes, m.context)
assert bare.gather_device(columns, 3, ids.ctypes.data, done.ctypes.data) == 3 and (out == ids).all()
bare.close()
h = b.stats()
host = Buffer.create(name + ".host", 10, schema={"k": "int64"}, drain="caller")
why, text = refused(lambda: host._handle.map_rows(m.address, m.bytes, m.context))
assert why == "device" and "lie in the segment" in text
assert host._handle.header["device_kind"] == 0 and b._handle.header["device_kind"] == 1 and b._handle.header["device_uuid"] == m.device.uuid
for x in (b, host):
    x.close(); destroy(x.name)
""",
        name,
    )


def test_there_are_as_many_device_rings_as_were_asked_for(over, name):
    over(
        BEGIN
        + """
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0", device_rings=2)
k = np.arange(3)
def put(x):
    return x.submit_device([(0, 8, k.ctypes.data)], 3, False, 20.0, lambda ids, n: ids, (None, None), 0)
one, two, three = (Buffer.attach(name) for _ in range(3))
assert put(one) is not None and put(two) is not None and put(three) is None and put(three) is None
assert len(three.extend({"k": k})) == 3
one.close()
assert len(put(three).wait(20)) == 3 and put(b) is None
for x in (b, two, three):
    x.close()
destroy(name)
""",
        name,
    )


def test_who_gets_no_device_ring_does_not_ask_for_it_at_each_put(over, name):
    """Nor naps, where nobody is dead or closed: a slot that is free is nobody's."""
    over(
        BEGIN
        + """
import time
b = Buffer.create(name, 100, schema={"k": "int64"}, drain="caller", device="cuda:0", device_rings=1, max_collectors=8)
k = np.arange(3)
def put(x):
    return x.submit_device([(0, 8, k.ctypes.data)], 3, False, 20.0, lambda ids, n: ids, (None, None), 0)
one, two, three = (Buffer.attach(name) for _ in range(3))
assert put(one) is not None
for x in (two, three):
    x.extend({"k": k})
two.close(); b._handle.sweep()
assert len(b.collectors()) == 2
began = time.monotonic()
for _ in range(5):
    assert put(three) is None and len(three.extend({"k": k})) == 3
tries, naps = three._handle.device_ring_tries
assert naps == 0, naps
assert tries == 1 or time.monotonic() - began > 0.9, tries
two = Buffer.attach(name); two.extend({"k": k})  # others come, and go: it asks again, each time once
for _ in range(5):
    assert put(three) is None
assert three._handle.device_ring_tries[0] <= tries + 1 or time.monotonic() - began > 0.9
one.close()
assert len(put(three).wait(20)) == 3
for x in (b, two, three):
    x.close()
destroy(name)
""",
        name,
    )


def test_more_rows_than_one_kernel_takes(over, name):
    over(
        BEGIN
        + """
n = 150_000
b = Buffer.create(name, n, schema={"k": "int32", "x": "uint8"}, ring_bytes=1 << 22, drain="caller", device="cuda:0")
b.extend({"k": np.arange(n, dtype=np.int32), "x": np.arange(n).astype(np.uint8)})
ids = np.random.default_rng(0).permutation(n)
done, k, x = np.zeros(n, np.uint8), np.zeros(n, np.int32), np.zeros(n, np.uint8)
done[5::7] = 1
places = {c.key[-1]: (c.offset, c.nbytes) for c in b.schema.columns}
b._handle.gather_device([(*places["k"], k.ctypes.data), (*places["x"], x.ctypes.data)], n, ids.ctypes.data, done.ctypes.data)
asked = np.arange(n) % 7 != 5
assert done.all() and (k[asked] == ids[asked]).all() and (x[asked] == ids[asked].astype(np.uint8)).all() and not k[~asked].any()
done[:] = 0
b._handle.gather_device([(*places["k"], k.ctypes.data)], n, ids.ctypes.data, done.ctypes.data)
assert (k == ids).all()
drawn, at = np.zeros(n, np.int32), np.zeros(n, np.int64)
assert b._handle.draw_device([(*places["k"], drawn.ctypes.data)], n, at.ctypes.data, 0, 1.0) == 0 and (drawn == at).all()
b.close(); destroy(name)
""",
        name,
        STANDIN_DELAY_US="0",
    )
