"""What leaves its workers whatever else is decided: residents of jobs that have ended, of workers
that are lost, of hosts that drain, and cores whose place another one needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import HostGone, Lose, Why
from meshrl.services.planner.admission.sharing import PoolDivision
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.presence import Presence, gone_for


def lose(draft: Draft, presence: Presence) -> None:
    """Tells of hosts and workers that are lost, and ends who was on them. The others of their gangs
    stay, in the same rank order; but with its first worker a gang has lost who gives its turns, and
    ends.
    """
    tell_of_hosts(draft, presence)
    for worker in presence.newly:
        draft.decide(Lose(worker, Why("lost")))
    known = set(draft.workers) - presence.lost
    for gang in list(draft.gangs.values()):
        if known.issuperset(gang.workers):
            continue
        gone = {rank for rank, worker in enumerate(gang.workers) if worker not in known}
        hit = [r for r in gang.residents if 0 in gone or gone.intersection(r.ranks)]
        short = {resident.job for resident in hit}
        for resident in gang.residents:
            if resident in hit or (resident.turns and resident.job in short):
                draft.remove(draft.of[resident.job][resident.id], Why("lost"))
        if gang.id in draft.gangs and not draft.gangs[gang.id].residents:
            draft.dissolve(gang, Why("lost"))


def tell_of_hosts(draft: Draft, presence: Presence) -> None:
    """Says which hosts have vanished, with what was on them, and which are back."""
    for name in presence.newly_gone:
        there = [worker for worker in draft.workers.values() if worker.host == name]
        on = {seated.resident.id for worker in there for seated in draft.on[worker.id].values()}
        [services] = [host.services for host in draft.snapshot.hosts if host.name == name]
        figures = {
            "workers": [worker.id for worker in there],
            "residents": sorted(on),
            "services": list(services),
            "away_s": round(gone_for(presence.away, name, draft.snapshot.now_ms), 1),
        }
        draft.decide(HostGone(name, False, Why("lost", "", figures)))
    for name in presence.back:
        draft.decide(HostGone(name, True, Why("lost")))


def release(draft: Draft, jobs: Sequence[PlannedJob]) -> None:
    """Removes the residents of jobs that have ended."""
    there = {job.id for job in jobs}
    for job in sorted(set(draft.of) - there):
        for seated in draft.team(job).all:
            draft.remove(seated, Why("release", job))


def leave(draft: Draft, job: PlannedJob, presence: Presence, division: PoolDivision) -> None:
    """Removes a running job's residents from where they may not stay, if they can go elsewhere. A
    core does once a checkpoint has what it would go on from, or the host cannot wait; engines that
    take turns with it go with it.
    """
    home = division.homes.get(job.id)
    core = draft.team(job.id).core
    stays = False
    if core is not None and not job.checkpointed:
        hosts = {draft.workers[worker].host for worker in core.workers}
        waited_s = max(gone_for(presence.away, one, draft.snapshot.now_ms) for one in hosts)
        stays = waited_s <= draft.snapshot.settings.move_s
    for seated in draft.team(job.id).all:
        out = not draft.usable.issuperset(seated.workers)
        displaced = False
        if seated.resident.core and home is not None:
            displaced = {draft.place(worker) for worker in seated.workers} != {home}
        if not out and not displaced:
            continue
        if stays and (seated.resident.core or seated.resident.turns):
            continue
        hosts = {draft.workers[worker].host for worker in seated.workers}
        rule = "drain" if out else "share"
        draft.remove(seated, Why(rule, job.id, {"hosts": sorted(hosts)}))
