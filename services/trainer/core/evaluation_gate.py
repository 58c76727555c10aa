"""The evaluation gate: keeps a version current until its evaluation is done."""

from __future__ import annotations

from common.job.evaluation_plan import due
from common.job.job_data import JobData
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from common.state import jobs

LOOK_S = 0.1
EVALUATOR = "rollout/0"


async def evaluated(mesh: Mesh, data: JobData, version: int) -> None:
    """Waits for the evaluation that `version` asks for, if it does, at most `evaluation.hold_s`;
    past it training goes on, and what is evaluated later is left out of the figures.
    """
    plan = due(data.config, version)
    if plan is None:
        return
    until = mesh.clock.monotonic() + data.config.evaluation.hold_s
    with mesh.wait(f"the evaluation of version {version}", on=EVALUATOR):
        while await patiently(
            mesh.clock, lambda: jobs.awaits_evaluation(mesh.state, data.id, plan.tag)
        ):
            if mesh.clock.monotonic() > until:
                mesh.log.warning("going on without the evaluation", version=version)
                return
            await mesh.clock.sleep(LOOK_S)
