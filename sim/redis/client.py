"""Clients of a simulated server, which handle its faults as redis-py does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from meshrl.common.state.redis.client import (
    BACKOFF,
    RENEWAL_RETRIES,
    RENEWAL_TIMEOUT_S,
    RETRIES,
    SOCKET_TIMEOUT_S,
)
from meshrl.sim.redis.server import SimulatedRedisServer


def _encode_argument(value: Any) -> str | bytes:
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(
            f"Invalid input of type: {type(value).__name__!r}. "
            "Convert to a bytes, string, int or float first."
        )
    return repr(value)


def _is_ok(reply: Any) -> Any:
    return reply == "OK" if reply is not None else None


def _parse_stream_entries(reply: list[Any]) -> list[tuple[str, dict[str, str]]]:
    return [(id_, dict(zip(flat[::2], flat[1::2], strict=True))) for id_, flat in reply]


# Conversion of replies by redis-py, by command.
REPLY_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "SET": _is_ok,
    "FLUSHALL": _is_ok,
    "PING": lambda reply: reply == "PONG",
    "TIME": lambda reply: (int(reply[0]), int(reply[1])),
    "XRANGE": _parse_stream_entries,
    "XREVRANGE": _parse_stream_entries,
}


def _execute(server: SimulatedRedisServer, words: tuple[Any, ...]) -> Any:
    reply = server.execute(
        tuple([word if type(word) is str else _encode_argument(word) for word in words])
    )
    converter = REPLY_CONVERTERS.get(words[0])
    return reply if converter is None else converter(reply)


def _execute_with_faults(
    server: SimulatedRedisServer, words: tuple[Any, ...], timeout_s: float
) -> Any:
    """Execute a command; raise the client's error if the server is unreachable, or slower than
    `timeout_s`.
    """
    faults = server.faults
    if faults.is_unreachable:
        raise RedisConnectionError("Error 111 connecting to the simulated Redis.")
    reply = _execute(server, words)
    if faults.lost_replies > 0 or faults.delay_s > timeout_s:
        faults.lost_replies = max(faults.lost_replies - 1, 0)
        raise RedisTimeoutError("Timeout reading from the simulated Redis")
    return reply


class SimulatedRedisClient:
    """Client for the loop. It waits on the loop's time, virtual or not."""

    def __init__(self, server: SimulatedRedisServer) -> None:
        self.server = server
        self._retry = AsyncRetry(BACKOFF, RETRIES)

    async def execute_command(self, *words: Any) -> Any:
        """Execute a command; other tasks run before its reply."""
        if self.server.faults.affects_delivery:
            return await self._retry.call_with_retry(lambda: self._execute_slowly(words), _on_retry)
        reply = _execute(self.server, words)
        await asyncio.sleep(0)
        return reply

    async def _execute_slowly(self, words: tuple[Any, ...]) -> Any:
        try:
            reply = _execute_with_faults(self.server, words, SOCKET_TIMEOUT_S)
        except RedisTimeoutError:
            await asyncio.sleep(SOCKET_TIMEOUT_S)
            raise
        await asyncio.sleep(self.server.faults.delay_s)
        return reply

    async def aclose(self) -> None:
        """Do nothing, as the client has no connection."""


async def _on_retry(_error: Exception) -> None:
    """Do nothing; the real client closes the connection here."""


class SimulatedSyncRedisClient:
    """Client for the renewal thread. No clock advances while it waits."""

    def __init__(self, server: SimulatedRedisServer) -> None:
        self.server = server
        self._retry = Retry(NoBackoff(), RENEWAL_RETRIES)

    def execute_command(self, *words: Any) -> Any:
        if self.server.faults.affects_delivery:
            return self._retry.call_with_retry(
                lambda: _execute_with_faults(self.server, words, RENEWAL_TIMEOUT_S),
                lambda _error: None,
            )
        return _execute(self.server, words)

    def close(self) -> None:
        """Do nothing, as the client has no connection."""
