"""Recorders of all jobs of a mesh that stays up, each in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from meshrl.common.base.errors import CorruptData, DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.base.files import corruption
from meshrl.common.state import events
from meshrl.common.state.job_lifecycle.trajectory_accounting import format_violations
from meshrl.directory import job_file
from meshrl.view.recording.audit import describe_wrong_account
from meshrl.view.recording.recorder import POLL_S, POLL_TIMEOUT_S, Recorder
from meshrl.view.recording.shared_snapshot import RunningMesh, SharedSnapshot
from meshrl.view.report import report

DISK_FULL_STOP_S = 5.0  # wait for a full disk while the mesh stops
RETRY_S = 5.0  # a run directory that cannot be read or written is tried again: disks get emptied


async def record_all(mesh: RunningMesh, stop: asyncio.Event) -> None:
    """Record every job of a mesh until `stop`, each in its own task.

    A job with a bad directory or a slow tracker does not delay the others.
    """
    recording: dict[str, asyncio.Task[None]] = {}
    shared_snapshot = SharedSnapshot(mesh)
    while not stop.is_set():
        try:
            async with mesh.clock.timeout(POLL_TIMEOUT_S, "reading the jobs"):
                known = await shared_snapshot.read_live_jobs()
        except (StateUnavailable, DeadlineExceeded):
            known = []
        for row in known:
            if row.id not in recording:
                work = record_job(mesh, row.id, Path(row.run_dir), stop, shared_snapshot)
                recording[row.id] = asyncio.create_task(work, name=f"record {row.id}")
        for job in [job for job, task in recording.items() if task.done()]:
            recording.pop(job).result()  # raises our own faults; the job may be resumed
        await mesh.clock.sleep(POLL_S)
    await asyncio.gather(*recording.values())


async def record_job(
    mesh: RunningMesh,
    job: str,
    run_dir: Path,
    stop: asyncio.Event,
    shared_snapshot: SharedSnapshot | None = None,
) -> None:
    """Record one job until it has ended or `stop` is set, and write its report.

    While its directory is unusable, report that once, in the log and as the event `unrecorded`, and
    retry.
    """

    def print_line(text: str) -> None:
        print(f"{job}: {text}", file=sys.stderr, flush=True)

    last_error = ""
    while True:
        recorder: Recorder | None = None
        try:
            await _repair_job_file(mesh, run_dir)
            recorder = Recorder(mesh, job, run_dir, shared_snapshot)
            async with contextlib.aclosing(report.LivePage(recorder, print_line)) as page:
                while not stop.is_set():
                    shot = await recorder.poll()
                    last_error = ""
                    if shot is not None and shot.is_terminal:
                        break
                    page.update_if_due()
                    await mesh.clock.sleep(POLL_S)
            has_given_up = _make_give_up_check(mesh, stop)
            await recorder.close(has_given_up)
            summary = await report.write_results(recorder, has_given_up)
            if bad := format_violations(summary):
                print_line(describe_wrong_account(run_dir, bad))
            if missing := await recorder.finish_copy(stop):
                print_line(missing)
            return
        except (OSError, MeshError) as error:
            if str(error) != last_error:
                last_error = str(error)
                print(f"{job} is not recorded: {last_error}", file=sys.stderr, flush=True)
                with contextlib.suppress(StateUnavailable, DeadlineExceeded):
                    async with mesh.clock.timeout(POLL_TIMEOUT_S, "appending to the event stream"):
                        await events.append(
                            mesh.state, "unrecorded", {"job": job, "why": last_error}
                        )
            if recorder is not None:
                await recorder.abandon()
        with contextlib.suppress(DeadlineExceeded):
            async with mesh.clock.timeout(RETRY_S, "waiting to retry"):
                await stop.wait()
                return


async def _repair_job_file(mesh: RunningMesh, run_dir: Path) -> None:
    """Restore a corrupt `job.json` from Redis; a missing one may have been removed on purpose."""
    try:
        job_file.read_job_file(run_dir / job_file.JOB_FILE_NAME)
    except CorruptData as error:
        async with mesh.clock.timeout(POLL_TIMEOUT_S, "reading the job"):
            about = {"mesh": str(mesh.mesh_paths.root)}
            event_fields = await job_file.restore_job_file(
                mesh.state, run_dir, about, error.message
            )
            if event_fields is not None:
                await events.append(mesh.state, corruption.CORRUPTION_EVENT, event_fields)


def _make_give_up_check(mesh: RunningMesh, stop: asyncio.Event) -> Callable[[], bool]:
    """Return a check that the mesh has been stopping for too long to wait for a full disk."""
    stopping: list[float] = []

    def given_up() -> bool:
        now = mesh.clock.monotonic()
        if stop.is_set() and not stopping:
            stopping.append(now)
        return bool(stopping) and now - stopping[0] > DISK_FULL_STOP_S

    return given_up
