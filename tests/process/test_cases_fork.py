"""Class FORK of cases from public bug trackers: fork, spawn, seeds, order. Each test is named after its case."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from shmbuf import Buffer, destroy, segment
from tests import oracle

# ---- B120: handles go through spawn --------------------------------------------------------------------------------

PASSED = """
import multiprocessing, sys
import numpy as np
from shmbuf import Buffer

def f(what, first):
    buf = Buffer.attach(what) if isinstance(what, str) else what
    buf.extend({"k": np.arange(first, first + 3)})
    print(buf._handle.slot, flush=True)
    buf.close()

if __name__ == "__main__":
    method, name = sys.argv[1:]
    context = multiprocessing.get_context(method)
    with Buffer.create(name, 100, schema={"k": "int64"}, drain="thread", max_collectors=8) as handle, Buffer.attach(name) as collector:
        collector.extend({"k": np.arange(3)})  # has a ring of its own
        mine = collector._handle.slot
        children = [context.Process(target=f, args=(what, 3 + 3 * i)) for i, what in enumerate((handle, collector, name))]
        for p in children: p.start()
        collector.extend({"k": np.arange(12, 15)})
        for p in children: p.join()
        assert [p.exitcode for p in children] == [0] * 3
        assert collector._handle.slot == mine
        rows = handle.gather(np.arange(*handle.window))["k"].tolist()
        assert sorted(rows) == list(range(15)), rows
        print("parent", mine)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_b120_handles_names_and_collectors_go_to_another_process(name, tmp_path, method):
    """A collector's handle becomes a registration of its own: never two processes on one ring."""
    (script := tmp_path / "main.py").write_text(PASSED)
    p = subprocess.run([sys.executable, script, method, name], capture_output=True, text=True, timeout=100)
    assert (p.returncode, p.stderr) == (0, ""), p.stderr
    *slots, last = p.stdout.splitlines()
    assert last.startswith("parent ") and last.split()[1] not in slots and len(slots) == 3
    destroy(name)


NO_GUARD = """
import multiprocessing, sys
import numpy as np
from shmbuf import Buffer

def f(buf, first):
    buf.extend({"k": np.arange(first, first + 3)})
    buf.close()

method, name = sys.argv[1:]
buf = Buffer.create(name, 100, schema={"k": "int64"}, exists="attach")
p = multiprocessing.get_context(method).Process(target=f, args=(buf, 3))
p.start()
buf.extend({"k": np.arange(3)})
p.join()
print(p.exitcode, sorted(buf.gather(np.arange(*buf.window))["k"].tolist()))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_b120_a_main_module_without_a_guard(name, tmp_path, method):
    """fork works. The others import the main module again, in which Python itself refuses to start a process and says how to
    mend it; the parent and its rows are unharmed."""
    (script := tmp_path / "main.py").write_text(NO_GUARD)
    p = subprocess.run([sys.executable, script, method, name], capture_output=True, text=True, timeout=100)
    assert p.returncode == 0, p.stderr
    if method == "fork":
        assert (p.stdout, p.stderr) == (f"0 {list(range(6))}\n", "")
    else:
        assert p.stdout == "1 [0, 1, 2]\n" and "freeze_support()" in p.stderr and "shmbuf" not in p.stderr
    with Buffer.attach(name) as buffer:
        assert [m["pid"] for m in buffer.members() if m["alive"]] == [os.getpid()]
    destroy(name)


# ---- B122: a seed fixes the samples --------------------------------------------------------------------------------

CALLS = 50
SEEDED = """
import hashlib, json, random, sys
import numpy as np
from shmbuf import Buffer
name, calls, seed, disturb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(disturb)
with Buffer.attach(name) as buf:
    buf.seed(seed)
    digests = []
    for draw in (lambda: buf.draw(16), lambda: buf.draw_by_priority(16, beta=0.5), lambda: buf.draw_by_priority(16, stratified=True),
                 lambda: buf.draw_slices(4, 5), lambda: buf.draw_slices(4, 5, by="start")):
        digest = hashlib.sha256()
        for _ in range(calls):
            if disturb:
                random.seed(int(rng.integers(99))); np.random.seed(int(rng.integers(99)))
            before = random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]
            rows, *more = draw()
            assert before == (random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2])
            for a in (rows["k"], *more): digest.update(np.ascontiguousarray(a).tobytes())
        digests.append(digest.hexdigest())
print(json.dumps(digests))
"""


def test_b122_a_seed_fixes_the_samples(name, python):
    """Two processes, 50 calls each; the global generators are neither read nor moved."""
    with Buffer.create(name, 500, schema=oracle.ENDING, drain="caller") as buffer:
        buffer.keep_priorities(0.6, 1e-8)
        buffer.extend(oracle.make_rows(1, 0, 700, ends=True), priorities=np.arange(700) % 13 + 0.5)
        first, second, other = (
            json.loads(python(SEEDED, name, CALLS, seed, disturb)) for seed, disturb in ((7, 0), (7, 5), (8, 0))
        )
        assert first == second, "the same rows, order, ids, lengths and weights"
        assert all(a != b for a, b in zip(first, other, strict=True)) and len({*first, *other}) == 10
    destroy(name)


IN_CHILD = """
import json, os, sys
from shmbuf import Buffer
with Buffer.attach(sys.argv[1]) as buf:
    buf.seed(9)
    r, w = os.pipe()
    if os.fork() == 0:
        buf.seed(7)  # the first thing it does with it
        os.write(w, json.dumps([buf.draw(16)[1].tolist(), buf.generator().integers(1 << 40, size=2).tolist()]).encode())
        os._exit(0)
    os.wait()
    child = json.loads(os.read(r, 1 << 16))
    buf.seed(7)
    print(json.dumps([child, [buf.draw(16)[1].tolist(), buf.generator().integers(1 << 40, size=2).tolist()]]))
"""


def test_a_seed_that_a_fork_child_sets_first_of_all_counts(name, python):
    """It went to the handle of the parent, which the child then exchanged for one of its own."""
    with Buffer.create(name, 500, schema={"k": "int64"}, drain="caller") as buffer:
        buffer.extend({"k": np.arange(500)})
        child, parent = json.loads(python(IN_CHILD, name))
        assert child == parent
    destroy(name)


SEEDED_TENSORS = """
import hashlib, json, sys
import torch, shmbuf
from tests.process.test_cases_fork import digest_of_tensors
print(json.dumps(digest_of_tensors(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
"""


def digest_of_tensors(name: str, seed: int, threads: int, disturb: int) -> list[str]:
    import hashlib

    import torch

    import shmbuf

    before_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    digests = []
    try:
        for sampler in (
            None,
            shmbuf.RandomSampler(),
            shmbuf.SliceSampler(slice_len=4),
        ):  # None: the buffer's, by priority
            with shmbuf.attach(name, seed=seed, **({} if sampler is None else {"sampler": sampler})) as rb:
                digest = hashlib.sha256()
                for i in range(CALLS):
                    torch.manual_seed(disturb * i)
                    state = torch.get_rng_state()
                    batch = rb.sample(16)
                    assert torch.equal(torch.get_rng_state(), state)
                    for key in ("k", "row_id", "priority_weight"):
                        if key in set(batch.keys()):
                            digest.update(batch[key].contiguous().numpy().tobytes())
                digests.append(digest.hexdigest())
    finally:
        torch.set_num_threads(before_threads)
    return digests


@pytest.mark.timeout(240)
def test_b122_a_seed_fixes_the_samples_of_tensors(name, python):
    """With 1 and with 8 threads, torch.manual_seed of other numbers in between."""
    torch = pytest.importorskip("torch")
    from tensordict import TensorDict

    from shmbuf import PrioritizedSampler, ShmStorage, TensorDictReplayBuffer

    sampler = PrioritizedSampler(500, alpha=0.6, beta=0.4)
    with TensorDictReplayBuffer(
        storage=ShmStorage(500, name=name, drain="caller"), sampler=sampler, batch_size=16, priority_key="p"
    ) as rb:
        k = torch.arange(500)
        rb.extend(TensorDict({"k": k, "p": k % 13 + 0.5, "next": {"done": k[:, None] % 20 == 19}}, [500]))
        here = digest_of_tensors(name, 7, 1, 3)
        assert json.loads(python(SEEDED_TENSORS, name, 7, 8, 11)) == here
        assert all(a != b for a, b in zip(here, digest_of_tensors(name, 8, 1, 3), strict=True)) and len(set(here)) == 3
    destroy(name)


# ---- B124: a forked child's end is not the parent's ----------------------------------------------------------------

PARENT = """
import os, sys
import numpy as np
from shmbuf import Buffer, StorageLost
from tests.unit.helpers import numbers
name, end, drain = sys.argv[1:]
buf = Buffer.create(None if name == "unnamed" else name, 10_000, schema={"k": "int64"}, drain=drain, ring_bytes=4096)
collector = Buffer.attach(buf.name)
collector.extend({"k": np.arange(3)})
slot, members = collector._handle.slot, sorted(m["pid"] for m in buf.members())
if drain == "caller": assert buf._handle.try_take_role()       # this process is the writer while it forks
pending = collector.put({"k": np.arange(3, 5)})
pid = os.fork()
if not pid:
    try: pending.wait(1)
    except StorageLost: pass                                    # the parent's, not ours
    else: os._exit(99)
    if end == "return": sys.argv.append("child")
    elif end == "sys.exit": sys.exit(0)
    elif end == "os._exit": os._exit(0)
    elif end == "exception": raise KeyError("mine")
    elif end == "close":
        collector.close(); buf.close()
        os._exit(0)
if "child" not in sys.argv:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (1 if end == "exception" else 0), status
    if drain == "caller": buf._handle.give_back_role()
    for k in range(5, 1005): collector.put({"k": np.arange(k, k + 1)}, timeout=60)
    assert pending.wait(60).tolist() == [3, 4]
    collector.extend({"k": np.arange(1005, 1006)}, timeout=60)
    assert numbers(buf) == list(range(1006))
    assert collector._handle.slot == slot and sorted(m["pid"] for m in buf.members() if m["alive"]) == members
    assert [c["state"] for c in buf.collectors()] == ["alive"]
    with Buffer.attach(buf.name) as other: assert len(other) == 1006
    print("parent done")
"""


@pytest.mark.parametrize("drain", ["thread", "caller"])
@pytest.mark.parametrize("end", ["return", "sys.exit", "os._exit", "exception", "close"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_b124_a_forked_childs_end_is_not_the_parents(name, start, end, drain, named):
    p = start(PARENT, name if named else "unnamed", end, drain)
    out, err = p.communicate(timeout=100)
    assert (p.returncode, out) == (0, "parent done\n"), err
    assert err == "" or (end == "exception" and err.endswith("KeyError: 'mine'\n") and err.count("Traceback") == 1)
    assert (name in segment.names()) == named


INHERITED = """
import os, sys
import numpy as np
from shmbuf import Buffer
with Buffer.create(sys.argv[1], 100, schema={"k": "int64"}, drain=sys.argv[2]) as buf:
    buf.extend({"k": np.arange(3)})
    slot = buf._handle.slot
    pid = os.fork()
    if not pid:
        buf.extend({"k": np.arange(3, 6)}, timeout=60)
        assert buf._handle.slot != slot, "a ring of its own"
        os._exit(0)
    buf.extend({"k": np.arange(6, 9)}, timeout=60)
    assert os.waitpid(pid, 0)[1] == 0
    print(buf._handle.slot == slot, sorted(buf.gather(np.arange(9))["k"].tolist()) == list(range(9)))
"""


@pytest.mark.parametrize("drain", ["thread", "caller", "process"])
def test_b124_the_child_registers_anew_when_it_puts(name, python, drain):
    assert python(INHERITED, name, drain) == "True True"
    destroy(name)
