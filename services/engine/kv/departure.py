"""Departure of requests and their KV caches from an engine whose host is about to end.

Requests leave in the order of the prefill that a second of transfer saves, while the others still
compute. When the host ends, the caches that have left saved most, whenever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.telemetry.tracing import current_call
from meshrl.services.engine.kv.cache_moves import CacheMoves

MAX_LEAVING = 4  # requests that leave at a time: as many as another engine fetches together
START_S = 1.0  # after which a cache that no engine fetches is not waited for
FIXED_S = 0.02  # of a transfer of any size: request, first pause of the engine, first chunk
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class DepartingCache:
    """Cache of a session with a running request."""

    request: int
    session: int
    saved_s: float  # to compute it elsewhere
    transfer_s: float  # above 0

    @property
    def value(self) -> float:
        """Seconds saved by a second of transfer."""
        return self.saved_s / self.transfer_s


def order_departures(caches: Sequence[DepartingCache], left_s: float) -> list[DepartingCache]:
    """Return the caches that begin to leave within `left_s`, in the order of their transfers.

    The last one may arrive in part. The others are computed again.
    """
    order: list[DepartingCache] = []
    for cache in sorted(caches, key=lambda one: (-one.value, one.transfer_s, one.request)):
        if left_s <= 0:
            break
        order.append(cache)
        left_s -= cache.transfer_s
    return order


def read_call_time_s(clock: Clock) -> float:
    """Return the seconds until the deadline of the call that is being served; 0: none is."""
    scope = current_call.get()
    return scope.deadline - clock.monotonic() if scope is not None else 0.0


class Departure:
    """Departure of the running requests of one engine.

    `read_requests` returns session and tokens of each request, `abort` ends requests with all
    their tokens delivered, and `read_prefill_rate` returns tokens per second, 0: not measured.
    """

    def __init__(
        self,
        clock: Clock,
        moves: CacheMoves,
        bytes_per_token: int,
        read_prefill_rate: Callable[[], float],
        read_requests: Callable[[], Mapping[int, tuple[int, int]]],
        abort: Callable[[Collection[int]], None],
    ) -> None:
        self._clock, self._moves, self._bytes_per_token = clock, moves, bytes_per_token
        self._read_prefill_rate, self._read_requests = read_prefill_rate, read_requests
        self._abort = abort
        self.order: list[int] = []  # sessions, as they were told to leave
        self._exported = set[int]()
        moves.on_exported = self._exported.add

    async def run(self, left_s: float) -> None:
        """Let requests leave with their caches, and return within `left_s` seconds.

        Requests for whose caches the time does not suffice are still running.
        """
        until_s = self._clock.monotonic() + left_s
        leaving: dict[int, float] = {}  # session -> since when
        while (now_s := self._clock.monotonic()) < until_s:
            for session, since_s in list(leaving.items()):
                is_late = session not in self._moves.exporting and now_s - since_s > START_S
                if session in self._exported or is_late:
                    del leaving[session]
            order = order_departures(self._list_caches(leaving), until_s - now_s)
            if not order and not leaving:
                return
            if chosen := order[: MAX_LEAVING - len(leaving)]:
                leaving |= {cache.session: now_s for cache in chosen}
                self.order += [cache.session for cache in chosen]
                self._abort([cache.request for cache in chosen])
            await self._clock.sleep(POLL_S)

    def _list_caches(self, leaving: Collection[int]) -> list[DepartingCache]:
        """Return the caches of the requests that have not been told to leave."""
        prefill, s_per_byte = self._read_prefill_rate(), self._moves.export_rate.s_per_byte
        return [
            DepartingCache(
                request,
                session,
                tokens / prefill if prefill else float(tokens),
                FIXED_S + tokens * self._bytes_per_token * s_per_byte,
            )
            for request, (session, tokens) in self._read_requests().items()
            if session not in leaving and session not in self.order
        ]
