"""A job on the virtual mesh, in a process of a pool, which cannot import from `__main__`."""

from __future__ import annotations

from meshrl.sim.mesh.emulated_run import run_workload
from meshrl.sim.mesh.job.emulated_workload import EmulatedWorkload


def run_virtually(task: tuple[int, EmulatedWorkload]) -> tuple[int, EmulatedWorkload, float, float]:
    seed, workload = task
    found = run_workload(workload, seed)
    if found.failures:
        raise RuntimeError(f"seed {seed}: {found.failures}")
    return seed, workload, found.rl_s / workload.steps, found.cpu_s
