"""`meshrl wait` and `meshrl cancel`: wait for the end of a job, or end it."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

from meshrl.common.base.errors import NotFound, Refused, StateUnavailable
from meshrl.common.state import jobs
from meshrl.common.state.jobs import TERMINAL_PHASES, JobRow
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.command_target import RunLocation, may_be_running, read_run_row, resolve_run
from meshrl.directory.directory_paths import read_json_or_empty
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.runs.outcome import RunOutcome, read_outcome

POLL_S = 0.5
EXIT_TIMED_OUT = 124  # exit status of a wait that was too short, as timeout(1) has it
MISSING_JOB_GRACE_S = (
    2.0  # a mesh that starts has the job of its run only a moment after its Redis answers
)
EXPORT_TIMEOUT_S = (
    150.0  # for the report and the model of a run that is over: the export may take 120 s
)


def wait_for_run(target: Path, mesh: Path | None, timeout_s: float | None, as_json: bool) -> int:
    """Return when the run is over and its report is written, with the exit status for its end."""
    run = resolve_run(target, mesh)
    found = wait_for_outcome(run, timeout_s)
    if found is None:
        now = read_outcome(run, is_live=True).format_lines()[0]
        print(f"error: timeout after {timeout_s:g} s: {now}", file=sys.stderr)
        return EXIT_TIMED_OUT
    _print_outcome(found, as_json)
    return found.exit_status


def cancel_run(target: Path, mesh: Path | None, as_json: bool) -> int:
    """End a run for good or until it is resumed; return 0 when it has stopped, resumably."""
    run = resolve_run(target, mesh)

    async def stop(state: StateClient) -> None:
        await read_run_row(state, run)
        await jobs.cancel(state, run.job, uuid.uuid4().hex)

    outcome = read_outcome(run, is_live=False)
    if may_be_running(run.mesh_paths):
        query_mesh(run.mesh_paths, stop, ANSWER_TIMEOUT_S)
        outcome = wait_for_outcome(run, EXPORT_TIMEOUT_S) or read_outcome(run, is_live=False)
    if outcome.state in ("finished", "failed"):
        how = "finished" if outcome.state == "finished" else f"failed ({outcome.error})"
        raise Refused(f"{run.job} has already {how}: it cannot be cancelled")
    _print_outcome(outcome, as_json)
    return 0


def wait_for_outcome(run: RunLocation, timeout_s: float | None) -> RunOutcome | None:
    """Return the run's outcome once it has ended and its results are written; None on a timeout."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    missing_since_s: float | None = None  # since when Redis answers and has the run no more
    while until is None or time.monotonic() < until:
        try:
            row, missing_since_s = _read_job_row(run), None
        except (NotFound, Refused):
            row, missing_since_s = None, missing_since_s or time.monotonic()
            if time.monotonic() - missing_since_s >= MISSING_JOB_GRACE_S:
                return read_outcome(run, is_live=False)  # the mesh works on other things
        has_ended = row is not None and row.is_terminal
        if has_ended or (row is None and not may_be_running(run.mesh_paths)):
            _wait_for_summary(run, has_ended, until)
            return read_outcome(run, is_live=False)
        time.sleep(POLL_S)
    return None


def _read_job_row(run: RunLocation) -> JobRow | None:
    """Return the job's row; None if Redis does not answer.

    Raises NotFound or Refused if Redis answers and no longer has the run.
    """
    if not run.mesh_paths.settings.is_file():
        return None
    try:
        return query_mesh(run.mesh_paths, lambda state: read_run_row(state, run), ANSWER_TIMEOUT_S)
    except StateUnavailable:
        return None


def _wait_for_summary(run: RunLocation, is_terminal: bool, deadline_s: float | None) -> None:
    """Wait until the files of a run show its end: the summary comes last, after the model.

    `is_terminal`: Redis reports the end. Otherwise its mesh is gone, and the run has ended only if
    its events record that.
    """
    summary, began = run.directory / "summary.json", time.time()
    record = run.directory / "events.jsonl"
    while deadline_s is None or time.monotonic() < deadline_s:
        phase = read_outcome(run, is_live=False).phase
        if phase not in TERMINAL_PHASES:
            if not is_terminal:
                return
        elif read_json_or_empty(summary).get("phase") == phase:
            return
        last_write_s = max(
            began if is_terminal else 0.0, record.stat().st_mtime if record.is_file() else 0.0
        )
        if time.time() > last_write_s + EXPORT_TIMEOUT_S:
            return  # no process records the run
        time.sleep(POLL_S)


def _print_outcome(found: RunOutcome, as_json: bool) -> None:
    print(json.dumps(found.to_document()) if as_json else "\n".join(found.format_lines()))
