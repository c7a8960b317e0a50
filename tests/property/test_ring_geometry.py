"""Any sequence of record sizes against any ring size: nothing is lost, doubled, torn or reordered. Every byte of a row follows from
its number, and a record that ends at, before or beyond the ring's end is drawn as often as any other."""

from __future__ import annotations

import secrets

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmbuf import Buffer, destroy
from tests.conftest import PREFIX

CAPACITY = 3000


def rows(first: int, n: int, width: int, who: int) -> dict:
    k = np.arange(first, first + n, dtype=np.uint32)
    return {
        "x": ((k[:, None] * 2654435761 + np.arange(width, dtype=np.uint32) * 40503 + who * 97) >> 7).astype(np.uint8),
        "k": k.astype(np.uint16),
    }


# A step: put n rows through handle h (n > 0), or drain (0).
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.one_of(st.just(0), st.integers(1, 3), st.integers(1, 90))), min_size=1, max_size=60
)


@given(
    width=st.one_of(st.integers(0, 70), st.integers(900, 2100)),
    ring_bytes=st.sampled_from([4096, 8192, 16384]),
    steps=STEPS,
)
@example(width=2006, ring_bytes=4096, steps=[(0, 1)] * 9 + [(1, 0), (0, 3)])  # a record is half the ring, to the byte
@example(width=22, ring_bytes=4096, steps=[(0, 84), (0, 1), (1, 0)] * 7)  # records of 2048 and of 64 bytes
@example(width=5, ring_bytes=4096, steps=[(0, 89), (1, 89), (0, 0)] * 6)
@settings(max_examples=250, report_multiple_bugs=False)
def test_nothing_is_lost_doubled_torn_or_reordered(width: int, ring_bytes: int, steps: list[tuple[int, int]]):
    name = f"{PREFIX}{secrets.token_hex(4)}"
    with Buffer.create(
        name,
        CAPACITY,
        schema={"x": ("uint8", (width,)), "k": "uint16"},
        ring_bytes=ring_bytes,
        max_collectors=2,
        drain="caller",
    ) as one:
        try:
            with Buffer.attach(name) as two:
                handles, given_rows, tickets = (one, two), [0, 0], []
                for h, n in steps:
                    if not n:
                        handles[h].drain()
                    elif sum(given_rows) + n <= CAPACITY:
                        tickets.append((h, given_rows[h], n, handles[h].put(rows(given_rows[h], n, width, h))))
                        given_rows[h] += n
                one.drain()
                assert one.window == (0, sum(given_rows)) and one.stats()["malformed_records"] == 0
                seen = [np.zeros(n, bool) for n in given_rows]
                last = [-1, -1]
                for h, first, n, ticket in tickets:
                    ids = ticket.wait(0)
                    assert len(ids) == n and ids[0] > last[h] and (np.diff(ids) > 0).all(), (
                        "in order, also within a put of several records"
                    )
                    last[h] = ids[-1]
                    got, expected = two.gather(ids), rows(first, n, width, h)
                    assert (got["k"] == expected["k"]).all() and (got["x"] == expected["x"]).all()
                    assert not seen[h][first : first + n].any()
                    seen[h][first : first + n] = True
                assert all(s.all() for s in seen)
                assert len({i for *_, t in tickets for i in t.ids().tolist()}) == sum(given_rows), "no id twice"
                assert all(c["ring_used"] == 0 for c in one.collectors())
        finally:
            destroy(name, force=True)
