"""Colocated or split mode of a job with `pool.colocate = "auto"`.

Colocated engines share the workers of the core by time slices; split ones have their own. The
planner compares the predicted steps of both modes, like splits of the workers. In colocated mode
rollout and training alternate on the core's workers, and each switch takes the time to move tensors
that do not fit beside each other. A change is measured afterwards, and undone if it did not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshrl.common.state.pool.demand.measurements import parse_accelerator_kind
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale
from meshrl.common.state.pool.scheduling.feasibility import count_shared_bytes, list_slice_bytes
from meshrl.common.state.pool.workers.rows import Tier, WorkerRow
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.balance.trials import COLOCATED, SPLIT
from meshrl.services.planner.forecast.step_quantities import WorkerSplit
from meshrl.services.planner.policies.placement import (
    explain_no_engine_room,
    start_time_slicing,
)
from meshrl.services.planner.pool.draft import PoolDraft

# Bytes per second between an accelerator and its host, until a worker has measured them: of copies
# in a CPU's memory, and of pinned copies over PCIe 4.
CPU_COPY_BYTES_PER_S, GPU_COPY_BYTES_PER_S = 1e9, 12e9


def apply_mode(draft: PoolDraft, job: PlannedJob, state: SplitState | None) -> PlannedJob:
    """Return the job with the chosen mode, and with the seconds of a switch between its slices."""
    if not job.requirements.can_time_slice or not job.requirements.needs_rollout:
        return job
    core = draft.get_instances(job.id).core
    workers = [draft.workers[worker] for worker in core.workers] if core is not None else []
    switch_s = predict_switch_s(workers, count_shared_bytes(list_slice_bytes(job.requirements)))
    job = replace(job, slice_switch_s=job.slice_switch_s or switch_s)
    if job.requirements.colocate != "auto" or state is None or not state.is_colocated:
        return job
    return replace(job, requirements=replace(job.requirements, colocate="always"))


def predict_switch_s(workers: Sequence[WorkerRow], needed_bytes: int) -> float:
    """Predict the seconds of a switch between slices by the rates that the workers measured.

    Bytes beyond the accelerator's budget leave, and as many arrive.
    """
    longest_s = 0.0
    for worker in workers:
        excess = needed_bytes - worker.budget.accelerator
        if worker.budget.accelerator and excess > 0:
            is_cpu = parse_accelerator_kind(worker.accelerator).lower() == "cpu"
            assumed = CPU_COPY_BYTES_PER_S if is_cpu else GPU_COPY_BYTES_PER_S
            ways = (Tier.ACCELERATOR, Tier.MEMORY), (Tier.MEMORY, Tier.ACCELERATOR)
            rates = [
                worker.copy_rates.get(f"{source}>{target}") or assumed for source, target in ways
            ]
            longest_s = max(longest_s, sum(excess / rate for rate in rates))
    return longest_s


def find_other_mode(
    draft: PoolDraft, job: PlannedJob, state: SplitState
) -> tuple[str, WorkerSplit] | None:
    """Return the direction of a change of the mode and the split after it; None if the job cannot
    change.
    """
    split, team = state.split, draft.get_instances(job.id)
    assert split is not None
    if state.is_colocated:
        return SPLIT, replace(split, engines=len(team.engines), shared_engines=0)
    core = team.core
    if (
        job.requirements.colocate != "auto"
        or not job.requirements.can_time_slice
        or not draft.snapshot.settings.time_slicing
        or core is None
        or split.shared_engines
        or explain_no_engine_room(draft, job)
    ):
        return None
    ranks = len(core.workers)
    return COLOCATED, replace(split, engines=split.engines + ranks, shared_engines=ranks)


def change_mode(
    draft: PoolDraft, job: PlannedJob, state: SplitState, direction: str, rationale: Rationale
) -> SplitState:
    """Place engines on the core's workers, or remove them from there."""
    if direction == COLOCATED:
        start_time_slicing(draft, job, rationale)
    else:
        for engine in draft.get_instances(job.id).time_sliced_engines:
            draft.remove_instance(engine, rationale)
    return replace(state, is_colocated=direction == COLOCATED)
