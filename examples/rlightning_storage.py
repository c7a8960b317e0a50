"""rlightning's Storage in shared memory: two processes add steps of many environments, the learner samples slices of their episodes.

    python examples/rlightning_storage.py [--steps 200]

A toy task: each of 64 environments counts up and ends at a random step. Who adds needs no actor and no call to another process;
who samples attaches by name. Episodes are visible when they are complete, each environment's by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing

import numpy as np
import torch

import shmbuf
from shmbuf.rlightning import EnvMeta, EnvRet, EpisodeTable, PolicyResponse, Storage

NAME, WORKERS, ENVIRONMENTS, SLICE = "rlightning_storage", 2, 64, 8


def work(env_id: str, steps: int) -> None:
    storage = Storage.attach(NAME, env_meta_list=[EnvMeta(env_id, num_envs=ENVIRONMENTS)], timeout=60)
    rng, state, done = (
        np.random.default_rng(len(env_id)),
        np.zeros(ENVIRONMENTS, np.float32),
        np.zeros(ENVIRONMENTS, bool),
    )
    reward = np.zeros(ENVIRONMENTS, np.float32)
    for _ in range(steps):
        env_ret = EnvRet(
            env_id, {"state": state}, last_reward=reward, last_terminated=done, last_truncated=np.zeros_like(done)
        )
        response = PolicyResponse(env_id, action=torch.randn(ENVIRONMENTS, 2))
        storage.add_transition(env_ret, response)  # one copy of the step; episodes that ended are stored
        state = np.where(done, 0, state + 1).astype(np.float32)  # after its end an environment begins anew
        done = rng.random(ENVIRONMENTS) < 0.02
    storage.truncate_one_episode(env_id)  # what is still running
    storage.close()


def main(steps: int) -> None:
    storage = Storage(100_000, "circular", "episode", auto_truncate_episode=True, name=NAME, exists="replace")
    table = EpisodeTable(1, [f"worker-{i}" for i in range(WORKERS)])
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(env_id, steps)) for env_id in table.get_envs_for_storage(0)]
    for p in workers:
        p.start()
    learner = shmbuf.attach(NAME, sampler=shmbuf.SliceSampler(slice_len=SLICE), batch_size=32 * SLICE)
    learner.wait_rows(1000, timeout=120)
    for _ in range(100):  # beside those who add
        slices = learner.sample(timeout=60).reshape(32, SLICE)
        state = slices["observation", "state"]
        assert (state.diff(dim=1) == 1).all(), "a slice is consecutive steps of one episode"
    for p in workers:
        p.join()
    lengths = [len(episode) for episode in storage.get_data()]
    print(
        f"{len(storage):,} episodes of {min(lengths)} to {max(lengths)} rows, {len(learner):,} rows in all; "
        f"the longest ends at {storage[int(np.argmax(lengths))]['next_observation']['state'][-1]:.0f}"
    )
    learner.close()
    storage.close()
    shmbuf.destroy(NAME, force=True)
    if any(p.exitcode for p in workers):
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each process")
    main(parser.parse_args().steps)
