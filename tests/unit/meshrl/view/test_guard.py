"""Faults of views, reports and trackers cost a run a warning, never its end or its result."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from meshrl.view.guard import WarningGuard
from meshrl.view.live.view import GuardedView, RunLines
from meshrl.view.recording.recorder import Recorder
from meshrl.view.report import report


async def test_a_report_and_trackers_that_fail_cost_a_run_a_warning_and_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, run_dir = Launcher(MeshPlace(tmp_path), MeshShape()), tmp_path / "one"
    document = JobConfig(name="one").document()
    tracking = {"tensorboard": True, "trace": True}
    held = {"job": "one", "document": document | {"tracking": tracking}}
    later: dict[str, Any] = {"tensorboard": {"id": "one", "of_a_later_version": 1}}
    write_json(run_dir / "job.json", held)
    write_json(run_dir / "tracking.json", later)
    for name in ("report.html", "samples.jsonl", "trace"):
        (run_dir / name / "in the way").mkdir(parents=True)
    assert Recorder(launcher, "one", run_dir).trackers.trackers == []
    (run_dir / "tracking.json").unlink()
    recorder = Recorder(launcher, "one", run_dir)
    recorder.tally.prefixes["1"] = {"of_a_later_version": None}  # type: ignore[dict-item]
    recorder.trackers.offer([], [Event("1-0", 1, "evaluation", {"tag": "before", "step": 0})])
    await report.write(recorder)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["job"], summary["phase"], summary["lost"]) == ("one", "queued", 0)
    said = capsys.readouterr().err
    for what in ("tracking by tensorboard", "tracking", "the rest of the summary", "the report"):
        assert f"warning: {what} failed: " in said, said


def test_a_guarded_fault_is_one_warning_with_its_place() -> None:
    said: list[str] = []
    guard = WarningGuard(said.append)
    for _ in range(3):
        with guard("the chart"):
            [].pop()
    [warning] = said
    assert warning.startswith("warning: the chart failed: IndexError: pop from empty list (test_")


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("Broken pipe")


def test_a_view_whose_output_is_closed_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.redirect_stdout(ClosedPipe()), GuardedView(RunLines()) as view:
        view.say("one")
        view.say("two")
    assert capsys.readouterr().err.count("BrokenPipeError") == 1
