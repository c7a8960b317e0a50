"""Any schema: it survives its bytes, its columns do not touch, and rows of random bytes come back bit for bit, however they lie in
the caller's memory."""

from __future__ import annotations

import math
import secrets

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shmbuf import Buffer, Schema, destroy
from shmbuf.schema import DTYPES, flatten, nest
from tests.conftest import PREFIX

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
LEAVES = st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES)
SPECS = st.recursive(
    st.dictionaries(NAMES, LEAVES, min_size=1, max_size=5),
    lambda inner: st.dictionaries(NAMES, st.one_of(inner, LEAVES), min_size=1, max_size=4),
    max_leaves=12,
)


def lay_out(a: np.ndarray, how: int) -> np.ndarray:
    """The same values, elsewhere: as they are, strided, reversed, byte-swapped, Fortran, read-only."""
    if how == 1:
        wide = np.zeros((2 * a.shape[0], *(d + 1 for d in a.shape[1:])), a.dtype)
        view = wide[(slice(None, None, 2), *(slice(1, None) for _ in a.shape[1:]))]
        view[...] = a
        return view
    if how == 2:
        return np.ascontiguousarray(a[::-1])[::-1]
    if how == 3:
        return a.byteswap().view(a.dtype.newbyteorder("S"))
    if how == 4:
        return np.asfortranarray(a)
    if how == 5:
        a = a.copy()
        a.flags.writeable = False
    return a


@given(spec=SPECS)
@settings(max_examples=300, report_multiple_bugs=False)
def test_a_schema_survives_its_bytes_and_its_columns_do_not_touch(spec):
    schema = Schema.from_spec(spec)
    again = Schema.from_bytes(schema.to_bytes())
    assert again == schema and again.keys == schema.keys == tuple(flatten(spec, is_node=lambda v: isinstance(v, dict)))
    assert (again.row_bytes, again.payload_bytes, again.nodes) == (schema.row_bytes, schema.payload_bytes, schema.nodes)
    at = 0
    for offset, nbytes, size in sorted((c.offset, c.nbytes, DTYPES[c.dtype].bytes) for c in schema.columns if c.nbytes):
        assert offset == at and offset % min(8, size) == 0
        at += nbytes
    assert at == schema.payload_bytes and schema.row_bytes == max(8, math.ceil(at / 8) * 8)


@given(
    spec=SPECS,
    n=st.integers(1, 9),
    puts=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    layouts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    late=st.booleans(),
)
@settings(max_examples=150, report_multiple_bugs=False)
def test_rows_come_back_bit_for_bit(spec, n, puts, seed, layouts, late):
    schema, rng = Schema.from_spec(spec), np.random.default_rng(seed)
    # bits of bfloat16 and others that numpy lacks: without a schema they would be the integers that they look like
    late = late and all(c.numpy == c.dtype for c in schema.columns)
    name = f"{PREFIX}{secrets.token_hex(4)}"
    with Buffer.create(
        name, 20, schema=None if late else schema, ring_bytes=1 << 14, max_collectors=2, drain="caller"
    ) as buf:
        try:
            ids, given_rows = [], []
            for _ in range(puts):
                leaves = [np.frombuffer(rng.bytes(n * c.nbytes), np.uint8) for c in schema.columns]
                leaves = [
                    (b & 1 if c.dtype == "bool" else b).view(c.numpy).reshape(n, *c.shape)
                    for b, c in zip(leaves, schema.columns, strict=True)
                ]
                odd = [lay_out(a, layouts[i % len(layouts)]) for i, a in enumerate(leaves)]
                ids.append(buf.extend(nest(schema.keys, odd)))
                given_rows.append(leaves)
            assert buf.schema == schema
            lo = buf.window[0]
            for these, leaves in zip(ids, given_rows, strict=True):
                live = these >= lo
                got = flatten(buf.gather(these[live]))
                assert tuple(got) == schema.keys
                for key, column, a in zip(schema.keys, schema.columns, leaves, strict=True):
                    assert got[key].dtype == np.dtype(column.numpy) and got[key].shape == (live.sum(), *column.shape)
                    assert got[key].tobytes() == a[live].tobytes()
            drawn, at = buf.draw(10)
            every = np.concatenate(ids)
            assert np.isin(at, every[every >= lo]).all()
            for key, column in zip(schema.keys, range(len(schema.keys)), strict=True):
                a = np.concatenate([leaves[column] for leaves in given_rows])
                assert flatten(drawn)[key].tobytes() == a[at].tobytes()
        finally:
            destroy(name, force=True)
