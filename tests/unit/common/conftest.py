"""Meshes over real sockets, with an in-process State, that are gone when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.clock import SystemClock
from common.process.host import SystemHost
from common.random import Random
from common.runtime.mesh import Mesh
from common.transport.zmq import ZmqTransport
from sim.state import simulated_state
from tests.unit.common.runtime.talking import Join, Talker


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """`await join(name, actor)` -> its mesh."""
    clock = SystemClock()
    state = simulated_state(clock)
    meshes: list[Mesh] = []

    async def joined(name: str, actor: Talker | None = None, **options: float) -> Mesh:
        mesh = Mesh(
            name=name,
            kind="test",
            state=state,
            transport=ZmqTransport(),
            clock=clock,
            random=Random.system(),
            host=SystemHost(),
            **options,  # type: ignore[arg-type]
        )
        if actor is not None:
            actor.mesh = mesh
        meshes.append(mesh)
        await mesh.join(actor)
        return mesh

    yield joined
    for mesh in meshes:
        await mesh.leave()
    await state.close()
