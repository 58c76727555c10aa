"""Policy of a gang's time slices: pure, a round robin over the instances that wait.

A slice is granted for all the ranks of its instance or for none. Instances that share no rank hold
slices at the same time. A slice is a lease: its holder must be killed after the deadline, and its
ranks are free once it is dead. No instance overtakes a waiting one twice: a request that is ahead
reserves its ranks even while some of them are not free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    default_s: float = 600.0  # without an estimate: a first operation may compile its kernels

    def compute_limit_s(self, estimate_s: float) -> float:
        """Return the seconds that a slice may last; `estimate_s` 0: unknown."""
        if estimate_s <= 0.0:
            return min(self.default_s, self.cap_s)
        return min(max(self.floor_s, self.factor * estimate_s), self.cap_s)


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """Request of a process for a slice on all ranks of its instance."""

    ticket: str  # unique name of the request
    instance: str
    generation: int
    incarnation: str  # of the requesting process
    sequence_number: int  # number of its requests so far
    process: str  # name of that process
    function: str  # one of FUNCTIONS
    estimate_s: float  # 0: unknown
    ranks: frozenset[int]  # all ranks of the instance


@dataclass(frozen=True, slots=True)
class SliceGrant:
    """Granted slice with its deadline."""

    request: SliceRequest
    granted_at: float  # by the caller's clock, in seconds
    deadline: float  # by the same clock; its holder is killed then


class SlicePolicy:
    """Queue of requests and set of granted slices; all times are seconds of the caller's clock.

    The instance that was served longest ago goes first. A new one counts as served just now, so
    that one that dies and returns gains nothing.
    """

    def __init__(self, limits: SliceLimits | None = None) -> None:
        self._limits = limits or SliceLimits()
        self._last_grants: dict[str, int] = {}  # by instance: the number of its last grant
        self._grant_count = 0
        self._waiting: dict[str, SliceRequest] = {}  # by ticket, in the order of requests
        self._grants: dict[str, SliceGrant] = {}  # by ticket
        self._being_killed: set[str] = set()  # tickets of holders that are being killed

    @property
    def waiting(self) -> tuple[SliceRequest, ...]:
        """Requests without a slice, in the order in which they arrived."""
        return tuple(self._waiting.values())

    @property
    def grants(self) -> tuple[SliceGrant, ...]:
        """Slices that occupy their ranks now, with those of holders that are being killed."""
        return tuple(self._grants.values())

    def enqueue(self, request: SliceRequest, now: float) -> None:
        """Enqueue a request, unless it waits or is granted already.

        Requests and slices of another process of the same instance become void: that process is
        dead.
        """
        for other in self._requests_of(request.instance):
            if (other.incarnation, other.generation) != (request.incarnation, request.generation):
                self._drop(other.ticket)
        if request.ticket not in self._grants and request.ticket not in self._waiting:
            self._waiting[request.ticket] = request
            self._last_grants.setdefault(request.instance, self._grant_count)

    def get_grant(self, ticket: str) -> SliceGrant | None:
        """Return the slice of a request; None if it waits, is void or has a dying holder."""
        return None if ticket in self._being_killed else self._grants.get(ticket)

    def release(self, ticket: str) -> bool:
        """Release a slice or request, and return whether there was one.

        A holder that is being killed releases nothing: it may still compute until it is dead.
        """
        if ticket in self._being_killed:
            return False
        return self._drop(ticket)

    def drop_instance(self, instance: str) -> None:
        """Drop the requests and slices of an instance that no longer has a process."""
        for request in self._requests_of(instance):
            self._drop(request.ticket)

    def retain_instances(self, generations: Mapping[str, int], deadline: float) -> None:
        """Drop the requests of other instances, and shorten their slices to end at `deadline`.

        Their processes may still be computing. `generations`: of the instances to retain, by id;
        another generation of the same instance is not retained.
        """
        for request in self.waiting:
            if generations.get(request.instance) != request.generation:
                self._drop(request.ticket)
        for ticket, grant in self._grants.items():
            if generations.get(grant.request.instance) != grant.request.generation:
                self._grants[ticket] = replace(grant, deadline=min(grant.deadline, deadline))
        self._last_grants = {
            instance: grant_number
            for instance, grant_number in self._last_grants.items()
            if instance in generations
        }

    def grant_waiting(self, now: float) -> list[SliceGrant]:
        """Grant slices to all requests that can have one now."""
        busy_ranks = frozenset[int]().union(
            *(grant.request.ranks for grant in self._grants.values())
        )
        granted = []
        for request in sorted(
            self.waiting, key=lambda request: self._last_grants[request.instance]
        ):
            if not busy_ranks & request.ranks:
                del self._waiting[request.ticket]
                self._grant_count += 1
                self._last_grants[request.instance] = self._grant_count
                grant = SliceGrant(
                    request, now, now + self._limits.compute_limit_s(request.estimate_s)
                )
                self._grants[request.ticket] = grant
                granted.append(grant)
            busy_ranks |= request.ranks  # also while it waits: small requests never starve it
        return granted

    def extend_deadlines(self, granted_before: float, lag_s: float) -> None:
        """Extend the slices granted up to a time by `lag_s` seconds.

        The scheduler received no messages for so long, so a release may be unread.
        """
        for ticket, grant in self._grants.items():
            if grant.granted_at <= granted_before:
                self._grants[ticket] = replace(grant, deadline=grant.deadline + lag_s)

    def take_overdue(self, now: float) -> list[SliceGrant]:
        """Mark overdue slices as being killed, and return each of them once.

        Their ranks stay busy until `free_killed` or `drop_instance`.
        """
        overdue = [
            candidate
            for ticket, candidate in self._grants.items()
            if candidate.deadline <= now and ticket not in self._being_killed
        ]
        self._being_killed.update(grant.request.ticket for grant in overdue)
        return overdue

    def free_killed(self, grant: SliceGrant) -> None:
        """Free the ranks of an overdue slice; its holder is dead."""
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

    def _requests_of(self, instance: str) -> list[SliceRequest]:
        requests = [*self._waiting.values(), *(grant.request for grant in self._grants.values())]
        return [request for request in requests if request.instance == instance]

    def _drop(self, ticket: str) -> bool:
        """Remove a request or slice, and return True if there was one."""
        self._being_killed.discard(ticket)
        request = self._waiting.pop(ticket, None)
        grant = self._grants.pop(ticket, None)
        return request is not None or grant is not None
