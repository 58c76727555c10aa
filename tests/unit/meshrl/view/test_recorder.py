"""What a run's record says was evaluated, and that it outlives a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.lines import LineFile, read
from meshrl.common.job.config import JobConfig
from meshrl.common.state.events import Event
from meshrl.directory.places import MeshPlace, write_json
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.shape import MeshShape
from meshrl.view.history import news
from meshrl.view.recording.recorded import evaluated
from meshrl.view.recording.recorder import Recorder

JOB = "j"


def event(kind: str, **fields: Any) -> Event:
    return Event("1-0", 0, kind, {"job": JOB} | fields)


def judged(step: int, value: float, best: bool) -> Event:
    return event("evaluation", tag=f"step-{step}", step=step, value=value, best=best)


def told(known: list[Event]) -> list[tuple[str, bool]]:
    return [(e.fields["tag"], e.fields["best"]) for e in evaluated(known, JOB)]


def test_evaluations_of_abandoned_versions_do_not_stand() -> None:
    before = [judged(4, 0.5, True), judged(8, 0.25, False), judged(12, 0.25, False)]
    back = event("lineage", lineage=1, version=8)
    assert told(before) == [("step-4", True), ("step-8", False), ("step-12", False)]
    assert told([*before, back]) == [("step-4", True), ("step-8", False)]
    assert told([*before, back, judged(12, 0.75, True)])[-1] == ("step-12", True)
    other = Event("1-0", 0, "lineage", {"job": "other", "lineage": 1, "version": 0})
    assert told([*before, other]) == told(before)


def test_no_earlier_version_is_the_best_when_the_best_one_is_abandoned() -> None:
    known = [judged(4, 0.5, True), judged(12, 0.75, True)]
    assert told([*known, event("lineage", lineage=1, version=8)]) == [("step-4", False)]


def test_what_was_evaluated_after_training_is_one_on_the_way_once_the_run_is_extended() -> None:
    after = event("evaluation", tag="after", step=3, best=False)
    changes = {"budget.steps": [3, 6]}
    more = event("changed", lineage=0, version=3, extended=True, changes=changes)
    assert told([after, more]) == [("step-3", False)]
    end = event("evaluation", tag="after", step=6, best=False)
    assert told([after, more, end]) == [("step-3", False), ("after", False)]
    other = event("changed", lineage=0, version=3, extended=False, changes={})
    assert told([after, other]) == [("after", False)]
    assert news.told(more) == "from step 4 on: budget.steps 3 -> 6"


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_stay_outlive_a_full_disk_when_those_after_them_are_cut_off(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step} for step in (1, 2, 3)]
    LineFile(metrics).append(rows)
    document = JobConfig(name=JOB).document()
    write_json(tmp_path / "job.json", {"job": JOB, "document": document})
    recorder = Recorder(Launcher(MeshPlace(tmp_path), MeshShape()), JOB, tmp_path)
    back = [event("lineage", lineage=1, version=2)]
    with no_room(), pytest.raises(StorageFull):
        recorder._abandon(3, back)
    assert read(metrics).rows == recorder.rows == rows
    recorder._abandon(3, back)
    assert read(metrics).rows == recorder.rows == rows[:2]
