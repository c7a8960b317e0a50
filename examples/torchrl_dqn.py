"""DQN on CartPole-v1 with TorchRL's collectors, environments and loss; of the replay buffer, the import and the storage's name
are ours.

    python examples/torchrl_dqn.py [--seed 1] [--collectors 2] [--frames 200000] [--timeout 300] [--help]

TorchRL's collector processes step the environments and extend the buffer by themselves; this process samples it by priority and
trains. Needs torchrl: pip install 'shmbuf[torchrl]' gymnasium. Exit status 0: a mean return of 195 over the last 10 episodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import shmbuf
from shmbuf import NewestSampler, PrioritizedSampler, RemoteTensorDictReplayBuffer, ShmStorage


@dataclass
class Settings:
    seed: int = 1
    collectors: int = 2
    """processes"""
    frames: int = 200_000
    """at most"""
    frames_per_batch: int = 64
    """that a collector extends the buffer by"""
    capacity: int = 50_000
    batch_size: int = 256
    warm_up: int = 2_000
    """frames stored before the first update"""
    gamma: float = 0.99
    lr: float = 1e-3
    target: float = 195.0
    timeout: float = 300.0
    """seconds"""


def environment() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))


def actor() -> QValueActor:
    net = MLP(in_features=4, out_features=2, num_cells=[128, 128], activation_class=nn.ReLU)
    return QValueActor(net, in_keys=["observation"], action_space="one-hot", spec=GymEnv("CartPole-v1").action_spec)


def main(s: Settings) -> int:
    torch.manual_seed(s.seed)
    torch.set_num_threads(1)
    policy = actor()
    explore = EGreedyModule(policy.spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=10_000)
    acting = TensorDictSequential(policy, explore)
    loss_module = DQNLoss(policy, delay_value=True, double_dqn=True)
    loss_module.make_value_estimator(gamma=s.gamma)
    target = SoftUpdate(loss_module, eps=0.98)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=s.lr)

    rb = RemoteTensorDictReplayBuffer(
        storage=ShmStorage(s.capacity),
        sampler=PrioritizedSampler(s.capacity, alpha=0.6, beta=0.4),
        priority_key="td_error",
        batch_size=s.batch_size,
    )
    newest = shmbuf.attach(rb.name, sampler=NewestSampler())  # another handle on the same rows, to look at how they do
    collector = MultiAsyncCollector(
        [environment] * s.collectors,
        acting,
        replay_buffer=rb,
        frames_per_batch=s.frames_per_batch,
        total_frames=s.frames,
    )
    collector.set_seed(s.seed)
    began, updates = time.monotonic(), 0
    status = 1
    try:
        collector.start()
        while rb.write_count < s.frames and time.monotonic() - began < s.timeout:
            if rb.write_count < s.warm_up:
                rb.wait_rows(min(s.warm_up, s.capacity), timeout=s.timeout)
                continue
            batch = rb.sample()
            loss = loss_module(batch)["loss"]
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            target.step()
            rb.update_tensordict_priority(batch)
            updates += 1
            if updates % 20 == 0:
                explore.step(s.batch_size)
                collector.update_policy_weights_()
            if updates % 100 == 0:
                rows = newest.sample(min(len(rb), 4_000))["next"]
                returns = rows["episode_reward"][rows["done"]][:10]  # newest first
                mean = returns.mean().item() if len(returns) else float("nan")
                print(
                    f"{time.monotonic() - began:5.0f} s  {rb.write_count:7,} frames  {updates:6,} updates  return {mean:6.1f}"
                )
                if len(returns) == 10 and mean >= s.target:
                    status = 0
                    break
    finally:
        collector.shutdown()
        newest.close()
        rb.close()
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    sys.exit(main(Settings(**vars(parser.parse_args()))))
