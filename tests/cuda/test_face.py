"""Replay buffers, rlightning's storage and indices of any kind over rows in device memory: over the stand-in, whose device tensors are
the host's. What more there is to it, the tests of host storages have, run over a device (conformance.py)."""

from __future__ import annotations

import pytest

from tests.cuda.helpers import ask, line
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
