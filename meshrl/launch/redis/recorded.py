"""How far a run has come by what lies in its directory, whatever Redis says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.records.checkpoints import all_checkpoints
from common.state.events import order
from common.state.rollback import FIRST, JobMark, Mark, joined

STANDS = ("initial", "step", "lineage", "restored")  # events that tell a lineage and a version
ISSUED = ("registered", "leader")  # events that tell a fencing token
TOGETHER = 1000  # marks that are joined at a time


def recorded(run_dir: Path, job: str) -> Mark:
    """By the recorder's events and the checkpoints. Nothing of a run that has not begun."""
    return RunRecord(run_dir, job).look()


class RunRecord:
    """Reads what the recorder appends, each line once. A line that does not read tells nothing: who
    reads the record for what it says reports it.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self._run_dir, self._job = run_dir, job
        self._at = 0  # bytes that were read
        self._mark, self._phase = Mark(), ""

    def look(self) -> Mark:
        """How far it has come by now."""
        path, marks = self._run_dir / "events.jsonl", [self._mark]
        for line in self._new(path):
            if (told := _parsed(line)) is None:
                continue
            marks.append(self._told(told))
            if len(marks) == TOGETHER:
                marks = [joined(marks)]
        for checkpoint in all_checkpoints(self._run_dir):
            # It is written before the step commits that it is of.
            lineage, step = map(int, checkpoint.stem.split("-")[1:3])
            marks.append(self._one(JobMark(lineage, step - 1)))
        self._mark = joined(marks)
        if self._mark.empty:
            return self._mark
        return joined([self._mark, self._one(JobMark(run_dir=str(self._run_dir)), self._phase)])

    def _new(self, path: Path) -> list[bytes]:
        """Whole lines that have been added; all of them where the file was made again."""
        if not path.is_file():
            return []
        if path.stat().st_size < self._at:
            self._at = 0
        with path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.splitlines()

    def _told(self, event: dict[str, Any]) -> Mark:
        kind, fields = event["kind"], event["fields"]
        token = int(fields["token"]) if kind in ISSUED else 0
        mark = Mark(event["id"], token)
        if fields.get("job") != self._job:
            return mark
        if kind == "opened" and fields["groups"]:
            return joined([mark, self._one(JobMark(next_group=max(fields["groups"]) + 1))])
        if kind == "phase":
            self._phase = str(fields["phase"])
        if kind in STANDS:
            one = JobMark(int(fields["lineage"]), int(fields["version"]))
            return joined([mark, self._one(one)])
        return mark

    def _one(self, one: JobMark, phase: str = "") -> Mark:
        about = JobMark(one.lineage, one.version, one.next_group, one.run_dir, phase)
        return Mark(FIRST, 0, {self._job: about})


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An event; None for a line that is none, as the last one that a crash has cut off."""
    try:
        told = json.loads(line)
        order(told["id"])
        return told if isinstance(told["fields"], dict) and "kind" in told else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
