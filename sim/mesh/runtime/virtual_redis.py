"""Redis of the virtual mesh that may be unreachable, slow, or lose replies, with the clients of
each process.

A client repeats unanswered commands as redis-py does: for about two seconds, whether or not the
command was executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from meshrl.common.base.random import Random
from meshrl.common.state.redis.client import (
    RENEWAL_RETRIES,
    RETRIES,
    SCRIPTS_DIR,
    StateClient,
    load_script,
)
from meshrl.sim.redis.client import SimulatedRedisClient, SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.virtual_machine import MachineClock
from meshrl.sim.virtual_process import VirtualProcess

MEAN_LATENCY_S = 0.0004  # mean from a command to its execution, without faults
DELAYED_SHARE = 0.2  # share of commands with a delay, without faults
BACKOFF_S, MAX_BACKOFF_S = 0.02, 0.5


class VirtualRedis:
    """Simulated Redis server with its current faults."""

    def __init__(self, clock: MachineClock, random: Random) -> None:
        """Create a server. `clock` is its own: it may differ from those of its clients."""
        self.clock, self.random = clock, random
        self.server = SimulatedRedisServer(clock)
        self.client, self.sync_client = (
            SimulatedRedisClient(self.server),
            SimulatedSyncRedisClient(self.server),
        )
        self.is_unreachable = False
        self.mean_latency_s = MEAN_LATENCY_S
        self.is_owner_only = False  # it has restarted, and admits only its owner
        self.reply_loss = 0.0  # share of lost replies
        self.command_listeners: list[
            Callable[[tuple[Any, ...]], None]
        ] = []  # called with each command
        self.reset_listeners: list[Callable[[], None]] = []  # called before it loses its state
        self.restart_listeners: list[
            Callable[[], None]
        ] = []  # called after a restart without its state

    def restart(self, saved_state: Any = None) -> None:
        """Restart with a state saved by `copy_state`; None: empty. The owner then admits the
        mesh.
        """
        for listener in self.reset_listeners:
            listener()
        if saved_state is None:
            self.server.lose_state()
        else:
            self.server.restore_state(saved_state)
        self.is_owner_only = True
        for listener in self.restart_listeners:
            listener()

    def clear_faults(self) -> None:
        self.is_unreachable, self.mean_latency_s, self.reply_loss = False, MEAN_LATENCY_S, 0.0

    async def execute(self, words: tuple[Any, ...], is_owner: bool) -> Any:
        """Try a command once."""
        if self.mean_latency_s > MEAN_LATENCY_S or self.random.random() < DELAYED_SHARE:
            await self.clock.sleep(self.random.expovariate(1 / self.mean_latency_s))
        if self.is_unreachable or (self.is_owner_only and not is_owner):
            raise RedisConnectionError("no server listens")
        for listener in self.command_listeners:
            listener(words)
        reply: Any = await self.client.execute_command(*words)
        if self.reply_loss and self.random.random() < self.reply_loss:
            raise RedisConnectionError("the connection was lost")
        return reply

    def execute_sync(self, words: tuple[Any, ...]) -> Any:
        if self.is_unreachable or self.is_owner_only:
            raise RedisConnectionError("no server listens")
        reply: Any = self.sync_client.execute_command(*words)
        if self.reply_loss and self.random.random() < self.reply_loss:
            raise RedisConnectionError("the connection was lost")
        return reply


class _VirtualRedisClient:
    """Client for the loop of one process; `owner`: admitted before the mesh."""

    def __init__(self, server: VirtualRedis, process: VirtualProcess, is_owner: bool) -> None:
        self._server, self._process, self._is_owner = server, process, is_owner

    async def execute_command(self, *words: Any) -> Any:
        self._process.machine.record.log_event(
            f"redis {self._process.label} {get_script_name(words)}"
        )
        for attempt in range(RETRIES + 1):
            try:
                return await self._server.execute(words, self._is_owner)
            except RedisConnectionError:
                if attempt == RETRIES:
                    raise
            await self._server.clock.sleep(min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S))
        raise AssertionError


class _VirtualSyncRedisClient:
    """Client for the threads of one process."""

    def __init__(self, server: VirtualRedis) -> None:
        self._server = server

    def execute_command(self, *words: Any) -> Any:
        for attempt in range(RENEWAL_RETRIES + 1):
            try:
                return self._server.execute_sync(words)
            except RedisConnectionError:
                if attempt == RENEWAL_RETRIES:
                    raise
        raise AssertionError


def open_state(
    server: VirtualRedis, process: VirtualProcess, is_owner: bool = False
) -> StateClient:
    clients: tuple[Any, Any] = (
        _VirtualRedisClient(server, process, is_owner),
        _VirtualSyncRedisClient(server),
    )
    return StateClient("simulated:", *clients, server.clock.monotonic)


def get_script_name(words: tuple[Any, ...]) -> str:
    """Return the name of the script that a command runs, or the command's own."""
    if words[0] == "EVALSHA":
        return _load_script_names().get(words[1], "?")
    if words[0] == "EVAL":
        return _load_script_names().get(
            hashlib.sha1(words[1].encode(), usedforsecurity=False).hexdigest(), "?"
        )
    return str(words[0])


@cache
def _load_script_names() -> dict[str, str]:
    scripts = (path.stem for path in SCRIPTS_DIR.glob("*/[!_]*.lua") if path.stem != "prelude")
    return {load_script(name)[1]: name for name in scripts}
