"""Instances that share an accelerator with real tensors and the real table of kinds, on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from meshrl.common.api.calls.role import RoleControl, SetTier, TierUsage
from meshrl.common.base.random import Random
from meshrl.common.mesh.instances.kind_calls import KindCallsMixin
from meshrl.common.mesh.instances.kind_controller import KindController, TensorsOfKind
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.model.files.tensor_storages import TensorStorages
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.sim.virtual_loop import VirtualClock
from tests.unit.node.residency.shared_worker import A, B, SharedWorker, run_worker

FLOATS = {"parameters": 2048, "gradients": 2048, "optimizer": 6144}
SIZE = 4 * sum(FLOATS.values())  # of an instance


class TensorRole(KindCallsMixin):
    """Role process with one tensor of each kind."""

    interface = RoleControl

    def __init__(self, mesh: Mesh) -> None:
        self.tensors = {kind: torch.zeros(count) for kind, count in FLOATS.items()}
        self.kinds = KindController(
            mesh,
            {
                kind: TensorsOfKind(
                    partial(TensorStorages, {kind: tensor}), partial(getattr, tensor, "nbytes")
                )
                for kind, tensor in self.tensors.items()
            },
            partial(mesh.host.run_blocking, deadline_s=60.0),
        )
        self.steps = 0

    @call(RoleControl.drain)
    def drain(self, reason: str) -> None:
        """Do nothing: all work is done in time slices."""

    @call(RoleControl.set_tier)
    def set_tier(self, request: SetTier) -> TierUsage:
        self.kinds.set_targets(request.segment_owner, request.offload_dir)
        stored = self.kinds.stored_bytes
        return TierUsage(self.kinds.accelerator_bytes, stored[Tier.MEMORY], stored[Tier.DISK])

    async def compute(self) -> None:
        """Add one to each number."""
        async with self.kinds.use_kinds(list(FLOATS), changed=list(FLOATS)):
            for tensor in self.tensors.values():
                assert torch.all(tensor == self.steps)
                tensor += 1
            self.steps += 1


class TensorWorker(SharedWorker):
    """Worker whose role processes have real tensors."""

    size_bytes = SIZE

    def __init__(self, clock: VirtualClock, random: Random, root: Path, budgets: TierBytes) -> None:
        super().__init__(clock, random, root, budgets)
        self.tensor_roles: dict[str, TensorRole] = {}

    async def serve(self, mesh: Mesh, seat: Placement) -> None:
        role = self.tensor_roles[seat.instance] = TensorRole(mesh)
        await mesh.join(role, stats=lambda: {"generation": seat.generation, "ready": True})
        slices = SliceClient(
            mesh, seat.slice_scheduler, seat.instance, seat.generation, enabled=True
        )
        try:
            while True:
                async with slices.time_slice("train_step"):
                    await role.compute()
                    used = sum(one.kinds.accelerator_bytes for one in self.tensor_roles.values())
                    assert used <= self.tiers.budgets.accelerator
                await self.clock.sleep(0.1)
        finally:
            await mesh.leave()


@pytest.mark.parametrize("memory", [0, pytest.param(4096, marks=pytest.mark.deep)])
def test_tensors_survive_moves_bit_by_bit_in_memory_and_on_disk(memory: int) -> None:
    async def story(shared: TensorWorker) -> None:
        shared.set_desired(A, B)
        await shared.until(
            "both instances have computed",
            lambda: all(
                one.id in shared.tensor_roles and shared.tensor_roles[one.id].steps >= 8
                for one in (A, B)
            ),
            120.0,
        )
        assert all(shared.process(one).restarts == 0 for one in (A, B))
        rates = shared.worker.residency.state().rates
        tier = Tier.DISK if memory else Tier.MEMORY
        assert {f"accelerator>{tier}", f"{tier}>accelerator"} <= rates.keys()

    run_worker(story, TierBytes(int(1.6 * SIZE), memory), TensorWorker)
