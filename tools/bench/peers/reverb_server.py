"""A reverb server in the host's process, its producers over gRPC on loopback."""

from __future__ import annotations

from collections.abc import Callable

import reverb

from ..rows import Row


class Host:
    copies = 4

    def __init__(self, row: Row, capacity: int, scratch: str):
        table = reverb.Table(
            "rows",
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
        )
        self._server = reverb.Server([table])
        self.handle = self._server.port
        self._client = reverb.Client(f"localhost:{self.handle}")

    def visible(self) -> int:
        info = self._client.server_info()["rows"]
        return info.rate_limiter_info.insert_stats.completed

    def close(self) -> None:
        self._server.stop()


class Producer:
    def __init__(self, handle: int, row: Row):
        self._row = row
        client = reverb.Client(f"localhost:{handle}")
        self._writer = client.trajectory_writer(num_keep_alive_refs=1)

    def bind(self, batch: int) -> Callable[[], object]:
        arrays = self._row.arrays(batch)
        rows = [{name: array[i] for name, array in arrays.items()} for i in range(batch)]
        writer, names = self._writer, list(arrays)

        def send() -> None:
            for row in rows:
                writer.append(row)
                writer.create_item("rows", 1.0, {k: writer.history[k][-1:] for k in names})
            # Without it the writer's own buffer grows without end.
            writer.flush(block_until_num_items=200)

        return send

    def finish(self) -> None:
        self._writer.flush()
