"""Simulation of one gang's queue of time slices under virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.services.node.slices.slice_policy import SlicePolicy, SliceRequest
from meshrl.services.node.slices.slice_queue import SliceQueue

RANKS = frozenset({0})


@dataclass(frozen=True)
class Source:
    """Sequence of computations of an instance, one after the other.

    Each has the seconds from the end of the one before to its request, and the seconds of its
    slice.
    """

    instance: str
    computations: Sequence[tuple[float, float]]
    ranks: frozenset[int] = RANKS


@dataclass(frozen=True)
class Switches:
    """Seconds to load and offload each instance; only the last holder is on the accelerator."""

    load_s: dict[str, float]
    offload_s: dict[str, float]

    def between(self, last: str | None, following: str) -> float:
        if last == following:
            return 0.0
        return self.load_s[following] + (self.offload_s[last] if last is not None else 0.0)


@dataclass
class Outcome:
    """Measured times of one policy, in seconds."""

    waits: list[float] = field(default_factory=list)  # until each slice began
    responses: list[float] = field(default_factory=list)  # until each slice ended
    makespan: float = 0.0
    switching: float = 0.0
    idle_beside_waiting: float = 0.0


class Simulation:
    """One gang, with the sources that request its slices."""

    def __init__(self, policy: SlicePolicy, sources: Sequence[Source], switches: Switches) -> None:
        self._sources, self._switches = sources, switches
        self._last: str | None = None
        self._queue = SliceQueue(policy, estimate_switch_s=self._estimate_switch_s)
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._outcome = Outcome()

    def run(self) -> Outcome:
        for number, source in enumerate(self._sources):
            self._push(source.computations[0][0], "request", (number, 0))
        idle_since: float | None = None
        while self._events:
            now = self._events[0][0]
            if idle_since is not None:
                self._outcome.idle_beside_waiting += now - idle_since
            while self._events and self._events[0][0] == now:
                _, _, kind, about = heapq.heappop(self._events)
                self._apply(now, kind, about)
            for chosen in self._queue.choose_waiting(now):
                request = chosen.request
                switch_s = self._estimate_switch_s(request)
                self._last = request.instance
                self._outcome.switching += switch_s
                self._push(now + switch_s, "begin", request)
            if self._queue.anticipates_until < float("inf"):
                self._push(self._queue.anticipates_until, "wake", None)
            is_idle = not self._queue.chosen and not self._queue.grants
            idle_since = now if is_idle and self._queue.waiting else None
        return self._outcome

    def _estimate_switch_s(self, request: SliceRequest) -> float:
        return self._switches.between(self._last, request.instance)

    def _push(self, at: float, kind: str, about: Any) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, about))

    def _apply(self, now: float, kind: str, about: Any) -> None:
        if kind == "request":
            number, index = about
            source = self._sources[number]
            ticket, service_s = f"{number}.{index}", source.computations[index][1]
            request = SliceRequest(
                *(ticket, source.instance, 1, "i", index, ticket, "train_step", service_s),
                source.ranks,
            )
            self._queue.enqueue(request, now)
        elif kind == "begin":
            grant = self._queue.begin(about.ticket, now)
            self._outcome.waits.append(now - grant.requested_at)
            self._push(now + about.estimate_s, "end", grant)
        elif kind == "end":
            self._queue.release(about.request.ticket, now)
            self._outcome.responses.append(now - about.requested_at)
            self._outcome.makespan = now
            number, index = map(int, about.request.ticket.split("."))
            if index + 1 < len(self._sources[number].computations):
                gap_s = self._sources[number].computations[index + 1][0]
                self._push(now + gap_s, "request", (number, index + 1))


def find_best_mean_response_s(sources: Sequence[Source], switches: Switches) -> float:
    """Return the least mean response time of single computations, over every order.

    An order may leave the gang idle until its next request.
    """
    pending = [(source.instance, *source.computations[0]) for source in sources]
    best = float("inf")

    def extend(left: frozenset[int], now: float, last: str | None, total: float) -> None:
        nonlocal best
        # each of the rest takes at least its own service
        if total + sum(pending[i][2] for i in left) >= best:
            return
        if not left:
            best = total
        for i in left:
            instance, at, service_s = pending[i]
            end = max(now, at) + switches.between(last, instance) + service_s
            extend(left - {i}, end, instance, total + end - at)

    extend(frozenset(range(len(pending))), 0.0, None, 0.0)
    return best / len(pending)
