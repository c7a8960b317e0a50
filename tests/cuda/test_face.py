"""Replay buffers, rlightning's storage and indices of any kind over rows in device memory: over the stand-in, whose device tensors are
the host's. What more there is to it, the tests of host storages have, run over a device (conformance.py)."""

from __future__ import annotations

import pytest

from tests.cuda.helpers import ask, line
from tests.cuda.test_lazily import COUNTS, MAPPED, NOTHING
from tests.cuda.test_sharing import WAYS

TORCH = """
import sys
import torch
from tensordict import TensorDict
import shmbuf
from shmbuf import PrioritizedSampler, ShmStorage, SliceSampler, TensorDictReplayBuffer, traj
def td(first, n):
    k = torch.arange(first, first + n)
    return TensorDict({"obs": k[:, None] * 10.0 + torch.arange(4), "next": {"done": k % 5 == 4, "reward": k.float()}, "k": k}, [n])
def right(s):
    return bool((s["obs"] == s["k"][:, None] * 10.0 + torch.arange(4)).all())
def say(*what):
    print(*what, flush=True)
"""


def test_two_learners_and_two_collectors_share_one_device_buffer(begin, name):
    make = TORCH + (
        "rb = TensorDictReplayBuffer(storage=ShmStorage(1000, name=sys.argv[1], device='cuda:0', device_rings=1),\n"
        "    sampler=PrioritizedSampler(1000, alpha=0.7, beta=0.5), batch_size=32, priority_key='p')\n"
        "rb.extend(td(0, 50)); say('made')\n"
        "while (what := sys.stdin.readline().strip()): say(eval(what))"
    )
    join = (
        TORCH
        + "rb = shmbuf.attach(sys.argv[1], timeout=60); rb.buffer.wait_rows(1, 60); say('attached', rb._storage.device)\nwhile (what := sys.stdin.readline().strip()): say(eval(what))"
    )
    maker, other = begin(make, name), begin(join, name, STANDIN_DELAY_US="500")
    assert line(maker) == "made" and line(other) == "attached cpu"
    holders = "len(__import__('shmbuf.cuda.sharing', fromlist=['x']).holders(rb.buffer._handle))"
    assert ask(maker, holders) == "2"
    assert (
        ask(other, "rb.extend(td(50, 50)).tolist()[-1]") == "99"
    )  # through the host's ring: the device ring is the maker's
    assert ask(maker, "(s := rb.sample(), right(s), s['priority_weight'].shape)[1:]") == "(True, torch.Size([32]))"
    assert (
        ask(other, "(s := rb.sample(), s.set('p', torch.rand(32)), rb.update_tensordict_priority(s), right(s))[-1]")
        == "True"
    )
    assert int(ask(maker, "rb.stats()['priorities_set']")) == 32
    assert (
        ask(
            maker,
            "rb.update_priority(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3.0, 4.0], dtype=torch.float16))",
        )
        == "tensor([True, True])"
    )  # B146
    assert ask(other, "len(rb.query((traj.length == 5) & (traj.reward.sum() > 100)))") == "16"
    assert ask(other, "right(rb[:]) and rb[-1]['k'].item()") == "99"
    assert (
        ask(
            maker,
            "(rb._storage.update_at_(3, {'obs': torch.zeros(4)}) if hasattr(rb._storage, 'update_at_') else None, len(rb))[1]",
        )
        == "100"
    )


@pytest.mark.parametrize("way", WAYS)
def test_rlightning_s_storage(over, name, way):
    code = TORCH + (
        "from shmbuf.rlightning import EnvRet, PolicyResponse, Storage\n"
        "s = Storage(100, name=sys.argv[1], device='cuda:0')\n"
        "for t in range(6):\n"
        "    s.add_transition(EnvRet('e', observation=torch.full((3,), float(t)), last_reward=torch.tensor(1.0), last_terminated=torch.tensor(False),\n"
        "        last_truncated=torch.tensor(False)), PolicyResponse('e', action=torch.tensor([t])))\n"
        "s.truncate_one_episode('e')\n"
        "say(len(s), s.device, s._rb.buffer._place.hold.memory.kind)\n"
        "say(sorted(map(str, s.get_data().keys())), shmbuf.attach(sys.argv[1]).sample(4).batch_size)"
    )
    first, second = over(code, name, **WAYS[way]).splitlines()
    assert first == f"5 cpu {way}" and "torch.Size([4])" in second


def test_rows_of_a_checkpoint_go_to_a_device_and_come_from_one(over, name, tmp_path):
    code = TORCH + (
        "a = TensorDictReplayBuffer(storage=ShmStorage(40, device='cuda:0'), batch_size=8); a.extend(td(0, 60)); a.dumps(sys.argv[1] + '/a')\n"
        "b = TensorDictReplayBuffer(storage=ShmStorage(40), batch_size=8); b.loads(sys.argv[1] + '/a'); b.dumps(sys.argv[1] + '/b')\n"
        "c = TensorDictReplayBuffer(storage=ShmStorage(40, device='cuda:0'), batch_size=8); c.loads(sys.argv[1] + '/b')\n"
        "say(all(right(x[:]) and x[:]['k'].sort()[0].tolist() == list(range(20, 60)) for x in (a, b, c)))"
    )
    assert over(code, tmp_path) == "True"


def test_storages_say_where_they_are_before_and_after(over):
    code = TORCH + (
        "s = ShmStorage(10, device=torch.device('cuda')); say(s.device)\n"
        "rb = TensorDictReplayBuffer(storage=s, batch_size=2); say(s.device, s.buffer.device); rb.extend(td(0, 3)); say(s.device, rb.sample()['obs'].device)\n"
        "try: ShmStorage(10, device='mps')\nexcept ValueError as e: say('ValueError', 'nvidia-smi' in str(e))"
    )
    assert over(code).splitlines() == ["cuda", "cuda:0 cuda:0", "cpu cpu", "ValueError True"]


def test_a_collector_without_the_device_extends_a_replay_buffer(begin, name):
    make = TORCH + (
        "rb = TensorDictReplayBuffer(storage=ShmStorage(1000, name=sys.argv[1], device='cuda:0'), batch_size=32)\n"
        "rb.extend(td(0, 50)); say('made')\nwhile (what := sys.stdin.readline().strip()): say(eval(what))"
    )
    maker = begin(make, name)
    assert line(maker) == "made"
    join = (
        "import sys; sys.modules['cuda.bindings.driver'] = None\n"
        + TORCH
        + "rb = shmbuf.attach(sys.argv[1]); say('attached')\n"
        "def tried(f):\n    try: return f()\n    except Exception as e: return f'{type(e).__name__}: {e}'\n"
        "while (what := sys.stdin.readline().strip()): say(tried(lambda: eval(what)))"
    )
    other = begin(join, name)
    assert line(other) == "attached"
    assert ask(other, "rb.extend(td(50, 7)).tolist()") == str(list(range(50, 57)))
    said = ask(other, "rb.sample()")
    assert said.startswith("DeviceError") and "shmbuf[cuda]" in said
    assert ask(maker, "right(rb[:]) and len(rb)") == "57"


def test_a_replay_buffer_that_only_extends_opens_no_context(begin, name):
    make = TORCH + (
        "rb = TensorDictReplayBuffer(storage=ShmStorage(1000, name=sys.argv[1], device='cuda:0'), batch_size=32)\n"
        "rb.extend(td(0, 50)); say('made'); sys.stdin.readline()"
    )
    maker = begin(make, name)
    assert line(maker) == "made"
    other = begin(
        TORCH
        + COUNTS
        + "rb = shmbuf.attach(sys.argv[1]); say('attached')\nwhile (what := sys.stdin.readline().strip()): say(eval(what))",
        name,
    )
    assert line(other) == "attached"
    assert ask(other, "(rb.extend(td(50, 7)).tolist(), rb.add(td(57, 1)[0]), len(rb), has())[2:]") == f"(58, {NOTHING})"
    assert ask(other, "(right(rb.sample()), rb._storage.device, has())") == f"(True, device(type='cpu'), {MAPPED})"
    assert ask(other, "(rb.extend(td(58, 2)).tolist(), right(rb[:]))") == "([58, 59], True)"


# What a batch's making asks of streams, in order: what, whether aside of the caller's stream, by which thread.
LOGGED = (
    TORCH
    + """
import contextlib, threading
from shmbuf.on_device import OnDevice
calls, of = [], threading.local()
def told(what):
    calls.append((what, getattr(of, "aside", 0), threading.current_thread().name.replace("MainThread", "user")))
class Streams:
    def __init__(self, device): pass
    @contextlib.contextmanager
    def aside(self):
        of.aside = getattr(of, "aside", 0) + 1
        yield
        of.aside -= 1
    def mark(self):
        told("mark")
        return "marked"
    def follow(self, mark):
        assert mark == "marked"
        told("follow")
    def used_here(self, t): told("used")
def logged(rb):
    s = rb._storage; s.schema(); s._on = OnDevice(torch.device("cpu"), Streams)
    for name, of in (("_fresh", s), ("stream", s._on)):
        def call(*args, do=getattr(of, name), name=name, **more):
            told(name)
            return do(*args, **more)
        setattr(of, name, call)
    return rb
def batch(do):
    calls.clear(); do()
    out = []
    for c in calls:
        if not out or out[-1] != c: out.append(c)
    return out
def made(**how):
    rb = TensorDictReplayBuffer(storage=ShmStorage(100, device="cuda:0", drain="caller"), batch_size=8, **how); rb.extend(td(0, 50))
    return logged(rb)
HANDED = [("mark", 1, "user"), ("follow", 0, "user"), ("used", 0, "user")]
"""
)


def test_a_sample_is_made_beside_the_caller_s_stream_and_handed_to_it(over):
    code = (
        LOGGED
        + (
            "rb = made(); drawn = [('_fresh', 1, 'user'), ('stream', 1, 'user')]\n"
            "assert batch(rb.sample) == drawn + HANDED, calls\n"
            "assert [c[0] for c in calls].count('used') == 6, calls\n"
            "s, info = rb.sample(return_info=True); assert right(s) and info['row_id'] is s['row_id']\n"
            "assert batch(lambda: rb.sample(out=s)) == [('stream', 0, 'user')], calls\n"  # the rule of out=: after the caller's stream
            "assert batch(lambda: rb[3:7]) == [('_fresh', 0, 'user'), ('stream', 0, 'user')], calls\n"
            "for sampler in (PrioritizedSampler(100, alpha=0.7, beta=0.5), SliceSampler(slice_len=2, strict_length=False)):\n"
            "    rb = made(sampler=sampler); got = batch(rb.sample)\n"
            "    assert got[-3:] == HANDED and {c[1:] for c in got[:-3]} == {(1, 'user')}, calls"
        )
    )
    over(code)


def test_batches_ahead_are_made_beside_all_streams_and_handed_to_that_of_who_asks(over):
    code = LOGGED + (
        "def look(td):\n    told('transform'); return td\n"
        "for rb in (made(prefetch=1), made(prefetch=1, transform=look), made(prefetch=1, collate_fn=look)):\n"
        "    own = [('transform', 1, 'shmbuf-finish')] * bool(rb._touched)\n"
        "    rb.sample(); rb.synchronize(); calls.clear(); first = rb.sample(); rb.synchronize()\n"
        "    by = lambda who: [c for c in dict.fromkeys(calls) if c[2] == who]\n"
        "    assert by('shmbuf-draw') == [('_fresh', 1, 'shmbuf-draw'), ('stream', 1, 'shmbuf-draw')], calls\n"
        "    assert by('shmbuf-finish') == own + [('mark', 1, 'shmbuf-finish')], calls\n"
        "    assert by('user') == [('follow', 0, 'user'), ('used', 0, 'user')], calls\n"
        "    assert right(first); calls.clear(); s, info = rb.sample(return_info=True)\n"
        "    assert [c[0] for c in calls if c[2] == 'user'].count('follow') == 2 and right(s), calls\n"
        "    calls.clear(); n = 0\n"
        "    for s in rb:\n        n += 1\n        if n == 3: break\n"
        "    assert [c[0] for c in calls if c[2] == 'user'].count('follow') == 3, calls\n"
        "    rb.close()\n"
        "rb = made(transform=look); got = batch(rb.sample)\n"
        "assert got == [('_fresh', 1, 'user'), ('stream', 1, 'user'), *HANDED, ('transform', 0, 'user')], calls"
    )
    over(code)


def test_nothing_is_drawn_into_a_graph_that_is_being_captured(over):
    code = TORCH + (
        "from shmbuf.on_device import OnDevice\n"
        "rb = TensorDictReplayBuffer(storage=ShmStorage(100, device='cuda:0'), batch_size=8); rb.extend(td(0, 50))\n"
        "rb._storage._on = OnDevice(torch.device('cuda', 0)); torch.cuda.is_current_stream_capturing = lambda: True\n"
        "def tried(f):\n    try: return f()\n    except Exception as e: return f'{type(e).__name__}: {e}'\n"
        "said = tried(rb.sample); say(said); assert said.startswith('DeviceError') and 'graph' in said"
    )
    over(code)
