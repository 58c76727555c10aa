"""Tiers of sleeping processes, and processes whose host has no agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from meshrl.common.api.calls.role import SetTier
from meshrl.common.base.errors import Refused
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.orphans import ORPHAN_TIMEOUT_S, wait_until_orphaned
from meshrl.common.mesh.instances.tiers import RestoreTensors, SaveTensors, TierController
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost, virtual

BYTES = 100
LEASE_MS = 6000


class OneTensor:
    """Sleeps and wakes, and asserts that nobody wakes what is awake."""

    def __init__(self) -> None:
        self.asleep = self.is_removable = False
        self.refusal: Refused | None = None  # what `cover` raises

    @property
    def size_bytes(self) -> int:
        return 0 if self.asleep else BYTES

    async def sleep(self, save: SaveTensors) -> None:
        assert not self.asleep
        self.asleep = True

    async def wake(self, restore: RestoreTensors) -> None:
        assert self.asleep, "it sleeps"
        self.asleep = False

    async def move(self, tier: Tier) -> None:
        assert self.asleep

    async def prepare_removal(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def cancel_removal(self) -> None:
        pass


class Bench:
    def __init__(self, clock: VirtualClock, random: Random, files: Path) -> None:
        mesh = alone("engine/g0.0", clock, random, SimulatedHost(clock, random.child("host")))
        self.sleeper = OneTensor()
        self.tiers = TierController(mesh, self.sleeper, "", str(files))

    async def settle(self, tier: str) -> int:
        """Bytes on the accelerator after it."""
        wish = SetTier(
            tier, self.tiers.epoch + 1, time_sliced=False, segment_owner="", offload_dir=""
        )
        return (await self.tiers.set_tier(wish)).accelerator_bytes


def test_who_cannot_remove_what_it_kept_is_awake_all_the_same(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, tmp_path)
        await bench.settle("disk")
        make_offload_path(str(tmp_path), "engine/g0.0").mkdir()  # what no unlink removes
        assert await bench.settle("accelerator") == BYTES
        assert bench.tiers.tier == Tier.ACCELERATOR
        assert await bench.settle("memory") == 0
        assert await bench.settle("accelerator") == BYTES

    run_virtual(main, limit_s=60.0)


def test_who_wakes_to_be_covered_and_is_not_says_that_it_is_awake(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, tmp_path)
        await bench.settle("memory")
        bench.sleeper.refusal = Refused("no checkpoint now")
        for _ in range(2):
            with pytest.raises(Refused, match="no checkpoint now"):
                await bench.settle("absent")
            assert bench.tiers.tier == Tier.ACCELERATOR
        assert await bench.settle("accelerator") == BYTES
        assert await bench.settle("memory") == 0

    run_virtual(main, limit_s=60.0)


@virtual
async def test_a_host_that_stood_still_orphans_nobody_and_one_without_an_agent_does(
    clock: VirtualClock, random: Random
) -> None:
    mesh = alone("worker/w0", clock, random, SimulatedHost(clock, random))
    agent = registry.RegistryEntry(f"node/{mesh.settings.host}", "node", incarnation="a")
    await registry.register(mesh.state, agent, LEASE_MS)
    orphaned = asyncio.create_task(wait_until_orphaned(mesh))
    await clock.sleep(1.0)
    cast(VirtualLoop, asyncio.get_running_loop()).now_s += 10 * ORPHAN_TIMEOUT_S  # it looks first
    await clock.sleep(3.0)
    assert not orphaned.done(), "its agent has had no time to renew its lease"
    await registry.register(mesh.state, agent, LEASE_MS)
    await clock.sleep(5.0)
    began = clock.monotonic()
    assert (await orphaned).startswith(f"{agent.name} has held no lease for {ORPHAN_TIMEOUT_S:g} s")
    assert ORPHAN_TIMEOUT_S <= clock.monotonic() - began <= ORPHAN_TIMEOUT_S + 10.0
