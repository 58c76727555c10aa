"""A Redis for the virtual mesh that is away, slow, or loses replies, and each process's clients.

A client repeats what was not answered, as redis-py does: for about two seconds, whether or not the
command was run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from meshrl.common.base.random import Random
from meshrl.common.state.redis.client import RENEWAL_RETRIES, RETRIES, SCRIPTS, State, script_source
from meshrl.sim.machine import MachineClock
from meshrl.sim.process import VirtualProcess
from meshrl.sim.redis.client import SimulatedRedis, SimulatedSyncRedis
from meshrl.sim.redis.server import RedisServer

LATENCY_S = 0.0004  # mean from a command to its execution, when all is well
DELAYED = 0.2  # share of commands that are not executed at once even then
BACKOFF_S, LONGEST_BACKOFF_S = 0.02, 0.5


class VirtualRedis:
    """The server, and what is wrong with it now."""

    def __init__(self, clock: MachineClock, random: Random) -> None:
        """`clock` is its own: it may jump apart from those of its clients."""
        self.clock, self.random = clock, random
        self.server = RedisServer(clock)
        self.client, self.sync_client = SimulatedRedis(self.server), SimulatedSyncRedis(self.server)
        self.away = False
        self.slow_s = LATENCY_S
        self.shut = False  # it has started again, and only its owner is let in
        self.lost = 0.0  # share of replies that do not come
        self.before: list[Callable[[tuple[Any, ...]], None]] = []  # told of each command
        self.forgets: list[Callable[[], None]] = []  # told when it will lose what it has
        self.returns: list[Callable[[], None]] = []  # told when it is back without it

    def restart(self, held: Any = None) -> None:
        """Starts again with what a `server.copy` held; None: with nothing. Who owns it lets the
        mesh in.
        """
        for tell in self.forgets:
            tell()
        if held is None:
            self.server.lose()
        else:
            self.server.restart(held)
        self.shut = True
        for tell in self.returns:
            tell()

    def well(self) -> None:
        self.away, self.slow_s, self.lost = False, LATENCY_S, 0.0

    async def asked(self, words: tuple[Any, ...], owner: bool) -> Any:
        """One try of a command."""
        if self.slow_s > LATENCY_S or self.random.random() < DELAYED:
            await self.clock.sleep(self.random.expovariate(1 / self.slow_s))
        if self.away or (self.shut and not owner):
            raise RedisConnectionError("nobody listens")
        for tell in self.before:
            tell(words)
        reply: Any = await self.client.execute_command(*words)
        if self.lost and self.random.random() < self.lost:
            raise RedisConnectionError("the connection broke")
        return reply

    def asked_now(self, words: tuple[Any, ...]) -> Any:
        if self.away or self.shut:
            raise RedisConnectionError("nobody listens")
        reply: Any = self.sync_client.execute_command(*words)
        if self.lost and self.random.random() < self.lost:
            raise RedisConnectionError("the connection broke")
        return reply


class _Client:
    """For the loop of one process; `owner`: it is let in before the mesh is."""

    def __init__(self, server: VirtualRedis, process: VirtualProcess, owner: bool) -> None:
        self._server, self._process, self._owner = server, process, owner

    async def execute_command(self, *words: Any) -> Any:
        self._process.machine.record.say(f"redis {self._process.label} {script_of(words)}")
        for attempt in range(RETRIES + 1):
            try:
                return await self._server.asked(words, self._owner)
            except RedisConnectionError:
                if attempt == RETRIES:
                    raise
            await self._server.clock.sleep(min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S))
        raise AssertionError


class _SyncClient:
    """For the threads of one process."""

    def __init__(self, server: VirtualRedis) -> None:
        self._server = server

    def execute_command(self, *words: Any) -> Any:
        for attempt in range(RENEWAL_RETRIES + 1):
            try:
                return self._server.asked_now(words)
            except RedisConnectionError:
                if attempt == RENEWAL_RETRIES:
                    raise
        raise AssertionError


def state_of(server: VirtualRedis, process: VirtualProcess, owner: bool = False) -> State:
    clients: tuple[Any, Any] = _Client(server, process, owner), _SyncClient(server)
    return State("simulated:", *clients, server.clock.monotonic)


def script_of(words: tuple[Any, ...]) -> str:
    """The name of the script that a command runs, or the command's own."""
    if words[0] == "EVALSHA":
        return _names().get(words[1], "?")
    if words[0] == "EVAL":
        return _names().get(hashlib.sha1(words[1].encode(), usedforsecurity=False).hexdigest(), "?")
    return str(words[0])


@cache
def _names() -> dict[str, str]:
    scripts = (path.stem for path in SCRIPTS.glob("*/[!_]*.lua") if path.stem != "prelude")
    return {script_source(name)[1]: name for name in scripts}
