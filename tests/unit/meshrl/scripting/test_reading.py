"""Records of a run, read from Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import meshrl
from meshrl.client.event_types import EvaluationEvent, PhaseEvent
from meshrl.common.base.errors import NotFound
from meshrl.scripting.child_process import ChildProcess
from meshrl.scripting.row_follower import RowFollower
from tests.unit.meshrl.runs.conftest import write_run


def evaluation(step: int, tag: str, **fields: Any) -> dict[str, Any]:
    """Return an event of an evaluation."""
    figures = {"held_out.sampled": step / 10}
    about = {"job": "tiny", "tag": tag, "step": step, "figures": figures} | fields
    return {"id": f"9-{step}", "ms": 9, "kind": "evaluation", "fields": about}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make the directory of a finished run of two steps with two evaluations."""
    run = write_run(tmp_path / "run", [{"phase": "finished", "error": ""}], [0.25, 0.5])
    phase, _, _ = (run / "events.jsonl").read_text().partition("\n")  # and a torn line
    more = [evaluation(0, "before"), evaluation(2, "after", best=True)]
    (run / "events.jsonl").write_text("\n".join([phase, *map(json.dumps, more), ""]))
    return run


def test_ended_run_has_its_rows_as_plain_data(directory: Path) -> None:
    run = meshrl.Run(directory)
    assert [row["reward"] for row in run.metrics] == [0.25, 0.5]
    assert run.evaluations == [
        {"step": 0, "tag": "before", "best": False, "held_out.sampled": 0.0},
        {"step": 2, "tag": "after", "best": True, "held_out.sampled": 0.2},
    ]
    assert (run.state, run.model, run.samples) == ("finished", None, [])
    assert list(run) == run.metrics and run.wait() is run
    types = {type(event) for event in run.events()}
    assert types == {PhaseEvent, EvaluationEvent}


def test_failed_run_raises_its_error_when_awaited(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"phase": "failed", "error": "no stop token"}], [0.25])
    with pytest.raises(meshrl.JobFailed, match=r"no stop token.+meshrl resume"):
        meshrl.Run(run).wait()


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no run in"):
        meshrl.Run(tmp_path)


def test_follower_reads_complete_rows_once_and_replaced_files_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    follower = RowFollower(path)
    assert follower.read_new() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert follower.read_new() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert (follower.read_new(), follower.read_new()) == ([{"step": 2}], [])
    (tmp_path / "new").write_bytes(b'{"step": 1}\n{"step": 3}\n')
    os.replace(tmp_path / "new", path)
    assert follower.read_new() == [{"step": 1}, {"step": 3}]


def test_child_that_cannot_start_leaves_no_descriptor_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="null byte"):
        ChildProcess(["start", "a\0b"], is_shown=False)
    assert os.listdir("/proc/self/fd") == before
