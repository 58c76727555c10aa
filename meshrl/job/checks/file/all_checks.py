"""Runs the checks of what a job file says; the first mistake is told.

A check is a function of the job file that raises a ConfigError with the line and what to do.
"""

from __future__ import annotations

from dataclasses import replace

from meshrl.job.checks.file import (
    algorithm,
    experts,
    extras,
    files,
    judges,
    models,
    sandbox,
    sizes,
)
from meshrl.job.loaded import Check, JobFile

NUMBERS: tuple[Check, ...] = (
    sizes.buckets,
    sizes.paces,
    sizes.degrees,
    sizes.workers,
    sizes.pool,
    judges.evaluation,
    algorithm.check,
    sandbox.check,  # options of rewards, before the rows that they name
)
FILES: tuple[Check, ...] = (  # which a run has copies of: they do not change
    models.declared,
    judges.judge,
    files.model,
    files.rows_of_all,
    files.taskset,
    files.rewards,
    files.references_of_all,
)
SHAPES: tuple[Check, ...] = (  # of models that are there
    models.shapes,
    sizes.divides,
    experts.check,
    extras.check,
)


def completed(job: JobFile) -> JobFile:
    """Return a job of given answers with groups of one trajectory; another one as it is."""
    config = job.config
    if not config.supervised:
        if config.algorithm.group_size < 2 and config.algorithm.name not in algorithm.REWARDLESS:
            raise job.fail(
                "algorithm.group_size",
                "algorithm.group_size must be at least 2: an advantage compares",
            )
        return job
    if job.given.get("algorithm", {}).get("group_size", 1) != 1:
        raise job.fail("algorithm.group_size", "algorithm.group_size: of sft it is 1")
    if config.environment.verifiers:
        raise job.fail("environment.verifiers", "sft learns rows, which tasks of verifiers are not")
    return job.with_config(replace(config, algorithm=replace(config.algorithm, group_size=1)))


def check(job: JobFile) -> None:
    for one in NUMBERS + FILES + SHAPES:
        one(job)


def check_changed(job: JobFile) -> None:
    """Check what may change of a run whose files stay."""
    for one in NUMBERS + SHAPES:
        one(job)
