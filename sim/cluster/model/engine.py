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

from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.speeds import SimSpeed

RATE_REFRESH_TOKENS = (
    512.0  # tokens of progress after which the rate is looked at again, as contexts grow
)
TOKEN_EPSILON = 1e-6  # tokens that count as none


@dataclass(eq=False, slots=True)
class SimRequest:
    """A turn to generate: `left` tokens behind `context`, of which the engine has `cached`."""

    remaining_tokens: float
    context_tokens: float
    cached_tokens: float
    on_end: Callable[[], None]
    made_tokens: float = 0.0  # tokens, when it is not at an engine
    start_step: float = field(default=0.0, repr=False)  # the engine's progress when it joined


class SimEngine:
    """A gang that generates for one job. Who waits is served in the order in which he came."""

    def __init__(
        self,
        name: str,
        event_queue: EventQueue,
        speed: SimSpeed,
        slots: int,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.name, self.tensor_parallel_size, self.slots, self.version = (
            name,
            tensor_parallel_size,
            slots,
            0,
        )
        self.kind = ""  # of its accelerators
        self.generated_tokens = 0.0  # generated so far,
        self.busy_s = 0.0  # in so many seconds,
        self.prefilled_tokens = 0.0  # and prefilled
        self._event_queue, self.speed, self._capacity_tokens = (
            event_queue,
            speed,
            speed.get_capacity_tokens(),
        )
        self._progress_steps = 0.0  # steps so far
        self._updated_s = self._started_s = event_queue.now_s  # as of then
        self._blocked_until_s = 0.0  # until then nothing is decoded: a prefill, a pull of weights
        self._steps_per_s = 0.0  # steps a second
        self._running: list[tuple[float, int, SimRequest]] = []  # by the step at which each ends
        self._context_offset = 0.0  # tokens of context of those, less the steps so far of each
        self._waiting: deque[SimRequest] = deque()
        self._sequence_number = 0
        self._event_number = 0  # the event that counts: others are out of date

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SimRequest) -> None:
        """Takes a request; its `ended` is called when its turn is over."""
        self._advance()
        self._waiting.append(request)
        self._start_waiting()
        self._schedule_next()

    def block(self, seconds: float) -> None:
        self._advance()
        self._blocked_until_s = max(self._blocked_until_s, self._event_queue.now_s) + seconds
        self._schedule_next()

    def release(self, request: SimRequest) -> None:
        """Lets go of a request; what was made of it is in it."""
        self._advance()
        if request in self._waiting:
            self._waiting.remove(request)
            return
        self._running = [one for one in self._running if one[2] is not request]
        heapify(self._running)
        self._update_request(request)
        self._start_waiting()
        self._schedule_next()

    def release_all(self) -> list[SimRequest]:
        """Lets go of all, those that run first."""
        self._advance()
        running = [request for _, _, request in sorted(self._running)]
        for request in running:
            self._update_request(request)
        found = [*running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._event_number += 1
        return found

    @property
    def uptime_s(self) -> float:
        return self._event_queue.now_s - self._started_s

    @property
    def steps(self) -> int:
        self._advance()
        return round(self._progress_steps)

    # -- its progress ------------------------------------------------------------------------------

    def _advance(self) -> None:
        now_s = self._event_queue.now_s
        began_s = max(self._updated_s, min(self._blocked_until_s, now_s))
        if self._running:
            steps = (now_s - began_s) * self._steps_per_s
            self._progress_steps += steps
            self.generated_tokens += steps * len(self._running)
            self.busy_s += now_s - self._updated_s
        self._updated_s = now_s

    def _count_context_tokens(self) -> float:
        return self._context_offset + self._progress_steps * len(self._running)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting[0]
            if (
                self._running
                and self._count_context_tokens() + request.context_tokens + request.remaining_tokens
                > self._capacity_tokens
            ):
                return
            self._waiting.popleft()
            fresh = request.context_tokens - request.cached_tokens
            if fresh > 0:
                now_s = max(self._blocked_until_s, self._event_queue.now_s)
                self._blocked_until_s = now_s + self.speed.predict_prefill_s(
                    fresh, request.cached_tokens
                )
                self.prefilled_tokens += fresh
            request.start_step = self._progress_steps
            self._context_offset += request.context_tokens - self._progress_steps
            self._sequence_number += 1
            heappush(
                self._running,
                (self._progress_steps + request.remaining_tokens, self._sequence_number, request),
            )

    def _update_request(self, request: SimRequest) -> None:
        """Takes what was made of a request into it."""
        made = min(request.remaining_tokens, self._progress_steps - request.start_step)
        self._context_offset -= request.context_tokens - request.start_step
        request.made_tokens += made
        request.remaining_tokens -= made
        request.context_tokens += made

    def _schedule_next(self) -> None:
        """When the next request ends, or the rate is to be looked at again."""
        self._event_number += 1
        if not self._running:
            return
        count = len(self._running)
        self._steps_per_s = 1.0 / self.speed.predict_step_s(
            count, self._count_context_tokens() / count
        )
        steps = min(RATE_REFRESH_TOKENS, self._running[0][0] - self._progress_steps)
        due, now_s = self._event_number, self._event_queue.now_s
        when_s = max(self._blocked_until_s, now_s) + steps / self._steps_per_s
        self._event_queue.schedule_at(when_s, lambda: self._on_event(due))

    def _on_event(self, event_number: int) -> None:
        if event_number != self._event_number:
            return
        self._advance()
        over: list[SimRequest] = []
        while self._running and self._running[0][0] - self._progress_steps <= TOKEN_EPSILON:
            request = heappop(self._running)[2]
            self._update_request(request)
            over.append(request)
        self._start_waiting()
        self._schedule_next()
        for request in over:
            request.on_end()
