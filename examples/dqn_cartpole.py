"""DQN on CartPole-v1: collectors write, a learner in its own process samples, all through one named buffer.

    python examples/dqn_cartpole.py [--seed 1] [--collectors 4] [--target-return 400] [--timeout 300] [--out out]

Three kinds of process, and two buffers between them:

    collector × 4   plays with the newest policy and puts every step     → buffer "cartpole", 1 row a step
    learner         samples batches from it, publishes its weights       → buffer "cartpole-policy", 1 row in all
    main            creates both, watches, judges the policy, ends everything; it never writes a row

Collectors are numpy only: they start in half a second and never import torch. Nothing else connects the processes: no queue,
no pipe, no lock. Each attaches by name, and any of them may be killed without hanging the others.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import numpy as np

import shmbuf
from shmbuf import Buffer


@dataclass
class Settings:
    name: str = "cartpole"
    """name of the buffer; the policy's is NAME-policy"""
    seed: int = 1
    """of environments and learner; runs still differ a little, because processes do not run in lockstep"""
    collectors: int = 4
    """number of collector processes"""
    target_return: float = 400.0
    """success: the mean return of the evaluation reaches this"""
    timeout: float = 300.0
    """seconds until it gives up, with exit status 1"""
    out: str = "out"
    """folder for the picture"""
    capacity: int = 100_000
    """rows in the buffer; then the oldest are overwritten"""
    warmup: int = 2_000
    """rows collected at random before the first update"""
    rows_per_update: float = 4.0
    """pace: collectors and learner wait for each other to keep this ratio"""
    batch_size: int = 128
    """rows of one sample"""
    learning_rate: float = 1e-3
    """of Adam"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.01
    """the target network moves by this part of the way at each update"""
    epsilon_updates: int = 4_000
    """updates during which epsilon falls from 1 to 0.05"""
    publish_every: int = 20
    """updates between two publications of the policy"""
    eval_episodes: int = 10
    """greedy episodes of one evaluation"""


# ---- the policy, in numpy: what collectors and the evaluation need of it ----------------------------------------------


def q_values(net: dict[str, np.ndarray], observation: np.ndarray) -> np.ndarray:
    """The learner's network (see there), from the row that it published."""
    x = np.maximum(net["0.weight"] @ observation + net["0.bias"], 0)
    x = np.maximum(net["2.weight"] @ x + net["2.bias"], 0)
    return net["4.weight"] @ x + net["4.bias"]


def newest(policy: Buffer) -> tuple[int, float, dict[str, np.ndarray]] | None:
    """(updates, epsilon, net) of the policy buffer's only row; None before the first. Never half of one and half of the next."""
    if not len(policy):
        return None
    row, _ = policy.draw(1, timeout=10)
    return int(row["updates"][0]), float(row["epsilon"][0]), {k: v[0] for k, v in row["net"].items()}


# ---- collector --------------------------------------------------------------------------------------------------------


def collector(s: Settings, number: int, parent: int) -> None:
    buffer, policy = Buffer.attach(s.name), Buffer.attach(f"{s.name}-policy")
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng([s.seed, number])
    observation, _ = env.reset(seed=s.seed * 1000 + number)
    while os.getppid() == parent:  # a killed main process takes us along
        updates, epsilon, net = newest(policy) or (0, 1.0, {})
        if buffer.write_count > s.warmup + s.rows_per_update * (updates + 2 * s.publish_every):
            time.sleep(0.001)  # ahead of the learner
            continue
        for _ in range(16):
            explore = rng.random() < epsilon
            action = rng.integers(2) if explore else q_values(net, observation).argmax()
            following, reward, terminated, truncated, _ = env.step(action)
            buffer.put({
                "observation": observation[None],  # a put takes rows [n, ...]; here n = 1
                "action": np.array([action]),
                "next": {
                    "observation": following[None],
                    "reward": np.array([reward], np.float32),
                    "terminated": np.array([terminated]),
                    "done": np.array([terminated or truncated]),
                },
            })
            observation = following
            if terminated or truncated:
                observation, _ = env.reset()


# ---- learner ----------------------------------------------------------------------------------------------------------


def learner(s: Settings, parent: int) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)  # small matrices: a second thread only gets in the collectors' way
    torch.manual_seed(s.seed)

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    net, target = network(), network()
    target.load_state_dict(net.state_dict())
    adam = torch.optim.Adam(net.parameters(), lr=s.learning_rate, fused=True)
    rb, policy = shmbuf.attach(s.name), Buffer.attach(f"{s.name}-policy")
    rb.buffer.wait_rows(s.warmup, timeout=60)
    updates = 0
    while os.getppid() == parent:
        while rb.write_count < s.warmup + s.rows_per_update * (updates - 2 * s.publish_every):
            time.sleep(0.001)  # ahead of the collectors

        batch = rb.sample()  # a TensorDict of batch_size rows, copied out of shared memory
        after = batch["next"]
        with torch.no_grad():  # double DQN: net picks the action, target values it
            best = net(after["observation"]).argmax(1, keepdim=True)
            value = target(after["observation"]).gather(1, best).squeeze(1)
            goal = after["reward"] + s.gamma * ~after["terminated"] * value  # a time limit is no end: terminated, not done
        chosen = net(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(chosen, goal)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), s.tau)

        updates += 1
        if updates % s.publish_every == 0:
            policy.extend({
                "updates": np.array([updates]),
                "epsilon": np.array([max(0.05, 1 - 0.95 * updates / s.epsilon_updates)]),
                "net": {name: p.detach().numpy()[None] for name, p in net.named_parameters()},
            })


# ---- main: creates, watches, judges, ends -----------------------------------------------------------------------------


def evaluate(net: dict[str, np.ndarray], env: gymnasium.Env, episodes: int) -> float:
    """Mean return of greedy episodes."""
    total = 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=10_000 + episode)
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(q_values(net, observation).argmax())
            total += float(reward)
            over = terminated or truncated
    return total / episodes


def picture(s: Settings, history: list[dict]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    t = [h["t"] for h in history]
    judged = [h for h in history if h["judged"]]
    top.plot([h["t"] for h in judged], [h["return"] for h in judged], "o-", ms=3, color="tab:blue")
    top.axhline(s.target_return, color="tab:gray", ls="--", lw=1)
    top.set(ylabel="evaluation return")
    bottom.plot(t, [h["rows/s"] for h in history], color="tab:orange", label="rows/s in")
    bottom.plot(t, [h["batches/s"] for h in history], color="tab:green", label="batches/s out")
    bottom.set(xlabel="seconds", ylabel="per second")
    bottom.legend()
    path = Path(s.out) / "dqn_cartpole.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def main(s: Settings) -> int:
    from shmbuf import RandomSampler, ShmStorage, TensorDictReplayBuffer
    rb = TensorDictReplayBuffer(storage=ShmStorage(s.capacity, name=s.name, exists="replace"), sampler=RandomSampler(), batch_size=s.batch_size)
    policy = Buffer.create(f"{s.name}-policy", 1, drain="caller", exists="replace")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    me = os.getpid()
    jobs = {"learner": context.Process(target=learner, args=(s, me), daemon=True)}
    jobs |= {f"collector {i}": context.Process(target=collector, args=(s, i, me), daemon=True) for i in range(s.collectors)}
    t0 = time.time()
    for p in jobs.values(): p.start()
    env = gymnasium.make("CartPole-v1")
    seen = 0
    last = 0
    try:
        while time.time() - t0 < s.timeout:
            time.sleep(0.2)
            for n, p in jobs.items():
                if p.exitcode is not None:
                    print(n, p.exitcode); return 1
            row = newest(policy)
            if row is None: continue
            if row[0] >= seen + 500:
                seen = row[0]
                a = time.time()
                r = evaluate(row[2], env, s.eval_episodes)
                print(f"{a - t0:.1f} updates {row[0]} rows {rb.write_count} eps {row[1]:.2f} return {r} eval took {time.time()-a:.2f}", flush=True)
                if r >= s.target_return:
                    print("DONE", s.seed, time.time() - t0); return 0
        print("GAVEUP", s.seed)
        return 1
    finally:
        for p in jobs.values(): p.terminate()
        for p in jobs.values(): p.join()
        rb.close(); policy.close()
        shmbuf.destroy(s.name, force=True); shmbuf.destroy(s.name + "-policy", force=True)


def parse() -> Settings:
    """The dataclass as command-line options; its docstrings are their help."""
    texts = dict(re.findall(r'(\w+): \w+ = .*\n\s+"""(.*?)"""', inspect.getsource(Settings)))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for f in fields(Settings):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=texts[f.name])
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main(parse()))
