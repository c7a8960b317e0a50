"""`shminfo metrics`: the figures for Prometheus, printed or served."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shmbuf import segment
from shmbuf.cli import looking
from shmbuf.cli.looking import ERRORS, Info, look, not_found
from shmbuf.cli.watching import edges
from shmbuf.errors import BufferNotFound
from shmbuf.printing import print_json, printable

WAITS = ("rows", "schema", "room", "commit", "limiter")
# name (counters get _total), help, where in what `look` tells
COUNTERS = (
    ("put_rows", "Rows put into rings.", "put_rows"),
    ("stored_rows", "Rows stored, overwritten ones included.", "rows_total"),
    ("sampled_rows", "Rows sampled by all processes.", "sampled_rows"),
    ("sampled_batches", "Batches sampled by all processes.", "sampled_batches"),
    ("dropped_rows", "Rows dropped by full=drop_newest.", "dropped_rows"),
    ("skipped_rows", "Rows dropped by full=drop_oldest.", "skipped_rows"),
    ("refused_rows", "Rows refused because a ring was full.", "refused_rows"),
    ("blocked_seconds", "Seconds that collectors waited for room in their rings.", "blocked_seconds"),
    ("transactions", "Transactions of the writer.", "transactions"),
    ("takeovers", "Transactions finished for a writer that died.", "takeovers"),
    ("malformed_records", "Ring records that could not be read.", "malformed_records"),
    ("streams_cut", "Trajectories cut short because a collector's table of streams was full.", "streams_cut"),
    ("collectors_died", "Collectors that died without closing.", "collectors_died"),
    ("writers_died", "Writers that died in a transaction.", "writers_died"),
    ("processes_died", "Attached processes, not collectors, that died without closing.", "processes_died"),
)
GAUGES = (
    ("size_rows", "Rows stored now.", "size"),
    ("capacity_rows", "Rows the buffer can hold.", "capacity"),
    ("waiting_rows", "Rows put and not yet stored.", "waiting_rows"),
    ("row_bytes", "Bytes of a row; 0 before there is a schema.", "row_bytes"),
    ("segment_bytes", "Address space of the segment in bytes; rings are sparse.", "file_bytes"),
    ("memory_bytes", "Memory of the segment in bytes.", "allocated_bytes"),
    ("processes", "Processes attached.", "processes_alive"),
    ("collectors", "Collectors alive.", "collectors_alive"),
    ("age_seconds", "Seconds since the buffer was created.", "age_seconds"),
)
RING = (
    ("collector_ring_fill_ratio", "How full this collector's ring is, 0 to 1.", "ring_fill"),
    ("collector_put_rows", "Rows put by this collector; starts again with the next in its slot.", "put_rows"),
    ("collector_blocked_seconds", "Seconds this collector waited for room in its ring.", "blocked_seconds"),
)


def metrics_command(args: argparse.Namespace) -> int:
    for name in args.names:
        segment.check_name(name)
    source = Source(args.names, None if args.all_users else args.owner, args.all_users)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(source)
    if args.serve is not None:
        return serve(registry, args)
    if args.json:
        print_json([_plain(family) for family in registry.collect()])
    else:
        sys.stdout.write(generate_latest(registry).decode())
    for name in source.missing:
        print(printable(f"shminfo: {not_found(name, args.owner)}"), file=sys.stderr)
    return int(bool(source.missing))


def serve(registry: CollectorRegistry, args: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM; each scrape looks anew."""
    try:
        server, thread = start_http_server(args.serve, args.address, registry)
    except OSError as e:
        raise OSError(f"cannot serve on {args.address} port {args.serve}: {e.strerror or e}") from None
    host = f"[{args.address}]" if ":" in args.address else args.address
    url = f"http://{host}:{server.server_port}/metrics"
    over = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: over.set())
    if args.json:
        print_json({"url": url, "address": args.address, "port": server.server_port})
    else:
        print(f"serving {url} (Ctrl-C ends)")
    sys.stdout.flush()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            over.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


def _plain(family: Metric) -> Info:
    return {
        "name": family.name,
        "type": family.type,
        "help": family.documentation,
        "samples": [{"name": s.name, "labels": s.labels, "value": s.value} for s in family.samples],
    }


class Source(Collector):
    """Looks at the buffers when it is asked. ``names``: of which; empty: all there are. owner None: of all users."""

    def __init__(self, names: list[str], owner: int | None, label_owner: bool):
        self.names, self.owner, self.missing = names, owner, list[str]()
        self.labels = ["buffer", "owner"] if label_owner else ["buffer"]

    def collect(self) -> Iterable[Metric]:
        wanted = [(o, n) for o, n in looking.buffers(self.owner) if n in self.names or not self.names]
        known = {n for _, n in wanted}
        self.missing = [n for n in self.names if n not in known]
        infos = []
        for owner, name in wanted:
            try:
                infos.append(look(name, owner, whole=True))
            except BufferNotFound:  # gone since
                if name in self.names:
                    self.missing.append(name)
            except ERRORS as e:
                infos.append({"name": name, "owner": owner, "state": "unreadable", "reason": str(e)})
        up = self._family(GaugeMetricFamily, "up", "1: the buffer can be read, 0: it is damaged, foreign or not there.")
        readable = [i for i in infos if "counters" in i]
        for info in infos:
            up.add_metric(self._labels(info), float("counters" in info))
        for name in self.missing:
            up.add_metric([name, *[str(self.owner or "")] * (len(self.labels) - 1)], 0.0)
        yield up
        yield from self._families(readable)

    def _family(self, kind: type, name: str, text: str, *labels: str) -> Any:
        return kind(f"shmbuf_{name}", text, labels=[*self.labels, *labels])

    def _labels(self, info: Info, *more: str) -> list[str]:
        # A name may hold what UTF-8 cannot, which the exposition must be.
        return [printable(info["name"]), *[str(info["owner"])] * (len(self.labels) - 1), *more]

    def _families(self, infos: list[Info]) -> Iterator[Metric]:
        for name, text, key in COUNTERS:
            yield self._filled(CounterMetricFamily, name, text, infos, lambda i, key=key: i["counters"][key])
        for name, text, key in GAUGES:
            yield self._filled(GaugeMetricFamily, name, text, infos, lambda i, key=key: i[key] or 0)
        yield self._filled(
            GaugeMetricFamily,
            "ring_fill_ratio",
            "How full the fullest ring is, 0 to 1.",
            infos,
            lambda i: i["counters"]["ring_fill"],
        )
        yield self._filled(
            GaugeMetricFamily,
            "writer_idle_seconds",
            "Seconds since the writer's last transaction.",
            [i for i in infos if i["writer"]["age_seconds"] is not None],
            lambda i: i["writer"]["age_seconds"],
        )
        yield self._filled(
            GaugeMetricFamily,
            "writer_active",
            "1: somebody holds the writer role.",
            infos,
            lambda i: i["writer"]["active"],
        )
        yield self._filled(
            GaugeMetricFamily,
            "rows_lost",
            "1: nobody has the device memory of the rows any more. Of buffers with rows in device memory.",
            [i for i in infos if i["device"]],
            lambda i: i["device"]["lost"],
        )
        yield from self._priorities([i for i in infos if i["priorities"]])
        yield from self._sampling(infos)
        waiting = self._family(GaugeMetricFamily, "waiting_handles", "Handles that wait, by what they wait for.", "for")
        for i in infos:
            for what in WAITS:
                n = sum(m["alive"] and m["waits_for"] == what for m in i["members"])
                waiting.add_metric(self._labels(i, what), n)
        yield waiting
        for name, text, key in RING:
            kind = GaugeMetricFamily if key == "ring_fill" else CounterMetricFamily
            family = self._family(kind, name, text, "slot")
            for i in infos:
                for c in i["collectors"]:
                    family.add_metric(self._labels(i, str(c["slot"])), c[key])
            yield family

    def _filled(self, kind: type, name: str, text: str, infos: list[Info], value: Any) -> Metric:
        family = self._family(kind, name, text)
        for i in infos:
            family.add_metric(self._labels(i), float(value(i)))
        return family

    def _priorities(self, infos: list[Info]) -> Iterator[Metric]:
        for kind, name, text, key in (
            (GaugeMetricFamily, "priority_sum", "Sum of the priorities p^alpha of all rows.", "sum"),
            (CounterMetricFamily, "priorities_set", "Priorities set, in rows.", "applied"),
            (
                CounterMetricFamily,
                "priorities_stale",
                "Priorities that came after their row was overwritten, in rows.",
                "stale",
            ),
        ):
            yield self._filled(kind, name, text, infos, lambda i, key=key: i["priorities"][key])

    def _sampling(self, infos: list[Info]) -> Iterator[Metric]:
        ages = self._family(
            HistogramMetricFamily, "sampled_age_rows", "Ages of sampled rows, in rows stored after them."
        )
        for i in infos:
            bins, below, buckets = i["ages"]["sampled"], 0, []
            for k in range(min(len(bins), i["capacity"].bit_length() + 1)):  # no older row can be sampled
                below += bins[k]
                buckets.append((str(float(edges(k)[1])), float(below)))
            ages.add_metric(self._labels(i), [*buckets, ("+Inf", float(sum(bins)))], float(i["ages"]["sum"]))
        yield ages
        for name, text, key in (
            ("staleness_versions", "Staleness of sampled rows, summed, in policy versions.", "staleness_sum"),
            ("staleness_rows", "Sampled rows whose staleness is known.", "staleness_rows"),
        ):
            yield self._filled(CounterMetricFamily, name, text, infos, lambda i, key=key: i["ages"][key])
        with_limiter = [i for i in infos if i["limiter"]]
        yield self._filled(
            GaugeMetricFamily,
            "limiter_difference_rows",
            "inserted * samples_per_insert - sampled, in rows.",
            with_limiter,
            lambda i: i["limiter"]["diff"],
        )
