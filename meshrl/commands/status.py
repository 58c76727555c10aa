"""Commands that read or change a running mesh through its Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from meshrl.common.api.node import SliceExplanation
from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.child_handle import read_process_usage
from meshrl.common.mesh.process.diagnosis.failure import read_log_end
from meshrl.common.mesh.process.supervision import exit_reports
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import MOVE_OUTCOME_EVENT
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import redact_password
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.command_target import may_be_running, read_run, resolve_mesh
from meshrl.directory.directory_paths import MeshPaths, find_mesh
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, make_not_running_error, query_mesh
from meshrl.directory.owner_mesh import open_owner_mesh
from meshrl.runs.outcome import read_outcome
from meshrl.view import disk_full
from meshrl.view.history import decisions, move_outcomes
from meshrl.view.history.decisions import DECISION_KINDS
from meshrl.view.json_output import to_json_document
from meshrl.view.live import console_tables, mesh_tables, slice_tables
from meshrl.view.mesh import gang_slices, gpu_status
from meshrl.view.mesh import host_rows as standing
from meshrl.view.mesh.job_progress import describe_activity, list_working_processes
from meshrl.view.mesh.mesh_snapshot import (
    MeshSnapshot,
    find_stopped_processes,
    read_full_snapshot,
    read_mesh_snapshot,
    read_writable_snapshot,
)
from meshrl.view.mesh.process_usage import find_owner_job
from meshrl.view.mesh.stalls import JOB_PREFIX, Stall, diagnose_stalls, make_redis_stall
from meshrl.view.recording.job_usage import sum_live_slices
from meshrl.view.recording.run_record import read_recorded_events

STALL_TIMEOUT_S = 3.0  # with the start of this program below the 5 s that a stall is named in


def print_status(target: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Print the state of a run, with its mesh while that runs, or all jobs and hosts of a mesh."""
    if print_run_status(target, mesh, as_json):
        return
    place = resolve_mesh(target, mesh)
    found = query_mesh(place, read_full_snapshot, ANSWER_TIMEOUT_S)
    hosts = standing.build_host_rows(found, place)
    if as_json:
        rows = to_json_document(found.jobs)
        for row in rows:
            del row["document"]
        content = {
            "mesh": str(place.root),
            "redis": redact_password(place.redis_url),
            "leader": found.leader,
            "jobs": rows,
            "processes": [asdict(entry) for entry in found.entries],
            **mesh_tables.to_document(found),
            "hosts": to_json_document(hosts),
            "scaler": asdict(found.scaler) if found.scaler is not None else None,
            "slices": sum_live_slices(found),
            "ended": [exit_reports.to_document(end) for end in found.last_exits],
        }
        print(json.dumps(content))
        return
    tables = [mesh_tables.make_jobs_table(found), mesh_tables.make_processes_table(found)]
    tables += [mesh_tables.make_workers_table(found), mesh_tables.make_hosts_table(hosts)]
    console = console_tables.make_console(*tables)
    console.print(tables[0])
    for line in mesh_tables.list_block_reasons(found.jobs):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in mesh_tables.list_shared_gangs(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(hosts) > 1:
        console.print(tables[3])
    scaler_lines, scaler_errors = mesh_tables.list_scaler_lines(found.scaler)
    for line in scaler_lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(tables[1], tables[2])
    problems = [f"{row.id} failed: {row.error}" for row in found.jobs if row.error]
    problems += [*mesh_tables.format_exits(found), *mesh_tables.list_copy_errors(found.entries)]
    problems += [
        *mesh_tables.list_quota_errors(found.entries),
        *gpu_status.list_gpu_problems(found),
        *scaler_errors,
    ]
    for line in problems:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def print_run_status(target: Path | None, mesh: Path | None, as_json: bool) -> bool:
    """Print the state of a run; return True when its mesh does not run, so nothing else is to
    print.
    """
    directory = target or mesh or find_mesh(None).root
    if not (directory / "job.json").is_file():
        return False
    run = read_run(directory)
    live = may_be_running(run.mesh_paths)
    found = read_outcome(run, live)
    if not as_json:
        print("\n".join(found.format_lines()))
    elif not live:
        print(json.dumps({"run": found.to_document()}))
    return not live


def print_workers(mesh: Path | None, as_json: bool) -> None:
    """Print the workers of a mesh with all their instances."""
    found = query_mesh(find_mesh(mesh), read_mesh_snapshot, ANSWER_TIMEOUT_S)
    if as_json:
        print(json.dumps(mesh_tables.to_document(found)))
    else:
        table = mesh_tables.make_workers_table(found)
        console_tables.print_table(table)


def explain_decisions(subject: str, mesh: Path | None, as_json: bool) -> None:
    """Print the last decisions about a job, a gang or a worker, with rules, inputs and move
    outcomes.

    For a job also print its current prediction, and why nothing moves. For a gang in time slices
    also print the decisions of its slice scheduler.
    """

    async def read_recent_state(state: StateClient) -> tuple[list[Event], MeshSnapshot]:
        return await decisions.read_recent(state), await read_mesh_snapshot(state)

    place = find_mesh(mesh)
    recent, snapshot = query_mesh(place, read_recent_state, ANSWER_TIMEOUT_S)
    name, kinds = subject.removeprefix("worker/"), (*DECISION_KINDS, MOVE_OUTCOME_EVENT)
    recorded = (read_recorded_events(Path(row.run_dir), kinds, name) for row in snapshot.jobs)
    all_events = decisions.merge_events(*recorded, recent)
    judged = move_outcomes.list_outcomes(all_events, subject)
    found = decisions.select_decisions(all_events, subject)
    if not found and not judged:
        _check_subject(subject, snapshot)
    present = snapshot.predictions.get(subject)
    slices = _read_slices(place, subject, snapshot)
    if as_json:
        content = {
            "decisions": [asdict(event) for event in found],
            "moves": [asdict(move) for move in judged],
            "now": to_json_document(present),
            "slices": asdict(slices) if isinstance(slices, SliceExplanation) else None,
            "slices_error": slices.message if isinstance(slices, MeshError) else "",
        }
        print(json.dumps(content))
        return
    if not found:
        print(f"there is no recent decision about {subject}")
    for event in found:
        print(decisions.format_event(event))
    if judged:
        print(f"\nOutcomes of the last moves of {subject}, in seconds per step:")
        table = mesh_tables.make_moves_table(judged)
        console_tables.print_table(table)
    if present is not None and (lines := move_outcomes.describe_prediction(present)):
        print("\nNow:")
        print("\n".join(f"  {line}" for line in lines))
    if isinstance(slices, SliceExplanation):
        print(f"\nTime slices of {subject} by the policy {slices.policy}, in seconds:")
        console_tables.print_table(slice_tables.make_decisions_table(slices))
        for error in slices.kill_errors:
            print(error)
    elif slices is not None:
        print(f"\nThe slice scheduler of {subject} does not explain itself: {slices}")


def _check_subject(subject: str, snapshot: MeshSnapshot) -> None:
    """Raise NotFound unless a job, gang, instance, worker or host has the name."""
    gangs = [gang.id for gang in snapshot.gangs]
    known = {*gangs, *(row.id for row in snapshot.jobs)}
    known |= {name for worker in snapshot.workers for name in (worker.id, worker.host)}
    known |= {instance.id for gang in snapshot.gangs for instance in gang.instances}
    if subject.removeprefix("worker/") not in known:
        raise NotFound(
            f"there is no job, gang, worker or host {subject}",
            fix=f"The gangs are {', '.join(gangs) or 'not formed yet'}; `meshrl status` lists jobs "
            "and workers",
        )


def _read_slices(
    place: MeshPaths, subject: str, snapshot: MeshSnapshot
) -> SliceExplanation | MeshError | None:
    """Return the explanation of a gang's slice scheduler, or its error.

    None: the subject is no gang, or its instances compute without time slices.
    """
    gang = next((gang for gang in snapshot.gangs if gang.id == subject), None)
    if gang is None or not gang_slices.is_time_sliced(gang):
        return None

    async def read() -> SliceExplanation:
        async with asyncio.timeout(ANSWER_TIMEOUT_S), open_owner_mesh(place) as mesh:
            return await gang_slices.read_gang_slices(mesh, gang)

    try:
        return asyncio.run(read())
    except TimeoutError:
        return DeadlineExceeded(f"no answer within {ANSWER_TIMEOUT_S:g} s")
    except MeshError as error:
        return error


def print_stalls(target: Path | None, mesh: Path | None, as_json: bool) -> None:
    """Print which process waits for which; also when Redis itself does not answer."""
    place = resolve_mesh(target, mesh)
    if not may_be_running(place):
        if not print_run_status(target, mesh, as_json):
            raise make_not_running_error(place)
        return
    found, entries = diagnose_run_stalls(place)
    if as_json:
        print(json.dumps([asdict(stall) for stall in found]))
        return
    here = MeshSettings.from_file(place.settings).host
    pids = {entry.name: entry.pid for entry in entries if entry.host == here}
    if not found:
        print("nothing is stalled")
    for stall in found:
        who = f"{stall.waiter} waits for {stall.culprit}" if stall.waiter else stall.culprit
        who += f" (job {stall.job})" if stall.job and stall.job not in who else ""
        pid = pids.get(stall.culprit, 0)
        # This machine's kernel reports the state of the culprit.
        usage = read_process_usage(pid) if pid else None
        process_state = "" if usage is None else f" Process {pid}"
        process_state += (
            (" is stopped by a signal." if usage.state == "T" else ".") if usage else ""
        )
        print(f"{who}: {stall.what}, for {stall.since_s:.1f} s. {stall.reason}{process_state}")
    quiet = {stall.job for stall in found if stall.culprit.startswith(JOB_PREFIX)}
    now_ms = max((entry.renewed_ms for entry in entries), default=0)
    for entry in list_working_processes(entries):
        if quiet and find_owner_job(entry) in ("", *quiet):
            last = read_log_end(place.log_path(entry.name), 1)
            print(
                f"  {describe_activity(entry, now_ms)}"
                + (f"; last log line: {last}" if last else "")
            )


def diagnose_run_stalls(place: MeshPaths) -> tuple[list[Stall], Sequence[RegistryEntry]]:
    """Return the stalls of a mesh and its registry entries; it takes a few seconds at most."""
    full = disk_full.find_full_disk([place.root, place.redis_directory])
    here = MeshSettings.from_file(place.settings).host
    try:
        mesh = query_mesh(place, read_writable_snapshot, STALL_TIMEOUT_S)
    except StateUnavailable as error:
        return make_redis_stall(STALL_TIMEOUT_S, f"{error.message}. {full}".strip()), []
    return diagnose_stalls(mesh, full, find_stopped_processes(mesh, here)), mesh.entries
