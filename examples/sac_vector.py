"""SAC on Pendulum-v1 with vectorised environments: rows are put in batches, as TensorDicts.

    python examples/sac_vector.py [--seed 1] [--collectors 2] [--environments 4] [--timeout 300] [--out out] [--help]

As examples/dqn_cartpole.py, which has the longer comments, with these differences: a collector steps several environments at
once and puts their rows together; buffers are handed to the processes instead of attached by name (a handle pickles as its
name); the policy is published as what it is, the TensorDict of a module's parameters.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

try:
    import gymnasium
    import numpy as np
    import torch
    from tensordict import TensorDict
    from torch import nn

    import shmbuf
    from shmbuf import ShmStorage, TensorDictReplayBuffer
except KeyboardInterrupt:  # importing torch takes seconds
    sys.exit(130)


@dataclass
class Settings:
    name: str = "pendulum"
    """of the buffer; the policy's is NAME-policy"""
    seed: int = 1
    """of environments and learner"""
    collectors: int = 2
    """number of collector processes"""
    environments: int = 4
    """of each collector: rows per put"""
    target_return: float = -300.0
    """success: the mean return of an evaluation is at least this"""
    timeout: float = 300.0
    """seconds after which it gives up"""
    out: str = "out"
    """folder for the picture"""
    capacity: int = 100_000
    """rows in the buffer; then the oldest are overwritten"""
    warmup: int = 1_000
    """rows, from random actions, before the first update"""
    rows_per_update: float = 2.0
    """collectors and learner wait for each other to keep this pace"""
    batch_size: int = 256
    """rows of one sample"""
    learning_rate: float = 1e-3
    """of the three Adams"""
    gamma: float = 0.98
    """discount"""
    tau: float = 0.02
    """part of the way that the target critics move at each update"""
    publish_every: int = 10
    """updates between two publications of the policy"""
    evaluate_every: int = 200
    """updates between two evaluations"""
    episodes: int = 10
    """episodes of an evaluation, side by side"""


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def act(actor: nn.Module, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A random action in −1…1 and its log-probability."""
    mean, log_std = actor(observation).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
    u = normal.rsample()
    log_p = normal.log_prob(u) - 2 * (np.log(2) - u - nn.functional.softplus(-2 * u))
    return u.tanh(), log_p.squeeze(-1)


def newest(policy: TensorDictReplayBuffer) -> TensorDict | None:
    """{"updates", "actor"} as last published; None before."""
    return policy.sample(1, timeout=10)[0] if len(policy) else None


def environments(n: int) -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * n)


# ---- collector --------------------------------------------------------------------------------------------------------


def collector(s: Settings, rb: TensorDictReplayBuffer, policy: TensorDictReplayBuffer, number: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 * s.seed + number)
    env, actor = environments(s.environments), mlp(3, 2)
    weights = TensorDict.from_module(actor).data
    observation, _ = env.reset(seed=1000 * s.seed + 100 * number)
    ended = np.zeros(s.environments, bool)
    while parent_process().is_alive():
        row = newest(policy)
        updates = int(row["updates"]) if row is not None else 0
        if rb.write_count > s.warmup + s.rows_per_update * (updates + 2 * s.publish_every):
            time.sleep(0.001)  # the learner is behind
            continue
        if row is None:
            action = torch.rand(s.environments, 1) * 2 - 1
        else:
            weights.update_(row["actor"])
            with torch.no_grad():
                action, _ = act(actor, torch.from_numpy(observation))
        after, reward, terminated, truncated, _ = env.step(2 * action.numpy())
        rows = TensorDict(
            {
                "observation": observation,
                "action": action,
                "next": {
                    "observation": after,
                    "reward": reward.astype(np.float32),
                    "terminated": terminated,
                    "done": terminated | truncated,
                },
            },
            batch_size=[s.environments],
        )
        # Where an episode ended in the step before, Gymnasium ≥ 1.0 has used this one to reset: `after` starts a new episode,
        # the action counted for nothing, and the row would lead from one episode into the next. The row before it is right
        # as it is: its "next" is the true last observation.
        rb.put(rows[torch.from_numpy(~ended)])
        observation, ended = after, terminated | truncated


# ---- learner ----------------------------------------------------------------------------------------------------------


def learner(s: Settings, rb: TensorDictReplayBuffer, policy: TensorDictReplayBuffer) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(s.seed)
    actor, critics, targets = mlp(3, 2), nn.ModuleList([mlp(4, 1), mlp(4, 1)]), nn.ModuleList([mlp(4, 1), mlp(4, 1)])
    targets.load_state_dict(critics.state_dict())
    log_alpha = nn.Parameter(torch.zeros(()))
    adam_actor = torch.optim.Adam(actor.parameters(), s.learning_rate, fused=True)
    adam_critics = torch.optim.Adam(critics.parameters(), s.learning_rate, fused=True)
    adam_alpha = torch.optim.Adam([log_alpha], s.learning_rate, fused=True)

    def least(pair: nn.ModuleList, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        x = torch.cat([observation, action], -1)
        return torch.minimum(pair[0](x), pair[1](x)).squeeze(-1)

    updates, batch = 0, None
    while parent_process().is_alive():
        if rb.write_count < s.warmup + s.rows_per_update * (updates - 2 * s.publish_every):
            time.sleep(0.001)  # the collectors are behind
            continue
        batch = rb.sample(out=batch)  # from the second on into the same tensors
        now, after = batch["observation"], batch["next"]
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action, log_p = act(actor, after["observation"])
            future = least(targets, after["observation"], action) - alpha * log_p
            goal = after["reward"] / 10 + s.gamma * ~after["terminated"] * future  # rewards go down to −16 a step
        x = torch.cat([now, batch["action"]], -1)
        adam_critics.zero_grad()
        sum(nn.functional.mse_loss(critic(x).squeeze(-1), goal) for critic in critics).backward()
        adam_critics.step()

        action, log_p = act(actor, now)
        adam_actor.zero_grad()
        (alpha * log_p - least(critics, now, action)).mean().backward()
        adam_actor.step()
        adam_alpha.zero_grad()
        (
            -log_alpha.exp() * (log_p.detach().mean() - 1)
        ).backward()  # towards an entropy of −1, minus the number of actions
        adam_alpha.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), s.tau)
        updates += 1
        if updates % s.publish_every == 0:
            policy.extend(TensorDict({"updates": updates, "actor": TensorDict.from_module(actor).data}).unsqueeze(0))


# ---- main: makes the buffers, watches, judges, ends -------------------------------------------------------------------


@torch.no_grad()
def evaluate(actor: nn.Module, episodes: int) -> float:
    """Mean return with the mean action. A Pendulum episode is always 200 steps, so nothing resets on the way."""
    env, total = environments(episodes), 0.0
    observation, _ = env.reset(seed=0)
    for _ in range(200):
        action = actor(torch.from_numpy(observation))[:, :1].tanh()
        observation, reward, *_ = env.step(2 * action.numpy())
        total += float(reward.mean())
    return total


def run(s: Settings) -> int:
    print(
        f"SAC on Pendulum-v1: {s.collectors} × {s.environments} environments and a learner share buffer {s.name!r}",
        flush=True,
    )
    from rich.live import Live

    with ExitStack() as end:  # its calls run at the end in reverse order, whatever happened
        rb = TensorDictReplayBuffer(
            storage=ShmStorage(s.capacity, name=s.name, exists="replace"), batch_size=s.batch_size
        )
        end.callback(shmbuf.destroy, s.name, force=True)
        policy = TensorDictReplayBuffer(
            storage=ShmStorage(1, name=f"{s.name}-policy", drain="caller", exists="replace")
        )
        end.callback(shmbuf.destroy, policy.name, force=True)

        spawn = get_context("spawn")
        jobs = {
            f"collector {i}": spawn.Process(target=collector, args=(s, rb, policy, i), daemon=True)
            for i in range(s.collectors)
        }
        jobs["learner"] = spawn.Process(target=learner, args=(s, rb, policy), daemon=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # for their numpy
        end.callback(stop, jobs)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it: Ctrl-C is main's affair alone
        for job in jobs.values():
            job.start()
        signal.signal(signal.SIGINT, interrupt)

        actor = mlp(3, 2)
        watch: list[tuple[float, int, int]] = []  # (seconds, rows written, batches sampled), five times a second
        returns: list[tuple[float, float]] = []  # (seconds, mean return) of each evaluation
        rings: dict[int, dict] = {}  # pid: what the buffer knows of a collector, kept here in case it dies
        began, judged, verdict = time.monotonic(), 0, ""
        with Live(auto_refresh=False, transient=True) as live:
            while not verdict:
                ended = connection.wait([job.sentinel for job in jobs.values()], timeout=0.2)
                t = time.monotonic() - began
                row = newest(policy)
                updates = int(row["updates"]) if row is not None else 0
                rings |= {c["pid"]: c for c in rb.buffer.collectors()}
                watch.append((t, sum(c["put_rows"] for c in rings.values()), updates))
                if updates >= judged + s.evaluate_every:
                    TensorDict.from_module(actor).data.update_(row["actor"])
                    returns.append((t, evaluate(actor, s.episodes)))
                    judged = updates
                line = (
                    f"{t:3.0f} s  in {per_second(watch, -1, 1):,.0f} rows/s  out {per_second(watch, -1, 2):,.0f} batches/s  "
                    f"rings {max((c['ring_used'] / c['ring_bytes'] for c in rings.values()), default=0):.1%}  "
                    f"return {f'{returns[-1][1]:.0f}' if returns else '–'}"
                )
                if live.console.is_terminal:
                    live.update(line, refresh=True)
                elif len(watch) % 25 == 1:  # a log gets a line now and then
                    print(line, flush=True)
                if ended:
                    dead = [(name, job.join() or job.exitcode) for name, job in jobs.items() if job.sentinel in ended]
                    verdict = f"failed: {', '.join(f'{name} ended with exit code {code}' for name, code in dead)}"
                elif returns and returns[-1][1] >= s.target_return:
                    verdict = "solved"
                elif t > s.timeout:
                    verdict = "gave up"

    since = next((w for w in watch if w[2]), watch[-1])  # rates are those while it learned
    put = [rings[job.pid]["put_rows"] if job.pid in rings else 0 for name, job in jobs.items() if name != "learner"]
    print(f"{verdict} after {t:.1f} s")
    print(f"  rows written     {sum(put):,} ({(watch[-1][1] - since[1]) / max(t - since[0], 0.1):,.0f} rows/s)")
    print(f"  per collector    {'  '.join(f'{n:,}' for n in put)}")
    print(
        f"  batches sampled  {updates:,} of {s.batch_size} rows ({(updates - since[2]) / max(t - since[0], 0.1):,.0f} batches/s)"
    )
    if returns:
        print(f"  final return     {returns[-1][1]:.1f} (mean of {s.episodes} episodes; target {s.target_return:g})")
    print(f"  picture          {picture(s, watch, returns)}")
    return 0 if verdict == "solved" else 1


def stop(jobs: dict) -> None:
    """Kill them, at whatever instruction they are: a row is in the buffer whole or not at all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C does not keep us from cleaning up
    for job in [job for job in jobs.values() if job.pid is not None]:  # those that were started
        job.kill()
        job.join()


def per_second(watch: list[tuple[float, int, int]], i: int, column: int) -> float:
    """The rate at moment i, over the two seconds before it."""
    i %= len(watch)
    earlier, now = watch[max(0, i - 10)], watch[i]
    return (now[column] - earlier[column]) / max(now[0] - earlier[0], 0.1)


def picture(s: Settings, watch: list[tuple[float, int, int]], returns: list[tuple[float, float]]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    figure.suptitle(
        f"SAC on Pendulum-v1, {s.collectors} × {s.environments} environments, seed {s.seed} (dashed: target)"
    )
    top.axhline(s.target_return, color="gray", linestyle="--")
    top.plot([t for t, _ in returns], [r for _, r in returns], "o-", markersize=4)
    top.set(ylabel=f"mean return of {s.episodes} episodes", ylim=(None, 0))
    for axes, column, label, color in (
        (middle, 1, "rows/s in", "tab:orange"),
        (bottom, 2, "batches/s out", "tab:green"),
    ):
        axes.plot([t for t, _, _ in watch], [per_second(watch, i, column) for i in range(len(watch))], color=color)
        axes.set(ylabel=label, ylim=(0, None))
    bottom.set(xlabel="seconds", xlim=(0, None))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    path = Path(s.out, "sac_vector.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def parse() -> Settings:
    """The dataclass as command-line options; its docstrings are their help."""
    texts = dict(re.findall(r'(\w+): \w+ = .*\n\s+"""(.*?)"""', inspect.getsource(Settings)))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for f in fields(Settings):
        parser.add_argument(
            f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=texts[f.name]
        )
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    settings = parse()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # as Ctrl-C
    try:
        sys.exit(run(settings))
    except KeyboardInterrupt:
        print("interrupted; processes and buffers are gone")
        sys.exit(130)
    except shmbuf.ShmbufError as e:
        sys.exit(f"failed: {e}")
