"""Names under which memory is offered, who is refused, answers that are none, drivers that lack a call."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading

import msgpack
import pytest

from shmbuf import segment
from shmbuf.cuda import driver, holding, sharing
from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line
from tests.cuda.test_sharing import TEN, WAYS, steward_of, until

UUID = bytes(range(16))


@pytest.fixture
def address():
    return f"\0shmbuf.test.{secrets.token_hex(8)}"


@pytest.fixture
def share():
    made = holding.Share(1, "vmm", 4096, UUID, why="x", fd=os.memfd_create("test"))
    yield made
    made.release()


def listening(address) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind(address)
    s.listen(4)
    return s


# ---- names ---------------------------------------------------------------------------------------------------------


def test_a_name_that_somebody_else_has_is_taken_when_it_is_free(address, share):
    other = listening(address)
    offered = sharing.Offered(sharing.server(), address, share)
    offered.begin()
    other.close()

    def answered():
        offer = sharing._ask_one(address, 5.0)
        if offer is None:
            return False
        assert (offer.kind, offer.size, offer.uuid, os.fstat(offer.fd).st_ino) == (
            "vmm",
            4096,
            UUID,
            os.fstat(share.fd).st_ino,
        )
        offer.drop()
        return True

    until(answered)
    offered.withdraw()
    assert sharing._ask_one(address, 5.0) is None
    listening(address).close()  # the name is free


def test_what_is_withdrawn_before_it_could_be_offered_is_tried_no_more(address, share):
    other = listening(address)
    offered = sharing.Offered(sharing.server(), address, share)
    offered.begin()
    assert offered._listen in sharing.server()._tasks
    offered.withdraw()
    until(lambda: offered._listen not in sharing.server()._tasks)
    other.close()
    assert sharing._ask_one(address, 5.0) is None


def test_each_handle_has_a_name_of_its_own_also_in_an_entry_that_another_had(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    user = begin(USER, name)
    assert line(user) == "attached cuda:0"
    entry = "(lambda h: (h.member, __import__('shmbuf.cuda.sharing', fromlist=['x']).address_of(7, next(m for m in h.members() if m['member'] == h.member))))"
    member, first = eval(ask(user, f"{entry}(b._handle)"))
    again, second = eval(ask(user, f"(b.close(), globals().update(b=Buffer.attach(b.name)), {entry}(b._handle))[-1]"))
    assert member == again and first != second
    maker.kill()
    maker.wait()
    third = begin(USER, name)
    assert line(third) == "attached cuda:0" and ask(third, "stored(b)") == TEN


def test_a_handle_offers_no_more_before_it_gives_its_entry_back(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    code = USER.replace("b.close(); ", "").replace(
        'say("attached"',
        "h = b._place.hold; before, seen = h.withdraw, []\n"
        "h.withdraw = lambda: (before(), seen.append((b._bare.closed, h._offered)))\n"
        'say("attached"',
    )
    user = begin(code, name)
    assert line(user) == "attached cuda:0"
    assert ask(user, "(b.close(), seen[0])[1]") == "(False, None)"


# ---- who is refused --------------------------------------------------------------------------------------------------


def test_another_user_s_reader_is_told_that_it_is_refused_not_that_the_rows_are_lost(begin, name):
    if os.getuid():
        pytest.skip("needs root, to be another user")
    maker = begin(MAKER.replace('device="cuda"', 'device="cuda", mode=0o644'), name)
    assert line(maker) == "made"
    code = USER.replace(
        "b = Buffer.attach(sys.argv[1])",
        "import shmbuf.cuda.holding, cuda.bindings.driver; os.setuid(12345); b = Buffer.attach(sys.argv[1], owner=0, readonly=True)",
    )
    other = begin(code, name)
    assert line(other) == "attached cuda:0"
    for what in ("b.gather([0])", "b.draw(2)"):
        said = ask(other, what)
        assert said.startswith("DeviceError") and "of its own user only" in said and f"pid {maker.pid}" in said, said
        assert "of uid 0 has it" in said and "uid 12345" in said and "lost" not in said
    assert ask(other, "(len(b), b.window)") == "(10, (0, 10))"
    holders = "__import__('shmbuf.cuda.sharing', fromlist=['x']).holders(b._handle)"
    assert ask(other, f"[p['answers'] for p in {holders}]") == "[False]"


# ---- answers that are none -------------------------------------------------------------------------------------------


def test_who_attaches_beside_a_stopped_holder_waits_for_it_once(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    os.kill(maker.pid, signal.SIGSTOP)
    counted = (
        "import shmbuf.cuda.sharing as sharing\nasked, ask = [], sharing.ask\n"
        "sharing.ask = lambda handle, what, patience: (asked.append(what), ask(handle, what, patience))[1]\n"
    )
    user = begin(counted + USER, name)
    assert line(user) == "attached cuda:0"
    assert ask(user, "b.put(rows(10)).rows") == "1" and ask(user, "len(asked)") == "1"
    assert f"kill -CONT {maker.pid}" in ask(user, "b.gather([0])")
    os.kill(maker.pid, signal.SIGCONT)
    assert ask(user, "stored(b)[:10]") == TEN


def test_the_stopped_are_asked_last(begin, name):
    stopped = [begin(MAKER, name)]
    assert line(stopped[0]) == "made"
    stopped += [begin(USER, name) for _ in range(3)]
    for p in stopped[1:]:
        assert line(p) == "attached cuda:0"
    last = begin(USER, name)
    assert line(last) == "attached cuda:0"
    for p in stopped:
        os.kill(p.pid, signal.SIGSTOP)
        until(lambda p=p: segment.process_state(p.pid) == "T")
    counted = (
        "import shmbuf.cuda.sharing as sharing\nnames, ask_one = [], sharing._ask_one\n"
        "sharing._ask_one = lambda name, seconds: (names.append(name), ask_one(name, seconds))[1]\n"
    )
    user = begin(counted + USER, name)
    assert line(user) == "attached cuda:0" and ask(user, "len(names)") == "1"
    assert ask(user, "b._place.hold.memory.pid") == str(last.pid) and ask(user, "stored(b)") == TEN
    for p in stopped:
        os.kill(p.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"\x81", b"no", msgpack.packb([1, 2]), msgpack.packb({"kind": "vmm"}), msgpack.packb({"other": 1})],
    ids=["never", "short", "text", "list", "few", "other"],
)
def test_a_descriptor_that_comes_with_nonsense_is_closed(address, packet):
    listener = listening(address)

    def answer():
        peer, _ = listener.accept()
        fd = os.memfd_create("nonsense")
        socket.send_fds(peer, [packet], [fd])
        os.close(fd)
        peer.close()

    t = threading.Thread(target=answer)
    t.start()
    assert sharing._ask_one(address, 20.0) is None
    t.join()
    listener.close()
    held = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            held.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    assert not any("nonsense" in path for path in held)


def test_a_connection_that_is_closed_here_while_it_is_looked_at_is_no_loss(share):
    class Closing:
        def recv(self, *_):
            hold._closed = True  # what another thread's close() does
            raise OSError("closed")

    hold = holding.Hold(share)
    hold.connection = Closing()
    assert not hold.lost


# ---- older drivers, MIG ----------------------------------------------------------------------------------------------

LACKS = """
from cuda.bindings import driver as d
def lack(*names):
    for name in names:
        def none(*args, name=name):
            raise RuntimeError(f'Function "{name}" not found')
        setattr(d, name, none)
lack(*sys.argv[2:])
"""


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemGetAllocationGranularity", "cuMemExportToShareableHandle", "cuMemAddressReserve"]
)
def test_a_driver_without_a_call_has_its_memory_shared_by_a_steward(over, name, call):
    code = PRELUDE + LACKS + "b = Buffer.create(sys.argv[1], 10, schema=SPEC, device='cuda', drain='caller')\n"
    code += "b.extend(rows(0, 3)); say(stored(b), b._place.hold.memory.kind); say(b._place.hold.memory.why)"
    works, why = over(code, name, call).splitlines()
    assert works == "[0, 1, 2] ipc" and f"{call} is not to be had here" in why and "too old" in why


def test_an_attribute_that_a_driver_does_not_know_is_no_end(over, name):
    code = PRELUDE + (
        "from shmbuf.cuda import driver\nbefore = driver.attribute\n"
        "def attribute(name, device):\n    raise driver.Refused('cuDeviceGetAttribute: CUDA_ERROR_INVALID_VALUE', 1)\n"
        "driver.attribute = attribute\n"
        "b = Buffer.create(sys.argv[1], 10, schema=SPEC, device='cuda', drain='caller'); b.extend(rows(0, 3)); say(stored(b), b._place.hold.memory.kind)"
    )
    assert over(code, name) == "[0, 1, 2] ipc"


def test_a_driver_of_before_uuids_of_their_own_gives_the_device_s(over):
    code = PRELUDE + LACKS + "from shmbuf.cuda import driver; say(driver.devices()[0].uuid_text)"
    assert over(code, "x", "cuDeviceGetUuid_v2") == over(code, "x") == "GPU-5add1e00-0000-4000-8000-000000000001"


def test_a_mig_instance_is_named_as_nvidia_smi_names_it(over, name):
    uuid = UUID.hex()
    text = f"MIG-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"
    assert driver.uuid_of(text) == UUID
    assert driver.Device(0, UUID, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 1).uuid_text == text
    assert driver.Device(0, UUID, "NVIDIA A100-SXM4-40GB", 1).uuid_text == "GPU" + text[3:]
    code = PRELUDE + (
        "b = Buffer.create(sys.argv[1], 10, schema=SPEC, device='MIG-5add1e00-0000-4000-8000-000000000001', drain='caller')\n"
        "b.extend(rows(0, 2)); say(b.device, stored(b), b.config['device']['uuid'])\n"
        "say(tried(lambda: Buffer.create(None, 10, device='MIG-GPU-5add1e00-0000-4000-8000-000000000001/1/0')))"
    )
    works, old = over(code, name).splitlines()
    assert works == "cuda:0 [0, 1] GPU-5add1e00-0000-4000-8000-000000000001"
    assert old.startswith("ValueError") and "nvidia-smi -L" in old


def test_who_gets_a_steward_s_memory_late_watches_it_all_the_same(begin, name):
    maker = begin(MAKER, name, **WAYS["ipc"])
    assert line(maker) == "made"
    pid = steward_of(name)
    os.kill(pid, signal.SIGSTOP)
    impatient = USER.replace("b = Buffer", "import shmbuf.cuda.sharing as s; s.PATIENCE = s.ANSWER = 0.2; b = Buffer")
    user = begin(impatient, name, **WAYS["ipc"])
    assert line(user) == "attached cuda:0"
    assert ask(user, "b.gather([0])").startswith("DeviceError")
    os.kill(pid, signal.SIGCONT)
    assert ask(user, "stored(b)") == TEN and ask(user, "type(b._handle).__name__") == "Watched"
