"""Policy of time slices: serve an instance until none of its requests waits.

It has the fewest switches, and the longest waits. L. Takacs, "Two queues attended by a single
server", Operations Research 16 (1968).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.services.node.slices.slice_policy import (
    STARVATION_CAP_S,
    Candidate,
    GangState,
    RankedCandidate,
    split_overdue,
)


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Order by the last holder, then by the request's age."""

    cap_s: float = STARVATION_CAP_S
    name: str = "exhaustive"

    def rank_candidates(self, gang: GangState) -> list[RankedCandidate]:
        """Return the candidates: overdue ones, those of the last holder, the oldest."""
        overdue, others = split_overdue(gang, self.cap_s)
        kept, rest = [], []
        for candidate in others:
            wait_s = gang.now - candidate.requested_at
            if gang.get_tenure(candidate.request) is not None:
                kept.append(RankedCandidate(candidate, wait_s, "last holder"))
            else:
                rest.append(RankedCandidate(candidate, wait_s, "oldest request"))
        return overdue + kept + rest

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return infinity for any switch that takes time."""
        return math.inf if switch_s > 0.0 else 0.0

    def compute_follow_up_s(self, rival: Candidate) -> float:
        """Return 0: its quantum covers all slices."""
        return 0.0
