"""Policy of time slices: a round robin over the instances that wait."""

from __future__ import annotations

from meshrl.services.node.slices.slice_policy import Candidate, GangState, RankedCandidate


class RoundRobin:
    """Order by the last slice: the instance that was served longest ago goes first.

    No instance overtakes a waiting one twice.
    """

    name = "round_robin"

    def rank_candidates(self, gang: GangState) -> list[RankedCandidate]:
        """Return the candidates, the instance that was served longest ago first."""
        newest = max(gang.last_grants.values(), default=0)
        ranked = [
            RankedCandidate(
                candidate,
                newest - gang.last_grants[candidate.request.instance],
                "served longest ago",
            )
            for candidate in gang.candidates
        ]
        return sorted(ranked, key=lambda one: -one.score)

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return 0: the turn passes on after each slice."""
        return 0.0

    def compute_follow_up_s(self, rival: Candidate) -> float:
        """Return 0: the turn passes on after each slice."""
        return 0.0
