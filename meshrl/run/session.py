"""`meshrl run` and `meshrl resume`: one job on a mesh, from its start to the report and a clean
end.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Refused
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.output.streams import outlive_a_full_disk
from meshrl.common.state import jobs
from meshrl.common.state.lifecycle.accounting import wrong
from meshrl.common.state.redis import embedded
from meshrl.directory import places
from meshrl.directory.claims import claimed, writing
from meshrl.directory.target import run_in
from meshrl.directory.versions import copied
from meshrl.job.bundle import pack_run
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from meshrl.launch.holding import interruptible
from meshrl.run.outcome import FAILED, FINISHED, INTERRUPTED
from meshrl.view.guard import WarningGuard
from meshrl.view.live.view import GuardedView, view_for
from meshrl.view.recording.audit import accused
from meshrl.view.recording.recorder import LOOK_S, Recorder
from meshrl.view.report import report
from meshrl.view.report.facts import show


def run(config: JobConfig, base: Path, force: bool, job_file: Path | None = None) -> int:
    """Runs a job from its start; the exit status. `job_file` is where it was read."""
    with claimed(config, force) as claim:
        run_dir = claim.directory
        with writing(run_dir):
            document = pack_run(config, base, run_dir, {"job": config.name}, job_file)

        async def begin(launcher: Launcher) -> None:
            state, job = launcher.state, config.name
            if job in {row.id for row in await jobs.jobs(state)}:
                shown = embedded.without_password(embedded.configured_url())
                raise Refused(
                    f"another job named {job} is in {shown}",
                    fix="Give this one another name: --set name=X",
                )
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
            claim.keep()

        return asyncio.run(session(run_dir, shape_for(config), begin, claim.replace))


def shape_for(config: JobConfig) -> MeshShape:
    """The mesh that a job asks for."""
    mesh = config.mesh
    return MeshShape(mesh.workers, mesh.device, mesh.bind, mesh.advertise, mesh.metrics)


async def session(
    run_dir: Path,
    shape: MeshShape,
    begin: Callable[[Launcher], Awaitable[None]],
    started: Callable[[], None] = lambda: None,
) -> int:
    """A mesh from its start to the end of a run; the exit status. `begin` gives Redis the job,
    before any service looks for one; `started` is called when all services are there.
    """
    outlive_a_full_disk()
    run = run_in(run_dir)
    launcher = Launcher(run.place, shape)
    stop = asyncio.Event()
    interruptible(stop, launcher.kill)
    print(f"{run.job}: starting a mesh of {shape.workers} workers in {run.shown}", flush=True)
    await launcher.start(partial(begin, launcher))
    places.point_to(run.place)
    if not stop.is_set():
        started()
    try:
        recorder = Recorder(launcher, run.job, run_dir)
        await _follow(recorder, launcher, stop)
        await launcher.stop_services()
        await recorder.close()
        summary = await report.write(recorder)
    finally:
        await launcher.stop()
    return await _conclude(recorder, summary, launcher, stop)


async def _follow(recorder: Recorder, launcher: Launcher, stop: asyncio.Event) -> None:
    """Shows the run until it is over, the user stops it, or the mesh gives up."""
    with GuardedView(view_for(recorder.run_dir)) as view:
        async with aclosing(report.LivePage(recorder, view.say)) as page:
            while not stop.is_set() and not launcher.failed.is_set():
                shot = await recorder.look()
                if shot is not None:
                    view.show(shot, recorder.rows)
                    if shot.over:
                        return
                page.look()
                await launcher.clock.sleep(LOOK_S)
        if stop.is_set():
            view.say("stopping; Ctrl-C again ends everything at once")


async def _conclude(
    recorder: Recorder, summary: dict[str, Any], launcher: Launcher, stop: asyncio.Event
) -> int:
    """Says what the user can do next, and delivers what is to be elsewhere; the exit status."""
    with WarningGuard()("the closing table"):
        show(summary, recorder.run_dir)
    phase = recorder.shot.phase if recorder.shot else None
    if launcher.failed.is_set():
        print(f"error: {launcher.why}", file=sys.stderr)
    if bad := wrong(summary):
        print(f"error: {accused(recorder.run_dir, bad)}", file=sys.stderr)
    elif phase == jobs.Phase.FAILED:
        error = recorder.shot.error if recorder.shot else ""
        print(f"error: the job failed: {error}", file=sys.stderr)
    elif phase != jobs.Phase.FINISHED:
        print(f"To go on: meshrl resume {places.shown(recorder.run_dir)}", flush=True)
    if recorder.out:
        print(f"copying what is left to {recorder.out}", flush=True)
    lacking = [await copied(recorder.run_dir, stop), await recorder.delivered(stop)]
    missing = [why for why in lacking if why]
    for why in missing:
        print(f"error: {why}", file=sys.stderr)
    return status(summary, phase, launcher.failed.is_set()) or (FAILED if missing else FINISHED)


def status(summary: dict[str, Any], phase: jobs.Phase | None, gave_up: bool) -> int:
    """The exit status of a run: 0 only for one that has finished with an account that is right."""
    if wrong(summary) or phase == jobs.Phase.FAILED:
        return FAILED
    if phase == jobs.Phase.FINISHED:
        return FINISHED
    return FAILED if gave_up else INTERRUPTED
