"""Checks of a job together with those of the mesh that is to be started for it."""

from __future__ import annotations

from meshrl.job.checks.host import all_checks as checks
from meshrl.job.checks.host import devices, memory, programs
from meshrl.job.checks.host.error_texts import raise_combined
from meshrl.job.job_file import Check, JobFile
from meshrl.launch.checks import budget_checks, redis_checks
from meshrl.launch.checks.address_checks import check_bind_address, check_metrics_ports

MESH_CHECKS: tuple[Check, ...] = (
    devices.check_devices,
    memory.check_memory,
    check_bind_address,
    check_metrics_ports,
    redis_checks.check_redis,
    budget_checks.check_budgets,
)
HOST_CHECKS: tuple[Check, ...] = (programs.check_isolation,)  # the mesh has this one alone


def check_job_and_mesh(job: JobFile) -> None:
    """Check on this host that the job and a mesh for it can start.

    Raises the error of the only check that failed, or a ConfigError with the texts of all failures.
    """
    checks.check_host(job, HOST_CHECKS + MESH_CHECKS)


def check_mesh(job: JobFile) -> None:
    """Check the mesh alone, for a job that has begun."""
    raise_combined(checks.collect_errors(MESH_CHECKS, job))
