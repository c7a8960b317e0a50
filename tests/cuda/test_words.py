"""What is said where a device is not to be had, or is named by a word that is none, and by the steward."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

import shmbuf
from shmbuf import Buffer, DeviceError, ShmStorage, StorageLost, TensorDictReplayBuffer
from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line
from tests.cuda.test_sharing import TEN, A, B

NONE = "0000000c-0000-4000-8000-000000000003"
NO_BINDINGS = "import sys; sys.modules['cuda.bindings.driver'] = None\n"


@pytest.mark.parametrize("lacks", ["bindings", "driver", "device"])
def test_who_cannot_read_is_told_of_which_buffer_and_where_it_is(begin, name, lacks):
    both = {"STANDIN_DEVICES": f"{A},{B}"}
    maker = begin(MAKER.replace('device="cuda"', 'device="cuda:1"'), name, **both)
    assert line(maker) == "made"
    env = {"bindings": {}, "driver": {"LD_LIBRARY_PATH": ""}, "device": {"CUDA_VISIBLE_DEVICES": "0"}}[lacks]
    user = begin((NO_BINDINGS if lacks == "bindings" else "") + USER, name, **{**both, **env})
    assert line(user) == f"attached GPU-{B}" and ask(user, "b.put(rows(10)).rows") == "1"
    said = ask(user, "b.gather([0])")
    begins = f"DeviceError: the rows of buffer {name!r} are on GPU-{B}, and this process can put but not read: "
    assert said.startswith(begins) and said.count(B) == 1, said
    assert {"bindings": "pip install", "driver": "NVIDIA's driver", "device": "Visible are: "}[lacks] in said


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_a_device_that_is_not_here_is_named_as_it_was_asked_for(over, kind):
    code = PRELUDE + "say(tried(lambda: Buffer.create(None, 10, schema=SPEC, device=sys.argv[1])))"
    said = over(code, f"{kind}-{NONE}", STANDIN_DEVICES=f"{A},{B}")
    assert said.startswith(
        f"DeviceError: device='{kind}-{NONE}': no device of this UUID is visible here. Visible are: "
    )
    assert said.count(NONE) == 1 and f"GPU-{A}" in said and f"GPU-{B}" in said


@pytest.mark.parametrize("text", ["GPU-5add1e00", "MIG-", f"GPU-{NONE}0", f"MIG-GPU-{NONE}/1/0"])
def test_a_uuid_that_is_none_is_refused_where_it_is_said(text):
    with pytest.raises(ValueError, match="nvidia-smi -L") as e:
        ShmStorage(10, device=text)
    old = text.endswith("/1/0")
    assert repr(text) in str(e.value) and ("CUDA 11.4" in str(e.value) and "MIG-<uuid>" in str(e.value)) == old
    assert ("32 hexadecimal digits" in str(e.value)) != old
    ShmStorage(10, device=f"MIG-{NONE}")  # whether it is here is asked later


@pytest.fixture
def host():
    with TensorDictReplayBuffer(storage=ShmStorage(10), batch_size=2) as rb:
        rb.extend(TensorDict({"k": torch.arange(3)}, [3]))
        yield rb


@pytest.mark.parametrize("device", ["nonsense", f"GPU-{NONE}", "cuda:x", 1.5, 0])
def test_where_a_batch_can_go_is_said(host, device):
    if device == 0 and torch.cuda.is_available():
        pytest.skip("torch knows what that is where there is a device")
    with pytest.raises(ValueError, match='"cpu", "cuda", "cuda:1"') as e:
        host.sample(device=device)
    assert f"device={device!r}" in str(e.value) and ("UUIDs say" in str(e.value)) == ("GPU" in str(device))
    assert len(host.sample(device="cpu")) == 2


@pytest.mark.parametrize("built", [None, "12.8"])
def test_a_torch_without_cuda_is_told_from_one_without_a_device(host, monkeypatch, built):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError) as e:
        host.sample(device="cuda")
    assert ("install a CUDA build of torch" in str(e.value)) == (built is None)
    assert ("CUDA_VISIBLE_DEVICES" in str(e.value)) == (built is not None)


# ---- the end -------------------------------------------------------------------------------------------------------


def test_a_buffer_that_was_destroyed_before_is_not_said_to_have_been_waited_for(name):
    made = Buffer.create(name, 10, schema={"k": "int64"}, drain="caller")
    other, rb = Buffer.attach(name), shmbuf.attach(name, batch_size=2)
    made.destroy(force=True)
    for read in (lambda: other.draw(1), lambda: other.draw(1, timeout=5), rb.sample, lambda: rb.sample(timeout=5)):
        with pytest.raises(StorageLost) as e:
            read()
        assert str(e.value) == f"buffer {name!r} was destroyed"
    other.close()
    rb.close()


# ---- the steward ---------------------------------------------------------------------------------------------------


def steward(driver, *argv: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "shmbuf.cuda.steward", *argv]
    return subprocess.Popen(
        command, env={**os.environ, **driver}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_steward_s_help_says_what_it_does():
    said = " ".join(steward({}, "--help").communicate(timeout=60)[0].split())
    for words in ("foreground", "SIGTERM", "removed", "no CUDA context", "--timeout SECONDS"):
        assert words in said, words


def test_the_steward_s_hint_is_for_the_shell(name):
    for more in ((), ("--timeout", "0.1")):
        p = steward({}, name, *more)
        said = p.communicate(timeout=60)[1]
        assert p.returncode == 1 and "--timeout SECONDS" in said and "attach(" not in said
    p = steward({}, name, "--timeout", "-1")
    assert "--timeout" in p.communicate(timeout=60)[1] and p.returncode == 2


def test_the_steward_waits_for_the_name_and_for_the_first_rows(begin, name, driver):
    p = steward(driver, name, "--timeout", "100")
    try:
        maker = begin(
            PRELUDE
            + "wait(); b = Buffer.create(sys.argv[1], 100, device='cuda', drain='caller', ring_bytes=4096); say('made')\n"
            "wait(); b.extend(rows(0, 10)); say('put'); wait()",
            name,
        )
        assert ask(maker, "make") == "made"
        assert p.stdout.readline().strip() == f"shmbuf.cuda.steward {name}: pid {p.pid} is waiting for the first rows"
        assert ask(maker, "put") == "put"
        assert "keeps" in p.stdout.readline()
        maker.kill()
        maker.wait()
        user = begin(USER, name)
        assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == 0
    finally:
        p.kill()
        p.communicate()
