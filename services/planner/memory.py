"""What the planner remembers from look to look: a value, which is on record for the next leader.

All its times are Redis' milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.encoding.plain import plain, restored
from meshrl.common.base.errors import BadMessage
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.policies.mixtures import Mixture, told
from meshrl.services.planner.pool.presence import PoolAbsences


@dataclass(frozen=True, slots=True)
class PlannerMemory(PoolAbsences):
    """What one look leaves to the next."""

    short: Mapping[str, int] = field(default_factory=dict)  # job that can never fit -> since
    watches: Mapping[str, SplitWatch] = field(default_factory=dict)  # of jobs' splits
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers; people are shown it
    mixtures: Mapping[str, Mixture] = field(default_factory=dict)  # of jobs whose cores divide
    correction: Correction = field(default_factory=Correction)  # of predicted speeds of engines

    def document(self) -> dict[str, Any]:
        """All of it, as JSON takes it, and what people are told of jobs and their shares."""
        explained = {job: dict(watch.explained) for job, watch in self.watches.items()}
        for job, mixture in self.mixtures.items():
            explained.setdefault(job, {})["ranks"] = told(mixture)
        shown = {job: about for job, about in explained.items() if about}
        found: dict[str, Any] = {"entitled": {}} | plain(self) | {"explained": shown}
        return found

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> PlannerMemory:
        """The memory that was written as this document; an empty one for an empty document."""
        try:
            return restored(cls, {key: one for key, one in document.items() if key != "explained"})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadMessage(
                f"what the planner remembers is of another version: {error}",
                where="Redis",
                fix="Start the version that wrote it, or a mesh with an empty Redis",
            ) from error

    def after_outage(self) -> PlannerMemory:
        """The memory after Redis was away: all leases look expired then, so who is missing counts
        anew.
        """
        return replace(self, missing={}, away={})
