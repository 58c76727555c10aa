"""Watchdog of the mesh's own Redis: it sends a PING each second and kills a silent server.

It also cuts off connections that stay unauthenticated too long, or of which there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.mesh.process.child_handle import ChildProcess
from meshrl.common.mesh.process.diagnosis.failure import read_tail
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient

CHECK_INTERVAL_S = 1.0
PING_TIMEOUT_S = 2.0
MAX_SILENCES = 4  # in a row, 2 s each: 8 s without an answer, and it is killed and started again
START_TIMEOUT_S = 20.0  # reading its append-only file may take a while
NO_ANSWER_ERRORS = (RedisError, OSError, TimeoutError)
# Unauthenticated connections take the places of authenticated ones.
MAX_UNAUTHENTICATED_S = (
    5  # for a handshake and a password: milliseconds, and a second on a busy host
)
MAX_UNAUTHENTICATED = (
    64  # unauthenticated clients at a time; all clients together are at most 10,000
)
# A client of no user is listed as one of `default`, whose password no process has.
UNAUTHENTICATED_CLIENT = re.compile(r"\bid=(\d+) .*\bage=(\d+) .*\buser=default\b")
OWNER_TIMEOUT_S = 5.0  # for an answer to the server's owner (the launcher)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def is_answering(url: str) -> bool:
    """Send one PING and return whether any answer came.

    The answer of a server that still loads its data, or whose disk is full, counts: killing it
    would not help.
    """
    task = asyncio.current_task()
    cancel_requests = task.cancelling() if task else 0
    try:
        await _ping(url)
        has_answered = True
    except (BusyLoadingError, ResponseError):
        has_answered = True
    except NO_ANSWER_ERRORS:
        has_answered = False
    if task and task.cancelling() > cancel_requests:
        raise asyncio.CancelledError  # redis-py swallows one that comes as the bytes leave
    return has_answered


async def _ping(url: str) -> None:
    client = Redis.from_url(
        url, socket_timeout=PING_TIMEOUT_S, socket_connect_timeout=PING_TIMEOUT_S
    )
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            await client.ping()
    finally:
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()


async def wait_until_ready(
    url: str, clock: Clock, child: ChildProcess | None, log: Path | None
) -> None:
    """Return when Redis takes commands; else raise StateUnavailable with the end of its log."""
    until = clock.monotonic() + START_TIMEOUT_S
    while clock.monotonic() < until and (child is None or child.poll() is None):
        try:
            return await _ping(url)
        except NO_ANSWER_ERRORS:
            await clock.sleep(0.03)
    log_tail = " / ".join(read_tail(log, 3)) if log else ""
    fix = (
        f"Check its log {log}, which ends: {log_tail}"
        if log
        else "Check the server that $MESHRL_REDIS_URL names"
    )
    where = embedded_server.redact_password(url)
    raise StateUnavailable("Redis does not start", where=where, fix=fix)


async def watch_server(url: str, clock: Clock, children: list[ChildProcess]) -> None:
    """Kill the newest Redis in `children` (the last one) when it stays silent; never returns.

    Silences are counted, not timed: a launcher that was stopped itself must not blame Redis.
    """
    silent: tuple[int, int] = (0, 0)  # pid, silences in a row
    while True:
        await clock.sleep(CHECK_INTERVAL_S)
        server = children[-1]
        has_answered = await is_answering(url)
        silent = (
            server.pid,
            0 if has_answered else 1 + (silent[1] if silent[0] == server.pid else 0),
        )
        if silent[1] >= MAX_SILENCES and server.poll() is None:
            server.kill()
            silent = (server.pid, 0)


def select_clients_to_kill(client_list: str) -> list[str]:
    """Return the ids of clients to cut off, the oldest first, from Redis's list of clients."""
    found = [
        match.groups()
        for match in map(UNAUTHENTICATED_CLIENT.search, client_list.splitlines())
        if match
    ]
    by_age: Sequence[tuple[str, int]] = sorted(
        ((client, int(age)) for client, age in found), key=lambda one: -one[1]
    )
    excess = len(by_age) - MAX_UNAUTHENTICATED
    return [
        client
        for n, (client, age) in enumerate(by_age)
        if age >= MAX_UNAUTHENTICATED_S or n < excess
    ]


async def kill_unauthenticated_clients(owner: StateClient, clock: Clock) -> None:
    while True:
        await clock.sleep(CHECK_INTERVAL_S)
        with contextlib.suppress(StateUnavailable, DeadlineExceeded):
            listed = await owner.run_command("CLIENT", "LIST", deadline_s=OWNER_TIMEOUT_S)
            for client in select_clients_to_kill(str(listed)):
                await owner.run_command("CLIENT", "KILL", "ID", client, deadline_s=OWNER_TIMEOUT_S)
