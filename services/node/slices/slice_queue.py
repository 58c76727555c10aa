"""Queue of a gang's time slices: requests, preparations, granted slices, and their ends; pure.

A slice is granted for all the ranks of its instance or for none. Instances that share no rank hold
slices at the same time. A policy orders the waiting requests. A request whose ranks are not all
free reserves them before all later ones, so small requests never starve a large one.

A chosen request occupies its ranks while its tensors are moved; then its slice begins. The slice is
a lease: its holder must be killed after the deadline, and its ranks are free once it is dead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from meshrl.common.api.node import KindUse
from meshrl.services.node.slices.forecast import InstanceSlices, PastSlice, list_uses
from meshrl.services.node.slices.slice_policy import (
    SHORT_REASON,
    STARVATION_REASON,
    Candidate,
    GangState,
    RankedCandidate,
    SlicePolicy,
    SliceRequest,
    Tenure,
)

DEFAULT_SERVICE_S = 1.0  # of a slice without an estimate, to compare it with others
# A last holder that has not used its quantum keeps its ranks for this share of the next switch,
# since its next request often follows at once; at most ANTICIPATION_CAP_S.
ANTICIPATION_SHARE = 0.1
ANTICIPATION_CAP_S = 0.5
ANTICIPATION_FACTOR = 4.0  # times the expected gap before a short slice of the last holder

FUNCTIONS = (
    "generate",
    "score",
    "forward_backward",
    "optim_step",
    "train_step",
    "warm_start",
    "sync",
    "save",
    "load",
)


@dataclass(frozen=True, slots=True)
class SliceLimits:
    """Bounds of a slice's length, by its holder's estimate."""

    factor: float = 8.0  # times the estimate: other bins are longer, and hosts are shared
    floor_s: float = 15.0  # a busy host delays even the shortest operation by seconds
    cap_s: float = 3600.0  # the deadline of one computation
    default_s: float = 600.0  # without an estimate, and at least for a first operation

    def compute_limit_s(self, estimate_s: float, *, is_first: bool = False) -> float:
        """Return the seconds that a slice may last; `estimate_s` 0: unknown.

        `is_first`: the process may compile the function's kernels, whatever the estimate.
        """
        floor_s = self.default_s if is_first or estimate_s <= 0.0 else self.floor_s
        return min(max(floor_s, self.factor * estimate_s), self.cap_s)


@dataclass(frozen=True, slots=True)
class ChosenRequest:
    """Request that occupies its ranks; its slice begins when its tensors are in place."""

    request: SliceRequest
    requested_at: float
    chosen_at: float
    switch_s: float  # as estimated


@dataclass(frozen=True, slots=True)
class SliceGrant:
    """Granted slice with its deadline; times are seconds of the caller's clock."""

    request: SliceRequest
    requested_at: float
    chosen_at: float
    granted_at: float
    deadline: float  # its holder is killed then


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice of one request, with all that waited at that time."""

    now: float
    policy: str
    ranked: tuple[RankedCandidate, ...]  # best first
    chosen: RankedCandidate


@dataclass(frozen=True, slots=True)
class _Activity:
    """Last slice of an instance, from which its next request is expected."""

    request: SliceRequest
    released_at: float
    gap_s: float  # between the release before it and its request; infinity: unknown


class SliceQueue:
    """Queue of requests and set of granted slices; all times are seconds of the caller's clock."""

    def __init__(
        self,
        policy: SlicePolicy,
        limits: SliceLimits | None = None,
        estimate_switch_s: Callable[[SliceRequest], float] = lambda request: 0.0,
        record: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        """Create an empty queue.

        Args:
            policy: Order of the waiting requests.
            limits: Bounds of a slice's length.
            estimate_switch_s: Returns the expected duration of the moves before a slice.
            record: Receives each decision.
        """
        self.policy = policy
        self._limits = limits or SliceLimits()
        self._estimate_switch_s, self._record = estimate_switch_s, record
        self._last_grants: dict[str, int] = {}  # by instance: the number of its last grant
        self._grant_count = 0
        # by ticket, in the order of requests: with the time of the request
        self._waiting: dict[str, tuple[SliceRequest, float]] = {}
        self._chosen: dict[str, ChosenRequest] = {}  # by ticket: being prepared
        self._grants: dict[str, SliceGrant] = {}  # by ticket
        self._being_killed: set[str] = set()  # tickets of holders that are being killed
        self._tenures: dict[int, Tenure] = {}  # by rank
        self._activity: dict[str, _Activity] = {}  # by instance
        self._past: defaultdict[str, InstanceSlices] = defaultdict(InstanceSlices)
        self.anticipates_until = math.inf  # end of the wait for a last holder's next request

    @property
    def waiting(self) -> tuple[SliceRequest, ...]:
        """Requests that are not chosen yet, in the order in which they arrived."""
        return tuple(request for request, _ in self._waiting.values())

    @property
    def chosen(self) -> tuple[ChosenRequest, ...]:
        """Requests that occupy their ranks while their tensors are moved."""
        return tuple(self._chosen.values())

    @property
    def grants(self) -> tuple[SliceGrant, ...]:
        """Slices that occupy their ranks now, with those of holders that are being killed."""
        return tuple(self._grants.values())

    def enqueue(self, request: SliceRequest, now: float) -> None:
        """Enqueue a request, unless it waits or is chosen or granted already.

        Requests and slices of an earlier run of the same process, or of another generation of the
        instance, become void: that process is dead. A worker requests slices for an instance that
        starts; these are independent of the instance's own.
        """
        for other in self.list_requests(request.instance):
            is_same_process = other.process == request.process
            is_replaced = is_same_process and other.incarnation != request.incarnation
            is_void = is_replaced or other.generation != request.generation
            if is_void and other.ticket not in self._being_killed:
                self._drop(other.ticket)
        if not self.has(request.ticket):
            self._waiting[request.ticket] = request, now
            self._last_grants.setdefault(request.instance, self._grant_count)
            activity = self._activity.get(request.instance)
            if activity is not None:
                self._activity[request.instance] = replace(
                    activity, gap_s=now - activity.released_at
                )

    def list_requests(self, instance: str) -> list[SliceRequest]:
        """Return the requests of an instance that wait, are chosen or are granted."""
        requests = [*self.waiting, *(chosen.request for chosen in self.chosen)]
        requests += [grant.request for grant in self._grants.values()]
        return [request for request in requests if request.instance == instance]

    def list_computing(self) -> list[KindUse]:
        """List the kinds that the holders' slices compute with."""
        requests = [grant.request for grant in self._grants.values()]
        return [KindUse(one.instance, list(one.kinds)) for one in requests]

    def forecast_uses(self, now: float) -> list[KindUse]:
        """Return the kinds that the next slices of all instances need, the soonest first.

        Requests follow the holders in the policy's order, and then what each instance repeats.
        """
        ends: dict[str, tuple[SliceRequest, float]] = {}  # by instance: last known slice, its end
        busy_s: dict[int, float] = {}  # by rank: until it is free
        uses = []
        for grant in self._grants.values():
            left_s = max(0.0, grant.granted_at + grant.request.estimate_s - now)
            ends[grant.request.instance] = grant.request, left_s
            busy_s |= dict.fromkeys(grant.request.ranks, left_s)
        ranked = self.rank_waiting(now) if self._waiting else []
        queued = [(chosen.request, chosen.request.estimate_s) for chosen in self._chosen.values()]
        queued += [(one.candidate.request, one.candidate.service_s) for one in ranked]
        for request, service_s in queued:
            start_s = max(busy_s.get(rank, 0.0) for rank in request.ranks)
            uses.append(KindUse(request.instance, list(request.kinds), start_s))
            ends[request.instance] = request, start_s + service_s
            busy_s |= dict.fromkeys(request.ranks, start_s + service_s)
        for instance in dict.fromkeys([*self._past, *ends]):
            last, end_s = ends.get(instance, (None, 0.0))
            following = self._past.get(instance, InstanceSlices()).find_following(last)
            if following and last is None:
                end_s = max(0.0, self._activity[instance].released_at - now + following[0].gap_s)
            elif following:
                end_s += following[0].gap_s
            uses += list_uses(following, end_s)
        return sorted(uses, key=lambda use: use.starts_in_s)

    def has(self, ticket: str) -> bool:
        """Return True for a request that waits, is chosen or is granted."""
        return ticket in self._waiting or ticket in self._chosen or ticket in self._grants

    def get_grant(self, ticket: str) -> SliceGrant | None:
        """Return the slice of a request; None if it waits, is void or has a dying holder."""
        return None if ticket in self._being_killed else self._grants.get(ticket)

    def release(self, ticket: str, now: float) -> bool:
        """Release a slice or request, and return whether there was one.

        A holder that is being killed releases nothing: it may still compute until it is dead.
        """
        if ticket in self._being_killed:
            return False
        grant = self._grants.get(ticket)
        if grant is not None:
            self._record_use(grant, now)
        return self._drop(ticket)

    def drop_instance(self, instance: str, others: Container[str] = ()) -> list[SliceGrant]:
        """Drop the requests and slices of an instance whose process has exited.

        Those of `others`, the processes of workers, stay: a worker makes room for the next start.
        Slices on several ranks stay, marked as being killed: the other ranks may still compute.
        Return each of these once.
        """
        remaining = []
        for request in self.list_requests(instance):
            if request.process in others:
                continue
            grant = self._grants.get(request.ticket)
            if grant is None or len(request.ranks) == 1:
                self._drop(request.ticket)
            elif request.ticket not in self._being_killed:
                self._being_killed.add(request.ticket)
                remaining.append(grant)
        self._activity.pop(instance, None)
        self._past.pop(instance, None)
        return remaining

    def retain_instances(self, generations: Mapping[str, int], deadline: float) -> None:
        """Drop the requests of other instances, and shorten their slices to end at `deadline`.

        Their processes may still be computing. `generations`: of the instances to retain, by id;
        another generation of the same instance is not retained.
        """
        for request in (*self.waiting, *(chosen.request for chosen in self.chosen)):
            if generations.get(request.instance) != request.generation:
                self._drop(request.ticket)
        for ticket, grant in self._grants.items():
            if generations.get(grant.request.instance) != grant.request.generation:
                self._grants[ticket] = replace(grant, deadline=min(grant.deadline, deadline))
        for table in (self._last_grants, self._activity, self._past):
            for instance in table.keys() - generations.keys():
                del table[instance]

    # -- choices ---------------------------------------------------------------------------------

    def choose_waiting(self, now: float) -> list[ChosenRequest]:
        """Choose all requests that can have their ranks now; they occupy these from now on."""
        self.anticipates_until = math.inf
        if not self._waiting:
            return []
        occupied = [chosen.request for chosen in self._chosen.values()]
        occupied += [grant.request for grant in self._grants.values()]
        busy_ranks = frozenset[int]().union(*(request.ranks for request in occupied))
        if all(request.ranks & busy_ranks for request, _ in self._waiting.values()):
            return []
        newly_chosen = []
        ranked = self.rank_waiting(now)
        for one in ranked:
            request = one.candidate.request
            if not busy_ranks & request.ranks and not self._is_anticipating(one, now):
                self._record(Decision(now, self.policy.name, tuple(ranked), one))
                newly_chosen.append(self._choose(one, now))
            busy_ranks |= request.ranks  # also while it waits: small requests never starve it
        return newly_chosen

    def begin(self, ticket: str, now: float) -> SliceGrant:
        """Begin the slice of a chosen request."""
        chosen = self._chosen.pop(ticket)
        request = chosen.request
        limit_s = self._limits.compute_limit_s(request.estimate_s, is_first=request.is_first)
        grant = SliceGrant(request, chosen.requested_at, chosen.chosen_at, now, now + limit_s)
        self._grants[ticket] = grant
        return grant

    def compute_quantum_s(self, request: SliceRequest, now: float) -> float:
        """Return how long the holder of a slice should keep it before the next switch; 0: as it
        likes.
        """
        rival = self._find_next_waiting(request, now)
        if rival is None or rival.switch_s <= 0.0:
            return 0.0
        tenure = self._tenures[min(request.ranks)]
        quantum_s = min(self.policy.compute_quantum_s(rival.switch_s), self._limits.floor_s / 2.0)
        return max(0.0, quantum_s - tenure.used_s)

    def predict_next(self, holder: SliceRequest | None, now: float) -> SliceRequest | None:
        """Return the request that probably follows a holder on some of its ranks; None: anywhere.

        It is the best waiting one, or else the last one of the instance whose next request is
        expected first; None: no other instance is active.
        """
        rival = self._find_next_waiting(holder, now) if holder is not None else None
        if rival is not None:
            return rival.request
        expected = [
            (activity.released_at + activity.gap_s, activity.request)
            for instance, activity in self._activity.items()
            if holder is None
            or (instance != holder.instance and activity.request.ranks & holder.ranks)
        ]
        return min(expected, key=lambda one: one[0])[1] if expected else None

    # -- deadlines -------------------------------------------------------------------------------

    def extend_deadlines(self, granted_before: float, lag_s: float) -> None:
        """Extend the slices granted up to a time by `lag_s` seconds.

        The scheduler received no messages for so long, so a release may be unread.
        """
        for ticket, grant in self._grants.items():
            if grant.granted_at <= granted_before:
                self._grants[ticket] = replace(grant, deadline=grant.deadline + lag_s)

    def take_overdue(self, now: float) -> list[SliceGrant]:
        """Mark overdue slices as being killed, and return each of them once.

        Their ranks stay busy until `free_killed`, or `drop_instance` if there is one rank.
        """
        overdue = [
            candidate
            for ticket, candidate in self._grants.items()
            if candidate.deadline <= now and ticket not in self._being_killed
        ]
        self._being_killed.update(grant.request.ticket for grant in overdue)
        return overdue

    def free_killed(self, grant: SliceGrant) -> None:
        """Free the ranks of a slice whose holder is dead on all of them."""
        self._drop(grant.request.ticket)

    def next_deadline(self) -> float:
        """Return the earliest deadline of slices that are not being killed; infinity if there is
        none.
        """
        return min(
            (
                grant.deadline
                for ticket, grant in self._grants.items()
                if ticket not in self._being_killed
            ),
            default=math.inf,
        )

    # -- order and use ----------------------------------------------------------------------------

    def rank_waiting(self, now: float) -> list[RankedCandidate]:
        """Return the waiting requests in the order of the policy, best first."""
        candidates = [
            Candidate(
                request,
                requested_at,
                request.estimate_s if request.estimate_s > 0.0 else DEFAULT_SERVICE_S,
                self._estimate_switch_s(request),
            )
            for request, requested_at in self._waiting.values()
        ]
        return self.policy.rank_candidates(
            GangState(now, candidates, self._tenures, self._last_grants)
        )

    def _find_next_waiting(self, holder: SliceRequest, now: float) -> Candidate | None:
        """Return the best waiting candidate of another instance that needs a rank of a holder."""
        if not self._waiting:
            return None
        candidates = (one.candidate for one in self.rank_waiting(now))
        return next(
            (
                candidate
                for candidate in candidates
                if candidate.request.instance != holder.instance
                and candidate.request.ranks & holder.ranks
            ),
            None,
        )

    def _choose(self, ranked: RankedCandidate, now: float) -> ChosenRequest:
        candidate, request = ranked.candidate, ranked.candidate.request
        _, requested_at = self._waiting.pop(request.ticket)
        self._grant_count += 1
        self._last_grants[request.instance] = self._grant_count
        for rank in request.ranks:
            tenure = self._tenures.get(rank)
            if tenure is None or tenure.instance != request.instance:
                tenure = Tenure(request.instance, 0.0)
            is_short = ranked.reason == SHORT_REASON
            short_s = tenure.short_s + candidate.service_s if is_short else 0.0
            self._tenures[rank] = replace(tenure, short_s=short_s)
        chosen = ChosenRequest(request, requested_at, now, candidate.switch_s)
        self._chosen[request.ticket] = chosen
        return chosen

    def _is_anticipating(self, one: RankedCandidate, now: float) -> bool:
        """Return True while ranks stay with their last holder, whose request is about to come."""
        request, switch_s = one.candidate.request, one.candidate.switch_s
        quantum_s = self.policy.compute_quantum_s(switch_s)
        if one.reason == STARVATION_REASON:
            return False
        for tenure in {self._tenures[rank] for rank in request.ranks if rank in self._tenures}:
            last = self._activity.get(tenure.instance)
            if tenure.instance == request.instance or last is None:
                continue
            limit_s = self._compute_follow_up_limit_s(tenure, one.candidate)
            gap_s = 0.0
            if tenure.used_s < quantum_s:
                limit_s = max(limit_s, min(ANTICIPATION_SHARE * switch_s, ANTICIPATION_CAP_S))
                gap_s = 0.0 if math.isinf(last.gap_s) else last.gap_s
            if gap_s <= limit_s and now < last.released_at + limit_s:
                self.anticipates_until = min(self.anticipates_until, last.released_at + limit_s)
                return True
        return False

    def _compute_follow_up_limit_s(self, tenure: Tenure, rival: Candidate) -> float:
        """Return how long a rival waits for a short slice that the last holder requests soon.

        It is 0 if none is expected soon enough.
        """
        following = self._past[tenure.instance].find_following()
        if not following or rival.switch_s <= 0.0:
            return 0.0
        most_s = self.policy.compute_follow_up_s(rival)
        left_s = most_s - tenure.short_s - following[0].duration_s
        limit_s = min(ANTICIPATION_FACTOR * following[0].gap_s, ANTICIPATION_CAP_S)
        return limit_s if 0.0 < limit_s <= left_s else 0.0

    def _record_use(self, grant: SliceGrant, now: float) -> None:
        """Record the duration of a slice that ends."""
        request = grant.request
        for rank in request.ranks:
            tenure = self._tenures[rank]
            used_s = tenure.used_s + now - grant.granted_at
            self._tenures[rank] = replace(tenure, used_s=used_s)
        last = self._activity.get(request.instance)
        gap_s = last.gap_s if last is not None else request.repeat_gap_s
        self._activity[request.instance] = _Activity(request, now, gap_s)
        known_gap_s = 0.0 if math.isinf(gap_s) else gap_s
        self._past[request.instance].add(PastSlice(request, known_gap_s, now - grant.granted_at))

    def _drop(self, ticket: str) -> bool:
        """Remove a request or slice, and return True if there was one."""
        self._being_killed.discard(ticket)
        tables = (self._waiting, self._chosen, self._grants)
        return any([table.pop(ticket, None) is not None for table in tables])
