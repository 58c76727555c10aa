"""Policy of time slices: the order of requests."""

from __future__ import annotations

from meshrl.services.node.slices.slice_policy import Candidate, GangState, RankedCandidate


class Fifo:
    """Order of requests, without regard to the cost of switches."""

    name = "fifo"

    def rank_candidates(self, gang: GangState) -> list[RankedCandidate]:
        """Return the candidates, oldest first."""
        ranked = [
            RankedCandidate(candidate, gang.now - candidate.requested_at, "oldest request")
            for candidate in gang.candidates
        ]
        return sorted(ranked, key=lambda one: one.candidate.requested_at)

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return 0: an instance with a newer request never keeps its ranks."""
        return 0.0

    def compute_follow_up_s(self, rival: Candidate) -> float:
        """Return 0: the order of requests holds."""
        return 0.0
