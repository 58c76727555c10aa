"""Preemption notices on a virtual mesh: withdrawn before or after the drain, or followed."""

from __future__ import annotations

import pytest

from meshrl.common.state import registry
from meshrl.common.state.pool.scheduling.snapshot import SHUTDOWN_NOTICE
from meshrl.common.state.pool.store import host_notices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import HostNotice
from meshrl.sim.mesh.runtime.virtual_mesh import VirtualMesh, VirtualMeshSize
from tests.mesh.simulated.virtual_meshes import (
    check_account,
    mesh_story,
    wait_for_version,
    wait_until_ended,
)

STEPS = 4


async def announce(world: VirtualMesh, host: str, left_s: float) -> None:
    notice = HostNotice("a test", world.clock.wall() + left_s)
    await host_notices.write_notice(world.state, host, notice)
    await pool.set_drain_reason(world.state, host, SHUTDOWN_NOTICE, expected="")


async def withdraw(world: VirtualMesh, host: str) -> None:
    await host_notices.write_notice(world.state, host, HostNotice())
    await pool.set_drain_reason(world.state, host, "", expected=SHUTDOWN_NOTICE)


async def list_engines(world: VirtualMesh) -> set[str]:
    """Return the engines that serve."""
    entries = await registry.list_entries(world.state, "engine")
    return {entry.name for entry in entries if entry.alive and entry.stats.get("ready")}


@pytest.mark.rotating(2)
@pytest.mark.timeout(200)
@mesh_story(VirtualMeshSize(workers=2, steps=STEPS), seed=5)
async def test_withdrawn_notice_restores_the_workers_without_loss(world: VirtualMesh) -> None:
    await wait_for_version(world, 1)
    [host] = {worker.host for worker in await pool.read_workers(world.state)}
    before = await list_engines(world)
    for version, drained_s in ((1, 0.7), (2, 20.0)):  # before and after the drain's end
        await wait_for_version(world, version)
        await announce(world, host, 60.0)
        await world.clock.sleep(drained_s)
        await withdraw(world, host)
        async with world.clock.timeout(60.0, "engines that serve again"):
            while not await list_engines(world):
                await world.clock.sleep(0.5)
    assert before and before.isdisjoint(await list_engines(world)), "they have left in between"
    await wait_until_ended(world)
    counted, _ = await check_account(world.state)
    assert counted["in_flight"] == 0
    assert await pool.read_drain_reasons(world.state) == {}
