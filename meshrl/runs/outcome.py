"""State or outcome of a run, from the files of its directory alone."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files import json_lines
from meshrl.common.base.files.corruption import CORRUPTION_EVENT, describe_event
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import format_violations
from meshrl.common.state.jobs import Phase, format_phase
from meshrl.directory import job_file
from meshrl.directory.command_target import RunLocation, may_be_running
from meshrl.directory.directory_paths import read_json
from meshrl.view.health.findings import Finding, find_problems, has_failure
from meshrl.view.health.run_figures import RunFigures
from meshrl.view.history.early_stop import EarlyStop
from meshrl.view.history.event_text import format_event
from meshrl.view.mesh.rates import is_supervised_step
from meshrl.view.recording.audit import account_for_run
from meshrl.view.recording.run_record import list_corrupt_files, read_events

# Exit statuses of commands that follow a run to its end.
EXIT_FINISHED, EXIT_FAILED, EXIT_STOPPED = 0, 1, 3
EXIT_NOT_LEARNED = 4  # the run finished its steps, but cannot have learned
EXIT_INTERRUPTED = 130  # after Ctrl-C, as shells have it
MAX_CORRUPT_FILES = 5  # corrupt files that are reported, the last ones
RUNNING_STATE, STOPPED_STATE = "running", "stopped"
# What is read of a run: a mesh gives up with a process that ends and is not started again.
OUTCOME_EVENTS = tuple(
    f'"kind": "{kind}"'
    for kind in ("phase", "step", "evaluation", "process_ended", CORRUPTION_EVENT)
)


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run.

    `state` is running, finished, failed or stopped: not finished, and no process runs it.
    """

    run: str
    job: str
    state: str
    phase: str
    step: int
    steps: int | None  # steps of the job's budget; None: its `job.json` is corrupt
    reward: float | None  # of the last step; None: the algorithm is sft
    held_out: float | None  # sampled, as measured last
    error: str
    phase_text: str = ""  # phase for people
    loss: float | None = None  # of the last step of sft
    early_stop: EarlyStop | None = None  # the run has finished before its budget
    damaged: tuple[str, ...] = ()  # corruptions among its files, and their consequences
    health: tuple[Finding, ...] = ()  # findings about its steps

    @property
    def exit_status(self) -> int:
        """Exit status of a command that has followed the run to this end."""
        if self.state == "finished" and has_failure(self.health):
            return EXIT_NOT_LEARNED
        return {"finished": EXIT_FINISHED, "failed": EXIT_FAILED}.get(self.state, EXIT_STOPPED)

    @property
    def resume_command(self) -> str:
        """Command that resumes the run; empty when nothing is left to do or a process runs it."""
        return f"meshrl resume {self.run}" if self.state in ("failed", "stopped") else ""

    def format_lines(self) -> list[str]:
        """Return the outcome as lines of text."""
        of = "" if self.steps is None else f" of {self.steps}"
        at = f"at step {self.step}{of}"
        figures = [] if self.reward is None else [f"reward {self.reward:.3f}"]
        figures += [] if self.loss is None else [f"loss {self.loss:.4f}"]
        figures += [] if self.held_out is None else [f"held-out {self.held_out:.3f}"]
        so_far = f" ({', '.join(figures)})" if figures else ""
        if self.state == "finished":
            but = ", but cannot have learned" if has_failure(self.health) else ""
            steps = f"{self.step} of {self.steps}" if self.early_stop else f"its {self.step}"
            lines = [f"{self.job} has finished {steps} steps{so_far}{but}"]
            if self.early_stop:
                lines.append(f"It ended early: {self.early_stop.reason}")
                lines.append(f"The best weights: meshrl export {self.run} --best")
            if (Path(self.run) / "model/config.json").is_file():
                lines.append(f"The model is in {self.run}/model, the report {self.run}/report.html")
        elif self.state == RUNNING_STATE:
            lines = [f"{self.job} is running: {self.phase_text}, {at}{so_far}"]
        elif self.state == "failed":
            lines = [f"{self.job} failed {at}{so_far}: {self.error}"]
            lines.append(f"To resume after a fix: {self.resume_command}")
        else:
            lines = [f"{self.job} was stopped {at}{so_far}", f"To resume: {self.resume_command}"]
        lines += [finding.line for finding in self.health]
        return [*lines, *(f"corrupt: {line}" for line in self.damaged)]

    def to_document(self) -> dict[str, Any]:
        """Return the outcome as JSON."""
        return {**asdict(self), "resume": self.resume_command}


def read_outcome(run: RunLocation, is_live: bool | None = None) -> RunOutcome:
    """Return the state of the run; `is_live`: its mesh runs, None: find out."""
    corruption_lines: list[str] = []
    phase, error, held_out, gave_up = Phase.QUEUED.value, "", None, ""
    early_stop: EarlyStop | None = None
    for event in json_lines.iterate_rows(run.directory / "events.jsonl", *OUTCOME_EVENTS):
        kind, fields = event["kind"], event["fields"]
        if kind == CORRUPTION_EVENT and fields.get("job") in ("", run.job):
            corruption_lines.append(describe_event(fields))
        if kind == "process_ended" and fields.get("final"):
            gave_up = format_event(Event(event["id"], int(event["ms"]), kind, fields))
        if fields.get("job") != run.job:
            continue
        if kind in ("phase", "step"):
            gave_up = ""  # the mesh continued the run
        if kind == "phase":
            phase, error = fields["phase"], fields.get("error", "")
        elif kind == "evaluation":
            early_stop = EarlyStop.from_event(fields) or early_stop
            if fields.get("sampled") is not None:
                held_out = float(fields["sampled"])
    figures, last_row = RunFigures(), dict[str, Any]()
    for row in json_lines.iterate_rows(run.directory / "metrics.jsonl"):
        figures.add(row)
        last_row = row
    state, error = _choose_state(run, phase, error, gave_up, is_live)
    document: dict[str, Any] = {}
    with contextlib.suppress(CorruptData, FileNotFoundError):
        document = job_file.read_job_file(run.directory / job_file.JOB_FILE_NAME)["document"]
    is_supervised = bool(last_row) and is_supervised_step(last_row)
    return RunOutcome(
        run=run.display_path,
        job=run.job,
        state=state,
        phase=phase,
        step=figures.last_step,
        steps=int(document["budget"]["steps"]) if document else None,
        reward=float(last_row["reward"]) if last_row and not is_supervised else None,
        loss=float(last_row["loss"]) if is_supervised else None,
        held_out=held_out,
        error=error,
        phase_text=format_phase(phase, document),
        early_stop=early_stop if early_stop and early_stop.step == figures.last_step else None,
        damaged=(*corruption_lines[-MAX_CORRUPT_FILES:], *list_corrupt_files(run.directory)),
        health=find_problems(figures, document, is_over=state in (Phase.FINISHED, Phase.FAILED)),
    )


def _choose_state(
    run: RunLocation, phase: str, error: str, gave_up: str, is_live: bool | None
) -> tuple[str, str]:
    """Return the run's state and error. `gave_up`: why its mesh ended by itself, if it did."""
    if phase == Phase.FINISHED and (bad := _find_violations(run)):
        return "failed", f"its account of trajectories is wrong: {bad}"
    if phase in (Phase.FINISHED, Phase.FAILED):
        return phase, error
    if phase == Phase.STOPPED:
        return STOPPED_STATE, ""
    if may_be_running(run.mesh_paths) if is_live is None else is_live:
        return RUNNING_STATE, error
    return ("failed", gave_up) if gave_up else (STOPPED_STATE, "")


def _find_violations(run: RunLocation) -> str:
    """Return violations in the run's summary, or in its events if that is corrupt; empty if there
    are none.
    """
    summary = run.directory / "summary.json"
    if not summary.is_file():
        return ""
    try:
        return format_violations(read_json(summary))
    except CorruptData:
        return format_violations(
            account_for_run(run.directory, read_events(run.directory), run.job)
        )
