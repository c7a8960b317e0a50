"""Processes with no descriptor left, or no thread, on a buffer in device memory: what they are told, and that others do not notice."""

from __future__ import annotations

from tests.cuda.helpers import MAKER, PRELUDE, USER, ask, line
from tests.cuda.test_sharing import TEN

FILL = """
import resource
def fill(left):
    global junk
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    junk = []
    try:
        while True: junk.append(os.open(os.devnull, 0))
    except OSError: pass
    for _ in range(left): os.close(junk.pop())
def free():
    while junk: os.close(junk.pop())
"""


def test_who_has_no_descriptor_left_for_the_memory_is_told_so_and_keeps_nothing(begin, over, name):
    # DeviceError: the driver has none left
    assert line(begin(MAKER, name)) == "made"
    code = PRELUDE + FILL + (
        "from shmbuf.cuda import holding\n"
        "for left in range(12):\n"
        "    fill(left); b = tried(lambda: Buffer.attach(sys.argv[1]))\n"
        "    if isinstance(b, str): say(b.startswith('TooManyOpenFiles') or b)\n"
        "    else:\n"
        "        got = tried(lambda: stored(b)); free(); say(got == stored(b) or got.startswith(('TooManyOpenFiles', 'DeviceError')) or got); b.close()\n"
        "    free(); assert not holding._known, (left, holding._known)\n"
        "with Buffer.attach(sys.argv[1]) as b: say(len({m['member'] for m in b._handle.members() if m['alive']}), stored(b))\n"
    )  # fmt: skip
    assert over(code, name).splitlines() == ["True"] * 12 + [f"2 {TEN}"]


def test_a_holder_without_a_descriptor_left_hands_over_all_the_same(begin, name):
    maker = begin(MAKER.replace("b = Buffer", FILL + "b = Buffer"), name)
    assert line(maker) == "made" and ask(maker, "fill(0)") == "None"
    for _ in range(3):
        user = begin(USER, name)
        assert line(user) == "attached cuda:0" and ask(user, "b._place.error") == "None"
        assert ask(user, "b._place.hold.memory.pid") == str(maker.pid) and ask(user, "stored(b)") == TEN
        user.communicate("close\n", timeout=60)


def test_without_a_thread_to_hand_it_over_the_memory_is_not_had_and_rows_can_be_put(begin, name):
    maker = begin(MAKER, name)
    assert line(maker) == "made"
    none = 'import threading\ndef none(self): raise RuntimeError("can\'t start new thread")\nthreading.Thread.start = none\n'
    user = begin(none + USER, name)
    assert line(user) == "attached cuda:0"
    said = ask(user, "stored(b)")
    assert said.startswith("DeviceError") and "ulimit -u" in said
    assert ask(user, "__import__('shmbuf.cuda.holding').cuda.holding._known") == "{}"
    assert ask(user, "b.put(rows(10)).rows") == "1" and ask(maker, "(b.drain(), stored(b)[-1])[1]") == "10"
