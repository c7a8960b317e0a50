"""The same operations on rows in the segment and on rows in device memory give the same rows, ids, draws and trajectories. What is put from
the device, and gathered to it, lies in memory of the driver's there; check_cuda has a GPU do the same."""

from __future__ import annotations

import pytest

CODE = """
import sys
import numpy as np
from shmbuf import Buffer, destroy
from shmbuf._extension import native
from shmbuf.cuda import driver
from tools.dev.cuda_smoke import Array
name, seed, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
big = kind == "big"
ours = driver.current(driver.by_index(0)); ours.__enter__()
rng = np.random.default_rng(seed)
schema = {"a": ("uint8", (int(rng.integers(1, 9)),)), "b": ("float32", (int(rng.integers(1, 70)),)), "k": "int64", "done": "bool", "h": ("float16", (3,)), "v": "float32"}
if big:
    schema["image"] = ("uint8", (9000,))
if kind == "wide":  # rows of a multiple of 16 bytes, and columns of 16 and more first: moved by 16 bytes at a time
    schema = {"a": ("float64", (32,)), "b": ("float64", (2,)), "k": "int64", "done": "bool", "h": ("uint8", (3,)), "v": "float32"}
if kind == "many":  # more than a kernel takes at once
    schema.update({f"m{i:02}": [("uint8", (1,)), "float32", ("int16", (3,))][i % 3] for i in range(70)})
if seed % 2 and kind != "wide":
    schema["episode"] = "int32"
capacity = int(rng.choice([7, 40, 1000]))
how = dict(schema=schema, ring_bytes=1 << (18 if big else 14), drain="caller")
host = Buffer.create(name + ".h", capacity, **how)
dev = Buffer.create(name + ".d", capacity, device="cuda:0", **how)
assert dev._handle.device_rows and not host._handle.device_rows
if kind == "wide":
    assert host._header["row_bytes"] % 16 == 0 and all(c.offset % 16 == 0 for c in host.schema.columns if c.nbytes >= 16), host.schema
assert (len(host.schema.columns) > 64) == (kind == "many")
both = (host, dev)
for b in both:
    b.seed(5)
    b.keep_priorities(0.7, 1e-6)
k = 0
def rows(n):
    global k
    out = {"k": np.arange(k, k + n), "done": rng.random(n) < 0.2}
    k += n
    for c in host.schema.columns:
        key = c.key[-1]
        if key not in out:
            out[key] = (rng.random((n, *c.shape)) * 200).astype(c.numpy)
    if "episode" in out:
        out["episode"] = (out["k"] // 5).astype(np.int32)
    return out
def same(x, y):
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[i], y[i]) for i in x)
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(same, x, y))
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=np.asarray(x).dtype.kind == "f")
def submit(b, r, stream):
    if b is dev and rng_way:
        kept = {i: Array(v) for i, v in r.items()}
        columns = [(c.offset, c.nbytes, kept[c.key[-1]].address) for c in b.schema.columns]
        try:
            return b.submit_device(columns, len(r["k"]), False, 20.0, lambda ids, n: ids, (stream, None), 0).wait(20)
        finally:
            for a in kept.values():
                a.free()
    return b.put(r, stream=stream).wait(20)
most = (how["ring_bytes"] // 2 - 32) // (host._header["row_bytes"] + 12)
for step in range(60 if not big else 25):
    what = rng.integers(0, 10)
    lo, hi = host.window
    assert (lo, hi) == dev.window
    if what < 5 or lo == hi:
        n = int(rng.choice([1, 3, min(20, most), most, capacity + 3 if capacity + 3 <= most else 2]))
        r, rng_way = rows(n), bool(rng.integers(0, 2))
        stream = None if "episode" in schema else np.ascontiguousarray(r["k"] % 3)
        a, b = (submit(x, r, stream) for x in both)
        assert same(a, b), (a, b)
    elif what < 8:
        ids = rng.integers(max(0, lo - 3), hi, size=int(rng.integers(1, 12)))  # some are gone, some named twice
        new = rows(len(ids))
        keys = [i for i in new if rng.random() < 0.5] or ["v"]
        if "k" in keys or rng.random() < 0.5:
            new = {i: new[i] for i in keys}
            version = {}
        else:
            new, version = {i: new[i] for i in {*keys, "v"}}, {"version": "v", "require_newer": bool(rng.integers(0, 2))}
        a, b = (x.edit(ids, new, timeout=20, **version) for x in both)
        assert same(a, b), (a, b)
    elif what == 8:
        a, b = (x.draw_by_priority(33) for x in both)
        assert same(a, b)
        ids = np.unique(a[1])
        assert same(*(x.set_priorities(ids, ids % 7 + 0.5) for x in both))
    elif rng.random() < 0.3:
        for x in both:
            x.empty()
    lo, hi = host.window
    if hi > lo:
        ids = rng.permutation(np.arange(lo, hi))
        assert same(host.gather(ids), dev.gather(ids)), (step, what)
        assert same(host.draw(50), dev.draw(50))
        some = rng.integers(max(0, lo - 5), hi + 5, 30)
        (a, av), (b, bv) = (x.try_gather(some) for x in both)
        assert same(av, bv) and same({i: v[av] for i, v in a.items()}, {i: v[bv] for i, v in b.items()})
        # outputs "on the device", a part of the columns, in places of their own
        columns = [c for c in dev.schema.columns if rng.random() < 0.6]
        out = [Array(np.zeros((len(ids), *c.shape), c.numpy)) for c in columns]
        done, at = np.zeros(len(ids), np.uint8), np.ascontiguousarray(ids.astype(np.int64))
        done[::3] = 1  # not asked for
        dev._handle.gather_device([(c.offset, c.nbytes, o.address) for c, o in zip(columns, out)], len(ids), at.ctypes.data, done.ctypes.data)
        right = host.gather(ids)
        assert done.all()
        for c, a in zip(columns, out):
            o = a.back()
            a.free()
            mine = np.arange(len(ids)) % 3 != 0
            assert same(o[mine], right[c.key[-1]][mine]) and not o[~mine].astype(bool).any(), c
assert [t[:2] for t in zip(*host._handle.trajectories())] == [t[:2] for t in zip(*dev._handle.trajectories())]
assert not dev.check()["findings"] and dev.stats()["malformed_records"] == 0
for b in both:
    b.close(); destroy(b.name)
"""


CASES = [*((seed, "small") for seed in range(6)), (11, "big"), (12, "wide"), (13, "many"), (14, "wide")]


@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_rows_of_a_device_are_as_rows_of_the_host(over, name, seed, kind):
    over(CODE, name, seed, kind, STANDIN_DELAY_US="20" if kind != "many" else "0")
