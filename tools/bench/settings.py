"""How long and how often things are measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .rows import Row


@dataclass(frozen=True)
class Settings:
    producers: tuple[int, ...] = (1, 2, 4, 8)
    batches: tuple[int, ...] = (1, 64)
    batch_size: int = 256
    """Rows of one sample."""
    warm_seconds: float = 0.3
    round_seconds: float = 1.0
    """One ingest round or one phase of sampling beside collectors."""
    rounds: int = 3
    beside_rounds: int = 5
    """More of them: which of three processes share a core is luck for seconds."""
    kills: int = 20
    """Rounds in which one collector is killed."""
    turns: int = 80
    """Round-robin turns of the uniform samplers."""
    turn_seconds: float = 0.01
    fill: float = 1.0
    """Share of the row's capacity that is used."""
    timeout: float = 300.0
    """After this a case counts as hung."""

    def capacity(self, row: Row) -> int:
        return max(1_000, int(row.capacity * self.fill))

    def as_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Settings:
        lists = {"producers", "batches"}
        return cls(**{k: tuple(v) if k in lists else v for k, v in values.items()})


FULL = Settings()
QUICK = Settings(
    producers=(1, 2),
    warm_seconds=0.1,
    round_seconds=0.3,
    rounds=1,
    beside_rounds=1,
    kills=5,
    turns=8,
    fill=0.25,
    timeout=90.0,
)
