"""Which cases there are, in the order they run: peers of one kind right after each other."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

from . import peers
from .settings import Settings

# Those whose buffer a learner can sample while others write.
SHARED = (peers.OURS, "cpprb", "torchrl")
# With torch not imported here: the names of samplers.NAMES, ours first.
SAMPLERS = (
    peers.OURS,
    "index_select",
    "torchrl",
    "torchrl memmap",
    "cpprb",
    "tianshou",
    "sb3",
)
# Those that draw by priority and update; the names of priorities._PEERS, ours first. Those that draw slices, and out of how many rows.
PRIORITISED = (peers.OURS, "torchrl", "cpprb", "tianshou")
SLICED = (
    peers.OURS,
    f"{peers.OURS} prioritised",
    "torchrl",
    "torchrl cached",
    "torchrl prioritised",
)
SIZES = (10_000, 1_000_000, 10_000_000)
# What the sampler has beside it, and the rows and records of those who write.
ALONE, WRITING, BURNING, COPYING, APART = "alone", "writing", "burning", "copying", "apart"
UPDATING = "updating"
# Who loses a collector, and what a round of that can come to.
CPPRB_PRIORITISED = "cpprb prioritised"
KILLED = (peers.OURS, "cpprb", CPPRB_PRIORITISED, "faster-fifo", "torchrl")
KILL_OUTCOMES = ("hung", "learner", "collector", "unseen", "torn", "raised", "fine")
# Calls of the face that are timed beside TorchRL's; where buffers fall off a cliff, and how many read at once.
FACE_CALLS = ("extend", "set_at")
FACES = (peers.OURS, "torchrl")
CLIFFS = ("keys", "readers", "pauses", "updates", "slices")
READERS = (1, 2, 4, 8)
# Beside rlightning's storage: a call of another process, as an actor's is one.
CALL = "call of a process"
# Over two Ray nodes, ours first: on the buffer's node, across nodes, out of two shards; beside an actor that is called for each step.
RAY_FACES = (
    *(peers.OURS, "local", "shmbuf across", "shmbuf across, ahead", "shmbuf shards", "shmbuf shards ahead"),
    *("torchrl", "torchrl ahead"),
)
ACTOR = "Ray actor call"
UPDATED = (10_000, 100_000, 1_000_000)
# Rows stored and capacity: 10 million rows with ten times the room would take all of a small machine.
FILLS = (
    (100_000, 100_000),
    (100_000, 1_000_000),
    (1_000_000, 1_000_000),
    (1_000_000, 10_000_000),
    (10_000_000, 10_000_000),
)
CONTENDERS = {
    "sample": SAMPLERS,
    "prio": PRIORITISED,
    "slices": SLICED,
    "face": FACES,
    "query": FACES,
    "checkpoints": FACES,
}
BESIDE = (("mujoco", 1), ("mujoco", 64), ("atari", 64))


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    row: str = ""
    contender: str = ""
    batch: int = 0

    def spec(self, settings: Settings) -> dict:
        return {
            "kind": self.kind,
            "row": self.row,
            "contender": self.contender,
            "contenders": list(CONTENDERS.get(self.kind, ())),
            "batch": self.batch,
            "settings": settings.as_dict(),
        }


def cases(only: list[str]) -> list[Case]:
    """All of them, or those that a pattern or part of a name in `only` picks."""
    every = [Case("memcpy/before", "memcpy")]
    for row in ("mujoco", "atari"):
        every += [Case(f"ingest/{row}/{n}", "ingest", row, n) for n in peers.NAMES]
    every += [Case(f"sample/{row}", "sample", row) for row in ("mujoco", "atari")]
    for row, batch in BESIDE:
        every += [Case(f"beside/{row}/{batch}/{n}", "beside", row, n, batch) for n in SHARED]
    every += [Case(f"{kind}/mujoco", kind, "mujoco") for kind in ("prio", "learners", "updaters")]
    every += [Case(f"slices/{size}", "slices", str(size)) for size in SIZES]
    every += [Case("face", "face"), Case("query/1000000", "query", "1000000"), Case("checkpoints", "checkpoints")]
    every += [Case(f"cliffs/{c}", "cliffs", c) for c in CLIFFS]
    every += [Case("rlightning", "rlightning"), Case("ray", "ray")]
    every += [Case(f"kills/atari/{n}", "kills", "atari", n) for n in KILLED]
    every += [Case(f"memory/{row}", "memory", row) for row in ("mujoco", "atari")]
    every += [Case("memcpy/after", "memcpy")]
    if not only:
        return every
    return [
        case for case in every if case.kind == "memcpy" or any(o in case.name or fnmatch(case.name, o) for o in only)
    ]
