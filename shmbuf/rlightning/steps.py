"""Steps of episodes that are still running, in this process's own memory: nobody sees an episode before its end.

One environment's are a list of dicts. Of N that step together each key is one array [steps, N, ...], so a step is one copy a key;
an episode that ends is gathered out of it, whenever and wherever in the array the others of its environment began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from shmbuf.errors import SchemaError
from shmbuf.rlightning.chain import default_postprocess_fn, is_number, places, rows_of
from shmbuf.rlightning.fitting import Stored
from shmbuf.rlightning.leaves import Leaf, as_leaf, as_tensors, column, leaves_of
from shmbuf.schema import Column, Key, show_key

Postprocess = Callable[[dict[str, list[Any]]], Mapping[str, Any]]


class Episodes(NamedTuple):
    """Rows of ended episodes, one after another.

    lengths: int64[k], rows of each. columns: what a row is made of, without the storage's own numbers.
    take: the rows of episodes [first, last), as arrays [rows, ...] in the order of columns, to be read before it is called again.
    """

    lengths: np.ndarray
    columns: list[Column]
    take: Callable[[int, int], list[np.ndarray]]


def of_rows(rows: Any) -> Episodes:
    """Of a mapping of arrays [rows, ...]: one episode. SchemaError: no common number of rows."""
    return _of_leaves({key: as_leaf(key, value) for key, value in leaves_of(rows)}, 1)


def _of_leaves(leaves: dict[Key, Leaf], count: int) -> Episodes:
    if not leaves:
        raise SchemaError("an episode without keys: nothing was stored")
    sizes = {key: leaf.array.shape[0] if leaf.array.ndim else None for key, leaf in leaves.items()}
    n = next(iter(sizes.values()))
    if n is None or len(set(sizes.values())) > 1:
        each = ", ".join(f"{show_key(k)}: {'none' if s is None else s}" for k, s in sizes.items())
        raise SchemaError(
            f"an episode's keys have different numbers of rows (first dimension): {each}. Nothing was stored"
        )
    arrays, each = [leaf.array for leaf in leaves.values()], n // count

    def take(first: int, last: int) -> list[np.ndarray]:
        return [a[first * each : last * each] for a in arrays]

    return Episodes(np.full(count, each, np.int64), [column(k, v, 1) for k, v in leaves.items()], take)


def env_major(rows: Any, num_envs: int) -> Episodes:
    """Of arrays [rows, num_envs, ...]: one episode an environment, the first environment's rows first."""
    flat: dict[Key, Leaf] = {}
    for key, value in leaves_of(rows):
        leaf = as_leaf(key, value)
        if leaf.array.ndim < 2 or leaf.array.shape[1] != num_envs:
            raise SchemaError(
                f"key {show_key(key)}: shape {list(leaf.array.shape)}, expected [rows, {num_envs}, ...]. Nothing was stored"
            )
        a = leaf.array
        flat[key] = Leaf(np.ascontiguousarray(a.swapaxes(0, 1)).reshape(-1, *a.shape[2:]), leaf.dtype)
    return _of_leaves(flat, num_envs)


def kept(value: Any) -> Any:
    """A copy: what was handed over may be written again by its owner."""
    if isinstance(value, Mapping):
        return {k: kept(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def stored_names(step: Mapping[str, Any], all_of_them: bool) -> list[str]:
    return [name for name in step if all_of_them or places(name)]


def ended(step: Mapping[str, Any]) -> Any:
    """Whether the step ended its episode: bool, or bool[N]."""
    flags = [step[k] for k in ("last_terminated", "last_truncated") if k in step]
    arrays = [as_leaf(("flag",), f).array != 0 for f in flags]
    return arrays[0] | arrays[1] if len(arrays) == 2 else arrays[0] if arrays else np.zeros((), bool)


class SingleSteps:
    """Of one environment."""

    def __init__(self, postprocess: Postprocess, ends: bool, stored: Stored | None = None):
        """ends: steps are looked at for flags that end their episode. stored: what the default postprocess' rows have to fit."""
        self._stored = Stored() if stored is None else stored
        self._postprocess, self._default, self._ends = postprocess, postprocess is default_postprocess_fn, ends
        self._steps: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._seen: dict[Key, Any] = {}  # of what kind each leaf is

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: Mapping[str, Any]) -> bool:
        """True: the episode ended with it. SchemaError: it is not made as those before, or as rows are; nothing was kept."""
        names = stored_names(step, not self._default)
        if self._steps and set(names) != set(self._names):
            raise SchemaError(_difference(names, self._names))
        numbers: dict[Key, Any] = {}
        found = dict(_kinds({k: step[k] for k in names}, not self._steps, numbers)) if self._default else {}
        if len(self._steps) > 1 and found.keys() != self._seen.keys():
            raise SchemaError(_difference([*map(show_key, found)], [*map(show_key, self._seen)]))
        for key, kind in found.items():
            if kind != self._seen.get(key, kind):
                raise SchemaError(
                    f"key {show_key(key)}: got {_show(kind)}, its episode has {_show(self._seen[key])}. Nothing was stored"
                )
        if self._default:
            silent = () if self._steps else tuple(k for k in names if is_dummy((k,)))
            self._stored.require({k: kind for k, kind in found.items() if kind is not None}, numbers, silent)
        done = self._ends and bool(np.any(ended(step)))
        if not self._steps:
            self._names, self._seen = names, {}
        self._seen.update(found)
        self._steps.append({name: kept(step[name]) for name in names})
        return done

    def episodes(self) -> list[Episodes]:
        """Of what there is, as rows; one step makes none. Nothing is forgotten yet: `forget`."""
        if len(self._steps) < 2:
            return []
        values = {name: [_tensor(step[name], self._default) for step in self._steps] for name in self._names}
        try:
            return [of_rows(rows_of(values, self._stored.scalars()) if self._default else self._postprocess(values))]
        except (ValueError, RuntimeError) as e:
            if self._default and not isinstance(e, SchemaError):
                raise SchemaError(f"{e}. Nothing was stored") from None
            raise

    def forget(self, envs: None = None) -> None:
        self._steps, self._seen = [], {}


def _kinds(step: Mapping[str, Any], first: bool, numbers: dict[Key, Any]) -> Iterator[tuple[Key, Any]]:
    """Dtype and shape of each leaf that goes into a row; numbers, which are told besides, are all alike."""
    for key, value in leaves_of(step):
        if first and is_dummy(key):
            continue
        if is_number(value):
            numbers[key] = value
            yield key, None
        else:
            leaf = as_leaf(key, value)
            yield key, (leaf.dtype, leaf.array.shape)


def _show(kind: Any) -> str:
    return "a number" if kind is None else f"{kind[0]}{list(kind[1])}"


def is_dummy(key: Key) -> bool:
    """Whether an episode's first step says nothing under this key: it is of the step before it."""
    return [step for _, step in places(key[0])] == [1]


def _tensor(value: Any, flat: bool) -> Any:
    """flat: TensorDicts become dicts."""
    if isinstance(value, Mapping):
        return {k: _tensor(v, flat) for k, v in value.items()}
    if flat and is_tensor_collection(value) and not isinstance(value, torch.Tensor):
        return {k: _tensor(value.get(k), flat) for k in list(value.keys())}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV":
        leaf = as_leaf(("value",), value)
        return as_tensors(np.require(leaf.array, leaf.array.dtype.newbyteorder("="), ["C", "W"]), leaf.dtype)
    return value


def _difference(names: list[Any], first: list[Any]) -> str:
    missing, extra = [k for k in first if k not in names], [k for k in names if k not in first]
    return f"a step's keys differ from those of its episode's first: {missing} missing, {extra} new. Nothing was stored"


class Segments(NamedTuple):
    """Ended episodes among the steps: of which environments, from which step on, how many steps."""

    envs: np.ndarray
    begins: np.ndarray
    steps: np.ndarray


class Known:
    """How steps looked, so that one like them needs but a glance."""

    def __init__(self, columns: list[Column], num_envs: int):
        self._nodes: dict[Key, set[str]] = {}
        for c in columns:
            for depth in range(1, len(c.key)):
                self._nodes.setdefault(c.key[:depth], set()).add(c.key[depth])
        self._names = {c.key[0] for c in columns}
        self._leaves = [
            (c.key, np.dtype(c.numpy) if c.numpy == c.dtype else None, getattr(torch, c.dtype), (num_envs, *c.shape))
            for c in columns
        ]

    def arrays(self, step: Mapping[str, Any]) -> list[np.ndarray] | None:
        """The step's leaves, column by column; None: it has to be looked at."""
        found, nodes = 0, self._nodes
        for name in step:
            if name in self._names:
                found += 1
            elif places(name):
                return None
        if found != len(self._names):
            return None
        for key, names in nodes.items():
            if type(node := _at(step, key)) is not dict or node.keys() != names:
                return None
        out = []
        for key, dtype, torch_dtype, shape in self._leaves:
            value = step[key[0]] if len(key) == 1 else _at(step, key)
            if type(value) is torch.Tensor and value.dtype is torch_dtype and value.shape == shape:
                value = as_leaf(key, value).array if dtype is None else _quick(value)
            elif type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                return None
            if value is None:
                return None
            out.append(value)
        return out


def _at(step: Any, key: Key) -> Any:
    for part in key:
        if type(step) is not dict or part not in step:
            return None
        step = step[part]
    return step


def _quick(t: torch.Tensor) -> np.ndarray | None:
    try:
        return t.numpy()
    except (RuntimeError, TypeError):  # of another device, or with a gradient
        return None


class VectorSteps:
    """Of N environments that step together. Each one's episode may end by itself.

    Takes the memory of N times the longest running episode (rounded up to a power of two), and keeps it for the next ones.
    """

    def __init__(self, num_envs: int, postprocess: Postprocess, separate: bool, stored: Stored | None = None):
        """separate: episodes end one by one; else all at once, and a custom postprocess gets steps of all of them. stored: what the
        default one's rows have to fit."""
        self._stored = Stored() if stored is None else stored
        self._fit_for: Any = self  # the schema that the columns were held against; itself: not all of them yet
        self.num_envs, self._separate = num_envs, separate
        self._postprocess, self._default = postprocess, postprocess is default_postprocess_fn
        self._columns: list[Column] = []
        self._known: Known | None = None
        self._rings: list[np.ndarray] = []
        self._others: list[dict[str, Any]] = []  # a step's values that are no arrays, for a custom postprocess
        self._clock, self._room = 0, 0
        self._begin = np.zeros(num_envs, np.int64)
        self._none_done = np.zeros(num_envs, bool)
        self._scratch: dict[int, np.ndarray] = {}  # for rows on their way into the ring

    def lengths(self) -> np.ndarray:
        """int64[N]: the steps of each running episode."""
        return self._clock - self._begin

    def append(self, step: Mapping[str, Any]) -> np.ndarray:
        """bool[N]: whose episode ended with it. SchemaError: a leaf is not [N, ...], or differs from those before, or from what rows
        are made of; nothing was kept."""
        running = self._clock - int(self._begin.min())
        arrays = None if self._known is None else self._known.arrays(step)
        others: dict[str, Any] = {}
        if arrays is not None:
            columns = self._columns
        else:
            leaves, others = self._leaves(step, running == 0)
            columns = [column(k, leaf, 1) for k, leaf in leaves.items()]
            if columns != self._columns and running:
                if leaves.keys() == {c.key for c in self._columns}:  # perhaps just in another order
                    leaves = {c.key: leaves[c.key] for c in self._columns}
                    columns = [column(k, leaf, 1) for k, leaf in leaves.items()]
                odd = [c for c, mine in zip(columns, self._columns, strict=False) if c != mine]
                dummies = running == 1 and all(is_dummy(c.key) for c in odd)
                if len(columns) != len(self._columns) or (odd and not dummies):
                    raise SchemaError(self._unlike(columns))
            arrays = [leaf.array for leaf in leaves.values()]
        if self._default and (columns is not self._columns or self._stored.now() is not self._fit_for):
            silent = () if running else tuple(c.key[0] for c in columns if is_dummy(c.key))
            self._stored.require({c.key: (c.dtype, c.shape) for c in columns if c.key[0] not in silent}, {}, silent)
            self._fit_for = self if silent else self._stored.now()
        done = self._done(step)
        if not running:
            self._clock = 0
            self._begin[:] = 0
            self._others.clear()
        if columns != self._columns:
            self._use(columns, arrays)
        if running >= self._room:
            self._grow(arrays)
        at = self._clock % self._room
        for ring, array in zip(self._rings, arrays, strict=True):
            ring[at] = array
        if not self._default:
            self._others.append(others)
        self._clock += 1
        return done

    def _leaves(self, step: Mapping[str, Any], first: bool) -> tuple[dict[Key, Leaf], dict[str, Any]]:
        leaves: dict[Key, Leaf] = {}
        others: dict[str, Any] = {}
        for name in stored_names(step, not self._default):
            try:
                leaves.update((k, self._checked(k, as_leaf(k, v), first)) for k, v in [*leaves_of({name: step[name]})])
            except SchemaError:
                if self._default or "info" not in name:
                    raise
                others[name] = kept(step[name])
        return leaves, others

    def _checked(self, key: Key, leaf: Leaf, first: bool) -> Leaf:
        if leaf.array.shape[:1] == (self.num_envs,):
            return leaf
        if first and is_dummy(key) and not leaf.array.ndim:  # after a reset, an EnvRet's own 0.0 and False
            return Leaf(np.broadcast_to(leaf.array, (self.num_envs,)), leaf.dtype)
        raise SchemaError(
            f"key {show_key(key)}: shape {list(leaf.array.shape)}, but the step is of {self.num_envs:,} environments: "
            f"batch dimension mismatch, expected [{self.num_envs}, ...]. Nothing was stored"
        )

    def _use(self, columns: list[Column], arrays: list[np.ndarray]) -> None:
        """Steps are made of these from now on: at their beginning, or where a reset's dummies were made otherwise."""
        if self._room and [c.key for c in columns] == [c.key for c in self._columns]:
            for i, (c, mine, a) in enumerate(zip(columns, self._columns, arrays, strict=True)):
                if c != mine:
                    self._rings[i] = np.zeros((self._room, *a.shape), a.dtype.newbyteorder("="))
        else:
            self._rings, self._room = [], 0
        self._columns = columns
        self._known = Known(columns, self.num_envs) if self._default else None

    def _done(self, step: Mapping[str, Any]) -> np.ndarray:
        if not self._separate:
            return self._none_done
        done = ended(step)
        if done.shape[:1] != (self.num_envs,):
            return np.broadcast_to(done.any(), (self.num_envs,))
        return done if done.ndim == 1 else done.reshape(self.num_envs, -1).any(1)  # of an action chunk's steps: any

    def _unlike(self, columns: list[Column]) -> str:
        before, now = ({c.key: c for c in cs} for cs in (self._columns, columns))
        if before.keys() != now.keys():
            return _difference([show_key(k) for k in now], [show_key(k) for k in before])
        lines = [f"key {show_key(k)}: got {now[k]}, its episode has {c}" for k, c in before.items() if now[k] != c]
        return "; ".join(lines) + ". Nothing was stored"

    def _grow(self, like: list[np.ndarray]) -> None:
        room, first = max(32, 2 * self._room), int(self._begin.min())
        times = np.arange(first, self._clock)
        rings = []
        for i, a in enumerate(like):
            ring = np.empty((room, *a.shape), a.dtype.newbyteorder("="))
            if len(times):
                ring[times % room] = self._rings[i][times % self._room]
            rings.append(ring)
        self._rings, self._room = rings, room

    # ---- the end of episodes --------------------------------------------------------------------------------------

    def segments(self, envs: np.ndarray) -> Segments:
        return Segments(envs, self._begin[envs], self._clock - self._begin[envs])

    def forget(self, envs: np.ndarray) -> None:
        self._begin[envs] = self._clock

    def episodes(self, s: Segments) -> list[Episodes]:
        """Of these segments as rows; those of one step make none. Nothing is forgotten yet: `forget`."""
        s = Segments(*(a[s.steps > 1] for a in s))
        if not len(s.envs):
            return []
        if self._default:
            return [self._gathered(s)]
        if not self._separate:
            return [env_major(self._postprocess(self._lists(s.begins[0], s.steps[0], None)), self.num_envs)]
        return [of_rows(self._postprocess(self._lists(b, n, e))) for e, b, n in zip(*s, strict=True)]

    def _gathered(self, s: Segments) -> Episodes:
        """What default_postprocess_fn makes of each, without a list of steps."""
        lengths, sources = s.steps - 1, {}
        for i, c in enumerate(self._columns):
            for name, step in places(c.key[0]):
                sources[(name, *c.key[1:])] = (i, step, c)
        columns = [Column(key, c.dtype, c.shape) for key, (_, _, c) in sources.items()]
        flat = [r.reshape(-1, *r.shape[2:]) for r in self._rings]
        size = self._room * self.num_envs

        def take(first: int, last: int) -> list[np.ndarray]:
            n = lengths[first:last]
            total = int(n.sum())
            begins = s.begins[first:last] % self._room
            # one environment's steps lie N rows apart
            start = begins * self.num_envs + s.envs[first:last] - (np.cumsum(n) - n) * self.num_envs
            at = np.repeat(start, n) + np.arange(total) * self.num_envs
            after = at + self.num_envs
            if int((begins + n).max()) >= self._room:
                at, after = at % size, after % size
            out = []
            for j, (i, step, _) in enumerate(sources.values()):
                to = self._scratch.get(j)
                if to is None or len(to) < total or to.dtype != flat[i].dtype or to.shape[1:] != flat[i].shape[1:]:
                    self._scratch[j] = to = np.empty((total, *flat[i].shape[1:]), flat[i].dtype)
                out.append(np.take(flat[i], after if step else at, axis=0, out=to[:total], mode="clip"))
            return out

        return Episodes(lengths, columns, take)

    def _lists(self, begin: int, steps: int, env: int | None) -> dict[str, Any]:
        """For a custom postprocess: each key's values, step by step."""
        out: dict[str, list[Any]] = {}
        for t in range(begin, begin + steps):
            step: dict[str, Any] = {}
            for c, ring in zip(self._columns, self._rings, strict=True):
                node = step
                for part in c.key[:-1]:
                    node = node.setdefault(part, {})
                row = ring[t % self._room]
                node[c.key[-1]] = as_tensors((row if env is None else row[env : env + 1]).copy(), c.dtype)
                if env is not None:
                    node[c.key[-1]] = node[c.key[-1]][0]
            if self._others:
                step.update(self._others[t])
            for name, value in step.items():
                out.setdefault(name, []).append(value)
        return out
