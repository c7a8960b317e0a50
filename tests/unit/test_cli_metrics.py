"""`shminfo metrics`: every figure under its name, with its unit, printed and served."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shmbuf import Buffer, Queue, segment
from tests.unit.helpers import k
from tests.unit.helpers_cli import SCHEMA, collector, rows

pytest_plugins = ["tests.unit.fixtures_cli"]


def parsed(text: str) -> dict[tuple, float]:
    """(sample's name, labels sorted) → value."""
    return {
        (s.name, *sorted(s.labels.items())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


def of(name: str, figures: dict[tuple, float]) -> dict[str, float]:
    """Those of one buffer that have no other label, by the sample's name without "shmbuf_"."""
    return {key[0].removeprefix("shmbuf_"): v for key, v in figures.items() if key[1:] == (("buffer", name),)}


def test_figures_are_those_of_the_buffer(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf, collector(name, 130):
        buf.empty()
        buf.extend(rows(100))
        buf.draw(32), buf.draw(8)
        status, out, err = shminfo("metrics", name)
        assert (status, err) == (0, "")
        figures = parsed(out)
        mine, st = of(name, figures), os.stat(segment.path_of(name))
        expected = {
            "up": 1,
            "put_rows_total": 230,
            "stored_rows_total": 230,  # also those that were forgotten
            "sampled_rows_total": 40,
            "sampled_batches_total": 2,
            "size_rows": 100,
            "capacity_rows": 100,
            "waiting_rows": 0,
            "row_bytes": 32,
            "segment_bytes": st.st_size,
            "memory_bytes": st.st_blocks * 512,
            "processes": 2,
            "collectors": 2,
            "collectors_died_total": 0,
            "sampled_age_rows_count": 40,
        }
        assert mine == {**mine, **expected}
        assert 0 <= mine["writer_idle_seconds"] < 100 and mine["age_seconds"] > 0
        rings = [v for key, v in figures.items() if key[0] == "shmbuf_collector_put_rows_total"]
        assert sorted(rings) == [100, 130]
        assert all(set(dict(key[1:])) <= {"buffer", "slot", "le", "for"} for key in figures), "few labels"


def test_ages_are_a_histogram_whose_buckets_do_not_move(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:

        def buckets() -> dict[str, float]:
            found = parsed(shminfo("metrics", name)[1])
            return {dict(key[1:])["le"]: v for key, v in found.items() if key[0] == "shmbuf_sampled_age_rows_bucket"}

        empty = buckets()
        assert list(empty) == ["0.0", "1.0", "3.0", "7.0", "15.0", "31.0", "63.0", "127.0", "+Inf"]
        assert set(empty.values()) == {0}
        buf.extend(rows(1))
        buf.draw(5)
        assert buckets() == dict.fromkeys(empty, 5), "the newest row: nothing was stored after it"
        buf.extend(rows(99))
        buf.draw(1000)
        full = list(buckets().values())
        assert full == sorted(full) and full[-1] == full[-2] == 1005 and full[5] < 1005


def test_priorities_and_limiter_have_figures_where_there_are_some(name, shminfo):
    with Buffer.create(name, 100, schema={"k": "int64"}, drain="caller") as buf:
        buf.extend(k(1, 2, 3))
        assert not {"priority_sum", "limiter_difference_rows"} & set(of(name, parsed(shminfo("metrics", name)[1])))
        buf.keep_priorities(alpha=1.0, eps=0.0)
        buf.set_limiter(Queue(100))
        buf.set_priorities([0, 1], 2.5)
        mine = of(name, parsed(shminfo("metrics", name)[1]))
        assert (mine["priority_sum"], mine["priorities_set_total"], mine["priorities_stale_total"]) == (6, 2, 0)
        assert "limiter_difference_rows" in mine


def test_every_metric_says_its_unit_and_counters_end_in_total(name, shminfo):
    with Buffer.create(name, 100, schema=SCHEMA):
        out = shminfo("metrics", name)[1]
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", out, re.M))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", out, re.M))
    assert kinds.keys() == helps.keys() and len(kinds) > 30 and all(n.startswith("shmbuf_") for n in kinds)
    assert all(n.endswith("_total") == (kind == "counter") for n, kind in kinds.items())
    for unit, word in (("_rows", "[Rr]ow"), ("_seconds", "[Ss]econd"), ("_bytes", "[Bb]ytes"), ("_ratio", "0 to 1")):
        for n in kinds:
            if n.removesuffix("_total").endswith(unit):
                assert re.search(word, helps[n]), (n, helps[n])


def test_json_has_the_same(name, shminfo, shminfo_json):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        buf.extend(rows(7))
        families = shminfo_json("metrics", name, "--json")
        (stored,) = [f for f in families if f["name"] == "shmbuf_stored_rows"]
        assert stored == {
            "name": "shmbuf_stored_rows",
            "type": "counter",
            "help": "Rows stored, overwritten ones included.",
            "samples": [{"name": "shmbuf_stored_rows_total", "labels": {"buffer": name}, "value": 7}],
        }


def test_without_a_name_it_is_all_there_are(only_mine, name, shminfo):
    second, third = f"{name}.2", f"{name}.3"
    with Buffer.create(name, 10), Buffer.create(second, 20, schema=SCHEMA):
        Path(segment.path_of(third)).write_bytes(b"nonsense" * 1000)
        os.chmod(segment.path_of(third), 0o600)
        status, out, err = shminfo("metrics")
        assert (status, err) == (0, "")
        figures = parsed(out)
        assert {dict(key[1:])["buffer"]: v for key, v in figures.items() if key[0] == "shmbuf_up"} == {
            name: 1,
            second: 1,
            third: 0,
        }
        assert of(second, figures)["capacity_rows"] == 20 and of(third, figures) == {"up": 0}
        figures = parsed(shminfo("metrics", "--all-users")[1])
        assert figures["shmbuf_up", ("buffer", name), ("owner", str(os.getuid()))] == 1


def test_a_buffer_that_is_not_there_is_down_and_said(name, shminfo):
    with Buffer.create(name, 10):
        status, out, err = shminfo("metrics", name, f"{name}x")
        assert status == 1 and f"no buffer named '{name}x'" in err
        assert of(name, parsed(out))["up"] == 1 and of(f"{name}x", parsed(out)) == {"up": 0}
    assert shminfo("metrics", "a/b")[0] == 1


def test_names_from_strangers_are_exposed_readable(name, only_mine, shminfo):
    path = os.fsdecode(os.fsencode(segment.path_of(name)) + b'"\\\xff\n')
    Path(path).touch(0o600)
    try:
        status, out, _ = shminfo("metrics")
        assert status == 0 and out.encode() and len([key for key in parsed(out) if key[0] == "shmbuf_up"]) == 1
    finally:
        os.unlink(path)


# ---- served ------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    running = []

    def serve(*args: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-m", "shmbuf.cli", "metrics", *args]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(p)
        line = p.stdout.readline()
        found = re.fullmatch(r"serving (http://\S+/metrics) \(Ctrl-C ends\)\n", line)
        assert found, (line, p.stderr.read())
        return p, found[1]

    yield serve
    for p in running:
        p.kill()
        p.communicate()


def scrape(url: str) -> dict[tuple, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_served_on_a_free_port_of_this_machine_only_each_scrape_anew(name, serve, how):
    with Buffer.create(name, 100, schema=SCHEMA, drain="caller") as buf:
        p, url = serve(name, "--serve", "0")
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*/metrics", url)
        assert of(name, scrape(url))["stored_rows_total"] == 0
        buf.extend(rows(5))
        assert of(name, scrape(url))["stored_rows_total"] == 5
        segment.destroy(name, force=True)
        assert of(name, scrape(url)) == {"up": 0}, "it goes on: the next of this name will be scraped"
        with Buffer.create(name, 30):
            assert of(name, scrape(url))["capacity_rows"] == 30
        p.send_signal(how)
        out, err = p.communicate(timeout=60)
        assert (p.returncode, out, err) == (0, "", "")


def test_the_address_is_printed_as_json_on_request(name):
    command = [sys.executable, "-m", "shmbuf.cli", "metrics", "--serve", "0", "--json", "--address", "127.0.0.1"]
    p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.endswith("}\n"):
            text += p.stdout.readline()
        answer = json.loads(text)
        assert answer["address"] == "127.0.0.1" and answer["url"] == f"http://127.0.0.1:{answer['port']}/metrics"
        scrape(answer["url"])
    finally:
        p.kill()
        p.communicate()


def test_a_port_that_is_taken_is_said(shminfo):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        status, out, err = shminfo("metrics", "--serve", str(port))
        assert (status, out) == (1, "") and err.startswith(f"shminfo: cannot serve on 127.0.0.1 port {port}: ")
    status, out, err = shminfo("metrics", "--serve", "0", "--address", "no.such.host.invalid")
    assert (status, out) == (1, "") and "no.such.host.invalid" in err and "Traceback" not in err


def test_a_buffer_that_waits_for_its_first_rows_can_be_looked_at(name, shminfo):
    """Priorities and a limiter were asked for, and there is no tree yet."""
    with Buffer.create(name, 100, drain="caller") as buf:
        buf.keep_priorities(alpha=0.5, eps=0.0)
        buf.set_limiter(Queue(100))
        expected = {"ready": False, "sum": 0, "min": 0, "new_row": 1, "applied": 0}
        assert expected.items() <= buf.stats()["priorities"].items()
        for command in (["metrics"], ["show"], ["show", "--json"], ["top", "--once", "--interval", "0.05"], ["check"]):
            status, _, err = shminfo(*command, name)
            assert (status, err) == (0, ""), command
        mine = of(name, parsed(shminfo("metrics", name)[1]))
        assert (mine["priority_sum"], mine["priorities_set_total"], mine["limiter_difference_rows"]) == (0, 0, 0)
