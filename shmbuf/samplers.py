"""Ways of drawing rows. A sampler draws and copies in one step, so that each row is checked right after its copy."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from shmbuf.storage import ShmStorage


class RandomSampler:
    """Uniform with replacement over the rows stored at the moment of the draw."""

    name = "random"

    def arguments(self) -> dict[str, Any]:
        """What another process needs to rebuild it."""
        return {}

    def sample(
        self,
        storage: ShmStorage,
        batch_size: int,
        *,
        out: TensorDictBase | None = None,
        timeout: float | None = 0.0,
        pin: bool = False,
    ) -> TensorDictBase:
        return storage.draw(batch_size, out=out, timeout=timeout, pin=pin)

    def __repr__(self) -> str:
        return "RandomSampler()"


SAMPLERS = {RandomSampler.name: RandomSampler}
