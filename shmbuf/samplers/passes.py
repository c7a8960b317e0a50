"""Samplers whose batches belong to a pass over the rows, which has an end."""

from __future__ import annotations

import threading

from shmbuf.samplers.base import Sampler


class PassSampler(Sampler):
    """Tells the end of a pass by ``ran_out``. Where no batch is left of one, because rows were overwritten before their turn, a
    plain `sample` goes on into the next pass and ``ran_out`` is True with its first batch; an iteration, which begins by setting
    ``ran_out = False`` and may be over by setting it True, ends without: its second and later `sample` raises NotEnoughRows."""

    _ran_out = False
    _iteration: tuple[int, bool] | None = None  # whose thread's; whether it has had a batch

    @property
    def ran_out(self) -> bool:
        """The last call came to the end of a pass (of one that is shared: one reader sees it), or took the last row there was."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = bool(value)
        self._iteration = None if value else (threading.get_ident(), False)

    @property
    def _into_next(self) -> bool:
        """Whether this thread's next batch may be of another pass than its last."""
        return self._iteration != (threading.get_ident(), True)

    def _came(self, ran_out: bool, at_end: bool) -> None:
        """After a batch; at_end: it was the last one of its pass, not the first one of the next."""
        began = self._iteration == (threading.get_ident(), False)
        self._ran_out = at_end if began else ran_out
        if self._ran_out:
            self._iteration = None
        elif began:
            self._iteration = (threading.get_ident(), True)

    def _came_to_nothing(self) -> None:
        self._ran_out, self._iteration = True, None
