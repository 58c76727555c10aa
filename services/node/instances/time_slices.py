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

OPERATIONS = ("generate", "score", "train_step", "warm_start", "sync", "save")


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
    ticket: str  # unique name of the request
    instance: str
    generation: int
    incarnation: str  # of the requesting process
    sequence_number: int  # number of its requests so far
    process: str  # name of that process
    operation: str  # one of FUNCTIONS
    estimate_s: float  # 0: unknown
    ranks: frozenset[int]  # all ranks of the instance


@dataclass(frozen=True, slots=True)
class SliceGrant:
    request: SliceRequest
    granted_at: float
    deadline: float  # its holder is killed then


class SlicePolicy:
    """Requests, slices and their deadlines; times are of the caller's clock.

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

    def instance_exited(self, instance: str) -> None:
        """Drop requests and slices of an instance that has no process any more."""
        for asked in self._requests_of(instance):
            self._drop(asked.ticket)

    def retain_instances(self, generations: Mapping[str, int], deadline: float) -> None:
        """Drop the requests of all other instances, and set a deadline for the slices that they
        hold.

        They may still be computing. `generations`: of the instances to retain.
        """
        for asked in self.waiting:
            if generations.get(asked.instance) != asked.generation:
                self._drop(asked.ticket)
        for ticket, held in self._grants.items():
            if generations.get(held.request.instance) != held.request.generation:
                self._grants[ticket] = replace(held, deadline=min(held.deadline, deadline))
        self._last_grants = {r: at for r, at in self._last_grants.items() if r in generations}

    def grant_waiting(self, now: float) -> list[SliceGrant]:
        """Grant slices to all requests that can have one now."""
        taken = frozenset[int]().union(*(held.request.ranks for held in self._grants.values()))
        granted = []
        for asked in sorted(self.waiting, key=lambda asked: self._last_grants[asked.instance]):
            if not taken & asked.ranks:
                del self._waiting[asked.ticket]
                self._grant_count += 1
                self._last_grants[asked.instance] = self._grant_count
                held = SliceGrant(asked, now, now + self._limits.compute_limit_s(asked.estimate_s))
                self._grants[asked.ticket] = held
                granted.append(held)
            taken |= asked.ranks  # also while it waits: small requests never starve it
        return granted

    def extend_deadlines(self, granted_before: float, lag_s: float) -> None:
        """Extend slices granted before a time by the seconds that the scheduler received no
        messages.
        """
        for ticket, held in self._grants.items():
            if held.granted_at <= granted_before:
                self._grants[ticket] = replace(held, deadline=held.deadline + lag_s)

    def take_overdue(self, now: float) -> list[SliceGrant]:
        """Return slices whose holders must be killed, each once; `instance_exited` frees their
        ranks.
        """
        late = [
            h for t, h in self._grants.items() if h.deadline <= now and t not in self._being_killed
        ]
        self._being_killed.update(held.request.ticket for held in late)
        return late

    def holder_killed(self, grant: SliceGrant) -> None:
        self._drop(grant.request.ticket)

    def next_deadline(self) -> float:
        """Return the time when the next slice is overdue; infinity when none is held."""
        return min(
            (h.deadline for t, h in self._grants.items() if t not in self._being_killed),
            default=math.inf,
        )

    def _requests_of(self, instance: str) -> list[SliceRequest]:
        every = [*self._waiting.values(), *(held.request for held in self._grants.values())]
        return [asked for asked in every if asked.instance == instance]

    def _drop(self, ticket: str) -> bool:
        self._being_killed.discard(ticket)
        waited = self._waiting.pop(ticket, None)
        held = self._grants.pop(ticket, None)
        return waited is not None or held is not None
