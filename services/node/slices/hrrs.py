"""Policy of time slices: the highest response ratio next, with the cost of switches.

The ratio is (wait + service + switch) / (service + switch): short slices go first, and waiting
requests rise. P. Brinch Hansen, "Short-term scheduling in multiprogramming systems", SOSP 1971;
here the service time includes the switch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.services.node.slices.slice_policy import (
    STARVATION_CAP_S,
    GangState,
    RankedCandidate,
    split_overdue,
)

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
        kept = [one for one in ranked if self._is_in_quantum(gang, one, ranked)]
        rest = [one for one in ranked if one not in kept]
        return overdue + [RankedCandidate(k.candidate, k.score, "quantum") for k in kept] + rest

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return the multiple of the switch's duration."""
        return self.quantum_switches * switch_s

    def _is_in_quantum(
        self, gang: GangState, one: RankedCandidate, ranked: list[RankedCandidate]
    ) -> bool:
        """Return True for a last holder that has used less than its quantum, if another waits."""
        request = one.candidate.request
        tenure = gang.get_tenure(request)
        if tenure is None:
            return False
        for other in ranked:
            rival = other.candidate.request
            if rival.instance != request.instance and rival.ranks & request.ranks:
                return tenure.used_s < self.compute_quantum_s(other.candidate.switch_s)
        return False
