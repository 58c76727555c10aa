"""The planner's decisions: one pure function from what a leader sees, and what it remembers, to
what it decides and remembers then.

The policies beside it answer one question each; the order in which they are asked is here. Each
works on a draft that the last one left, and a snapshot that shows what was decided leads to nothing
more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Decision
from meshrl.common.state.pool.placing.fitting import fitted
from meshrl.common.state.pool.placing.snapshot import Snapshot
from meshrl.services.planner.admission.feasibility import runnable, shortfalls
from meshrl.services.planner.admission.sharing import PoolDivision, ShareClaim, divide
from meshrl.services.planner.admission.takers import Takers
from meshrl.services.planner.balance.balancing import Plays, balance
from meshrl.services.planner.balance.learning import learned
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies import moves, pausing
from meshrl.services.planner.policies.engines import nowhere
from meshrl.services.planner.policies.leaving import leave, lose, release
from meshrl.services.planner.policies.mixtures import divided
from meshrl.services.planner.policies.placement import end_turns, give_back, grow, place_floor
from meshrl.services.planner.policies.requests import answer
from meshrl.services.planner.policies.serving import serve
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.presence import Presence, present


def decide(snapshot: Snapshot, memory: PlannerMemory) -> tuple[list[Decision], PlannerMemory]:
    """What a leader decides at this look, in order, and what it remembers after it."""
    presence = present(snapshot, memory)
    draft = Draft(snapshot, presence.usable)
    lose(draft, presence)
    short, failed = shortfalls(snapshot, presence.counted, memory.short)
    for failure in failed:
        draft.decide(failure)
    jobs = [
        replace(job, need=fitted(job.need, presence.usable))
        for job in runnable(snapshot.jobs, failed)
    ]
    release(draft, jobs)
    divisions = {job.id: divided(draft, job, memory.mixtures.get(job.id)) for job in jobs}
    jobs = [job for job, _ in divisions.values()]
    moves.finish(draft)
    takers = Takers(snapshot, presence)
    division = _divide(draft, jobs, presence, takers)
    _place(draft, jobs, division, presence)
    aside = answer(draft, jobs, division, presence, takers, memory.aside)
    before = {job.id: memory.watches.get(job.id, SplitWatch()) for job in jobs}
    running = [job for job in jobs if job.id in division.workers]
    plays = Plays(snapshot.now_ms)
    watches = {
        job.id: balance(draft, job, before[job.id], memory.correction, plays)
        for job in sorted(running, key=lambda job: before[job.id].played_ms)
    }
    moves.abandon(draft)
    draft.clear()
    serve(draft, jobs, division, presence, takers)
    known = {worker.id for worker in snapshot.workers}
    return draft.decisions, PlannerMemory(
        missing=presence.missing,
        lost=presence.lost,
        away=presence.away,
        gone=presence.gone,
        short=short,
        aside=aside & known,
        watches=watches,
        entitled=dict(division.workers),
        mixtures={id: mixture for id, (_, mixture) in divisions.items() if mixture is not None},
        correction=learned(memory.correction, draft, jobs, memory.watches, watches),
    )


def _divide(
    draft: Draft, jobs: Sequence[PlannedJob], presence: Presence, takers: Takers
) -> PoolDivision:
    """The shares of jobs; none for those whose services no host takes. While a new mesh gathers
    nobody takes turns: workers may still come.
    """
    snapshot = draft.snapshot
    unserved = {job.id: why for job in jobs if (why := takers.refused(job))}
    jobs = [job for job in jobs if job.id not in unserved]
    settings = snapshot.settings
    places = Counter(settings.place(worker) for worker in presence.usable)
    claims = {job.id: _claim(draft, job) for job in jobs}
    turns = settings.turns and not snapshot.gathers
    division = divide(jobs, places, claims, turns, settings.gangs)
    division.refused.update(unserved)
    return division


def _claim(draft: Draft, job: PlannedJob) -> ShareClaim:
    team = draft.team(job.id)
    home = draft.place(team.core.workers[0]) if team.core is not None else ""
    engines = sum(len(seated.workers) for seated in team.engines if seated.resident.pinned)
    helpers = sum(seated.resident.pinned for seated in team.helpers)
    if not engines and helpers and job.need.rolls_out:
        engines = job.need.smallest
    settled = team.core is not None and team.core.awake and team.core.resident.settled
    stranded = settled and job.checkpointed and nowhere(draft, job)
    return ShareClaim(home, engines + helpers, stranded)


def _place(
    draft: Draft, jobs: Sequence[PlannedJob], division: PoolDivision, presence: Presence
) -> None:
    """Residents where the shares say: what is given back first, then floors, then the rest."""
    for job in jobs:
        if job.id not in division.workers:
            pausing.tell(draft, job, division)
            pausing.hold(draft, job)
    running = [(job, division.workers[job.id]) for job in jobs if job.id in division.workers]
    for job, _ in running:
        leave(draft, job, presence, division)
    wakes = pausing.places(draft, [job for job, _ in running])
    for job, share in running:
        give_back(draft, job, share, "share", wakes)
    for job, share in running:
        pausing.wake(draft, job, share)
        place_floor(draft, job, share, division.homes.get(job.id, ""), division.turns)
        pausing.tell(draft, job, division)
    for job, share in running:
        grow(draft, job, share)
        end_turns(draft, job, share)
