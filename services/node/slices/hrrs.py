"""Policy of time slices: the highest response ratio next, with the cost of switches.

The ratio is (wait + service + switch) / (service + switch): short slices go first, and waiting
requests rise. P. Brinch Hansen, "Short-term scheduling in multiprogramming systems", SOSP 1971;
here the service time includes the switch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.services.node.slices.slice_policy import (
    SHORT_REASON,
    STARVATION_CAP_S,
    Candidate,
    GangState,
    RankedCandidate,
    split_overdue,
)

FOLLOW_UP_SHARE = 0.1  # of a waiting slice's cost, by which short ones may delay it
QUANTUM_SWITCHES = 2.0  # an instance keeps its ranks for so many durations of the next switch


@dataclass(frozen=True, slots=True)
class HighestResponseRatio:
    """Order by response ratio, with a quantum against frequent switches and a starvation cap."""

    quantum_switches: float = QUANTUM_SWITCHES
    cap_s: float = STARVATION_CAP_S
    name: str = "hrrs"

    def rank_candidates(self, gang: GangState) -> list[RankedCandidate]:
        """Return the candidates: overdue ones, those in their quantum, the highest ratio."""
        overdue, others = split_overdue(gang, self.cap_s)
        ranked = sorted(
            (
                RankedCandidate(
                    candidate,
                    (gang.now - candidate.requested_at + candidate.cost_s) / candidate.cost_s,
                    "response ratio",
                )
                for candidate in others
            ),
            key=lambda one: -one.score,
        )
        reasons = {one: self._find_reason(gang, one, ranked) for one in ranked}
        kept = [RankedCandidate(o.candidate, o.score, why) for o, why in reasons.items() if why]
        return overdue + kept + [one for one in ranked if not reasons[one]]

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return the multiple of the switch's duration."""
        return self.quantum_switches * switch_s

    def compute_follow_up_s(self, rival: Candidate) -> float:
        """Return a share of the cost and a quantum: the switch happens beside the short slices."""
        return FOLLOW_UP_SHARE * rival.cost_s + self.compute_quantum_s(rival.switch_s)

    def _find_reason(
        self, gang: GangState, one: RankedCandidate, ranked: list[RankedCandidate]
    ) -> str:
        """Return why the last holder goes first if another waits; "": it does not.

        It has used less than its quantum, or its slice is short, such as the sync after an update.
        """
        request, service_s = one.candidate.request, one.candidate.service_s
        tenure = gang.get_tenure(request)
        if tenure is None:
            return ""
        for other in ranked:
            rival = other.candidate.request
            if rival.instance != request.instance and rival.ranks & request.ranks:
                if tenure.used_s < self.compute_quantum_s(other.candidate.switch_s):
                    return "quantum"
                most_s = self.compute_follow_up_s(other.candidate)
                return SHORT_REASON if tenure.short_s + service_s <= most_s else ""
        return ""
