"""From figures to the lines of the table: ours, the peers', the ratio, the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .peers import NAMES, OURS, OURS_NUMPY
from .plan import (
    ACTOR,
    ALONE,
    APART,
    BESIDE,
    BURNING,
    CALL,
    COPYING,
    FILLS,
    KILLED,
    PRIORITISED,
    RAY_FACES,
    READERS,
    SAMPLERS,
    SHARED,
    SIZES,
    SLICED,
    UPDATED,
    UPDATING,
    WRITING,
)
from .results import Results
from .rows import ROWS
from .settings import Settings

PEERS = tuple(n for n in NAMES if n not in (OURS, OURS_NUMPY))
SAMPLING_PEERS = tuple(n for n in SAMPLERS if n not in (OURS, "index_select"))


@dataclass
class Goal:
    text: str
    value: float | None
    unit: str = "x"
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass
class Line:
    what: str
    unit: str
    ours: float | None
    peers: dict[str, float | None] = field(default_factory=dict)
    goal: Goal | None = None
    more_is_better: bool = True
    us: str = OURS
    errors: str = ""
    """Where in the results the reasons for missing figures are: `kind/row`."""
    compared: bool = True
    """Whether a ratio makes sense."""

    @property
    def ranked(self) -> list[tuple[str, float | None]]:
        """Best first, those without a figure last."""
        sign = -1 if self.more_is_better else 1
        return sorted(self.peers.items(), key=lambda p: (p[1] is None, sign * (p[1] or 0)))

    @property
    def ratio(self) -> float | None:
        return over(self.ours, self.ranked[0][1]) if self.ranked and self.compared else None


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def lines(results: Results, settings: Settings) -> list[Line]:
    every = (_ingest, _sample, _beside, _prioritised, _slices, _face, _cliffs, _rlightning, _ray, _kills, _memory)
    found = [line for group in every for line in group(results, settings)]
    return [line for line in found if line.ours is not None or line.peers]


def _ingest(results: Results, settings: Settings) -> Iterator[Line]:
    memcpy = max(results.values.get("memcpy", [0])) or None
    for row in ROWS.values():
        for batch in settings.batches:
            two = results.get(f"ingest/{row.name}/{batch}/2/{OURS}")
            for count in settings.producers:
                prefix = f"ingest/{row.name}/{batch}/{count}"
                ours, others = results.get(f"{prefix}/{OURS}"), results.peers(prefix, PEERS)
                goal = None
                if count > 2:
                    goal = Goal("≥ 0.8 x 2 producers", over(ours, two), "x 2 producers", least=0.8)
                elif count == 2 and row.name == "mujoco":
                    least = 4 if batch == 1 else 3
                    ratio = over(ours, others.get("cpprb"))
                    goal = Goal(f"≥ {least} x cpprb", ratio, "x cpprb", least=least)
                elif count == 2:
                    share = over(ours and ours * row.nbytes, memcpy)
                    # The target speaks of rows in batches; for single rows the share is shown.
                    least, text = (0.4, "≥ 0.4 x memcpy") if batch > 1 else (None, "")
                    goal = Goal(text, share, "x memcpy", least=least)
                what = f"ingest {row.name}, {batch}-row, {_count(count, 'producer')}"
                place = f"ingest/{row.name}"
                yield Line(what, "rows/s", ours, others, goal, errors=place)
                numpy = Line(f"{what}, from numpy", "rows/s", results.get(f"{prefix}/{OURS_NUMPY}"))
                numpy.us, numpy.errors = OURS_NUMPY, place
                numpy.peers = {name: value for name, value in others.items() if value is not None}
                yield numpy


def _sample(results: Results, settings: Settings) -> Iterator[Line]:
    for row in ROWS.values():
        prefix = f"sample/{row.name}"
        ours, in_place = (results.get(f"{prefix}/{n}") for n in (OURS, "shmbuf out="))
        bare, bare_out = (results.get(f"{prefix}/index_select{end}") for end in ("", " out="))
        others = results.peers(prefix, SAMPLING_PEERS)
        what = f"sample({settings.batch_size}) {row.name}, {settings.capacity(row):,} rows"
        common = {"more_is_better": False, "errors": prefix}
        best = Line(what, "s", ours, others, **common)
        best.goal = Goal("≤ 0.5 x fastest peer", best.ratio, "x fastest", most=0.5)
        yield best
        most = 1.0 if row.name == "mujoco" else 1.2
        goal = Goal(f"≤ {most} x index_select", over(ours, bare), "x index_select", most=most)
        yield _limit(f"{what}, the limit", ours, "torch.index_select", bare, goal, common)
        yield _limit(f"{what}, out=", in_place, "torch.index_select out=", bare_out, None, common)


def _limit(what, ours, name, value, goal, common) -> Line:
    return Line(what, "s", ours, {name: value} if value is not None else {}, goal, **common)


def _beside(results: Results, settings: Settings) -> Iterator[Line]:
    rivals = tuple(n for n in SHARED if n != OURS)
    company = {ALONE: "nobody", WRITING: "2 collectors", BURNING: "2 Python loops", COPYING: "2 private copies"}
    for row, batch in BESIDE:
        prefix, place = f"beside/{row}/{batch}", f"beside/{row}"

        def line(what: str, figure: str, unit: str, goal: Goal | None, prefix=prefix, place=place) -> Line:
            ours, others = results.get(f"{prefix}/{figure}/{OURS}"), results.peers(f"{prefix}/{figure}", rivals)
            return Line(what, unit, ours, others, goal, more_is_better=unit != "s", errors=place)

        def explained(figure: str, prefix=prefix) -> float | None:
            """Beside collectors, over beside two processes that take as much CPU and copy as many bytes."""
            return over(*(results.get(f"{prefix}/{figure}{phase}/{OURS}") for phase in (WRITING, COPYING)))

        for phase, who in company.items():
            goal = Goal("≥ 0.9 x private copies", explained(""), "x private copies", least=0.9)
            yield line(
                f"sampling beside {who}, {row}, {batch}-row", phase, "samples/s", goal if phase == WRITING else None
            )
        for phase in (ALONE, WRITING, COPYING):
            goal = Goal("≤ 1.1 x private copies", explained("cpu "), "x private copies", most=1.1)
            what = f"CPU of one sample beside {company[phase]}, {row}, {batch}-row"
            yield line(what, f"cpu {phase}", "s", goal if phase == WRITING else None)
        yield line(f"rows written beside the sampler, {row}, {batch}-row", "written", "rows/s", None)


def _prioritised(results: Results, settings: Settings) -> Iterator[Line]:
    row, batch = ROWS["mujoco"], settings.batch_size
    place, common = f"prio/{row.name}", {"more_is_better": False}
    ours = results.get(f"{place}/{OURS}")
    best = Line(
        f"prioritised sample({batch}) + update, {settings.capacity(row):,} rows",
        "s",
        ours,
        results.peers(place, PRIORITISED[1:]),
        errors=place,
        **common,
    )
    best.goal = Goal("≤ 0.5 x fastest peer", best.ratio, "x fastest", most=0.5)
    yield best
    uniform = results.get(f"{place}/uniform")
    goal = Goal("≤ 2.5 x our uniform sample", over(ours, uniform), "x uniform", most=2.5)
    against = {"shmbuf uniform": uniform} if uniform is not None else {}
    yield Line("the same, against uniform", "s", ours, against, goal, errors=place, **common)
    yield Line("of that the sample", "s", results.get(f"{place}/sample"), {}, None, errors=place, **common)
    for part in ("draw", "update"):
        took = results.get(f"{place}/tree {part}")
        goal = Goal("≤ 40 µs", took and took * 1e6, "µs", most=40)
        yield Line(f"the tree alone: {batch} {part}s", "s", took, {}, goal, errors=place, **common)

    rates = {n: results.get(f"learners/{row.name}/{n}/{OURS}") for n in (1, 2, 4)}
    for n, least in ((1, None), (2, 1.6), (4, 0.9)):
        half = _count(n // 2, "learner")
        goal = Goal(f"≥ {least} x {half}", over(rates[n], rates[n // 2]), f"x {half}", least=least) if least else None
        yield Line(
            f"sample + update, {_count(n, 'learner')}", "calls/s", rates[n], {}, goal, errors=f"learners/{row.name}"
        )
    apart = results.get(f"learners/{row.name}/{APART}/{OURS}")
    explained = Goal("", over(apart, rates[1]), "x 1 learner")
    what = "sample + update, 2 learners, each with a buffer of its own"
    yield Line(what, "calls/s", apart, {}, explained, errors=f"learners/{row.name}")

    place = f"updaters/{row.name}"
    updates = results.get(f"{place}/updates/{OURS}")
    goal = Goal("≥ 3 M/s", updates and updates / 1e6, "M/s", least=3)
    yield Line(f"priority updates, 2 processes, random {batch}", "updates/s", updates, {}, goal, errors=place)
    rates = {phase: results.get(f"{place}/{phase}/{OURS}") for phase in (ALONE, UPDATING, BURNING)}
    goal = Goal("≥ 0.9 x beside Python loops", over(rates[UPDATING], rates[BURNING]), "x Python loops", least=0.9)
    for phase, who in ((ALONE, "nobody"), (UPDATING, "2 updaters"), (BURNING, "2 Python loops")):
        what = f"ingest {row.name}, 64-row, 1 producer beside {who}"
        yield Line(what, "rows/s", rates[phase], {}, goal if phase == UPDATING else None, errors=place)


def _slices(results: Results, settings: Settings) -> Iterator[Line]:
    small = f"slices/{SIZES[0]}"
    for end in ("", " prioritised"):
        for size in SIZES:
            place = f"slices/{size}"
            ours = results.get(f"{place}/{OURS}{end}")
            others = results.peers(
                place, tuple(n for n in SLICED if n.startswith("torchrl") and n.endswith("prioritised") == bool(end))
            )
            uncached = others.get(f"torchrl{end}")
            goal = Goal("≤ 0.1 x uncached", over(ours, uncached), "x uncached", most=0.1)
            what = f"slices 64 x 32{end}, {size:,} rows"
            yield Line(what, "s", ours, others, goal, more_is_better=False, errors=place)
        large = over(results.get(f"slices/{SIZES[-1]}/{OURS}{end}"), results.get(f"{small}/{OURS}{end}"))
        if large is not None:
            goal = Goal("flat", large, f"x {SIZES[0]:,} rows")
            yield Line(
                f"slices 64 x 32{end}, from {SIZES[0]:,} to {SIZES[-1]:,} rows",
                "x",
                large,
                {},
                goal,
                more_is_better=False,
                errors=small,
            )


def _face(results: Results, settings: Settings) -> Iterator[Line]:
    for call, what, most in (
        ("extend", "extend of 1 row through one transform", 0.25),
        ("set_at", f"set_at_ of 256 rows, {_million(settings)}", 0.5),
    ):
        place = f"face/{call}"
        line = Line(what, "s", results.get(f"{place}/{OURS}"), results.peers(place, ("torchrl",)), errors=place)
        line.more_is_better = False
        line.goal = Goal(f"≤ {most} x TorchRL", line.ratio, "x TorchRL", most=most)
        yield line
    for query, what in (
        ("length", "length > 1000"),
        ("none", "reward.sum() > x, none match"),
        ("half", "the same, half match"),
        ("all", "all"),
    ):
        place = f"query/1000000/{query}"
        line = Line(
            f"query of {1_000 * settings.fill:,.0f} trajectories, {_million(settings)}: {what}",
            "s",
            results.get(f"{place}/{OURS}"),
            results.peers(place, ("torchrl",)),
        )
        line.more_is_better, line.errors = False, "query/1000000"
        line.goal = Goal("≤ 0.2 x TorchRL", line.ratio, "x TorchRL", most=0.2) if query == "none" else None
        yield line
    for call in ("dumps", "loads"):
        place = f"checkpoints/{call}"
        line = Line(
            f"{call} with priorities, {_million(settings)}",
            "s",
            results.get(f"{place}/{OURS}"),
            results.peers(place, ("torchrl",)),
        )
        line.more_is_better, line.errors = False, "checkpoints"
        line.goal = Goal("≤ 0.2 x TorchRL", line.ratio, "x TorchRL", most=0.2)
        yield line
    plain, ours = results.get("checkpoints/plain"), results.get(f"checkpoints/dumps/{OURS}")
    goal = Goal("≥ 0.7 x the disk's speed", over(plain, ours), "x a plain write", least=0.7)
    yield Line(
        "dumps, against writing as many bytes",
        "s",
        ours,
        {"write + fsync": plain} if plain else {},
        goal,
        more_is_better=False,
        errors="checkpoints",
    )


def _cliffs(results: Results, settings: Settings) -> Iterator[Line]:
    place, common = "cliffs/keys", {"more_is_better": False, "errors": "cliffs/keys"}
    for keys in (1, 500):
        for what, most, us in (
            ("attach", 50e3 if keys > 1 else None, "≤ 50 ms"),
            ("put", 20 if keys == 1 else None, "≤ 20 µs"),
            ("sample", None, ""),
        ):
            took = results.get(f"{place}/{keys}/{what}")
            goal = Goal(us, took and took * 1e6, "µs", most=most) if most else None
            yield Line(f"{what}, numpy, {_count(keys, 'key')}", "s", took, {}, goal, **common)
    rates = {n: results.get(f"cliffs/readers/{n}") for n in READERS}
    for n in READERS:
        goal = Goal("as the cores allow", over(rates[n], rates[1]), "x 1 reader") if n > 1 else None
        yield Line(
            f"samples of 256 rows of 4 KiB, {_count(n, 'reader')}",
            "samples/s",
            rates[n],
            {},
            goal,
            errors="cliffs/readers",
        )
    few = results.get(f"cliffs/updates/{UPDATED[0]}")
    for rows in UPDATED:
        took = results.get(f"cliffs/updates/{rows}")
        goal = Goal(f"≤ 4 x of {UPDATED[0]:,}", over(took, few), most=4) if rows > UPDATED[0] else None
        yield Line(
            f"256 priorities of {rows:,} rows, numpy",
            "s",
            took,
            {},
            goal,
            more_is_better=False,
            errors="cliffs/updates",
        )
    few = results.get("cliffs/slices/{}/{}".format(*FILLS[0]))
    for rows, capacity in FILLS:
        place = f"cliffs/slices/{rows}/{capacity}"
        took = results.get(place)
        goal = Goal(f"≤ 3 x of {FILLS[0][0]:,}", over(took, few), most=3) if (rows, capacity) != FILLS[0] else None
        what = f"256 slices of 4 of {rows:,} rows, room for {capacity:,}"
        yield Line(what, "s", took, {}, goal, more_is_better=False, errors=place)
    for what in ("update", "sample"):
        longest = results.get(f"cliffs/pauses/{what} longest")
        goal = Goal("≤ 20 ms", longest and longest * 1e3, "ms", most=20)
        yield Line(
            f"longest {what} of 256 priorities, 10 M updates",
            "s",
            longest,
            {},
            goal,
            more_is_better=False,
            errors="cliffs/pauses",
        )
        growth = results.get(f"cliffs/pauses/{what} growth")
        yield Line(
            f"the last tenth of them, {what}s, against the first",
            "x",
            growth,
            {},
            None,
            more_is_better=False,
            errors="cliffs/pauses",
        )


def _rlightning(results: Results, settings: Settings) -> Iterator[Line]:
    common = {"more_is_better": False, "errors": "rlightning"}
    call = results.peers("rlightning/step", (CALL,))
    for figure, what in (
        ("step", "rlightning: add a step of 4,096 environments"),
        ("rollout", "the same, with its share of storing 24 steps"),
        ("auto", "the same, episodes that end one by one"),
    ):
        yield Line(what, "s", results.get(f"rlightning/{figure}/{OURS}"), call, None, **common)
    rows = results.get(f"rlightning/rows/{OURS}")
    yield Line("rlightning: rows of 464 bytes out of such steps", "rows/s", rows, {}, None, errors="rlightning")


def _ray(results: Results, settings: Settings) -> Iterator[Line]:
    common = {"more_is_better": False, "errors": "ray/sample"}
    local, torchrl = (results.peers("ray/sample", names) for names in (("local",), ("torchrl", "torchrl ahead")))
    ours = {who: results.get(f"ray/sample/{who}") for who in RAY_FACES}
    near = Goal("≤ 2 x local", over(ours[OURS], local.get("local")), "x local", most=2.0)
    yield Line("Ray: sample(256), the buffer's node", "s", ours[OURS], local, near, **common)
    yield Line("Ray: sample(256) across nodes", "s", ours["shmbuf across"], torchrl, None, **common)
    ahead = ours["shmbuf across, ahead"]
    best = min((t for t in torchrl.values() if t is not None), default=None)
    far = Goal("≥ 2 x torchrl's rate", over(best, ahead), "x torchrl", least=2.0)
    yield Line("the same, three batches ahead", "s", ahead, torchrl, far, **common)
    yield Line("Ray: sample(256) out of two shards", "s", ours["shmbuf shards"], torchrl, None, **common)
    yield Line("the same, three batches ahead", "s", ours["shmbuf shards ahead"], torchrl, None, **common)
    step, call = results.get(f"ray/step/{OURS}"), results.peers("ray/step", (ACTOR,))
    times = over(call.get(ACTOR), step)
    goal = Goal("≥ 20 x an actor call", times, "x an actor call", least=20.0)
    yield Line("Ray: add a step of 4,096 environments", "s", step, call, goal, more_is_better=False, errors="ray/step")


def _kills(results: Results, settings: Settings) -> Iterator[Line]:
    place = "kills/atari"
    what = f"kill a collector, then read, {settings.kills} times"
    counted = (
        ("hung", f"{what}: hangs"),
        ("learner", "of these the learner"),
        ("collector", "of these the other collector"),
        ("torn", f"{what}: torn rows"),
        ("raised", f"{what}: errors"),
    )
    for outcome, text in counted:
        ours, others = results.get(f"{place}/{outcome}/{OURS}"), results.peers(f"{place}/{outcome}", KILLED[1:])
        goal = None if text.startswith("of these") else Goal("0", ours, f"of {settings.kills}", most=0)
        yield Line(text, "", ours, others, goal, more_is_better=False, errors=place, compared=False)


def _memory(results: Results, settings: Settings) -> Iterator[Line]:
    for row in ROWS.values():
        place, common = f"memory/{row.name}", {"more_is_better": False}
        beyond = results.get(f"{place}/beyond rows")
        most = 48 + 1e6 / settings.capacity(row)
        goal = Goal("≤ 48 B a row + 1 MB", beyond, "B", most=most)
        text = f"segment beyond its rows, {row.name}, {settings.capacity(row):,} rows"
        yield Line(text, "B/row", beyond, {}, goal, errors=place, **common)
        if row.name == "mujoco":
            count = results.get(f"{place}/descriptors")
            goal = Goal("≤ 3", count, "", most=3)
            yield Line("descriptors per handle", "", count, {}, goal, errors=place, **common)
            # A memory-mapped storage is file pages: its figure would be that of the buffer.
            names = tuple(n for n in PEERS if n != "torchrl memmap")
            rivals = {n: results.get(f"collector/{row.name}/{n}") for n in names}
            rivals = {name: value for name, value in rivals.items() if value is not None}
            rivals["numpy alone"] = results.get(f"{place}/numpy")
            if rivals["numpy alone"] is None:
                del rivals["numpy alone"]
            held = results.get(f"{place}/collector")
            goal = Goal("≤ 40 MB", held, "MB", most=40)
            text = "memory of a collector, anonymous + file pages"
            yield Line(text, "MB", held, rivals, goal, errors=place, **common)


def _million(settings: Settings) -> str:
    return f"{settings.fill:g} M rows"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
