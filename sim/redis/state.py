"""A State on a simulated Redis, under a given clock: the real scripts, no server."""

from __future__ import annotations

from typing import TypeVar

from meshrl.common.state.redis.client import State
from meshrl.sim.redis.client import SimulatedRedis, SimulatedSyncRedis
from meshrl.sim.redis.server import RedisServer, WallClock

S = TypeVar("S", bound=State)


def simulated_state(clock: WallClock) -> State:
    """On a new server, whose TIME and expiry follow `clock`."""
    return simulated_as(State, clock)


def simulated_as(kind: type[S], clock: WallClock) -> S:
    """The same as a `kind` of State, for instance one that fails."""
    return state_on(RedisServer(clock), kind, clock)


def state_on(server: RedisServer, kind: type[S], clock: WallClock) -> S:
    """A further one on a server that others use as well, or whose faults somebody sets."""
    clients = SimulatedRedis(server), SimulatedSyncRedis(server)
    return kind("simulated:", *clients, clock.monotonic)
