"""Batches that are wanted on another device: drawn ahead, and copied beside the learner's stream. The device is torch's "meta"."""

from __future__ import annotations

import contextlib
from collections import namedtuple

import pytest
import torch
from tensordict import TensorDict

from shmbuf import DeviceError, SchemaError
from shmbuf.face import reading
from shmbuf.face.sending import Sender, Sent, each_tensor, target
from tests.unit.helpers_torch import rows

META = torch.device("meta")


def devices(td) -> set[str]:
    return {t.device.type for t in td.values(True, True)}


def test_a_sample_comes_where_it_is_wanted_and_its_numbers_stay(make_rb):
    rb = make_rb(batch_size=8)
    rb.extend(rows(0, 20))
    td, info = rb.sample(device="meta", return_info=True)
    assert devices(td) == {"meta"} and td.batch_size == (8,)
    assert info["row_id"].device.type == "cpu" and set(info["index"].tolist()) <= set(range(20))
    assert devices(rb.sample()) == {"cpu"} and devices(rb.sample(device="cpu")) == {"cpu"}


def test_what_is_drawn_ahead_is_on_its_way_and_what_was_for_elsewhere_is_dropped(make_rb):
    rb = make_rb(batch_size=8)
    rb._set_prefetch(2)
    rb.extend(rows(0, 20))
    assert devices(rb.sample()) == {"cpu"} and len(rb._ahead) == 2
    for _ in range(4):
        assert devices(rb.sample(device="meta")) == {"meta"}
    assert len(rb._ahead) == 2
    rb._ahead.synchronize()
    assert all(devices(coming.result().batch[0]) == {"meta"} for _, coming in rb._ahead._queue)
    assert devices(rb.sample()) == {"cpu"}


class Recorded:
    """Streams that write down what is asked of them."""

    def __init__(self, device):
        self.done: list[str] = []

    @contextlib.contextmanager
    def aside(self):
        self.done.append("begin")
        yield
        self.done.append("begun")

    def mark(self):
        self.done.append("mark")
        return len(self.done)

    def follow(self, mark):
        self.done.append(f"follow {mark}")

    def used_here(self, t):
        self.done.append("used")


def test_the_copy_is_begun_aside_and_followed_by_who_takes_it():
    sender = Sender(META, Recorded)
    sent = sender.send(rows(0, 3))
    assert isinstance(sent, Sent) and sender._streams.done == ["begin", "mark", "begun"]
    assert devices(sent.received()) == {"meta"}
    assert sender._streams.done[3:] == ["follow 2"] + ["used"] * 4


@pytest.mark.parametrize("prefetch", [None, 2])
def test_every_batch_of_a_replay_buffer_is_received_once(make_rb, monkeypatch, prefetch):
    made = []
    monkeypatch.setattr(reading, "Sender", lambda device: made.append(Sender(device, Recorded)) or made[-1])
    rb = make_rb(batch_size=4)
    rb._set_prefetch(prefetch)
    rb.extend(rows(0, 20))
    for _ in range(5):
        assert devices(rb.sample(device="meta")) == {"meta"}
    if prefetch:
        rb._ahead.synchronize()
    (sender,) = made
    asked = [d.split()[0] for d in sender._streams.done]
    assert asked.count("follow") == 5 and asked.count("mark") == 5 + (prefetch or 0)


def test_batches_of_any_form():
    Pair = namedtuple("Pair", "a b")
    batch = {
        "t": torch.zeros(2),
        "l": [torch.ones(2), "text"],
        "p": Pair(torch.zeros(1), 3),
        "td": TensorDict({"x": torch.zeros(2)}, [2]),
    }
    got = each_tensor(batch, lambda t: t.to(META))
    assert got["t"].is_meta and got["l"][0].is_meta and got["l"][1] == "text" and got["p"].a.is_meta and got["p"].b == 3
    assert got["td"]["x"].is_meta and type(got["p"]) is Pair


def test_errors(make_rb):
    rb = make_rb(batch_size=8)
    rb.extend(rows(0, 20))
    with pytest.raises(SchemaError, match="device= is not for it"):
        rb.sample(out=rb.sample(), device="meta")
    with pytest.raises(ValueError, match="'nonsense': a batch can go to"):
        rb.sample(device="nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            target("cuda:0")
        with pytest.raises(DeviceError, match="no CUDA device"):
            rb.sample(device="cuda")
