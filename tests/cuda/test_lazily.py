"""Who attaches keeps the memory and opens no context; that comes with the first use of the rows in this process: over the stand-in."""

from __future__ import annotations

import pytest

from shmbuf import segment
from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line
from tests.cuda.test_sharing import TEN, WAYS, begin_steward, until

# What the driver knows of this process: whether it has a context of the device, and device memory mapped.
COUNTS = """
def has():
    from cuda.bindings import driver as d
    d.cuInit(0)
    return int(d.cuDevicePrimaryCtxGetState(0)[2]), int(any("standin-cuda" in l for l in open("/proc/self/maps")))
"""
NOTHING, MAPPED = "(0, 0)", "(1, 1)"
COUNTING = USER.replace("b = Buffer", COUNTS + "b = Buffer")
THREAD = MAKER.replace('drain="caller", ', "")


@pytest.mark.parametrize("way", WAYS)
def test_attaching_and_putting_from_the_host_opens_no_context(begin, name, way):
    maker = begin(THREAD, name, **WAYS[way])
    assert line(maker) == "made"
    user = begin(COUNTING, name, **WAYS[way])
    assert line(user) == "attached cuda:0" and ask(user, "has()") == NOTHING
    assert ask(user, "b.put(rows(10)).wait(60).tolist()") == "[10]"
    assert ask(user, "b.extend(rows(11, 3)).tolist()") == "[11, 12, 13]"
    assert ask(user, "(b.wait_rows(14, 60), len(b), b.stats()['size'], b.window)") == "(None, 14, 14, (0, 14))"
    assert ask(user, "b.edit([3], {'x': np.full((1, 5), 30 + np.arange(5), 'f4')}).tolist()") == "[True]"
    assert ask(user, "has()") == NOTHING
    assert ask(user, "right(b.draw(5)[0])") == "True" and ask(user, "has()") == MAPPED
    assert ask(user, "stored(b)[-1]") == "13" and ask(user, "has()") == MAPPED


def test_putting_from_the_device_maps(begin, name):
    maker = begin(MAKER.replace('device="cuda"', 'device="cuda", device_rings=2'), name)
    assert line(maker) == "made"
    code = COUNTING.replace(
        "b = Buffer",
        "def put(k):\n"
        "    r = rows(k); c = [(c.offset, c.nbytes, r[c.key[-1]].ctypes.data) for c in b.schema.columns]\n"
        "    return b.submit_device(c, 1, True, 60.0, lambda ids, n: ids, (None, None), 0).wait(60).tolist()\n"
        "b = Buffer",
        1,
    )
    user = begin(code, name)
    assert line(user) == "attached cuda:0" and ask(user, "has()") == NOTHING
    assert ask(user, "put(10)") == "[10]" and ask(user, "has()") == MAPPED


@pytest.mark.parametrize("end", ["close", "kill"])
def test_who_never_used_them_keeps_the_rows_and_hands_them_on(begin, name, end):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    keeper = begin(COUNTING, name)
    assert line(keeper) == "attached cuda:0"
    if end == "close":
        assert ask(maker, "close") == "closed"
    else:
        maker.kill()
        maker.wait()
    third = begin(COUNTING, name)
    assert line(third) == "attached cuda:0"
    assert ask(keeper, "has()") == NOTHING and ask(third, "has()") == NOTHING
    assert ask(third, "stored(b)") == TEN and ask(keeper, "has()") == NOTHING
    assert ask(keeper, "stored(b)") == TEN


def test_without_the_bindings_they_are_kept_all_the_same(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    plain = begin("import sys; sys.modules['cuda.bindings.driver'] = None\n" + USER, name)
    assert line(plain).startswith("attached GPU-")
    maker.kill()
    maker.wait()
    user = begin(USER, name)
    assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN


def test_a_keeping_steward_opens_no_context(begin, name, driver):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    with begin_steward(name, driver) as steward:
        with open(f"/proc/{steward.pid}/maps") as f:
            assert "libcuda" not in f.read()
        assert ask(maker, "close") == "closed"
        user = begin(USER, name)
        assert line(user) == "attached cuda:0" and ask(user, "stored(b)") == TEN


@pytest.mark.parametrize("wait", ["b.extend(rows(10), timeout=60).tolist()", "b.put(rows(10)).wait(60).tolist()"])
def test_who_waits_where_nobody_drains_maps_and_does_it(begin, name, wait):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    at_once = (
        "from shmbuf.devices import Place; Place.look_after = lambda *_: None\n"  # before the wait, not some time after
    )
    user = begin(COUNTING.replace("b = Buffer", at_once + "b = Buffer"), name)
    assert line(user) == "attached cuda:0"
    assert ask(user, wait) == "[10]" and ask(user, "has()") == MAPPED


def test_who_waits_for_room_where_nobody_drains_maps_and_does_it(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    user = begin(COUNTING, name)
    assert line(user) == "attached cuda:0"
    assert ask(user, "[b.put(rows(10 + i), timeout=60).rows for i in range(300)].count(1)") == "300"
    assert ask(user, "has()") == MAPPED and int(ask(user, "b.write_count")) > 100


def test_who_waits_for_a_drainer_that_dies_maps_and_does_it(begin, name, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    maker = begin(THREAD, name, STANDIN_GATE=str(gate))
    assert line(maker) == "made"
    user = begin(COUNTING, name)
    assert line(user) == "attached cuda:0"
    gate.unlink()  # its copies end no more
    user.stdin.write("b.extend(rows(10), timeout=60).tolist()\n")
    user.stdin.flush()
    until(lambda: _waits(name, user.pid))
    maker.kill()
    maker.wait()
    assert line(user) == "[10]" and ask(user, "has()") == MAPPED


def test_a_handle_that_is_closed_while_its_rows_are_mapped_says_so(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    closes = (
        "from shmbuf.cuda import holding\n"
        "mapping = holding.Share.map\n"
        "holding.Share.map = lambda share, what: (mapping(share, what), b._bare.close())[0]\n"
    )
    user = begin(closes + USER, name)
    assert line(user) == "attached cuda:0"
    for what in ("b.draw(1)", "b.gather([1])"):
        said = ask(user, what)
        assert said.startswith("ValueError") and "is closed" in said


def test_drain_is_a_use(begin, over, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    assert ask(maker, "b.put(rows(10)).rows") == "1"
    user = begin(COUNTING, name)
    assert line(user) == "attached cuda:0"
    assert ask(user, "b.drain()") == "True" and ask(user, "has()") == MAPPED
    assert "10" in ask(maker, "stored(b)[-1]")


def _waits(name, pid) -> bool:
    handle = segment.attach(name, watch=True)
    try:
        return any(m["pid"] == pid and m["waits_for"] == "commit" for m in handle.members())
    finally:
        handle.close()


def test_the_prelude_counts_what_it_says(over):
    assert over(PRELUDE + COUNTS + "b = Buffer.create(None, 10, schema=SPEC, device='cuda'); say(has())") == MAPPED
