"""What each role may ask of each kind of process, over CURVE with a key for each process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from loadtests.doors.calls import methods
from loadtests.doors.matrix import ANSWERS, role_matrix, without_key
from loadtests.doors.plan import Process
from meshrl.common.api.calls.callers import CALLERS, ROLES
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.doorway import Doorway
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.seams import Access, Seams, Terms
from meshrl.common.mesh.transport.zmq import ZmqTransport
from meshrl.common.state.hosts import doors
from meshrl.common.state.redis.client import State
from meshrl.sim.redis.client import SimulatedSyncRedis
from meshrl.sim.redis.server import RedisServer
from meshrl.sim.redis.state import state_on
from tests.answering import answering
from tests.meshes import PATIENT

HOST = "head-000001"

Opened = Callable[..., Awaitable[Process]]


@pytest.fixture
async def state() -> AsyncIterator[State]:
    """The owner's, of a mesh of one host."""
    found = state_on(RedisServer(SystemClock()), State, SystemClock())
    await doors.admit_host(found, HOST)
    yield found
    await found.close()


@pytest.fixture
async def opened(state: State) -> AsyncIterator[Opened]:
    """`await opened(kind)` -> a process of that kind, with the mesh's own table."""
    clock, meshes = SystemClock(), []

    async def join(kind: str, callers: Any = CALLERS, ran: list[str] | None = None) -> Process:
        name = f"node/{HOST}" if kind == "node" else f"{kind}/0"
        client = SimulatedSyncRedis(state.client.server)  # type: ignore[attr-defined]
        doorway = await Doorway.enter(name, kind, HOST, state, client, clock)
        mesh = Mesh(
            name,
            kind,
            Seams(
                state=state,
                transport=ZmqTransport(keys=doorway.keys),
                clock=clock,
                random=Random.system(),
                host=SystemHost(),
            ),
            settings=MeshSettings(redis_url="", run_root="", host=HOST),
            terms=Terms(**PATIENT),
            access=Access(callers=callers, doorway=doorway),
        )
        meshes.append(mesh)
        await mesh.join(answering(kind, [] if ran is None else ran))
        return Process(name, mesh.transport.address, mesh.incarnation)

    yield join
    for mesh in meshes:
        await mesh.leave()


async def test_each_role_may_call_what_the_table_says_and_nothing_else(
    opened: Opened, state: State
) -> None:
    ran: list[str] = []
    processes = [await opened(kind, ran=ran) for kind in (*ANSWERS, "gateway")]
    before = {(row.role, row.name) for row in await doors.rows(state)}
    matrix = await role_matrix(dict.fromkeys(ROLES, state), HOST, processes)
    assert matrix.errors == []
    assert matrix.tried > len(ROLES) * len(processes) * len(methods()) * 9 // 10
    assert not ran
    assert {(row.role, row.name) for row in await doors.rows(state)} == before


async def test_a_table_that_is_not_the_mesh_s_own_is_found_out(
    opened: Opened, state: State
) -> None:
    wide = {**CALLERS, "Weights.save": CALLERS["Weights.save"] | {"sandbox"}}
    narrow = {label: roles - {"worker"} for label, roles in CALLERS.items()}
    weights = await opened("weights", wide)
    engine = await opened("engine", narrow)
    errors = (await role_matrix(dict.fromkeys(ROLES, state), HOST, [weights, engine])).errors
    assert len(errors) >= 3
    assert any("Weights.save of weights/0 by a sandbox" in error for error in errors)
    assert any("Resting.drain of engine/0 by a worker" in error for error in errors)


async def test_without_a_key_no_method_of_any_process_answers(opened: Opened) -> None:
    processes = [await opened(kind) for kind in ("engine", "weights", "gateway")]
    tried, answered = without_key(processes)
    assert answered == []
    assert tried == 3 * len(processes) * 2 * len(methods())
