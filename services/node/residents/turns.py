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

FUNCTIONS = ("generate", "score", "train_step", "warm_start", "sync", "save")


@dataclass(frozen=True, slots=True)
class Leases:
    """How long a turn may last, by what its holder expects."""

    factor: float = 8.0  # times what was expected: other bins are longer, and hosts are shared
    floor_s: float = 15.0  # a busy host delays even the shortest piece by seconds
    cap_s: float = 3600.0  # the deadline of one piece of arithmetic
    unknown_s: float = 600.0  # nothing is expected yet: a first piece may compile its kernels

    def lasts_s(self, estimate_s: float) -> float:
        """Seconds that a turn may last; `estimate_s` 0: nothing is known."""
        if estimate_s <= 0.0:
            return min(self.unknown_s, self.cap_s)
        return min(max(self.floor_s, self.factor * estimate_s), self.cap_s)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    ticket: str  # its own name, which no other request has
    resident: str
    generation: int
    incarnation: str  # of the process that asks,
    number: int  # how many it has made,
    process: str  # and its name
    function: str  # one of FUNCTIONS
    estimate_s: float  # 0: not known
    ranks: frozenset[int]  # all that the resident occupies


@dataclass(frozen=True, slots=True)
class GrantedTurn:
    asked: TurnRequest
    since: float
    until: float  # its holder is killed then


class TurnOrder:
    """Requests, turns and their deadlines. Times are of whatever clock the caller has.

    The resident that was served longest ago goes first. A new one counts as served just now: one
    that dies and comes again gains nothing.
    """

    def __init__(self, leases: Leases | None = None) -> None:
        self._leases = leases or Leases()
        self._served: dict[str, int] = {}  # by resident: the number of its last grant
        self._grants = 0
        self._waiting: dict[str, TurnRequest] = {}  # by ticket, in the order of asking
        self._held: dict[str, GrantedTurn] = {}  # by ticket
        self._ending: set[str] = set()  # tickets of holders that are being killed

    @property
    def waiting(self) -> tuple[TurnRequest, ...]:
        return tuple(self._waiting.values())

    @property
    def held(self) -> tuple[GrantedTurn, ...]:
        """Turns that occupy their ranks now, also those of holders that are being killed."""
        return tuple(self._held.values())

    def ask(self, asked: TurnRequest, now: float) -> None:
        """Puts a request in line; nothing if it is there or granted already. What another process
        of the same resident had is void: that one is dead.
        """
        for other in self._of(asked.resident):
            if (other.incarnation, other.generation) != (asked.incarnation, asked.generation):
                self._drop(other.ticket)
        if asked.ticket not in self._held and asked.ticket not in self._waiting:
            self._waiting[asked.ticket] = asked
            self._served.setdefault(asked.resident, self._grants)

    def holds(self, ticket: str) -> GrantedTurn | None:
        """The turn of this request, unless it waits, is void, or its holder is being killed."""
        return None if ticket in self._ending else self._held.get(ticket)

    def give_back(self, ticket: str) -> bool:
        """The turn or the request is over; whether there was one. A holder that is being killed
        gives nothing back: it may do anything until it is dead.
        """
        if ticket in self._ending:
            return False
        return self._drop(ticket)

    def gone(self, resident: str) -> None:
        """The resident has no process any more."""
        for asked in self._of(resident):
            self._drop(asked.ticket)

    def keep(self, generations: Mapping[str, int], until: float) -> None:
        """Whoever is not among these residents, by generation, waits for no turn, and has until
        then to give back the one that it holds: it may still be computing.
        """
        for asked in self.waiting:
            if generations.get(asked.resident) != asked.generation:
                self._drop(asked.ticket)
        for ticket, held in self._held.items():
            if generations.get(held.asked.resident) != held.asked.generation:
                self._held[ticket] = replace(held, until=min(held.until, until))
        self._served = {r: at for r, at in self._served.items() if r in generations}

    def grant(self, now: float) -> list[GrantedTurn]:
        """Gives turns to all who can have one now."""
        taken = frozenset[int]().union(*(held.asked.ranks for held in self._held.values()))
        granted = []
        for asked in sorted(self.waiting, key=lambda asked: self._served[asked.resident]):
            if not taken & asked.ranks:
                del self._waiting[asked.ticket]
                self._grants += 1
                self._served[asked.resident] = self._grants
                held = GrantedTurn(asked, now, now + self._leases.lasts_s(asked.estimate_s))
                self._held[asked.ticket] = held
                granted.append(held)
            taken |= asked.ranks  # who waits ahead keeps them: many small ones never starve a gang
        return granted

    def stood_still(self, since: float, lag_s: float) -> None:
        """The keeper heard nobody for so long: who had a turn by `since` has it so much longer."""
        for ticket, held in self._held.items():
            if held.since <= since:
                self._held[ticket] = replace(held, until=held.until + lag_s)

    def overdue(self, now: float) -> list[GrantedTurn]:
        """Turns whose holders are to be killed, each told once; `dead` frees their ranks."""
        late = [h for t, h in self._held.items() if h.until <= now and t not in self._ending]
        self._ending.update(held.asked.ticket for held in late)
        return late

    def dead(self, held: GrantedTurn) -> None:
        self._drop(held.asked.ticket)

    def due(self) -> float:
        """When the next turn is overdue; infinity when none is held."""
        return min(
            (h.until for t, h in self._held.items() if t not in self._ending), default=math.inf
        )

    def _of(self, resident: str) -> list[TurnRequest]:
        every = [*self._waiting.values(), *(held.asked for held in self._held.values())]
        return [asked for asked in every if asked.resident == resident]

    def _drop(self, ticket: str) -> bool:
        self._ending.discard(ticket)
        waited = self._waiting.pop(ticket, None)
        held = self._held.pop(ticket, None)
        return waited is not None or held is not None
