"""Engine as a rate curve: every decoding sequence gets a token per step. A step takes the predicted
time for its sequences and contexts, and a prefill delays all of them.

Progress is a shared count of steps. So adding or removing a request costs the logarithm of the
number of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.speeds import SimSpeed

RATE_REFRESH_TOKENS = 512.0  # tokens of progress between updates of the rate, as contexts grow
TOKEN_EPSILON = 1e-6  # tokens that count as none


@dataclass(eq=False, slots=True)
class SimRequest:
    """Turn to generate: `remaining_tokens` after `context_tokens`, of which the engine has
    `cached_tokens`.
    """

    remaining_tokens: float
    context_tokens: float
    cached_tokens: float
    on_end: Callable[[], None]
    made_tokens: float = 0.0  # tokens, when it is not at an engine
    start_step: float = field(default=0.0, repr=False)  # the engine's progress when it joined


class SimEngine:
    """Gang that generates for one job. Waiting requests are served in order of arrival."""

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
        self.generated_tokens = 0.0  # total of generated tokens,
        self.busy_s = 0.0  # seconds of generation,
        self.prefilled_tokens = 0.0  # and total of prefilled tokens
        self._event_queue, self.speed, self._capacity_tokens = (
            event_queue,
            speed,
            speed.get_capacity_tokens(),
        )
        self._progress_steps = 0.0  # steps so far
        self._updated_s = self._started_s = event_queue.now_s  # time of that count
        self._blocked_until_s = 0.0  # no decoding until then: a prefill, a pull of weights
        self._steps_per_s = 0.0  # steps per second
        self._running: list[tuple[float, int, SimRequest]] = []  # by the step of each end
        self._context_offset = 0.0  # their context tokens, less the steps so far of each
        self._waiting: deque[SimRequest] = deque()
        self._sequence_number = 0
        self._event_number = 0  # number of the valid event: others are obsolete

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: SimRequest) -> None:
        """Submit a request; its `on_end` is called at the end of its turn."""
        self._advance()
        self._waiting.append(request)
        self._start_waiting()
        self._schedule_next()

    def block(self, seconds: float) -> None:
        self._advance()
        self._blocked_until_s = max(self._blocked_until_s, self._event_queue.now_s) + seconds
        self._schedule_next()

    def release(self, request: SimRequest) -> None:
        """Release a request, with its generated tokens."""
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
        """Release all requests, running ones first."""
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

    # -- progress ----------------------------------------------------------------------------------

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
        """Update a request with its generated tokens."""
        new_tokens = min(request.remaining_tokens, self._progress_steps - request.start_step)
        self._context_offset -= request.context_tokens - request.start_step
        request.made_tokens += new_tokens
        request.remaining_tokens -= new_tokens
        request.context_tokens += new_tokens

    def _schedule_next(self) -> None:
        """Schedule the next end of a request or update of the rate."""
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
        finished: list[SimRequest] = []
        while self._running and self._running[0][0] - self._progress_steps <= TOKEN_EPSILON:
            request = heappop(self._running)[2]
            self._update_request(request)
            finished.append(request)
        self._start_waiting()
        self._schedule_next()
        for request in finished:
            request.on_end()
