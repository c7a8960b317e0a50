"""Episodes as TorchRL lays out their rows, and what is in a buffer, comparable."""

from __future__ import annotations

import numpy as np

from shmbuf.schema import flatten, nest

ENDS = {"reward": ("float32", (1,)), "terminated": ("bool", (1,)), "truncated": ("bool", (1,)), "done": ("bool", (1,))}
TED = {"observation": ("float32", (3,)), "action": "int64", "next": {"observation": ("float32", (3,)), **ENDS}}
TREE = {"position": ("float64", (2,)), "hand": {"open": "bool", "image": ("uint8", (32, 32, 3))}}
NESTED = {"observation": TREE, "action": {"arm": ("float32", (2,))}, "next": {"observation": TREE, **ENDS}}


def some(rng, dtype, shape):
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, shape).astype(dtype) if "int" in dtype else rng.normal(size=shape).astype(dtype)


def episode(schema, n, how, rng) -> dict:
    """n steps whose next observations are the following ones; how: the end key that the last one has, or None."""
    leaves = {}
    for key, spec in flatten(schema, is_node=lambda v: isinstance(v, dict)).items():
        dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
        leaves[key] = some(rng, dtype, (n + 1, *shape))
    for key in list(leaves):
        if key[:2] == ("next", "observation"):
            leaves[key] = leaves[key[1:]][1:]
    for key in leaves:
        if key[-1] in ("terminated", "truncated", "done"):
            leaves[key][:] = False
            if how and key[-1] in (how, "done"):
                leaves[key][n - 1] = True
        leaves[key] = leaves[key][:n]
    return nest(leaves.keys(), leaves.values())


def play(buf, schema=TED, ends=("terminated", "truncated", "terminated")) -> None:
    """Episodes of 4, 5, … rows, each step by step in a stream of its own, so that their rows lie between one another."""
    rng = np.random.default_rng(1)
    games = [episode(schema, 4 + i, how, rng) for i, how in enumerate(ends)]
    for t in range(4 + len(ends)):
        for i, game in enumerate(games):
            if t < 4 + i:
                leaves = {k: a[t : t + 1] for k, a in flatten(game).items()}
                buf.extend(nest(leaves.keys(), leaves.values()), stream=i)


def contents(buf) -> list:
    """Every trajectory with all of its rows, comparable, in one order."""
    out = []
    for t in buf.trajectories():
        leaves = flatten(buf.gather(buf.trajectory(t.end)))
        out.append((t.ended, {k: (a.dtype.name, a.shape, a.tobytes()) for k, a in leaves.items()}))
    return sorted(out, key=lambda x: sorted(x[1].items()))
