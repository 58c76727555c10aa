"""`meshrl run` and `meshrl resume`: one job on a mesh, from its start to the report and a clean
end.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Refused
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.process.output.streams import install_lossy_output
from meshrl.common.state import jobs
from meshrl.common.state.job_lifecycle.trajectory_accounting import format_violations
from meshrl.common.state.redis import embedded_server
from meshrl.directory import directory_paths
from meshrl.directory.command_target import read_run
from meshrl.directory.run_claims import claim_run_directory, translate_write_errors
from meshrl.directory.versions_process import copy_versions
from meshrl.job.bundle import pack_run
from meshrl.launch.directory_lock import handle_stop_signals
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.runs import next_commands
from meshrl.runs.monitoring.slice_observer import SliceObserver
from meshrl.runs.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_NOT_LEARNED
from meshrl.view.guard import WarningGuard
from meshrl.view.health.findings import has_failure, parse_findings
from meshrl.view.live.run_view import GuardedView, ProgressLines, RunView, ScreenView, make_run_view
from meshrl.view.recording.audit import describe_wrong_account
from meshrl.view.recording.recorder import POLL_S, Recorder
from meshrl.view.report import report
from meshrl.view.report.summary_table import print_summary


def run_job(
    config: JobConfig,
    base: Path,
    force: bool,
    job_file: Path | None = None,
    on_started: Callable[[Path], None] = lambda run_dir: None,
    *,
    is_evaluation: bool = False,
) -> int:
    """Run a job from its start and return the exit status.

    `job_file`: the path of its file. `on_started` gets the run directory when the mesh has started.
    `is_evaluation`: print only the progress, as the caller prints the figures.
    """
    with claim_run_directory(config, force) as claim:
        run_dir = claim.directory
        with translate_write_errors(run_dir):
            document = pack_run(config, base, run_dir, {"job": config.name}, job_file)

        async def begin(launcher: Launcher) -> None:
            state, job = launcher.state, config.name
            if job in {row.id for row in await jobs.read_jobs(state)}:
                public_url = embedded_server.redact_password(embedded_server.read_configured_url())
                raise Refused(
                    f"another job named {job} is in {public_url}",
                    fix="Choose another name: --set name=X",
                )
            await jobs.submit(state, job, document, str(run_dir), uuid.uuid4().hex)
            claim.commit()

        def keep_run() -> None:
            claim.delete_replaced_run()
            on_started(run_dir)

        shape = derive_mesh_shape(config)
        return asyncio.run(
            run_session(run_dir, shape, begin, keep_run, is_evaluation=is_evaluation)
        )


def derive_mesh_shape(config: JobConfig) -> MeshShape:
    """Return the mesh that a job requests."""
    mesh = config.mesh
    return MeshShape(mesh.workers, mesh.device, mesh.bind, mesh.advertise, mesh.metrics)


async def run_session(
    run_dir: Path,
    shape: MeshShape,
    submit: Callable[[Launcher], Awaitable[None]],
    on_started: Callable[[], None] = lambda: None,
    *,
    is_evaluation: bool = False,
) -> int:
    """Run a mesh from its start to the end of a run; return the exit status.

    `submit` gives Redis the job, before any service reads it; `on_started` is called when all
    services are registered. `is_evaluation`: print no figures.
    """
    install_lossy_output()
    run = read_run(run_dir)
    launcher = Launcher(run.mesh_paths, shape)
    stop = asyncio.Event()
    handle_stop_signals(stop, launcher.kill)
    workers = "worker" if shape.workers == 1 else "workers"
    print(
        f"{run.job}: starting a mesh of {shape.workers} {workers} in {run.display_path}", flush=True
    )
    await launcher.start(partial(submit, launcher))
    directory_paths.set_current_mesh(run.mesh_paths)
    if not stop.is_set():
        on_started()
    try:
        recorder = Recorder(launcher, run.job, run_dir)
        view = ProgressLines() if is_evaluation else make_run_view(run_dir)
        await _follow_run(recorder, launcher, stop, view)
        await launcher.stop_services()
        await recorder.close()
        summary = await report.write_results(recorder)
    finally:
        await launcher.stop()
    if not is_evaluation:
        _print_results(recorder, summary)
    return await _conclude(recorder, summary, launcher, stop)


async def _follow_run(
    recorder: Recorder, launcher: Launcher, stop: asyncio.Event, run_view: RunView
) -> None:
    """Show the run until it is over, the user stops it, or the mesh gives up."""
    with GuardedView(run_view) as view:
        async with (
            aclosing(report.LivePage(recorder, view.print_line)) as page,
            SliceObserver(launcher.mesh_paths) as slices,
        ):
            while not stop.is_set() and not launcher.failed.is_set():
                shot = await recorder.poll()
                if shot is not None:
                    if isinstance(run_view, ScreenView):
                        shot = replace(shot, slices=slices.poll_frames(shot.shared_gangs))
                    view.show(shot, recorder.rows)
                    if shot.is_terminal:
                        return
                page.update_if_due()
                await launcher.clock.sleep(POLL_S)
        if stop.is_set():
            view.print_line("stopping; Ctrl-C again stops all processes at once")


def _print_results(recorder: Recorder, summary: dict[str, Any]) -> None:
    """Print the closing table, and the user's next commands after a finished run."""
    with WarningGuard()("the final table"):
        print_summary(summary, recorder.run_dir)
        if recorder.snapshot and recorder.snapshot.phase == jobs.Phase.FINISHED:
            lines = next_commands.list_next_commands(recorder.run_dir, recorder.job_file_content)
            print("Next:", *lines, sep="\n", flush=True)


async def _conclude(
    recorder: Recorder, summary: dict[str, Any], launcher: Launcher, stop: asyncio.Event
) -> int:
    """Print errors, deliver output to other places, return the exit status."""
    phase = recorder.snapshot.phase if recorder.snapshot else None
    if launcher.failed.is_set():
        print(f"error: {launcher.failure_reason}", file=sys.stderr)
    if bad := format_violations(summary):
        print(f"error: {describe_wrong_account(recorder.run_dir, bad)}", file=sys.stderr)
    elif phase == jobs.Phase.FAILED:
        error = recorder.snapshot.error if recorder.snapshot else ""
        print(f"error: the job failed: {error}", file=sys.stderr)
    elif phase != jobs.Phase.FINISHED:
        print(
            f"To resume: meshrl resume {directory_paths.format_path(recorder.run_dir)}", flush=True
        )
    findings = parse_findings(summary.get("health", ()))
    if phase == jobs.Phase.FINISHED and has_failure(findings):
        print("error: the run has finished, but cannot have learned", file=sys.stderr)
    for finding in findings:
        print(finding.line, file=sys.stderr)
    if recorder.output_url:
        print(f"copying the remaining files to {recorder.output_url}", flush=True)
    copy_errors = [await copy_versions(recorder.run_dir, stop), await recorder.finish_copy(stop)]
    missing = [why for why in copy_errors if why]
    for why in missing:
        print(f"error: {why}", file=sys.stderr)
    return choose_exit_status(summary, phase, launcher.failed.is_set()) or (
        EXIT_FAILED if missing else EXIT_FINISHED
    )


def choose_exit_status(summary: dict[str, Any], phase: jobs.Phase | None, gave_up: bool) -> int:
    """Return the exit status of a run: 0 only for a finished one with a correct account.

    A finished run that cannot have learned has a status of its own.
    """
    if format_violations(summary) or phase == jobs.Phase.FAILED:
        return EXIT_FAILED
    if phase == jobs.Phase.FINISHED:
        has_learned = not has_failure(parse_findings(summary.get("health", ())))
        return EXIT_FINISHED if has_learned else EXIT_NOT_LEARNED
    return EXIT_FAILED if gave_up else EXIT_INTERRUPTED
