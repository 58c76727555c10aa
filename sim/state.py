"""Redis inside this process, under a clock of ours: the real scripts, no server."""

from __future__ import annotations

import importlib
import threading
import time
from types import TracebackType
from typing import Any, Protocol, TypeVar

import fakeredis
import redis
import redis.asyncio
from fakeredis import FakeServer

from common.state.client import State

VERSION = (7,)  # the command set that we write for
READS_TIME = (
    "fakeredis._helpers",
    "fakeredis._socket._base",
    "fakeredis.commands_mixins.server_mixin",
    "fakeredis.model._stream",
)


S = TypeVar("S", bound=State)


class WallClock(Protocol):
    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class _ServersClock:
    """Stands for the module `time` inside fakeredis: the clock of the server at work, else the real
    time.
    """

    def __init__(self) -> None:
        self.at_work = threading.local()

    def time(self) -> float:
        clock: WallClock | None = getattr(self.at_work, "clock", None)
        return time.time() if clock is None else clock.wall()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


_CLOCK = _ServersClock()


class _ClockedLock:
    """The lock of one server. fakeredis holds it while it runs a command, so that whoever holds it
    sets the time.
    """

    def __init__(self, clock: WallClock) -> None:
        self._lock = threading.Lock()
        self._clock = clock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            _CLOCK.at_work.clock = self._clock
        return taken

    def release(self) -> None:
        _CLOCK.at_work.clock = None
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def simulated_clients(clock: WallClock) -> tuple[redis.asyncio.Redis, redis.Redis]:
    """An asynchronous and a synchronous client of one in-process server that lives by `clock`."""
    for module in READS_TIME:
        importlib.import_module(module).time = _CLOCK  # type: ignore[attr-defined]
    server = FakeServer(version=VERSION)
    server.lock = _ClockedLock(clock)  # type: ignore[assignment]
    return (
        fakeredis.FakeAsyncRedis(server=server, decode_responses=True, protocol=2),
        fakeredis.FakeRedis(server=server, decode_responses=True, protocol=2),
    )


def simulated_state(clock: WallClock) -> State:
    """An in-process Redis whose TIME and expiry follow `clock`."""
    return simulated_as(State, clock)


def simulated_as(kind: type[S], clock: WallClock) -> S:
    """The same as a `kind` of State, for instance one that fails."""
    client, sync_client = simulated_clients(clock)
    return kind("simulated:", client, sync_client, clock.monotonic)
