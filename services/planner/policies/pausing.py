"""What becomes of a job whose workers others need, and of one whose turn has come again.

A paused job keeps its core asleep where it is; engines, helpers and frozen models hold nothing that
is nowhere else, and leave. While it sleeps other residents may use its workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Admit, Why
from meshrl.common.state.pool.placing.fitting import room, sleeps
from meshrl.common.state.pool.store.documents import numbered
from meshrl.common.state.pool.workers.rows import Doing, Tier
from meshrl.services.planner.admission.sharing import PoolDivision, started
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated


def tell(draft: Draft, job: PlannedJob, division: PoolDivision) -> None:
    """Says how a job stands, when that has changed: one that is to run waits while the workers of
    its core are not free. While a new mesh gathers none waits yet.
    """
    admitted = job.id in division.workers
    home = division.homes.get(job.id, "")
    refusal = _awaited(draft, job, home) if admitted else division.refused.get(job.id)
    kind = "paused" if started(job) else "waiting"
    held = f"{kind}: {refusal}" if refusal is not None else ""
    if held == job.held or (draft.snapshot.gathers and refusal is not None and not started(job)):
        return
    rule = "share" if admitted else "preempt" if started(job) else "queue"
    inputs = {"entitled": division.workers.get(job.id, 0), "priority": job.need.priority}
    draft.decide(Admit(job.id, held, Why(rule, job.id, inputs)))


def hold(draft: Draft, job: PlannedJob) -> None:
    """Frees the accelerators of a job that does not run."""
    team = draft.team(job.id)
    why = Why("preempt", job.id, {"priority": job.need.priority})
    for seated in team.all:
        out = any(worker not in draft.usable for worker in seated.workers)
        # A core on its way up may take hours: it does not fall asleep before it is ready, and
        # another start of it makes again what this one has made so far.
        starting = seated.awake and seated.resident.doing == Doing.STARTING
        starting = starting and (job.checkpointed or not job.steps_done)
        anew = (out and job.checkpointed) or starting
        if seated is not team.core or not started(job) or anew:
            draft.remove(seated, why)
            continue
        since_ms = draft.snapshot.now_ms - seated.resident.changed_ms
        late = not seated.resident.settled and since_ms > 1000 * draft.snapshot.settings.move_s
        if seated.awake or seated.resident.doing == Doing.FAILED or late:
            _sleep(draft, job, seated, why)


def wake(draft: Draft, job: PlannedJob, share: int) -> None:
    """A core that sleeps goes on where it is, or from its checkpoint elsewhere when that place is
    another core's by now.
    """
    core = draft.team(job.id).core
    if core is None or core.awake or core.resident.tier == Tier.ABSENT:  # the last one leaves
        return
    why = Why("share", job.id, {"entitled": share})
    others = [s for w in core.workers for s in draft.awake_on(w)]
    if any(worker not in draft.usable for worker in core.workers) or any(
        other.resident.core for other in others
    ):
        if job.checkpointed:
            draft.remove(core, why)
        return
    for other in {seated.resident.id: seated for seated in others}.values():
        draft.remove(other, why)
    draft.change(core, why, tier=Tier.ACCELERATOR)


def places(draft: Draft, jobs: Iterable[PlannedJob]) -> set[str]:
    """The workers where cores of these jobs sleep, and are to wake."""
    cores = (draft.team(job.id).core for job in jobs)
    return {w for core in cores if core is not None and not core.awake for w in core.workers}


def _awaited(draft: Draft, job: PlannedJob, home: str) -> str | None:
    """What the core of a job that is to run waits for; None when it has its place."""
    if draft.team(job.id).core is not None:
        return None
    ranks = job.need.ranks
    needed = f"its core needs {ranks} of {home}" if ranks > 1 else "its core needs a worker"
    leaving = {
        s.resident.id: f"{s.resident.id} of {s.resident.job}"
        for worker in draft.placeable
        if ranks == 1 or draft.place(worker) == home
        for s in draft.on[worker].values()
        if not s.awake and not s.resident.settled
    }
    if leaving:
        first = leaving[min(leaving, key=numbered)]
        more = f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
        return f"{needed}; not yet asleep: {first}{more}"
    return f"{needed}, and what is there cannot be taken yet"


def _sleep(draft: Draft, job: PlannedJob, core: Seated, why: Why) -> None:
    """To disk; where that is full or has failed, to memory; else only its checkpoint is left."""
    tiers = [Tier.DISK, Tier.MEMORY]
    if not core.awake:  # it has failed to get where it was to go
        tiers = tiers[tiers.index(core.resident.tier) + 1 :] if core.resident.tier in tiers else []
    more = sleeps(core.resident, job.need)

    def holds(worker: str, tier: Tier) -> bool:
        there = [s.resident for s in draft.on[worker].values() if s.resident.tier == tier]
        asleep = sum(sleeps(r, draft.needs[r.job]) for r in there if r.job in draft.needs)
        return room(draft.workers[worker].budget, tier, asleep, more)

    for tier in tiers:
        if all(holds(worker, tier) for worker in core.workers):
            draft.change(core, why, tier=tier, turns=False)
            return
    if job.checkpointed:
        draft.remove(core, why)
