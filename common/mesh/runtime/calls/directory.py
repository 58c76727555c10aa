"""Directory of actors: their addresses, looked up in the registry and cached until they prove
wrong.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import (
    DeadlineExceeded,
    HandshakeFailed,
    MeshError,
    PeerLost,
    StateUnavailable,
    WrongKeys,
)
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5
DEAD_AFTER_LOOKUPS = 2  # lookups without a lease: leases return after an outage of Redis


@dataclass(frozen=True, slots=True)
class Route:
    """Address and incarnation of an actor."""

    actor: str
    address: str
    incarnation: str


class ActorDirectory:
    """Routes that this process has cached from the registry."""

    def __init__(
        self,
        state: StateClient,
        clock: Clock,
        waits: WaitTable,
        verify: Callable[[registry.RegistryEntry], Awaitable[None]] | None = None,
    ) -> None:
        """Create a directory. `verify` raises HandshakeFailed for an entry whose key is wrong."""
        self._state, self._clock, self._waits = state, clock, waits
        self._verify = verify
        self._is_stale = False
        self.redis_silent_at = -math.inf  # monotonic time of the last unanswered lookup
        self._routes: dict[str, Route] = {}
        self._lookups: dict[str, asyncio.Task[registry.RegistryEntry | None]] = {}
        self._missing_counts: dict[Route, int] = {}

    def find_cached(self, name: str) -> Route | None:
        """Return the cached route of an actor; None if it must be looked up."""
        if self._is_stale:
            self._is_stale = False
            self._routes.clear()
        return self._routes.get(name)

    def invalidate(self) -> None:
        """Invalidate all routes, because keys may have been revoked. Runs on any thread."""
        self._is_stale = True

    def forget(self, route: Route) -> None:
        """Drop a route that proved wrong, unless a newer one has replaced it."""
        if self._routes.get(route.actor) is route:
            del self._routes[route.actor]

    def forget_address(self, address: str) -> None:
        """Drop all routes to a process."""
        for route in [r for r in self._routes.values() if r.address == address]:
            del self._routes[route.actor]

    async def find(self, name: str, deadline: float) -> Route:
        """Find the current route of `name`.

        Raises PeerLost if no process with a right key holds the name until the deadline, and
        WrongKeys as soon as that is certain.
        """
        pause = FIRST_RETRY_S
        why: MeshError | None = None
        with self._waits.wait("its registry entry", name):
            while True:
                try:
                    entry = await self._look_up(name, deadline)
                    if entry is not None and entry.alive:
                        if self._verify is not None:
                            await self._verify(entry)
                        found = Route(entry.name, entry.address, entry.incarnation)
                        if self._routes.get(entry.name) != found:
                            self._routes[entry.name] = found
                        return self._routes[entry.name]
                    why = _make_missing_error(name, entry)
                except (StateUnavailable, DeadlineExceeded) as error:
                    why, self.redis_silent_at = why or error, self._clock.monotonic()
                except WrongKeys:
                    raise
                except HandshakeFailed as error:
                    why = error
                if self._clock.monotonic() + pause >= deadline:
                    raise why
                await self._clock.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_S)

    async def _look_up(self, name: str, deadline: float) -> registry.RegistryEntry | None:
        """Query the registry once; concurrent callers share the query."""
        task = self._lookups.get(name)
        if task is None:
            task = asyncio.create_task(registry.lookup(self._state, name), name=f"look up {name}")
            self._lookups[name] = task
            task.add_done_callback(lambda _: self._lookups.pop(name, None))
        remaining_s = max(deadline - self._clock.monotonic(), 0.001)
        async with self._clock.timeout(remaining_s, f"looking up {name}"):
            return await asyncio.shield(task)

    async def find_dead(self, routes: Iterable[Route]) -> list[Route]:
        """Return routes whose process has lost its name: it may be stopped, its connection open.

        No process counts as dead while Redis is unavailable, nor at the first lookup after an
        outage.
        """
        doubted = self._missing_counts
        self._missing_counts = {}
        found = []
        for route in routes:
            entry = await registry.lookup(self._state, route.actor)
            if entry is not None and entry.alive:
                if entry.incarnation != route.incarnation:
                    found.append(route)
            elif (doubts := doubted.get(route, 0) + 1) >= DEAD_AFTER_LOOKUPS:
                found.append(route)
            else:
                self._missing_counts[route] = doubts
        return found

    def stop(self) -> None:
        """Cancel lookups in progress."""
        for task in self._lookups.values():
            task.cancel()


def _make_missing_error(name: str, entry: registry.RegistryEntry | None) -> PeerLost:
    if entry is None:
        return PeerLost(
            f"no process is registered as {name}",
            where="registry",
            fix="Run `meshrl status` to list the processes",
        )
    return PeerLost(
        f"{name} has lost its lease (pid {entry.pid} on {entry.host})",
        where="registry",
        fix="Run `meshrl logs` to see why it exited",
    )
