"""DQN on CartPole-v1: collectors write, a learner samples, each in its own process, all through one named buffer.

    python examples/dqn_cartpole.py [--seed 1] [--collectors 4] [--timeout 300] [--out out] [--help]

Three kinds of process, and two buffers between them:

    collector × 4   plays with the newest policy, puts each step          → buffer "cartpole", the replay buffer
    learner         samples batches from it, publishes its network        → buffer "cartpole-policy", one row in all
    main            makes both, watches, judges the policy, ends everything; it never writes a row

Collectors use numpy only: they are up in half a second and never import torch. Nothing else connects the processes, no queue,
no pipe, no lock; each attaches by name. None depends on another, so ending them all when one dies is main's choice.
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

import gymnasium
import numpy as np

import shmbuf
from shmbuf import Buffer


@dataclass
class Settings:
    name: str = "cartpole"
    """of the buffer; the policy's is NAME-policy"""
    seed: int = 1
    """of environments and learner; runs still differ, because processes do not run in lockstep"""
    collectors: int = 4
    """number of collector processes"""
    target_return: float = 400.0
    """success: the mean return of the last three evaluations is at least this"""
    timeout: float = 300.0
    """seconds after which it gives up"""
    out: str = "out"
    """folder for the picture"""
    capacity: int = 100_000
    """rows in the buffer; then the oldest are overwritten"""
    warmup: int = 2_000
    """rows, from random actions, before the first update"""
    rows_per_update: float = 8.0
    """collectors and learner wait for each other to keep this pace"""
    batch_size: int = 256
    """rows of one sample"""
    learning_rate: float = 1e-3
    """of Adam; falls to a twentieth in the first 5,000 updates"""
    gamma: float = 0.98
    """discount"""
    tau: float = 0.05
    """part of the way that the target network moves at each update"""
    epsilon_updates: int = 2_000
    """updates in which epsilon falls from 1 to each collector's own least"""
    publish_every: int = 10
    """updates between two publications of the policy"""
    evaluate_every: int = 200
    """updates between two evaluations"""
    episodes: int = 10
    """greedy episodes of an evaluation"""


# ---- the policy, in numpy: what collectors and evaluation need of it --------------------------------------------------

SCALE = np.array([1 / 2.4, 1 / 2, 1 / 0.21, 1 / 2], np.float32)  # brings the four observed numbers to about −1…1


def q_values(net: dict[str, np.ndarray], observation: np.ndarray) -> np.ndarray:
    """The same network as the learner's."""
    x = np.maximum(net["0.weight"] @ (observation * SCALE) + net["0.bias"], 0)
    x = np.maximum(net["2.weight"] @ x + net["2.bias"], 0)
    return net["4.weight"] @ x + net["4.bias"]


def newest(policy: Buffer) -> tuple[int, float, dict[str, np.ndarray]]:
    """(updates, epsilon, network) as last published: whole, never half of one and half of the next."""
    if not len(policy):
        return 0, 1.0, {}
    row, _ = policy.draw(1, timeout=10)  # of one row, so it is the newest
    return int(row["updates"][0]), float(row["epsilon"][0]), {k: v[0] for k, v in row["net"].items()}


# ---- collector --------------------------------------------------------------------------------------------------------


def collector(s: Settings, number: int) -> None:
    buffer, policy = Buffer.attach(s.name), Buffer.attach(f"{s.name}-policy")
    least = np.geomspace(0.02, 0.2, s.collectors)[number]  # some explore more than others, as in Ape-X
    rng = np.random.default_rng([s.seed, number])
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=1000 * s.seed + number)
    while parent_process().is_alive():  # if main is killed, end too
        updates, epsilon, net = newest(policy)
        if buffer.write_count > s.warmup + s.rows_per_update * (updates + 2 * s.publish_every):
            time.sleep(0.001)  # the learner is behind
            continue
        for _ in range(16):
            explore = rng.random() < max(epsilon, least)
            action = rng.integers(2) if explore else q_values(net, observation).argmax()
            after, reward, terminated, truncated, _ = env.step(action)
            buffer.put(
                {  # returns at once; the first dimension of every leaf is the rows, here one
                    "observation": observation[None],
                    "action": np.array([action]),
                    "next": {
                        "observation": after[None],
                        "reward": np.array([reward], np.float32),
                        "terminated": np.array([terminated]),
                        "done": np.array([terminated or truncated]),
                    },
                }
            )
            observation = env.reset()[0] if terminated or truncated else after


# ---- learner ----------------------------------------------------------------------------------------------------------


def learner(s: Settings) -> None:
    import torch
    from torch import nn

    torch.manual_seed(s.seed)
    torch.set_num_threads(1)  # the matrices are small, and collectors need the other cores

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    net, target, scale = network(), network(), torch.from_numpy(SCALE)
    nn.init.ones_(
        net[-1].bias
    )  # values are in units of the best possible one: all is well until a fall teaches otherwise
    target.load_state_dict(net.state_dict())
    adam = torch.optim.Adam(net.parameters(), fused=True)
    rb, policy = shmbuf.attach(s.name), Buffer.attach(f"{s.name}-policy")  # rb: class and batch size as main chose them
    updates = 0
    while parent_process().is_alive():
        if rb.write_count < s.warmup + s.rows_per_update * (updates - 2 * s.publish_every):
            time.sleep(0.001)  # the collectors are behind
            continue
        batch = rb.sample()  # a TensorDict [batch_size], copied out of shared memory
        now, after = batch["observation"] * scale, batch["next", "observation"] * scale
        with torch.no_grad():  # double DQN: net chooses the action, target values it
            best = net(after).argmax(1, keepdim=True)
            future = (
                target(after).gather(1, best).squeeze(1) * ~batch["next", "terminated"]
            )  # not "done": a time limit is no fall
            goal = (1 - s.gamma) * batch["next", "reward"] + s.gamma * future
        value = net(now).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        adam.param_groups[0]["lr"] = s.learning_rate * max(0.05, 1 - updates / 5_000)
        adam.zero_grad()
        nn.functional.mse_loss(value, goal).backward()
        adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), s.tau)
        updates += 1
        if updates % s.publish_every == 0:
            policy.extend(
                {  # returns when every process can see it
                    "updates": np.array([updates]),
                    "epsilon": np.array([max(0.0, 1 - updates / s.epsilon_updates)]),
                    "net": {name: p.detach().numpy()[None] for name, p in net.named_parameters()},
                }
            )


# ---- main: makes the buffers, watches, judges, ends -------------------------------------------------------------------


def evaluate(net: dict[str, np.ndarray], env: gymnasium.Env, episodes: int) -> float:
    """Mean return of greedy episodes."""
    total = 0.0
    for episode in range(episodes):
        (observation, _), over = env.reset(seed=episode), False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(q_values(net, observation).argmax())
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def run(s: Settings) -> int:
    print(f"DQN on CartPole-v1: {s.collectors} collectors and a learner share buffer {s.name!r}", flush=True)
    from rich.live import Live

    with ExitStack() as end:  # its calls run at the end in reverse order, whatever happened
        storage = shmbuf.ShmStorage(s.capacity, name=s.name, exists="replace")  # imports torch
        rb = shmbuf.TensorDictReplayBuffer(storage=storage, batch_size=s.batch_size)
        end.callback(shmbuf.destroy, s.name, force=True)
        policy = Buffer.create(f"{s.name}-policy", 1, drain="caller", exists="replace")
        end.callback(shmbuf.destroy, policy.name, force=True)
        # Neither has a schema yet: the first put of any process decides it, here a collector's and the learner's.

        spawn = get_context("spawn")
        jobs = {
            f"collector {i}": spawn.Process(target=collector, args=(s, i), daemon=True) for i in range(s.collectors)
        }
        jobs["learner"] = spawn.Process(target=learner, args=(s,), daemon=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # for their numpy
        end.callback(stop, jobs)
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # they inherit it: Ctrl-C is main's affair alone
        for job in jobs.values():
            job.start()
        signal.signal(signal.SIGINT, interrupt)

        env = gymnasium.make("CartPole-v1")
        watch: list[tuple[float, int, int]] = []  # (seconds, rows written, batches sampled), five times a second
        returns: list[tuple[float, float]] = []  # (seconds, mean return) of each evaluation
        rings: dict[int, dict] = {}  # pid: what the buffer knows of a collector, kept here in case it dies
        began, judged, final, verdict = time.monotonic(), 0, 0.0, ""
        with Live(auto_refresh=False, transient=True) as live:
            while not verdict:
                ended = connection.wait([job.sentinel for job in jobs.values()], timeout=0.2)
                t = time.monotonic() - began
                updates, epsilon, net = newest(policy)
                rings |= {c["pid"]: c for c in rb.buffer.collectors()}
                watch.append((t, sum(c["put_rows"] for c in rings.values()), updates))
                if updates >= judged + s.evaluate_every:
                    returns.append((t, evaluate(net, env, s.episodes)))
                    judged, final = updates, float(np.mean([r for _, r in returns[-3:]]))
                line = (
                    f"{t:3.0f} s  in {per_second(watch, -1, 1):,.0f} rows/s  out {per_second(watch, -1, 2):,.0f} batches/s  "
                    f"rings {max((c['ring_used'] / c['ring_bytes'] for c in rings.values()), default=0):.1%}  "
                    f"return {f'{returns[-1][1]:.0f}' if returns else '–'}  epsilon {epsilon:.2f}"
                )
                if live.console.is_terminal:
                    live.update(line, refresh=True)
                elif len(watch) % 25 == 1:  # a log gets a line now and then
                    print(line, flush=True)
                if ended:
                    dead = [(name, job.join() or job.exitcode) for name, job in jobs.items() if job.sentinel in ended]
                    verdict = f"failed: {', '.join(f'{name} ended with exit code {code}' for name, code in dead)}"
                elif len(returns) >= 3 and final >= s.target_return:
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
        print(
            f"  final return     {final:.1f} (last 3 evaluations of {s.episodes} episodes; target {s.target_return:g})"
        )
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
    figure.suptitle(f"DQN on CartPole-v1, {s.collectors} collectors, seed {s.seed} (dashed: target)")
    top.axhline(s.target_return, color="gray", linestyle="--")
    top.plot([t for t, _ in returns], [r for _, r in returns], "o-", markersize=4)
    top.set(ylabel=f"mean return of {s.episodes} greedy episodes", ylim=(0, 520))
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
    path = Path(s.out, "dqn_cartpole.png")
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
