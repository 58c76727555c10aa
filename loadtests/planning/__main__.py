"""Benchmark of one `decide` of the planner by gangs and jobs, for a stable pool and one that is
divided again.

Usage:

    python -m loadtests.planning

One worker a gang, eight a host; every fourth job's core has two ranks, priorities and shares
differ, and all jobs train. `decide_ms` is a snapshot without decisions, `first_ms` the one that
places all instances, `lost_ms` one after the loss of a host, `spot_ms` one of a pool at rest whose
every other worker is a spot one, and whose jobs take few of these; each name ends in workers and
jobs. Each is a median of `--repeats`, in CPU-milliseconds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from loadtests.measuring.entry import options, report
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    DissolveGang,
    FormGang,
    PlaceInstance,
    RemoveInstance,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolHost, PoolSnapshot
from meshrl.common.state.pool.workers.rows import (
    MARKETS,
    Gang,
    InstancePhase,
    InstanceReport,
    WorkerRow,
)
from meshrl.services.planner.balance.seeding import SeedingState
from meshrl.services.planner.decision import decide
from meshrl.services.planner.memory import PlannerMemory

WORKERS = (16, 256, 1024, 4096)
JOBS = (1, 64)
OF_A_HOST = 8
NOW_MS = 1_000_000
SPOT = MARKETS[-1]
SPOT_WORKERS = 10  # that a job makes use of


def pool_of(workers: int, jobs: int) -> PoolSnapshot:
    hosts = max(1, workers // OF_A_HOST)
    return PoolSnapshot(
        now_ms=NOW_MS,
        workers=tuple(
            WorkerRow(f"w{n}", f"host{n % hosts}", "cpu:0", token=n + 1) for n in range(workers)
        ),
        jobs=tuple(
            PlannedJob(
                f"job{n}",
                Phase.TRAINING,
                JobRequirements(ranks=2 if n % 4 == 3 else 1, priority=n % 3, share=1.0 + n % 2),
                submitted_ms=n,
                steps_done=10,
                has_checkpoint=True,
            )
            for n in range(jobs)
        ),
        hosts=tuple(PoolHost(f"host{n}") for n in range(hosts)),
    )


def applied(snapshot: PoolSnapshot, decisions: Sequence[Decision]) -> PoolSnapshot:
    gangs = {gang.id: gang for gang in snapshot.gangs}
    formed = snapshot.gangs_formed
    for decision in decisions:
        match decision:
            case FormGang(gang, workers):
                gangs[gang] = Gang(gang, workers, 1, (), snapshot.now_ms)
                formed += 1
            case DissolveGang(gang):
                del gangs[gang]
            case RemoveInstance(gang, resident_id):
                kept = tuple(r for r in gangs[gang].instances if r.id != resident_id)
                gangs[gang] = replace(gangs[gang], instances=kept)
            case PlaceInstance(gang, resident):
                kept = tuple(r for r in gangs[gang].instances if r.id != resident.id)
                reports = {
                    rank: InstanceReport(
                        rank,
                        resident.generation,
                        resident.epoch,
                        1,
                        InstancePhase.READY,
                        resident.tier,
                    )
                    for rank in resident.ranks
                }
                placed = max(gangs[gang].next_instance, int(resident.id.rpartition(".")[2]) + 1)
                done = replace(resident, reports=reports)
                gangs[gang] = replace(gangs[gang], instances=(*kept, done), next_instance=placed)
    where = {worker: gang.id for gang in gangs.values() for worker in gang.workers}
    return replace(
        snapshot,
        now_ms=snapshot.now_ms + 500,
        gangs=tuple(gangs.values()),
        workers=tuple(replace(w, gang=where.get(w.id, "")) for w in snapshot.workers),
        gangs_formed=formed,
    )


def at_rest(
    snapshot: PoolSnapshot, memory: PlannerMemory | None = None
) -> tuple[PoolSnapshot, PlannerMemory]:
    """Return the pool and its planner's memory after all placements."""
    memory = memory or PlannerMemory()
    for _ in range(8):
        decisions, memory = decide(snapshot, memory)
        moved = [
            d
            for d in decisions
            if isinstance(d, FormGang | DissolveGang | PlaceInstance | RemoveInstance)
        ]
        if not moved:
            return snapshot, memory
        snapshot = applied(snapshot, moved)
    raise RuntimeError("the pool does not come to rest: run tests/unit/planner")


def spot_at_rest(snapshot: PoolSnapshot) -> tuple[PoolSnapshot, PlannerMemory]:
    """Return the pool with spot workers, whose jobs have returned all but a few of them."""
    workers = (
        replace(w, market=SPOT if n % 2 else w.market) for n, w in enumerate(snapshot.workers)
    )
    limits = {job.id: SeedingState(most_remote=SPOT_WORKERS) for job in snapshot.jobs}
    first = PlannerMemory(seeding=limits)
    return at_rest(replace(snapshot, workers=tuple(workers)), first)


def cpu_ms(snapshot: PoolSnapshot, memory: PlannerMemory, repeats: int) -> float:
    took = []
    for _ in range(repeats):
        gc.collect()
        started_s = time.process_time()
        decide(snapshot, memory)
        took.append(1000 * (time.process_time() - started_s))
    return round(statistics.median(took), 2)


def measured(workers: int, jobs: int, repeats: int) -> dict[str, float]:
    """Return the figures of one pool size; the names end in its workers and jobs."""
    new = pool_of(workers, jobs)
    rest, memory = at_rest(new)
    host = rest.workers[-1].host
    away = replace(
        rest,
        workers=tuple(replace(w, alive=w.host != host) for w in rest.workers),
        now_ms=rest.now_ms + 60_000,
    )
    missing = {w.id: rest.now_ms for w in away.workers if not w.alive}
    figures = {
        "decide_ms": cpu_ms(rest, memory, repeats),
        "first_ms": cpu_ms(new, PlannerMemory(), repeats),
        "spot_ms": cpu_ms(*spot_at_rest(new), repeats),
        "lost_ms": cpu_ms(away, replace(memory, missing_since=missing), repeats),
    }
    return {f"{name}_{workers}_{jobs}": figure for name, figure in figures.items()}


def main() -> None:
    parser = options(__doc__, repeats=9, workers=[*WORKERS], jobs=[*JOBS])
    a = parser.parse_args()
    found: dict[str, float] = {}
    for workers in a.workers:
        for jobs in a.jobs:
            found |= measured(workers, jobs, a.repeats)
    report(found)


if __name__ == "__main__":
    main()
