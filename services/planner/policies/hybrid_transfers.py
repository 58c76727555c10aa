"""Transfer of a hybrid's gradients: a hybrid that cannot send them in time is not placed."""

from __future__ import annotations

from meshrl.common.state.pool.demand.measurements import MeasuredWork
from meshrl.common.state.pool.demand.requirements import PlannedJob


def can_add_hybrids(job: PlannedJob) -> bool:
    """Return True if further hybrids may shorten a job's steps."""
    return job.requirements.allows_hybrids and not explain_unpaid_hybrid(job)


def explain_unpaid_hybrid(job: PlannedJob) -> str:
    """Explain why a hybrid cannot shorten a job's steps; empty: it can, or no step is measured."""
    work = sum(job.measurements.work_by_process.values(), MeasuredWork())
    if work.steps < 1 or not job.gradient_transfer_s:
        return ""
    alone_s = work.work_s / work.steps / job.requirements.ranks
    if job.gradient_transfer_s < alone_s:
        return ""
    return f"the core alone computes them in {alone_s:.3g} s, so no hybrid is placed"


def describe_hybrid_transfer(job: PlannedJob) -> str:
    """Describe the cost of a hybrid's gradients; empty if it is small or unknown."""
    size, transfer_s = job.requirements.gradient_bytes, job.gradient_transfer_s
    if not size or not job.requirements.allows_hybrids:
        return ""
    sent = f"a hybrid sends gradients of {size / 1e9:.3g} GB a step in {transfer_s:.3g} s"
    why = explain_unpaid_hybrid(job)
    return f"{sent}; {why}" if why else sent
