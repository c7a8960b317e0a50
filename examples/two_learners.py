"""Two learners on one buffer, by priority, beside collectors, with a rate limiter and an evaluator that draws slices.

    python examples/two_learners.py [--rows 20000]

The task is a toy on purpose: what to look at is who does what. Four numpy-only collectors put steps of eight environments each;
two learners draw by priority and write priorities back, at the same time; the evaluator checks slices of eight consecutive steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import numpy as np

NAME, ENVIRONMENTS, BATCH, SLICE = "two_learners", 8, 256, 8


def collect(who: int, rows: int) -> None:
    from shmbuf import Buffer  # no torch in this process

    buf, rng = Buffer.attach(NAME, timeout=60), np.random.default_rng(who)
    step = np.zeros(ENVIRONMENTS, np.int64)
    streams = np.arange(ENVIRONMENTS)  # whose next step each row is
    for _ in range(rows // ENVIRONMENTS):
        done = rng.random(ENVIRONMENTS) < 0.02
        obs = rng.standard_normal((ENVIRONMENTS, 4)).astype(np.float32)
        rows_ = {"obs": obs, "target": obs.sum(axis=1), "step": step, "next": {"done": done}}
        buf.put(rows_, stream=streams)
        step = np.where(done, 0, step + 1)
    buf.close()


def learn(who: int, steps: int) -> None:
    import torch

    import shmbuf

    torch.set_num_threads(1)
    rb = shmbuf.attach(
        NAME, timeout=60, seed=who
    )  # draws by priority, as the buffer was made; its beta is this handle's own
    beta = shmbuf.LinearScheduler(rb, "beta", final_value=1.0, num_steps=steps)
    model = torch.nn.Linear(4, 1)
    optimiser = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(steps):
        batch = rb.sample(timeout=60)  # waits for rows, and for the limiter
        error = model(batch["obs"]).squeeze(-1) - batch["target"]
        optimiser.zero_grad()
        (batch["priority_weight"] * error**2).mean().backward()
        optimiser.step()
        batch["td_error"] = error.detach().abs()
        rb.update_tensordict_priority(batch)
        beta.step()
    print(f"learner {who}: error {error.abs().mean():.3f}, beta {rb.sampler.beta:.2f}", flush=True)
    rb.close()


def evaluate(slices: int) -> None:
    from shmbuf import Buffer

    buf, seen = Buffer.attach(NAME, timeout=60), 0
    while seen < slices:
        rows, _, lens = buf.draw_slices(16, SLICE, timeout=60)  # [16 * SLICE] rows; lens: all SLICE, for it is strict
        steps = rows["step"].reshape(-1, SLICE)
        assert (np.diff(steps, axis=1) == 1).all(), "a slice is consecutive steps of one episode"
        seen += len(lens)
    print(f"evaluator: {seen} slices of {SLICE} steps, each of one episode", flush=True)
    buf.close()


def main(rows: int) -> None:
    from shmbuf import PrioritizedSampler, RateLimiter, ShmStorage, TensorDictReplayBuffer, destroy

    steps = rows * 7 // 4 // BATCH  # of each learner: a little less than the limiter would let them make of these rows
    rb = TensorDictReplayBuffer(
        # A small ring: with a limiter, what waits in the rings is how far collectors run ahead.
        storage=ShmStorage(100_000, name=NAME, exists="replace", ring_bytes=1 << 14),
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4),
        batch_size=BATCH,
        priority_key="td_error",
        limiter=RateLimiter(samples_per_insert=4.0, min_size=1000),
    )
    spawn, began = multiprocessing.get_context("spawn"), time.monotonic()
    collectors = [spawn.Process(target=collect, args=(i, rows // 4)) for i in range(4)]
    readers = [spawn.Process(target=learn, args=(i, steps)) for i in range(2)] + [
        spawn.Process(target=evaluate, args=(64,))
    ]
    for p in [*collectors, *readers]:
        p.start()
    for p in readers:
        p.join()
    sampled = rb.stats()["limiter"]["sampled"]
    rb.set_limiter(None)  # nobody samples any more: the collectors would wait for ever
    for p in collectors:
        p.join()
    s = rb.stats()
    print(
        f"{s['write_count']:,} rows in, {sampled:,} out in {time.monotonic() - began:.1f} s; "
        f"{s['priorities_set']:,} priorities set, {s['priorities_stale']:,} came too late for their row"
    )
    rb.close()
    destroy(NAME, force=True)
    if any(p.exitcode for p in [*collectors, *readers]):
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="that the collectors put in all")
    main(parser.parse_args().rows)
