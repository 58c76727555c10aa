"""Progress of a run by the files in its directory, independent of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshrl.common.base.files.json_lines import Row, decode_row, has_check
from meshrl.common.records.checkpoints import list_manifest_paths
from meshrl.common.state.events import parse_event_id
from meshrl.common.state.server_state.rollback import (
    FIRST_EVENT_ID,
    JobWatermark,
    StateWatermark,
    merge_watermarks,
)

VERSION_EVENTS = ("initial", "step", "lineage", "restored")  # events with a lineage and a version
TOKEN_EVENTS = ("registered", "leader")  # events with a fencing token
WATERMARKS_PER_MERGE = 1000  # marks that are joined at a time
READ_BYTES = 1 << 20  # bytes of lines that are in memory at a time


def read_run_watermark(run_dir: Path, job: str) -> StateWatermark:
    """Return the watermark from the recorder's events and the checkpoints; empty for a run not
    begun.
    """
    return RunRecordReader(run_dir, job).read_watermark()


class RunRecordReader:
    """Reader of the recorder's output, each line once.

    A corrupt line is skipped here: readers of the record's content report it.
    """

    def __init__(self, run_dir: Path, job: str) -> None:
        self._run_dir, self._job = run_dir, job
        self._offset = 0  # bytes that were read
        self._has_checks = False  # its lines have checks
        self._watermark, self._phase = StateWatermark(), ""

    def read_watermark(self) -> StateWatermark:
        path, marks = self._run_dir / "events.jsonl", [self._watermark]
        for line in self._read_new_lines(path):
            self._has_checks = self._has_checks or has_check(line)
            row = decode_row(line)
            if row is None or (self._has_checks and not has_check(line)):
                continue
            try:
                marks.append(self._parse_event(row))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # of a file without checks
            if len(marks) == WATERMARKS_PER_MERGE:
                marks = [merge_watermarks(marks)]
        for checkpoint in list_manifest_paths(self._run_dir):
            # The row is written before its step commits.
            lineage, step = map(int, checkpoint.stem.split("-")[1:3])
            marks.append(self._make_watermark(lineage=lineage, version=step - 1))
        self._watermark = merge_watermarks(marks)
        if self._watermark.is_empty:
            return self._watermark
        return merge_watermarks(
            [self._watermark, self._make_watermark(run_dir=str(self._run_dir), phase=self._phase)]
        )

    def _read_new_lines(self, path: Path) -> Iterator[bytes]:
        """Yield complete lines that have been added; all of them where the file was recreated."""
        if not path.is_file():
            return
        if path.stat().st_size < self._offset:
            self._offset = 0
        with path.open("rb") as file:
            file.seek(self._offset)
            while lines := file.readlines(READ_BYTES):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield line[:-1]

    def _parse_event(self, event: Row) -> StateWatermark:
        kind, fields = event["kind"], event["fields"]
        parse_event_id(event["id"])
        token = int(fields["token"]) if kind in TOKEN_EVENTS else 0
        mark = StateWatermark(event["id"], token)
        if fields.get("job") != self._job:
            return mark
        if kind == "opened" and fields["groups"]:
            return merge_watermarks(
                [mark, self._make_watermark(next_group=max(fields["groups"]) + 1)]
            )
        if kind == "phase":
            self._phase = str(fields["phase"])
        if kind in VERSION_EVENTS:
            at = {key: int(fields[key]) for key in ("lineage", "version")}
            return merge_watermarks([mark, self._make_watermark(**at)])
        return mark

    def _make_watermark(self, **fields: Any) -> StateWatermark:
        return StateWatermark(FIRST_EVENT_ID, 0, {self._job: JobWatermark(**fields)})
