"""The process of one case: `python -m tools.bench.case SPEC`."""

from __future__ import annotations

import importlib
import json
import sys

from .isolate import Emitter
from .settings import Settings

KINDS = {
    "ingest": "tools.bench.ingest",
    "sample": "tools.bench.sampling",
    "beside": "tools.bench.beside",
    "prio": "tools.bench.priorities",
    "learners": "tools.bench.priorities",
    "updaters": "tools.bench.priorities",
    "slices": "tools.bench.slices",
    "face": "tools.bench.face",
    "cliffs": "tools.bench.cliffs",
    "query": "tools.bench.query",
    "checkpoints": "tools.bench.checkpoints",
    "rlightning": "tools.bench.rlightning",
    "ray": "tools.bench.ray_nodes",
    "kills": "tools.bench.kills",
    "memory": "tools.bench.memory",
    "memcpy": "tools.bench.machine",
}


def main() -> None:
    spec = json.loads(sys.argv[1])
    settings = Settings.from_dict(spec["settings"])
    # Imported late: a spawned child loads this module again and must not pay for all of them.
    module = importlib.import_module(KINDS[spec["kind"]])
    module.run(spec, settings, Emitter(spec["scratch"]))


if __name__ == "__main__":
    main()
