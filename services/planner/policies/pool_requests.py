"""Decisions on user requests: moves of workers, and drains of hosts."""

from __future__ import annotations

from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import Rationale, RejectRequest
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.process_names import parse_service_name
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.admission.fair_shares import PoolDivision
from meshrl.services.planner.admission.service_hosts import ServiceHosts
from meshrl.services.planner.policies import engine_placement
from meshrl.services.planner.policies.market_limits import explain_not_taken
from meshrl.services.planner.policies.role_moves import move_worker
from meshrl.services.planner.pool.draft import PoolDraft
from meshrl.services.planner.pool.presence import PoolPresence

ASSIGNABLE_ROLES = (
    Role.ROLLOUT,
    Role.TRAINING,
    Role.IDLE,
)  # roles that a user may assign to a worker


def answer_requests(
    draft: PoolDraft,
    jobs: list[PlannedJob],
    division: PoolDivision,
    presence: PoolPresence,
    service_hosts: ServiceHosts,
    cordoned: frozenset[str],
) -> frozenset[str]:
    """Grant or reject each request for a move of workers or a drain of a host.

    Return the cordoned workers, which a user has moved out of every job: no job may use them.
    """
    moved: set[str] = set()  # gangs: never two moves of one at once
    moved.update(under_way.gang for under_way in draft.snapshot.moves)
    for request in draft.snapshot.requests:
        if request.kind == "drain":
            _settle_drain(draft, request, service_hosts)
            continue
        if request.kind != "move":
            continue
        named = [job for job in jobs if job.id == request.job] if request.job else jobs
        job = named[0] if len(named) == 1 else None
        why = _explain_rejection(draft, request, job, division, presence, cordoned)
        if not why and draft.gang_by_worker.get(request.worker) in moved:
            continue  # it is read again after that move
        if why:
            draft.add_decision(RejectRequest(request.op, why, Rationale("user", request.job)))
            continue
        gang = draft.gang_by_worker.get(request.worker)
        moved.update([gang] if gang else [])
        cordoned = _grant_move(draft, request, job, cordoned)
    return cordoned


def _settle_drain(draft: PoolDraft, request: PoolRequest, service_hosts: ServiceHosts) -> None:
    """Complete a drain when no instance is left on the host, and no service that another host
    accepts.
    """
    hosts = {host.name: host.services for host in draft.snapshot.hosts}
    host_workers = [w for w in draft.workers.values() if w.host == request.host]
    if not host_workers and request.host not in hosts:
        why = f"there is no host {request.host}"
        draft.add_decision(RejectRequest(request.op, why, Rationale("drain")))
    elif not any(draft.placements_by_worker[worker.id] for worker in host_workers) and not any(
        service_hosts.find_hosts(name)
        for name in hosts.get(request.host, ())
        if parse_service_name(name)[1] in draft.requirements_by_job
    ):
        draft.add_decision(
            RejectRequest(request.op, "", Rationale("drain", "", {"host": request.host}))
        )


def _explain_rejection(
    draft: PoolDraft,
    request: PoolRequest,
    job: PlannedJob | None,
    division: PoolDivision,
    presence: PoolPresence,
    cordoned: frozenset[str],
) -> str:
    """Explain why a requested move is rejected; empty: it is made."""
    worker = draft.workers.get(request.worker)
    if worker is None:
        return f"there is no worker {request.worker}"
    if request.role not in ASSIGNABLE_ROLES:
        return f"{request.role} is not a role; choose from {', '.join(ASSIGNABLE_ROLES)}"
    if worker.id in presence.lost_workers:
        return f"{worker.id} is lost; its agent restarts it when its host returns"
    if worker.host in presence.draining_hosts:
        return f"{worker.host} is draining; choose a worker of another host"
    for seated in draft.list_awake_on(worker.id):
        if seated.instance.core:
            return f"{worker.id} is in the core of {seated.instance.job}; move another one"
        if seated.instance.role == Role.SCORING:
            return f"{worker.id} hosts the frozen models of {seated.instance.job}; move another one"
    if request.role == Role.IDLE:
        return ""
    if job is None:
        known = (
            f"there is no job {request.job}"
            if request.job
            else "the mesh does not have exactly one job"
        )
        return f"{known}; name the job with --job"
    if job.id not in division.workers:
        return f"{job.id} is not running: {division.rejected.get(job.id, 'it has ended')}"
    if why := explain_not_taken(draft, job, [worker.id]):
        return why
    on = any(seated.instance.job == job.id for seated in draft.list_awake_on(worker.id))
    if (
        job.requirements.max_workers
        and draft.get_instances(job.id).awake_worker_count >= job.requirements.max_workers
        and not on
    ):
        max_workers = job.requirements.max_workers
        return f"{job.id} has its maximum of {max_workers} workers; raise pool.workers.most"
    if (
        _is_joining_engine(draft, request, job)
        and engine_placement.find_engine_around(draft, job, worker.id) is None
    ):
        return (
            f"an engine of {job.id} needs {job.requirements.smallest_engine} workers of one "
            f"host (rollout.tensor_parallel), and {worker.host} has too few idle or "
            f"hybrid workers beside {worker.id}; cordon another one first"
        )
    return ""


def _grant_move(
    draft: PoolDraft, request: PoolRequest, job: PlannedJob | None, cordoned: frozenset[str]
) -> frozenset[str]:
    worker, role = request.worker, Role(request.role)
    there = draft.list_awake_on(worker)
    before = there[0].instance.role if there else Role.IDLE
    why = Rationale("user", request.job, {"worker": worker})
    if role == Role.IDLE:
        for seated in there:
            draft.remove_instance(seated, why, request.op)
        if not there:
            draft.add_decision(RejectRequest(request.op, "", why))
        return cordoned | {worker}
    assert job is not None
    why = Rationale("user", job.id, {"worker": worker})
    details = {"policy": "user", "from": before, "to": role}
    same = [s for s in there if s.instance.job == job.id]
    if same and same[0].instance.role == role:
        draft.update_instance(same[0], why, pinned=True)
        draft.add_decision(RejectRequest(request.op, "", why))
    elif _is_joining_engine(draft, request, job):
        found = engine_placement.find_engine_around(draft, job, worker)
        assert found is not None, "the request should have been rejected"
        engine_placement.place_engine(draft, job, found, why, details, pinned=True, op=request.op)
        cordoned -= set(found.workers)
    elif same and not same[0].instance.time_sliced:
        move_worker(draft, same[0], role, why, details, worker=worker, pinned=True, op=request.op)
    else:
        for seated in there:
            draft.remove_instance(seated, why)
        draft.place_instance([worker], job.id, role, why, pinned=True, op=request.op)
    return cordoned - {worker}


def _is_joining_engine(draft: PoolDraft, request: PoolRequest, job: PlannedJob) -> bool:
    """Return True if a worker is to join an engine of several workers, and serves in no engine of
    the job.
    """
    there = [s for s in draft.list_awake_on(request.worker) if s.instance.job == job.id]
    serves = any(seated.instance.role == Role.ROLLOUT for seated in there)
    return request.role == Role.ROLLOUT and job.requirements.smallest_engine > 1 and not serves
