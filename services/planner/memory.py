"""What the planner remembers from look to look: a value, which is on record for the next leader.

All its times are Redis' milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.encoding.json_values import from_json_value, to_json_value
from meshrl.common.base.errors import BadMessage
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.policies.expert_split import ExpertSplitState, describe_expert_split
from meshrl.services.planner.pool.presence import PoolAbsences


@dataclass(frozen=True, slots=True)
class PlannerMemory(PoolAbsences):
    """What one look leaves to the next."""

    short: Mapping[str, int] = field(default_factory=dict)  # job that can never fit -> since
    watches: Mapping[str, SplitState] = field(default_factory=dict)  # of jobs' splits
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers; people are shown it
    mixtures: Mapping[str, ExpertSplitState] = field(
        default_factory=dict
    )  # of jobs whose cores divide
    correction: Correction = field(default_factory=Correction)  # of predicted speeds of engines

    def encode(self) -> dict[str, Any]:
        """All of it, as JSON takes it, and what people are told of jobs and their shares."""
        explained = {job: dict(watch.explained) for job, watch in self.watches.items()}
        for job, mixture in self.mixtures.items():
            explained.setdefault(job, {})["ranks"] = describe_expert_split(mixture)
        shown = {job: about for job, about in explained.items() if about}
        found: dict[str, Any] = {"entitled": {}} | to_json_value(self) | {"explained": shown}
        return found

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> PlannerMemory:
        """The memory that was written as this document; an empty one for an empty document."""
        try:
            return from_json_value(
                cls, {key: one for key, one in document.items() if key != "explained"}
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadMessage(
                f"what the planner remembers is of another version: {error}",
                where="Redis",
                fix="Start the version that wrote it, or a mesh with an empty Redis",
            ) from error

    def reset_after_outage(self) -> PlannerMemory:
        """The memory after Redis was away: all leases look expired then, so who is missing counts
        anew.
        """
        return replace(self, missing={}, away={})
