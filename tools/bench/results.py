"""All figures of a run, by key: `ingest/mujoco/1/2/cpprb` and the like."""

from __future__ import annotations

from statistics import median

from .isolate import Outcome
from .plan import Case


class Results:
    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}
        """Why a contender has no figures, by `kind/row/contender`."""

    def add(self, case: Case, outcome: Outcome) -> None:
        for record in outcome.records:
            if "error" in record:
                self.errors[record["key"]] = record["error"]
            else:
                self.values.setdefault(record["key"], []).extend(record["values"])
        if outcome.error:
            contender = outcome.at or case.contender or case.kind
            self.errors[f"{case.kind}/{case.row}/{contender}"] = outcome.error

    def get(self, key: str) -> float | None:
        values = self.values.get(key)
        return median(values) if values else None

    def peers(self, prefix: str, names: tuple[str, ...]) -> dict[str, float | None]:
        """Figures of those that ran or failed; who was not asked is left out."""
        kind, row = prefix.split("/")[:2]
        found = {name: self.get(f"{prefix}/{name}") for name in names}
        return {
            name: value for name, value in found.items() if value is not None or f"{kind}/{row}/{name}" in self.errors
        }

    def as_dict(self) -> dict:
        return {"values": self.values, "errors": self.errors}
