"""DQN over two Ray nodes: collectors on each, one learner, one replay buffer with a shard in the shared memory of each node.

    python examples/ray_two_nodes.py [--updates 2000] [--seed 0]

The nodes are local ones, of a cluster that this script starts; on real machines `ray.init("auto")` takes its place. A collector writes
to its own node's shard without a call to anybody; the learner draws by priority out of both, ahead of time, and sends priorities back.
Stops when the greedy policy has learnt to stay near the middle, and then exits with 0; or after so many updates, with 1.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from shmbuf import PrioritizedSampler, RateLimiter, ShardedReplayBuffer, ShmStorage

NAME, ENVIRONMENTS, STEPS, BATCH, GAMMA, GOOD = "ray_two_nodes", 32, 40, 256, 0.9, 0.85


class Walks:
    """Many pushed carts on a line: state (position, speed), actions push left, none, right; reward 1 - |position|; 40 steps."""

    def __init__(self, n: int, seed: int):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.reset()

    def reset(self) -> None:
        self.state = np.stack([self.rng.uniform(-1, 1, self.n), np.zeros(self.n)], 1).astype(np.float32)
        self.t = 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """The next state, the reward, and whether all walks are over (then they begin anew)."""
        speed = 0.9 * self.state[:, 1] + 0.05 * (action - 1) + self.rng.normal(0, 0.01, self.n)
        position = np.clip(self.state[:, 0] + speed, -1, 1)
        self.state = np.stack([position, speed], 1).astype(np.float32)
        after, reward, self.t = self.state, (1 - np.abs(position)).astype(np.float32), self.t + 1
        over = self.t == STEPS
        if over:
            self.reset()
        return after, reward, over


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


def mean_return(net: torch.nn.Module, seed: int) -> float:
    """Of the greedy policy, per step."""
    walks, rewards = Walks(200, seed), []
    with torch.no_grad():
        for _ in range(STEPS):
            rewards.append(walks.step(net(torch.from_numpy(walks.state)).argmax(1).numpy())[1].mean())
    return float(np.mean(rewards))


@ray.remote(num_cpus=0, max_concurrency=2)
class Collector:
    """Acts nearly greedily by the newest policy it was sent, and puts every step of its environments into the buffer."""

    def __init__(self, rb: ShardedReplayBuffer, seed: int):
        torch.set_num_threads(1)
        self.rb, self.net, self.walks, self.rng = rb, network(), Walks(ENVIRONMENTS, seed), np.random.default_rng(seed)
        self.running = True

    def ready(self) -> bool:
        return self.running

    def policy(self, weights: dict) -> None:
        self.net.load_state_dict(weights)

    def stop(self) -> None:
        self.running = False

    def collect(self) -> str:
        streams = torch.arange(ENVIRONMENTS)  # whose next step each row is
        while self.running:
            state = torch.from_numpy(self.walks.state)
            with torch.no_grad():
                action = self.net(state).argmax(1).numpy()
            action = np.where(self.rng.random(ENVIRONMENTS) < 0.2, self.rng.integers(0, 3, ENVIRONMENTS), action)
            after, reward, over = self.walks.step(action)
            rows = {"state": state, "action": torch.from_numpy(action), "reward": torch.from_numpy(reward)}
            following = {"state": torch.from_numpy(after), "done": torch.full((ENVIRONMENTS, 1), over)}
            # The limiter holds collectors back while the learner is behind.
            self.rb.put(TensorDict({**rows, "next": following}, [ENVIRONMENTS]), stream=streams, timeout=60)
        return next(s["segment"] for s in self.rb.shards() if s["local"])


def main(updates: int, seed: int) -> int:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    nodes = [n["NodeID"] for n in ray.nodes()]
    try:
        rb = ShardedReplayBuffer(
            storage=ShmStorage(20_000, name=NAME, ring_bytes=1 << 16),  # of each node
            sampler=PrioritizedSampler(alpha=0.6, beta=0.5),
            batch_size=BATCH,
            prefetch=3,  # batches on their way while the learner computes
            limiter=RateLimiter(samples_per_insert=8.0, min_size=2_000, max_batch=4 * BATCH),  # over both nodes
        )
        collectors = [
            Collector.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)).remote(rb, seed + i)
            for i, n in enumerate(nodes)
        ]
        ray.get([c.ready.remote() for c in collectors])  # so that both nodes are there from the first batch on
        working = [c.collect.remote() for c in collectors]
        net, slow = network(), network()
        slow.load_state_dict(net.state_dict())
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        before, after, began = mean_return(net, 99), 0.0, time.monotonic()
        drawn = dict.fromkeys(range(len(nodes)), 0)
        for update in range(1, updates + 1):
            batch = rb.sample(timeout=60)
            with torch.no_grad():
                best = net(batch["next", "state"]).argmax(1, keepdim=True)  # double DQN
                # The walk is cut after so many steps, not over: the value goes on.
                target = batch["reward"] + GAMMA * slow(batch["next", "state"]).gather(1, best).squeeze(1)
            error = net(batch["state"]).gather(1, batch["action"][:, None]).squeeze(1) - target
            optimiser.zero_grad()
            (
                batch["priority_weight"]
                * torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
            ).mean().backward()
            optimiser.step()
            rb.update_tensordict_priority(batch.set("td_error", error.detach().abs()))  # by (shard, row_id)
            for k in drawn:
                drawn[k] += int((batch["shard"] == k).sum())
            if update % 10 == 0:
                slow.load_state_dict(net.state_dict())
                weights = ray.put(net.state_dict())
                for c in collectors:
                    c.policy.remote(weights)
            if update % 100 == 0 and (after := mean_return(net, 99)) > GOOD:
                break
        took = time.monotonic() - began
        stats = rb.stats()
        rb.set_limiter(None)  # nobody samples any more: collectors would wait for ever
        for c in collectors:
            c.stop.remote()
        print(f"nodes           {len(nodes)}, shards {', '.join(sorted(ray.get(working)))}")
        print(
            f"rows inserted   {stats['limiter']['inserted']:,}, sampled {stats['limiter']['sampled']:,}, {update / took:.0f} updates/s"
        )
        print(f"rows drawn      {', '.join(f'{n:,} of shard {k}' for k, n in drawn.items())}")
        print(f"reward a step   {before:.2f} before, {after:.2f} after")
        rb.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0 if after > GOOD else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(main(args.updates, args.seed))
