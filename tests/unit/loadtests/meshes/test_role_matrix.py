"""Calls of each role to each kind of process, over CURVE with a key for each process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from loadtests.doors.calls import methods
from loadtests.doors.matrix import ANSWERS, role_matrix, without_key
from loadtests.doors.plan import Process
from meshrl.common.api.calls.call_permissions import CALL_PERMISSIONS, ROLES
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import AccessRules, LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.process_credentials import ProcessCredentials
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state.hosts import credentials
from meshrl.common.state.redis.client import StateClient
from meshrl.sim.redis.client import SimulatedSyncRedisClient
from meshrl.sim.redis.server import SimulatedRedisServer
from meshrl.sim.redis.simulated_state import open_state_on
from tests.meshes import PATIENT
from tests.recording_actors import make_recording_actor

HOST = "head-000001"

Opened = Callable[..., Awaitable[Process]]


@pytest.fixture
async def state() -> AsyncIterator[StateClient]:
    """Return the owner's connection in a mesh of one host."""
    found = open_state_on(SimulatedRedisServer(SystemClock()), StateClient, SystemClock())
    await credentials.admit_host(found, HOST)
    yield found
    await found.close()


@pytest.fixture
async def open_process(state: StateClient) -> AsyncIterator[Opened]:
    """Return a function that opens a process of a kind with the mesh's own permission table."""
    clock, meshes = SystemClock(), []

    async def join(
        kind: str, callers: Any = CALL_PERMISSIONS, ran: list[str] | None = None
    ) -> Process:
        name = f"node/{HOST}" if kind == "node" else f"{kind}/0"
        client = SimulatedSyncRedisClient(state.client.server)  # type: ignore[attr-defined]
        doorway = await ProcessCredentials.register(name, kind, HOST, state, client, clock)
        mesh = Mesh(
            name,
            kind,
            MeshDependencies(
                state=state,
                transport=ZmqTransport(keys=doorway.keys),
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
            ),
            settings=MeshSettings(redis_url="", run_root="", host=HOST),
            terms=LeaseTerms(**PATIENT),
            access=AccessRules(callers=callers, credentials=doorway),
        )
        meshes.append(mesh)
        await mesh.join(make_recording_actor(kind, [] if ran is None else ran))
        return Process(name, mesh.transport.address, mesh.incarnation)

    yield join
    for mesh in meshes:
        await mesh.leave()


async def test_each_role_may_call_exactly_what_the_table_permits(
    open_process: Opened, state: StateClient
) -> None:
    ran: list[str] = []
    processes = [await open_process(kind, ran=ran) for kind in (*ANSWERS, "gateway")]
    before = {(row.role, row.process) for row in await credentials.list_credentials(state)}
    matrix = await role_matrix(dict.fromkeys(ROLES, state), HOST, processes)
    assert matrix.errors == []
    assert matrix.tried > len(ROLES) * len(processes) * len(methods()) * 9 // 10
    assert not ran
    assert {(row.role, row.process) for row in await credentials.list_credentials(state)} == before


async def test_deviating_permission_table_is_detected(
    open_process: Opened, state: StateClient
) -> None:
    method = "Weights.save_checkpoint"
    wide = {**CALL_PERMISSIONS, method: CALL_PERMISSIONS[method] | {"sandbox"}}
    narrow = {label: roles - {"worker"} for label, roles in CALL_PERMISSIONS.items()}
    weights = await open_process("weights", wide)
    engine = await open_process("engine", narrow)
    errors = (await role_matrix(dict.fromkeys(ROLES, state), HOST, [weights, engine])).errors
    assert len(errors) >= 3
    assert any("Weights.save_checkpoint of weights/0 by a sandbox" in error for error in errors)
    assert any("RoleControl.drain of engine/0 by a worker" in error for error in errors)


async def test_no_method_of_any_process_answers_without_a_key(open_process: Opened) -> None:
    processes = [await open_process(kind) for kind in ("engine", "weights", "gateway")]
    tried, answered = without_key(processes)
    assert answered == []
    assert tried == 3 * len(processes) * 2 * len(methods())
