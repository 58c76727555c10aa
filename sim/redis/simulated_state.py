"""A State on a simulated Redis, under a given clock: the real scripts, no server."""

from __future__ import annotations

from typing import TypeVar

from meshrl.common.state.redis.client import StateClient
from meshrl.sim.redis.client import SimulatedRedisClient, SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer, WallClock

S = TypeVar("S", bound=StateClient)


def open_simulated_state(clock: WallClock) -> StateClient:
    """On a new server, whose TIME and expiry follow `clock`."""
    return open_simulated_state_as(StateClient, clock)


def open_simulated_state_as(state_class: type[S], clock: WallClock) -> S:
    """The same as a `kind` of State, for instance one that fails."""
    return open_state_on(SimulatedRedisServer(clock), state_class, clock)


def open_state_on(server: SimulatedRedisServer, state_class: type[S], clock: WallClock) -> S:
    """A further one on a server that others use as well, or whose faults somebody sets."""
    clients = SimulatedRedisClient(server), SimulatedSyncRedisClient(server)
    return state_class("simulated:", *clients, clock.monotonic)
