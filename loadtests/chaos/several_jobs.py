"""Chaos of several jobs on one mesh, on workers of their own or all on one gang."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests.chaos.faults import RUN_S, Chaos, audit_runs
from loadtests.chaos.verdict import verdict
from loadtests.jobs.mesh import RunningMesh, mesh_up
from loadtests.measuring.entry import print_progress
from loadtests.sharing.gang_sharing import (
    SliceRecording,
    declared_budgets,
    place_beside,
    record_slices,
)
from meshrl.client.client import Client
from meshrl.common.base.errors import MeshError
from meshrl.common.state import jobs
from meshrl.job.checks.host.memory import plan_job_memory
from meshrl.job.job_reader import load_config

WORKERS = 2  # for each job, by default
AGAIN_S = 1.0  # between two questions to a mesh that may be without Redis
SHARED_S = 900.0  # until the first jobs have computed on one gang; a warm start goes before
ROOM = 0.6  # of a core's tensors that the accelerator holds beside one core that computes


async def run_several(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run jobs at once, and as many again while faults are left to make; return the verdict.

    With `--shared` all of them compute on one gang, and faults begin when they do.
    """
    kinds = arguments.faults.split(",")
    if set(kinds) - {"kill", "stop"}:
        raise SystemExit("with --jobs there are the faults kill and stop")
    workers = arguments.workers or (1 if arguments.shared else WORKERS * arguments.jobs)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    summaries: dict[Path, dict[str, Any]] = {}
    sizes_bytes: dict[str, int] = {}
    if arguments.shared:
        sizes_bytes["accelerator"] = compute_budget(arguments.job, arguments.set or [])
    with declared_budgets(os.environ, **sizes_bytes):
        async with (
            mesh_up(folder, workers, jobs_per_gang=max(2, arguments.jobs)) as mesh,
            record_slices(mesh) as recording,
        ):
            chaos = Chaos(mesh.root, arguments.seed, kinds, arguments.count)
            try:
                async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as tasks:
                    faults = tasks.create_task(_disturb(chaos, recording, arguments))
                    while not summaries or not faults.done():
                        summaries |= await _run_once(mesh, arguments, workers, len(summaries))
            except TimeoutError:
                print("the jobs hang", file=sys.stderr)
    answer = verdict(summaries, chaos.report, arguments.count, await audit_runs(summaries))
    answer |= {f"hits_{out.name}": chaos.report.count_hits(out.name) for out in summaries}
    host = {key: mesh.watched.host[key] for key in ("host_cores", "steal_cores", "load")}
    answer |= {"hits_common": chaos.report.count_hits(""), **host}
    if arguments.shared:
        answer |= describe_sharing(recording, {out.name for out in summaries})
        answer["accelerator_bytes"] = sizes_bytes["accelerator"]
        answer["ok"] = int(answer["ok"] and answer["shared"])
    return answer


def compute_budget(job: Path, changes: list[str]) -> int:
    """Return bytes of an accelerator that holds any instance of a job, and not two cores at once.

    Raises ConfigError for a mistake in the job.
    """
    plan = plan_job_memory(load_config(job, changes)[0])
    # Gradients are as large as the parameters, and so is the one moment.
    cores = [one.least_bytes + round(ROOM * 1.5 * one.state_bytes) for one in plan.core]
    return max([*cores, *(one.total_bytes for one in plan.processes if one not in plan.core)])


def describe_sharing(recording: SliceRecording, names: set[str]) -> dict[str, Any]:
    """Return what jobs shared; `shared` is 0 if a job had no gang with another, or nothing moved.

    That is also printed, since a test without sharing has shown nothing.
    """
    found = recording.describe_sharing()
    alone = sorted(names - recording.find_sharing_jobs())
    if alone:
        print(f"NOT SHARED: {', '.join(alone)} had no time slices beside a job", file=sys.stderr)
    if not found["kinds_moved"]:
        print("NOT SHARED: the accelerator held all tensors, so none moved", file=sys.stderr)
    return {"shared": int(not alone and found["kinds_moved"] > 0), **found}


async def _disturb(chaos: Chaos, recording: SliceRecording, arguments: argparse.Namespace) -> None:
    """Inject the faults, if the gang is to be shared once all first jobs compute there."""
    until = time.monotonic() + SHARED_S
    while arguments.shared and len(recording.find_sharing_jobs()) < arguments.jobs:
        if time.monotonic() > until:
            raise RuntimeError(
                f"the jobs share no gang after {SHARED_S:.0f} s, but have the time slices "
                f"{recording.describe_sharing()}; see `meshrl status --why` of {chaos.run_dir}"
            )
        await asyncio.sleep(AGAIN_S)
    await chaos.wreak()


async def _run_once(
    mesh: RunningMesh, arguments: argparse.Namespace, workers: int, first: int
) -> dict[Path, dict[str, Any]]:
    """Run the jobs from number `first` on; return their summaries by run directory."""
    names = [f"job{first + number}" for number in range(arguments.jobs)]
    for number, name in enumerate(names):
        changes = [f"seed={number}", *(arguments.set or [])]
        await submit(mesh, arguments.job, name, changes)
        # On one worker they share it anyway, as no other is left.
        if number and arguments.shared and workers > 1:
            print_progress(await place_beside(mesh, name, names[0]))
    ended = await asyncio.gather(*(await_summary(mesh, name) for name in names))
    return dict(zip((mesh.root / name for name in names), ended, strict=True))


async def submit(mesh: RunningMesh, job: Path, name: str, changes: list[str]) -> None:
    """Submit a job and retry while Redis is unreachable; an already accepted job is no error."""
    words = [f"name={name}", f"out={mesh.root / name}", *changes]
    while True:
        try:
            async with Client(mesh.root) as client:
                if name not in [state.name for state in await client.jobs()]:
                    await client.submit(job, words)
                return
        except MeshError as error:
            if not error.retryable:
                raise
            print_progress(f"submitting again: {error}")
        await asyncio.sleep(AGAIN_S)


async def await_summary(mesh: RunningMesh, name: str) -> dict[str, Any]:
    path = mesh.root / name / "summary.json"
    while True:
        with contextlib.suppress(MeshError):  # Redis is away, or starts
            async with Client(mesh.root) as client:
                told = await client.job(name)
            if told.over and path.exists():
                return json.loads(path.read_text()) if told.phase == jobs.Phase.FINISHED else {}
        await asyncio.sleep(AGAIN_S)
