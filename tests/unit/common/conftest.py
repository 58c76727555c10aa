"""Meshes over real sockets with an in-process state store, closed at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.meshes import on_sockets
from tests.unit.common.mesh.runtime.talking import Join, Talker


@pytest.fixture
async def join() -> AsyncIterator[Join]:
    """Return `join`: `await join(name, actor)` opens a mesh and joins it."""
    clock = SystemClock()
    state = open_simulated_state(clock)
    meshes: list[Mesh] = []

    async def join_mesh(name: str, actor: Talker | None = None, **options: Any) -> Mesh:
        mesh = on_sockets(name, state, clock, **options)
        if actor is not None:
            actor.mesh = mesh
        meshes.append(mesh)
        await mesh.join(actor)
        return mesh

    yield join_mesh
    for mesh in meshes:
        await mesh.leave()
    await state.close()
