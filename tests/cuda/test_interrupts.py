"""Ctrl-C at each point of attaching and closing leaves no part of a device buffer in the process: over the stand-in."""

from __future__ import annotations

import pytest

from tests.cuda.helpers import MAKER, PRELUDE, line
from tests.cuda.test_sharing import WAYS

EACH_POINT = (
    PRELUDE
    + """
import gc
from shmbuf import segment
from shmbuf.cuda import holding, sharing
from tests.process.interrupts import At
name, what = sys.argv[1:]
def left():
    gc.collect()
    watch = segment.attach(name, watch=True)
    here = [m["member"] for m in watch.members() if m["alive"] and m["pid"] == os.getpid()]
    watch.close()
    return here, list(holding._known), [s.fileno() for s in sharing.server()._sockets]
def attach():
    global b
    b = Buffer.attach(name)
wrong, n, at = {}, 0, None
while n == 0 or at.where:
    n, b = n + 1, None
    if what == "close": attach(); stored(b)
    at = At(n)
    sys.settrace(at)
    try: attach() if what == "attach" else b.close()
    except KeyboardInterrupt: pass
    finally: sys.settrace(None)
    if what == "attach" and b is not None: b.close()
    b = None
    if left() != ([], [], []): wrong[at.where] = left()
    assert not wrong, wrong
say(n > 30 or n)
"""
)


@pytest.mark.parametrize("what", ["attach", "close"])
def test_ctrl_c_anywhere_leaves_nothing(begin, over, name, way, what):
    assert line(begin(MAKER, name, **way)) == "made"
    assert over(EACH_POINT, name, what, **way).strip() == "True"


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]
