"""Client of Redis: registered scripts, bounded retries, and one error for an unavailable Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from meshrl.common.base.errors import ConfigError, Fenced, NotAllowed, StateUnavailable, from_wire
from meshrl.common.base.urls import Url
from meshrl.common.state.redis.embedded_server import is_gated, redact_password
from meshrl.common.state.redis.keys import MESH_PREFIX, job_prefix

SCRIPTS_DIR = Path(__file__).parent / "scripts"
SOCKET_TIMEOUT_S = 5.0  # scripts take microseconds; a fsync of a busy disk may take seconds
BACKOFF = ExponentialBackoff(cap=0.5, base=0.02)
RETRIES = 6  # with this backoff, about two seconds: a supervisor restarts Redis in less
RENEWAL_RETRIES = 1  # the renewal thread tries again by itself
# Both tries of a renewal together are shorter than a lease. A renewal that is answered late, after
# an outage, would not have noticed the outage.
RENEWAL_TIMEOUT_S = 2.0
DEADLINE_S = 20.0  # for one script, all its retries included
# operations that the next one acknowledges, so that it stays small after an outage
MAX_ACKNOWLEDGED = 32
MAX_CONNECTIONS = 16  # per process; further coroutines wait for a free connection
UNREACHABLE_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
AUTH_ERRORS = (AuthenticationError, AuthorizationError)
# Prefixes of answers to a script that exceeds its caller's permissions.
ACL_FAILURE_PREFIXES = ("ACL failure in script", "The user executing the script can't")
DISK_FULL_PREFIXES = ("MISCONF", "NOREPLICAS")  # prefixes of answers when the disk is full


def find_script(name: str) -> Path:
    """Return the path of a script. Script names are unique across all folders of `scripts`."""
    [found] = SCRIPTS_DIR.glob(f"*/{name}.lua")
    return found


@cache
def load_script(name: str) -> tuple[str, str]:
    """Return (source, sha1) of a script: its name, the prelude, the fragments it uses, and its
    body.
    """
    body = find_script(name).read_text()
    uses = re.match(r"-- uses: (.+)", body)
    fragments = [f"_{part}" for part in uses.group(1).split()] if uses else []
    parts = [find_script(part).read_text() for part in ["prelude", *fragments]]
    source = "\n".join([f"local SCRIPT = '{name}'", *parts, body])
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisClient(Protocol):
    """Subset of redis-py's asyncio client that `StateClient` uses."""

    def execute_command(self, *words: Any) -> Awaitable[Any]:
        """Execute a command and return the reply; raise redis-py's errors."""

    def aclose(self) -> Awaitable[None]:
        """Close all connections."""


class SyncRedisClient(Protocol):
    """Subset of redis-py's synchronous client that `StateClient` uses."""

    def execute_command(self, *words: Any) -> Any:
        """Execute a command and return the reply; raise redis-py's errors."""

    def close(self) -> None:
        """Close all connections."""


class StateClient:
    """Client of Redis.

    `run_script` is for the event loop, `run_script_sync` for the lease renewal thread.
    """

    def __init__(
        self,
        url: str,
        client: RedisClient,
        sync_client: SyncRedisClient,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.client = client
        self._sync_client = sync_client
        self._monotonic = monotonic
        self._last_reply_s = monotonic()  # when Redis last answered the renewal thread
        self._is_unreachable = False
        # Keys of answered operations: the next operation acknowledges them.
        self._acknowledged_ops: deque[str] = deque()
        # Renews the lease of this process; True if the lease is live. Set by the holder of a lease.
        self.renew_lease: Callable[[], Awaitable[bool]] | None = None

    @classmethod
    async def open(cls, url: str, *, connect_timeout_s: float = 10) -> StateClient:
        """Connect to Redis and send PING.

        Raises:
            StateUnavailable: no answer within `connect_timeout_s`, or the mesh's own Redis does not
                admit processes yet.
            ConfigError: `url` is not a URL, names a server that is not Redis, or the server
                rejects the credentials.
        """
        common: dict[str, Any] = {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": min(SOCKET_TIMEOUT_S, connect_timeout_s),
            "decode_responses": True,
            "protocol": 2,
        }
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=DEADLINE_S,
                retry=AsyncRetry(BACKOFF, RETRIES),
                **common,
            )
            sync_pool = redis.ConnectionPool.from_url(
                url,
                retry=Retry(BACKOFF, RENEWAL_RETRIES),
                **common
                | {
                    "socket_timeout": RENEWAL_TIMEOUT_S,
                    "socket_connect_timeout": min(RENEWAL_TIMEOUT_S, connect_timeout_s),
                },
            )
        except ValueError as error:
            raise ConfigError(
                f"this is not the URL of a Redis: {Url.parse(url).redact(str(error))}",
                where=redact_password(url),
                fix="Write redis://HOST:PORT/0, rediss://HOST:PORT/0 (TLS) or unix:///PATH",
            ) from error
        state = cls(url, redis.asyncio.Redis.from_pool(pool), redis.Redis.from_pool(sync_pool))
        try:
            await state.run_command("PING", deadline_s=connect_timeout_s)
        except StateUnavailable as error:
            await state.close()
            if (auth_error := find_auth_error(error)) is not None and not is_gated(url):
                raise _connection_error(url, auth_error) from error
            raise
        except (ResponseError, InvalidResponse) as error:
            await state.close()
            raise _connection_error(url, error) from error
        return state

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        """Run a script and return its decoded answer.

        Raise the MeshError of a rejection, or StateUnavailable. After an outage longer than this
        process's lease, scripts are fenced until the next renewal restores the lease. In that case
        this method renews the lease at once and runs the script again: the fenced script changed
        nothing.
        """
        try:
            return await self._run_script(script, keys, *args)
        except Fenced:
            if self.renew_lease is None or not await self.renew_lease():
                raise
        return await self._run_script(script, keys, *args)

    async def run_job_script(self, script: str, job: str, /, **args: Any) -> Any:
        """Run a script of a job, with the job's name among its arguments; see `run_script`."""
        return await self.run_script(script, [job_prefix(job)], {"job": job, **args})

    async def run_mesh_script(self, script: str, /, **args: Any) -> Any:
        """Run a script of the mesh; see `run_script`."""
        return await self.run_script(script, [MESH_PREFIX], args)

    async def _run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        operation = args[0].get("op") if args and isinstance(args[0], dict) else None
        acknowledged = list(islice(self._acknowledged_ops, MAX_ACKNOWLEDGED)) if operation else []
        if acknowledged:
            args = ({**args[0], "acknowledged": acknowledged}, *args[1:])
        source, sha = load_script(script)
        words = [len(keys), *keys, *map(_encode_argument, args)]
        try:
            reply = await self.run_command("EVALSHA", sha, *words)
        except NoScriptError:  # a new or flushed server: EVAL registers the script as well
            reply = await self.run_command("EVAL", source, *words)
        answer = _decode_reply(script, reply)
        if operation:
            for key in acknowledged:
                with contextlib.suppress(ValueError):  # another operation has acknowledged it
                    self._acknowledged_ops.remove(key)
            self._acknowledged_ops.append(f"{keys[0]}:op:{script}:{operation}")
        return answer

    def run_script_sync(self, script: str, keys: list[str], *args: Any) -> Any:
        """Run a script from a thread, over the synchronous client; see `run_script`."""
        try:
            reply = _evaluate(self._sync_client, script, keys, *args)
        except (*UNREACHABLE_ERRORS, ResponseError) as error:
            unavailable = self._translate_error(error)
            self._is_unreachable = True
            raise unavailable from error
        self._last_reply_s, self._is_unreachable = self._monotonic(), False
        return _decode_reply(script, reply)

    def get_outage_ms(self) -> int:
        """Return the time since Redis last answered the renewal thread, in ms; 0 if it answers."""
        return int((self._monotonic() - self._last_reply_s) * 1000) if self._is_unreachable else 0

    async def run_command(self, *words: Any, deadline_s: float = DEADLINE_S) -> Any:
        """Execute one Redis command; StateUnavailable if there is no answer by the deadline."""
        send = self.client.execute_command
        task = asyncio.current_task()
        earlier_cancellations = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(deadline_s):
                reply = await send(*words)
                # redis-py sends through asyncio.wait_for, which in Python 3.11 swallows a
                # cancellation that comes as the bytes leave.
                if task and task.cancelling() > earlier_cancellations:
                    raise asyncio.CancelledError
                return reply
        except (*UNREACHABLE_ERRORS, ResponseError, TimeoutError) as error:
            raise self._translate_error(error) from error

    async def close(self) -> None:
        """Close both clients' connections, the synchronous ones first."""
        self._sync_client.close()
        await self.client.aclose()

    def _translate_error(self, error: BaseException) -> StateUnavailable:
        """Return the error that a caller may retry; raise errors that a retry cannot fix."""
        if isinstance(error, ResponseError):
            in_script = any(prefix in str(error) for prefix in ACL_FAILURE_PREFIXES)
            if isinstance(error, NoPermissionError) or in_script:
                raise NotAllowed(
                    f"Redis does not permit this process to do that: {error}",
                    where=redact_password(self.url),
                    fix="common/state/hosts/acl.py lists the permissions of its role. All hosts of "
                    "a mesh must run the same version of MeshRL.",
                ) from error
            is_full = isinstance(error, OutOfMemoryError | ReadOnlyError)
            if not is_full and not str(error).startswith(DISK_FULL_PREFIXES):
                raise error
            return StateUnavailable(
                f"Redis rejects writes: {error}",
                where=redact_password(self.url),
                fix="See whether its disk or memory is full, and that it is a primary.",
            )
        if is_gated(self.url) and (isinstance(error, AUTH_ERRORS) or find_auth_error(error)):
            return StateUnavailable(
                "Redis admits no process yet: the launcher is checking whether it has lost data",
                where=redact_password(self.url),
                fix="Wait a moment; if it lasts, read the launcher's output.",
            )
        return StateUnavailable(
            f"Redis does not answer: {error or type(error).__name__}",
            where=redact_password(self.url),
            fix="See whether it runs (`meshrl status`) and what $MESHRL_REDIS_URL names.",
        )


def open_sync_client(url: str, deadline_s: float) -> SyncRedisClient:
    """Return a client for threads.

    It connects at its first command, does not retry, and waits at most `deadline_s`.
    """
    return redis.Redis.from_url(
        url,
        socket_timeout=deadline_s,
        socket_connect_timeout=deadline_s,
        decode_responses=True,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )


def run_script_once(client: SyncRedisClient, script: str, keys: list[str], *args: Any) -> Any:
    """Run a script once from a thread and return its answer, like `run_script_sync`.

    StateUnavailable also when the server rejects the credentials: the caller then knows nothing.
    """
    try:
        return _decode_reply(script, _evaluate(client, script, keys, *args))
    except (*UNREACHABLE_ERRORS, ResponseError) as error:
        message = f"Redis does not answer: {error or type(error).__name__}"
        raise StateUnavailable(message, fix="See whether it runs (`meshrl status`).") from error


def _evaluate(client: SyncRedisClient, script: str, keys: list[str], *args: Any) -> Any:
    source, sha = load_script(script)
    words = [len(keys), *keys, *map(_encode_argument, args)]
    try:
        return client.execute_command("EVALSHA", sha, *words)
    except NoScriptError:
        return client.execute_command("EVAL", source, *words)


async def read_server_time_ms(state: StateClient) -> float:
    """Return the server's time in ms. Leases and waits are compared with it."""
    seconds, micros = await state.run_command("TIME")
    return int(seconds) * 1000 + int(micros) / 1000


def find_auth_error(error: BaseException) -> BaseException | None:
    """Return the authentication error that caused an error; None if there is none.

    redis-py reports an authentication error as a broken connection.
    """
    cause = error.__cause__
    while cause is not None and not isinstance(cause, AUTH_ERRORS):
        cause = cause.__cause__
    return cause


def _connection_error(url: str, error: BaseException) -> ConfigError:
    if isinstance(error, InvalidResponse):
        message, fix = (
            f"the server at this address is not Redis: {error}",
            "See whether host and port are right",
        )
    else:
        message = f"Redis rejects this connection: {error}"
        fix = "Write user and password into the URL: redis://USER:PASSWORD@HOST:PORT/0"
    return ConfigError(message, where=redact_password(url), fix=fix)


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def _encode_argument(value: Any) -> Any:
    if isinstance(value, dict | list):
        return _encode_json(value)
    return value


def _decode_reply(script: str, reply: Any) -> Any:
    if not isinstance(reply, str):
        raise RedisError(f"script {script} answered {reply!r}, not JSON")
    answer = json.loads(reply)
    if isinstance(answer, dict) and "error_code" in answer:
        raise from_wire(answer["error_code"], answer["text"])
    return answer
