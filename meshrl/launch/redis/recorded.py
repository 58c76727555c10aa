"""How far a run has come by what lies in its directory, whatever Redis says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common.base.files.lines import Row, is_checked, row_of
from meshrl.common.records.checkpoints import all_checkpoints
from meshrl.common.state.events import order
from meshrl.common.state.server.rollback import FIRST, JobMark, RollbackMark, joined

STANDS = ("initial", "step", "lineage", "restored")  # events that tell a lineage and a version
ISSUED = ("registered", "leader")  # events that tell a fencing token
TOGETHER = 1000  # marks that are joined at a time
BLOCK = 1 << 20  # bytes of lines that are in memory at a time


def recorded(run_dir: Path, job: str) -> RollbackMark:
    """By the recorder's events and the checkpoints. Nothing of a run that has not begun."""
    return RunRecord(run_dir, job).look()


class RunRecord:
    """Reads what the recorder appends, each line once. A line that is not what was written tells
    nothing: who reads the record for what it says reports it.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self._run_dir, self._job = run_dir, job
        self._at = 0  # bytes that were read
        self._checked = False  # its lines have checks
        self._mark, self._phase = RollbackMark(), ""

    def look(self) -> RollbackMark:
        path, marks = self._run_dir / "events.jsonl", [self._mark]
        for line in self._new(path):
            self._checked = self._checked or is_checked(line)
            row = row_of(line)
            if row is None or (self._checked and not is_checked(line)):
                continue
            try:
                marks.append(self._told(row))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # of a file without checks
            if len(marks) == TOGETHER:
                marks = [joined(marks)]
        for checkpoint in all_checkpoints(self._run_dir):
            # It is written before the step commits that it is of.
            lineage, step = map(int, checkpoint.stem.split("-")[1:3])
            marks.append(self._one(lineage=lineage, version=step - 1))
        self._mark = joined(marks)
        if self._mark.empty:
            return self._mark
        return joined([self._mark, self._one(run_dir=str(self._run_dir), phase=self._phase)])

    def _new(self, path: Path) -> Iterator[bytes]:
        """Whole lines that have been added; all of them where the file was made again."""
        if not path.is_file():
            return
        if path.stat().st_size < self._at:
            self._at = 0
        with path.open("rb") as file:
            file.seek(self._at)
            while lines := file.readlines(BLOCK):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return
                    self._at += len(line)
                    yield line[:-1]

    def _told(self, event: Row) -> RollbackMark:
        kind, fields = event["kind"], event["fields"]
        order(event["id"])
        token = int(fields["token"]) if kind in ISSUED else 0
        mark = RollbackMark(event["id"], token)
        if fields.get("job") != self._job:
            return mark
        if kind == "opened" and fields["groups"]:
            return joined([mark, self._one(next_group=max(fields["groups"]) + 1)])
        if kind == "phase":
            self._phase = str(fields["phase"])
        if kind in STANDS:
            at = {key: int(fields[key]) for key in ("lineage", "version")}
            return joined([mark, self._one(**at)])
        return mark

    def _one(self, **about: Any) -> RollbackMark:
        return RollbackMark(FIRST, 0, {self._job: JobMark(**about)})
