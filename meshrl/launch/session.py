"""`meshrl run` and `meshrl resume`: one job on a mesh, from its start to the report and a clean
end.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

from common.errors import NotFound, Refused
from common.job.config import JobConfig
from common.records.checkpoints import best, committed, is_first, last_lineage
from common.state import embedded, jobs, steps
from common.state.client import State
from meshrl.job import bundle
from meshrl.launch import places
from meshrl.launch.launcher import Launcher, Shape, interruptible, shape_of
from meshrl.launch.places import MeshPlace, read_json, write_json
from meshrl.observe import report
from meshrl.observe.recorder import LOOK_S, Recorder, job_of
from meshrl.observe.view import view_for

STOPPED = 130  # exit status after Ctrl-C, as shells have it


def run(config: JobConfig, base: Path, force: bool) -> int:
    """Runs a job from its start; the exit status."""
    run_dir = places.run_directory(config, force)
    _, document = bundle.pack(config, base, run_dir)
    write_json(run_dir / "job.json", {"job": config.name, "document": document})
    mesh = config.mesh
    shape = Shape(
        mesh.workers,
        config.rollout.shards,
        mesh.device,
        mesh.bind,
        mesh.advertise,
        mesh.metrics,
        config.training.ranks,
        config.sandbox.processes,
    )
    return asyncio.run(_session(run_dir, shape))


def resume(run_dir: Path) -> int:
    """Continues the run in a directory; the exit status."""
    run_dir = places.existing_run(run_dir)
    return asyncio.run(_session(run_dir, shape_of(place_of(run_dir))))


def place_of(run_dir: Path) -> MeshPlace:
    """The mesh of a run: its own, or the one that it was submitted to."""
    return MeshPlace(Path(read_json(run_dir / "job.json").get("mesh", run_dir)))


async def _session(run_dir: Path, shape: Shape) -> int:
    job, document = job_of(run_dir)
    place = place_of(run_dir)
    launcher = Launcher(place, shape)
    stop = asyncio.Event()
    interruptible(stop, launcher)
    print(f"{job}: starting a mesh of {shape.workers} workers in {_short(run_dir)}", flush=True)
    await launcher.start()
    places.point_to(place)
    recorder: Recorder | None = None
    try:
        await _bring_in(launcher, run_dir, job, document)
        recorder = Recorder(launcher, job, run_dir)
        await _follow(recorder, stop)
        await launcher.stop_services()
        await recorder.close()
    finally:
        await launcher.stop()
    return await _conclude(recorder, launcher)


async def _bring_in(launcher: Launcher, run_dir: Path, job: str, document: dict[str, Any]) -> None:
    """Submits the job, or goes on with what Redis still has of it, or else with a checkpoint."""
    known = {row.id: row for row in await jobs.jobs(launcher.state)}
    if job in known:
        row = known[job]
        if row.phase == jobs.Phase.FINISHED:
            raise Refused("the job is finished; nothing is left to do")
        if row.run_dir != str(run_dir):
            shown = embedded.without_password(embedded.configured_url())
            raise Refused(f"another job named {job} is in {shown}")
        if row.ended:
            await jobs.reopen(launcher.state, job, uuid.uuid4().hex)
        return
    checkpoint = await put_back(launcher.state, run_dir, job, document)
    if checkpoint is not None:
        print(f"redis has no job {job}; it starts again from {checkpoint.name}", flush=True)


async def put_back(state: State, run_dir: Path, job: str, document: dict[str, Any]) -> Path | None:
    """Submits a job that Redis does not have: as its newest checkpoint, which is returned, has it,
    or else as a new one.
    """
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is not None:
        held = read_json(checkpoint)
        account = held["account"] | {"manifest": held["weights"], "checkpoint": checkpoint.stem}
        if (found := best(run_dir)) is not None:  # perhaps after the checkpoint
            kept = {
                "best_version": found.version,
                "best_manifest": found.manifest,
                "best_value": found.value,
            }
            account["kept"] = account.get("kept", {}) | kept
        last = last_lineage(run_dir)
        await steps.restore_job(state, job, document, str(run_dir), account, last)
        return checkpoint
    if (run_dir / "metrics.jsonl").is_file():
        raise NotFound(
            f"{run_dir} has neither Redis data nor a checkpoint",
            fix="Start over with `meshrl run JOB`",
        )
    await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
    return None


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last committed checkpoint; the one before the first step has no account."""
    found = committed(run_dir)
    return None if found is None or is_first(found) else found


async def _follow(recorder: Recorder, stop: asyncio.Event) -> None:
    """Shows the run until it is over, the user stops it, or the mesh gives up."""
    page = report.LivePage(recorder)
    with view_for(recorder.run_dir) as view:
        while not stop.is_set() and not recorder.launcher.failed.is_set():
            shot = await recorder.look()
            if shot is not None:
                view.show(shot, recorder.rows)
                if shot.over:
                    return
            await page.look()
            await recorder.launcher.clock.sleep(LOOK_S)
        if stop.is_set():
            view.say("stopping; Ctrl-C again ends everything at once")


async def _conclude(recorder: Recorder | None, launcher: Launcher) -> int:
    """Reports, and says what the user can do next."""
    if recorder is None:
        return 1
    summary = await report.write(recorder)
    report.show(summary, recorder.run_dir)
    if launcher.failed.is_set():
        print(f"error: {launcher.why}", file=sys.stderr)
    phase = recorder.shot.phase if recorder.shot else None
    if phase == jobs.Phase.FINISHED:
        return 0
    if phase == jobs.Phase.FAILED:
        error = recorder.shot.error if recorder.shot else ""
        print(f"error: the job failed: {error}", file=sys.stderr)
        return 1
    print(f"To go on: meshrl resume {_short(recorder.run_dir)}", flush=True)
    return 1 if launcher.failed.is_set() else STOPPED


def _short(path: Path) -> str:
    """Relative to the working directory where that is shorter to type."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
