"""An engine as a rate curve: all sequences that it decodes get a token a step, and a step takes
what its cost says of so many sequences with so much context; a prefill holds up everybody's steps.

Progress is a count of steps that all share, so that who joins and who leaves costs the logarithm of
how many there are, whatever they do in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.speeds import SimSpeed

AHEAD = 512.0  # tokens of progress after which the rate is looked at again, as contexts grow
DONE = 1e-6  # tokens that count as none


@dataclass(eq=False, slots=True)
class SimRequest:
    """A turn to generate: `left` tokens behind `context`, of which the engine has `cached`."""

    left: float
    context: float
    cached: float
    ended: Callable[[], None]
    made: float = 0.0  # tokens, when it is not at an engine
    began: float = field(default=0.0, repr=False)  # the engine's progress when it joined


class SimEngine:
    """A gang that generates for one job. Who waits is served in the order in which he came."""

    def __init__(
        self, name: str, agenda: Agenda, speed: SimSpeed, slots: int, degree: int = 1
    ) -> None:
        self.name, self.degree, self.slots, self.version = name, degree, slots, 0
        self.kind = ""  # of its accelerators
        self.tokens = 0.0  # generated so far,
        self.busy_s = 0.0  # in so many seconds,
        self.prefilled = 0.0  # and prefilled
        self._agenda, self.speed, self._room = agenda, speed, speed.capacity()
        self._far = 0.0  # steps so far
        self._at_s = self._began_s = agenda.now_s  # as of then
        self._stands_s = 0.0  # until then nothing is decoded: a prefill, a pull of weights
        self._per_s = 0.0  # steps a second
        self._there: list[tuple[float, int, SimRequest]] = []  # by the step at which each ends
        self._held = 0.0  # tokens of context of those, less the steps so far of each
        self._waiting: deque[SimRequest] = deque()
        self._order = 0
        self._due = 0  # the event that counts: others are out of date

    @property
    def running(self) -> int:
        return len(self._there)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SimRequest) -> None:
        """Takes a request; its `ended` is called when its turn is over."""
        self._advance()
        self._waiting.append(request)
        self._fill()
        self._plan()

    def stand(self, seconds: float) -> None:
        self._advance()
        self._stands_s = max(self._stands_s, self._agenda.now_s) + seconds
        self._plan()

    def release(self, request: SimRequest) -> None:
        """Lets go of a request; what was made of it is in it."""
        self._advance()
        if request in self._waiting:
            self._waiting.remove(request)
            return
        self._there = [one for one in self._there if one[2] is not request]
        heapify(self._there)
        self._leave(request)
        self._fill()
        self._plan()

    def clear(self) -> list[SimRequest]:
        """Lets go of all, those that run first."""
        self._advance()
        running = [request for _, _, request in sorted(self._there)]
        for request in running:
            self._leave(request)
        found = [*running, *self._waiting]
        self._there.clear()
        self._waiting.clear()
        self._due += 1
        return found

    @property
    def lived_s(self) -> float:
        return self._agenda.now_s - self._began_s

    @property
    def steps(self) -> int:
        self._advance()
        return round(self._far)

    # -- its progress ------------------------------------------------------------------------------

    def _advance(self) -> None:
        now_s = self._agenda.now_s
        began_s = max(self._at_s, min(self._stands_s, now_s))
        if self._there:
            steps = (now_s - began_s) * self._per_s
            self._far += steps
            self.tokens += steps * len(self._there)
            self.busy_s += now_s - self._at_s
        self._at_s = now_s

    def _context(self) -> float:
        return self._held + self._far * len(self._there)

    def _fill(self) -> None:
        while self._waiting and len(self._there) < self.slots:
            request = self._waiting[0]
            if self._there and self._context() + request.context + request.left > self._room:
                return
            self._waiting.popleft()
            fresh = request.context - request.cached
            if fresh > 0:
                now_s = max(self._stands_s, self._agenda.now_s)
                self._stands_s = now_s + self.speed.prefill_s(fresh, request.cached)
                self.prefilled += fresh
            request.began = self._far
            self._held += request.context - self._far
            self._order += 1
            heappush(self._there, (self._far + request.left, self._order, request))

    def _leave(self, request: SimRequest) -> None:
        """Takes what was made of a request into it."""
        made = min(request.left, self._far - request.began)
        self._held -= request.context - request.began
        request.made += made
        request.left -= made
        request.context += made

    def _plan(self) -> None:
        """When the next request ends, or the rate is to be looked at again."""
        self._due += 1
        if not self._there:
            return
        count = len(self._there)
        self._per_s = 1.0 / self.speed.step_s(count, self._context() / count)
        steps = min(AHEAD, self._there[0][0] - self._far)
        due, now_s = self._due, self._agenda.now_s
        when_s = max(self._stands_s, now_s) + steps / self._per_s
        self._agenda.at(when_s, lambda: self._look(due))

    def _look(self, due: int) -> None:
        if due != self._due:
            return
        self._advance()
        over: list[SimRequest] = []
        while self._there and self._there[0][0] - self._far <= DONE:
            request = heappop(self._there)[2]
            self._leave(request)
            over.append(request)
        self._fill()
        self._plan()
        for request in over:
            request.ended()
