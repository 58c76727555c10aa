"""Meshes over real sockets, with an in-process State, that are gone when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from talking import Join, Talker

from common.clock import SystemClock
from common.host import SystemHost
from common.mesh import Mesh
from common.random import Random
from common.state.client import State
from common.transport.zmq import ZmqTransport


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """`await join(name, actor)` -> its mesh."""
    clock = SystemClock()
    state = State.simulated(clock)
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
