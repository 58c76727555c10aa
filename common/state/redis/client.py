"""The connection to Redis: registered scripts, bounded retries, one error when Redis is away."""

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
# Both tries of a renewal together are shorter than a lease: one that is answered late, after an
# outage, would not know yet that Redis was away.
RENEWAL_TIMEOUT_S = 2.0
DEADLINE_S = 20.0  # for one script, all its retries included
MAX_ACKNOWLEDGED = (
    32  # operations that the next one tells of, so that it stays small after an outage
)
MAX_CONNECTIONS = 16  # most in one process; further coroutines queue for one
UNREACHABLE_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
AUTH_ERRORS = (AuthenticationError, AuthorizationError)
# How answers begin to a script that does what its caller may not.
ACL_FAILURE_PREFIXES = ("ACL failure in script", "The user executing the script can't")
DISK_FULL_PREFIXES = ("MISCONF", "NOREPLICAS")  # how answers begin that a full disk brings about


def find_script(name: str) -> Path:
    """The path of a script, whose name occurs once in all folders of `scripts`."""
    [found] = SCRIPTS_DIR.glob(f"*/{name}.lua")
    return found


@cache
def load_script(name: str) -> tuple[str, str]:
    """(source, sha1) of a script: its name, the prelude, the fragments it names, and itself."""
    body = find_script(name).read_text()
    uses = re.match(r"-- uses: (.+)", body)
    fragments = [f"_{part}" for part in uses.group(1).split()] if uses else []
    parts = [find_script(part).read_text() for part in ["prelude", *fragments]]
    source = "\n".join([f"local SCRIPT = '{name}'", *parts, body])
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisClient(Protocol):
    """What State needs of redis-py's client for the loop."""

    def execute_command(self, *words: Any) -> Awaitable[Any]:
        """The reply; redis-py's errors."""

    def aclose(self) -> Awaitable[None]:
        """Closes all connections."""


class SyncRedisClient(Protocol):
    """What State needs of redis-py's client for threads."""

    def execute_command(self, *words: Any) -> Any:
        """The reply; redis-py's errors."""

    def close(self) -> None:
        """Closes all connections."""


class StateClient:
    """The connection to Redis. `run` is for the loop, `run_sync` for the lease renewal thread."""

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
        # Keys of operations whose answers have come: they are let go of with the next operation.
        self._acknowledged_ops: deque[str] = deque()
        # Renews the lease of this process, and says whether it is held; set by who holds one.
        self.renew_lease: Callable[[], Awaitable[bool]] | None = None

    @classmethod
    async def open(cls, url: str, *, connect_timeout_s: float = 10) -> StateClient:
        """Connects and pings; StateUnavailable when there is no answer within `connect_timeout_s`,
        or the mesh's own Redis lets nobody in yet; ConfigError when `url` is none, or names what is
        no Redis or one that refuses us.
        """
        common: dict[str, Any] = {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": min(2.0, connect_timeout_s),
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
                **common | {"socket_timeout": RENEWAL_TIMEOUT_S},
            )
        except ValueError as error:
            raise ConfigError(
                f"this is no URL of a Redis: {Url.parse(url).redact(str(error))}",
                where=redact_password(url),
                fix="Write redis://HOST:PORT/0, rediss://HOST:PORT/0 (TLS) or unix:///PATH",
            ) from error
        state = cls(url, redis.asyncio.Redis.from_pool(pool), redis.Redis.from_pool(sync_pool))
        try:
            await state.run_command("PING", deadline_s=connect_timeout_s)
        except StateUnavailable as error:
            await state.close()
            if (refusal := find_auth_error(error)) is not None and not is_gated(url):
                raise _connection_error(url, refusal) from error
            raise
        except (ResponseError, InvalidResponse) as error:
            await state.close()
            raise _connection_error(url, error) from error
        return state

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        """The script's answer, decoded; the MeshError of its refusal; StateUnavailable.

        The first scripts after an outage that outlasted the lease of this process are refused until
        the next renewal takes it up again: that is done at once, and the script, which changed
        nothing, runs again.
        """
        try:
            return await self._run_script(script, keys, *args)
        except Fenced:
            if self.renew_lease is None or not await self.renew_lease():
                raise
        return await self._run_script(script, keys, *args)

    async def run_job_script(self, script: str, job: str, /, **args: Any) -> Any:
        """What `run` gives of a script of a job, which is among its arguments."""
        return await self.run_script(script, [job_prefix(job)], {"job": job, **args})

    async def run_mesh_script(self, script: str, /, **args: Any) -> Any:
        """What `run` gives of a script of the mesh."""
        return await self.run_script(script, [MESH_PREFIX], args)

    async def _run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        operation = args[0].get("op") if args and isinstance(args[0], dict) else None
        told = list(islice(self._acknowledged_ops, MAX_ACKNOWLEDGED)) if operation else []
        if told:
            args = ({**args[0], "answered": told}, *args[1:])
        source, sha = load_script(script)
        words = [len(keys), *keys, *map(_encode_argument, args)]
        try:
            reply = await self.run_command("EVALSHA", sha, *words)
        except NoScriptError:  # a new or flushed server: EVAL registers the script as well
            reply = await self.run_command("EVAL", source, *words)
        answer = _decode_reply(script, reply)
        if operation:
            for key in told:
                with contextlib.suppress(ValueError):  # another operation has told of it meanwhile
                    self._acknowledged_ops.remove(key)
            self._acknowledged_ops.append(f"{keys[0]}:op:{script}:{operation}")
        return answer

    def run_script_sync(self, script: str, keys: list[str], *args: Any) -> Any:
        """What `run` does, for threads, with a client of its own."""
        try:
            reply = _evaluate(self._sync_client, script, keys, *args)
        except (*UNREACHABLE_ERRORS, ResponseError) as error:
            unavailable = self._translate_error(error)
            self._is_unreachable = True
            raise unavailable from error
        self._last_reply_s, self._is_unreachable = self._monotonic(), False
        return _decode_reply(script, reply)

    def get_outage_ms(self) -> int:
        """How long Redis has given the renewal thread no answer, in ms; 0 while it answers."""
        return int((self._monotonic() - self._last_reply_s) * 1000) if self._is_unreachable else 0

    async def run_command(self, *words: Any, deadline_s: float = DEADLINE_S) -> Any:
        """One Redis command; StateUnavailable when there is no answer by the deadline."""
        send = self.client.execute_command
        task = asyncio.current_task()
        asked = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(deadline_s):
                reply = await send(*words)
                # redis-py sends through asyncio.wait_for, which in Python 3.11 swallows a
                # cancellation that comes as the bytes leave.
                if task and task.cancelling() > asked:
                    raise asyncio.CancelledError
                return reply
        except (*UNREACHABLE_ERRORS, ResponseError, TimeoutError) as error:
            raise self._translate_error(error) from error

    async def close(self) -> None:
        """Closes both clients' connections, the one that needs no waiting first."""
        self._sync_client.close()
        await self.client.aclose()

    def _translate_error(self, error: BaseException) -> StateUnavailable:
        """The error that a caller may retry; other answers are a fault of ours and go through."""
        if isinstance(error, ResponseError):
            in_script = any(begins in str(error) for begins in ACL_FAILURE_PREFIXES)
            if isinstance(error, NoPermissionError) or in_script:
                raise NotAllowed(
                    f"Redis does not allow this process that: {error}",
                    where=redact_password(self.url),
                    fix="common/state/hosts/acl.py tells what its role may do. All hosts of a "
                    "mesh must run the same version of MeshRL.",
                ) from error
            full = isinstance(error, OutOfMemoryError | ReadOnlyError)
            if not full and not str(error).startswith(DISK_FULL_PREFIXES):
                raise error
            return StateUnavailable(
                f"Redis refuses writes: {error}",
                where=redact_password(self.url),
                fix="See whether its disk or memory is full, and that it is a primary.",
            )
        if is_gated(self.url) and (isinstance(error, AUTH_ERRORS) or find_auth_error(error)):
            return StateUnavailable(
                "Redis lets nobody in yet: the launcher looks whether it is as it was",
                where=redact_password(self.url),
                fix="That takes a moment; then see the launcher's output.",
            )
        return StateUnavailable(
            f"Redis does not answer: {error or type(error).__name__}",
            where=redact_password(self.url),
            fix="See whether it runs (`meshrl status`) and what $MESHRL_REDIS_URL names.",
        )


def open_sync_client(url: str, deadline_s: float) -> SyncRedisClient:
    """A client for threads, which tries once and waits for `deadline_s` at most; it connects when
    it is first asked.
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
    """A script's answer for threads, as `run_sync` gives it; StateUnavailable also when the server
    refuses us: then we are to know nothing.
    """
    try:
        return _decode_reply(script, _evaluate(client, script, keys, *args))
    except (*UNREACHABLE_ERRORS, ResponseError) as error:
        said = f"Redis does not answer: {error or type(error).__name__}"
        raise StateUnavailable(said, fix="See whether it runs (`meshrl status`).") from error


def _evaluate(client: SyncRedisClient, script: str, keys: list[str], *args: Any) -> Any:
    source, sha = load_script(script)
    words = [len(keys), *keys, *map(_encode_argument, args)]
    try:
        return client.execute_command("EVALSHA", sha, *words)
    except NoScriptError:
        return client.execute_command("EVAL", source, *words)


async def read_server_time_ms(state: StateClient) -> float:
    """The server's time, which leases and waits are compared with."""
    seconds, micros = await state.run_command("TIME")
    return int(seconds) * 1000 + int(micros) / 1000


def find_auth_error(error: BaseException) -> BaseException | None:
    """The server's refusal to let us in, which redis-py made a broken connection of, that is behind
    an error; None: there is none.
    """
    cause = error.__cause__
    while cause is not None and not isinstance(cause, AUTH_ERRORS):
        cause = cause.__cause__
    return cause


def _connection_error(url: str, error: BaseException) -> ConfigError:
    if isinstance(error, InvalidResponse):
        said, fix = (
            f"what answers there is no Redis: {error}",
            "See whether host and port are right",
        )
    else:
        said = f"Redis refuses us: {error}"
        fix = "Write user and password into the URL: redis://USER:PASSWORD@HOST:PORT/0"
    return ConfigError(said, where=redact_password(url), fix=fix)


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def _encode_argument(value: Any) -> Any:
    if isinstance(value, dict | list):
        return _encode_json(value)
    return value


def _decode_reply(script: str, reply: Any) -> Any:
    if not isinstance(reply, str):
        raise RedisError(f"script {script} answered {reply!r}, not JSON")
    answer = json.loads(reply)
    if isinstance(answer, dict) and "refusal" in answer:
        raise from_wire(answer["refusal"], answer["text"])
    return answer
