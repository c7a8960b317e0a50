"""`Storage`: rlightning's storage of a buffer, over rows that many processes share."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from shmbuf.attaching import attach
from shmbuf.buffer import Buffer
from shmbuf.errors import BufferExists, SchemaError
from shmbuf.replay_buffer import TensorDictReplayBuffer
from shmbuf.rlightning.chain import (
    default_env_ret_preprocess_fn,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    identity,
)
from shmbuf.rlightning.fitting import Stored
from shmbuf.rlightning.pushing import EPISODE_ID, Pusher
from shmbuf.rlightning.reading import Reader
from shmbuf.rlightning.steps import Episodes, SingleSteps, VectorSteps, env_major, kept, of_rows
from shmbuf.rlightning.types import EnvMeta, EnvRet, PolicyResponse
from shmbuf.samplers import Sampler
from shmbuf.storage import ShmStorage

__all__ = ["Storage"]

logger = logging.getLogger("shmbuf.rlightning")

_MODES = {"circular": "circular", "standard": "standard", "fixed": "standard"}
_UNITS = ("transition", "episode")
_COUNTERS = (
    "env_ret_replaced",
    "env_ret_out_of_order",
    "policy_resp_without_env_ret",
    "policy_resp_duplicate",
    "episodes_too_short",
    "env_ret_left_at_end",
)
_LINKS: dict[str, Callable] = {
    "obs_preprocessor": identity,
    "reward_preprocessor": identity,
    "env_ret_preprocess_fn": default_env_ret_preprocess_fn,
    "policy_resp_preprocess_fn": default_policy_resp_preprocess_fn,
    "preprocess_fn": default_preprocess_fn,
    "postprocess_fn": default_postprocess_fn,
}


class _Rows(TensorDictReplayBuffer):
    """The replay buffer under a storage; whoever attaches by name alone gets a plain one."""

    _said: Mapping[str, Any] = {}

    def __init__(self, said: dict[str, Any], **kw: Any):
        self._said = said
        super().__init__(**kw)

    def _described(self, pin_memory: bool) -> dict[str, Any]:
        return {**super()._described(pin_memory), "rlightning": self._said}


class Storage:
    """Episodes of many environments, collected step by step and stored when they are complete, in memory that processes share.

    Steps wait in the process that adds them; an episode's T + 1 steps become T rows, all visible at once, when it is truncated: by
    `truncate_one_episode`, or at a step with ``last_terminated`` or ``last_truncated`` if auto_truncate_episode (then other processes
    see them a moment later). So of a process that is killed, nobody sees the episodes it was in the middle of, and what it had
    truncated stays.

    Of N environments that step together the adding process keeps N times the longest running episode.

    Args:
        capacity: in rows, for both units.
        mode: "circular": the oldest rows are overwritten; "standard" (also called "fixed"): what does not fit is refused.
        unit: "transition" or "episode": what ``len``, indices and `get_data` count. An episode that has lost its first row to newer
            ones is no longer counted at all; as long as its other rows are there, samplers of transitions draw them.
        env_meta_list: whose data are taken, with their num_envs: a list of `EnvMeta`, or a dict of them by env_id.
            None: any, each one environment.
        device: "cpu": rows are in host memory; "cuda", "cuda:1": in that device's. Running episodes wait in host memory.
        obs_preprocessor, reward_preprocessor: see `default_env_ret_preprocess_fn`; preprocess_fn and the two it calls: see
            `default_preprocess_fn`; postprocess_fn: see `default_postprocess_fn`, by which rows of many environments are made fastest.
        auto_truncate_episode: episodes end where their flags say so, those of N environments that step together one by one. Otherwise
            flags are only stored.
        name: for others to attach: ``Storage.attach(name)`` to add, too; ``shmbuf.attach(name)`` to sample. None: unnamed, and gone with
            this object; it may still be sent to other processes (spawn, fork, a Ray task), as its name and functions.
        exists: if the name is taken: "error", "attach" or "replace".
        sampler, batch_size: of :attr:`replay_buffer`. priority_key: what rows carry under it is their priority, where samplers draw by
            priority; it is a column as all others. timeout: seconds that adding waits for room; None: for ever.
        ring_bytes, max_collectors, drain: see `Buffer.create`.

    Attributes:
        counters: of this process: ``env_ret_replaced`` by a newer one before its PolicyResponse came, ``env_ret_out_of_order`` (older
            than the one before), ``policy_resp_without_env_ret`` and ``policy_resp_duplicate`` (refused), ``episodes_too_short`` (one
            step, of which no row can be made), ``env_ret_left_at_end`` (it waited when its episode was truncated, and begins the next).
        timing_raw: see `print_timing_summary`.

    One thread of a process adds at a time; others may look and sample meanwhile. Rows come back with their own keys; in samples of a
    replay buffer they also have ("episode", "id") and ("episode", "rows"), its length.
    """

    def __init__(
        self,
        capacity: int,
        mode: str = "circular",
        unit: str = "transition",
        env_meta_list: Sequence[EnvMeta] | Mapping[str, EnvMeta] | None = None,
        device: str | torch.device = "cpu",
        obs_preprocessor: Callable = identity,
        reward_preprocessor: Callable = identity,
        env_ret_preprocess_fn: Callable = default_env_ret_preprocess_fn,
        policy_resp_preprocess_fn: Callable = default_policy_resp_preprocess_fn,
        preprocess_fn: Callable = default_preprocess_fn,
        postprocess_fn: Callable = default_postprocess_fn,
        auto_truncate_episode: bool = False,
        *,
        name: str | None = None,
        exists: str = "error",
        sampler: Sampler | None = None,
        batch_size: int | None = None,
        priority_key: str | tuple[str, ...] = "td_error",
        timeout: float | None = None,
        ring_bytes: int | None = None,
        max_collectors: int = 256,
        drain: str = "thread",
    ):
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r}: one of {', '.join(_MODES)}")
        if unit not in _UNITS:
            raise ValueError(f"Unknown unit type {unit!r}: one of {', '.join(_UNITS)}")
        said = {"mode": _MODES[mode], "unit": unit, "auto": bool(auto_truncate_episode)}
        metas = _by_id(env_meta_list)
        storage = ShmStorage(
            capacity,
            name=name,
            device=device,
            exists=exists,
            timeout=timeout,
            ring_bytes=ring_bytes,
            max_collectors=max_collectors,
            drain=drain,
            traj_key=EPISODE_ID,
        )
        rb = _Rows(said, storage=storage, sampler=sampler, batch_size=batch_size, priority_key=priority_key)
        try:
            has = (rb.buffer.config.get("face") or {}).get("rlightning")
            if has is None or any(has.get(k) != said[k] for k in ("mode", "unit")):
                raise BufferExists(
                    f"buffer {name!r} exists, {'and is no storage of this kind' if has is None else f'with {has}, asked for {said}'}: "
                    f'Storage.attach({name!r}) takes it as it is; exists="replace"'
                )
        except BaseException:
            rb.close()
            raise
        links = {
            "obs_preprocessor": obs_preprocessor,
            "reward_preprocessor": reward_preprocessor,
            "env_ret_preprocess_fn": env_ret_preprocess_fn,
            "policy_resp_preprocess_fn": policy_resp_preprocess_fn,
            "preprocess_fn": preprocess_fn,
            "postprocess_fn": postprocess_fn,
        }
        self._set(rb, said, metas, links)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        env_meta_list: Sequence[EnvMeta] | Mapping[str, EnvMeta] | None = None,
        auto_truncate_episode: bool | None = None,
        timeout: float | None = 0.0,
        sampler: Sampler | None = None,
        batch_size: int | None = None,
        **functions: Callable,
    ) -> Storage:
        """The storage of that name, to add to it and look at it. Functions are of this process, by the constructor's names.

        auto_truncate_episode: None: as its maker's. timeout: seconds to wait until the name exists; None: for ever.
        Raises BufferNotFound, BufferFormatError; BufferExists: it is a buffer, but no such storage.
        """
        if unknown := functions.keys() - _LINKS.keys():
            raise TypeError(f"attach() got {', '.join(sorted(unknown))}; functions are {', '.join(_LINKS)}")
        metas = _by_id(env_meta_list)
        rb = attach(name, sampler=sampler, batch_size=batch_size, timeout=timeout)
        has = (rb.buffer.config.get("face") or {}).get("rlightning")
        if not isinstance(has, dict) or has.get("mode") not in _MODES or has.get("unit") not in _UNITS:
            rb.close()
            raise BufferExists(f"buffer {name!r} is no storage of this kind: shmbuf.attach({name!r}) takes it as it is")
        auto = has.get("auto", False) if auto_truncate_episode is None else auto_truncate_episode
        self = cls.__new__(cls)
        self._set(rb, {**has, "auto": bool(auto)}, metas, {**_LINKS, **functions})
        return self

    def _set(self, rb: Any, said: dict[str, Any], metas: dict[str, EnvMeta] | None, links: dict[str, Callable]) -> None:
        for name, link in links.items():
            if not callable(link):
                rb.close()
                raise TypeError(f"{name} is a function, not {type(link).__name__}")
        self._rb, self._said, self._metas, self._links = rb, said, metas, links
        self.capacity, self.mode, self.unit = rb.buffer.capacity, said["mode"], said["unit"]
        self.auto_truncate_episode = said["auto"]
        self._pusher = Pusher(rb.buffer, self.mode == "standard", self.unit == "episode", rb._priority_key, rb._reduced)
        self._stored = Stored(lambda: rb.buffer.schema)
        self._reads = Reader(rb._storage, self.unit == "episode")
        self._running: dict[str, SingleSteps | VectorSteps] = {}
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, dict[str, Any]] = {}  # what the policy has not answered yet
        self._ended: dict[str, np.ndarray | None] = {}  # what could not be stored when it should have been
        self._stamps: dict[str, int] = {}
        self._debug = os.environ.get("RLIGHTNING_DEBUG") == "1"
        self.timing_raw: dict[str, dict[str, Any]] = {}
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    @property
    def device(self) -> torch.device:
        """Where the rows are, and what is read of them."""
        return self._rb._storage.device

    def __reduce__(self) -> tuple:
        return _attached, (type(self), self._rb, self._said, self._metas, self._links)

    # ---- adding ---------------------------------------------------------------------------------------------------

    def add_transition(self, env_ret: EnvRet, policy_resp: PolicyResponse) -> None:
        """One step: what an environment gave and what the policy answered; of N environments that step together, of all of them.

        The first episode of all decides what rows are made of. Arrays and tensors keep their dtype (rewards in float64 stay so). Single
        numbers become float32, int64 or bool, flags bool (an episode of np.float64, say, float64); later ones become what is stored
        already, if they are such numbers: 1 is as good as 1.0, but 0.5 is none where integers are stored.

        Raises:
            ValueError: they are of different environments; the storage is closed. KeyError: the environment is not in env_meta_list.
            SchemaError: a value does not fit those before it, or the rows that are stored: nothing was taken (what a custom
            postprocess_fn makes is known, and refused, at the episode's end). RuntimeError, RingFull: an episode ended with it, and there is no room: the step
            was taken, and the environment's next one, or `truncate_one_episode`, tries again first.
        """
        now, theirs = time.time_ns(), getattr(env_ret, "env_id", None)
        if theirs != getattr(policy_resp, "env_id", None):
            raise ValueError(
                f"Mismatched env_id: the env_ret is of {theirs!r}, the policy_resp of {getattr(policy_resp, 'env_id', None)!r}"
            )
        steps = self._steps_of(env_ret.env_id)
        if self._debug:
            self._time("transition_pair_to_buffer", min(_latency(env_ret, now), _latency(policy_resp, now)))
        step = self._preprocessed({}, env_ret, policy_resp)
        self._append(env_ret.env_id, steps, step, whole=True)
        env_ret.ts_env_sent_ns = time.time_ns()

    def add_data_async(self, item: EnvRet | PolicyResponse) -> None:
        """Half a step. What an environment gave waits for the policy's answer to the same env_id; with it they are one step.

        :attr:`counters` says what did not come in pairs: a second EnvRet in place of one without an answer (it replaces that one, with a
        warning), an EnvRet with an older stamp than the one before it (it is taken as it comes, with a warning).

        Raises:
            ValueError: a PolicyResponse to nothing, or a second one to the same; counted, nothing is changed. TypeError: neither of the
            two. Others: see `add_transition`.
        """
        now = time.time_ns()
        if isinstance(item, EnvRet):
            self._steps_of(item.env_id)
            if self._debug:
                self._time("transition_env_to_buffer", _latency(item, now))
            step = kept(self._preprocessed({}, item, None))
            if item.env_id in self._waiting:
                self._odd("env_ret_replaced", f"env {item.env_id!r}: an EnvRet replaces one that had no PolicyResponse")
            elif item.ts_env_sent_ns < self._stamps.get(item.env_id, item.ts_env_sent_ns):
                self._odd("env_ret_out_of_order", f"env {item.env_id!r}: an EnvRet is older than the one before it")
            self._stamps[item.env_id] = item.ts_env_sent_ns
            self._waiting[item.env_id] = step
        elif isinstance(item, PolicyResponse):
            steps = self._steps_of(item.env_id)
            if item.env_id not in self._waiting:
                again = item.env_id in self._running
                self.counters["policy_resp_duplicate" if again else "policy_resp_without_env_ret"] += 1
                raise ValueError(
                    f"env {item.env_id!r}: a PolicyResponse, but "
                    + ("the last EnvRet has one already" if again else "no EnvRet came before it")
                    + ". It was not taken: an EnvRet first, then the one PolicyResponse to it"
                )
            if self._debug:
                self._time("transition_policy_to_buffer", _latency(item, now))
            step = self._preprocessed(dict(self._waiting[item.env_id]), None, item)
            self._append(item.env_id, steps, step)
        else:
            raise TypeError(f"an EnvRet or a PolicyResponse is added, not {type(item).__name__}")

    def _preprocessed(
        self, step: dict[str, Any], env_ret: EnvRet | None, policy_resp: PolicyResponse | None
    ) -> dict[str, Any]:
        f = self._links
        return f["preprocess_fn"](
            step,
            env_ret,
            policy_resp,
            f["obs_preprocessor"],
            f["reward_preprocessor"],
            f["env_ret_preprocess_fn"],
            f["policy_resp_preprocess_fn"],
        )

    def _odd(self, counter: str, text: str) -> None:
        self.counters[counter] += 1
        warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _num_envs(self, env_id: str) -> int:
        if self._metas is None:
            return 1
        if env_id in self._metas:
            return self._metas[env_id].num_envs or 1
        if "/" in env_id and env_id.split("/", 1)[0] in self._metas:
            return 1
        raise KeyError(
            f"Env ID {env_id!r} not found in env_meta_list: {', '.join(map(repr, self._metas)) or 'it is empty'}"
        )

    def _require_open(self) -> None:
        if self._rb.buffer.closed:
            raise ValueError(
                f"this storage, {self.name!r}, is closed: Storage.attach(name) opens it again, if it has a name"
            )

    def _steps_of(self, env_id: str) -> SingleSteps | VectorSteps:
        self._require_open()
        steps = self._running.get(env_id)
        if steps is None:
            n, post = self._num_envs(env_id), self._links["postprocess_fn"]
            auto = self.auto_truncate_episode
            steps = VectorSteps(n, post, auto, self._stored) if n > 1 else SingleSteps(post, auto, self._stored)
        return steps

    def _append(
        self, env_id: str, steps: SingleSteps | VectorSteps, step: Mapping[str, Any], whole: bool = False
    ) -> None:
        if env_id in self._ended:  # the step before this one ended episodes that could not be stored then
            self._store_ended(env_id, steps)
        done = steps.append(step)
        self._running[env_id] = steps
        if self._waiting.pop(env_id, None) is not None and whole:
            self._odd("env_ret_replaced", f"env {env_id!r}: a whole step replaces an EnvRet that had no PolicyResponse")
        if np.any(done):
            self._ended[env_id] = None if isinstance(steps, SingleSteps) else np.flatnonzero(done)
            self._store_ended(env_id, steps)

    def _store_ended(self, env_id: str, steps: SingleSteps | VectorSteps) -> None:
        try:
            self._end(env_id, steps, self._ended[env_id], wait=False)
        finally:
            if self._pusher.took:
                del self._ended[env_id]

    # ---- the end of episodes ----------------------------------------------------------------------------------------

    def truncate_one_episode(self, item: Any) -> None:
        """Store what there is of an environment's episode, or of the episodes of all N that step together.

        item: env_id (``f"{env_id}/{i}"``: the i-th of N, if they end one by one), or an object with an ``env_id``.
        Nothing happens where no step was added since the last end. Of one step no row can be made: it is dropped, and counted. An
        EnvRet that still waits for its PolicyResponse is the next episode's first (as in rlightning; counted, with a warning).

        Raises:
            KeyError: nothing was ever added of that environment. TypeError: item is none. RuntimeError: the episode does not fit
            (mode "standard"). SchemaError, ValueError: its rows are not made as those stored, or have a priority that cannot be. The
            steps are kept then: `drop_one_episode`.
        """
        began = time.perf_counter()
        env_id, steps, envs = self._found(item)
        ran = len(steps) if isinstance(steps, SingleSteps) else int(steps.lengths().max())
        self._end(env_id, steps, envs, wait=True)
        if ran and env_id in self._waiting and (envs is None or len(envs) == steps.num_envs):  # type: ignore[union-attr]
            self._odd(
                "env_ret_left_at_end",
                f"env {env_id!r} was truncated while an EnvRet waits for its PolicyResponse: that step begins the next episode. Truncate "
                "after the answer, or drop_one_episode() before the next step",
            )
        self._time("truncate_one_episode", time.perf_counter() - began)

    def truncate_episodes(self, env_ids: Iterable[Any]) -> None:
        """`truncate_one_episode` of each. KeyError, TypeError: for one of them; none was truncated."""
        items = [env_ids] if isinstance(env_ids, str) else list(env_ids)
        for item in items:
            self._found(item)
        for item in items:
            self.truncate_one_episode(item)

    def drop_one_episode(self, item: Any) -> None:
        """Forget an environment's running episode, and an EnvRet that waits; what is stored stays. item, KeyError, TypeError: see
        `truncate_one_episode`."""
        env_id = getattr(item, "env_id", item)
        if env_id in self._waiting and env_id not in self._running:
            del self._waiting[env_id]
            return
        env_id, steps, envs = self._found(item)
        steps.forget(envs)  # type: ignore[arg-type]
        whole = envs is None or len(envs) == steps.num_envs  # type: ignore[union-attr]
        ended = self._ended.pop(env_id, None)
        if ended is not None and envs is not None and len(left := np.setdiff1d(ended, envs)):
            self._ended[env_id] = left
        if whole:
            self._waiting.pop(env_id, None)

    def _found(self, item: Any) -> tuple[str, SingleSteps | VectorSteps, np.ndarray | None]:
        """Whose steps, the steps, and of those that step together which are meant."""
        self._require_open()
        env_id = item if isinstance(item, str) else getattr(item, "env_id", None)
        if not isinstance(env_id, str):
            raise TypeError(f"an env_id or an object that has one is truncated, not {type(item).__name__}")
        steps = self._running.get(env_id)
        if steps is not None:
            return env_id, steps, np.arange(steps.num_envs) if isinstance(steps, VectorSteps) else None
        parent, _, number = env_id.rpartition("/")
        group = self._running.get(parent)
        if (
            isinstance(group, VectorSteps)
            and self.auto_truncate_episode
            and number.isdecimal()
            and int(number) < group.num_envs
        ):
            return parent, group, np.array([int(number)])
        raise KeyError(
            f"{env_id}: no step of this environment was added; added were {', '.join(self._running) or 'none'}"
        )

    def _end(self, env_id: str, steps: SingleSteps | VectorSteps, envs: np.ndarray | None, *, wait: bool) -> None:
        """Forgets the steps when they are rows, or cannot be any."""
        self._pusher.took, short = False, 0
        try:
            if isinstance(steps, SingleSteps):
                episodes, short = steps.episodes(), int(len(steps) == 1)
            else:
                assert envs is not None
                found = steps.segments(envs)
                episodes, short = steps.episodes(found), int((found.steps == 1).sum())
            self._pusher.push(episodes, wait=wait)
        except ValueError as e:  # rows that cannot be, also of a custom function
            kind = SchemaError if isinstance(e, SchemaError) else ValueError
            raise kind(f"{e}\nThe steps are kept; drop_one_episode({env_id!r}) forgets them") from e
        finally:
            if self._pusher.took:
                steps.forget(envs)  # type: ignore[arg-type]
                self.counters["episodes_too_short"] += short

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Store rows as they are, past the chain of functions: a dict or TensorDict of arrays or tensors [T, ...]; [T, num_envs, ...] are
        num_envs episodes. A list of such: one after another.

        Raises SchemaError: keys of different lengths, or not those stored; RuntimeError: they do not fit. Nothing was stored then.
        """
        if isinstance(episode, (list, tuple)):
            self._pusher.push([self._rows_of(e, num_envs) for e in episode])
        else:
            self._pusher.push([self._rows_of(episode, num_envs)])

    @staticmethod
    def _rows_of(episode: Any, num_envs: int) -> Episodes:
        if not isinstance(episode, (Mapping, TensorDictBase)):
            raise TypeError(f"an episode is a dict or a TensorDict, not {type(episode).__name__}")
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs={num_envs!r}: a number ≥ 1")
        return of_rows(episode) if num_envs == 1 else env_major(episode, num_envs)

    # ---- what is stored -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reader(self) -> Iterator[Reader]:
        self._pusher.settle()
        with self._reads.alone():
            yield self._reads

    def __len__(self) -> int:
        with self._reader() as reader:
            return len(reader)

    @property
    def size(self) -> int:
        """Stored rows, or whole episodes: see ``unit``."""
        return len(self)

    def get_size(self) -> int:
        return len(self)

    def get_data(self) -> TensorDict | list[TensorDict]:
        """All that is stored, oldest first, as copies: a TensorDict [rows]; of episodes one [episodes, rows], or a list of TensorDicts
        [rows] where they have different lengths. Of an empty storage: without rows."""
        with self._reader() as reader:
            return reader.all()

    def __getitem__(self, index: Any) -> Any:
        """By age, 0 is the oldest; negative ones count from the newest. Nested dicts of tensors, copies; of several episodes of
        different lengths a list of TensorDicts.

        index: an integer, a slice, or a list, array or tensor of integers. IndexError: out of range. Of what is no number: IndexError
        for rows, TypeError for episodes.
        """
        with self._reader() as reader:
            return reader.get(index)

    @property
    def data_use_counter(self) -> np.ndarray:
        """int32[capacity], by slot: how often this handle read the row there (`get_data`, indices); −1: there is none."""
        with self._reader() as reader:
            return reader.reads()

    def clear(self, *, partial: bool = False) -> None:
        """Forget what is stored, for every process. partial: also the steps of this process's episodes that are running."""
        self._pusher.settle()
        self._rb.empty()
        if partial:
            self._running.clear()
            self._ended.clear()
            self._waiting.clear()
            self._stamps.clear()

    # ---- the buffer under it ------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Buffer:
        """The numpy-level handle under it."""
        self._pusher.settle()
        return self._rb.buffer

    @property
    def replay_buffer(self) -> TensorDictReplayBuffer:
        """The same rows to sample; another process gets one by `shmbuf.attach`."""
        self._pusher.settle()
        return self._rb

    @property
    def name(self) -> str:
        return self._rb.name

    def close(self) -> None:
        """Let go of the shared memory. Steps of running episodes are gone; what is stored under a name stays."""
        self._rb.close()

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Storage({self.name!r}, mode={self.mode!r}, unit={self.unit!r}, {self.buffer!r})"

    # ---- timing ---------------------------------------------------------------------------------------------------------

    def _time(self, name: str, seconds: float) -> None:
        t = self.timing_raw.setdefault(name, {"count": 0, "total": 0.0, "avg": 0.0})
        t["count"] += 1
        t["total"] += seconds
        t["avg"] = t["total"] / t["count"]

    def print_timing_summary(self, reset: bool = False) -> None:
        """Log (at level DEBUG, logger "shmbuf.rlightning") how often and how long things were done. reset: count anew.

        The time that data were on their way is taken where the environment variable RLIGHTNING_DEBUG is 1.
        """
        logger.debug("Buffer storage timing:")
        for name, t in self.timing_raw.items():
            logger.debug(f"{name:28} count={t['count']:<3} total={t['total']:.6f}s avg={t['avg']:.6f}s")
        if reset:
            self.timing_raw = {}


def _latency(item: Any, now: int) -> float:
    return item.compute_sent_latency(now)


def _by_id(metas: Sequence[EnvMeta] | Mapping[str, EnvMeta] | None) -> dict[str, EnvMeta] | None:
    if metas is None:
        return None
    out = dict(metas) if isinstance(metas, Mapping) else {m.env_id: m for m in metas}
    for env_id, meta in out.items():
        n = meta.num_envs
        if not isinstance(env_id, str) or not (
            n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 1)
        ):
            raise ValueError(f"env_meta_list: env_id {env_id!r} with num_envs={n!r}: a str, and a number ≥ 1 or None")
    return out  # type: ignore[return-value]


def _attached(cls: type[Storage], rb: Any, *rest: Any) -> Storage:
    self = cls.__new__(cls)
    self._set(rb, *rest)
    return self
