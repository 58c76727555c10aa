"""Arms about worker allocation: shares against max-min after floors, preemption, and role
changes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence

from loadtests.jobs.mesh import LOOK_S, Plan, RunningMesh, WorkSample
from loadtests.measuring.rounds import Arm
from meshrl.client.client import JobHandle
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Role, Tier

FLOOR = 2  # workers of a calculator job: an engine and a core
SHARED = 8  # workers that two jobs share
PREEMPTED = 4  # workers that one job has when another comes
SETTLED_S = 600.0  # until the desired state is reached, a warm start included
FOREVER = 100_000  # steps of a job that is stopped before its end
WORKERS = 4
BEFORE_S = 10.0  # the others' rate is measured over as long before a move,
LEAST_S = 4.0  # and over the move, or so long: their steps are that coarse


def role_changes(events: Sequence[Event]) -> dict[str, list[float]]:
    """Return seconds from decision to ready, by `from to`; a fresh process is from `idle`."""
    began: dict[tuple[str, int, int], tuple[int, str]] = {}
    found: dict[str, list[float]] = {}
    left: dict[str, str] = {}  # by gang, the role of a resident that has to go
    for event in events:
        f = event.fields
        if event.kind == "desired" and f.get("role") == "idle":
            left[f["gang"]] = str(f.get("from_role") or "idle")
        elif event.kind == "desired":
            was = str(f.get("from_role") or "idle")
            was = left.pop(f["gang"], "idle") if was == "idle" else was
            key = (f["resident"], int(f["generation"]), int(f["epoch"]))
            began[key] = (event.ms, f"{was} {f['role']}")
        elif event.kind == "actual" and f.get("status") == "ready":
            key = (f["resident"], int(f["generation"]), int(f["epoch"]))
            if key in began:
                at, which = began.pop(key)
                found.setdefault(which, []).append((event.ms - at) / 1000)
    return found


def others_rate(
    seen: Sequence[WorkSample], moved: set[str], began: float, ended: float
) -> float | None:
    """Return the rate of all instances that did not move over theirs before; None if there are
    none.
    """
    ended = max(ended, began + LEAST_S)
    ratios = []
    for name in sorted({one.name for one in seen} - moved):
        mine = [one for one in seen if one.name == name]
        before = _rate([o for o in mine if began - BEFORE_S <= o.at <= began])
        during = _rate([o for o in mine if began <= o.at <= ended])
        if before and during is not None:
            ratios.append((before, during))
    total = sum(before for before, _ in ratios)
    return sum(during for _, during in ratios) / total if total else None


def _rate(mine: Sequence[WorkSample]) -> float | None:
    if len(mine) < 2 or mine[-1].at <= mine[0].at:
        return None
    done = mine[-1].pieces - mine[0].pieces
    return done / (mine[-1].at - mine[0].at) if done >= 0 else None


async def moves(plan: Plan) -> Arm:
    """Move one of a job's four workers between both sides again and again."""
    rates: list[float] = []
    async with plan.mesh("moves", WORKERS) as mesh:
        more = (f"budget.steps={FOREVER}", "planner.imbalance=1000.0")
        job = await mesh.submit(plan.job, "moved", *plan.overrides(plan.seeds[0], *more))
        await settled(mesh, {"moved": float(WORKERS)})
        await stepped(job)  # evaluated, and all caches warm
        await asyncio.sleep(BEFORE_S)
        worker = await movable(mesh)
        for number in range(2 * plan.moves):
            role = "training" if number % 2 == 0 else "rollout"
            known = {one.name for one in mesh.watched.seen}
            started_s = time.monotonic()
            await mesh.client.move(worker, role, "moved")
            await settled(mesh, {"moved": float(WORKERS)})
            ended = time.monotonic()
            await asyncio.sleep(max(BEFORE_S, LEAST_S))
            alive = {one.name for one in mesh.watched.seen if one.at > ended + LEAST_S / 2}
            moved = (known | alive) - (known & alive)  # leaving and joining instances
            rate = others_rate(mesh.watched.seen, moved, started_s, ended)
            if rate is not None:
                rates.append(rate)
        changes = role_changes(await mesh.events())
        await job.stop()
    return {
        **{
            f"role_change_s_{which.replace(' ', '_')}_p50": round(statistics.median(s), 3)
            for which, s in sorted(changes.items())
        },
        "others_rate": round(statistics.median(rates), 4) if rates else None,
        **mesh.watched.honest(),
    }


async def movable(mesh: RunningMesh) -> str:
    """Return a worker whose gang has nothing but an engine."""
    for gang in sorted(await pool.read_gangs(mesh.state), key=lambda gang: gang.id, reverse=True):
        if [one.role for one in gang.instances] == [Role.ROLLOUT]:
            return gang.workers[0]
    raise RuntimeError("no worker does nothing but generate")


def max_min(workers: int, floors: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return weighted max-min shares in whole workers, above their floors."""
    held = [float(floor) for floor in floors]
    for _ in range(workers - sum(map(int, floors))):
        least = min(range(len(held)), key=lambda i: (held[i] / shares[i], i))
        held[least] += 1.0
    return held


async def share(plan: Plan, shares: tuple[float, float]) -> Arm:
    """Run two jobs with these shares on eight workers and measure after both have settled."""
    async with plan.mesh("share", SHARED) as mesh:
        names = [f"share{i}" for i in range(len(shares))]
        handles = [
            await mesh.submit(
                plan.job,
                name,
                *plan.overrides(seed, f"pool.share={part}", f"budget.steps={FOREVER}"),
            )
            for name, part, seed in zip(names, shares, plan.seeds, strict=False)
        ]
        await settled(mesh, dict.fromkeys(names, float(FLOOR)))
        started_s = time.monotonic()
        await asyncio.sleep(plan.window_s)
        held = [h for at, h in mesh.watched.held if at >= started_s]
        for handle in handles:
            await handle.stop()
    wanted = max_min(SHARED, [FLOOR] * len(shares), shares)
    had = [statistics.fmean(h.get(name, 0.0) for h in held) for name in names]
    errors = [abs(h - w) / w for h, w in zip(had, wanted, strict=True)]
    return {
        "shares": list(shares),
        "wanted": wanted,
        "had": [round(h, 3) for h in had],
        "share_error": round(max(errors), 4),
        **mesh.watched.honest(),
    }


async def preempt(plan: Plan) -> Arm:
    """Submit a job of higher priority while another has all workers, again and again."""
    took: list[float] = []
    async with plan.mesh("preempt", PREEMPTED) as mesh:
        forever = f"budget.steps={FOREVER}"
        low = await mesh.submit(plan.job, "low", *plan.overrides(plan.seeds[0], forever))
        await stepped(low)
        for number in range(plan.moves):
            await settled(mesh, {"low": float(PREEMPTED)})
            seed = plan.seeds[1 + number % (len(plan.seeds) - 1)]
            more = ("pool.priority=1", f"pool.workers.least={FLOOR}", forever)
            started_s = time.monotonic()
            high = await mesh.submit(plan.job, f"high{number}", *plan.overrides(seed, *more))
            await settled(mesh, {high.name: float(FLOOR)})
            took.append(time.monotonic() - started_s)
            await high.stop()
        await low.stop()
    return {"preempt_s": round(statistics.median(took), 2), **mesh.watched.honest()}


async def stepped(job: JobHandle) -> None:
    """Wait until a job has done a step; TimeoutError."""
    async with asyncio.timeout(SETTLED_S):
        while (await job.state()).step < 1:
            await asyncio.sleep(LOOK_S)


async def settled(mesh: RunningMesh, least: Mapping[str, float]) -> None:
    """Wait until these jobs have so many workers that are ready; TimeoutError."""
    async with asyncio.timeout(SETTLED_S):
        while True:
            ready: dict[str, float] = {}
            for gang in await pool.read_gangs(mesh.state):
                for one in gang.instances:
                    if one.is_reconciled and one.tier == Tier.ACCELERATOR:
                        ready[one.job] = ready.get(one.job, 0.0) + len(one.ranks)
            if all(ready.get(job, 0.0) >= count for job, count in least.items()):
                return
            await asyncio.sleep(0.05)
