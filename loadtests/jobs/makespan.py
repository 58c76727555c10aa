"""Two jobs at once beside one after the other, on as many workers.

Each trains about as long as one engine generates for it, so that two workers are what it makes good
use of, and its evaluations are short. A job whose every further worker is worth as much as the
first gains nothing by company: at the pace of the other arms, where training hardly counts, and
while it is evaluated, both take about as long.
"""

from __future__ import annotations

import asyncio
import time

from loadtests.jobs.mesh import mesh_up
from loadtests.jobs.plan import Plan, accounts
from loadtests.measuring.rounds import Arm

WORKERS = 4
BALANCED = ("training.pace=800/200", "evaluation.problems=64")


async def pair_s(plan: Plan, at_once: bool) -> Arm:
    """Seconds from the first submission to the end of both."""
    with plan.folder("span") as folder:
        async with mesh_up(folder, WORKERS) as mesh:
            began = time.monotonic()
            summaries = []
            handles = []
            for seed in plan.seeds[:2]:
                handle = await mesh.submit(
                    plan.job, f"seed{seed}", *plan.overrides(seed, *BALANCED)
                )
                handles.append(handle)
                if not at_once:
                    summaries.append(await mesh.finished(handle))
            if at_once:
                summaries = list(await asyncio.gather(*(mesh.finished(h) for h in handles)))
            took = time.monotonic() - began
        return {
            "at_once": int(at_once),
            "makespan_s": round(took, 2),
            **accounts(summaries),
            **mesh.watched.honest(),
        }
