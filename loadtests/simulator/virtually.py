"""A job on the virtual mesh, in a process of a pool, which cannot import from `__main__`."""

from __future__ import annotations

from meshrl.sim.mesh.job.workload import PacedWorkload
from meshrl.sim.mesh.paced import run


def run_virtually(task: tuple[int, PacedWorkload]) -> tuple[int, PacedWorkload, float, float]:
    seed, workload = task
    found = run(workload, seed)
    if found.failures:
        raise RuntimeError(f"seed {seed}: {found.failures}")
    return seed, workload, found.rl_s / workload.steps, found.cpu_s
