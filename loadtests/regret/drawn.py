"""Random jobs: lengths, tools, sizes of models as paces, workers."""

from __future__ import annotations

import math

from meshrl.common.base.random import Random
from meshrl.sim.drift import LinearDrift
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload, constant_drift

STEPS = 48  # as the demo trains
IN_FLIGHT = 3  # steps whose groups the gate lets through at a time: its staleness and one
# What training with the core alone takes over what rollout on all other workers takes: 1 is where
# the default split is right, and a planner has nothing to do.
LEAST_RATIO, MOST_RATIO = 0.4, 6.0
LEAST_STEP_S = 2.0  # of rollout; a move takes as long
DRIFTING = 0.3  # share of jobs that are another job at their end


def draw_job(seed: int) -> EmulatedWorkload:
    """Return the job of a seed; its steps are long enough for a move to matter."""
    random = Random(seed).child("regret")
    while True:
        job, step_s = _candidate(random)
        if step_s >= LEAST_STEP_S:
            return job


def _candidate(random: Random) -> tuple[EmulatedWorkload, float]:
    """Return a job and the approximate seconds of a step's rollout beside its core."""
    turns = random.choice((1, 1, 2, 3))
    median = math.exp(random.uniform(math.log(12), math.log(45))) / math.sqrt(turns)
    sigma = random.uniform(0.3, 1.0)
    tool_s = random.choice((0.0, 0.0, 0.3, 1.0, 2.0)) * random.uniform(0.5, 1.5)
    drifts = random.random() < DRIFTING
    decode_s, plateau = random.uniform(0.06, 0.15), random.choice((4, 6, 8, 12, 16))
    workers = random.choice((3, 4, 5, 6, 7, 8))
    job = EmulatedWorkload(
        workers=workers,
        steps=STEPS,
        groups_per_step=random.choice((3, 4, 5)),
        group_size=random.choice((4, 6)),
        turns=turns,
        median_tokens=_drift(median, 1.8 if drifts else 1.0),
        log_sigma=constant_drift(sigma),
        tool_s=_drift(tool_s, 3.0 if drifts else 1.0),
        engine_speed=f"{round(1000 * decode_s)}/{plateau}/4000",
    )
    ratio = math.exp(random.uniform(math.log(LEAST_RATIO), math.log(MOST_RATIO)))
    step_s = rollout_s(job, workers - 1, decode_s, plateau)
    tokens_per_s = trained_tokens(job) / (ratio * step_s)
    update_ms = random.uniform(30, 200)
    return job.with_training_speed(f"{tokens_per_s:.0f}/{update_ms:.0f}"), step_s


def _drift(value: float, factor: float) -> LinearDrift:
    return LinearDrift(value, value * factor)


def sampled_tokens(job: EmulatedWorkload) -> float:
    """Return the mean tokens of one trajectory's turns over the run."""
    sigma = (job.log_sigma.initial + job.log_sigma.final) / 2
    median = (job.median_tokens.initial + job.median_tokens.final) / 2
    return job.turns * median * math.exp(sigma * sigma / 2)


def trained_tokens(job: EmulatedWorkload) -> float:
    """Return the tokens of a step's trajectories, with prompts and appended text."""
    each = sampled_tokens(job) + 2 + job.turns
    return job.groups_per_step * job.group_size * each


def rollout_s(job: EmulatedWorkload, engines: int, decode_s: float, plateau: int) -> float:
    """Return the approximate seconds of a step's rollout.

    This is the time at the engines' rate. It is at least a trajectory's own time where the gate
    admits no more than IN_FLIGHT steps.
    """
    trajectories = job.groups_per_step * job.group_size
    batch = IN_FLIGHT * trajectories / engines
    step_s = decode_s * max(1.0, batch / plateau)
    waits_s = job.turns * (job.tool_s.initial + job.tool_s.final) / 2
    return (sampled_tokens(job) * step_s + waits_s) / IN_FLIGHT
