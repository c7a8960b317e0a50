"""Eight collectors, two learners, records of random sizes, small rings, a buffer that wraps: nothing lost, doubled or torn."""

import multiprocessing

import pytest

from shmbuf import Buffer, destroy
from tests import oracle
from tests.process import workers

LARGEST = 40


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("drain", ["thread", "process"])
def test_conservation(method, drain, tmp_path, unique_name):
    if drain == "process" and method != "spawn":
        pytest.skip("the drain process is the same whoever forks; one start method is enough")
    context = multiprocessing.get_context(method)
    stop, out = context.Event(), context.Queue()
    acks = oracle.Acks(tmp_path / "acks")
    with Buffer.create(unique_name, 7_001, schema=oracle.SCHEMA, ring_bytes=1 << 15, drain=drain) as buffer:
        tasks = [(workers.collect, (unique_name, w, acks.path, LARGEST, stop, w)) for w in range(8)]
        tasks += [(workers.learn, (unique_name, stop, out)) for _ in range(2)]
        codes = workers.run_all(method, tasks, 5, stop, lambda: buffer.write_count > buffer.capacity)
        assert codes == [0] * 10
        assert sum(out.get(timeout=10) for _ in range(2)) > 0
        oracle.settle(buffer)
        stats = oracle.check(buffer, acks.counts, 0)
        assert stats["rows_total"] == acks.counts.sum()  # nobody died: exactly
        assert stats["rows_total"] > buffer.capacity, "the buffer never wrapped: the test did not test it"
    destroy(unique_name)


def test_records_larger_than_ring_and_capacity(tmp_path, unique_name):
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    acks = oracle.Acks(tmp_path / "acks")
    with Buffer.create(unique_name, 50, schema=oracle.SCHEMA, ring_bytes=1 << 14) as buffer:
        tasks = [(workers.collect, (unique_name, w, acks.path, 700, stop, w, 20_000)) for w in range(3)]
        assert workers.run_all("fork", tasks, 60, stop) == [0, 0, 0]
        oracle.settle(buffer)
        assert oracle.check(buffer, acks.counts, 0)["rows_total"] == 60_000
    destroy(unique_name)
