"""A paced workload (`sim/mesh/paced.py`) as a job of a simulated cluster."""

from __future__ import annotations

from meshrl.common.job.config import PlannerConfig
from meshrl.common.job.pace import profile, training_profile
from meshrl.sim.cluster.model.job import JobSpec
from meshrl.sim.cluster.model.speeds import PacedSpeed
from meshrl.sim.cluster.model.training import PacedTraining
from meshrl.sim.cluster.model.workload import LogNormal
from meshrl.sim.mesh.job.workload import LONGEST, SLOTS, PacedWorkload


def spec_of(job: PacedWorkload, seed: int, longest: int = LONGEST) -> JobSpec:
    """The job of a workload, with trajectories of up to so many tokens."""
    pace, training = profile(job.decode), training_profile(job.training)

    return JobSpec(
        workload=LogNormal(
            seed,
            job.turns,
            job.median,
            job.sigma,
            job.tool_s,
            longest=longest,
        ),
        trains=PacedTraining(training, job.bin_tokens),
        speed=lambda kind, degree: PacedSpeed(pace.of_degree(degree), kind, degree),
        steps=job.steps,
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        slots=SLOTS,
        bin_tokens=job.bin_tokens,
        planner=PlannerConfig(moves=job.moves, training=1 + job.helping, **dict(job.planner)),
        pace=job.decode,
        training_pace=job.training,
    )
