"""Who has how many workers: shares against max-min after floors, and a job of higher priority that
comes in the middle.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence

from loadtests.jobs.mesh import LOOK_S, RunningMesh, mesh_up
from loadtests.jobs.plan import Plan
from loadtests.measuring.rounds import Arm
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.rows import Tier

FLOOR = 2  # workers of a calculator job: an engine and a core
SHARED = 8  # workers that two jobs share
PREEMPTED = 4  # workers that one job has when another comes
SETTLED_S = 600.0  # until all that was wished is done, a warm start among it
FOREVER = 100_000  # steps of a job that is stopped before its end


def max_min(workers: int, floors: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Weighted max-min in whole workers: each has its floor, and each further one goes to whom it
    leaves with the least per share.
    """
    held = [float(floor) for floor in floors]
    for _ in range(workers - sum(map(int, floors))):
        least = min(range(len(held)), key=lambda i: (held[i] / shares[i], i))
        held[least] += 1.0
    return held


async def share(plan: Plan, shares: tuple[float, float]) -> Arm:
    """Two jobs of these shares on eight workers, over a window after both have settled."""
    with plan.folder("share") as folder:
        async with mesh_up(folder, SHARED) as mesh:
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
            began = time.monotonic()
            await asyncio.sleep(plan.window_s)
            held = [h for at, h in mesh.watched.held if at >= began]
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
    """A job of higher priority comes while another has all workers, again and again."""
    took: list[float] = []
    with plan.folder("preempt") as folder:
        async with mesh_up(folder, PREEMPTED) as mesh:
            forever = f"budget.steps={FOREVER}"
            low = await mesh.submit(plan.job, "low", *plan.overrides(plan.seeds[0], forever))
            async with asyncio.timeout(SETTLED_S):
                while (await low.state()).step < 1:
                    await asyncio.sleep(LOOK_S)
            for number in range(plan.moves):
                await settled(mesh, {"low": float(PREEMPTED)})
                seed = plan.seeds[1 + number % (len(plan.seeds) - 1)]
                more = ("pool.priority=1", f"pool.workers.least={FLOOR}", forever)
                began = time.monotonic()
                high = await mesh.submit(plan.job, f"high{number}", *plan.overrides(seed, *more))
                await settled(mesh, {high.name: float(FLOOR)})
                took.append(time.monotonic() - began)
                await high.stop()
            await low.stop()
        return {
            "preempt_s": round(statistics.median(took), 2),
            "preempt_s_max": round(max(took), 2),
            "preempt_s_all": [round(s, 2) for s in took],
            **mesh.watched.honest(),
        }


async def settled(mesh: RunningMesh, least: Mapping[str, float]) -> None:
    """Returns when each of these jobs has so many workers whose residents are ready on the
    accelerator; TimeoutError.
    """
    async with asyncio.timeout(SETTLED_S):
        while True:
            ready: dict[str, float] = {}
            for gang in await pool.gangs(mesh.state):
                for one in gang.residents:
                    if one.settled and one.tier == Tier.ACCELERATOR:
                        ready[one.job] = ready.get(one.job, 0.0) + len(one.ranks)
            if all(ready.get(job, 0.0) >= count for job, count in least.items()):
                return
            await asyncio.sleep(0.05)
