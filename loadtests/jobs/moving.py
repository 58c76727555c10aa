"""Workers that change roles, beside fresh processes, and what everybody else does meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from loadtests.jobs.mesh import LOOK_S, RunningMesh, Seen, mesh_up
from loadtests.jobs.plan import Plan
from loadtests.jobs.sharing import FOREVER, SETTLED_S, settled
from loadtests.measuring.rounds import Arm
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store import store as pool

WORKERS = 4
BEFORE_S = 10.0  # the others' rate is measured over as long before a move,
LEAST_S = 4.0  # and over the move, or so long: their steps are that coarse


def role_changes(events: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds from a decision to ready, by `from to`; of a worker that did nothing before, a fresh
    process, from `idle`.
    """
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


def others_rate(seen: Sequence[Seen], moved: set[str], began: float, ended: float) -> float | None:
    """Tokens and pieces a second of all that did not move, over what they did before; None: there
    is nobody else who did anything.
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


def _rate(mine: Sequence[Seen]) -> float | None:
    if len(mine) < 2 or mine[-1].at <= mine[0].at:
        return None
    done = mine[-1].pieces - mine[0].pieces
    return done / (mine[-1].at - mine[0].at) if done >= 0 else None


async def moves(plan: Plan) -> Arm:
    """One job on four workers, of which one changes sides again and again, by hand."""
    rates: list[float] = []
    with plan.folder("moves") as folder:
        async with mesh_up(folder, WORKERS) as mesh:
            more = (f"budget.steps={FOREVER}", "planner.imbalance=1000.0")
            job = await mesh.submit(plan.job, "moved", *plan.overrides(plan.seeds[0], *more))
            await settled(mesh, {"moved": float(WORKERS)})
            async with asyncio.timeout(SETTLED_S):
                while (await job.state()).step < 1:  # evaluated, and all caches warm
                    await asyncio.sleep(LOOK_S)
            await asyncio.sleep(BEFORE_S)
            worker = await _movable(mesh)
            for number in range(2 * plan.moves):
                role = "training" if number % 2 == 0 else "rollout"
                known = {one.name for one in mesh.watched.seen}
                began = time.monotonic()
                await mesh.client.move(worker, role, "moved")
                await settled(mesh, {"moved": float(WORKERS)})
                ended = time.monotonic()
                await asyncio.sleep(max(BEFORE_S, LEAST_S))
                alive = {one.name for one in mesh.watched.seen if one.at > ended + LEAST_S / 2}
                moved = (known | alive) - (known & alive)  # who left, and who came
                rate = others_rate(mesh.watched.seen, moved, began, ended)
                if rate is not None:
                    rates.append(rate)
            changes = role_changes(await mesh.events())
            await job.stop()
        return {
            **{
                f"role_change_s_{which.replace(' ', '_')}_{name}": figure
                for which, s in sorted(changes.items())
                for name, figure in (
                    ("p50", round(statistics.median(s), 3)),
                    ("max", round(max(s), 3)),
                    ("n", len(s)),
                )
            },
            "others_rate": round(statistics.median(rates), 4) if rates else None,
            "others_rate_least": round(min(rates), 4) if rates else None,
            **mesh.watched.honest(),
        }


async def _movable(mesh: RunningMesh) -> str:
    """A worker whose gang has nothing but an engine."""
    for gang in sorted(await pool.gangs(mesh.state), key=lambda gang: gang.id, reverse=True):
        if [str(one.role) for one in gang.residents] == ["rollout"]:
            return gang.workers[0]
    raise RuntimeError("no worker does nothing but generate")
