"""Interface of the policies that order requests for a gang's time slices; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

STARVATION_CAP_S = 60.0  # longest wait for a slice, where the slices of the others allow it
STARVATION_REASON = "starvation cap"
SHORT_REASON = "short slice"


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """Request of a process for a slice on all ranks of its instance."""

    ticket: str  # unique name of the request
    instance: str
    generation: int
    incarnation: str  # of the requesting process
    sequence_number: int  # number of its requests so far
    process: str  # name of that process
    function: str  # one of slice_queue.FUNCTIONS
    estimate_s: float  # 0: unknown
    ranks: frozenset[int]  # all ranks of the instance
    kinds: tuple[str, ...] = ()  # tensor kinds that it needs on the accelerator; none: all
    is_first: bool = False  # of the function in its process: it may compile kernels
    # expected from its end to a request of the same function; infinity: unknown
    repeat_gap_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Candidate:
    """Waiting request with its expected times in seconds."""

    request: SliceRequest
    requested_at: float
    service_s: float  # of the slice; positive
    switch_s: float  # of the moves of tensors before it

    @property
    def cost_s(self) -> float:
        """Seconds for which the candidate would occupy its ranks."""
        return self.service_s + self.switch_s


@dataclass(frozen=True, slots=True)
class Tenure:
    """Instance that computes on a rank or computed there last, and since it got the rank."""

    instance: str
    used_s: float  # duration of its slices so far
    short_s: float = 0.0  # expected, of its last slices that went before a rival as short ones


@dataclass(frozen=True, slots=True)
class GangState:
    """State of a gang at a decision; times are seconds of the caller's clock."""

    now: float
    candidates: Sequence[Candidate]  # in the order of requests
    tenures: Mapping[int, Tenure]  # by rank
    last_grants: Mapping[str, int]  # by instance: number of its last slice

    def get_tenure(self, request: SliceRequest) -> Tenure | None:
        """Return the tenure of an instance that had all of its ranks last; None otherwise."""
        tenures = [self.tenures.get(rank) for rank in request.ranks]
        first = tenures[0] if tenures else None
        if first is None or first.instance != request.instance:
            return None
        return first if all(tenure == first for tenure in tenures) else None


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """Candidate with the policy's score and the reason for its place."""

    candidate: Candidate
    score: float
    reason: str


class SlicePolicy(Protocol):
    """Order of waiting requests."""

    @property
    def name(self) -> str:
        """Name in `pool.slice_policy`."""

    def rank_candidates(self, gang: GangState) -> list[RankedCandidate]:
        """Return all candidates, best first."""

    def compute_quantum_s(self, switch_s: float) -> float:
        """Return for how long an instance keeps its ranks before a switch of that duration."""

    def compute_follow_up_s(self, rival: Candidate) -> float:
        """Return by how much short slices of the last holder may delay another request."""


def split_overdue(
    gang: GangState, cap_s: float
) -> tuple[list[RankedCandidate], Sequence[Candidate]]:
    """Split off the candidates that must go first, oldest first, so that none waits past the cap.

    A candidate is overdue once it would wait longer than `cap_s` in the order of requests. From
    then on the order of requests holds for it and all older ones. So it waits for at most `cap_s`
    and the one slice that was granted before, if the slices of the other instances together take
    less than `cap_s`.
    """
    begins: dict[int, float] = {}  # by rank: seconds until the older candidates have been served
    last = 0
    by_age = sorted(gang.candidates, key=lambda candidate: candidate.requested_at)
    for count, candidate in enumerate(by_age, 1):
        ranks = candidate.request.ranks
        begin_s = max((begins.get(rank, 0.0) for rank in ranks), default=0.0)
        if gang.now - candidate.requested_at + begin_s + candidate.switch_s > cap_s:
            last = count
        begins.update(dict.fromkeys(ranks, begin_s + candidate.cost_s))
    overdue = [
        RankedCandidate(candidate, gang.now - candidate.requested_at, STARVATION_REASON)
        for candidate in by_age[:last]
    ]
    return overdue, by_age[last:]
