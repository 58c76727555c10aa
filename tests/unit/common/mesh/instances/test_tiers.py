"""Sleep tiers of role processes, and processes whose host has no agent."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from meshrl.common.api.calls.role import SetTier
from meshrl.common.base.errors import Refused
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.orphans import ORPHAN_TIMEOUT_S, wait_until_orphaned
from meshrl.common.mesh.instances.tiers import TierController
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost, virtual

BYTES = 100
LEASE_MS = 6000


class OneTensor:
    """Process with one tensor, which asserts that each sleep and wake changes its state."""

    def __init__(self) -> None:
        self.asleep = self.is_removable = False
        self.removal_error: Refused | None = None  # raised by `prepare_removal`

    def measure_bytes(self) -> int:
        return 0 if self.asleep else BYTES

    async def sleep(self, tier: Tier) -> None:
        assert not self.asleep
        self.asleep = True

    async def wake(self) -> None:
        assert self.asleep, "it sleeps"
        self.asleep = False

    async def move(self, tier: Tier) -> None:
        assert self.asleep

    async def prepare_removal(self) -> None:
        if self.removal_error is not None:
            raise self.removal_error

    async def cancel_removal(self) -> None:
        pass


class Bench:
    def __init__(self, clock: VirtualClock, random: Random, files: Path) -> None:
        mesh = alone("engine/g0.0", clock, random, SimulatedHost(clock, random.child("host")))
        self.sleeper = OneTensor()
        source = TensorsOfKind(lambda: TensorStorages({}), self.sleeper.measure_bytes)
        self.kinds = KindController(
            mesh,
            {"parameters": source},
            partial(mesh.host.run_blocking, deadline_s=60.0),
            "",
            str(files),
        )
        self.tiers = TierController(mesh, self.sleeper, self.kinds)

    async def set_tier(self, tier: str) -> int:
        """Set the tier and return the bytes on the accelerator afterwards."""
        request = SetTier(
            tier, self.tiers.epoch + 1, time_sliced=False, segment_owner="", offload_dir=""
        )
        return (await self.tiers.set_tier(request)).accelerator_bytes


def test_process_is_awake_even_if_its_offload_file_cannot_be_removed(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, tmp_path)
        await bench.set_tier("disk")
        # A directory, which unlink cannot remove.
        make_offload_path(str(tmp_path), "engine/g0.0").mkdir()
        assert await bench.set_tier("accelerator") == BYTES
        assert bench.tiers.tier == Tier.ACCELERATOR
        assert await bench.set_tier("memory") == 0
        assert await bench.set_tier("accelerator") == BYTES

    run_virtual(main, limit_s=60.0)


def test_failed_removal_leaves_the_process_awake(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, tmp_path)
        await bench.set_tier("memory")
        bench.sleeper.removal_error = Refused("no checkpoint now")
        for _ in range(2):
            with pytest.raises(Refused, match="no checkpoint now"):
                await bench.set_tier("absent")
            assert bench.tiers.tier == Tier.ACCELERATOR
        assert await bench.set_tier("accelerator") == BYTES
        assert await bench.set_tier("memory") == 0

    run_virtual(main, limit_s=60.0)


@virtual
async def test_process_is_orphaned_by_a_missing_agent_not_by_a_stalled_host(
    clock: VirtualClock, random: Random
) -> None:
    mesh = alone("worker/w0", clock, random, SimulatedHost(clock, random))
    agent = registry.RegistryEntry(f"node/{mesh.settings.host}", "node", incarnation="a")
    await registry.register(mesh.state, agent, LEASE_MS)
    orphaned = asyncio.create_task(wait_until_orphaned(mesh))
    await clock.sleep(1.0)
    # Agents are checked before renewals.
    cast(VirtualLoop, asyncio.get_running_loop()).now_s += 10 * ORPHAN_TIMEOUT_S
    await clock.sleep(3.0)
    assert not orphaned.done(), "its agent has had no time to renew its lease"
    await registry.register(mesh.state, agent, LEASE_MS)
    await clock.sleep(5.0)
    start_s = clock.monotonic()
    assert (await orphaned).startswith(f"{agent.name} has had no lease for {ORPHAN_TIMEOUT_S:g} s")
    assert ORPHAN_TIMEOUT_S <= clock.monotonic() - start_s <= ORPHAN_TIMEOUT_S + 10.0
