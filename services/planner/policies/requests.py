"""Decides on what people ask for: moves of workers, and hosts that drain."""

from __future__ import annotations

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Decline, Why
from meshrl.common.state.pool.placing.snapshot import PoolRequest
from meshrl.common.state.pool.workers.names import service
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.admission.sharing import PoolDivision
from meshrl.services.planner.admission.takers import Takers
from meshrl.services.planner.policies import engines
from meshrl.services.planner.policies.moves import move
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.presence import Presence

ROLES = (Role.ROLLOUT, Role.TRAINING, Role.IDLE)  # roles that a worker may be given by hand


def answer(
    draft: Draft,
    jobs: list[PlannedJob],
    division: PoolDivision,
    presence: Presence,
    takers: Takers,
    aside: frozenset[str],
) -> frozenset[str]:
    """Grants what was asked for, or says why not; the workers that are put aside after it."""
    moved: set[str] = set()  # gangs: never two moves of one at once
    moved.update(under_way.gang for under_way in draft.snapshot.moves)
    for request in draft.snapshot.requests:
        if request.kind == "drain":
            _drain(draft, request, takers)
            continue
        named = [job for job in jobs if job.id == request.job] if request.job else jobs
        job = named[0] if len(named) == 1 else None
        why = _refusal(draft, request, job, division, presence, aside)
        if not why and draft.where.get(request.worker) in moved:
            continue  # it is heard when that move is over
        if why:
            draft.decide(Decline(request.op, why, Why("user", request.job)))
            continue
        gang = draft.where.get(request.worker)
        moved.update([gang] if gang else [])
        aside = _grant(draft, request, job, aside)
    return aside


def _drain(draft: Draft, request: PoolRequest, takers: Takers) -> None:
    """A drain is settled when nobody is left on the host, and no shard or sandbox that another host
    could have.
    """
    hosts = {host.name: host.services for host in draft.snapshot.hosts}
    there = [w for w in draft.workers.values() if w.host == request.host]
    if not there and request.host not in hosts:
        why = f"no host is called {request.host}"
        draft.decide(Decline(request.op, why, Why("drain")))
    elif not any(draft.on[worker.id] for worker in there) and not any(
        takers.of(name) for name in hosts.get(request.host, ()) if service(name)[1] in draft.needs
    ):
        draft.decide(Decline(request.op, "", Why("drain", "", {"host": request.host})))


def _refusal(
    draft: Draft,
    request: PoolRequest,
    job: PlannedJob | None,
    division: PoolDivision,
    presence: Presence,
    aside: frozenset[str],
) -> str:
    """Why a requested move is declined; empty when it is made."""
    worker = draft.workers.get(request.worker)
    if worker is None:
        return f"no worker is called {request.worker}"
    if request.role not in ROLES:
        return f"{request.role} is no role; choose from {', '.join(ROLES)}"
    if worker.id in presence.lost:
        return f"{worker.id} is lost; its agent starts it again when its host is there"
    if worker.host in presence.draining:
        return f"{worker.host} drains; choose a worker of another host"
    for seated in draft.awake_on(worker.id):
        if seated.resident.core:
            return f"{worker.id} is in the core of {seated.resident.job}; move another one"
        if seated.resident.role == Role.SCORING:
            return f"{worker.id} hosts the frozen models of {seated.resident.job}; move another one"
    if request.role == Role.IDLE:
        return ""
    if job is None:
        known = f"no job is called {request.job}" if request.job else "the mesh has not one job"
        return f"{known}; say which job with --job"
    if job.id not in division.workers:
        return f"{job.id} does not run: {division.refused.get(job.id, 'it has ended')}"
    on = any(seated.resident.job == job.id for seated in draft.awake_on(worker.id))
    if job.need.most and draft.team(job.id).workers >= job.need.most and not on:
        return f"{job.id} has its most workers, {job.need.most}; raise pool.workers.most"
    if _becomes_engine(draft, request, job) and engines.around(draft, job, worker.id) is None:
        return (
            f"an engine of {job.id} takes {job.need.smallest} workers of one host "
            f"(rollout.tensor_parallel), and {worker.host} has too few beside {worker.id} that are "
            "idle or help it; put another one of it aside first"
        )
    return ""


def _grant(
    draft: Draft, request: PoolRequest, job: PlannedJob | None, aside: frozenset[str]
) -> frozenset[str]:
    worker, role = request.worker, Role(request.role)
    there = draft.awake_on(worker)
    before = there[0].resident.role if there else Role.IDLE
    why = Why("user", request.job, {"worker": worker})
    if role == Role.IDLE:
        for seated in there:
            draft.remove(seated, why, request.op)
        if not there:
            draft.decide(Decline(request.op, "", why))
        return aside | {worker}
    assert job is not None
    why = Why("user", job.id, {"worker": worker})
    details = {"policy": "user", "from": before, "to": role}
    same = [s for s in there if s.resident.job == job.id]
    if same and same[0].resident.role == role:
        draft.change(same[0], why, pinned=True)
        draft.decide(Decline(request.op, "", why))
    elif _becomes_engine(draft, request, job):
        found = engines.around(draft, job, worker)
        assert found is not None, "it was refused"
        engines.seat(draft, job, found, why, details, pinned=True, op=request.op)
        aside -= set(found.workers)
    elif same and not same[0].resident.turns:
        move(draft, same[0], role, why, details, worker=worker, pinned=True, op=request.op)
    else:
        for seated in there:
            draft.remove(seated, why)
        draft.seat([worker], job.id, role, why, pinned=True, op=request.op)
    return aside - {worker}


def _becomes_engine(draft: Draft, request: PoolRequest, job: PlannedJob) -> bool:
    """Whether a worker is to be in an engine of several, and is in none of the job yet."""
    there = [s for s in draft.awake_on(request.worker) if s.resident.job == job.id]
    serves = any(seated.resident.role == Role.ROLLOUT for seated in there)
    return request.role == Role.ROLLOUT and job.need.smallest > 1 and not serves
