"""A process ends when its host has had no agent for long, and not because the host stood still."""

from __future__ import annotations

import asyncio
from typing import cast

from meshrl.common.base.random import Random
from meshrl.common.mesh.residents.orphan import ORPHAN_S, until_orphaned
from meshrl.common.state import registry
from meshrl.sim.loop import VirtualClock, VirtualLoop, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost

LEASE_MS = 6000


def test_a_host_that_stood_still_orphans_nobody_and_one_without_an_agent_does() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        mesh = alone("worker/w0", clock, random, SimulatedHost(clock, random))
        agent = registry.Entry(f"node/{mesh.settings.host}", "node", incarnation="a")
        await registry.register(mesh.state, agent, LEASE_MS)
        orphaned = asyncio.create_task(until_orphaned(mesh))
        await clock.sleep(1.0)
        cast(VirtualLoop, asyncio.get_running_loop()).now += 10 * ORPHAN_S  # it looks first
        await clock.sleep(3.0)
        assert not orphaned.done(), "its agent has had no time to renew its lease"
        await registry.register(mesh.state, agent, LEASE_MS)
        await clock.sleep(5.0)
        began = clock.monotonic()
        assert (await orphaned).startswith(f"{agent.name} has held no lease for {ORPHAN_S:g} s")
        assert ORPHAN_S <= clock.monotonic() - began <= ORPHAN_S + 10.0

    run_virtual(main)
