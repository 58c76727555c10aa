"""Budget of a GPU worker: the driver's figure, less a context for each process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshrl.common.job.memory.process_memory import CONTEXT_BYTES
from tests.gpus.driver import GIB, Gpus
from tests.load import scaled
from tests.unit.node.smallmesh import ROOT

UUID = "GPU-a1111111-0000-0000-0000-000000000000"
PROGRAM = f"""
from meshrl.common.state.pool.workers.rows import TierBytes
from meshrl.services.node.instances.gpu_memory import GpuMemoryGuard
from meshrl.services.node.residency.residency_manager import ResidencyManager
from tests.unit.node.residency.virtual_roles import World, run_story

async def story(world):
    for uuid in ("{UUID}", ""):
        guard = GpuMemoryGuard(world.mesh, uuid)
        processes = lambda: list(world.processes.values())
        async with ResidencyManager(
            world.mesh, world.budgets, guard, processes, world.kill
        ) as residency:
            print(residency.state().accelerator_budget)
            if not world.processes:
                for instance in "ab":
                    await world.start(instance)
                print(residency.state().accelerator_budget)

run_story(story, TierBytes())
"""


@pytest.mark.needs("compiler")
@pytest.mark.deep  # 1 CPU-s for another interpreter
def test_gpu_without_a_budget_has_its_memory_less_a_context_for_each_process(gpus: Gpus) -> None:
    gpus.gpu(UUID, total=80 * GIB)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **gpus.environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    context = CONTEXT_BYTES["cuda"]
    assert done.stdout.split() == [str(80 * GIB - context), str(80 * GIB - 2 * context), "0"]
