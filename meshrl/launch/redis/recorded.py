"""How far a run has come by what lies in its directory, whatever Redis says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.records.checkpoints import all_checkpoints
from common.records.lines import row_of
from common.state.events import order
from common.state.rollback import FIRST, JobMark, Mark, joined

STANDS = ("initial", "step", "lineage", "restored")  # events that tell a lineage and a version

ISSUED = ("registered", "leader")  # events that tell a fencing token


def recorded(run_dir: Path, job: str) -> Mark:
    """By the recorder's events and the checkpoints. A line that does not read tells nothing: who
    reads the record for what it says reports it. Nothing of a run that has not begun.
    """
    event, token, phase, marks = FIRST, 0, "", [Mark()]
    path = run_dir / "events.jsonl"
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else []:
        told = _parsed(line)
        if told is None:
            continue
        event = max(event, told["id"], key=order)
        fields = told["fields"]
        if told["kind"] in ISSUED:
            token = max(token, int(fields["token"]))
        if fields.get("job") != job:
            continue
        if told["kind"] == "opened" and fields["groups"]:
            marks.append(_mark(job, JobMark(next_group=max(fields["groups"]) + 1)))
        elif told["kind"] == "phase":
            phase = str(fields["phase"])
        elif told["kind"] in STANDS:
            marks.append(_mark(job, JobMark(int(fields["lineage"]), int(fields["version"]))))
        if len(marks) > 1000:
            marks = [joined(marks)]
    for checkpoint in all_checkpoints(run_dir):
        # It is written before the step commits that it is of.
        lineage, step = map(int, checkpoint.stem.split("-")[1:3])
        marks.append(_mark(job, JobMark(lineage, step - 1)))
    if event == FIRST and len(marks) == 1:
        return Mark()  # it has not begun
    about = JobMark(run_dir=str(run_dir), phase=phase)
    return joined([*marks, _mark(job, about), Mark(event, token)])


def _mark(job: str, one: JobMark) -> Mark:
    return Mark(jobs={job: one})


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An event; None for a line that is none, as the last one that a crash has cut off."""
    try:
        told = row_of(line)
        if told is None:
            return None
        order(told["id"])
        return told if isinstance(told["fields"], dict) and "kind" in told else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
