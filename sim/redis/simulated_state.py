"""StateClient on a simulated Redis, with a given clock: the real scripts without a server."""

from __future__ import annotations

from typing import TypeVar

from meshrl.common.state.redis.client import StateClient
from meshrl.sim.redis.client import SimulatedRedisClient, SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer, WallClock

S = TypeVar("S", bound=StateClient)


def open_simulated_state(clock: WallClock) -> StateClient:
    """Open a state on a new server, whose TIME and expiry follow `clock`."""
    return open_simulated_state_as(StateClient, clock)


def open_simulated_state_as(state_class: type[S], clock: WallClock) -> S:
    """Open a state as `state_class`, for instance one with failures."""
    return open_state_on(SimulatedRedisServer(clock), state_class, clock)


def open_state_on(server: SimulatedRedisServer, state_class: type[S], clock: WallClock) -> S:
    """Open a further state on a shared server, or on one with faults."""
    clients = SimulatedRedisClient(server), SimulatedSyncRedisClient(server)
    return state_class("simulated:", *clients, clock.monotonic)
