"""The evaluation gate: keeps a version current until its evaluation is done."""

from __future__ import annotations

from contextlib import nullcontext

from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.evaluation_plan import due
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.names import shard

LOOK_S = 0.1


async def evaluated(mesh: Mesh, data: JobData, version: int) -> None:
    """Waits for the evaluation that `version` asks for, if it does, at most `evaluation.hold_s`;
    past it training goes on, and what is evaluated later is left out of the figures.
    """
    plan = due(data.config, version)
    if plan is None:
        return
    until = mesh.job_clock.monotonic() + data.config.evaluation.hold_s
    waited_for = f"the evaluation of version {version}"
    while True:
        held = mesh.job_clock.held  # nobody is late in a pause: the wait begins anew after it
        with nullcontext() if held else mesh.wait(waited_for, on=shard(data.id, 0)):
            while mesh.job_clock.held == held:
                if not await patiently(
                    mesh.clock, lambda: jobs.awaits_evaluation(mesh.state, data.id, plan.tag)
                ):
                    return
                if mesh.job_clock.monotonic() > until:
                    mesh.log.warning("going on without the evaluation", version=version)
                    return
                await mesh.clock.sleep(LOOK_S)
