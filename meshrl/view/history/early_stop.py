"""End of a run before its budget, because evaluations found no better version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EarlyStop:
    """Last step of a run that evaluations have stopped early."""

    step: int
    best_version: int
    patience: int  # evaluations since, none of them better

    @classmethod
    def from_event(cls, fields: dict[str, Any]) -> EarlyStop | None:
        """Return the early stop that an `evaluation` event has decided, if any."""
        if fields.get("ends_at") is None:
            return None
        return cls(int(fields["ends_at"]), int(fields["best_version"]), int(fields["patience"]))

    @property
    def reason(self) -> str:
        """Reason of the stop, for people."""
        since = f"{self.patience} evaluations since" if self.patience > 1 else "evaluation since"
        return f"version {self.best_version} is the best, and no better one came in the {since}"
