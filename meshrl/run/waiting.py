"""`meshrl wait` and `meshrl cancel`: the end of a job, waited for or brought about."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path

from meshrl.common.base.errors import NotFound, Refused, StateUnavailable
from meshrl.common.state import jobs
from meshrl.common.state.jobs import ENDED, JobRow
from meshrl.common.state.redis.client import State
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import read_if_whole
from meshrl.directory.target import Run, may_live, row_of, run_of
from meshrl.run.outcome import RunOutcome, outcome_of

POLL_S = 0.5
TIMED_OUT = 124  # exit status of a wait that was too short, as timeout(1) has it
GONE_S = 2.0  # a mesh that starts has the job of its run only a moment after its Redis answers
WRITTEN_S = 150.0  # for the report and the model of a run that is over: the export may take 120 s


def wait(chosen: Path, mesh: Path | None, timeout_s: float | None, as_json: bool) -> int:
    """Returns when the run is over and its report is written, with the exit status for its end."""
    run = run_of(chosen, mesh)
    found = until_over(run, timeout_s)
    if found is None:
        now = outcome_of(run, live=True).lines()[0]
        print(f"error: after {timeout_s:g} s {now}", file=sys.stderr)
        return TIMED_OUT
    _print(found, as_json)
    return found.status


def cancel(chosen: Path, mesh: Path | None, as_json: bool) -> int:
    """Ends a run for good or until it is resumed; 0 when it stands still now and may go on."""
    run = run_of(chosen, mesh)

    async def stop(state: State) -> None:
        await row_of(state, run)
        await jobs.cancel(state, run.job, uuid.uuid4().hex)

    ended = outcome_of(run, live=False)
    if may_live(run.place):
        ask(run.place, stop, ANSWER_S)
        ended = until_over(run, WRITTEN_S) or outcome_of(run, live=False)
    if ended.state in ("finished", "failed"):
        how = "finished" if ended.state == "finished" else f"failed ({ended.error})"
        raise Refused(f"{run.job} has {how} already: there is nothing to cancel")
    _print(ended, as_json)
    return 0


def until_over(run: Run, timeout_s: float | None) -> RunOutcome | None:
    """How the run ended, once it has and what it leaves is written; None when that takes longer."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    gone: float | None = None  # since when Redis answers and has the run no more
    while until is None or time.monotonic() < until:
        try:
            row, gone = _row(run), None
        except (NotFound, Refused):
            row, gone = None, gone or time.monotonic()
            if time.monotonic() - gone >= GONE_S:
                return outcome_of(run, live=False)  # the mesh works on other things
        ended = row is not None and row.ended
        if ended or (row is None and not may_live(run.place)):
            _written(run, ended, until)
            return outcome_of(run, live=False)
        time.sleep(POLL_S)
    return None


def _row(run: Run) -> JobRow | None:
    """None: Redis does not answer. NotFound or Refused: it does, and has the run no more."""
    if not run.place.settings.is_file():
        return None
    try:
        return ask(run.place, lambda state: row_of(state, run), ANSWER_S)
    except StateUnavailable:
        return None


def _written(run: Run, ended: bool, until: float | None) -> None:
    """Waits until the files of a run tell of its end: the summary comes last, after the model.

    `ended`: Redis says that it has; else its mesh is gone, and it has only if its events say so.
    """
    summary, began = run.directory / "summary.json", time.time()
    record = run.directory / "events.jsonl"
    while until is None or time.monotonic() < until:
        phase = outcome_of(run, live=False).phase
        if phase not in ENDED:
            if not ended:
                return
        elif read_if_whole(summary).get("phase") == phase:
            return
        noted = max(began if ended else 0.0, record.stat().st_mtime if record.is_file() else 0.0)
        if time.time() > noted + WRITTEN_S:
            return  # nobody is at it
        time.sleep(POLL_S)


def _print(found: RunOutcome, as_json: bool) -> None:
    print(json.dumps(found.document()) if as_json else "\n".join(found.lines()))
