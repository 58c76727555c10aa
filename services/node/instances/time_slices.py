"""Whose turn it is to compute on a gang: pure, a round robin over the residents that wait.

A turn is granted to all the ranks that its resident occupies or to none, and residents that share
no rank hold theirs at once. It is a lease: its holder is to be killed when the deadline has passed,
and its ranks are free once it is dead. Who waits is never overtaken twice by the same resident: a
request that is ahead keeps its ranks even while they are not all free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

OPERATIONS = ("generate", "score", "train_step", "warm_start", "sync", "save")


@dataclass(frozen=True, slots=True)
class SliceLimits:
    """How long a turn may last, by what its holder expects."""

    factor: float = 8.0  # times what was expected: other bins are longer, and hosts are shared
    floor_s: float = 15.0  # a busy host delays even the shortest piece by seconds
    cap_s: float = 3600.0  # the deadline of one piece of arithmetic
    default_s: float = 600.0  # nothing is expected yet: a first piece may compile its kernels

    def compute_limit_s(self, estimate_s: float) -> float:
        """Seconds that a turn may last; `estimate_s` 0: nothing is known."""
        if estimate_s <= 0.0:
            return min(self.default_s, self.cap_s)
        return min(max(self.floor_s, self.factor * estimate_s), self.cap_s)


@dataclass(frozen=True, slots=True)
class SliceRequest:
    ticket: str  # its own name, which no other request has
    instance: str
    generation: int
    incarnation: str  # of the process that asks,
    sequence_number: int  # how many it has made,
    process: str  # and its name
    operation: str  # one of FUNCTIONS
    estimate_s: float  # 0: not known
    ranks: frozenset[int]  # all that the resident occupies


@dataclass(frozen=True, slots=True)
class SliceGrant:
    request: SliceRequest
    granted_at: float
    deadline: float  # its holder is killed then


class SlicePolicy:
    """Requests, turns and their deadlines. Times are of whatever clock the caller has.

    The resident that was served longest ago goes first. A new one counts as served just now: one
    that dies and comes again gains nothing.
    """

    def __init__(self, limits: SliceLimits | None = None) -> None:
        self._limits = limits or SliceLimits()
        self._last_grants: dict[str, int] = {}  # by resident: the number of its last grant
        self._grant_count = 0
        self._waiting: dict[str, SliceRequest] = {}  # by ticket, in the order of asking
        self._grants: dict[str, SliceGrant] = {}  # by ticket
        self._being_killed: set[str] = set()  # tickets of holders that are being killed

    @property
    def waiting(self) -> tuple[SliceRequest, ...]:
        return tuple(self._waiting.values())

    @property
    def grants(self) -> tuple[SliceGrant, ...]:
        """Turns that occupy their ranks now, also those of holders that are being killed."""
        return tuple(self._grants.values())

    def enqueue(self, request: SliceRequest, now: float) -> None:
        """Puts a request in line; nothing if it is there or granted already. What another process
        of the same resident had is void: that one is dead.
        """
        for other in self._requests_of(request.instance):
            if (other.incarnation, other.generation) != (request.incarnation, request.generation):
                self._drop(other.ticket)
        if request.ticket not in self._grants and request.ticket not in self._waiting:
            self._waiting[request.ticket] = request
            self._last_grants.setdefault(request.instance, self._grant_count)

    def get_grant(self, ticket: str) -> SliceGrant | None:
        """The turn of this request, unless it waits, is void, or its holder is being killed."""
        return None if ticket in self._being_killed else self._grants.get(ticket)

    def release(self, ticket: str) -> bool:
        """The turn or the request is over; whether there was one. A holder that is being killed
        gives nothing back: it may do anything until it is dead.
        """
        if ticket in self._being_killed:
            return False
        return self._drop(ticket)

    def instance_exited(self, instance: str) -> None:
        """The resident has no process any more."""
        for asked in self._requests_of(instance):
            self._drop(asked.ticket)

    def retain_instances(self, generations: Mapping[str, int], deadline: float) -> None:
        """Whoever is not among these residents, by generation, waits for no turn, and has until
        then to give back the one that it holds: it may still be computing.
        """
        for asked in self.waiting:
            if generations.get(asked.instance) != asked.generation:
                self._drop(asked.ticket)
        for ticket, held in self._grants.items():
            if generations.get(held.request.instance) != held.request.generation:
                self._grants[ticket] = replace(held, deadline=min(held.deadline, deadline))
        self._last_grants = {r: at for r, at in self._last_grants.items() if r in generations}

    def grant_waiting(self, now: float) -> list[SliceGrant]:
        """Gives turns to all who can have one now."""
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
            taken |= asked.ranks  # who waits ahead keeps them: many small ones never starve a gang
        return granted

    def extend_deadlines(self, granted_before: float, lag_s: float) -> None:
        """The keeper heard nobody for so long: who had a turn by `since` has it so much longer."""
        for ticket, held in self._grants.items():
            if held.granted_at <= granted_before:
                self._grants[ticket] = replace(held, deadline=held.deadline + lag_s)

    def take_overdue(self, now: float) -> list[SliceGrant]:
        """Turns whose holders are to be killed, each told once; `dead` frees their ranks."""
        late = [
            h for t, h in self._grants.items() if h.deadline <= now and t not in self._being_killed
        ]
        self._being_killed.update(held.request.ticket for held in late)
        return late

    def holder_killed(self, grant: SliceGrant) -> None:
        self._drop(grant.request.ticket)

    def next_deadline(self) -> float:
        """When the next turn is overdue; infinity when none is held."""
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
