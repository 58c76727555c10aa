"""What the planner remembers from look to look: a value, which is on record for the next leader.

All its times are Redis' milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.planner.balance.watch import SplitWatch
from services.planner.costs.correction import Correction
from services.planner.policies.mixtures import Mixture, told
from services.planner.pool.presence import PoolAbsences


@dataclass(frozen=True, slots=True)
class PlannerMemory(PoolAbsences):
    """What one look leaves to the next."""

    short: Mapping[str, int] = field(default_factory=dict)  # job that can never fit -> since
    watches: Mapping[str, SplitWatch] = field(default_factory=dict)  # of jobs' splits
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers; people are shown it
    mixtures: Mapping[str, Mixture] = field(default_factory=dict)  # of jobs whose cores divide
    correction: Correction = field(default_factory=Correction)  # of predicted speeds of engines

    def document(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return {
            "missing": dict(self.missing),
            "lost": sorted(self.lost),
            "away": dict(self.away),
            "gone": sorted(self.gone),
            "short": dict(self.short),
            "aside": sorted(self.aside),
            "watches": {job: watch.document() for job, watch in self.watches.items()},
            "entitled": dict(self.entitled),
            "correction": self.correction.document(),
            "mixtures": {job: mixture.document() for job, mixture in self.mixtures.items()},
            "explained": self._explained(),
        }

    def _explained(self) -> dict[str, dict[str, Any]]:
        """What people are told of jobs."""
        found = {job: dict(watch.explained) for job, watch in self.watches.items()}
        for job, mixture in self.mixtures.items():
            found.setdefault(job, {})["ranks"] = told(mixture)
        return {job: about for job, about in found.items() if about}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> PlannerMemory:
        """The memory that was written as this document; an empty one for an empty document."""
        if not document:
            return cls()
        return cls(
            missing=dict(document["missing"]),
            lost=frozenset(document["lost"]),
            away=dict(document["away"]),
            gone=frozenset(document["gone"]),
            short=dict(document["short"]),
            aside=frozenset(document["aside"]),
            watches={job: SplitWatch.of(d) for job, d in document["watches"].items()},
            entitled=dict(document["entitled"]),
            correction=Correction.of(document.get("correction", [])),
            mixtures={job: Mixture.of(d) for job, d in document.get("mixtures", {}).items()},
        )

    def after_outage(self) -> PlannerMemory:
        """The memory after Redis was away: all leases look expired then, so who is missing counts
        anew.
        """
        return replace(self, missing={}, away={})
