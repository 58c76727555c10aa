"""Runs the checks of a job together with those of the mesh that is to be started for it."""

from __future__ import annotations

from meshrl.job.checks.machine import all_checks as checks
from meshrl.job.checks.machine import devices, programs
from meshrl.job.checks.machine.together import raise_all
from meshrl.job.loaded import Check, JobFile
from meshrl.launch.checks import redis_server
from meshrl.launch.checks.addresses import bind, metrics

OF_THE_MESH: tuple[Check, ...] = (devices.present, bind, metrics, redis_server.answers)
OF_THE_HOST: tuple[Check, ...] = (programs.isolation,)  # the mesh has this one alone


def check(job: JobFile) -> None:
    """Return if the job and a mesh for it can start, as far as this host can tell; else raise the
    error of the only check that failed, or a ConfigError with the texts of all that did.
    """
    checks.check(job, OF_THE_HOST + OF_THE_MESH)


def check_mesh(job: JobFile) -> None:
    """Check the mesh alone, for a job that has begun."""
    raise_all(checks.failures(OF_THE_MESH, job))
