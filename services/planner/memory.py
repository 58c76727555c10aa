"""Memory of the planner between passes: an immutable value, stored for the next leader.

All times are Redis' milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.base.encoding.json_values import from_json_value, to_json_value
from meshrl.common.base.errors import BadMessage
from meshrl.common.state.pool.store.spot_scaling import ScalingPlan
from meshrl.services.planner.balance.seeding import SeedingState, describe_seeding
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.policies.expert_split import ExpertSplitState, describe_expert_split
from meshrl.services.planner.pool.presence import PoolAbsences


@dataclass(frozen=True, slots=True)
class PlannerMemory(PoolAbsences):
    """State that one pass leaves to the next."""

    infeasible_since: Mapping[str, int] = field(default_factory=dict)  # infeasible job -> since
    # by job: state of its split
    split_states: Mapping[str, SplitState] = field(default_factory=dict)
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers; displayed to users
    # of jobs whose cores split experts
    expert_splits: Mapping[str, ExpertSplitState] = field(default_factory=dict)
    seeding: Mapping[str, SeedingState] = field(default_factory=dict)  # of jobs that offload
    # of jobs that a user has placed with another job: that job
    requested_partners: Mapping[str, str] = field(default_factory=dict)
    correction: Correction = field(default_factory=Correction)  # of predicted engine speeds
    scaling: ScalingPlan | None = None  # of the spot hosts, which the launcher reads

    def encode(self) -> dict[str, Any]:
        """Encode the memory for JSON, with the explanations of jobs and shares for users."""
        explained = {job: dict(watch.explanation) for job, watch in self.split_states.items()}
        for job, mixture in self.expert_splits.items():
            explained.setdefault(job, {})["expert_split_reason"] = describe_expert_split(mixture)
        for job, seeding in self.seeding.items():
            if text := describe_seeding(seeding):
                explained.setdefault(job, {})["seeding"] = text
        explanations = {job: about for job, about in explained.items() if about}
        found: dict[str, Any] = {"entitled": {}} | to_json_value(self) | {"explained": explanations}
        return found

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> PlannerMemory:
        """Decode a memory from its document; an empty document gives an empty memory. Raise
        BadMessage for the document of another version.
        """
        try:
            return from_json_value(
                cls, {key: one for key, one in document.items() if key != "explained"}
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadMessage(
                f"the planner's memory was written by another version: {error}",
                where="Redis",
                fix="Start the version that wrote it, or start a mesh with an empty Redis",
            ) from error

    def reset_after_outage(self) -> PlannerMemory:
        """Return the memory after an outage of Redis. All leases look expired then, so absence
        times restart.
        """
        return replace(self, missing_since={}, away_since={})
